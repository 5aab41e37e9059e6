"""Meshes of two devices: shard_map, explicit and automatic sharding, over the shared table of cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, arguments, close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_rope import Rotary, rope, rope_cached, rope_qk

COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")


def mesh_of(kind):
    return jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.transformation("shard_map over batch, sequence or heads, gradients with psum in the loss")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(None, None, "d")], ids=["batch", "sequence", "heads"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_shard_map(implementation, spec, check_vma, jit, rng):
    """Positions are replicated, but where the sequence is sharded, which has its global positions."""
    mesh = mesh_of(AxisType.Auto)
    q, k = draw(rng, 2, 6, 4, 8), draw(rng, 2, 6, 2, 8)
    positions = jnp.asarray(rng.integers(0, 1000, 6), jnp.int32)

    def local(q, k, p):
        a, b = rope_qk(q, k, p, implementation=implementation)
        return jnp.sum(jnp.sin(a)) + jnp.sum(b**2)

    def total(q, k, p):
        return jax.lax.psum(local(q, k, p), "d")

    in_specs = (spec, spec, P("d") if spec == P(None, "d") else P())
    sharded = jax.shard_map(total, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    f = jax.value_and_grad(sharded, (0, 1))
    q_in, k_in, p_in = (
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((q, k, positions), in_specs, strict=True)
    )
    actual = (jax.jit(f) if jit else f)(q_in, k_in, p_in)
    close(actual, jax.value_and_grad(lambda q, k: local(q, k, positions), (0, 1))(q, k), 3e-4)


@pytest.mark.transformation("shard_map with replicated floats that have gradients")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.floats])
def test_replicated_floats(implementation, name, check_vma, rng):
    """Their gradients are summed over the shards, once."""
    mesh = mesh_of(AxisType.Auto)
    x, *floats = arguments(CASES[name], rng)
    ours = functools.partial(CASES[name].ours, implementation=implementation)

    def loss(f):
        return lambda x, *floats: jnp.sum(jnp.sin(f(x, *floats)))

    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(loss(ours)(*a), "d"),
        mesh=mesh,
        in_specs=(P("d"), *[P()] * len(floats)),
        out_specs=P(),
        check_vma=check_vma,
    )
    argnums = tuple(range(1 + len(floats)))
    close(
        jax.jit(jax.grad(sharded, argnums))(x, *floats), jax.grad(loss(CASES[name].formula), argnums)(x, *floats), 3e-4
    )


@pytest.mark.transformation("shard_map with a replicated x beside positions that vary")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_replicated_operand(implementation, check_vma, rng):
    """Its gradient is the sum over the shards, not one of them."""
    mesh = mesh_of(AxisType.Auto)
    x, positions = draw(rng, 1, 5, 2, 8), jnp.asarray(rng.integers(0, 99, (2, 5)), jnp.int32)

    def local(x, p):
        return jnp.sum(jnp.sin(rope(x, p, implementation=implementation)))

    sharded = jax.shard_map(
        lambda x, p: jax.lax.psum(local(x, p), "d"),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P(),
        check_vma=check_vma,
    )
    expected = jax.grad(lambda x: local(x, positions[:1]) + local(x, positions[1:]))(x)
    close(jax.jit(jax.grad(sharded))(x, positions), expected)


@pytest.mark.transformation("explicit axis types: no collective, sharding kept")
@pytest.mark.parametrize(
    "spec", [P("d"), P(None, "d"), P(None, None, "d"), P()], ids=["batch", "sequence", "heads", "none"]
)
@pytest.mark.parametrize("chosen", ["jnp", "webgpu", None])
@pytest.mark.parametrize("kind", ["offset", "rows", "float"])
def test_explicit(chosen, spec, kind, rng):
    mesh = mesh_of(AxisType.Explicit)
    q, k = draw(rng, 2, 6, 4, 8), draw(rng, 2, 6, 2, 8)
    positions = {
        "offset": jnp.int32(10**6),
        "rows": jnp.asarray(rng.integers(0, 99, (2, 6)), jnp.int32),
        "float": jnp.asarray(rng.uniform(0, 99, 6), jnp.float32),
    }[kind]

    def f(q, k, p):
        return rope_qk(q, k, p, implementation=chosen)

    def loss(q, k, p):
        return sum(jnp.sum(jnp.sin(y)) for y in f(q, k, p))

    expected = rope_qk(q, k, positions, implementation="jnp")
    gradient = jax.grad(loss, (0, 1))(q, k, positions)
    with jax.set_mesh(mesh):
        q_in, k_in = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k))
        compiled = jax.jit(f).lower(q_in, k_in, positions).compile()
        results = compiled(q_in, k_in, positions)
        assert not [c for c in COLLECTIVES if c in compiled.as_text()]
        gradients = jax.jit(jax.grad(loss, (0, 1)))(q_in, k_in, positions)
        for a in (*results, *gradients):
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)
    close((results, gradients), (expected, gradient), 3e-4)


@pytest.mark.transformation("explicit axis types: no collective, sharding kept")
def test_explicit_tables_and_heads_first(implementation, rng):
    mesh = mesh_of(AxisType.Explicit)
    x = draw(rng, 2, 4, 6, 8)
    cos, sin = Rotary().tables(np.arange(6), 8)
    expected = rope_cached(x, cos, sin, seq_axis=-2, implementation="jnp")
    with jax.set_mesh(mesh):
        for spec in (P("d"), P(None, "d"), P(None, None, "d")):
            x_in = jax.device_put(x, NamedSharding(mesh, spec))
            f = jax.jit(lambda x: rope_cached(x, cos, sin, seq_axis=-2, implementation=implementation))
            close(f(x_in), expected)
            assert f(x_in).sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


def test_explicit_mistakes(rng):
    mesh = mesh_of(AxisType.Explicit)
    q, k = draw(rng, 2, 6, 4, 8), draw(rng, 2, 6, 2, 8)
    with jax.set_mesh(mesh):
        by_head_dim = jax.device_put(q, NamedSharding(mesh, P(None, None, None, "d")))
        with pytest.raises(ValueError, match="head_dim must not be sharded"):
            jax.jit(lambda q: rope(q, implementation="webgpu"))(by_head_dim)
        by_batch, by_token = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((q, P("d")), (k, P(None, "d"))))
        with pytest.raises(ValueError, match="q and k must be sharded alike, but for their heads"):
            jax.jit(lambda q, k: rope_qk(q, k, implementation="webgpu"))(by_batch, by_token)


@pytest.mark.transformation(
    "automatic sharding: never gathers, sharding kept", webgpu="raises: use `jnp`, `shard_map` or explicit axis types"
)
@pytest.mark.parametrize("chosen", ["jnp", "webgpu", None])
def test_automatic(chosen, rng):
    """jnp and None never gather, and keep the sharding; webgpu says what to do instead."""
    mesh = mesh_of(AxisType.Auto)
    for spec in (P("d"), P(None, "d"), P(None, None, "d")):
        x = jax.device_put(draw(rng, 2, 6, 4, 8), NamedSharding(mesh, spec))
        f = jax.jit(lambda x: rope(x, 3, implementation=chosen))
        if chosen == "webgpu":
            with pytest.raises(
                NotImplementedError, match=r"under automatic sharding .* use 'jnp', jax.shard_map, or a mesh"
            ):
                f(x)
            continue
        compiled = f.lower(x).compile()
        assert not [c for c in COLLECTIVES if c in compiled.as_text()]
        assert compiled(x).sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
        close(compiled(x), rope(np.asarray(x), 3))


@pytest.mark.transformation("pmap")
def test_pmap(implementation, rng):
    if not hasattr(jax, "pmap"):
        return  # some JAX has it no more
    x = draw(rng, 2, 5, 4, 8)
    f = jax.pmap(lambda x: rope(x, 3, implementation=implementation), devices=jax.devices()[:2])
    close(f(x), rope(x, 3, implementation="jnp"))
