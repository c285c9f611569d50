"""pip install with progress: what, how many of how many, and for how long; pip itself stays quiet.

Usage: python scripts/install.py <python> <argument of pip install>...

The interpreter is that of the environment. When pip fails, all that it has written is shown.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

_EVERY_S = 5.0
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_DOWNLOAD = re.compile(r"\s+(?:Downloading|Using cached) (\S+)\.whl \((.+)\)")


class Progress:
    """Describes the progress of an installation, from pip's lines and the installed packages."""

    def __init__(self, folder: Path) -> None:
        self._begin = time.monotonic()
        self._folder = folder
        self._num_before = self._num_present()
        self._collected: set[str] = set()
        self._num_downloaded = 0
        self._installing: list[str] = []
        self._text = "looking for packages"

    def read(self, line: str) -> None:
        if match := _DOWNLOAD.match(line):
            self._num_downloaded += 1
            name, size = match[1].rsplit("/", 1)[-1].split("-")[0], match[2]
            self._text = f"downloading {name} ({size})"
        elif line.startswith("Collecting "):
            self._collected.add(re.split(r"[=<>!~\[ ;(]", line[len("Collecting ") :])[0])
        elif line.startswith("Installing collected packages: "):
            self._installing = line.strip().split(": ", 1)[1].split(", ")

    def line(self) -> str:
        seconds = int(time.monotonic() - self._begin)
        clock = f"install {seconds // 60}:{seconds % 60:02d}"
        if not self._installing:
            count = f"{self._num_downloaded} of {len(self._collected)}"
            return f"[{clock}] {count}: {self._text}"
        done, total = self._num_present() - self._num_before, len(self._installing)
        name = self._installing[min(max(done, 0), total - 1)]
        return f"[{clock}] {done} of {total}: unpacking {name}"

    def _num_present(self) -> int:
        return sum(1 for _ in self._folder.glob("*.dist-info"))


def main() -> int:
    python, *arguments = sys.argv[1:]
    purelib = subprocess.run([python, "-c", _PURELIB], check=True, capture_output=True, text=True)
    progress = Progress(Path(purelib.stdout.strip()))
    command = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    # A few of thousands of modules are imported; Python compiles those at their first import.
    command += ["--progress-bar", "off", "--no-compile", *arguments]
    lines: queue.Queue[str | None] = queue.Queue()
    everything: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        threading.Thread(target=_forward, args=(pip, lines), daemon=True).start()
        shown_at = time.monotonic()
        while True:
            try:
                line = lines.get(timeout=1.0)
                if line is None:
                    break
                everything.append(line)
                progress.read(line)
            except queue.Empty:
                pass
            if time.monotonic() - shown_at >= _EVERY_S:
                print(progress.line(), flush=True)
                shown_at = time.monotonic()
    if pip.returncode != 0:
        sys.stderr.write("".join(everything))
    return pip.returncode


def _forward(pip: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert pip.stdout is not None
    for line in pip.stdout:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    sys.exit(main())
