"""Turns docstrings into Markdown for the site: a griffe extension that mkdocs.yml names.

Docstrings are written for `help()`: aligned columns of arguments, indented examples, pictures. Markdown would join such lines into one
paragraph. Paragraph by paragraph, this file makes

    a table        of lines `name   text` or `name:  text`, with their indented continuations
    a code block   of indented lines, of a formula in the first line, and of `Example: call(...)`
    plain text     of the rest, with shapes and names with underscores as code, and with the signs that Markdown would read escaped

It does not parse sections such as `Args:`, because no docstring has them.
"""

import itertools
import re
from typing import Any

import griffe

ENTRY = re.compile(r"((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*|the rest):?\s{2,}(\S.*)")
NAMES = re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)+")
CODE = re.compile(r"(\"\w+\"|\[\w[\w ,.+*/:-]*\]|\b[\w.]*\w_\w[\w.]*\b(?:\([^()`]*\)|\[[^\[\]`]*\])?)")
"""Shapes, and names with an underscore together with the arguments of a call or an index."""


class Docstrings(griffe.Extension):
    """Replaces each docstring by its Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object: replaces its docstring, if it has one; those of modules stay."""
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = markdown(obj.docstring.value, "field" if obj.is_class else "argument")


def markdown(text: str, column: str = "argument") -> str:
    """The Markdown of a docstring; `column` heads the names in its tables.

    By paragraph: indented lines become a code block, adjacent ones one block; a first paragraph of one line without a
    final ".", ":" or "`" becomes Python code, as does the call after "Example: "; the rest becomes a table and text
    (`_paragraph`).
    """
    out: list[str] = []
    paragraphs = [
        list(lines) for blank, lines in itertools.groupby(text.split("\n"), lambda x: not x.strip()) if not blank
    ]
    for n, lines in enumerate(paragraphs):
        if all(line.startswith("    ") for line in lines):
            block = "\n".join(line[4:] for line in lines)
            if n and all(line.startswith("    ") for line in paragraphs[n - 1]):  # a blank line inside of one block
                out[-1] = out[-1].removesuffix("\n```") + f"\n\n{block}\n```"
            else:
                out.append(f"```{_language(block)}\n{block}\n```")
        elif n == 0 and len(lines) == 1 and not lines[0].rstrip().endswith((".", ":", "`")):
            out.append(f"```python\n{lines[0].replace('`', '')}\n```")
        elif len(lines) == 1 and lines[0].startswith("Example: "):
            out.append(f"Example:\n\n```python\n{lines[0].removeprefix('Example: ')}\n```")
        else:
            out.extend(_paragraph(lines, column))
    return "\n\n".join(out)


def _language(block: str) -> str:
    """The language by which a code block is highlighted: "text" for pictures, made of box characters or "#" and ".",
    else "python".
    """
    return "text" if re.search(r"[█░┌│]|^[ #.]+$", block, re.MULTILINE) else "python"


def _paragraph(lines: list[str], column: str) -> list[str]:
    """The table that `lines` begin with, if they do, and the text after it, each one string.

    A row is a line that matches ENTRY, or names alone above an indented line; indented lines after it belong to it. The
    table ends at the first other line; from there on everything is text.
    """
    rows: list[tuple[str, str]] = []
    taken = 0
    for n, line in enumerate(lines):
        entry = ENTRY.match(line)
        if entry:
            rows.append((entry.group(1), entry.group(2)))
        elif line.startswith(" ") and rows:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
        elif NAMES.fullmatch(line.strip()) and lines[n + 1 : n + 2] and lines[n + 1].startswith(" "):
            rows.append((line.strip(), ""))
        else:
            break
        taken = n + 1
    out = []
    if rows:
        cells = [f"| {_names(name)} | {_text(text).replace('|', chr(92) + '|')} |" for name, text in rows]
        out.append("\n".join([f"| {column} | |", "|---|---|", *cells]))
    if lines[taken:]:
        out.append(_text(" ".join(line.strip() for line in lines[taken:])))
    return out


def _names(names: str) -> str:
    """Names of arguments, separated by ", ", each as code; "the rest" as it is."""
    return names if names == "the rest" else ", ".join(f"`{name}`" for name in names.split(", "))


def _text(text: str) -> str:
    """`text` with shapes and names as code, pages of docs/ as links, and Markdown's signs escaped outside of both."""
    spans = re.split(r"(`[^`]*`|docs/\w+\.md)", text)
    spans[1::2] = (re.sub(r"^docs/((\w+)\.md)$", r"[\2](\1)", x) for x in spans[1::2])
    for n in range(0, len(spans), 2):
        pieces = CODE.split(spans[n])
        spans[n] = "".join(f"`{x}`" if k % 2 else re.sub(r"([*_\[\]<>#])", r"\\\1", x) for k, x in enumerate(pieces))
    return "".join(spans)
