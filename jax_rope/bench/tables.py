"""The tables that a person reads."""

from typing import Any

from . import workloads
from .report import Report, groups

LEGEND = """\
x floor: its time over that of the same bytes carried the same way. x ours: over the fastest of jnp, webgpu and None.
error: the largest, in units of 2^-24 of the pair's norm; what jax_rope promises for float32 is 4.
An exactly rounded bfloat16 may be off by 65536 of these.
default: the allocator as it is. kept: it keeps large arrays' memory (glibc's MALLOC_ variables).
"""


def show(report: Report, console: Any) -> None:
    """Prints the header, a table for each workload and direction, and who is absent and why."""
    console.print(", ".join(f"{name} {number}" for name, number in report.versions.items()))
    adapter = report.adapter
    named = f"{adapter['name']} ({adapter['kind']}, {adapter['backend']})" if adapter else "no WebGPU adapter"
    console.print(f"{report.system}, {report.cores} cores; {named}\n")
    for group in groups(report.results, "workload", "direction"):
        console.print(_table(group))
    if report.results:
        console.print(LEGEND)
    if report.large:
        console.print(_large_table(report.large))
    for sentence in _absences(report.absent):
        console.print(sentence, markup=False)
    for failure in report.failures:
        keys = "workload", "allocator", "direction", "participant"
        named = ", ".join(failure[key] for key in keys if key in failure)
        console.print(f"failed: {named}: {failure['reason']}", style="red", markup=False)


def _table(group: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    workload = workloads.WORKLOADS[group[0]["workload"]]
    shapes = " and ".join(str(list(shape)) for shape in workload.shapes)
    allocators = list(dict.fromkeys(result["allocator"] for result in group))
    table = Table(
        title=f"{workload.title}: {workload.dtype} {shapes}, {group[0]['direction']}",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("")
    for allocator in allocators:
        for column in (f"{allocator}, ms", "x floor", "x ours"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    kind = group[0]["kind"]
    for of_one in groups(group, "participant"):
        if of_one[0]["kind"] != kind:
            kind = of_one[0]["kind"]
            table.add_section()
        found = {result["allocator"]: result for result in of_one}
        cells = [of_one[0]["participant"]]
        for allocator in allocators:
            result = found.get(allocator, {})
            cells += [_number(result.get(key)) for key in ("median_ms", "over_floor", "over_ours")]
        table.add_row(*cells, _number(max((r["error"] for r in of_one if r["error"] is not None), default=None)))
    return table


def _large_table(large: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    title = f"Large float32 arrays: {large[0]['participant']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("MiB", "allocator", "ms", "ns per byte", "memory beyond x and the result, MiB"):
        table.add_column(column, justify="right")
    for row in large:
        extra = None if row["extra_bytes"] is None else row["extra_bytes"] / workloads.MiB
        size, times = str(row["nbytes"] // workloads.MiB), (row["median_ms"], row["ns_per_byte"], extra)
        table.add_row(size, row["allocator"], *map(_number, times))
    return table


def _number(value: float | None) -> str:
    """Three digits are all that such a measurement has."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _absences(absent: list[dict[str, Any]]) -> list[str]:
    """One sentence for each participant and reason."""
    sentences = []
    for group in groups(absent, "participant", "reason"):
        where = ", ".join(dict.fromkeys(line["workload"] for line in group))
        sentences.append(f"without {group[0]['participant']} ({where}): {group[0]['reason']}")
    return sentences
