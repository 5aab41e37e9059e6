"""The documentation builds without a warning, has every public name, and its figures and programs are right."""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import mpmath
import numpy as np
import pytest
import test_public_names
import yaml

import jax_rope
from jax_rope import phase, reference, scaling
from jax_rope.webgpu import device, kernels, rotator

ROOT = Path(__file__).parents[1]
RULES = {f"jax_rope.scaling.{rule.__name__}" for rule in scaling.Scaling.__subclasses__()}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def flowing(name: str) -> str:
    """The text without its line breaks."""
    return " ".join(read(name).split())


def build(root: Path, folder: Path) -> subprocess.CompletedProcess:
    """Not with --quiet: then --strict has no effect."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_warning_fails_the_build(tmp_path):
    (tmp_path / "mkdocs.yml").write_text("site_name: sabotaged\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stderr


def test_every_public_name_has_its_place(site):
    """In the inventory, by which other projects' documentation finds it too."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    there = {line.split()[0] for line in inventory.splitlines()}
    inherited = {f"{rule}.{method}" for rule in RULES for method in vars(scaling.Scaling)}
    names = {named.name for named in test_public_names.public_names()}
    named_by_their_functions = {"jax_rope", "jax_rope.allocator", "jax_rope.huggingface"}
    assert names - there - inherited - named_by_their_functions == set()


def test_docstrings_become_pages(site):
    """Examples, powers and links."""
    page = (site / "api" / "rope" / "index.html").read_text()
    assert "Example::" not in page
    assert "<strong>" not in (site / "api" / "reference" / "index.html").read_text()
    assert 'href="../settings/#jax_rope.configure"' in page
    assert (
        "<pre><span></span><code>usage: python -m jax_rope check" in (site / "command-line" / "index.html").read_text()
    )
    assert "nested vmap" in (site / "transformations" / "index.html").read_text()


@pytest.mark.parametrize("page", ["index.md", "getting-started.md"])
def test_the_programs_run(page, tmp_path):
    programs = re.findall(r"```python\n(import .*?)```", read(f"docs/{page}"), re.DOTALL)
    assert programs
    check = "assert abs(q4 - q1).max() < 1e-6  # as the page says" if page == "getting-started.md" else ""
    for program in programs:
        run = [sys.executable, "-c", program + check]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def polynomial(coefficients, x):
    return sum(a * x**i for i, a in enumerate(coefficients))


def test_the_figures_of_the_polynomials():
    with mpmath.workdps(40):
        s, c = ([mpmath.mpf(float(np.float32(a))) for a in terms] for terms in (phase.SINE, phase.COSINE))
        off_sine = off_cosine = mpmath.mpf(0)
        for i in range(1, 2049):
            t = mpmath.mpf(i) / 8 / 2048
            sine, cosine = t * polynomial(s, t * t), 1 + t * t * polynomial(c, t * t)
            off_sine = max(off_sine, abs(sine - mpmath.sin(2 * mpmath.pi * t)))
            off_cosine = max(off_cosine, abs(cosine - mpmath.cos(2 * mpmath.pi * t)))
    text = flowing("docs/numerics.md")
    assert f"the sine is off by at most {said(off_sine)} ({float(off_sine) * 2**24:.3f} units)" in text
    assert f"the cosine by at most {said(off_cosine)} ({float(off_cosine) * 2**24:.3f} units)" in text
    for coefficient in phase.SINE + phase.COSINE:
        assert f"{abs(coefficient)}" in text


def said(number) -> str:
    return f"{float(number):.1e}".replace("e-0", "e-")


def test_the_figure_of_float32():
    phases = np.random.default_rng(0).integers(-(2**29), 2**29, 400_000).astype(np.int32)
    t = phases.astype(np.float32) * np.float32(2.0**-32)
    u = t * t
    s0, s1, s2, s3 = map(np.float32, phase.SINE)
    c0, c1, c2, c3 = map(np.float32, phase.COSINE)
    sine = t * (s0 + u * (s1 + u * (s2 + u * s3)))
    cosine = np.float32(1) + u * (c0 + u * (c1 + u * (c2 + u * c3)))
    radians = phases.astype(np.float64) * (2 * np.pi * 2.0**-32)
    units = np.hypot(sine - np.sin(radians), cosine - np.cos(radians)).max() * 2**24
    assert f"off by at most {units:.1f} units at 400 000" in flowing("docs/numerics.md")


def test_constants():
    """What pages say that modules decide."""
    assert f"turns these pairs in up to {kernels.HEADS_PER_THREAD} heads" in flowing("docs/kernels.md")
    assert f"at most {rotator.PIECE >> 20} MiB" in flowing("docs/kernels.md")
    assert f"from {rotator.PIECE >> 20} MiB to {rotator.SMALLEST_PIECE >> 10} KiB" in flowing("docs/faults.md")
    assert f"It is {device.TIME_LIMIT:g} s for each piece" in flowing("docs/faults.md")
    assert f"`DIGITS` is {phase.DIGITS}." in read("docs/api/scaling.md")
    smallest = int(np.log2(reference.SMALLEST))
    sentence = f"`BITS` is {reference.BITS}, `UNITS` {reference.UNITS:g} and `SMALLEST` 2^{smallest}."
    assert sentence in read("docs/api/reference.md")


def test_tables_are_whole():
    sources = "".join(path.read_text() for path in (ROOT / "jax_rope").rglob("*.py"))
    settings = set(re.findall(r"JAX_ROPE_[A-Z_]+", sources))
    assert set(re.findall(r"^\| (JAX_ROPE_\w+)", read("docs/implementations.md"), re.MULTILINE)) == settings
    assert set(re.findall(r"JAX_ROPE_\w+", read("CHANGELOG.md"))) == settings
    assert set(re.findall(r"\]\[(jax_rope\.scaling\.\w+)\]", read("docs/rotaries.md"))) == RULES


def test_what_contributors_read():
    text = read("CONTRIBUTING.md")
    assert len(text.splitlines()) <= 35
    assert jax_rope.__version__ in read("CHANGELOG.md")
    paths = [
        path for path in re.findall(r"[`/ ]((?:[\w.-]+/)+[\w.-]+\w)", text) if not path.startswith((".venv", "bin"))
    ]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_issue_template_asks_for_what_is_needed():
    form = yaml.safe_load(read(".github/ISSUE_TEMPLATE/bug_report.yml"))
    asked = [field["attributes"]["label"] for field in form["body"]]
    assert {"python -m jax_rope info --json", "python -m jax_rope check --json"} <= set(asked)
    assert all(field["validations"]["required"] for field in form["body"])
