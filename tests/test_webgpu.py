"""The host path: pieces and limits, staging, pipelines, threads; and the WGSL under a second compiler."""

import dataclasses
import gc
import itertools
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu

from jax_rope import adapters, rope, rope_qk
from jax_rope.webgpu import device, kernels, offload, rotator as rotator_module


def small_rotator(binding=None, workgroups=None, mapped=None, kind=None) -> offload.Rotator:
    """A device of its own, which believes in tighter limits than its adapter has, and perhaps in another kind."""
    own = device.Device()
    if binding is not None:
        own.limits["max-storage-buffer-binding-size"] = binding
    if workgroups is not None:
        own.limits["max-compute-workgroups-per-dimension"] = workgroups
    if mapped is not None:
        own.mapped = mapped
    if kind is not None:
        own.adapter = dataclasses.replace(own.adapter, kind=kind)
    return offload.Rotator(own)


@pytest.fixture
def runs(monkeypatch):
    """Counts the pieces that are run."""
    seen = []
    start = offload.Rotator._start

    def counting(self, call, piece, data):
        seen.append(piece)
        return start(self, call, piece, data)

    monkeypatch.setattr(offload.Rotator, "_start", counting)
    return seen


def draw(rng, shape, dtype):
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize(
    ("mapped", "kind", "small"),
    [
        (True, "software", True),
        (True, "software", False),
        (True, "integrated", False),
        (False, "discrete", True),
        (False, "discrete", False),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("seq_axis", [-3, -2])
@pytest.mark.parametrize(
    ("limits", "least_pieces"),
    [
        ({"binding": 4096}, 4),
        ({"binding": 512}, 30),  # less than a token's heads
        ({"workgroups": 1}, 4),
        ({"workgroups": 3}, 1),  # up to seven workgroups, three by three
        ({}, 1),
    ],
)
def test_pieces(monkeypatch, runs, limits, least_pieces, seq_axis, dtype, mapped, kind, small, rng):
    """Cut by rows, by tokens or by heads, through the queue, mapped or staged buffers, the result is the whole."""
    if not small:
        monkeypatch.setattr(rotator_module, "SMALL", 0)
    rotator = small_rotator(**limits, mapped=mapped, kind=kind)
    assert len(rotator.slots) == (1 if kind == "software" else 2)  # in turn, or overlapped
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
    for round in range(4):
        for size in (1, 300, 40, 1500, 7):
            x = draw(rng, (size, 3, 32), jnp.float32)
            jax.block_until_ready(rope(x, np.arange(size), implementation="webgpu"))
            jax.block_until_ready(rope(x, round, implementation="webgpu"))
        gc.collect()  # a map that was asked for and its buffer refer to each other
        live = wgpu.diagnostics.object_counts.get_dict()
        counts.append({kind: live[kind]["count"] for kind in ("Buffer", "BindGroup", "ComputePipeline")})
    assert counts[1] == counts[2] == counts[3]  # the first may still grow a buffer


@pytest.mark.parametrize(("mapped", "kind"), [(True, "software"), (True, "integrated"), (False, "discrete")])
def test_a_failed_call_leaves_the_next_one_well(monkeypatch, mapped, kind, rng):
    """pygfx/wgpu-py#781: a staging buffer still mapped when it is used again."""
    rotator = small_rotator(mapped=mapped, kind=kind)
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


ROOT = Path(__file__).parents[1]
WGSL = sorted(file for folder in ("wgsl", "examples") for file in (ROOT / folder).rglob("*.wgsl"))
# What the package gives to overrides; to those of type bool either value.
IN_USE = {
    "STORAGE": (1, 2),
    "WORKGROUP_SIZE": (kernels.WORKGROUP_SIZE,),
    "HEADS_PER_THREAD": (kernels.HEADS_PER_THREAD,),
}


def variants(source: str) -> list[tuple[str, dict[str, int]]]:
    """The entry points of a WGSL file, each with every combination of its overrides' values."""
    entry_points = re.findall(r"^@compute[^;{]*?\bfn (\w+)", source, re.MULTILINE)
    overrides = re.findall(r"^override (\w+): (\w+)", source, re.MULTILINE)
    values = [(0, 1) if kind == "bool" else IN_USE[name] for name, kind in overrides]
    combinations = [dict(zip((name for name, _ in overrides), v, strict=True)) for v in itertools.product(*values)]
    return list(itertools.product(entry_points, combinations))


@pytest.mark.parametrize("file", WGSL, ids=lambda file: file.name)
def test_tint_compiles_every_variant(file):
    """Dawn's compiler rejects some of what naga accepts. Its null backend needs no driver, but a process of its own."""
    source = file.read_text(encoding="utf-8")
    tried = variants(source)
    assert len(tried) >= source.count("@compute") > 0
    program = f"""
import wgpudawn
device = wgpudawn.gpu.request_adapter_sync().request_device_sync()
module = device.create_shader_module(code={source!r})
for entry_point, constants in {tried!r}:
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
    assert done.stdout.count("compiled") == len(tried)


def test_every_variant_is_read():
    """Two directions, three ways to store, by angles or by tables; three overrides of two values."""
    tried = variants(kernels.source("rope.wgsl"))
    assert len(tried) == len({(entry_point, *constants.items()) for entry_point, constants in tried}) == 12 * 8
