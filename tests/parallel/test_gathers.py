"""Numbers of bytes in messages about gathered arrays."""

import pytest

from flexjax.parallel.gathers import bytes_text

TEXTS = {
    999: "999 B", 1000: "1 kB", 1536: "1.54 kB", 999_499: "999 kB", 999_500: "1 MB", 999_999: "1 MB", 1_500_000_000: "1.5 GB",
    2 * 10**12: "2 TB", 12_345 * 10**12: "12345 TB",
}  # fmt: skip


@pytest.mark.parametrize("size", TEXTS)
def test_bytes_in_words(size: int) -> None:
    assert bytes_text(size) == TEXTS[size]
