"""The whole matrix on a device whose limits are small, all at once, and which has no optional feature.

WebGPU itself enforces them, so that what exceeds one raises. No XLA: the host path is called as its callback calls it.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from jax_rope import Rotary, scaling
from jax_rope.check import arrays, host
from jax_rope.webgpu import device, rotator

TIGHT = {
    "max-storage-buffer-binding-size": 4096,
    "max-compute-workgroups-per-dimension": 2,
    "max-compute-invocations-per-workgroup": 256,
    "min-storage-buffer-offset-alignment": 256,
}
BATCH, TOKENS = 2, 11
POSITIONS = {
    "none": None,
    "an offset": 10_000_000,
    "by token": np.arange(TOKENS) * 1001 - 8,
    "by row": np.random.default_rng(5).integers(-(2**31), 2**31, (BATCH, TOKENS)),
    "floats by row": np.random.default_rng(6).integers(-9999, 9999, (BATCH, TOKENS)) + 0.375,
}
WINDOWS = {  # heads of q and of k, head_dim, start, rotary_dim
    "whole heads": ((9, 3), 16, 0, None),
    "one pair a thread": ((5,), 18, 2, 6),
    "a part of each head": ((4, 1), 96, 64, 32),
    "more heads than a binding holds": ((17, 1), 128, 0, None),
}


def tight_rotator(kind: str = "software", **limits: int) -> rotator.Rotator:
    """On a device with tight limits, which may believe in others, and perhaps in another kind of adapter."""
    own = device.Device()
    _, adapter = device.matching(None)[0]
    own.handle = adapter.request_device_sync(required_features=[], required_limits=TIGHT)
    own.limits = {name: int(own.handle.limits[name]) for name in device.LIMITS} | limits
    own.adapter = dataclasses.replace(own.adapter, kind=kind)
    own.mapped = False
    return rotator.Rotator(own)


@pytest.fixture(scope="module", params=["written by the queue", "through pairs of staging buffers"])
def tight(request):
    examined = host.Host(host.Target(None, 0))
    with pytest.MonkeyPatch.context() as patched:
        if "staging" in request.param:
            patched.setattr(rotator, "SMALL", 0)
            examined.rotator = tight_rotator("discrete")
            assert len(examined.rotator.slots) == 2
        else:
            examined.rotator = tight_rotator()
        yield examined


def draw(heads: tuple[int, ...], head_dim: int, seq_axis: int, dtype: str) -> list[np.ndarray]:
    shapes = [(BATCH, TOKENS, h, head_dim) if seq_axis == -3 else (BATCH, h, TOKENS, head_dim) for h in heads]
    return [host.draw(shape, dtype, seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("max-storage-buffer-binding-size", "exceeds .* limit 4096"),
        ("max-compute-workgroups-per-dimension", "must be less or equal to 2"),
    ],
)
def test_the_limits_are_enforced(tight, limit, message):
    """What does not know of one of them fails."""
    assert TIGHT.items() <= tight.rotator.device.handle.limits.items()
    assert TIGHT.items() <= tight.rotator.device.limits.items()
    x = host.draw((100, 1, 64))
    assert tight.compared([x]).holds
    with pytest.raises(Exception, match=message):
        tight.rotate([x], None, Rotary(), rotator=tight_rotator(**{limit: 65535}))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", host.DTYPES)
def test_rotations(tight, dtype, window, positions):
    """Forward and backward, both axis orders and pairings."""
    heads, head_dim, start, rotary_dim = WINDOWS[window]
    for seq_axis, pairing in itertools.product((-3, -2), host.PAIRINGS):
        xs = draw(heads, head_dim, seq_axis, dtype)
        rotary = Rotary(pairing=pairing, start=start, rotary_dim=rotary_dim)
        found = tight.compared(xs, POSITIONS[positions], rotary, seq_axis=seq_axis)
        assert found.holds, (seq_axis, pairing, found)


@pytest.mark.parametrize("dtype", host.DTYPES)
def test_frequencies(tight, dtype):
    """Streams of positions, and rows with frequencies of their own, which alone exceed a binding."""
    streams = np.random.default_rng(8).integers(0, 9999, (3, BATCH, TOKENS))
    rule = scaling.LongRoPE((1.5,) * 8, (3.25,) * 8, original_max_position_embeddings=100)
    for seq_axis in (-3, -2):
        for section_layout in ("contiguous", "interleaved"):
            rotary = Rotary(sections=(4, 2, 2), section_layout=section_layout)
            assert tight.compared(draw((9, 3), 16, seq_axis, dtype), streams, rotary, seq_axis=seq_axis).holds
        x = host.draw((40, 1, 1, 16), dtype)
        assert tight.compared([x], np.arange(40)[:, None] * 5, Rotary(scaling=rule), seq_axis=seq_axis).holds


def test_tables(tight):
    """Half and full width, by row and shared, forward and backward."""
    cases = list(arrays.tables(tight))
    assert len(cases) == 24
    for name, case in cases:
        assert case().holds, name


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, 1, 64), (3, 1, 1, 2)])
def test_the_smallest_arrays(tight, shape):
    assert tight.compared([host.draw(shape)], 5).holds
