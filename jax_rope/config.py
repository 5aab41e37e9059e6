"""Which implementation runs: what the caller asks for, else what was configured, else what is known to be best."""

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from .checks import shown

if TYPE_CHECKING:
    from .webgpu.device import Adapter

logger = logging.getLogger("jax_rope")

IMPLEMENTATIONS = ("webgpu", "jnp")
TRANSPORTS = ("pure_callback", "buffer_callback")
_KEEP = object()


class _Settings:
    implementation: str | None = os.environ.get("JAX_ROPE_IMPLEMENTATION") or None
    adapter: str | None = os.environ.get("JAX_ROPE_ADAPTER") or None
    transport: str | None = os.environ.get("JAX_ROPE_TRANSPORT") or None
    autotune: str | None = os.environ.get("JAX_ROPE_AUTOTUNE") or None
    time_limit: float | str | None = os.environ.get("JAX_ROPE_TIME_LIMIT") or None


settings = _Settings()


class Choice(NamedTuple):
    """An implementation and why it was chosen. Calls that rotate less than ``from_bytes`` run in ``jnp``."""

    implementation: str
    reason: str
    from_bytes: int = 0


_choices: dict[tuple, Choice] = {}  # by the settings that they depend on
_choosing = threading.Lock()


def configure(
    *,
    implementation: str | None = _KEEP,  # type: ignore[assignment]
    adapter: "Adapter | str | None" = _KEEP,  # type: ignore[assignment]
    transport: str | None = _KEEP,  # type: ignore[assignment]
    time_limit: float | None = _KEEP,  # type: ignore[assignment]
) -> None:
    """Sets what calls use that do not say so themselves. What was traced before stays as it is.

    Args:
      implementation: ``"webgpu"``, ``"jnp"``, or ``None`` to choose; at first what the environment's
        JAX_ROPE_IMPLEMENTATION says. ``None`` is ``"webgpu"`` for arrays above a size from which on it is faster, and
        ``"jnp"`` below it; the first call measures that, which takes about a second, and a file in the user's cache
        directory keeps it (JAX_ROPE_AUTOTUNE=0: no measurement, and ``"jnp"``). It is always ``"jnp"`` without an
        adapter or with one that computes on the CPU, where JAX has an accelerator, for float64, and for arrays that
        JAX may spread over several devices: with more than one, outside of `jax.shard_map` and explicit axis types.
        Sizes are those that the trace sees: of a shard, and of one example under `jax.vmap`. A call that
        `jax.export` is going to take has to say ``"jnp"`` itself.
      adapter: one that `jax_rope.adapters` lists, or a part of its name, kind, backend or driver, or ``None`` for
        the best; at first what the environment's JAX_ROPE_ADAPTER says.
      transport: how compiled programs reach the GPU: ``"pure_callback"``; ``"buffer_callback"``, faster, experimental
        in JAX; or ``None`` to choose; at first what the environment's JAX_ROPE_TRANSPORT says.
      time_limit: how many seconds a call waits for the GPU to finish a piece of it, 8 MiB at most, before it raises;
        ``None`` is 60; at first what the environment's JAX_ROPE_TIME_LIMIT says. Programs that are compiled already
        follow it too.

    Raises:
      TypeError: an adapter that is neither.
      ValueError: an unknown implementation or transport, a time limit that is not a number above 0.
      RuntimeError: no adapter matches.
    """
    if implementation is not _KEEP:
        _check(implementation, "implementation")
    if transport is not _KEEP:
        _check(transport, "transport", TRANSPORTS)
    if time_limit is not _KEEP:
        _seconds(time_limit, "time_limit")
    if adapter is not _KEEP:
        from .webgpu import device

        if adapter is not None:
            if not isinstance(adapter, str | device.Adapter):
                raise TypeError(f"adapter must be an Adapter, a part of its name or None, got {shown(adapter)}")
            device.choose(str(adapter))
    with _choosing:  # nothing changes in the middle of a measurement
        if adapter is not _KEEP:
            settings.adapter = None if adapter is None else str(adapter)
            _choices.clear()  # what failed may be tried again
        if implementation is not _KEEP:
            settings.implementation = implementation
        if transport is not _KEEP:
            settings.transport = transport
        if time_limit is not _KEEP:
            settings.time_limit = time_limit


_process: int | None = None  # that first rotated


def check_process() -> None:
    """Raises a RuntimeError in a process that was forked too late: it would wait forever."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise RuntimeError(
            "this process was forked from one that rotated already, and neither JAX nor WebGPU survives that: "
            "start it by the spawn or forkserver method"
        )


def check_settings() -> None:
    """Raises the ValueError of a setting that calls would raise as they run, where it is no plain error."""
    transport()
    time_limit()


def choose(requested: str | None, dtypes: Iterable[object], xs: Sequence[jax.Array]) -> str:
    """The implementation of one call, ``"webgpu"`` or ``"jnp"``, given its operands and the dtypes they came with."""
    _check(requested, "implementation")
    if requested is None:
        requested = settings.implementation
        _check(requested, "JAX_ROPE_IMPLEMENTATION")
    float64 = any(dtype == np.float64 for dtype in (*dtypes, *(x.dtype for x in xs)))
    if requested is None:
        requested = "jnp" if float64 or _spread(xs[0]) else _by_size(xs)
    if requested == "webgpu":
        if float64:
            raise TypeError("implementation 'webgpu' takes float32, bfloat16 or float16, got float64: use 'jnp'")
        from .webgpu import offload

        check_settings()
        offload.rotator(settings.adapter)
    return requested


def default() -> Choice:
    """What ``implementation=None`` is."""
    if settings.implementation is None:
        return automatic()
    _check(settings.implementation, "JAX_ROPE_IMPLEMENTATION")
    return Choice(settings.implementation, "it was configured")


def _by_size(xs: Sequence[jax.Array]) -> str:
    if not all(isinstance(size, int) for x in xs for size in x.shape):
        return "jnp"  # shapes with names for sizes are made to be exported
    choice = automatic()
    return choice.implementation if sum(x.size * x.dtype.itemsize for x in xs) >= choice.from_bytes else "jnp"


def _spread(x: jax.Array) -> bool:
    """Whether XLA may decide on which devices x lies, as far as a trace can know."""
    mesh = jax.typeof(x).sharding.mesh
    by_hand = [kind in (AxisType.Manual, AxisType.Explicit) for kind in mesh.axis_types]
    if any(by_hand):
        return any(size > 1 and not known for size, known in zip(mesh.axis_sizes, by_hand, strict=True))
    return jax.device_count() > 1


def transport() -> str:
    """How compiled programs reach the GPU."""
    _check(settings.transport, "JAX_ROPE_TRANSPORT", TRANSPORTS)
    if settings.transport is not None:
        return settings.transport
    # jax-ml/jax#25861: with one core, pure_callback can wait for itself forever while several calls are in flight.
    stuck = jax.__version_info__ < (0, 12) and cores() == 1
    return "buffer_callback" if stuck else "pure_callback"


def time_limit() -> float:
    """How many seconds the GPU may take."""
    return _seconds(settings.time_limit, "JAX_ROPE_TIME_LIMIT")


def _seconds(value: object, name: str) -> float:
    from .webgpu import device

    if value is None:
        return device.TIME_LIMIT
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be a number of seconds above 0{_or_none(name)}, got {shown(value)}")
    return seconds


def gave_up(reason: str) -> None:
    """Has ``None`` be ``"jnp"`` from now on, since the GPU failed as it ran."""
    if not _choosing.acquire(blocking=False):
        return  # whoever is choosing, perhaps by the very call that failed, finds out by itself
    try:
        key = settings.adapter, settings.transport, settings.autotune
        if _choices.get(key, Choice("webgpu", "")).implementation == "webgpu":
            logger.warning("rotating in jnp from now on where no implementation is named: %s", reason)
            _choices[key] = Choice("jnp", reason)
    finally:
        _choosing.release()


def cores() -> int:
    """How many of the machine's cores the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(value: str | None, name: str, known: tuple[str, ...] = IMPLEMENTATIONS) -> None:
    if value is not None and value not in known:
        joint = " or " if name.isupper() else ", "
        raise ValueError(f"{name} must be {joint.join(map(repr, known))}{_or_none(name)}, got {shown(value)}")


def _or_none(name: str) -> str:
    """How a message goes on about None, which in the environment is a name that is not set."""
    return ", or not set" if name.isupper() else " or None"


def automatic() -> Choice:
    """What is known to be best. Threads that ask for the same at once wait for one of them."""
    with _choosing:
        key = settings.adapter, settings.transport, settings.autotune
        if key not in _choices:
            _choices[key] = _automatic()
        return _choices[key]


def _automatic() -> Choice:
    _check(settings.autotune, "JAX_ROPE_AUTOTUNE", ("0", "1"))
    if jax.default_backend() != "cpu":
        return Choice("jnp", f"JAX itself runs on {jax.default_backend()}")
    from .webgpu import device

    try:
        adapter = device.choose(settings.adapter)
    except RuntimeError as error:
        logger.warning("rotating in jnp: %s", error)
        return Choice("jnp", str(error))
    if adapter.kind == "software":
        return Choice("jnp", f"{adapter} computes on the CPU, as XLA does without a callback")
    if settings.autotune == "0":
        return Choice("jnp", "JAX_ROPE_AUTOTUNE=0 switches the measurement off that could choose otherwise")
    from . import crossover
    from .webgpu import offload

    try:
        offload.rotator(settings.adapter)  # what was measured before may not work any more
        size = crossover.crossover(crossover.measured())
    except Exception as error:
        # What a callback raises comes with its whole traceback as text.
        last = f"{type(error).__name__}: {error}".rstrip().splitlines()[-1].strip()
        reason = f"{adapter} failed as it was to be measured: {last}"
        logger.warning("rotating in jnp: %s", reason)
        return Choice("jnp", reason)
    if size is None:
        return Choice("jnp", f"{adapter} is slower, as measured on this machine")
    where = ""
    if jax.device_count() > 1:
        where = "; jnp for what JAX may spread over its devices, outside of jax.shard_map and explicit axis types"
    return Choice("webgpu", f"{adapter} is faster from there on, as measured on this machine{where}", size)
