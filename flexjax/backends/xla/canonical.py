"""The forward pass in the canonical order (plan/invariant.py): a row gets the same bits in whatever call it is.

Every product has one shape, ROWS rows and KEYS keys, and all rows of a product belong to one key head, because the bits
of a larger product follow its shape. Every floating operation on a tile has one shape too, and stands between
optimization barriers: XLA would fuse a product into a sum, unrounded, in one program and not in another.
"""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.xla.forward import empty_results
from flexjax.block_mask.transpose import EMPTY
from flexjax.integers import cdiv
from flexjax.ir.evaluate import apply_op, evaluate, literal_array, loop_of_arrays
from flexjax.ir.evaluate_rank4 import diagonal_value, map_call
from flexjax.ir.origin import key_positions, query_positions
from flexjax.ir.program import INPUT_NAMES, KV, Atom, Axes, B, Call, H, Lit, Load, Op, Program, Q, Val
from flexjax.ir.rewrite import with_results
from flexjax.plan.invariant import KEYS, RISE, ROWS, SPLIT
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.plan.lengths import NONE, existing_results
from flexjax.plan.precision import for_dot_general
from flexjax.rewrites.mask_blocks import classes_of_plan

Array = jax.Array
Tree = typing.TypeVar("Tree")
TILE = (1, 1, ROWS, KEYS)


def bar(x: Tree) -> Tree:
    return lax.optimization_barrier(x)


def forward(plan: KernelPlan, operands: Operands) -> Results:
    """What backends/xla/forward.py computes, in the canonical order."""
    if plan.batch * plan.q_len * plan.kv_len == 0:
        return existing_results(empty_results(plan, operands), operands.lengths, plan)
    rows = plan.q_len * plan.group  # of one key head: the query heads of a token side by side
    tiles = cdiv(rows, ROWS)
    call = _Call(plan, operands)

    def round_(item: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        m, b = item // tiles % plan.kv_heads, item // (tiles * plan.kv_heads)
        made = call.row_tile(b, m, item % tiles)
        put = lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, item, 0)
        return tuple(put(x, y) for x, y in zip(found, made, strict=True))

    items = plan.batch * plan.kv_heads * tiles
    empty = [jnp.zeros((items, ROWS, *rest), call.compute) for rest in ((plan.value_dim,), (), ())]
    # behind the barrier XLA does not know the number of rounds, so that no loop is unrolled or compiled another way
    found = lax.fori_loop(jnp.int32(0), bar(jnp.int32(items)), round_, tuple(empty))

    def arranged(x: Array) -> Array:
        x = x.reshape(plan.batch, plan.kv_heads, tiles * ROWS, *x.shape[2:])[:, :, :rows]
        x = x.reshape(plan.batch, plan.kv_heads, plan.q_len, plan.group, *x.shape[3:])
        x = jnp.moveaxis(x, 2, 1).reshape(plan.batch, plan.q_len, plan.q_heads, *x.shape[4:])
        return x if plan.layout == "BTNH" else jnp.swapaxes(x, 1, 2)

    out, lse, top = map(arranged, bar(found))
    results = existing_results(Results(out, lse, top if plan.max_scores else None), operands.lengths, plan)
    # a cast in both cases: XLA's reduce_precision makes subnormal numbers of float16 0
    out = bar(results.out.astype(plan.out_dtype))
    rounding = (results.out - out.astype(call.compute)).astype(out.dtype) if plan.returns_rounding else None
    return results._replace(out=out, rounding=rounding)


class _State(typing.NamedTuple):
    """Of each of the ROWS rows: a whole power of two as the reference, and sums relative to it."""

    base: Array
    total: Array
    out: Array  # [ROWS, E]
    top: Array  # the largest score


class _Rows(typing.NamedTuple):
    """The ROWS rows of a tile, of one batch entry and key head; past the last row it is repeated."""

    b: Array
    m: Array
    head: Array  # int32 [ROWS]
    token: Array
    query: Array  # [ROWS, D]
    hit: Array | None  # which key blocks some row may see, bool; None: all


class _Call:
    """The operands of a call, and its tiles."""

    def __init__(self, plan: KernelPlan, operands: Operands):
        self.plan, self.operands = plan, operands
        self.lengths = operands.lengths or NONE
        self.compute = jnp.dtype(plan.score_dtype)
        self.low = np.finfo(self.compute).min
        self.log2e = np.asarray(tile_math.LOG2E, self.compute)
        self.hits = None
        if plan.blocks is not None and operands.lists is not None:
            self.hits = classes_of_plan(plan, operands.lists) != EMPTY

    # ------------------------------------------------------------------ rows

    def row_tile(self, b: Array, m: Array, tile: Array) -> tuple[Array, Array, Array]:
        """(out [ROWS, E], lse [ROWS], largest scores [ROWS]) of rows of key head m."""
        plan, operands = self.plan, self.operands
        row = jnp.minimum(tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32), plan.q_len * plan.group - 1)
        token, head = row // plan.group, m * plan.group + row % plan.group
        query = operands.query[(b, token, head) if plan.layout == "BTNH" else (b, head, token)]
        rows = _Rows(b, m, head, token, bar(query.astype(self.compute)), self._hit(b, m, token[0], token[-1]))
        first, last = self._documents(b, token)
        one = lambda number, state: self._keys_between(state, rows, *self._bounds(b, token, number))
        state = lax.fori_loop(first, last, one, self._start())
        sinks = None if operands.sinks is None else operands.sinks[head].astype(self.compute)
        return self._finish(state, sinks)

    def _documents(self, b: Array, token: Array) -> tuple[Array, Array]:
        """(the first document of tokens, past the last one); a row without documents is one."""
        offsets = self._offsets(b)
        if offsets is None:
            return jnp.int32(0), jnp.int32(1)
        first, last = ((offsets[1:] <= t).sum(dtype=jnp.int32) for t in (token[0], token[-1]))
        return first, jnp.minimum(last + 1, offsets.shape[0] - 1)

    def _offsets(self, b: Array) -> Array | None:
        return None if self.operands.documents is None else self.operands.documents[b]

    def _bounds(self, b: Array, token: Array, document: Array) -> tuple[Array, Array]:
        """Where the keys of a document begin among those of the call, 0 or before without documents, and end."""
        plan, lengths = self.plan, self.lengths
        end = jnp.int32(plan.kv_len) if lengths.key is None else lengths.key[b]
        if lengths.query is not None:
            end = jnp.where(token[0] < lengths.query[b], end, 0)  # these rows are not read
        offsets = self._offsets(b)
        if offsets is not None:
            return offsets[document], jnp.minimum(end, offsets[document + 1])
        return -key_positions(plan.origin, self.operands.origin, b, jnp.int32(0)), end

    def _keys_between(self, state: _State, rows: _Rows, begin: Array, end: Array) -> _State:
        """The state after the keys begin .. end too, in tiles and splits from `begin` on."""
        low, high = jnp.maximum(begin, 0), end
        if rows.hit is not None:
            low, high = self._visible(rows.hit, low, high)
        first, last = (low - begin) // KEYS, -(-(high - begin) // KEYS)
        first, last = jnp.where(low < high, first, 0), jnp.where(low < high, last, 0)
        tiles = SPLIT // KEYS

        def split(number: Array, whole: _State) -> _State:
            inside = lambda t: jnp.clip(t, number * tiles, (number + 1) * tiles)
            one = lambda t, part: self._maybe(part, rows, begin + t * KEYS, end)
            return self._added(whole, lax.fori_loop(inside(first), inside(last), one, self._start()))

        return lax.fori_loop(first // tiles, -(-last // tiles), split, state)

    # ------------------------------------------------------------------ which tiles are visited

    def _hit(self, b: Array, m: Array, low: Array, high: Array) -> Array | None:
        """Which key blocks the lists name for tokens low .. high and the query heads of key head m."""
        plan = self.plan
        if self.hits is None or plan.blocks is None:
            return None
        blocks = plan.blocks
        heads = m * plan.group + jnp.arange(plan.group) if blocks.heads > 1 else jnp.zeros(1, jnp.int32)
        most = min(((ROWS - 1) // plan.group + 1) // blocks.block_q + 2, self.hits.shape[2])
        at = jnp.minimum(low // blocks.block_q + jnp.arange(most), high // blocks.block_q)
        return self.hits[b if blocks.batch > 1 else 0][heads[:, None], at].any((0, 1))

    def _visible(self, hit: Array, begin: Array, end: Array) -> tuple[Array, Array]:
        """(first, past the last) key of begin .. end in a block that is hit."""
        assert self.plan.blocks is not None
        size = self.plan.blocks.block_kv
        starts = jnp.arange(hit.shape[0], dtype=jnp.int32) * size
        hit = hit & (starts < end) & (starts + size > begin)
        low, high = jnp.min(jnp.where(hit, starts, end)), jnp.max(jnp.where(hit, starts + size, 0))
        return jnp.maximum(low, begin), jnp.minimum(high, end)

    def _maybe(self, state: _State, rows: _Rows, at: Array, end: Array) -> _State:
        """`_step` if a block of the tile is hit."""
        step = lambda state: self._step(state, rows, at, end)
        if rows.hit is None or self.plan.blocks is None:
            return step(state)
        size, count = self.plan.blocks.block_kv, rows.hit.shape[0]
        block = at // size + jnp.arange((KEYS - 1) // size + 2, dtype=jnp.int32)
        inside = (block >= 0) & (block * size < at + KEYS) & (block < count)
        seen = jnp.any(inside & rows.hit[jnp.clip(block, 0, count - 1)])
        return lax.cond(seen, step, lambda state: state, state)

    # ------------------------------------------------------------------ one tile

    def _step(self, state: _State, rows: _Rows, at: Array, end: Array) -> _State:
        """The state after the tile of the keys from `at` on, of which those before `end` exist."""
        plan, operands = self.plan, self.operands
        index = at + jnp.arange(KEYS, dtype=jnp.int32)
        exists = (index >= 0) & (index < end)
        k, v = (self._keys(x, rows, index, exists) for x in (operands.key, operands.value))
        s = bar(self._product(rows.query, k, 1) * np.asarray(plan.scale, self.compute))
        indices = {
            B: rows.b.reshape(1, 1, 1, 1),
            H: rows.head.reshape(1, 1, -1, 1),
            Q: query_positions(plan.origin, operands.origin, rows.b, rows.token).reshape(1, 1, -1, 1),
            KV: key_positions(plan.origin, operands.origin, rows.b, index).reshape(1, 1, 1, -1),
        }
        tile = _Tile(indices, s.reshape(TILE))
        if plan.score is not None:
            program = with_results(plan.score, plan.score.results[:1])
            s = tile.result(program, operands.score_captures)[0, 0].astype(self.compute)
        on = exists if plan.mask is None else exists & tile.result(plan.mask, operands.mask_captures)[0, 0]
        return self._softmax(state, bar(jnp.where(on, s, -jnp.inf)), v)

    def _softmax(self, state: _State, s: Array, v: Array) -> _State:
        power = self._in_base_2(s)
        most = bar(power.max(1))
        base = jnp.where(most > state.base + np.asarray(RISE, self.compute), jnp.ceil(most), state.base)
        factor = bar(self._power(state.base - base))
        p = bar(jnp.exp2(bar(power - base[:, None])))
        total = bar(bar(state.total * factor) + _row_sum(p))
        narrow = p if self.plan.score_dtype == self.plan.dtype else tile_math.round_to(p, self.plan.dtype)
        out = bar(bar(state.out * factor[:, None]) + self._product(narrow, v, 0))
        return _State(base, total, out, jnp.maximum(state.top, s.max(1)))

    def _keys(self, x: Array, rows: _Rows, index: Array, exists: Array) -> Array:
        """The keys or values of a tile, [KEYS, ..] in the dtype of scores; 0 for those that do not exist."""
        plan, b, m = self.plan, rows.b, rows.m
        index = jnp.clip(index, 0, plan.kv_len - 1)
        if plan.page:
            assert self.operands.pages is not None
            number = self.operands.pages[b, index // plan.page]
            exists = exists & (number >= 0) & (number < x.shape[0])
            found = x[jnp.clip(number, 0, x.shape[0] - 1), index % plan.page, m]
        else:
            found = x[b, index, m] if plan.layout == "BTNH" else x[b, m, index]
        return bar(jnp.where(exists[:, None], found, jnp.zeros((), x.dtype)).astype(self.compute))

    def _product(self, a: Array, b: Array, axis: int) -> Array:
        """The product of a [ROWS, n] with the axis `axis` of b, in the dtype of scores."""
        dims = (((1,), (axis,)), ((), ()))
        precision = for_dot_general(self.plan.precision)
        return bar(lax.dot_general(*bar((a, b)), dims, precision=precision, preferred_element_type=self.compute))

    # ------------------------------------------------------------------ states

    def _start(self) -> _State:
        full = lambda value, *rest: jnp.full((ROWS, *rest), value, self.compute)
        return _State(full(self.low), full(0), full(0, self.plan.value_dim), full(-jnp.inf))

    def _in_base_2(self, s: Array) -> Array:
        # a finite score stays finite, so that a row of the least float averages its values
        return bar(jnp.where(jnp.isinf(s), s, jnp.clip(bar(s * self.log2e), self.low, -self.low)))

    def _power(self, n: Array) -> Array:
        """2^n for whole n of at most 0, exactly; XLA's exp2 of a whole number is not always a power of two."""
        kind = np.finfo(self.compute)
        bits = jnp.dtype(f"int{kind.bits}")
        least = int(kind.minexp)
        whole = jnp.clip(n, least - 1, 0).astype(bits)
        made = jnp.where(whole < least, 0, (whole + (1 - least)) << kind.nmant)
        return lax.bitcast_convert_type(made.astype(bits), self.compute)

    def _added(self, a: _State, b: _State) -> _State:
        """The state of the keys of both."""
        base = jnp.maximum(a.base, b.base)
        fa, fb = bar(self._power(a.base - base)), bar(self._power(b.base - base))
        total = bar(bar(a.total * fa) + bar(b.total * fb))
        out = bar(bar(a.out * fa[:, None]) + bar(b.out * fb[:, None]))
        return _State(base, total, out, jnp.maximum(a.top, b.top))

    def _finish(self, state: _State, sinks: Array | None) -> tuple[Array, Array, Array]:
        base, total, out, top = state
        if sinks is not None:
            power = self._in_base_2(sinks)
            new = jnp.maximum(base, jnp.ceil(power))
            factor = bar(self._power(base - new))
            total = bar(bar(total * factor) + bar(jnp.exp2(bar(power - new))))
            base, out = new, bar(out * factor[:, None])
        dead = total == 0
        safe = jnp.where(dead, 1, total)
        # a sum of products of -0 follows the tiles that are visited; + 0 makes it 0
        out = bar(bar(out / safe[:, None]) + bar(jnp.zeros((), self.compute)))
        lse = bar(bar(base * np.asarray(tile_math.LN2, self.compute)) + bar(jnp.log(safe)))
        return jnp.where(dead[:, None], 0, out), jnp.where(dead, -jnp.inf, lse), top


def _row_sum(p: Array) -> Array:
    """[ROWS, KEYS] -> [ROWS], written out, because the order of a reduction is the compiler's."""
    while p.shape[1] > 1:
        half = p.shape[1] // 2
        p = bar(p[:, :half] + p[:, half:])
    return p[:, 0]


class _Tile:
    """A tile on which ir/evaluate.py evaluates a program (see its `Tile`): arrays that broadcast to TILE."""

    def __init__(self, indices: dict[int, Array], score: Array):
        self.indices, self.score = indices, score
        self.captures: Sequence[Array] = ()

    def result(self, program: Program, captures: Sequence[Array]) -> Array:
        """The only result of a program, of the shape TILE."""
        self.captures = captures
        return jnp.broadcast_to(evaluate(program, self)[0], TILE)

    def input(self, val: Val) -> Array:
        return self.score if INPUT_NAMES[val.id] == "score" else self.indices[val.id]

    def literal(self, lit: Lit) -> Array:
        return literal_array(lit)

    def spread(self, value: Array, have: Axes, want: Axes) -> Array:
        return value

    def diagonal(self, val: Val, uniform: typing.Mapping[int, Array]) -> Array:
        return diagonal_value(val, self.indices[Q] - self.indices[KV], self.indices.__getitem__, uniform)

    def apply(self, op: Op, args: Sequence[Array]) -> Array:
        exact = not any(jnp.issubdtype(jnp.dtype(x.dtype), jnp.inexact) for x in (*args, op.out))
        if exact:
            return apply_op(op, jnp.broadcast_arrays(*args) if len(args) > 1 else args)
        return bar(apply_op(op, bar([jnp.broadcast_to(x, TILE) for x in args])))

    def load(self, load: Load, index: Sequence[Array]) -> Array:
        array = self.captures[load.capture]
        if not index:
            return array.reshape(1, 1, 1, 1)
        shape = jnp.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in index))
        return array.at[tuple(jnp.broadcast_to(x, shape) for x in index)].get(mode="clip")

    def loop(self, step: Op, size: int, body: Callable[[Array], Array]) -> Array:
        return loop_of_arrays(step, size, body, (1, 1, 1, 1))

    def call(self, call: Call, read: Callable[[Atom], Array]) -> Sequence[Array]:
        whole = lambda atom: bar(jnp.broadcast_to(read(atom), TILE))
        return bar(map_call(call, self.captures, whole))
