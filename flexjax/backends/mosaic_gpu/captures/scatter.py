"""Adds the sums of kernel.py to the elements of a captured array that the load's index names.

The sums are one number for each (b, h) and query, key, difference of both, or (query, key): the *position*. There are
three cases. Where each dimension of the array is indexed by one axis, the sums are transposed and added as they are.
Where no two sums share an element, they are scattered with unique indices. Otherwise they are sorted by element and
each run of equal elements is summed. Sums for each (query, key) where several positions may read one element do not
come here, because kernel.py adds those to the array itself.

A *load* is score_mod's read of a captured array, with an index atom for each dimension; axis delta: q - kv.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.mosaic_gpu.backward.pair_bias import axis_aligned_dims, embedded
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.ir.evaluate import apply_op
from flexjax.ir.origin import key_positions, query_positions
from flexjax.plan.kernel_plan import KernelPlan, Operands

SORTED_AT_ONCE = 1 << 24
"""The most sums that one sort takes; longer inputs are sorted in parts, which bounds the memory."""
LARGEST_ARRAY = 1 << 30
"""The most elements of an array of which several positions may read one element: `_sum_runs` also numbers, in int32,
elements past its end.
"""


def axes(load: ir.Load) -> frozenset[str]:
    """The axes among "b", "h", "q", "kv" and "delta" that the load's index depends on."""
    return frozenset().union(*(ir.axes_of(a) for a in load.index))


def positions_differ_by_entry(plan: KernelPlan, load: ir.Load) -> bool:
    """Whether the index depends on positions that an origin gives each batch entry."""
    return plan.origin is not None and plan.origin.differs_by_entry(axes(load))


def distinct(plan: KernelPlan, load: ir.Load) -> bool:
    """Whether different (b, h, position) certainly read different elements; batch entries and heads count only if the
    index depends on them.

    True where each axis that the index depends on indexes some dimension alone, with step 1 or -1; also for constants.
    """
    if "b" not in axes(load) and positions_differ_by_entry(plan, load):
        return False
    found = set()
    for atom in load.index:
        own = ir.axes_of(atom)
        if not own:
            continue
        linear = atom.linear if isinstance(atom, ir.Val) else None
        if linear is None or len(own) != 1 or linear.uniform:
            return False
        steps = {"b": linear.b, "h": linear.h, "q": linear.q, "kv": linear.kv, "delta": linear.q}
        if abs(steps[next(iter(own))]) != 1:
            return False
        found |= own
    return found == axes(load)


POSITIONS = {ir.SCALAR: (2, 3), ir.ROW: (3,), ir.COLUMN: (2,), ir.TILE: ()}
"""For each kind of load, the axes of [b, h, q, kv] that its sums lack."""


def add_at(
    plan: KernelPlan, operands: Operands, derivative: ir.Program, load: ir.Load, sums: jax.Array, total: jax.Array
) -> jax.Array:
    """`total`, float32 in the shape of the captured array, with the sums of one load added to what it reads.

    sums   [b, h, ...] from `gradients._load_sums`. Where these are a whole gradient (`gradients._sum_type`), the result
           has their dtype, and `total` is zeros

    Indices are clipped to the array, or sums outside of it dropped. NotImplementedError: a `Call` computes the index.
    """
    if not load.index:
        return total + sums.sum()
    dims, kind = axis_aligned_dims(load), ir.classify_load(load).kind
    if dims is not None and kind in POSITIONS and (plan.origin is None or kind == ir.SCALAR):
        # no index arrays and no scatter: for a pair bias these would cost more than the kernels
        found = embedded(jnp.expand_dims(sums, POSITIONS[kind]), dims, total.shape)
        return found if found.dtype != total.dtype else total + found
    index = [jnp.broadcast_to(i, sums.shape) for i in indices(plan, operands, derivative, load, sums.ndim)]
    if distinct(plan, load):
        return total.at[tuple(index)].add(sums, mode="drop", unique_indices=True)
    flat = jnp.zeros(sums.shape, jnp.int32)
    for i, n in zip(index, total.shape, strict=True):
        flat = flat * n + jnp.clip(i, 0, n - 1)
    return total + sum_repeated(flat.ravel(), sums.ravel(), total.size).reshape(total.shape)


def sum_repeated(element: jax.Array, value: jax.Array, size: int) -> jax.Array:
    """[size] sums of the values with the same `element`, in one fixed order; sorts parts of SORTED_AT_ONCE.

    element   [n] int32, which element each value belongs to, 0 to size - 1
    value     [n] float32
    """
    parts = cdiv(element.shape[0], SORTED_AT_ONCE)
    if parts == 1:
        return _sum_runs(element, value, size)
    each = cdiv(element.shape[0], parts)
    extra = (0, parts * each - element.shape[0])
    element = jnp.pad(element, extra, constant_values=0).reshape(parts, each)
    value = jnp.pad(value, extra).reshape(parts, each)

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _sum_runs(part[0], part[1], size), None

    return lax.scan(add, jnp.zeros((size,), value.dtype), (element, value))[0]


def _sum_runs(element: jax.Array, value: jax.Array, size: int) -> jax.Array:
    """`sum_repeated` of one part: a stable sort by element, then a segmented scan."""
    element, value = lax.sort((element, value), num_keys=1, is_stable=True)

    def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return b[0], jnp.where(a[0] == b[0], a[1] + b[1], b[1])

    _, running = lax.associative_scan(join, (element, value))
    last = jnp.concatenate([element[1:] != element[:-1], jnp.ones((1,), bool)])
    at = jnp.where(last, element, size + jnp.arange(element.shape[0]))
    return jnp.zeros((size,), value.dtype).at[at].set(running, mode="drop", unique_indices=True)


def indices(plan: KernelPlan, operands: Operands, derivative: ir.Program, load: ir.Load, rank: int) -> list[jax.Array]:
    """The elements that a load reads: for each dimension, indices that broadcast to the shape of the sums.

    rank   of the sums: 2, [b, h], for a load of class scalar; 4, [b, h, q, kv], for class tile; else 3, [b, h,
           position]

    The position of a load of class diagonal is the difference q - kv counted from -(kv_len - 1).
    """
    kind, own = ir.classify_load(load).kind, axes(load)
    shape = lambda n, at: jnp.arange(n, dtype=jnp.int32).reshape([-1 if d == at else 1 for d in range(rank)])
    zero = jnp.zeros((1,) * rank, jnp.int32)
    q = kv = zero
    if kind == ir.ROW:
        q = shape(plan.q_len, 2)
    elif kind == ir.COLUMN:
        kv = shape(plan.kv_len, 2)
    elif kind == ir.DIAGONAL:
        difference = shape(plan.q_len + plan.kv_len - 1, 2) - (plan.kv_len - 1)
        q = jnp.maximum(difference, 0)
        kv = q - difference
    elif kind == ir.TILE:
        q, kv = shape(plan.q_len, 2), shape(plan.kv_len, 3)
    by_entry = "b" in own or positions_differ_by_entry(plan, load)
    b = shape(plan.batch, 0) if by_entry else zero
    placed = (plan.origin, operands.origin)
    env: dict[int, jax.Array] = {
        ir.B: b,
        ir.H: shape(plan.q_heads, 1) if "h" in own else zero,
        ir.Q: query_positions(*placed, b, q),
        ir.KV: key_positions(*placed, b, kv),
    }

    def read(atom: ir.Atom) -> jax.Array:
        if isinstance(atom, ir.Lit):
            return jnp.full((1,) * rank, atom.value, jnp.dtype(atom.dtype))
        return env[atom.id]

    needed = ir.uses(derivative.steps, load.index)
    for step in derivative.steps:
        if not any(o.id in needed for o in step.outs):
            continue
        if isinstance(step, ir.Op):
            operands_ = jnp.broadcast_arrays(*(read(a) for a in step.inputs))
            env[step.out.id] = apply_op(step, operands_)
        elif isinstance(step, ir.Load):
            env[step.out.id] = operands.score_captures[step.capture][tuple(read(a) for a in step.index)]
        else:
            raise NotImplementedError(
                f"`{step.name}` in the index of a captured array has no gradient on this backend."
            )
    return [read(a) for a in load.index]


def diagonal_sums(tiles: jax.Array) -> jax.Array:
    """[..., n, n] -> [..., 2n - 1]: the sums of each tile along its diagonals row - column = -(n - 1) .. n - 1."""
    n = tiles.shape[-1]
    flipped = jnp.pad(tiles[..., ::-1], [(0, 0)] * (tiles.ndim - 1) + [(0, n)])
    flat = flipped.reshape(*tiles.shape[:-2], n * 2 * n)[..., : n * (2 * n - 1)]
    return flat.reshape(*tiles.shape[:-2], n, 2 * n - 1).sum(-2)


def join_windows(windows: jax.Array) -> jax.Array:
    """[..., d, 2n - 1] -> [..., n * (d + 1) - 1]: adds up d windows, each n numbers after the one before."""
    *head, count, width = windows.shape
    n = (width + 1) // 2
    padded = jnp.pad(windows, [(0, 0)] * (windows.ndim - 1) + [(0, 1)]).reshape(*head, count, 2, n)
    low = jnp.pad(padded[..., 0, :], [(0, 0)] * len(head) + [(0, 1), (0, 0)])
    high = jnp.pad(padded[..., 1, :], [(0, 0)] * len(head) + [(1, 0), (0, 0)])
    return (low + high).reshape(*head, (count + 1) * n)[..., : (count + 1) * n - 1]
