"""Buffers that persist between calls, and the way of arrays into them and out of them.

Mapped memory is 8 to 18 times as fast as ``queue.write_buffer`` and ``queue.read_buffer``. Where the adapter lets the
host map the very buffer that the kernel works on (`Device.mapped`), nothing is copied on the way; elsewhere a pair of
staging buffers stands between.
"""

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


class _Buffers(NamedTuple):
    """All three are one buffer where it can be mapped."""

    upload: wgpu.GPUBuffer
    data: wgpu.GPUBuffer
    download: wgpu.GPUBuffer


class DataBuffer:
    """The storage buffer that kernels work on in place. It grows when a call needs more, up to ``largest`` bytes."""

    def __init__(self, device: Device, largest: int, replaced: Callable[[], None]):
        self._device = device
        self._largest = largest
        self._replaced = replaced
        self._buffers: _Buffers | None = None

    @property
    def buffer(self) -> wgpu.GPUBuffer:
        assert self._buffers is not None, "nothing was written"
        return self._buffers.data

    def _reserve(self, size: int) -> _Buffers:
        if self._buffers is None or self._buffers.data.size < size:
            self._destroy()
            self._buffers = self._create(size_class(size, self._largest))
        return self._buffers

    def _create(self, size: int) -> _Buffers:
        create = self._device.handle.create_buffer
        if self._device.mapped:
            data = create(label="data", size=size, usage=USAGE.STORAGE | USAGE.MAP_WRITE | USAGE.MAP_READ)
            return _Buffers(data, data, data)
        return _Buffers(
            create(label="upload", size=size, usage=USAGE.MAP_WRITE | USAGE.COPY_SRC),
            create(label="data", size=size, usage=USAGE.STORAGE | USAGE.COPY_DST | USAGE.COPY_SRC),
            create(label="download", size=size, usage=USAGE.MAP_READ | USAGE.COPY_DST),
        )

    def _destroy(self) -> None:
        if self._buffers is not None:
            for buffer in set(self._buffers):
                buffer.destroy()
            self._buffers = None
            self._replaced()

    def write(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Takes in arrays at byte offsets (multiples of 8)."""
        upload = self._reserve(max(_padded(offset + part.nbytes) for offset, part in parts)).upload
        upload.map_sync(wgpu.MapMode.WRITE)
        try:
            for offset, part in parts:
                upload.write_mapped(as_bytes(part), offset)
        finally:
            upload.unmap()

    def run(self, size: int, encode: Callable[[wgpu.GPUCommandEncoder], None]) -> None:
        """Submits what ``encode`` records, between the copies of the first ``size`` bytes that staging needs."""
        assert self._buffers is not None, "nothing was written"
        upload, data, download = self._buffers
        encoder = self._device.handle.create_command_encoder()
        if upload is not data:
            encoder.copy_buffer_to_buffer(upload, 0, data, 0, _padded(size))
        encode(encoder)
        if download is not data:
            encoder.copy_buffer_to_buffer(data, 0, download, 0, _padded(size))
        self._device.handle.queue.submit([encoder.finish()])

    def read(self, parts: Sequence[tuple[int, np.dtype, np.ndarray]]) -> None:
        """Waits for what was submitted and fills arrays, which may be strided, from byte offsets and stored dtypes."""
        assert self._buffers is not None, "nothing was written"
        download = self._buffers.download
        download.map_sync(wgpu.MapMode.READ)
        try:
            for offset, stored, part in parts:
                size = part.size * stored.itemsize
                mapped = download.read_mapped(offset, _padded(size), copy=False)
                # This view of mapped memory must not outlive the mapping.
                with np.errstate(over="ignore", invalid="ignore"):
                    part[...] = np.frombuffer(mapped, np.uint8)[:size].view(stored).reshape(part.shape)
        finally:
            download.unmap()


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


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A contiguous array's bytes: dtypes like bfloat16 have no buffer protocol of their own."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _padded(size: int) -> int:
    """Mappings and copies count in fours, mapped offsets in eights."""
    return -(-size // 8) * 8
