"""The operations of a program: every name that `Op.prim` may have in a finished program.

Each is an elementwise primitive of jax.lax by its own name, except `floordiv` and `floormod`, the integer division and
the remainder of Python. A table elsewhere that gives each operation a meaning (a value, a range, a form in a kernel) is
checked against OPERATIONS by tests/backends/test_every_primitive.py.
"""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
TOTAL_ORDER = frozenset({"eq_to", "le_to", "lt_to"})
"""Comparisons of floats in total order: -NaN, -inf .. -0.0, 0.0 .. inf, NaN; searchsorted and sorts compare so."""
DIVISIONS = frozenset({"div", "rem", "floordiv", "floormod"})
ARITHMETIC = frozenset({"abs", "add", "integer_pow", "max", "min", "mul", "neg", "sign", "square", "sub"}) | DIVISIONS
BITS = frozenset(
    {
        "and",
        "clz",
        "mulhi",
        "not",
        "or",
        "population_count",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "xor",
    }
)
"""Operations on the bits of integers; `and`, `or`, `xor` and `not` are also the logic of bools."""
CONVERSIONS = frozenset({"bitcast_convert_type", "convert_element_type", "reduce_precision"})
ROUNDINGS = frozenset({"ceil", "floor", "nextafter", "round"})
EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "cbrt", "rsqrt", "sqrt"})
TRIGONOMETRY = frozenset({"acos", "asin", "atan", "atan2", "cos", "sin", "tan"})
HYPERBOLIC = frozenset({"acosh", "asinh", "atanh", "cosh", "sinh", "tanh"})
SPECIAL_FUNCTIONS = frozenset(
    {
        "bessel_i0e",
        "bessel_i1e",
        "digamma",
        "erf",
        "erf_inv",
        "erfc",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "lgamma",
        "polygamma",
        "regularized_incomplete_beta",
        "zeta",
    }
)
COMPLEX_NUMBERS = frozenset({"complex", "conj", "imag", "real"})
CHOICES = frozenset({"is_finite", "select_n"})
HASHES = frozenset({"threefry2x32"})
"""One word, number `word`, of a hash. Unrolled, two hashes in a chain would take XLA minutes to compile on a CPU."""

OPERATIONS = (
    ARITHMETIC
    | BITS
    | CHOICES
    | COMPARISONS
    | COMPLEX_NUMBERS
    | CONVERSIONS
    | EXPONENTIALS
    | HASHES
    | HYPERBOLIC
    | ROUNDINGS
    | SPECIAL_FUNCTIONS
    | TOTAL_ORDER
    | TRIGONOMETRY
)

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
"""Operations whose two operands may be exchanged."""

REDUCTIONS = {
    "loop_add": "add",
    "loop_mul": "mul",
    "loop_max": "max",
    "loop_min": "min",
    "loop_and": "and",
    "loop_or": "or",
    "loop_xor": "xor",
}
"""`loop_add(x, k)` is the sum of x over all values of the loop index k, by the operation named here."""
LOOP_INDEX = "loop_index"  # the step without operands whose result is the index of a loop
LOOP_AT = "loop_at"
"""`loop_at(x, k, i, ...)`: element k = i of a Call's vector x, only in the program that a derivative is made from."""
LOOPS = frozenset({*REDUCTIONS, LOOP_INDEX})
"""Names of `Op.prim` beyond OPERATIONS: a backend runs a loop as a whole, or refuses it."""

STOP_GRADIENT = "stop_gradient"
"""Beyond OPERATIONS: only in programs that are differentiated, also in the one that jax differentiates again on xla."""

COTANGENT = "cotangent"
"""Beyond OPERATIONS: the cotangent of the new score, for derivative rules that are not linear in it.

Its operand, the score, says that it differs at each entry.
"""
