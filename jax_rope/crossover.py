"""From which size on the GPU is faster than XLA, measured once and kept in a file in the user's cache directory."""

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from . import config, fallback, primitive
from .about import versions
from .arguments import canonical
from .rotary import Rotary
from .webgpu import device, offload

logger = logging.getLogger("jax_rope")

T = TypeVar("T")

# In bytes. Below the last one a call takes less than the GPU needs to begin.
SIZES = (1 << 24, 1 << 22, 1 << 20, 1 << 18)
HEADS, HEAD_DIM = 32, 128
# As many as fit into the time, but enough for a median.
ROUNDS = range(3, 10)
SECONDS_A_SIZE = 0.15
# So much faster must the GPU be: less than that may be noise.
MARGIN = 0.95
# A driver that hangs must not take the program with it.
LONGEST = 60.0


class Times(NamedTuple):
    """How long one call takes, from operand to result, in seconds; the operand is float32 of ``size`` bytes."""

    size: int
    jnp: float
    webgpu: float


Measurement = tuple[Times, ...]  # by size, the largest first; none is smaller than the largest that the GPU loses


def measured() -> Measurement:
    """What was measured before, in another process too, or else what is measured now, which takes about a second.

    Raises:
      Exception: whatever a call raises on the adapter that is configured.
    """
    return known() or measure()


def measure() -> Measurement:
    """Measures, whatever is known, and keeps it; otherwise as `measured`."""
    measurement = _in_a_fresh_thread(_measure)
    _measurements[file_name()] = measurement
    _write(measurement)
    return measurement


def crossover(measurement: Measurement) -> int | None:
    """The bytes from which on the GPU is faster at every measured size; None where it loses at the largest.

    Both times grow about linearly between two sizes, so that is where the lines cross.
    """
    won = list(itertools.takewhile(lambda times: _lead(times) >= 0, measurement))
    if not won:
        return None
    smallest = won[-1]
    if len(won) == len(measurement):
        return smallest.size
    lost = measurement[len(won)]
    share = _lead(smallest) / (_lead(smallest) - _lead(lost))
    return smallest.size - int((smallest.size - lost.size) * share)


def _lead(times: Times) -> float:
    return MARGIN * times.jnp - times.webgpu


def _measure() -> Measurement:
    offload.rotator(config.settings.adapter)  # an error is a plain one here
    measurement: Measurement = ()
    for size in SIZES:
        measurement += (_times(size),)
        if _lead(measurement[-1]) < 0:
            break
    return measurement


def _times(size: int) -> Times:
    shape = (1, size // (4 * HEADS * HEAD_DIM), HEADS, HEAD_DIM)
    x = jax.device_put(np.ones(shape, np.float32), jax.local_devices()[0])
    calls = [jax.jit(functools.partial(_call, rotate)) for rotate in (fallback.rotate, primitive.rotate)]
    for call in calls:
        jax.block_until_ready(call(x))  # compiled, and the GPU's buffers made
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < ROUNDS.stop and (len(rounds) < ROUNDS.start or time.perf_counter() - began < SECONDS_A_SIZE):
        rounds.append([_seconds(call, x) for call in calls])
    return Times(size, *map(statistics.median, zip(*rounds, strict=True)))


def _call(rotate: Callable, x: jax.Array) -> tuple[jax.Array, ...]:
    layout, xs, angles, _ = canonical({"x": x}, None, Rotary(), -3, None, False)
    return rotate(layout, xs, angles)


def _seconds(call: Callable, x: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call(x))
    return time.perf_counter() - began


def _in_a_fresh_thread(f: Callable[[], T]) -> T:
    """What f returns or raises.

    The caller may be in the middle of a trace. What JAX traces, and what ``with jax.disable_jit()`` and its like set,
    belongs to the thread; what is set for all threads has to be undone.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
                outcome.set_result(f())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="jax_rope measures", daemon=True).start()
    try:
        return outcome.result(LONGEST)
    except TimeoutError:
        if outcome.done():
            raise
        raise TimeoutError(f"it took more than {LONGEST:.0f} s") from None


_measurements: dict[str, Measurement] = {}  # by file name; all that there is where no file can be written


def conditions() -> dict[str, Any]:
    """What a measurement is good for: where one of these changes, another one is needed."""
    adapter = device.choose(config.settings.adapter)
    return {
        "adapter": f"{adapter}, {adapter.driver}",
        "transport": config.transport(),
        "jax_backend": jax.default_backend(),
        "cores": config.cores(),
        "machine": platform.machine(),
        "versions": versions(),
    }


def file_name() -> str:
    """The name of the file that keeps the measurement."""
    digest = hashlib.sha256(json.dumps(conditions(), sort_keys=True).encode()).hexdigest()
    return f"crossover-{digest[:16]}.json"


def directory() -> Path:
    """The user's cache directory for this package, which need not exist.

    Raises:
      RuntimeError: the user has no home.
    """
    root: str | Path
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(root):  # then, says the specification, it is to be ignored
            root = Path.home() / ".cache"
    return Path(root) / "jax_rope"


def known() -> Measurement | None:
    """What was measured before, in this process or as the file says, or None."""
    name = file_name()
    if name not in _measurements:
        try:
            kept = json.loads((directory() / name).read_bytes())
            if kept["conditions"] != conditions():
                raise ValueError(f"{name} is about something else")
            _measurements[name] = _checked(kept["times"])
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, LookupError, TypeError, ValueError, OverflowError) as error:
            logger.debug("measuring again: %s", error)
            return None
    return _measurements[name]


def _checked(rows: list[dict[str, Any]]) -> Measurement:
    measurement = tuple(Times(int(row["size"]), float(row["jnp"]), float(row["webgpu"])) for row in rows)
    sizes = [times.size for times in measurement]
    positive = all(0 < number < math.inf for times in measurement for number in times)
    if not sizes or not positive or sizes != sorted(set(sizes), reverse=True):
        raise ValueError(f"no measurement: {rows}")
    return measurement


def as_dict(measurement: Measurement) -> dict[str, Any]:
    """As JSON takes it: sizes and the crossover in bytes, times in seconds."""
    return {"crossover": crossover(measurement), "times": [times._asdict() for times in measurement]}


def kept_in() -> Path | None:
    """The file that keeps the measurement, where there is one."""
    try:
        path = directory() / file_name()
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def _write(measurement: Measurement) -> None:
    try:
        path = directory() / file_name()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read it or write it by now: it gets the whole file, the old one or the new one.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as new:
            whole = Path(new) / path.name
            whole.write_text(json.dumps({"conditions": conditions(), **as_dict(measurement)}, indent=1))
            os.replace(whole, path)
    except (OSError, RuntimeError) as error:
        logger.debug("the measurement is not kept: %s", error)
