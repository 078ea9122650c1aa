"""Attention by its definition, dense: what every backend is tested against."""
