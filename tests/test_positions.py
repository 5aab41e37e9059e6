"""Every form of positions, against the oracle and against one another."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, positions, rope, scaling

B, S, H, D = 3, 5, 2, 16


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((B, S, H, D)), jnp.float32)


def check(x, argument, expected, implementation):
    y = rope(x, argument, implementation=implementation)
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(expected, x.shape[:-2])), x)


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


# The helpers


def traced(f, *arguments):
    """Their results eagerly and traced, which must be one."""
    eager, jitted = f(*arguments), jax.jit(f)(*arguments)
    assert eager.dtype == jitted.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(eager), np.asarray(jitted))
    return np.asarray(eager)


def test_from_offsets():
    offsets = jnp.array([[0, 7, -3]])
    expected = [[[0, 1, 2, 3], [7, 8, 9, 10], [-3, -2, -1, 0]]]
    np.testing.assert_array_equal(traced(lambda o: positions.from_offsets(o, 4), offsets), expected)
    np.testing.assert_array_equal(positions.from_offsets(5, 2), [5, 6])


def test_lengths_that_are_arrays_or_have_names():
    np.testing.assert_array_equal(positions.from_offsets(5, jnp.int32(2)), [5, 6])
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: positions.from_offsets(5, x.shape[0])))(
        jax.ShapeDtypeStruct((n,), jnp.float32)
    )
    np.testing.assert_array_equal(exported.call(jnp.zeros(3)), [5, 6, 7])


def test_from_segment_ids(rng):
    """allenai/OLMo-core PR#591: packed documents begin at 0."""
    ids = rng.integers(0, 3, (4, 50))
    expected = np.zeros((4, 50), int)
    for row in range(4):
        for i in range(1, 50):
            expected[row, i] = expected[row, i - 1] + 1 if ids[row, i] == ids[row, i - 1] else 0
    np.testing.assert_array_equal(traced(positions.from_segment_ids, jnp.asarray(ids, jnp.int32)), expected)
    assert positions.from_segment_ids(jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)


@pytest.mark.parametrize("lengths", [[3, 2], [5], [0, 1, 0, 0, 4], [2, 3, 0]])
def test_from_cu_seqlens(lengths):
    boundaries = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    expected = np.concatenate([np.arange(n) for n in lengths])
    np.testing.assert_array_equal(traced(lambda b: positions.from_cu_seqlens(b, 5), boundaries), expected)
    np.testing.assert_array_equal(positions.from_cu_seqlens(boundaries, 7)[5:], [0, 1])


def test_from_mask():
    """unslothai/unsloth#3699: left-padded rows have positions of their own."""
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(traced(positions.from_mask, mask), expected)
    np.testing.assert_array_equal(traced(positions.from_mask, mask == 1), expected)


def test_packed_documents_are_rotated_as_if_alone(implementation, rng):
    documents = [jnp.asarray(rng.standard_normal((n, H, D)), jnp.float32) for n in (4, 1, 6)]
    packed = jnp.concatenate(documents)
    where = positions.from_cu_seqlens(jnp.array([0, 4, 5, 11]), 11)
    alone = jnp.concatenate([rope(document, implementation=implementation) for document in documents])
    np.testing.assert_array_equal(np.asarray(rope(packed, where, implementation=implementation)), np.asarray(alone))


def test_left_padded_rows_are_rotated_as_if_alone(implementation, x):
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    y = np.asarray(rope(x, positions.from_mask(mask), implementation=implementation))
    for row, padding in enumerate((2, 0, 4)):
        alone = rope(x[row, padding:], implementation=implementation)
        np.testing.assert_array_equal(y[row, padding:], np.asarray(alone))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: positions.from_offsets(1.5, 3), TypeError, "offsets must be integers, got float32"),
        (lambda: positions.from_offsets("a", 3), TypeError, "offsets must be integers in int32, got 'a'"),
        (lambda: positions.from_offsets(None, 3), TypeError, "offsets must be integers in int32, got None"),
        (lambda: positions.from_offsets(2**40, 3), ValueError, "offsets must be integers in int32, got 1099511627776"),
        (lambda: positions.from_offsets(1, -3), ValueError, "length must be at least 0, got -3"),
        (lambda: positions.from_offsets(1, 2.5), TypeError, "length must be an integer known while tracing, got 2.5"),
        (
            lambda: jax.jit(positions.from_offsets)(1, 2),
            TypeError,
            "length must be .* known while tracing, got a traced one",
        ),
        (lambda: positions.from_cu_seqlens([0, 2], -1), ValueError, "total must be at least 0, got -1"),
        (lambda: positions.from_cu_seqlens(None, 2), TypeError, "cu_seqlens must be integers in int32, got None"),
        (
            lambda: positions.from_segment_ids([[1], [2, 3]]),
            TypeError,
            r"segment_ids must be .* got \[\[1\], \[2, 3\]\]",
        ),
        (lambda: positions.from_segment_ids(3), ValueError, r"segment_ids must be \[..., S\], got a scalar"),
        (lambda: positions.from_segment_ids(np.ones(3)), TypeError, "segment_ids must be integers"),
        (lambda: positions.from_cu_seqlens(np.zeros((2, 2), int), 3), ValueError, r"cu_seqlens must be \[N \+ 1\]"),
        (lambda: positions.from_mask(np.ones(3)), TypeError, "mask must be booleans or integers, got float"),
        (lambda: positions.from_mask(None), TypeError, "mask must be booleans or integers, got None"),
        (lambda: positions.from_mask(True), ValueError, r"mask must be \[..., S\], got a scalar"),
    ],
)
def test_what_the_helpers_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("last", [2**31 - 1, 2**31 - 3])
@pytest.mark.parametrize("traced", [False, True])
def test_lengths_at_the_end_of_int32(last, traced, implementation, rng):
    """A row that ends there is a long one, whether its positions are given, counted from an offset, or traced."""
    rule = scaling.LongRoPE((1.0,) * 4, (4.0,) * 4, original_max_position_embeddings=16)
    rotary, long = Rotary(scaling=rule), Rotary(freqs=tuple(1e4 ** -(i / 4) / 4 for i in range(4)))
    x = jnp.asarray(rng.standard_normal((2, 1, 1, 8)), jnp.float32)
    factor = rotary.attention_factor(17)

    def rotated(at):
        return rope(x, at, rotary, implementation=implementation)

    for at in (np.array([[last], [last - 1]], np.int32), np.int32(last)):
        y = (jax.jit(rotated) if traced else rotated)(at)
        expected = factor * rope(x, at, long, implementation=implementation)
        np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=0, atol=2e-6)


def test_lengths_of_positions_between_integers(implementation, rng):
    """Counted from an offset or given one by one, they are as long."""
    rotary = Rotary(scaling=scaling.DynamicNTK(4.0, 4))
    x = jnp.asarray(rng.standard_normal((4, 1, 8)), jnp.float32)
    for offset in (0.5, 0.25, 0.75, 3.5):
        counted = rope(x, offset, rotary, implementation=implementation)
        given = rope(x, np.float32(offset) + np.arange(4, dtype=np.float32), rotary, implementation=implementation)
        np.testing.assert_allclose(np.asarray(counted), np.asarray(given), rtol=0, atol=1e-6)


def test_known_positions_are_checked():
    """What would wrap around int32, or make no boundaries."""
    with pytest.raises(ValueError, match="offsets, counted to the rows' ends, must fit into int32, got 2147483647 to"):
        positions.from_offsets([2**31 - 1], 3)
    np.testing.assert_array_equal(positions.from_offsets([2**31 - 3], 3), [[2**31 - 3, 2**31 - 2, 2**31 - 1]])
    with pytest.raises(ValueError, match="segment_ids must fit into int32, got 0 to 4294967296"):
        positions.from_segment_ids(np.array([0, 2**32]))
    for bad in ([1, 5], [0, 5, 3], [0, 9]):
        with pytest.raises(
            ValueError, match="cu_seqlens must begin with 0, never fall and end at total 7 at most, got"
        ):
            positions.from_cu_seqlens(np.array(bad), 7)
    jax.jit(lambda at: positions.from_offsets(at, 3))(np.array([2**31 - 1], np.int32))  # what is traced is not known
