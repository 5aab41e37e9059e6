"""Adapters, and devices on them."""

import functools
import threading
from dataclasses import asdict, dataclass
from typing import Any

import wgpu

# Best first; an adapter of a kind that is not listed comes last.
KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "Unknown": "other", "CPU": "software"}
BACKENDS = ("Vulkan", "Metal", "D3D12", "OpenGL")
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroups-per-dimension",
    "max-compute-invocations-per-workgroup",
    "min-storage-buffer-offset-alignment",
)
MAPPABLE = "mappable-primary-buffers"

TIME_LIMIT = 60.0  # seconds that one piece of work may take: a software adapter takes some hundredths

HOW_TO_GET_ONE = (
    "no WebGPU adapter was found: install the GPU's Vulkan driver, or a software one (on Debian and Ubuntu: "
    "apt-get install mesa-vulkan-drivers), or use implementation='jnp'"
)


@dataclass(frozen=True)
class Adapter:
    """A WebGPU adapter.

    Attributes:
      name: what the driver calls it.
      kind: ``"discrete"``, ``"integrated"``, ``"other"`` or ``"software"``.
      backend: ``"Vulkan"``, ``"Metal"``, ``"D3D12"`` or ``"OpenGL"``.
      driver: the driver's own words on its version.
      mappable: whether the host can map the buffers that kernels work on.
      limits: those of its limits that matter here, by their WebGPU names.
    """

    name: str
    kind: str
    backend: str
    driver: str
    mappable: bool
    limits: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.backend})"

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it.

        Returns:
          The attributes by their names.
        """
        return asdict(self)


def _describe(adapter: wgpu.GPUAdapter) -> Adapter:
    info = adapter.info
    return Adapter(
        name=info["device"],
        kind=KINDS.get(info["adapter_type"], "other"),
        backend=info["backend_type"],
        driver=info["description"],
        mappable=MAPPABLE in adapter.features,
        limits={name: int(adapter.limits[name]) for name in LIMITS},
    )


@functools.cache
def _handles() -> tuple[wgpu.GPUAdapter, ...]:
    return tuple(wgpu.gpu.enumerate_adapters_sync())


@functools.cache
def _found() -> tuple[tuple[Adapter, wgpu.GPUAdapter], ...]:
    """All adapters, best first. Looked for once: a search takes tens of milliseconds."""

    def rank(pair):
        adapter, _ = pair
        backend = BACKENDS.index(adapter.backend) if adapter.backend in BACKENDS else len(BACKENDS)
        return list(KINDS.values()).index(adapter.kind), backend

    return tuple(sorted(((_describe(a), a) for a in _handles()), key=rank))


def adapters() -> list[Adapter]:
    """The WebGPU adapters of this machine.

    Returns:
      All of them, the preferred one first; none where there is no driver. They are looked for once in a process.
    """
    return [adapter for adapter, _ in _found()]


def matching(name: str | None) -> list[tuple[Adapter, wgpu.GPUAdapter]]:
    """The best adapter whose description contains ``name`` (in any case), or the best of all; behind it those of the
    same kind and backend, which shards of an array may be spread over too.

    Raises:
      RuntimeError: there is none.
    """
    found = _found()
    if not found:
        raise RuntimeError(HOW_TO_GET_ONE)
    named = [(a, handle) for a, handle in found if name is None or name.lower() in f"{a} {a.driver}".lower()]
    if not named:
        raise RuntimeError(f"no adapter matches {name!r}; found {', '.join(str(adapter) for adapter, _ in found)}")
    best = named[0][0]
    return [(a, handle) for a, handle in named if (a.kind, a.backend) == (best.kind, best.backend)]


def choose(name: str | None) -> Adapter:
    """The first of the `matching` ones."""
    return matching(name)[0][0]


class Device:
    """A logical device with its queue. Whoever encodes, submits or maps holds ``lock``: one lock around all of it is
    faster than none, and a buffer must not be replaced while another thread maps it."""

    def __init__(self, name: str | None = None, number: int = 0):
        self.adapter, known = matching(name)[number]
        self.lock = threading.Lock()
        self.time_limit = TIME_LIMIT
        # Mapping what a discrete adapter computes on would keep it in the host's memory.
        self.mapped = self.adapter.mappable and self.adapter.kind in ("software", "integrated")
        try:
            self.handle = self._requested_from(known)
        except RuntimeError:
            # A device consumes the handle that it is requested from, says WebGPU. wgpu's own implementation lets it be
            # used again, and on OpenGL needs that: devices of different handles abort the process when they meet.
            self.handle = self._requested_from(wgpu.gpu.enumerate_adapters_sync()[_handles().index(known)])
        self.limits = {name: int(self.handle.limits[name]) for name in LIMITS}

    def _requested_from(self, handle: wgpu.GPUAdapter) -> wgpu.GPUDevice:
        return handle.request_device_sync(
            required_features=[MAPPABLE] if self.mapped else [],
            required_limits={name: handle.limits[name] for name in LIMITS[:2]},
        )
