"""Two pictures side by side: time against size, and error against position."""

from pathlib import Path
from typing import Any

from .. import reference
from . import workloads
from .report import Report

# Okabe and Ito's colours, which the colour-blind tell apart.
STYLES: dict[str, dict[str, Any]] = {
    "jnp": {"color": "#0072B2", "marker": "o", "linewidth": 2.2},
    "webgpu, pure_callback": {"color": "#D55E00", "marker": "s", "linewidth": 2.2},
    "webgpu, buffer_callback": {"color": "#E69F00", "marker": "D", "linewidth": 2.2},
    "Hugging Face's formula, jnp": {"color": "#009E73", "marker": "^"},
    "cos and sin in the op, jnp": {"color": "#CC79A7", "marker": "v"},
    "Hugging Face's formula, torch": {"color": "#56B4E9", "marker": "x"},
    "onnxruntime": {"color": "#000000", "marker": "+"},
    "equinox": {"color": "#8C8C00", "marker": "1"},
    "x * 1.0001": {"color": "#888888", "linestyle": "--"},
}
LABELS = {"jnp": "jax_rope, jnp"} | {name: f"jax_rope, {name}" for name in STYLES if name.startswith("webgpu")}


def plot(report: Report, path: Path) -> None:
    """Saves the picture, a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    _times(left, report)
    _errors(right, report)
    handles: dict[str, Any] = {}
    for axes in (left, right):
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def _draw(axes: Any, name: str, points: list[tuple[float, float]], **more: Any) -> None:
    style = {"linewidth": 1.2, "markersize": 5, **STYLES[name], **more}
    axes.plot(*zip(*points, strict=True), label=LABELS.get(name, name), **style)


def _times(axes: Any, report: Report) -> None:
    for name in STYLES:
        found = [r for r in report.sizes if r["participant"] == name]
        points = [(workloads.SIZES[r["workload"]].nbytes / workloads.MiB, r["median_ms"]) for r in found]
        if points:
            _draw(axes, name, sorted(points))
    axes.set(xscale="log", yscale="log", xlabel="size of x, MiB", ylabel="milliseconds")
    adapter = report.adapter["name"] if report.adapter else "no WebGPU adapter"
    axes.set_title(f"time, float32 [1, S, 32, 128]\n{report.cores} cores; {adapter}", fontsize=10)
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.yaxis.set_major_formatter(lambda time, _: f"{time:g}")


def _errors(axes: Any, report: Report) -> None:
    for i, found in enumerate(report.positions):
        # Where lines coincide, each shows its marker at other points.
        _draw(axes, found["participant"], found["points"], markevery=(i % 6, 6))
    axes.axhline(reference.UNITS, color="#444444", linestyle=":", linewidth=1, label="what jax_rope promises")
    axes.set(xscale="log", yscale="log", xlabel="position", ylabel="largest error / (2$^{-24}$ of the pair's norm)")
    axes.set_title("error, float32, theta 10 000\nup to position 2$^{31}$ - 1", fontsize=10)
