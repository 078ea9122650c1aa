"""Measures what makes the package hard or easy to live in, and prints a table.

python -m tools.house                 of this checkout
python -m tools.house OTHER_CHECKOUT  beside another one
"""

import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("flexjax", "masks", "mods")
GPU = "flexjax/backends/mosaic_gpu/"
CARD = re.compile(r"\bcard is (?:not )?None\b|\basked_for\(|\bmma_card\(|\.capability\b")
CARDS_OWN = ("/families/", "/machine/mma_cards.py", "backends/target.py", "backends/reference_gpu.py")
"""Files that may ask which card or family runs."""
PRAGMA = re.compile(r"\s+# (?:type|pyright): ignore.*")
GENERIC = re.compile(r"Inputs|Outputs|Scratch|Call|Plan|Rows|Visit|Tiles?")
"""Names that say so little that a second class of that name is another meaning."""


def sources(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(path, text) of each file of the wheel; masks and mods once, although flexjax/ links to them."""
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents if parent != root):
                yield file.relative_to(root).as_posix(), file.read_text()


def docstring_lines(tree: ast.AST) -> int:
    """Lines of the strings that stand alone as statements: docstrings, also those of fields and constants."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    alone = [n for body in bodies for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in alone if isinstance(n.value.value, str))


def takes_interpret(tree: ast.AST) -> int:
    """Functions with a parameter `interpret` or `simulated`."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    given = ([*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs] for n in functions)
    return sum(any(a.arg in ("interpret", "simulated") for a in arguments) for arguments in given)


def branches_on_interpret(tree: ast.AST) -> int:
    """Conditions that read `interpret` or `simulated`."""
    asks = lambda test: any(
        getattr(n, "attr", getattr(n, "id", None)) in ("interpret", "simulated") for n in ast.walk(test)
    )
    return sum(isinstance(n, ast.If | ast.IfExp | ast.While) and asks(n.test) for n in ast.walk(tree))


def measure(root: pathlib.Path) -> dict[str, float]:
    """The figures of the checkout at `root`, by what they say."""
    found: collections.Counter[str] = collections.Counter()
    folders: collections.Counter[str] = collections.Counter()
    classes: dict[str, list[str]] = collections.defaultdict(list)
    for path, text in sources(root):
        tree = ast.parse(text)
        folders[path.rpartition("/")[0]] += 1
        found["lines"] += text.count("\n")
        found["docstrings"] += docstring_lines(tree)
        found["long lines"] += sum(len(PRAGMA.sub("", line)) > 120 for line in text.splitlines())
        if path.startswith(GPU):
            found["takes"] += takes_interpret(tree)
            found["branches"] += branches_on_interpret(tree)
        if not any(own in path for own in CARDS_OWN):
            found["cards"] += sum(bool(CARD.search(line)) for line in text.splitlines())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and GENERIC.fullmatch(node.name):
                classes[node.name].append(path)
    return {
        "lines of Python in the wheel": found["lines"],
        "docstring share, %": round(100 * found["docstrings"] / found["lines"], 1),
        "lines past 120 columns": found["long lines"],
        "files flat in one folder, most": max(folders.values()),
        "GPU kernels: functions that take `interpret`": found["takes"],
        "GPU kernels: branches on it": found["branches"],
        "places that ask for a card or a family outside families/": found["cards"],
        "generic class names with several meanings": sum(len(paths) > 1 for paths in classes.values()),
    }


def main() -> None:
    """Prints the table, with a column for each checkout."""
    roots = [ROOT, *map(pathlib.Path, sys.argv[1:])]
    tables = [measure(root) for root in roots]
    for name in tables[0]:
        print(f"{name:60}", *(f"{table[name]:>8}" for table in tables))


if __name__ == "__main__":
    main()
