"""How the package's docstrings become Markdown: examples, powers, and names that are links.

mkdocstrings loads this as an extension of griffe, which reads the package.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

# What the reference's pages are about: links go to these and to their members.
PAGES = "\n".join(page.read_text() for page in sorted((Path(__file__).parent / "api").glob("*.md")))
DOCUMENTED = frozenset(re.findall(r"^::: ([\w.]+)", PAGES, re.MULTILINE))


class Docstrings(griffe.Extension):
    """Rewrites each docstring once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.path.startswith("jax_rope.forward_mode.") and "_in_either_mode(" in str(getattr(obj, "value", "")):
            obj.docstring = griffe.Docstring(
                f"`jax_rope.{obj.name}`, with the same arguments and results, differentiable in forward mode too.",
                parent=obj,
            )
        if obj.docstring is not None and id(obj.docstring) not in self._seen:
            self._seen.add(id(obj.docstring))
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text: str, obj: griffe.Object) -> str:
    text = re.sub(r"^Example::\n\n((?: {4}.*\n|\n)+)", _code, text + "\n", flags=re.MULTILINE)
    parts = re.split(r"(```.*?```|``.*?``|`[^`\n]+`)", text, flags=re.DOTALL)
    return "".join(_link(p, obj) if p.startswith("`") else p.replace("2**", r"2\*\*") for p in parts).rstrip()


def _code(match: re.Match) -> str:
    return f"```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n"


def _link(code: str, obj: griffe.Object) -> str:
    name = code.strip("`")
    if code.startswith("``") or not re.fullmatch(r"[\w.]+", name):
        return code
    scopes = ["", "jax_rope.", f"{obj.path}.", f"{obj.module.path}."]
    if obj.parent is not None:
        scopes.append(f"{obj.parent.path}.")
    for path in (scope + name for scope in scopes):
        if path != obj.path and _documented(path, obj):
            return f"[{code}][{_exported(path)}]"
    return code


def _documented(path: str, obj: griffe.Object) -> bool:
    """Whether a page has a heading for it: it is the page's, or a function, class or property in what is."""
    exported = _exported(path)
    if exported in DOCUMENTED:
        return True
    if not any(exported.startswith(f"{name}.") for name in DOCUMENTED):
        return False
    try:
        found = obj.package[path.removeprefix("jax_rope.")]
    except (KeyError, griffe.GriffeError):
        return False
    return not found.is_alias and found.docstring is not None


def _exported(path: str) -> str:
    """Where the package exports what one of its modules defines."""
    return re.sub(r"^jax_rope\.(op|rotary|config|webgpu\.device)\.", "jax_rope.", path)
