"""Positions, shapes, frequencies and tables, on one rotator."""

import itertools
from functools import partial

import numpy as np

from .. import reference, scaling
from ..arguments import canonical_tables
from ..reference import Comparison
from ..rotary import Rotary
from ..webgpu import selftest
from ..webgpu.call import ByTables
from .host import DTYPES, FAR, PAIRINGS, Cases, Host, draw, worst


def positions(host: Host) -> Cases:
    rng = np.random.default_rng(1)
    per_row = rng.integers(-(2**31), 2**31, (2, 8))
    floats = np.array([0.5, -0.25, 1e6 + 0.375, 3.0, 131_071.9, -70_000.1, 2**24 + 1, 1e-3])
    forms = {
        "near and far": np.array(FAR),
        "no positions": None,
        "an offset": 10_000_000,
        "a negative offset": -5,
        "an offset that counts past int32": 2**31 - 3,
        "positions by row": per_row,
        "float positions": floats,
        "float positions by row": floats + rng.integers(0, 9999, (2, 8)),
        "a float offset": 1_000_000.625,
    }
    for (name, at), dtype, pairing in itertools.product(forms.items(), DTYPES, PAIRINGS):
        for seq_axis in (-3, -2):
            shape = (2, 8, 3, 64) if seq_axis == -3 else (2, 3, 8, 64)
            xs, rotary = [draw(shape, dtype)], Rotary(pairing=pairing)
            axes = "[..., S, H, D]" if seq_axis == -3 else "[..., H, S, D]"
            label = f"{name}, {dtype}, {pairing}, {axes}"
            yield label, partial(host.compared, xs, at, rotary, seq_axis=seq_axis)


def shapes(host: Host, quick: bool) -> Cases:
    head_dims = (2, 6, 36, 72, 128) if quick else (2, 6, 18, 36, 64, 72, 80, 96, 128, 256)
    for head_dim, dtype, pairing in itertools.product(head_dims, DTYPES, PAIRINGS):
        xs, rotary = [draw((17, 3, head_dim), dtype)], Rotary(pairing=pairing)
        yield f"head_dim {head_dim}, {dtype}, {pairing}", partial(host.compared, xs, 4095, rotary)
    for (head_dim, start, width), dtype, pairing in itertools.product(
        ((24, 8, 16), (24, 3, 6), (96, 64, 32), (64, 0, 32), (20, 18, 2)), DTYPES, PAIRINGS
    ):
        xs, rotary = [draw((17, 3, head_dim), dtype)], Rotary(pairing=pairing, start=start, rotary_dim=width)
        name = f"elements {start} to {start + width - 1} of {head_dim}, {dtype}, {pairing}"
        yield name, partial(host.compared, xs, 4095, rotary)
    for (heads, length), dtype, seq_axis in itertools.product(
        (((9, 3), 17), ((32, 8), 5), ((1, 1), 1), ((1,), 17), ((33,), 1), ((2, 1), 1000)), DTYPES, (-3, -2)
    ):
        xs = [draw((2, length, h, 32) if seq_axis == -3 else (2, h, length, 32), dtype, h) for h in heads]
        name = f"{' + '.join(map(str, heads))} heads, {length} tokens, {dtype}, seq_axis {seq_axis}"
        yield name, partial(host.compared, xs, 7, seq_axis=seq_axis)
    yield "three batch axes", partial(host.compared, [draw((2, 3, 2, 5, 2, 16))], 7)


def frequencies(host: Host) -> Cases:
    long = scaling.LongRoPE((1.5,) * 16, (3.25,) * 16, original_max_position_embeddings=99, factor=4.0)
    rotaries = {
        "theta 500000": Rotary(theta=5e5),
        "theta 1": Rotary(theta=1.0),
        "Llama3": Rotary(theta=5e5, scaling=scaling.Llama3(8.0, 1.0, 4.0, 8192)),
        "YaRN with its attention factor": Rotary(scaling=scaling.YaRN(4.0, 4096)),
        "LongRoPE by row": Rotary(scaling=long),
        "DynamicNTK by row": Rotary(scaling=scaling.DynamicNTK(2.0, 99)),
        "Proportional": Rotary(scaling=scaling.Proportional(0.25)),
        "frequencies of more than a turn": Rotary(freqs=[0.0, 1.0, -2.5, 1000.0] * 4),
        "sections": Rotary(sections=(8, 4, 4)),
        "interleaved sections": Rotary(sections=(8, 4, 4), section_layout="interleaved"),
        "axial sections": Rotary(sections=(8, 8), section_layout="axial"),
    }
    rng = np.random.default_rng(2)
    for (name, rotary), dtype in itertools.product(rotaries.items(), DTYPES):
        streams = () if rotary.sections is None else (rotary.streams,)
        at = np.array([[1], [10**7]]) + rng.integers(-(10**6) if streams else 0, 99, (*streams, 2, 5))
        xs = [draw((2, 5, 9, 32), dtype), draw((2, 5, 3, 32), dtype, 1)]
        yield f"{name}, {dtype}", partial(host.compared, xs, at, rotary)
        if "YaRN" in name:
            yield f"{name}, undone, {dtype}", partial(host.compared, xs, at, rotary, inverse=True)


def tables(host: Host) -> Cases:
    """The caller's cosines and sines of float32, which are the exact ones here."""
    for dtype, pairing, rows, full in itertools.product(DTYPES, PAIRINGS, (1, 2), (False, True)):
        width = "an entry for each element" if full else "an entry for each pair"
        name = f"{width}, {'by row' if rows > 1 else 'shared'}, {dtype}, {pairing}"
        yield name, partial(_by_tables, host, dtype, pairing, rows, full)


def _by_tables(host: Host, dtype: str, pairing: str, rows: int, full: bool) -> Comparison:
    x = draw((2, 17, 9, 32), dtype)
    angles = np.random.default_rng(3).uniform(-np.pi, np.pi, (rows, 17, 16))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    (first, second), _ = reference.pairs(Rotary(pairing=pairing), 32)
    given = np.stack((cos, sin))
    if full:
        given = np.empty((2, rows, 17, 32), np.float32)
        given[..., first] = given[..., second] = np.stack((cos, sin))
    layout, _, by, _ = canonical_tables(x, given[0], given[1], pairing, -3, False)
    found = []
    for sign in (1, -1):
        exact = x.astype(np.float64)
        a, b = exact[..., first], exact[..., second]
        c, s = cos[:, :, None].astype(np.float64), sign * sin[:, :, None].astype(np.float64)
        exact[..., first], exact[..., second] = c * a - s * b, s * a + c * b
        (y,) = selftest.rotate_on(host.rotator, layout, [x], ByTables(layout, x.shape, *map(np.asarray, by)))
        found.append(reference.compare(y, exact, x, Rotary(pairing=pairing)))
        layout = layout.transpose()
    return worst(found)
