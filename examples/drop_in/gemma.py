"""Gemma's ``apply_rope``, exact at every position: the signature of ``gemma.gm.math.apply_rope``.

Which implementation rotates is what `jax_rope.configure` or JAX_ROPE_IMPLEMENTATION says.
"""

import jax

from jax_rope import Rotary, rope
from jax_rope.scaling import Proportional


def apply_rope(
    inputs: jax.Array,
    positions: jax.Array,
    *,
    base_frequency: float,
    scale_factor: float = 1.0,
    rope_proportion: float = 1.0,
) -> jax.Array:
    """Rotates queries or keys.

    Args:
      inputs: ``[B, L, N, H]``; elements i and i + H / 2 of a head are a pair.
      positions: ``[B, L]``.
      base_frequency: the base, a number: 10,000 in Gemma's local layers, 1,000,000 in its global ones.
      scale_factor: positions are divided by it, at least 1.
      rope_proportion: the part of the pairs that turns. The others, the slowest, stay; no frequency changes by it.

    Returns:
      An array of the shape and dtype of ``inputs``.
    """
    if scale_factor < 1.0:
        raise ValueError(f"scale_factor must be >= 1.0, got {scale_factor}")
    scaling = Proportional(rope_proportion, scale_factor)
    return rope(inputs, positions, Rotary(theta=base_frequency, pairing="half", scaling=scaling))
