"""The xla backend accepts everything; see `conformance.py` for what that means."""

from tests.backends.conformance import FORWARD_ALONE, Conformance

# Everyday cases whose gradients are left to the slow run, because those of other rows have a load of the class, or have nothing
# to do with what the case is there for.
FORWARD = frozenset({
    "everything_at_once", "packed", "custom_rule", "one_query", "pair_bias_and_transpose", "small_integers", "by_batch_and_head",
    "zero_divisors", "lengths_unblocked", "sinks_masked_rows", "flagged_keys", "window", "modular_table",
})  # fmt: skip


class TestXla(Conformance):
    implementation = "xla"
    everyday_forward = FORWARD_ALONE | FORWARD
    # tests/transforms has them for this backend, each over a table of calls
    slow_tests = frozenset({
        "test_eager_equals_jit", "test_vmap_over_inputs", "test_second_order", "test_export", "test_vmap_over_captures", "test_vmap_over_captures_of_the_mask",
        "test_vmap_over_block_masks", "test_gradient_of_vmap", "test_checkpoint", "test_jvp", "test_reverse_over_reverse",
        *(f"test_gradients[{name}-float32]" for name in FORWARD), "test_values[window-bfloat16]", "test_values[sinks-bfloat16]",
        # what another row has too, in another dtype or beside more
        "test_gradients[dim_17-float16]", "test_gradients[extra-bfloat16]", "test_gradients[log_bucket_bias-float32]",
        "test_gradients[mqa-float32]", "test_gradients[one_key-float32]", "test_gradients[poison_everywhere-float32]",
        "test_gradients[relative_bias-bfloat16]", "test_gradients[window-bfloat16]", "test_gradients[distant_past-float32]",
        "test_gradients[seven-float32]", "test_gradients[poison_root-float32]", "test_gradients[head_pair_bias-float32]",
        "test_gradients[pair_bias-bfloat16]", "test_gradients[chain-float32]", "test_gradients[long_query-float32]",
        "test_gradients[lengths-bfloat16]", "test_gradients[zero_lengths-float32]", "test_large_scores[float32-False-False]",
        "test_gradients[one_array_read_twice-float32]",
        *(f"test_gradients[{name}-bfloat16]" for name in ("skipped", "random_entries", "chosen_blocks", "interpolated", "noise", "entropy", "sigmoid_weights")),
        "test_gradients[natten-float32]", "test_gradients[row_bias-float32]", "test_gradients[extra-float32]", "test_gradients[sinks-float32]",
    })  # fmt: skip
