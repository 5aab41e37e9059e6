"""SwiftShader, a software Vulkan driver that shares nothing with Mesa's: ``python tests/swiftshader.py`` gets it.

It is a part of Debian's package of Chromium, which is downloaded and unpacked into a folder that git ignores; nothing
is installed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parents[1] / ".cache" / "swiftshader"
DRIVER = FOLDER / "driver.json"  # what VK_ICD_FILENAMES takes
PACKAGE, LIBRARY = "chromium-common", "libvk_swiftshader.so"


def main() -> int:
    """Returns the exit status: 0 if it is there, 1 with a sentence on standard error if it cannot be had."""
    if DRIVER.exists():
        return 0
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        print("SwiftShader is not there: it comes from a Debian package, and there is no apt-get here", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"getting SwiftShader out of Debian's package {PACKAGE}", flush=True)
    with TemporaryDirectory(dir=FOLDER) as folder:
        said = _download(folder)
        (package,) = list(Path(folder).glob("*.deb")) or (None,)
        if package is None:
            print(f"SwiftShader is not there: apt-get could not download {PACKAGE}: {said}", file=sys.stderr)
            return 1
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        (library,) = Path(folder).rglob(LIBRARY)
        library.replace(FOLDER / LIBRARY)
    # Last, for it says that the rest is there. The path is relative to the file that names it.
    driver = {"file_format_version": "1.0.0", "ICD": {"library_path": f"./{LIBRARY}", "api_version": "1.3.0"}}
    DRIVER.write_text(json.dumps(driver))
    return 0


def _download(folder: str) -> str:
    """Leaves the package in a folder, if it can be had; returns the last of what was said."""
    # A list of packages that is missing or old names none that can be downloaded.
    update = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for command in (None, [*update, "apt-get", "update", "--quiet=2"]):
        if command and shutil.which(command[0]):
            subprocess.run(command, capture_output=True)
        done = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True)
        if done.returncode == 0:
            break
    return (done.stderr.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
