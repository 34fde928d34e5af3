"""Builds the documentation as a site of README.md, launch/docs, the pages of recipes, those of the battery and a
reference of the public names (api_pages.py).

    scripts/docs [FOLDER]     default: .cache/site; the site is FOLDER/html

The groups of pages are those of the README's table "Where to read on". A link to a page leads to the page in the site,
one to another file of the repository is a text alone, and a page's first mention of a public name leads to the
reference. Zensical builds the site, with warnings as errors: a link that leads nowhere fails. The site loads nothing
from the internet; for its search any server of files does:

    python -m http.server -d .cache/site/html
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from posixpath import relpath
from typing import Any, Final

import yaml

from scripts.api_pages import MODULES, api_pages, page_of, with_api_links

ROOT: Final = Path(__file__).parents[1]
_START: Final = "README.md"
_TABLE: Final = "## Where to read on"
_REFERENCE: Final = "API reference"
_LINK: Final = re.compile(r"\[([^\]\n]*(?:\[[^\]\n]*\][^\]\n]*)*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CONFIG: Final[dict[str, Any]] = {
    "site_name": "flexmarl",
    "docs_dir": "pages",
    "site_dir": "html",
    "use_directory_urls": False,  # pages of a folder open without a server
    "theme": {
        "font": False,  # its fonts come from the internet
        "features": ["navigation.sections", "navigation.top", "search.highlight", "content.code.copy"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
        ],
    },
    "markdown_extensions": [
        "tables",
        "admonition",
        "attr_list",
        "pymdownx.superfences",
        {"toc": {"permalink": True}},
    ],
}


def site_pages() -> dict[str, str]:
    """The page in the site for each file, both by their paths: ``launch/docs/modes.md`` is ``modes.md``."""
    pages = {_START: "index.md"}
    for file in sorted((ROOT / "launch" / "docs").glob("*.md")):
        pages[f"launch/docs/{file.name}"] = file.name
    for file in sorted((ROOT / "launch" / "recipes").glob("*/README.md")):
        pages[str(file.relative_to(ROOT))] = f"recipes/{file.parent.name.replace('_', '-')}.md"
    pages["scripts/gpu/README.md"] = "gpu-battery.md"
    pages["scripts/gpu/RESULTS.md"] = "gpu-results.md"
    return pages


def site_pictures() -> dict[str, str]:
    """The place in the site of each picture, both by their paths."""
    files = sorted((ROOT / "launch" / "docs" / "pictures").glob("*.png"))
    return {str(file.relative_to(ROOT)): f"pictures/{file.name}" for file in files}


def with_site_links(text: str, file: str, pages: Mapping[str, str]) -> str:
    """``text`` of ``file`` with the links of its page in the site. ``pages``: with the pictures. Blocks of code stay as
    they are."""
    folder = PurePosixPath(file).parent

    def replace(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target:
            return match[0]
        path = relpath(folder / target, ".")
        if path not in pages:
            return words
        return f"[{words}]({relpath(pages[path], PurePosixPath(pages[file]).parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def navigation(readme: str, pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """The groups of pages with their titles, by the table of ``readme``; pages outside of it are in a last group. The
    reference is the end of the last group of the table."""
    groups: dict[str, dict[str, str]] = {}
    rows = [
        line.split("|")[1:-1] for line in readme.partition(_TABLE)[2].splitlines() if line.startswith("|")
    ]
    group = ""
    for first, page_cell, subject in rows[2:]:
        group = first.strip(" *") or group
        titles = groups.setdefault(group, {})
        links = [(words, target) for words, target, _ in _LINK.findall(page_cell)]
        if not links:  # "Add ...": the subjects are pages, or parts of others
            begin = page_cell.strip(" .")
            links = [(f"{begin} {words}", page) for words, page, part in _LINK.findall(subject) if not part]
        for title, file in links:
            titles.setdefault(pages[file or _START], title)
    groups[next(iter(groups))]["index.md"] = "flexmarl"
    listed = {page for titles in groups.values() for page in titles}
    rest = {page: PurePosixPath(page).stem for page in pages.values() if page not in listed}
    entries: dict[str, list[Any]] = {
        name.capitalize(): [{title: page} for page, title in titles.items()]
        for name, titles in {**groups, "recipes and results": rest}.items()
    }
    entries[group.capitalize()].append({_REFERENCE: [{module: page_of(module)} for module in MODULES]})
    return [{name: titles} for name, titles in entries.items()]


def write_sources(folder: Path) -> None:
    """The pages with the links of the site, and its config, in ``folder``."""
    pages, pictures = site_pages(), site_pictures()
    places = pages | pictures
    texts = {
        page: with_api_links(with_site_links((ROOT / file).read_text(), file, places), page)
        for file, page in pages.items()
    }
    for file, picture in pictures.items():
        target = folder / "pages" / picture
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target)
    for page, text in {**texts, **api_pages()}.items():
        target = folder / "pages" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    config = _CONFIG | {"nav": navigation((ROOT / _START).read_text(), pages)}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def build(folder: Path) -> int:
    """Builds the site in ``folder``, which is emptied before. Returns the status of zensical."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_sources(folder)
    command = [sys.executable, "-P", "-m", "zensical", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".cache" / "site"
    if status := build(folder):
        return status
    print(f"{folder / 'html' / 'index.html'}")
    return 0
