"""How operands lie in memory and which of their elements are rotated: static, hashable, free of any array."""

from typing import NamedTuple


class Layout(NamedTuple):
    """The canonical form of a call, for operands [..., S, H, D] (token_major) or [..., H, S, D]."""

    interleaved: bool  # pairs (2i, 2i + 1) of the window, else (i, i + pairs)
    start: int  # of the window in each head
    pairs: int  # the window is twice as long
    token_major: bool
    direction: int = 1  # or -1: every pair turns by the opposite angle, which is the transpose

    def transpose(self) -> "Layout":
        return self._replace(direction=-self.direction)

    @property
    def token_axis(self) -> int:
        return -3 if self.token_major else -2

    @property
    def head_axis(self) -> int:
        return -2 if self.token_major else -3
