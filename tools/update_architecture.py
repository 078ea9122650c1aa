"""Writes docs/files.md: what each room imports, and each file with the first sentence of its docstring.

    python3 tools/update_architecture.py

tests/test_architecture.py fails if the page is out of date.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Files

Made by `python3 tools/update_architecture.py` from the docstrings and imports of the files; [architecture.md](architecture.md) is the
page to read first.

## What each room imports

"""


def first_sentence(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring, as one cell of a Markdown table; empty without a docstring. It ends
    with the first paragraph at the latest.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]]{2}\.)\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def folders() -> list[pathlib.Path]:
    """The folders of the package that have files of their own, top first; masks/ and mods/ are pages of their own."""
    there = {path.parent for path in (ROOT / "flexjax").rglob("*.py") if path.read_text().strip()}
    return sorted(there - {ROOT / "flexjax" / "masks", ROOT / "flexjax" / "mods"})


def imported_rooms(path: pathlib.Path) -> set[str]:
    """The rooms of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" if node.module == "flexjax" else node.module for a in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("flexjax.")}
    return found


def rooms() -> str:
    """The table of the rooms directly in flexjax/."""
    rows = []
    for folder in (f for f in folders() if f.parent == ROOT / "flexjax"):
        others = set().union(*map(imported_rooms, folder.rglob("*.py"))) - {folder.name}
        rows.append(f"| `{folder.name}/` | {first_sentence(folder / '__init__.py')} | {', '.join(sorted(others))} |")
    return "\n".join(["| room | owns | imports |", "|---|---|---|", *rows]) + "\n"


def table(folder: pathlib.Path) -> str:
    """The section of a folder's files, without those of its subfolders and without empty files."""
    files = [path for path in sorted(folder.glob("*.py")) if path.read_text().strip() and path.name != "__init__.py"]
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
    name = folder.relative_to(ROOT).as_posix()
    says = first_sentence(folder / "__init__.py")
    return "\n".join([f"## `{name}/`", "", says, "", "| file | what it is for |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join([rooms(), *map(table, folders())])


if __name__ == "__main__":
    PAGE.write_text(page())
