"""The frequency rules: against golden values (tests of `from_hf` hold all of those), formulas written out here in 40
digits, far positions, and lengths."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope, rope_cached, scaling

mp = mpmath.mpf
PI = mpmath.pi


def omegas(theta, n):
    return [mp(theta) ** (-mp(i) / n) for i in range(n)]


def linear(rule, theta, n, length):
    return [w / mp(rule.factor) for w in omegas(theta, n)]


def dynamic(rule, theta, n, length):
    factor, original = mp(rule.factor), rule.original_max_position_embeddings
    if length > original:
        theta = mp(theta) * (factor * length / original - factor + 1) ** (mp(2 * n) / (2 * n - 2))
    return omegas(theta, n)


def yarn(rule, theta, n, length):
    def dim(turns):
        return 2 * n * mpmath.log(rule.original_max_position_embeddings / (turns * 2 * PI)) / (2 * mpmath.log(theta))

    low, high = dim(mp(rule.beta_fast)), dim(mp(rule.beta_slow))
    if rule.truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(n)]
    return [w / mp(rule.factor) * r + w * (1 - r) for w, r in zip(omegas(theta, n), ramps, strict=True)]


def longrope(rule, theta, n, length):
    factors = rule.long_factor if length > rule.original_max_position_embeddings else rule.short_factor
    return [w / mp(f) for w, f in zip(omegas(theta, n), factors, strict=True)]


def llama3(rule, theta, n, length):
    def scaled(w):
        wavelength = 2 * PI / w
        low = rule.original_max_position_embeddings / mp(rule.low_freq_factor)
        high = rule.original_max_position_embeddings / mp(rule.high_freq_factor)
        if wavelength < high:
            return w
        if wavelength > low:
            return w / mp(rule.factor)
        smooth = rule.original_max_position_embeddings / wavelength - mp(rule.low_freq_factor)
        smooth /= mp(rule.high_freq_factor) - mp(rule.low_freq_factor)
        return (1 - smooth) * w / mp(rule.factor) + smooth * w

    return [scaled(w) for w in omegas(theta, n)]


def proportional(rule, theta, n, length):
    return [w / mp(rule.factor) if i < int(rule.proportion * n) else mp(0) for i, w in enumerate(omegas(theta, n))]


LONG = scaling.LongRoPE(
    short_factor=tuple(1 + 0.01 * i for i in range(32)),
    long_factor=tuple(1 + 0.7 * i for i in range(32)),
    original_max_position_embeddings=4096,
    factor=32,
)
RULES = {
    "linear": (scaling.Linear(4), linear),
    "dynamic": (scaling.DynamicNTK(2.5, 2048), dynamic),
    "yarn": (scaling.YaRN(4, 4096), yarn),
    "yarn, not truncated": (scaling.YaRN(32, 4096, truncate=False, beta_fast=24, beta_slow=2), yarn),
    "yarn, clamped": (scaling.YaRN(4, 40), yarn),
    "longrope": (LONG, longrope),
    "llama3": (scaling.Llama3(8, 1, 4, 8192), llama3),
    "llama3.2": (scaling.Llama3(32, 1.5, 3, 4096), llama3),
    "proportional": (scaling.Proportional(0.25, 2), proportional),
}
NEAR_AND_FAR = np.array([1, 4096, 10**7, 2**31 - 1])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [100, 2048, 2049, 4096, 4097, 100_000])
def test_frequencies(name, length):
    """To the last of 64 bits of each pair's fraction of a turn."""
    rule, formula = RULES[name]
    rotary = Rotary(theta=500_000, scaling=rule)
    with mpmath.workdps(oracle.DIGITS):
        exact = formula(rule, 500_000, 32, length)
        turns = [int(mpmath.nint(w / (2 * PI) * 2**64)) for w in exact]
    np.testing.assert_allclose(rotary.inv_freq(64, length), [float(w) for w in exact], rtol=3e-16)
    table = rotary.table(64, length, inverse=False)
    assert [int(row[0]) << 32 | int(row[1]) for row in table] == turns


@pytest.mark.parametrize("name", RULES)
def test_far_positions(implementation, name, rng):
    """The accuracy contract holds for each rule, forward and gradient; the factor multiplies both."""
    rule, formula = RULES[name]
    rotary = Rotary(scaling=rule, pairing="half")
    factor = rotary.attention_factor(100_000)
    x, ct = (jnp.asarray(a, jnp.float32) for a in rng.standard_normal((2, 4, 2, 64)))
    y, vjp = jax.vjp(lambda x: rope(x, NEAR_AND_FAR, rotary, seq_len=100_000, implementation=implementation), x)
    with mpmath.workdps(oracle.DIGITS):
        angles = [[int(p) * w for w in formula(rule, 1e4, 32, 100_000)] for p in NEAR_AND_FAR]
        cos, sin = (np.array([[float(f(a)) for a in row] for row in angles]) for f in (mpmath.cos, mpmath.sin))
    for actual, taken, sign in ((y, x, 1), (vjp(ct)[0], ct, -1)):
        taken = np.asarray(taken, np.float64)
        x1, x2 = taken[..., :32], taken[..., 32:]
        c, s = factor * cos[:, None], sign * factor * sin[:, None]
        exact = np.concatenate([c * x1 - s * x2, s * x1 + c * x2], axis=-1)
        error = np.abs(np.asarray(actual, np.float64) - exact)
        error = np.hypot(error[..., :32], error[..., 32:])
        assert np.all(error <= 4 * 2.0**-24 * factor * np.hypot(x1, x2))


def test_attention_factors():
    """transformers' own numbers: an explicit factor wins and nothing is multiplied onto it."""
    assert scaling.YaRN(4, 32768).factor_on_attention(None) == pytest.approx(1.138629436111989, rel=1e-12)
    assert scaling.YaRN(32, 4096).factor_on_attention(None) == pytest.approx(1.3465735902799727, rel=1e-12)
    assert scaling.YaRN(16, 4096, attention_factor=1.0).factor_on_attention(None) == 1.0
    assert scaling.YaRN(16, 4096, attention_factor=0.7, mscale=2, mscale_all_dim=1).factor_on_attention(None) == 0.7
    assert scaling.YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0).factor_on_attention(None) == 1.0
    both = scaling.YaRN(40, 4096, mscale=1.0, mscale_all_dim=0.707).factor_on_attention(None)
    assert both == pytest.approx((0.1 * np.log(40) + 1) / (0.0707 * np.log(40) + 1), rel=1e-12)
    assert LONG.factor_on_attention(10) == pytest.approx(1.1902380714238083, rel=1e-12)
    moe = scaling.LongRoPE((1.0,), (2.0,), 4096, 32, short_mscale=1.25, long_mscale=1.5)
    assert (moe.factor_on_attention(4096), moe.factor_on_attention(4097)) == (1.25, 1.5)
    assert scaling.Llama3(8, 1, 4, 8192).factor_on_attention(None) == scaling.Linear(2).factor_on_attention(None) == 1.0


@pytest.mark.parametrize("positions", [None, 3, np.array([3, 0, 9, 5000, 12])])
@pytest.mark.parametrize("cached", [False, True])
def test_the_factor_forward_backward_and_undone(implementation, positions, cached, rng):
    """The transpose is not the inverse: the factor multiplies in both directions, and the inverse divides by it."""
    rotary = Rotary(scaling=scaling.YaRN(16, 64))
    factor = rotary.attention_factor()
    assert factor > 1.2
    x, ct = (jnp.asarray(a, jnp.float32) for a in rng.standard_normal((2, 5, 3, 16)))

    def f(x, inverse=False):
        if not cached:
            return rope(x, positions, rotary, inverse=inverse, implementation=implementation)
        taken = np.arange(5) + (positions or 0) if np.ndim(positions) == 0 else positions
        return rope_cached(x, *rotary.tables(taken, 16), inverse=inverse, implementation=implementation)

    y, vjp = jax.vjp(f, x)
    norm = np.linalg.norm
    np.testing.assert_allclose(norm(y), factor * norm(x), rtol=1e-6)
    np.testing.assert_allclose(norm(vjp(ct)[0]), factor * norm(ct), rtol=1e-6)
    np.testing.assert_allclose(np.vdot(ct, y), np.vdot(vjp(ct)[0], x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(f(y, inverse=True)), np.asarray(x), atol=1e-6)
    np.testing.assert_allclose(np.asarray(f(f(x, inverse=True))), np.asarray(x), atol=1e-6)


def test_without_a_length_a_row_is_within_the_original_one():
    for rotary in BY_LENGTH.values():
        np.testing.assert_array_equal(rotary.inv_freq(8), rotary.inv_freq(8, 16))
        assert (rotary.inv_freq(8, 17) != rotary.inv_freq(8)).any()
        assert rotary.attention_factor() == rotary.attention_factor(16)


def expected_at(rotary, x, positions, lengths):
    """Row by row with an explicit length, in float64."""
    rows = []
    for row, p, length in zip(np.asarray(x, np.float64), positions, lengths, strict=True):
        angles = np.asarray(p)[:, None, None] * rotary.inv_freq(x.shape[-1], int(length))
        factor = rotary.attention_factor(int(length))
        c, s = factor * np.cos(angles), factor * np.sin(angles)
        y = np.empty_like(row)
        y[..., 0::2] = c * row[..., 0::2] - s * row[..., 1::2]
        y[..., 1::2] = s * row[..., 0::2] + c * row[..., 1::2]
        rows.append(y)
    return np.stack(rows)


BY_LENGTH = {
    "dynamic": Rotary(scaling=scaling.DynamicNTK(4, 16)),
    "longrope": Rotary(
        scaling=scaling.LongRoPE((1.0, 1.5, 2.0, 2.5), (2.0, 4.0, 8.0, 16.0), 16, 4, long_mscale=1.5, short_mscale=1.25)
    ),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_lengths_are_each_rows_own(implementation, name, rng):
    """transformers#25306, unsloth PR#10681: a row's result depends neither on its batch nor on calls before. The
    switch comes above the original length, 16, not at it."""
    rotary = BY_LENGTH[name]
    x = jnp.asarray(rng.standard_normal((4, 3, 2, 8)), jnp.float32)
    last = np.array([15, 16, 14, 300])
    positions = last[:, None] - np.array([2, 1, 0])
    expected = expected_at(rotary, x, positions, last + 1)
    actual = rope(x, positions, rotary, implementation=implementation)
    np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-6)
    for row in range(4):
        alone = rope(x[row : row + 1], positions[row : row + 1], rotary, implementation=implementation)
        np.testing.assert_allclose(np.asarray(alone[0]), expected[row], atol=2e-6)
    given = rope(x, positions, rotary, seq_len=np.array([16, 17, 40, 9]), implementation=implementation)
    np.testing.assert_allclose(np.asarray(given), expected_at(rotary, x, positions, [16, 17, 40, 9]), atol=2e-6)
    one = rope(x, positions, rotary, seq_len=33, implementation=implementation)
    np.testing.assert_allclose(np.asarray(one), expected_at(rotary, x, positions, [33] * 4), atol=2e-6)


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("offset", [13, 14, None])
def test_lengths_from_offsets(implementation, name, offset, rng):
    rotary = BY_LENGTH[name]
    x = jnp.asarray(rng.standard_normal((2, 3, 2, 8)), jnp.float32)
    positions = (offset or 0) + np.broadcast_to(np.arange(3), (2, 3))
    expected = expected_at(rotary, x, positions, positions[:, -1] + 1)
    np.testing.assert_allclose(np.asarray(rope(x, offset, rotary, implementation=implementation)), expected, atol=2e-6)


def test_traced_positions_switch_longrope_row_by_row(implementation, compilations, rng):
    rotary = BY_LENGTH["longrope"]
    x = jnp.asarray(rng.standard_normal((4, 3, 2, 8)), jnp.float32)
    f = jax.jit(lambda x, p: rope(x, p, rotary, implementation=implementation))
    seen = []
    for last in ([15, 16, 14, 300], [2, 3, 2, 4]):
        positions = np.array(last)[:, None] - np.array([2, 1, 0])
        expected = expected_at(rotary, x, positions, np.array(last) + 1)
        np.testing.assert_allclose(np.asarray(f(x, positions.astype(np.int32))), expected, atol=2e-6)
        seen.append(compilations())
    assert seen[0] == seen[1]
    step = jax.jit(lambda x, offset: rope(x, offset, rotary, implementation=implementation))
    for offset in (13, 14):
        positions = offset + np.broadcast_to(np.arange(3), (4, 3))
        expected = expected_at(rotary, x, positions, positions[:, -1] + 1)
        np.testing.assert_allclose(np.asarray(step(x, offset)), expected, atol=2e-6)
    given = jax.jit(lambda x, n: rope(x, 0, rotary, seq_len=n, implementation=implementation))(
        x, jnp.array([16, 17, 1, 99])
    )
    expected = expected_at(rotary, x, np.broadcast_to(np.arange(3), (4, 3)), [16, 17, 1, 99])
    np.testing.assert_allclose(np.asarray(given), expected, atol=2e-6)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_an_empty_batch_with_lengths(implementation, name):
    x = jnp.zeros((0, 3, 2, 8))
    y = rope(x, np.zeros((0, 3), int), BY_LENGTH[name], seq_len=np.zeros(0, int), implementation=implementation)
    assert y.shape == x.shape


def test_traced_positions_and_dynamic_ntk():
    rotary = BY_LENGTH["dynamic"]
    x = jnp.zeros((3, 2, 8))
    with pytest.raises(ValueError, match="seq_len must be known while tracing for DynamicNTK, got one that is traced"):
        jax.make_jaxpr(lambda p: rope(x, p, rotary))(jnp.int32(3))
    jax.make_jaxpr(lambda p: rope(x, p, rotary, seq_len=50))(jnp.int32(3))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: scaling.Linear(0.5), ValueError, "factor must be at least 1, got 0.5"),
        (lambda: scaling.Linear("4"), TypeError, "factor must be a number, got '4'"),
        (lambda: scaling.Linear(float("inf")), ValueError, "factor must be finite, got inf"),
        (lambda: scaling.Linear(10**400), ValueError, r"factor must be finite, got 1.000e\+400"),
        (lambda: scaling.DynamicNTK(2, 0), ValueError, "original_max_position_embeddings must be at least 1, got 0"),
        (lambda: scaling.DynamicNTK(2, 0.5 + 1), TypeError, "original_max_position_embeddings must be an integer"),
        (
            lambda: scaling.YaRN(2, 64, beta_fast=1, beta_slow=2),
            ValueError,
            "beta_slow must be above 0 and at most beta_fast 1.0, got 2.0",
        ),
        (lambda: scaling.YaRN(2, 64, truncate=0), TypeError, "truncate must be True or False, got 0"),
        (lambda: scaling.LongRoPE((1.0,), (1.0, 2.0), 64), ValueError, "must be equally long, got 1 and 2"),
        (lambda: scaling.LongRoPE((0.0,), (1.0,), 64), ValueError, "short_factor must be above 0, got 0.0"),
        (lambda: scaling.LongRoPE((1.0, -1.0), (1.0, 1.0), 64), ValueError, "short_factor must be above 0, got -1.0"),
        (
            lambda: scaling.LongRoPE(1.0, (1.0,), 64),
            TypeError,
            "short_factor must be numbers, one for each pair, got 1.0",
        ),
        (lambda: scaling.LongRoPE(np.float32(2), (1.0,), 64), TypeError, "short_factor must be numbers, .* got 2.0"),
        (lambda: scaling.LongRoPE((1.0,), "1", 64), TypeError, "long_factor must be numbers, .* got '1'"),
        (lambda: scaling.LongRoPE((1.0,), (None,), 64), TypeError, "long_factor must be numbers, .* got None"),
        (lambda: scaling.LongRoPE((1.0,), (1.0,), 64, -3), ValueError, "factor must be above 0, got -3"),
        (lambda: scaling.LongRoPE((1.0,), (1.0,), 64, 0), ValueError, "factor must be above 0, got 0"),
        (
            lambda: scaling.LongRoPE((1.0,), (1.0,), 64, short_mscale=2),
            ValueError,
            "short_mscale and long_mscale must be given together, got 2.0 and None",
        ),
        (
            lambda: scaling.Llama3(8, 4, 1, 8192),
            ValueError,
            "low_freq_factor must be above 0 and below high_freq_factor 1.0, got 4.0",
        ),
        (lambda: scaling.Proportional(1.5), ValueError, "proportion must be from 0 to 1, got 1.5"),
        (lambda: scaling.Proportional(-1), ValueError, "proportion must be from 0 to 1, got -1.0"),
        (lambda: Rotary(scaling="yarn"), TypeError, "scaling must be a rule .* got 'yarn'"),
        (lambda: BY_LENGTH["longrope"].inv_freq(16, 5), ValueError, "must have 8 entries, got 4"),
        (
            lambda: rope(jnp.zeros((2, 3, 1, 8)), seq_len=2.5),
            TypeError,
            "seq_len must be an integer or an array of integers, got 2.5",
        ),
        (
            lambda: rope(jnp.zeros((2, 3, 1, 8)), seq_len=[1, 2, 3]),
            ValueError,
            r"seq_len must .* batch \(2,\), got shape",
        ),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
