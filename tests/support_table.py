"""The README's table of transformations, from the tests' marks: ``python tests/support_table.py`` writes it.

A test that is marked ``transformation(name)`` runs for the implementations that its parameters name. A keyword
``webgpu="..."`` says what it shows there instead of support.
"""

import contextlib
import io
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
BEGIN, END = "<!-- transformations: made by tests/support_table.py -->\n", "<!-- end -->\n"


class Collector:
    def __init__(self) -> None:
        self.cells: dict[str, dict[str, object]] = {}

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:
            for mark in item.iter_markers("transformation"):
                row = self.cells.setdefault(mark.args[0], {"jnp": 0, "webgpu": 0})
                parameters = item.callspec.params if hasattr(item, "callspec") else {}
                named = parameters.get("implementation", parameters.get("chosen", "webgpu"))
                if named in row:
                    instead = mark.kwargs.get(named)
                    row[named] = instead or row[named] + 1  # type: ignore[operator]


def table() -> str:
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(["--collect-only", "-q", str(TESTS)], plugins=[collector])
    if status or not collector.cells:
        raise RuntimeError(f"the tests cannot be collected: {printed.getvalue()}")
    lines = ["| transformation | `jnp` | `webgpu` |", "|---|---|---|"]
    for name, row in collector.cells.items():
        lines.append(f"| {name} | {' | '.join(map(said, row.values()))} |")
    return "\n".join(lines) + "\n"


def said(cell: object) -> str:
    if isinstance(cell, int):
        return f"{cell} test{'s' * (cell > 1)}" if cell else ""
    return str(cell)


def parts() -> tuple[str, str, str]:
    before, rest = README.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


if __name__ == "__main__":
    before, _, after = parts()
    README.write_text(before + BEGIN + table() + END + after)
    sys.exit(0)
