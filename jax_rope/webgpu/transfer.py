"""Buffers that persist between calls, and the way of arrays into them and out of them.

Mapped memory is 8 to 18 times as fast as ``queue.write_buffer`` and ``queue.read_buffer``, but a map has to be waited
for: what is small is written by the queue. Where the adapter lets the host map the very buffer that the kernel works on
(`Device.mapped`), nothing is copied on the way; elsewhere a pair of staging buffers stands between.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import wgpu

from .device import Device

USAGE = wgpu.BufferUsage
SMALLEST = 1 << 16


def size_class(size: int, largest: int) -> int:
    """The size of a buffer that has room for ``size`` bytes: a power of two, so that few sizes are in use."""
    return min(max(SMALLEST, 1 << (size - 1).bit_length()), largest)


class TimeLimitError(Exception):
    """The device did not answer within `Device.time_limit`."""


class _Buffers(NamedTuple):
    """Two or all three may be one buffer."""

    upload: wgpu.GPUBuffer
    data: wgpu.GPUBuffer
    download: wgpu.GPUBuffer


class DataBuffer:
    """The storage buffer that kernels work on in place: `write`, `run`, `fetch` and `read`, in turn.

    It grows when a call needs more, up to ``largest`` bytes.
    """

    def __init__(self, device: Device, largest: int, replaced: Callable[[], None]):
        self._device = device
        self._largest = largest
        self._replaced = replaced
        self._buffers: _Buffers | None = None
        self._mapped: wgpu.GPUPromise | None = None  # what the last map that was asked for waits for

    @property
    def buffer(self) -> wgpu.GPUBuffer:
        assert self._buffers is not None, "nothing was written"
        return self._buffers.data

    def reserve(self, size: int) -> None:
        """Has room for ``size`` bytes from now on."""
        if self._buffers is None or self._buffers.data.size < size:
            self.destroy()
            self._buffers = self._create(size_class(size, self._largest))

    def _create(self, size: int) -> _Buffers:
        """Between calls the buffer stays mapped for writing. A map is only granted when all that was submitted has
        ended, so one asked for late would keep an array from being written while the kernel works on another."""
        if self._device.mapped:
            data = self._made("data", size, USAGE.STORAGE | USAGE.MAP_WRITE | USAGE.MAP_READ)
            return _Buffers(data, data, data)
        return _Buffers(
            self._made("upload", size, USAGE.MAP_WRITE | USAGE.COPY_SRC),
            self._made("data", size, USAGE.STORAGE | USAGE.COPY_DST | USAGE.COPY_SRC),
            self._made("download", size, USAGE.MAP_READ | USAGE.COPY_DST),
        )

    def _made(self, label: str, size: int, usage: int) -> wgpu.GPUBuffer:
        writable = bool(usage & USAGE.MAP_WRITE)
        return self._device.handle.create_buffer(label=label, size=size, usage=usage, mapped_at_creation=writable)

    def destroy(self) -> None:
        """Gives the memory back, whatever state it is in."""
        if self._buffers is not None:
            for buffer in set(self._buffers):
                buffer.destroy()
            self._buffers = self._mapped = None
            self._replaced()

    def write(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Takes in arrays at byte offsets (multiples of 8)."""
        assert self._buffers is not None, "nothing was reserved"
        self._wait()
        for offset, part in parts:
            self._buffers.upload.write_mapped(as_bytes(part), offset)
        self._buffers.upload.unmap()

    def _wait(self) -> None:
        """Waits for the last map that was asked for."""
        if self._mapped is None:
            return
        # wgpu waits for this event without a limit, and has no public way to wait with one. A thread sets it, which
        # ends where the device is destroyed; other implementations of wgpu's API have neither.
        handle, limit = self._device.handle, self._device.time_limit
        event = getattr(self._mapped, "_thread_event", None) if hasattr(handle, "_poller") else None
        end = time.monotonic() + limit
        while event is not None and not event.wait(min(1.0, limit)):
            if handle._poller is None:
                raise RuntimeError("the device was destroyed")
            if time.monotonic() >= end:
                raise TimeLimitError(f"no answer within {limit:g} s")
        self._mapped.sync_wait()

    def run(self, size: int, encode: Callable[[wgpu.GPUCommandEncoder], None]) -> None:
        """Submits what ``encode`` records, between the copies of the first ``size`` bytes that staging needs."""
        assert self._buffers is not None, "nothing was written"
        upload, data, download = self._buffers
        encoder = self._device.handle.create_command_encoder()
        if upload is not data:
            encoder.copy_buffer_to_buffer(upload, 0, data, 0, padded(size))
        encode(encoder)
        if download is not data:
            encoder.copy_buffer_to_buffer(data, 0, download, 0, padded(size))
        self._device.handle.queue.submit([encoder.finish()])

    def fetch(self) -> None:
        """Asks for what was run, without waiting for it."""
        assert self._buffers is not None, "nothing was written"
        self._mapped = _map_for_reading(self._buffers.download)

    def read(self, parts: Sequence[tuple[int, np.dtype, np.ndarray]]) -> None:
        """Waits for what was fetched and fills arrays, which may be strided, from byte offsets and stored dtypes."""
        assert self._buffers is not None and self._mapped is not None, "nothing was fetched"
        self._wait()
        download = self._buffers.download
        for offset, stored, part in parts:
            size = part.size * stored.itemsize
            mapped = download.read_mapped(offset, padded(size), copy=False)
            # This view of mapped memory must not outlive the mapping.
            with np.errstate(over="ignore", invalid="ignore"):
                part[...] = np.frombuffer(mapped, np.uint8)[:size].view(stored).reshape(part.shape)
        download.unmap()
        self._mapped = self._prepared()

    def _prepared(self) -> wgpu.GPUPromise | None:
        """What the next `write` has to wait for."""
        assert self._buffers is not None, "nothing was read"
        return self._buffers.upload.map_async(wgpu.MapMode.WRITE)


class SmallDataBuffer(DataBuffer):
    """A `DataBuffer` that the queue writes: a quarter less time for a few KiB, several times as much for a few MiB."""

    def _create(self, size: int) -> _Buffers:
        if self._device.mapped:
            data = self._made("small data", size, USAGE.STORAGE | USAGE.COPY_DST | USAGE.MAP_READ)
            return _Buffers(data, data, data)
        data = self._made("small data", size, USAGE.STORAGE | USAGE.COPY_DST | USAGE.COPY_SRC)
        return _Buffers(data, data, self._made("small download", size, USAGE.MAP_READ | USAGE.COPY_DST))

    def write(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        assert self._buffers is not None, "nothing was reserved"
        for offset, part in parts:
            data = as_bytes(part)
            if data.size % 4:
                data = np.pad(data, (0, -data.size % 4))
            self._device.handle.queue.write_buffer(self._buffers.data, offset, data)

    def _prepared(self) -> None:
        return None


class ParameterBuffer:
    """A small buffer written with every call. Its size is that of its largest use."""

    def __init__(self, device: Device, replaced: Callable[[], None]):
        self._device = device
        self._replaced = replaced
        self._buffer: wgpu.GPUBuffer | None = None

    def write(self, data: np.ndarray) -> wgpu.GPUBuffer:
        """The buffer, which begins with ``data``, uint8 of a multiple of 4 bytes."""
        if self._buffer is None or self._buffer.size < data.nbytes:
            if self._buffer is not None:
                self._buffer.destroy()
                self._replaced()
            usage = USAGE.UNIFORM | USAGE.STORAGE | USAGE.COPY_DST
            size = size_class(data.nbytes, self._device.limits["max-buffer-size"])
            self._buffer = self._device.handle.create_buffer(label="parameters", size=size, usage=usage)
        self._device.handle.queue.write_buffer(self._buffer, 0, data)
        return self._buffer


def _map_for_reading(buffer: wgpu.GPUBuffer) -> wgpu.GPUPromise:
    """Asks for a map of a buffer that work was just submitted for.

    wgpu's plain READ submits empty work first, for buffers that nothing was ever submitted for. Drivers that take one
    submission at a time make the caller wait there, beyond any time limit.
    """
    try:
        return buffer.map_async("READ_NOSYNC")
    except (KeyError, ValueError):  # a wgpu that does not know it
        return buffer.map_async(wgpu.MapMode.READ)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A contiguous array's bytes: dtypes like bfloat16 have no buffer protocol of their own."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def padded(size: int) -> int:
    """Mappings and copies count in fours, mapped offsets in eights."""
    return -(-size // 8) * 8
