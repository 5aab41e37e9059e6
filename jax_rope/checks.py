"""What arguments are checked with. Every message is "NAME must be WHAT, got VALUE"."""

import numbers
from collections.abc import Sequence
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np

LONGEST = 80


def shown(value: object) -> str:
    """A value in a message, on one short line: by its type, if it is no plain value."""
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 10**20:
        return f"{Decimal(int(value)):.3e}"  # Python refuses to write out more than 4300 digits
    if isinstance(value, numbers.Real):
        text = str(value)
    elif value is None or isinstance(value, str):
        text = repr(value)
    elif isinstance(value, tuple | list):
        inner = ", ".join(map(shown, value[:LONGEST]))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    elif isinstance(value, jax.core.Tracer):
        text = "a traced one"
    elif isinstance(value, jax.Array | np.ndarray):
        text = "an array"
    else:
        text = type(value).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raises a ValueError for a value that is not known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(value)}")


def integer(name: str, value: object) -> int:
    """The value as an int; a TypeError for what is none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer known while tracing, got {shown(value)}")
    return int(value)


def beyond_int32(name: str, least: object, most: object) -> ValueError:
    """The error of integers from least to most."""
    return ValueError(f"{name} must fit into int32, got {' to '.join(dict.fromkeys(map(shown, (least, most))))}")


def array(name: str, value: jax.typing.ArrayLike, what: str) -> jax.Array:
    """The value as an array; a TypeError, or for integers too large a ValueError, for what is none."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")  # JAX would take it for the name of a dtype, at first
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = ValueError if isinstance(error, OverflowError) else TypeError
        raise kind(f"{name} must be {what}, got {getattr(value, 'dtype', shown(value))}") from error
