"""What a lowering rule is given: the translation, and one equation of a jaxpr with the types that jax does not declare.

A rule translates one equation of a mod's jaxpr. It is a function of (translation, equation, operands) that returns the values
(values.py) of the equation's results, or None where the equation must stay whole (a Call, lower_call.py). The rules are in
lower_rules.py, lower_special.py, indexing.py and lazy_rules.py; the translation is Lowering of lower_jaxpr.py, which imports the
rules. This file exists so that they need not import it.
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
    """The type of an array in a jaxpr (jax calls it aval): its shape, its dtype, and whether the dtype is weak, as that of 1.0
    is.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        ...

    @property
    def weak_type(self) -> bool:
        """Whether the dtype is weak, as that of the Python number 1.0 is."""
        ...


class Variable(Protocol):
    """A variable or a literal of a jaxpr; `aval` is its type."""

    @property
    def aval(self) -> Typed:
        """The type of the variable or literal."""
        ...


class Equation(Protocol):
    """An equation of a jaxpr: outvars = primitive(invars), with static parameters by name in `params`."""

    @property
    def primitive(self) -> jex_core.Primitive:
        """The primitive that the equation applies."""
        ...

    @property
    def params(self) -> dict[str, Any]:
        """The static parameters of the primitive, by name."""
        ...

    @property
    def invars(self) -> Sequence[Variable]:
        """The operands."""
        ...

    @property
    def outvars(self) -> Sequence[Variable]:
        """The results."""
        ...


class Scope(Protocol):
    """The parts of a jaxpr that are read to run it: constants, inputs, equations (each an Equation) and outputs (each a
    Variable).
    """

    @property
    def constvars(self) -> Sequence[object]:
        """The variables of the constants."""
        ...

    @property
    def invars(self) -> Sequence[object]:
        """The variables of the inputs, in the order of the arguments; those of the constants are `constvars`."""
        ...

    @property
    def eqns(self) -> Sequence[object]:
        """The equations, in order."""
        ...

    @property
    def outvars(self) -> Sequence[object]:
        """The outputs, variables or literals."""
        ...


class ClosedScope(Protocol):
    """A jaxpr with the values of its constants, in the order of its constvars."""

    @property
    def jaxpr(self) -> Scope:
        """The jaxpr."""
        ...

    @property
    def consts(self) -> Sequence[Any]:
        """The values of the jaxpr's constants."""
        ...


class Translation(Protocol):
    """What the rules need of the translation of one jaxpr, lower_jaxpr.Lowering.

    builder   makes the program
    """

    builder: Builder

    def run(self, jaxpr: Scope, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Translates a jaxpr, whose steps are appended to the program; returns the values of its results.

        consts, args   the values of its constants and of its inputs
        """
        ...

    def run_branch(self, taken: Atom, closed: ClosedScope, args: Sequence[Value]) -> list[Value]:
        """Translates the branch of a cond that is taken where the bool atom `taken` is True; returns the values of its results, which the
        caller selects. All branches are translated; `taken` matters to derivatives alone (`Lowering.run_branch`).

        closed   the jaxpr of the branch, with its constants
        args     the values of its inputs
        """
        ...

    def as_atoms(self, value: Value) -> np.ndarray:
        """Turns any value into an array of atoms of its shape; elements of a known value become loads, or literals (`Lowering.as_atoms`).
        ModError for more than MAX_ELEMENTS elements.
        """
        ...

    def load(self, array: jax.Array, index: Sequence[Atom]) -> Atom:
        """The atom array[index] of a JAX array, which is captured if it is not yet; `index` has one int32 atom for each
        dimension, in bounds.
        """
        ...

    def capture(self, value: jax.Array) -> int:
        """The number of a JAX array among the program's captured arrays; captures it if it is not yet."""
        ...

    def lazy(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str) -> Value:
        """Makes a lazy array; one of at most one element is an array of atoms instead.

        shape, dtype   of the array
        element        makes the atom at an index when it is asked for
        too_large      the error, a sentence that starts with "it", if a rule needs all of too many elements
        """
        ...

    def map_values(
        self, make: Callable[..., Atom], values: Sequence[Value], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Value:
        """The array whose elements are `make` of the corresponding elements of `values`; lazy if a value is lazy or a known array of
        several elements, else an array of atoms (`Lowering.map_values`).

        make           makes an atom from one atom of each value
        values         each has the shape of the result or is a scalar (shape ())
        shape, dtype   of the result
        """
        ...


Rule = Callable[[Translation, Equation, list[Value]], Sequence[Value] | None]
Params = Mapping[str, Any]
"""The parameters of an equation by name."""
