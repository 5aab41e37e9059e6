"""Gradients: against jax.grad of an independent formula, finite differences, and algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

from jax_rope import Rotary, rope, rope_qk

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def formula(x, positions, pairing, theta=1e4):
    """The textbook rotation in float64 jnp, differentiated by JAX itself."""
    n = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(n) / n)[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = oracle.pair_indices(pairing, 2 * n)
    x1, x2 = x[..., first], x[..., second]
    return jnp.zeros_like(x).at[..., first].set(cos * x1 - sin * x2).at[..., second].set(sin * x1 + cos * x2)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_against_an_independent_formula(implementation, pairing, rng):
    x, weights = rng.standard_normal((2, 6, 3, 16))
    positions = np.arange(6) + 20

    def loss(rotated, weights):
        return jnp.sum(jnp.sin(rotated) * weights)

    ours = jax.grad(
        lambda x: loss(rope(x, 20, Rotary(pairing=pairing), implementation=implementation), jnp.float32(weights))
    )(jnp.float32(x))
    with jax.enable_x64(True):
        expected = jax.grad(lambda x: loss(formula(x, positions * 1.0, pairing), weights))(jnp.asarray(x))
        expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(ours), expected, atol=2e-6)


@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_finite_differences(implementation, seq_axis, rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 2, 8)), jnp.float32)
    rotary = Rotary(rotary_dim=4, start=2)

    def f(x):
        return jnp.sin(rope(x, 3, rotary, seq_axis=seq_axis, implementation=implementation))

    check_grads(f, (x,), order=2, modes=["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("inverse", [False, True])
def test_transpose_identity(implementation, inverse, pairing, dtype, rng):
    """<y, J x> = <J' y, x>, to the rounding of the dtype."""
    x, y = (jnp.asarray(a, dtype) for a in rng.standard_normal((2, 5, 4, 32)))
    out, vjp = jax.vjp(
        lambda x: rope(x, 900, Rotary(pairing=pairing), inverse=inverse, implementation=implementation), x
    )
    (back,) = vjp(y)
    assert back.dtype == dtype

    def inner(a, b):
        return float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))

    size = np.linalg.norm(np.asarray(x, np.float64)) * np.linalg.norm(np.asarray(y, np.float64))
    assert inner(y, out) == pytest.approx(inner(back, x), abs=float(jnp.finfo(dtype).eps) * size)


def test_the_gradient_of_q_and_k(implementation, rng):
    q, k = (jnp.asarray(rng.standard_normal((2, 5, h, 16)), jnp.bfloat16) for h in (6, 2))
    (q_out, k_out), vjp = jax.vjp(lambda q, k: rope_qk(q, k, 40, implementation=implementation), q, k)
    cotangents = vjp((q_out, k_out))
    positions = np.broadcast_to(40 + np.arange(5), (2, 5))
    for x, out, cotangent in zip((q, k), (q_out, k_out), cotangents, strict=True):
        oracle.assert_exact(cotangent, oracle.rotate(out, positions, direction=-1), out)
        assert cotangent.dtype == x.dtype


def test_the_gradient_of_q_alone(implementation, rng):
    q, k = (jnp.asarray(rng.standard_normal((5, h, 16)), jnp.float32) for h in (6, 2))
    grad = jax.grad(lambda q: rope_qk(q, k, 40, implementation=implementation)[0].sum())(q)
    ones = np.ones(q.shape, np.float32)
    oracle.assert_exact(grad, oracle.rotate(ones, 40 + np.arange(5), direction=-1), ones)


def test_passed_through_elements_have_the_cotangent_itself(implementation, rng):
    x, ct = (jnp.asarray(a, jnp.float16) for a in rng.standard_normal((2, 3, 2, 12)))
    _, vjp = jax.vjp(lambda x: rope(x, 8, Rotary(rotary_dim=4, start=4), implementation=implementation), x)
    np.testing.assert_array_equal(oracle.bits(vjp(ct)[0][..., :4]), oracle.bits(ct[..., :4]))
    np.testing.assert_array_equal(oracle.bits(vjp(ct)[0][..., 8:]), oracle.bits(ct[..., 8:]))


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_float_positions_have_a_gradient(implementation, pairing, rng):
    """Position 0 and whole positions included; first and second derivatives, mixed ones too."""
    x, weights = rng.standard_normal((2, 4, 3, 8))
    positions = np.array([0.0, 2.0, 0.3, -1.8])

    def loss(rotated, weights):
        return jnp.sum(jnp.sin(rotated) * weights)

    def ours(x, positions):
        rotated = rope(x, positions, Rotary(pairing=pairing), implementation=implementation)
        return loss(rotated, jnp.float32(weights))

    arguments = jnp.float32(x), jnp.float32(positions)
    gradients = jax.grad(ours, (0, 1))(*arguments)
    hessian = jax.jacrev(jax.grad(ours, (0, 1)), (0, 1))(*arguments)
    with jax.enable_x64(True):

        def theirs(x, positions):
            return loss(formula(x, positions, pairing), weights)

        arguments = jnp.asarray(x), jnp.asarray(positions)
        expected = jax.tree.map(np.asarray, jax.grad(theirs, (0, 1))(*arguments))
        expected_hessian = jax.tree.map(np.asarray, jax.jacrev(jax.grad(theirs, (0, 1)), (0, 1))(*arguments))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), hessian, expected_hessian)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_float_positions_in_every_dtype(implementation, dtype, rng):
    x, ct = (jnp.asarray(a, dtype) for a in rng.standard_normal((2, 4, 2, 8)))
    positions = jnp.float32([0.0, 2.0, 0.3, -1.8])
    _, vjp = jax.vjp(lambda x, p: rope(x, p, implementation=implementation), x, positions)
    x_cotangent, positions_cotangent = vjp(ct)
    assert (x_cotangent.dtype, positions_cotangent.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a).astype(np.float64)) for a in (x, positions, ct)]
        _, vjp = jax.vjp(lambda x, p: formula(x, p, "interleaved"), *wide[:2])
        expected = np.asarray(vjp(wide[2])[1])
    np.testing.assert_allclose(np.asarray(positions_cotangent), expected, atol=20 * float(jnp.finfo(dtype).eps))


def test_recomputation_is_not_corrupted(implementation, rng):
    """unslothai/unsloth#5001: the kernel works in place, on its own copy."""
    x = jnp.asarray(rng.standard_normal((4, 2, 16)), jnp.float32)
    before = np.asarray(x).copy()

    def f(x):
        return jnp.sum(rope(x, 3, implementation=implementation) ** 3)

    plain, checkpointed = jax.grad(f)(x), jax.grad(jax.checkpoint(f))(x)
    np.testing.assert_array_equal(np.asarray(x), before)
    np.testing.assert_allclose(np.asarray(plain), np.asarray(checkpointed), rtol=1e-6)


def test_training_curves_agree(rng):
    """A tiny transformer, thirty steps of gradient descent: the loss falls, and both implementations draw one curve."""
    tokens = jnp.asarray(rng.integers(0, 11, (4, 24)))
    tokens = tokens.at[:, 12:].set(tokens[:, :12])  # to be copied: position matters
    shapes = {"embed": (11, 32), "q": (32, 4, 8), "k": (32, 2, 8), "v": (32, 2, 8), "o": (4, 8, 32), "up": (32, 64)}
    start = {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    start["down"] = jnp.asarray(0.3 * rng.standard_normal((64, 32)), jnp.float32)

    def loss(params, implementation):
        x = params["embed"][tokens]
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[name]) for name in "qkv")
        q, k = rope_qk(q, k, implementation=implementation)
        x = x + jnp.einsum("bshe,hed->bsd", jax.nn.dot_product_attention(q, k, v, is_causal=True), params["o"])
        x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        scores = jax.nn.log_softmax(x[:, :-1] @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    def curve(implementation):
        step = jax.jit(jax.value_and_grad(lambda params: loss(params, implementation)))
        params, losses = start, []
        for _ in range(30):
            value, grads = step(params)
            losses.append(float(value))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return losses

    gpu, reference = curve("webgpu"), curve("jnp")
    assert reference[-1] < 0.7 * reference[0]
    np.testing.assert_allclose(gpu, reference, rtol=1e-4)
