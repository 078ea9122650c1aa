"""Copies by TMA from and to arrays of any number of rows: the copies that are emitted, executed in numpy by the rules of TMA; and that no
operand or result is copied beside a kernel, in programs compiled for Hopper.
"""

import dataclasses
import operator
import os
import pathlib
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func

import flexjax
from flexjax.backends.mosaic_gpu.machine.clipped_copies import _ClippedCopy
from tests.backends.mosaic_gpu import compile_card, compile_hopper

ROOT = pathlib.Path(__file__).parents[3]
BATCH, HEADS, COLUMNS = 2, 3, 64
"""Of the array, and the columns of a piece."""


def number_of(value: typing.Any, turn: int) -> int:
    """What an index is that was computed from constants and the number `turn` of the loop."""
    if isinstance(value.owner, ir.Block):
        return turn
    operation = value.owner.operation
    if operation.name == "arith.constant":
        return ir.IntegerAttr(operation.attributes["value"]).value
    if operation.name in ("llvm.inline_asm", "arith.index_cast"):  # a `mov`
        return number_of(operation.operands[0], turn)
    left, right = (number_of(x, turn) for x in operation.operands)
    rules = {
        "arith.addi": operator.add,
        "arith.subi": operator.sub,
        "arith.muli": operator.mul,
        "arith.divui": operator.floordiv,
        "arith.remui": operator.mod,
    }
    return rules[operation.name](left, right)


COMPARISONS = {"eq": operator.eq, "sle": operator.le, "slt": operator.lt, "sge": operator.ge, "sgt": operator.gt}
"""Predicates of arith.cmpi by name."""


def is_taken(block: typing.Any) -> bool:
    """Whether a copy that was emitted in `block` is executed: its branch is that of the condition, of constants, or it is in none."""
    while (parent := block.owner.operation).name != "func.func":
        if parent.name == "scf.if" and block not in list(parent.regions[0 if holds(parent.operands[0]) else 1].blocks):
            return False
        block = parent.block
    return True


def holds(condition: typing.Any) -> bool:
    """Whether a condition of constants holds: a comparison, or two of them."""
    operation = condition.owner.operation
    if operation.name == "arith.andi":
        return all(holds(x) for x in operation.operands)
    predicate = arith.CmpIPredicate(ir.IntegerAttr(operation.attributes["predicate"]).value)
    return COMPARISONS[predicate.name](*(number_of(x, 0) for x in operation.operands))


def turns(block: typing.Any) -> int:
    """How often what was emitted in `block` is executed: the turns of its loop, or 1."""
    loop = block.owner.operation
    return number_of(loop.operands[1], 0) if loop.name == "scf.for" else 1


TILES = [
    (100, 64, 0), (100, 64, 32), (100, 64, 40), (100, 64, 64), (100, 32, 96), (35, 64, 0), (5, 64, 0), (97, 64, 104),
    (100, 64, 128), (127, 128, 0), (9, 64, 0), (57, 64, 0), (5, 64, 64), (131, 64, 128),
]  # fmt: skip
"""Rows of an array, rows of a tile, and where it begins."""


@dataclasses.dataclass
class Emitted:
    """The copies that `_ClippedCopy` emits between an array and one tile, executed as they are emitted.

    length, rows, start   rows of the array and of the tile, and the tile's first row
    layout                of the array
    columns               of the tile, from column `first` of the array's on
    stores                whether the tile is copied to the array
    """

    length: int
    rows: int
    start: int
    layout: str
    columns: int = 2 * COLUMNS
    first: int = 0
    stores: bool = False

    def __post_init__(self) -> None:
        shape = (
            (BATCH, self.length, HEADS, 2 * COLUMNS)
            if self.layout == "BTNH"
            else (BATCH, HEADS, self.length, 2 * COLUMNS)
        )
        self.array = np.arange(1, np.prod(shape) + 1, dtype=np.int32).reshape(shape)
        self.slot = np.full(self.rows * self.columns, -1, np.int32)
        if self.stores:
            self.slot = -np.arange(1, self.slot.size + 1, dtype=np.int32)
        self.copies, self.bytes, self.groups = 0, 0, 0

    @property
    def tile(self) -> np.ndarray:
        """The tile, [rows, columns], from its swizzled order before the swizzle."""
        pieces = self.slot.reshape(self.rows // 8, self.columns // COLUMNS, 8, COLUMNS)
        return pieces.swapaxes(1, 2).reshape(self.rows, self.columns)

    @property
    def head(self) -> np.ndarray:
        """The rows of the array that the tile is one of, [length, columns], a view."""
        rows = self.array[1, :, 2] if self.layout == "BTNH" else self.array[1, 2]
        return rows[:, self.first : self.first + self.columns]

    def run(self, aligned: bool) -> "Emitted":
        """Emits and executes the copies. `aligned` is that of `clip_rows`."""
        with mlir.make_ir_context(), ir.Location.unknown():
            mgpu.dialect.register_dialect(ir.Context.current)  # pyright: ignore[reportPrivateImportUsage]
            module = ir.Module.create()
            i32 = ir.IntegerType.get_signless(32)
            array = ir.MemRefType.get(self.array.shape, i32)
            tile = ir.MemRefType.get((self.rows // 8, self.columns // COLUMNS, 8, COLUMNS), i32)
            with ir.InsertionPoint(module.body):

                @func.FuncOp.from_py_func(array, tile, tile)
                def body(array: ir.Value, tile: ir.Value, barrier: ir.Value) -> None:
                    c = lambda n: mgpu.c(n, ir.IndexType.get())
                    at, there = [c(n) for n in (1, 2)], mgpu.ds(c(self.start), self.rows)
                    columns = mgpu.ds(c(self.first), self.columns)
                    index = (at[0], there, at[1], columns) if self.layout == "BTNH" else (*at, there, columns)
                    ends = {"src_ref": tile, "dst_ref": array} if self.stores else {"src_ref": array, "dst_ref": tile}
                    _ClippedCopy(self._record, aligned)(
                        **ends, gmem_slice=index, barrier=None if self.stores else barrier, arrive=self.stores,
                        gmem_transform=(mgpu.TileTransform((8, COLUMNS)),),
                    )  # fmt: skip

            self.groups += str(module).count("nvvm.cp.async.bulk.commit.group")
        return self

    def _record(self, **given: typing.Any) -> None:
        """Executes the copy if it is emitted in the branch that is taken, once for each turn of a loop."""
        block = typing.cast(typing.Any, ir.InsertionPoint.current).block
        self.groups += given["arrive"]
        if is_taken(block):
            for turn in range(turns(block)):
                self._execute(given, turn)

    def _execute(self, given: dict[str, typing.Any], turn: int) -> None:
        """One copy, in a loop that number `turn`: as Mosaic does, the indexed dimensions go to the front, then the transforms give TMA's
        array, its box and its index. The box is read or written in row-major order; past the ends of the array 0 is read and nothing
        written.
        """
        in_global, in_shared = ("dst_ref", "src_ref") if self.stores else ("src_ref", "dst_ref")
        base, sizes, squeezed = mgpu.utils.parse_indices(given["gmem_slice"], self.array.shape, check_oob=False)
        front = [d for d, one in enumerate(squeezed) if one]
        order = (*front, *(d for d, one in enumerate(squeezed) if not one))
        transforms = (mgpu.TransposeTransform(order), *(t.batch(len(front)) for t in given["gmem_transform"]))
        ref, box = given[in_global], tuple(sizes)
        index = tuple(x if isinstance(x, ir.Value) else mgpu.c(x, ir.IndexType.get()) for x in base)
        for transform in transforms:
            ref, box, index = transform.apply(ref), transform.transform_shape(box), transform.transform_index(index)
        there = ir.MemRefType(ref.type)
        strides, offset = there.get_strides_and_offset()
        assert offset == 0
        view = np.lib.stride_tricks.as_strided(
            self.array, tuple(there.shape), [s * self.array.itemsize for s in strides]
        )
        first = [number_of(x, turn) for x in index]
        ends = [max(0, min(size, n - at)) for size, n, at in zip(box, view.shape, first, strict=True)]
        inside = tuple(slice(e) for e in ends)
        outside = tuple(slice(at, at + e) for at, e in zip(first, ends, strict=True))
        assert tuple(ir.MemRefType(given[in_shared].type).shape) == box[len(front) :]
        place = offset_of(given[in_shared], turn)
        part = self.slot[place : place + np.prod(box)].reshape(box)
        if self.stores:
            view[outside] = part[inside]
        else:
            part[...] = 0
            part[inside] = view[outside]
        self.copies += 1
        self.bytes += part.size


def offset_of(ref: typing.Any, turn: int) -> int:
    """The number of the first element of a memref that is contiguous in the tile of which it is a part."""
    if isinstance(ref.owner, ir.Block):
        return 0
    operation = ref.owner.operation
    before = offset_of(operation.operands[0], turn)
    if operation.name != "memref.subview":
        return before
    static, given = list(ir.DenseI64ArrayAttr(operation.attributes["static_offsets"])), list(operation.operands)[1:]
    first = static[0] if static[0] >= 0 else number_of(given[0], turn)
    assert not any(static[1:])
    return before + first * ir.MemRefType(operation.operands[0].type).get_strides_and_offset()[0][0]


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize(("length", "rows", "start"), TILES)
@pytest.mark.parametrize("columns", [COLUMNS, 2 * COLUMNS])
def test_tiles_and_zeros(length: int, rows: int, start: int, columns: int, layout: str) -> None:
    """Every tile holds its rows in swizzled order before the swizzle, and 0 past the last row, and as many bytes arrive as it has. Where
    tiles begin at multiples of their rows three copies are enough.
    """
    for aligned in (False, True)[: 1 + (start % rows == 0)]:
        done = Emitted(length, rows, start, layout, columns, 2 * COLUMNS - columns).run(aligned)
        want = np.zeros((rows, columns), np.int32)
        want[: max(0, length - start)] = done.head[start : start + rows]
        np.testing.assert_array_equal(done.tile, want)
        assert done.bytes == rows * columns
        assert done.copies <= (1 if columns == COLUMNS else 3 if aligned and length > 8 else rows // 8)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize(("length", "rows", "start"), TILES)
@pytest.mark.parametrize("columns", [COLUMNS, 2 * COLUMNS])
def test_stores_end_with_the_array(length: int, rows: int, start: int, columns: int, layout: str) -> None:
    """The rows of a tile that the array has are written to it, in at most two copies and one group; no other number of it changes."""
    done = Emitted(length, rows, start, layout, columns, 2 * COLUMNS - columns, stores=True)
    want = done.array.copy()
    done.run(aligned=False)
    rows_of = want[1, :, 2] if layout == "BTNH" else want[1, 2]
    there = max(0, min(rows, length - start))
    rows_of[start : start + there, 2 * COLUMNS - columns :] = done.tile[:there]
    np.testing.assert_array_equal(done.array, want)
    assert done.copies <= 2
    assert done.groups == 1


# ------------------------------------------------------------------- compiled programs

CALLS: dict[str, dict[str, typing.Any]] = {
    "decode": {"tokens": 1, "keys": 16383},
    "decode, lengths": {"tokens": 1, "keys": 16383, "lengths": True},
    "decode, lengths, BNTH": {"tokens": 1, "keys": 16381, "lengths": True, "layout": "BNTH"},
    "prefill": {"tokens": 128, "keys": 16383},
    "prefill, BNTH": {"tokens": 128, "keys": 16383, "layout": "BNTH"},
    "prefill, lengths": {"tokens": 128, "keys": 16383, "lengths": True},
    "prefill, lengths, BNTH": {"tokens": 128, "keys": 16381, "lengths": True, "layout": "BNTH"},
    "prefill, lengths, mma": {"tokens": 128, "keys": 16383, "lengths": True, "instruction": "mma"},
    "decode, head dim 64, mma": {"tokens": 1, "keys": 16383, "dim": 64, "instruction": "mma"},
    "prefill, mma": {"tokens": 128, "keys": 16383, "instruction": "mma"},
}


PASSES: dict[str, dict[str, typing.Any]] = {
    "forward": {"dim": 128, "backward": False},
    "forward, BNTH": {"dim": 128, "layout": "BNTH", "backward": False},
    "both passes, head dim 64": {"dim": 64},
    "both passes": {"dim": 128},
    "both passes, BNTH": {"dim": 128, "layout": "BNTH"},
    "both passes, head dim 256": {"dim": 256},
}
"""Calls of causal self-attention, with gradients or without."""


def growth(dim: int, layout: str = "BTNH", backward: bool = True) -> float:
    """Bytes of temporary arrays of a call on 8191 tokens, with `backward` and the gradients of queries, keys and values, over those of 8192
    tokens.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> typing.Any:
        attend = lambda *x: flexjax.flex_attention(
            *x, mask_mod=flexjax.masks.causal, layout=layout, implementation="mosaic_gpu",  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        return jax.vjp(attend, q, k, v)[1](d_out) if backward else attend(q, k, v)

    def temporaries(tokens: int) -> int:
        shape = (1, tokens, 2, dim) if layout == "BTNH" else (1, 2, tokens, dim)
        array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return compile_hopper.compile_for_hopper(run, *(array,) * 4).memory_analysis().temp_size_in_bytes

    return temporaries(8191) / temporaries(8192)


def temporary_share(tokens: int, keys: int, lengths: bool = False, layout: str = "BTNH", dim: int = 128,
                    instruction: typing.Any = None, card: str | None = None) -> float:  # fmt: skip
    """Bytes of temporary arrays over those of keys and values, of a call on two batch entries of 8 query and 2 key heads."""
    of = lambda n, heads: jax.ShapeDtypeStruct(
        (2, n, heads, dim) if layout == "BTNH" else (2, heads, n, dim), jnp.bfloat16
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array) -> jax.Array:
        return flexjax.flex_attention(
            q, k, v, layout=layout, implementation="mosaic_gpu",  # pyright: ignore[reportArgumentType]
            key_value_seq_lengths=ends if lengths else None,
            kernel_options=flexjax.KernelOptions(instruction=instruction),
        )  # fmt: skip

    arrays = of(tokens, 8), of(keys, 2), of(keys, 2), jax.ShapeDtypeStruct((2,), jnp.int32)
    made = (
        compile_hopper.compile_for_hopper(run, *arrays)
        if card is None
        else compile_card.compile_for(card, run, *arrays)
    )
    return made.memory_analysis().temp_size_in_bytes / sum(x.size * 2 for x in arrays[1:3])


@pytest.mark.slow
def test_tokens_are_not_copied() -> None:
    """Arrays beside keys and values take less than 1% of their bytes, whatever the number of tokens is, and those of self-attention
    are no larger than for a multiple of 8.
    """
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_clipped_copies"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    shares = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()}
    assert set(shares) == {*CALLS, *PASSES}
    assert max(shares[name] for name in CALLS) < 0.01, shares
    assert max(shares[name] for name in PASSES) < 1.02, shares


if __name__ == "__main__":
    for call, fields in CALLS.items():
        print(call, temporary_share(**fields), flush=True)
    for call, fields in PASSES.items():
        print(call, growth(**fields), flush=True)
