"""The arguments of a call, checked and brought into canonical form: a `Layout`, operands and `Angles`."""

import jax
import jax.numpy as jnp
import numpy as np

from .checks import array, beyond_int32, one_of, shown
from .fallback import Tables
from .layout import Layout
from .phase import Angles, traced_pair_table
from .rotary import PAIRINGS, Rotary
from .scaling import LongRoPE

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
FLOATS = "float32, bfloat16, float16 or float64"
INT32 = np.iinfo(np.int32)


def canonical(
    named: dict[str, jax.typing.ArrayLike],
    positions: jax.typing.ArrayLike | None,
    rotary: Rotary,
    seq_axis: int,
    seq_len: jax.typing.ArrayLike | None,
    inverse: bool,
) -> tuple[Layout, tuple[jax.Array, ...], Angles, Layout]:
    """For the operands by their arguments' names: (layout, operands, angles, layout of the results).

    Raises what `jax_rope.rope` documents.
    """
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary, got {shown(rotary)}")
    xs = tuple(_operand(name, x) for name, x in named.items())
    token_major = _token_major(seq_axis, xs[0].ndim)
    if len(xs) == 2:
        _check_alike(xs[0], xs[1], -2 if token_major else -3)
    head_dim = xs[0].shape[-1]
    layout, written = _layouts(rotary.pairing, rotary.start, rotary.window(head_dim) // 2, token_major, inverse)
    batch, length = xs[0].shape[:-3], xs[0].shape[layout.token_axis]
    whole, fractions = _positions(positions, batch, length, rotary)
    table, frequencies = _table(rotary, head_dim, seq_len, _down(whole, fractions), batch, length, inverse)
    return layout, xs, Angles(whole, table, fractions, frequencies), written


def canonical_tables(
    x: jax.typing.ArrayLike,
    cos: jax.typing.ArrayLike,
    sin: jax.typing.ArrayLike,
    pairing: str,
    seq_axis: int,
    inverse: bool,
) -> tuple[Layout, tuple[jax.Array, ...], Tables, Layout]:
    """As `canonical`, for `jax_rope.rope_cached`."""
    one_of("pairing", pairing, PAIRINGS)
    x = _operand("x", x)
    token_major = _token_major(seq_axis, x.ndim)
    length, head_dim, batch = x.shape[-3 if token_major else -2], x.shape[-1], x.shape[:-3]
    cos, sin = (_one_table(name, t, batch, length) for name, t in (("cos", cos), ("sin", sin)))
    width = cos.shape[-1]
    if sin.shape[-1] != width:
        raise ValueError(f"cos and sin must be equally wide, got {width} and {sin.shape[-1]}")
    if head_dim == 1:
        raise ValueError("head_dim must be at least 2, got 1")
    if not 0 < width <= head_dim // 2 and (width != head_dim or head_dim % 2):
        whole = "" if head_dim % 2 else f" or {head_dim},"
        raise ValueError(f"cos and sin must be 1 to {head_dim // 2} wide, half of head_dim,{whole} got {width}")
    pairs = width // 2 if width == head_dim else width
    layout, written = _layouts(pairing, 0, pairs, token_major, inverse)
    if width == head_dim and pairing == "interleaved":  # the entries of first elements come first, then the others'
        cos, sin = (jnp.concatenate((t[..., 0::2], t[..., 1::2]), axis=-1) for t in (cos, sin))
    tables = Tables(cos, sin)
    if inverse:
        layout = layout.transpose()  # the tables are those of the inverse itself
        tables = _inverted(tables, pairs)
    return layout, (x,), tables, written


def table_angles(
    positions: jax.typing.ArrayLike, rotary: Rotary, head_dim: int, seq_len: jax.typing.ArrayLike | None
) -> Angles:
    """The angles of positions [..., S], with leading axes as they are."""
    positions = _numbers(positions)
    sectioned = rotary.sections is not None
    shape = positions.shape[1:] if sectioned else positions.shape
    if not shape:
        taken = f"[{rotary.streams}, ..., S], a stream for each section" if sectioned else "[..., S]"
        raise ValueError(f"positions must be an array {taken}, got shape {positions.shape}")
    whole, fractions = _positions(positions, shape[:-1], shape[-1], rotary)
    rounded = _down(whole, fractions)
    table, frequencies = _table(rotary, head_dim, seq_len, rounded, shape[:-1], shape[-1], inverse=False)
    return Angles(whole, table, fractions, frequencies)


def _layouts(pairing: str, start: int, pairs: int, token_major: bool, inverse: bool) -> tuple[Layout, Layout]:
    """How pairs are read, and how they are written."""
    if not isinstance(inverse, bool | np.bool_):
        raise TypeError(f"inverse must be True or False, known while tracing, got {shown(inverse)}")
    read, written = pairing != "half", pairing == "interleaved"
    if inverse:
        read, written = written, read
    layout = Layout(read, start, pairs, token_major, -1 if inverse else 1)
    return layout, layout._replace(interleaved=written)


def _one_table(name: str, table: jax.typing.ArrayLike, batch: tuple[int, ...], length: int) -> jax.Array:
    table = _floats(name, table)
    lead = _aligned(table.shape[:-2], batch)
    if lead is None or table.ndim < 2 or table.shape[-2] != length:
        raise ValueError(
            f"{name} must be [S, n] or [..., S, n], a row for each token, that broadcasts to the batch, "
            f"got shape {table.shape} for batch {batch} and S = {length}"
        )
    return table.reshape(*lead, *table.shape[-2:])


def _inverted(tables: Tables, pairs: int) -> Tables:
    """The tables of the inverse: of the matrix ((c, -s), (s2, c2)) that turns a pair."""
    c, c2 = tables.cos[..., :pairs], tables.cos[..., -pairs:]
    s, s2 = tables.sin[..., :pairs], tables.sin[..., -pairs:]
    scale = 1 / (c * c2 + s * s2)
    if tables.cos.shape[-1] == pairs:
        return Tables(c * scale, s * -scale)
    return Tables(*(jnp.concatenate(pair, axis=-1) for pair in ((c2 * scale, c * scale), (s * -scale, s2 * -scale))))


def _operand(name: str, x: jax.typing.ArrayLike) -> jax.Array:
    x = _floats(name, x)
    if x.ndim < 3:
        raise ValueError(f"{name} must have at least 3 axes, [..., S, H, D] or [..., H, S, D], got shape {x.shape}")
    return x


def _floats(name: str, values: jax.typing.ArrayLike) -> jax.Array:
    floats = array(name, values, f"an array of {FLOATS}")
    if floats.dtype not in DTYPES:
        raise TypeError(f"{name} must be {FLOATS}, got {getattr(values, 'dtype', floats.dtype)}")
    return floats


def _token_major(seq_axis: int, rank: int) -> bool:
    if isinstance(seq_axis, int | np.integer) and not isinstance(seq_axis, bool):
        axis = seq_axis - rank if seq_axis >= 0 else seq_axis
        if axis in (-3, -2):
            return axis == -3
    raise ValueError(f"seq_axis must be -3 for [..., S, H, D] or -2 for [..., H, S, D], got {shown(seq_axis)}")


def _check_alike(q: jax.Array, k: jax.Array, head_axis: int) -> None:
    if q.dtype != k.dtype:
        raise TypeError(f"q and k must have one dtype, got q {q.dtype} and k {k.dtype}")

    def apart_from_heads(shape):
        heads = len(shape) + head_axis
        return shape[:heads] + shape[heads + 1 :]

    if apart_from_heads(q.shape) != apart_from_heads(k.shape):
        raise ValueError(f"q and k must be alike but for their number of heads, got q {q.shape} and k {k.shape}")


def _positions(positions, batch: tuple[int, ...], length: int, rotary: Rotary):
    """(positions, fractions or None) as in `Angles`."""
    if positions is None:
        return np.zeros((1,) * len(batch) + (1, 1), np.int32), None
    positions = _numbers(positions)
    whole, fractions = _integers(positions) if jnp.issubdtype(positions.dtype, jnp.integer) else _split(positions)
    if rotary.sections is None:
        shape = _broadcastable("None, a scalar, [S] or [..., S]", positions.shape, 0, batch, length)
        shape = (*shape[:-1], 1, shape[-1])
        return whole.reshape(shape), None if fractions is None else fractions.reshape(shape)
    taken = f"None, a scalar, or [{rotary.streams}, ..., S], a stream for each section,"
    if positions.ndim and positions.shape[0] != rotary.streams:
        raise ValueError(f"positions must be {taken} got shape {positions.shape}")
    shape = _broadcastable(taken, positions.shape, 1, batch, length)

    def arranged(array):
        streams = rotary.streams if positions.ndim else 1
        return (jnp if isinstance(array, jax.Array) else np).moveaxis(array.reshape(streams, *shape), 0, -2)

    return arranged(whole), None if fractions is None else arranged(fractions)


def _broadcastable(
    taken: str, given: tuple[int, ...], streams: int, batch: tuple[int, ...], length: int
) -> tuple[int, ...]:
    """The shape [..., S] of positions, or [..., 1] for an offset, with as many leading axes as the batch has.

    ``streams`` is the number of axes that come before those.
    """
    shape = given[streams:]
    if not shape:
        return (1,) * (len(batch) + 1)
    lead = _aligned(shape[:-1], batch)
    if lead is None or shape[-1] != length:
        raise ValueError(
            f"positions must be {taken} that broadcasts to the batch, "
            f"got shape {given} for batch {batch} and S = {length}"
        )
    return (*lead, length)


def _aligned(shape: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...] | None:
    """A shape that broadcasts to the batch, with as many axes; None for one that does not."""
    lead = (1,) * (len(batch) - len(shape)) + shape
    fits = len(lead) == len(batch) and all(a in (1, b) for a, b in zip(lead, batch, strict=True))
    return lead if fits else None


def _table(rotary: Rotary, head_dim: int, seq_len, whole, batch: tuple[int, ...], length: int, inverse: bool):
    """(table, frequencies or None) as in `Angles`."""
    if rotary.depends_on_length:
        return _table_by_length(rotary, head_dim, _lengths(seq_len, whole, batch, length), inverse), None
    if seq_len is not None:
        _checked_lengths(seq_len, batch)
    lead = (1,) * len(batch)
    if isinstance(rotary.freqs, jax.Array):
        streams = (0,) * rotary.freqs.shape[0] if rotary.sections is None else rotary.pair_streams()
        traced = traced_pair_table(rotary.freqs, streams)
        return traced.reshape(lead + traced.shape), rotary.freqs.reshape(lead + rotary.freqs.shape)
    table = rotary.table(head_dim, None, inverse)
    return table.reshape(lead + table.shape), None


def _table_by_length(rotary: Rotary, head_dim: int, lengths, inverse: bool):
    """The table of each row, for rows of these lengths."""
    if not isinstance(lengths, jax.Array):
        tables = [rotary.table(head_dim, int(n), inverse) for n in lengths.ravel()]
        return np.array(tables, np.uint32).reshape(*lengths.shape, rotary.window(head_dim) // 2, 4)
    rule = rotary.scaling
    if not isinstance(rule, LongRoPE):
        raise ValueError(
            f"seq_len must be known while tracing for {type(rule).__name__}, "
            f"got one that is traced or follows from traced positions"
        )
    original = rule.original_max_position_embeddings
    short, long = (rotary.table(head_dim, n, inverse) for n in (original, original + 1))
    return jnp.where((lengths > original)[..., None, None], long, short)


def _down(whole, fractions):
    """Positions rounded down; their integers are the nearest ones."""
    return whole if fractions is None else whole - (fractions < 0).astype(np.int32)


def _lengths(seq_len, whole, batch: tuple[int, ...], length: int):
    """Each row's length, [...] with leading axes as in `Angles`; NumPy unless it is traced."""
    if seq_len is not None:
        return _checked_lengths(seq_len, batch)
    if not isinstance(whole, jax.core.Tracer):
        whole = np.asarray(whole, np.int64)
    if whole.size == 0:
        return np.zeros((1,) * len(batch), np.int64)
    further = length if whole.shape[-1] != length else 1
    highest = whole.max(axis=(-2, -1))
    if isinstance(highest, jax.Array):  # a length beyond int32 is as good as its largest
        highest = jnp.minimum(highest, INT32.max - further)
    return highest + further


def _checked_lengths(seq_len, batch: tuple[int, ...]):
    try:
        lengths = seq_len if isinstance(seq_len, jax.core.Tracer) else np.asarray(seq_len)
    except (TypeError, ValueError) as error:
        raise TypeError(f"seq_len must be an integer or an array of integers, got {shown(seq_len)}") from error
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        what = getattr(seq_len, "dtype", shown(seq_len))
        if isinstance(seq_len, int) and not isinstance(seq_len, bool):
            raise ValueError(f"seq_len must fit into int64, got {what}")
        raise TypeError(f"seq_len must be an integer or an array of integers, got {what}")
    lead = _aligned(lengths.shape, batch)
    if lead is None:
        raise ValueError(f"seq_len must be a scalar or broadcast to the batch {batch}, got shape {lengths.shape}")
    return lengths.reshape(lead)


def _numbers(positions) -> jax.Array | np.ndarray:
    """An array of integers or floats; NumPy's, in the machine's byte order, unless it is traced or floats of JAX's."""
    if isinstance(positions, np.ma.MaskedArray):
        raise TypeError("positions must be a number or an array, got a masked array")
    if not isinstance(positions, jax.Array | np.ndarray):
        try:
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(positions))
            numbers = jnp.asarray(positions) if traced else np.asarray(positions)
        except (TypeError, ValueError) as error:
            raise TypeError(f"positions must be a number or an array, got {shown(positions)}") from error
        if numbers.dtype == object and numbers.size and all(isinstance(p, int) for p in numbers.ravel()):
            raise beyond_int32("positions", numbers.min(), numbers.max())
        if numbers.dtype.kind in "OSU":
            raise TypeError(f"positions must be a number or an array, got {shown(positions)}")
        positions = numbers
    kind = positions.dtype
    if jnp.issubdtype(kind, jnp.integer):
        return positions if isinstance(positions, jax.core.Tracer) else np.asarray(positions)
    if kind.newbyteorder("=") not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"positions must be integers, float32 or float64 (16-bit floats merge positions above 256), got {kind}"
        )
    return positions if isinstance(positions, jax.Array) else positions.astype(kind.newbyteorder("="))


def _integers(positions):
    """(int32, None); for traced int64 with NaN as fractions of what lies beyond int32."""
    limits = jnp.iinfo(positions.dtype)
    if limits.max <= INT32.max:
        return positions.astype(np.int32), None
    if isinstance(positions, jax.core.Tracer):
        if limits.min == 0:
            raise TypeError(f"positions must be signed integers or floats where they are traced, got {positions.dtype}")
        fits = (positions >= INT32.min) & (positions <= INT32.max)
        return positions.astype(np.int32), jnp.where(fits, jnp.float32(0), jnp.float32(jnp.nan))
    if positions.size and not (positions.min() >= INT32.min and positions.max() <= INT32.max):
        raise beyond_int32("positions", positions.min(), positions.max())
    return positions.astype(np.int32), None


def _split(positions):
    """Floats into the nearest int32 and a fraction from -1/2 to 1/2, NaN where there is none such."""
    xp = jnp if isinstance(positions, jax.Array) else np
    if xp is np and not np.all(finite := np.isfinite(positions)):
        raise ValueError(f"positions must be finite, got {positions[~finite].flat[0]}")
    # 2**31 - 1/2 is no float32: there the bound is 2**31.
    valid = (positions >= -(2.0**31)) & (positions < 2.0**31 - 0.5)
    if xp is np and not np.all(valid):
        raise beyond_int32("positions", positions.min(), positions.max())
    whole = xp.where(valid, xp.round(positions), 0)
    return whole.astype(np.int32), xp.where(valid, positions - whole, xp.nan)
