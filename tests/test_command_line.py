"""The commands, as a user runs them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_rope
from jax_rope import __main__, config, crossover, demo
from jax_rope.webgpu import device

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())["cases"]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jax_rope", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_info_json():
    done = command("info", "--json", JAX_ROPE_IMPLEMENTATION="webgpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["jax-rope"] == jax_rope.__version__
    assert found["adapters"][0]["limits"]["max-storage-buffer-binding-size"] >= 2**27
    assert found["webgpu_adapter"].startswith(found["adapters"][0]["name"])
    assert (found["implementation"], found["from_bytes"], found["reason"]) == ("webgpu", 0, "it was configured")


@pytest.mark.parametrize("arguments", [["info"], ["check", "--quick"]])
@pytest.mark.parametrize("name", ["TIME_LIMIT", "TRANSPORT"])
def test_a_setting_that_is_wrong(arguments, name):
    done = command(*arguments, **{f"JAX_ROPE_{name}": "abc"})
    assert done.returncode == 2
    assert f"error: JAX_ROPE_{name} must be" in done.stderr


def test_info_reads_well(capsys):
    assert __main__.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "implementation='webgpu' would use: " in printed
    assert "implementation=None would use: jnp for every size, since " in printed


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A directory for what is measured, and nothing known so far."""
    monkeypatch.setattr(crossover, "directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(crossover, "_measurements", {})
    monkeypatch.setattr(config, "_choices", {})
    return tmp_path / "cache"


def test_info_measures(monkeypatch, capsys, cache):
    """On any adapter, and whatever is known; without being asked it shows what is known."""
    monkeypatch.setattr(crossover, "SIZES", (1 << 18,))
    assert __main__.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measurement"] is None
    assert __main__.main(["info", "--measure", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["measurement"]
    assert [file.name for file in cache.iterdir()] == [Path(first["file"]).name]
    ((size, *seconds),) = [row.values() for row in first["times"]]
    assert size == 1 << 18 and all(0 < t < 1 for t in seconds)
    assert __main__.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measurement"] == first
    assert __main__.main(["info", "--measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measurement"] != first


def test_info_on_a_gpu(monkeypatch, capsys, cache):
    times = (crossover.Times(1 << 24, 0.02, 0.01), crossover.Times(1 << 20, 0.001, 0.0015))
    adapter = dataclasses.replace(device.adapters()[0], kind="discrete")
    monkeypatch.setattr(crossover, "_measure", lambda: times)
    monkeypatch.setattr(device, "choose", lambda name: adapter)
    assert __main__.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "implementation=None would use: webgpu from 1.86 MiB on, jnp below, since " in printed
    assert "is faster from there on, as measured on this machine" in printed
    assert f"measured (kept in {cache}" in printed
    assert "      16 MiB    20.00 ms    10.00 ms\n       1 MiB     1.00 ms     1.50 ms\n" in printed
    assert "webgpu is faster from 1.86 MiB on" in printed
    monkeypatch.setattr(crossover, "directory", lambda: cache / next(cache.iterdir()))
    assert __main__.main(["info", "--measure"]) == 0
    assert "measured (not kept: " in capsys.readouterr().out


def test_info_says_why_nothing_was_measured(monkeypatch, capsys, cache):
    monkeypatch.setattr(device, "_found", lambda: ())
    assert __main__.main(["info", "--measure"]) == 1
    assert "error: nothing was measured: no WebGPU adapter was found" in capsys.readouterr().err


def test_info_checks_the_environment():
    done = command("info", JAX_ROPE_AUTOTUNE="yes")
    assert done.returncode == 2
    assert "error: JAX_ROPE_AUTOTUNE must be '0' or '1', or not set, got 'yes'" in done.stderr


def test_info_without_an_adapter(monkeypatch, capsys, caplog):
    monkeypatch.setattr(device, "_found", lambda: ())
    jax_rope.configure(adapter=None)  # forgets what was chosen before
    assert __main__.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "mesa-vulkan-drivers" in printed
    assert "implementation='webgpu' would use: nothing: no WebGPU adapter was found" in printed
    assert "rotating in jnp: no WebGPU adapter was found" in caplog.text
    monkeypatch.undo()
    jax_rope.configure(adapter=None)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["webgpu", "jnp"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][:12])
def test_demo(case, implementation):
    """A published model continues as its reference does: the same tokens, logits within 2e-3."""
    prompt = case["prompt"]
    done = command("demo", "--prompt", prompt, "--tokens", "24", "--implementation", implementation, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ids"] == case["greedy"]
    assert said["logits_top5"]["ids"] == case["top5"]
    assert said["logits_top5"]["values"] == pytest.approx(case["top5_logits"], abs=2e-3)
    assert (said["prompt"], said["implementation"]) == (prompt, implementation)
    assert said["adapter"] == str(device.choose(None))
    assert 0 < said["max_logit_difference"] < 2e-3


def test_demo_says_what_is_wrong(capsys, monkeypatch, tmp_path):
    assert __main__.main(["demo", "--tokens", "0"]) == 2
    assert "--tokens must be at least 1, got 0" in capsys.readouterr().err
    model = tmp_path / "model.gguf"
    model.write_bytes(b"not a model")
    assert __main__.main(["demo", "--model", str(model)]) == 2
    assert f"cannot run {model}" in capsys.readouterr().err
    monkeypatch.setattr(demo, "EXTRAS", ("no_such_package",))
    assert __main__.main(["demo"]) == 2
    assert "the demo needs no_such_package: pip install 'jax-rope[demo]'" in capsys.readouterr().err
