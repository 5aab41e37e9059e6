"""The public functions, compiled by XLA: few cases, as each costs a compilation."""

import functools
import itertools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .. import config, reference
from ..op import rope, rope_cached, rope_qk
from ..reference import Comparison
from ..rotary import Rotary
from .host import DTYPES, FAR, Cases, draw, worst


def _configured(
    adapter: str | None, transport: str | None, case: Callable[..., Comparison], *arguments: str
) -> Comparison:
    """A case with settings of its own."""
    before = config.settings.adapter, config.settings.transport
    config.configure(adapter=adapter, transport=transport)
    try:
        return case(*arguments)
    finally:
        config.configure(adapter=before[0], transport=before[1])


def through_jax(adapter: str | None, quick: bool) -> Cases:
    on_adapter = functools.partial(functools.partial, _configured, adapter)
    pairings = ("interleaved", "half", "interleaved_to_half")
    combinations = list(itertools.product(DTYPES, pairings))
    for dtype, pairing in combinations[::4] if quick else combinations:
        yield f"rope and its gradient, {dtype}, {pairing}", on_adapter(None, _rope, dtype, pairing)
    # On other backends of JAX its buffers do not lie in the host's memory.
    transports = config.TRANSPORTS if jax.default_backend() == "cpu" else config.TRANSPORTS[:1]
    for transport in transports:
        yield f"rope_qk through {transport}", on_adapter(transport, _rope_qk)
    yield "rope_cached and its gradient", on_adapter(None, _rope_cached)
    yield "undone by inverse=True", on_adapter(None, _inverse)
    yield "vmap", on_adapter(None, _vmap)
    yield "8 threads call one jitted function", on_adapter(None, _threads)


def _rope(dtype: str, pairing: str) -> Comparison:
    x, cotangent = (jnp.asarray(draw((8, 3, 64), dtype, seed)) for seed in (0, 1))
    rotary, at = Rotary(pairing=pairing), np.array(FAR)

    @jax.jit
    def both(x, cotangent):
        y, vjp = jax.vjp(lambda x: rope(x, at, rotary, implementation="webgpu"), x)
        return y, *vjp(cotangent)

    y, x_cotangent = both(x, cotangent)
    exact, exact_back = reference.rotate(x, at, rotary), reference.rotate(cotangent, at, rotary, transpose=True)
    return worst(
        (
            reference.compare(y, exact, x, rotary),
            reference.compare(x_cotangent, exact_back, cotangent, rotary, transpose=True),
        )
    )


def _rope_qk() -> Comparison:
    """Grouped-query attention, heads first, a traced offset."""
    q, k = (jnp.asarray(draw((2, heads, 17, 64), "bfloat16", heads)) for heads in (9, 3))
    rotated = jax.jit(lambda q, k, offset: rope_qk(q, k, offset, seq_axis=-2, implementation="webgpu"))
    return worst(
        reference.compare(y, reference.rotate(x, offset, seq_axis=-2), x)
        for offset in (0, 131_071, 2**31 - 5)
        for x, y in zip((q, k), rotated(q, k, offset), strict=True)
    )


def _rope_cached() -> Comparison:
    x, rotary = jnp.asarray(draw((2, 17, 3, 64))), Rotary(pairing="half")
    angles = np.arange(17)[:, None] * rotary.inv_freq(64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotated(x):
        return rope_cached(x, cos, sin, pairing="half", implementation="webgpu")

    y, vjp = jax.vjp(rotated, x)
    (x_cotangent,) = vjp(x)
    return worst(
        (
            reference.compare(y, reference.rotate(x, None, rotary), x, rotary),
            reference.compare(x_cotangent, reference.rotate(x, None, rotary, transpose=True), x, rotary),
        )
    )


def _inverse() -> Comparison:
    x, rotary = jnp.asarray(draw((17, 3, 64))), Rotary(pairing="interleaved_to_half")
    y = rope(x, 10_000_000, rotary, inverse=True, implementation="webgpu")
    return reference.compare(y, reference.rotate(x, 10_000_000, rotary, inverse=True), x, rotary, inverse=True)


def _vmap() -> Comparison:
    """Over an axis that is not the first, with positions that have another."""
    x, at = draw((5, 4, 3, 16)), np.arange(20, dtype=np.int32).reshape(4, 5) * 1001
    rotated = jax.vmap(lambda x, at: rope(x, at, implementation="webgpu"), in_axes=(1, 0), out_axes=1)
    y = np.asarray(rotated(jnp.asarray(x), jnp.asarray(at)))
    return worst(reference.compare(y[:, i], reference.rotate(x[:, i], at[i]), x[:, i]) for i in range(4))


def _threads() -> Comparison:
    x = jnp.asarray(draw((40, 4, 32)))
    rotated = jax.jit(lambda x, offset: rope(x, offset, implementation="webgpu"))
    results: dict[int, np.ndarray] = {}
    rotated(x, 0)  # compiles

    def work(offset: int) -> None:
        for i in range(5):
            results[offset + i] = np.asarray(rotated(x, offset + i))

    running = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if len(results) < 40:
        raise RuntimeError(f"{40 - len(results)} of 40 calls from 8 threads have no result")
    return worst(reference.compare(y, reference.rotate(x, offset), x) for offset, y in results.items())
