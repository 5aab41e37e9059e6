"""Which implementation runs: what the caller asks for, else what was configured, else what is known to be best."""

import functools
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

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


settings = _Settings()


class Choice(NamedTuple):
    """An implementation and why it was chosen."""

    implementation: str
    reason: str


def configure(
    *,
    implementation: str | None = _KEEP,  # type: ignore[assignment]
    adapter: "Adapter | str | None" = _KEEP,  # type: ignore[assignment]
    transport: str | None = _KEEP,  # type: ignore[assignment]
) -> None:
    """Sets what calls use that do not say so themselves. What was traced before stays as it is.

    Args:
      implementation: ``"webgpu"``, ``"jnp"``, or ``None`` to choose; at first what the environment's
        JAX_ROPE_IMPLEMENTATION says.
      adapter: one that `jax_rope.adapters` lists, or a part of its name, kind, backend or driver, or ``None`` for
        the best; at first what the environment's JAX_ROPE_ADAPTER says.
      transport: how compiled programs reach the GPU: ``"pure_callback"``; ``"buffer_callback"``, faster, experimental
        in JAX; or ``None`` to choose; at first what the environment's JAX_ROPE_TRANSPORT says.

    Raises:
      TypeError: an adapter that is neither.
      ValueError: an unknown implementation or transport.
      RuntimeError: no adapter matches.
    """
    if implementation is not _KEEP:
        _check(implementation, "implementation")
    if transport is not _KEEP:
        _check(transport, "transport", TRANSPORTS)
    if adapter is not _KEEP:
        from .webgpu import device

        if adapter is not None:
            if not isinstance(adapter, str | device.Adapter):
                raise TypeError(f"adapter must be an Adapter, a part of its name or None, got {adapter!r}")
            adapter = str(adapter)
            device.choose(adapter)
        settings.adapter = adapter
        automatic.cache_clear()
    if implementation is not _KEEP:
        settings.implementation = implementation
    if transport is not _KEEP:
        settings.transport = transport


def choose(requested: str | None, dtypes: Iterable[object]) -> str:
    """The implementation of one call, ``"webgpu"`` or ``"jnp"``, given the dtypes that its operands came with."""
    _check(requested, "implementation")
    requested = requested or default().implementation
    if requested == "webgpu":
        if any(dtype == np.float64 for dtype in dtypes):
            raise TypeError("implementation 'webgpu' takes float32, bfloat16 or float16, got float64: use 'jnp'")
        from .webgpu import device

        device.device(settings.adapter)
    return requested


def default() -> Choice:
    """What ``implementation=None`` is."""
    if settings.implementation is None:
        return automatic()
    _check(settings.implementation, "JAX_ROPE_IMPLEMENTATION")
    return Choice(settings.implementation, "it was configured")


def transport() -> str:
    """How compiled programs reach the GPU."""
    _check(settings.transport, "JAX_ROPE_TRANSPORT", TRANSPORTS)
    if settings.transport is not None:
        return settings.transport
    # jax-ml/jax#25861: with one core, pure_callback can wait for itself forever while several calls are in flight.
    stuck = jax.__version_info__ < (0, 12) and _cores() == 1
    return "buffer_callback" if stuck else "pure_callback"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(value: str | None, name: str, known: tuple[str, ...] = IMPLEMENTATIONS) -> None:
    if value is not None and value not in known:
        raise ValueError(f"{name} must be {', '.join(map(repr, known))} or None, got {value!r}")


@functools.cache
def automatic() -> Choice:
    """What is known to be best."""
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
    return Choice("jnp", "a callback's copies alone take longer on the CPU than the whole rotation in jnp")
