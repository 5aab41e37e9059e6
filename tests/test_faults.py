"""What drivers and processes do to a call: lost devices, memory that is not there, a GPU that does not answer, forks,
interrupts, exits. After each, the next call works."""

import dataclasses
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import wgpu

import jax_rope
from jax_rope import config, rope
from jax_rope.webgpu import device, kernels, offload, selftest, transfer


@pytest.fixture(autouse=True)
def own_rotators(monkeypatch):
    """Devices that are spoilt here are nobody else's."""
    monkeypatch.setattr(offload, "_rotators", {})
    monkeypatch.setattr(config, "_choices", {})


@pytest.fixture
def discrete(monkeypatch, tmp_path):
    """This machine's adapters pass for GPUs, of which nothing is known yet."""
    found = tuple((dataclasses.replace(a, kind="discrete"), handle) for a, handle in device._found())
    monkeypatch.setattr(device, "_found", lambda: found)
    monkeypatch.setattr(config, "_spread", lambda x: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def rotated(x, offset=0):
    """Rotated on the GPU, and right."""
    y = np.asarray(rope(x, offset, implementation="webgpu"))
    oracle.assert_exact(y, oracle.rotate(x, offset + np.arange(x.shape[-3])), x)


@pytest.mark.parametrize("tokens", [3, 3000])  # written by the queue, and through a map
def test_a_lost_device_is_replaced(rng, tokens):
    x = draw(rng, tokens, 8, 64)
    rotated(x)
    lost = offload.rotator()
    lost.device.handle.destroy()
    rotated(x)
    assert offload.rotator() is not lost
    rotated(x, 7)


def test_a_device_lost_in_the_middle_of_a_call(rng, monkeypatch):
    """Between two pieces: the whole call is done again."""
    x = draw(rng, 3000, 32, 128)  # six pieces
    rotated(x)
    lost, started = offload.rotator(), []
    start = offload.Rotator._start

    def losing(self, *arguments):
        started.append(self)
        if len(started) == 3:
            self.device.handle.destroy()
        return start(self, *arguments)

    monkeypatch.setattr(offload.Rotator, "_start", losing)
    rotated(x)
    assert started[0] is lost
    assert started[-1] is not lost


def test_a_device_that_is_always_lost(rng, monkeypatch, caplog):
    """Two in a row are a clear error, and without an implementation named it is jnp from then on, said once."""
    x = draw(rng, 3, 8, 64)
    f = jax.jit(lambda x: rope(x, implementation="webgpu"))
    jax.block_until_ready(f(x))
    with monkeypatch.context() as losing:
        start = offload.Rotator._start
        losing.setattr(selftest, "fault", lambda rotator: None)
        losing.setattr(
            offload.Rotator, "_start", lambda self, *rest: (self.device.handle.destroy(), start(self, *rest))[1]
        )
        for _ in range(2):
            with pytest.raises(Exception, match=r"failed twice: .*device is lost; use implementation='jnp' instead"):
                jax.block_until_ready(f(x))
    assert caplog.text.count("rotating in jnp from now on where no implementation is named") == 1
    assert config.default().implementation == "jnp"
    assert "failed twice" in config.default().reason
    jax.block_until_ready(f(x))
    rotated(x)


@pytest.mark.parametrize("kind", ["software", "discrete"])
def test_little_memory_on_the_device(rng, monkeypatch, kind):
    """Buffers that cannot be made become smaller."""
    x = draw(rng, 600, 32, 128)
    own = device.Device()
    own.mapped = kind == "software"
    create, refused = own.handle.create_buffer, []

    def create_little(*, size, **rest):
        if size > 1 << 20:
            refused.append(size)
            raise wgpu.GPUOutOfMemoryError("not enough memory left")
        return create(size=size, **rest)

    monkeypatch.setattr(own.handle, "create_buffer", create_little)
    rotator = offload.Rotator(own)
    monkeypatch.setattr(offload, "rotator", lambda *_: rotator)
    rotated(x)
    assert refused == [1 << 23, 1 << 22, 1 << 21]
    rotated(x, 5)
    assert len(refused) == 3  # what did not fit once is not asked for again


def test_no_memory_on_the_device(rng, monkeypatch):
    x = draw(rng, 600, 32, 128)
    with monkeypatch.context() as full:

        def create(self, **rest):
            raise wgpu.GPUOutOfMemoryError("not enough memory left")

        full.setattr(transfer.DataBuffer, "_made", lambda *_: create(None))
        full.setattr(selftest, "fault", lambda rotator: None)
        with pytest.raises(Exception, match=r"failed twice: not enough memory left; use implementation='jnp' instead"):
            jax.block_until_ready(rope(x, implementation="webgpu"))
    rotated(x)


def test_a_validation_error(rng, monkeypatch):
    """What the driver's compiler does not take."""
    x = draw(rng, 3, 8, 64)
    with monkeypatch.context() as broken:
        broken.setattr(kernels, "source", lambda name: "fn f() -> u32 { return 1.5; }")
        with pytest.raises(Exception, match="Shader"):
            rope(x, implementation="webgpu")
    rotated(x)


def test_an_adapter_that_computes_wrongly(rng, discrete, monkeypatch, caplog):
    """It raises where it is asked for, and is not chosen where no implementation is named."""
    x = draw(rng, 3, 8, 64)
    right = kernels.source("rope.wgsl")
    with monkeypatch.context() as wrong:
        wrong.setattr(kernels, "source", lambda name: right.replace("19.739208", "19.7393"))
        with pytest.raises(RuntimeError, match=r"fails its first rotations \(float32, .*python -m jax_rope check"):
            rope(x, implementation="webgpu")
        y = rope(x)
        oracle.assert_exact(y, oracle.rotate(x, np.arange(3)), x)
        assert "rotating in jnp: " in caplog.text
        assert "fails its first rotations" in config.default().reason
    rotated(x)


def test_a_gpu_that_fails_as_it_is_measured(rng, discrete, monkeypatch, caplog):
    """The callback that fails runs while the choice is being made."""
    x = draw(rng, 3, 8, 64)

    def fail(*_):
        raise RuntimeError("the GPU is on fire")

    monkeypatch.setattr(offload, "_run_on_a_device", fail)
    start = time.monotonic()
    y = rope(x)
    oracle.assert_exact(y, oracle.rotate(x, np.arange(3)), x)
    assert time.monotonic() - start < 20
    assert "the GPU is on fire" in config.default().reason
    assert caplog.text.count("rotating in jnp") == 1


PROGRAM = """
import sys, time, threading, os, signal
import numpy as np
import jax, jax.numpy as jnp
import jax_rope
from jax_rope import rope
from jax_rope.webgpu import kernels, offload, selftest
x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 8, 64)), jnp.float32)
expected = np.asarray(rope(x, 3, implementation="jnp"))
def works():
    np.testing.assert_allclose(np.asarray(rope(x, 3, implementation="webgpu")), expected, atol=1e-5)
"""


def run(program: str, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_a_gpu_that_does_not_answer():
    """A kernel that takes many seconds: an error at the limit, and the process ends."""
    done = run(
        """
works()
right = kernels.source("rope.wgsl")
slow = right.replace("let y = turn(r, Pairs(vec2(a.x, b.x), vec2(a.y, b.y)));", '''
        var z = Pairs(vec2(a.x, b.x), vec2(a.y, b.y));
        for (var i = 0u; i < 60000u; i++) { """
        + "z = turn(r, z); " * 20
        + """}  // llvmpipe ends loops at 65536
        let y = z;''')
assert slow != right
kernels.source = lambda name: slow
fault, selftest.fault = selftest.fault, lambda rotator: None
offload._rotators.clear()
start = time.monotonic()
try:
    jax.block_until_ready(rope(jnp.ones((2048, 32, 128)), 3, implementation="webgpu"))
except Exception as error:
    print("said:", str(error).strip().splitlines()[-1])
print("after", time.monotonic() - start < 20)
kernels.source = lambda name: right
selftest.fault = fault
works()
print("the next one works", flush=True)
os._exit(0)  # the driver is still busy, in threads of its own
""",
        JAX_ROPE_TIME_LIMIT="2",
    )
    assert done.returncode == 0, done.stderr
    assert "did not answer within 2 s, the limit that configure(time_limit=...)" in done.stdout
    assert "after True" in done.stdout
    assert "the next one works" in done.stdout


def test_a_forked_child_says_so_at_once():
    """pygfx/wgpu-py and rerun-io/rerun#6223: devices do not survive a fork, and waiting for them never ends."""
    done = run(
        """
import warnings
warnings.simplefilter("ignore")  # JAX warns of forks too
works()
child = os.fork()
if child == 0:
    for implementation in ("webgpu", "jnp"):
        try:
            rope(np.ones((3, 8, 64), np.float32), implementation=implementation)
        except RuntimeError as error:
            print(f"{implementation}:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
works()
print("parent: well")
"""
    )
    assert done.returncode == 0, done.stderr
    for implementation in ("webgpu", "jnp"):
        assert f"{implementation}: this process was forked from one that rotated already" in done.stdout
    assert "parent: well" in done.stdout


@pytest.mark.parametrize("transport", ["pure_callback", "buffer_callback"])
def test_exit_with_work_in_flight(transport):
    """pygfx/wgpu-py#797: a process that ends ends."""
    start = time.monotonic()
    done = run(
        """
big = jnp.ones((4096, 32, 128))
f = jax.jit(lambda x: rope(x, implementation="webgpu"))
jax.block_until_ready(f(big))
def work():
    while True:
        f(big)
threading.Thread(target=work, daemon=True).start()
results = [f(big) for _ in range(4)]
print("ends", flush=True)
""",
        JAX_ROPE_TRANSPORT=transport,
    )
    assert "ends" in done.stdout, done.stderr
    assert time.monotonic() - start < 50


def test_an_interrupt_in_a_long_call():
    """Ctrl-C ends it with a KeyboardInterrupt or the callback's report of one; what comes after is well."""
    done = run(
        """
big = jnp.ones((1 << 15, 32, 128))
f = jax.jit(lambda x: rope(x, implementation="webgpu"))
jax.block_until_ready(f(big))
interrupted = 0
for delay in (0.02, 0.1, 0.2):
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        jax.block_until_ready(f(big))
        time.sleep(1)
    except BaseException as error:
        assert "KeyboardInterrupt" in type(error).__name__ + str(error), error
        interrupted += 1
    works()
print("interrupted", interrupted)
""",
        seconds=120,
    )
    assert done.returncode == 0, done.stderr
    assert "interrupted 3" in done.stdout


def test_time_limit(monkeypatch):
    monkeypatch.setattr(config.settings, "time_limit", None)
    assert config.time_limit() == 60
    jax_rope.configure(time_limit=1.5)
    assert config.time_limit() == 1.5
    for bad in (0, -1, float("nan"), "soon", True):
        with pytest.raises(ValueError, match="time_limit must be a number of seconds above 0 or None, got"):
            jax_rope.configure(time_limit=bad)
    monkeypatch.setattr(config.settings, "time_limit", "never")
    with pytest.raises(
        ValueError, match="JAX_ROPE_TIME_LIMIT must be a number of seconds above 0, or not set, got 'never'"
    ):
        config.time_limit()
    with pytest.raises(ValueError, match="JAX_ROPE_TIME_LIMIT must be a number"):
        jax.eval_shape(lambda x: rope(x, implementation="webgpu"), jnp.ones((3, 2, 8)))  # while tracing
