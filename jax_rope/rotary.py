"""What is rotated, and how fast."""

import functools
import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checks import integer, one_of, shown
from .phase import STREAM_BITS, cos_sin, pair_table
from .scaling import Frequencies, Scaling, powers

PAIRINGS = ("interleaved", "half", "interleaved_to_half")
SECTION_LAYOUTS = ("contiguous", "interleaved", "axial")

# Compiled as one where it is called outside of jit; inside, it is inlined.
_cos_sin = jax.jit(cos_sin, static_argnums=(1, 2), inline=True)


@dataclass(frozen=True)
class Rotary:
    """Which elements of a head are paired, and how fast each pair turns. Immutable and hashable: static under ``jit``.

    Pair i of n = rotary_dim / 2 turns by ``theta ** (-i / n)`` radians per position (Su et al., "RoFormer",
    arXiv:2104.09864, section 3.2.2), unless ``scaling``, ``sections`` or ``freqs`` say otherwise.

    Attributes:
      theta: the base, a number from 1e-6 to 1e300.
      pairing: ``"interleaved"`` pairs elements (2i, 2i + 1) of the window (RoFormer, LLaMA as published, GPT-J, GGUF);
        ``"half"`` pairs (i, i + rotary_dim / 2) (GPT-NeoX, Hugging Face); ``"interleaved_to_half"`` reads pairs
        (2i, 2i + 1) and writes (i, i + rotary_dim / 2) (DeepSeek-V3 as Hugging Face runs it).
      rotary_dim: how many elements of each head are rotated, even; ``None`` is all from ``start`` on, or as many as
        ``freqs`` has pairs for.
      start: the first of them. What lies outside the window passes through bit for bit.
      scaling: a frequency rule from `jax_rope.scaling`.
      sections: how many pairs follow each stream of positions; then positions are ``[streams, ..., S]``.
      section_layout: ``"contiguous"``: the first section's pairs come first, and so on (Qwen2-VL's M-RoPE);
        ``"interleaved"``: pair i follows stream i modulo the number of streams, as long as that stream's section lasts,
        else the first (Qwen3-VL); ``"axial"``: contiguous, and frequencies begin anew in each section (2-D vision).
      freqs: the frequencies themselves, in radians per position, one for each pair: numbers, which are taken exactly,
        or a float array ``[pairs]``, which may be traced and has a gradient. A Rotary with an array is not hashable.

    Raises:
      TypeError, ValueError: for a field that is of no such form; the message names it.
    """

    theta: float = 10_000.0
    pairing: str = "interleaved"
    rotary_dim: int | None = None
    start: int = 0
    scaling: Scaling | None = None
    sections: tuple[int, ...] | None = None
    section_layout: str = "contiguous"
    freqs: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.theta, numbers.Real) or isinstance(self.theta, bool):
            raise TypeError(
                f"theta must be a number known while tracing (pass freqs for a traced one), got {shown(self.theta)}"
            )
        if not 1e-6 <= (float(self.theta) if isinstance(self.theta, np.floating) else self.theta) <= 1e300:
            raise ValueError(f"theta must be from 1e-6 to 1e300, got {shown(self.theta)}")
        self._set(theta=float(self.theta))
        one_of("pairing", self.pairing, PAIRINGS)
        if self.rotary_dim is not None:
            self._set(rotary_dim=integer("rotary_dim", self.rotary_dim))
            if self.rotary_dim <= 0 or self.rotary_dim % 2:
                raise ValueError(f"rotary_dim must be even and above 0, got {shown(self.rotary_dim)}")
        self._set(start=integer("start", self.start))
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {shown(self.start)}")
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise TypeError(f"scaling must be a rule from jax_rope.scaling or None, got {shown(self.scaling)}")
        one_of("section_layout", self.section_layout, SECTION_LAYOUTS)
        if self.sections is not None:
            self._set(sections=_sections(self.sections))
            if tuple(map(self.pair_streams().count, range(self.streams))) != self.sections:
                raise ValueError(
                    f"sections must have the longest first, and the others short enough to take turns, "
                    f"for section_layout 'interleaved', got {shown(self.sections)}"
                )
        if self.freqs is not None:
            self._take_freqs()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_freqs(self) -> None:
        if self.scaling is not None:
            raise ValueError(
                f"scaling must be None beside freqs, which are the frequencies themselves, got {shown(self.scaling)}"
            )
        if isinstance(self.freqs, jax.Array):
            if self.freqs.ndim != 1 or self.freqs.dtype not in (jnp.float32, jnp.float64):
                raise TypeError(
                    f"freqs must be float32 or float64 [pairs], got {self.freqs.dtype} of shape {self.freqs.shape}"
                )
            count = self.freqs.shape[0]
        else:
            try:
                values = tuple(float(f) for f in self.freqs)
            except (TypeError, ValueError) as error:
                raise TypeError(f"freqs must be numbers or a float array [pairs], got {shown(self.freqs)}") from error
            except OverflowError as error:
                raise ValueError("freqs must be finite, got a number beyond float64") from error
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"freqs must be finite, got {value}")
            self._set(freqs=values)
            count = len(values)
        if count == 0:
            raise ValueError("freqs must have at least one entry, got 0")
        if self.rotary_dim is not None and self.rotary_dim != 2 * count:
            raise ValueError(
                f"freqs must have {self.rotary_dim // 2} entries, one for each pair of rotary_dim {self.rotary_dim}, "
                f"got {count}"
            )
        self._set(rotary_dim=2 * count)

    @classmethod
    def from_hf(cls, config: dict[str, Any] | str | os.PathLike[str] | Any, layer_type: str | None = None) -> "Rotary":
        """What a model's ``config.json`` describes: see `jax_rope.huggingface.read`.

        Args:
          config: a dict, the path of a ``config.json`` or of its directory, or any object with ``to_dict()``.
          layer_type: which kind of layer, where a model has several.

        Returns:
          The model's Rotary. For multi-head latent attention it describes the rotated part of the head alone.

        Raises:
          TypeError, ValueError: the configuration says something that is not known; the message names the key.
        """
        from . import huggingface

        return huggingface.read(config, layer_type)

    @property
    def streams(self) -> int:
        """How many streams of positions there are."""
        return 1 if self.sections is None else len(self.sections)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on ``seq_len``, by the rule of ``scaling``."""
        return self.scaling is not None and self.scaling.depends_on_length

    def window(self, head_dim: int) -> int:
        """How many elements of a head are rotated.

        Args:
          head_dim: of the heads to be rotated.

        Returns:
          ``rotary_dim``, or what it stands for.

        Raises:
          TypeError: ``head_dim`` is no integer.
          ValueError: the window does not fit into ``head_dim``, or what it leaves is odd.
        """
        head_dim = integer("head_dim", head_dim)
        if self.rotary_dim is None:
            width = head_dim - self.start
            if width <= 0 or width % 2:
                raise ValueError(
                    f"head_dim must leave an even number above 0 from start {self.start} on where rotary_dim is None, "
                    f"got {head_dim}"
                )
        else:
            width = self.rotary_dim
            if self.start + width > head_dim:
                raise ValueError(
                    f"rotary_dim must fit into head_dim {head_dim} from start {self.start} on, got {width}"
                )
        if self.sections is not None and sum(self.sections) != width // 2:
            raise ValueError(f"sections must add up to {width // 2} pairs, got {shown(self.sections)}")
        return width

    def inv_freq(self, head_dim: int, seq_len: int | None = None) -> np.ndarray:
        """The frequencies.

        Args:
          head_dim: of the heads to be rotated.
          seq_len: the length of the row, where ``scaling`` depends on it; ``None`` is one within the original length.

        Returns:
          Radians per position, float64 ``[rotary_dim / 2]``.

        Raises:
          ValueError: the window does not fit.
          TypeError: ``freqs`` is an array; it is what this would return.
        """
        if isinstance(self.freqs, jax.Array):
            raise TypeError("freqs must be numbers for inv_freq, got an array, which is itself what it would return")
        return np.array([float(omega) for omega in _frequencies(self, self.window(head_dim), self._length(seq_len))])

    def attention_factor(self, seq_len: int | None = None) -> float:
        """The factor on cosine and sine.

        Args:
          seq_len: as in `inv_freq`.

        Returns:
          The factor, 1 but for rules of ``scaling`` that have another.
        """
        return 1.0 if self.scaling is None else self.scaling.factor_on_attention(self._length(seq_len))

    def tables(
        self, positions: jax.typing.ArrayLike, head_dim: int, seq_len: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines for `jax_rope.rope_cached`, attention factor included.

        Args:
          positions: as in `jax_rope.rope`, an array ``[..., S]`` (``[streams, ..., S]`` with ``sections``).
          head_dim: of the heads to be rotated.
          seq_len: as in `jax_rope.rope`.

        Returns:
          (cos, sin), float32 ``[..., S, rotary_dim / 2]``.

        Raises:
          TypeError, ValueError: as in `jax_rope.rope`.
        """
        from .arguments import table_angles

        angles = table_angles(positions, self, head_dim, seq_len)
        return _cos_sin(angles, angles.positions.shape[-1], jnp.dtype(jnp.float32))

    def table(self, head_dim: int, seq_len: int | None, inverse: bool) -> np.ndarray:
        """The frequencies as the kernels take them.

        Args:
          head_dim: of the heads to be rotated.
          seq_len: as in `inv_freq`.
          inverse: whether for the inverse, whose factor on cosine and sine is the reciprocal.

        Returns:
          uint32 ``[rotary_dim / 2, 4]``: a pair's fraction of a turn per position in 64 bits (high word, low word), its
          whole turns and its stream of positions (``turns << 8 | stream``), and its factor on cosine and sine (the bits
          of a float32).

        Raises:
          TypeError, ValueError: as `window`; a frequency of 2**23 turns per position or more.
        """
        return _table(self, self.window(head_dim), self._length(seq_len), inverse)

    def pair_streams(self) -> tuple[int, ...]:
        """Which stream of positions each pair follows, where there are ``sections``.

        Returns:
          For each pair a number below `streams`.
        """
        assert self.sections is not None
        if self.section_layout != "interleaved":
            return tuple(stream for stream, count in enumerate(self.sections) for _ in range(count))
        streams = len(self.sections)
        return tuple(i % streams if i < streams * self.sections[i % streams] else 0 for i in range(sum(self.sections)))

    def _length(self, seq_len: int | None) -> int | None:
        # Lengths that make no difference must not make two tables.
        return None if self.scaling is None else self.scaling.representative(seq_len)


def _sections(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise TypeError(f"sections must be a tuple of numbers of pairs, got {shown(value)}")
    for count in value:
        if not isinstance(count, numbers.Integral) or isinstance(count, bool):
            raise TypeError(f"sections must be integers, got {shown(count)}")
    sections, most = tuple(map(int, value)), (1 << STREAM_BITS) - 1
    if not 0 < len(sections) <= most or min(sections) < 0:
        got = f"{len(sections)} of them" if not 0 < len(sections) <= most else shown(min(sections))
        raise ValueError(f"sections must be 1 to {most} numbers of pairs, none negative, got {got}")
    return sections


@functools.lru_cache(maxsize=256)
def _frequencies(rotary: Rotary, width: int, seq_len: int | None) -> Frequencies:
    if rotary.freqs is not None:
        return tuple(Decimal(omega) for omega in rotary.freqs)
    theta, rule = Decimal(rotary.theta), rotary.scaling
    widths = [width]
    if rotary.sections is not None and rotary.section_layout == "axial":
        widths = [2 * count for count in rotary.sections]
    per_section = [powers(theta, w) if rule is None else rule.frequencies(theta, w, seq_len) for w in widths]
    return tuple(omega for frequencies in per_section for omega in frequencies)


@functools.lru_cache(maxsize=256)
def _table(rotary: Rotary, width: int, seq_len: int | None, inverse: bool) -> np.ndarray:
    amplitude = rotary.attention_factor(seq_len)
    frequencies = _frequencies(rotary, width, seq_len)
    streams = [0] * len(frequencies) if rotary.sections is None else rotary.pair_streams()
    table = pair_table(frequencies, 1 / amplitude if inverse else amplitude, streams)
    table.setflags(write=False)
    return table
