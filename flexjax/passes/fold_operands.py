"""The programs and operands of a mapped call for its folded batch: V copies of a call with B batch entries each.

"Mapped" arrays have an axis of copies in front; the others are shared by all copies. `plan` is that of one copy,
`operands` are those of the mapped call, `flags` say which of them are mapped, and `size` is V.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.ir.fold_vmap import fold_batch
from flexjax.ir.origin import OriginLayout, Starts
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Lengths, Operands, Scales

Array = jax.Array


class CannotFold(Exception):
    """The call cannot be folded: a loop over the copies has to run."""


def fold_program(program: Program | None, size: int, batch: int, mapped: Sequence[bool]) -> Program | None:
    """The program for the folded batch; CannotFold if it reads a mapped array as a whole."""
    if program is None or size * batch == 0 or not (any(mapped) or program.reads("b")):
        return program
    if any(isinstance(a, int) and mapped[a] for call in program.calls for a in call.arguments):
        raise CannotFold
    return fold_batch(program, size, batch, mapped)


def into_batch(x: Array, mapped: bool, size: int) -> Array:
    """x, [V, B, ...] if mapped, else [B, ...] and repeated for each copy, as [V * B, ...]."""
    whole = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return whole.reshape(size * whole.shape[1], *whole.shape[2:])


def _for_each_entry(x: Array, mapped: bool, size: int, batch: int) -> Array:
    """x, [V, B or 1, ...] if mapped, else [B or 1, ...], with an entry of its own for each: [V * B, ...]."""
    whole = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return into_batch(jnp.broadcast_to(whole, (size, batch, *whole.shape[2:])), True, size)


def fold_lists(plan: KernelPlan, operands: Operands, flags: Operands, size: int) -> tuple[typing.Any, int]:
    """(block lists for the folded batch, their batch size: 1 if all share the lists, 0 without lists)."""
    if operands.lists is None or plan.blocks is None:
        return operands.lists, 0
    if plan.blocks.batch == 1 and not any(jax.tree.leaves(flags.lists)):
        return operands.lists, 1
    spread = functools.partial(_for_each_entry, size=size, batch=plan.batch)
    return jax.tree.map(spread, operands.lists, flags.lists), size * plan.batch


def fold_lengths(lengths: Lengths | None, mapped: Lengths | None, size: int) -> Lengths | None:
    """The lengths for the folded batch, int32 [V * B]."""
    if lengths is None or mapped is None:
        return None
    fold = lambda x, m: None if x is None else into_batch(x, m, size)
    return Lengths(fold(lengths.query, mapped.query), fold(lengths.key, mapped.key))


def fold_pages(plan: KernelPlan, operands: Operands, flags: Operands, size: int) -> dict[str, typing.Any]:
    """The key and value pools, pages (int32 [V * B, n]) and scales for the folded batch, by name.

    A pool that all copies share stays, and so do its scales. If a pool or a scale is mapped, the pools of all copies
    become one, and page p of copy v is page v * P + p there; a page number outside 0 .. P - 1 becomes -1. Scales become
    float32 [V * P, M] then.
    """
    pages, scales = operands.pages, operands.scales
    assert pages is not None
    copied = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    pages = copied(pages, flags.pages)
    names = {"key": operands.key, "value": operands.value}
    if any(jax.tree.leaves((flags.key, flags.value, flags.scales))):
        pool = operands.key.shape[1 if flags.key else 0]
        first = pool * jnp.arange(size, dtype=jnp.int32)[:, None, None]
        pages = jnp.where((pages >= 0) & (pages < pool), pages + first, -1)
        names = {n: into_batch(x, getattr(flags, n), size) for n, x in names.items()}
        if scales is not None and flags.scales is not None:
            by_page = lambda x: x if x.ndim == 3 else jnp.broadcast_to(x[:, None], (size, pool, x.shape[1]))
            scales = Scales(
                *(by_page(copied(x, m)).reshape(size * pool, -1) for x, m in zip(scales, flags.scales, strict=True))
            )
    return {**names, "pages": pages.reshape(size * plan.batch, -1), "scales": scales}


def fold_origin(
    plan: KernelPlan, operands: Operands, flags: Operands, size: int
) -> tuple[OriginLayout | None, Starts | None]:
    """The origin (layout, starts) for the folded batch: one row if all share it, else V * B rows."""
    layout, starts, mapped = plan.origin, operands.origin, flags.origin
    if layout is None or starts is None or mapped is None:
        return layout, starts
    if layout.rows == 1 and not any(mapped):
        return layout, starts
    rows = (_for_each_entry(x, bool(m), size, plan.batch) for x, m in zip(starts, mapped, strict=True))
    return dataclasses.replace(layout, rows=size * plan.batch), Starts(*rows)
