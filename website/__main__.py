"""`python -m website`: builds the site; see `make site`.

What `python -m website.timeline` has written before is embedded; the packages of
`requirements/site.txt` do the rest, and neither PyTorch nor the library is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from website import figures, navigation, reference, timeline
from website.results import REPO
from website.stage import LISTING, SOURCE, Stage


def stage_pages(folder: Path, timelines: Path) -> None:
    """Writes all pages of the navigation.

    Args:
        folder: folder that MkDocs will read.
        timelines: folder with the pages of `website.timeline`.
    """
    stage = Stage(REPO, folder, navigation.copied())
    stage.copy_all()
    stage.write(navigation.FIGURES, figures.page())
    stage.write(navigation.TIMELINE, timeline.embedding(timelines, folder))
    stage.write("reference/index.md", reference.index())
    for page in reference.PAGES:
        stage.write(f"reference/{page.name}.md", reference.markdown(page))
    (folder / "style.css").write_text((REPO / "website" / "style.css").read_text())


def configuration(pages: Path, site: Path, path: Path) -> None:
    """Writes what `mkdocs.yml` of this folder leaves open; JSON is YAML."""
    content = {
        "INHERIT": str(REPO / "website" / "mkdocs.yml"),
        "docs_dir": str(pages),
        "site_dir": str(site),
        "nav": navigation.navigation(),
        "plugins": {"mkdocstrings": {"handlers": {"python": {"paths": [str(REPO / "python")]}}}},
        # Sources that pages link to.
        "not_in_nav": f"*{SOURCE}\n{LISTING}\n",
    }
    path.write_text(json.dumps(content, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("--out", type=Path, default=REPO / "build" / "site", help="folder to write")
    out = parser.parse_args().out.resolve()
    stage_pages(out / "pages", out / "timelines")
    configuration(out / "pages", out / "html", out / "mkdocs.json.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    # The release of MkDocs is a deliberate choice: docs/design/site.md.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command += ["-f", str(out / "mkdocs.json.yml")]
    status = subprocess.run(command, env=environment).returncode
    if status == 0:
        print(f"the site is in {out / 'html'}; open index.html, or serve the folder")
    return status


if __name__ == "__main__":
    sys.exit(main())
