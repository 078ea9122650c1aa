"""Tiles of queries handed out one by one, by a counter in memory.

Programs that stay on their multiprocessor copy ahead over the end of a tile, but a fixed share of tiles is uneven where rows
differ in length. Here the copying warpgroup of a program that is nearly done draws the next number, looks up where that tile
lies and what it visits, and leaves it in shared memory beside the queries; the computing warpgroups find both at once.

In the simulator every program draws the numbers that are its own in turn, which is all the same to what follows.
"""

import contextlib
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=SPLAT)
    def take(_: typing.Any, global_counter: typing.Any, shared: typing.Any) -> typing.Any:
        word = arith.constant(ir.IndexType.get(), 0)
        with _one_thread():
            memref.store(_fetch_add(global_counter), shared, [word])
        mgpu_utils.warpgroup_barrier()
        return _splat(memref.load(shared, [word]))

    return take(drawn.at[pl.ds(0, 1)], box.at[pl.ds(DRAWN, 1)])  # pyright: ignore[reportCallIssue]  # the context argument is filled in


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """What is emitted within runs in one thread of the warpgroup.

    Mosaic's own `single_thread` remembers in a global of the process that it is inside: where two Python threads lower at once, one
    of them emits its body for all 128 threads.
    """
    elected = scf.IfOp(mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP))  # pyright: ignore[reportAttributeAccessIssue]
    with ir.InsertionPoint(elected.then_block):
        yield
        scf.yield_([])


SPLAT = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))


def _fetch_add(counter: typing.Any) -> typing.Any:
    """What a counter in memory was before one is added to it; for one thread."""
    return mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
        mgpu_utils.memref_ptr(counter),
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )


def _splat(value: typing.Any) -> typing.Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


# ------------------------------------------------------------------- start numbers


def draw_start(counter: Ref, word: Ref) -> None:
    """Puts how many CTAs drew from `counter` before this one into `word`, both [1] int32 in memory; for one warpgroup.

    CUDA promises no order in which CTAs start, so the number of a CTA in its grid says nothing about that. The word lies in
    global memory, because shared memory has no byte to spare where this is used.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_: typing.Any, counted: typing.Any, mine: typing.Any) -> None:
        with _one_thread():
            memref.store(_fetch_add(counted), mine, [arith.constant(ir.IndexType.get(), 0)])
        mgpu_utils.warpgroup_barrier()

    take(counter, word)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def read_start(word: Ref) -> Scalar:
    """What `draw_start` left there, for any warpgroup of the CTA after a barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=SPLAT)
    def read(_: typing.Any, mine: typing.Any) -> typing.Any:
        found = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
            "ld.relaxed.cta.global.b32 $0, [$1];",
            mgpu_utils.memref_ptr(mine),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        # of the first lane: the compiler then knows that a warp agrees, and keeps what follows in uniform registers
        same = mgpu_utils.inline_ptx(  # pyright: ignore[reportAttributeAccessIssue]
            "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
            found,
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return _splat(same)

    return read(word)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def each(body: typing.Any, more: Scalar, carry: typing.Any) -> typing.Any:
    """`more, carry = body(carry)` as long as there is more; the last carry."""
    return lax.while_loop(lambda state: state[0], lambda state: body(*state[1:]), (more, *carry))[1:]
