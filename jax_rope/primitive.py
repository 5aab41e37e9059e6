"""The JAX primitive that offloads a rotation: its rules for abstract values, derivatives, batching and lowering.

Operands: q, perhaps k, then positions, table and perhaps fractions (`jax_rope.phase.Angles`). The result is linear
in q and k. The primitive's name says what it runs as, for readers of a jaxpr.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import config, fallback
from .layout import Layout
from .phase import Angles

rope_p = Primitive("rope_pure_callback")
rope_p.multiple_results = True


def rotate(layout: Layout, xs: Sequence[jax.Array], angles: Angles) -> tuple[jax.Array, ...]:
    """Rotates every x on the GPU, as `jax_rope.fallback.rotate` does in ``jnp``."""
    fractions = () if angles.fractions is None else (angles.fractions,)
    return tuple(rope_p.bind(*xs, angles.positions, angles.table, *fractions, layout=layout, count=len(xs)))


def _unpack(operands: Sequence, count: int) -> tuple[tuple, Angles]:
    positions, table, *fractions = operands[count:]
    return tuple(operands[:count]), Angles(positions, fractions[0] if fractions else None, table)


@functools.partial(jax.jit, static_argnames=("layout", "count"))
def _eager(*operands, layout, count):
    return rope_p.bind(*operands, layout=layout, count=count)


rope_p.def_impl(_eager)


@rope_p.def_abstract_eval
def _abstract_eval(*avals, layout, count):
    return avals[:count]


def _host(*operands, layout: Layout, count: int) -> tuple[np.ndarray, ...]:
    from .webgpu import offload

    # No JAX operation may run inside a callback: one inside can wait for itself forever.
    arrays = [np.asarray(operand) for operand in operands]
    positions, table, *fractions = arrays[count:]
    return offload.rotate(
        layout, arrays[:count], positions, table, fractions[0] if fractions else None, config.settings.adapter
    )


def _callback(*operands, layout, count):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:count]]
    return jax.pure_callback(functools.partial(_host, layout=layout, count=count), shapes, *operands)


mlir.register_lowering(rope_p, mlir.lower_fun(_callback, multiple_results=True))


def _jvp(primals, tangents, *, layout, count):
    xs, angles = _unpack(primals, count)
    x_changes, changes = _unpack(tangents, count)
    ys = rotate(layout, xs, angles)
    y_changes: Sequence = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in xs]
    if any(type(t) is not ad.Zero for t in x_changes):
        y_changes = rotate(layout, [ad.instantiate_zeros(t) for t in x_changes], angles)
    if changes.fractions is not None and type(changes.fractions) is not ad.Zero:
        turned = [fallback.turned_by(layout, y, angles, changes.fractions) for y in ys]
        y_changes = [ad.add_tangents(a, b) for a, b in zip(y_changes, turned, strict=True)]
    return list(ys), list(y_changes)


ad.primitive_jvps[rope_p] = _jvp


def _transpose(cotangents, *operands, layout, count):
    _, angles = _unpack(operands, count)
    rest = [None] * (len(operands) - count)
    if all(type(ct) is ad.Zero for ct in cotangents):
        return list(cotangents) + rest
    return list(rotate(layout.transpose(), [ad.instantiate_zeros(ct) for ct in cotangents], angles)) + rest


ad.primitive_transposes[rope_p] = _transpose


def _batch(operands, axes, *, layout, count):
    """One call for the whole batch. All operands get the axis in front, of size 1 if they have none: operands of
    unequal rank would not align, silently where sizes collide."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def in_front(index, operand):
        if axes[index] is not None:
            return jnp.moveaxis(operand, axes[index], 0)
        operand = operand[None]
        return jnp.broadcast_to(operand, (size, *operand.shape[1:])) if index < count else operand

    results = rope_p.bind(*(in_front(i, x) for i, x in enumerate(operands)), layout=layout, count=count)
    return results, [0] * count


batching.primitive_batchers[rope_p] = _batch
