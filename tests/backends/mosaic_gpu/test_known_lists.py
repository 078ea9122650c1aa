"""What the kernels derive from block lists that are known while a call is traced: the same as from traced lists, and no XLA kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import masks
from flexjax.backends.mosaic_gpu.backward import hopper_fused_visits, tile_visits
from flexjax.backends.mosaic_gpu.captures import lists as captures_lists
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import BlockLists
from flexjax.rewrites import mask_blocks
from tests.cases.small import quick_jit
from tests.plan.test_known_lists import T, call, documents, same

MASKS = {
    "causal": masks.causal,
    "window": masks.sliding_window(200),
    "documents": flexjax.and_masks(masks.causal, masks.document(documents(0))),
    "everything": lambda b, h, q, kv: q >= 0,
    "nothing": lambda b, h, q, kv: q < 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_lists_of_kernels_are_the_same_from_known_and_from_traced_lists(name):
    plan, operands = call(MASKS[name])
    assert plan.blocks is not None
    assert plan.blocks.known is not None
    host = plan.on_host(operands).lists
    same(host, operands.lists) if jax.tree.leaves(host) else None
    step = mask_blocks.rewrite(plan, 256, 128)
    assert step is not None
    wider, made, expected = step.plan, step.operands(operands._replace(lists=host)), step.operands(operands)
    assert wider.blocks is not None
    assert wider.blocks.known is None
    if made.lists is not None and jax.tree.leaves(made.lists):
        same(made.lists, expected.lists)

    def of_kernels(lists: BlockLists) -> dict:
        """Everything that the backward kernels derive from the lists."""
        by_key = tile_visits.visit_lists(plan, lists, transposed=True)
        tiles = (-(-T // 128), -(-T // 128))
        order = dq_order.order_for(plan, *tiles)
        visits = tile_visits.visits_for(plan, 128, 128, transposed=True)
        found = {
            "order": tile_visits.longest_first(visits, by_key, tiles[0]),
            "captures": [
                captures_lists.tile_lists(plan, lists, captures_lists.shape_for(plan, kind, 128, (True, True)))
                for kind in (ir.SCALAR, ir.ROW, ir.DIAGONAL, ir.TILE)
            ],
        }
        if jax.tree.leaves(by_key):
            found["fixed"] = hopper_fused_visits.query_visits(plan, by_key, *tiles, 128, order)
            found["any"] = hopper_fused_visits.query_visits(plan, by_key, *tiles, 128, None)
        return found

    assert host is not None
    same(of_kernels(host), quick_jit(of_kernels)(operands.lists))


LIST_OPERATIONS = re.compile(r"stablehlo\.(sort|scatter|reduce_window|case)\b")


@pytest.mark.parametrize("traced", [False, True])
def test_programs_of_known_masks_make_no_lists(traced):
    """The lowered program of both passes has no operation on lists; with traced documents it has."""
    shape = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    fixed = masks.document(np.repeat(np.arange(4, dtype=np.int32), 128))

    def loss(q: jax.Array, ids: jax.Array) -> jax.Array:
        """A scalar of the output, with documents that are an argument of the program or constants."""
        mask = flexjax.and_masks(masks.causal, masks.document(ids) if traced else fixed)
        return flexjax.flex_attention(q, q, q, mask_mod=mask, implementation="mosaic_gpu").astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(shape, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert bool(LIST_OPERATIONS.search(text)) == traced
