"""Which rows of a table run by default and which with --slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_slow(rows: Iterable[Any], everyday: Collection[Any]) -> list[Any]:
    """Parameters of which all but the everyday ones are left to the slow run. A row that is a tuple has several parameters."""
    slow = lambda row: [] if row in everyday else [pytest.mark.slow]
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=slow(row)) for row in rows]
