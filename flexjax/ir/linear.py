"""The linear form of an integer value of a program, where it is affine in the indices b, h, q and kv.

It tells a load of a contiguous vector or tile from a gather (program.classify_load), and lets kernels compute the value
of a whole tile from one number. builder.py derives it, operation by operation.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Linear:
    """self.b * b + self.h * h + self.q * q + self.kv * kv + const + uniform terms, for an integer value."""

    b: int = 0
    h: int = 0
    q: int = 0
    kv: int = 0
    const: int = 0
    # (id, coefficient) sorted by id; the Val of that id depends on b and h alone
    uniform: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: "Linear") -> "Linear":
        """The form of the sum of two values; uniform terms whose coefficients cancel are dropped."""
        terms: dict[int, int] = dict(self.uniform)
        for ident, coefficient in other.uniform:
            terms[ident] = terms.get(ident, 0) + coefficient
        kept = tuple(sorted((i, c) for i, c in terms.items() if c))
        return Linear(
            self.b + other.b, self.h + other.h, self.q + other.q, self.kv + other.kv, self.const + other.const, kept
        )

    def times(self, factor: int) -> "Linear":
        if factor == 0:
            return Linear()
        terms = tuple((i, c * factor) for i, c in self.uniform)
        return Linear(self.b * factor, self.h * factor, self.q * factor, self.kv * factor, self.const * factor, terms)
