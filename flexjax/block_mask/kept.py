"""A block mask of which some blocks were left out by a proof (flexjax/tolerance): lists that may grow.

Lists of a mask are exact, and lists of a user hide what they leave out. These are neither: a kernel that visits more
blocks, because its tiles are larger, computes with the mask's own program and is never wrong. So they count as lists
that were made from the mask.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.block_mask import transpose
from flexjax.block_mask.parts import BROADCAST, Parts, parts_of
from flexjax.errors import bad_argument
from flexjax.tolerance.checks import check_bound, check_tolerance
from flexjax.tolerance.claim import Claim, digests_of
from flexjax.tolerance.keep import Given, Spec, compiled
from flexjax.tolerance.static import indices_of, why_nothing
from flexjax.trace.trace_mod import trace_score_mod
from flexjax.types import ScoreMod

Array = jax.Array


def in_bits(shape: tuple[int, ...]) -> bool:
    """Whether `arrays_of` makes bits of blocks of this shape."""
    return math.prod(shape) > transpose.LARGE


def arrays_of(keep: Array, flags: tuple[Array, Array] | None) -> list[Array]:
    """The lists, or bits where these are many, of the blocks `keep`, bool [B, H, rows, columns], by their class."""
    partial = jnp.zeros_like(keep) if flags is None else keep & flags[0]
    full = keep if flags is None else keep & flags[1]
    if in_bits(keep.shape):
        return [transpose.bits_of(partial), transpose.bits_of(full)]
    no_partial = [jnp.zeros(keep.shape[:3], jnp.int32), jnp.zeros((*keep.shape[:3], 0), jnp.int32)]
    return [*(no_partial if flags is None else transpose.lists_of(partial)), *transpose.lists_of(full)]


def with_arrays(
    mask: Parts | None, arrays: list[Array], lengths: tuple[int, int], block_size: tuple[int, int]
) -> Parts:
    """The block mask with `arrays_of` in place of its lists; without a mask, one whose blocks are all full."""
    rows = -(-lengths[0] // block_size[0])
    if mask is None:
        return parts_of(arrays, (), None, lengths, block_size, (0 if len(arrays) == 4 else rows, rows))
    return parts_of(
        arrays, mask.captures, mask.program, lengths, block_size, (rows, rows), mask.lists_decide, mask.origin
    )


def without_small_blocks(
    mask: Parts,
    score_mod: ScoreMod | None,
    counts: tuple[int | None, int | None],
    bound: object,
    tolerance: object,
    scale: float | None,
    weighted: bool = False,
) -> Parts:
    """The block mask without what provably holds at most `tolerance` of a row where no score is above `bound`.

    `counts` is (batch, heads), None where all share one list; `weighted`: score_mod gives weights. Raises ValueError
    for arguments that do not fit.
    """
    most = check_tolerance(tolerance)
    if score_mod is None:
        raise bad_argument("score_mod", "None beside tolerance", "the score_mod of the call", "It says what falls.")
    if bound is None:
        raise bad_argument(
            "score_bound", "None beside tolerance", "a number", "|scale * query . key| is at most score_bound."
        )
    sizes = (*(n or BROADCAST for n in counts), mask.q_len, mask.kv_len)
    traced = trace_score_mod(score_mod, sizes)  # type: ignore[arg-type]
    for name, axis, count in (("batch", "b", counts[0]), ("heads", "h", counts[1])):
        if count is None and axis in indices_of(traced.program):
            raise ValueError(
                f"`{name}` is None but `score_mod` depends on `{axis}`; expected the number of "
                f"{name if name == 'heads' else 'batch entries'}. Pass {name}=... so that each gets its own blocks."
            )
    limit = check_bound(bound, (counts[0] or 1, counts[1] or 1, *mask.blocks))
    given = (*traced.arrays, *mask.captures, limit, *([] if mask.origin is None else jax.tree.leaves(mask.origin)))
    if any(isinstance(x, Tracer) for x in (*given, *mask.lists)):
        raise bad_argument(
            "tolerance",
            "given to create_block_mask with traced arrays",
            "arrays that are known, whose numbers the block mask keeps",
            "Pass tolerance= to flex_attention, which reads them in each call.",
        )
    claim = Claim(traced.program, sizes, digests_of(traced.arrays), scale, most, weighted)  # type: ignore[arg-type]
    if why_nothing(traced.program) is not None or mask.q_len == 0 or mask.kv_len == 0:
        return dataclasses.replace(mask, claim=claim)
    heads = max(counts[0] or 1, mask.list_dims[0]), max(counts[1] or 1, mask.list_dims[1])
    origin = mask.origin
    spec = Spec(
        traced.program, mask.program, heads, (mask.q_len, mask.kv_len, *mask.block_size), most,  # type: ignore[arg-type]
        origin=None if origin is None else origin.layout, weighted=weighted,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        flags = mask.flags()
        starts = None if origin is None else origin.starts
        keep = np.asarray(compiled(spec)(Given(traced.arrays, mask.captures, flags, bound=limit, starts=starts)).keep)
        places = [np.argwhere(keep & np.asarray(x)) for x in flags]
        rows, columns = (*heads, mask.blocks[0]), (*heads, mask.blocks[1])
        widths = transpose.rounded([transpose.longest_row(p, rows) for p in places], mask.blocks[1])
        turned = [transpose.longest_row(transpose.transposed_places(p), columns) for p in places]
        lists = [x for p, w in zip(places, widths, strict=True) for x in transpose.lists_of_places(p, rows, w)]
        arrays = [jnp.asarray(x) for x in lists]
    made = parts_of(
        arrays, mask.captures, mask.program, (mask.q_len, mask.kv_len), mask.block_size,
        transpose.rounded(turned, mask.blocks[0]), origin=origin, on_host=tuple(lists),  # type: ignore[arg-type]
    )  # fmt: skip
    return dataclasses.replace(made, claim=claim)
