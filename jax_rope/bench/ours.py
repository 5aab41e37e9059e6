"""This package's ways to rotate."""

from collections.abc import Callable

import jax.numpy as jnp

from .. import config
from ..op import rope, rope_qk
from ..webgpu import device
from .entry import CannotError, Entry, jitted
from .workloads import Case


def implementation(name: str | None) -> Callable[[Case], Entry]:
    """``rope``, or ``rope_qk`` of two arrays, under jit."""

    def prepare(case: Case) -> Entry:
        rotary = case.workload.rotary

        def rotate(xs, positions):
            if len(xs) == 2:
                return rope_qk(xs[0], xs[1], positions, rotary, implementation=name)
            return (rope(xs[0], positions, rotary, implementation=name),)

        positions = case.workload.positions
        return jitted(case, rotate, None if positions is None else jnp.asarray(positions, jnp.int32))

    return prepare


def webgpu(transport: str) -> Callable[[Case], Entry]:
    """The kernels, reached in one of the two ways."""

    def prepare(case: Case) -> Entry:
        try:
            device.choose(config.settings.adapter)
        except RuntimeError as error:
            raise CannotError(str(error)) from error
        before = config.settings.transport
        config.configure(transport=transport)
        try:
            entry = implementation("webgpu")(case)
            entry.run()  # the transport is read as the program is compiled
        finally:
            config.configure(transport=before)
        return entry

    return prepare
