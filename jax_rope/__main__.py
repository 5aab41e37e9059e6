"""The command line: ``python -m jax_rope info`` and ``python -m jax_rope demo``."""

import argparse
import json
import platform
import sys
from importlib.metadata import version
from typing import Any

import jax

from . import __version__, config, demo
from .webgpu import device


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_rope", description="Rotary position embedding on any GPU.")
    commands = parser.add_subparsers(required=True, metavar="command")
    add = commands.add_parser("info", help="what WebGPU finds on this machine, and what rope would use and why")
    add.add_argument("--json", action="store_true", help="print one JSON object instead")
    add.set_defaults(run=info)
    add = commands.add_parser("demo", help="a language model that rotates its queries and keys with rope_qk")
    demo.add_arguments(add)
    add.set_defaults(run=demo.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def info(arguments: argparse.Namespace) -> int:
    """Prints what `gather` finds."""
    try:
        found = gather()
    except ValueError as error:  # a setting from the environment
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(", ".join(f"{name} {number}" for name, number in found["versions"].items()))
    for adapter in found["adapters"]:
        print(f"\n{adapter['name']} ({adapter['kind']}, {adapter['backend']})")
        print(f"  driver: {adapter['driver']}")
        print(f"  buffers that kernels work on can be mapped: {'yes' if adapter['mappable'] else 'no'}")
        for name, value in adapter["limits"].items():
            print(f"  {name}: {value:,}")
    print(f"\nimplementation='webgpu' would use: {found['webgpu_adapter'] or found['webgpu_error']}")
    print(f"implementation=None would use: {found['implementation']}, since {found['reason']}")
    return 0


def gather() -> dict[str, Any]:
    """Versions, adapters, and what would be used, as JSON takes it."""
    adapter, error = None, None
    try:
        adapter = str(device.choose(config.settings.adapter))
    except RuntimeError as raised:
        error = f"nothing: {raised}"
    choice = config.default()
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy", "wgpu")}
    return {
        "versions": {"jax-rope": __version__, "python": platform.python_version(), **versions},
        "system": platform.platform(),
        "jax_backend": jax.default_backend(),
        "adapters": [adapter.as_dict() for adapter in device.adapters()],
        "webgpu_adapter": adapter,
        "webgpu_error": error,
        "implementation": choice.implementation,
        "reason": choice.reason,
    }


if __name__ == "__main__":
    sys.exit(main())
