"""The commands, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jax_rope
from jax_rope import __main__, demo
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
    assert (found["implementation"], found["reason"]) == ("webgpu", "it was configured")


def test_info_reads_well(capsys):
    assert __main__.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "implementation='webgpu' would use: " in printed
    assert "implementation=None would use: jnp, since " in printed


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
