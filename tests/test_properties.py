"""Properties of rotations over random calls: any shape, stride, dtype, position, window, rule and direction.

Most examples take the kernels' host path and one compiled ``jnp`` program for each of a few shapes: what the public
functions add, compilation, costs a hundred times as much as the rotation. JAX_ROPE_EXAMPLES=100 runs a hundred times as
many examples, and other ones each time.
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import assume, given, settings, strategies as st

from jax_rope import Rotary, fallback, reference, rope, rope_qk, scaling
from jax_rope.arguments import canonical, canonical_tables
from jax_rope.webgpu import offload

FACTOR = int(os.environ.get("JAX_ROPE_EXAMPLES", "1"))
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
IMPLEMENTATIONS = ("jnp", "webgpu")
UNIT = 2.0**-24
BOUND = 4 * UNIT  # of the accuracy contract, relative to a pair's norm
INT32 = np.iinfo(np.int32)

both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def examples(count: int):
    """The same examples in every run, unless there are to be more of them."""
    return settings(max_examples=count * FACTOR, derandomize=FACTOR == 1, deadline=None, database=None, print_blob=True)


# What a call is drawn from

edges = st.sampled_from(
    [0, 1, -1, 255, 256, 257, 710, 4095, 65_535, 131_071, 16_777_217, 103_993_000, INT32.max, INT32.min, INT32.min + 1]
)
whole_positions = edges | st.integers(INT32.min, INT32.max) | st.integers(-5000, 5000)
# Those that float32 has: JAX makes float32 of all others.
float_positions = whole_positions.map(lambda p: float(np.float32(min(p, 2**31 - 256)))) | st.floats(
    -(2.0**31), 2.0**31 - 256, width=32
)
seeds = st.integers(0, 2**32 - 1)
thetas = st.sampled_from([1e4, 5e5, 1e6, 100.0]) | st.floats(1.5, 1e9)


def draw_values(seed: int, shape: tuple[int, ...], dtype: np.dtype, spread: int = 6) -> np.ndarray:
    """Normally distributed, times powers of two."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(dtype)


@st.composite
def strided(draw, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values, perhaps as a view: with axes exchanged, backwards, or every other element of a larger array."""
    values = draw_values(draw(seeds), shape, dtype)
    how = draw(st.sampled_from(["contiguous", "exchanged", "backwards", "sparse", "inside"]))
    if how == "exchanged":
        axes = draw(st.permutations(range(len(shape))))
        return np.ascontiguousarray(values.transpose(axes)).transpose(np.argsort(axes))
    if how == "backwards":
        return np.ascontiguousarray(values[..., ::-1, ::-1])[..., ::-1, ::-1]
    if how in ("sparse", "inside"):
        step = 2 if how == "sparse" else 1
        larger = np.full([n * step + 3 for n in shape], np.nan, dtype)
        view = larger[tuple(slice(1, 1 + n * step, step) for n in shape)]
        view[...] = values
        return view
    return values


def rules(pairs: int) -> st.SearchStrategy:
    factors = st.lists(st.floats(1.0, 60.0), min_size=pairs, max_size=pairs).map(tuple)
    return st.one_of(
        st.none(),
        st.builds(scaling.Linear, st.floats(1.0, 50.0)),
        st.builds(scaling.DynamicNTK, st.floats(1.0, 8.0), st.integers(1, 5000)),
        st.builds(
            scaling.YaRN,
            st.floats(1.0, 64.0),
            st.integers(32, 40_000),
            truncate=st.booleans(),
            attention_factor=st.none() | st.floats(0.25, 4.0),
        ),
        st.builds(scaling.LongRoPE, factors, factors, st.integers(2, 5000), st.floats(1.0, 64.0)),
        st.builds(scaling.Llama3, st.floats(1.0, 64.0), st.just(1.0), st.floats(1.5, 8.0), st.integers(16, 40_000)),
        st.builds(scaling.Proportional, st.floats(0.0, 1.0), st.floats(1.0, 8.0)),
    )


@st.composite
def sections_of(draw, pairs: int) -> tuple[tuple[int, ...], str]:
    """How many pairs each of two to four streams has, and how they lie."""
    streams = draw(st.integers(2, 4))
    layout = draw(st.sampled_from(["contiguous", "axial", "interleaved"]))
    if layout == "interleaved":  # the first must be the longest
        others = [draw(st.integers(0, pairs // streams)) for _ in range(streams - 1)]
        return (pairs - sum(others), *others), layout
    cuts = sorted(draw(st.integers(0, pairs)) for _ in range(streams - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, pairs], strict=True)), layout


@st.composite
def rotaries(draw, pairs: int, start: int = 0, plain: bool = False) -> Rotary:
    """Of a window of this many pairs."""
    window = {
        "pairing": draw(st.sampled_from(["interleaved", "half", "interleaved_to_half"])),
        "rotary_dim": 2 * pairs,
        "start": start,
    }
    kind = "theta" if plain else draw(st.sampled_from(["theta", "rule", "sections", "freqs"]))
    if kind == "freqs":
        freqs = st.lists(st.floats(-3.0, 3.0), min_size=pairs, max_size=pairs)
        return Rotary(freqs=tuple(draw(freqs)), **window)
    if kind == "sections":
        sections, layout = draw(sections_of(pairs))
        return Rotary(draw(thetas), sections=sections, section_layout=layout, **window)
    return Rotary(draw(thetas), scaling=draw(rules(pairs)) if kind == "rule" else None, **window)


@st.composite
def positions_for(draw, batch: tuple[int, ...], length: int, rotary: Rotary):
    """Any form that the op takes: nothing, an offset, or an array that broadcasts to the batch."""
    streams = () if rotary.sections is None else (rotary.streams,)
    number = draw(st.sampled_from([whole_positions, float_positions]))
    form = draw(st.sampled_from(["none", "offset", "tokens", "rows"]))
    if form == "none":
        return None
    if form == "offset":
        return draw(number)
    lead = tuple(draw(st.sampled_from([1, n])) for n in batch) if form == "rows" else ()
    shape = (*streams, *lead, length)
    pool = draw(st.lists(number, min_size=1, max_size=6))
    values = np.random.default_rng(draw(seeds)).choice(np.array(pool), shape)
    if values.dtype == np.int64:
        return values.astype(draw(st.sampled_from([np.int64, np.int32])))
    return values.astype(draw(st.sampled_from([np.float64, np.float32])))


@st.composite
def calls(draw, plain: bool = False):
    """(xs, positions, rotary, options)."""
    dtype = draw(st.sampled_from(DTYPES))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    length = draw(st.integers(1, 9))
    heads = draw(st.sampled_from([(1,), (3,), (1, 1), (4, 2), (6, 1), (17,), (18, 3)]))
    # Multiples of four, of two and odd ones take different kernels.
    pairs = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 32]))
    start = draw(st.sampled_from([0, 0, 0, 1, 2, 4, 7, 8]))
    head_dim = start + 2 * pairs + draw(st.sampled_from([0, 0, 0, 1, 2, 4]))
    seq_axis = draw(st.sampled_from([-3, -2]))
    rotary = draw(rotaries(pairs, start, plain))
    xs = [
        draw(strided((*batch, length, h, head_dim) if seq_axis == -3 else (*batch, h, length, head_dim), dtype))
        for h in heads
    ]
    options = {"seq_axis": seq_axis, "inverse": draw(st.booleans())}
    positions = draw(positions_for(batch, length, rotary))
    # The length that follows from an offset between two integers depends on which of them it is rounded to.
    between = isinstance(positions, float) and not positions.is_integer()
    if rotary.depends_on_length and (between or draw(st.booleans())):
        options["seq_len"] = draw(st.integers(1, 10_000))
    return xs, positions, rotary, options


# What runs it


def moved(x: np.ndarray, rotary: Rotary, back: bool = False) -> np.ndarray:
    """A window's adjacent pairs as halves, or back."""
    i = rotary.start + np.arange(rotary.window(x.shape[-1]))
    order = np.concatenate((i[0::2], i[1::2]))
    y = x.copy()
    y[..., i if not back else order] = x[..., order if not back else i]
    return y


@functools.partial(jax.jit, static_argnums=0)
def in_jnp(layout, xs, angles):
    return fallback.rotate(layout, xs, angles)


def on_adapter(layout, xs, angles):
    fractions = None if angles.fractions is None else np.asarray(angles.fractions)
    return offload.rotate(layout, xs, np.asarray(angles.positions), np.asarray(angles.table), fractions)


def rotated(implementation, xs, positions=None, rotary=Rotary(), *, seq_axis=-3, seq_len=None, inverse=False, **way):
    """What the op makes of NumPy arrays, without a compilation for each call; ``transpose=True``: the gradient's."""
    transpose = way.pop("transpose", False)
    named = dict(zip("qk", map(jax.device_put, xs), strict=False))  # jnp.asarray compiles a copy for each shape
    layout, _, angles, written = canonical(named, positions, rotary, seq_axis, seq_len, inverse)
    before, after = layout.interleaved, written.interleaved
    if transpose:
        layout, before, after = layout.transpose(), after, before
    if before != after:  # turned as halves, either way
        layout = layout._replace(interleaved=False)
        xs = [moved(x, rotary) for x in xs] if before else xs
    ys = [np.asarray(y) for y in (in_jnp if implementation == "jnp" else on_adapter)(layout, xs, angles)]
    return [moved(y, rotary, back=True) for y in ys] if after and not before else ys


def doubles(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def pairs_of(values: np.ndarray, pairing: str) -> tuple[np.ndarray, np.ndarray]:
    first, second = oracle.pair_indices(pairing, values.shape[-1])
    return doubles(values)[..., first], doubles(values)[..., second]


def norms(values: np.ndarray, pairing: str = "interleaved") -> np.ndarray:
    return np.hypot(*pairs_of(values, pairing))


# One shape and one program for each dtype, direction and form of positions: any number of examples

SHAPE = (2, 5, 3, 24)  # rows, tokens, heads, elements


@st.composite
def same_shape(draw, dtypes=DTYPES, number=whole_positions):
    """(x, positions) of `SHAPE`."""
    x = draw_values(draw(seeds), SHAPE, draw(st.sampled_from(dtypes)))
    pool = np.array(draw(st.lists(number, min_size=1, max_size=6)))
    positions = np.random.default_rng(draw(seeds)).choice(pool, SHAPE[:2])
    return x, positions if positions.dtype == np.int64 else positions.astype(np.float32)


plain_rotaries = st.builds(Rotary, thetas, st.sampled_from(["interleaved", "half"]))
far = st.integers(-(2**30), 2**30)


@examples(600)
@given(call=calls(), transpose=st.booleans())
def test_kernels_are_exact_for_every_call(call, transpose):
    """Forward and gradient: any shape, stride, dtype, form of positions, window, rule, sections and direction."""
    xs, positions, rotary, options = call
    ys = rotated("webgpu", xs, positions, rotary, transpose=transpose, **options)
    for x, y in zip(xs, ys, strict=True):
        exact = reference.rotate(x, positions, rotary, transpose=transpose, **options)
        found = reference.compare(y, exact, x, rotary, inverse=options["inverse"], transpose=transpose)
        assert found.holds, found


@examples(100)
@given(call=calls(plain=True))
def test_kernels_and_the_reference_are_what_40_digits_say(call):
    """The reference of the other tests is the package's own: here nothing is."""
    xs, positions, rotary, options = call
    assume(rotary.pairing != "interleaved_to_half")
    window = {"pairing": rotary.pairing, "rotary_dim": rotary.rotary_dim, "start": rotary.start}
    ys = rotated("webgpu", xs, positions, rotary, **options)
    for x, y in zip(xs, ys, strict=True):
        swap = (lambda a: a) if options["seq_axis"] == -3 else (lambda a: np.swapaxes(a, -3, -2))
        tokens_first = swap(x)
        counted = np.arange(tokens_first.shape[-3])
        at = np.asarray((positions or 0) + counted if np.ndim(positions) == 0 else positions)
        at = np.broadcast_to(at, tokens_first.shape[:-2])
        direction = -1 if options["inverse"] else 1
        expected = oracle.rotate(tokens_first, at, rotary.theta, direction=direction, **window)
        oracle.assert_exact(swap(y), expected, tokens_first, **window)
        np.testing.assert_allclose(
            swap(reference.rotate(x, positions, rotary, **options)),
            expected,
            rtol=0,
            atol=2e-9 * np.abs(doubles(x)).max(initial=0),
        )


@st.composite
def calls_by_tables(draw):
    """(x, cos, sin, options), tables of a row for each token, of half or full width."""
    dtype, pairs = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 2, 3, 4, 6, 16]))
    full = draw(st.booleans())
    head_dim = 2 * pairs if full else 2 * pairs + draw(st.sampled_from([0, 0, 1, 2, 4]))
    # Few shapes of tables: XLA compiles what checks and inverts them.
    batch, length = draw(st.sampled_from([(), (2,), (3, 2)])), draw(st.sampled_from([1, 5]))
    x = draw(strided((*batch, length, draw(st.sampled_from([1, 3, 17])), head_dim), dtype))
    lead = draw(st.sampled_from([(), batch, (1,) * len(batch)]))
    cos, sin = draw_values(draw(seeds), (2, *lead, length, head_dim if full else pairs), np.dtype(np.float32), spread=2)
    return x, cos, sin, {"pairing": draw(st.sampled_from(["interleaved", "half"])), "inverse": draw(st.booleans())}


@examples(60)
@given(call=calls_by_tables(), transpose=st.booleans())
def test_kernels_are_exact_for_any_tables(call, transpose):
    """Of any numbers, turned or sheared, to the rounding of three operations; undone, to that of what undoing is."""
    x, cos, sin, options = call
    given = map(jax.device_put, (x, cos, sin))
    layout, _, tables, _ = canonical_tables(*given, options["pairing"], -3, options["inverse"])
    layout = layout.transpose() if transpose else layout
    (y,) = offload.rotate_by_tables(layout, [x], *map(np.asarray, tables))
    pairs = layout.pairs
    first, second = oracle.pair_indices(options["pairing"], 2 * pairs)
    # An entry for each pair, or for each element, which lies where the element does.
    entries = (first, second) if cos.shape[-1] > pairs else (slice(None), slice(None))
    (c, c2), (s, s2) = (tuple(doubles(t)[..., None, at] for at in entries) for t in (cos, sin))
    conditioned = 1.0
    if options["inverse"]:
        determinant = c * c2 + s * s2
        assume(np.abs(determinant).min() > 1e-3)
        conditioned = (np.abs(c * c2) + np.abs(s * s2)) / np.abs(determinant)
        c, s, c2, s2 = c2 / determinant, -s / determinant, c / determinant, -s2 / determinant
    if transpose:
        s, s2 = -s2, -s
    x1, x2 = doubles(x)[..., first], doubles(x)[..., second]
    slack = 0.0 if x.dtype.itemsize == 4 else float(ml_dtypes.finfo(x.dtype).eps)
    tiny = float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
    largest = float(ml_dtypes.finfo(x.dtype).max)
    for at, a, b in ((first, c * x1, -s * x2), (second, s2 * x1, c2 * x2)):
        bound = (4 + 8 * (conditioned if options["inverse"] else 0)) * UNIT * (np.abs(a) + np.abs(b))
        wrong = np.abs(doubles(y)[..., at] - (a + b)) > bound + slack * np.abs(a + b) + tiny
        assert not np.any(wrong & (np.abs(a + b) < 0.99 * largest))
    np.testing.assert_array_equal(oracle.bits(y[..., 2 * pairs :]), oracle.bits(x[..., 2 * pairs :]))


@examples(150)
@given(drawn=same_shape() | same_shape(number=float_positions), rotary=plain_rotaries, inverse=st.booleans())
def test_implementations_are_exact_alike(drawn, rotary, inverse):
    x, positions = drawn
    exact = reference.rotate(x, positions, rotary, inverse=inverse)
    for implementation in IMPLEMENTATIONS:
        (y,) = rotated(implementation, [x], positions, rotary, inverse=inverse)
        found = reference.compare(y, exact, x, rotary, inverse=inverse)
        assert found.holds, (implementation, found)


@both
@examples(60)
@given(drawn=same_shape(), rotary=plain_rotaries)
def test_the_norm_of_every_pair_is_kept(implementation, drawn, rotary):
    x, positions = drawn
    (y,) = rotated(implementation, [x], positions, rotary)
    before, after = norms(x, rotary.pairing), norms(y, rotary.pairing)
    bound = BOUND * before
    if x.dtype.itemsize == 2:  # and each element two units in the last place, of a subnormal at least
        info = ml_dtypes.finfo(x.dtype)
        bound = bound + 2 * float(info.eps) * before + 4 * float(info.smallest_subnormal)
    assert np.all(np.abs(after - before) <= bound)


@both
@examples(60)
@given(seed=seeds, near=far, distance=st.integers(0, 2**30 - 1), dtype=st.sampled_from(DTYPES), rotary=plain_rotaries)
def test_scores_depend_on_relative_positions_only(implementation, seed, near, distance, dtype, rotary):
    """<R(p) q, R(p + d) k> does not depend on p, bfloat16 included (KellerJordan/modded-nanogpt#39), to what the
    roundings of the four results allow."""
    x = draw_values(seed, SHAPE, dtype, spread=1)
    x[1] = x[0]
    positions = np.zeros(SHAPE[:2], np.int64)
    positions[:, 1:] = distance
    positions[1] += near
    (y,) = rotated(implementation, [x], positions, rotary)

    def scores(row):
        return (doubles(y[row, :1]) * doubles(y[row, 1:])).sum(-1)

    size = (norms(x[0, :1], rotary.pairing) * norms(x[0, 1:], rotary.pairing)).sum(-1)
    rounding = BOUND if dtype.itemsize == 4 else BOUND + 2 * float(ml_dtypes.finfo(dtype).eps)
    assert np.all(np.abs(scores(0) - scores(1)) <= 2 * (2 * rounding + rounding**2) * size + 1e-9)


@both
@examples(60)
@given(drawn=same_shape([DTYPES[0]]), rotary=st.builds(Rotary, thetas, scaling=rules(SHAPE[-1] // 2)))
def test_the_inverse_undoes(implementation, drawn, rotary):
    """The attention factor included."""
    x, positions = drawn
    options = {"seq_len": 3000}
    (y,) = rotated(implementation, [x], positions, rotary, **options)
    (z,) = rotated(implementation, [y], positions, rotary, inverse=True, **options)
    assert np.all(norms(doubles(z) - x) <= 2.01 * BOUND * norms(x))


@both
@examples(40)
@given(seed=seeds, dtype=st.sampled_from(DTYPES), theta=thetas, pool=st.lists(whole_positions, min_size=1, max_size=5))
@pytest.mark.parametrize("window", [{}, {"rotary_dim": 12, "start": 4}])
def test_pairings_are_permutations_of_one_another(implementation, seed, dtype, theta, pool, window):
    """Bit for bit, for each implementation."""
    x = draw_values(seed, SHAPE, dtype)
    positions = np.random.default_rng(seed).choice(pool, SHAPE[:2])
    made = functools.partial(Rotary, theta, **window)
    (interleaved,) = rotated(implementation, [x], positions, made(pairing="interleaved"))
    (half,) = rotated(implementation, [moved(x, made())], positions, made(pairing="half"))
    (crossed,) = rotated(implementation, [x], positions, made(pairing="interleaved_to_half"))
    np.testing.assert_array_equal(oracle.bits(half), oracle.bits(moved(interleaved, made())))
    np.testing.assert_array_equal(oracle.bits(crossed), oracle.bits(half))


@both
@examples(40)
@given(drawn=same_shape(), rotary=plain_rotaries, seed=seeds)
def test_rows_do_not_depend_on_one_another(implementation, drawn, rotary, seed):
    """Whatever else the other row holds, and without it."""
    x, positions = drawn
    (y,) = rotated(implementation, [x], positions, rotary)
    others, elsewhere = x.copy(), positions.copy()
    others[0] = np.nan if seed % 2 else draw_values(seed, SHAPE[1:], x.dtype)
    elsewhere[0] = np.random.default_rng(seed).integers(INT32.min, INT32.max, SHAPE[1])
    (z,) = rotated(implementation, [others], elsewhere, rotary)
    np.testing.assert_array_equal(oracle.bits(z[1]), oracle.bits(y[1]))
    if implementation == "webgpu":
        for row in range(2):
            (alone,) = rotated(implementation, [x[row]], positions[row], rotary)
            np.testing.assert_array_equal(oracle.bits(alone), oracle.bits(y[row]))


@both
@examples(60)
@given(seed=seeds, first=far, second=far, rotary=plain_rotaries)
def test_rotations_compose(implementation, seed, first, second, rotary):
    """By a and then by b is by a + b."""
    x, steps = draw_values(seed, SHAPE, DTYPES[0]), np.broadcast_to(np.arange(SHAPE[1]), SHAPE[:2])
    (once,) = rotated(implementation, [x], first + steps, rotary)
    (twice,) = rotated(implementation, [once], np.full_like(steps, second), rotary)
    exact = reference.rotate(x, first + second + steps, rotary)
    assert np.all(norms(twice - exact, rotary.pairing) <= 2.01 * BOUND * norms(x, rotary.pairing))


@both
@examples(60)
@given(
    drawn=same_shape(),
    rotary=plain_rotaries,
    places=st.lists(st.integers(0, math.prod(SHAPE) - 1), min_size=1, max_size=4),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_nan_and_infinity_stay_in_their_pair(implementation, drawn, rotary, places, value):
    """All others are bit for bit what they are without them."""
    x, positions = drawn
    (clean,) = rotated(implementation, [x], positions, rotary)
    hit = np.zeros(SHAPE, bool)
    hit.reshape(-1)[places] = True
    broken = np.where(hit, np.array(value, x.dtype), x)
    (y,) = rotated(implementation, [broken], positions, rotary)
    first, second = oracle.pair_indices(rotary.pairing, SHAPE[-1])
    touched = np.zeros(SHAPE, bool)
    touched[..., first] = touched[..., second] = hit[..., first] | hit[..., second]
    np.testing.assert_array_equal(oracle.bits(y[~touched]), oracle.bits(clean[~touched]))
    still = positions == 0
    np.testing.assert_array_equal(oracle.bits(y[still]), oracle.bits(broken[still]))
    turned = touched & (np.abs(positions) * rotary.inv_freq(SHAPE[-1]).min() > 1e-6)[..., None, None]
    assert not np.isfinite(doubles(y[turned])).any()


@both
@examples(60)
@given(drawn=same_shape(), rotary=plain_rotaries, scale=st.integers(-20, 2), zeros=seeds)
def test_subnormal_numbers_stay_small(implementation, drawn, rotary, scale, zeros):
    """They may be flushed to zero anywhere on the way, and nothing else may become of them; zeros stay zeros."""
    x, positions = drawn
    info = ml_dtypes.finfo(x.dtype)
    x = (doubles(x) / 64 * float(info.tiny) * 2.0**scale).astype(x.dtype)
    chosen = np.random.default_rng(zeros).integers(0, 3, (*SHAPE[:-1], SHAPE[-1] // 2))
    zero = np.zeros((), x.dtype)
    first, second = oracle.pair_indices(rotary.pairing, SHAPE[-1])
    for half in (first, second):
        x[..., half] = np.choose(chosen, (x[..., half], zero, -zero))
    (y,) = rotated(implementation, [x], positions, rotary)
    exact = reference.rotate(x, positions, rotary)
    # Flushed: both elements, both products and the result; rounded: once.
    slack = 5 * float(np.finfo(np.float32).tiny) + float(info.smallest_subnormal)
    if x.dtype == np.float16:
        slack += float(info.tiny)
    allowed = slack + (BOUND + (0 if x.dtype == np.float32 else 2 * float(info.eps))) * np.abs(doubles(x)).max()
    assert np.all(np.abs(doubles(y) - exact) <= allowed)
    assert np.all(doubles(y[..., first])[chosen > 0] == 0) and np.all(doubles(y[..., second])[chosen > 0] == 0)
    still = positions == 0
    np.testing.assert_array_equal(oracle.bits(y[still]), oracle.bits(x[still]))


@both
@examples(60)
@given(drawn=same_shape(), rotary=plain_rotaries, fraction=st.sampled_from([1.0, 0.99, 0.75, 0.7, 0.5]))
def test_the_largest_numbers_overflow_only_where_the_exact_result_does(implementation, drawn, rotary, fraction):
    """Never to NaN, and with the right sign."""
    x, positions = drawn
    largest = float(ml_dtypes.finfo(x.dtype).max)
    x = (np.sign(doubles(x)) * largest * fraction).astype(x.dtype)
    (y,) = rotated(implementation, [x], positions, rotary)
    exact = reference.rotate(x, positions, rotary)
    slack = BOUND * 2 + (0 if x.dtype == np.float32 else 2 * float(ml_dtypes.finfo(x.dtype).eps))
    assert not np.isnan(doubles(y)).any()
    assert np.isfinite(doubles(y))[np.abs(exact) <= largest * (1 - slack)].all()
    assert np.isinf(doubles(y))[np.abs(exact) >= largest * (1 + slack)].all()
    overflowed = np.isinf(doubles(y))
    assert np.all(np.sign(doubles(y))[overflowed] == np.sign(exact)[overflowed])
    if fraction <= 0.7:  # the norm is below the largest number
        assert not overflowed.any()


# The public functions, whose every shape XLA compiles

PUBLIC = {  # of [rows, heads, tokens, elements]: axis, dtype, rotary, the view that is rotated
    "transposed": (-3, DTYPES[0], Rotary(pairing="half", rotary_dim=8, start=4), lambda x: jnp.swapaxes(x, 1, 2)),
    "heads first": (-2, DTYPES[1], Rotary(scaling=scaling.YaRN(4, 64)), lambda x: x),
    "every other token": (-2, DTYPES[2], Rotary(pairing="interleaved_to_half"), lambda x: x[:, :, ::2]),
    "backwards": (-2, DTYPES[0], Rotary(theta=5e5), lambda x: x[:, ::-1, ::-1]),
}


@functools.cache
def program(name: str, implementation: str, inverse: bool):
    seq_axis, _, rotary, view = PUBLIC[name]
    options = {"seq_axis": seq_axis, "inverse": inverse, "implementation": implementation}

    @jax.jit
    def run(q, k, positions):
        q, k = view(q), view(k)
        alone, back = jax.vjp(lambda q: rope(q, positions, rotary, **options), q)
        return q, k, *rope_qk(q, k, positions, rotary, **options), alone, *back(q)

    return run


@both
@pytest.mark.parametrize("name", PUBLIC)
@examples(15)
@given(seed=seeds, pool=st.lists(whole_positions, min_size=1, max_size=5), inverse=st.booleans())
def test_public_functions_are_exact(implementation, name, seed, pool, inverse):
    """Compiled, with traced positions and operands that are views; and the gradient."""
    seq_axis, dtype, rotary, _ = PUBLIC[name]
    q, k = (draw_values(seed + heads, (4, heads, 2, 16), dtype).swapaxes(0, 2) for heads in (4, 2))
    positions = np.random.default_rng(seed).choice(pool, (2, 2 if name == "every other token" else 4)).astype(np.int32)
    q, k, q_out, k_out, alone, back = map(np.asarray, program(name, implementation, inverse)(q, k, positions))
    for x, y, way in ((q, q_out, {}), (k, k_out, {}), (q, alone, {}), (q, back, {"transpose": True})):
        way["inverse"] = inverse
        exact = reference.rotate(x, positions, rotary, seq_axis=seq_axis, **way)
        assert reference.compare(y, exact, x, rotary, **way).holds
