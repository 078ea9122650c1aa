"""How many threads and warps a warpgroup has."""

WARPGROUP = 128
WARPS = 4
