"""Pages of the site and their order; pages of the repository keep their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from website import reference
from website.results import REPO

#: Pages that the generators of this folder write, by path in the site.
TIMELINE = "docs/timeline.md"
FIGURES = "benchmarks/results/figures.md"

_SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "docs/README.md", "docs/quickstart.md", "docs/installing.md",
              "docs/gpus.md", "docs/auto.md", "docs/notebooks.md",
              "docs/gallery.md", "docs/finetune_gptj.md", "docs/from_others.md",
              "docs/migration.md", "docs/trainer.md",
              "examples/README.md"),
    "Use": ("docs/running.md", "docs/running_reference.md", "docs/losses.md", TIMELINE,
            "docs/planning.md", "docs/verifying.md", "docs/tensor_parallelism.md",
            "docs/context_parallel.md", "docs/memory.md", "docs/quantized.md",
            "docs/checkpoints.md", "docs/going_on.md", "docs/orchestrators.md",
            "docs/slurm.md", "docs/kubernetes.md", "docs/aws.md", "docs/ray.md",
            "docs/security.md", "docs/debian.md"),
    "When something is wrong": ("docs/troubleshooting.md", "docs/limits.md", "docs/models.md",
                                "docs/removed.md"),
}  # fmt: skip


def navigation() -> list[dict[str, Any]]:
    """The value of `nav` of MkDocs."""
    sections: dict[str, list[Any]] = {name: list(pages) for name, pages in _SECTIONS.items()}
    sections["Reference"] = ["reference/index.md"]
    sections["Reference"] += [f"reference/{page.name}.md" for page in reference.PAGES]
    results = [{_short_title(page): page} for page in _all("benchmarks/results")]
    sections["Figures"] = [FIGURES, "benchmarks/README.md", *results]
    sections["Inside"] = ["ARCHITECTURE.md", *_all("docs/design")]
    sections["Project"] = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    return [{name: pages} for name, pages in sections.items()]


def pages() -> list[str]:
    """Returns all pages of the navigation, those that are generated as well."""
    entries = [entry for section in navigation() for own in section.values() for entry in own]
    return [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries]


def copied() -> list[str]:
    """Pages that are in the repository."""
    made = {TIMELINE, FIGURES}
    return [page for page in pages() if page not in made and not page.startswith("reference/")]


def _all(folder: str) -> list[str]:
    return sorted(path.relative_to(REPO).as_posix() for path in Path(REPO, folder).glob("*.md"))


def _short_title(page: str) -> str:
    """The heading of a page of results without its machine, which the file's name has."""
    heading = Path(REPO, page).read_text().splitlines()[0].lstrip("# ").replace("`", "")
    machine = "Xeon" if "xeon" in page else "EPYC"
    return f"{re.split(r',| [(]', heading)[0]}, {machine}"
