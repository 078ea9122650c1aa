"""The parts of a forward tile that only float8 has (float8_products.py): its rings, and the columns in which P V is summed.

Nothing here imports Mosaic.
"""

FLOAT8_RINGS = ((2, 2, 2), (3, 3, 2))
"""The rings of float8 operands, which are half as large, before those of RINGS."""
FLOAT8_COLUMNS = 128
"""Columns of a product of float8 with the values."""
SUM_COLUMNS = 8
"""The fewest columns that WGMMA adds."""
