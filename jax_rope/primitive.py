"""The JAX primitive that offloads a rotation: its rules for abstract values, derivatives, batching and lowering.

Operands: q, perhaps k, then the leaves of what they are rotated by, `Angles` or `Tables`, and of the number of the
shard, whose tree is a parameter. The result is linear in q and k. The primitive's name says what it runs as, for
readers of a jaxpr.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import config, fallback
from .fallback import Tables
from .layout import Layout
from .phase import Angles
from .sharding import shard_number

rope_p = Primitive("rope_pure_callback")
rope_p.multiple_results = True


def rotate(layout: Layout, xs: Sequence[jax.Array], by: Angles | Tables) -> tuple[jax.Array, ...]:
    """Rotates every x on the GPU, as `jax_rope.fallback.rotate` does in ``jnp``."""
    leaves, tree = jax.tree.flatten((by, shard_number()))
    return tuple(rope_p.bind(*xs, *leaves, layout=layout, tree=tree))


@rope_p.def_abstract_eval
def _abstract_eval(*avals, layout, tree):
    return avals[: len(avals) - tree.num_leaves]


def _unpack(operands: Sequence, tree) -> tuple[Sequence, Any, Any]:
    """The operands that are rotated, what they are rotated by, and the number of the shard."""
    count = len(operands) - tree.num_leaves
    by, shard = jax.tree.unflatten(tree, operands[count:])
    return operands[:count], by, shard


def _host(*operands, layout, tree, out: Sequence[np.ndarray] | None = None) -> tuple[np.ndarray, ...]:
    from .webgpu import offload

    # No JAX operation may run inside a callback: one inside can wait for itself forever.
    xs, by, shard = _unpack([np.asarray(operand) for operand in operands], tree)
    rotate = offload.rotate_by_tables if isinstance(by, Tables) else offload.rotate
    number = 0 if shard is None else int(shard.ravel()[0])
    try:
        return rotate(
            layout,
            xs,
            *by,
            adapter=config.settings.adapter,
            shard=number,
            time_limit=config.time_limit(),
            out=out,
        )
    except RuntimeError as error:
        config.gave_up(str(error))
        raise


def _into_buffers(context, out, *operands, layout, tree) -> None:
    _host(*operands, layout=layout, tree=tree, out=[np.asarray(buffer) for buffer in out])


def _shapes(operands, tree) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[: len(operands) - tree.num_leaves]]


def _callback(*operands, layout, tree):
    host = functools.partial(_host, layout=layout, tree=tree)
    return jax.pure_callback(host, _shapes(operands, tree), *operands)


def _buffer_callback(*operands, layout, tree):
    host = functools.partial(_into_buffers, layout=layout, tree=tree)
    return buffer_callback(host, _shapes(operands, tree))(*operands)


def _lower(context, *operands, layout, tree):
    if context.module_context.lowering_parameters.for_export:
        raise NotImplementedError("implementation 'webgpu' cannot be exported, as no host callback can: use 'jnp'")
    if _partitioned_automatically(context.module_context.axis_context):
        raise NotImplementedError(
            "implementation 'webgpu' cannot run under automatic sharding over several devices, where a callback would "
            "gather its operands onto one of them: use 'jnp', jax.shard_map, or a mesh with explicit axis types"
        )
    callback = _buffer_callback if config.transport() == "buffer_callback" else _callback
    return mlir.lower_fun(callback, multiple_results=True)(context, *operands, layout=layout, tree=tree)


def _partitioned_automatically(axes) -> bool:
    """Whether XLA decides on which devices the operands lie, in `shard_map` over some of a mesh's axes too."""
    if hasattr(axes, "manual_axes"):
        return any(size > 1 for axis, size in axes.mesh.shape.items() if axis not in axes.manual_axes)
    return axes.num_devices > 1


rope_p.def_impl(_callback)
mlir.register_lowering(rope_p, _lower)


def _jvp(primals, tangents, *, layout, tree):
    xs, by, _ = _unpack(primals, tree)
    x_changes, changes, _ = _unpack([None if _is_zero(t) else t for t in tangents], tree)
    ys = rotate(layout, xs, by)
    y_changes: Sequence = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in xs]
    if any(t is not None for t in x_changes):
        filled = [jnp.zeros_like(x) if t is None else t for x, t in zip(xs, x_changes, strict=True)]
        y_changes = rotate(layout, filled, by)
    if jax.tree.leaves(changes):
        moved = fallback.changed_by(layout, xs if isinstance(by, Tables) else ys, by, changes)
        y_changes = [ad.add_tangents(a, b) for a, b in zip(y_changes, moved, strict=True)]
    return list(ys), list(y_changes)


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


ad.primitive_jvps[rope_p] = _jvp


def _transpose(cotangents, *operands, layout, tree):
    _, by, _ = _unpack(operands, tree)
    rest = [None] * tree.num_leaves
    if all(type(ct) is ad.Zero for ct in cotangents):
        return list(cotangents) + rest
    return [*rotate(layout.transpose(), [ad.instantiate_zeros(ct) for ct in cotangents], by), *rest]


ad.primitive_transposes[rope_p] = _transpose


def _batch(operands, axes, *, layout, tree):
    """One call for the whole batch. All operands get the axis in front, of size 1 if they have none: operands of
    unequal rank would not align, silently where sizes collide."""
    count = len(operands) - tree.num_leaves
    mapped = [axis is not None for axis in axes]
    if any(mapped[:count]) and not all(mapped[:count]) and not any(mapped[count:]):
        # q alone, or k alone: the other one stays as it is.
        results: list[jax.Array] = []
        out_axes: list[int | None] = []
        for operand, axis in zip(operands[:count], axes[:count], strict=True):
            alone, alone_axes = (operand, *operands[count:]), (axis, *axes[count:])
            if axis is None:
                results += rope_p.bind(*alone, layout=layout, tree=tree)
                out_axes.append(None)
            else:
                results += _batch(alone, alone_axes, layout=layout, tree=tree)[0]
                out_axes.append(0)
        return results, out_axes
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def in_front(index, operand):
        if mapped[index]:
            return jnp.moveaxis(operand, axes[index], 0)
        operand = operand[None]
        return jnp.broadcast_to(operand, (size, *operand.shape[1:])) if index < count else operand

    results = rope_p.bind(*(in_front(i, x) for i, x in enumerate(operands)), layout=layout, tree=tree)
    return results, [0] * count


batching.primitive_batchers[rope_p] = _batch
