"""Writes expected.json, what the page compares the kernels with: ``python examples/browser/expected.py``.

The values are `jax_rope.reference`'s, which has exact angles and shares nothing with the kernels. They are rounded to
ten digits, a thousandth of what float32 can tell apart.
"""

import json
import math
from pathlib import Path

import numpy as np

from jax_rope import Rotary, reference

FILE = Path(__file__).with_name("expected.json")
Q_HEADS, K_HEADS, TOKENS = 2, 1, 3
FAR = 1_000_000_000
# name: (storage, pairing, theta, head_dim, start, token major, an offset or positions)
CASES = {
    "near": ("float32", "interleaved", 1e4, 8, 0, True, 0),
    "far": ("float32", "interleaved", 1e4, 8, 0, True, FAR),
    "halves": ("float32", "half", 5e5, 8, 0, True, FAR),
    "heads first": ("float32", "half", 1e4, 8, 0, False, 131_072),
    "ends of int32": ("float32", "interleaved", 1e6, 8, 4, True, [-(2**31), -1, 2**31 - 1]),
    "odd number of pairs": ("float32", "interleaved", 1e4, 10, 0, True, -FAR),
    "odd start": ("float32", "half", 123.5, 9, 3, False, [7, 7, 70_000_000]),
    "bfloat16": ("bfloat16", "interleaved", 1e4, 8, 0, True, FAR),
    "bfloat16 halves": ("bfloat16", "half", 1e4, 12, 4, False, [5, -5, FAR]),
    "float16": ("float16", "half", 1e4, 8, 0, True, 2**31 - 3),
    "float16 pairs": ("float16", "interleaved", 1e4, 8, 0, False, 4_095),
}


def content() -> list[dict]:
    """For each case what is rotated, q and k, and what becomes of both: forward, and backward."""
    return [_case(name, *case) for name, case in CASES.items()]


def _case(name, storage, pairing, theta, head_dim, start, token_major, positions) -> dict:
    rotary = Rotary(theta=theta, pairing=pairing, start=start)
    tokens = np.arange(TOKENS) + positions if isinstance(positions, int) else positions
    case = {
        "name": name,
        "storage": storage,
        "pairing": pairing,
        "theta": theta,
        "headDim": head_dim,
        "start": start,
        "tokenMajor": token_major,
        "seqLen": TOKENS,
        "qHeads": Q_HEADS,
        "kHeads": K_HEADS,
        "positions": positions,
        "x": {},
        "forward": {},
        "backward": {},
    }
    for operand, heads in (("q", Q_HEADS), ("k", K_HEADS)):
        shape = (TOKENS, heads, head_dim) if token_major else (heads, TOKENS, head_dim)
        # Eighths up to 6: exact in 16 bits.
        x = ((np.arange(math.prod(shape)) * 37 + 11 * heads) % 97 - 48).reshape(shape) / 8
        case["x"][operand] = x.ravel().tolist()
        for direction in ("forward", "backward"):
            y = reference.rotate(
                x, tokens, rotary, seq_axis=-3 if token_major else -2, transpose=direction == "backward"
            )
            case[direction][operand] = [float(f"{value:.10g}") for value in y.ravel()]
    return case


def main() -> None:
    cases = ",\n".join(json.dumps(case) for case in content())
    FILE.write_text(f"[\n{cases}\n]\n")
    print(f"{FILE.name}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
