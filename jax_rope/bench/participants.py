"""Who takes part."""

from . import bare, floors, formulas, libraries, ours
from .entry import Participant

_ALL = (
    Participant("jnp", "ours", ours.implementation("jnp"), "x * 1.0001"),
    Participant("webgpu, pure_callback", "ours", ours.webgpu("pure_callback"), "identity pure_callback"),
    Participant("webgpu, buffer_callback", "ours", ours.webgpu("buffer_callback"), "identity buffer_callback"),
    Participant("None", "ours", ours.implementation(None), "x * 1.0001"),
    Participant("kernel alone", "part", bare.kernel, "multiply kernel"),
    Participant("x * 1.0001", "floor", floors.product),
    Participant("identity pure_callback", "floor", floors.pure_callback),
    Participant("identity buffer_callback", "floor", floors.into_buffers),
    Participant("multiply kernel", "floor", bare.multiply),
    Participant("wgpu write, multiply, map", "floor", bare.round_trip),
    Participant("Hugging Face's formula, jnp", "peer", formulas.hugging_face),
    Participant("cos and sin in the op, jnp", "peer", formulas.on_the_fly),
    Participant("Hugging Face's formula, torch", "peer", libraries.torch_hugging_face),
    Participant("onnxruntime", "peer", libraries.onnxruntime_operator),
    Participant("equinox", "peer", libraries.equinox_module),
)
PARTICIPANTS = {participant.name: participant for participant in _ALL}

# Where time is shown against size: those that answer with a whole result.
SHOWN_BY_SIZE = [p.name for p in _ALL if p.kind in ("ours", "peer") and p.name != "None"] + ["x * 1.0001"]
# Where error is shown against position: one way to the kernels is enough.
SHOWN_BY_POSITION = [name for name in SHOWN_BY_SIZE if name not in ("webgpu, buffer_callback", "x * 1.0001")]
LARGE = "webgpu, buffer_callback"
