"""The primitives of jax that a mod may use, by how lower_jaxpr.py treats each, and those that are refused by name.

A primitive in none of these sets has a rule in lower_rules.py or becomes a Call.
"""

from flexjax.ir.operations import HASHES, OPERATIONS

COLLECTIVES = frozenset(
    [
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "ppermute",
        "pbroadcast",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "axis_index",
        "all_gather_invariant",
        "psum_scatter",
    ]
)
CASTS = frozenset(["pvary", "pcast"])
"""Primitives that change over which mesh axes of shard_map the type of an array varies, and not its elements."""
SAME = frozenset(["optimization_barrier", "reshard"]) | CASTS
"""Primitives that do nothing: where a value lies on a mesh, as `reshard` says, means nothing for a scalar."""

CALLBACKS = frozenset(
    ["pure_callback", "io_callback", "debug_callback", "debug_print", "outside_call", "infeed", "outfeed"]
)
INLINED = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_lin", "core_closed_call"]
)
CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])
"""Functions with a derivative rule of their own."""

RANDOM = frozenset(
    [
        "iota_2x32_shape",
        "random_bits",
        "random_clone",
        "random_fold_in",
        "random_seed",
        "random_split",
        "random_unwrap",
        "random_wrap",
    ]
)
"""What primitives of random keys make of known operands is known: hashing it at each entry would be waste."""

CONTROL_FLOW = frozenset(["while", "scan"])
"""Primitives that read elements of an array repeatedly; a Call of one takes captured arrays whole, however small."""

REWRITTEN = frozenset(["add_any", "clamp", "copy", "copy_p", "stop_gradient"])
"""Elementwise primitives that become other operations of a program, or none."""
ELEMENTWISE = (OPERATIONS - {"floordiv", "floormod", "bitcast_convert_type"} - HASHES) | REWRITTEN
"""Primitives that compute each element of their result from the same element of each operand."""
REDUCTIONS = frozenset(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or", "xor"))
"""Primitives that combine the elements along some dimensions of one array."""

KEPT_PARAMS = frozenset({"y", "new_dtype", "rounding_method", "exponent_bits", "mantissa_bits"})
"""Parameters of elementwise primitives that an Op keeps; hints about sharding and accuracy are dropped."""
