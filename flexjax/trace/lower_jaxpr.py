"""Translates the jaxpr of a mod to a program of scalar operations.

The jaxpr is interpreted once, equation by equation, on values of three kinds (values.py):

    known value      a JAX array that depends on captured arrays alone. It is computed outside of the kernel, so `bias.T[h, kv]`
                     or `exp(table)[h]` cost nothing inside, and JAX differentiates them
    array of atoms   a scalar, or a small array whose elements are atoms of the program
    lazy array       an array whose elements become atoms when they are asked for

Small vectors inside a mod are unrolled into scalars, nested calls are inlined, branches become selects, loops of known length are
unrolled. An equation that no rule covers becomes a `Call` (lower_call.py), which only some backends run. To capture a JAX array is to
make it a captured array of the program. Functions with a derivative rule of their own are those of jax.custom_jvp and jax.custom_vjp.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.typing import DTypeLike

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.operations import STOP_GRADIENT
from flexjax.ir.program import Atom, Lit
from flexjax.trace.equations import (
    PYTHON_DIVISION,
    aval_of,
    equation_function,
    has_jaxpr,
    inner_jaxpr,
    is_float0,
    is_jnp_function,
    refuse_symbolic_shape,
    varying_axes,
)
from flexjax.trace.lazy_rules import LAZY_RULES, element_of, too_large_of, whole_capture
from flexjax.trace.lift_numpy import as_operand
from flexjax.trace.lower_call import equation_as_call
from flexjax.trace.lower_rules import RULES
from flexjax.trace.primitives import (
    CALLBACKS,
    CASTS,
    COLLECTIVES,
    CUSTOM,
    ELEMENTWISE,
    INLINED,
    KEPT_PARAMS,
    SAME,
)
from flexjax.trace.translation import ClosedScope, Equation, Scope
from flexjax.trace.values import (
    MAX_ELEMENTS,
    Index,
    LazyArray,
    Value,
    is_atoms,
    is_known,
    is_lazy,
    map_elements,
    no_tangent,
    scalar,
    settled,
)


class Lowering:
    """The translation of one jaxpr to a program.

    builder   makes the program
    arrays    the JAX arrays that this translation captured so far, in the order of their numbers; the builder's captures may begin with
              others (derivative.replay_inlined)
    """

    def __init__(
        self,
        builder: Builder,
        keep_custom: bool = False,
        inline_constants: bool = False,
        split: Mapping[int, jax.Array] | None = None,
    ):
        """Starts a translation that appends its steps to `builder`.

        keep_custom        functions with derivative rules of their own, and stop_gradient, become steps, so that a derivative can be
                           made; otherwise such functions are inlined
        inline_constants   a known array that is turned into atoms as a whole (`as_atoms`) becomes literals instead of loads, unless it is
                           traced; one that is indexed is still loaded
        split              the array to capture instead of another, by the id of that other: arrays over explicit mesh axes (see
                           lift_numpy.py)
        """
        self.builder = builder
        self.keep_custom = keep_custom
        self.inline_constants = inline_constants
        self.arrays: list[jax.Array] = []
        self._split = split or {}
        self._capture_of: dict[int, int] = {}
        self._parts_of: dict[int, tuple[jax.Array, tuple[jax.Array, jax.Array]]] = {}
        self._branches: list[Atom] = []
        self._repeated: dict[int, tuple[Atom, jax.Array]] = {}  # arrays of one literal, by identity

    # ------------------------------------------------------------------ the interpreter

    def run(self, jaxpr: Scope, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Translates a jaxpr; returns the values of its results.

        jaxpr          the jaxpr, whose equations are translated in order; its scalar literals become literals of the
                       program, its literal arrays known values
        consts, args   the values of its constants and of its inputs

        Variables and literals of dtype float0, the tangents of integers, have no value: they become False, and equations that
        compute them are left out.
        """
        env: dict[object, Value] = {}

        def read(var: object) -> Value:
            """The value of a variable or literal of the jaxpr: a scalar literal is a literal of the program, a literal array a known
            value.
            """
            if isinstance(var, jex_core.Literal):
                if is_float0(var):
                    return no_tangent(aval_of(var).shape)
                if np.ndim(var.val) == 0:
                    return scalar(literal(var.val, aval_of(var).dtype))
                return var.val if isinstance(var.val, jax.Array) else as_operand(np.asarray(var.val))
            return env[var]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in cast(Sequence[Equation], jaxpr.eqns):
            if eqn.outvars and all(map(is_float0, eqn.outvars)):
                env.update((v, no_tangent(aval_of(v).shape)) for v in eqn.outvars)
                continue
            outs = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Equation, args: list[Value]) -> Sequence[Value]:
        """Translates one equation on the values `args`; returns the values of its results.

        An equation whose operands are all known values or literals is computed outside of the kernel, unless it has only
        literals and scalar results. A primitive of CASTS returns its operands, known ones too; one of SAME returns those that
        are not all known. An elementwise primitive becomes an operation for each element. A nested function is inlined. So is
        one with a derivative rule of its own, but with `keep_custom` it becomes a Call. Any other primitive has a rule; where
        there is none, or the rule returns None, the equation becomes a Call.

        Raises ModError for collectives and callbacks, whatever their operands, and for an equation inside the kernel that reads
        an array of symbolic shape.
        """
        name = eqn.primitive.name
        if name in COLLECTIVES:
            raise ModError(
                f"it uses the collective `{name}`; a mod must be a function of its scalars and captured arrays."
            )
        if name in CALLBACKS:
            raise ModError(f"it calls back into Python (`{name}`); a mod must have no side effects.")
        held = [a for a in args if not is_atoms(a)]  # JAX values and lazy arrays
        lazy = any(map(is_lazy, args))
        known = not lazy and all(not is_atoms(a) or (a.size == 1 and isinstance(a.item(), Lit)) for a in args)
        if held and not lazy and name in CASTS:
            return args
        if known and (held or any(v.aval.shape != () for v in eqn.outvars)):
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
        """Computes an equation that depends on captured arrays and literals alone, outside of the kernel; returns the values of its
        results.

        args   the values of its operands: known values, or literals as arrays of one atom

        The equation becomes part of the caller's trace where an operand is a tracer, and where it has an inner jaxpr and its types vary
        over mesh axes of shard_map; a nested function (jit, remat) whose types vary so is translated by its body. Everything else is
        computed at once, outside of shard_map also what has literals alone, because the derivative of a mod is kept and shared by all
        traces.
        """
        # inside shard_map the equation may ask for a sharding that exists only there
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        full = jnp.full if inside else lambda *given: as_operand(np.full(*given))
        values = [full(a.shape, a.item().value, jnp.dtype(a.item().dtype)) if is_atoms(a) else a for a in args]
        run = equation_function(eqn)
        typed = any(varying_axes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if typed and eqn.primitive.name in INLINED:
            closed, consts = inner_jaxpr(eqn)
            return self.run(closed, consts, args)
        if any(isinstance(v, Tracer) for v in values) or (typed and has_jaxpr(eqn)):
            return run(*values)
        with jax.ensure_compile_time_eval():
            return run(*values)

    def run_branch(self, taken: Atom, closed: ClosedScope, args: Sequence[Value]) -> list[Value]:
        """Translates one branch of a cond; returns the values of its results, which the caller selects where it is
        taken.

        taken    a bool atom: whether the branch is taken; it matters with `keep_custom` only, where derivatives are
                 made
        closed   the branch's jaxpr with its constants
        args     the values of its inputs

        Where `taken` is False, no derivative enters the branch: it would be zero times the derivative of the branch,
        which is NaN where that is infinite (the square root of a negative number).
        """
        if not self.keep_custom:
            return self.run(closed.jaxpr, closed.consts, args)
        make = lambda atom: self._where_taken(taken, atom)
        args = [self.map_values(make, [a], a.shape, a.dtype) if is_atoms(a) or is_lazy(a) else a for a in args]
        self._branches.append(taken)
        outs = self.run(closed.jaxpr, closed.consts, args)
        self._branches.pop()
        return outs

    def _where_taken(self, taken: Atom, atom: Atom) -> Atom:
        """The atom with the same value, whose derivative is stopped where a branch of `cond` is not taken: `atom` where `taken` is True,
        else the stop_gradient of `atom`. `run_branch` calls it for what enters a branch, `load` for elements loaded inside one.

        taken   a bool atom: whether the branch is taken
        atom    the atom; literals, bools and integers are returned unchanged, without a new step
        """
        if isinstance(atom, Lit) or not jnp.issubdtype(jnp.dtype(atom.dtype), jnp.inexact):
            return atom
        return self.builder.select(taken, atom, self.builder.unfolded(STOP_GRADIENT, atom))

    def inline(self, eqn: Equation, args: list[Value]) -> list[Value]:
        """Translates an equation that calls a nested function (jit, remat) on the values `args` by its body; returns the
        results.

        Integer `//` and `%` of jax.numpy, which are such functions, become floordiv and floormod.
        """
        jaxpr, consts = inner_jaxpr(eqn)
        function = PYTHON_DIVISION.get(eqn.params.get("name", ""))
        if function is not None and not consts and is_jnp_function(function, jaxpr):
            out = eqn.outvars[0].aval
            pair = [self.as_atoms(a) for a in args]
            as_out = lambda atom: self.builder.convert(atom, out.dtype)
            prim = "floordiv" if function is jnp.floor_divide else "floormod"
            return [
                map_elements(lambda x, y: self.builder.op(prim, (as_out(x), as_out(y)), out.dtype), pair, out.shape)
            ]
        return self.run(jaxpr, consts, args)

    # ------------------------------------------------------------------ operands

    def as_atoms(self, value: Value) -> np.ndarray:
        """Turns any value into an array of atoms, a numpy object array of its shape.

        A known value is captured and each of its elements loaded (or made a literal, with `inline_constants` and unless it is traced).
        Raises ModError for a known or lazy value of more than MAX_ELEMENTS elements.
        """
        if is_lazy(value):
            return value.atoms()
        if not is_known(value):
            return cast(np.ndarray, value)
        if value.size > MAX_ELEMENTS:
            raise ModError(whole_capture(value.shape))
        out = np.empty(value.shape, object)
        if self.inline_constants and not isinstance(value, Tracer):
            known = np.asarray(value)
            for place in np.ndindex(*value.shape):
                out[place] = literal(known[place], value.dtype)
            return out
        for place in np.ndindex(*value.shape):
            out[place] = self.load(cast(jax.Array, value), tuple(literal(i, "int32") for i in place))
        return out

    def lazy(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str) -> Value:
        """Makes a lazy array of the program; an array of at most one element is made now, as an array of atoms.

        shape, dtype   of the array
        element        makes the atom at an index; it is called when an element is asked for
        too_large      the error, as a sentence that starts with "it", if a rule needs all elements and they are too many

        The array remembers the branches of `cond` that are being translated now. An element that is made later is translated inside those
        branches, because `run_branch` stops the derivative of a branch that is not taken.
        """
        branches = list(self._branches)

        def make(index: Index) -> Atom:
            """The atom at an index, made as if the translation were still in the branches in which the array was made."""
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

        make           makes an atom from one atom of each value
        values         each has the shape of the result, perhaps with dimensions of size 1 that every element of the result shares, or is
                       a scalar (shape ()) that every element of the result takes
        shape, dtype   of the result

        If one of the values is lazy, or a known array of several elements, the result is a lazy array: `make` is called when an
        element is asked for. Otherwise it is called now, and the result is an array of atoms; that raises ModError for more
        than MAX_ELEMENTS elements.
        """
        if all(is_atoms(v) or v.size == 1 for v in values):
            return map_elements(make, [self.as_atoms(v) for v in values], shape)
        first = literal(0, "int32")

        def of(value: Value, index: Index) -> Atom:
            """The element of `value` for the element of the result at `index`: dimensions of size 1 are read at 0."""
            return element_of(self, value, [first if n == 1 else i for n, i in zip(value.shape, index, strict=False)])

        return self.lazy(shape, dtype, lambda i: make(*(of(v, i) for v in values)), too_large_of(values, shape))

    def load(self, array: jax.Array, index: Sequence[Atom]) -> Atom:
        """The atom array[index] of a JAX array, which is captured if it is not yet.

        index   one int32 atom for each dimension, in bounds

        An array known to repeat one literal gives that literal. A complex element is made of loads of its two parts.
        Inside branches of `cond` the derivative of the element is stopped where they are not taken. Raises ModError for
        an array of random keys.
        """
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            parts = tuple(self.load(part, index) for part in self.complex_parts(array))
            return self.builder.op("complex", parts, array.dtype)
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise ModError(
                f"it reads captured random keys ({array.dtype}) at each position; draw the numbers outside the mod and index "
                "those, or make the key inside, with jax.random.key."
            )
        if id(array) in self._repeated:
            return self._repeated[id(array)][0]
        element = self.builder.load(self.capture(array), index)
        for taken in self._branches:
            element = self._where_taken(taken, element)
        return element

    def complex_parts(self, array: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The real and the imaginary part of a complex array, computed once for the same array.

        They are captured instead of the array, because gradients are of real arrays.
        """
        if id(array) not in self._parts_of:
            with contextlib.nullcontext() if isinstance(array, Tracer) else jax.ensure_compile_time_eval():
                self._parts_of[id(array)] = (array, (lax.real(array), lax.imag(array)))
        return self._parts_of[id(array)][1]

    def capture(self, value: jax.Array) -> int:
        """The number of a JAX array among the program's captured arrays; the same array object always has the same number.

        An array that is new is appended to the builder's captures, and to `arrays`: itself, or the array that the argument
        `split` of the class has for it.
        """
        if id(value) not in self._capture_of:
            self._capture_of[id(value)] = self.builder.capture(value.shape, value.dtype)
            self.arrays.append(self._split.get(id(value), value))
        return self._capture_of[id(value)]

    def elementwise(self, eqn: Equation, args: list[Value]) -> Value:
        """Translates an elementwise primitive on the values `args`: one operation of the program for each element of
        the result.

        A copy returns its operand; so does stop_gradient, but with `keep_custom` it becomes a step for each element.
        """
        out = eqn.outvars[0].aval
        name = eqn.primitive.name
        name = {"add_any": "add", "copy_p": "copy"}.get(name, name)
        if name == STOP_GRADIENT and self.keep_custom:
            make = lambda atom: self.builder.unfolded(name, atom)
            return self.map_values(make, args, out.shape, out.dtype)
        if name in ("copy", STOP_GRADIENT):
            return args[0] if is_lazy(args[0]) else self.as_atoms(args[0])
        params = {k: v for k, v in eqn.params.items() if k in KEPT_PARAMS}
        if "new_dtype" in params:
            params["new_dtype"] = jnp.dtype(params["new_dtype"]).name
        prim = str(name)
        make = lambda *atoms: self.builder.op(prim, atoms, out.dtype, **params)
        return self.map_values(make, args, out.shape, out.dtype)
