"""The xla backend accepts everything; see `conformance.py` for what that means."""

from tests.backends.conformance import FORWARD_ALONE, Conformance


class TestXla(Conformance):
    implementation = "xla"
    everyday_forward = FORWARD_ALONE - {"one_query", "packed"}
    # tests/transforms has them for this backend, each over a table of calls
    slow_tests = frozenset({
        "test_eager_equals_jit", "test_vmap_over_inputs", "test_second_order", "test_export", "test_vmap_over_captures", "test_vmap_over_captures_of_the_mask",
        "test_vmap_over_block_masks", "test_gradient_of_vmap", "test_checkpoint", "test_jvp", "test_reverse_over_reverse",
        # what another row has too, in another dtype or beside more
        "test_gradients[dim_17-float16]", "test_gradients[extra-bfloat16]", "test_gradients[log_bucket_bias-float32]",
        "test_gradients[mqa-float32]", "test_gradients[one_key-float32]", "test_gradients[poison_everywhere-float32]",
        "test_gradients[relative_bias-bfloat16]", "test_gradients[window-bfloat16]", "test_gradients[distant_past-float32]",
        "test_gradients[seven-float32]", "test_gradients[poison_root-float32]", "test_gradients[head_pair_bias-float32]",
        "test_gradients[pair_bias-bfloat16]", "test_gradients[chain-float32]", "test_gradients[long_query-float32]",
        "test_gradients[lengths-bfloat16]", "test_gradients[zero_lengths-float32]", "test_large_scores[float32-False-False]",
        "test_gradients[one_array_read_twice-float32]",
        "test_gradients[natten-float32]", "test_gradients[row_bias-float32]", "test_gradients[extra-float32]",
    })  # fmt: skip
