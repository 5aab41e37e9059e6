"""Settings of every test: no implicit promotion of dtypes or ranks, no warning unnoticed, an adapter or failure."""

import os

import numpy as np
import pytest

# Two CPU devices, for the tests of sharding. It has to be said before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(params=["jnp", "webgpu"])
def implementation(request) -> str:
    """Both implementations. Without an adapter ``"webgpu"`` fails: it is never skipped."""
    return request.param


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compiled.append(event) if event.endswith("/backend_compile_duration") else None
)


@pytest.fixture
def compilations():
    """How many programs XLA has compiled so far."""
    assert jax.jit(lambda: 0)() == 0 and _compiled, "JAX does not report compilations by this name any more"
    return lambda: len(_compiled)
