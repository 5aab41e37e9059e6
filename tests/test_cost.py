"""What the implementations cost, as ratios against floors and formulas measured in the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_rope.bench import children

# With room for a machine that is busy elsewhere, and for cores that rested, which compute at a third of their speed for
# some milliseconds. What is reached otherwise: README, and docs/bench.json.
MOST = {
    "kernel": 1.3,
    "pure_callback": 1.8,
    "buffer_callback": 2.6,
    "jnp interleaved": 1.4,
    "jnp half": 1.35,
    "jnp / Hugging Face's formula, jnp": 0.45,
    "jnp / Hugging Face's formula, jnp, forward and backward": 0.7,
    "jnp / cos and sin in the op, jnp": 0.45,
    "bfloat16 kernel": 1.0,
    "decode step": 2.2,
    "kept: jnp": 3.0,
    "kept: pure_callback": 2.5,
    "kept: buffer_callback": 3.6,
}


def most(name: str) -> float:
    """The bound that says the most of what is measured."""
    return MOST[max((bound for bound in MOST if name.startswith(bound)), key=len)]


@pytest.mark.alone
@pytest.mark.parametrize("allocator", children.allocators())
def test_cost(allocator):
    """Other work on the machine hits what keeps all cores busy more than a floor that waits for memory, so a bound
    that is missed may be met by a later run; each measure counts at its best."""
    best: dict[str, float] = {}
    kept = children.KEPT if allocator == "kept" else {}
    for _ in range(5):
        program = Path(__file__).with_name("cost.py")
        environment = {**os.environ, **kept}
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, timeout=200, env=environment
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        for name, ratio in json.loads(done.stdout).items():
            best[name] = min(ratio, best.get(name, ratio))
        missed = {name: ratio for name, ratio in best.items() if ratio > most(name)}
        if not missed:
            return
    raise AssertionError(f"too slow: {missed} of {best}, against {MOST}")
