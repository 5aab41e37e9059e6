"""Sections, custom and learned frequencies, and DeepSeek's pairing."""

import json
from decimal import Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope, rope_qk, scaling
from jax_rope.phase import pair_table, traced_pair_table

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hf_rotations.json").read_text())["cases"]


def rotated(x, angles, pairing="interleaved"):
    """float64, for angles [..., S, pairs]."""
    x = np.asarray(x, np.float64)
    first, second = oracle.pair_indices(pairing, x.shape[-1])
    c, s = np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]
    y = np.empty_like(x)
    y[..., first] = c * x[..., first] - s * x[..., second]
    y[..., second] = s * x[..., first] + c * x[..., second]
    return y


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


# Sections


@pytest.mark.parametrize(
    ("sections", "section_layout", "streams"),
    [
        ((2, 3, 3), "contiguous", [0, 0, 1, 1, 1, 2, 2, 2]),
        ((4, 2, 2), "interleaved", [0, 1, 2, 0, 1, 2, 0, 0]),
        ((3, 3, 2), "interleaved", [0, 1, 2, 0, 1, 2, 0, 1]),
        ((2, 2, 2, 2), "contiguous", [0, 0, 1, 1, 2, 2, 3, 3]),
        ((8,), "contiguous", [0] * 8),
    ],
)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_sections(implementation, sections, section_layout, streams, pairing, rng):
    """Each pair follows its stream, in every row (linkedin/Liger-Kernel PR#464); the result is not silently
    one-dimensional (ml-explore/mlx-lm PR#1768)."""
    rotary = Rotary(pairing=pairing, sections=sections, section_layout=section_layout)
    x = draw(rng, 3, 5, 2, 16)
    positions = rng.integers(0, 1000, (len(sections), 3, 5))
    angles = np.moveaxis(positions, 0, -1)[..., streams] * rotary.inv_freq(16)
    y = rope(x, positions, rotary, implementation=implementation)
    np.testing.assert_allclose(np.asarray(y), rotated(x, angles, pairing), atol=2e-6)
    z = rope(jnp.swapaxes(x, 1, 2), positions, rotary, seq_axis=-2, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(jnp.swapaxes(z, 1, 2)), np.asarray(y))


def test_axial_sections_begin_anew(implementation, rng):
    """Two-dimensional vision: 20 pairs for each axis of an 80-element head, whose frequencies are those of 40."""
    rotary = Rotary(sections=(20, 20), section_layout="axial", pairing="half")
    omega = 1e4 ** (-np.arange(20) / 20)
    np.testing.assert_allclose(rotary.inv_freq(80), np.concatenate([omega, omega]), rtol=1e-14)
    x = draw(rng, 12, 2, 80)
    row, column = np.divmod(np.arange(12), 4)
    angles = np.concatenate([row[:, None] * omega, column[:, None] * omega], axis=-1)
    y = rope(x, np.stack([row, column]), rotary, implementation=implementation)
    np.testing.assert_allclose(np.asarray(y), rotated(x, angles, "half"), atol=2e-6)


@pytest.mark.parametrize("section_layout", ["contiguous", "interleaved"])
def test_equal_streams_are_one_dimensional(implementation, section_layout, rng):
    rotary = Rotary(sections=(4, 2, 2), section_layout=section_layout)
    x = draw(rng, 2, 5, 3, 16)
    positions = rng.integers(0, 10**7, (2, 5))
    plain = rope(x, positions, implementation=implementation)
    streams = np.broadcast_to(positions, (3, 2, 5))
    np.testing.assert_array_equal(
        np.asarray(rope(x, streams, rotary, implementation=implementation)), np.asarray(plain)
    )
    for offset in (None, 9):
        one = rope(x, offset, implementation=implementation)
        np.testing.assert_array_equal(
            np.asarray(rope(x, offset, rotary, implementation=implementation)), np.asarray(one)
        )


def test_sections_with_a_partial_rotation(implementation, rng):
    """AI-Hypercomputer/maxtext#4616: the window stays a window."""
    rotary = Rotary(sections=(2, 1, 1), rotary_dim=8, start=4)
    x = draw(rng, 2, 5, 3, 16)
    positions = rng.integers(0, 1000, (3, 2, 5))
    angles = np.moveaxis(positions, 0, -1)[..., [0, 0, 1, 2]] * rotary.inv_freq(16)
    y = np.asarray(rope(x, positions, rotary, implementation=implementation))
    np.testing.assert_allclose(y[..., 4:12], rotated(x[..., 4:12], angles), atol=2e-6)
    outside = [0, 1, 2, 3, 12, 13, 14, 15]
    np.testing.assert_array_equal(y[..., outside], np.asarray(x)[..., outside])


def test_sections_under_vmap_and_with_float_positions(implementation, rng):
    rotary = Rotary(sections=(2, 3, 3))
    x = draw(rng, 4, 5, 3, 16)
    positions = jnp.asarray(rng.uniform(-50, 50, (3, 4, 5)), jnp.float32)
    angles = np.moveaxis(np.asarray(positions, np.float64), 0, -1)[..., [0, 0, 1, 1, 1, 2, 2, 2]] * rotary.inv_freq(16)
    f = jax.vmap(lambda x, p: rope(x, p, rotary, implementation=implementation), in_axes=(0, 1))
    np.testing.assert_allclose(np.asarray(f(x, positions)), rotated(x, angles), atol=3e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rotary(sections=(2, -1)), ValueError, "sections must be 1 to 255 numbers of pairs, .* got -1"),
        (lambda: Rotary(sections=8), TypeError, "sections must be a tuple"),
        (lambda: Rotary(sections=()), ValueError, "sections must be 1 to 255 numbers of pairs, .* got 0 of them"),
        (lambda: Rotary(sections=(1,) * 300), ValueError, "none negative, got 300 of them$"),
        (lambda: Rotary(sections=(2.0, 2)), TypeError, "sections must be integers, got 2.0"),
        (
            lambda: Rotary(sections=(2, 4, 2), section_layout="interleaved"),
            ValueError,
            "longest first, .* got .2, 4, 2.$",
        ),
        (lambda: Rotary(sections=(3, 3, 1), section_layout="interleaved"), ValueError, "short enough to take turns"),
        (lambda: Rotary(section_layout="diagonal"), ValueError, "section_layout must be one of"),
        (
            lambda: rope(jnp.zeros((5, 1, 16)), 0, Rotary(sections=(2, 2))),
            ValueError,
            "sections must add up to 8 pairs",
        ),
        (
            lambda: rope(jnp.zeros((5, 1, 8)), np.zeros((3, 5), int), Rotary(sections=(2, 2))),
            ValueError,
            r"positions must be .* \[2, ..., S\], a stream for each section, got shape \(3, 5\)",
        ),
        (
            lambda: rope(jnp.zeros((3, 5, 1, 8)), np.zeros((2, 3, 4), int), Rotary(sections=(2, 2))),
            ValueError,
            r"a stream for each section, that broadcasts .* got shape \(2, 3, 4\) for batch \(3,\) and S = 5",
        ),
        (
            lambda: Rotary(sections=(2, 2)).tables(np.zeros(2, int), 8),
            ValueError,
            r"positions must be an array \[2, ..., S\], a stream for each section, got shape \(2,\)",
        ),
        (
            lambda: rope(jnp.zeros((5, 1, 8)), np.zeros(5, int), Rotary(sections=(2, 2))),
            ValueError,
            "positions must be",
        ),
    ],
)
def test_sections_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Golden rotations


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_rotations_of_published_models(implementation, case):
    """Every golden rotation, with the Rotary that its configuration describes."""
    rotary = Rotary.from_hf(case["config"])
    assert rotary.pairing == case["pairing"].replace("->", "_to_")
    q, k, q_out, k_out = (np.reshape(case[key], case[f"shape_{key[0]}"]) for key in ("q", "k", "q_out", "k_out"))
    positions = np.array(case["positions"])
    results = rope_qk(
        q.astype(np.float32), k.astype(np.float32), positions, rotary, seq_axis=-2, implementation=implementation
    )
    near = positions.reshape(-1, positions.shape[-1]).max(axis=0) < 200
    for actual, expected in zip(results, (q_out, k_out), strict=True):
        # Relative to the size of the elements: exact angles are up to 3.8e-6 from the reference's float32 ones here.
        size = np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(actual)[:, :, near], expected[:, :, near], rtol=0, atol=2e-6 * size)
        np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-4)


# DeepSeek


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interleaved_to_half(implementation, dtype, rng):
    """Reads neighbours, writes halves; the transpose reads halves and writes neighbours."""
    rotary = Rotary(pairing="interleaved_to_half", rotary_dim=8, start=4)
    x, ct = (jnp.asarray(a, dtype) for a in rng.standard_normal((2, 2, 5, 3, 16)))
    order = np.concatenate([np.arange(4), 4 + np.arange(0, 8, 2), 5 + np.arange(0, 8, 2), np.arange(12, 16)])
    plain = Rotary(rotary_dim=8, start=4)

    def f(x, rotary, **options):
        return rope(x, 70, rotary, implementation=implementation, **options)

    y, vjp = jax.vjp(lambda x: f(x, rotary), x)
    np.testing.assert_array_equal(oracle.bits(y), oracle.bits(f(x, plain)[..., order]))
    back = np.argsort(order)
    np.testing.assert_array_equal(oracle.bits(vjp(ct)[0]), oracle.bits(f(ct[..., back], plain, inverse=True)))
    undone = f(y, rotary, inverse=True)
    np.testing.assert_allclose(
        np.asarray(undone, np.float32), np.asarray(x, np.float32), atol=0.03 if dtype != jnp.float32 else 1e-6
    )


def test_multi_head_latent_attention(implementation, rng):
    """Only the rope part of a query head turns, and one shared key head serves all of them."""
    rotary = Rotary(pairing="interleaved_to_half", start=128, rotary_dim=64)
    q, k_rope = draw(rng, 2, 5, 4, 192), draw(rng, 2, 5, 1, 64)
    q_out = np.asarray(rope(q, 30, rotary, implementation=implementation))
    k_out = np.asarray(rope(k_rope, 30, Rotary(pairing="interleaved_to_half"), implementation=implementation))
    np.testing.assert_array_equal(q_out[..., :128], np.asarray(q)[..., :128])
    positions = np.broadcast_to(30 + np.arange(5), (2, 5))
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    np.testing.assert_allclose(q_out[..., 128:], oracle.rotate(q[..., 128:], positions)[..., order], atol=2e-6)
    np.testing.assert_allclose(k_out, oracle.rotate(k_rope, positions)[..., order], atol=2e-6)


# Custom and learned frequencies


def test_custom_frequencies_are_exact(implementation, rng):
    """Also above a turn per position, below zero, and at zero; far positions and fractions of one."""
    freqs = (1.0, 20.0, -0.3, 0.0)
    x = draw(rng, 4, 2, 8)
    positions = np.array([1.0, 10_000_000.0, 0.375, -77.625])
    with mpmath.workdps(oracle.DIGITS):
        angles = [[float(mpmath.fmod(mpmath.mpf(p) * mpmath.mpf(f), 2 * mpmath.pi)) for f in freqs] for p in positions]
    y = rope(x, positions, Rotary(freqs=freqs), implementation=implementation)
    np.testing.assert_allclose(np.asarray(y), rotated(x, np.array(angles)), atol=1.5e-6)
    np.testing.assert_array_equal(np.asarray(y)[..., 6:], np.asarray(x)[..., 6:])


def test_traced_frequencies_are_exact_too():
    """The same table as from the numbers themselves, to a unit of its 64 bits."""
    freqs = np.array([1, 0.1, 3e-7, 20, -0.3, -1e-9, 0, 1e6, -5e5, 1e-20, 1e-40], np.float32)
    expected = pair_table([Decimal(float(f)) for f in freqs], 1.0, [2] * len(freqs))
    actual = np.asarray(jax.jit(lambda f: traced_pair_table(f, [2] * len(freqs)))(freqs))

    def number(table):
        return [int(row[2]) >> 8 << 64 | int(row[0]) << 32 | int(row[1]) for row in table]

    for a, b in zip(number(actual), number(expected), strict=True):
        assert min((a - b) % 2**88, (b - a) % 2**88) <= 1
    assert (actual[:, 2] & 0xFF == 2).all()
    assert (actual[:, 3] == expected[:, 3]).all()


def test_traced_float64_frequencies(x64):
    freqs = np.array([1 / 3, 1e4**-0.3, -2.7, 1e-12])
    expected = pair_table([Decimal(float(f)) for f in freqs], 1.0, [0] * 4)
    actual = np.asarray(traced_pair_table(jnp.asarray(freqs), [0] * 4))
    difference = [
        (int(a[0]) << 32 | int(a[1])) - (int(b[0]) << 32 | int(b[1])) for a, b in zip(actual, expected, strict=True)
    ]
    assert max(map(abs, difference)) <= 2**17  # of 2**64: float64's own 53 bits


def test_traced_frequencies_that_are_none_give_nan(implementation):
    y = rope(jnp.ones((2, 1, 8)), 3, Rotary(freqs=jnp.array([1, jnp.nan, jnp.inf, 1e9])), implementation=implementation)
    y = np.asarray(y).reshape(2, 4, 2)
    assert np.isfinite(y[:, 0]).all()
    assert np.isnan(y[:, 1:]).all()


def test_learned_frequencies_have_a_gradient(implementation, rng):
    """With whole and float positions, offsets too: first, second and mixed derivatives."""
    x, weights = rng.standard_normal((2, 4, 2, 6))
    freqs = np.array([1.1, 0.37, 0.05])

    def loss(y, weights):
        return jnp.sum(jnp.sin(y) * weights)

    def theirs(x, freqs, positions):
        angles = positions[:, None, None] * freqs[None, None]
        c, s = jnp.cos(angles), jnp.sin(angles)
        x1, x2 = x[..., 0::2], x[..., 1::2]
        y = jnp.stack([c * x1 - s * x2, s * x1 + c * x2], axis=-1).reshape(x.shape)
        return loss(y, weights)

    floats = np.array([0.0, 2.0, 0.3, -1.8])
    for argument, positions in (
        (7, 7.0 + np.arange(4)),
        (np.array([3, 0, 9, -2]), np.array([3.0, 0, 9, -2])),
        (jnp.float32(floats), floats),
    ):

        def ours(x, freqs, argument=argument):
            y = rope(x, argument, Rotary(freqs=freqs), implementation=implementation)
            return loss(y, jnp.float32(weights))

        arguments = jnp.float32(x), jnp.float32(freqs)
        gradient = jax.grad(ours, (0, 1))(*arguments)
        hessian = jax.jacrev(jax.grad(ours, (0, 1)), (0, 1))(*arguments)
        with jax.enable_x64(True):

            def expected(x, freqs, positions=positions):
                return theirs(x, freqs, jnp.asarray(positions))

            arguments = jnp.asarray(x), jnp.asarray(freqs)
            g = jax.tree.map(np.asarray, jax.grad(expected, (0, 1))(*arguments))
            h = jax.tree.map(np.asarray, jax.jacrev(jax.grad(expected, (0, 1)), (0, 1))(*arguments))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), gradient, g)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), hessian, h)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rotary(freqs=(1.0,), scaling=scaling.Linear(2)), ValueError, "scaling must be None .* got Linear"),
        (lambda: Rotary(freqs=()), ValueError, "freqs must have at least one entry, got 0"),
        (
            lambda: Rotary(freqs=(1.0, 2.0), rotary_dim=8),
            ValueError,
            "freqs must have 4 entries, .* of rotary_dim 8, got 2",
        ),
        (lambda: Rotary(freqs="fast"), TypeError, "freqs must be numbers"),
        (lambda: Rotary(freqs=(1.0, float("nan"))), ValueError, "freqs must be finite, got nan"),
        (lambda: Rotary(freqs=(10**400,)), ValueError, "freqs must be finite, got a number beyond float64"),
        (lambda: Rotary(freqs=jnp.ones((2, 2))), TypeError, "freqs must be float32 or float64"),
        (lambda: Rotary(freqs=jnp.ones(2, jnp.bfloat16)), TypeError, "freqs must be float32 or float64"),
        (
            lambda: rope(jnp.ones((1, 1, 4)), 0, Rotary(freqs=(1.0,) * 4)),
            ValueError,
            "must fit into head_dim 4 .* got 8",
        ),
        (lambda: Rotary(freqs=jnp.ones(2)).inv_freq(4), TypeError, "freqs must be numbers for inv_freq"),
    ],
)
def test_frequencies_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
