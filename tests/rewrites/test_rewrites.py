"""A call and the call that is run in its place have the same results and the same gradients, for every rewrite."""

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, Origin, masks
from flexjax.backends.reference.support import DenseBackend
from flexjax.backends.target import Target
from flexjax.backends.xla import larger_blocks
from flexjax.backends.xla.support import XlaBackend
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.paged.call import PagedArguments, prepare_paged
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.problem import Problem
from flexjax.plan.rewrite import Rewrite, Steps, backward, forward, last_plan
from flexjax.rewrites import (
    extra_features,
    float8,
    join_heads,
    lengths_as_mask,
    mask_blocks,
    pack_heads,
    pages,
    residues,
)
from tests.arrays import array
from tests.bound_case import BoundCase
from tests.cases import CASES

GIVEN = tuple[Problem, Operands]
CPU, GPU = Target("cpu"), Target("cuda", "NVIDIA H100")
RNG = np.random.default_rng(7)
B, S, N, D = 2, 160, 16, 8
LENGTHS = array([101, S])
AUX = AuxRequest(lse=True, max_scores=True)


def normal(*shape: int) -> typing.Any:
    return array(RNG.standard_normal(shape), jnp.float32)


# ------------------------------------------------------------------- calls that are no rows of the table

SLOPE, TABLE, ROW, COLUMN = normal(N), normal(N, 2 * S), normal(B, S), normal(S)


def every_load(s: typing.Any, b: typing.Any, h: typing.Any, i: typing.Any, j: typing.Any) -> typing.Any:
    return s * SLOPE[h] + TABLE[h, i - j + S] + ROW[b, i] + COLUMN[j] + 0.1 * h


def few_queries(tokens: int, kv_heads: int, layout: str = "BTNH", heads: int = N, **arguments: typing.Any) -> GIVEN:
    turn = lambda x: x if layout == "BTNH" else jnp.swapaxes(x, 1, 2)
    arrays = (turn(normal(B, *size, D)) for size in ((tokens, heads), (S, kv_heads), (S, kv_heads)))
    call = prepare(Arguments(*arrays, layout=layout, return_aux=AUX, **arguments))
    return call.problem(None), call.operands


def at_the_end(tokens: int) -> dict[str, typing.Any]:
    return {
        "score_mod": every_load,
        "mask_mod": masks.causal,
        "origin": Origin(query=LENGTHS - tokens, whole=(B, N, S, S)),
    }


def with_lengths(tokens: int) -> dict[str, typing.Any]:
    given = {"query_seq_lengths": array([tokens, tokens - 1]), "key_value_seq_lengths": LENGTHS}
    return given | {"mask_mod": masks.causal, "origin": Origin(query="end")}


def of_later_heads() -> GIVEN:
    """A read at a head that is computed of a captured scalar, the first head of the origin."""
    reach = array(np.arange(2 * N) * 9)
    mask_mod = lambda b, h, q, kv: q - kv < reach[h]
    return few_queries(60, 8, mask_mod=mask_mod, origin=Origin(head=N), key_value_seq_lengths=array([50, 17]))


STEEP = array(np.linspace(0.3, 3.0, N), jnp.float32)


def falling(s: typing.Any, b: typing.Any, h: typing.Any, i: typing.Any, j: typing.Any) -> typing.Any:
    return s - STEEP[h] * jnp.abs(i - j)


def gently(s: typing.Any, b: typing.Any, h: typing.Any, i: typing.Any, j: typing.Any) -> typing.Any:
    return s - STEEP[h] / 4 * jnp.abs(i - j)


def thinned(tokens: int, kv_heads: int) -> GIVEN:
    """Without what holds at most 1e-7 of each row: other blocks for each head."""
    mask = flexjax.create_block_mask(
        masks.causal, None, None, tokens, S, block_size=(8, 16), origin=Origin(query=S - tokens)
    )
    return few_queries(tokens, kv_heads, score_mod=falling, block_mask=mask, tolerance=1e-7, score_bound=5.0)


def in_pages(tokens: int, dtype: str = "float32", columns: int = 4, **more: typing.Any) -> GIVEN:
    page = 16
    stored = normal(B * columns + 3, page, 8, D), normal(B * columns + 3, page, 8, D)
    if dtype == "int8":
        stored = tuple(flexjax.Quantized((x * 30).astype(dtype), jnp.abs(normal(8)) / 30) for x in stored)
    numbers = array(np.random.default_rng(1).permutation(B * columns + 3)[: B * columns].reshape(B, columns))
    table = flexjax.paged.PageTable(
        numbers.at[1, 3].set(-7), array([columns * page - 14, 23]), jnp.zeros(B * columns + 3, jnp.int32), page
    )
    cache = flexjax.paged.PagedCache(*stored)
    query = normal(B, tokens, N, D)
    (part,) = prepare_paged(PagedArguments(query, cache, table, return_aux=AUX, **more))
    return part.call.problem(None), part.call.operands


def in_float8() -> GIVEN:
    call = prepare(
        Arguments(
            *(normal(B, 40, 2, D).astype("float8_e4m3fn") for _ in range(3)), mask_mod=masks.causal, return_aux=AUX
        )
    )
    return call.problem(None), call.operands


def users_lists() -> GIVEN:
    """Some blocks of the mask are taken off, and some full ones are not asked about."""
    kinds = np.random.default_rng(0).integers(0, 3, (1, 1, 5, 5))
    index = [np.argsort(kinds != kind, -1, kind="stable") for kind in (1, 2)]
    partial, full = ((kinds == kind).sum(-1) for kind in (1, 2))
    mask = flexjax.BlockMask.from_kv_blocks(
        partial, index[0], full, index[1], block_size=32, mask_mod=masks.causal, q_len=S, kv_len=S
    )
    call = prepare(Arguments(*(normal(B, S, 2, D) for _ in range(3)), block_mask=mask, return_aux=AUX))
    return call.problem(None), call.operands


OWN: dict[str, Callable[[], GIVEN]] = {
    "every load": lambda: few_queries(3, 8, **at_the_end(3)),
    "every load of groups": lambda: few_queries(3, 4, **at_the_end(3)),
    "every load, heads first": lambda: few_queries(1, 4, "BNTH", **at_the_end(1)),
    "lengths at the end": lambda: few_queries(2, 8, **with_lengths(2)),
    "lengths at the end of groups": lambda: few_queries(2, 4, **with_lengths(2)),
    "a traced start": lambda: few_queries(1, 2, heads=6, mask_mod=masks.sliding_window(50), origin=Origin(query=jnp.int32(150))),
    "a read at the first head": lambda: of_later_heads(),
    "pages": lambda: in_pages(3),
    "pages of int8": lambda: in_pages(9, "int8"),
    "float8": in_float8,
    "lists of a user": users_lists,
    "tolerance": lambda: thinned(3, 8),
    "tolerance of groups": lambda: thinned(3, 4),
    "tolerance, pages": lambda: in_pages(3, columns=40, score_mod=gently, tolerance=1e-7, score_bound=5.0),
    "tolerance, pages, a mask by head": lambda: in_pages(
        3, columns=40, score_mod=gently, mask_mod=lambda b, h, i, j: i >= j + h, tolerance=1e-7, score_bound=5.0
    ),
}  # fmt: skip
THINNED = ("tolerance", "tolerance, pages", "tolerance, pages, a mask by head")


def given_by(name: str) -> GIVEN:
    """The problem of a call of OWN, or of a row of the table in float32."""
    if name in OWN:
        return OWN[name]()
    bound = BoundCase(CASES[name], "float32", "xla")
    found: list[GIVEN] = []

    class Planned(Exception):
        pass

    def plan_only(problem: Problem, operands: Operands) -> typing.NoReturn:
        found.append((problem, operands))
        raise Planned

    with mock.patch.object(sys.modules["flexjax.attention"], "attention", plan_only), pytest.raises(Planned):
        bound.attend(*bound.arrays())
    return found[0]


# ------------------------------------------------------------------- the property

FORWARD_ONLY = {"join_heads", "pack_heads", "float8", "gathered", "widened_pools"}
REWRITES: dict[str, tuple[Callable[[KernelPlan], Rewrite | None], tuple[str, ...]]] = {
    "mask_blocks": (lambda p: mask_blocks.rewrite(p, 48, 80), ("window", "by_batch_and_head", "lists of a user")),
    "larger_blocks": (lambda p: larger_blocks.rewrite(p, GPU), ("window", "lists of a user")),
    "lengths_as_mask": (lambda p: lengths_as_mask.rewrite(p, 64, 64), ("lengths", "lengths_unblocked", "lengths at the end", "a read at the first head")),
    "residues": (residues.rewrite, ("dilated", "dilated_and_more")),
    "extra_features": (extra_features.rewrite, ("extra", "extra_bnth")),
    "join_heads": (join_heads.rewrite, ("every load", "lengths at the end", "pages", *THINNED)),
    "pack_heads": (
        pack_heads.rewrite,
        ("every load of groups", "every load, heads first", "lengths at the end of groups", "a traced start", "one_query", "tolerance of groups"),
    ),
    "gathered": (pages.gathered, ("pages", "pages of int8")),
    "widened_pools": (lambda p: pages.widened_pools(p) if p.cache_dtype else None, ("pages of int8",)),
    "float8": (lambda p: float8.rewrite(p, "") if p.float8 else None, ("float8",)),
}  # fmt: skip


def in_float32(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return dataclasses.replace(plan, dtype="float32", float8=False), jax.tree.map(wide, operands)


def defined(plan: KernelPlan, operands: Operands) -> Results:
    """The results by the definition, in float32 whatever the dtypes are."""
    plan, operands = in_float32(plan, operands)
    return jax.jit(Run(DenseBackend(), plan, CPU).forward)(operands)  # eagerly it is forty programs


def computed(plan: KernelPlan, operands: Operands) -> Results:
    """The results by the loops of xla, which run every plan as it is."""
    plan, operands = in_float32(plan, operands)
    return XlaBackend().forward(plan, operands, CPU)


def check(name: str, call: str, rewrite: Callable[[KernelPlan], Rewrite | None]) -> None:
    problem, operands = given_by(call)
    plan, step = problem.plan, rewrite(problem.plan)
    assert step is not None
    want = defined(plan, operands)
    loosen = CASES[call].loosen if call in CASES else 1.0
    close(
        jax.jit(lambda given: forward((step,), given, functools.partial(computed, step.plan)))(operands), want, loosen
    )
    if name in FORWARD_ONLY:
        return
    wanted = Wanted.of([x is not None and jnp.issubdtype(x.dtype, jnp.floating) for x in operands.movable])
    d_out, d_lse = normal(*want.out.shape), jnp.where(jnp.isfinite(want.lse), normal(*want.lse.shape), 0.0)

    def gradients(steps: Steps, operands: Operands) -> Gradients:
        kernel = lambda last: XlaBackend().backward(last_plan(plan, steps), last, CPU)
        return backward(steps, BackwardInputs(operands, want, d_out, d_lse, wanted, problem.derivative), kernel)

    close(*(jax.jit(functools.partial(gradients, steps))(operands) for steps in ((step,), ())), loosen)


def close(got: typing.Any, want: typing.Any, loosen: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        within = loosen * (2e-5 if x.dtype == "float32" else float(jnp.finfo(x.dtype).eps))
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        finite = np.abs(np.where(np.isfinite(y), y, 0.0))
        np.testing.assert_allclose(x, y, rtol=within, atol=within * max(1.0, float(finite.max(initial=0.0))))


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, (_, calls) in REWRITES.items() for call in calls])
def test_results_and_gradients_stay(name: str, call: str) -> None:
    check(name, call, REWRITES[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("call", CASES)
def test_results_and_gradients_of_the_whole_table_stay(call: str) -> None:
    plan = given_by(call)[0].plan
    if 0 in (plan.q_len, plan.kv_len) or "poison" in call or "everywhere" in call:
        return
    for name, (rewrite, calls) in REWRITES.items():
        if call not in calls and rewrite(plan) is not None:
            check(name, call, rewrite)


@pytest.mark.parametrize(("call", "heads"), [*((call, 1) for call in THINNED), ("tolerance of groups", 4)])
def test_lists_of_tolerance_become_those_of_any_head(call: str, heads: int) -> None:
    problem, operands = given_by(call)
    plan, step = problem.plan, (join_heads if heads == 1 else pack_heads).rewrite(problem.plan)
    assert step is not None
    assert plan.blocks is not None
    assert operands.lists is not None
    visited = np.asarray(mask_blocks.classes_of_plan(plan, operands.lists)) > 0
    lists = step.operands(operands).lists
    assert lists is not None
    found = np.asarray(mask_blocks.classes_of_plan(step.plan, lists)) > 0
    want = visited.reshape(B, heads, N // heads, *visited.shape[2:]).any(2)
    np.testing.assert_array_equal(found, want)
    assert visited.sum((0, 2, 3)).min() < want.sum((0, 2, 3)).max() < visited[:, 0].size


def test_calls_that_stay() -> None:
    plan = given_by("every load of groups")[0].plan
    of_groups = few_queries(1, 8, mask_mod=masks.causal)[0].plan
    refused = {"layout": "BNTH"}, {"kv_heads": 4}, {"q_len": 5}, {"has_sinks": True}, {"extra_dim": 4, "extra_heads": 8}
    assert join_heads.rewrite(of_groups) is not None
    assert [join_heads.rewrite(dataclasses.replace(of_groups, **x)) for x in refused] == [None] * len(refused)
    refused = {"kv_heads": N}, {"q_len": 17}, {"has_sinks": True}, {"extra_dim": 4, "extra_heads": 4}
    assert [pack_heads.rewrite(dataclasses.replace(plan, **x)) for x in refused] == [None] * len(refused)
    by_head = few_queries(1, 4, mask_mod=lambda b, h, i, j: j <= 20 * h + i)[0].plan
    assert pack_heads.rewrite(by_head) is None
    sized = pack_heads.rewrite(dataclasses.replace(plan, options=flexjax.KernelOptions(block_q=8)))
    assert sized is not None
    assert sized.plan.options.block_q == 32, "as many queries"
