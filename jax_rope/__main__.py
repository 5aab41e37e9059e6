"""The command line: ``python -m jax_rope info``, ``check``, ``bench`` and ``demo``."""

import argparse
import json
import platform
import sys
from typing import Any

import jax

from . import check, config, crossover, demo
from .about import CommandError, versions
from .bench import command as bench
from .webgpu import device


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_rope",
        description="Rotary position embedding for JAX, as WGSL kernels on any GPU: what this machine has, whether it "
        "computes rightly, what it costs.",
        epilog="Each command has a --help of its own. They follow the settings in the environment (JAX_ROPE_ADAPTER, "
        "JAX_ROPE_IMPLEMENTATION, JAX_ROPE_TRANSPORT, JAX_ROPE_TIME_LIMIT, JAX_ROPE_AUTOTUNE). The exit status is 0, "
        "1 if something failed, or 2 if the command could not run. A problem is best reported with what 'info --json' "
        "and 'check --json' print.",
    )
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    add = commands.add_parser("info", help="which adapters WebGPU finds here, and what rope would use and why")
    add.add_argument("--json", action="store_true", help="print one JSON object instead")
    add.add_argument(
        "--measure", action="store_true", help="measure now from which size on webgpu is faster, whatever is known"
    )
    add.set_defaults(run=info)
    add = commands.add_parser("check", help="whether rotations on this machine's adapter keep the accuracy contract")
    check.add_arguments(add)
    add.set_defaults(run=check.run)
    add = commands.add_parser("bench", help="what rotations cost here, beside floors and other implementations")
    bench.add_arguments(add)
    add.set_defaults(run=bench.run)
    add = commands.add_parser("demo", help="a language model that rotates its queries and keys with rope_qk")
    demo.add_arguments(add)
    add.set_defaults(run=demo.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def info(arguments: argparse.Namespace) -> int:
    """Prints what `gather` finds, after a measurement if that is asked for."""
    try:
        if arguments.measure:
            crossover.measure()
        found = gather()
    except ValueError as error:  # a setting from the environment
        raise CommandError(error) from error
    except Exception as error:
        if not arguments.measure:
            raise
        print(f"error: nothing was measured: {error}", file=sys.stderr)
        return 1
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
    sizes = f"from {_bytes(found['from_bytes'])} on, jnp below" if found["from_bytes"] else "for every size"
    print(f"implementation=None would use: {found['implementation']} {sizes}, since {found['reason']}")
    if found["measurement"]:
        _print_measurement(**found["measurement"])
    return 0


def _print_measurement(file: str | None, crossover: int | None, times: list[dict[str, float]]) -> None:
    print(f"\nmeasured ({f'kept in {file}' if file else 'not kept: there is no cache directory to write to'}):")
    print(f"{'float32 of':>12}{'jnp':>12}{'webgpu':>12}")
    for row in times:
        print(f"{_bytes(row['size']):>12}{1e3 * row['jnp']:>9.2f} ms{1e3 * row['webgpu']:>9.2f} ms")
    where = f"faster from {_bytes(crossover)} on" if crossover else "not faster, and smaller arrays favour it less"
    print(f"  webgpu is {where}")


def _bytes(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"


def gather() -> dict[str, Any]:
    """Versions, adapters, and what would be used, as JSON takes it."""
    config.check_settings()
    adapter, error = None, None
    try:
        adapter = str(device.choose(config.settings.adapter))
    except RuntimeError as raised:
        error = f"nothing: {raised}"
    choice = config.default()
    measurement = crossover.known() if adapter else None
    kept_in = crossover.kept_in() if measurement else None
    return {
        "versions": versions(),
        "system": platform.platform(),
        "jax_backend": jax.default_backend(),
        "adapters": [adapter.as_dict() for adapter in device.adapters()],
        "webgpu_adapter": adapter,
        "webgpu_error": error,
        "implementation": choice.implementation,
        "reason": choice.reason,
        "from_bytes": choice.from_bytes,
        "measurement": measurement and {"file": kept_in and str(kept_in), **crossover.as_dict(measurement)},
    }


if __name__ == "__main__":
    sys.exit(main())
