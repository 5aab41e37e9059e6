"""The arguments of a call, checked and brought into canonical form: a `Layout`, operands and `Angles`."""

import jax
import jax.numpy as jnp
import numpy as np

from .layout import Layout
from .phase import Angles
from .rotary import Rotary

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
INT32 = np.iinfo(np.int32)


def canonical(
    named: dict[str, jax.typing.ArrayLike],
    positions: jax.typing.ArrayLike | None,
    rotary: Rotary,
    seq_axis: int,
    inverse: bool,
) -> tuple[Layout, tuple[jax.Array, ...], Angles]:
    """For the operands by their arguments' names. Raises what `jax_rope.rope` documents."""
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
    if not isinstance(inverse, bool | np.bool_):
        raise TypeError(f"inverse must be True or False, known while tracing, got {type(inverse).__name__}")
    xs = [_operand(name, x) for name, x in named.items()]
    token_major = _token_major(seq_axis, xs[0].ndim)
    head_axis = -2 if token_major else -3
    if len(xs) == 2:
        _check_alike(xs[0], xs[1], head_axis)
    head_dim = xs[0].shape[-1]
    pairs = rotary.window(head_dim) // 2
    layout = Layout(rotary.pairing == "interleaved", rotary.start, pairs, token_major, -1 if inverse else 1)
    batch = xs[0].shape[:-3]
    table = rotary.table(head_dim)
    whole, fractions = _positions(positions, batch, xs[0].shape[layout.token_axis])
    return layout, tuple(xs), Angles(whole, fractions, table.reshape((1,) * len(batch) + table.shape))


def _operand(name: str, x: jax.typing.ArrayLike) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}") from error
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
    if x.ndim < 3:
        raise ValueError(f"{name} must have at least 3 axes, [..., S, H, D] or [..., H, S, D], got shape {x.shape}")
    return x


def _token_major(seq_axis: int, rank: int) -> bool:
    if isinstance(seq_axis, int | np.integer) and not isinstance(seq_axis, bool):
        axis = seq_axis - rank if seq_axis >= 0 else seq_axis
        if axis in (-3, -2):
            return axis == -3
    raise ValueError(f"seq_axis must be -3 for [..., S, H, D] or -2 for [..., H, S, D], got {seq_axis!r}")


def _check_alike(q: jax.Array, k: jax.Array, head_axis: int) -> None:
    if q.dtype != k.dtype:
        raise TypeError(f"q and k must have one dtype, got q {q.dtype} and k {k.dtype}")

    def apart_from_heads(shape):
        heads = len(shape) + head_axis
        return shape[:heads] + shape[heads + 1 :]

    if apart_from_heads(q.shape) != apart_from_heads(k.shape):
        raise ValueError(f"q and k may differ only in their number of heads, got q {q.shape} and k {k.shape}")


def _positions(positions, batch: tuple[int, ...], length: int):
    """(positions, fractions or None) as in `Angles`."""
    if positions is None:
        return np.zeros((1,) * len(batch) + (1, 1), np.int32), None
    if not isinstance(positions, jax.Array | np.ndarray):
        positions = np.asarray(positions)
    kind = positions.dtype
    if jnp.issubdtype(kind, jnp.integer):
        whole, fractions = _integers(positions), None
    elif kind in (jnp.float32, jnp.float64):
        whole, fractions = _split(positions)
    else:
        raise TypeError(
            f"positions must be integers, float32 or float64 (16-bit floats merge positions above 256), got {kind}"
        )
    shape = _broadcastable(positions.shape, batch, length)
    return whole.reshape(shape), None if fractions is None else fractions.reshape(shape)


def _broadcastable(shape: tuple[int, ...], batch: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The shape [..., streams, S] of positions, or [..., streams, 1] for an offset."""
    if not shape:
        return (1,) * len(batch) + (1, 1)
    lead = (1,) * (len(batch) - len(shape) + 1) + shape[:-1]
    fits = len(lead) == len(batch) and all(a in (1, b) for a, b in zip(lead, batch, strict=True))
    if not fits or shape[-1] != length:
        raise ValueError(
            f"positions must be None, a scalar, [S] or [..., S] that broadcasts to the batch, "
            f"got shape {shape} for batch {batch} and S = {length}"
        )
    return (*lead, 1, length)


def _integers(positions):
    if np.iinfo(positions.dtype).max <= INT32.max:
        return positions.astype(np.int32)
    if isinstance(positions, jax.core.Tracer):
        if jnp.issubdtype(positions.dtype, jnp.unsignedinteger):
            raise TypeError(f"positions that are traced must be signed integers or floats, got {positions.dtype}")
        return positions.astype(np.int32)
    if positions.size and not (INT32.min <= positions.min() and positions.max() <= INT32.max):
        raise ValueError(f"positions must fit into int32, got {positions.min()} to {positions.max()}")
    return positions.astype(np.int32)


def _split(positions):
    """Floats into the nearest int32 and a fraction from -1/2 to 1/2, NaN where there is none such."""
    xp = jnp if isinstance(positions, jax.Array) else np
    if xp is np and not np.all(np.isfinite(positions)):
        raise ValueError("positions must be finite")
    # 2**31 - 1/2 is no float32: there the bound is 2**31.
    valid = (positions >= -(2.0**31)) & (positions < 2.0**31 - 0.5)
    if xp is np and not np.all(valid):
        raise ValueError(f"positions must fit into int32, got {positions.min()} to {positions.max()}")
    whole = xp.where(valid, xp.round(positions), 0)
    return whole.astype(np.int32), xp.where(valid, positions - whole, xp.nan)
