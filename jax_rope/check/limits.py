"""Values that are not numbers, an adapter's limits, and several threads."""

import functools
import itertools
import threading
from collections.abc import Callable

import numpy as np

from .. import reference, scaling
from ..reference import Comparison
from ..rotary import Rotary
from ..webgpu import kernels, offload
from .host import DTYPES, PAIRINGS, Cases, Host, draw, exactly, worst

LARGEST = 1 << 28  # bytes of an array that is made to exceed a limit


def special_values(host: Host) -> Cases:
    for dtype, pairing, head_dim in itertools.product(DTYPES, PAIRINGS, (64, 6)):
        x, rotary = draw((4, 3, head_dim), dtype), Rotary(pairing=pairing)
        x[0, 0, :3] = x[1, 1, :3] = -0.0, np.inf, np.nan
        x[2, 2, -1] = -np.inf
        name = f"head_dim {head_dim}, {dtype}, {pairing}"
        yield f"NaN and infinity stay in their pair, {name}", functools.partial(host.compared, [x], 5, rotary)
        yield f"position 0 is the identity, {name}", functools.partial(_identity, host, x, rotary)
        smallest = 2.0**-24 if dtype == "float16" else 2.0**-133
        tiny = np.full(x.shape, smallest).astype(x.dtype)
        yield f"subnormal numbers stay tiny, {name}", functools.partial(_tiny, host, tiny, rotary)
    for dtype, bits in (("float32", 0x7F800001), ("bfloat16", 0x7F81), ("float16", 0xFC01)):
        x = np.full((3, 2, 16), bits, f"u{np.dtype(DTYPES[dtype]).itemsize}").view(DTYPES[dtype])
        x[..., 3:9] = draw((3, 2, 6), dtype)
        window = Rotary(start=3, rotary_dim=6)
        yield f"a NaN outside the window keeps its bits, {dtype}", functools.partial(host.compared, [x], 5, window)


def _identity(host: Host, x: np.ndarray, rotary: Rotary) -> Comparison:
    (y,) = host.rotate([x], np.zeros(len(x), np.int32), rotary)
    return exactly(y, x)


def _tiny(host: Host, x: np.ndarray, rotary: Rotary) -> Comparison:
    """Adapters may flush them to 0, but not make anything else of them."""
    (y,) = host.rotate([x], 5, rotary)
    holds = bool(np.all(np.abs(y.astype(np.float64)) <= 2 * np.abs(x.astype(np.float64))))
    return Comparison(0.0 if holds else np.inf, None, holds)


def tight_limits(host: Host) -> Cases:
    """Pieces cut by rows, by tokens and by heads, through mapped and through staging buffers."""
    limits: tuple[tuple[str, dict[str, int]], ...] = (
        ("no tighter limits", {}),
        ("rows and tokens in pieces", {"binding": 4096}),
        ("heads in pieces", {"binding": 512}),
        ("one workgroup in each dimension", {"workgroups": 1}),
        ("two workgroups in each dimension", {"workgroups": 2}),
    )
    for mapped, (how, tight) in itertools.product(sorted({False, host.rotator.device.mapped}), limits):
        made = functools.partial(host.made, **tight, mapped=mapped)
        how = f"{how}, {'mapped' if mapped else 'staging'} buffers"
        for dtype, seq_axis in itertools.product(DTYPES, (-3, -2)):
            yield f"{how}, {dtype}, seq_axis {seq_axis}", functools.partial(_in_pieces, host, made, dtype, seq_axis)
        yield f"{how}, 1 to 35 tokens", functools.partial(_lengths, host, made)
        yield f"{how}, 40 rows with frequencies of their own", functools.partial(_rows, host, made)


Made = Callable[[], offload.Rotator]


def _in_pieces(host: Host, made: Made, dtype: str, seq_axis: int) -> Comparison:
    xs = [draw((3, 17, h, 16) if seq_axis == -3 else (3, h, 17, 16), dtype, h) for h in (9, 3)]
    fractions = np.random.default_rng(4).integers(-500, 500, (3, 17)) + 0.375
    forms = None, 1000, np.arange(17) - 8, fractions
    return worst(host.compared(xs, at, rotator=made(), seq_axis=seq_axis) for at in forms)


def _lengths(host: Host, made: Made) -> Comparison:
    """Those at which one more piece begins, and those around them."""
    return worst(host.compared([draw((n, 4, 16))], 5, rotator=made()) for n in range(1, 36))


def _rows(host: Host, made: Made) -> Comparison:
    """Rows whose frequencies alone exceed a binding."""
    rule = scaling.LongRoPE((1.5,) * 8, (3.25,) * 8, original_max_position_embeddings=100)
    return host.compared([draw((40, 1, 1, 16))], np.arange(40)[:, None] * 5, Rotary(scaling=rule), made())


def real_limits(host: Host) -> Cases:
    """One array above each of the adapter's own limits."""
    size = host.rotator.limits.bytes
    if size <= LARGEST:
        name = f"more than {size >> 20} MiB"
        yield name, functools.partial(_sampled, host, (size // 4096 + 100, 8, 128), size // 4096)
    threads = host.rotator.workgroups * kernels.WORKGROUP_SIZE
    if 8 * threads <= LARGEST:
        name = f"more than {host.rotator.workgroups:,} workgroups"
        yield name, functools.partial(_sampled, host, (threads + 1000, 1, 2), threads)


def _sampled(host: Host, shape: tuple[int, int, int], border: int) -> Comparison:
    """Forward, compared at the first and the last tokens, around the border and at some between."""
    x = np.resize(draw((1 << 16,)), shape)
    (y,) = host.rotate([x], 7, Rotary())
    near = np.array([0, 1, border - 1, border, border + 1, shape[0] - 1])
    some = np.unique(np.concatenate((near, np.arange(0, shape[0], shape[0] // 200))))
    return reference.compare(y[some], reference.rotate(x[some], 7 + some), x[some])


def threads(host: Host) -> Cases:
    def run() -> Comparison:
        """Each thread rotates arrays of its own, of other sizes than the others'."""
        found: list[Comparison] = []
        raised: list[Exception] = []

        def work(seed: int) -> None:
            try:
                for i in range(5):
                    x = draw((2 + seed, 3, 32), seed=seed)
                    found.append(host.compared([x], 1000 * seed + i))
            except Exception as error:
                raised.append(error)

        running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if raised:
            raise raised[0]
        return worst(found)

    yield "8 threads at once", run
