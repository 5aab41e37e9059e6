"""The README's table of times: ``python tests/bench_table.py`` writes it from docs/bench.json, or from the file that
``python -m jax_rope bench --json`` wrote and that is named, of which docs/bench.json then keeps what is needed."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, KEPT = ROOT / "README.md", ROOT / "docs" / "bench.json"
BEGIN, END = "<!-- bench: made by tests/bench_table.py -->\n", "<!-- end of bench -->\n"
COLUMNS = (("standard-half", "forward"), ("standard-half", "forward and backward"), ("llama3-prefill", "forward"))
TITLES = ("half pairs", "and backward", "Llama 3 q and k")
ROWS = (
    ("jnp", "**`jnp`**"),
    ("webgpu, pure_callback", "**`webgpu`**"),
    ("webgpu, buffer_callback", "**`webgpu`, `buffer_callback`**"),
    ("kernel alone", "of which the kernel"),
    ("x * 1.0001", "floor: `x * 1.0001`"),
    ("identity pure_callback", "floor: an identity `pure_callback`"),
    ("identity buffer_callback", "floor: an identity `buffer_callback`"),
    ("multiply kernel", "floor: a kernel that multiplies"),
    ("Hugging Face's formula, jnp", "Hugging Face's formula, `jnp`"),
    ("cos and sin in the op, jnp", "cos and sin in the op, `jnp`"),
    ("Hugging Face's formula, torch", "Hugging Face's formula, torch"),
    ("equinox", "equinox"),
    ("onnxruntime", "onnxruntime (tables given, buffers reused)"),
)


def table(found: dict[str, Any]) -> str:
    """Milliseconds, default allocator / kept memory, and the largest error."""
    by = {(r["participant"], r["workload"], r["direction"], r["allocator"]): r for r in found["results"]}
    lines = [f"| | {' | '.join(TITLES)} | error |", f"|---|{'---:|' * (len(TITLES) + 1)}"]
    for name, title in ROWS:
        cells = []
        for workload, direction in COLUMNS:
            both = [by.get((name, workload, direction, allocator)) for allocator in ("default", "kept")]
            cells.append(" / ".join(f"{r['median_ms']:.3g}" for r in both if r))
        error = by[name, *COLUMNS[0], "default"]["error"]
        lines.append(f"| {title} | {' | '.join(cells)} | {'' if error is None else f'{error:.3g}'} |")
    return "\n".join(lines) + "\n"


def parts() -> tuple[str, str, str]:
    before, rest = README.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside, after


def main(paths: list[str]) -> None:
    found = json.loads(Path(paths[0] if paths else KEPT).read_text())
    found["results"] = [{k: v for k, v in r.items() if k != "times_ms"} for r in found["results"]]
    for unused in ("sizes", "positions", "large"):
        found.pop(unused, None)
    KEPT.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    before, _, after = parts()
    README.write_text(before + BEGIN + table(found) + END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
