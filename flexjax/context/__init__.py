"""A call whose sequence is split over a mesh: its layout, its stages, what travels, and its derivatives."""
