"""Splits a call by residues of its tokens, for masks that hide keys of other residues, such as dilated windows.

A mask with the conjunct (q - kv) % m == 0 makes m problems that have nothing to do with each other, one for each
residue. In the order of the sequence every block has entries of all of them, so a kernel computes m entries for each
visible one. Split, it computes them alone. Token t is token i = t // m of residue r = t % m, and residues become heads:

    head       H = r * N + h        key head r * M + h // G = H // G, with G = N / M query heads of a key head
    query      [B, T, N, D] in layout BTNH  is  [B, T / m, m * N, D], the same memory; BNTH takes a transposition
    programs   read h = H % N, q = m * i + H // N, kv = m * j + H // N, so that q - kv = m * (i - j) and the conjunct is
               gone

The rest of the mask may not depend on the residue (comparisons such as q >= kv do not, `_cancels`), so one pair of
lists serves all heads; they are made while the call is traced (`residues_of`), and the plan has them. Where m does not
divide a length, the last token of some residues does not exist: arrays get up to m - 1 tokens of zeros, which the mask
hides, and the last blocks are not full.

Not split, by `residues_of` and call/prepare.py: masks that capture arrays or read b or h beside the conjunct, score
mods that read arrays by q or kv (those reads would be gathers), origins, lengths, pages and lists of the user.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis.patterns import residue_conjuncts
from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, classify_on_host
from flexjax.integers import cdiv
from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import KV, SCORE, UNIFORM, Atom, H, Linear, Op, Program, Q, Step, Val, axes_of
from flexjax.ir.replay import replay
from flexjax.plan.kernel_plan import (
    BackwardInputs,
    BlockLayout,
    BlockLists,
    Gradients,
    KernelPlan,
    Operands,
    Residues,
    Results,
)
from flexjax.plan.known_lists import MOST_BLOCKS, KnownLists
from flexjax.plan.rewrite import Rewrite
from flexjax.trace.lift_numpy import eager_without_mesh

Array = jax.Array

BLOCK = 128  # block size of the lists of a split call, in queries and keys
GAIN = 1.5
"""A call is split if it visits so many times the entries of the split call.

Below, shorter sequences and more padding in their last blocks may cost more than is gained.
"""


# ------------------------------------------------------------------- while a call is traced


def residues_of(mask: Program, scores: Sequence[Program], lengths: tuple[int, int], visited: float) -> Residues | None:
    """How a call is split; None where its programs do not allow it or the gain is too small (GAIN).

    `scores` are all programs of score_mod; `visited` is the mean number of entries of visited blocks.
    """
    modulus, _ = residue_conjuncts(mask)
    if modulus < 2 or mask.captures or mask.calls or mask.reads("b") or mask.reads("h") or min(lengths) < modulus:
        return None
    if any(axes_of(a) - UNIFORM for score in scores for load in score.loads for a in load.index):
        return None
    blocks, entries = _blocks(mask, modulus, lengths)
    return Residues(modulus, blocks) if blocks is not None and visited >= GAIN * modulus * entries else None


@functools.lru_cache(maxsize=256)
def _blocks(mask: Program, modulus: int, lengths: tuple[int, int]) -> tuple[BlockLayout | None, int]:
    """(the blocks of the mask among the tokens of one residue, the entries of those that are visited).

    No blocks if the mask among them depends on the residue, or if they are too many (MOST_BLOCKS).
    """
    program = _split_mask(mask, modulus, 1, lengths, ends=False)
    rows, columns = (_tokens(n, modulus) for n in lengths)
    counts = (cdiv(rows, BLOCK), cdiv(columns, BLOCK))
    if program is None or counts[0] * counts[1] > MOST_BLOCKS:
        return None, 0
    with eager_without_mesh():
        partial, full = classify_on_host(BlockedMask(program, (1, 1), (rows, columns, BLOCK, BLOCK)), (), None)
    # the last token of some residues does not exist where the modulus does not divide the length
    cut = np.zeros(len(full), bool)
    for axis, length, count in zip((2, 3), lengths, counts, strict=True):
        if length % modulus:
            cut |= full[:, axis] == count - 1
    pairs = (np.concatenate([partial, full[cut]]), full[~cut])
    grid, columns_grid = (1, 1, counts[0]), (1, 1, counts[1])
    widths = [transpose.longest_row(places, grid) for places in pairs]
    q_widths = [transpose.longest_row(transpose.transposed_places(places), columns_grid) for places in pairs]
    arrays: list[np.ndarray | None] = []
    for places, width in zip(pairs, widths, strict=True):
        num, index = transpose.lists_of_places(places, grid, width)
        arrays += (num, index) if width else (None, None)
    known = KnownLists(tuple(arrays), fixed=True)
    layout = BlockLayout(1, 1, BLOCK, BLOCK, widths[0], widths[1], q_widths[0], q_widths[1], known=known)
    return layout, (len(partial) + len(full)) * BLOCK * BLOCK


def _tokens(length: int, modulus: int) -> int:
    """The tokens of each residue, with that which does not exist for some of them."""
    return cdiv(length, modulus)


def _new_builder(
    program: Program, modulus: int, heads: int, lengths: tuple[int, int]
) -> tuple[Builder, list[dict[int, Atom]]]:
    """(builder of a program of the split call, inputs at residue 0, inputs at the head's own residue)."""
    number = lambda n: literal(n, "int32")
    sizes = (program.sizes[0], heads * modulus, _tokens(lengths[0], modulus), _tokens(lengths[1], modulus))
    builder = Builder(sizes, program.inputs[SCORE].dtype)
    builder.captures = list(program.captures)
    first: dict[int, Atom] = {v.id: v for v in builder.inputs}
    residue = builder.op("floordiv", (builder.inputs[H], number(heads)), "int32")
    first[H] = number(0) if heads == 1 else builder.op("floormod", (builder.inputs[H], number(heads)), "int32")
    for axis in (Q, KV):
        first[axis] = builder.op("mul", (builder.inputs[axis], number(modulus)), "int32")
    own = {axis: builder.op("add", (first[axis], residue), "int32") for axis in (Q, KV)}
    return builder, [first, first | own]


@functools.lru_cache(maxsize=512)
def _split_program(program: Program, modulus: int, heads: int, lengths: tuple[int, int]) -> Program:
    """A program of the split call, with the same captures and gradients; `heads` are query heads of the call."""
    builder, (_, own) = _new_builder(program, modulus, heads, lengths)
    found = replay(program, builder, own)
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])


def _cancels(atom: Atom, made: dict[int, Step]) -> bool:
    """Whether a conjunct compares two sides that move alike from residue to residue, such as q >= kv."""
    step = made.get(atom.id) if isinstance(atom, Val) else None
    if not isinstance(step, Op) or step.prim not in ("ge", "gt", "le", "lt", "eq", "ne"):
        return False
    one, other = (a.linear if isinstance(a, Val) else Linear() for a in step.inputs)
    return one is not None and other is not None and one.q + one.kv == other.q + other.kv


@functools.lru_cache(maxsize=512)
def _split_mask(mask: Program, modulus: int, heads: int, lengths: tuple[int, int], ends: bool) -> Program | None:
    """The mask of the split call without the conjunct of the residues; None if another one depends on the residue.

    With `ends` it also hides the tokens that do not exist, which depends on the residue.
    """
    builder, (first, own) = _new_builder(mask, modulus, heads, lengths)
    _, parts = residue_conjuncts(mask)
    with_residue = replay(mask, builder, own)
    made = {out.id: step for step in mask.steps for out in step.outs}
    if any("h" in axes_of(with_residue.new(part)) and not _cancels(part, made) for part in parts):
        return None
    found = replay(mask, builder, first)
    kept = [found.new(part) for part in parts]
    for axis, length in zip((Q, KV), lengths, strict=True):
        if ends and length % modulus:
            kept.append(builder.op("lt", (own[axis], literal(length, "int32")), "bool"))
    result: Atom = literal(True, "bool")
    for part in kept:
        result = builder.op("and", (result, part), "bool")
    return builder.finish([result])


# ------------------------------------------------------------------- while a pass is lowered


@functools.lru_cache(maxsize=512)
def split_plan(plan: KernelPlan) -> KernelPlan:
    """The plan of the split call, which has no `residues`."""
    assert plan.residues is not None
    assert plan.mask is not None
    modulus, lengths = plan.residues.modulus, (plan.q_len, plan.kv_len)
    split = lambda program: None if program is None else _split_program(program, modulus, plan.q_heads, lengths)
    return dataclasses.replace(
        plan,
        q_heads=plan.q_heads * modulus,
        kv_heads=plan.kv_heads * modulus,
        q_len=_tokens(plan.q_len, modulus),
        kv_len=_tokens(plan.kv_len, modulus),
        score=split(plan.score),
        mask=_split_mask(plan.mask, modulus, plan.q_heads, lengths, ends=True),
        dropout=split(plan.dropout),
        blocks=plan.residues.blocks,
        extra_heads=plan.extra_heads * modulus,
        residues=None,
    )


def rewrite(plan: KernelPlan) -> Rewrite | None:
    """The call split by residues; None for a plan without `residues`."""
    if plan.residues is None:
        return None
    modulus, made = plan.residues.modulus, split_plan(plan)
    cut = plan.layout == "BNTH" or plan.q_len % modulus or plan.kv_len % modulus
    why = (
        f"split by residues: token t is token t // {modulus} of residue t % {modulus}, {modulus} x {plan.q_heads} "
        f"heads of {made.q_len} queries and {made.kv_len} keys, "
        f"{'in copies of the arrays' if cut else 'without a copy'}"
    )
    part = functools.partial
    return Rewrite(made, why, part(_operands, plan), part(_results, plan), part(_given, plan), part(_gradients, plan))


def split_derivative(plan: KernelPlan, derivative: Program | None) -> Program | None:
    """The derivative program of score_mod in the split call; plan: with `residues`, as for all functions below."""
    if derivative is None:
        return None
    assert plan.residues is not None
    return _split_program(derivative, plan.residues.modulus, plan.q_heads, (plan.q_len, plan.kv_len))


def split_rows(plan: KernelPlan, x: Array, fill: float = 0.0) -> Array:
    """An array [B, T, N, ...] (BTNH) in the split call: [B, T / m, m * N, ...]; tokens that do not exist get `fill`."""
    assert plan.residues is not None
    modulus = plan.residues.modulus
    tokens, heads = (1, 2) if plan.layout == "BTNH" else (2, 1)
    padding = -x.shape[tokens] % modulus
    if padding:
        widths = [(0, padding if axis == tokens else 0) for axis in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill)
    shape = list(x.shape)
    shape[tokens : tokens + 1] = [shape[tokens] // modulus, modulus]
    x = x.reshape(shape)
    if plan.layout == "BNTH":
        x = jnp.moveaxis(x, tokens + 1, heads)  # [B, m, N, T / m, ..]
    return x.reshape(*x.shape[:heads], -1, *x.shape[heads + 2 :])


def merge_rows(plan: KernelPlan, x: Array, length: int) -> Array:
    """The inverse of `split_rows`, with `length` tokens."""
    assert plan.residues is not None
    modulus = plan.residues.modulus
    tokens, heads = (1, 2) if plan.layout == "BTNH" else (2, 1)
    x = x.reshape(*x.shape[:heads], modulus, -1, *x.shape[heads + 1 :])
    if plan.layout == "BNTH":
        x = jnp.moveaxis(x, heads, 3)  # [B, N, T / m, m, ..]
    x = x.reshape(*x.shape[:tokens], -1, *x.shape[tokens + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=tokens)


def known_lists(plan: KernelPlan) -> BlockLists:
    """The block lists of one residue, numpy arrays; None for lists of width 0."""
    assert plan.residues is not None
    assert plan.residues.blocks.known is not None
    return BlockLists(*typing.cast(tuple, plan.residues.blocks.known.arrays))


def _operands(plan: KernelPlan, operands: Operands) -> Operands:
    """Captured arrays stay; sinks are repeated for each residue."""
    assert plan.residues is not None
    rows = [None if x is None else split_rows(plan, x) for x in operands[:5]]
    return operands._replace(
        **dict(zip(Operands._fields[:5], rows, strict=True)),  # type: ignore[arg-type]
        sinks=None if operands.sinks is None else jnp.tile(operands.sinks, plan.residues.modulus),
        lists=BlockLists(*(None if x is None else jnp.asarray(x) for x in known_lists(plan))),
    )


def _results(plan: KernelPlan, results: Results, operands: Operands) -> Results:
    return Results(*(None if x is None else merge_rows(plan, x, plan.q_len) for x in results))  # type: ignore[arg-type]


def _given(plan: KernelPlan, given: BackwardInputs) -> BackwardInputs:
    """Rows that do not exist are hidden rows, whose out is 0 and whose lse is -inf."""
    fills = (0.0, -jnp.inf, -jnp.inf, 0.0, 0.0)
    rows = (None if x is None else split_rows(plan, x, f) for x, f in zip(given.results, fills, strict=True))
    return given._replace(
        results=Results(*rows),  # type: ignore[arg-type]
        d_out=split_rows(plan, given.d_out),
        d_lse=None if given.d_lse is None else split_rows(plan, given.d_lse),
        derivative=split_derivative(plan, given.derivative),
    )


def _gradients(plan: KernelPlan, gradients: Gradients, given: BackwardInputs) -> Gradients:
    """Gradients of captured arrays stay, because residues read the same arrays; that of a sink is a sum."""
    assert plan.residues is not None
    lengths = (plan.q_len, plan.kv_len, plan.kv_len, plan.q_len, plan.kv_len)
    rows = [None if x is None else merge_rows(plan, x, n) for x, n in zip(gradients[:5], lengths, strict=True)]
    sinks = gradients.sinks
    if sinks is not None:
        sinks = sinks.reshape(plan.residues.modulus, -1).astype(plan.score_dtype).sum(0)
    return Gradients(*typing.cast(list, rows), sinks=sinks, score_captures=gradients.score_captures)
