"""How many threads and warps a warpgroup has."""

WARPGROUP = 128
"""Threads of a warpgroup."""
WARPS = 4
"""Warps of a warpgroup."""
