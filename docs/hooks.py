"""What mkdocs calls while it builds: the parts of pages that are made from the package and the repository.

In a page, ``<!-- help -->`` is replaced by the command line's help, ``<!-- help NAME -->`` by that of one command,
``<!-- transformations -->`` by the README's table, and ``<!-- picture FILE: words -->`` by a picture, if it is there.
"""

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from jax_rope.__main__ import main

ROOT = Path(__file__).parents[1]
WIDTH = "100"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^<!-- (help|transformations|picture)\b ?(.*?) -->$", _made, markdown, flags=re.MULTILINE)


def _made(match: re.Match) -> str:
    what, argument = match.groups()
    if what == "help":
        return f"```text\n{command_help(*argument.split())}```"
    if what == "transformations":
        return transformations()
    file, _, words = argument.partition(": ")
    return f"![{words}]({file})\n\n{words}" if (ROOT / "docs" / file).is_file() else ""


def command_help(*command: str) -> str:
    """What ``python -m jax_rope COMMAND --help`` prints on a page that is `WIDTH` characters wide."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main([*command, "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return printed.getvalue()


def transformations() -> str:
    found = re.search(r"<!-- transformations: .*? -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise PluginError("README.md has no table of transformations between its two comments any more")
    return found[1]
