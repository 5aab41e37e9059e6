"""What the implementations cost, as ratios against floors measured in the same run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = {"kernel": 1.5, "webgpu": 2.0, "jnp": 1.5}


@pytest.mark.slow
def test_cost():
    """Other work on the machine hits what keeps all cores busy more than a floor that waits for memory, so a bound
    that is missed may be met by a second or third run; each measure counts at its best."""
    best: dict[str, float] = {}
    for _ in range(3):
        program = Path(__file__).with_name("cost.py")
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        for name, ratio in json.loads(done.stdout).items():
            best[name] = min(ratio, best.get(name, ratio))
        if all(ratio <= MOST[name.split()[0]] for name, ratio in best.items()):
            return
    raise AssertionError(f"too slow against {MOST}: {best}")
