"""Shapes, strides, axis orders, windows and sizes, each against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope, rope_qk

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def draw(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("head_dim", [2, 4, 6, 18, 36, 72, 80, 96, 256])
def test_head_dims(implementation, head_dim, pairing, dtype, rng):
    x = draw(rng, (2, 5, 3, head_dim), dtype)
    y = rope(x, 1000, Rotary(pairing=pairing), implementation=implementation)
    positions = np.broadcast_to(1000 + np.arange(5), (2, 5))
    oracle.assert_exact(y, oracle.rotate(x, positions, pairing=pairing), x, pairing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("head_dim", "start", "rotary_dim"),
    [(64, 0, 32), (64, 32, 32), (64, 32, None), (192, 128, 64), (40, 8, 16), (9, 1, 6), (7, 3, 4), (10, 2, 2)],
)
def test_windows(implementation, head_dim, start, rotary_dim, pairing, dtype, rng):
    """The exponent's denominator and the pairs' distance are the window's, and the rest passes through bit for bit."""
    x = draw(rng, (2, 3, 4, head_dim), dtype)
    rotary = Rotary(pairing=pairing, start=start, rotary_dim=rotary_dim)
    y = rope(x, 77, rotary, implementation=implementation)
    window = {"pairing": pairing, "rotary_dim": rotary_dim, "start": start}
    positions = np.broadcast_to(77 + np.arange(3), (2, 3))
    oracle.assert_exact(y, oracle.rotate(x, positions, **window), x, **window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("head_dim", [6, 32])
def test_axis_orders_agree(implementation, head_dim, pairing, dtype, rng):
    x = draw(rng, (3, 7, 9, head_dim), dtype)
    positions = rng.integers(0, 1000, (3, 7))
    rotary = Rotary(pairing=pairing)
    y = rope(x, positions, rotary, implementation=implementation)
    z = rope(jnp.swapaxes(x, 1, 2), positions, rotary, seq_axis=-2, implementation=implementation)
    np.testing.assert_array_equal(oracle.bits(jnp.swapaxes(z, 1, 2)), oracle.bits(y))
    same = rope(x, positions, rotary, seq_axis=1, implementation=implementation)
    np.testing.assert_array_equal(oracle.bits(same), oracle.bits(y))


@pytest.mark.parametrize("seq_axis", [-3, -2])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(4, 4), (9, 3), (32, 8), (8, 1), (1, 1), (71, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_queries(implementation, q_heads, k_heads, seq_axis, dtype, rng):
    """K has its own number of heads (microsoft/onnxruntime PR#28501, linkedin/Liger-Kernel#342)."""
    q, k = draw(rng, (2, 3, q_heads, 16), dtype), draw(rng, (2, 3, k_heads, 16), dtype)
    positions = np.broadcast_to(5 + np.arange(3), (2, 3))
    arguments = (q, k) if seq_axis == -3 else (jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2))
    results = rope_qk(*arguments, 5, seq_axis=seq_axis, implementation=implementation)
    for x, y in zip((q, k), results, strict=True):
        y = y if seq_axis == -3 else jnp.swapaxes(y, 1, 2)
        oracle.assert_exact(y, oracle.rotate(x, positions), x)


@pytest.mark.parametrize("shape", [(7200, 1, 1, 4), (1, 70_000, 1, 2), (2, 33_000, 3, 2), (70_000, 1, 1, 2)])
@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_large_extents(implementation, shape, seq_axis, rng):
    """More than 65 535 along an axis, or in a dispatch (microsoft/onnxruntime PR#20204)."""
    x = draw(rng, shape)
    arranged = x if seq_axis == -3 else jnp.swapaxes(x, 1, 2)
    y = rope(arranged, seq_axis=seq_axis, implementation=implementation)
    y = y if seq_axis == -3 else jnp.swapaxes(y, 1, 2)
    positions = np.broadcast_to(np.arange(shape[1]), shape[:2])
    oracle.assert_exact(y, oracle.rotate(x, positions), x)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8)])
@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_empty(implementation, shape, seq_axis):
    x = jnp.zeros(shape, jnp.bfloat16)
    y, vjp = jax.vjp(lambda x: rope(x, seq_axis=seq_axis, implementation=implementation), x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert vjp(y)[0].shape == x.shape
    z = jnp.ones((*shape[:-2], 3, shape[-1]), jnp.bfloat16)
    if seq_axis == -3:
        assert rope_qk(x, z, implementation=implementation)[1].shape == z.shape


@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_more_than_a_binding_holds(implementation, seq_axis, rng):
    """137 MB, beyond the 128 MiB that some adapters bind at once."""
    shape = (1, 2100, 128, 128)
    x = jnp.asarray(rng.random(shape, np.float32))
    arranged = x if seq_axis == -3 else jnp.swapaxes(x, 1, 2)
    y = rope(arranged, 50, seq_axis=seq_axis, implementation=implementation)
    y = np.asarray(y if seq_axis == -3 else jnp.swapaxes(y, 1, 2))
    for tokens in (slice(0, 3), slice(1000, 1003), slice(2040, 2060), slice(2097, 2100)):
        expected = oracle.rotate(x[:, tokens], 50 + np.arange(2100)[None, tokens])
        oracle.assert_exact(y[:, tokens], expected, x[:, tokens])


def test_transposed_and_sliced_operands(implementation, rng):
    """ggml-org/llama.cpp#19292: what is not contiguous, worst with partial rotation."""
    base = draw(rng, (5, 2, 24, 4))
    x = jnp.transpose(base, (1, 0, 3, 2))[:, :, 1:3, 4:20]
    rotary = Rotary(rotary_dim=8, start=4)
    y = jax.jit(lambda x: rope(x, 9, rotary, implementation=implementation))(x)
    positions = np.broadcast_to(9 + np.arange(5), (2, 5))
    oracle.assert_exact(y, oracle.rotate(x, positions, rotary_dim=8, start=4), x, rotary_dim=8, start=4)
    view = np.asarray(base).transpose(1, 0, 3, 2)[:, ::2, 1:3, 4:20]
    y = rope(view, 9, rotary, implementation=implementation)
    expected = oracle.rotate(view, np.broadcast_to(9 + np.arange(3), (2, 3)), rotary_dim=8, start=4)
    oracle.assert_exact(y, expected, view, rotary_dim=8, start=4)


def test_pairings_are_permutations_of_one_another(implementation, rng):
    """Half pairing of the permuted head is the permuted interleaved result, exactly."""
    x = draw(rng, (4, 2, 32))
    order = np.concatenate([np.arange(0, 32, 2), np.arange(1, 32, 2)])
    interleaved = rope(x, 300, implementation=implementation)
    half = rope(x[..., order], 300, Rotary(pairing="half"), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(half), np.asarray(interleaved[..., order]))


def test_rows_do_not_depend_on_their_batch(implementation, rng):
    x = draw(rng, (4, 6, 2, 16))
    positions = rng.integers(0, 10**6, (4, 6))
    together = rope(x, positions, implementation=implementation)
    for row in range(4):
        alone = rope(x[row : row + 1], positions[row : row + 1], implementation=implementation)
        np.testing.assert_array_equal(np.asarray(together[row]), np.asarray(alone[0]))
