"""The pages of the reference: every public name has an entry that leads to it, and docstrings become readable Markdown."""

import importlib
import importlib.util
import pathlib
import re
import types

import pytest

import flexjax

ROOT = pathlib.Path(__file__).parents[2]
WITHOUT_ENTRY = {"masks", "mods", "weights", "nn", "paged", "visualize"}


def entries(page: str) -> dict[str, str]:
    """Last part of the name -> dotted name, of the entries of a page."""
    dotted = re.findall(r"^::: (\S+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name.rpartition(".")[2]: name for name in dotted}


def named(dotted: str) -> object:
    """The object with this name, the last part of which is looked up in the module that the rest names.

    A function may hide the module of its name in the package, so the module is imported by its whole name.
    """
    home, _, last = dotted.rpartition(".")
    return getattr(importlib.import_module(home), last)


@pytest.mark.parametrize(("page", "module"), [("masks.md", flexjax.masks), ("mods.md", flexjax.mods)])
def test_each_mask_and_mod_has_an_entry(page: str, module: types.ModuleType) -> None:
    public = {name: x for name, x in vars(module).items() if callable(x) and not name.startswith("_")}
    found = entries(page)
    assert sorted(found) == sorted(public)
    for name, dotted in found.items():
        assert named(dotted) is public[name], dotted


def test_each_public_function_has_an_entry() -> None:
    found = entries("api.md")
    assert set(flexjax.__all__) - WITHOUT_ENTRY <= set(found)
    for name in set(flexjax.__all__) - WITHOUT_ENTRY:
        assert named(found[name]) is getattr(flexjax, name), name


def test_each_function_of_paged_has_an_entry() -> None:
    found = entries("api.md")
    for name in flexjax.paged.__all__:
        assert named(found[name]) is getattr(flexjax.paged, name), name


@pytest.fixture(scope="module")
def to_markdown() -> types.ModuleType:
    pytest.importorskip("griffe", reason="griffe makes the pages of the reference: pip install '.[docs]'")
    spec = importlib.util.spec_from_file_location("docs_docstrings", ROOT / "tools" / "docs_docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        (
            "Says a * b.\n\nlse     the [B, T, N] | of\n        a row\nkey, value  `[B]` of create_block_mask(x_y)\nAnd more.",
            "Says a \\* b.\n\n| argument | |\n|---|---|\n| `lse` | the `[B, T, N]` \\| of a row |\n"
            "| `key`, `value` | `[B]` of `create_block_mask(x_y)` |\n\nAnd more.",
        ),
        (
            "mask = q_idx >= n\n\nn:  int.\n\nOne sentence.  Another.\n\n    # . .\n    # # .",
            "```python\nmask = q_idx >= n\n```\n\n| argument | |\n|---|---|\n| `n` | int. |\n\nOne sentence.  Another.\n\n"
            "```text\n# . .\n# # .\n```",
        ),
        (
            "Runs.\n\nquery, key\n     as in f\n\n    x = 1\n\n    y = 2\n\nExample: f(1)",
            "Runs.\n\n| argument | |\n|---|---|\n| `query`, `key` | as in f |\n\n```python\nx = 1\n\ny = 2\n```\n\n"
            "Example:\n\n```python\nf(1)\n```",
        ),
        ("See docs/many_devices.md, or x_y.", "See [many_devices](many_devices.md), or `x_y`."),
    ],
)
def test_docstrings_become_markdown(to_markdown: types.ModuleType, docstring: str, markdown: str) -> None:
    assert to_markdown.markdown(docstring) == markdown
