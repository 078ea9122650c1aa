"""The operations of a program: every name that `Op.prim` may have in a finished program.

Each is an elementwise primitive of jax.lax by its own name, except `floordiv` and `floormod`, the integer division and the
remainder of Python. A table elsewhere that gives each operation a meaning (a value, a range, a form in a kernel) is checked
against OPERATIONS by tests/backends/test_every_primitive.py.
"""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
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

OPERATIONS = (
    ARITHMETIC
    | BITS
    | CHOICES
    | COMPARISONS
    | COMPLEX_NUMBERS
    | CONVERSIONS
    | EXPONENTIALS
    | HYPERBOLIC
    | ROUNDINGS
    | SPECIAL_FUNCTIONS
    | TRIGONOMETRY
)

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
"""Operations whose two operands may be exchanged."""

STOP_GRADIENT = "stop_gradient"
"""The one name beyond OPERATIONS: the program that a derivative is made from keeps it, and no backend sees it."""
