"""Lowering rules of primitives that are not elementwise, by the name of the primitive.

A rule (translation.py) unrolls small arrays into atoms. Reductions of larger arrays become loops (rolled.py), branches
become selects, short loops are unrolled. A rule that needs atoms of a captured or lazy array of more than MAX_ELEMENTS
elements raises ModError (`as_atoms`). For a lazy operand, lazy_rules.LAZY_RULES comes first.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom
from flexjax.trace.indexing import INDEXING_RULES
from flexjax.trace.lazy_rules import LAZY_RULES
from flexjax.trace.lower_special import SPECIAL_RULES
from flexjax.trace.random_keys import KEY_RULES
from flexjax.trace.rolled import Unit, cumulative, dot, place_of_best, reduced, rolls
from flexjax.trace.translation import Equation, Params, Rule, Translation
from flexjax.trace.values import MAX_UNROLL, ROLL, Value, as_object, choose, is_atoms, is_known, map_elements

# ------------------------------------------------------------------- shapes of small arrays


def _structural(change: Callable[[np.ndarray, Params], np.ndarray]) -> Rule:
    """The rule of a primitive that rearranges elements of its one operand: `change(atoms, parameters)`."""

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
        return [change(self.as_atoms(args[0]), eqn.params)]

    return rule


def _broadcast_in_dim(self: Translation, eqn: Equation, args: list[Value]) -> Sequence[Value] | None:
    """Repeats dimensions of length 1 and puts in new ones; lazy if the result has more than ROLL elements."""
    atoms, shape = self.as_atoms(args[0]), eqn.params["shape"]
    if math.prod(shape) > ROLL:
        return LAZY_RULES["broadcast_in_dim"](self, eqn, [atoms])
    spread = np.ones(len(shape), int)
    for axis, dim in enumerate(eqn.params["broadcast_dimensions"]):
        spread[dim] = atoms.shape[axis]
    return [np.broadcast_to(atoms.reshape(tuple(spread)), shape).copy()]


def _slice(atoms: np.ndarray, params: Params) -> np.ndarray:
    strides = params["strides"] or (1,) * atoms.ndim
    places = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return atoms[tuple(slice(*p) for p in places)]


def _concatenate(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    return [np.concatenate([self.as_atoms(a) for a in args], axis=eqn.params["dimension"])]


def _split(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    cuts = list(itertools.accumulate(eqn.params["sizes"]))[:-1]
    return np.split(self.as_atoms(args[0]), cuts, axis=eqn.params["axis"])


def _stack(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    return [np.stack([self.as_atoms(a) for a in args], axis=eqn.params["axis"])]


def _unstack(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    return [as_object(row) for row in np.moveaxis(self.as_atoms(args[0]), eqn.params["axis"], 0)]


def _iota(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    """An array of literals that count from 0 along one dimension."""
    aval = eqn.outvars[0].aval
    out = np.empty(aval.shape, object)
    for place in np.ndindex(*aval.shape):
        out[place] = literal(place[eqn.params["dimension"]], aval.dtype)
    return [out]


def _pad(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray] | None:
    """Low, high and interior padding; None (a Call) for negative padding, which cuts the array."""
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


def _least(dtype: np.dtype) -> float:
    return -math.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _greatest(dtype: np.dtype) -> float:
    return math.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _reduction(prim: str, unit: Unit) -> Rule:
    """The rule of a reduction such as `reduce_sum`, by the operation `prim`; no elements give `unit(dtype)`."""

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
        axes, aval = tuple(eqn.params["axes"]), eqn.outvars[0].aval
        dtype, array = aval.dtype, args[0]
        if rolls(array):
            return [reduced(self, prim, array, axes, unit, aval)]
        atoms = self.as_atoms(array)
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


def _arg_reduction(prim: str) -> Rule:
    """The rule of argmax (prim "gt") or argmin ("lt"): the index of the first best element, or the first NaN."""

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
        (axis,) = eqn.params["axes"]
        dtype = eqn.params["index_dtype"]
        if rolls(args[0]):
            return [place_of_best(self, "max" if prim == "gt" else "min", args[0], axis, eqn.outvars[0].aval)]
        rows = np.moveaxis(self.as_atoms(args[0]), axis, 0)
        out = np.empty(rows.shape[1:], object)
        for place in np.ndindex(*rows.shape[1:]):
            best, where = rows[(0, *place)], literal(0, dtype)
            for i in range(1, rows.shape[0]):
                candidate = rows[(i, *place)]
                better = _better(self, prim, candidate, best)
                best = self.builder.select(better, candidate, best)
                where = self.builder.select(better, literal(i, dtype), where)
            out[place] = where
        return [out]

    return rule


def _better(self: Translation, prim: str, candidate: Atom, best: Atom) -> Atom:
    """A bool atom: whether `candidate` replaces `best` by the comparison `prim` ("gt" or "lt")."""
    truth = lambda prim, *operands: self.builder.op(prim, operands, "bool")
    better = truth(prim, candidate, best)
    if not jnp.issubdtype(jnp.dtype(best.dtype), jnp.floating):
        return better
    # a NaN replaces any number and is never replaced
    return truth("or", better, truth("and", truth("ne", candidate, candidate), truth("eq", best, best)))


def _cumulative(prim: str, unit: Unit) -> Rule:
    """The rule of cumsum and the like, by the operation `prim` with which `unit(dtype)` changes nothing."""

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
        if rolls(args[0]):
            return [cumulative(self, prim, args[0], eqn.params["axis"], eqn.params["reverse"], unit)]
        atoms = np.moveaxis(self.as_atoms(args[0]).copy(), eqn.params["axis"], 0)
        dtype = eqn.outvars[0].aval.dtype
        order = range(1, len(atoms)) if not eqn.params["reverse"] else range(len(atoms) - 2, -1, -1)
        step = -1 if not eqn.params["reverse"] else 1
        for i in order:
            for place in np.ndindex(*atoms.shape[1:]):
                atoms[(i, *place)] = self.builder.op(prim, (atoms[(i + step, *place)], atoms[(i, *place)]), dtype)
        return [np.moveaxis(atoms, 0, eqn.params["axis"])]

    return rule


def _dot_general(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """A sum of products for each element; dims: batch, free dims of the first operand, of the second."""
    if any(map(rolls, args)) or (any(map(is_known, args)) and max(a.size for a in args) > ROLL):
        return [dot(self, eqn, args)]
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
            pair: tuple[Atom, ...] = (a.item(*head, *left, *inner), b.item(*head, *right, *inner))
            # converted to the dtype of the result before the product
            product = self.builder.op("mul", tuple(self.builder.convert(x, dtype) for x in pair), dtype)
            total = product if total is None else self.builder.op("add", (total, product), dtype)
        out[place] = literal(0, dtype) if total is None else total
    return [out]


# ------------------------------------------------------------------- control flow


def _cond(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """Computes every branch and picks the results by selects, because branches have no effects.

    The first operand is the branch's index: an integer that is clamped to the branches, or a bool, False for branch 0.
    """
    which = self.as_atoms(args[0]).item()
    branches = eqn.params["branches"]
    not_ = lambda truth: self.builder.op("not", (truth,), "bool")
    from_here = [
        which if which.dtype == "bool" else self.builder.op("ge", (which, literal(i, which.dtype)), "bool")
        for i in range(1, len(branches))
    ]
    results = []
    for i, branch in enumerate(branches):
        bounds = [*from_here[i - 1 : i], *map(not_, from_here[i : i + 1])]
        taken: Atom = literal(True, "bool")
        for bound in bounds:
            taken = self.builder.op("and", (taken, bound), "bool")
        results.append(self.run_branch(taken, branch, args[1:]))
    outs = []
    for var, *column in zip(eqn.outvars, *results, strict=True):
        chosen = column[0]
        for i in range(1, len(branches)):
            make = lambda new, old, here=from_here[i - 1]: choose(self.builder, here, new, old)
            chosen = self.map_values(make, [column[i], chosen], var.aval.shape, var.aval.dtype)
        outs.append(chosen)
    return outs


def _scan_counts(params: Params) -> tuple[int, int]:
    """(operands of a `scan` that are constants, operands that are carried)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.11 has trees in the parameters where 0.10 had numbers
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _scan(self: Translation, eqn: Equation, args: list[Value]) -> list[Value] | None:
    """Unrolls a loop of at most MAX_UNROLL iterations. Operands: constants, carry, arrays of rows.

    None (a Call) for a longer loop, and for a loop without iterations that has stacked results.
    """
    p = eqn.params
    if p["length"] > MAX_UNROLL:
        return None
    n_const, n_carry = _scan_counts(p)
    consts, carry, xs = args[:n_const], args[n_const : n_const + n_carry], args[n_const + n_carry :]
    closed = p["jaxpr"]
    rows: list[list[np.ndarray]] = [[] for _ in closed.jaxpr.outvars[n_carry:]]
    order = range(p["length"])
    for i in reversed(order) if p["reverse"] else order:
        row = [as_object(x[i]) if is_atoms(x) else x[i] for x in xs]
        outs = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *row])
        carry = outs[:n_carry]
        for kept, out in zip(rows, outs[n_carry:], strict=True):
            kept.append(self.as_atoms(out))
    # stacked results have the order of the inputs, also with `reverse`
    stacked = [np.stack(kept[::-1] if p["reverse"] else kept) for kept in rows] if p["length"] else None
    if stacked is None:
        return None if rows else list(carry)
    return [*carry, *stacked]


def _one_minus_square(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `one_minus_square`, which newer jax uses in the derivative of tanh: (1 - x) * (x + 1)."""
    out = eqn.outvars[0].aval
    one = literal(1, out.dtype)

    def make(x: Atom) -> Atom:
        less = self.builder.op("sub", (one, x), out.dtype)
        return self.builder.op("mul", (less, self.builder.op("add", (x, one), out.dtype)), out.dtype)

    return [self.map_values(make, args, out.shape, out.dtype)]


def _log2(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `log2`, a primitive of newer jax: log(x) * (1 / log(2)), as jax itself compiles it."""
    out = eqn.outvars[0].aval
    factor = literal(1 / math.log(2), out.dtype)
    make = lambda x: self.builder.op("mul", (self.builder.op("log", (x,), out.dtype), factor), out.dtype)
    return [self.map_values(make, args, out.shape, out.dtype)]


RULES: dict[str, Rule] = {
    "log2": _log2,
    "one_minus_square": _one_minus_square,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _structural(lambda a, p: a.transpose(p.get("dimensions") or range(a.ndim)).reshape(p["new_sizes"])),
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
    "reduce_max": _reduction("max", _least),
    "reduce_min": _reduction("min", _greatest),
    "reduce_and": _reduction("and", lambda d: (~np.zeros((), d)).item()),
    "reduce_or": _reduction("or", lambda d: False),
    "reduce_xor": _reduction("xor", lambda d: False),
    "argmax": _arg_reduction("gt"),
    "argmin": _arg_reduction("lt"),
    "cumsum": _cumulative("add", lambda d: 0),
    "cumprod": _cumulative("mul", lambda d: 1),
    "cummax": _cumulative("max", _least),
    "cummin": _cumulative("min", _greatest),
    "dot_general": _dot_general,
    **INDEXING_RULES,
    **SPECIAL_RULES,
    **KEY_RULES,
    "cond": _cond,
    "scan": _scan,
}
