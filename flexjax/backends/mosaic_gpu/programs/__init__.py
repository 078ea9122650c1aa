"""Traced programs on tiles of a kernel, and what their captured arrays need."""
