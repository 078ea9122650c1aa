"""The steps of decode/fragments.py, computed with numpy for all threads of a warpgroup as the PTX manual defines the instructions."""

import typing

import ml_dtypes
import numpy as np
import pytest

from flexjax.backends.mosaic_gpu.decode import fragments as decode_fragments

RNG = np.random.default_rng(3)
THREADS = np.arange(128)
WARP, G, T = THREADS // 32, THREADS % 32 // 4, THREADS % 4
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class NumpyOps:
    """Every value has an element for each of 128 threads: uint32, or float32."""

    thread = THREADS.astype(np.uint32)
    worst = 0  # different 16-byte parts in one bank that eight neighbouring threads read

    def add(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x + np.uint32(y)

    def times(self, x: typing.Any, factor: int) -> typing.Any:
        return x * np.uint32(factor)

    def shift_right(self, x: typing.Any, bits: int) -> typing.Any:
        return x >> np.uint32(bits)

    def bits_and(self, x: typing.Any, mask: int) -> typing.Any:
        return x & np.uint32(mask)

    def bits_or(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x | y

    def bits_xor(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x ^ np.uint32(y)

    def permuted(self, x: typing.Any, y: typing.Any, selector: int) -> typing.Any:
        both = np.concatenate([as_words(x)[:, None].view(np.uint8), as_words(y)[:, None].view(np.uint8)], 1)
        chosen = [both[:, (selector >> 4 * n) & 7] for n in range(4)]
        return np.ascontiguousarray(np.stack(chosen, 1)).view(np.uint32)[:, 0]

    def subtracted(self, x: typing.Any, y: typing.Any, dtype: str) -> typing.Any:
        return from_halves((halves(x, dtype) - halves(y, dtype)).astype(DTYPES[dtype]))

    def multiplied(self, x: typing.Any, y: typing.Any, dtype: str) -> typing.Any:
        return from_halves((halves(x, dtype) * halves(y, dtype)).astype(DTYPES[dtype]))

    def packed(self, low: typing.Any, high: typing.Any, dtype: str) -> typing.Any:
        return from_halves(np.stack([low, high], 1).astype(DTYPES[dtype]))

    def load(self, memory: np.ndarray, offset: typing.Any) -> list[typing.Any]:
        assert not (offset % 16).any()
        for eight in offset.reshape(-1, 8):
            banks = np.unique(eight) // 16 % 8
            NumpyOps.worst = max(NumpyOps.worst, int(np.bincount(banks).max()))
        return list(memory[offset[:, None] + np.arange(16)].copy().view(np.uint32).T)

    def mma(self, sums: list, left: list, right: list, dtype: str) -> list:
        """m16n8k16 of the PTX manual, in float32."""
        a, b, c = np.zeros((4, 16, 16)), np.zeros((4, 16, 8)), np.zeros((4, 16, 8))
        for word, (down, along) in zip(left, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
            for n in range(2):
                a[WARP, G + down, 2 * T + along + n] = halves(word, dtype)[:, n]
        for word, down in zip(right, (0, 8), strict=True):
            for n in range(2):
                b[WARP, 2 * T + down + n, G] = halves(word, dtype)[:, n]
        places = [(G + down, 2 * T + n) for down in (0, 8) for n in range(2)]
        for value, (row, column) in zip(sums, places, strict=True):
            c[WARP, row, column] = value
        found = a @ b + c
        return [found[WARP, row, column].astype(np.float32) for row, column in places]

    def transposed(self, x: typing.Any) -> typing.Any:
        whole = np.zeros((4, 8, 8), np.uint16)
        parts = as_words(x)[:, None].view(np.uint16)
        for n in range(2):
            whole[WARP, G, 2 * T + n] = parts[:, n]
        return np.ascontiguousarray(np.stack([whole[WARP, 2 * T + n, G] for n in range(2)], 1)).view(np.uint32)[:, 0]

    def exchanged(self, x: typing.Any, distance: int) -> typing.Any:
        return x[THREADS ^ distance]

    def sum(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x + y

    def product(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x * y

    def difference(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return x - y

    def larger(self, x: typing.Any, y: typing.Any) -> typing.Any:
        return np.maximum(x, y)

    def zero_if_hidden(self, x: typing.Any) -> typing.Any:
        return np.where(np.isneginf(x), np.float32(0), x)

    def power(self, x: typing.Any) -> typing.Any:
        return np.exp2(x)


def as_words(x: typing.Any) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(x, np.uint32), (128,)))


def halves(x: typing.Any, dtype: str) -> np.ndarray:
    return as_words(x)[:, None].view(DTYPES[dtype]).astype(np.float32)


def from_halves(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)[:, 0]


def swizzled(tile: np.ndarray) -> np.ndarray:
    """The bytes of [rows, columns] in pieces of 8 rows of 128 bytes, 16-byte parts at part XOR row."""
    rows, columns = tile.shape
    parts = tile.reshape(rows // 8, 8, columns // 128, 8, 16).transpose(0, 2, 1, 3, 4).copy()
    for row in range(8):
        parts[:, :, row] = parts[:, :, row, np.arange(8) ^ row]
    return parts.reshape(-1)


@pytest.mark.parametrize("order", [decode_fragments.IN_ORDER, decode_fragments.APART])
@pytest.mark.parametrize(("stored", "dtype"), [(s, d) for s in ("int8", "float8_e4m3fn") for d in DTYPES])
def test_every_byte_is_widened_exactly(stored: str, dtype: str, order: tuple[int, int, int, int]) -> None:
    """The two bytes of float8_e4m3fn that are no numbers are 480 and -480."""
    whole = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(128, 4)
    numbers = whole.view(np.int8 if stored == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)
    words = decode_fragments.widened(NumpyOps(), whole.view(np.uint32)[:, 0], stored, dtype, order)
    found = np.concatenate([halves(word, dtype) for word in words], 1)
    numbers = np.where(np.isnan(numbers), np.copysign(np.float32(480), numbers), numbers)
    np.testing.assert_array_equal(found, numbers[:, order])


CASES = [
    (128, 128, 128, 8, "int8", "bfloat16"),
    (64, 256, 256, 8, "float8_e4m3fn", "bfloat16"),
    (128, 128, 128, 16, "float8_e4m3fn", "float16"),
    (64, 256, 128, 16, "int8", "float16"),
]


@pytest.mark.parametrize(("keys", "head_dim", "value_dim", "columns", "stored", "dtype"), CASES)
def test_one_tile(keys: int, head_dim: int, value_dim: int, columns: int, stored: str, dtype: str) -> None:
    ops = NumpyOps()
    tiles = []
    for dim in (head_dim, value_dim):
        whole = RNG.integers(0, 256, (keys, dim)).astype(np.uint8)
        tiles.append(np.where(whole & 0x7F == 0x7F, 5, whole).astype(np.uint8))  # no NaN of float8
    numbers = [x.view(np.int8 if stored == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float64) for x in tiles]
    query = (RNG.normal(size=(columns, head_dim)) / 50).astype(DTYPES[dtype])
    zero = np.zeros(128, np.float32)

    words = decode_fragments.query_words(ops, query.reshape(-1).view(np.uint8), columns, head_dim)
    NumpyOps.worst = 0
    sizes = decode_fragments.TileOfBytes(keys, columns, head_dim, stored, dtype)
    found = decode_fragments.scores(ops, swizzled(tiles[0]), words, zero, sizes)
    whole = np.zeros((keys, columns))
    for (row, column), value in found.items():
        whole[row + 16 * WARP + G, column + 2 * T] = value
    want = numbers[0] @ query.astype(np.float64).T
    np.testing.assert_allclose(whole, want, rtol=1e-5, atol=1e-4)

    first = RNG.normal(size=(4, columns)).astype(np.float32) * 20
    first[1] = -np.inf
    at = lambda x: {(half, c): x[WARP, c + 2 * T] for half in (0, 8) for c in sorted({c for _, c in found})}
    hidden = {(r, c): np.where((WARP == 2) | (G == 3), np.float32(-np.inf), v) for (r, c), v in found.items()}
    made = decode_fragments.softmax(ops, hidden, at(first), at(np.ones((4, columns), np.float32)))
    hide = np.isin(np.arange(keys) % 64 // 16, [2]) | (np.arange(keys) % 8 == 3)
    s = np.where(hide[:, None], -np.inf, want).reshape(-1, 4, 16, columns)
    top = np.maximum(first, s.max((0, 2)))
    base = np.where(np.isneginf(top), 0, top)
    p = np.exp2(s - base[:, None]).reshape(keys, columns)
    for (half, column), value in made.top.items():
        np.testing.assert_allclose(value, top[WARP, column + 2 * T], rtol=1e-5, err_msg=str(half))
    for (row, column), value in made.weights.items():
        np.testing.assert_allclose(value, p[row + 16 * WARP + G, column + 2 * T], rtol=1e-2, atol=1e-6)
    factor = np.exp2(first - base)
    sums = decode_fragments.column_sums(ops, made.total)
    total = p.reshape(-1, 4, 16, columns).sum((0, 2)) + 16 * factor
    for column, value in sums.items():
        np.testing.assert_allclose(value, total[WARP, column + 2 * T], rtol=1e-2, atol=1e-6)

    old = RNG.normal(size=(4, value_dim, columns)).astype(np.float32)
    dim = lambda row: row // 512 * 128 + 16 * G + 2 * (row // 64 % 8) + row // 8 % 2
    before = {
        (64 * m + half, c): old[WARP, dim(64 * m + half), c + 2 * T]
        for m in range(value_dim // 16)
        for half in (0, 8)
        for c in sums
    }
    weights = {key: value.astype(np.float32) for key, value in made.weights.items()}
    sizes = sizes._replace(dim=value_dim)
    after = decode_fragments.add_values(ops, swizzled(tiles[1]), weights, made.factor, before, sizes)
    rounded = p.astype(np.float32).astype(DTYPES[dtype]).astype(np.float64).reshape(-1, 4, 16, columns)
    new = np.einsum("bwkc,bwkd->wdc", rounded, numbers[1].reshape(-1, 4, 16, value_dim)) + old * factor[:, None]
    for (row, column), value in after.items():
        np.testing.assert_allclose(value, new[WARP, dim(row), column + 2 * T], rtol=2e-2, atol=3.0)
    assert NumpyOps.worst == 1, "reading a tile has bank conflicts"
