"""Bad input: one clear sentence that names the argument, while tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rope import Rotary, configure, rope, rope_qk
from jax_rope.webgpu import device

X = jnp.zeros((2, 5, 3, 8))


def traced(f, *arguments):
    """Nothing may run: the error has to come from tracing alone."""
    jax.make_jaxpr(f)(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": jnp.zeros((5, 8))}, ValueError, "x must have at least 3 axes"),
        ({"x": jnp.zeros((2, 5, 3, 8), jnp.int32)}, TypeError, "x must be float32, .* got int32"),
        ({"x": jnp.zeros((2, 5, 3, 8), bool)}, TypeError, "x must be float32, .* got bool"),
        ({"x": jnp.zeros((2, 5, 3, 8), jnp.complex64)}, TypeError, "x must be float32, .* got complex64"),
        ({"x": "x"}, TypeError, "x must be an array"),
        ({"x": None}, TypeError, "x must be an array"),
        ({"x": jnp.zeros((2, 5, 3, 7))}, ValueError, "rotary_dim .* even and above 0, got head_dim 7"),
        ({"rotary": Rotary(rotary_dim=10)}, ValueError, "rotary_dim 10 from start 0 on does not fit into head_dim 8"),
        ({"rotary": Rotary(rotary_dim=4, start=6)}, ValueError, "rotary_dim 4 from start 6 on does not fit"),
        ({"rotary": Rotary(start=8)}, ValueError, "head_dim 8 with start 8"),
        ({"rotary": 10_000.0}, TypeError, "rotary must be a Rotary, got float"),
        ({"positions": np.zeros((4,), int)}, ValueError, r"positions .* got shape \(4,\) .* S = 5"),
        ({"positions": np.zeros((3, 5), int)}, ValueError, r"positions .* got shape \(3, 5\) for batch \(2,\)"),
        ({"positions": np.zeros((2, 1), int)}, ValueError, r"positions .* got shape \(2, 1\)"),
        ({"positions": np.zeros((1, 2, 5), int)}, ValueError, r"positions .* got shape \(1, 2, 5\)"),
        ({"positions": np.zeros((5,), bool)}, TypeError, "positions must be integers, float32 or float64"),
        ({"positions": True}, TypeError, "positions must be integers, float32 or float64"),
        ({"positions": jnp.zeros((5,), jnp.bfloat16)}, TypeError, "positions .* merge positions above 256"),
        ({"positions": "far"}, TypeError, "positions must be integers"),
        ({"positions": 2**31}, ValueError, "positions must fit into int32, got 2147483648"),
        ({"positions": np.array([0, 1, 2, 3, 2**31])}, ValueError, "positions must fit into int32"),
        ({"positions": 1e10}, ValueError, "positions must fit into int32"),
        ({"positions": np.nan}, ValueError, "positions must be finite"),
        ({"seq_axis": -1}, ValueError, "seq_axis must be -3 .* got -1"),
        ({"seq_axis": 0}, ValueError, "seq_axis must be -3 .* got 0"),
        ({"inverse": 1}, TypeError, "inverse must be True or False"),
        ({"implementation": "cuda"}, ValueError, "implementation must be 'webgpu', 'jnp' or None, got 'cuda'"),
    ],
)
def test_rope(arguments, error, message):
    arguments = {"x": X, **arguments}
    with pytest.raises(error, match=message):
        traced(lambda: rope(arguments["x"], **{k: v for k, v in arguments.items() if k != "x"}))


def test_traced_unsigned_positions():
    """Which of them lie beyond int32 cannot be known."""
    with pytest.raises(TypeError, match="positions that are traced must be signed integers"):
        traced(lambda p: rope(X, p), jnp.zeros(5, jnp.uint32))


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (jnp.zeros((2, 5, 1, 8), jnp.bfloat16), TypeError, "q and k must have one dtype, got q float32 and k bfloat16"),
        (jnp.zeros((2, 5, 1, 6)), ValueError, "q and k may differ only in their number of heads"),
        (jnp.zeros((2, 4, 3, 8)), ValueError, "q and k may differ only in their number of heads"),
        (jnp.zeros((5, 3, 8)), ValueError, "q and k may differ only in their number of heads"),
        (jnp.zeros((2, 5, 3, 8), jnp.int8), TypeError, "k must be float32"),
    ],
)
def test_rope_qk(k, error, message):
    with pytest.raises(error, match=message):
        traced(lambda: rope_qk(X, k))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rotary_dim": 5}, ValueError, "rotary_dim must be even and above 0, got 5"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim must be even and above 0, got 0"),
        ({"rotary_dim": 4.0}, TypeError, "rotary_dim must be an integer"),
        ({"start": -1}, ValueError, "start must not be negative, got -1"),
        ({"start": None}, TypeError, "start must be an integer"),
        ({"pairing": "neox"}, ValueError, "pairing must be one of 'interleaved', 'half', got 'neox'"),
        ({"theta": 0}, ValueError, "theta must be a finite number above 0, got 0"),
        ({"theta": float("inf")}, ValueError, "theta must be a finite number above 0"),
        ({"theta": "10000"}, TypeError, "theta must be a number"),
    ],
)
def test_rotary(arguments, error, message):
    with pytest.raises(error, match=message):
        Rotary(**arguments)


def test_float64_on_webgpu(x64):
    x = jnp.zeros((5, 3, 8), jnp.float64)
    with pytest.raises(TypeError, match="'webgpu' takes float32, bfloat16 or float16, got float64"):
        traced(lambda: rope(x, implementation="webgpu"))


def test_numpy_float64_on_webgpu():
    """It would silently lose half of its digits."""
    with pytest.raises(TypeError, match="got float64"):
        rope(np.zeros((5, 3, 8)), implementation="webgpu")


def test_no_adapter(monkeypatch):
    monkeypatch.setattr(device, "_found", lambda: ())
    monkeypatch.setattr(device, "_devices", {})
    with pytest.raises(RuntimeError, match=r"no WebGPU adapter was found: install .* mesa-vulkan-drivers"):
        traced(lambda: rope(X, implementation="webgpu"))


def test_unknown_adapter():
    with pytest.raises(RuntimeError, match="no adapter matches 'voodoo'; found "):
        configure(adapter="voodoo")
    with pytest.raises(ValueError, match="implementation must be"):
        configure(implementation="cuda")
