"""Translates the jaxpr of a mod to a program of scalar operations.

The jaxpr is interpreted once, equation by equation, on values of three kinds (values.py):

    known value      a JAX array that depends on captured arrays alone. It is computed outside of the kernel, so
                     `bias.T[h, kv]`
                     or `exp(table)[h]` cost nothing inside, and JAX differentiates them
    array of atoms   a scalar, or a small array whose elements are atoms of the program
    lazy array       an array whose elements become atoms when they are asked for

Small vectors inside a mod are unrolled into scalars, nested calls are inlined, branches become selects, loops of known
length are unrolled. An equation that no rule covers becomes a `Call` (lower_call.py), which only some backends run.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.operations import STOP_GRADIENT
from flexjax.ir.program import Atom, Lit
from flexjax.mod_tools.numpy_arrays import as_array
from flexjax.trace.equations import (
    PYTHON_DIVISION,
    aval_of,
    equation_function,
    has_jaxpr,
    inner_jaxpr,
    is_float0,
    is_jnp_function,
    keeps_split,
    refuse_symbolic_shape,
    varying_axes,
)
from flexjax.trace.lazy_rules import LAZY_RULES, element_of, too_large_of, whole_capture
from flexjax.trace.lift_numpy import as_operand, eager_without_mesh
from flexjax.trace.lower_call import equation_as_call
from flexjax.trace.lower_rules import RULES
from flexjax.trace.primitives import CASTS, COLLECTIVES, CUSTOM, ELEMENTWISE, INLINED, KEPT_PARAMS, RANDOM, SAME
from flexjax.trace.random_keys import elementwise_on_keys
from flexjax.trace.translation import ClosedScope, Equation, Scope
from flexjax.trace.values import (
    MAX_ELEMENTS,
    Index,
    Key,
    LazyArray,
    Value,
    is_atoms,
    is_key_dtype,
    is_known,
    is_lazy,
    literal_index,
    map_elements,
    no_tangent,
    scalar,
    settled,
)


class Lowering:
    """The translation of one jaxpr to a program."""

    def __init__(
        self,
        builder: Builder,
        keep_custom: bool = False,
        inline_constants: bool = False,
        split: Mapping[int, jax.Array] | None = None,
        again: bool = False,
    ):
        """Starts a translation that appends its steps to `builder`.

        keep_custom        custom_jvp, custom_vjp and stop_gradient become steps, for a derivative; else inlined
        inline_constants   elements of known arrays at indices of literals become literals, unless the array is traced
        split              arrays over explicit mesh axes, captured in place of the array of that id
        again              the program is one that jax differentiates again; with `keep_custom`
        """
        self.again = again
        self.builder = builder
        self.keep_custom = keep_custom
        self.inline_constants = inline_constants
        # in the order of their numbers; the builder's captures may begin with others (derivative.replay_inlined)
        self.arrays: list[jax.Array] = []
        self._split = dict(split or {})
        self._alive: list[object] = []  # keys of _split are ids
        self._capture_of: dict[int, int] = {}
        self._parts_of: dict[int, tuple[jax.Array, tuple[jax.Array, ...]]] = {}
        self._branches: list[Atom] = []
        # the equations that are being translated, each in the one before it
        self.inside: list[Equation] = []
        self._repeated: dict[int, tuple[Atom, jax.Array]] = {}  # arrays of one literal, by identity

    def shares_captures_of(self, other: "Lowering") -> None:
        self.builder.captures = list(other.builder.captures)
        self.arrays, self._capture_of = list(other.arrays), dict(other._capture_of)

    # ------------------------------------------------------------------ the interpreter

    def run(self, jaxpr: Scope, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Translates a jaxpr; returns the values of its results."""
        env: dict[object, Value] = {}

        def read(var: object) -> Value:
            if isinstance(var, jex_core.Literal):
                if is_float0(var):
                    return no_tangent(aval_of(var).shape)
                if np.ndim(var.val) == 0 and not is_key_dtype(aval_of(var).dtype):
                    return scalar(literal(var.val, aval_of(var).dtype))
                return var.val if isinstance(var.val, jax.Array) else as_operand(np.asarray(var.val))
            return env[var]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in cast(Sequence[Equation], jaxpr.eqns):
            # tangents of integers have no value
            if eqn.outvars and all(map(is_float0, eqn.outvars)):
                env.update((v, no_tangent(aval_of(v).shape)) for v in eqn.outvars)
                continue
            self.inside.append(eqn)
            outs = self.equation(eqn, [read(v) for v in eqn.invars])
            self.inside.pop()
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def run_inlined(self, jaxpr: Scope, consts: Sequence[Any], args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Translates a jaxpr on arrays of atoms; arrays that it computes from literals alone become literals."""
        known = [as_operand(c) if isinstance(c, np.ndarray) else c for c in consts]
        before, self.inline_constants = self.inline_constants, True
        try:
            return [self.as_atoms(out) for out in self.run(jaxpr, known, args)]
        finally:
            self.inline_constants = before

    def equation(self, eqn: Equation, args: list[Value]) -> Sequence[Value]:
        """Translates one equation; returns the values of its results.

        An equation of known values and literals is computed outside of the kernel. Raises ModError for collectives,
        whatever their operands, and for an equation inside the kernel that reads an array of symbolic shape.
        """
        name = eqn.primitive.name
        if name in COLLECTIVES:
            raise ModError(
                f"it uses the collective `{name}`; a mod must be a function of its scalars and captured arrays."
            )
        held = [a for a in args if not is_atoms(a)]  # JAX values and lazy arrays
        lazy = any(map(is_lazy, args))
        known = not lazy and all(not is_atoms(a) or (a.size == 1 and isinstance(a.item(), Lit)) for a in args)
        if held and not lazy and name in CASTS:
            return args
        # literals alone with scalar results stay in the kernel, unless the equation computes a random key
        if known and (held or name in RANDOM or any(v.aval.shape != () for v in eqn.outvars)):
            outs = self.compute_now(eqn, args)
            if name == "broadcast_in_dim" and not held:
                self._repeated[id(outs[0])] = (cast(np.ndarray, args[0]).item(), cast(jax.Array, outs[0]))
            return outs
        if name in SAME:
            return args
        for array in held:
            refuse_symbolic_shape(array.shape)
        if name in ELEMENTWISE:
            return [self.elementwise(eqn, args)]
        if name in INLINED:
            return self.inline(eqn, args)
        if name in CUSTOM and not self.keep_custom:
            closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
            return self.run(closed.jaxpr, closed.consts, args)
        rule = LAZY_RULES.get(name) if lazy else None
        rule = RULES.get(name) if rule is None else rule
        if rule is not None:
            outs = rule(self, eqn, args)
            if outs is not None:
                return outs
        return equation_as_call(self, eqn, args)

    def compute_now(self, eqn: Equation, args: list[Value]) -> Sequence[Value]:
        """Computes an equation of known values and literals outside of the kernel; returns the values of its results.

        It becomes part of the caller's trace if an operand is a tracer. Everything else is computed at once, because
        the derivative of a mod is kept and shared by all traces.
        """
        # inside shard_map the equation may ask for a sharding that exists only there
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        full = jnp.full if inside else lambda *given: as_operand(np.full(*given))
        values = [full(a.shape, a.item().value, jnp.dtype(a.item().dtype)) if is_atoms(a) else a for a in args]
        run = equation_function(eqn)
        over_explicit = any(id(v) in self._split for v in values)
        typed = any(varying_axes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        # types that vary over mesh axes of shard_map, or arrays over explicit axes: a nested function is translated by
        # its body
        if (typed or over_explicit) and eqn.primitive.name in INLINED:
            closed, consts = inner_jaxpr(eqn)
            return self.run(closed, consts, args)

        def computed(given: Sequence[Value]) -> list[jax.Array]:
            if any(isinstance(v, Tracer) for v in given) or (typed and has_jaxpr(eqn)):
                return run(*cast(Sequence[jax.Array], given))
            keyed = any(is_key_dtype(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
            lies = [getattr(v, "sharding", None) for v in given]
            if inside and not typed and not keyed and not any(isinstance(at, NamedSharding) for at in lies):
                # jax 0.10 lays results over the mesh of shard_map, and then refuses some of them
                with eager_without_mesh():
                    return [as_array(np.asarray(x)) for x in run(*cast(Sequence[jax.Array], given))]
            with jax.ensure_compile_time_eval():
                return run(*cast(Sequence[jax.Array], given))

        outs = computed(values)
        originals = [self._split.get(id(v), v) for v in values]
        if over_explicit and keeps_split(eqn, cast(Sequence[jax.Array], originals)):
            (whole,), (split,) = outs, computed(originals)
            self._split[id(whole)] = split
            self._alive.append(whole)
        return outs

    def run_branch(self, taken: Atom, closed: ClosedScope, args: Sequence[Value]) -> list[Value]:
        """Translates one branch of a cond, taken where the atom `taken` is True; the caller selects the results."""
        if not self.keep_custom:
            return self.run(closed.jaxpr, closed.consts, args)
        # no derivative enters a branch that is not taken: 0 times an infinite derivative is NaN, as of sqrt(-1)
        make = lambda atom: self._where_taken(taken, atom)
        args = [self.map_values(make, [a], a.shape, a.dtype) if is_atoms(a) or is_lazy(a) else a for a in args]
        self._branches.append(taken)
        outs = self.run(closed.jaxpr, closed.consts, args)
        self._branches.pop()
        return outs

    def _where_taken(self, taken: Atom, atom: Atom) -> Atom:
        """`atom` with its derivative stopped where the branch is not taken."""
        if isinstance(atom, Lit | Key) or not jnp.issubdtype(jnp.dtype(atom.dtype), jnp.inexact):
            return atom
        return self.builder.select(taken, atom, self.builder.unfolded(STOP_GRADIENT, atom))

    def inline(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Translates a nested function (jit, remat) by its body; jnp's `//` and `%` become floordiv and floormod."""
        jaxpr, consts = inner_jaxpr(eqn)
        function = PYTHON_DIVISION.get(eqn.params.get("name", ""))
        if function is not None and is_jnp_function(function, jaxpr, cast(Sequence[jax.Array], consts)):
            out = eqn.outvars[0].aval
            prim = "floordiv" if function is jnp.floor_divide else "floormod"
            as_out = lambda atom: self.builder.convert(atom, out.dtype)
            make = lambda x, y: self.builder.op(prim, (as_out(x), as_out(y)), out.dtype)
            alike = all(a.ndim in (0, len(out.shape)) for a in args)
            pair = args if alike else [self.as_atoms(a) for a in args]  # map_values aligns dims from the first
            return [self.map_values(make, pair, out.shape, out.dtype)]
        return self.run(jaxpr, consts, args)

    # ------------------------------------------------------------------ operands

    def as_atoms(self, value: Value) -> np.ndarray:
        """Turns any value into an array of atoms, a numpy object array of its shape; known elements are loaded.

        Raises ModError for a known or lazy value of more than MAX_ELEMENTS elements.
        """
        if is_lazy(value):
            return value.atoms()
        if not is_known(value):
            return cast(np.ndarray, value)
        if value.size > MAX_ELEMENTS:
            raise ModError(whole_capture(value.shape))
        out = np.empty(value.shape, object)
        for place in np.ndindex(*value.shape):
            out[place] = self.load(cast(jax.Array, value), tuple(literal(i, "int32") for i in place))
        return out

    def lazy(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str) -> Value:
        """Makes a lazy array, whose atoms `element(index)` makes when asked; one of at most one element is made now.

        `too_large` is the error if a rule needs all of too many elements: a sentence that starts with "it".
        """
        # an element that is made later stops derivatives as in the branches in which the array was made (`run_branch`)
        branches = list(self._branches)

        def make(index: Index) -> Atom:
            now, self._branches = self._branches, branches
            try:
                return element(index)
            finally:
                self._branches = now

        return settled(LazyArray(shape, dtype, make, too_large))

    def map_values(
        self, make: Callable[..., Atom], values: Sequence[Value], shape: tuple[int, ...], dtype: DTypeLike
    ) -> Value:
        """The array whose elements are `make(*elements)` of the corresponding elements of `values`.

        Each value has the shape of the result, perhaps with dims of size 1, or is a scalar. The result is lazy if a
        value is lazy or a known array of several elements. Else it is an array of atoms; ModError above MAX_ELEMENTS.
        """
        if all(is_atoms(v) or v.size == 1 for v in values):
            return map_elements(make, [self.as_atoms(v) for v in values], shape)
        first = literal(0, "int32")

        def of(value: Value, index: Index) -> Atom:
            return element_of(self, value, [first if n == 1 else i for n, i in zip(value.shape, index, strict=False)])

        return self.lazy(shape, dtype, lambda i: make(*(of(v, i) for v in values)), too_large_of(values, shape))

    def load(self, array: jax.Array, index: Sequence[Atom]) -> Atom:
        """The atom array[index] of a JAX array, which is captured if it is not yet; `index` has int32 atoms, in bounds.

        A complex element is made of loads of its two parts, a random key of loads of its words.
        """
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            parts = tuple(self.load(part, index) for part in self.parts_of(array, lax.real, lax.imag))
            return self.builder.op("complex", parts, array.dtype)
        if is_key_dtype(array.dtype):
            (words,) = self.parts_of(array, jax.random.key_data)
            places = np.ndindex(*words.shape[array.ndim :])
            made = tuple(self.load(words, (*index, *literal_index(place))) for place in places)
            return cast(Atom, Key(made, array.dtype))
        if id(array) in self._repeated:
            return self._repeated[id(array)][0]
        if self.inline_constants and not isinstance(array, Tracer) and all(isinstance(i, Lit) for i in index):
            return literal(np.asarray(array)[tuple(cast(Lit, i).value for i in index)], array.dtype)
        element = self.builder.load(self.capture(array), index)
        for taken in self._branches:
            element = self._where_taken(taken, element)
        return element

    def parts_of(self, array: jax.Array, *parts: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        """The captured parts of an array, computed once: real and imaginary part, or a random key's words."""
        if id(array) not in self._parts_of:
            with contextlib.nullcontext() if isinstance(array, Tracer) else jax.ensure_compile_time_eval():
                self._parts_of[id(array)] = (array, tuple(part(array) for part in parts))
        return self._parts_of[id(array)][1]

    def capture(self, value: jax.Array) -> int:
        """The number of a JAX array among the program's captured arrays, always the same for one array object."""
        if id(value) not in self._capture_of:
            self._capture_of[id(value)] = self.builder.capture(value.shape, value.dtype)
            self.arrays.append(self._split.get(id(value), value))
        return self._capture_of[id(value)]

    def elementwise(self, eqn: Equation, args: list[Value]) -> Value:
        """Translates an elementwise primitive: one operation of the program for each element of the result."""
        out = eqn.outvars[0].aval
        name = eqn.primitive.name
        name = {"add_any": "add", "copy_p": "copy"}.get(name, name)
        if name == STOP_GRADIENT and self.keep_custom and not is_key_dtype(out.dtype):
            make = lambda atom: self.builder.unfolded(name, atom)
            return self.map_values(make, args, out.shape, out.dtype)
        if name in ("copy", STOP_GRADIENT):
            return args[0] if is_lazy(args[0]) else self.as_atoms(args[0])
        if any(is_key_dtype(v.aval.dtype) for v in eqn.invars):
            make = lambda *elements: elementwise_on_keys(self.builder, name, elements, out.dtype)
            return self.map_values(make, args, out.shape, out.dtype)
        params = {k: v for k, v in eqn.params.items() if k in KEPT_PARAMS}
        if "new_dtype" in params:
            params["new_dtype"] = jnp.dtype(params["new_dtype"]).name
        prim = str(name)
        make = lambda *atoms: self.builder.op(prim, atoms, out.dtype, **params)
        return self.map_values(make, args, out.shape, out.dtype)
