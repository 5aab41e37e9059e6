"""Rotary position embedding as a JAX operation whose forward and backward run as WGSL kernels on any GPU."""

from . import positions as positions, scaling as scaling
from .config import configure as configure
from .op import rope as rope, rope_cached as rope_cached, rope_qk as rope_qk
from .rotary import Rotary as Rotary
from .webgpu.device import Adapter as Adapter, adapters as adapters

__all__ = ["Adapter", "Rotary", "adapters", "configure", "positions", "rope", "rope_cached", "rope_qk", "scaling"]
__version__ = "0.1.0"
