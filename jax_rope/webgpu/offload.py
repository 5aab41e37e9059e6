"""What the callback runs: arrays are cut into pieces that the adapter takes, each goes through the kernel."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import wgpu

from ..layout import Layout
from . import device as devices, kernels, transfer
from .device import Device

# Larger pieces would only hold more of the host's memory: a piece this size takes milliseconds.
LARGEST_PIECE = 1 << 27
CALL_WORDS = 36  # of the WGSL struct Call
ALIGNMENT = 256  # of binding offsets; no adapter asks for more


class Limits(NamedTuple):
    """What one dispatch may be."""

    bytes: int  # of any one binding
    threads: int


class Piece(NamedTuple):
    """A part of the work: ranges of rows and tokens, and of heads for each operand that takes part."""

    rows: slice
    tokens: slice
    heads: tuple[tuple[int, slice], ...]


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

    def run(self, call: "Call", piece: Piece) -> None:
        """Takes a piece of the operands to the device and its result back into ``call.ys``."""
        operands = [call.operand(i, piece.rows, piece.tokens, heads) for i, heads in piece.heads]
        starts = np.cumsum([0] + [-(-x.nbytes // 16) * 16 for x, _ in operands]).tolist()
        with self.device.lock:
            self.data.write([(start, x) for start, (x, _) in zip(starts, operands, strict=False)])
            self.data.run(starts[-1], self.kernel(call, piece, starts))
            self.data.read([(start, x.dtype, y) for start, (x, y) in zip(starts, operands, strict=False)])

    def kernel(self, call: "Call", piece: Piece, starts: list[int]) -> Callable[[wgpu.GPUCommandEncoder], None]:
        """What records the dispatch that rotates a piece, whose operands lie in the data buffer from ``starts`` on."""
        ranges = self._write_parameters(call, piece, starts)
        group = self.kernels.bind_group(*ranges, (self.data.buffer, 0, self.data.buffer.size))
        pipeline, grid = self._dispatch(call, piece)

        def record(encoder: wgpu.GPUCommandEncoder) -> None:
            compute = encoder.begin_compute_pass()
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*grid)
            compute.end()

        return record

    def _write_parameters(self, call: "Call", piece: Piece, starts: list[int]) -> list[tuple]:
        table, positions = call.parameters(piece)
        uniform = call.uniform(piece, starts)
        at_table = ALIGNMENT
        at_positions = at_table + -(-table.nbytes // ALIGNMENT) * ALIGNMENT
        data = np.zeros(at_positions + positions.nbytes, np.uint8)
        data[: uniform.nbytes] = uniform.view(np.uint8)
        data[at_table : at_table + table.nbytes] = transfer.as_bytes(table)
        data[at_positions:] = transfer.as_bytes(positions)
        buffer = self.parameters.write(data)
        return [
            (buffer, 0, CALL_WORDS * 4),
            (buffer, at_positions, min(buffer.size - at_positions, self.binding)),
            (buffer, at_table, min(buffer.size - at_table, self.binding)),
        ]

    def _dispatch(self, call: "Call", piece: Piece):
        entry_point = ("forward" if call.layout.direction > 0 else "backward") + call.suffix
        constants = {
            "INTERLEAVED": int(call.layout.interleaved),
            "WORKGROUP_SIZE": kernels.WORKGROUP_SIZE,
            "HEADS_PER_THREAD": kernels.HEADS_PER_THREAD,
        }
        if call.suffix == "_packed":
            constants["STORAGE"] = 1 if call.dtype.name == "bfloat16" else 2
        workgroups = -(-call.threads(piece) // kernels.WORKGROUP_SIZE)
        y = -(-workgroups // self.workgroups)
        return self.kernels.pipeline(entry_point, **constants), (-(-workgroups // y), y, 1)


class Call:
    """One rotation on the host: operands as [rows, tokens, heads, head_dim] or [rows, heads, tokens, head_dim]."""

    def __init__(
        self,
        layout: Layout,
        xs: Sequence[np.ndarray],
        positions: np.ndarray,
        table: np.ndarray,
        fractions: np.ndarray | None,
    ):
        self.layout = layout
        batch = xs[0].shape[:-3]
        self.rows = math.prod(batch)
        self.tokens = xs[0].shape[layout.token_axis]
        self.heads = [x.shape[layout.head_axis] for x in xs]
        self.head_dim = xs[0].shape[-1]
        self.dtype = xs[0].dtype
        aligned = not (self.head_dim % 4 or layout.start % 4 or layout.pairs % 4)
        if self.dtype.itemsize == 2 and aligned:
            self.suffix, self.pairs_per_thread = "_packed", 4
        elif not (self.head_dim % 2 or layout.start % 2 or layout.pairs % 2):
            self.suffix, self.pairs_per_thread = "", 2
        else:
            self.suffix, self.pairs_per_thread = "_scalar", 1
        # 16-bit operands whose pairs do not fill words go as float32.
        self.stored = self.dtype if self.suffix == "_packed" else np.dtype(np.float32)
        self.xs = [x.reshape(self.rows, *x.shape[-3:]) for x in xs]
        self.ys = [np.empty(x.shape, x.dtype) for x in self.xs]
        self.positions = self._by_row(positions, batch, 2)
        self.fractions = None if fractions is None else self._by_row(fractions.astype(np.float32), batch, 2)
        self.table = self._by_row(table, batch, 2)
        # A row's only position is an offset, from which its tokens count.
        self.counted = self.positions.shape[-1] != self.tokens

    def _by_row(self, array: np.ndarray, batch: tuple[int, ...], rank: int) -> np.ndarray:
        """[rows, ...], or [1, ...] if all rows are alike."""
        if any(size != 1 for size in array.shape[:-rank]):
            array = np.broadcast_to(array, batch + array.shape[-rank:])
            return array.reshape(self.rows, *array.shape[-rank:])
        return array.reshape(1, *array.shape[-rank:])

    def operand(self, index: int, rows: slice, tokens: slice, heads: slice) -> tuple[np.ndarray, np.ndarray]:
        """The part of an operand that a piece takes, and of its result that the piece makes."""
        at = (rows, tokens, heads) if self.layout.token_major else (rows, heads, tokens)
        return self.xs[index][at].astype(self.stored, copy=False), self.ys[index][at]

    def parameters(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """The table's rows, and positions followed by fractions, that a piece needs."""

        def cut(array):
            rows = piece.rows if array.shape[0] > 1 else slice(None)
            return array[rows] if self.counted else array[rows, :, piece.tokens]

        positions = [cut(self.positions).reshape(-1).view(np.uint32)]
        if self.fractions is not None:
            positions.append(cut(self.fractions).reshape(-1).view(np.uint32))
        table = self.table[piece.rows] if self.table.shape[0] > 1 else self.table
        return table, np.concatenate(positions)

    def threads(self, piece: Piece) -> int:
        return _length(piece.rows) * _length(piece.tokens) * self._blocks(piece) * self._groups

    @property
    def _groups(self) -> int:
        return self.layout.pairs // self.pairs_per_thread

    @staticmethod
    def _blocks(piece: Piece) -> int:
        return sum(-(-_length(heads) // kernels.HEADS_PER_THREAD) for _, heads in piece.heads)

    def uniform(self, piece: Piece, starts: list[int]) -> np.ndarray:
        """The WGSL struct Call."""
        rows, tokens = _length(piece.rows), _length(piece.tokens)
        counts = [_length(heads) for _, heads in piece.heads] + [0]
        _, positions = self.parameters(piece)
        streams = self.positions.shape[1]
        per_stream = 1 if self.counted else tokens
        per_row = streams * per_stream if self.positions.shape[0] > 1 else 0
        inner = self._blocks(piece) if self.layout.token_major else rows * tokens
        words = [*_divisor(self._groups), *_divisor(inner), *_divisor(tokens)]
        for heads, start in zip(counts[:2], starts[:2], strict=True):
            base = start // self.stored.itemsize + self.layout.start
            by_token, by_head = self.head_dim * heads, self.head_dim
            if not self.layout.token_major:
                by_token, by_head = self.head_dim, self.head_dim * tokens
            words += [base, self.head_dim * heads * tokens, by_token, by_head]
        words += [rows * tokens, self._blocks(piece), counts[0], counts[1]]
        words += [int(not self.layout.token_major), self.layout.pairs]
        words += [int(self.fractions is not None and len(positions) // 2)]
        words += [self.layout.pairs if self.table.shape[0] > 1 else 0]
        words += [per_row, per_stream, int(not self.counted), int(self.counted)]
        words += [piece.tokens.start if self.counted else 0]
        return np.array(words + [0] * (CALL_WORDS - len(words)), np.uint32)

    def pieces(self, limits: "Limits") -> Iterator[Piece]:
        """Cuts the work so that each piece is within limits: by rows, else by tokens, else by operands and heads."""
        all_heads = tuple((i, slice(0, heads)) for i, heads in enumerate(self.heads))
        tokens = self._most_tokens(all_heads, limits)
        if tokens:
            rows = max(1, tokens // self.tokens)
            if self.table.shape[0] > 1:
                rows = max(1, min(rows, limits.bytes // self.table[0].nbytes))
            yield from self._cut(rows, tokens, all_heads)
            return
        for i, count in enumerate(self.heads):
            heads = count
            while heads and not self._most_tokens(((i, slice(0, heads)),), limits):
                heads //= 2
            if not heads:
                raise ValueError(
                    f"one head of one token, {self.head_dim} {self.stored.name}, exceeds the adapter's limits: {limits}"
                )
            for head in range(0, count, heads):
                yield from self._cut(1, 1, ((i, slice(head, min(count, head + heads))),))

    def _most_tokens(self, heads: tuple[tuple[int, slice], ...], limits: "Limits") -> int:
        """How many tokens of these heads one piece may have."""
        # 16 bytes align each operand's start.
        elements = sum(_length(h) for _, h in heads) * self.head_dim * self.stored.itemsize + 16 * len(heads)
        position = 0 if self.counted else self.positions.shape[1] * (4 if self.fractions is None else 8)
        threads = self._blocks(Piece(slice(0), slice(0), heads)) * self._groups
        return min(limits.bytes // max(elements, position), limits.threads // threads)

    def _cut(self, rows: int, tokens: int, heads: tuple[tuple[int, slice], ...]) -> Iterator[Piece]:
        for row in range(0, self.rows, rows):
            for token in range(0, self.tokens, tokens):
                end = min(self.rows, row + rows), min(self.tokens, token + tokens)
                yield Piece(slice(row, end[0]), slice(token, end[1]), heads)


def _length(part: slice) -> int:
    return part.stop - part.start


def _divisor(value: int) -> tuple[int, int, int, int]:
    """The WGSL struct Divisor."""
    shift = (value - 1).bit_length()
    return value, -(-(1 << 31 + shift) // value), shift, 0


_rotators: dict[int, Rotator] = {}


def rotator(name: str | None = None) -> Rotator:
    device = devices.device(name)
    with device.lock:
        if id(device) not in _rotators:
            _rotators[id(device)] = Rotator(device)
        return _rotators[id(device)]


def rotate(
    layout: Layout,
    xs: Sequence[np.ndarray],
    positions: np.ndarray,
    table: np.ndarray,
    fractions: np.ndarray | None,
    adapter: str | None = None,
) -> tuple[np.ndarray, ...]:
    """Rotates arrays [..., S, H, D] (or as the layout says), of float32, bfloat16 or float16, alike but for H.

    The other operands are those of `jax_rope.phase.Angles`.
    """
    call = Call(layout, xs, positions, table, fractions)
    if call.rows and call.tokens and all(call.heads):
        running = rotator(adapter)
        for piece in call.pieces(running.limits):
            running.run(call, piece)
    return tuple(y.reshape(x.shape) for x, y in zip(xs, call.ys, strict=True))
