"""Every python block of the pages in docs/ runs as it is pasted, in the order of its page."""

import importlib.util
import pathlib
import re
import textwrap
import warnings

import pytest

from flexjax.backends.mosaic_gpu.support import OLDEST_JAX
from tests.marks import some_slow

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
EVERYDAY = [page for page in PAGES if page != "pictures.md"]
"""Pages whose blocks run by default. They take up to four seconds each. Pictures need matplotlib, which the tests alone do not; .ci/run
runs them on Python 3.12."""


def blocks(page: str) -> list[str]:
    # those in tabs are indented
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


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
        with warnings.catch_warnings():
            if library is not None:
                warnings.simplefilter("ignore")  # those of the library, when it is imported
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


def test_the_page_of_versions_names_the_bounds() -> None:
    page = (DOCS / "versions.md").read_text()
    (oldest,) = re.findall(r'"jax>=([\d.]+)"', (DOCS.parent / "pyproject.toml").read_text())
    assert f"| {oldest} |" in page
    assert f"GPU kernels need jax {'.'.join(map(str, OLDEST_JAX[:2]))} or later" in page


def test_the_site_has_the_addresses_of_where_it_is_published() -> None:
    """mkdocs.yml reads what the workflow sets, and the link to the repository is no component that asks GitHub for stars."""
    read = dict(re.findall(r'^(\w+_url): !ENV \[(\w+), ""\]$', (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    workflow = (DOCS.parent / ".github/workflows/pages.yml").read_text()
    written = dict(re.findall(r"^ +([A-Z]+_URL): (.*)$", workflow, re.MULTILINE))
    assert read == {"site_url": "SITE_URL", "repo_url": "REPO_URL"}
    assert written == {
        "REPO_URL": "${{ github.server_url }}/${{ github.repository }}",
        "SITE_URL": "${{ steps.pages.outputs.base_url }}",
    }
    assert "data-md-component" not in (DOCS.parent / "tools/site/partials/source.html").read_text()


def test_the_search_splits_names() -> None:
    (separator,) = re.findall(r"^ +separator: '(.*)'$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    for text, words in {
        "masks.sliding_window(128)": ["masks", "sliding", "window", "128"],
        "`q_idx - kv_idx`": ["q", "idx", "kv", "idx"],
        "BlockMask 0.11": ["Block", "Mask", "0.11"],
    }.items():
        assert [word for word in re.split(separator, text) if word] == words


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_lead_somewhere(page: str) -> None:
    """Pages and images of the site; mkdocs checks anchors when it builds."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", (DOCS / page).read_text()):
        if "://" not in target:
            assert (DOCS / target).is_file(), target


def test_the_page_of_examples_shows_every_script_and_a_picture() -> None:
    scripts = {path.name for path in (DOCS.parent / "examples").glob("*.py") if "def main(" in path.read_text()}
    page = (DOCS / "examples.md").read_text()
    assert scripts == set(re.findall(r"^\| \[`(\w+\.py)`\]\(#\w+py\) \|", page, re.MULTILINE))
    sections = dict(re.findall(r"^## (\S+)\n\n(!.*\n)", page, re.MULTILINE))
    assert scripts == set(sections) == set(re.findall(r'--8<-- "(\S+)"', page))
    for script, picture in sections.items():
        assert re.search(rf"\]\(images/.*\b{script.removesuffix('.py')}\.(png|svg)\)$", picture), script
