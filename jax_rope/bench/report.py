"""What was found, gathered from the children."""

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import config
from ..about import versions
from ..webgpu import device
from . import workloads

PEERS = ("torch", "onnxruntime", "onnx", "equinox")


def _versions() -> dict[str, str]:
    found = versions()
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _adapter() -> dict[str, Any] | None:
    try:
        return device.choose(config.settings.adapter).as_dict()
    except RuntimeError:
        return None


@dataclass
class Report:
    """Everything, as JSON takes it.

    Attributes:
      results: one for each participant, workload, direction and allocator: the median, the least and all times in
        milliseconds, the largest error in units of 2**-24 of the pair's norm, and the ratios to its floor and to the
        fastest of ours.
      sizes: the same for one array of several sizes.
      positions: the error at each of many positions.
      large: time per byte, and memory beyond x and the result.
      absent: who does not take part where, and why.
      failures: what went wrong.
    """

    versions: dict[str, str] = field(default_factory=_versions)
    system: str = field(default_factory=platform.platform)
    cores: int = field(default_factory=config.cores)
    adapter: dict[str, Any] | None = field(default_factory=_adapter)
    results: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[dict[str, Any]] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)
    large: list[dict[str, Any]] = field(default_factory=list)
    absent: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def take(self, line: dict[str, Any], workload: str, allocator: str) -> None:
        """Takes in what a child has said."""
        event = line["event"]
        values = {key: value for key, value in line.items() if key != "event"}
        places = {"positions": self.positions, "large": self.large, "absent": self.absent, "failed": self.failures}
        places["result"] = self.sizes if workload in workloads.SIZES else self.results
        if event in places:
            places[event].append({"workload": workload, "allocator": allocator, **values})

    def compare(self) -> None:
        """Adds the ratios to the results."""
        for group in groups(self.results, "workload", "direction", "allocator"):
            medians = {result["participant"]: result["median_ms"] for result in group}
            ours = [result["median_ms"] for result in group if result["kind"] == "ours"]
            for result in group:
                floor = medians.get(result["floor"])
                result["over_floor"] = result["median_ms"] / floor if floor else None
                result["over_ours"] = result["median_ms"] / min(ours) if ours else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def groups(results: Iterable[dict[str, Any]], *keys: str) -> list[list[dict[str, Any]]]:
    found: dict[tuple, list] = {}
    for result in results:
        found.setdefault(tuple(result[key] for key in keys), []).append(result)
    return list(found.values())
