"""Adapters other than the one that all other tests run on: SwiftShader, OpenGL, and Dawn in the place of wgpu.

Each in processes of their own, for a process reads at its start which drivers there are. An adapter that is missing is
a failure.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import swiftshader

pytestmark = pytest.mark.adapters

ADAPTERS = {  # how to find one, what its name says, its backend
    "SwiftShader": (str(swiftshader.DRIVER), "SwiftShader", "Vulkan"),
    "OpenGL": (os.devnull, "", "OpenGL"),
}
TOPICS = {"positions", "shapes", "frequencies", "tables", "special values", "limits", "threads", "through JAX"}

GRADIENTS = """
import itertools
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax_rope import Rotary, rope_qk

rng = np.random.default_rng(7)
FAR = np.array([0, 1, 4095, 131_071, 10_000_000, 2**31 - 1, -1, -(2**31), 123_456_789])
for dtype, pairing in itertools.product((jnp.float32, jnp.bfloat16), ("interleaved", "half")):
    q, k, q_cotangent, k_cotangent = (jnp.asarray(rng.standard_normal((9, heads, 32)), dtype) for heads in (5, 1, 5, 1))

    def rotated(q, k):
        return rope_qk(q, k, FAR, Rotary(pairing=pairing), implementation="webgpu")

    def loss(q, k):
        q, k = rotated(q, k)
        return jnp.sum((q * q_cotangent).astype(jnp.float32)) + jnp.sum((k * k_cotangent).astype(jnp.float32))

    for x, y in zip((q, k), jax.jit(rotated)(q, k), strict=True):
        oracle.assert_exact(y, oracle.rotate(x, FAR, pairing=pairing), x, pairing)
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k)
    for cotangent, gradient in zip((q_cotangent, k_cotangent), gradients, strict=True):
        exact = oracle.rotate(cotangent, FAR, pairing=pairing, direction=-1)
        oracle.assert_exact(gradient, exact, cotangent, pairing)
    print("exact")
"""

ON_DAWN = """
import wgpudawn
wgpudawn.install_as_wgpu()
import wgpu
import jax_rope
assert wgpu.GPUDevice is wgpudawn.GPUDevice
print(jax_rope.adapters()[0])
"""


def run(arguments: list[str], drivers: str) -> str:
    """What a process prints to which these Vulkan drivers are all there are."""
    apart = ("XLA_FLAGS", "VK_DRIVER_FILES", "WGPU_BACKEND_TYPE", "WGPUPY_WGPU_ADAPTER_NAME", "JAX_ROPE_ADAPTER")
    environment = {name: value for name, value in os.environ.items() if name not in apart}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "VK_ICD_FILENAMES": drivers, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(params=ADAPTERS)
def adapter(request) -> tuple[str, str, str]:
    return ADAPTERS[request.param]


@pytest.mark.slow
def test_the_contract_holds(adapter):
    """The core of the numerical suite."""
    drivers, name, backend = adapter
    found = json.loads(run(["-m", "jax_rope", "check", "--quick", "--json"], drivers))
    (checked,) = found["adapters"]
    assert name in checked["name"]
    assert (checked["backend"], checked["kind"]) == (backend, "software")
    assert [case for case in checked["cases"] if not case["passed"]] == []
    assert found["passed"] and checked["passed"]
    assert {case["topic"] for case in checked["cases"]} == TOPICS
    assert len(checked["cases"]) > 300


def test_gradients_are_exact(adapter):
    """From `jax.grad` through `rope_qk`, at positions across int32."""
    drivers, name, backend = adapter
    printed = run(["-c", f"import jax_rope; print(jax_rope.adapters()[0]){GRADIENTS}"], drivers).splitlines()
    assert name in printed[0] and printed[0].endswith(f"(software, {backend})")
    assert printed[1:] == ["exact"] * 4


def test_dawn():
    """The same kernels and host code on the other implementation of WebGPU, whose compiler is another too."""
    printed = run(["-c", ON_DAWN + GRADIENTS], ADAPTERS["SwiftShader"][0]).splitlines()
    assert "SwiftShader" in printed[0] and printed[0].endswith("(software, Vulkan)")
    assert printed[1:] == ["exact"] * 4
