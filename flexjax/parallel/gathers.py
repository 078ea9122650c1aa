"""Says what is communicated before a call because its arrays are split otherwise than its work.

The work is split by batch and heads. An array that is split over another dimension, or over other axes, is gathered first.
"""

import math
import typing
import warnings
from collections.abc import Sequence

import jax

from flexjax.errors import FallbackWarning
from flexjax.ir.origin import Starts
from flexjax.parallel.split import Split, choose_split, operand_dims, spec_of
from flexjax.partition import Mesh, Names, Spec, names_of
from flexjax.plan.kernel_plan import BlockLists, Operands
from flexjax.plan.problem import Problem

DIMENSIONS = {"b": "batch", "t": "tokens", "s": "tokens", "d": "head dim", "e": "head dim", "r": "features"}
DIMENSIONS |= dict.fromkeys("hmx", "heads")

_said: set[object] = set()
"""Plans of the warnings of this process."""


def warn_of_gathers(problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]) -> None:
    """Warns, once a plan, if operands that are split as `specs` say are gathered. `arrays`: operands or their shapes."""
    found = gathers(problem, split, arrays, specs)
    if not found or problem.plan in _said:
        return
    total, each = found
    warnings.warn(
        f"Each device receives {total} before the forward pass of a call: {each}. Of how arrays are split over a mesh, "
        f"attention keeps the batch and the heads. Split those instead. {problem.call}",
        FallbackWarning,
        stacklevel=2,
    )
    _said.add(problem.plan)  # last: a warning that is an error is one at the next call too


def warn_of_whole_calls(problem: Problem, why: str) -> None:
    """Warns, once a plan and reason, that every device computes all of a call."""
    if (problem.plan, why) in _said:
        return
    warnings.warn(f"{why} {problem.call}", FallbackWarning, stacklevel=2)
    _said.add((problem.plan, why))


def gathers(
    problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]
) -> tuple[str, str] | None:
    """The bytes that each device receives, and a list of the operands that are gathered; None if there are none."""
    total, each = 0, []
    for name, dims, x, given in zip(operand_names(problem), operand_dims(problem), arrays, specs, strict=True):
        needed = [names_of(part) for part in spec_of(problem.plan, dims, split)]
        size = _received(x, given, needed, split)
        if size:
            total += size
            over = [
                DIMENSIONS.get(d, "another dimension")
                for d, g, n in zip(dims.split(), given, needed, strict=True)
                if set(g) - set(n)
            ]
            each.append(f"{name} {_bytes(size)} (split over {' and '.join(over)})")
    return (_bytes(total), ", ".join(each)) if each else None


def _received(x: typing.Any, given: Sequence[Names], needed: Sequence[Names], split: Split) -> int:
    """The bytes of a device's part as `needed` that are not in its part as `given`."""
    devices = lambda parts: math.prod(split.count(tuple(names)) for names in parts)
    both = [dict.fromkeys((*g, *n)) for g, n in zip(given, needed, strict=True)]
    size = math.prod(x.shape) * x.dtype.itemsize
    return size // devices(needed) - size // devices(map(tuple, both))


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def operand_names(problem: Problem) -> list[str]:
    """A name for each operand."""
    n = problem.structure.num_leaves
    places = problem.arrange(range(n))
    tree_of: typing.Any = Operands
    of_mod = lambda mod, captures: tuple(f"captured array {i} of {mod}" for i in range(len(captures)))
    named = tree_of(
        *(None if place is None else name for name, place in zip(Operands._fields[:6], places[:6], strict=True)),
        score_captures=of_mod("score_mod", places.score_captures),
        mask_captures=of_mod("mask_mod", places.mask_captures),
        dropout_captures=of_mod("dropout", places.dropout_captures),
        lists=None
        if places.lists is None
        else BlockLists._make(None if x is None else "a block list" for x in places.lists),
        origin=None if places.origin is None else Starts("the origin of query", "the origin of key"),
    )
    return jax.tree.leaves(named)


def describe_devices(problem: Problem, arrays: Sequence[typing.Any], shardings: Sequence[typing.Any]) -> str:
    """How the work is split over devices and what is gathered, for operands with these shardings; "" on one device."""
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1]
    if not named:
        return ""
    mesh: Mesh = named[0].mesh.abstract_mesh
    entries = [s.spec if s in named and s.mesh.abstract_mesh == mesh else () for s in shardings]
    specs = [
        (*map(names_of, spec), *[()] * (len(x.shape) - len(spec))) for x, spec in zip(arrays, entries, strict=True)
    ]
    split = choose_split(problem.plan, mesh, operand_dims(problem), specs)
    over = [f"{what} over {', '.join(axes)}" for what, axes in (("batch", split.batch), ("heads", split.heads)) if axes]
    found = gathers(problem, split, arrays, specs)
    return "\n".join(
        (
            "devices: " + " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
            "  the work is split by " + " and ".join(over) if over else "  every device computes all of it",
            "  nothing is gathered" if found is None else f"  each device receives {found[0]}: {found[1]}",
        )
    )
