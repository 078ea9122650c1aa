"""Says what is communicated before a call because its arrays are split otherwise than its work.

The work is split by batch and heads. An array that is split over another dimension, or over other axes, is gathered first: each
device receives the parts that its share of the work needs and that it does not have. A Spec (flexjax/partition.py) has, for each
dimension of an array, the mesh axes that split the dimension.

A Split says over which mesh axes the batch and the heads of the work are split.

A plan (KernelPlan) is everything static about one call; operands are its arrays; a problem is a plan with the derivative program
of score_mod and the backends to ask (plan/problem.py).
"""

import math
import typing
import warnings
from collections.abc import Sequence

import jax

from flexjax.errors import FallbackWarning, stacklevel_of_user
from flexjax.parallel.split import Split, choose_split, operand_dims, spec_of
from flexjax.partition import Mesh, Names, Spec, names_of
from flexjax.plan.kernel_plan import FIRST_CAPTURE, BlockLists, Lengths, Operands
from flexjax.plan.problem import Problem

DIMENSIONS = {"b": "batch", "t": "tokens", "s": "tokens", "d": "head dim", "e": "head dim", "r": "features"}
DIMENSIONS |= dict.fromkeys("hmx", "heads")
"""What warnings call the dimensions that `operand_dims` names by a letter."""

_said: set[object] = set()
"""What this process has warned of: pairs of a plan and what is gathered, or the reason for a whole call."""


def warn_of_gathers(problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]) -> None:
    """Warns, once for each plan and what it gathers in a process, if a forward pass whose work is split by `split` has to gather operands.

    arrays   the operands or their shapes, as a flat list
    specs    how each of them is split now
    """
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
    """Warns, once for each plan and reason in a process, that every device computes all of a call.

    why   the reason and what to do: whole sentences, the beginning of the message
    """
    if (problem.plan, why) in _said:
        return
    warnings.warn(f"{why} {problem.call}", FallbackWarning, stacklevel=stacklevel_of_user())
    _said.add((problem.plan, why))


def gathers(
    problem: Problem, split: Split, arrays: Sequence[typing.Any], specs: Sequence[Spec]
) -> tuple[str, str] | None:
    """What each device receives before the work is done by `split`: None if nothing is gathered, else two texts for a message.

    arrays   the operands or their shapes, as a flat list
    specs    how each of them is split now

    The texts are the bytes in total ("1.5 GB"), and for each gathered operand its name, its bytes, and the dimensions over which
    it is split now and not for the work.
    """
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
    """How many bytes of x one device receives when the split of x changes from `given` to `needed`.

    given, needed   for each dimension of x (an array or its shape) the axes that split it
    split           its mesh gives the sizes of the axes

    That is the size of the device's needed part less the size of what it has of this part already.
    """
    devices = lambda parts: math.prod(split.count(tuple(names)) for names in parts)
    both = [dict.fromkeys((*g, *n)) for g, n in zip(given, needed, strict=True)]
    size = math.prod(x.shape) * x.dtype.itemsize
    return size // devices(needed) - size // devices(map(tuple, both))


def bytes_text(size: int) -> str:
    """A number of bytes as text: three significant digits with TB, GB, MB or kB (powers of 1000), such as "1.5 GB", or below 1000 all
    digits with B. What rounds to 1000 of a unit has the next one; from 999.5 TB on all digits of the TB are written.
    """
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if 10_000 * size >= 9_995 * factor:
            number = size / factor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{size} B"


def operand_names(problem: Problem) -> list[str]:
    """A name for each operand of the flat list, in its order, for messages: "query", "captured array 0 of score_mod", "a block list",
    "the origin of key", "query_seq_lengths".
    """
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
        else BlockLists._make(None if x is None else "a block list" for x in places.lists),
        origin=None if places.origin is None else ("the origin of query", "the origin of key"),
        lengths=None
        if places.lengths is None
        else Lengths._make(
            None if x is None else f"{name}_seq_lengths"
            for name, x in zip(("query", "key_value"), places.lengths, strict=True)
        ),
    )
    return jax.tree.leaves(named)


def describe_devices(problem: Problem, arrays: Sequence[typing.Any], shardings: Sequence[typing.Any]) -> str:
    """The lines of `flexjax.explain` about devices, as one text; "" if no array lies on a mesh of several devices.

    arrays      the operands or their shapes, as a flat list
    shardings   the jax sharding of each of them (only NamedShardings count), None where it has none

    The first line has the axes of the mesh and their sizes, "devices: data 2 x model 4", the second what the work is split by or that every
    device computes all of it, the third what each device receives or that nothing is gathered. The mesh is that of the first such array;
    arrays on another mesh count as whole.
    """
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
