"""``rope``, ``rope_qk`` and ``rope_cached``: canonical arguments, and the custom_vjp over both implementations."""

import contextvars
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import config, fallback, primitive, sharding
from .arguments import canonical, canonical_tables
from .fallback import Tables
from .layout import Layout
from .phase import Angles
from .rotary import Rotary


def rope(
    x: jax.Array,
    positions: jax.typing.ArrayLike | None = None,
    rotary: Rotary = Rotary(),
    *,
    seq_axis: int = -3,
    seq_len: jax.typing.ArrayLike | None = None,
    inverse: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Rotary position embedding (Su et al., "RoFormer", arXiv:2104.09864).

    Each pair (x1, x2) of elements of each head of the token at position p becomes
    ``(cos(a) x1 - sin(a) x2, sin(a) x1 + cos(a) x2)`` with ``a = p * omega`` and the pair's frequency omega. The
    angle is reduced exactly at every int32 position. Arithmetic is float32 with one rounding at the end.

    Example::

        q = rope(q)                                     # [B, S, H, D], positions 0 ... S - 1
        q = rope(q, cache_length, Rotary(theta=5e5))    # one more step of decoding, S = 1

    Args:
      x: ``[..., S, H, D]``, or ``[..., H, S, D]`` with ``seq_axis=-2``; float32, bfloat16 or float16 (in x64 mode
        also float64, in ``jnp`` only).
      positions: ``None`` for 0 ... S - 1; an integer scalar, traced or not, for offset ... offset + S - 1; or an array
        ``[S]`` or ``[..., S]`` whose leading axes broadcast to x's; with ``rotary.sections``, ``[streams, ..., S]``.
        Integers are exact in all of int32. Floats, offsets too, are taken exactly, but for the rounding of float64 to
        float32 that JAX does outside x64 mode. Numbers that are not finite or beyond int32 raise where they are
        Python's or NumPy's, and rotate to NaN where they are JAX's.
      rotary: what is rotated, and how fast.
      seq_axis: -3 or -2, the axis of x that counts tokens (or the same axis counted from the front).
      seq_len: the length that ``rotary.scaling`` depends on, if it does: an int, or an integer array that broadcasts to
        x's leading axes, one for each row; else it is the row's highest position, rounded down, plus one. Where it,
        or without it the positions, are traced, LongRoPE switches between its two sets of frequencies as the program
        runs, and DynamicNTK raises.
      inverse: undo the rotation instead, attention factor included.
      implementation: ``"webgpu"``, ``"jnp"``, or ``None`` to choose (see `jax_rope.configure`).

    Returns:
      The rotated x, of its shape and dtype. Linear in x; its gradient is the transposed rotation of the cotangent.
      Float positions and ``rotary.freqs`` that are arrays have their gradients too. For forward mode (`jax.jvp`,
      `jax.jacfwd`) call `jax_rope.forward_mode.rope`.

    Raises:
      TypeError, ValueError: an argument that is of no such form; the message names it.
      RuntimeError: ``implementation="webgpu"`` without an adapter.
    """
    (y,) = _rotate({"x": x}, positions, rotary, seq_axis, seq_len, inverse, implementation)
    return y


def rope_qk(
    q: jax.Array,
    k: jax.Array,
    positions: jax.typing.ArrayLike | None = None,
    rotary: Rotary = Rotary(),
    *,
    seq_axis: int = -3,
    seq_len: jax.typing.ArrayLike | None = None,
    inverse: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`rope` of queries and keys in one offload.

    Args:
      q: ``[..., S, Hq, D]`` (``[..., Hq, S, D]`` with ``seq_axis=-2``).
      k: like q except for its number of heads (grouped-query attention).
      positions: as in `rope`, shared by q and k, as are all further arguments.
      rotary: as in `rope`.
      seq_axis: as in `rope`.
      seq_len: as in `rope`.
      inverse: as in `rope`.
      implementation: as in `rope`.

    Returns:
      The rotated (q, k).

    Raises:
      TypeError, ValueError, RuntimeError: as in `rope`; q and k that differ in more than their heads.
    """
    q, k = _rotate({"q": q, "k": k}, positions, rotary, seq_axis, seq_len, inverse, implementation)
    return q, k


def rope_cached(
    x: jax.Array,
    cos: jax.typing.ArrayLike,
    sin: jax.typing.ArrayLike,
    *,
    pairing: str = "interleaved",
    seq_axis: int = -3,
    inverse: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Rotation by the caller's tables of cosines and sines, row s of which belongs to token s.

    Example::

        cos, sin = rotary.tables(positions, head_dim)
        q = rope_cached(q, cos, sin, pairing="half")

    Args:
      x: as in `rope`.
      cos: float ``[S, n]`` or ``[..., S, n]`` whose leading axes broadcast to x's, for the first 2n elements of each
        head; or as wide as the head, an entry for each element, as Hugging Face makes them by concatenation
        (``pairing="half"``) and others by repetition (``pairing="interleaved"``). Taken as float32.
      sin: like cos.
      pairing: as in `Rotary`.
      seq_axis: as in `rope`.
      inverse: undo the rotation, whatever the tables' amplitude.
      implementation: as in `rope`.

    Returns:
      The rotated x, of its shape and dtype; differentiable in x, cos and sin.

    Raises:
      TypeError, ValueError, RuntimeError: as in `rope`; tables that have not a row for each token.
    """
    config.check_process()
    layout, xs, tables, written = canonical_tables(x, cos, sin, pairing, seq_axis, inverse)
    chosen = config.choose(implementation, [getattr(x, "dtype", None)], xs)
    (y,) = _arranged(chosen, layout, written, xs, tables)
    return y


def _rotate(named, positions, rotary, seq_axis, seq_len, inverse, implementation):
    config.check_process()
    layout, xs, angles, written = canonical(named, positions, rotary, seq_axis, seq_len, inverse)
    # JAX makes float32 of NumPy's float64 where x64 mode is off; who asks for the GPU should know.
    chosen = config.choose(implementation, [getattr(x, "dtype", None) for x in named.values()], xs)
    return _arranged(chosen, layout, written, xs, angles)


def _arranged(implementation, layout: Layout, written: Layout, xs, by) -> tuple[jax.Array, ...]:
    """Rotates between rearrangements, where a pairing reads its pairs in one arrangement and writes them in another."""
    if layout.interleaved == written.interleaved:
        return _on_mesh(implementation, layout, xs, by)
    if layout.interleaved:  # turned as halves, either way
        layout, xs = written, tuple(fallback.rearrange(layout, x) for x in xs)
        return _on_mesh(implementation, layout, xs, by)
    return tuple(fallback.rearrange(layout, y) for y in _on_mesh(implementation, layout, xs, by))


def _on_mesh(implementation, layout: Layout, xs, by) -> tuple[jax.Array, ...]:
    xs, by = sharding.varying_alike(xs, by)
    rotate = functools.partial(rule.get(), implementation, layout)
    return sharding.by_shards(rotate, layout, xs, by) if implementation == "webgpu" else rotate(xs, by)


def apply(implementation: str, layout: Layout, xs: Sequence[jax.Array], by: Angles | Tables) -> tuple[jax.Array, ...]:
    """Rotates, with the derivatives that JAX finds by itself."""
    rotate = primitive.rotate if implementation == "webgpu" else fallback.rotate
    return rotate(layout, tuple(xs), by)


# Without the custom_vjp the jnp backward would be a transposed stack and slices, several times as slow as the
# rotation that it is.
_rope = jax.custom_vjp(apply, nondiff_argnums=(0, 1))

# Which of the two is called; `jax_rope.forward_mode` sets it for its own calls.
rule: contextvars.ContextVar = contextvars.ContextVar("rule", default=_rope)


def _forward(implementation, layout, xs, by):
    ys = apply(implementation, layout, xs, by)
    # These are needed again only for the gradient with respect to floats that x is rotated by.
    kept = (xs if isinstance(by, Tables) else ys) if jax.tree.leaves(_floats(by)) else None
    return ys, (kept, by)


def _backward(implementation, layout, residuals, cotangents):
    kept, by = residuals
    xs_cotangent = apply(implementation, layout.transpose(), cotangents, by)
    if kept is None:
        return xs_cotangent, None
    # The map is linear: its transpose is the same wherever it is taken.
    zeros = jax.tree.map(jnp.zeros_like, _floats(by))
    _, vjp = jax.vjp(lambda changes: fallback.changed_by(layout, kept, by, changes), zeros)
    return xs_cotangent, *vjp(tuple(cotangents))


def _floats(by: Any) -> Any:
    """The float leaves; None, which is also the cotangent of an integer, in the others' place."""
    return type(by)(*(leaf if leaf is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else None for leaf in by))


_rope.defvjp(_forward, _backward)
