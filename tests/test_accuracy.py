"""The accuracy contract, forward and gradient, at positions across all of int32, against 40 digits."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope

FAR = np.array([0, 1, 4095, 131_071, 10_000_000, 2**31 - 1, -1, -(2**31)])


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_contract(implementation, dtype, pairing, head_dim, theta, rng):
    x = jnp.asarray(rng.standard_normal((len(FAR), 3, head_dim)), dtype)
    cotangent = jnp.asarray(rng.standard_normal(x.shape), dtype)
    rotary = Rotary(theta=theta, pairing=pairing)
    y, vjp = jax.vjp(lambda x: rope(x, FAR, rotary, implementation=implementation), x)
    (x_cotangent,) = vjp(cotangent)
    oracle.assert_exact(y, oracle.rotate(x, FAR, theta, pairing), x, pairing)
    oracle.assert_exact(x_cotangent, oracle.rotate(cotangent, FAR, theta, pairing, direction=-1), cotangent, pairing)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_every_quadrant_and_magnitude(implementation, pairing, dtype, rng):
    """Many positions, angles near all multiples of a quarter turn, elements of very different sizes."""
    positions = np.concatenate([np.arange(500), rng.integers(-(10**5), 10**5, 1500)])
    x = rng.standard_normal((2000, 1, 64)) * 2.0 ** rng.integers(-10, 10, (2000, 1, 64))
    x = jnp.asarray(x, dtype)
    y = rope(x, positions, Rotary(pairing=pairing), implementation=implementation)
    oracle.assert_exact(y, oracle.rotate(x, positions, pairing=pairing), x, pairing)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 6])
def test_position_zero_is_the_identity_bit_for_bit(implementation, head_dim, dtype, rng):
    x = np.asarray(jnp.asarray(rng.standard_normal((1, 2, head_dim)), dtype)).copy()
    x[0, 0, :6] = np.array([-0.0, -1.0, np.inf, 1.0, np.nan, -np.inf], x.dtype)
    y = rope(x, 0, implementation=implementation)
    np.testing.assert_array_equal(oracle.bits(y), oracle.bits(x))


@pytest.mark.parametrize(
    ("dtype", "payload"), [(jnp.bfloat16, 0x7F81), (jnp.float16, 0xFC01), (jnp.float32, 0x7F800001)]
)
def test_what_passes_through_keeps_a_nan_as_it_is(implementation, dtype, payload):
    """And so does position 0."""
    words = np.full((1, 4, 2, 8), payload, np.uint32 if dtype == jnp.float32 else np.uint16)
    x = words.view(dtype)
    for rotary in (Rotary(rotary_dim=4), Rotary(rotary_dim=2, start=3)):
        y = np.asarray(rope(x, 1, rotary, implementation=implementation))
        outside = [i for i in range(8) if not rotary.start <= i < rotary.start + rotary.rotary_dim]
        np.testing.assert_array_equal(oracle.bits(y[..., outside]), words[..., outside])
    y = rope(x[:, :1], 0, implementation=implementation)
    np.testing.assert_array_equal(oracle.bits(y), words[:, :1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 6])
def test_nan_and_infinity_stay_in_their_pair(implementation, head_dim, dtype, rng):
    x = np.asarray(jnp.asarray(rng.standard_normal((3, 1, head_dim)), dtype)).copy()
    clean = np.asarray(rope(x, 5, implementation=implementation))
    x[1, 0, 2] = np.nan
    x[2, 0, 5] = np.inf
    y = np.asarray(rope(x, 5, implementation=implementation))
    touched = np.zeros(x.shape, bool)
    touched[1, 0, 2:4] = touched[2, 0, 4:6] = True
    assert not np.isfinite(y[touched].astype(np.float32)).any()
    np.testing.assert_array_equal(oracle.bits(y[~touched]), oracle.bits(clean[~touched]))


def test_float64(x64, rng):
    x = jnp.asarray(rng.standard_normal((len(FAR), 2, 64)))
    assert x.dtype == jnp.float64
    y = rope(x, FAR, implementation="jnp")
    # The phase is exact to 2**-64 turn, and F's rounding times 2**31 to 2**-34 turn.
    np.testing.assert_allclose(np.asarray(y), oracle.rotate(x, FAR), rtol=0, atol=4e-9)
    near = np.arange(len(FAR))
    np.testing.assert_allclose(
        np.asarray(rope(x, near, implementation="jnp")), oracle.rotate(x, near), rtol=0, atol=4e-15
    )


def test_a_rotation_keeps_the_norm_of_each_pair(implementation, rng):
    x = jnp.asarray(rng.standard_normal((64, 2, 32)), jnp.float32)
    y = np.asarray(rope(x, 2**31 - 64, implementation=implementation), np.float64).reshape(64, 2, 16, 2)
    norms = np.linalg.norm(np.asarray(x, np.float64).reshape(y.shape), axis=-1)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), norms, rtol=3e-7)


@pytest.mark.parametrize("offset", [0, 1_000_000, -(2**31), 2**31 - 200])
def test_scores_depend_on_relative_positions_only(implementation, offset, rng):
    """<R(m) q, R(n) k> is a function of m - n, here seen through float32 outputs."""
    q, k = jnp.asarray(rng.standard_normal((2, 1, 1, 64)), jnp.float32)
    near = rope_scores(q, k, 0, implementation)
    far = rope_scores(q, k, offset, implementation)
    np.testing.assert_allclose(far, near, atol=2e-5)


def rope_scores(q, k, offset, implementation):
    steps = np.arange(100)
    repeated = jnp.broadcast_to(k, (100, 1, 64))
    rotated_k = np.asarray(rope(repeated, offset + steps, implementation=implementation), np.float64)
    rotated_q = np.asarray(rope(q[None, 0], offset + 99, implementation=implementation), np.float64)
    return (rotated_k * rotated_q).sum(-1)


def test_known_answer(implementation):
    """d = 2, x = (1, 0): at position 1 it is (cos 1, sin 1)."""
    y = rope(jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]]), implementation=implementation)
    np.testing.assert_allclose(np.asarray(y[:, 0]), [[1, 0], [0.540302, 0.841471]], atol=5e-7)
    assert float(y[0, 0] @ y[1, 0]) == pytest.approx(0.540302, abs=5e-7)
