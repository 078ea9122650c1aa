"""The laboratory: models of cards, clocks of machine code, the first hour on a new card, notes and results."""
