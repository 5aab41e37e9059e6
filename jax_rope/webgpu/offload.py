"""What the callback runs: a rotation on a device, and on a new one where that fails."""

import threading
from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np
import wgpu

from ..layout import Layout
from . import device as devices, selftest, transfer
from .call import By, ByAngles, ByTables, Call
from .device import Device
from .rotator import Rotator

INSTEAD = "use implementation='jnp' instead"

_rotators: dict[tuple[str | None, int], Rotator] = {}
_abandoned: list[Rotator] = []  # they work on: to let go of them would be to wait for them
_lock = threading.Lock()


def rotator(name: str | None = None, shard: int = 0) -> Rotator:
    """The process's rotator on one of the `jax_rope.webgpu.device.matching` adapters, over which shards are spread;
    made, and tried, at the first call.

    Raises:
      RuntimeError: there is no such adapter, or it fails its first rotations.
    """
    number = shard % len(devices.matching(name))
    with _lock:
        if (name, number) not in _rotators:
            made = Rotator(Device(name, number))
            fault = selftest.fault(made)
            if fault:
                raise RuntimeError(f"{fault}; {INSTEAD}, and please report what `python -m jax_rope check` prints")
            _rotators[name, number] = made
        return _rotators[name, number]


def _replace(failed: Rotator) -> None:
    """Has the next call make a new rotator."""
    with _lock:
        for key in [key for key, rotator in _rotators.items() if rotator is failed]:
            del _rotators[key]


class Options(TypedDict, total=False):
    """How `rotate` is to run: on which adapter, for which shard of several, within how many seconds for each piece of
    the work, and into which arrays."""

    adapter: str | None
    shard: int
    time_limit: float
    out: Sequence[np.ndarray] | None


def rotate(
    layout: Layout,
    xs: Sequence[np.ndarray],
    positions: np.ndarray,
    table: np.ndarray,
    fractions: np.ndarray | None,
    frequencies: np.ndarray | None = None,
    **options: Unpack[Options],
) -> tuple[np.ndarray, ...]:
    """Rotates arrays [..., S, H, D] (or as the layout says), of float32, bfloat16 or float16, alike but for H.

    The other operands are those of `jax_rope.phase.Angles`; the table says what frequencies say.
    """
    return _run(layout, xs, ByAngles(layout, xs[0].shape, positions, table, fractions), **options)


def rotate_by_tables(
    layout: Layout, xs: Sequence[np.ndarray], cos: np.ndarray, sin: np.ndarray, **options: Unpack[Options]
) -> tuple[np.ndarray, ...]:
    """`rotate` by cosines and sines, as in `jax_rope.fallback.Tables`."""
    return _run(layout, xs, ByTables(layout, xs[0].shape, cos, sin), **options)


def _run(
    layout: Layout,
    xs: Sequence[np.ndarray],
    by: By,
    adapter: str | None = None,
    shard: int = 0,
    time_limit: float = devices.TIME_LIMIT,
    out: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, ...]:
    results = [np.empty(x.shape, x.dtype) for x in xs] if out is None else out
    call = Call(layout, xs, by, results)
    if call.rows and call.tokens and all(call.heads):
        _run_on_a_device(call, adapter, shard, time_limit)
        call.finish()
    return tuple(results)


def _run_on_a_device(call: Call, adapter: str | None, shard: int, time_limit: float) -> None:
    """Runs on the device, or where that fails or is lost, once more on a new one."""
    for last in (False, True):
        running = rotator(adapter, shard)
        running.device.time_limit = time_limit
        try:
            running.run(call)
            return
        except transfer.TimeLimitError as error:
            _replace(running)
            _abandoned.append(running)
            raise RuntimeError(
                f"{running.device.adapter} did not answer within {time_limit:g} s, the limit that "
                f"configure(time_limit=...) or JAX_ROPE_TIME_LIMIT sets; {INSTEAD}"
            ) from error
        except (wgpu.GPUError, RuntimeError) as error:
            _replace(running)
            if last:
                said = " ".join(str(error).split())
                raise RuntimeError(f"{running.device.adapter} failed twice: {said}; {INSTEAD}") from error
