"""Pages of the repository as MkDocs takes them.

They keep their places, so that links between them hold. What changes: marks of blocks
(`tests/docs/pages.py`) become titles, which say that tests run them, and files that pages link to
become pages with their source.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_MARKED = re.compile(r"^<!--\s*(.*?)\s*-->[ ]*\n```(\w+)[ ]*\n", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".toml": "toml"}
#: How names of pages with sources end; they are in no menu.
SOURCE = ".source.md"
LISTING = "files.md"
_PICTURES = {".svg", ".png"}


class Stage:
    """Writes pages into a folder.

    Args:
        repo: root of the repository.
        folder: folder for the pages; its contents are removed.
        pages: paths below `repo`.
    """

    def __init__(self, repo: Path, folder: Path, pages: list[str]) -> None:
        self._repo, self._folder = repo, folder
        self._pages = set(pages)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def copy_all(self) -> None:
        """Copies the pages and what they link to.

        Raises:
            ValueError: a link leads nowhere; names page and link.
        """
        for page in sorted(self._pages):
            self.write(page, self.links_of(page, titled((self._repo / page).read_text())))

    def write(self, page: str, text: str) -> None:
        """Adds a page by its path in the site."""
        path = self._folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def links_of(self, page: str, text: str) -> str:
        """The text of a page with links that hold in the site; blocks of code stay as they are."""

        def replaced(match: re.Match[str]) -> str:
            return match[1] + self._target(page, match[2]) + match[3]

        result, end = [], 0
        for fence in _FENCE.finditer(text):
            result += [_LINK.sub(replaced, text[end : fence.start()]), fence.group()]
            end = fence.end()
        return "".join([*result, _LINK.sub(replaced, text[end:])])

    def _target(self, page: str, link: str) -> str:
        name, _, anchor = link.partition("#")
        if "://" in link or not name:
            return link
        path = (self._repo / page).parent / name
        target = os.path.relpath(path.resolve(), self._repo)
        if target in self._pages:
            return link
        if not path.exists() or target.startswith(".."):
            raise ValueError(f"{page}: the link {link} leads to nothing in the repository")
        if path.suffix in _PICTURES:
            (self._folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._folder / target)
            return link
        own = self._source_page(path, target)
        return os.path.relpath(self._folder / own, (self._folder / page).parent)

    def _source_page(self, path: Path, target: str) -> str:
        """A page that shows a file, or what is in a folder."""
        if path.is_dir():
            own, text = f"{target}/{LISTING}", _listing(path, target)
        else:
            own = f"{target}{SOURCE}"
            language = _LANGUAGES.get(path.suffix, "text")
            text = f"# {target}\n\n`````{language}\n{path.read_text()}`````\n"
        self.write(own, text)
        return own


def titled(text: str) -> str:
    """Marks of blocks as titles of them; other comments stay."""

    def with_title(match: re.Match[str]) -> str:
        title = _title(match[1])
        return f'```{match[2]} title="{title}"\n' if title else f"```{match[2]}\n"

    return _MARKED.sub(with_title, text)


def _title(mark: str) -> str:
    """Makes a title for readers from a mark, e.g. ``train.py, run by tests on 2 processes``."""
    marks = dict(part.strip().partition(":")[::2] for part in mark.split(";"))
    words = []
    if file := marks.get("file", "").strip():
        words.append(file)
    if run := marks.get("run", "").strip():
        counts = " and ".join(count.strip() for count in run.split(","))
        words.append(f"run by tests on {counts} process{'es' if counts != '1' else ''}")
    if "prints" in marks:
        words.append("prints")
    return ", ".join(words)


def _listing(path: Path, target: str) -> str:
    lines = [f"# {target}", ""]
    for file in sorted(path.iterdir()):
        if file.suffix == ".py" and not file.name.startswith("_"):
            first = file.read_text().lstrip('"').splitlines()[0].rstrip('"')
            lines.append(f"- `{file.name}`: {first}")
    return "\n".join([*lines, ""])
