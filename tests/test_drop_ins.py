"""Drop-ins: against the libraries whose calls they take, or their published formulas, and against 40 digits far out."""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest

import jax_rope

FOLDER = Path(__file__).parent.parent / "examples" / "drop_in"
FAR = np.array([[0, 1_000_000, 123_456_789, 2**31 - 1], [-(2**31), 65_537, 16_777_217, 5]])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"drop_in_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(name: str) -> ModuleType:
    """A library that the test extra installs. Without it these tests are left out, but for CI, where they fail."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is not installed")


gemma, maxtext = load("gemma"), load("maxtext")


@pytest.fixture
def by(implementation):
    """The drop-ins have no argument for it."""
    jax_rope.configure(implementation=implementation)
    yield implementation
    jax_rope.configure(implementation=os.environ.get("JAX_ROPE_IMPLEMENTATION") or None)


@pytest.fixture
def lenient():
    """Libraries and published formulas count on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def draw(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def halves(x):
    x = np.asarray(x, np.float64)
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def exact(x, positions, omega):
    """float64, for x [..., S, H, D], positions [..., S] and omega, one mpf for each pair (i, i + D / 2)."""
    with mpmath.workdps(oracle.DIGITS):
        turned = [[mpmath.expj(int(p) * o) for o in omega] for p in np.asarray(positions).ravel()]
        z = np.array([[complex(e) for e in row] for row in turned])
    z = z.reshape(*np.shape(positions), 1, len(omega))
    x1, x2 = halves(x)
    y = (x1 + 1j * x2) * z
    return np.concatenate([y.real, y.imag], axis=-1)


def worst(actual, expected, x):
    """The largest error of a pair relative to its norm."""
    error, norm = (np.hypot(*halves(v)) for v in (np.asarray(actual, np.float64) - expected, x))
    return (error / norm).max()


def name_of(parameter):
    return getattr(parameter, "__name__", str(parameter))


CONTRACT = 4 * 2.0**-24


# gemma.py


def gemma_formula(x, positions, *, base_frequency, scale_factor=1.0, rope_proportion=1.0):
    """What Gemma's definition says: float32 angles over timescales, of which some are infinite."""
    pairs = x.shape[-1] // 2
    turning = int(rope_proportion * x.shape[-1] // 2)
    timescale = base_frequency ** (2 * jnp.arange(turning) / x.shape[-1])
    timescale = jnp.concatenate([timescale, jnp.full(pairs - turning, jnp.inf)])
    angles = positions[..., None, None] / timescale / scale_factor
    x1, x2 = x[..., :pairs], x[..., pairs:]
    c, s = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1).astype(x.dtype)


GEMMA = [
    {"base_frequency": 10_000},
    {"base_frequency": 1_000_000, "scale_factor": 8.0},
    {"base_frequency": 1_000_000, "rope_proportion": 0.25},
    {"base_frequency": 10_000, "scale_factor": 1.5, "rope_proportion": 0.3},
]


@pytest.mark.parametrize(
    ("dtype", "options"), [*((jnp.float32, options) for options in GEMMA), (jnp.bfloat16, GEMMA[3])], ids=name_of
)
def test_gemma_is_the_formula(by, lenient, options, dtype, rng):
    x, positions = draw(rng, (2, 9, 3, 16), dtype), jnp.asarray(rng.integers(0, 100, (2, 9)), jnp.int32)
    actual, expected = (f(x, positions, **options) for f in (gemma.apply_rope, gemma_formula))
    assert actual.dtype == expected.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=2e-5 if dtype == jnp.float32 else 2e-2
    )


@pytest.mark.parametrize("options", GEMMA, ids=str)
def test_gemma_far_out(by, options, rng):
    x = draw(rng, (2, 4, 3, 16))
    turning = int(options.get("rope_proportion", 1) * 8)
    with mpmath.workdps(oracle.DIGITS):
        base, scale = mpmath.mpf(options["base_frequency"]), mpmath.mpf(options.get("scale_factor", 1))
        omega = [base ** (-mpmath.mpf(i) / 8) / scale if i < turning else mpmath.mpf(0) for i in range(8)]
    expected = exact(x, FAR, omega)
    assert worst(gemma.apply_rope(x, FAR, **options), expected, x) <= CONTRACT
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        usual = gemma_formula(x, jnp.asarray(FAR), **options)
    assert worst(usual, expected, x) > 0.1


def test_gemma_signature(rng):
    x, positions = draw(rng, (1, 2, 1, 4)), jnp.arange(2)[None]
    with pytest.raises(ValueError, match=r"scale_factor must be >= 1.0, got 0.5"):
        gemma.apply_rope(x, positions, base_frequency=10_000, scale_factor=0.5)
    with pytest.raises(TypeError, match="base_frequency"):
        gemma.apply_rope(x, positions)
    with pytest.raises(TypeError, match="positional"):
        gemma.apply_rope(x, positions, 10_000)


# maxtext.py


def maxtext_tables(position, dims, max_timescale, min_timescale=1, factor=1.0, dtype=jnp.float32):
    timescale = min_timescale * (max_timescale / min_timescale) ** (2 * jnp.arange(dims // 2) / dims) * factor
    angles = position[:, :, None, None] / timescale
    return tuple(jnp.concatenate([f(angles)] * 2, axis=-1).astype(dtype) for f in (jnp.cos, jnp.sin))


def maxtext_formula(inputs, cos, sin):
    first, second = jnp.split(inputs, 2, axis=-1)
    return inputs * cos + jnp.concatenate([-second, first], axis=-1) * sin


@pytest.mark.parametrize(
    ("timescales", "dtype", "of_tables", "result"),
    [
        ((10_000,), jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        ((500_000, 1, 8.0), jnp.float32, jnp.float32, jnp.float32),
        ((1_000_000, 2, 1.0), jnp.bfloat16, jnp.float32, jnp.float32),
    ],
    ids=name_of,
)
def test_maxtext_is_the_formula(by, lenient, dtype, of_tables, result, timescales, rng):
    x, position = draw(rng, (2, 9, 3, 16), dtype), jnp.asarray(rng.integers(0, 100, (2, 9)), jnp.int32)
    theirs = maxtext_tables(position, 16, *timescales, dtype=of_tables)
    ours = maxtext.cos_sin(position, 16, *timescales, dtype=of_tables)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape == (2, 9, 1, 16) and a.dtype == b.dtype == of_tables
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5, rtol=2.0**-8)
    actual, expected = maxtext.apply_rotary(x, *theirs), maxtext_formula(x, *theirs)
    assert actual.dtype == expected.dtype == result
    tolerance = 2e-6 if result == jnp.float32 else 3e-2
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance)


def test_maxtext_far_out(by, rng):
    x = draw(rng, (2, 4, 3, 16))
    with mpmath.workdps(oracle.DIGITS):
        omega = [mpmath.mpf(10_000) ** (-mpmath.mpf(i) / 8) / 4 for i in range(8)]
    expected = exact(x, FAR, omega)
    tables = maxtext.cos_sin(FAR, 16, 10_000, rope_linear_scaling_factor=4.0)
    assert worst(maxtext.apply_rotary(x, *tables), expected, x) <= CONTRACT
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        usual = maxtext_formula(x, *maxtext_tables(jnp.asarray(FAR), 16, 10_000, factor=4.0))
    assert worst(usual, expected, x) > 0.1


def test_maxtext_gradient_and_refusals(by, rng):
    x, ct = draw(rng, (2, 4, 3, 16)), draw(rng, (2, 4, 3, 16))
    cos, sin = maxtext.cos_sin(FAR, 16, 10_000)
    _, vjp = jax.vjp(maxtext.apply_rotary, x, cos, sin)
    with jax.numpy_rank_promotion("allow"):
        _, expected = jax.vjp(maxtext_formula, x, cos, sin)
        for actual, theirs in zip(vjp(ct), expected(ct), strict=True):
            np.testing.assert_allclose(actual, theirs, atol=1e-5)
    with pytest.raises(ValueError, match=r"cos must be \[..., S, 1, H\].* got shape \(2, 4, 3, 16\)"):
        maxtext.apply_rotary(x, x, x)


# equinox_module.py


@pytest.fixture(scope="module")
def equinox():
    return library("equinox")


@pytest.fixture(scope="module")
def rotary_embedding(equinox):
    return load("equinox_module").RotaryPositionalEmbedding


def original(equinox, *arguments):
    """The original with an empty cache: it would take what another theta left there."""
    equinox.nn._embedding.internal_rope_embedding_cache.clear()
    return equinox.nn.RotaryPositionalEmbedding(*arguments)


@pytest.mark.parametrize(("theta", "dtype"), [((), jnp.bfloat16), ((500_000.0,), jnp.float32)])
def test_equinox_is_the_original(by, lenient, equinox, rotary_embedding, theta, dtype, rng):
    ours, theirs = rotary_embedding(16, *theta), original(equinox, 16, *theta)
    assert (ours.embedding_size, ours.theta, ours.dtype) == (theirs.embedding_size, theirs.theta, theirs.dtype)
    assert jax.tree.leaves(ours) == jax.tree.leaves(theirs) == []
    x = draw(rng, (40, 3, 16), dtype)
    actual, expected = (jax.vmap(module, in_axes=1, out_axes=1)(x) for module in (ours, theirs))
    assert actual.dtype == expected.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance)
    np.testing.assert_array_equal(ours(x[:, 0], key=jax.random.key(0)), actual[:, 0])
    np.testing.assert_array_equal(ours(x[7:, 0], jnp.int32(7)), actual[7:, 0])


def test_equinox_far_out(by, lenient, equinox, rotary_embedding, rng):
    length = 100_000
    x = draw(rng, (length, 8))
    expected = oracle.rotate(x[:, None], np.arange(length), pairing="half")[:, 0]
    assert worst(rotary_embedding(8)(x), expected, x) <= CONTRACT
    assert worst(original(equinox, 8)(x), expected, x) > 1000 * CONTRACT


def test_equinox_forgets_no_theta(by, rotary_embedding, rng):
    x = draw(rng, (9, 1, 16))
    for theta in (10_000.0, 500_000.0, 10_000.0):
        expected = oracle.rotate(x, np.arange(9), theta=theta, pairing="half")
        assert worst(rotary_embedding(16, theta)(x[:, 0])[:, None], expected, x) <= CONTRACT


def test_equinox_transformations_and_refusals(by, equinox, rotary_embedding, rng):
    module, x, ct = rotary_embedding(16), draw(rng, (9, 1, 16)), draw(rng, (9, 1, 16))

    @equinox.filter_jit
    def gradient(module, x):
        return jax.grad(lambda x: jnp.vdot(module(x), ct[:, 0]))(x)

    expected = oracle.rotate(ct, np.arange(9), pairing="half", direction=-1)
    assert worst(gradient(module, x[:, 0])[:, None], expected, ct) <= CONTRACT
    for size in (7, -2):
        for cls in (rotary_embedding, equinox.nn.RotaryPositionalEmbedding):
            with pytest.raises(ValueError, match="`embedding_size` must"):
                cls(size)
    for module in (rotary_embedding(8), equinox.nn.RotaryPositionalEmbedding(8)):
        with pytest.raises(ValueError, match="embedding_size"):
            module(x[:, 0])


# flax_module.py


@pytest.fixture(scope="module")
def nnx():
    return library("flax.nnx")


@pytest.fixture(scope="module")
def flax_module(nnx):
    return load("flax_module")


def test_flax_module(by, nnx, flax_module, rng):
    module = flax_module.RotaryEmbedding(theta=500_000.0, pairing="half", rngs=nnx.Rngs(0))
    assert jax.tree.leaves(nnx.state(module)) == []
    q, k = draw(rng, (2, 4, 4, 16)), draw(rng, (2, 4, 2, 16))
    rotated = nnx.jit(lambda module, q, k, positions: module(q, k, positions))(module, q, k, FAR)
    for actual, x in zip(rotated, (q, k), strict=True):
        assert worst(actual, oracle.rotate(x, FAR, theta=5e5, pairing="half"), x) <= CONTRACT
    step = module(q[:, :1], k[:, :1], jnp.int32(1_000_000))[1]
    positions = np.full((2, 1), 1_000_000)
    assert worst(step, oracle.rotate(k[:, :1], positions, theta=5e5, pairing="half"), k[:, :1]) <= CONTRACT


def test_attention_of_flax(by, lenient, nnx, flax_module, rng):
    """Its output and the gradients of its weights are those of the formula written out."""
    rotary = flax_module.RotaryEmbedding(pairing="half")
    layer = nnx.MultiHeadAttention(
        num_heads=4, in_features=32, decode=False, attention_fn=rotary.attention, rngs=nnx.Rngs(0)
    )
    x, ct = draw(rng, (2, 7, 32)), draw(rng, (2, 7, 32))
    cos, sin = (np.tile(t, 2)[None, :, None] for t in oracle.cos_sin(1e4, 8, np.arange(7)))
    cos, sin = jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)

    def formula(query, key, value, **_):
        query, key = maxtext_formula(query, cos, sin), maxtext_formula(key, cos, sin)
        scores = jnp.einsum("bshd,bthd->bhst", query, key) / np.sqrt(8)
        weights = jax.nn.softmax(jnp.where(np.tri(7, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhst,bthd->bshd", weights, value)

    @nnx.jit
    def loss_and_gradient(layer):
        return nnx.value_and_grad(lambda layer: jnp.vdot(layer(x, is_causal=True), ct))(layer)

    ours, gradient = loss_and_gradient(layer)
    layer.attention_fn = formula
    expected, expected_gradient = nnx.value_and_grad(lambda layer: jnp.vdot(layer(x), ct))(layer)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    leaves = list(map(jax.tree.leaves, (gradient, expected_gradient)))
    assert len(leaves[0]) == 8  # four weights and biases
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    layer.attention_fn = nnx.dot_product_attention
    assert abs(float(jnp.vdot(layer(x, is_causal=True), ct)) - float(ours)) > 0.01  # the rotation matters


def test_attention_of_flax_refuses_its_cache(nnx, flax_module, lenient):
    rotary = flax_module.RotaryEmbedding()
    layer = nnx.MultiHeadAttention(
        num_heads=4, in_features=32, decode=True, attention_fn=rotary.attention, rngs=nnx.Rngs(0)
    )
    layer.init_cache((2, 7, 32))
    with pytest.raises(ValueError, match="as long as each other, got 1 and 7 tokens"):
        layer(jnp.ones((2, 1, 32)))
