"""Times the tiles of a call and keeps the fastest."""
