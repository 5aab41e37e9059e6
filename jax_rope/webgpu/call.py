"""One rotation on the host: what the kernel's bindings hold, and how the work is cut to an adapter's limits."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..layout import Layout
from . import kernels

CALL_WORDS = 40  # of the WGSL struct Call


class Limits(NamedTuple):
    """What one dispatch may be."""

    bytes: int  # of any one binding
    threads: int


class Piece(NamedTuple):
    """A part of the work: ranges of rows and tokens, and of heads for each operand that takes part."""

    rows: slice
    tokens: slice
    heads: tuple[tuple[int, slice], ...]


class By(Protocol):
    """What operands are rotated by: the arrays at bindings 1 and 2, and the words of the uniform that describe them."""

    suffix: str  # of the entry point
    plain: bool  # the WGSL override PLAIN
    token_bytes: int  # the most of a binding that a token needs
    row_bytes: int  # the most of a binding that a row needs, its tokens left aside

    def arrays(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]: ...

    def words(self, piece: Piece) -> list[int]: ...


class ByAngles:
    """Positions and frequencies, as in `jax_rope.phase.Angles`."""

    suffix = ""

    def __init__(
        self,
        layout: Layout,
        shape: tuple[int, ...],
        positions: np.ndarray,
        table: np.ndarray,
        fractions: np.ndarray | None,
    ):
        batch, tokens = shape[:-3], shape[layout.token_axis]
        self._positions = by_row(positions, batch)
        self._fractions = None if fractions is None else by_row(fractions.astype(np.float32), batch)
        self._table = by_row(table, batch)
        # A row's only position is an offset, from which its tokens count.
        self._counted = self._positions.shape[-1] != tokens
        amplitudes = self._table[..., 3]
        self._amplitude = int(amplitudes.max(initial=0))
        self.plain = fractions is None and self._positions.shape[1] == 1 and bool((amplitudes == self._amplitude).all())
        self.token_bytes = 0 if self._counted else self._positions.shape[1] * (4 if fractions is None else 8)
        self.row_bytes = self._table[0].nbytes

    def arrays(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        positions = [self._cut(self._positions, piece)]
        if self._fractions is not None:
            positions.append(self._cut(self._fractions, piece))
        return np.concatenate(positions), rows_of(self._table, piece)

    def _cut(self, array: np.ndarray, piece: Piece) -> np.ndarray:
        rows = rows_of(array, piece)
        return (rows if self._counted else rows[:, :, piece.tokens]).reshape(-1).view(np.uint32)

    def words(self, piece: Piece) -> list[int]:
        rows, streams, _ = self._positions.shape
        per_stream = 1 if self._counted else length(piece.tokens)
        positions = (length(piece.rows) if rows > 1 else 1) * streams * per_stream
        return [
            0 if self._fractions is None else positions,
            self._table.shape[1] if len(self._table) > 1 else 0,
            streams * per_stream if rows > 1 else 0,
            per_stream if streams > 1 else 0,
            int(not self._counted),
            int(self._counted),
            piece.tokens.start if self._counted else 0,
            *[0] * 4,
            self._amplitude,
        ]


class ByTables:
    """Cosines and sines, as in `jax_rope.fallback.Tables`."""

    suffix = "_tables"
    plain = False

    def __init__(self, layout: Layout, shape: tuple[int, ...], cos: np.ndarray, sin: np.ndarray):
        self._tables = [by_row(table.astype(np.float32), shape[:-3]) for table in (cos, sin)]
        self._second = cos.shape[-1] - layout.pairs
        self.token_bytes = 2 * 4 * cos.shape[-1]
        self.row_bytes = 0

    def arrays(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        both = [rows_of(table, piece)[:, piece.tokens].reshape(-1) for table in self._both()]
        return np.zeros(1, np.uint32), np.concatenate(both)

    def _both(self) -> list[np.ndarray]:
        """Cosines and sines, with as many rows each."""
        rows = max(map(len, self._tables))
        return [np.broadcast_to(table, (rows, *table.shape[1:])) for table in self._tables]

    def words(self, piece: Piece) -> list[int]:
        cosines, _ = self._both()
        width, tokens = cosines.shape[-1], length(piece.tokens)
        rows = length(piece.rows) if len(cosines) > 1 else 1
        per_row = tokens * width if len(cosines) > 1 else 0
        return [0] * 7 + [per_row, width, self._second, rows * tokens * width]


class Call:
    """Operands as [rows, tokens, heads, head_dim] or [rows, heads, tokens, head_dim], and what they are rotated by."""

    def __init__(self, layout: Layout, xs: Sequence[np.ndarray], by: By, ys: Sequence[np.ndarray]):
        self.layout, self.by = layout, by
        self.rows = math.prod(xs[0].shape[:-3])
        self.tokens = xs[0].shape[layout.token_axis]
        self.heads = [x.shape[layout.head_axis] for x in xs]
        self.head_dim = xs[0].shape[-1]
        dtype = xs[0].dtype
        kind, self._pairs_per_thread = self._kind(dtype)
        # 16-bit operands whose pairs do not fill words go as float32.
        self.stored = dtype if kind == "_packed" else np.dtype(np.float32)
        self.nbytes = sum(x.size for x in xs) * self.stored.itemsize
        self.xs = [x.reshape(self.rows, *x.shape[-3:]) for x in xs]
        self.ys = [y.reshape(self.rows, *y.shape[-3:]) for y in ys]
        self.entry_point = ("forward" if layout.direction > 0 else "backward") + kind + by.suffix
        self.constants = {
            "INTERLEAVED": int(layout.interleaved),
            "PLAIN": int(by.plain),
            "WORKGROUP_SIZE": kernels.WORKGROUP_SIZE,
            "HEADS_PER_THREAD": kernels.HEADS_PER_THREAD,
        }
        if kind == "_packed":
            self.constants["STORAGE"] = 1 if dtype.name == "bfloat16" else 2

    def _kind(self, dtype: np.dtype) -> tuple[str, int]:
        """Which entry point, and how many pairs a thread of it turns."""
        for kind, pairs in (("_packed", 4), ("", 2)):
            fits = dtype.itemsize == 2 or kind != "_packed"
            if fits and not any(n % pairs for n in (self.head_dim, self.layout.start, self.layout.pairs)):
                return kind, pairs
        return "_scalar", 1

    def operand(self, index: int, rows: slice, tokens: slice, heads: slice) -> tuple[np.ndarray, np.ndarray]:
        """The part of an operand that a piece takes, and of its result that the piece makes."""
        at = (rows, tokens, heads) if self.layout.token_major else (rows, heads, tokens)
        return self.xs[index][at].astype(self.stored, copy=False), self.ys[index][at]

    def finish(self) -> None:
        """Completes the results when all pieces have run."""
        if self.stored != self.ys[0].dtype:  # on the way through float32 a NaN's bits may have changed
            end = self.layout.start + 2 * self.layout.pairs
            for x, y in zip(self.xs, self.ys, strict=True):
                y[..., : self.layout.start] = x[..., : self.layout.start]
                y[..., end:] = x[..., end:]

    def threads(self, piece: Piece) -> int:
        return length(piece.rows) * length(piece.tokens) * _blocks(piece.heads) * self._groups

    @property
    def _groups(self) -> int:
        return self.layout.pairs // self._pairs_per_thread

    def uniform(self, piece: Piece, starts: list[int]) -> np.ndarray:
        """The WGSL struct Call, for operands that lie in the data buffer from ``starts`` (in bytes) on."""
        rows, tokens = length(piece.rows), length(piece.tokens)
        counts = [length(heads) for _, heads in piece.heads] + [0]
        blocks = _blocks(piece.heads)
        words = [*_divisor(self._groups)]
        words += _divisor(blocks if self.layout.token_major else rows * tokens)
        words += _divisor(tokens)
        for heads, start in zip(counts[:2], starts[:2], strict=True):
            base = start // self.stored.itemsize + self.layout.start
            by_token, by_head = self.head_dim * heads, self.head_dim
            if not self.layout.token_major:
                by_token, by_head = self.head_dim, self.head_dim * tokens
            words += [base, self.head_dim * heads * tokens, by_token, by_head]
        words += [rows * tokens, blocks, counts[0], counts[1], int(not self.layout.token_major), self.layout.pairs]
        words += self.by.words(piece)
        return np.array(words + [0] * (CALL_WORDS - len(words)), np.uint32)

    def pieces(self, limits: Limits) -> Iterator[Piece]:
        """Cuts the work so that each piece is within limits: by rows, else by tokens, else by operands and heads."""
        all_heads = tuple((i, slice(0, heads)) for i, heads in enumerate(self.heads))
        tokens = self._most_tokens(all_heads, limits)
        if tokens:
            rows = max(1, tokens // self.tokens)
            if self.by.row_bytes:
                rows = max(1, min(rows, limits.bytes // self.by.row_bytes))
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

    def _most_tokens(self, heads: tuple[tuple[int, slice], ...], limits: Limits) -> int:
        """How many tokens of these heads one piece may have."""
        # 16 bytes align each operand's start.
        size = sum(length(h) for _, h in heads) * self.head_dim * self.stored.itemsize + 16 * len(heads)
        threads = _blocks(heads) * self._groups
        return min(limits.bytes // max(size, self.by.token_bytes), limits.threads // threads)

    def _cut(self, rows: int, tokens: int, heads: tuple[tuple[int, slice], ...]) -> Iterator[Piece]:
        for row in range(0, self.rows, rows):
            for token in range(0, self.tokens, tokens):
                end = min(self.rows, row + rows), min(self.tokens, token + tokens)
                yield Piece(slice(row, end[0]), slice(token, end[1]), heads)


def by_row(array: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """[..., a, b] to [rows, a, b], or [1, a, b] if all rows are alike."""
    if any(size != 1 for size in array.shape[:-2]):
        array = np.broadcast_to(array, batch + array.shape[-2:])
    return array.reshape(math.prod(array.shape[:-2]), *array.shape[-2:])


def rows_of(array: np.ndarray, piece: Piece) -> np.ndarray:
    return array[piece.rows] if len(array) > 1 else array


def length(part: slice) -> int:
    return part.stop - part.start


def _blocks(heads: tuple[tuple[int, slice], ...]) -> int:
    """How many threads share the heads of a token and a group of pairs."""
    return sum(-(-length(h) // kernels.HEADS_PER_THREAD) for _, h in heads)


def _divisor(value: int) -> list[int]:
    """The WGSL struct Divisor."""
    shift = (value - 1).bit_length()
    return [value, -(-(1 << 31 + shift) // value), shift, 0]
