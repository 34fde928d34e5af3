"""The site of the documentation: its links, its groups, and that it is built without a warning."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scripts.api_pages import MODULES as API_MODULES
from scripts.api_pages import page_of
from scripts.docs_site import ROOT, build, navigation, site_pages, with_site_links

from ..patience import PATIENCE_S

PAGES = site_pages()
MODULES = ROOT / ".cache" / "browser"
CHROMIUM = shutil.which("chromium") or ""
NODE = shutil.which("node") or ""
FOLDERS = ("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
"""Variables that name the folders in which Chromium leaves files."""


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    assert build(folder) == 0
    return folder / "html"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("README.md", "[Modes](launch/docs/modes.md)", "[Modes](modes.md)"),
        ("launch/docs/modes.md", "[r](../../README.md#two-commands)", "[r](index.md#two-commands)"),
        ("launch/docs/gpus.md", "[`rank_bytes`](../../actors/trainer/rank_bytes.py)", "`rank_bytes`"),
        ("launch/docs/workflows.md", "[c](../recipes/coding_harness/README.md)", "[c](recipes/coding-harness.md)"),
        ("launch/recipes/countdown/README.md", "[m](../../docs/modes.md)", "[m](../modes.md)"),
        ("launch/docs/modes.md", "[a](https://a.b/c) [b](#here)", "[a](https://a.b/c) [b](#here)"),
        ("launch/docs/modes.md", "```\n[r](../../README.md)\n```", "```\n[r](../../README.md)\n```"),
    ],
)  # fmt: skip
def test_links_lead_to_the_pages_of_the_site(file: str, text: str, expected: str) -> None:
    assert with_site_links(text, file, PAGES) == expected


def test_the_groups_are_those_of_the_readme_and_each_page_is_in_one() -> None:
    groups = [next(iter(group.items())) for group in navigation((ROOT / "README.md").read_text(), PAGES)]
    names = [name for name, _ in groups]
    assert names == ["Start", "Write a workflow", "Run it", "Extend it", "Recipes and results"]
    extend = dict(groups)["Extend it"]
    reference = extend.pop()
    assert reference == {"API reference": [{module: page_of(module)} for module in API_MODULES]}
    listed = [page for _, entries in groups for entry in entries for page in entry.values()]
    assert sorted(listed) == sorted(PAGES.values())
    assert {"Add a sink": "add-a-sink.md"} in extend


def test_it_is_built_without_a_warning_and_loads_nothing_from_elsewhere(html: Path) -> None:
    for page in [*PAGES.values(), *map(page_of, API_MODULES)]:
        text = (html / page).with_suffix(".html").read_text()
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"?([^\"\s>]+)|<link[^>]*href=\"?([^\"\s>]+)", text
        )
        assert loaded and not [link for link in loaded if "//" in "".join(link)], page
        shown = re.findall(r"<img[^>]*src=\"?([^\"\s>]+)", text)
        assert all((html / page).parent.joinpath(picture).is_file() for picture in shown), page
    _check_search(html)
    assert 'href="api/core.html#ActorSystem"' in (html / "runtime.html").read_text()
    assert 'id="ActorSystem.spawn"' in (html / "api" / "core.html").read_text()


def _check_search(html: Path) -> None:
    """The index that the search reads is in the folder, has words of pages and of the reference, and its entries lead
    to parts of pages that exist."""
    entries = json.loads((html / "search.json").read_text())["items"]
    texts = " ".join(entry["text"] for entry in entries)
    assert "max_failed_share" in texts and "Deadlock" in texts
    for place in {entry["location"] for entry in entries}:
        page, _, part = place.partition("#")
        assert not part or f'id="{part}"' in (html / page).read_text(), place
    [worker] = (html / "assets" / "javascripts" / "workers").glob("search.*.js")
    assert worker.stat().st_size > 0


@pytest.mark.skipif(
    not (CHROMIUM and NODE and (MODULES / "node_modules" / "playwright-core").is_dir()),
    reason="Chromium, node or .cache/browser are missing: CI=true .ci/run installs them",
)
@pytest.mark.parametrize("words", ["max_failed_share", "Deadlock"])
def test_its_search_works_without_the_internet(html: Path, words: str) -> None:
    script = Path(__file__).with_name("site_search.mjs")
    with served(html) as address, TemporaryDirectory(ignore_cleanup_errors=True) as home:
        done = subprocess.run(
            [NODE, script, MODULES, address, words],
            env={**os.environ, "FLEXMARL_CHROMIUM": CHROMIUM, **dict.fromkeys(FOLDERS, home)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr


class QuietHandler(SimpleHTTPRequestHandler):
    """Logs no request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Writes nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
