"""Under jit, vmap, scan, checkpoint and grad; how often the host is called; what is traced and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope, rope_qk
from jax_rope.webgpu import offload


@pytest.fixture
def calls(monkeypatch):
    """The (direction, number of operands, shape of the first) of each offload."""
    seen = []
    rotate = offload.rotate

    def counting(layout, xs, *rest, **options):
        seen.append((layout.direction, len(xs), xs[0].shape))
        return rotate(layout, xs, *rest, **options)

    monkeypatch.setattr(offload, "rotate", counting)
    return seen


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def test_jit_equals_eager(implementation, rng):
    """To the rounding that XLA's fused multiply-adds change."""
    q, k = draw(rng, 2, 5, 4, 16), draw(rng, 2, 5, 2, 16)
    f = functools.partial(rope_qk, implementation=implementation)
    for a, b in zip(f(q, k, 3), jax.jit(f)(q, k, 3), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=5e-7)


def test_one_callback_forward_and_one_backward(calls, rng):
    q, k = draw(rng, 5, 4, 16), draw(rng, 5, 2, 16)

    @jax.jit
    def step(q, k):
        def loss(q, k):
            a, b = rope_qk(q, k, implementation="webgpu")
            return jnp.sum(a**2) + jnp.sum(b**3)

        return jax.value_and_grad(loss, (0, 1))(q, k)

    assert str(step.trace(q, k).jaxpr).count("rope_pure_callback") == 2
    assert step.lower(q, k).as_text().count("xla_ffi_python_cpu_callback") == 2
    jax.block_until_ready(step(q, k))
    assert [(direction, operands) for direction, operands, _ in calls] == [(1, 2), (-1, 2)]


def test_jnp_has_no_callback_and_exports(rng):
    q, k = draw(rng, 5, 4, 16), draw(rng, 5, 2, 16)

    @jax.jit
    def f(q, k, offset):
        return jax.grad(lambda q: sum(jnp.sum(y**2) for y in rope_qk(q, k, offset, implementation="jnp")))(q)

    assert "callback" not in str(f.trace(q, k, 3).jaxpr)
    assert "callback" not in f.lower(q, k, 3).as_text()
    exported = jax.export.deserialize(jax.export.export(f)(q, k, jnp.int32(3)).serialize())
    np.testing.assert_array_equal(np.asarray(exported.call(q, k, jnp.int32(3))), np.asarray(f(q, k, jnp.int32(3))))


def test_a_changed_offset_or_length_makes_no_pipeline(compilations, rng):
    f = jax.jit(lambda x, offset: rope(x, offset, implementation="webgpu"))
    x = draw(rng, 64, 4, 32)
    jax.block_until_ready(f(x, 0))
    pipelines = offload.rotator().kernels.pipelines
    before, compiled = len(pipelines), compilations()
    for offset in (1, 5000, -7):
        jax.block_until_ready(f(x, offset))
    assert compilations() == compiled
    for length in (1, 3, 63):
        jax.block_until_ready(f(x[:length], 9))
    jax.block_until_ready(rope(draw(rng, 2, 5, 6, 48), implementation="webgpu"))
    assert len(pipelines) == before


def test_equal_arguments_do_not_retrace(implementation, rng):
    traces = []

    @functools.partial(jax.jit, static_argnames="rotary")
    def f(x, rotary):
        traces.append(rotary)
        return rope(x, rotary=rotary, implementation=implementation)

    for _ in range(3):
        f(draw(rng, 5, 2, 16), Rotary(theta=500_000))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("x_axis", "position_axis"),
    [(x, p) for x in (None, 0, 1, 2, 3) for p in (None, 0, 1) if (x, p) != (None, None)],
)
@pytest.mark.parametrize("sizes", [(4, 3, 2), (2, 2, 2)])
@pytest.mark.transformation("vmap over x, positions or both, any axes, sizes that collide: one call")
def test_vmap(implementation, calls, x_axis, position_axis, sizes, rng):
    """Over x, positions, both; any axis; sizes that collide. One call for the whole batch."""
    batch, tokens, heads = sizes
    x = rng.standard_normal((tokens, heads, 8)).astype(np.float32)
    if x_axis is not None:
        x = rng.standard_normal((batch, tokens, heads, 8)).astype(np.float32)
    positions = rng.integers(0, 1000, (tokens,) if position_axis is None else (batch, tokens))
    rows = np.broadcast_to(x, (batch, tokens, heads, 8))
    expected = oracle.rotate(rows, np.broadcast_to(positions, (batch, tokens)))
    moved_x = x if x_axis is None else np.moveaxis(x, 0, x_axis)
    moved_positions = positions if position_axis is None else np.moveaxis(positions, 0, position_axis)
    mapped = jax.vmap(
        lambda x, p: rope(x, p, implementation=implementation), in_axes=(x_axis, position_axis), out_axes=1
    )
    y = mapped(jnp.asarray(moved_x), jnp.asarray(moved_positions, jnp.int32))
    oracle.assert_exact(np.moveaxis(np.asarray(y), 1, 0), expected, rows)
    assert len(calls) == (implementation == "webgpu")


@pytest.mark.transformation("nested vmap: one call")
def test_nested_vmap(implementation, calls, rng):
    x = draw(rng, 3, 3, 3, 3, 8)
    positions = jnp.asarray(rng.integers(0, 99, (3, 3)), jnp.int32)
    inner = jax.vmap(lambda x, p: rope(x, p, implementation=implementation), in_axes=(0, None))
    y = jax.vmap(inner, in_axes=(1, 0), out_axes=1)(x, positions)
    expected = oracle.rotate(x, np.broadcast_to(np.asarray(positions)[None], (3, 3, 3)))
    oracle.assert_exact(y, expected, x)
    assert len(calls) == (implementation == "webgpu")


def test_vmap_of_a_traced_offset(implementation, rng):
    x = draw(rng, 4, 5, 2, 8)
    offsets = jnp.array([0, 100, 7, -3], jnp.int32)
    y = jax.vmap(lambda x, p: rope(x, p, implementation=implementation))(x, offsets)
    oracle.assert_exact(y, oracle.rotate(x, np.asarray(offsets)[:, None] + np.arange(5)), x)


def test_per_sample_gradients(implementation, rng):
    x = draw(rng, 4, 5, 2, 8)
    f = functools.partial(rope, implementation=implementation)
    grads = jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 3)))(x)
    expected = jnp.stack([jax.grad(lambda x: jnp.sum(f(x) ** 3))(row) for row in x])
    np.testing.assert_allclose(np.asarray(grads), np.asarray(expected), rtol=1e-6)


@pytest.mark.transformation("scan over decode steps, over layers with checkpoint")
def test_scan_over_decode_steps(implementation, calls, rng):
    x = draw(rng, 6, 1, 2, 8)

    @jax.jit
    def decode(x):
        def step(position, token):
            return position + 1, rope(token, position, implementation=implementation)

        return jax.lax.scan(step, jnp.int32(10), x)[1]

    oracle.assert_exact(decode(x), oracle.rotate(x, (10 + np.arange(6))[:, None]), x)
    assert len(calls) == (6 if implementation == "webgpu" else 0)


@pytest.mark.transformation("scan over decode steps, over layers with checkpoint")
def test_scan_over_layers_with_checkpoint(implementation, rng):
    """The gradient through rematerialised layers is that of the layers written out."""
    weights, x = 0.3 * draw(rng, 3, 8, 8), draw(rng, 5, 2, 8)

    def layer(x, w):
        return jnp.tanh(rope(x @ w, 4, implementation=implementation)), None

    def scanned(weights):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    def unrolled(weights):
        y = x
        for w in weights:
            y, _ = layer(y, w)
        return jnp.sum(y**2)

    np.testing.assert_allclose(
        np.asarray(jax.jit(jax.grad(scanned))(weights)), np.asarray(jax.grad(unrolled)(weights)), atol=1e-5
    )


def test_hessian(implementation, rng):
    x = draw(rng, 3, 1, 4)
    f = functools.partial(rope, implementation=implementation)
    hessian = jax.hessian(lambda x: jnp.sum(jnp.sin(f(x))))(x).reshape(12, 12)
    jacobian = np.asarray(jax.jacrev(f)(x), np.float64).reshape(12, 12)
    second = -np.sin(np.asarray(f(x), np.float64)).reshape(12)
    np.testing.assert_allclose(np.asarray(hessian), jacobian.T @ (second[:, None] * jacobian), atol=2e-6)


def test_donation(implementation, rng):
    x = draw(rng, 5, 2, 16)
    expected = oracle.rotate(x, np.arange(5))
    before = np.asarray(x).copy()
    y = jax.jit(lambda x: rope(x, implementation=implementation), donate_argnums=0)(x)
    oracle.assert_exact(y, expected, before)


def test_eval_shape_needs_no_call(calls):
    x = jax.ShapeDtypeStruct((2, 5, 4, 16), jnp.bfloat16)
    y = jax.eval_shape(lambda x: rope(x, implementation="webgpu"), x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert calls == []


def test_without_jit(implementation, rng):
    """jax.disable_jit is how people debug: eager, and under grad, vmap and scan."""
    x = draw(rng, 3, 5, 2, 8)
    f = functools.partial(rope, implementation=implementation)
    expected = oracle.rotate(x, 4 + np.broadcast_to(np.arange(5), (3, 5)))
    with jax.disable_jit():
        oracle.assert_exact(f(x, 4), expected, x)
        oracle.assert_exact(jax.vmap(f, in_axes=(0, None))(x, 4), expected, x)
        ones = np.ones(x.shape, np.float32)
        grad = jax.grad(lambda x: jnp.sum(f(x)))(x)
        oracle.assert_exact(grad, oracle.rotate(ones, np.broadcast_to(np.arange(5), (3, 5)), direction=-1), ones)
        oracle.assert_exact(jax.lax.scan(lambda c, x: (c, f(x, 4)), 0, x)[1], expected, x)


def test_vmap_of_q_alone_leaves_k_alone(implementation, calls, rng):
    q, k = draw(rng, 4, 5, 3, 8), draw(rng, 5, 1, 8)
    f = jax.vmap(lambda q: rope_qk(q, k, 3, implementation=implementation), out_axes=(0, None))
    q_out, k_out = f(q)
    oracle.assert_exact(q_out, oracle.rotate(q, 3 + np.broadcast_to(np.arange(5), (4, 5))), q)
    oracle.assert_exact(k_out, oracle.rotate(k, 3 + np.arange(5)), k)


def test_int64_positions_beyond_int32(x64, implementation):
    """Traced ones cannot raise: they are not silently taken modulo 2**32."""
    x = jnp.ones((3, 1, 4), jnp.float32)
    positions = np.array([1, 2**40 + 1, -(2**31)])
    y = np.asarray(jax.jit(functools.partial(rope, implementation=implementation))(x, positions))
    assert np.isnan(y[1]).all()
    oracle.assert_exact(y[[0, 2]], oracle.rotate(x[:2], positions[[0, 2]]), x[:2])
