"""The wheel and the source distribution work by themselves, without the repository beside them."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import jax_rope
assert Path(jax_rope.__file__).is_relative_to(sys.argv[1]), jax_rope.__file__
x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4, 16)), jnp.float32)
y, vjp = jax.vjp(lambda x: jax_rope.rope(x, 1_000_000, implementation="webgpu"), x)
(back,) = vjp(y)
print("there and back:", float(jnp.abs(back - x).max()) < 1e-5)
from jax_rope import demo
demo._llama()  # it comes along
"""


def run(*command: object, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_installed_alone(built, pattern, tmp_path):
    (package,) = built.glob(pattern)
    target = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(*pip, "--no-build-isolation", "--target", target, package)
    said = run(sys.executable, "-c", PROGRAM, target, cwd=tmp_path, env={"PYTHONPATH": str(target), "PATH": ""})
    assert "there and back: True" in said
    assert (target / "jax_rope" / "wgsl" / "rope.wgsl").is_file()
    assert (target / "jax_rope" / "py.typed").is_file()


def test_the_source_distribution_has_what_the_tests_need(built):
    (package,) = built.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("tests/conftest.py", "tests/golden/smollm2.json", "docs/bench.json", "examples/llama.py", "Makefile"):
        assert name in names
    assert not [name for name in names if name.startswith(".cache")]
