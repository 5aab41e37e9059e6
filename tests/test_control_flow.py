"""Control flow, rematerialisation, compilation and JAX's checks, over the shared table of cases."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, arguments, close

from jax_rope import rope

pytestmark = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def case(name, implementation, rng):
    """(ours, the formula, arguments)"""
    return (
        functools.partial(CASES[name].ours, implementation=implementation),
        CASES[name].formula,
        arguments(CASES[name], rng),
    )


@pytest.mark.transformation("scan, while_loop, fori_loop, cond")
def test_loops(case):
    ours, formula, (x, *floats) = case

    def scanned(f, x):
        def layer(carry, _):
            return jnp.tanh(f(carry, *floats)), None

        return jax.lax.scan(layer, x, length=3)[0]

    def whiled(f, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(f(c[1], *floats))), (0, x))[1]

    def chosen(f, x):
        return jax.lax.cond(x[0, 0, 0, 0] > 0, lambda x: f(x, *floats), lambda x: -f(-2 * x, *floats), x)

    for program in (scanned, whiled, chosen):
        close(jax.jit(functools.partial(program, ours))(x), program(formula, x))
    for program in (scanned, chosen):
        close(
            jax.jit(jax.grad(lambda x, p=program: jnp.sum(p(ours, x))))(x),
            jax.grad(lambda x, p=program: jnp.sum(p(formula, x)))(x),
        )
    rows = jnp.stack([x, -x])
    close(jax.vmap(functools.partial(chosen, ours))(rows), jax.vmap(functools.partial(chosen, formula))(rows))


@pytest.mark.transformation("checkpoint with policies")
def test_checkpoint(case):
    ours, formula, (x, *floats) = case

    def loss(f):
        return lambda x: jnp.sum(jnp.sin(f(jnp.cos(x), *floats)))

    for policy in (None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable):
        rematerialised = jax.checkpoint(loss(ours), policy=policy)
        close(jax.jit(jax.grad(rematerialised))(x), jax.grad(loss(formula))(x))


@pytest.mark.transformation("jit, lower and compile, donation, eval_shape")
def test_compiled(case, compilations):
    ours, formula, (x, *floats) = case
    expected = formula(x, *floats)
    compiled = jax.jit(ours).lower(x, *floats).compile()
    close(compiled(x, *floats), expected)
    shape = jax.eval_shape(ours, x, *floats)
    assert (shape.shape, shape.dtype) == (expected.shape, expected.dtype)
    jitted = jax.jit(ours, donate_argnums=0)
    once, again = x.copy(), x.copy()
    close(jitted(once, *floats), expected)
    before = compilations()
    jitted(again, *floats)
    assert compilations() == before


@pytest.mark.transformation("checking_leaks, debug_nans, disable_jit, bfloat16 matmuls")
def test_under_checks(case):
    ours, formula, (x, *floats) = case

    def step(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(ours(x, *floats))))(x)

    expected = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(formula(x, *floats))))(x)
    with jax.checking_leaks():
        close(jax.jit(step)(x), expected)
    with jax.debug_nans(True):
        close(jax.jit(step)(x), expected)
    with jax.default_matmul_precision("bfloat16"):
        close(jax.jit(step)(x), expected)
    with jax.disable_jit():
        close(step(x), expected)


@pytest.mark.transformation("x64 mode")
def test_x64_mode_changes_nothing(case, x64):
    """float32 stays float32, to the last bit; traced int64 offsets are as good."""
    ours, formula, (x, *floats) = case
    y = jax.jit(ours)(x, *floats)
    assert y.dtype == jnp.float32
    close(y, formula(x, *(jnp.float32(f) for f in floats)))


@pytest.mark.transformation("jax.export", webgpu="raises: use `jnp`")
def test_export(case, implementation):
    """jnp exports; webgpu says that it cannot, and what can."""
    ours, formula, (x, *floats) = case
    if implementation == "webgpu":
        with pytest.raises(NotImplementedError, match="cannot be exported, as no host callback can: use 'jnp'"):
            jax.export.export(jax.jit(ours))(x, *floats)
        return
    exported = jax.export.deserialize(jax.export.export(jax.jit(ours))(x, *floats).serialize())
    close(exported.call(x, *floats), formula(x, *floats))


@pytest.mark.transformation("unused results")
def test_what_is_not_needed_is_not_run(name, implementation, monkeypatch):
    if name != "rope":
        return  # it is about programs, not about cases
    from jax_rope.webgpu import offload

    calls = []
    monkeypatch.setattr(offload, "_run", lambda *a, **k: calls.append(a))

    @jax.jit
    def f(x):
        rope(x, implementation=implementation)
        return x + 1

    f(jnp.ones((3, 1, 4))).block_until_ready()
    assert calls == []
