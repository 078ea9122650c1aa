"""Every python block of the pages in docs/ runs as it is pasted, in the order of its page."""

import importlib.util
import pathlib
import re

import pytest

from tests.marks import some_slow

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
EVERYDAY = [page for page in PAGES if page != "pictures.md"]
"""Pages whose blocks run by default. They take up to four seconds each. Pictures need matplotlib, which the tests alone do not; .ci/run
runs them on Python 3.12."""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def needs(block: str) -> str | None:
    """The library that a block says it needs, in a first line `# needs flax`."""
    found = re.match(r"# needs (\w+)\n", block)
    return found.group(1) if found else None


@pytest.mark.filterwarnings("ignore::flexjax.FallbackWarning")
@pytest.mark.parametrize("page", some_slow([page for page in PAGES if blocks(page)], EVERYDAY))
def test_blocks_run(page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some blocks save pictures
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(tmp_path))  # and one stores tiles
    names: dict[str, object] = {}
    for block in blocks(page):
        library = needs(block)
        if library is not None and importlib.util.find_spec(library) is None:
            continue
        exec(compile(block, page, "exec"), names)


def test_explain_prints_what_its_page_shows() -> None:
    page = (DOCS / "explain.md").read_text()
    names: dict[str, str] = {}
    exec(compile(blocks("explain.md")[0], "explain.md", "exec"), names)
    printed = iter(names["text"].splitlines())
    for line in re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0].splitlines():
        assert line.strip() == "..." or any(line == other for other in printed), line


def test_the_navigation_names_every_page() -> None:
    listed = re.findall(r": (\w+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_lead_somewhere(page: str) -> None:
    """Pages and images of the site; mkdocs checks anchors when it builds."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", (DOCS / page).read_text()):
        if "://" not in target:
            assert (DOCS / target).is_file(), target


def test_the_page_of_examples_names_every_script() -> None:
    scripts = {path.name for path in (DOCS.parent / "examples").glob("*.py") if "def main(" in path.read_text()}
    assert scripts == set(re.findall(r"^\| `(\w+\.py)` \|", (DOCS / "examples.md").read_text(), re.MULTILINE))
