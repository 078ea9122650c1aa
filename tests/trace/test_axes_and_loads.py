"""What each value depends on and how each load walks its array, written down for shipped and odd mods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import masks, mods
from flexjax.ir.builder import mixed_axes
from flexjax.ir.program import axes_of, classify_load
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from tests.cases import odd_mods
from tests.masks.test_masks import CASES as MASK_CASES
from tests.mods.test_mods import CASES as MOD_CASES

SIZES = (2, 3, 23, 37)
IDS = jax.device_put(np.arange(40) // 7)


def seen(program: object) -> list[str]:
    return [str(classify_load(load)) for load in program.loads]


@pytest.mark.parametrize("name", odd_mods.SCORES)
def test_loads_of_odd_scores(name: str) -> None:
    mod, loads = odd_mods.SCORES[name]
    assert seen(trace_score_mod(mod, odd_mods.SIZES).program) == list(loads)


@pytest.mark.parametrize("name", [n for n in odd_mods.MASKS if n != "any_of_a_vector"])
def test_loads_of_odd_masks(name: str) -> None:
    mod, loads = odd_mods.MASKS[name]
    assert seen(trace_mask_mod(mod, odd_mods.SIZES).program) == list(loads)


def array(*shape: int) -> jnp.ndarray:
    return jax.device_put(np.zeros(shape, np.float32))


# name: (mod, loads)
SHIPPED_SCORES = {
    "identity": (mods.identity, ""),
    "alibi": (mods.alibi(3), "scalar"),
    "distance_penalty": (mods.distance_penalty(array(3)), "scalar"),
    "log_distance_penalty": (mods.log_distance_penalty(array(3), array(3)), "scalar, scalar"),
    "softcap": (mods.softcap(2.0), ""),
    "softcap_approx": (mods.softcap_approx(2.0), ""),
    "t5_bias": (mods.t5_bias(array(3, 8), bidirectional=True, max_distance=6), "diagonal gather"),
    "relative_table": (mods.relative_table(array(3, 79)), "diagonal slice"),
    "pair_bias": (mods.pair_bias(array(2, 3, 23, 37)), "tile slice"),
    "head_gate": (mods.head_gate(array(3)), "scalar"),
    "temperature": (mods.temperature(array(3)), "scalar"),
    "log_n_scaling": (mods.log_n_scaling(4), ""),
    "scalable_softmax": (mods.scalable_softmax(array(3)), "scalar"),
    "key_scales": (mods.key_scales(array(2, 37)), "column slice"),
    "query_scales": (mods.query_scales(array(2, 3, 23)), "row slice"),
    "checkerboard": (mods.checkerboard(), ""),
}


def test_every_shipped_mod_is_written_down() -> None:
    assert set(SHIPPED_SCORES) == set(MOD_CASES)
    assert set(SHIPPED_MASKS) == set(MASK_CASES)


@pytest.mark.parametrize("name", SHIPPED_SCORES)
def test_loads_of_shipped_mods(name: str) -> None:
    mod, loads = SHIPPED_SCORES[name]
    program = trace_score_mod(mod, SIZES).program
    assert ", ".join(seen(program)) == loads
    assert program.axes == {"score", "b", "h", "q", "kv"}


LENGTHS = jnp.asarray([5, 9])
FLAGS = jnp.zeros(40, bool)
SPANS = jnp.zeros((5, 2), jnp.int32)

# name: (mask, axes of its result, loads)
SHIPPED_MASKS = {
    "full": (masks.full, "", ""),
    "causal": (masks.causal, "q kv", ""),
    "causal_offset": (masks.causal_offset(LENGTHS), "b q kv", "scalar"),
    "sliding_window": (masks.sliding_window(5), "q kv", ""),
    "two_sided_window": (masks.two_sided_window(3, 1), "delta", ""),
    "dilated_window": (masks.dilated_window(4, 3), "delta", ""),
    "dilated_two_sided_window": (masks.dilated_two_sided_window(2, 1, 3), "delta", ""),
    "chunked": (masks.chunked(5), "q kv", ""),
    "block_diagonal": (masks.block_diagonal(5), "q kv", ""),
    "block_causal": (masks.block_causal(6), "q kv", ""),
    "prefix_lm": (masks.prefix_lm(LENGTHS), "b q kv", "scalar"),
    "document": (masks.document(IDS), "q kv", "row slice, column slice"),
    "per_document": (
        masks.per_document(masks.causal, IDS),
        "q kv",
        "row slice, column slice, row slice, column slice",
    ),
    "batched": (masks.batched([masks.causal, masks.full]), "b q kv", ""),
    "shared_prefix": (masks.shared_prefix(LENGTHS, masks.causal), "b q kv", "scalar"),
    "noop_mask": (masks.noop_mask, "", ""),
    "padding": (masks.padding(LENGTHS), "b kv", "scalar"),
    "query_padding": (masks.query_padding(LENGTHS), "b q", "scalar"),
    "left_padding": (masks.left_padding(LENGTHS), "b kv", "scalar"),
    "global_tokens": (masks.global_tokens(FLAGS), "q kv", "row slice, column slice"),
    "local_global": (masks.local_global(2, 1), "q kv", ""),
    "streaming": (masks.streaming(2, 4), "q kv", ""),
    "strided": (masks.strided(4), "delta", ""),
    "strided_fixed": (masks.strided_fixed(5), "q kv", ""),
    "big_bird": (masks.big_bird(37, 5), None, None),
    "tree": (masks.tree(np.arange(-1, 22)), None, None),
    "block_diffusion": (masks.block_diffusion(8, 4), "q kv", ""),
    "natten_2d": (masks.natten_2d((6, 6), (3, 3)), "q kv", ""),
    "natten_2d_tiled": (masks.natten_2d_tiled((6, 6), (3, 3), (2, 3)), "q kv", ""),
    "natten_2d_morton": (masks.natten_2d_morton((8, 8), (3, 5)), "q kv", None),
    "sliding_tile_2d": (masks.sliding_tile_2d((6, 8), (6, 4), (2, 2), 0), "q kv", None),
    "sliding_tile_3d": (masks.sliding_tile_3d((2, 4, 6), (2, 2, 6), (1, 2, 2), 0), "q kv", None),
    "interleaved_media": (masks.interleaved_media(FLAGS, 3), "q kv", None),
    "media_intervals": (masks.media_intervals(SPANS, 3), "q kv", None),
}


@pytest.mark.parametrize("name", SHIPPED_MASKS)
def test_axes_and_loads_of_shipped_masks(name: str) -> None:
    mask, axes, loads = SHIPPED_MASKS[name]
    program = trace_mask_mod(mask, SIZES).program
    if axes is not None:
        assert program.axes == set(axes.split())
    if loads is not None:
        assert ", ".join(seen(program)) == loads
    assert not program.calls


AXES = {
    "nothing": (lambda b, h, q, k: q - q + 1 == 1, ""),
    "q alone": (lambda b, h, q, k: (q + k) - k > 3, "q"),
    "difference": (lambda b, h, q, k: (q + h) - (k + h) > 3, "delta"),
    "difference and head": (lambda b, h, q, k: q - k > h, "delta h"),
    "difference and key": (lambda b, h, q, k: (q - k) * (k + 1) > 3, "q kv"),
    "batch": (lambda b, h, q, k: b * 2 > 1, "b"),
    "multiples that cancel": (lambda b, h, q, k: 3 * (q - k) + 3 * k - 2 * q > 1, "q"),
}


@pytest.mark.parametrize("name", AXES)
def test_what_cancels_is_gone(name: str) -> None:
    mask, axes = AXES[name]
    program = trace_mask_mod(mask, SIZES).program
    assert program.axes == set(axes.split())
    for step in program.steps:
        for out in step.outs:
            operands = mixed_axes([axes_of(a) for a in step.inputs])
            assert operands <= out.axes or "delta" in out.axes
