"""Says what is communicated before a call because its arrays are split otherwise than its work.

The work is split by batch and heads. An array that is split over another dimension, or over other axes, is gathered
first: each device receives the parts that its share of the work needs and that it does not have.

`arrays` are the operands or their shapes, as a flat list; `specs` says how each of them is split now.
"""

import math
import typing
import warnings
from collections.abc import Sequence

import jax

from flexjax.errors import FallbackWarning, stacklevel_of_user
from flexjax.parallel.split import Split, choose_split, operand_dims, spec_of
from flexjax.partition import Mesh, Names, Spec, names_of
from flexjax.plan.kernel_plan import FIRST_CAPTURE, Lengths, Operands
from flexjax.plan.problem import Problem

# what warnings call the dimensions that `operand_dims` names by a letter
DIMENSIONS = {"b": "batch", "t": "tokens", "s": "tokens", "d": "head dim", "e": "head dim", "r": "features"}
DIMENSIONS |= dict.fromkeys("hmx", "heads")

_said: set[object] = set()  # what this process has warned of: (plan, what is gathered) or (plan, reason)


def warn_of_gathers(problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]) -> None:
    """Warns, once for a plan and what it gathers, if a forward pass split by `split` has to gather operands."""
    found = gathers(problem, split, arrays, specs)
    if not found or (problem.plan, found) in _said:
        return
    total, each = found
    keep = (
        ", or name the axis that splits the tokens in context=flexjax.ContextParallel(axis)" if "tokens" in each else ""
    )
    warnings.warn(
        f"Each device receives {total} before the forward pass of a call: {each}. Attention keeps a split of the "
        f"batch and of the heads, and gathers other splits. Split the batch or the heads instead{keep}. {problem.call}",
        FallbackWarning,
        stacklevel=stacklevel_of_user(),
    )
    _said.add((problem.plan, found))  # last: a warning that is an error is one at the next call too


def warn_of_whole_calls(problem: Problem, why: str) -> None:
    """Warns, once for a plan and reason `why` (whole sentences), that every device computes all of a call."""
    if (problem.plan, why) in _said:
        return
    warnings.warn(f"{why} {problem.call}", FallbackWarning, stacklevel=stacklevel_of_user())
    _said.add((problem.plan, why))


def gathers(
    problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]
) -> tuple[str, str] | None:
    """What each device receives before the work, or None: the bytes in total, and each operand with its bytes."""
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
            each.append(f"{name} {bytes_text(size)} (split over {' and '.join(over)})")
    return (bytes_text(total), ", ".join(each)) if each else None


def _received(x: typing.Any, given: Sequence[Names], needed: Sequence[Names], split: Split) -> int:
    """How many bytes of x one device receives when the axes of its dimensions change from `given` to `needed`."""
    devices = lambda parts: math.prod(split.count(tuple(names)) for names in parts)
    both = [dict.fromkeys((*g, *n)) for g, n in zip(given, needed, strict=True)]
    size = math.prod(x.shape) * x.dtype.itemsize
    return size // devices(needed) - size // devices(map(tuple, both))


def bytes_text(size: int) -> str:
    """A number of bytes with three significant digits and TB, GB, MB or kB (powers of 1000), or below 1000 with B."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if 10_000 * size >= 9_995 * factor:
            number = size / factor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{size} B"


def operand_names(problem: Problem) -> list[str]:
    """Names of the flat list of operands for messages: "query", "captured array 0 of score_mod", "a block list"."""
    n = problem.structure.num_leaves
    places = problem.arrange(range(n))
    tree_of: typing.Any = Operands
    of_mod = lambda mod, captures: tuple(f"captured array {i} of {mod}" for i in range(len(captures)))
    named = tree_of(
        *(
            None if place is None else name
            for name, place in zip(Operands._fields[:FIRST_CAPTURE], places[:FIRST_CAPTURE], strict=True)
        ),
        score_captures=of_mod("score_mod", places.score_captures),
        mask_captures=of_mod("mask_mod", places.mask_captures),
        dropout_captures=of_mod("dropout", places.dropout_captures),
        lists=None
        if places.lists is None
        else places.lists._make(None if x is None else "a block list" for x in places.lists),
        origin=None if places.origin is None else ("the origin of query", "the origin of key"),
        lengths=None
        if places.lengths is None
        else Lengths._make(
            None if x is None else f"{name}_seq_lengths"
            for name, x in zip(("query", "key_value"), places.lengths, strict=True)
        ),
        documents=None if places.documents is None else "origin.documents",
    )
    return jax.tree.leaves(named)


def describe_devices(problem: Problem, arrays: Sequence[typing.Any], shardings: Sequence[typing.Any]) -> str:
    """The lines of `flexjax.explain` about devices; "" if no array lies on a mesh of several devices."""
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
