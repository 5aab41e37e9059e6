"""Measures what the implementations cost against their floors, in a process of its own: ``python tests/cost.py``.

Prints a JSON object of ratios for float32 [1, 2048, 32, 128]. Each is a ratio of medians over rounds in which both
take turns, so that noise hits both alike.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import wgpu

from jax_rope import Rotary, rope
from jax_rope.layout import Layout
from jax_rope.webgpu import device, offload

SHAPE = (1, 2048, 32, 128)
PAIRINGS = ("interleaved", "half")

MULTIPLY = """
@group(0) @binding(0) var<storage, read_write> data: array<vec4<f32>>;
@compute @workgroup_size(64)
fn multiply(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) local: u32) {
    let i = (group.y * groups.x + group.x) * 64u + local;
    if (i < arrayLength(&data)) { data[i] = data[i] * 1.0001; }
}
"""


def ratio(ours, floor, rounds=25) -> float:
    times: dict = {ours: [], floor: []}
    for f in times:
        f()
    for _ in range(rounds):
        for f, seen in times.items():
            start = time.perf_counter()
            f()
            seen.append(time.perf_counter() - start)
    return float(np.median(times[ours]) / np.median(times[floor]))


def on(x, f):
    """A call of the jitted f that waits for its result."""
    jitted = jax.jit(f)
    return lambda: jax.block_until_ready(jitted(x))


def offloaded(x, pairing) -> float:
    """Against an identity callback that reads its argument."""

    def identity(x):
        return jax.pure_callback(_read, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return ratio(on(x, lambda x: rope(x, rotary=Rotary(pairing=pairing), implementation="webgpu")), on(x, identity))


def _read(x):
    return np.asarray(x).copy()


def fallback(x, pairing) -> float:
    """Against an elementwise product."""
    ours = on(x, lambda x: rope(x, rotary=Rotary(pairing=pairing), implementation="jnp"))
    return ratio(ours, on(x, lambda x: x * jnp.float32(1.0001)))


def kernel(x, pairing) -> float:
    """Against a plain product in place, one vec4 a thread."""
    layout = Layout(pairing == "interleaved", 0, SHAPE[-1] // 2, token_major=True)
    xs = [np.asarray(x)]
    table = Rotary().table(SHAPE[-1], None, inverse=False)[None]
    call = offload.Call(layout, xs, offload.ByAngles(layout, x.shape, np.zeros((1, 1, 1), np.int32), table, None), xs)
    rotator = offload.Rotator(device.Device())
    (piece,) = call.pieces(rotator.limits)
    rotator.data.write([(0, xs[0])])
    usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
    waiting = rotator.device.handle.create_buffer(size=256, usage=usage)

    def timed(record):
        def record_and_signal(encoder):
            record(encoder)
            encoder.clear_buffer(waiting)

        def run():
            rotator.data.run(0, record_and_signal)
            waiting.map_sync(wgpu.MapMode.READ)
            waiting.unmap()

        return run

    return ratio(timed(rotator.kernel(call, piece, [0, x.nbytes])), timed(multiply(rotator)))


def multiply(rotator):
    """What records the product of all of the data buffer."""
    handle, buffer = rotator.device.handle, rotator.data.buffer
    module = handle.create_shader_module(code=MULTIPLY)
    pipeline = handle.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "multiply"})
    entry = {"binding": 0, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
    group = handle.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[entry])

    def record(encoder):
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(buffer.size // 16 // 64 // 2, 2)
        compute.end()

    return record


if __name__ == "__main__":
    x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE), jnp.float32)
    measures = {"kernel": kernel, "webgpu": offloaded, "jnp": fallback}
    print(json.dumps({f"{name} {p}": measure(x, p) for name, measure in measures.items() for p in PAIRINGS}))
