"""The frequencies, against 40 digits and against values computed with other people's software."""

import json
from decimal import Decimal
from pathlib import Path

import mpmath
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope_qk
from jax_rope.phase import pair_table

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 1.5])
@pytest.mark.parametrize("rotary_dim", [2, 18, 64, 256])
def test_turn_fractions_are_exact(theta, rotary_dim):
    """All 64 bits of every pair's fraction of a turn, and the pair's whole turns, stream and amplitude."""
    table = Rotary(theta=theta).table(rotary_dim, None, inverse=False)
    with mpmath.workdps(oracle.DIGITS):
        turns = [omega / (2 * mpmath.pi) * 2**64 for omega in oracle.exact_omega(theta, rotary_dim)]
        expected = [int(mpmath.nint(t)) for t in turns]
    actual = [int(row[0]) << 32 | int(row[1]) for row in table]
    assert actual == expected
    assert (table[:, 2] == 0).all()
    assert (table[:, 3].view(np.float32) == 1).all()


def test_inv_freq():
    rotary = Rotary(theta=500_000, rotary_dim=96)
    exact = [float(omega) for omega in oracle.exact_omega(5e5, 96)]
    np.testing.assert_allclose(rotary.inv_freq(128), exact, rtol=2.3e-16)
    assert rotary.inv_freq(128).dtype == np.float64


PUBLISHED = {  # head_dim, Rotary
    "llama2-7b": (128, Rotary(pairing="half")),
    "llama3-8b": (128, Rotary(theta=500_000, pairing="half")),
    "smollm2-135m": (64, Rotary(theta=100_000, pairing="half")),
    "mistral-7b-v0.3": (128, Rotary(theta=1e6, pairing="half")),
    "gpt-neox-20b": (96, Rotary(pairing="half", rotary_dim=24)),
    "gemma-7b": (256, Rotary(pairing="half")),
    "glm4-9b": (128, Rotary(rotary_dim=64)),
    "olmo2-7b": (128, Rotary(theta=500_000, pairing="half")),
    "stablelm-1.6b": (64, Rotary(pairing="half", rotary_dim=16)),
    "nemotron-partial": (128, Rotary(pairing="half", rotary_dim=64)),
}


def golden(name: str, file: str) -> dict:
    (case,) = [case for case in json.loads((GOLDEN / file).read_text())["cases"] if case["name"] == name]
    return case


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_of_published_models(name):
    head_dim, rotary = PUBLISHED[name]
    np.testing.assert_allclose(rotary.inv_freq(head_dim), golden(name, "hf_frequencies.json")["inv_freq"], rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "rotary"),
    [("llama-half-gqa", Rotary(pairing="half")), ("glm4-interleaved-partial", Rotary(rotary_dim=8))],
)
def test_rotations_of_published_models(implementation, name, rotary):
    case = golden(name, "hf_rotations.json")
    q, k, q_out, k_out = (np.reshape(case[key], case[f"shape_{key[0]}"]) for key in ("q", "k", "q_out", "k_out"))
    positions = np.array(case["positions"])
    results = rope_qk(
        q.astype(np.float32), k.astype(np.float32), positions, rotary, seq_axis=-2, implementation=implementation
    )
    for actual, expected in zip(results, (q_out, k_out), strict=True):
        near = positions[0] < 200
        np.testing.assert_allclose(np.asarray(actual)[:, :, near], expected[:, :, near], rtol=0, atol=2e-6)
        np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-4)


def test_a_changed_theta_changes_the_frequencies():
    """lucidrains/rotary-embedding-torch#11: a cache whose key lacks a parameter."""
    tables = {Rotary(theta=theta).table(64, None, False).tobytes() for theta in (1e4, 1e4 + 1, 5e5)}
    assert len(tables) == 3


def test_frequencies_above_a_turn_keep_their_whole_turns():
    quarter = pair_table([Decimal(2) * Decimal(np.pi) * 3 + 1], 2.5, [3])
    assert quarter[0, 2] == 3 << 8 | 3
    assert quarter[0, 3] == np.float32(2.5).view(np.uint32)
    backwards = pair_table([Decimal(-1)], 1.0, [0])
    assert backwards[0, 2] == 0xFFFFFF00
    with pytest.raises(
        ValueError, match=r"frequencies must be below 5.27e\+07 radians per position in size, got 1e\+09"
    ):
        pair_table([Decimal(10) ** 9], 1.0, [0])


def test_equal_rotaries_are_one_key():
    assert Rotary(theta=10_000) == Rotary(theta=10_000.0)
    assert hash(Rotary(rotary_dim=np.int64(8))) == hash(Rotary(rotary_dim=8))
