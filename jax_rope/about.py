"""Which software this is, for reports."""

import platform
from importlib.metadata import version

from . import __version__


def versions() -> dict[str, str]:
    """This package's, Python's, and those of what it builds on."""
    others = {name: version(name) for name in ("jax", "jaxlib", "numpy", "wgpu")}
    return {"jax-rope": __version__, "python": platform.python_version(), **others}
