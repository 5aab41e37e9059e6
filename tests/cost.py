"""Measures what the implementations cost against their floors, in a process of its own: ``python tests/cost.py``.

Prints a JSON object of ratios of medians over rounds in which both take turns, so that noise hits both alike; for
float32 [1, 2048, 32, 128] where nothing else is said.
"""

import dataclasses
import json
import os

import numpy as np

from jax_rope.bench import workloads
from jax_rope.bench.measure import calls_in_a_row, interleaved
from jax_rope.bench.participants import PARTICIPANTS

PAIRINGS = ("interleaved", "half")
FLOORED = {
    "kernel": "kernel alone",
    "pure_callback": "webgpu, pure_callback",
    "buffer_callback": "webgpu, buffer_callback",
    "jnp": "jnp",
}


def times(workload: workloads.Workload, names: list[str], backward: bool = False, rounds: int = 15) -> dict[str, float]:
    case = workloads.case(workload, backward)
    runs = {name: PARTICIPANTS[name].prepare(case).run for name in names}
    return {name: float(np.median(t)) for name, t in interleaved(runs, rounds, calls_in_a_row(workload)).items()}


def over_floors() -> dict[str, float]:
    ratios = {}
    for what, name in FLOORED.items():
        floor = PARTICIPANTS[name].floor
        assert floor is not None
        for pairing in PAIRINGS:
            seen = times(workloads.WORKLOADS[f"standard-{pairing}"], [name, floor])
            ratios[f"{what} {pairing}"] = seen[name] / seen[floor]
    return ratios


def backward_over_floors() -> dict[str, float]:
    seen = times(workloads.WORKLOADS["standard-half"], ["jnp", "x * 1.0001"], backward=True)
    return {"jnp half, forward and backward": seen["jnp"] / seen["x * 1.0001"]}


def over_formulas() -> dict[str, float]:
    """How often the usual formulas fit into our time, upside down."""
    formulas = ["Hugging Face's formula, jnp", "cos and sin in the op, jnp"]
    ratios = {}
    for backward in (False, True):
        seen = times(workloads.WORKLOADS["standard-half"], ["jnp", *formulas], backward, rounds=7)
        for name in formulas:
            ratios[f"jnp / {name}{', forward and backward' if backward else ''}"] = seen["jnp"] / seen[name]
    return ratios


def bfloat16_over_float32() -> dict[str, float]:
    ratios = {}
    for pairing in PAIRINGS:
        float32 = workloads.WORKLOADS[f"standard-{pairing}"]
        runs = {
            dtype: PARTICIPANTS["kernel alone"].prepare(workloads.case(workload, backward=False)).run
            for dtype, workload in (("f", float32), ("b", dataclasses.replace(float32, dtype="bfloat16")))
        }
        seen = interleaved(runs, 15)
        ratios[f"bfloat16 kernel {pairing}"] = float(np.median(seen["b"]) / np.median(seen["f"]))
    return ratios


def decoding() -> dict[str, float]:
    name, bare = "webgpu, buffer_callback", "wgpu write, multiply, map"
    seen = times(workloads.WORKLOADS["llama3-decode"], [name, bare], rounds=30)
    return {"decode step": seen[name] / seen[bare]}


def with_kept_memory() -> dict[str, float]:
    """What is left of the ways to the GPU when the kernel's time is taken off, in identities' times; and jnp."""
    names = ["kernel alone", "jnp", "x * 1.0001"]
    for transport in ("pure_callback", "buffer_callback"):
        names += [f"webgpu, {transport}", f"identity {transport}"]
    ratios = {}
    for pairing in PAIRINGS:
        seen = times(workloads.WORKLOADS[f"standard-{pairing}"], names)
        ratios[f"kept: jnp {pairing}"] = seen["jnp"] / seen["x * 1.0001"]
        for transport in ("pure_callback", "buffer_callback"):
            rest = seen[f"webgpu, {transport}"] - seen["kernel alone"]
            ratios[f"kept: {transport} {pairing}"] = rest / seen[f"identity {transport}"]
    return ratios


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        measures = [with_kept_memory]
    else:
        measures = [over_floors, backward_over_floors, over_formulas, bfloat16_over_float32, decoding]
    print(json.dumps({name: ratio for measure in measures for name, ratio in measure().items()}))
