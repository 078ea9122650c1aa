"""Which of jax's primitives a mod may use, and how each kind is treated."""

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
"""Primitives that change over which mesh axes of shard_map an array varies, as far as its type says."""
SAME = frozenset(["optimization_barrier", "reshard"]) | CASTS
"""Primitives that return their operands. On a mesh, `pvary` and `reshard` say where a value is; a scalar is everywhere."""

CALLBACKS = frozenset(
    ["pure_callback", "io_callback", "debug_callback", "debug_print", "outside_call", "infeed", "outfeed"]
)
INLINED = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat2",
        "remat",
        "checkpoint",
        "custom_lin",
        "core_closed_call",
    ]
)
CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])

LOOPS = frozenset(["while", "scan"])
"""Primitives that read an element of an array many times: captured arrays are theirs whole, however small."""

ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "complex",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "polygamma",
        "population_count",
        "pow",
        "real",
        "reduce_precision",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "zeta",
        "add_any",
        "mulhi",
    ]
)

# What an elementwise primitive keeps of its parameters: sharding and accuracy hints say nothing about a scalar.
KEPT_PARAMS = frozenset({"y", "new_dtype", "rounding_method", "exponent_bits", "mantissa_bits"})
