"""`ContextParallel`: attention whose sequence is split over mesh axes, and what is decided about a call before it runs.

    local rows of query, key, value        one device's blocks, in the order of the layout
       |  exchange (exchange.py)           key blocks travel, by one of four methods
       v
    stages: own keys, keys that came       each a call of the kernels, with the positions of its blocks (ir/origin.py)
       v
    merged by lse                          float32

    neighbours   each device receives the key blocks that its queries visit; own blocks compute while they travel
    ring         whole shards travel around the ring, one at a time: memory of three shards, n - 1 stages
    all_gather   every device receives all keys and values, in the order of the sequence; one stage
    all_to_all   the heads are split instead of the sequence for the time of the call

The backward pass exchanges keys and values again, because storing what was received costs memory in every layer. Each
stage runs the backward kernels with the out and lse of the whole row, so nothing is differentiated through the merge.
Gradients of keys and values travel back in float32 and are added in a fixed order.
"""

import collections
import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.core import Tracer

from flexjax.context import balance as context_balance
from flexjax.context.blocks import visited_blocks
from flexjax.context.layout import ContextLayout
from flexjax.context.rounds import Rounds, needed_keys, rounds_of
from flexjax.errors import bad_argument, kind_of
from flexjax.partition import Names
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan
from flexjax.plan.problem import Problem
from flexjax.trace.trace_mod import TracedMod

Array = jax.Array
Method = typing.Literal["auto", "neighbours", "ring", "all_gather", "all_to_all"]
METHODS = ("neighbours", "ring", "all_gather", "all_to_all")

MEMORY = 4 << 30  # bytes of visiting keys, values and their gradients above which "auto" chooses "ring"


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layout",), meta_fields=("axis", "method"))
@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Says that the sequence of a call is split over mesh axes; an argument of `flex_attention`.

    axis     the name of a mesh axis, or a tuple of names, the outermost first
    layout   what `context_layout` returns; None: device r has the r-th part of queries and of keys
    method   "auto", or how keys and values travel:
             "neighbours"   each device receives the key blocks that its queries visit
             "ring"         whole shards travel around the ring of devices, one at a time: least memory
             "all_gather"   each device receives all keys and values
             "all_to_all"   the heads are split instead during the call; the devices must divide query and key heads

    The call takes permuted arrays (`layout.shard`): global ones under jit with a mesh that is set (jax.set_mesh), whose
    axes are of type Auto or Explicit, or those of one device inside jax.shard_map. Captured arrays, block masks and all
    positions are in the order of the sequence. Rows of padding give 0.

    Example:

        layout = flexjax.context_layout(masks.causal, T, devices=4)
        q, k, v = (layout.shard(x, axis=1) for x in (q, k, v))
        out = flexjax.flex_attention(q, k, v, mask_mod=masks.causal, context=flexjax.ContextParallel("sp", layout))
        out = layout.unshard(out, axis=1)
    """

    axis: str | tuple[str, ...]
    layout: ContextLayout | None = None
    method: Method = "auto"

    @property
    def axes(self) -> Names:
        """The names of the mesh axes, the outermost first."""
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)


class Visitors(typing.NamedTuple):
    """The query blocks that visit received keys, where they are few: a stage of their own over all their keys.

    The other rows visit own keys alone, so nothing is merged. Gradients of own keys with several terms are added in
    float32. All arrays are int32 [devices, ...].
    """

    queries: Array | np.ndarray  # own query blocks that are visitors; past the end: the number of its query blocks
    query_blocks: Array | np.ndarray  # their numbers in the sequence; past the end: -1
    keys: Array | np.ndarray  # own key blocks that they visit; past the end: the number of its key blocks
    key_blocks: Array | np.ndarray  # their numbers in the sequence; past the end: -1
    changed: Array | np.ndarray  # own key blocks with gradients from elsewhere than the first stage
    # where in `changed` the blocks of `keys` are, then those sent in each round; past the end: the width of `changed`
    places: tuple[Array | np.ndarray, ...]


class Tables(typing.NamedTuple):
    """Arrays that say who owns and who sends which blocks, the same on every device."""

    query_blocks: Array  # int32 [devices, blocks of each], see ContextLayout
    key_blocks: Array
    send: tuple[Array, ...]  # for each round of "neighbours" int32 [devices, width], see Rounds; () for other methods
    received: tuple[Array, ...]
    lists: tuple[BlockLists, ...] | None = None  # of each stage; None where devices classify their blocks
    visitors: Visitors | None = None  # None where all query blocks may visit received keys
    # int8 [1 or B, 1 or N, query blocks, key blocks]: classes of a mask from user lists; None where the mask program
    # says all
    classes: Array | None = None


@dataclasses.dataclass(frozen=True)
class ContextCall:
    """The static part of a call whose sequence is split."""

    problem: Problem  # of the whole call; the block layout and the origin are those of stages
    axes: Names  # of the sequence, the outermost first
    mesh: tuple[tuple[str, int], ...]  # (name, size) of the same axes, in the order of the mesh
    devices: int
    method: str
    lengths: tuple[int, int]  # tokens of queries and keys in the sequence
    block_size: tuple[int, int]  # tokens of a block of queries and of keys
    shifts: tuple[int, ...]  # distances of the rounds of "neighbours"
    # the rounds may lack a block, as they were made for other values: devices then find out together and take the ring
    checked: bool
    blocks: tuple[BlockLayout, ...]  # of each stage whose lists are in the tables
    is_global: bool  # whether the arrays are those of all devices, split by XLA's partitioner
    structure: typing.Any  # of Tables

    @property
    def plan(self) -> KernelPlan:
        return self.problem.plan

    def tables(self, flat: Sequence[Array]) -> Tables:
        return jax.tree.unflatten(self.structure, flat)


def check_context(context: object) -> ContextParallel:
    """The argument `context` itself; raises ValueError for a wrong one. Axes are not compared with a mesh here."""
    if not isinstance(context, ContextParallel):
        raise bad_argument(
            "context", kind_of(context), "a flexjax.ContextParallel", "Pass ContextParallel('axis', layout)."
        )
    axes = context.axis if isinstance(context.axis, tuple) else (context.axis,)
    if not axes or not all(isinstance(name, str) for name in axes) or len(set(axes)) < len(axes):
        raise bad_argument("context.axis", repr(context.axis), "an axis name or a tuple of names", "Name mesh axes.")
    if context.layout is not None and not isinstance(context.layout, ContextLayout):
        raise bad_argument(
            "context.layout", kind_of(context.layout), "a layout or None", "Make one with context_layout."
        )
    if context.method not in ("auto", *METHODS):
        raise bad_argument(
            "context.method",
            repr(context.method),
            "'auto', " + ", ".join(map(repr, METHODS)),
            "'auto' models the bytes.",
        )
    return context


def devices_of(context: ContextParallel, shape: Mapping[str, int]) -> int:
    """The number of devices along the axes of a mesh of that shape. Raises ValueError for an axis that it lacks."""
    for name in context.axes:
        if name not in shape:
            raise bad_argument(
                "context.axis", repr(context.axis),
                f"axes of the mesh, which has {', '.join(map(repr, shape)) or 'none'}",
                "Run the call with the mesh set (jax.set_mesh), or inside jax.shard_map over these axes.",
            )  # fmt: skip
    return math.prod(shape[name] for name in context.axes)


def layout_for(context: ContextParallel, devices: int, rows: tuple[int, int]) -> ContextLayout:
    """The layout given, or a contiguous one without padding. Raises ValueError for one that does not fit."""
    layout = context.layout
    if layout is None:
        sizes = tuple(_block_of(name, n, devices) for name, n in zip(("query", "key"), rows, strict=True))
        blocks = [
            context_balance.contiguous(n // size // devices, devices) for n, size in zip(rows, sizes, strict=True)
        ]
        return ContextLayout(*rows, devices, (sizes[0], sizes[1]), "contiguous", blocks[0], blocks[1], None, None, None)
    if layout.devices != devices:
        raise bad_argument(
            "context.layout", f"for {layout.devices} devices", f"a layout for {devices}, the size of {context.axis!r}",
            f"Pass devices={devices} to context_layout.",
        )  # fmt: skip
    for name, side, n in (("query", "query", rows[0]), ("key", "key", rows[1])):
        if layout.padded(side) != n:  # type: ignore[arg-type]
            raise bad_argument(
                "context.layout",
                f"for {layout.padded(side)} rows of {name} on all devices together",  # type: ignore[arg-type]
                f"a layout for the {n} that the call has", "Permute and pad the arrays with layout.shard.",
            )  # fmt: skip
    return layout


def _block_of(name: str, rows: int, devices: int) -> int:
    """The block size of a contiguous layout, up to 128. Raises ValueError if no good one divides a device's rows."""
    if rows == 0:
        raise bad_argument(
            name, "0 rows", "tokens to split over the devices", "Leave context= out for a call without queries or keys."
        )
    each = rows // devices
    size = next((n for n in range(min(128, each), 0, -1) if each % n == 0), 0)
    if rows % devices or size < min(each, 8):
        raise bad_argument(
            name, f"{rows} rows on {devices} devices", "a number of rows that the devices divide into whole blocks",
            "Make a layout with context_layout, which pads.",
        )  # fmt: skip
    return size


# ------------------------------------------------------------------- the method


class Decision(typing.NamedTuple):
    """How the keys of a call travel."""

    method: str
    rounds: Rounds | None  # of "neighbours"; None for other methods
    checked: bool  # as in ContextCall


def decide(
    context: ContextParallel,
    layout: ContextLayout,
    plan: KernelPlan,
    mask: TracedMod,
    entries: tuple[int, int],
    lists_known: np.ndarray | None,
) -> Decision:
    """The method of a call, and its rounds. Raises ValueError for a method that the call cannot have.

    plan          of the call's own arrays, with a device's batch entries and heads where explicit axes split them
    entries       batch entries and query heads that the mask is traced for: all devices take part in the same rounds
    lists_known   bool [query blocks, key blocks]: the visited blocks of a mask from user lists; None for other masks
    """
    if layout.devices == 1:
        return Decision("all_gather", None, False)
    known = is_known(layout, mask)
    divides = all(n % layout.devices == 0 for n in (plan.q_heads, plan.kv_heads, *_present(plan.extra_heads)))
    if context.method == "all_to_all" and not divides:
        raise bad_argument(
            "context.method",
            "'all_to_all'",
            f"a method that keeps heads together, because {layout.devices} does not divide their numbers",
            f"The call has {plan.q_heads} query and {plan.kv_heads} key heads on each device; use 'ring' or "
            "'all_gather'.",
        )
    if context.method == "neighbours" and not known and layout.rounds is None:
        raise bad_argument(
            "context.method", "'neighbours'", "'ring', 'all_gather', 'all_to_all' or 'auto'",
            "Arrays of the mask or lengths are traced, so which blocks travel is unknown while the call is traced. "
            "Only a layout that context_layout made outside of jit, from the values of these arrays, knows.",
        )  # fmt: skip
    # a mask that is not known has the rounds of the layout, which were made for known values
    rounds = layout.rounds
    if context.method in ("auto", "neighbours") and known:
        rounds = _rounds(mask, layout, entries, lists_known)
    method = context.method if context.method != "auto" else _cheapest(plan, layout, rounds, divides)
    return Decision(method, rounds if method == "neighbours" else None, method == "neighbours" and not known)


def is_known(layout: ContextLayout, mask: TracedMod) -> bool:
    """Whether the numbers of the layout and of the arrays that the mask captures are known, not traced."""
    return layout.is_known and not any(isinstance(x, Tracer) for x in mask.arrays)


def _present(heads: int) -> tuple[int, ...]:
    return (heads,) if heads else ()


# The layers of a model ask for the same rounds. The values keep alive what the keys name by address.
_ROUNDS: collections.OrderedDict[tuple, tuple[object, Rounds]] = collections.OrderedDict()
KEPT_ROUNDS = 16


def _rounds(mask: TracedMod, layout: ContextLayout, entries: tuple[int, int], lists_known: np.ndarray | None) -> Rounds:
    """The rounds in which the devices get all key blocks that a known mask visits; arguments as those of `decide`."""
    batch, query_heads = entries
    heads = (batch if mask.program.reads("b") else 1, query_heads if mask.program.reads("h") else 1)
    sizes = (layout.q_len, layout.kv_len, *layout.block_size)
    key = (mask.program, heads, sizes, id(layout), *map(id, mask.arrays))
    found = _ROUNDS.get(key)
    if found is None or lists_known is not None:
        needed = visited_blocks(mask, heads, sizes).needed if lists_known is None else lists_known
        query_blocks, key_blocks = np.asarray(layout.query_blocks), np.asarray(layout.key_blocks)
        made = rounds_of(needed_keys(needed, query_blocks, key_blocks), key_blocks, rounded=False)
        found = ((layout, mask.arrays), made)
        if lists_known is None:
            _ROUNDS[key] = found
        while len(_ROUNDS) > KEPT_ROUNDS:
            _ROUNDS.popitem(last=False)
    return found[1]


def _cheapest(plan: KernelPlan, layout: ContextLayout, rounds: Rounds | None, divides: bool) -> str:
    """The method that "auto" stands for, from the bytes that a device receives; rounds: None if they are not known."""
    n, itemsize = layout.devices, np.dtype(plan.dtype).itemsize
    features = plan.kv_heads * (plan.head_dim + plan.value_dim) + plan.extra_heads * plan.extra_dim
    keys = plan.batch * layout.block_size[1] * features
    own = layout.key_blocks.shape[1]
    received = (n - 1) * own if rounds is None else rounds.width
    rows = plan.batch * layout.query_blocks.shape[1] * layout.block_size[0] * plan.q_heads
    both = rows * (plan.head_dim + plan.value_dim + plan.extra_dim) + keys * own
    # half, because nothing is computed while all_to_all runs
    if divides and both * (n - 1) / n < received * keys / 2:
        return "all_to_all"
    if received * keys * (itemsize + 8) > MEMORY:  # keys, values and their gradients in float32, received and sent back
        return "ring"
    return "all_gather" if rounds is None else "neighbours"
