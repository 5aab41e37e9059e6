"""The reference, against 40 digits from mpmath and against what other people's software makes."""

import json
import time
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, reference, scaling

GOLDEN = Path(__file__).parent / "golden"
ROTATIONS = json.loads((GOLDEN / "hf_rotations.json").read_text())["cases"]
FREQUENCIES = json.loads((GOLDEN / "hf_frequencies.json").read_text())["cases"]
FAR = np.array([0, 1, 4095, 131_071, 10_000_000, 2**31 - 1, -1, -(2**31), 123_456_789, -987_654_321])


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("window", [(None, 0), (6, 3), (20, 0)])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_equals_the_oracle(pairing, window, theta, rng):
    rotary_dim, start = window
    x = rng.standard_normal((len(FAR), 3, 24))
    rotary = Rotary(theta=theta, pairing=pairing, rotary_dim=rotary_dim, start=start)
    for direction, transpose in ((1, False), (-1, True)):
        expected = oracle.rotate(x, FAR, theta, pairing, rotary_dim, start, direction)
        np.testing.assert_allclose(reference.rotate(x, FAR, rotary, transpose=transpose), expected, rtol=0, atol=4e-15)


def test_positions_that_are_not_whole_and_those_past_int32(rng):
    x = rng.standard_normal((3, 1, 16))
    positions = np.array([1e6 + 0.375, -(2**31) + 2.0**-20, 2.0**-60])
    np.testing.assert_allclose(reference.rotate(x, positions), oracle.rotate(x, positions), rtol=0, atol=4e-15)
    expected = oracle.rotate(x, 2**31 - 1 + np.arange(3))
    np.testing.assert_allclose(reference.rotate(x, 2**31 - 1), expected, rtol=0, atol=4e-15)


def test_forms_of_positions_and_axes_agree(rng):
    x = rng.standard_normal((2, 5, 3, 8))
    whole = reference.rotate(x, np.broadcast_to(7 + np.arange(5), (2, 5)))
    np.testing.assert_array_equal(reference.rotate(x, 7), whole)
    np.testing.assert_array_equal(reference.rotate(x, 7 + np.arange(5)), whole)
    np.testing.assert_array_equal(reference.rotate(x, 7.0 + np.arange(5)), whole)
    swapped = reference.rotate(x.swapaxes(1, 2), 7, seq_axis=-2)
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), whole)
    sections = Rotary(sections=(2, 1, 1))
    np.testing.assert_array_equal(reference.rotate(x, 7, sections), whole)
    np.testing.assert_array_equal(reference.rotate(x, np.tile(7 + np.arange(5), (3, 1)), sections), whole)


@pytest.mark.parametrize("pairing", ["interleaved", "half", "interleaved_to_half"])
def test_inverse_and_transpose(pairing, rng):
    """The inverse undoes, attention factor included; the transpose has the same product with a cotangent."""
    rotary = Rotary(pairing=pairing, rotary_dim=8, start=2, scaling=scaling.YaRN(4.0, 64))
    x, cotangent = rng.standard_normal((2, 4, 2, 12))
    y = reference.rotate(x, FAR[:4], rotary)
    np.testing.assert_allclose(reference.rotate(y, FAR[:4], rotary, inverse=True), x, rtol=0, atol=4e-15)
    back = reference.rotate(cotangent, FAR[:4], rotary, transpose=True)
    assert np.vdot(y, cotangent) == pytest.approx(np.vdot(x, back), rel=1e-13)


@pytest.mark.parametrize("case", ROTATIONS, ids=[case["name"] for case in ROTATIONS])
def test_published_rotations(case):
    rotary, positions = Rotary.from_hf(case["config"]), np.array(case["positions"])
    for name in ("q", "k"):
        x, expected = (np.reshape(case[key], case[f"shape_{name}"]) for key in (name, f"{name}_out"))
        actual = reference.rotate(x, positions, rotary, seq_axis=-2, seq_len=1001 if rotary.scaling else None)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4 * np.abs(x).max())


@pytest.mark.parametrize("case", FREQUENCIES, ids=[case["name"] for case in FREQUENCIES])
def test_published_frequencies(case):
    """The pair (1, 0) at a small position says its angle and its factor."""
    rotary = Rotary.from_hf(case["config"], case["layer_type"])
    count, position = len(case["inv_freq"]), 2.0**-10
    x = np.zeros((1, 1, 2 * count + rotary.start))
    (read, _), (first, second) = reference.pairs(rotary, x.shape[-1])
    x[..., read] = 1
    positions = np.full((rotary.streams, 1) if rotary.sections else 1, position)
    y = reference.rotate(x, positions, rotary, seq_len=case["seq_len"])[0, 0]
    angles = np.arctan2(y[second], y[first]) / position
    np.testing.assert_allclose(angles, case["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(np.hypot(y[first], y[second]), case["attention_factor"], rtol=1e-6)


def test_rows_of_their_own_length(rng):
    rule = scaling.DynamicNTK(2.0, 8)
    x = rng.standard_normal((2, 4, 1, 8))
    positions = np.array([[0, 1, 2, 3], [20, 21, 22, 23]])
    y = reference.rotate(x, positions, Rotary(scaling=rule))
    np.testing.assert_array_equal(y[0], reference.rotate(x[0], positions[0], Rotary()))
    np.testing.assert_array_equal(y[1], reference.rotate(x[1], positions[1], Rotary(scaling=rule), seq_len=24))
    assert not np.array_equal(y[1], reference.rotate(x[1], positions[1], Rotary()))


def test_pi_and_frequencies_have_more_digits_than_needed():
    with mpmath.workdps(reference.DIGITS):
        assert abs(mpmath.mpf(str(reference._pi())) - mpmath.pi) < mpmath.mpf(10) ** -78
        for i, turns in enumerate(reference._turns(Rotary(), 64, None)):
            exact = mpmath.mpf(10_000) ** (-mpmath.mpf(i) / 32) / (2 * mpmath.pi)
            assert abs(Fraction(turns, 1 << reference.BITS) - Fraction(int(exact * 2**240), 1 << 240)) < 2.0**-190


def test_measures(rng):
    x = rng.standard_normal((40, 2, 16)).astype(np.float32)
    exact = reference.rotate(x)
    y = exact.astype(np.float32)
    assert reference.error(y, exact, x) < 1.01
    assert reference.compare(y, exact, x).holds
    wrong = y.copy()
    wrong[3, 1, 4] += 5 * 2.0**-24 * np.hypot(*exact[3, 1, 4:6])
    assert 4 < reference.error(wrong, exact, x) < 6.1
    assert not reference.compare(wrong, exact, x).holds
    half = x.astype(jnp.bfloat16)
    exact = reference.rotate(half)
    y = exact.astype(half.dtype)
    assert reference.steps(y, exact) == 0
    y.view(np.int16)[2, 1, 3] += 1
    assert (reference.steps(y, exact), reference.compare(y, exact, half).holds) == (1, True)
    y.view(np.int16)[2, 1, 3] += 1
    assert (reference.steps(y, exact), reference.compare(y, exact, half)[1:]) == (2, (2, False))


def test_what_lies_outside_the_window_must_not_change(rng):
    x = rng.standard_normal((4, 2, 16)).astype(np.float32)
    x[0, 0, 0] = -0.0
    rotary = Rotary(rotary_dim=8, start=4)
    exact = reference.rotate(x, None, rotary)
    y = exact.astype(np.float32)
    assert reference.compare(y, exact, x, rotary).holds
    y[0, 0, 0] = 0.0
    assert reference.compare(y, exact, x, rotary) == (np.inf, None, False)


def test_what_is_not_finite_must_stay_in_its_pair(rng):
    x = rng.standard_normal((3, 1, 8)).astype(np.float32)
    x[:, 0, 2] = np.inf, np.nan, -np.inf
    exact = reference.rotate(x)
    np.testing.assert_array_equal(exact[0], x[0])  # position 0 is the identity
    y = exact.astype(np.float32)
    assert reference.compare(y, exact, x).holds
    for index, value in (((1, 0, 3), 1.0), ((1, 0, 4), np.nan), ((0, 0, 3), np.nan)):
        wrong = y.copy()
        wrong[index] = value
        assert not reference.compare(wrong, exact, x).holds


def test_a_long_sequence_takes_no_time(rng):
    x = rng.standard_normal((2048, 1, 128)).astype(np.float32)
    start = time.perf_counter()
    reference.rotate(x, -(2**31))
    assert time.perf_counter() - start < 1.0
