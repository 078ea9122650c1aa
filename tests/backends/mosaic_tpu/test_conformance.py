"""The suite of every backend, on the kernels interpreted on the CPU."""

import functools

import pytest

import flexjax
from tests.backends.conformance import Conformance
from tests.cases import Case

# Rows in which the kernels do something of their own. The others differ in what happens before the kernels, which the xla
# backend's run of every row covers, or are in test_kernels.py (window, gqa3, column_bias), or have what two rows here
# have (pair_bias: head_pair_bias in float32, bf16_bias in bfloat16; poison_root: poison_bias and rows_minus_inf; seven: plain
# and packed; distant_past: nothing and packed; flagged_keys: poison_bias and by_batch_and_head; zero_lengths: nothing and lengths;
# index_out_of_range: bucket_bias and indirect_row).
# fmt: off
EVERYDAY = frozenset({
    "plain", "no_keys", "no_queries", "one_query", "narrower_values", "dim_17",
    "large_logits", "rows_minus_inf", "packed", "nothing",
    "by_batch_and_head", "batch_head_scale", "row_bias", "head_pair_bias", "pair_bias_and_transpose", "relative_bias",
    "bucket_bias", "indirect_row", "bf16_bias", "coordinates", "poison_bias", "sinks",
    "dropout", "extra", "extra_groups", "lengths", "sigmoid_weights",
    "four_expectations",
})
# fmt: on


class TestMosaicTpu(Conformance):
    implementation = "mosaic_tpu"
    everyday = EVERYDAY
    # what a load of each class, dropout, sinks, features and lengths add to the backward kernels is among the gradients
    everyday_forward = frozenset({
        "no_keys", "no_queries", "plain", "one_query", "narrower_values", "rows_minus_inf", "packed", "nothing", "batch_head_scale",
        "pair_bias_and_transpose", "indirect_row", "bf16_bias", "coordinates", "poison_bias", "extra_groups",
    })  # fmt: skip
    # what happens before a kernel is called (folding a mapped axis), or on the xla backend; of three kinds of large scores and of
    # a feature in two dtypes one that has what is the kernels' own
    slow_tests = frozenset({
        "test_vmap_over_inputs", "test_vmap_over_captures_of_the_mask", "test_checkpoint", "test_jvp", "test_second_order",
        "test_reverse_over_reverse", "test_dropout_follows_its_key", "test_eager_equals_jit", "test_vmap_over_block_masks",
        "test_gradient_of_vmap", "test_large_scores[float32-False-False]", "test_gradients[relative_bias-bfloat16]",
        "test_gradients[extra-float32]", "test_gradients[sinks-bfloat16]", "test_gradients[lengths-bfloat16]", "test_gradients[sigmoid_weights-bfloat16]",
        "test_gradients[by_batch_and_head-float32]",  # in test_kernels.py, with lists in chunks
        # run forward
        *(f"test_gradients[{name}-float32]" for name in everyday_forward - {"no_keys", "no_queries", "plain"}),
        "test_gradients[bf16_bias-bfloat16]", "test_large_scores[float32-False-True]", "test_vmap_over_captures", "test_export",
        # rows of the table have what these compare: packed and extra_groups
        "test_block_mask_equals_mask_mod", "test_extra_features_equal_longer_heads",
    })  # fmt: skip

    def refuses(self, case: Case, dtype: str) -> bool:
        return dtype not in ("float32", "bfloat16") or 0 in case.shape

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = flexjax.KernelOptions(interpret=True)
        attend = functools.partial(flexjax.flex_attention, kernel_options=options)
        monkeypatch.setattr(flexjax, "flex_attention", attend)
