"""From WGSL files to compute pipelines and bind groups, each made once."""

from pathlib import Path

import wgpu

from .device import Device

WORKGROUP_SIZE = 64  # a common adapter allows 256; 32 to 128 measured alike on a software adapter
HEADS_PER_THREAD = 16  # measured on the same: 8 takes a fifth longer, 4 half again as long, 32 the same

UNIFORM, READ, WRITE = "uniform", "read-only-storage", "storage"


def source(name: str) -> str:
    """The text of a WGSL file: in a wheel beside this package's modules, in the repository beside the package."""
    package = Path(__file__).parent.parent
    folder = package / "wgsl"
    if not folder.is_dir():
        folder = package.parent / "wgsl"
    return (folder / name).read_text(encoding="utf-8")


class Kernels:
    """The pipelines of one WGSL file on one device."""

    def __init__(self, device: Device, name: str, bindings: tuple[str, ...]):
        self._device = device.handle
        self._module = self._device.create_shader_module(label=name, code=source(name))
        self._bind_group_layout = self._device.create_bind_group_layout(
            entries=[
                {"binding": i, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
                for i, kind in enumerate(bindings)
            ]
        )
        self._layout = self._device.create_pipeline_layout(bind_group_layouts=[self._bind_group_layout])
        self.pipelines: dict[tuple, wgpu.GPUComputePipeline] = {}
        self._bind_groups: dict[tuple, wgpu.GPUBindGroup] = {}

    def pipeline(self, entry_point: str, **constants: int) -> wgpu.GPUComputePipeline:
        key = (entry_point, *sorted(constants.items()))
        if key not in self.pipelines:
            stage = {"module": self._module, "entry_point": entry_point, "constants": constants}
            self.pipelines[key] = self._device.create_compute_pipeline(layout=self._layout, compute=stage)
        return self.pipelines[key]

    def bind_group(self, *ranges: tuple[wgpu.GPUBuffer, int, int]) -> wgpu.GPUBindGroup:
        """The bind group of (buffer, offset, size) for each binding."""
        key = tuple((id(buffer), offset, size) for buffer, offset, size in ranges)
        if key not in self._bind_groups:
            if len(self._bind_groups) >= 64:
                self._bind_groups.clear()
            entries = [
                {"binding": i, "resource": {"buffer": buffer, "offset": offset, "size": size}}
                for i, (buffer, offset, size) in enumerate(ranges)
            ]
            self._bind_groups[key] = self._device.create_bind_group(layout=self._bind_group_layout, entries=entries)
        return self._bind_groups[key]

    def forget_bind_groups(self) -> None:
        """To be called when a buffer that they may hold is destroyed."""
        self._bind_groups.clear()
