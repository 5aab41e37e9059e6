"""The bench: that its participants rotate, and that it says what it found. Never how fast: that is test_cost.py's."""

import json
import sys

import jax
import numpy as np
import pytest
from test_command_line import command as run_command

from jax_rope import Rotary, __main__, scaling
from jax_rope.bench import accuracy, children, command, participants, plot, tables, workloads
from jax_rope.bench.entry import CannotError
from jax_rope.bench.report import Report

NAMES = [name for name, who in participants.PARTICIPANTS.items() if who.kind != "floor"]
SHAPES = ((1, 6, 4, 16), (1, 6, 2, 16))
SMALL = {
    "half": workloads.Workload("", SHAPES, Rotary(pairing="half")),
    "interleaved": workloads.Workload("", SHAPES, Rotary()),
    "scaled": workloads.Workload("", SHAPES, Rotary(scaling=scaling.YaRN(4.0, 64)), positions=2),
    "bfloat16": workloads.Workload("", SHAPES, Rotary(pairing="half"), dtype="bfloat16"),
}


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")  # peers' warnings are their own business, as is how they promote
def test_participants_rotate(name, small):
    """Near position 0 everybody's formula is right, and so is its gradient."""
    case = workloads.case(SMALL[small], backward=name != "onnxruntime")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            entry = participants.PARTICIPANTS[name].prepare(case)
        except CannotError as error:
            pytest.skip(str(error))
        error = accuracy.largest_error(case, entry.results())
    # Theirs are rounded to bfloat16 after each of three operations, as are their tables.
    assert error < (8 if case.workload.dtype == "float32" else 4 * 2**16)
    if participants.PARTICIPANTS[name].kind != "peer" and case.workload.dtype == "float32":
        assert error <= 4


@pytest.mark.parametrize("name", [name for name, who in participants.PARTICIPANTS.items() if who.kind == "floor"])
def test_floors_run(name):
    entry = participants.PARTICIPANTS[name].prepare(workloads.case(SMALL["half"], backward=True))
    entry.run()
    assert entry.results is None


def test_every_floor_takes_part():
    floors = {who.floor for who in participants.PARTICIPANTS.values()} - {None}
    assert all(participants.PARTICIPANTS[floor].kind == "floor" for floor in floors)
    shown = {*participants.SHOWN_BY_SIZE, *participants.SHOWN_BY_POSITION, participants.LARGE}
    assert shown <= set(plot.STYLES) & set(participants.PARTICIPANTS)


@pytest.mark.slow
def test_command(tmp_path):
    """A small run, as a user runs it."""
    path = tmp_path / "bench.json"
    done = run_command("bench", "--workload", "smollm2-decode", "--rounds", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "SmolLM2 135M, decode: float32 [1, 1, 9, 64] and [1, 1, 3, 64], forward and backward" in done.stdout
    found = json.loads(path.read_text())
    assert {"jax-rope", "jax", "wgpu"} <= set(found["versions"])
    assert found["adapter"]["name"] in done.stdout
    assert found["failures"] == []
    assert {r["allocator"] for r in found["results"]} == set(children.allocators())
    assert {r["direction"] for r in found["results"]} == {"forward", "forward and backward"}
    for result in found["results"]:
        who = participants.PARTICIPANTS[result["participant"]]
        assert 0 < result["min_ms"] <= result["median_ms"]
        assert (result["rounds"], len(result["times_ms"])) == (2, 40)
        assert (result["error"] is None) == (who.kind == "floor")
        assert (result["over_floor"] is None) == (who.floor is None)
        if who.kind in ("ours", "part"):
            assert result["error"] <= 4
    everybody = {line["participant"] for line in found["results"] + found["absent"]}
    assert everybody == set(participants.PARTICIPANTS)


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    name = "Hugging Face's formula, torch"
    with pytest.raises(CannotError, match="not installed: torch"):
        participants.PARTICIPANTS[name].prepare(workloads.case(SMALL["half"], False))
    report = Report()
    line = {"event": "absent", "participant": name, "direction": "forward", "reason": "not installed: torch"}
    for workload in ("llama3-decode", "smollm2-decode"):
        report.take(line, workload, "default")
    _show(report)
    assert "torch (llama3-decode, smollm2-decode): not installed: torch" in capsys.readouterr().out


def _show(report):
    from rich.console import Console

    tables.show(report, Console(width=120))


def test_a_child_that_fails_or_hangs_is_reported(monkeypatch, capsys):
    bad = command.Child("bad", "measure", "bad", "default", ("no-such-workload",))
    monkeypatch.setattr(command, "_children", lambda arguments: [bad])
    assert __main__.main(["bench"]) == 1
    assert "failed: bad, default: exit status 2: " in capsys.readouterr().out
    monkeypatch.setattr(children, "SILENCE", 0.01)
    reason = children.run("measure", ["smollm2-decode"], "default", lambda line: None)
    assert reason is not None and reason.startswith("it hung")


def test_says_what_is_wrong(monkeypatch, capsys, tmp_path):
    assert __main__.main(["bench", "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    assert __main__.main(["bench", "--json", str(tmp_path / "nowhere" / "a.json")]) == 2
    assert f"there is no directory {tmp_path / 'nowhere'}" in capsys.readouterr().err
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert __main__.main(["bench", "--plot", str(tmp_path / "a.png")]) == 2
    assert "the bench needs rich, matplotlib: pip install 'jax-rope[bench]'" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report = Report()
    for name in participants.SHOWN_BY_SIZE:
        for workload in workloads.SIZES:
            line = {"event": "result", "participant": name, "median_ms": workloads.SIZES[workload].nbytes / 1e6}
            report.take(line, workload, "default")
    for name in participants.SHOWN_BY_POSITION:
        points = [[int(position), 2.0] for position in workloads.FAR]
        report.take({"event": "positions", "participant": name, "points": points}, "positions", "default")
    path = tmp_path / "bench.png"
    plot.plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_large_table(capsys):
    report = Report()
    line = {"event": "large", "participant": participants.LARGE, "nbytes": 1 << 23, "median_ms": 8.0}
    report.take({**line, "ns_per_byte": 0.95, "extra_bytes": 1 << 24}, "size-8388608", "kept")
    _show(report)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "kept" in line]
    assert row.split() == ["8", "kept", "8", "0.95", "16"]


@pytest.mark.parametrize("name", ["jnp", "webgpu, pure_callback"])
def test_error_does_not_grow_with_position(name):
    points = accuracy.by_position(name)
    assert (points[0][0], points[-1][0]) == (1, 2**31 - 1)
    assert max(error for _, error in points) <= 4


def test_numbers_are_between_minus_one_and_one():
    case = workloads.case(workloads.WORKLOADS["smollm2-prefill"], backward=True)
    arrays = [np.asarray(x) for xs in case.passes for x in xs]
    assert [x.shape for x in arrays] == [*case.workload.shapes] * 2
    assert all(-1 <= x.min() < -0.99 and 0.99 < x.max() <= 1 for x in arrays)
    assert not np.array_equal(arrays[0], arrays[2])
