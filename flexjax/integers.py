"""Division of sizes that rounds up, for numbers that are known while a call is traced."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, such as the number of blocks of `b` tokens that cover `a` tokens, where the last may reach past the end."""
    return -(-a // b)


def round_up(length: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `length`."""
    return cdiv(length, unit) * unit
