"""A progress bar on one line of stderr."""

import sys

WIDTH = 24  # characters


class ProgressBar:
    """Shows how many of `total` candidates were timed."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        """wanted   whether to draw; None: only if stderr is a terminal or a notebook's"""
        self.total = total
        # a notebook's stderr is no terminal; a return to the start of the line works there, and no escape codes do
        self.notebook = type(sys.stderr).__module__.startswith("ipykernel.")
        self.on = sys.stderr is not None and (self.notebook or sys.stderr.isatty() if wanted is None else wanted)
        self.longest = 0

    def show(self, done: int, seconds_left: float, best: float | None, now: str) -> None:
        """Draws the line, for example

        [######..................] 3/12, 41 s left, best 1.234 ms, now block_q=128 block_kv=64
        """
        full = WIDTH * done // max(1, self.total)
        text = f"[{'#' * full}{'.' * (WIDTH - full)}] {done}/{self.total}, {seconds_left:.0f} s left"
        if best is not None:
            text += f", best {1e3 * best:.3f} ms"
        self._draw(f"{text}, now {now}")

    def close(self) -> None:
        """Clears the line; the cursor stays at its beginning."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self.on:
            self.longest = max(self.longest, len(text))
            sys.stderr.write(f"\r{text:<{self.longest}}" if self.notebook else f"\r\x1b[K{text}")
            sys.stderr.flush()
