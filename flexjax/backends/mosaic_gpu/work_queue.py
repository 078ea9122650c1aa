"""Tiles of queries handed out one by one, by a counter in memory.

Programs that stay on their multiprocessor copy ahead over the end of a tile, but a fixed share of tiles is uneven where rows
differ in length. Here the copying warpgroup of a program that is nearly done draws the next number, looks up where that tile
lies and what it visits, and leaves it in shared memory beside the queries; the computing warpgroups find both at once.

In the simulator every program draws the numbers that are its own in turn, which is all the same to what follows.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from flexjax.backends.mosaic_gpu.forward_walk import Item, Ref, Scalar, i32

WORDS = 16
"""Room for an item: whether there is one, its eight or nine numbers; the last word is for passing on a drawn number."""
DRAWN = WORDS - 1


def memory(slots: int) -> typing.Any:
    return plgpu.SMEM((slots * WORDS,), jnp.int32)


def counter(programs: int) -> jax.Array:
    """The first `programs` tiles are taken before anything is drawn."""
    return jnp.full((1,), programs, jnp.int32)


def put(box: Ref, slot: Scalar, item: Item | None) -> None:
    """The item into the box; None says that there are no more."""
    first = slot * i32(WORDS)
    if item is None:
        box[first] = i32(0)
        return
    box[first] = i32(1)
    for n, value in enumerate(jax.tree.leaves(item)):
        box[first + i32(1 + n)] = i32(value)


def get(box: Ref, slot: Scalar, like: Item) -> tuple[Scalar, Item]:
    """Whether there is an item in the box, and the item; `like` has its structure."""
    first = slot * i32(WORDS)
    leaves, tree = jax.tree.flatten(like)
    found = [box[first + i32(1 + n)] for n in range(len(leaves))]
    return box[first] != 0, jax.tree.unflatten(tree, found)


def draw(drawn: Ref, box: Ref, number: Scalar, programs: int, interpret: bool) -> Scalar:
    """The number of the next tile, after `number`; for one warpgroup."""
    if interpret:
        return number + i32(programs)
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat),
    )
    def take(_: typing.Any, global_counter: typing.Any, shared: typing.Any) -> typing.Any:
        word = arith.constant(ir.IndexType.get(), 0)
        with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
            mine = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
                "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
                mgpu_utils.memref_ptr(global_counter),
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref.store(mine, shared, [word])
        mgpu_utils.warpgroup_barrier()
        value = memref.load(shared, [word])
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return take(drawn.at[pl.ds(0, 1)], box.at[pl.ds(DRAWN, 1)])  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def each(body: typing.Any, more: Scalar, carry: typing.Any) -> typing.Any:
    """`more, carry = body(carry)` as long as there is more; the last carry."""
    return lax.while_loop(lambda state: state[0], lambda state: body(*state[1:]), (more, *carry))[1:]
