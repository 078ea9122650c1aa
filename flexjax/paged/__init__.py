"""A cache of keys and values in pages, and the table that says which request has which page.

`table.py` hands out pages and counts who uses them, `cache.py` writes and reads tokens. All functions run inside jit
and keep every shape, so that a serving loop compiles once.
"""

from flexjax.paged.cache import PagedCache as PagedCache
from flexjax.paged.cache import append as append
from flexjax.paged.cache import empty as empty
from flexjax.paged.cache import gather as gather
from flexjax.paged.table import PageTable as PageTable
from flexjax.paged.table import allocate as allocate
from flexjax.paged.table import fork as fork
from flexjax.paged.table import release as release
from flexjax.paged.table import table as table

__all__ = ["PageTable", "PagedCache", "allocate", "append", "empty", "fork", "gather", "release", "table"]
