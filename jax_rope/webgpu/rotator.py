"""One device at work: arrays are cut into pieces that it takes, each goes through the kernel."""

import functools
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import wgpu

from . import kernels, transfer
from .call import Call, Limits, Piece
from .device import Device

# Measured on a software adapter, from 2 to 64 MiB: pieces of this size, which caches hold, take the least time where
# XLA's arrays are fresh memory. Its kernels use all cores, so nothing is gained by writing one piece while another is
# computed; an adapter with a processor of its own takes two at a time.
PIECE = 1 << 23
SMALLEST_PIECE = 1 << 16
SMALL = 1 << 17  # bytes that the queue writes as fast as a map does
ALIGNMENT = 256  # of binding offsets; no adapter asks for more


class Rotator:
    """Kernels and buffers of one device."""

    def __init__(self, device: Device):
        self.device = device
        bindings = (kernels.UNIFORM, kernels.READ, kernels.READ, kernels.WRITE)
        self.kernels = kernels.Kernels(device, "rope.wgsl", bindings)
        self.workgroups = device.limits["max-compute-workgroups-per-dimension"]
        self._allow(min(device.limits["max-storage-buffer-binding-size"], device.limits["max-buffer-size"], PIECE))
        self.parameters = transfer.ParameterBuffer(device, self.kernels.forget_bind_groups)

    def _allow(self, size: int) -> None:
        """Makes buffers anew, of at most ``size`` bytes."""
        self.limits = Limits(
            bytes=size // ALIGNMENT * ALIGNMENT,
            # The kernel divides thread numbers below 2^31.
            threads=min(self.workgroups**2 * kernels.WORKGROUP_SIZE, 2**31 - 1),
        )
        overlapped = self.device.adapter.kind != "software"
        forget = self.kernels.forget_bind_groups
        self.slots = [transfer.DataBuffer(self.device, self.limits.bytes, forget) for _ in range(1 + overlapped)]
        self.small = transfer.SmallDataBuffer(self.device, min(2 * SMALL, self.limits.bytes), forget)

    def run(self, call: Call) -> None:
        """Rotates ``call.xs`` into ``call.ys``, piece by piece: while the kernel works on one, the next is written.

        Where the device has no memory left, the pieces become smaller.

        Raises:
          wgpu.GPUError, RuntimeError: the device failed, or is lost.
          TimeLimitError: it did not answer.
        """
        with self.device.lock:
            while True:
                try:
                    self._run(call)
                    return
                except transfer.TimeLimitError:
                    raise  # to give buffers back would be to wait for them
                except BaseException as error:
                    # Nobody knows what is mapped or in flight.
                    for data in (self.small, *self.slots):
                        data.destroy()
                    small = self.limits.bytes <= SMALLEST_PIECE
                    if small or not isinstance(error, wgpu.GPUOutOfMemoryError):
                        raise
                self._allow(self.limits.bytes // 2)

    def _run(self, call: Call) -> None:
        running: deque[Callable[[], None]] = deque()
        slots = [self.small] if call.nbytes <= SMALL else self.slots
        for piece, data in zip(call.pieces(self.limits), itertools.cycle(slots)):
            if len(running) == len(slots):
                running.popleft()()
            running.append(self._start(call, piece, data))
        for finish in running:
            finish()

    def _start(self, call: Call, piece: Piece, data: transfer.DataBuffer) -> Callable[[], None]:
        """Takes a piece of the operands to the device; returns what brings its result back into ``call.ys``."""
        operands = [call.operand(i, piece.rows, piece.tokens, heads) for i, heads in piece.heads]
        starts = np.cumsum([0] + [-(-x.nbytes // 16) * 16 for x, _ in operands]).tolist()
        data.reserve(transfer.padded(starts[-1]))
        data.write([(start, x) for start, (x, _) in zip(starts, operands, strict=False)])
        data.run(starts[-1], self.kernel(call, piece, starts, data.buffer))
        data.fetch()
        results = [(start, x.dtype, y) for start, (x, y) in zip(starts, operands, strict=False)]
        return functools.partial(data.read, results)

    def kernel(
        self, call: Call, piece: Piece, starts: list[int], data: wgpu.GPUBuffer
    ) -> Callable[[wgpu.GPUCommandEncoder], None]:
        """What records the dispatch that rotates a piece, whose operands lie in ``data`` from ``starts`` on."""
        ranges = self._write_parameters(call, piece, starts)
        group = self.kernels.bind_group(*ranges, (data, 0, data.size))
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
