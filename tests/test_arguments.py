"""Bad input: one clear sentence that names the argument, while tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rope import Rotary, adapters, checks, config, configure, rope, rope_qk
from jax_rope.webgpu import device, offload

X = jnp.zeros((2, 5, 3, 8))


def traced(f, *arguments):
    """Nothing may run: the error has to come from tracing alone."""
    jax.make_jaxpr(f)(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": jnp.zeros((5, 8))}, ValueError, "x must have at least 3 axes"),
        ({"x": jnp.zeros((2, 5, 3, 8), jnp.int32)}, TypeError, "x must be float32, .* got int32"),
        ({"x": jnp.zeros((2, 5, 3, 8), bool)}, TypeError, "x must be float32, .* got bool"),
        ({"x": jnp.zeros((2, 5, 3, 8), jnp.complex64)}, TypeError, "x must be float32, .* got complex64"),
        ({"x": "x"}, TypeError, "x must be an array"),
        ({"x": None}, TypeError, "x must be an array"),
        (
            {"x": jnp.zeros((2, 5, 3, 7))},
            ValueError,
            "head_dim must leave an even number above 0 from start 0 on .* None, got 7",
        ),
        ({"rotary": Rotary(rotary_dim=10)}, ValueError, "rotary_dim must fit into head_dim 8 from start 0 on, got 10"),
        (
            {"rotary": Rotary(rotary_dim=4, start=6)},
            ValueError,
            "rotary_dim must fit into head_dim 8 from start 6 on, got 4",
        ),
        ({"rotary": Rotary(start=8)}, ValueError, "head_dim must leave .* from start 8 on .* got 8"),
        ({"rotary": 10_000.0}, TypeError, "rotary must be a Rotary, got 10000.0"),
        ({"positions": np.zeros((4,), int)}, ValueError, r"positions .* got shape \(4,\) .* S = 5"),
        ({"positions": np.zeros((3, 5), int)}, ValueError, r"positions .* got shape \(3, 5\) for batch \(2,\)"),
        ({"positions": np.zeros((2, 1), int)}, ValueError, r"positions .* got shape \(2, 1\)"),
        ({"positions": np.zeros((1, 2, 5), int)}, ValueError, r"positions .* got shape \(1, 2, 5\)"),
        ({"positions": np.zeros((5,), bool)}, TypeError, "positions must be integers, float32 or float64"),
        ({"positions": True}, TypeError, "positions must be integers, float32 or float64"),
        ({"positions": jnp.zeros((5,), jnp.bfloat16)}, TypeError, "positions .* merge positions above 256"),
        ({"positions": "far"}, TypeError, "positions must be a number or an array, got 'far'"),
        ({"positions": [1, None]}, TypeError, r"positions must be a number or an array, got \[1, None\]"),
        ({"positions": 2**31}, ValueError, "positions must fit into int32, got 2147483648"),
        ({"positions": np.array([0, 1, 2, 3, 2**31])}, ValueError, "must fit into int32, got 0 to 2147483648"),
        ({"positions": 1e10}, ValueError, "positions must fit into int32"),
        ({"positions": np.nan}, ValueError, "positions must be finite, got nan"),
        ({"positions": np.array([0, 1, -np.inf, 3, 4])}, ValueError, "positions must be finite, got -inf"),
        ({"positions": 2**100}, ValueError, r"positions must fit into int32, got 1.268e\+30\s"),
        ({"positions": [[1, 2], [3]]}, TypeError, r"positions must be a number or an array, got \[\[1, 2\], \[3\]\]"),
        ({"positions": np.ma.arange(5)}, TypeError, "positions must be a number or an array, got a masked array"),
        ({"x": np.zeros((5, 1, 8), np.longdouble)}, TypeError, "x must be .* got (longdouble|float128)"),
        ({"x": np.zeros((5, 1, 8), object)}, TypeError, "x must be an array of .* got object"),
        ({"seq_axis": -1}, ValueError, "seq_axis must be -3 .* got -1"),
        ({"seq_axis": 0}, ValueError, "seq_axis must be -3 .* got 0"),
        ({"inverse": 1}, TypeError, "inverse must be True or False, known while tracing, got 1"),
        ({"seq_len": [[1], [2, 3]]}, TypeError, r"seq_len must be an integer or an array of integers, got \[\[1\]"),
        ({"seq_len": 2**100}, ValueError, r"seq_len must fit into int64, got 1.268e\+30"),
        ({"implementation": "cuda"}, ValueError, "implementation must be 'webgpu', 'jnp' or None, got 'cuda'"),
    ],
)
def test_rope(arguments, error, message):
    arguments = {"x": X, **arguments}
    with pytest.raises(error, match=message):
        traced(lambda: rope(arguments["x"], **{k: v for k, v in arguments.items() if k != "x"}))


def test_traced_unsigned_positions():
    """Which of them lie beyond int32 cannot be known."""
    with pytest.raises(
        TypeError, match="positions must be signed integers or floats where they are traced, got uint32"
    ):
        traced(lambda p: rope(X, p), jnp.zeros(5, jnp.uint32))


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (jnp.zeros((2, 5, 1, 8), jnp.bfloat16), TypeError, "q and k must have one dtype, got q float32 and k bfloat16"),
        (jnp.zeros((2, 5, 1, 6)), ValueError, "q and k must be alike but for their number of heads, got q .* and k "),
        (jnp.zeros((2, 4, 3, 8)), ValueError, "q and k must be alike but for their number of heads"),
        (jnp.zeros((5, 3, 8)), ValueError, "q and k must be alike but for their number of heads"),
        (jnp.zeros((2, 5, 3, 8), jnp.int8), TypeError, "k must be float32"),
    ],
)
def test_rope_qk(k, error, message):
    with pytest.raises(error, match=message):
        traced(lambda: rope_qk(X, k))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rotary_dim": 5}, ValueError, "rotary_dim must be even and above 0, got 5"),
        ({"rotary_dim": 0}, ValueError, "rotary_dim must be even and above 0, got 0"),
        ({"rotary_dim": 4.0}, TypeError, "rotary_dim must be an integer"),
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
        ({"start": None}, TypeError, "start must be an integer known while tracing, got None"),
        (
            {"pairing": "neox"},
            ValueError,
            "pairing must be one of 'interleaved', 'half', .* got 'neox'",
        ),
        ({"theta": 0}, ValueError, "theta must be from 1e-6 to 1e300, got 0"),
        ({"theta": float("inf")}, ValueError, "theta must be from 1e-6 to 1e300, got inf"),
        ({"theta": "10000"}, TypeError, "theta must be a number"),
        ({"theta": 10**400}, ValueError, r"theta must be from 1e-6 to 1e300, got 1.000e\+400$"),
        ({"theta": -(10**5000)}, ValueError, r"theta must be from 1e-6 to 1e300, got -1.000e\+5000$"),
        ({"theta": 1e-300}, ValueError, "theta must be from 1e-6 to 1e300"),
    ],
)
def test_rotary(arguments, error, message):
    with pytest.raises(error, match=message):
        Rotary(**arguments)


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(sections=(2, 2))])
@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (3, ValueError, r"positions must be an array \[.*S\].* got shape \(\)"),
        (None, TypeError, "positions must be a number or an array, got None"),
        ([[1, 2], [3]], TypeError, r"positions must be a number or an array, got \[\[1, 2\], \[3\]\]"),
    ],
)
def test_tables(rotary, positions, error, message):
    with pytest.raises(error, match=message):
        rotary.tables(positions, 8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (True, "True"),
        (10**20, "1.000e+20"),
        (None, "None"),
        ((1,), "(1,)"),
        ([1, "a", (2.5, None)], "[1, 'a', (2.5, None)]"),
        (np.zeros(3), "an array"),
        (jnp.zeros(3), "an array"),
        (len, "builtin_function_or_method"),
        ("x" * 999, f"'{'x' * 75} ..."),
        (list(range(999)), f"{str(list(range(999)))[:76]} ..."),
    ],
)
def test_what_a_message_shows(value, expected):
    """One line of at most 80 characters."""
    assert checks.shown(value) == expected
    assert len(expected) <= 80


def test_float64_on_webgpu(x64):
    x = jnp.zeros((5, 3, 8), jnp.float64)
    with pytest.raises(TypeError, match="'webgpu' takes float32, bfloat16 or float16, got float64"):
        traced(lambda: rope(x, implementation="webgpu"))


def test_numpy_float64_on_webgpu():
    """It would silently lose half of its digits."""
    with pytest.raises(TypeError, match="got float64"):
        rope(np.zeros((5, 3, 8)), implementation="webgpu")


def test_no_adapter(monkeypatch):
    monkeypatch.setattr(device, "_found", lambda: ())
    monkeypatch.setattr(offload, "_rotators", {})
    with pytest.raises(RuntimeError, match=r"no WebGPU adapter was found: install .* mesa-vulkan-drivers"):
        traced(lambda: rope(X, implementation="webgpu"))


def test_unknown_adapter():
    with pytest.raises(RuntimeError, match="no adapter matches 'voodoo'; found "):
        configure(adapter="voodoo")
    with pytest.raises(ValueError, match="implementation must be"):
        configure(implementation="cuda")
    with pytest.raises(TypeError, match="adapter must be an Adapter, a part of its name or None, got 3"):
        configure(adapter=3)
    before = config.settings.implementation
    with pytest.raises(RuntimeError, match="no adapter matches"):
        configure(implementation="jnp", adapter="voodoo")
    assert config.settings.implementation == before
    configure(adapter=adapters()[0])
    configure(adapter=None)


@pytest.mark.parametrize(
    "positions",
    [
        jnp.arange(5, dtype=jnp.uint32),
        jnp.arange(5, dtype=jnp.int4),
        np.arange(5, dtype=">i4"),
        np.arange(5, dtype=">f4"),
        [0, 1, 2, 3, 4],
        [jnp.int32(p) for p in range(5)],
        range(5),
    ],
)
def test_unusual_positions_that_are_fine(positions):
    x = jnp.ones((2, 5, 3, 8))
    np.testing.assert_array_equal(np.asarray(rope(x, positions)), np.asarray(rope(x)))


def test_a_list_of_traced_positions():
    x = jnp.ones((2, 2, 8))
    y = jax.jit(lambda p: rope(x, [p, p + 1], implementation="jnp"))(jnp.int32(0))
    np.testing.assert_allclose(np.asarray(y), np.asarray(rope(x, implementation="jnp")), atol=5e-7)


def test_big_endian_positions_are_numbers_all_the_same():
    x = jnp.ones((2, 1, 8))
    for kind in (">i4", ">f8"):
        y = rope(x, np.array([3, 100], kind))
        np.testing.assert_array_equal(np.asarray(y), np.asarray(rope(x, np.array([3, 100]))))
