"""A progress bar on one line of stderr."""

import sys

WIDTH = 24  # characters


class ProgressBar:
    """Shows how many of `total` candidates were timed."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        """`total`: how many candidates there are; `wanted`: whether to draw; None: only if stderr is a terminal."""
        self.total = total
        self.on = sys.stderr.isatty() if wanted is None else wanted

    def show(self, done: int, seconds_left: float, best: float | None, now: str) -> None:
        """Draws the line; nothing if the bar is not to be drawn. It reads, for example,

            [######..................] 3/12, 41 s left, best 1.234 ms, now block_q=128 block_kv=64

        done           how many candidates were timed
        seconds_left   time until the search ends
        best           seconds of the fastest candidate so far, None without one
        now            the candidate that is being timed, as text
        """
        full = WIDTH * done // max(1, self.total)
        text = f"[{'#' * full}{'.' * (WIDTH - full)}] {done}/{self.total}, {seconds_left:.0f} s left"
        if best is not None:
            text += f", best {1e3 * best:.3f} ms"
        self._draw(f"{text}, now {now}")

    def close(self) -> None:
        """Clears the line, if the bar is to be drawn; the cursor stays at its beginning."""
        self._draw("")

    def _draw(self, text: str) -> None:
        """Replaces the line on stderr by the text, if the bar is to be drawn."""
        if self.on:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
