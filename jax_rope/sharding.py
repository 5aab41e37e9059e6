"""Meshes: what a callback needs, that sees one shard at a time, and what its derivatives need."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .fallback import Tables
from .layout import Layout
from .phase import Angles

Rotate = Callable[[Sequence[jax.Array], Angles | Tables], tuple[jax.Array, ...]]


def varying_alike(xs: Sequence[jax.Array], by: Angles | Tables) -> tuple[tuple[jax.Array, ...], Angles | Tables]:
    """Within ``shard_map``, everything as varying over mesh axes as the most varying of it.

    An operand that is the same on all shards, beside others that are not, has a gradient that is summed over the
    shards. JAX does that where the operand is made varying, so that has to happen outside of the custom_vjp.
    """
    axes = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves((xs, by))))

    def varying(leaf):
        missing = tuple(axes - _varying(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(varying, (tuple(xs), by))


def _varying(leaf) -> frozenset:
    return jax.typeof(leaf).manual_axis_type.varying


def shard_number() -> jax.Array | None:
    """Within ``shard_map``, the number of this shard, int32; else None."""
    mesh = jax.sharding.get_abstract_mesh()
    number = None
    for axis in mesh.manual_axes:
        index = jax.lax.axis_index(axis)
        number = index if number is None else number * mesh.shape[axis] + index
    return number


def by_shards(rotate: Rotate, layout: Layout, xs: Sequence[jax.Array], by: Angles | Tables) -> tuple[jax.Array, ...]:
    """``rotate``, on each shard by itself where the operands' types say how they are sharded (explicit axis types).

    The results are sharded as the operands are, and nothing is moved between devices.

    Raises:
      ValueError: head_dim is sharded, or q and k are not sharded alike.
    """
    shardings = [jax.typeof(x).sharding for x in xs]
    mesh = shardings[0].mesh
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return rotate(xs, by)
    specs = [PartitionSpec(*s.spec, *[None] * (x.ndim - len(s.spec))) for s, x in zip(shardings, xs, strict=True)]
    shared = [(spec[:-3], spec[layout.token_axis]) for spec in specs]
    if any(spec[-1] is not None for spec in specs):
        raise ValueError(f"head_dim must not be sharded, got {', '.join(map(str, specs))}")
    if shared[0] != shared[-1]:
        raise ValueError(f"q and k must be sharded alike, but for their heads, got {specs[0]} and {specs[-1]}")
    batch, tokens = shared[0]
    if isinstance(by, Angles) and tokens is not None:
        by = _written_out(by, xs[0].shape[layout.token_axis])

    # The axes behind the batch.
    behind: dict[str, tuple] = {"cos": (tokens, None), "sin": (tokens, None)}
    if isinstance(by, Angles):
        behind = {"positions": (None, tokens), "table": (None, None)}
        behind |= {"fractions": (None, tokens), "frequencies": (None,)}

    def spec_of(leaf, last) -> PartitionSpec | None:
        if leaf is None:
            return None
        return PartitionSpec(
            *(axis if size > 1 else None for axis, size in zip(batch, leaf.shape, strict=False)), *last
        )

    kind: Any = type(by)
    by_specs = kind(**{name: spec_of(getattr(by, name), last) for name, last in behind.items()})
    by = jax.tree.map(lambda leaf, spec: jax.reshard(leaf, jax.sharding.NamedSharding(mesh, spec)), by, by_specs)
    in_specs = (tuple(specs), by_specs)
    sharded = jax.shard_map(
        lambda xs, by: rotate(*varying_alike(xs, by)), mesh=mesh, in_specs=in_specs, out_specs=tuple(specs)
    )
    return sharded(tuple(xs), by)


def _written_out(by: Angles, length: int) -> Angles:
    """With a position for each token: a shard cannot count from a row's first one, which another shard has."""
    if by.positions.shape[-1] == length:
        return by
    steps = jnp.expand_dims(jnp.arange(length, dtype=jnp.int32), tuple(range(by.positions.ndim - 1)))
    fractions = by.fractions
    if fractions is not None:
        fractions = jnp.broadcast_to(fractions, (*fractions.shape[:-1], length))
    return by._replace(positions=by.positions + steps, fractions=fractions)
