"""WebGPU without JAX: the kernel by itself, and the least that a kernel and its transfers can cost."""

from collections.abc import Callable

import jax
import numpy as np
import wgpu

from .. import config
from ..layout import Layout
from ..webgpu import device, offload
from ..webgpu.call import ByAngles, Call, Limits
from .entry import CannotError, Entry
from .workloads import Case, Workload

USAGE = wgpu.BufferUsage
Record = Callable[[wgpu.GPUCommandEncoder], None]

MULTIPLY = """
@group(0) @binding(0) var<storage, read_write> data: array<vec4<f32>>;
@compute @workgroup_size(64)
fn multiply(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
            @builtin(local_invocation_index) local: u32) {
    let i = (group.y * groups.x + group.x) * 64u + local;
    if (i < arrayLength(&data)) { data[i] = data[i] * 1.0001; }
}
"""


def kernel(case: Case) -> Entry:
    """The kernel, on data that lies in its buffer already, in one dispatch. Its results are those of the first run."""
    runs, results = [], []
    for xs, direction in zip(case.passes, (1, -1), strict=False):
        run, ys = _rotation(case.workload, xs, direction)
        runs.append(run)
        results += ys
    return Entry(_each(runs), lambda: results)


def multiply(case: Case) -> Entry:
    """A kernel that multiplies as many bytes in place, one vec4 a thread."""
    where = _device(case.workload)
    data = _buffer(where, case.workload.nbytes, USAGE.STORAGE | USAGE.COPY_DST)
    return Entry(_each([_timed(where, _product(where, data))] * len(case.passes)), None)


def round_trip(case: Case) -> Entry:
    """Bytes written through mapped memory, multiplied, and read through mapped memory."""
    where, size = _device(case.workload), case.workload.nbytes
    if where.mapped:
        upload = data = download = _buffer(where, size, USAGE.STORAGE | USAGE.MAP_WRITE | USAGE.MAP_READ)
    else:
        upload = _buffer(where, size, USAGE.MAP_WRITE | USAGE.COPY_SRC)
        data = _buffer(where, size, USAGE.STORAGE | USAGE.COPY_DST | USAGE.COPY_SRC)
        download = _buffer(where, size, USAGE.MAP_READ | USAGE.COPY_DST)
    x = np.zeros(data.size, np.uint8)
    y = np.empty_like(x)
    record = _product(where, data)

    def once() -> None:
        upload.map_sync(wgpu.MapMode.WRITE)
        upload.write_mapped(x)
        upload.unmap()
        encoder = where.handle.create_command_encoder()
        if upload is not data:
            encoder.copy_buffer_to_buffer(upload, 0, data, 0, data.size)
        record(encoder)
        if download is not data:
            encoder.copy_buffer_to_buffer(data, 0, download, 0, data.size)
        where.handle.queue.submit([encoder.finish()])
        download.map_sync(wgpu.MapMode.READ)
        y[...] = np.frombuffer(download.read_mapped(copy=False), np.uint8)
        download.unmap()

    return Entry(_each([once] * len(case.passes)), None)


def _each(runs: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for once in runs:
            once()

    return run


def _device(workload: Workload) -> device.Device:
    """One of its own."""
    try:
        made = device.Device(config.settings.adapter)
    except RuntimeError as error:
        raise CannotError(str(error)) from error
    largest = _largest(made)
    if workload.nbytes + 16 * len(workload.shapes) > largest:
        raise CannotError(f"one dispatch takes {largest // 2**20} MiB at most on this adapter")
    return made


def _largest(where: device.Device) -> int:
    return min(where.limits["max-storage-buffer-binding-size"], where.limits["max-buffer-size"])


def _buffer(where: device.Device, size: int, usage: int) -> wgpu.GPUBuffer:
    return where.handle.create_buffer(size=-(-size // 16) * 16, usage=usage)


def _rotation(
    workload: Workload, xs: tuple[jax.Array, ...], direction: int
) -> tuple[Callable[[], None], list[np.ndarray]]:
    """What runs the kernel and waits for it, and the results of a first run."""
    where = _device(workload)
    rotator = offload.Rotator(where)
    layout = Layout(workload.rotary.pairing == "interleaved", 0, workload.head_dim // 2, True, direction)
    table = workload.rotary.table(workload.head_dim, None, inverse=False)[None]
    offset = workload.positions if isinstance(workload.positions, int) else 0
    operands = [np.asarray(x) for x in xs]
    by = ByAngles(layout, operands[0].shape, np.full((1, 1, 1), offset, np.int32), table, None)
    call = Call(layout, operands, by, [np.empty_like(x) for x in operands])
    (piece,) = call.pieces(Limits(_largest(where), rotator.limits.threads))
    starts = np.cumsum([0] + [-(-x.nbytes // 16) * 16 for x in operands]).tolist()
    data = _buffer(where, starts[-1], USAGE.STORAGE | USAGE.COPY_DST | USAGE.COPY_SRC)
    queue = where.handle.queue
    for start, x in zip(starts, operands, strict=False):
        queue.write_buffer(data, start, x.reshape(-1).view(np.uint8))
    run = _timed(where, rotator.kernel(call, piece, starts, data))
    run()
    read = np.frombuffer(queue.read_buffer(data), np.uint8)
    ys = [
        read[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        for start, x in zip(starts, operands, strict=False)
    ]
    return run, ys


def _timed(where: device.Device, record: Record) -> Callable[[], None]:
    """Submits what ``record`` records and waits for it, without carrying the data back."""
    waiting = _buffer(where, 16, USAGE.MAP_READ | USAGE.COPY_DST)

    def run() -> None:
        encoder = where.handle.create_command_encoder()
        record(encoder)
        encoder.clear_buffer(waiting)
        where.handle.queue.submit([encoder.finish()])
        waiting.map_sync(wgpu.MapMode.READ)
        waiting.unmap()

    return run


def _product(where: device.Device, data: wgpu.GPUBuffer) -> Record:
    """What records the product of all of a buffer."""
    module = where.handle.create_shader_module(code=MULTIPLY)
    pipeline = where.handle.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "multiply"}
    )
    entry = {"binding": 0, "resource": {"buffer": data, "offset": 0, "size": data.size}}
    group = where.handle.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=[entry])
    workgroups = -(-data.size // 16 // 64)
    y = -(-workgroups // where.limits["max-compute-workgroups-per-dimension"])

    def record(encoder: wgpu.GPUCommandEncoder) -> None:
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(-(-workgroups // y), y)
        compute.end()

    return record
