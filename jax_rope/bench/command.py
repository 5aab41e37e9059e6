"""``python -m jax_rope bench``: starts the children, and shows and saves what they found."""

import argparse
import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..about import CommandError
from . import children, participants, workloads
from .measure import DIRECTIONS
from .report import Report
from .tables import show

ROUNDS, QUICK_ROUNDS = 15, 3
LARGE_ROUNDS = 5  # at most, for arrays that take seconds a round


class Child(NamedTuple):
    """A child to start."""

    title: str
    module: str
    workload: str
    allocator: str
    arguments: Sequence[object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        choices=workloads.WORKLOADS,
        metavar="NAME",
        help=f"only this one, may be repeated: {', '.join(workloads.WORKLOADS)}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"how often everybody has a turn (default: {ROUNDS}, or {LARGE_ROUNDS} where arrays are large)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{' and '.join(workloads.QUICK)}, forward only, {QUICK_ROUNDS} rounds, if nothing else is said",
    )
    parser.add_argument("--large", action="store_true", help="also arrays of 8 MiB to 1 GiB: time and memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save everything that was measured")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw time against size, and error against position"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if a child failed."""
    _check(arguments)
    from rich.console import Console

    report = Report()
    _measure(report, _children(arguments))
    report.compare()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    show(report, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        from .plot import plot

        plot(report, arguments.plot)
    return 1 if report.failures else 0


def _check(arguments: argparse.Namespace) -> None:
    needed = ("rich", "matplotlib") if arguments.plot else ("rich",)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"the bench needs {', '.join(missing)}: pip install 'jax-rope[bench]'")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise CommandError(f"--rounds must be at least 1, got {arguments.rounds}")
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"there is no directory {path.absolute().parent} to write {path.name} into")


def _children(arguments: argparse.Namespace) -> list[Child]:
    def counted(name: str) -> tuple[str, int]:
        usual = QUICK_ROUNDS if arguments.quick else ROUNDS
        if workloads.ALL[name].nbytes > 64 * workloads.MiB:
            usual = min(usual, LARGE_ROUNDS)
        return "--rounds", arguments.rounds or usual

    names = arguments.workload or (workloads.QUICK if arguments.quick else workloads.WORKLOADS)
    found = [
        Child(
            f"{name}, {allocator} allocator",
            "measure",
            name,
            allocator,
            (name, *counted(name), "--direction", direction),
        )
        for name in names
        for direction in (DIRECTIONS[:1] if arguments.quick else DIRECTIONS)
        for allocator in children.allocators()
    ]
    if arguments.plot:
        whom = ("--direction", "forward", "--participants", *participants.SHOWN_BY_SIZE)
        largest = 32 * workloads.MiB if arguments.quick else 256 * workloads.MiB
        found += [
            Child(name, "measure", name, "default", (name, *counted(name), *whom))
            for name, workload in workloads.SIZES.items()
            if workload.nbytes <= largest
        ]
        found.append(Child("positions", "accuracy", "positions", "default", ()))
    if arguments.large:
        found += [
            Child(f"{name}, {allocator} allocator", "memory", name, allocator, (name, *counted(name)))
            for name in workloads.LARGE
            for allocator in children.allocators()
        ]
    return found


def _measure(report: Report, to_start: Sequence[Child]) -> None:
    """Starts one child after the other, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(to_start))

        def hear(child: Child, line: dict[str, Any]) -> None:
            report.take(line, child.workload, child.allocator)
            if line["event"] == "progress":
                rounds = f"{line['done']}/{line['of']}"
                bar.update(task, description=f"{child.title}: {line.get('direction', '')} {rounds}")

        for child in to_start:
            bar.update(task, description=child.title)
            reason = children.run(child.module, child.arguments, child.allocator, functools.partial(hear, child))
            if reason:
                report.take({"event": "failed", "reason": reason}, child.workload, child.allocator)
            bar.advance(task)
