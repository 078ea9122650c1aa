"""`tolerance=`: which blocks of a call provably hold next to nothing of each row (docs/tolerance.md has the proof)."""
