"""The right values, from arbitrary-precision arithmetic and from nothing in the package."""

import functools

import mpmath
import numpy as np

DIGITS = 40


@functools.cache
def exact_omega(theta: float, rotary_dim: int) -> tuple[mpmath.mpf, ...]:
    with mpmath.workdps(DIGITS):
        return tuple(mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / rotary_dim) for i in range(rotary_dim // 2))


@functools.cache
def exact_cos_sin(theta: float, rotary_dim: int, position: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 [rotary_dim / 2] each, rounded from 40 digits."""
    with mpmath.workdps(DIGITS):
        angles = [mpmath.mpf(position) * omega for omega in exact_omega(theta, rotary_dim)]
        return np.array([float(mpmath.cos(a)) for a in angles]), np.array([float(mpmath.sin(a)) for a in angles])


def cos_sin(theta: float, rotary_dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [..., rotary_dim / 2]. float64 angles are good to 1e-11 up to position 1e5; beyond, 40 digits."""
    positions = np.asarray(positions)
    if positions.size == 0 or np.abs(positions.astype(np.float64)).max() <= 1e5:
        omega = np.array([float(o) for o in exact_omega(theta, rotary_dim)])
        angles = positions[..., None].astype(np.float64) * omega
        return np.cos(angles), np.sin(angles)
    pairs = [exact_cos_sin(theta, rotary_dim, p.item()) for p in positions.ravel()]
    shape = (*positions.shape, rotary_dim // 2)
    return np.reshape([c for c, _ in pairs], shape), np.reshape([s for _, s in pairs], shape)


def pair_indices(pairing: str, rotary_dim: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    i = np.arange(rotary_dim // 2)
    if pairing == "interleaved":
        return start + 2 * i, start + 2 * i + 1
    return start + i, start + i + rotary_dim // 2


def rotate(x, positions, theta=1e4, pairing="interleaved", rotary_dim=None, start=0, direction=1) -> np.ndarray:
    """float64, for x [..., S, H, D] and positions [..., S]."""
    x = np.asarray(x).astype(np.float64)
    rotary_dim = rotary_dim or x.shape[-1] - start
    c, s = cos_sin(theta, rotary_dim, positions)
    c, s = c[..., None, :], direction * s[..., None, :]
    first, second = pair_indices(pairing, rotary_dim, start)
    y = x.copy()
    y[..., first] = c * x[..., first] - s * x[..., second]
    y[..., second] = s * x[..., first] + c * x[..., second]
    return y


def ordered(values: np.ndarray) -> np.ndarray:
    """16-bit floats as integers that count them in order: a difference of 1 is one unit in the last place."""
    bits = values.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_exact(actual, exact: np.ndarray, x, pairing="interleaved", rotary_dim=None, start=0) -> None:
    """The accuracy contract: float32 within 4 * 2**-24 of the pair's norm; 16-bit floats within one unit in the last
    place of the exactly rounded result (or the float32 bound, where a pair's other element is thousands of times as
    large). Elements outside the window are x bit for bit."""
    actual, x = np.asarray(actual), np.asarray(x)
    assert actual.dtype == x.dtype
    assert actual.shape == exact.shape
    rotary_dim = rotary_dim or x.shape[-1] - start
    first, second = pair_indices(pairing, rotary_dim, start)
    error = np.abs(actual.astype(np.float64) - exact)
    norm = np.hypot(x[..., first].astype(np.float64), x[..., second].astype(np.float64))
    bound = np.zeros(exact.shape)
    bound[..., first] = bound[..., second] = 4 * 2.0**-24 * norm
    if actual.dtype == np.float32:
        pair_error = np.hypot(error[..., first], error[..., second])
        units = pair_error / np.maximum(norm, 1e-300) * 2**24
        assert np.all(pair_error <= bound[..., first]), f"{units.max()} units of 2**-24"
    else:
        steps = np.abs(ordered(actual) - ordered(exact.astype(actual.dtype)))
        assert np.all((steps <= 1) | (error <= bound)), f"{steps.max()} units in the last place"
    outside = np.setdiff1d(np.arange(x.shape[-1]), np.concatenate([first, second]))
    np.testing.assert_array_equal(bits(actual[..., outside]), bits(x[..., outside]))


def bits(values) -> np.ndarray:
    values = np.ascontiguousarray(values)
    return values.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize])
