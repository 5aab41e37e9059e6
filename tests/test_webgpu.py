"""The host path: pieces and limits, staging, pipelines, threads; and the WGSL under a second compiler."""

import gc
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu

from jax_rope import adapters, rope, rope_qk
from jax_rope.webgpu import device, kernels, offload


def small_rotator(binding=None, workgroups=None, mapped=None) -> offload.Rotator:
    """A device of its own, which believes in tighter limits than its adapter has."""
    own = device.Device()
    if binding is not None:
        own.limits["max-storage-buffer-binding-size"] = binding
    if workgroups is not None:
        own.limits["max-compute-workgroups-per-dimension"] = workgroups
    if mapped is not None:
        own.mapped = mapped
    return offload.Rotator(own)


@pytest.fixture
def runs(monkeypatch):
    """Counts the pieces that are run."""
    seen = []
    run = offload.Rotator.run

    def counting(self, call, piece):
        seen.append(piece)
        run(self, call, piece)

    monkeypatch.setattr(offload.Rotator, "run", counting)
    return seen


def draw(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("seq_axis", [-3, -2])
@pytest.mark.parametrize(
    ("limits", "least_pieces"),
    [
        ({"binding": 4096}, 4),
        ({"binding": 512}, 30),  # less than a token's heads
        ({"workgroups": 1}, 4),
        ({"workgroups": 2}, 2),
        ({}, 1),
    ],
)
def test_pieces(monkeypatch, runs, limits, least_pieces, seq_axis, dtype, mapped, rng):
    """Cut by rows, by tokens or by heads, through mapped or staged buffers, the result is the whole."""
    rotator = small_rotator(**limits, mapped=mapped)
    monkeypatch.setattr(offload, "rotator", lambda *_: rotator)
    q, k = draw(rng, (3, 17, 9, 16), dtype), draw(rng, (3, 17, 3, 16), dtype)
    whole_and_fraction = (rng.integers(-500, 500, (3, 17)) + 0.375).astype(np.float32)
    for positions in (None, 1000, rng.integers(0, 9999, (3, 17)), whole_and_fraction, rng.integers(0, 99, 17)):
        runs.clear()
        arranged = (q, k) if seq_axis == -3 else (jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2))
        results = rope_qk(*arranged, positions, seq_axis=seq_axis, implementation="webgpu")
        expected_positions = positions if np.ndim(positions) else (positions or 0) + np.arange(17)
        for x, y in zip((q, k), results, strict=True):
            y = y if seq_axis == -3 else jnp.swapaxes(y, 1, 2)
            oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(expected_positions, (3, 17))), x)
        assert len(runs) >= least_pieces if least_pieces > 1 else len(runs) == 1


def test_a_head_beyond_the_limits(monkeypatch):
    rotator = small_rotator(binding=256)
    monkeypatch.setattr(offload, "rotator", lambda *_: rotator)
    with pytest.raises(Exception, match="one head of one token, 128 float32, exceeds the adapter's limits"):
        jax.block_until_ready(rope(jnp.ones((1, 1, 128)), implementation="webgpu"))


def test_objects_do_not_pile_up(rng):
    """pygfx/wgpu-py#405: buffers, bind groups and pipelines are bounded, whatever the shapes."""
    counts = []
    gc.collect()  # what other tests left behind
    for round in range(4):
        for size in (1, 300, 40, 1500, 7):
            x = draw(rng, (size, 3, 32), jnp.float32)
            jax.block_until_ready(rope(x, np.arange(size), implementation="webgpu"))
            jax.block_until_ready(rope(x, round, implementation="webgpu"))
        live = wgpu.diagnostics.object_counts.get_dict()
        counts.append({kind: live[kind]["count"] for kind in ("Buffer", "BindGroup", "ComputePipeline")})
    assert counts[1] == counts[2] == counts[3]  # the first may still grow a buffer


@pytest.mark.parametrize("mapped", [True, False])
def test_a_failed_call_leaves_the_next_one_well(monkeypatch, mapped, rng):
    """pygfx/wgpu-py#781: a staging buffer still mapped when it is used again."""
    rotator = small_rotator(mapped=mapped)
    monkeypatch.setattr(offload, "rotator", lambda *_: rotator)
    x = draw(rng, (5, 2, 16), jnp.float32)
    expected = np.asarray(rope(x, implementation="webgpu"))
    for name in ("_write_parameters", "kernel"):
        with monkeypatch.context() as broken:
            broken.setattr(rotator, name, lambda *_: 1 / 0)
            with pytest.raises(Exception, match="ZeroDivisionError"):
                jax.block_until_ready(rope(x, implementation="webgpu"))
        np.testing.assert_array_equal(np.asarray(rope(x, implementation="webgpu")), expected)


def test_threads(rng):
    """Many Python threads call one jitted function; each gets its own result."""
    f = jax.jit(lambda x, offset: rope(x, offset, implementation="webgpu"))
    x = draw(rng, (40, 4, 32), jnp.float32)
    jax.block_until_ready(f(x, 0))
    failures = []

    def work(seed):
        try:
            for i in range(10):
                offset = 1000 * seed + i
                oracle.assert_exact(f(x, offset), oracle.rotate(x, offset + np.arange(40)), x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_adapters_are_described():
    first = adapters()[0]
    assert first.kind in ("discrete", "integrated", "other", "software")
    assert first.limits["max-storage-buffer-binding-size"] >= 2**27
    assert first.name in str(first)
    assert device.choose(first.backend.lower()).backend == first.backend


ENTRY_POINTS = [
    f"{way}{kind}{by}"
    for way in ("forward", "backward")
    for kind in ("", "_packed", "_scalar")
    for by in ("", "_tables")
]


def test_tint_compiles_every_variant():
    """Dawn's compiler rejects some of what naga accepts. Its null backend needs no driver, but a process of its own."""
    program = f"""
import wgpudawn
device = wgpudawn.gpu.request_adapter_sync().request_device_sync()
module = device.create_shader_module(code={kernels.source("rope.wgsl")!r})
for entry_point in {ENTRY_POINTS!r}:
    for interleaved in (0, 1):
        for storage in (1, 2):
            constants = dict(INTERLEAVED=interleaved, STORAGE=storage, WORKGROUP_SIZE=64, HEADS_PER_THREAD=8)
            compute = dict(module=module, entry_point=entry_point, constants=constants)
            device.create_compute_pipeline(layout="auto", compute=compute)
            print("compiled")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"WGPU_BACKEND_TYPE": "Null", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == 48
