"""Division of sizes that rounds up, for numbers that are known while a call is traced."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(length: int, unit: int) -> int:
    return cdiv(length, unit) * unit
