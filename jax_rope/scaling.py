"""The frequency rules: how published models change the frequencies of a pair to reach beyond their training length.

Each rule is an immutable value with two pure functions. ``frequencies(theta, rotary_dim, seq_len)`` gives the radians
per position of each pair, in `DIGITS` decimal digits; ``factor_on_attention(seq_len)`` the factor on cosine and sine.
Below, n = rotary_dim / 2 is the number of pairs, omega_i = theta ** (-i / n) and lambda_i = 2 pi / omega_i the
wavelength of pair i. Where the rule depends on the length (``depends_on_length``), ``seq_len`` is that of the row, and
None that of a row no longer than the original length.
"""

import math
import numbers
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import ClassVar

from .checks import shown
from .phase import DIGITS, TWO_PI

Frequencies = tuple[Decimal, ...]


def powers(theta: Decimal, rotary_dim: int) -> Frequencies:
    """omega_i of all pairs. float64 would not do: its rounding shows as 1e-7 radians at 2**31 positions.

    Args:
      theta: the base.
      rotary_dim: twice the number of pairs.

    Returns:
      Radians per position, in `DIGITS` decimal digits.
    """
    with localcontext() as context:
        context.prec = DIGITS
        logarithm = theta.ln()
        return tuple((logarithm * (-2 * i) / rotary_dim).exp() for i in range(rotary_dim // 2))


def _number(name: str, value: object, least: float | None = None, what: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least:g}, got {shown(value)}")
    return number


def _above_0(name: str, value: object, what: str = "a number") -> float:
    number = _number(name, value, what=what)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {shown(value)}")
    return number


def _factors(name: str, values: object) -> tuple[float, ...]:
    what = "numbers, one for each pair"
    try:
        each: tuple[object, ...] = tuple(values)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} must be {what}, got {shown(values)}") from error
    return tuple(_above_0(name, value, what) for value in each)


def _length(name: str, value: object) -> int:
    number = _number(name, value, least=1)
    if number != int(number):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    return int(number)


@dataclass(frozen=True)
class Scaling:
    """No change: what all rules have in common."""

    depends_on_length: ClassVar[bool] = False

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        """How fast each pair turns.

        Args:
          theta: the base.
          rotary_dim: twice the number of pairs.
          seq_len: the row's length; ``None`` is one within the original length.

        Returns:
          Radians per position, in `DIGITS` decimal digits.

        Raises:
          ValueError: the rule is for another number of pairs.
        """
        return powers(theta, rotary_dim)

    def factor_on_attention(self, seq_len: int | None) -> float:
        """The factor on cosine and sine.

        Args:
          seq_len: as in `frequencies`.

        Returns:
          The factor, 1 where the rule has none.
        """
        return 1.0

    def representative(self, seq_len: int | None) -> int | None:
        """One length for all that give the same frequencies and factor.

        Args:
          seq_len: as in `frequencies`.

        Returns:
          That length, or None where none matters.
        """
        return None

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: omega_i / factor (Chen et al., arXiv:2306.15595). Hugging Face: the same.

    Attributes:
      factor: the extended length over the original one, at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        self._set(factor=_number("factor", self.factor, least=1))

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        with localcontext() as context:
            context.prec = DIGITS
            return tuple(omega / Decimal(self.factor) for omega in powers(theta, rotary_dim))


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """NTK-aware scaling by the length at hand (bloc97 and emozilla, 2023; Peng et al., arXiv:2309.00071, appendix A).

    Rows of length L above the original length L0 use the base
    ``theta * (factor * L / L0 - (factor - 1)) ** (n / (n - 1))``, shorter ones theta itself. Hugging Face takes the
    longest row's L for the whole batch, and older versions kept it for later, shorter batches; here each row has its
    own, and nothing is kept.

    Attributes:
      factor: how much the base grows with the length, at least 1.
      original_max_position_embeddings: the original length, in tokens.
    """

    factor: float
    original_max_position_embeddings: int

    depends_on_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._set(
            factor=_number("factor", self.factor, least=1),
            original_max_position_embeddings=_length(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
        )

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        length, original = self.representative(seq_len), self.original_max_position_embeddings
        if rotary_dim == 2:  # a single pair turns by one radian, whatever the base
            return powers(theta, rotary_dim)
        with localcontext() as context:
            context.prec = DIGITS
            factor = Decimal(self.factor)
            growth = factor * length / original - (factor - 1)
            theta = theta * (growth.ln() * rotary_dim / (rotary_dim - 2)).exp()
        return powers(theta, rotary_dim)

    def representative(self, seq_len: int | None) -> int:
        return max(seq_len or 0, self.original_max_position_embeddings)


@dataclass(frozen=True)
class YaRN(Scaling):
    """NTK by parts (Peng et al., arXiv:2309.00071): slow pairs as `Linear`, fast ones as they are, a ramp between.

    The pair that makes b turns within the original length L0 has the (real) index
    ``c(b) = n * ln(L0 / (2 pi b)) / ln(theta)``. The ramp r_i rises from 0 at ``c(beta_fast)`` to 1 at
    ``c(beta_slow)``, the former rounded down and the latter up if ``truncate``, both kept within [0, rotary_dim - 1];
    omega_i becomes ``omega_i * (1 - r_i + r_i / factor)``. As in Hugging Face's implementation, and in the paper's
    published code, the upper bound is rotary_dim - 1, and a ramp of no width is made 0.001 wide.

    Cosine and sine are multiplied by ``attention_factor`` if given, else by
    ``m(mscale) / m(mscale_all_dim)`` if both are given (DeepSeek), else by ``m(1)``, where
    ``m(s) = 0.1 * s * ln(factor) + 1``. DeepSeek's softmax scale ``m(mscale_all_dim) ** 2`` is the attention's
    business and not included.

    Attributes:
      factor: the extended length over the original one, at least 1.
      original_max_position_embeddings: the original length, in tokens.
      beta_fast: pairs that make more turns than this within the original length stay as they are.
      beta_slow: those that make fewer than this are slowed down by ``factor``.
      truncate: whether the ramp's ends are rounded to whole indices.
      attention_factor: the factor on cosine and sine, ``None`` for the formula above.
      mscale: of that formula.
      mscale_all_dim: of that formula.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        self._set(
            factor=_number("factor", self.factor, least=1),
            original_max_position_embeddings=_length(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
            beta_fast=_number("beta_fast", self.beta_fast),
            beta_slow=_number("beta_slow", self.beta_slow),
        )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow must be above 0 and at most beta_fast {self.beta_fast}, got {self.beta_slow}")
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be True or False, got {shown(self.truncate)}")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                self._set(**{name: _number(name, getattr(self, name), least=0)})

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        with localcontext() as context:
            context.prec = DIGITS
            low, high = (self._index(Decimal(beta), theta, rotary_dim) for beta in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
            low, high = max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))
            if low == high:
                high += Decimal("0.001")
            factor = Decimal(self.factor)

            def scaled(i: int, omega: Decimal) -> Decimal:
                ramp = min(max((i - low) / (high - low), Decimal(0)), Decimal(1))
                return omega * (1 - ramp + ramp / factor)

            return tuple(scaled(i, omega) for i, omega in enumerate(powers(theta, rotary_dim)))

    def _index(self, turns: Decimal, theta: Decimal, rotary_dim: int) -> Decimal:
        if theta == 1:
            raise ValueError("theta must not be 1 for YaRN, whose frequencies would all be alike, got 1.0")
        return rotary_dim * (self.original_max_position_embeddings / (turns * TWO_PI)).ln() / (2 * theta.ln())

    def factor_on_attention(self, seq_len: int | None) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def m(scale: float) -> float:
            return 0.1 * scale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return m(self.mscale) / m(self.mscale_all_dim)
        return m(1.0)


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """A factor for each pair (Ding et al., arXiv:2402.13753): omega_i / short_factor[i], or omega_i / long_factor[i]
    in rows longer than the original length, not in rows that are just as long.

    Cosine and sine are multiplied by ``attention_factor`` if given, else by
    ``sqrt(1 + ln(factor) / ln(original length))``, where ``factor`` is the extended length over the original one; by
    ``short_mscale`` or ``long_mscale`` if both are given (Phi-3.5-MoE). Hugging Face switches the whole batch by its
    longest row; here each row has its own length.

    Attributes:
      short_factor: a divisor for each pair, in rows up to the original length.
      long_factor: likewise, in longer rows.
      original_max_position_embeddings: the original length, in tokens.
      factor: the extended length over the original one; only the factor on cosine and sine depends on it.
      attention_factor: the factor on cosine and sine, ``None`` for the formula above.
      short_mscale: the factor on cosine and sine in rows up to the original length, before all others.
      long_mscale: likewise, in longer rows.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float = 1.0
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    depends_on_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            self._set(**{name: _factors(name, getattr(self, name))})
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor and long_factor must be equally long, got {len(self.short_factor)} "
                f"and {len(self.long_factor)}"
            )
        self._set(
            factor=_above_0("factor", self.factor),
            original_max_position_embeddings=_length(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
        )
        for name in ("attention_factor", "short_mscale", "long_mscale"):
            if getattr(self, name) is not None:
                self._set(**{name: _number(name, getattr(self, name), least=0)})
        if (self.short_mscale is None) != (self.long_mscale is None):
            raise ValueError(
                f"short_mscale and long_mscale must be given together, got {self.short_mscale} and {self.long_mscale}"
            )
        if self.factor > 1 and self.original_max_position_embeddings == 1:
            raise ValueError("original_max_position_embeddings must be above 1 for a factor above 1, got 1")

    def is_long(self, seq_len: int | None) -> bool:
        """Whether a row is longer than the original length.

        Args:
          seq_len: as in `frequencies`.

        Returns:
          Whether ``long_factor`` is for it.
        """
        return self.representative(seq_len) > self.original_max_position_embeddings

    def representative(self, seq_len: int | None) -> int:
        return self.original_max_position_embeddings + int((seq_len or 0) > self.original_max_position_embeddings)

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        factors = self.long_factor if self.is_long(seq_len) else self.short_factor
        if len(factors) != rotary_dim // 2:
            raise ValueError(f"short_factor and long_factor must have {rotary_dim // 2} entries, got {len(factors)}")
        with localcontext() as context:
            context.prec = DIGITS
            return tuple(
                omega / Decimal(factor) for omega, factor in zip(powers(theta, rotary_dim), factors, strict=True)
            )

    def factor_on_attention(self, seq_len: int | None) -> float:
        if self.short_mscale is not None and self.long_mscale is not None:
            return self.long_mscale if self.is_long(seq_len) else self.short_mscale
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Llama 3.1's rule (Grattafiori et al., arXiv:2407.21783, and its published code). Hugging Face: the same.

    With the original length L0, omega_i stays where ``lambda_i < L0 / high_freq_factor``, becomes omega_i / factor
    where ``lambda_i > L0 / low_freq_factor``, and between them
    ``omega_i * (s + (1 - s) / factor)`` with ``s = (L0 / lambda_i - low) / (high - low)``.

    Attributes:
      factor: the extended length over the original one, at least 1.
      low_freq_factor: pairs that make fewer turns than this within the original length are slowed down.
      high_freq_factor: those that make more than this stay as they are.
      original_max_position_embeddings: the original length, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        self._set(
            factor=_number("factor", self.factor, least=1),
            low_freq_factor=_number("low_freq_factor", self.low_freq_factor),
            high_freq_factor=_number("high_freq_factor", self.high_freq_factor),
            original_max_position_embeddings=_length(
                "original_max_position_embeddings", self.original_max_position_embeddings
            ),
        )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be above 0 and below high_freq_factor {self.high_freq_factor}, "
                f"got {self.low_freq_factor}"
            )

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        with localcontext() as context:
            context.prec = DIGITS
            factor, low, high = (Decimal(f) for f in (self.factor, self.low_freq_factor, self.high_freq_factor))

            def scaled(omega: Decimal) -> Decimal:
                # The turns that the pair makes within the original length.
                turns = self.original_max_position_embeddings * omega / TWO_PI
                smooth = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
                return omega * (smooth + (1 - smooth) / factor)

            return tuple(scaled(omega) for omega in powers(theta, rotary_dim))


@dataclass(frozen=True)
class Proportional(Scaling):
    """The first ``int(proportion * n)`` pairs of the whole head turn, by omega_i / factor, the others do not (Gemma).

    Not the same as a partial rotation, which divides the exponents by the rotated part of the head: here they are
    divided by all of it, and half pairing pairs elements that lie half a head apart.

    Attributes:
      proportion: the part of the pairs that turn, from 0 to 1.
      factor: by which these are slowed down, at least 1.
    """

    proportion: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._set(proportion=_number("proportion", self.proportion), factor=_number("factor", self.factor, least=1))
        if not 0 <= self.proportion <= 1:
            raise ValueError(f"proportion must be from 0 to 1, got {self.proportion}")

    def frequencies(self, theta: Decimal, rotary_dim: int, seq_len: int | None) -> Frequencies:
        turning = int(self.proportion * rotary_dim / 2)
        with localcontext() as context:
            context.prec = DIGITS
            return tuple(
                omega / Decimal(self.factor) if i < turning else Decimal(0)
                for i, omega in enumerate(powers(theta, rotary_dim))
            )
