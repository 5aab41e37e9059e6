"""What all commands share: which software this is, and how they say that they cannot run."""

import platform
from importlib.metadata import version

from . import __version__


class CommandError(Exception):
    """Why a command cannot run: one sentence for the user, beside the exit status 2."""


def versions() -> dict[str, str]:
    """This package's, Python's, and those of what it builds on."""
    others = {name: version(name) for name in ("jax", "jaxlib", "numpy", "wgpu")}
    return {"jax-rope": __version__, "python": platform.python_version(), **others}
