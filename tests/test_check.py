"""``python -m jax_rope check`` and the self-test: they pass here, and find a kernel that is wrong."""

import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import jax_rope
from jax_rope import __main__, check
from jax_rope.check import host, report
from jax_rope.reference import Comparison
from jax_rope.webgpu import device, kernels, offload, selftest

SOURCE = kernels.source("rope.wgsl")
MISTAKES = {
    "a sign": ("r.cosine * x.x1 - r.sine * x.x2", "r.cosine * x.x1 + r.sine * x.x2"),
    "a coarse cosine": ("19.739208", "19.7393"),
    "positions that are not negative": ("return phase - select", "return phase - 0u * select"),
}


@pytest.fixture(params=MISTAKES)
def mistake(request, monkeypatch):
    """A kernel with a mistake, for rotators that are made from here on."""
    right, wrong = MISTAKES[request.param]
    assert right in SOURCE
    monkeypatch.setattr(kernels, "source", lambda name: SOURCE.replace(right, wrong))
    return request.param


def test_passes_here():
    command = [sys.executable, "-m", "jax_rope", "check", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    (adapter,) = found["adapters"]
    assert [case for case in adapter["cases"] if not case["passed"]] == []
    assert all(0 <= case["error"] <= case["bound"] for case in adapter["cases"])
    assert (found["passed"], adapter["passed"], done.returncode) == (True, True, 0)
    assert found["versions"]["jax-rope"] == jax_rope.__version__
    assert adapter["name"] == device.choose(None).name
    assert adapter["features"] and adapter["limits"]["max-storage-buffer-binding-size"] >= 2**27
    names = [(case["topic"], case["name"]) for case in adapter["cases"]]
    assert len(names) > 300 and len(set(names)) == len(names)


def test_a_wrong_kernel_is_named(mistake, monkeypatch, capsys):
    """Status 1, and a report with the adapter, its driver, cases, errors and versions."""
    examine = check.examine
    monkeypatch.setattr(check, "examine", lambda *which: itertools.islice(examine(*which), 12))
    assert __main__.main(["check", "--quick"]) == 1
    said, adapter = capsys.readouterr().out, device.choose(None)
    assert f"of 12 cases failed on\n  {adapter}, driver: {adapter.driver}\n  jax-rope {jax_rope.__version__}, " in said
    pattern = r"  positions: near and far, float32, interleaved, .*: (.*) units of .* norm, at most 4\n"
    named = re.search(pattern, said)
    assert named is not None and float(named[1]) > 4
    assert f"FAILED on {adapter}, driver: {adapter.driver}" in said


def test_selftest_passes_here():
    assert selftest.fault(offload.Rotator(device.Device())) is None


def test_selftest_finds(mistake):
    said = selftest.fault(offload.Rotator(device.Device()))
    assert said is not None and "\n" not in said
    assert said.startswith(f"{device.choose(None)} fails its first rotations (float32, interleaved pairs, forward): ")
    assert " instead of " in said


def test_selftest_takes_an_exception_for_a_fault(monkeypatch):
    rotator = offload.Rotator(device.Device())
    monkeypatch.setattr(rotator, "run", lambda *_: 1 / 0)
    assert selftest.fault(rotator).endswith("forward): ZeroDivisionError: division by zero")


def test_an_exception_fails_its_case_alone(monkeypatch):
    def cases(_):
        yield "one", lambda: 1 / 0
        yield "another", lambda: Comparison(1.5, None, True)

    monkeypatch.setattr(check, "positions", cases)
    one, another = itertools.islice(check.examine(host.Target(None, 0), quick=True), 2)
    assert (one["passed"], one["message"]) == (False, "ZeroDivisionError: division by zero")
    assert (another["passed"], another["error"], another["bound"]) == (True, 1.5, 4.0)


def test_without_an_adapter(monkeypatch, capsys):
    assert __main__.main(["check", "--adapter", "no such adapter"]) == 2
    assert "error: no adapter matches 'no such adapter'" in capsys.readouterr().err
    monkeypatch.setattr(device, "_found", lambda: ())
    for arguments in ([], ["--all"], ["--json"]):
        assert __main__.main(["check", *arguments]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"error: {device.HOW_TO_GET_ONE}\n")


def test_all_adapters_are_told_apart(monkeypatch):
    adapter, handle = device.matching(None)[0]
    monkeypatch.setattr(device, "_found", lambda: ((adapter, handle), (adapter, handle)))
    (_, first), (_, second) = check._targets(None, every=True)
    assert (first.name, first.number, second.number) == (second.name, 0, 1)
    assert device.matching(second.name)[second.number] == (adapter, handle)


@pytest.mark.parametrize("rich", [True, False])
def test_report(monkeypatch, capsys, rich):
    if not rich:
        monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    results = [
        check._result("shapes", "one", Comparison(1.25, None, True)),
        check._result("shapes", "two", Comparison(np.inf, 0, False)),
        check._result("limits", "three", Comparison(70.0, 2, False)),
    ]
    adapter = {**device.choose(None).as_dict(), "features": [], "seconds": 1.0, "passed": False, "cases": results}
    report.show({"versions": {"jax-rope": "1"}, "system": "x", "passed": False, "adapters": [adapter]})
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["shapes", "2", "1.25", "-", "1", "failed"] in lines
    assert ["limits", "1", "-", "2", "1", "failed"] in lines
    assert "shapes: two: elements have changed that must not" in printed
    assert "limits: three: 2 units in the last place, at most 1" in printed
