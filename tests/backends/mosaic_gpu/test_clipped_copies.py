"""Copies by TMA from arrays of any number of rows: the copies that are emitted, executed in numpy by the rules of TMA; and that keys and
values are not copied before a kernel, in programs compiled for Hopper.
"""

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
from flexjax.backends.mosaic_gpu import decode_tiles
from flexjax.backends.mosaic_gpu.clipped_copies import _ClippedCopy
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
    left, right = (number_of(x, turn) for x in operation.operands)
    rules = {
        "arith.addi": operator.add,
        "arith.muli": operator.mul,
        "arith.divui": operator.floordiv,
        "arith.remui": operator.mod,
    }
    return rules[operation.name](left, right)


COMPARISONS = {"sle": operator.le, "slt": operator.lt, "sge": operator.ge, "sgt": operator.gt}
"""Predicates of arith.cmpi by name."""


def is_taken(block: typing.Any) -> bool:
    """Whether a copy that was emitted in `block` is executed: its branch is that of the condition, of constants, or it is in none."""
    while (parent := block.owner.operation).name != "func.func":
        if parent.name == "scf.if":
            condition = parent.operands[0].owner.operation
            predicate = arith.CmpIPredicate(ir.IntegerAttr(condition.attributes["predicate"]).value)
            holds = COMPARISONS[predicate.name](*(number_of(x, 0) for x in condition.operands))
            return parent.regions[0 if holds else 1].blocks[0] == block
        block = parent.block
    return True


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize(("length", "rows", "start"), [
    (100, 64, 0), (100, 64, 32), (100, 64, 40), (100, 64, 64), (100, 32, 96), (35, 64, 0), (5, 64, 0), (97, 64, 104),
])  # fmt: skip
def test_tiles_and_zeros(length: int, rows: int, start: int, layout: str) -> None:
    """Every tile holds its rows in swizzled order before the swizzle, and 0 past the last row."""
    dim = 2 * COLUMNS
    shape = (BATCH, length, HEADS, dim) if layout == "BTNH" else (BATCH, HEADS, length, dim)
    array = np.arange(1, np.prod(shape) + 1, dtype=np.int32).reshape(shape)
    slot = np.full(rows * dim, -1, np.int32)
    with mlir.make_ir_context(), ir.Location.unknown():
        mgpu.dialect.register_dialect(ir.Context.current)  # pyright: ignore[reportPrivateImportUsage]
        module = ir.Module.create()
        i32 = ir.IntegerType.get_signless(32)
        source = ir.MemRefType.get(shape, i32)
        tile = ir.MemRefType.get((rows // 8, 2, 8, COLUMNS), i32)
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(source, tile, tile)
            def body(source: ir.Value, target: ir.Value, barrier: ir.Value) -> None:
                def record(**given: typing.Any) -> None:
                    """Executes the copy if it is emitted in the branch that is taken, once for each turn of a loop."""
                    if is_taken(typing.cast(typing.Any, ir.InsertionPoint.current).block):
                        pieces = (rows // 8) if len(given["gmem_transform"]) == 2 else 1
                        for turn in range(pieces):
                            execute(array, slot, given, turn)

                at = [mgpu.c(n, ir.IndexType.get()) for n in (1, 2)]
                there = mgpu.ds(mgpu.c(start, ir.IndexType.get()), rows)
                index = (at[0], there, at[1]) if layout == "BTNH" else (*at, there)
                _ClippedCopy(record)(
                    src_ref=source, dst_ref=target, gmem_slice=index, barrier=barrier, arrive=False,
                    gmem_transform=(mgpu.TileTransform((8, COLUMNS)),),
                )  # fmt: skip

    rows_there = (array[1, :, 2] if layout == "BTNH" else array[1, 2])[start : start + rows]
    want = np.zeros((rows, dim), np.int32)
    want[: len(rows_there)] = rows_there
    want = want.reshape(rows // 8, 8, 2, COLUMNS).swapaxes(1, 2)
    np.testing.assert_array_equal(slot.reshape(want.shape), want)


def execute(array: np.ndarray, slot: np.ndarray, given: dict[str, typing.Any], turn: int) -> None:
    """One copy, in a loop that number `turn`: as Mosaic does, the indexed dimensions go to the front, then the transforms give TMA's array,
    its box and its index; the box is written in row-major order, with 0 past the ends.
    """
    base, sizes, squeezed = mgpu.utils.parse_indices(given["gmem_slice"], array.shape, check_oob=False)
    front = [d for d, one in enumerate(squeezed) if one]
    order = (*front, *(d for d, one in enumerate(squeezed) if not one))
    transforms = (mgpu.TransposeTransform(order), *(t.batch(len(front)) for t in given["gmem_transform"]))
    ref, box, index = (
        given["src_ref"],
        tuple(sizes),
        tuple(x if isinstance(x, ir.Value) else mgpu.c(x, ir.IndexType.get()) for x in base),
    )
    for transform in transforms:
        ref, box, index = transform.apply(ref), transform.transform_shape(box), transform.transform_index(index)
    there = ir.MemRefType(ref.type)
    strides, offset = there.get_strides_and_offset()
    assert offset == 0
    view = np.lib.stride_tricks.as_strided(array, tuple(there.shape), [s * array.itemsize for s in strides])
    first = [number_of(x, turn) for x in index]
    found = np.zeros(box, array.dtype)
    ends = [max(0, min(size, n - at)) for size, n, at in zip(box, view.shape, first, strict=True)]
    found[tuple(slice(e) for e in ends)] = view[tuple(slice(at, at + e) for at, e in zip(first, ends, strict=True))]
    assert np.prod(ir.MemRefType(given["dst_ref"].type).shape) == found.size
    slot[turn * found.size : (turn + 1) * found.size] = found.reshape(-1)


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
def test_keys_are_not_copied() -> None:
    """Arrays beside keys and values take less than 1% of their bytes, whatever the number of keys is."""
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.backends.mosaic_gpu.test_clipped_copies"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    shares = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()}
    assert set(shares) == set(CALLS)
    assert max(shares.values()) < 0.01, shares


if __name__ == "__main__":
    decode_tiles.CLIPS_ROWS = True
    for call, fields in CALLS.items():
        print(call, temporary_share(**fields), flush=True)
