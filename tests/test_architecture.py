"""docs/architecture.md: every file of the package is in its tables, and every file that it names exists."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_the_tables_of_files_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("update_architecture", ROOT / "tools" / "update_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.updated(TEXT) == TEXT, "run: python3 tools/update_architecture.py"


def test_every_folder_of_the_package_has_a_table() -> None:
    tables = re.findall(r"^<!-- files: (\S+) -->$", TEXT, re.MULTILINE)
    listed = set(tables)
    assert len(tables) == len(listed), "a folder has two tables"
    there = {path.parent for path in (ROOT / "flexjax").rglob("*.py") if path.read_text().strip()}
    folders = {str(path.relative_to(ROOT)) for path in there}
    assert listed == folders - {"flexjax/masks", "flexjax/mods"}


def test_every_file_and_folder_named_in_the_text_exists() -> None:
    named = re.findall(r"`((?:flexjax|tests|tools|docs|masks|mods)/[\w/.<>-]*)`", TEXT)
    assert len(named) > 40
    for name in named:
        found = sorted(ROOT.glob(name.replace("<name>", "*")))
        assert found, name


def test_every_file_has_a_sentence() -> None:
    rows = re.findall(r"^\| `([\w.]+\.py)` \| (.*) \|$", TEXT, re.MULTILINE)
    assert len(rows) > 100
    assert not [name for name, sentence in rows if not sentence]
