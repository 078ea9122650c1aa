"""What a lowering rule is given: the translation, and one equation of a jaxpr with the types that jax does not declare.

A rule translates one equation of a mod's jaxpr. It is a function of (translation, equation, operands) that returns the
values (values.py) of the equation's results, or None where the equation must stay whole (a Call, lower_call.py). The
rules are in lower_rules.py, lower_special.py, indexing.py, random_keys.py and lazy_rules.py. The translation is
Lowering of lower_jaxpr.py, which imports the rules; this file exists so that they need not import it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.typing import DTypeLike

from flexjax.ir.builder import Builder
from flexjax.ir.program import Atom
from flexjax.trace.values import Index, Value


class Typed(Protocol):
    """The type of an array in a jaxpr, which jax calls aval."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def weak_type(self) -> bool:
        """Whether the dtype is weak, as that of the Python number 1.0 is."""
        ...


class Variable(Protocol):
    """A variable or a literal of a jaxpr."""

    @property
    def aval(self) -> Typed: ...


class Equation(Protocol):
    """An equation of a jaxpr: outvars = primitive(invars), with static parameters by name in `params`."""

    @property
    def primitive(self) -> jex_core.Primitive: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def invars(self) -> Sequence[Variable]: ...

    @property
    def outvars(self) -> Sequence[Variable]: ...


class Scope(Protocol):
    """The parts of a jaxpr that are read to run it."""

    @property
    def constvars(self) -> Sequence[object]: ...

    @property
    def invars(self) -> Sequence[object]: ...

    @property
    def eqns(self) -> Sequence[object]: ...

    @property
    def outvars(self) -> Sequence[object]: ...


class ClosedScope(Protocol):
    """A jaxpr with the values of its constants, in the order of its constvars."""

    @property
    def jaxpr(self) -> Scope: ...

    @property
    def consts(self) -> Sequence[Any]: ...


class Translation(Protocol):
    """What the rules need of the translation of one jaxpr, lower_jaxpr.Lowering, which documents the methods."""

    builder: Builder
    again: bool  # the program is one that jax differentiates again

    def run(self, jaxpr: Scope, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]: ...

    def run_inlined(self, jaxpr: Scope, consts: Sequence[Any], args: Sequence[np.ndarray]) -> list[np.ndarray]: ...

    def run_branch(self, taken: Atom, closed: ClosedScope, args: Sequence[Value]) -> list[Value]: ...

    def as_atoms(self, value: Value) -> np.ndarray: ...

    def load(self, array: jax.Array, index: Sequence[Atom]) -> Atom: ...

    def capture(self, value: jax.Array) -> int: ...

    def lazy(
        self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str
    ) -> Value: ...

    def map_values(
        self, make: Callable[..., Atom], values: Sequence[Value], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Value: ...


Rule = Callable[[Translation, Equation, list[Value]], Sequence[Value] | None]
Params = Mapping[str, Any]
