"""The xla backend accepts everything; see `conformance.py` for what that means."""

from tests.backends.conformance import Conformance


class TestXla(Conformance):
    implementation = "xla"
    # tests/transforms has them for this backend, each over a table of calls
    slow_tests = frozenset({
        "test_eager_equals_jit", "test_vmap_over_captures", "test_vmap_over_captures_of_the_mask",
        "test_vmap_over_block_masks", "test_gradient_of_vmap", "test_checkpoint", "test_jvp", "test_reverse_over_reverse",
    })  # fmt: skip
