"""What one thread does with a key tile of bytes: from shared memory to registers, both products, one softmax a warp.

The packed queries of a key head are few, so the products are transposed: keys (of K) and value dims (of V) are the rows
of `mma.sync` m16n8k16, and the packed queries its 8 columns. Bytes are widened in registers, and are the left operand
as they are. Each warp sums over keys of its own, so warps wait for nobody within a tile.

    S^T [16 keys, 8 queries]   += K [16 keys, 16 dims]  Q^T [16 dims, 8 queries]
    O^T [16 dims, 8 queries]   += V^T [16 dims, 16 keys]  P^T [16 keys, 8 queries]

With w the warp, g = lane / 4 and t = lane % 4, the fragments of m16n8k16 are, in words of two 16-bit numbers,

    left operand     row g, columns 2t 2t+1;  row g + 8, the same;  row g, columns 2t+8 2t+9;  row g + 8, the same
    right operand    rows 2t 2t+1 of column g;  rows 2t+8 2t+9 of column g
    sums             row g, columns 2t, 2t+1;  row g + 8, the same; float32

The order of the index that a product sums over is free, if both operands have the same, and so is that of O^T's rows:

- Keys: block i of 64 keys of a tile gives warp w the keys 64 i + 16 w + (0 .. 15), as in a WGMMA accumulator, so mods
  are evaluated on S^T [keys, queries] as on any tile.
- Q K^T sums over dims. The 128 dims of a row of a piece are eight parts of 16 bytes; a thread reads parts 2t and 2t + 1
  of its rows. A part has four words of four dims. An `mma` takes one word of each row from a thread, so it sums over 16
  dims. Dims 0 and 2 of a word are columns 2t and 2t+1 of the left operand, dims 1 and 3 columns 2t+8 and 2t+9.
- P V sums over keys. A thread reads part g of the rows of V of the keys 2t, 2t+1, 2t+8 and 2t+9: dims 16 g to 16 g + 15
  of a piece. `mma` number m, 0 to 7, computes dims 16 g + 2m and 16 g + 2m + 1, in rows g and g + 8 of O^T. Words of
  keys 2t and 2t+1 are interleaved before they are widened: a word of the left operand has one dim of both.
- P^T comes from S^T by transposing 8 x 8 matrices of 16-bit numbers (`movmatrix`).

Tiles lie in pieces of 8 rows of 128 bytes, swizzled by TMA: part n of row r is stored as part n XOR r. Eight
neighbouring threads, two neighbouring g with t = 0 .. 3 each, read eight different parts, so no two of them read the
same banks: 2t XOR g in rows g of K, and g XOR 2t in rows 2t of V.

The functions compute on values of one thread by an `Ops`, which emits instructions (bytes.py), or in tests computes
with numpy for all threads of a warpgroup.
"""

import typing

PIECE = 128  # bytes of a row of a swizzled piece of 8 rows
Word = typing.Any  # a value of 32 bits of one thread: an integer, two 16-bit numbers or a float32


class Ops(typing.Protocol):
    """Operations on the values of one thread; `dtype` is "bfloat16" or "float16"; an int argument is a constant.

    A word of two 16-bit numbers has the first in its lower half. Integers have 32 bits; sums and products are float32.
    """

    @property
    def thread(self) -> Word:
        """The number of the thread in its warpgroup, 0 to 127."""
        ...

    def add(self, x: Word, y: Word | int) -> Word: ...

    def times(self, x: Word, factor: int) -> Word: ...

    def shift_right(self, x: Word, bits: int) -> Word:
        """x shifted to the right, with zeros from the left."""
        ...

    def bits_and(self, x: Word, mask: int) -> Word: ...

    def bits_or(self, x: Word, y: Word) -> Word: ...

    def bits_xor(self, x: Word, y: Word | int) -> Word: ...

    def permuted(self, x: Word, y: Word | int, selector: int) -> Word:
        """The bytes of x (0 to 3, lowest first) and y (4 to 7) that the digits of `selector` name, by `prmt`."""
        ...

    def subtracted(self, x: Word, y: Word | int, dtype: str) -> Word:
        """x - y for each of the two numbers of the dtype in x and in y."""
        ...

    def multiplied(self, x: Word, y: int, dtype: str) -> Word:
        """x * y for each of the two numbers of the dtype in x and in y."""
        ...

    def packed(self, low: Word, high: Word, dtype: str) -> Word:
        """Two float32 rounded to the dtype: `low` in the lower half of the word, `high` in the upper half."""
        ...

    def load(self, memory: typing.Any, offset: Word) -> list[Word]:
        """The four words from byte `offset`, a multiple of 16, of `memory`: a pointer, in tests an array."""
        ...

    def mma(self, sums: list[Word], left: list[Word], right: list[Word], dtype: str) -> list[Word]:
        """sums + left @ right by m16n8k16 of the warp: four float32, four words of `left`, two of `right`."""
        ...

    def transposed(self, x: Word) -> Word:
        """The 8 x 8 matrix of 16-bit numbers that a warp holds, a word a lane, transposed by `movmatrix`."""
        ...

    def exchanged(self, x: Word, distance: int) -> Word:
        """x of the lane of the warp whose number is this lane's number XOR `distance`."""
        ...

    def sum(self, x: Word, y: Word) -> Word: ...

    def product(self, x: Word, y: Word) -> Word: ...

    def difference(self, x: Word, y: Word) -> Word: ...

    def larger(self, x: Word, y: Word) -> Word:
        """The larger of x and y; NaN if one is."""
        ...

    def zero_if_hidden(self, x: Word) -> Word:
        """x, or 0 where it is -inf."""
        ...

    def power(self, x: Word) -> Word:
        """2^x, 0 for -inf."""
        ...


IN_ORDER = (0, 1, 2, 3)
APART = (0, 2, 1, 3)  # orders of the bytes of a word for `widened`


def widened(
    ops: Ops, word: Word, stored: str, dtype: str, order: tuple[int, int, int, int] = IN_ORDER
) -> tuple[Word, Word]:
    """The four numbers in the bytes of `word` as two words of the 16-bit `dtype` (hopper_widen.py).

    `order` says which byte (0 the lowest) each number is. float8 takes IN_ORDER and APART, which needs no instruction
    that moves bytes; int8 takes any.
    """
    if stored == "int8":
        selectors = [0x4040 | second << 8 | first for first, second in (order[:2], order[2:])]
        if dtype == "bfloat16":
            spread = [ops.permuted(word, 0x43, selector) for selector in selectors]
            parts = [(ops.bits_and(x, 0xFF7FFF7F), ops.bits_and(x, 0xFF80FF80)) for x in spread]
        else:
            moved = ops.bits_xor(word, 0x80808080)
            parts = [(ops.permuted(moved, 0x64, selector), 0x64806480) for selector in selectors]
        first, second = (ops.subtracted(*part, dtype) for part in parts)
        return first, second
    shift, mask, factor = (4, 0x07F007F0, 0x7B807B80) if dtype == "bfloat16" else (1, 0x3F803F80, 0x5C005C00)
    if order == APART:  # a product by a power of two shifts too, by other units than those of the masks
        parts = [(ops.times(word, 1 << (8 - shift)), ops.times(word, 1 << 8)), (ops.shift_right(word, shift), word)]
    else:
        spread = [
            ops.permuted(word, 0, selector) for selector in (0x1404, 0x3424)
        ]  # each byte in the upper half of 16 bits
        parts = [(ops.shift_right(x, shift), x) for x in spread]
    found = []
    for magnitude, sign in parts:
        bits = ops.bits_or(ops.bits_and(magnitude, mask), ops.bits_and(sign, 0x80008000))
        found.append(ops.multiplied(bits, factor, dtype))
    return found[0], found[1]


class Lanes(typing.NamedTuple):
    """Where a thread is: warp of its warpgroup, g = lane / 4 and t = lane % 4."""

    warp: Word
    g: Word
    t: Word


def lanes_of(ops: Ops) -> Lanes:
    thread = ops.thread
    lane = ops.bits_and(thread, 31)
    return Lanes(ops.shift_right(thread, 5), ops.shift_right(lane, 2), ops.bits_and(lane, 3))


def query_words(ops: Ops, queries: typing.Any, columns: int, head_dim: int) -> list[Word]:
    """This thread's words of the right operands of K Q^T, in the order of `scores`.

    `queries` is [columns, head_dim], row-major, in shared or global memory; head_dim / 8 words for each eight queries.
    """
    _, g, t = lanes_of(ops)
    row = ops.add(ops.times(g, 2 * head_dim), ops.times(t, 64))
    found: list[Word] = []
    for first in range(0, columns, 8):
        for piece in range(head_dim // PIECE):
            for part in range(2):
                start = 2 * (first * head_dim + piece * PIECE) + 32 * part
                for half in (0, 16):
                    words = ops.load(queries, ops.add(row, start + half))
                    for x, y in (words[:2], words[2:]):
                        found += [ops.permuted(x, y, selector) for selector in (0x5410, 0x7632)]
    return found


class TileOfBytes(typing.NamedTuple):
    """Sizes and dtypes of a tile of keys or values, and of the product that it enters."""

    block_kv: int  # a multiple of 64
    columns: int  # packed queries, a multiple of 8
    dim: int  # head dim of the keys or the values, a multiple of PIECE
    stored: str  # dtype of the bytes, "int8" or "float8_e4m3fn"
    dtype: str  # 16-bit dtype of the product, to which the bytes are widened


def scores(
    ops: Ops, keys: typing.Any, queries: list[Word], zero: Word, tile: TileOfBytes
) -> dict[tuple[int, int], Word]:
    """This thread's elements of S^T = K Q^T, [block_kv, columns]: place (row, column) -> float32.

    A place is that in the first thread of the warpgroup; another thread has the element 16 * warp + g rows and 2 t
    columns further on. `keys` is [block_kv, head dim] bytes in swizzled pieces, `queries` of `query_words`, `zero` the
    float32 0.
    """
    block_kv, columns, head_dim, stored, dtype = tile
    warp, g, t = lanes_of(ops)
    pieces, per_column = head_dim // PIECE, len(queries) // (columns // 8)
    row = ops.add(ops.times(warp, 2 * pieces * 8 * PIECE), ops.times(g, PIECE))
    place = ops.times(ops.bits_xor(ops.times(t, 2), g), 16)
    starts = [ops.add(row, place), ops.add(row, ops.bits_xor(place, 16))]
    found: dict[tuple[int, int], Word] = {}
    for block in range(block_kv // 64):
        sums = [[zero] * 4 for _ in range(columns // 8)]
        for piece in range(pieces):
            for part in range(2):
                words = [
                    ops.load(keys, ops.add(starts[part], ((8 * block + half) * pieces + piece) * 8 * PIECE))
                    for half in range(2)
                ]
                for n in range(4):
                    upper, lower = (widened(ops, words[half][n], stored, dtype, APART) for half in range(2))
                    left = [upper[0], lower[0], upper[1], lower[1]]
                    for column in range(columns // 8):
                        first = column * per_column + (piece * 2 + part) * 8 + 2 * n
                        sums[column] = ops.mma(sums[column], left, queries[first : first + 2], dtype)
        for column, values in enumerate(sums):
            for n, value in enumerate(values):
                found[64 * block + 8 * (n // 2), 8 * column + n % 2] = value
    return found


class Softmax(typing.NamedTuple):
    """The weights of a tile and the state after it, by place as for `scores`, of the thread's warp."""

    weights: dict[tuple[int, int], Word]  # 2^(score - reference) of each key, 0 where hidden
    # by which sums of the tiles before are multiplied; in rows 0 and 8, which are equal
    factor: dict[tuple[int, int], Word]
    # references, the largest score so far, -inf where nothing was visible; as `factor`
    top: dict[tuple[int, int], Word]
    # sums of weights relative to `top`; in rows 0 and 8, each over the keys that the thread has there (`column_sums`)
    total: dict[tuple[int, int], Word]


LANES_OF_A_COLUMN = (4, 8, 16)
"""Exchanging with lanes at these distances (XOR) reduces over the eight lanes that hold a column."""


def softmax(
    ops: Ops,
    found: dict[tuple[int, int], Word],
    top: dict[tuple[int, int], Word],
    total: dict[tuple[int, int], Word],
    unit: Word | None = None,
) -> Softmax:
    """One step of the online softmax of each warp, over its own keys; `top` is -inf and `total` 0 at first.

    The scores are powers of two, or differences times `unit` are.
    """
    power = lambda x: ops.power(x if unit is None else ops.product(x, unit))
    weights: dict[tuple[int, int], Word] = {}
    factors: dict[tuple[int, int], Word] = {}
    tops: dict[tuple[int, int], Word] = {}
    totals: dict[tuple[int, int], Word] = {}
    for column in sorted({c for _, c in found}):
        rows = sorted(r for r, c in found if c == column)
        largest = found[rows[0], column]
        for row in rows[1:]:
            largest = ops.larger(largest, found[row, column])
        for distance in LANES_OF_A_COLUMN:
            largest = ops.larger(largest, ops.exchanged(largest, distance))
        new = ops.larger(top[0, column], largest)
        base = ops.zero_if_hidden(new)
        factor = power(ops.difference(top[0, column], base))
        sums = {half: ops.product(total[half, column], factor) for half in (0, 8)}
        for row in rows:
            weight = power(ops.difference(found[row, column], base))
            weights[row, column] = weight
            sums[row % 64] = ops.sum(sums[row % 64], weight)
        for half in (0, 8):
            factors[half, column], tops[half, column], totals[half, column] = factor, new, sums[half]
    return Softmax(weights, factors, tops, totals)


def add_values(
    ops: Ops,
    values: typing.Any,
    weights: dict[tuple[int, int], Word],
    factor: dict[tuple[int, int], Word],
    out: dict[tuple[int, int], Word],
    tile: TileOfBytes,
) -> dict[tuple[int, int], Word]:
    """This thread's elements of O^T = out * factor + V^T P^T, sums over the keys of its warp alone.

    Place (64 (8 p + m) + 8 h, column) has dim 128 p + 16 g + 2 m + h, of piece p, m from 0 to 7, h 0 or 1, for packed
    query column + 2 t. `values` is [block_kv, value dim] bytes in swizzled pieces; `weights`: float32 times scales.
    """
    block_kv, columns, value_dim, stored, dtype = tile
    warp, g, t = lanes_of(ops)
    pieces = value_dim // PIECE
    base = ops.times(warp, 2 * pieces * 8 * PIECE)
    starts = []
    for side in range(2):
        row = ops.add(ops.times(t, 2), side)
        starts.append(ops.add(base, ops.add(ops.times(row, PIECE), ops.times(ops.bits_xor(g, row), 16))))
    sums = {at: ops.product(value, factor[at[0] % 64, at[1]]) for at, value in out.items()}
    for block in range(block_kv // 64):
        right: list[list[Word]] = []
        for column in range(0, columns, 8):
            pairs = [[weights[64 * block + 8 * half, column + n] for n in range(2)] for half in range(2)]
            right.append([ops.transposed(ops.packed(low, high, dtype)) for low, high in pairs])
        for piece in range(pieces):
            by_keys: list[list[Word]] = []  # of the keys 2t 2t+1, and 2t+8 2t+9: sixteen words, one for each dim
            for half in range(2):
                offset = ((8 * block + half) * pieces + piece) * 8 * PIECE
                even, odd = (ops.load(values, ops.add(starts[side], offset)) for side in range(2))
                made: list[Word] = []
                for x, y in zip(even, odd, strict=True):
                    for selector in (0x5410, 0x7632):
                        made += widened(ops, ops.permuted(x, y, selector), stored, dtype, APART)
                by_keys.append(made)
            for m in range(8):
                left = [pair[2 * m + row] for pair in by_keys for row in range(2)]
                for column in range(columns // 8):
                    places = [(64 * (8 * piece + m) + 8 * h, 8 * column + n) for h in range(2) for n in range(2)]
                    new = ops.mma([sums[at] for at in places], left, right[column], dtype)
                    sums.update(zip(places, new, strict=True))
    return sums


def column_sums(ops: Ops, total: dict[tuple[int, int], Word]) -> dict[int, Word]:
    """column -> the sum of `total`, of `softmax`, over all keys of the warp, for all lanes of the column."""
    found = {}
    for column in sorted({c for _, c in total}):
        value = ops.sum(total[0, column], total[8, column])
        for distance in LANES_OF_A_COLUMN:
            value = ops.sum(value, ops.exchanged(value, distance))
        found[column] = value
    return found
