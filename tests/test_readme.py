"""What the README shows runs as printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import bench_table

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 24
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss 0\.\d+, gradient \(2, 16, 8, 64\) float32", done.stdout)


def test_the_table_of_transformations_is_what_the_tests_run():
    """Else: python tests/support_table.py."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import support_table as t; assert t.table() == t.parts()[1]"
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_times():
    """The table is what was measured last."""
    _, inside, _ = bench_table.parts()
    assert inside == bench_table.table(json.loads(bench_table.KEPT.read_text()))
