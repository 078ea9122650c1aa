"""The parts of a forward tile that only float8 has (hopper_float8.py): its rings and columns."""

FLOAT8_RINGS = ((2, 2, 2), (3, 3, 2))
"""Rings of float8 operands, which are half as large; they come before those of RINGS."""
FLOAT8_COLUMNS = 128  # columns of a product of float8 with the values
SUM_COLUMNS = 8  # the fewest columns that WGMMA adds
