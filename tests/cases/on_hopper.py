"""Small attention problems for the kernel tests: a plan with its operands, and what numpy makes of it in float64."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands
from flexjax.trace import trace_mod
from flexjax.types import KernelOptions

Mod = Callable[..., typing.Any]


class Problem(typing.NamedTuple):
    plan: KernelPlan
    operands: Operands
    out: np.ndarray
    lse: np.ndarray
    max_scores: np.ndarray


def over_all(mod: Mod, sizes: tuple[int, int, int, int], scores: jax.Array | None = None) -> np.ndarray:
    """mod at every (b, h, q, kv), after the score where there is one."""
    leading = 0 if scores is None else 1
    for axis in (3, 2, 1, 0):
        mod = jax.vmap(mod, in_axes=(0,) * leading + tuple(0 if i == axis else None for i in range(4)))
    index = [jnp.arange(n, dtype=jnp.int32) for n in sizes]
    return np.asarray(mod(*index) if scores is None else mod(scores, *index))


def block_lists(on: np.ndarray, block: tuple[int, int], use_full: bool = True) -> tuple[BlockLayout, BlockLists]:
    """Lists of a dense [B, H, T, S] mask."""
    b, h, t, s = on.shape
    rows, cols = -(-t // block[0]), -(-s // block[1])
    kinds = np.zeros((b, h, rows, cols), np.int8)
    for i in range(rows):
        for j in range(cols):
            part = on[:, :, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            full = part.all((2, 3)) & use_full
            kinds[:, :, i, j] = np.where(full, 2, part.any((2, 3)))

    def pack(kind: int) -> tuple[jax.Array | None, jax.Array | None, int]:
        hit = kinds == kind
        width = int(hit.sum(-1).max())
        if width == 0:
            return None, None, 0
        index = np.argsort(~hit, axis=-1, kind="stable")[..., :width].astype(np.int32)
        return jnp.asarray(hit.sum(-1).astype(np.int32)), jnp.asarray(index), width

    partial_num, partial_index, partial = pack(1)
    full_num, full_index, full = pack(2)
    lists = BlockLists(partial_num, partial_index, full_num, full_index)
    return BlockLayout(b, h, *block, partial, full, 0, 0), lists


def dense(
    arrays: tuple[jax.Array, ...],
    plan: KernelPlan,
    score: Mod | None,
    on: np.ndarray | None,
    dropout: Mod | None,
    sinks: jax.Array | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, lse and largest scores in float64, in the layout of the plan."""
    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    q, k, v = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in arrays)
    if plan.layout == "BTNH":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (np.repeat(x, plan.group, axis=1) for x in (k, v))
    s = np.einsum("bntd,bnsd->bnts", q, k) * plan.scale
    if score is not None:
        s = over_all(score, sizes, jnp.asarray(s, jnp.float32)).astype(np.float64)
    if on is not None:
        s = np.where(on, s, -np.inf)
    largest = s.max(-1)
    shift = largest if sinks is None else np.maximum(largest, np.asarray(sinks)[None, :, None])
    shift = np.where(np.isfinite(shift), shift, 0.0)
    p = np.exp(s - shift[..., None])
    total = p.sum(-1)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks)[None, :, None] - shift)
    dead = total == 0
    total = np.where(dead, 1.0, total)
    lse = np.where(dead, -np.inf, np.log(total) + shift)
    p = p / total[..., None]
    if dropout is not None:
        p = p * over_all(dropout, sizes, jnp.asarray(s, jnp.float32))
    out = np.einsum("bnts,bnse->bnte", p, v)
    if plan.layout == "BTNH":
        return out.swapaxes(1, 2), lse.swapaxes(1, 2), largest.swapaxes(1, 2)
    return out, lse, largest


def problem(
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    q_len: int = 256,
    kv_len: int = 256,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    layout: str = "BTNH",
    scale: float | None = None,
    score: Mod | None = None,
    mask: Mod | None = None,
    dropout: Mod | None = None,
    sinks: bool = False,
    block: tuple[int, int] | None = (128, 128),
    mask_batch: int = 1,
    mask_heads: int = 1,
    use_full: bool = True,
    max_scores: bool = False,
    interpret: bool = True,
    seed: int = 0,
) -> Problem:
    """`block=None`: no lists, the mask applies everywhere."""
    rng = np.random.default_rng(seed)
    value_dim = value_dim or dim
    sizes = (batch, heads, q_len, kv_len)

    def random(length: int, n: int, d: int) -> jax.Array:
        shape = (batch, length, n, d) if layout == "BTNH" else (batch, n, length, d)
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    arrays = (random(q_len, heads, dim), random(kv_len, kv_heads, dim), random(kv_len, kv_heads, value_dim))
    traced_score = trace_mod.trace_score_mod(score, sizes) if score else None
    traced_mask = trace_mod.trace_mask_mod(mask, sizes) if mask else None
    traced_dropout = trace_mod.trace_score_mod(dropout, sizes) if dropout else None
    on = over_all(mask, sizes) if mask else None
    blocks, lists = None, None
    if on is not None and block is not None:
        blocks, lists = block_lists(on[:mask_batch, :mask_heads], block, use_full)
    logits = jnp.asarray(rng.normal(size=heads), jnp.float32) if sinks else None
    plan = KernelPlan(
        batch, heads, kv_heads, q_len, kv_len, dim, value_dim, dtype, layout,
        dim**-0.5 if scale is None else scale,
        score=traced_score and traced_score.program,
        mask=traced_mask and traced_mask.program,
        dropout=traced_dropout and traced_dropout.program,
        blocks=blocks, has_sinks=sinks, max_scores=max_scores, options=KernelOptions(interpret=interpret),
    )  # fmt: skip
    captures = [t.arrays if t else () for t in (traced_score, traced_mask, traced_dropout)]
    operands = Operands(*arrays, None, None, logits, *captures, lists)
    return Problem(plan, operands, *dense(arrays, plan, score, on, dropout, logits))
