"""`rope`, `rope_qk` and `rope_cached` for direct forward mode: `jax.jvp`, `jax.jacfwd`, `jax.linearize`.

The functions of the same names in `jax_rope` are ``custom_vjp`` functions, to which JAX cannot apply forward mode
directly (forward over reverse, as in `jax.hessian`, it can). These take the same arguments, give the same results, and
can be differentiated in either mode; with ``"jnp"`` their backward is slower, since JAX transposes the rotation
operation by operation.

Example::

    from jax_rope import forward_mode

    y, change = jax.jvp(forward_mode.rope, (x,), (x_change,))
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from . import op

P = ParamSpec("P")
R = TypeVar("R")


def _in_either_mode(f: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(f)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        before = op.rule.set(op.apply)
        try:
            return f(*arguments, **options)
        finally:
            op.rule.reset(before)

    call.__doc__ = f"`jax_rope.{f.__name__}`, differentiable in forward mode too."
    return call


rope = _in_either_mode(op.rope)
rope_qk = _in_either_mode(op.rope_qk)
rope_cached = _in_either_mode(op.rope_cached)
