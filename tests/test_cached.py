"""rope_cached: the caller's own tables."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope, rope_cached, scaling

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def draw(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def tables(positions, rotary_dim):
    cos, sin = oracle.cos_sin(1e4, rotary_dim, positions)
    return jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("head_dim", [2, 6, 36, 64])
@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_against_the_oracle(implementation, seq_axis, head_dim, pairing, dtype, rng):
    """Forward and gradient, tables for each row, a window of the head; far positions."""
    positions = rng.integers(0, 2**31 - 1, (2, 5))
    x, ct = draw(rng, (2, 5, 3, head_dim + 4), dtype), draw(rng, (2, 5, 3, head_dim + 4), dtype)
    cos, sin = tables(positions, head_dim)

    def f(x):
        x = x if seq_axis == -3 else jnp.swapaxes(x, 1, 2)
        y = rope_cached(x, cos, sin, pairing=pairing, seq_axis=seq_axis, implementation=implementation)
        return y if seq_axis == -3 else jnp.swapaxes(y, 1, 2)

    y, vjp = jax.vjp(f, x)
    window = {"pairing": pairing, "rotary_dim": head_dim}
    oracle.assert_exact(y, oracle.rotate(x, positions, **window), x, **window)
    oracle.assert_exact(vjp(ct)[0], oracle.rotate(ct, positions, direction=-1, **window), ct, **window)


@pytest.mark.parametrize("lead", [(), (1,), (2,)])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_full_width(implementation, lead, pairing, rng):
    """Hugging Face concatenates (half pairing), others repeat (interleaved). Every row of the batch has its own
    (linkedin/Liger-Kernel PR#477)."""
    positions = rng.integers(0, 1000, (*lead, 5))
    x = draw(rng, (2, 5, 3, 16))
    widen = (
        (lambda t: jnp.repeat(t, 2, axis=-1)) if pairing == "interleaved" else (lambda t: jnp.concatenate([t, t], -1))
    )
    cos, sin = map(widen, tables(positions, 16))
    y = rope_cached(x, cos, sin, pairing=pairing, implementation=implementation)
    expected = oracle.rotate(x, np.broadcast_to(positions, (2, 5)), pairing=pairing)
    oracle.assert_exact(y, expected, x, pairing)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_halves_that_differ(implementation, pairing, rng):
    """An entry for each element means just that: x * cos + rotate_half(x) * sin, its transpose and its inverse."""
    x, ct = draw(rng, (5, 2, 8)), draw(rng, (5, 2, 8))
    cos, sin = draw(rng, (5, 8)), draw(rng, (5, 8))
    first, second = oracle.pair_indices(pairing, 8)

    def formula(x, cos, sin):
        partner = np.zeros_like(x)
        partner[..., first], partner[..., second] = -x[..., second], x[..., first]
        return x * cos[:, None] + partner * sin[:, None]

    def f(x, **options):
        return rope_cached(x, cos, sin, pairing=pairing, implementation=implementation, **options)

    y, vjp = jax.vjp(f, x)
    np.testing.assert_allclose(np.asarray(y), formula(*(np.asarray(a, np.float64) for a in (x, cos, sin))), atol=1e-6)
    np.testing.assert_allclose(float(jnp.vdot(ct, y)), float(jnp.vdot(vjp(ct)[0], x)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(f(y, inverse=True)), np.asarray(x), atol=2e-4)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_of_the_tables(implementation, inverse, width, rng):
    """Of x, cos and sin together, first and mixed second derivatives, against jnp written out."""
    x, weights = draw(rng, (3, 2, 8)), draw(rng, (3, 2, 8))
    cos, sin = 1 + 0.3 * draw(rng, (3, width)), draw(rng, (3, width))

    def formula(x, cos, sin):
        c, s = (jnp.concatenate([t, t], -1)[:, :8] for t in (cos, sin))
        c1, c2, s1, s2 = c[:, None, :4], c[:, None, 4:], s[:, None, :4], s[:, None, 4:]
        x1, x2 = x[..., :4], x[..., 4:]
        if inverse:
            scale = 1 / (c1 * c2 + s1 * s2)
            return jnp.concatenate([(c2 * x1 + s1 * x2) * scale, (c1 * x2 - s2 * x1) * scale], axis=-1)
        return jnp.concatenate([c1 * x1 - s1 * x2, s2 * x1 + c2 * x2], axis=-1)

    def ours(x, cos, sin):
        return rope_cached(x, cos, sin, pairing="half", inverse=inverse, implementation=implementation)

    def loss(f):
        return lambda *arguments: jnp.sum(jnp.sin(f(*arguments)) * weights)

    def check(of, tolerance):
        actual, expected = of(loss(ours))(x, cos, sin), of(loss(formula))(x, cos, sin)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=1e-3), actual, expected)

    check(lambda f: jax.grad(f, (0, 1, 2)), 2e-4)
    check(lambda f: jax.jacrev(jax.grad(f, (0, 1)), (1, 2)), 5e-3)


def test_tables_of_a_rotary(implementation, rng):
    """rope_cached with Rotary.tables is rope, with a rule, sections, and rows of different lengths."""
    x = draw(rng, (2, 5, 3, 16))
    positions = rng.integers(0, 10**6, (2, 5))
    for rotary, p in (
        (Rotary(scaling=scaling.YaRN(8, 64), pairing="half"), positions),
        (Rotary(sections=(2, 3, 3)), rng.integers(0, 99, (3, 2, 5))),
        (Rotary(scaling=scaling.DynamicNTK(2, 500_000)), positions),
        (Rotary(rotary_dim=8), positions[0]),
        (Rotary(pairing="interleaved_to_half"), positions),
    ):
        cos, sin = rotary.tables(p, 16)
        assert cos.dtype == sin.dtype == jnp.float32
        assert cos.shape == sin.shape == (*p.shape[rotary.streams > 1 :], rotary.window(16) // 2)
        y = rope_cached(x, cos, sin, pairing=rotary.pairing, implementation=implementation)
        np.testing.assert_allclose(y, rope(x, p, rotary, implementation=implementation), atol=2e-6)


def test_position_zero_is_the_identity(implementation, rng):
    x = np.array(draw(rng, (1, 2, 8)))
    x[0, 0] = [-0.0, -1, np.inf, 1, np.nan, 2, 0, -np.inf]
    cos, sin = Rotary().tables(np.array([0]), 8)
    np.testing.assert_array_equal(oracle.bits(rope_cached(x, cos, sin, implementation=implementation)), oracle.bits(x))


def test_vmap_over_tables(implementation, rng):
    x, positions = draw(rng, (4, 5, 3, 16)), rng.integers(0, 999, (4, 5))
    cos, sin = tables(positions, 16)
    f = jax.vmap(lambda x, c, s: rope_cached(x, c, s, implementation=implementation), in_axes=(0, 0, 0))
    oracle.assert_exact(f(x, cos, sin), oracle.rotate(x, positions), x)
    shared = jax.vmap(lambda c, s: rope_cached(x[0], c, s, implementation=implementation))
    rows = jnp.broadcast_to(x[0], x.shape)
    oracle.assert_exact(shared(cos, sin), oracle.rotate(rows, positions), rows)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cos": jnp.ones((4, 4))}, ValueError, r"cos must be .* a row for each token, .* got shape \(4, 4\) .* S = 5"),
        ({"sin": jnp.ones((6, 4))}, ValueError, r"sin must be .* got shape \(6, 4\)"),
        ({"cos": jnp.ones((3, 5, 4))}, ValueError, r"cos must be .* got shape \(3, 5, 4\) for batch \(2,\)"),
        ({"cos": jnp.ones(4)}, ValueError, "cos must be"),
        ({"cos": jnp.ones((5, 3))}, ValueError, "cos and sin must be equally wide, got 3 and 4"),
        (
            {"cos": jnp.ones((5, 6)), "sin": jnp.ones((5, 6))},
            ValueError,
            "cos and sin must be 1 to 4 wide, half of head_dim, or 8, got 6",
        ),
        (
            {"x": jnp.ones((2, 5, 1, 7)), "cos": jnp.ones((5, 7)), "sin": jnp.ones((5, 7))},
            ValueError,
            "cos and sin must be 1 to 3 wide, half of head_dim, got 7",
        ),
        ({"x": jnp.ones((2, 5, 1, 1))}, ValueError, "head_dim must be at least 2, got 1"),
        ({"cos": jnp.ones((5, 4), int)}, TypeError, "cos must be float32, bfloat16, float16 or float64, got int32"),
        ({"cos": None}, TypeError, "cos must be an array of float32, bfloat16, float16 or float64, got None"),
        ({"sin": "sin"}, TypeError, "sin must be an array of .* got 'sin'"),
        ({"pairing": "both"}, ValueError, "pairing must be one of"),
        ({"x": jnp.ones((5, 8))}, ValueError, "x must have at least 3 axes"),
        ({"inverse": None}, TypeError, "inverse must be True or False"),
        ({"implementation": "metal"}, ValueError, "implementation must be"),
    ],
)
def test_what_is_refused(arguments, error, message):
    complete = {"x": jnp.ones((2, 5, 1, 8)), "cos": jnp.ones((5, 4)), "sin": jnp.ones((5, 4)), **arguments}
    with pytest.raises(error, match=message):
        jax.make_jaxpr(lambda: rope_cached(**complete))()
