"""``python -m jax_rope check``: whether the accuracy contract holds on the user's own adapters."""

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

from .. import config, reference
from ..about import CommandError, versions
from ..webgpu import device
from . import report
from .arrays import frequencies, positions, shapes, tables
from .host import Cases, Host, Target
from .limits import real_limits, special_values, threads, tight_limits
from .through_jax import through_jax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--adapter", metavar="NAME", help="a part of the adapter's name, kind, backend or driver")
    which.add_argument("--all", action="store_true", help="check every adapter")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, and no arrays above the adapter's limits")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if a case failed."""
    try:
        config.check_settings()
        targets = _targets(arguments.adapter or config.settings.adapter, arguments.all)
    except (RuntimeError, ValueError) as error:
        raise CommandError(error) from error
    checked = []
    for adapter, target in targets:
        print(f"checking {adapter}", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        results = list(examine(target, arguments.quick))
        checked.append(
            {
                **adapter.as_dict(),
                "features": _features(target),
                "seconds": round(time.perf_counter() - begun, 1),
                "passed": all(case["passed"] for case in results),
                "cases": results,
            }
        )
    passed = all(adapter["passed"] for adapter in checked)
    found = {"versions": versions(), "system": platform.platform(), "passed": passed, "adapters": checked}
    if arguments.json:
        print(json.dumps(found))
    else:
        report.show(found)
    return 0 if passed else 1


def _targets(name: str | None, every: bool) -> list[tuple[device.Adapter, Target]]:
    """The adapters to check. Equal ones are told apart by their number among those that a name matches."""
    if not every:
        return [(device.choose(name), Target(name, 0))]
    if not device.adapters():
        raise RuntimeError(device.HOW_TO_GET_ONE)
    seen: dict[str, int] = {}
    targets = []
    for adapter in device.adapters():
        full = f"{adapter} {adapter.driver}"
        seen[full] = seen.get(full, -1) + 1
        targets.append((adapter, Target(full, seen[full])))
    return targets


def _features(target: Target) -> list[str]:
    _, handle = device.matching(target.name)[target.number]
    return sorted(handle.features)


def examine(target: Target, quick: bool) -> Iterator[dict[str, Any]]:
    """The results of all cases, as JSON takes them."""
    try:
        host = Host(target)
    except Exception as error:
        yield _failed("device", "a device with the kernels", error)
        return
    topics: dict[str, Cases] = {
        "positions": positions(host),
        "shapes": shapes(host, quick),
        "frequencies": frequencies(host),
        "tables": tables(host),
        "special values": special_values(host),
        "limits": itertools.chain(tight_limits(host), () if quick else real_limits(host)),
        "threads": threads(host),
        # A program reaches the first of equal adapters by its name, and the others through sharded arrays only.
        "through JAX": through_jax(target.name, quick) if target.number == 0 else iter(()),
    }
    for topic, cases in topics.items():
        for name, case in cases:
            try:
                comparison = case()
            except Exception as error:
                yield _failed(topic, name, error)
            else:
                yield _result(topic, name, comparison)


def _result(topic: str, name: str, comparison: reference.Comparison) -> dict[str, Any]:
    if comparison.steps is None:
        value, bound, unit = comparison.units, reference.UNITS, report.UNITS
    else:
        value, bound, unit = float(comparison.steps), 1.0, report.STEPS
    lost = not math.isfinite(comparison.units)
    message = None
    if not comparison.holds:
        message = "elements have changed that must not" if lost else f"{value:.4g} {unit}, at most {bound:g}"
    error = None if lost else value
    return {
        "topic": topic,
        "name": name,
        "passed": comparison.holds,
        "error": error,
        "bound": bound,
        "unit": unit,
        "message": message,
    }


def _failed(topic: str, name: str, error: Exception) -> dict[str, Any]:
    """An exception in one line: of a traceback that JAX passes on as text, the last."""
    text = f"{type(error).__name__}: {error}".strip()
    text = text.splitlines()[-1] if "Traceback" in text else " ".join(text.split())
    return {
        "topic": topic,
        "name": name,
        "passed": False,
        "error": None,
        "bound": None,
        "unit": None,
        "message": text if len(text) <= 300 else f"{text[:300]} ...",
    }
