"""docs/files.md has every file of the package, and every file that docs/architecture.md names exists."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
FILES = (ROOT / "docs" / "files.md").read_text()
MAP = (ROOT / "docs" / "architecture.md").read_text()


def test_the_page_of_files_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("update_architecture", ROOT / "tools" / "update_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.page() == FILES, "run: python3 tools/update_architecture.py"


def test_every_file_has_a_sentence() -> None:
    rows = re.findall(r"^\| `([\w.]+\.py)` \| (.*) \|$", FILES, re.MULTILINE)
    assert len(rows) > 100
    assert not [name for name, sentence in rows if not sentence]


def test_every_file_and_folder_named_on_the_map_exists() -> None:
    named = re.findall(r"`((?:flexjax|tests|tools|docs|masks|mods|bench|lab)/[\w/.<>-]*)`", MAP)
    assert len(named) > 25
    for name in named:
        assert sorted(ROOT.glob(name.replace("<name>", "*"))), name


def test_the_map_is_read_on_two_screens() -> None:
    assert len(MAP.splitlines()) <= 100
