"""Several processes, several adapters, one core, both transports: each in processes of their own, with time limits."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_rope
from jax_rope import config, rope, rope_cached
from jax_rope.webgpu import offload

ROOT = Path(__file__).parents[1]


def start(arguments, **environment) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen, seconds: float) -> str:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end after {seconds} s: {process.communicate()}") from None
    assert process.returncode == 0, err
    return out


@pytest.mark.transformation("several processes (jax.distributed)")
def test_two_processes_train_as_one(implementation):
    """The same parameters after ten steps."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = ["examples/data_parallel.py", "--implementation", implementation]
    both = ["--coordinator", f"localhost:{port}", "--processes", "2", "--process"]
    running = [start(program), *(start([*program, *both, str(i)]) for i in range(2))]
    outputs = [finish(process, 120).splitlines() for process in running]
    one, first, second = ([line for line in lines if not line.startswith("[Gloo]")] for lines in outputs)
    assert first[0].startswith("process 0 of 2") and second[0].startswith("process 1 of 2")
    assert first[1:] == second[1:]
    for a, b in zip(one[1:], first[1:], strict=True):
        assert a.split()[0] == b.split()[0]
        np.testing.assert_allclose(np.float64(a.split()[1:]), np.float64(b.split()[1:]), atol=3e-5)


TWO_ADAPTERS = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_rope import rope
from jax_rope.webgpu import device, offload

for shard in range(2):
    offload.rotator(None, shard)  # tries the adapter, which does not count
ran = []
run = offload.Rotator.run
offload.Rotator.run = lambda self, call: (ran.append(id(self.device)), run(self, call))[1]
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = np.random.default_rng(0).standard_normal((4, 6, 2, 8)).astype(np.float32)
x = jax.device_put(x, NamedSharding(mesh, P("d")))
f = jax.jit(jax.shard_map(lambda x: rope(x, 3, implementation="webgpu"), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
error = float(jnp.abs(f(x) - rope(np.asarray(x), 3, implementation="jnp")).max())
print(json.dumps({"adapters": len(device.matching(None)), "devices": len(set(ran)), "calls": len(ran), "error": error}))
"""


@pytest.mark.transformation("several adapters in one process")
def test_shards_are_spread_over_adapters(tmp_path):
    """Two software adapters: Mesa's driver, and a copy of it, which the loader takes for another."""
    (manifest,) = Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")
    said = json.loads(manifest.read_text())
    library = Path(said["ICD"]["library_path"])
    if not library.is_absolute():
        library = next(Path("/usr/lib").rglob(library.name))
    paths = []
    for number in range(2):
        copy = tmp_path / f"libvulkan_lvp_{number}.so"
        copy.write_bytes(library.read_bytes())
        said["ICD"]["library_path"] = str(copy)
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(said))
    process = start(
        ["-c", TWO_ADAPTERS],
        VK_ICD_FILENAMES=":".join(map(str, paths)),
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    found = json.loads(finish(process, 120))
    assert (found["adapters"], found["devices"], found["calls"]) == (2, 2, 4)
    assert found["error"] < 1e-6


ONE_CORE = """
import os, sys, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
from jax_rope import config, rope

f = jax.jit(lambda x, offset: rope(x, offset, implementation="webgpu"))
x = jnp.ones((1, 512, 4, 128), jnp.float32)
in_flight = []
for i in range(40):
    y = x
    for j in range(3):
        y = f(y, i + j)
    in_flight.append(y)
jax.block_until_ready(in_flight)
threads = [threading.Thread(target=lambda: [jax.block_until_ready(f(x, i)) for i in range(10)]) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(config.transport())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no process affinity")
@pytest.mark.transformation("one core, several calls in flight, several threads")
def test_one_core():
    """jax-ml/jax#24255, #25861: never stuck. Before jax 0.12 the buffers' transport is taken there by itself."""
    expected = "buffer_callback" if jax.__version_info__ < (0, 12) else "pure_callback"
    assert finish(start(["-c", ONE_CORE]), 120).strip() == expected


@pytest.fixture(params=config.TRANSPORTS)
def transport(request):
    jax_rope.configure(transport=request.param)
    yield request.param
    jax_rope.configure(transport=None)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [6, 16])
def test_transports(transport, dtype, head_dim, rng):
    """Both give the same, forward and backward, batched and by tables."""
    x, ct = (jnp.asarray(a, dtype) for a in rng.standard_normal((2, 3, 5, 2, head_dim)))
    positions = np.broadcast_to(70 + np.arange(5), (3, 5))
    f = jax.jit(
        lambda x, ct: (
            *jax.vjp(lambda x: rope(x, 70, implementation="webgpu"), x)[1](ct),
            rope(x, 70, implementation="webgpu"),
        )
    )
    assert ("xla_buffer_python_cpu_callback" in f.lower(x, ct).as_text()) == (transport == "buffer_callback")
    back, y = f(x, ct)
    oracle.assert_exact(y, oracle.rotate(x, positions), x)
    oracle.assert_exact(back, oracle.rotate(ct, positions, direction=-1), ct)
    cos, sin = (jnp.asarray(t, jnp.float32) for t in oracle.cos_sin(1e4, head_dim, positions[0]))
    mapped = jax.jit(jax.vmap(lambda x: rope_cached(x, cos, sin, implementation="webgpu")))
    oracle.assert_exact(mapped(x), oracle.rotate(x, positions), x)


def test_more_than_a_binding_into_buffers(transport, monkeypatch, rng):
    """Several pieces fill one result."""
    own = offload.devices.Device()
    own.limits["max-storage-buffer-binding-size"] = 4096
    rotator = offload.Rotator(own)
    monkeypatch.setattr(offload, "rotator", lambda *_: rotator)
    x = jnp.asarray(rng.standard_normal((3, 40, 2, 16)), jnp.float32)
    y = jax.jit(lambda x: rope(x, implementation="webgpu"))(x)
    oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(np.arange(40), (3, 40))), x)


def test_an_unknown_transport(monkeypatch):
    with pytest.raises(ValueError, match="transport must be 'pure_callback', 'buffer_callback' or None, got 'pigeon'"):
        jax_rope.configure(transport="pigeon")
    monkeypatch.setattr(config.settings, "transport", "pigeon")
    with pytest.raises(ValueError, match="JAX_ROPE_TRANSPORT must be 'pure_callback' or 'buffer_callback', or not set"):
        jax.jit(lambda x: rope(x, implementation="webgpu"))(jnp.ones((3, 1, 4)))
