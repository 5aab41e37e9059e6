"""What was checked, for people: a table by topic, the adapter, and what to put into a bug report."""

import importlib.util
from typing import Any

UNITS = "units of 2^-24 of the pair's norm"
STEPS = "units in the last place"
HEADER = ("", "cases", "worst float32", "worst 16-bit", "")
ALIGNED = "<>>><"  # as format() says it
SHOWN = 20  # failures; --json has all
TELLING = ("shader-f16", "subgroup", "subgroups", "timestamp-query", "mappable-primary-buffers")


def show(found: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    print(versions)
    for adapter in found["adapters"]:
        print(f"\n{_named(adapter)}\n")
        _table(_rows(adapter["cases"]))
        print(f"\nfloat32 in {UNITS}, at most 4; 16-bit in {STEPS}, at most 1; {adapter['seconds']} s")
        for limit, value in adapter["limits"].items():
            print(f"  {limit}: {value:,}")
        print(f"  features: {', '.join(f for f in TELLING if f in adapter['features']) or 'none that matter here'}")
    for adapter in found["adapters"]:
        _failures(adapter, f"{versions}, {found['system']}")
    verdict = "the accuracy contract holds" if found["passed"] else "FAILED"
    for adapter in found["adapters"]:
        if adapter["passed"] == found["passed"]:
            print(f"\n{verdict} on {_named(adapter)}")


def _named(adapter: dict[str, Any]) -> str:
    return f"{adapter['name']} ({adapter['kind']}, {adapter['backend']}), driver: {adapter['driver']}"


def _failures(adapter: dict[str, Any], where: str) -> None:
    """Ready to be put into a bug report."""
    failed = [case for case in adapter["cases"] if not case["passed"]]
    if not failed:
        return
    print(f"\n{len(failed)} of {len(adapter['cases'])} cases failed on")
    print(f"  {_named(adapter)}")
    print(f"  {where}")
    for case in failed[:SHOWN]:
        print(f"  {case['topic']}: {case['name']}: {case['message']}")
    if len(failed) > SHOWN:
        print(f"  and {len(failed) - SHOWN} more: --json prints all")


def _rows(cases: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for topic in dict.fromkeys(case["topic"] for case in cases):
        mine = [case for case in cases if case["topic"] == topic]
        failed = sum(not case["passed"] for case in mine)
        verdict = f"{failed} failed" if failed else "passed"
        rows.append((topic, str(len(mine)), _worst(mine, UNITS, ".2f"), _worst(mine, STEPS, ".0f"), verdict))
    return rows


def _worst(cases: list[dict[str, Any]], unit: str, spec: str) -> str:
    errors = [case["error"] for case in cases if case["unit"] == unit and case["error"] is not None]
    return format(max(errors), spec) if errors else "-"


def _table(rows: list[tuple[str, ...]]) -> None:
    """With rich where it is installed."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title, side in zip(HEADER, ALIGNED, strict=True):
            table.add_column(title, justify="right" if side == ">" else "left")
        for row in rows:
            table.add_row(*row, style=None if row[-1] == "passed" else "red")
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, *rows):
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, ALIGNED, widths, strict=True))
        print("  ".join(cells).rstrip())
