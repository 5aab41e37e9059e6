"""``implementation=None``: what it chooses, and the measurement that it may need first."""

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_rope
from jax_rope import Rotary, config, crossover, primitive, rope, rope_cached, rope_qk
from jax_rope.crossover import Times
from jax_rope.webgpu import device, offload

FROM = 1 << 20
FASTER_FROM = (Times(4 * FROM, 2.0, 1.0), Times(FROM, 1.0, 0.9))
SLOWER = (Times(4 * FROM, 1.0, 2.0),)
SMALL = jax.ShapeDtypeStruct((1, 63, 32, 128), jnp.float32)
LARGE = jax.ShapeDtypeStruct((1, 64, 32, 128), jnp.float32)


def webgpu(f, *arguments) -> bool:
    """Whether f, which is traced anew, rotates on the GPU."""
    return "rope_pure_callback" in str(jax.make_jaxpr(lambda *arguments: f(*arguments))(*arguments))


class Machine:
    """A GPU as far as the choice knows, and how often it was measured, by a stand-in unless ``real`` is set."""

    def __init__(self, real):
        self.count = 0
        self.result = FASTER_FROM
        self.adapter = dataclasses.replace(device.adapters()[0], kind="integrated")
        self._real = real
        self.real = False

    def measure(self):
        self.count += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self._real() if self.real else self.result


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    """One JAX device, an adapter that counts as a GPU, and nothing that is known about it."""
    machine = Machine(crossover._measure)
    monkeypatch.setattr(device, "choose", lambda name: machine.adapter)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(crossover, "directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(crossover, "_measure", machine.measure)
    monkeypatch.setattr(crossover, "_measurements", {})
    monkeypatch.setattr(config, "_choices", {})
    for setting in ("implementation", "transport", "autotune"):
        monkeypatch.setattr(config.settings, setting, None)
    return machine


@pytest.fixture
def another_process(monkeypatch):
    """Forgets what this process knows."""

    def forget():
        monkeypatch.setattr(crossover, "_measurements", {})
        monkeypatch.setattr(config, "_choices", {})

    return forget


@pytest.fixture
def really(machine, monkeypatch) -> Machine:
    """The same, measured for real, but briefly and in favour of the GPU."""
    machine.real = True
    monkeypatch.setattr(crossover, "SIZES", (1 << 18, 1 << 17))
    monkeypatch.setattr(crossover, "MARGIN", 1e9)
    return machine


def kept() -> list[Path]:
    directory = crossover.directory()
    return sorted(directory.iterdir()) if directory.is_dir() else []


def test_by_size(machine):
    assert not webgpu(rope, SMALL)
    assert webgpu(rope, LARGE)
    assert machine.count == 1
    assert not webgpu(rope, jax.ShapeDtypeStruct(LARGE.shape, jnp.bfloat16))
    half = jax.ShapeDtypeStruct((1, 64, 16, 128), jnp.float32)
    assert not webgpu(rope, half)
    assert webgpu(rope_qk, half, half)
    assert webgpu(lambda x: rope_cached(x, *Rotary().tables(np.arange(64), 128)), LARGE)
    assert webgpu(jax.grad(lambda x: jnp.sum(rope(x) ** 2)), LARGE)
    assert not webgpu(jax.vmap(rope), jax.ShapeDtypeStruct((4, *SMALL.shape), jnp.float32))
    assert not webgpu(rope, jax.ShapeDtypeStruct((0, *LARGE.shape[1:]), jnp.float32))
    assert webgpu(lambda x: rope(x, implementation="webgpu"), SMALL)
    assert not webgpu(lambda x: rope(x, implementation="jnp"), LARGE)
    assert config.default() == (
        "webgpu",
        f"{machine.adapter} is faster from there on, as measured on this machine",
        FROM,
    )


def test_outside_of_jit(machine):
    x = np.ones(LARGE.shape, np.float32)
    np.testing.assert_allclose(rope(x), rope(x, implementation="jnp"), atol=1e-6)


def test_slower_at_every_size(machine):
    machine.result = SLOWER
    assert not webgpu(rope, LARGE)
    assert config.default() == ("jnp", f"{machine.adapter} is slower, as measured on this machine", 0)


@pytest.mark.parametrize(
    "measurement, expected",
    [
        (SLOWER, None),
        ((Times(16, 1.0, 0.96),), None),  # no more than noise
        ((Times(16, 1.0, 0.9), Times(8, 1.0, 0.9)), 8),
        ((Times(16, 2.0, 0.95), Times(8, 1.0, 1.9)), 12),
        ((Times(16, 2.0, 0.95), Times(8, 1.0, 1.9), Times(4, 1.0, 0.1)), 12),
        ((Times(400, 8.0, 4.1), Times(4, 0.08, 0.14)), 12),  # 0.95 of size / 50 against 0.1 + size / 100
    ],
)
def test_where_the_lines_cross(measurement, expected):
    assert crossover.crossover(measurement) == expected


def test_what_is_jnp_without_a_measurement(machine, monkeypatch):
    machine.result = (Times(1, 1.0, 0.1),)
    x = np.ones((4, 2, 8))
    with jax.enable_x64(True):
        assert not webgpu(rope, jax.ShapeDtypeStruct(LARGE.shape, jnp.float64))
        assert not webgpu(lambda: rope(x.tolist()))
        with pytest.raises(TypeError, match="got float64: use 'jnp'"):
            rope(x.tolist(), implementation="webgpu")
    assert not webgpu(lambda: rope(x))  # NumPy's float64, which JAX makes float32 of
    (size,) = export.symbolic_shape("size")
    traced = export.export(jax.jit(lambda x: rope(x)))(jax.ShapeDtypeStruct((size, 4, 2, 8), jnp.float32))
    assert "callback" not in traced.mlir_module()
    monkeypatch.setattr(config.settings, "implementation", "jnp")
    assert not webgpu(rope, LARGE)
    monkeypatch.setattr(config.settings, "implementation", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not webgpu(rope, LARGE)
    assert config.default() == ("jnp", "JAX itself runs on gpu", 0)
    monkeypatch.undo()
    assert machine.count == 0


def test_software_adapters_are_not_measured(machine):
    machine.adapter = dataclasses.replace(machine.adapter, kind="software")
    assert not webgpu(rope, LARGE)
    assert "computes on the CPU" in config.default().reason
    assert machine.count == 0


def test_without_an_adapter(machine, monkeypatch, caplog):
    monkeypatch.undo()
    monkeypatch.setattr(device, "_found", lambda: ())
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(config, "_choices", {})
    assert not webgpu(rope, LARGE) and not webgpu(rope, SMALL)
    assert caplog.text.count("rotating in jnp: no WebGPU adapter was found") == 1


def test_the_switch(machine, monkeypatch):
    assert webgpu(rope, LARGE)
    monkeypatch.setattr(config.settings, "autotune", "0")
    assert not webgpu(rope, LARGE)
    assert config.default().reason.startswith("JAX_ROPE_AUTOTUNE=0 ")
    monkeypatch.setattr(config.settings, "autotune", "1")
    assert webgpu(rope, LARGE)
    monkeypatch.setattr(config.settings, "autotune", "yes")
    with pytest.raises(ValueError, match="JAX_ROPE_AUTOTUNE must be '0' or '1', or not set, got 'yes'"):
        webgpu(rope, LARGE)
    assert machine.count == 1


def test_several_devices(machine, monkeypatch):
    """Where XLA may spread operands over them None is jnp; within a shard it is chosen by the shard's size."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    devices = jax.devices()[:2]
    two = jax.ShapeDtypeStruct((2, *LARGE.shape[1:]), jnp.float32)
    assert not webgpu(rope, two)
    assert not webgpu(jax.jit(rope), two)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    placed = jax.device_put(jnp.ones(two.shape), NamedSharding(mesh, P("d")))
    assert not webgpu(rope, placed)
    assert machine.count == 0

    assert webgpu(jax.shard_map(lambda x: rope(x), mesh=mesh, in_specs=P("d"), out_specs=P("d")), two)
    assert not webgpu(
        jax.shard_map(lambda x: rope(x), mesh=mesh, in_specs=P("d"), out_specs=P("d")),
        LARGE.update(shape=(2, *SMALL.shape[1:])),
    )
    assert "outside of jax.shard_map" in config.default().reason
    partly = jax.make_mesh((1, 2), ("a", "d"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    by_one = jax.shard_map(lambda x: rope(x), mesh=partly, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    assert not webgpu(by_one, two)

    explicit = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=devices)
    with jax.set_mesh(explicit):
        assert webgpu(rope, jax.device_put(np.ones(two.shape, np.float32), NamedSharding(explicit, P("d"))))
    mixed = jax.make_mesh((1, 2), ("e", "d"), axis_types=(AxisType.Explicit, AxisType.Auto), devices=devices)
    with jax.set_mesh(mixed):
        assert not webgpu(rope, two)
    assert machine.count == 1


def test_automatic_sharding_runs(machine, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((2, *LARGE.shape[1:])), NamedSharding(mesh, P("d")))
    assert jax.jit(lambda x: rope(x))(x).sharding.is_equivalent_to(x.sharding, 4)


def _shard_map(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return jax.jit(jax.shard_map(lambda x: rope(x), mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)


def _explicit(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: rope(x))(jax.device_put(x, NamedSharding(mesh, P("d"))))


def _export(x):
    with pytest.raises(NotImplementedError, match="cannot be exported"):
        export.export(jax.jit(lambda x: rope(x)))(x)
    return rope(x, implementation="jnp")


TRACES = {
    "eager": lambda x: rope(x),
    "jit": lambda x: jax.jit(lambda x: rope(x))(x),
    "jit of rope itself": lambda x: jax.jit(rope)(x),
    "gradient": lambda x: jax.jit(jax.grad(lambda x: jnp.sum(rope(x) ** 2)))(rope(x, implementation="jnp")) / 2,
    "vmap": lambda x: jax.vmap(lambda x: rope(x))(x[None])[0],
    "scan": lambda x: jax.lax.scan(lambda carry, x: (carry, rope(x)), 0, x[None])[1][0],
    "checkpoint": lambda x: jax.checkpoint(lambda x: rope(x))(x),
    "shard_map": _shard_map,
    "explicit axis types": _explicit,
    "export": _export,
    "compile-time evaluation": lambda x: jax.jit(lambda: _evaluated(x))(),
}


def _evaluated(x):
    with jax.ensure_compile_time_eval():
        return rope(x)


CONTEXTS = {
    "checking_leaks": lambda: jax.checking_leaks(),
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "bfloat16 matmuls": lambda: jax.default_matmul_precision("bfloat16"),
    "transfer guard": lambda: jax.transfer_guard("disallow_explicit"),
    "other device": lambda: jax.default_device(jax.devices()[1]),
}


@pytest.fixture
def x(rng) -> jax.Array:
    return jnp.asarray(rng.standard_normal((1, 32, 32, 128)), jnp.float32)


@pytest.mark.parametrize("name", TRACES)
def test_measured_while_tracing(really, name, x):
    expected = rope(x, implementation="jnp")
    np.testing.assert_allclose(TRACES[name](x), expected, atol=1e-5)
    assert really.count == 1
    choice = config.default()
    assert choice.implementation == "webgpu", choice.reason


@pytest.mark.parametrize("name", CONTEXTS)
def test_measured_within(really, name, x, caplog):
    expected = rope(x, implementation="jnp")
    with CONTEXTS[name]():
        y = jax.jit(lambda x: rope(x))(x) if name != "transfer guard" else config.default() and expected
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert really.count == 1
    choice = config.default()
    assert choice.implementation == "webgpu", choice.reason


@pytest.mark.parametrize(
    "setting, value",
    [
        ("jax_disable_jit", True),
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_enable_x64", True),
        ("jax_check_tracer_leaks", True),
        ("jax_transfer_guard", "disallow"),
    ],
)
def test_measured_with_what_is_set_for_all_threads(really, setting, value):
    """As a caller within jit would have it: compiled, and without checks of the results."""
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        choice = config.default()
        assert choice.implementation == "webgpu", choice.reason
    finally:
        jax.config.update(setting, before)
    for times in crossover.known():
        assert times.jnp < 0.05, times


def test_what_is_set_for_all_threads_is_undone(machine, monkeypatch):
    seen = []
    monkeypatch.setattr(crossover, "_measure", lambda: seen.append(jax.config.jax_disable_jit) or FASTER_FROM)
    jax.config.update("jax_disable_jit", True)
    try:
        config.default()
    finally:
        jax.config.update("jax_disable_jit", False)
    assert seen == [False]


def test_it_compiles_at_its_first_use_only(really, compilations, another_process):
    before = compilations()
    config.default()
    measured = compilations()
    assert measured > before
    config.default()
    another_process()
    config.default()
    assert (compilations(), really.count) == (measured, 1)


def test_only_a_loss_ends_it(really, monkeypatch):
    assert [times.size for times in crossover.measure()] == [1 << 18, 1 << 17]
    monkeypatch.setattr(crossover, "MARGIN", 0.0)
    assert [times.size for times in crossover.measure()] == [1 << 18]


def test_kept_for_other_processes(machine, another_process):
    assert webgpu(rope, LARGE)
    (path,) = kept()
    found = json.loads(path.read_text())
    assert found["crossover"] == FROM
    assert found["times"][0] == {"size": 4 * FROM, "jnp": 2.0, "webgpu": 1.0}
    assert found["conditions"]["adapter"] == f"{machine.adapter}, {machine.adapter.driver}"
    another_process()
    assert webgpu(rope, LARGE)
    assert machine.count == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda machine, patch: setattr(machine, "adapter", dataclasses.replace(machine.adapter, driver="2")),
        lambda machine, patch: patch.setattr(config, "cores", lambda: 99),
        lambda machine, patch: patch.setattr(crossover, "versions", lambda: {"jax": "99"}),
    ],
    ids=["driver", "cores", "versions"],
)
def test_measured_again(machine, change, another_process, monkeypatch):
    config.default()
    another_process()
    change(machine, monkeypatch)
    config.default()
    assert machine.count == len(kept()) == 2


def test_configure_leaves_no_stale_choice(machine):
    assert webgpu(rope, LARGE)
    machine.result = SLOWER
    jax_rope.configure(transport="buffer_callback")
    assert not webgpu(rope, LARGE)
    jax_rope.configure(transport=None)
    assert webgpu(rope, LARGE)
    assert machine.count == 2
    machine.adapter = dataclasses.replace(machine.adapter, name="another")
    jax_rope.configure(adapter=None)
    assert not webgpu(rope, LARGE)
    assert machine.count == 3


NOT_ONE = [
    b"",
    b"{",
    b"\xff\x00",
    b"[]",
    b"null",
    b"[" * 100_000,
    {"conditions": {}},
    {"times": []},
    {"times": None},
    {"times": [1]},
    {"times": [{"size": 4}]},
    {"times": [{"size": 4, "jnp": float("nan"), "webgpu": 1.0}]},
    {"times": [{"size": float("inf"), "jnp": 1.0, "webgpu": 1.0}]},
    {"times": [{"size": 4, "jnp": -1.0, "webgpu": 1.0}]},
    {"times": [{"size": 4, "jnp": 1.0, "webgpu": 1.0}, {"size": 8, "jnp": 1.0, "webgpu": 1.0}]},
]


@pytest.mark.parametrize("content", NOT_ONE, ids=range(len(NOT_ONE)))
def test_a_file_that_is_not_one(machine, content, another_process, caplog):
    caplog.set_level(logging.DEBUG, "jax_rope")
    config.default()
    (path,) = kept()
    whole = path.read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(json.loads(whole) | content).encode())
    another_process()
    assert config.default().from_bytes == FROM
    assert machine.count == 2
    assert path.read_bytes() == whole
    (record,) = caplog.records
    assert record.levelname == "DEBUG" and record.message.startswith("measuring again: ")


@pytest.mark.parametrize("why", ["a file is in the way", "no home", "read only", "disk full"])
def test_without_a_directory(machine, why, monkeypatch, caplog, another_process, tmp_path):
    caplog.set_level(logging.DEBUG, "jax_rope")

    def fail(*_, **__):
        raise RuntimeError(why) if why == "no home" else OSError(why)

    if why == "a file is in the way":
        (tmp_path / "cache").write_text("")
    elif why == "no home":
        monkeypatch.setattr(crossover, "directory", fail)
    else:
        monkeypatch.setattr(Path, "mkdir" if why == "read only" else "write_text", fail)
    assert webgpu(rope, LARGE) and webgpu(rope, LARGE)
    assert machine.count == 1
    assert caplog.text.count("the measurement is not kept: ") == 1
    assert crossover.kept_in() is None
    assert all(record.levelname == "DEBUG" for record in caplog.records)
    if why != "no home":
        assert kept() == []
    another_process()
    assert webgpu(rope, LARGE)
    assert machine.count == 2


def test_the_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert crossover.directory() == tmp_path / ".cache" / "jax_rope"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert crossover.directory() == tmp_path / ".cache" / "jax_rope"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert crossover.directory() == tmp_path / "xdg" / "jax_rope"
    monkeypatch.setattr("sys.platform", "darwin")
    assert crossover.directory() == tmp_path / "Library" / "Caches" / "jax_rope"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert crossover.directory() == tmp_path / "Local" / "jax_rope"


def in_threads(*functions):
    """The results of functions that run at once; fails after a minute."""
    results, start = {}, threading.Barrier(len(functions))

    def run(i, f):
        start.wait()
        results[i] = f()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == len(functions), "a thread waits for ever"
    return [results[i] for i in range(len(functions))]


@pytest.mark.parametrize("shared", [True, False], ids=["one function", "a function each"])
def test_several_threads(really, shared, x):
    """One measures, the others wait, also for one another's traces."""
    functions = [jax.jit(lambda x: rope(x)) for _ in range(6)]
    if shared:
        functions = functions[:1] * 6
    expected = rope(x, implementation="jnp")
    for y in in_threads(*[lambda f=f: f(x) for f in functions]):
        np.testing.assert_allclose(y, expected, atol=1e-5)
    assert really.count == 1


def test_several_threads_fail_once(machine, caplog):
    machine.result = RuntimeError("the device was lost")
    choices = in_threads(*[config.default] * 6)
    assert {choice.implementation for choice in choices} == {"jnp"}
    assert machine.count == 1
    assert caplog.text.count("rotating in jnp: ") == 1


def test_readers_and_writers(machine, monkeypatch):
    """Whoever reads the file gets a whole one."""
    crossover.measure()

    def write():
        for _ in range(30):
            crossover._write(FASTER_FROM)

    def read():
        found = []
        for _ in range(100):
            found.append(json.loads((crossover.directory() / crossover.file_name()).read_bytes())["crossover"])
        return found

    *_, found = in_threads(write, write, read)
    assert set(found) == {FROM}
    assert len(kept()) == 1


@pytest.mark.parametrize("where", ["_host", "_callback"], ids=["as it runs", "as it is traced"])
def test_a_failure_is_jnp(really, where, monkeypatch, caplog, x):
    def fail(*_, **__):
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(config.settings, "transport", "pure_callback")
    monkeypatch.setattr(primitive, where, fail)
    np.testing.assert_allclose(jax.jit(lambda x: rope(x))(x), rope(x, implementation="jnp"), atol=1e-6)
    reason = f"{really.adapter} failed as it was to be measured: RuntimeError: the device was lost"
    assert config.default() == ("jnp", reason, 0)
    assert [record.message for record in caplog.records if record.name == "jax_rope"] == [f"rotating in jnp: {reason}"]
    assert kept() == []


def test_what_worked_before_fails(machine, another_process, monkeypatch, caplog):
    """None is jnp then, where ``"webgpu"`` raises."""
    assert webgpu(rope, LARGE)
    another_process()

    def fail(*_):
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(offload, "rotator", fail)
    assert not webgpu(rope, LARGE)
    assert machine.count == 1
    assert caplog.text.count("the device was lost") == 1


def test_a_driver_that_hangs(machine, monkeypatch, caplog):
    monkeypatch.setattr(crossover, "LONGEST", 0.05)
    monkeypatch.setattr(crossover, "_measure", lambda: time.sleep(0.5))
    assert not webgpu(rope, LARGE)
    assert "failed as it was to be measured: TimeoutError: it took more than" in caplog.text


def test_a_failure_of_time(machine):
    machine.result = TimeoutError("the driver's own")
    assert config.default().reason.endswith("failed as it was to be measured: TimeoutError: the driver's own")
