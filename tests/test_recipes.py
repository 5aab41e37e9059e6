"""The recipes run as they are, and what they print is true."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path):
    """What a recipe prints; it is run where it can find nothing but what is installed."""

    def run(name: str, *arguments: object) -> str:
        command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def number(pattern: str, text: str) -> float:
    (found,) = re.findall(pattern + r" (-?[\d.]+(?:e[-+]\d+)?)", text)
    return float(found)


def test_quickstart(run):
    text = run("quickstart")
    assert "implementation: webgpu" in text  # never without an adapter here
    assert "(1, 0) at positions 0, 1, 2: (1.0000, 0.0000) (0.5403, 0.8415) (-0.4161, 0.9093)" in text
    assert "the 16th token alone is rotated as among all: True" in text
    near, far = re.search(r"at 0 and at 2,000,000,000: (\S+) and (\S+)", text).groups()
    assert float(near) != 0 and float(near) == pytest.approx(float(far), abs=2e-4)
    assert re.search(r"loss 0\.\d+, gradients \(2, 16, 8, 64\) and \(2, 16, 2, 64\)", text)
    assert "Rotary(theta=500000.0, pairing='half', rotary_dim=64" in text


@pytest.mark.slow
def test_train(run, tmp_path):
    plot = tmp_path / "curves.png"
    text = run("train", "--plot", plot)
    losses = {name: (float(a), float(b)) for name, a, b in re.findall(r"(\w+) +loss (\S+) at first, (\S+) over", text)}
    assert losses.keys() == {"jnp", "webgpu"}
    assert all(4.5 < first < 5.5 and last < 2.7 for first, last in losses.values()), losses
    assert "the curves agree within 0.0001 nats: True" in text
    assert plot.read_bytes().startswith(PNG)


def test_decode(run):
    text = run("decode")
    assert "100 tokens with a ring of 16 places" in text
    assert number("at once differ by", text) < 1e-5
    assert number(r"from position 2,147,483,548 on by", text) < 1e-5


def test_mla(run):
    text = run("mla")
    assert "interleaved_to_half, YaRN times 40, of 64 elements" in text
    assert "factor on cosine and sine: 1; on the scores: 1.874" in text
    assert number("8 decoded tokens and the prefill differ by", text) < 1e-4
    assert "cached for each token: 96 numbers, not 384" in text


def test_packed(run):
    text = run("packed")
    assert "positions around the first boundary: 35 36 0 1 2" in text
    assert "by segment ids they are the same: True" in text
    assert number("packed and alone differ by", text) < 1e-5
    assert number("without the mask by", text) > 0.1
    assert number("positions that run on by", text) < 1e-5
    assert number("but the keys by", text) > 0.1
    assert number("gradient that reaches other documents:", text) == 0


def test_long_context(run, tmp_path):
    plot = tmp_path / "drift.png"
    text = run("long_context", "--plot", plot)
    lines = re.findall(r"^ *([\d,]+) +(\de-\d\d) +(\de-\d\d)$", text, re.MULTILINE)
    rows = {int(place.replace(",", "")): (float(ours), float(usual)) for place, ours, usual in lines}
    assert len(rows) == 9 and max(rows) == 2**31 - 101
    assert all(ours < 1e-6 for ours, _ in rows.values())
    assert rows[10**6][1] > 1e-4 and rows[10**9][1] > 1e-2  # what the usual formula does there
    assert "here it is below 1e-6 everywhere: True" in text
    assert plot.read_bytes().startswith(PNG)


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    named = re.findall(r"^\| \[`([\w/]+\.py)`\]\(([\w/]+\.py)\)", table, re.MULTILINE)
    assert all(shown == target for shown, target in named)
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("drop_in/*.py")]
    assert {shown for shown, _ in named} == {path.relative_to(EXAMPLES).as_posix() for path in files}


def test_latent_attention_is_deepseek_s():
    """Against NumPy in float64, with neighbours as complex numbers, as DeepSeek published it."""
    spec = importlib.util.spec_from_file_location("example_mla", EXAMPLES / "mla.py")
    assert spec is not None and spec.loader is not None
    mla = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mla)
    x = np.random.default_rng(0).standard_normal((2, 9, mla.CHANNELS)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        actual, cache = mla.prefill(mla.init(3), jnp.asarray(x))
    w = {name: np.asarray(array, np.float64) for name, array in mla.init(3).items()}
    # YaRN's ramp for 32 pairs: 32 turns in 4096 tokens are made by pair 10, one by pair 23.
    i = np.arange(32)
    ramp = np.clip((i - 10) / 13, 0, 1)
    turn = np.exp(1j * np.arange(9)[:, None] * 1e4 ** (-i / 32) * (1 - ramp + ramp / 40))

    def turned(y):
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * turn[:, None]
        return np.stack([z.real, z.imag], axis=-1).reshape(y.shape)

    latent = x @ w["latent"]
    q = np.einsum("bse,ehd->bshd", x, w["q"])
    q_rope, k_rope = turned(q[..., 16:]), turned((x @ w["k_rope"])[:, :, None])
    scores = np.einsum("bshd,btc,chd->bhst", q[..., :16], latent, w["k"])
    scores = (scores + np.einsum("bshd,btd->bhst", q_rope, k_rope[:, :, 0])) * (0.1 * np.log(40) + 1) ** 2 / 80**0.5
    scores = np.exp(np.where(np.tri(9, dtype=bool), scores, -np.inf))
    weights = scores / scores.sum(axis=-1, keepdims=True)
    expected = np.einsum("bhst,btc,chd,hde->bse", weights, latent, w["v"], w["o"])
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    halves = np.concatenate([k_rope[:, :, 0, 0::2], k_rope[:, :, 0, 1::2]], axis=-1)
    np.testing.assert_allclose(cache.key, halves, atol=1e-5)
