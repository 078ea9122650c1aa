"""The thumbnails of masks and score mods, and the pages that tools/docs_gallery.py writes."""

import importlib.util
import pathlib
import re
import sys
import types

import pytest

from flexjax import masks, mods

ROOT = pathlib.Path(__file__).parents[2]
PAGE, DARK_PAGE = "#ffffff", "#1e2129"
"""The backgrounds of the site's two schemes."""


def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("docs_gallery", ROOT / "tools" / "docs_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["docs_gallery"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GALLERY = tool()
SHOWN = [shown for sections in (GALLERY.MASKS, GALLERY.MODS) for lines in sections.values() for shown in lines]


def test_each_mask_and_mod_is_shown_once() -> None:
    for module in (masks, mods):
        public = [name for name, x in vars(module).items() if callable(x) and not name.startswith("_")]
        assert sorted(public) == sorted(shown.name for shown in SHOWN if shown.module is module)


def test_pages_are_what_the_tool_writes() -> None:
    for page, text in GALLERY.pages().items():
        assert (ROOT / "docs" / page).read_text() == text, "run tools/docs_gallery.py"


@pytest.mark.parametrize("shown", SHOWN, ids=[shown.name for shown in SHOWN])
def test_thumbnails_are_what_the_tool_draws(shown) -> None:
    image = (ROOT / "docs" / "images" / "thumbnails" / f"{shown.name}.svg").read_text()
    width, columns = map(int, re.findall(r'width="(\d+)" .*viewBox="0 0 (\d+) ', image)[0])
    assert width % columns == 0
    assert width // columns >= 2, "a cell is smaller than two pixels"
    if shown.kind == "mask":  # the last bit of a score decides its level, and may differ from one jax to another
        assert image == GALLERY.svg(GALLERY.cells(shown)), "run tools/docs_gallery.py"


@pytest.mark.parametrize("page", [PAGE, DARK_PAGE])
def test_colours_are_seen_on_both_pages(page: str) -> None:
    assert contrast(GALLERY.VISIBLE, page) > 3  # WCAG 2.2, 1.4.11
    assert contrast(GALLERY.VISIBLE, mixed(GALLERY.HIDDEN, page, 0.16)) > 2.5


def channels(colour: str) -> list[float]:
    return [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]


def mixed(colour: str, page: str, opacity: float) -> str:
    pairs = zip(channels(colour), channels(page), strict=True)
    return "#" + "".join(f"{round(255 * (opacity * x + (1 - opacity) * y)):02x}" for x, y in pairs)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    linear = lambda x: x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
    light, dark = sorted(
        (sum(w * linear(x) for w, x in zip((0.2126, 0.7152, 0.0722), channels(c), strict=True)) for c in (one, other)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)
