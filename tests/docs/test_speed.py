"""docs/speed.md and the table of README.md are what tools/docs_speed.py writes, and their captions name no number of their own."""

import dataclasses
import pathlib
import re

import pytest

from tools import docs_speed

TABLES = [table for tables in docs_speed.PARTS.values() for table in tables]
STALE = re.compile(r"since (?:this|that) (?:table|run)|an? (?:earlier|later) run|was made")


def test_the_page_is_what_the_tool_writes() -> None:
    assert docs_speed.PAGE.read_text() == docs_speed.page(), "run python3 tools/docs_speed.py"


def test_the_tables_in_other_pages_are_what_the_tool_writes() -> None:
    readme = docs_speed.README.read_text()
    assert readme == docs_speed.with_table(readme, docs_speed.in_readme()), "run python3 tools/docs_speed.py"
    clients = docs_speed.CLIENTS.read_text()
    assert clients == docs_speed.with_table(clients, docs_speed.in_clients()), "run python3 tools/docs_speed.py"
    assert 6 <= len(docs_speed.README_ROWS) <= 8


def test_the_readme_has_the_weakest_ratio_of_the_sweep() -> None:
    """Found here without the tool's reading of cells: the least first number of the column "worst"."""
    _, rows = docs_speed.SWEEP.read()
    column = rows[0].index("worst")
    worst = min((row[column] for row in rows[2:]), key=lambda cell: float(cell.split(",")[0]))
    assert f"is {worst.split(',')[0]} (" in docs_speed.in_readme()


@pytest.mark.parametrize("file", [docs_speed.PAGE, docs_speed.README], ids=lambda path: path.name)
def test_a_newer_figure_replaces_an_older_one(file: pathlib.Path) -> None:
    assert STALE.findall(" ".join(file.read_text().split())) == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.file} {table.title}")
def test_numbers_of_captions_are_in_the_results(table: docs_speed.Table) -> None:
    """Those with a point in them: times, ratios, versions; and the date, and each command where a caption brings its own."""
    results = (docs_speed.RESULTS / table.file).read_text()
    known = set(re.findall(r"\d+(?:\.\d+)+", results))
    assert set(re.findall(r"\d+(?:\.\d+)+", f"{table.where} {table.text}")) - known == set()
    assert re.search(r"\d{4}-\d\d-\d\d", table.where)
    for date in re.findall(r"\d{4}-\d\d-\d\d", table.where):
        assert date in results
    for script in re.findall(r"\w+\.py", table.command or ""):
        assert script in results


def test_a_table_that_is_not_there_is_an_error() -> None:
    table = docs_speed.SUSTAINED
    with pytest.raises(ValueError, match=re.escape("H200.md has 0 lines '## Beside nobody', expected one.")):
        dataclasses.replace(table, section="## Beside nobody").read()
    with pytest.raises(ValueError, match="asked for number 99"):
        dataclasses.replace(table, number=99).read()
    with pytest.raises(ValueError, match=r"Table 1 of .* has the commands \[\], expected one"):
        dataclasses.replace(docs_speed.SWEEP, command=None).read()
