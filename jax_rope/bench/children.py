"""Children and what they say: every measurement runs in a fresh process, since a process that has worked for long has a
slower software adapter, and since one that dies must not take the others' results along. JSON lines are the channel."""

import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

# glibc maps and unmaps every large array by itself, so that most of what an operation costs is page faults. With
# these, memory that was freed is kept and used again.
KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
# Threads that wait busily would take a core from whoever's turn is next.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
SILENCE = 300.0  # seconds without a line after which a child counts as hanging


def say(event: str, **values: object) -> None:
    """A child's line for its parent."""
    print(json.dumps({"event": event, **values}), flush=True)


def allocators() -> tuple[str, ...]:
    """What may be said about how large arrays are allocated here."""
    return ("default", "kept") if platform.libc_ver()[0] == "glibc" else ("default",)


def run(
    module: str, arguments: Sequence[object], allocator: str, heard: Callable[[dict[str, Any]], None]
) -> str | None:
    """Runs a module of this package as a child.

    Args:
      heard: called with each line.

    Returns:
      Why it did not end well, or None.
    """
    environment = {name: value for name, value in os.environ.items() if name not in KEPT} | PASSIVE
    if allocator == "kept":
        environment |= KEPT
    command = [sys.executable, "-m", f"{__package__}.{module}", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in _lines(child):
                heard(json.loads(line))
        except TimeoutError as error:
            return str(error)
        finally:
            child.kill()
            child.wait()
        if child.returncode == 0:
            return None
        errors.seek(0)
        said = errors.read().strip().splitlines()
        return f"exit status {child.returncode}" + (f": {said[-1]}" if said else "")


def _lines(child: subprocess.Popen):
    """The JSON among a child's lines, until it ends.

    Raises:
      TimeoutError: it hangs.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            raise TimeoutError(f"it hung: nothing was heard for {SILENCE:.0f} seconds") from None
        if line is None:
            child.wait(timeout=SILENCE)
            return
        if line.startswith("{"):  # libraries may print too
            yield line
