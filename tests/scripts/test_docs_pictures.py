"""The pictures of the documentation: small, shown on a page, and taken from the run of the tutorial."""

import shutil
import struct
from pathlib import Path

import pytest

from scripts.docs_pictures import PANELS, PICTURES, ROOT, take, tutorial

MOST_BYTES = 150_000


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    begin = picture.read_bytes()[:24]
    assert begin.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", begin[16:])
    return width, height


def test_each_picture_is_small_and_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PICTURES.parent.glob("*.md"))
    assert sorted(path.name for path in PICTURES.iterdir()) == sorted(f"{panel}.png" for panel in PANELS)
    for panel, size in PANELS.items():
        picture = PICTURES / f"{panel}.png"
        assert size_of(picture) == size and picture.stat().st_size < MOST_BYTES
        assert f"](pictures/{panel}.png)" in pages


def test_the_run_is_that_of_the_tutorial() -> None:
    (begin, training), files = tutorial((ROOT / "launch" / "docs" / "tutorial.md").read_text())
    assert begin == ["new", "cup"] and training == ["train", "cup", "--name", "first"]
    assert sorted(files) == ["cup/config.yaml", "cup/workflow.py"]
    assert "async def workflow" in files["cup/workflow.py"]


def test_chromium_takes_the_part_of_a_page_that_its_address_names(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium here")
    page = tmp_path / "report.html"
    page.write_text(
        "<body style='margin:0'><script>document.body.style.background = location.hash.slice(1)</script>"
    )
    take(page, tmp_path / "pictures", chromium, {"red": (600, 300), "blue": (600, 400)})
    red, blue = (tmp_path / "pictures" / f"{name}.png" for name in ("red", "blue"))
    assert size_of(red) == (600, 300) and size_of(blue) == (600, 400)
    assert red.read_bytes() != blue.read_bytes()
