"""How gradients of captured arrays are added up: which tiles, in what memory, at which places."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax.backends.mosaic_gpu.backward import common as backward_common
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.backward.row_statistics import row_statistics
from flexjax.backends.mosaic_gpu.captures import fixed_point, shift_invariance
from flexjax.backends.mosaic_gpu.captures import gradients as captures_gradients
from flexjax.backends.mosaic_gpu.captures import kernel as captures_kernel
from flexjax.backends.mosaic_gpu.captures import lists as captures_lists
from flexjax.backends.mosaic_gpu.captures import scatter as captures_scatter
from flexjax.backends.mosaic_gpu.captures import tiles as captures_tiles
from flexjax.backends.mosaic_gpu.captures.hopper import CAPTURES
from flexjax.backends.mosaic_gpu.machine import simulator
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands
from flexjax.trace import trace_mod
from tests.cases.dense_masks import block_lists
from tests.cases.hopper_backward import BY_PLACES
from tests.cases.on_hopper import BackwardProblem, assert_gradients_close, backward_problem, normal

KINDS = (ir.SCALAR, ir.ROW, ir.COLUMN, ir.DIAGONAL, ir.TILE)


def plan_of(
    length: int,
    heads: int,
    *,
    batch: int = 1,
    kv_len: int | None = None,
    blocks: BlockLayout | None = None,
    score: ir.Program | None = None,
) -> KernelPlan:
    sizes = (batch, heads, heads, length, kv_len or length, 64, 64)
    return KernelPlan(*sizes, "bfloat16", "BTNH", 0.125, score=score, blocks=blocks)


# ------------------------------------------------------------------- lists of tiles


def walked(
    plan: KernelPlan, shape: captures_lists.ListShape, lists: captures_lists.TileLists
) -> list[list[tuple[int, ...]]]:
    """(b, h, row, column, masked) of each visit of each list."""
    head, begin, count, tile = (np.asarray(x) for x in (lists.head, lists.begin, lists.count, lists.tile))
    found = []
    for n in range(shape.count):
        visits = []
        for turn in range(math.prod(shape.repeats)):
            for at in range(begin[n], begin[n] + count[n]):
                number = head[n] + (turn if shape.repeats[1] > 1 else turn * plan.q_heads)
                number += 0 if lists.head_offset is None else int(lists.head_offset[at])
                row, column = divmod(int(tile[at]) // 2, shape.columns)
                visits.append((*divmod(int(number), plan.q_heads), row, column, int(tile[at]) % 2))
        found.append(visits)
    return found


@pytest.mark.parametrize(
    ("masks", "shared"),
    [
        (None, (True, True)), ((1, 1), (False, True)), ((2, 1), (True, True)), ((1, 3), (False, True)),
        ((2, 3), (True, True)), ((2, 3), (False, False)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_lists_have_every_tile_once(
    kind: str, masks: tuple[int, int] | None, shared: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures_lists, "LISTS_WANTED", 5)
    batch, heads, lengths, period = 2, 3, (640, 512), 2 if kind == ir.DIAGONAL else 1
    expected = {(b, h, i, j): 0 for b in range(batch) for h in range(heads) for i in range(5) for j in range(4)}
    layout = lists = None
    if masks is not None:
        on = np.random.default_rng(1).integers(0, 3, (*masks, 5, 4))  # a block: off, partly on, on
        dense = np.repeat(np.repeat(on, 128, 2), 128, 3) - (np.arange(512) % 2 == 0)
        layout, lists = block_lists(dense > 0, (128, 128))
        full = np.broadcast_to(on, (batch, heads, 5, 4))
        expected = {at: int(full[at] == 1) for at in expected if full[at]}
    plan = plan_of(lengths[0], heads, batch=batch, kv_len=lengths[1], blocks=layout)
    shape = captures_lists.shape_for(plan, kind, 128, shared, period)
    found = walked(plan, shape, captures_lists.tile_lists(plan, lists, shape))

    visits = [visit for one in found for visit in one]
    assert len(visits) == len(expected)
    assert {visit[:4]: visit[4] for visit in visits} == expected
    has_in_common = {
        ir.SCALAR: lambda i, j: 0,
        ir.ROW: lambda i, j: i,
        ir.COLUMN: lambda i, j: j,
        ir.DIAGONAL: lambda i, j: (i - j, i % period),
        ir.TILE: lambda i, j: (i, j),
    }[kind]
    kernel = captures_kernel.CaptureKernel(plan, None, 0, shape, DenseBiasPlan(), captures_kernel.Sink.SUMS, CAPTURES)  # type: ignore[arg-type]
    for n, one in enumerate(found):
        assert len({has_in_common(i, j) for _, _, i, j, _ in one}) <= 1
        assert len({(b if shape.batch > 1 else 0, h if shape.heads > 1 else 0) for b, h, *_ in one}) <= 1
        if kind == ir.DIAGONAL and one:
            row, column = (int(x) // 128 for x in kernel.first_on_diagonal(jnp.int32(n)))
            assert has_in_common(row, column) == has_in_common(*one[0][2:4])
            assert all(row <= visit[2] for visit in one)


LONG = 524288
BAND = BlockLayout(1, 1, 128, 128, 2, 7, 2, 7)
WALKS: dict[str, tuple[tuple[int, ...], typing.Any]] = {
    "scalar": ((16,), lambda c: lambda s, b, h, i, j: s + c[h] * (j - i)),
    "row": ((16, LONG), lambda c: lambda s, b, h, i, j: s + c[h, i]),
    "column": ((16, LONG), lambda c: lambda s, b, h, i, j: s + c[h, j]),
    "diagonal": ((16, 2 * LONG - 1), lambda c: lambda s, b, h, i, j: s + c[h, i - j + LONG - 1]),
    "table of two dimensions": (
        (16, 1023, 2047),
        lambda c: lambda s, b, h, i, j: s + c[h, i // 1024 - j // 1024 + 511, i % 1024 - j % 1024 + 1023],
    ),
}


def abstract(*shape: int, dtype: str = "bfloat16") -> typing.Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def largest(jaxpr: typing.Any) -> int:
    """Bytes of the largest array that a jaxpr computes; kernels are looked at from outside."""
    found = 0
    for equation in jaxpr.eqns:
        for var in equation.outvars:
            aval = var.aval
            if hasattr(aval, "size") and hasattr(aval, "dtype"):
                found = max(found, aval.size * aval.dtype.itemsize)
        if "kernel" in str(equation.primitive) or "mpmd" in str(equation.primitive):
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                found = max(found, largest(inner.jaxpr))
    return found


@pytest.mark.parametrize("name", WALKS)
def test_memory_follows_the_block_mask(name: str) -> None:
    """Half a million tokens under a window of 1024: a number for each of the 268 million tiles would be a gigabyte."""
    shape, mod = WALKS[name]
    array = abstract(*shape, dtype="float32")
    found: list[typing.Any] = []

    def trace(c: jax.Array) -> jax.Array:
        found.append(trace_mod.trace_score_mod(mod(c), (1, 16, LONG, LONG)))
        return c

    jax.eval_shape(trace, array)  # the array is only looked at by its shape
    derivative = found[0].derivative
    plan = plan_of(LONG, 16, blocks=BAND, score=found[0].program)
    tokens, queries = abstract(1, LONG, 16, 16), LONG // 128
    given = backward_common.Tokens(*(tokens,) * 4, abstract(1, 16, 2, LONG, dtype="float32"))
    numbers = lambda *s: abstract(1, 1, queries, *s, dtype="int32")
    lists = BlockLists(numbers(), numbers(2), numbers(), numbers(7))

    def run(given: typing.Any, lists: typing.Any, array: jax.Array) -> typing.Any:
        operands = Operands(*given[:3], None, None, None, (array,), (), (), lists)
        return captures_gradients.capture_gradients(
            plan, operands, given, (True,), derivative, DenseBiasPlan(), CAPTURES
        )

    jaxpr = jax.make_jaxpr(run)(given, lists, array)
    allowed = max(math.prod(tokens.shape) * 4, 4 * 2 * math.prod(shape))  # queries in float32, the array in 64 bits
    assert largest(jaxpr.jaxpr) <= allowed
    assert captures_gradients.refuses(plan, derivative, (True,)) is None


def test_the_order_of_sums_does_not_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backward_problem(
        score=lambda c, s, b, h, q, k: s + c[0][h] * (k - q), captured=(jnp.ones(2),), q_len=128, kv_len=128
    )
    asked: list[int] = []
    for name in ("devices", "local_devices"):  # which know the number of SMs
        found = getattr(jax, name)()
        monkeypatch.setattr(jax, name, lambda *given, found=found: asked.append(1) or found)
    jax.eval_shape(made.gradients)
    assert not asked


# ------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", BY_PLACES)
def test_at_places_that_repeat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fixed point, as arrays that are too large for shared memory (test_private_sums.py)."""
    monkeypatch.setattr(captures_tiles, "most_copies", lambda *_: None)
    sinks: list[tuple[captures_kernel.Sink, str]] = []
    run = captures_kernel.CaptureKernel.run
    watched = lambda self, *given: (sinks.append((self.sink, self.shape.kind)), run(self, *given))[1]
    monkeypatch.setattr(captures_kernel.CaptureKernel, "run", watched)
    made = backward_problem(**BY_PLACES[name])
    assert_gradients_close(made.gradients(), made.expected, tolerance=3e-2)
    kind = ir.DIAGONAL if "diagonal" in name else ir.SCALAR
    measured = [(captures_kernel.Sink.MAGNITUDES, ir.SCALAR)] if "nothing bounds" in name else []
    assert sinks == [*measured, (captures_kernel.Sink.SCATTER, kind)]


def test_a_period_of_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures_gradients, "_period", lambda *_: 2)
    case = {**BY_PLACES["2-D table, tiles of a diagonal"], "q_len": 192, "kv_len": 192}
    made = backward_problem(**case)
    assert_gradients_close(made.gradients(), made.expected, tolerance=3e-2)


def test_many_lists_a_few_heads_at_a_time_with_masks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures_lists, "LISTS_WANTED", 1)
    monkeypatch.setattr(captures_gradients, "LISTS_AT_ONCE", 2)
    monkeypatch.setattr(captures_scatter, "SORTED_AT_ONCE", 100)
    made = backward_problem(
        score=lambda c, s, b, h, q, k: s + c[0][jnp.clip(q - k, -20, 20) + 20],
        captured=(normal(41),),
        mask=lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0) & ((h == 0) | (k < 64)),
        mask_heads=2,
        block=(64, 64),
        q_len=192,
        kv_len=128,
    )
    assert_gradients_close(made.gradients(), made.expected, tolerance=3e-2)


def test_what_all_gradients_add_up_to_is_bounded() -> None:
    made = backward_problem(**BY_PLACES["2-D table, odd, with dropout"])
    given = backward_common.padded_tokens(
        made.plan,
        made.given.operands,
        made.given.d_out,
        simulator.running(True)(row_statistics)(made.plan, made.given.results, made.given.d_out, None),
        unit=1,
    )
    assert made.given.derivative is not None
    total = captures_gradients._largest_total(made.plan, given, made.given.derivative, 0)
    assert total is not None
    (expected,) = made.expected.score_captures
    assert expected is not None
    assert float(jnp.abs(expected).sum()) <= float(total) <= 1e4 * float(jnp.abs(expected).sum())
    small = given._replace(d_out=jax.tree.map(lambda x: x * 2.0**-80, given.d_out), stats=given.stats * 2.0**-80)
    less = captures_gradients._largest_total(made.plan, small, made.given.derivative, 0)
    assert less is not None
    np.testing.assert_allclose(float(less) * 2.0**80, float(total), rtol=1e-4)


# ------------------------------------------------------------------- refusals


def refusal(made: BackwardProblem, **change: int) -> str | None:
    assert made.given.derivative is not None
    return captures_gradients.refuses(dataclasses.replace(made.plan, **change), made.given.derivative, (True,))


def test_refuses_more_tiles_than_can_be_numbered() -> None:
    small = {"captured": (jnp.ones(1),), "q_len": 64, "kv_len": 64, "heads": 1}
    made = backward_problem(score=lambda c, s, b, h, q, k: s + c[0][h] * (k - q), **small)
    assert refusal(made) is None
    assert refusal(made, q_len=1 << 21, kv_len=1 << 22) is None
    sentence = "the gradient of captured array 0 adds up more tiles of 128 x 128 than int32 can number: {} queries and {} keys."
    assert refusal(made, q_len=1 << 22, kv_len=1 << 22) == sentence.format("1 x 1 heads of 4194304", 4194304)
    assert refusal(made, batch=1 << 11, q_len=1 << 17, kv_len=1 << 17) == sentence.format(
        "2048 x 1 heads of 131072", 131072
    )
    wide = {"batch": 64, "q_len": 1 << 19, "kv_len": 1 << 19, "head_dim": 128, "value_dim": 128}
    assert refusal(made, **wide) is None
    joined = refusal(made, **wide, extra_dim=32, extra_heads=1)  # beside wider heads the tiles are smaller
    assert joined == sentence.replace("128 x 128", "64 x 64").format("64 x 1 heads of 524288", 524288)


def test_refuses_a_place_that_depends_on_the_score() -> None:
    score = lambda c, s, b, h, q, k: s + c[0][jnp.clip(s, 0, 3).astype(jnp.int32)]
    made = backward_problem(score=score, captured=(jnp.ones(4),), q_len=64, kv_len=64, heads=1)
    assert refusal(made) == "captured array 0 is read by an index that depends on the score."


# ------------------------------------------------------------------- fixed point


@pytest.mark.parametrize("total", [1e-37, 1e-20, 1.0, 1.5e7, 3e38])
def test_fixed_point(total: float) -> None:
    whole = jnp.float32(total)
    factor = np.float64(fixed_point.scale(whole))
    assert factor * 4 * total < 2.0**63
    assert factor == 2.0**126 or factor * 2 * total >= 2.0**59
    numbers = np.array([0, 1, -1, 2**32, -(2**32), 2**32 - 1, -(2**40) + 1, 2**61, -(2**61), 2**63 - 1], np.int64)
    words = np.stack([numbers & 0xFFFFFFFF, numbers >> 32], -1).astype(np.uint32)
    with np.errstate(over="ignore"):
        expected = (numbers / factor).astype(np.float32)
    np.testing.assert_allclose(fixed_point.decoded(jnp.asarray(words), whole), expected, rtol=2e-7, atol=1e-44)


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_sums_without_a_finite_total_are_nan(total: float) -> None:
    assert np.isnan(fixed_point.decoded(jnp.zeros((3, 2), jnp.uint32), jnp.float32(total))).all()
    assert np.isfinite(fixed_point.scale(jnp.float32(total)))


# ------------------------------------------------------------------- what is the same when query and key move together


INDICES: dict[str, tuple[typing.Callable[..., typing.Any], tuple[int, ...]]] = {
    # the index, and the periods up to 24 that are known
    "grid of 4": (lambda i, j: (i // 4 - j // 4 + 40) * 9 + i % 4 - j % 4 + 3, (4, 8, 12, 16, 20, 24)),
    "grid of 6, from 3": (lambda i, j: ((i + 3) // 6 - (j + 3) // 6 + 40) * 9 + (i + 3) % 6, (6, 12, 18, 24)),
    "video of 2 x 4": (lambda i, j: (i // 8 - j // 8 + 20) * 49 + i // 4 % 2 - j // 4 % 2 + 1, (8, 16, 24)),
    "clipped": (lambda i, j: jnp.clip(i // 4 - j // 4, -2, 2) + 2 + i % 4, (4, 8, 12, 16, 20, 24)),
    "bits": (lambda i, j: i & 3, (4, 8, 12, 16, 20, 24)),
    "shifted, of which no range is known": (lambda i, j: (i >> 2) - (j >> 2) + 40, ()),
    "where": (lambda i, j: jnp.where(i // 4 > j // 4, i // 4 - j // 4, i % 2), (4, 8, 12, 16, 20, 24)),
    "sum": (lambda i, j: i + j, ()),
    "product": (lambda i, j: i * j % 11, ()),
    "larger": (lambda i, j: jnp.maximum(i, j) - jnp.minimum(i, j) + i % 6, (6, 12, 18, 24)),
}


@pytest.mark.parametrize("name", INDICES)
def test_shift_invariance(name: str) -> None:
    index, expected = INDICES[name]
    length, table = 120, jnp.zeros(40000)
    traced = trace_mod.trace_score_mod(lambda s, b, h, i, j: s + table[index(i, j)], (1, 1, length, length))
    (load,) = traced.program.loads
    known = tuple(n for n in range(1, 25) if shift_invariance.invariant(traced.program, load.index, n))
    assert known == expected
    i, j = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    values = np.asarray(index(i, j))
    for n in known:
        np.testing.assert_array_equal(values[n:, n:], values[:-n, :-n])


def test_a_derivative_that_overflows_past_the_last_query() -> None:
    """x is finite for both queries, and infinite for those that the tile has beyond them, whose probability is 0."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, n, 1, 64)), jnp.bfloat16) for n in (2, 70, 70)]

    def loss(gain: jax.Array) -> jax.Array:
        def mod(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
            x = q.astype(jnp.float32)
            for _ in range(5):
                x = x * x
            return s + gain[h] * x

        options = flexjax.KernelOptions(interpret=True)
        out = flexjax.flex_attention(*arrays, score_mod=mod, implementation="mosaic_gpu", kernel_options=options)
        return out.astype(jnp.float32).sum()

    assert np.isfinite(jax.grad(loss)(jnp.ones(1))).all()
