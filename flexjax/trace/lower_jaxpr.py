"""From a scalar jaxpr to a program.

The jaxpr is interpreted once. A value that depends on nothing but captured arrays stays what it is, a JAX value, and is
computed outside the kernel (so `bias.T[h, kv]` or `exp(table)[h]` cost nothing inside, and differentiate by themselves).
Everything else is an array of atoms: small vectors inside a mod are unrolled into scalars, nested calls are inlined,
branches become selects, loops of known length are unrolled. What is left over becomes a `Call`.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex_core

from flexjax.errors import ModError
from flexjax.trace.builder import Builder, literal
from flexjax.trace.mod_ir import Atom, Call, Lit, axes_of

MAX_ELEMENTS = 1024
"""Largest small array that is unrolled into scalars."""
MAX_UNROLL = 64
"""Longest loop that is unrolled, and largest array handed whole to a function with a derivative rule of its own."""

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
SAME = frozenset(["optimization_barrier", "pvary", "reshard"])
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
        "bitcast_convert_type",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
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

Value = Any
"""A JAX value (it depends on captures alone) or an object array of atoms."""


class Lowering:
    """State of one translation: the builder, and the arrays behind its captures."""

    def __init__(self, builder: Builder, keep_custom: bool = False, inline_constants: bool = False):
        """keep_custom: functions with derivative rules stay whole; inline_constants: small known arrays become literals."""
        self.builder = builder
        self.keep_custom = keep_custom
        self.inline_constants = inline_constants
        self.arrays: list[jax.Array] = []
        self._capture_of: dict[int, int] = {}

    # ------------------------------------------------------------------ the interpreter

    def run(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        env: dict[object, Value] = {}

        def read(var: object) -> Value:
            if isinstance(var, jex_core.Literal):
                if np.ndim(var.val) == 0:
                    return scalar(literal(var.val, aval_of(var).dtype))
                return jnp.asarray(var.val)
            return env[var]

        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            raise ModError(
                f"it uses the collective `{name}`; a mod must be a function of its scalars and captured arrays."
            )
        if name in CALLBACKS:
            raise ModError(f"it calls back into Python (`{name}`); a mod must have no side effects.")
        held = [a for a in args if not is_atoms(a)]
        known = all(not is_atoms(a) or (a.size == 1 and isinstance(a.item(), Lit)) for a in args)
        if known and (held or any(v.aval.shape != () for v in eqn.outvars)):
            return self.outside(eqn, args)
        if name in SAME:
            return [self.as_atoms(a) for a in args]
        if name in ELEMENTWISE:
            return [self.elementwise(eqn, args)]
        if name in INLINED:
            return self.inline(eqn, args)
        if name in CUSTOM and not self.keep_custom:
            closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
            return self.run(closed.jaxpr, closed.consts, args)
        rule = RULES.get(name)
        if rule is not None:
            outs = rule(self, eqn, args)
            if outs is not None:
                return outs
        return self.call(eqn, args)

    def outside(self, eqn: Any, args: list[Value]) -> list[Value]:
        """Computes the equation now, in the caller's trace: it depends on captured arrays alone."""
        values = [jnp.asarray(a.item().value, jnp.dtype(a.item().dtype)) if is_atoms(a) else a for a in args]
        run = equation_function(eqn)
        if any(isinstance(v, Tracer) for v in values):
            return run(*values)
        with jax.ensure_compile_time_eval():
            return run(*values)

    def inline(self, eqn: Any, args: list[Value]) -> list[Value]:
        closed = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
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
        """The value as atoms: an array computed outside is captured and read element by element."""
        if is_atoms(value):
            return value
        if value.size > MAX_ELEMENTS:
            raise ModError(
                f"it uses a whole captured array of shape {tuple(value.shape)} at each position; index it with b, h, q_idx "
                "or kv_idx, or reduce it outside the mod."
            )
        out = np.empty(value.shape, object)
        if self.inline_constants and not isinstance(value, Tracer):
            known = np.asarray(value)
            for place in np.ndindex(*value.shape):
                out[place] = literal(known[place], value.dtype)
            return out
        capture = self.capture(value)
        for place in np.ndindex(*value.shape):
            out[place] = self.builder.load(capture, tuple(literal(i, "int32") for i in place))
        return out

    def capture(self, value: jax.Array) -> int:
        if id(value) not in self._capture_of:
            self._capture_of[id(value)] = self.builder.capture(value.shape, value.dtype)
            self.arrays.append(value)
        return self._capture_of[id(value)]

    def elementwise(self, eqn: Any, args: list[Value]) -> np.ndarray:
        out = eqn.outvars[0].aval
        name = eqn.primitive.name
        name = {"add_any": "add", "copy_p": "copy"}.get(name, name)
        if name == "stop_gradient" and self.keep_custom:
            make = lambda atom: self.builder.unfolded(name, atom)
            return map_elements(make, [self.as_atoms(args[0])], out.shape)
        if name in ("copy", "stop_gradient"):
            return self.as_atoms(args[0])
        params = {k: v for k, v in eqn.params.items() if k in KEPT_PARAMS}
        if "new_dtype" in params:
            params["new_dtype"] = jnp.dtype(params["new_dtype"]).name
        prim = str(name)
        make = lambda *atoms: self.builder.op(prim, atoms, out.dtype, **params)
        return map_elements(make, [self.as_atoms(a) for a in args], out.shape)

    def call(self, eqn: Any, args: list[Value]) -> list[np.ndarray]:
        """The equation as it is: for backends that can map a jaxpr over a tile."""
        parts, axes = [], frozenset()
        for arg in args:
            whole = eqn.primitive.name not in CUSTOM or (not is_atoms(arg) and arg.size > MAX_UNROLL)
            if not is_atoms(arg) and arg.ndim > 0 and whole:
                parts.append(self.capture(arg))
                continue
            atoms = self.as_atoms(arg)
            parts.append((atoms.shape, tuple(atoms.ravel())))
            axes = axes.union(*(axes_of(a) for a in atoms.ravel()))
        axes = frozenset({"q", "kv"} | (axes - {"delta"})) if "delta" in axes else axes
        axes = axes | {"b", "h", "q", "kv"} if "score" in axes else axes
        results = []
        for var in eqn.outvars:
            size = math.prod(var.aval.shape)
            if size > MAX_ELEMENTS:
                raise ModError(
                    f"its `{eqn.primitive.name}` makes an array of shape {tuple(var.aval.shape)} at each position; at most "
                    f"{MAX_ELEMENTS} elements."
                )
            results.append((var.aval.shape, tuple(self.builder.fresh(var.aval.dtype.name, axes) for _ in range(size))))
        inner = eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr") if eqn.primitive.name in CUSTOM else None
        bind = equation_function(eqn)
        step = Call(eqn.primitive.name, equation_text(eqn), tuple(parts), tuple(results), bind, inner)
        self.builder.steps.append(step)
        return [object_array(vals).reshape(shape) for shape, vals in results]


def aval_of(var: Any) -> Any:
    """The type of a variable: jax declares less of it than there is."""
    return var.aval


def is_atoms(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def scalar(atom: Atom) -> np.ndarray:
    return object_array([atom]).reshape(())


def object_array(atoms: Sequence[Atom]) -> np.ndarray:
    out = np.empty(len(atoms), object)
    for i, atom in enumerate(atoms):
        out[i] = atom
    return out


def map_elements(make: Callable[..., Atom], args: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(shape) > MAX_ELEMENTS:
        raise ModError(
            f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."
        )
    out = np.empty(shape, object)
    full = [np.broadcast_to(a, shape) for a in args]
    for place in np.ndindex(*shape):
        out[place] = make(*(a[place] for a in full))
    return out


def equation_function(eqn: Any) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its operands."""

    def run(*values: jax.Array) -> list[jax.Array]:
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


def equation_text(eqn: Any) -> str:
    """Parameters as text; constants inside nested jaxprs count by their values."""
    digest = hashlib.sha256()
    for const in nested_consts(eqn.params.values()):
        digest.update(np.asarray(const).tobytes())
    return f"{ {k: str(v) for k, v in sorted(eqn.params.items())} } {digest.hexdigest()[:16]}"


def nested_consts(params: Sequence[Any]) -> list[object]:
    found: list[object] = []
    for param in params:
        if isinstance(param, tuple | list):
            found += nested_consts(param)
        elif hasattr(param, "consts") and hasattr(param, "jaxpr"):
            found += list(param.consts)
            for eqn in param.jaxpr.eqns:
                found += nested_consts(tuple(eqn.params.values()))
    return found


# ------------------------------------------------------------------- integer division as Python has it

PYTHON_DIVISION = {"remainder": jnp.remainder, "floor_divide": jnp.floor_divide}


def is_jnp_function(function: Callable[..., jax.Array], jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a nested function of two integers that bears the name is that function of jax.numpy, word for word."""
    avals = [aval_of(v) for v in jaxpr.invars]
    if len(avals) != 2 or not jnp.issubdtype(aval_of(jaxpr.outvars[0]).dtype, jnp.integer):
        return False
    key = (function, str(jaxpr))
    if key not in _jnp_functions:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        inside = [e.params["jaxpr"].jaxpr for e in jax.make_jaxpr(function)(*shapes).jaxpr.eqns if "jaxpr" in e.params]
        _jnp_functions[key] = len(inside) == 1 and str(inside[0]) == str(jaxpr)
    return _jnp_functions[key]


_jnp_functions: dict[tuple[Callable, str], bool] = {}


# ------------------------------------------------------------------- shapes of small arrays


def _structural(change: Callable[[np.ndarray, dict], np.ndarray]) -> Callable:
    def rule(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
        return [change(self.as_atoms(args[0]), eqn.params)]

    return rule


def _broadcast_in_dim(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    atoms, shape = self.as_atoms(args[0]), eqn.params["shape"]
    if math.prod(shape) > MAX_ELEMENTS:
        raise ModError(f"it broadcasts to shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements.")
    spread = np.ones(len(shape), int)
    for axis, dim in enumerate(eqn.params["broadcast_dimensions"]):
        spread[dim] = atoms.shape[axis]
    return [np.broadcast_to(atoms.reshape(tuple(spread)), shape).copy()]


def _slice(atoms: np.ndarray, params: dict) -> np.ndarray:
    strides = params["strides"] or (1,) * atoms.ndim
    places = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return atoms[tuple(slice(*p) for p in places)]


def _concatenate(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    return [np.concatenate([self.as_atoms(a) for a in args], axis=eqn.params["dimension"])]


def _split(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    cuts = list(itertools.accumulate(eqn.params["sizes"]))[:-1]
    return np.split(self.as_atoms(args[0]), cuts, axis=eqn.params["axis"])


def _stack(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    return [np.stack([self.as_atoms(a) for a in args], axis=eqn.params["axis"])]


def _unstack(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    return [as_object(row) for row in np.moveaxis(self.as_atoms(args[0]), eqn.params["axis"], 0)]


def _iota(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    aval = eqn.outvars[0].aval
    out = np.empty(aval.shape, object)
    for place in np.ndindex(*aval.shape):
        out[place] = literal(place[eqn.params["dimension"]], aval.dtype)
    return [out]


def _pad(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray] | None:
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return None
    atoms, fill = self.as_atoms(args[0]), self.as_atoms(args[1]).item()
    out = np.empty(eqn.outvars[0].aval.shape, object)
    out.fill(fill)
    places = [
        slice(low, low + (n - 1) * (gap + 1) + 1, gap + 1) for (low, _, gap), n in zip(config, atoms.shape, strict=True)
    ]
    if atoms.size:
        out[tuple(places)] = atoms
    return [out]


# ------------------------------------------------------------------- reductions of small arrays


def _reduction(prim: str, unit: Callable[[np.dtype], object]) -> Callable:
    def rule(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
        atoms, axes = self.as_atoms(args[0]), tuple(eqn.params["axes"])
        dtype = eqn.outvars[0].aval.dtype
        moved = np.moveaxis(atoms, axes, range(len(axes)))
        rows = moved.reshape(-1, *moved.shape[len(axes) :])
        if not len(rows):
            return [map_elements(lambda: literal(unit(dtype), dtype), [], rows.shape[1:])]
        total = rows[0]
        for row in rows[1:]:
            make = lambda a, b: self.builder.op(prim, (a, b), dtype)
            total = map_elements(make, [as_object(total), as_object(row)], rows.shape[1:])
        return [as_object(total)]

    return rule


def as_object(value: Any) -> np.ndarray:
    """numpy hands out a bare atom where an object array has no dimension."""
    return value if is_atoms(value) else scalar(value)


def _arg_reduction(prim: str) -> Callable:
    def rule(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
        (axis,) = eqn.params["axes"]
        dtype = eqn.params["index_dtype"]
        rows = np.moveaxis(self.as_atoms(args[0]), axis, 0)
        out = np.empty(rows.shape[1:], object)
        for place in np.ndindex(*rows.shape[1:]):
            best, where = rows[(0, *place)], literal(0, dtype)
            for i in range(1, rows.shape[0]):
                candidate = rows[(i, *place)]
                better = self.builder.op(prim, (candidate, best), "bool")
                best = self.builder.select(better, candidate, best)
                where = self.builder.select(better, literal(i, dtype), where)
            out[place] = where
        return [out]

    return rule


def _cumulative(prim: str) -> Callable:
    def rule(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
        atoms = np.moveaxis(self.as_atoms(args[0]).copy(), eqn.params["axis"], 0)
        dtype = eqn.outvars[0].aval.dtype
        order = range(1, len(atoms)) if not eqn.params["reverse"] else range(len(atoms) - 2, -1, -1)
        step = -1 if not eqn.params["reverse"] else 1
        for i in order:
            for place in np.ndindex(*atoms.shape[1:]):
                atoms[(i, *place)] = self.builder.op(prim, (atoms[(i + step, *place)], atoms[(i, *place)]), dtype)
        return [np.moveaxis(atoms, 0, eqn.params["axis"])]

    return rule


def _dot_general(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    a, b = (self.as_atoms(x) for x in args)
    dtype = eqn.outvars[0].aval.dtype
    free_a = [i for i in range(a.ndim) if i not in (*contract_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*contract_b, *batch_b)]
    a, b = a.transpose(*batch_a, *free_a, *contract_a), b.transpose(*batch_b, *free_b, *contract_b)
    n, nc = len(batch_a), len(contract_a)
    out = np.empty(eqn.outvars[0].aval.shape, object)
    for place in np.ndindex(*out.shape):
        head, rest = place[:n], place[n:]
        left, right = rest[: len(free_a)], rest[len(free_a) :]
        total: Atom | None = None
        for inner in np.ndindex(*a.shape[a.ndim - nc :]):
            pair: Any = (a[(*head, *left, *inner)], b[(*head, *right, *inner)])
            product = self.builder.op("mul", tuple(self.builder.convert(x, dtype) for x in pair), dtype)
            total = product if total is None else self.builder.op("add", (total, product), dtype)
        out[place] = literal(0, dtype) if total is None else total
    return [out]


# ------------------------------------------------------------------- indexing


def _element(self: Lowering, array: Value, index: Sequence[Atom]) -> Atom:
    """array[index], the index in bounds."""
    if not is_atoms(array):
        return self.builder.load(self.capture(array), index)
    return _pick(self, array, list(index))


def _pick(self: Lowering, atoms: np.ndarray, index: list[Atom]) -> Atom:
    """An element of a small array of values at an index known only in the kernel: a chain of selects."""
    if not index:
        return atoms.item()
    first, rest = index[0], index[1:]
    if isinstance(first, Lit):
        return _pick(self, as_object(atoms[int(first.value)]), rest)
    chosen = _pick(self, as_object(atoms[0]), rest)
    for i in range(1, atoms.shape[0]):
        here = self.builder.op("eq", (first, literal(i, first.dtype)), "bool")
        chosen = self.builder.select(here, _pick(self, as_object(atoms[i]), rest), chosen)
    return chosen


def _dynamic_slice(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    array, sizes = args[0], eqn.params["slice_sizes"]
    starts = [self.as_atoms(a).item() for a in args[1:]]
    starts = [self.builder.clamped(s, n - k) for s, n, k in zip(starts, array.shape, sizes, strict=True)]
    if math.prod(sizes) > MAX_ELEMENTS:
        raise ModError(f"it slices out shape {tuple(sizes)} at each position; at most {MAX_ELEMENTS} elements.")
    out = np.empty(sizes, object)
    for place in np.ndindex(*sizes):
        index = [self.builder.op("add", (s, literal(i, "int32")), "int32") for s, i in zip(starts, place, strict=True)]
        out[place] = _element(self, array, index)
    return [out]


def _gather(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    array, indices = args[0], self.as_atoms(args[1])
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out_aval = eqn.outvars[0].aval
    if math.prod(out_aval.shape) > MAX_ELEMENTS:
        raise ModError(f"it gathers shape {tuple(out_aval.shape)} at each position; at most {MAX_ELEMENTS} elements.")
    collapsed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window_dims = [d for d in range(len(sizes)) if d not in collapsed]
    batch_axes = [d for d in range(len(out_aval.shape)) if d not in dims.offset_dims]
    fill = _fill_value(eqn)
    out = np.empty(out_aval.shape, object)
    for place in np.ndindex(*out_aval.shape):
        batch = tuple(place[d] for d in batch_axes)
        index: list[Atom] = [literal(0, "int32")] * len(sizes)
        valid: Atom = literal(True, "bool")
        for k, d in enumerate(dims.start_index_map):
            start = indices[(*batch, k)]
            valid = _in_bounds(self, valid, start, array.shape[d] - sizes[d])
            index[d] = self.builder.clamped(start, array.shape[d] - sizes[d])
        for d, i in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            index[d] = literal(batch[i], "int32")
        for d, axis in zip(window_dims, dims.offset_dims, strict=True):
            index[d] = self.builder.op("add", (index[d], literal(place[axis], "int32")), "int32")
        element = _element(self, array, index)
        out[place] = element if fill is None else self.builder.select(valid, element, fill)
    return [out]


def _fill_value(eqn: Any) -> Lit | None:
    mode, dtype = eqn.params["mode"], eqn.outvars[0].aval.dtype
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    value = eqn.params.get("fill_value")
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = math.nan
        elif dtype == jnp.bool_:
            value = True
        else:
            info = jnp.iinfo(dtype)
            value = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return literal(value, dtype)


def _in_bounds(self: Lowering, valid: Atom, start: Atom, limit: int) -> Atom:
    low = self.builder.op("ge", (start, literal(0, start.dtype)), "bool")
    if limit > jnp.iinfo(jnp.dtype(start.dtype)).max:
        return self.builder.op("and", (valid, low), "bool")
    high = self.builder.op("le", (start, literal(limit, start.dtype)), "bool")
    both = self.builder.op("and", (low, high), "bool")
    return self.builder.op("and", (valid, both), "bool")


# ------------------------------------------------------------------- control flow


def _cond(self: Lowering, eqn: Any, args: list[Value]) -> list[np.ndarray]:
    """Both branches are computed and selected: they have no effects."""
    which = self.as_atoms(args[0]).item()
    branches = eqn.params["branches"]
    results = [self.run(b.jaxpr, b.consts, args[1:]) for b in branches]
    outs = []
    for column in zip(*results, strict=True):
        chosen = self.as_atoms(column[0])
        for i in range(1, len(branches)):
            here = which if which.dtype == "bool" else self.builder.op("ge", (which, literal(i, which.dtype)), "bool")
            make = lambda new, old, here=here: self.builder.select(here, new, old)
            other = self.as_atoms(column[i])
            chosen = map_elements(make, [other, chosen], chosen.shape)
        outs.append(chosen)
    return outs


def _scan_counts(params: dict) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried (jax 0.11 has trees where 0.10 had numbers)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _scan(self: Lowering, eqn: Any, args: list[Value]) -> list[Value] | None:
    """A short loop, unrolled."""
    p = eqn.params
    if p["length"] > MAX_UNROLL:
        return None
    n_const, n_carry = _scan_counts(p)
    consts, carry, xs = args[:n_const], args[n_const : n_const + n_carry], args[n_const + n_carry :]
    closed = p["jaxpr"]
    rows: list[list[Value]] = [[] for _ in closed.jaxpr.outvars[n_carry:]]
    order = range(p["length"])
    for i in reversed(order) if p["reverse"] else order:
        row = [as_object(x[i]) if is_atoms(x) else x[i] for x in xs]
        outs = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *row])
        carry = outs[:n_carry]
        for kept, out in zip(rows, outs[n_carry:], strict=True):
            kept.append(self.as_atoms(out))
    stacked = [np.stack(kept[::-1] if p["reverse"] else kept) for kept in rows] if p["length"] else None
    if stacked is None:
        return None if rows else list(carry)
    return [*carry, *stacked]


def _one_minus_square(self: Lowering, eqn: Any, args: list[Value]) -> list[Value]:
    """1 - x * x, which newer jax has as a primitive, for the derivative of tanh."""
    out = eqn.outvars[0].aval
    one = literal(1, out.dtype)

    def make(x: Atom) -> Atom:
        less = self.builder.op("sub", (one, x), out.dtype)
        return self.builder.op("mul", (less, self.builder.op("add", (x, one), out.dtype)), out.dtype)

    return [map_elements(make, [self.as_atoms(args[0])], out.shape)]


def _log2(self: Lowering, eqn: Any, args: list[Value]) -> list[Value]:
    """log(x) / log(2), which newer jax has as a primitive; it compiles it to this product too."""
    out = eqn.outvars[0].aval
    factor = literal(1 / math.log(2), out.dtype)
    make = lambda x: self.builder.op("mul", (self.builder.op("log", (x,), out.dtype), factor), out.dtype)
    return [map_elements(make, [self.as_atoms(args[0])], out.shape)]


RULES: dict[str, Callable] = {
    "log2": _log2,
    "one_minus_square": _one_minus_square,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _structural(lambda a, p: a.reshape(p["new_sizes"])),
    "squeeze": _structural(lambda a, p: as_object(np.squeeze(a, axis=tuple(p["dimensions"])))),
    "expand_dims": _structural(lambda a, p: np.expand_dims(a, tuple(p["dimensions"]))),
    "transpose": _structural(lambda a, p: a.transpose(p["permutation"])),
    "rev": _structural(lambda a, p: np.flip(a, tuple(p["dimensions"]))),
    "slice": _structural(_slice),
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "iota": _iota,
    "pad": _pad,
    "reduce_sum": _reduction("add", lambda d: 0),
    "reduce_prod": _reduction("mul", lambda d: 1),
    "reduce_max": _reduction("max", lambda d: -math.inf if jnp.issubdtype(d, jnp.inexact) else jnp.iinfo(d).min),
    "reduce_min": _reduction("min", lambda d: math.inf if jnp.issubdtype(d, jnp.inexact) else jnp.iinfo(d).max),
    "reduce_and": _reduction("and", lambda d: True),
    "reduce_or": _reduction("or", lambda d: False),
    "reduce_xor": _reduction("xor", lambda d: False),
    "argmax": _arg_reduction("gt"),
    "argmin": _arg_reduction("lt"),
    "cumsum": _cumulative("add"),
    "cumprod": _cumulative("mul"),
    "cummax": _cumulative("max"),
    "cummin": _cumulative("min"),
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "cond": _cond,
    "scan": _scan,
}
