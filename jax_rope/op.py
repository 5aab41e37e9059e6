"""``rope`` and ``rope_qk``: arguments in, canonical form out, and the custom_vjp over both implementations."""

from collections.abc import Sequence

import jax

from . import config, fallback, primitive
from .arguments import canonical
from .layout import Layout
from .phase import Angles
from .rotary import Rotary


def rope(
    x: jax.Array,
    positions: jax.typing.ArrayLike | None = None,
    rotary: Rotary = Rotary(),
    *,
    seq_axis: int = -3,
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
        ``[S]`` or ``[..., S]`` whose leading axes broadcast to x's. Integers are exact in all of int32; float32 are
        taken as they are. A position that is not finite, or beyond int32, rotates to NaN.
      rotary: what is rotated, and how fast.
      seq_axis: -3 or -2, the axis of x that counts tokens.
      inverse: undo the rotation instead.
      implementation: ``"webgpu"``, ``"jnp"``, or ``None`` to choose (see `jax_rope.configure`).

    Returns:
      The rotated x, of its shape and dtype. Linear in x; its gradient is the opposite rotation of the cotangent.

    Raises:
      TypeError, ValueError: an argument that is of no such form; the message names it.
      RuntimeError: ``implementation="webgpu"`` without an adapter.
    """
    (y,) = _rotate({"x": x}, positions, rotary, seq_axis, inverse, implementation)
    return y


def rope_qk(
    q: jax.Array,
    k: jax.Array,
    positions: jax.typing.ArrayLike | None = None,
    rotary: Rotary = Rotary(),
    *,
    seq_axis: int = -3,
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
      inverse: as in `rope`.
      implementation: as in `rope`.

    Returns:
      The rotated (q, k).

    Raises:
      TypeError, ValueError, RuntimeError: as in `rope`; q and k that differ in more than their heads.
    """
    q, k = _rotate({"q": q, "k": k}, positions, rotary, seq_axis, inverse, implementation)
    return q, k


def _rotate(named, positions, rotary, seq_axis, inverse, implementation):
    layout, xs, angles = canonical(named, positions, rotary, seq_axis, inverse)
    # JAX makes float32 of NumPy's float64 where x64 mode is off; who asks for the GPU should know.
    chosen = config.choose(implementation, [getattr(x, "dtype", None) for x in named.values()])
    return _rope(chosen, layout, xs, angles)


def _apply(implementation: str, layout: Layout, xs: Sequence[jax.Array], angles: Angles) -> tuple[jax.Array, ...]:
    rotate = primitive.rotate if implementation == "webgpu" else fallback.rotate
    return rotate(layout, xs, angles)


# Without the custom_vjp the jnp backward would be a transposed stack and slices, several times as slow as the
# rotation that it is, and an angle that is not differentiated would keep x alive.
_rope = jax.custom_vjp(_apply, nondiff_argnums=(0, 1))


def _forward(implementation, layout, xs, angles):
    # Only the gradient with respect to fractional positions needs x again.
    kept = None if angles.fractions is None else xs
    return _apply(implementation, layout, xs, angles), (kept, angles)


def _backward(implementation, layout, residuals, cotangents):
    xs, angles = residuals
    if angles.fractions is None:
        return _apply(implementation, layout.transpose(), cotangents, angles), None

    def of(xs, fractions):
        return _apply(implementation, layout, xs, angles._replace(fractions=fractions))

    _, vjp = jax.vjp(of, xs, angles.fractions)
    xs_cotangent, fractions_cotangent = vjp(tuple(cotangents))
    # None stands for the cotangent of what has none: integers.
    return xs_cotangent, Angles(positions=None, fractions=fractions_cotangent, table=None)  # type: ignore[arg-type]


_rope.defvjp(_forward, _backward)
