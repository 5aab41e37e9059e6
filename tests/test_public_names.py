"""Every public name has its types, and a docstring that names its parameters, its result and what it raises."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

import pytest

import jax_rope
from jax_rope import allocator, forward_mode, huggingface, positions, reference, scaling

# All of what these have is public, beside what `jax_rope` exports itself.
MODULES = (positions, scaling, forward_mode, allocator, huggingface, reference)


class Named(NamedTuple):
    """A public object, and the class that it is a method of."""

    name: str
    value: Any
    owner: type | None = None


def public_names() -> Iterator[Named]:
    yield Named("jax_rope", jax_rope)
    for module in MODULES:
        yield from members(module)
    for name in jax_rope.__all__:
        if not inspect.ismodule(value := getattr(jax_rope, name)):
            yield from with_methods(f"jax_rope.{name}", value)


def members(module: ModuleType) -> Iterator[Named]:
    yield Named(module.__name__, module)
    for name, value in vars(module).items():
        mine = getattr(value, "__module__", None) == module.__name__ or hasattr(value, "__wrapped__")
        if not name.startswith("_") and mine and (inspect.isroutine(value) or inspect.isclass(value)):
            yield from with_methods(f"{module.__name__}.{name}", value)


def with_methods(name: str, value: Any) -> Iterator[Named]:
    yield Named(name, value)
    if inspect.isclass(value):
        for attribute, static in vars(value).items():
            documented = isinstance(static, property | staticmethod | classmethod) or inspect.isfunction(static)
            if not attribute.startswith("_") and documented:
                method = static if isinstance(static, property) else getattr(value, attribute)
                yield Named(f"{name}.{attribute}", method, value)


def faults(named: Named) -> list[str]:
    """What is missing, in words."""
    name, value, owner = named
    text = words(named)
    if not text:
        return [f"{name} has no docstring"]
    if inspect.ismodule(value):
        return []
    if inspect.isclass(value):
        return [
            f"{name}'s docstring has no {field} in Attributes" for field in fields(value) - entries(text, "Attributes")
        ]
    function = value.fget if isinstance(value, property) else inspect.unwrap(value)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    found = [f"{name} has no type for {p.name}" for p in parameters if p.annotation is p.empty]
    returned = inspect.signature(function).return_annotation
    if returned is inspect.Signature.empty:
        found.append(f"{name} has no type for its result")
    found += [f"{name}'s docstring has no {p.name} in Args" for p in parameters if p.name not in entries(text, "Args")]
    if returned not in (None, "None") and not isinstance(value, property) and "Returns" not in sections(text):
        found.append(f"{name}'s docstring has no Returns")
    if raises(function, owner) and "Raises" not in sections(text):
        found.append(f"{name} raises, and its docstring has no Raises")
    return found


def words(named: Named) -> str:
    """The docstring; that of a method which overrides another one may be the other's."""
    if inspect.isclass(named.value) or inspect.ismodule(named.value):
        own = named.value.__doc__ or ""
        # What dataclass and NamedTuple write themselves says nothing.
        return "" if own.startswith(f"{getattr(named.value, '__name__', '')}(") else inspect.cleandoc(own)
    value = named.value if isinstance(named.value, property) else inspect.unwrap(named.value)
    return inspect.getdoc(value if named.owner is None else getattr(named.owner, method_name(value))) or ""


def method_name(value: Any) -> str:
    return (value.fget if isinstance(value, property) else value).__name__


def fields(kind: type) -> set[str]:
    """Of a dataclass or a NamedTuple: what its constructor takes."""
    constant = {name for name, hint in get_type_hints(kind).items() if "ClassVar" in str(hint)}
    named = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "_fields", ())
    return {field for field in named if not field.startswith("_")} - constant


def sections(text: str) -> dict[str, list[str]]:
    """The docstring's sections, by title."""
    found: dict[str, list[str]] = {}
    title = None
    for line in text.splitlines():
        if line and not line.startswith(" "):
            title = line[:-1] if re.fullmatch(r"[A-Z]\w+:", line) else None
        if title:
            found.setdefault(title, []).append(line)
    return found


def entries(text: str, title: str) -> set[str]:
    heads = [re.match(r" {2}(\**\w+(?:, \w+)*):", line) for line in sections(text).get(title, ())]
    return {name.strip("*") for head in heads if head for name in head[1].split(", ")}


@functools.cache
def raises(function: Callable, owner: type | None = None) -> bool:
    """Whether it has a ``raise``, or calls by name a function of this package that has."""
    if not inspect.isfunction(function := inspect.unwrap(function)) or not function.__module__.startswith("jax_rope"):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.Call):
            continue
        called = None
        if isinstance(node.func, ast.Name):
            called = function.__globals__.get(node.func.id)
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self" and owner:
            called = getattr(owner, node.func.attr, None)
        if inspect.isfunction(called) and called is not function and raises(called, owner):
            return True
    return False


@pytest.mark.parametrize("named", list(public_names()), ids=lambda named: named.name)
def test_typed_and_documented(named):
    assert faults(named) == []


def test_what_is_missing_is_found():
    class Sabotaged:
        def silent(self) -> None: ...

        def untyped(self, x):
            """Words."""

        def terse(self, x: int) -> int:
            """Words.

            Args:
              y: another one.
            """
            return x

        @property
        def half(self):
            """Words."""

    class Bare(NamedTuple):
        x: int

    Sabotaged.terse.__module__ = positions.__name__  # to be looked into
    found = [fault for named in with_methods("Sabotaged", Sabotaged) for fault in faults(named)]
    assert found == [
        "Sabotaged has no docstring",
        "Sabotaged.silent has no docstring",
        "Sabotaged.untyped has no type for x",
        "Sabotaged.untyped has no type for its result",
        "Sabotaged.untyped's docstring has no x in Args",
        "Sabotaged.untyped's docstring has no Returns",
        "Sabotaged.terse's docstring has no x in Args",
        "Sabotaged.terse's docstring has no Returns",
        "Sabotaged.half has no type for its result",
    ]
    assert faults(Named("Bare", Bare)) == ["Bare has no docstring"]


def test_what_raises_is_found():
    assert raises(positions.from_segment_ids)  # itself
    assert raises(positions.from_offsets)  # through a function of its module
    assert raises(jax_rope.Rotary.inv_freq, jax_rope.Rotary)  # through a method
    assert not raises(jax_rope.adapters)


def test_the_package_says_that_it_is_typed():
    assert (Path(jax_rope.__file__).parent / "py.typed").is_file()
