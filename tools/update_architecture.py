"""Writes the tables of files in docs/architecture.md: each file with the first sentence of its docstring.

    python3 tools/update_architecture.py

A table stands between `<!-- files: FOLDER -->` and `<!-- end -->`. tests/test_architecture.py fails if a table is out of date.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"(?<=<!-- files: )(\S+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def first_sentence(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring, as one cell of a Markdown table; empty without a docstring. It ends with
    the first paragraph at the latest.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]]{2}\.)\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def table(folder: str) -> str:
    """The Markdown table of a folder's files, without those of its subfolders and without empty files.

    folder   its path from the root of the repository
    """
    files = [path for path in sorted((ROOT / folder).glob("*.py")) if path.read_text().strip()]
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
    return "\n".join(["| file | what it is for |", "|---|---|", *rows]) + "\n"


def updated(text: str) -> str:
    """The text of docs/architecture.md with every table of files written anew."""
    return TABLE.sub(lambda found: found[1] + found[2] + table(found[1]), text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
