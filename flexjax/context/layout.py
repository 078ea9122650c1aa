"""`context_layout`: which device of a split sequence owns which tokens, and what it needs from the others.

The sequence is cut into blocks of `block_size` tokens, and every device owns the same number of them (balance.py).
Arrays over the sequence are permuted: the blocks of device 0 in ascending order, then those of device 1, and so on.
Where the lengths do not divide evenly, rows of padding follow the last token.

The numbers of a layout are leaves of a pytree, so another layout with arrays of the same shapes compiles nothing again.
A layout with known arrays is hashable, so it may be a static argument too.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flexjax.context import balance as context_balance
from flexjax.context.blocks import is_traced, trace_mask, visited_blocks
from flexjax.context.rounds import Rounds, needed_keys, received_counts, rounds_of
from flexjax.errors import bad_argument, public
from flexjax.integers import cdiv
from flexjax.mod_tools.settings import own
from flexjax.types import ArrayArgument, MaskMod

Array = jax.Array
Balance = typing.Literal["auto", "contiguous", "zigzag"]
Side = typing.Literal["query", "key"]
A = typing.TypeVar("A", bound=ArrayArgument)

STATIC = ("q_len", "kv_len", "devices", "block_size", "balance")
NUMBERS = ("query_blocks", "key_blocks", "rounds", "_loads", "_blocks_received")


@functools.partial(jax.tree_util.register_dataclass, data_fields=NUMBERS, meta_fields=STATIC)
@dataclasses.dataclass(frozen=True, eq=False)
class ContextLayout:
    """Who owns which tokens of a sequence that is split over devices; `context_layout` makes one.

    q_len, kv_len   tokens of the sequence, without padding
    block_size      tokens of a block of queries and of a block of keys
    query_blocks    int32 [devices, blocks]: each device's blocks of queries, ascending. Blocks past the end are padding
    key_blocks      the same for keys: the same blocks if lengths and block sizes are equal, else the r-th part
    rounds          how key blocks travel; None where the mask was traced
    """

    q_len: int
    kv_len: int
    devices: int
    block_size: tuple[int, int]
    balance: str
    query_blocks: Array | np.ndarray
    key_blocks: Array | np.ndarray
    rounds: Rounds | None
    _loads: Array | np.ndarray | None
    _blocks_received: Array | np.ndarray | None

    # ------------------------------------------------------------------ what it says

    @property
    @own
    def positions(self) -> Array | np.ndarray:
        """int32 [padded q_len]: the position in the sequence of each row of permuted queries, -1 in padding."""
        return self._positions("query")

    @property
    @own
    def key_positions(self) -> Array | np.ndarray:
        """int32 [padded kv_len]: the position in the sequence of each row of permuted keys, -1 in padding."""
        return self._positions("key")

    @property
    @own
    def loads(self) -> Array | np.ndarray:
        """float [devices]: visited blocks, the mean over batch and heads. Raises ValueError if the mask was traced."""
        return self._counted(self._loads, "loads")

    @property
    @own
    def blocks_received(self) -> Array | np.ndarray:
        """int [devices]: key blocks that each needs from others. Raises ValueError if the mask was traced."""
        return self._counted(self._blocks_received, "blocks_received")

    def padded(self, side: Side = "query") -> int:
        """Rows of a permuted array of queries (side "query") or keys ("key"), all devices together, with padding."""
        return _size(self._of(side)[1]) * self._of(side)[2]

    @property
    def is_known(self) -> bool:
        """Whether no array of the layout is traced. Only then are layouts equal and hashed by content."""
        return not any(isinstance(x, Tracer) for x in jax.tree.leaves(self))

    def _of(self, side: Side) -> tuple[int, Array | np.ndarray, int]:
        """(tokens without padding, blocks, tokens of a block) of a side. Raises ValueError for any other side."""
        if side not in ("query", "key"):
            raise bad_argument("side", repr(side), "'query' or 'key'", "Keys and values are on the side 'key'.")
        if side == "query":
            return self.q_len, self.query_blocks, self.block_size[0]
        return self.kv_len, self.key_blocks, self.block_size[1]

    def _positions(self, side: Side) -> Array | np.ndarray:
        length, blocks, size = self._of(side)
        np_or_jnp: typing.Any = jnp if isinstance(blocks, Tracer) else np
        blocks = blocks if isinstance(blocks, Tracer) else np.asarray(blocks)
        rows = (blocks[..., None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        return np_or_jnp.where(rows < length, rows, -1).astype(np.int32)

    def _counted(self, numbers: Array | np.ndarray | None, name: str) -> Array | np.ndarray:
        """The numbers of the property `name`; raises ValueError if they are None, because the mask was traced."""
        if numbers is None:
            raise ValueError(
                f"`{name}` of this layout is unknown, because its mask_mod captures traced arrays; expected known "
                "arrays. Make the layout outside of jit."
            )
        return numbers

    # ------------------------------------------------------------------ permuting arrays

    @own
    def shard(self, x: A, axis: int = 1, side: Side = "query") -> A:
        """x with the tokens along an axis permuted, and rows of zeros where there is padding; numpy or jax, as x is.

        x   a global array: `axis` has q_len entries (side "query") or kv_len ("key"), then `padded(side)`

        Explicit mesh axes that split x split the result too, but not along this axis. Raises ValueError for another
        length.
        """
        length = self._of(side)[0]
        axis = self._axis(x, axis, length, side, "q_len" if side == "query" else "kv_len")
        at = self._positions(side)
        np_or_jnp: typing.Any = np if isinstance(x, np.ndarray) and not isinstance(at, Tracer) else jnp
        if length == self.padded(side):
            return _take(x, at, axis)
        if length == 0:
            return np_or_jnp.zeros((*x.shape[:axis], self.padded(side), *x.shape[axis + 1 :]), x.dtype)
        taken = _take(x, np_or_jnp.maximum(at, 0), axis)
        inside = (at >= 0).reshape(-1, *[1] * (x.ndim - 1 - axis))
        return np_or_jnp.where(inside, taken, np_or_jnp.zeros((), x.dtype))

    @own
    def unshard(self, x: A, axis: int = 1, side: Side = "query") -> A:
        """x with the tokens along an axis in the order of the sequence, without padding; undoes `shard`.

        Explicit mesh axes split the result as x, but not along this axis. Raises ValueError unless the
        axis has `padded(side)` entries.
        """
        length = self._of(side)[0]
        axis = self._axis(x, axis, self.padded(side), side, f"padded({side!r})")
        at = self._positions(side)
        if isinstance(at, Tracer):
            rows = jnp.arange(at.shape[0], dtype=jnp.int32)
            place: typing.Any = jnp.zeros(length, jnp.int32).at[jnp.where(at < 0, length, at)].set(rows, mode="drop")
        else:
            place = np.zeros(length, np.int32)
            place[at[at >= 0]] = np.flatnonzero(at >= 0)
        return _take(x, place, axis)

    def _axis(self, x: ArrayArgument, axis: int, length: int, side: str, what: str) -> int:
        """The argument `axis` as a number from 0 on. Raises ValueError unless x has that axis with `length` entries."""
        if not -x.ndim <= axis < x.ndim:
            raise bad_argument("axis", repr(axis), f"an axis of x, which has {x.ndim}", "Name the axis of the tokens.")
        if x.shape[axis] != length:
            raise bad_argument(
                f"x.shape[{axis}]", x.shape[axis], f"{length}, the layout's {what}",
                f"Pass the axis of the tokens, and side='{'key' if side == 'query' else 'query'}' for an array over "
                "the other side.",
            )  # fmt: skip
        return axis % x.ndim

    # ------------------------------------------------------------------ as a value

    def _content(self) -> tuple:
        """What makes two layouts equal, as a hashable value. The numbers must be known."""
        arrays = [np.asarray(x) for x in jax.tree.leaves(self)]
        rounds = None if self.rounds is None else self.rounds.shifts
        return (*(getattr(self, f) for f in STATIC), rounds, *((x.shape, x.tobytes()) for x in arrays))

    def __eq__(self, other: object) -> bool:
        """Whether both have the same content; a layout with traced numbers equals itself alone."""
        if not isinstance(other, ContextLayout) or not (self.is_known and other.is_known):
            return self is other
        return self._content() == other._content()

    def __hash__(self) -> int:
        """The hash of the content; of the object if its numbers are traced."""
        return hash(self._content()) if self.is_known else id(self)

    def __repr__(self) -> str:
        """The sizes and the balance, without the numbers."""
        keys = "" if self.q_len == self.kv_len else f", kv_len={self.kv_len}"
        return (
            f"ContextLayout(q_len={self.q_len}{keys}, devices={self.devices}, block_size={self.block_size}, "
            f"balance={self.balance!r})"
        )

    def __str__(self) -> str:
        """The picture of the layout, see `picture`."""
        return picture(self)


def _take(x: typing.Any, rows: Array | np.ndarray, axis: int) -> typing.Any:
    """The rows of x with these numbers along an axis: a numpy array if both are, else a jax array."""
    if isinstance(x, np.ndarray) and not isinstance(rows, Tracer):
        return np.take(x, rows, axis=axis)
    array = jnp.asarray(x)
    where = jax.typeof(array).sharding
    if AxisType.Explicit not in where.mesh.axis_types:
        return jnp.take(array, rows, axis=axis)
    # jax does not choose how explicit mesh axes split the result of a gather
    spec = PartitionSpec(*(None if i == axis else part for i, part in enumerate(where.spec)))
    return array.at[(*[slice(None)] * axis, rows)].get(out_sharding=NamedSharding(where.mesh, spec))


def _size(x: Array | np.ndarray) -> int:
    """The number of blocks of all devices together, padding included; x: query_blocks or key_blocks of a layout."""
    return x.shape[0] * x.shape[1]


WIDTH = 64  # characters of a picture
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"


def picture(layout: ContextLayout) -> str:
    """A layout as text: owners of the parts of the sequence, and each device's work and received key blocks."""
    lines = [repr(layout)]
    if not layout.is_known:
        return f"{lines[0]}, traced"
    for side in ("query", "key") if layout.q_len != layout.kv_len else ("query",):
        length, blocks, size = layout._of(side)
        count = max(1, cdiv(length, size))
        owner = np.zeros(_size(blocks), int)
        owner[np.asarray(blocks).ravel()] = np.repeat(np.arange(layout.devices), blocks.shape[1])
        shown = owner[np.linspace(0, count, min(count, WIDTH), endpoint=False).astype(int)]
        lines.append(f"{'queries' if side == 'query' else 'keys':>8} {''.join(DIGITS[n % len(DIGITS)] for n in shown)}")
    if layout._loads is None or layout._blocks_received is None:
        return "\n".join([*lines, "  the work is unknown, because mask_mod captures traced arrays"])
    loads, received = np.asarray(layout._loads), np.asarray(layout._blocks_received)
    mean = loads.mean() or 1.0
    others = max(1, _size(layout.key_blocks) - layout.key_blocks.shape[1])
    for device, (load, blocks) in enumerate(zip(loads, received, strict=True)):
        bar = "█" * round(24 * load / max(loads.max(), 1e-30))
        lines.append(
            f"{DIGITS[device % len(DIGITS)]:>8} {bar:<24} work {load / mean:.2f}   receives {blocks} key blocks"
        )
    lines.append(
        f"heaviest over mean work {loads.max() / mean:.3f}, received {received.mean() / others:.3f} of an all-gather"
    )
    return "\n".join(lines)


# ------------------------------------------------------------------- making one


@public
@own
def context_layout(
    mask_mod: MaskMod | None,
    q_len: int,
    kv_len: int | None = None,
    *,
    devices: int,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] = 128,
    balance: Balance = "auto",
) -> ContextLayout:
    """Which device owns which tokens of a sequence that is split over devices, for `ContextParallel`.

    mask_mod       mask_mod(b, h, q_idx, kv_idx) -> bool of the call, which says where the work is; None: all of it
    q_len, kv_len  tokens of queries and keys, any; kv_len None: q_len. Where they and both block sizes are equal,
                   queries and keys are permuted alike; otherwise device r has the r-th part of the keys
    devices        number of devices that the sequence is split over
    batch, heads   needed where mask_mod reads `b` or `h`: work is the mean over them, traffic what any needs
    block_size     tokens of a block, one number or (queries, keys); at most ceil(length / devices) is used
    balance        of the queries. "auto": even work for this mask, few blocks received. "contiguous": the r-th part for
                   device r. "zigzag": the r-th run from the front and the r-th from the back, for causal masks

    Runs on the host. Raises ValueError for bad sizes, for a mask_mod that cannot be compiled, and for balance "auto" if
    mask_mod captures traced arrays, because they have no numbers that work could be counted with.

    Example:

        layout = flexjax.context_layout(masks.causal, 131072, devices=4)
        tokens = layout.shard(tokens, axis=1)
        print(layout)
    """
    kv_len = q_len if kv_len is None else kv_len
    for name, given in (("q_len", q_len), ("kv_len", kv_len), ("devices", devices)):
        if not isinstance(given, int | np.integer) or isinstance(given, bool) or given < 1:
            raise bad_argument(name, repr(given), "a positive int", "Pass a static int.")
    for name, given in (("batch", batch), ("heads", heads)):
        if given is not None and (not isinstance(given, int | np.integer) or isinstance(given, bool) or given < 1):
            raise bad_argument(name, repr(given), "a positive int or None", "None where mask_mod does not read it.")
    q_len, kv_len, devices = int(q_len), int(kv_len), int(devices)
    if balance not in typing.get_args(Balance):
        raise bad_argument("balance", repr(balance), "'auto', 'contiguous' or 'zigzag'", "'auto' looks at the mask.")
    given = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(given) != 2 or any(not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1 for n in given):
        raise bad_argument("block_size", repr(block_size), "a positive int or a pair of them", "128 is the default.")
    size = (min(int(given[0]), cdiv(q_len, devices)), min(int(given[1]), cdiv(kv_len, devices)))
    counts = (cdiv(q_len, size[0]), cdiv(kv_len, size[1]))
    make = functools.partial(ContextLayout, q_len, kv_len, devices, size, balance)
    each, chunk = context_balance.blocks_per_device(counts[0], devices, balance)
    key_blocks = context_balance.contiguous(max(1, cdiv(counts[1], devices)), devices)
    alike = q_len == kv_len and size[0] == size[1]
    fixed = context_balance.zigzag if balance == "zigzag" else context_balance.contiguous
    query_blocks = fixed(each, devices)
    traced = None if mask_mod is None else trace_mask(_callable(mask_mod), (q_len, kv_len), batch, heads)
    if traced is not None and is_traced(traced):
        if balance == "auto":
            raise ValueError(
                "`mask_mod` captures traced arrays, but balance='auto' counts the blocks that it visits; expected "
                "known arrays. Make the layout outside of jit and pass it as an argument, or pass balance='contiguous' "
                "or 'zigzag'."
            )
        return make(query_blocks, query_blocks if alike else key_blocks, None, None, None)
    if traced is None:
        needed, work = np.ones(counts, bool), np.full(counts[0], float(counts[1]))
    else:
        reads = [1 if not traced.program.reads(axis) else (n or 1) for axis, n in (("b", batch), ("h", heads))]
        needed, work = visited_blocks(traced, (reads[0], reads[1]), (q_len, kv_len, *size))
    if balance == "auto":
        owner = None if alike else np.repeat(np.arange(devices), key_blocks.shape[1])[: counts[1]]
        query_blocks = context_balance.balanced(needed, work, each, chunk, devices, owner)
    if alike:
        key_blocks = query_blocks
    keys = needed_keys(needed, query_blocks, key_blocks)
    loads = np.pad(work, (0, query_blocks.size - len(work)))[query_blocks].sum(1)
    rounds = rounds_of(keys, key_blocks, rounded=traced is not None and bool(traced.arrays))
    return make(query_blocks, key_blocks, rounds, loads, received_counts(keys, key_blocks))


def _callable(mask_mod: object) -> Callable:
    if not callable(mask_mod):
        raise bad_argument(
            "mask_mod", repr(mask_mod), "a function (b, h, q_idx, kv_idx) -> bool, or None", "See MaskMod."
        )
    return mask_mod
