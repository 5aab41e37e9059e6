"""What is rotated, named after the models that rotate it."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import scaling
from ..rotary import Rotary

LLAMA3 = Rotary(
    theta=500_000.0,
    pairing="half",
    scaling=scaling.Llama3(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)
SMOLLM2 = Rotary(theta=100_000.0, pairing="half")
DEEPSEEK = Rotary(
    scaling=scaling.YaRN(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
)
HALF = Rotary(pairing="half")

MiB = 1 << 20


@dataclass(frozen=True, eq=False)
class Workload:
    """One call of ``rope``, or of ``rope_qk`` where there are two shapes.

    Attributes:
      title: for a table's heading.
      shapes: of x, or of q and k: ``[1, S, H, D]`` each. All of D is rotated.
      positions: as in `jax_rope.rope`: None, an offset, which is traced, or int32 [S], traced too.
    """

    title: str
    shapes: tuple[tuple[int, int, int, int], ...]
    rotary: Rotary
    positions: int | np.ndarray | None = None
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return self.shapes[0][1]

    @property
    def head_dim(self) -> int:
        return self.shapes[0][-1]

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes) * jnp.dtype(self.dtype).itemsize

    def position_of_tokens(self) -> np.ndarray:
        """int64 [S]."""
        if isinstance(self.positions, np.ndarray):
            return self.positions.astype(np.int64)
        return (self.positions or 0) + np.arange(self.tokens)


class Case(NamedTuple):
    """A workload's arrays, and those of the results' cotangents where the backward is measured too."""

    workload: Workload
    xs: tuple[jax.Array, ...]
    cotangents: tuple[jax.Array, ...] | None

    @property
    def passes(self) -> list[tuple[jax.Array, ...]]:
        """The arrays that go forward, and those that go backward."""
        return [self.xs] if self.cotangents is None else [self.xs, self.cotangents]


def case(workload: Workload, backward: bool) -> Case:
    """Numbers between -1 and 1."""
    count = len(workload.shapes)
    arrays = [_numbers(shape, workload.dtype, i) for i, shape in enumerate(workload.shapes * (1 + backward))]
    jax.block_until_ready(arrays)
    return Case(workload, tuple(arrays[:count]), tuple(arrays[count:]) if backward else None)


def _numbers(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    # Multiples of the golden ratio modulo 1, made in one pass: a generator's intermediate arrays would count in the
    # peak of memory.
    @jax.jit
    def numbers():
        count = jax.lax.iota(jnp.uint32, int(np.prod(shape))) + jnp.uint32(seed << 20)
        return (((count * jnp.uint32(2654435769)) >> 8).astype(jnp.float32) * 2.0**-23 - 1).astype(dtype).reshape(shape)

    return numbers()


WORKLOADS = {
    "llama3-prefill": Workload("Llama 3 8B, prefill", ((1, 2048, 32, 128), (1, 2048, 8, 128)), LLAMA3),
    "llama3-decode": Workload("Llama 3 8B, decode", ((1, 1, 32, 128), (1, 1, 8, 128)), LLAMA3, positions=131_071),
    "llama3-128k": Workload("Llama 3 8B, keys of a 128k context", ((1, 131_072, 8, 128),), LLAMA3, dtype="bfloat16"),
    "smollm2-prefill": Workload("SmolLM2 135M, prefill", ((1, 2048, 9, 64), (1, 2048, 3, 64)), SMOLLM2),
    "smollm2-decode": Workload("SmolLM2 135M, decode", ((1, 1, 9, 64), (1, 1, 3, 64)), SMOLLM2, positions=8191),
    "deepseek-mla": Workload("DeepSeek V2, MLA", ((1, 1024, 128, 64), (1, 1024, 1, 64)), DEEPSEEK),
    "standard-interleaved": Workload("standard, interleaved", ((1, 2048, 32, 128),), Rotary()),
    "standard-half": Workload("standard, half", ((1, 2048, 32, 128),), HALF),
}
QUICK = ("smollm2-decode", "standard-half")


def _of_size(size: int) -> Workload:
    shape = (1, size // (32 * 128 * 4), 32, 128)
    return Workload(f"float32 {list(shape)}", (shape,), HALF)


# By the bytes of x.
SMALLEST = f"size-{MiB >> 4}"
SIZES = {f"size-{size}": _of_size(size) for size in (MiB >> 4, MiB >> 2, MiB, 4 * MiB, 32 * MiB, 256 * MiB)}
LARGE = {f"size-{size}": _of_size(size) for size in (8 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB)}

# Error against position: one token at each of many positions, and for those who only count from 0 a long row.
FAR = np.unique(np.geomspace(1, 2**31 - 1, 48).astype(np.int64)).astype(np.int32)
POSITIONS = {
    "positions": Workload("positions up to 2^31 - 1", ((1, len(FAR), 32, 128),), HALF, positions=FAR),
    "positions-from-0": Workload("positions from 0", ((1, 1 << 17, 1, 128),), HALF),
}

ALL = WORKLOADS | SIZES | LARGE | POSITIONS
