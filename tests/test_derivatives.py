"""Every derivative of every case, against JAX's own derivatives of an independent formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, arguments, close

from jax_rope import rope

pytestmark = pytest.mark.parametrize("name", CASES)


def pair(name, implementation, forward=False):
    case = CASES[name]
    return functools.partial(case.ours, implementation=implementation, forward=forward), case.formula


def all_arguments(name):
    return tuple(range(1 + len(CASES[name].floats)))


def scalar(f):
    return lambda *arguments: jnp.sum(jnp.sin(f(*arguments)))


@pytest.mark.transformation("grad, value_and_grad, vjp")
def test_reverse(name, implementation, rng):
    ours, formula = pair(name, implementation)
    inputs, argnums = arguments(CASES[name], rng), all_arguments(name)
    for jit in (lambda f: f, jax.jit):
        actual = jit(jax.value_and_grad(scalar(ours), argnums))(*inputs)
        close(actual, jax.value_and_grad(scalar(formula), argnums)(*inputs))
    y, vjp = jax.vjp(ours, *inputs)
    expected, expected_vjp = jax.vjp(formula, *inputs)
    close((y, vjp(jnp.cos(y))), (expected, expected_vjp(jnp.cos(expected))))


@pytest.mark.transformation("jacrev")
def test_jacrev(name, implementation, rng):
    ours, formula = pair(name, implementation)
    inputs, argnums = arguments(CASES[name], rng), all_arguments(name)
    close(jax.jacrev(ours, argnums)(*inputs), jax.jacrev(formula, argnums)(*inputs))


@pytest.mark.transformation("reverse over reverse")
def test_reverse_over_reverse(name, implementation, rng):
    ours, formula = pair(name, implementation)
    inputs, argnums = arguments(CASES[name], rng), all_arguments(name)

    def twice(f):
        gradient = jax.grad(scalar(f), argnums)
        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in gradient(*a)), argnums)

    close(twice(ours)(*inputs), twice(formula)(*inputs), 5e-3)


@pytest.mark.transformation("hessian, forward over reverse")
def test_forward_over_reverse(name, implementation, rng):
    ours, formula = pair(name, implementation)
    x, *floats = arguments(CASES[name], rng)
    inputs, argnums = (x[:1, :, :1], *floats), all_arguments(name)
    if name == "rope":  # its positions have two rows
        inputs = (x[:, :, :1],)
    close(jax.hessian(scalar(ours), argnums)(*inputs), jax.hessian(scalar(formula), argnums)(*inputs), 1e-3)


@pytest.mark.transformation("jvp, jacfwd, linearize (through jax_rope.forward_mode)")
def test_forward(name, implementation, rng):
    ours, formula = pair(name, implementation, forward=True)
    inputs = arguments(CASES[name], rng)
    changes = tuple(jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for a in inputs)
    close(jax.jvp(ours, inputs, changes), jax.jvp(formula, inputs, changes))
    close(jax.jit(lambda a, b: jax.jvp(ours, a, b))(inputs, changes), jax.jvp(formula, inputs, changes))
    y, linear = jax.linearize(ours, *inputs)
    close((y, linear(*changes)), jax.jvp(formula, inputs, changes))
    argnums = all_arguments(name)
    close(jax.jacfwd(ours, argnums)(*inputs), jax.jacfwd(formula, argnums)(*inputs))
    close(jax.grad(scalar(ours), argnums)(*inputs), jax.grad(scalar(formula), argnums)(*inputs))


@pytest.mark.transformation("linear_transpose (through jax_rope.forward_mode)")
def test_linear_transpose(name, implementation, rng):
    ours, formula = pair(name, implementation, forward=True)
    x, *floats = arguments(CASES[name], rng)
    if name == "rope_qk":
        return  # this case multiplies q by k, and is not linear
    y = formula(x, *floats)
    (back,) = jax.linear_transpose(lambda x: ours(x, *floats), x)(y)
    (expected,) = jax.vjp(lambda x: formula(x, *floats), x)[1](y)
    close(back, expected)


@pytest.mark.transformation("per-sample gradients, vmap of grad")
def test_per_sample_gradients(name, implementation, rng):
    ours, formula = pair(name, implementation)
    x, *floats = arguments(CASES[name], rng)
    xs = jnp.stack([x, 2 * x, x - 1])
    axes = (0, *[None] * len(floats))
    argnums = all_arguments(name)
    actual = jax.vmap(jax.grad(scalar(ours), argnums), axes)(xs, *floats)
    close(actual, jax.vmap(jax.grad(scalar(formula), argnums), axes)(xs, *floats))


def test_direct_forward_mode_is_refused(name, implementation, rng):
    """With jax_rope.rope itself, not silently wrong."""
    if name != "rope":
        return  # one is as good as all
    x, *_ = arguments(CASES[name], rng)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: rope(x, implementation=implementation), (x,), (x,))
    assert "forward_mode" in rope.__doc__


@pytest.mark.transformation("integer positions: their cotangent is float0")
def test_integer_positions_have_no_gradient(name, implementation, rng):
    if name != "rope":
        return  # the others' positions are constants
    x, _ = rng.standard_normal((2, 2, 5, 4, 8)).astype(np.float32)
    positions = jnp.arange(5, dtype=jnp.int32)
    gradient = jax.grad(lambda x, p: jnp.sum(rope(x, p, implementation=implementation)), (0, 1), allow_int=True)
    by_x, by_positions = gradient(jnp.asarray(x), positions)
    assert (by_positions.dtype, by_positions.shape) == (jax.dtypes.float0, (5,))
    assert by_x.shape == x.shape
