"""Every form of positions, against the oracle and against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import rope

B, S, H, D = 3, 5, 2, 16


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, S, H, D)), jnp.float32)


def check(x, positions_argument, positions, implementation, **options):
    y = rope(x, positions_argument, implementation=implementation, **options)
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(positions, x.shape[:-2])), x)


@pytest.mark.parametrize("offset", [0, 7, -3, 2**31 - S, np.int32(9), np.int64(-(2**31)), np.uint8(200)])
def test_offset(implementation, x, offset):
    check(x, offset, int(offset) + np.arange(S), implementation)


@pytest.mark.parametrize("offset", [0, 4096, -(2**31), 2**31 - S])
def test_traced_offset(implementation, x, offset):
    rotated = jax.jit(lambda x, offset: rope(x, offset, implementation=implementation))
    y = rotated(x, jnp.int32(offset))
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(offset + np.arange(S), (B, S))), x)


def test_an_offset_counts_past_int32(implementation, x):
    """The last tokens lie beyond int32. They are not taken for negative positions."""
    check(x, 2**31 - 2, 2**31 - 2 + np.arange(S), implementation)


def test_none_counts_from_zero(implementation, x):
    check(x, None, np.arange(S), implementation)


@pytest.mark.parametrize("shape", [(S,), (1, S), (B, S)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.int16])
def test_arrays(implementation, x, shape, dtype, rng):
    positions = rng.integers(0, 30_000, shape).astype(dtype)
    check(x, positions, positions, implementation)
    check(x, jnp.asarray(positions.astype(np.int32)), positions, implementation)


def test_leading_axes_broadcast(implementation, rng):
    x = jnp.asarray(rng.standard_normal((2, 3, S, H, D)), jnp.float32)
    for shape in [(2, 1, S), (1, 3, S), (3, S), (2, 3, S)]:
        positions = rng.integers(-1000, 1000, shape)
        check(x, positions, positions, implementation)


def test_packed_tokens(implementation, rng):
    x = jnp.asarray(rng.standard_normal((7, H, D)), jnp.float32)
    check(x, np.array([0, 1, 2, 0, 1, 0, 1]), np.array([0, 1, 2, 0, 1, 0, 1]), implementation)


def test_every_row_of_a_batch_with_one_token(implementation, rng):
    """ml-explore/mlx#3494, linkedin/Liger-Kernel PR#477: rows after the first."""
    x = jnp.asarray(rng.standard_normal((4, 1, H, D)), jnp.float32)
    positions = np.array([[3], [1000], [0], [77]])
    check(x, positions, positions, implementation)


def test_a_decode_step_equals_the_prefill_row(implementation, x):
    """keras-hub PR#1544: decoding that ignores the start."""
    prefill = rope(x, 100, implementation=implementation)
    step = rope(x[:, -1:], 100 + S - 1, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(prefill[:, -1:]), np.asarray(step))


def test_256_and_257_differ(implementation, rng):
    """keras-hub PR#1544: an offset kept in a half type."""
    x = jnp.asarray(rng.standard_normal((1, 1, D)), jnp.bfloat16)
    for offset in (256, 257):
        y = rope(x, offset, implementation=implementation)
        oracle.assert_exact(y, oracle.rotate(x, np.array([offset])), x)


@pytest.mark.parametrize("shape", [(), (S,), (B, S)])
@pytest.mark.parametrize("traced", [False, True])
def test_float_positions(implementation, x, shape, traced, rng):
    positions = np.asarray(rng.uniform(-3000, 3000, shape), np.float32)
    argument = jnp.asarray(positions) if traced else positions
    rotated = jax.jit(rope, static_argnames="implementation") if traced else rope
    y = rotated(x, argument, implementation=implementation)
    expected = positions.astype(np.float64)
    if shape == ():
        expected = expected + np.arange(S)
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(expected, (B, S))), x)


def test_python_float_offset(implementation, x):
    check(x, 0.25, 0.25 + np.arange(S), implementation)


def test_whole_floats_are_as_exact_as_integers(implementation, x):
    positions = np.array([0, 1, 2**24, 10_000_000, -(2**31)], np.float32)
    y = rope(x, positions, implementation=implementation)
    np.testing.assert_array_equal(
        np.asarray(y), np.asarray(rope(x, positions.astype(np.int64), implementation=implementation))
    )


def test_traced_floats_that_are_no_positions_give_nan(implementation, x):
    positions = jnp.array([0, jnp.nan, jnp.inf, 3e9, 1], jnp.float32)
    y = np.asarray(rope(x, positions, implementation=implementation))
    assert np.isnan(y[:, 1:4]).all()
    np.testing.assert_array_equal(y[:, 0], np.asarray(x[:, 0]))
    assert np.isfinite(y[:, 4]).all()


def test_inverse_undoes(implementation, x):
    y = rope(rope(x, 12_345, implementation=implementation), 12_345, inverse=True, implementation=implementation)
    np.testing.assert_allclose(np.asarray(y), np.asarray(x), atol=2e-6)


@pytest.mark.parametrize("positions", [np.array([[0, 1, 2, 3, 4]]), 11, None])
def test_inverse_is_the_opposite_rotation(implementation, x, positions):
    y = rope(x, positions, inverse=True, implementation=implementation)
    p = np.arange(S) if positions is None else positions if np.ndim(positions) else positions + np.arange(S)
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(p, (B, S)), direction=-1), x)
