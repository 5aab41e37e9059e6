"""What the callback runs: arrays are cut into pieces that the adapter takes, each goes through the kernel."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

import numpy as np
import wgpu

from ..layout import Layout
from . import device as devices, kernels, transfer
from .call import By, ByAngles, ByTables, Call, Limits, Piece
from .device import Device

# Larger pieces would only hold more of the host's memory: a piece this size takes milliseconds.
LARGEST_PIECE = 1 << 27
ALIGNMENT = 256  # of binding offsets; no adapter asks for more


class Rotator:
    """Kernels and buffers of one device."""

    def __init__(self, device: Device):
        self.device = device
        bindings = (kernels.UNIFORM, kernels.READ, kernels.READ, kernels.WRITE)
        self.kernels = kernels.Kernels(device, "rope.wgsl", bindings)
        limits = device.limits
        self.binding = limits["max-storage-buffer-binding-size"]
        self.workgroups = limits["max-compute-workgroups-per-dimension"]
        self.limits = Limits(
            bytes=min(self.binding, limits["max-buffer-size"], LARGEST_PIECE) // ALIGNMENT * ALIGNMENT,
            # The kernel divides thread numbers below 2^31.
            threads=min(self.workgroups**2 * kernels.WORKGROUP_SIZE, 2**31 - 1),
        )
        self.data = transfer.DataBuffer(device, self.limits.bytes, self.kernels.forget_bind_groups)
        self.parameters = transfer.ParameterBuffer(device, self.kernels.forget_bind_groups)

    def run(self, call: Call, piece: Piece) -> None:
        """Takes a piece of the operands to the device and its result back into ``call.ys``."""
        operands = [call.operand(i, piece.rows, piece.tokens, heads) for i, heads in piece.heads]
        starts = np.cumsum([0] + [-(-x.nbytes // 16) * 16 for x, _ in operands]).tolist()
        with self.device.lock:
            self.data.write([(start, x) for start, (x, _) in zip(starts, operands, strict=False)])
            self.data.run(starts[-1], self.kernel(call, piece, starts))
            self.data.read([(start, x.dtype, y) for start, (x, y) in zip(starts, operands, strict=False)])

    def kernel(self, call: Call, piece: Piece, starts: list[int]) -> Callable[[wgpu.GPUCommandEncoder], None]:
        """What records the dispatch that rotates a piece, whose operands lie in the data buffer from ``starts`` on."""
        ranges = self._write_parameters(call, piece, starts)
        group = self.kernels.bind_group(*ranges, (self.data.buffer, 0, self.data.buffer.size))
        pipeline = self.kernels.pipeline(call.entry_point, **call.constants)
        workgroups = -(-call.threads(piece) // kernels.WORKGROUP_SIZE)
        y = -(-workgroups // self.workgroups)

        def record(encoder: wgpu.GPUCommandEncoder) -> None:
            compute = encoder.begin_compute_pass()
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(-(-workgroups // y), y, 1)
            compute.end()

        return record

    def _write_parameters(self, call: Call, piece: Piece, starts: list[int]) -> list[tuple]:
        """Writes what bindings 0 to 2 hold and returns their ranges."""
        ends, parts = [0], []
        for part in (call.uniform(piece, starts), *call.by.arrays(piece)):
            data = transfer.as_bytes(part)
            parts.append((ends[-1], data))
            ends.append(-(-(ends[-1] + data.nbytes) // ALIGNMENT) * ALIGNMENT)
        whole = np.zeros(ends[-1], np.uint8)
        for start, data in parts:
            whole[start : start + data.nbytes] = data
        buffer = self.parameters.write(whole)
        return [(buffer, start, end - start) for start, end in itertools.pairwise(ends)]


_rotators: dict[int, Rotator] = {}


def rotator(name: str | None = None, shard: int = 0) -> Rotator:
    """The one on the device that `jax_rope.webgpu.device.device` gives for an adapter's name and a shard."""
    device = devices.device(name, shard)
    with device.lock:
        if id(device) not in _rotators:
            _rotators[id(device)] = Rotator(device)
        return _rotators[id(device)]


class Options(TypedDict, total=False):
    """How `rotate` is to run: on which adapter, for which shard of several, and into which arrays."""

    adapter: str | None
    shard: int
    out: Sequence[np.ndarray] | None


def rotate(
    layout: Layout,
    xs: Sequence[np.ndarray],
    positions: np.ndarray,
    table: np.ndarray,
    fractions: np.ndarray | None,
    frequencies: np.ndarray | None = None,
    **options: Unpack[Options],
) -> tuple[np.ndarray, ...]:
    """Rotates arrays [..., S, H, D] (or as the layout says), of float32, bfloat16 or float16, alike but for H.

    The other operands are those of `jax_rope.phase.Angles`; the table says what frequencies say.
    """
    return _run(layout, xs, ByAngles(layout, xs[0].shape, positions, table, fractions), **options)


def rotate_by_tables(
    layout: Layout, xs: Sequence[np.ndarray], cos: np.ndarray, sin: np.ndarray, **options: Unpack[Options]
) -> tuple[np.ndarray, ...]:
    """`rotate` by cosines and sines, as in `jax_rope.fallback.Tables`."""
    return _run(layout, xs, ByTables(layout, xs[0].shape, cos, sin), **options)


def _run(
    layout: Layout,
    xs: Sequence[np.ndarray],
    by: By,
    adapter: str | None = None,
    shard: int = 0,
    out: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, ...]:
    results = [np.empty(x.shape, x.dtype) for x in xs] if out is None else out
    call = Call(layout, xs, by, results)
    if call.rows and call.tokens and all(call.heads):
        running = rotator(adapter, shard)
        for piece in call.pieces(running.limits):
            running.run(call, piece)
        call.finish()
    return tuple(results)
