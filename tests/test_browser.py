"""The kernels outside Python: wgsl/README.md against what it describes, and examples/browser in headless Chromium."""

import contextlib
import functools
import http.server
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import threading
from decimal import localcontext
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_rope import Rotary
from jax_rope.layout import Layout
from jax_rope.webgpu.call import CALL_WORDS, ByAngles, Call, Limits

ROOT = Path(__file__).parents[1]
WGSL = (ROOT / "wgsl" / "rope.wgsl").read_text(encoding="utf-8")
README = (ROOT / "wgsl" / "README.md").read_text(encoding="utf-8")
PAGE = ROOT / "examples" / "browser"
EXPECTED = json.loads((PAGE / "expected.json").read_text(encoding="utf-8"))


# wgsl/README.md


def table(title: str) -> list[list[str]]:
    """The rows of the table in a section, without its head; without the marks of code."""
    _, _, rest = README.partition(f"\n## {title}\n")
    rows = [line.strip("|").split("|") for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows[2:]]


def struct(name: str) -> list[tuple[str, str]]:
    (body,) = re.findall(rf"^struct {name} {{(.*?)^}}", WGSL, re.MULTILINE | re.DOTALL)
    return re.findall(r"^ +(\w+): (\w+),", body, re.MULTILINE)


def test_uniform_table():
    """Every field at its offset: what WGSL says of structs of 4-byte numbers is that they follow each other, and that
    structs in a uniform begin and end at multiples of 16."""
    size = {"u32": 4, **{name: -(-4 * len(struct(name)) // 16) * 16 for name in ("Divisor", "Operand")}}
    offset, fields = 0, []
    for name, kind in struct("Call"):
        if kind != "u32":
            offset = -(-offset // 16) * 16
        fields.append([str(offset), name, kind])
        offset += size[kind]
    assert [row[:3] for row in table("The uniform")] == fields
    assert -(-offset // 16) * 16 == 4 * CALL_WORDS == 160
    assert "struct Call { // 160 bytes" in WGSL and "160 bytes" in README


@pytest.mark.parametrize("name", ["Divisor", "Operand"])
def test_inner_structs(name):
    (said,) = re.findall(rf"`{name}` is four `u32`: (.*?)\.", README, re.DOTALL)
    assert re.findall(r"`(\w+)`", said) == [field for field, _ in struct(name)]


def test_overrides_table():
    declared = re.findall(r"^override (\w+): (\w+) = (\w+);", WGSL, re.MULTILINE)
    assert declared and [tuple(row[:3]) for row in table("Overrides")] == declared


def test_bindings_table():
    declared = re.findall(r"@group\(0\) @binding\((\d)\) var<([\w, ]+)> (\w+): ([\w<>]+);", WGSL)
    kinds = {"uniform": "uniform", "storage, read": "read-only-storage", "storage, read_write": "storage"}
    expected = sorted({(number, kinds[space]) for number, space, _, _ in declared})
    assert [tuple(row[:2]) for row in table("Bindings")] == expected


def test_pair_table():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    with localcontext():  # it sets the precision
        exec(code, names)
        for theta, pairs in ((1e4, 64), (5e5, 7)):
            assert names["pair_table"](theta, pairs) == [
                tuple(row) for row in Rotary(theta=theta).table(2 * pairs, None, False).tolist()
            ]


def test_uniform_in_the_rust_sketch():
    """Its words, by name, are as many as the struct's."""
    (body,) = re.findall(r"let mut words = Vec::new\(\);(.*?)words.try_into", README, re.DOTALL)
    listed = re.findall(r"words.extend\((\[.*?\]|divisor|operand)", body)
    assert sum(len(re.findall(r",", item)) + 1 if item[0] == "[" else 4 for item in listed) == CALL_WORDS


def test_entry_points_table():
    declared = re.findall(r"^@compute[^;{]*?\bfn (\w+)", WGSL, re.MULTILINE)
    listed = [name for row in table("Entry points") for name in row[0].split(", ")]
    assert sorted(listed + [f"{name}_tables" for name in listed]) == sorted(declared)


# examples/browser


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"browser_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_expected_values_are_what_the_command_writes():
    for written, now in zip(EXPECTED, load(PAGE / "expected.py").content(), strict=True):
        for direction in ("forward", "backward"):
            for operand in ("q", "k"):  # in this order, in a file too
                np.testing.assert_allclose(written[direction].pop(operand), now[direction].pop(operand), rtol=1e-9)
        assert written == now


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WITH_WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
WITHOUT_AN_ADAPTER = ("--disable-features=WebGPU",)
# Tells the server when the page has results. Before that, makes the choices that the address names after "#", as a
# person would who sees the page's first results.
REPORT = """
<script type="module">
  const result = document.getElementById("result");
  const choices = [...new URLSearchParams(location.hash.slice(1))];
  const report = () => {
    if (!result.textContent) return;
    if (choices.length) {
      const control = document.getElementsByName(choices[0][0])[0];
      control.value = choices.shift()[1];
      control.dispatchEvent(new Event("input", { bubbles: true }));
      return;
    }
    const body = JSON.stringify({ result: result.textContent, text: document.body.innerText });
    fetch("/report", { method: "POST", body });
  };
  new MutationObserver(report).observe(result, { childList: true });
  report();
</script>
"""
# A page that runs the README's example and shows what it prints.
EXAMPLE = """<!doctype html><pre id="result"></pre><script type="module">
console.log = (...words) => document.getElementById("result").append(words.join(" "));
window.onunhandledrejection = ({ reason }) => console.log(reason);
%s</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The repository's files, and pages that report."""

    reports: queue.Queue

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/examples/browser/":
            page = (PAGE / "index.html").read_text(encoding="utf-8")
        elif path == "/wgsl/example.html":
            (code,) = re.findall(r"```js\n(.*?)```", README, re.DOTALL)
            page = EXAMPLE % code
        else:
            super().do_GET()
            return
        body = (page + REPORT).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def visit(tmp_path):
    """Opens a page in headless Chromium; returns what it reports first: the text of its results, and all it shows."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, f"none of {', '.join(BROWSERS)} is installed; 'make browser' installs Chromium on Debian"
    reports: queue.Queue = queue.Queue()
    handler = type("Reporting", (Handler,), {"reports": reports})
    with (
        contextlib.ExitStack() as stack,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=ROOT)) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)

        def visit(address: str, flags: tuple[str, ...] = WITH_WEBGPU, host: str = "127.0.0.1") -> dict:
            command = [browser, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"]
            command += ["--disable-background-networking", "--disable-component-update", *flags]
            command += [f"--user-data-dir={tmp_path}", f"http://{host}:{server.server_port}/{address}"]
            with open(tmp_path / "log", "w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
                try:
                    return reports.get(timeout=60)
                except queue.Empty:
                    log.seek(0)
                    pytest.fail(f"the page reported nothing; Chromium said:\n{log.read()[-2000:]}")
                finally:
                    process.terminate()

        yield visit


@pytest.mark.browser
def test_page(visit):
    """Right on SwiftShader, far from position 0, by its own measure; and its uniforms and tables are the package's."""
    report = visit("examples/browser/?pairing=half#offset=1000000000&more=7")
    result = json.loads(report["result"])
    assert result["ok"] and result["error"] is None, report
    assert "swiftshader" in result["adapter"].lower()
    assert "are as exact as they should be" in report["text"]
    shown = result["shown"]
    assert (shown["offset"], shown["pairing"]) == (1_000_000_007, "half")
    assert 0 < shown["errors"]["forward"] <= 4 and 0 < shown["errors"]["backward"] <= 4
    assert shown["errors"]["float32Angles"] > 1e6
    for case, tried in zip(EXPECTED, result["cases"], strict=True):
        assert case["name"] == tried["name"] and tried["ok"]
        assert 0 < tried["forward"] <= tried["allowed"] and 0 < tried["backward"] <= tried["allowed"]
        uniform, entry_point, constants, pairs = as_the_package(case)
        np.testing.assert_array_equal(np.array(tried["uniform"], np.uint32), uniform)
        np.testing.assert_array_equal(np.array(tried["table"], np.uint32), pairs.reshape(-1))
        assert (tried["entryPoint"], tried["constants"]) == (entry_point, constants)


def as_the_package(case):
    """The uniform, the entry point, the overrides and the pairs that the package has for a case of expected.json."""
    start, head_dim, tokens = case["start"], case["headDim"], case["seqLen"]
    pairs = (head_dim - start) // 2
    layout = Layout(case["pairing"] == "interleaved", start, pairs, case["tokenMajor"])
    dtype = jnp.dtype(case["storage"])
    heads = (case["qHeads"], case["kHeads"])
    xs = [np.zeros((tokens, h, head_dim) if layout.token_major else (h, tokens, head_dim), dtype) for h in heads]
    rows = Rotary(theta=case["theta"], start=start).table(head_dim, None, False)
    positions = np.reshape(np.array(case["positions"], np.int32), (1, -1))
    call = Call(layout, xs, ByAngles(layout, xs[0].shape, positions, rows, None), xs)
    (piece,) = call.pieces(Limits(bytes=1 << 20, threads=1 << 20))
    k_start = -(-xs[0].nbytes // 16) * 16
    return call.uniform(piece, [0, k_start]), call.entry_point, call.constants, rows


@pytest.mark.browser
@pytest.mark.parametrize(
    ("flags", "host", "sentence"),
    [
        (WITHOUT_AN_ADAPTER, "127.0.0.1", "This browser has WebGPU, but finds no GPU that it would use"),
        (
            (*WITH_WEBGPU, "--host-resolver-rules=MAP elsewhere.test 127.0.0.1"),
            "elsewhere.test",
            "Browsers offer WebGPU only to pages that come over https or from localhost.",
        ),
    ],
    ids=["no adapter", "not secure"],
)
def test_page_without_webgpu(visit, flags, host, sentence):
    """It says why, and shows nothing else."""
    report = visit("examples/browser/", flags, host)
    assert not json.loads(report["result"])["ok"]
    assert sentence in report["text"]
    assert "How far from exact" not in report["text"]


@pytest.mark.browser
def test_example_in_the_readme(visit):
    """It prints the first pair of token 1 at position 1001: (1, 0) turned by 1001 radians."""
    printed = visit("wgsl/example.html")["result"]
    assert printed == f"token 1, head 0, pair 0: {np.cos(1001):.5f} {np.sin(1001):.5f}"
