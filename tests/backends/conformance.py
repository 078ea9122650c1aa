"""What every backend is put through.

A backend's own test file subclasses `Conformance`, names the implementation and states what it cannot do:

    class TestMine(Conformance):
        implementation = "mine"
        second_order = False

`TableConformance` runs each case of `tests/cases/calls.py` forward and through the gradient against the float64 oracle;
`TransformationConformance` puts a few small problems through every transformation of JAX. `Conformance` is both.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests import oracle
from tests.arrays import array
from tests.bound_case import Arrays, BoundCase, x64
from tests.cases import CASES, Case, exact_captures, large_scores
from tests.compare import assert_close

# The gradient pass runs the forward pass too and compares its results; these are run forward alone besides, outside the slow run.
FORWARD_ALONE = frozenset({"plain", "no_keys", "no_queries", "one_query", "packed", "sinks"})


def _every_case(
    everyday: frozenset[str] | None,
    extra_dtypes: tuple[str, ...],
    only_dtypes: tuple[str, ...] | None,
    left_out: Callable[[Case, str], bool],
) -> list[Any]:
    """(case, dtype): the dtypes that a row names, and beyond them `extra_dtypes`, in the slow run only.

    With `only_dtypes` each case has those dtypes instead, the first of them outside the slow run.
    """
    rows = []
    for case in CASES.values():
        dtypes, usual = (only_dtypes, only_dtypes[:1]) if only_dtypes else ((*case.dtypes, *extra_dtypes), case.dtypes)
        for dtype in dict.fromkeys(dtypes):
            if left_out(case, dtype):
                continue
            slow = case.slow or dtype not in usual or (everyday is not None and case.name not in everyday)
            rows.append(pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=[pytest.mark.slow] if slow else []))
    return rows


class _MayJit:
    jitted = True  # whether jax.jit may surround a call; otherwise the tests call eagerly

    def _jit(self, function: Any) -> Any:
        return jax.jit(function) if self.jitted else function


class TableConformance(_MayJit):
    """The table of cases.  Class attributes say what a backend supports; a missing ability must raise, not mislead."""

    implementation: typing.ClassVar[str]
    deterministic = True
    everyday: frozenset[str] | None = None  # names of the cases outside the slow run; None: as the table says
    everyday_forward: frozenset[str] = FORWARD_ALONE  # those of them that are run forward alone besides
    extra_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float64")  # for every case, in the slow run
    only_dtypes: tuple[str, ...] | None = None  # for every case, whatever its row says
    roundings = 1  # of the gradient of a bfloat16 capture in float32 attention: one if it is summed in float32
    loosen = 1.0  # factor on the float32 tolerance, for hardware that multiplies in less

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            everyday = self.everyday
            left_out = self.refuses  # test_values checks that a refused case raises
            if metafunc.function.__name__ == "test_values":
                everyday = self.everyday_forward if everyday is None else self.everyday_forward & everyday
                left_out = lambda case, dtype: False
            rows = _every_case(everyday, self.extra_dtypes, self.only_dtypes, left_out)
            metafunc.parametrize(("case", "dtype"), rows)

    def refuses(self, case: Case, dtype: str) -> bool:
        """Whether this backend says that it cannot run the case; it must then raise NotImplementedError."""
        return False

    def test_values(self, case: Case, dtype: str):
        with x64(dtype):
            problem = BoundCase(case, dtype, self.implementation)
            if self.refuses(case, dtype):
                with pytest.raises(NotImplementedError):
                    problem.attend(*problem.arrays())
                return
            got = self._jit(problem.attend)(*problem.arrays())
            self._check_dtypes(got, problem)
            self._compare(got, problem)

    def test_gradients(self, case: Case, dtype: str):
        with x64(dtype):
            problem = BoundCase(case, dtype, self.implementation)
            step = self._jit(jax.grad(problem.loss, argnums=(0, 1), has_aux=True))
            (d_inputs, d_learn), results = first = step(*problem.arrays())
            for name, arrays in (("inputs", problem.arrays()[0]), ("captures", problem.arrays()[1])):
                for key, x in arrays.items():
                    g = (d_inputs if name == "inputs" else d_learn)[key]
                    assert g.dtype == x.dtype, f"gradient of {key} has dtype {g.dtype}, not {x.dtype}"
            self._compare(results | {"d:" + n: x for n, x in (d_inputs | d_learn).items()}, problem)
            if self.deterministic:
                again = step(*problem.arrays())
                for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), "two runs differ in their bits"

    def _check_dtypes(self, got: Arrays, problem: BoundCase) -> None:
        wide = "float64" if problem.dtype == "float64" else "float32"
        assert got["out"].dtype == problem.dtype
        assert got["lse"].dtype == wide
        assert "max_scores" not in got or got["max_scores"].dtype == wide

    def _compare(self, got: Arrays, problem: BoundCase) -> None:
        case, dtype = problem.case, problem.dtype
        low = dtype not in ("float32", "float64")
        if low and case.dropout:
            return  # plain low precision attention knows no dropout; the wide dtypes check the entries
        gradients = any(name.startswith("d:") for name in got)
        want = (oracle.expected if gradients else oracle.expected_values)(case, problem.keep())
        plain = oracle.plain_low_precision(case, dtype) if low else {}
        narrow = {"d:" + n: str(c.dtype) for n, c in case.captures if c.dtype in ("bfloat16", "float16")}
        narrow |= {"d:sinks": "float32"} if dtype == "float64" else {}
        for name, x in got.items():
            assert_close(
                name,
                np.asarray(x.astype(jnp.float32) if low else x),
                want[name],
                dtype="float32" if dtype == "float64" and _is_single(problem, name) else dtype,
                plain=plain.get(name),
                result_dtype=narrow.get(name),
                roundings=self.roundings,
                loosen=case.loosen * self.loosen if dtype == "float32" else 1.0,
            )


class TransformationConformance(_MayJit):
    """Small problems through every transformation of JAX."""

    implementation: typing.ClassVar[str]
    forward_mode = True  # jvp
    second_order = True  # jvp of grad
    export = True
    small_dtype = "float32"  # of q, k and v in the small problems
    slow_tests: frozenset[str] = frozenset()  # names of tests that are left to the slow run

    def __init_subclass__(cls) -> None:
        """Leaves out the tests that ask for what the class says that its backend has not."""
        super().__init_subclass__()
        left_out = {
            "test_eager_equals_jit": not cls.jitted,
            "test_second_order": not cls.jitted,
            "test_reverse_over_reverse": not (cls.jitted and cls.second_order),
            "test_export": not cls.export,
            "test_dropout_keeps_the_right_share": not cls.jitted,  # reads what is kept off a jitted call
            "test_large_scores": cls.small_dtype != "float32",  # in a file of that backend's own
        }
        for name, without in left_out.items():
            if without:
                setattr(cls, name, None)

    def _small(self, tokens: int = 20) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v of a small problem, [1, tokens, 4 or 2, 8]."""
        rng = np.random.default_rng(3)
        q, k, v = (array(rng.standard_normal((1, tokens, heads, 8)), self.small_dtype) for heads in (4, 2, 2))
        return q, k, v

    def _close(self, got: Any, want: Any, rtol: float, atol: float = 0.0) -> None:
        """Two ways to compute the same. Below float32 each rounds its results once or twice: 4 units in the last place of the largest."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if self.small_dtype != "float32":
            rtol, atol = 0.0, 4 * float(jnp.finfo(self.small_dtype).eps) * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)

    def _same_as_loop(self, mapped: Any, one: Any, arrays: tuple, in_axes: tuple | None = None) -> None:
        """`mapped` over axis 0 (or `in_axes`) gives what `one` gives item by item."""
        axes = in_axes or (0,) * len(arrays)
        items = [
            one(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, axes, strict=True)))
            for i in range(3)
        ]
        self._close(mapped(*arrays), jnp.stack(items), rtol=1e-5, atol=2e-6)

    def _attention(self, **options: Any):
        return functools.partial(flexjax.flex_attention, implementation=self.implementation, **options)

    def test_eager_equals_jit(self):
        q, k, v = self._small()
        attend = self._attention(score_mod=_biased(_bias()), mask_mod=_causal)
        self._close(attend(q, k, v), jax.jit(attend)(q, k, v), rtol=1e-6, atol=1e-6)

    def test_vmap_over_inputs(self):
        q, k, v = (jnp.stack([x, x + 1, -x]) for x in self._small())
        attend = self._attention(score_mod=_biased(_bias()), mask_mod=_causal)
        self._same_as_loop(jax.vmap(attend), attend, (q, k, v))
        self._same_as_loop(
            jax.vmap(attend, in_axes=(1, None, 0)),
            attend,
            (jnp.swapaxes(q, 0, 1), k[0], v),
            in_axes=(1, None, 0),
        )

    def test_vmap_over_captures(self):
        q, k, v = self._small()
        bias = jnp.stack([_bias(), 2 * _bias(), -_bias()])
        attend = lambda bias: self._attention(score_mod=_biased(bias), mask_mod=_causal)(q, k, v)
        self._same_as_loop(jax.vmap(attend), attend, (bias,))
        slope = self._jit(lambda bias: jax.grad(lambda b: jnp.sum(attend(b) ** 2))(bias))
        self._same_as_loop(self._jit(jax.vmap(slope)), slope, (bias,))

    def test_vmap_over_captures_of_the_mask(self):
        q, k, v = self._small()
        ids = array(np.sort(np.random.default_rng(0).integers(0, 3, (3, 20)), axis=-1))
        attend = lambda ids: self._attention(mask_mod=_document(ids))(q, k, v)
        self._same_as_loop(jax.vmap(attend), attend, (ids,))

    def test_vmap_over_block_masks(self):
        q, k, v = self._small()
        ids = array(np.sort(np.random.default_rng(0).integers(0, 3, (3, 20)), axis=-1))
        build = lambda ids: flexjax.create_block_mask(_document(ids), None, None, 20, 20, block_size=8)
        attend = lambda block_mask: self._attention(block_mask=block_mask)(q, k, v)
        stacked = jax.vmap(build)(ids)
        want = jnp.stack([attend(build(one)) for one in ids])
        self._close(jax.vmap(attend)(stacked), want, rtol=1e-5, atol=1e-6)

    def test_gradient_of_vmap(self):
        q, k, v = (jnp.stack([x, x + 1]) for x in self._small())
        attend = self._attention(score_mod=_biased(_bias()), mask_mod=_causal)
        loss = lambda q, k, v: jnp.sum(attend(q, k, v) ** 2)
        slopes = self._jit(jax.grad(lambda *x: jnp.sum(jax.vmap(loss)(*x)), argnums=(0, 1, 2)))(q, k, v)
        one = self._jit(jax.grad(loss, argnums=(0, 1, 2)))
        for i in range(2):
            for got, want in zip(slopes, one(q[i], k[i], v[i]), strict=True):
                self._close(got[i], want, rtol=1e-4, atol=1e-5)

    def test_checkpoint(self):
        attend = self._attention(score_mod=_biased(_bias()), mask_mod=_causal)
        loss = lambda f: lambda q, k, v: jnp.sum(f(q, k, v) ** 2)
        slope = lambda f: self._jit(jax.grad(loss(f), argnums=(0, 1, 2)))
        slopes = [slope(f)(*self._small()) for f in (attend, jax.checkpoint(attend))]
        for got, want in zip(*slopes, strict=True):
            self._close(got, want, rtol=1e-5, atol=1e-6)

    def test_jvp(self):
        def loss(q, k, v, bias):
            return jnp.sum(self._attention(score_mod=_biased(bias), mask_mod=_causal)(q, k, v) ** 2)

        primals = (*self._small(), _bias())
        tangents = tuple(x[::-1] * 0.5 for x in primals)
        if not self.forward_mode:
            with pytest.raises((NotImplementedError, TypeError)):
                jax.jvp(loss, primals, tangents)
            return
        value, slope = self._jit(lambda x, t: jax.jvp(loss, x, t))(primals, tangents)
        gradients = self._jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*primals)
        self._close(value, loss(*primals), rtol=1e-5)
        want = sum(jnp.vdot(g, t) for g, t in zip(gradients, tangents, strict=True))
        self._close(slope, want, rtol=1e-4)

    def test_second_order(self):
        def loss(implementation, q, k, v, bias):
            attend = functools.partial(flexjax.flex_attention, implementation=implementation)
            out, aux = attend(
                q, k, v, score_mod=_biased(bias), mask_mod=_causal, return_aux=flexjax.AuxRequest(lse=True)
            )
            return jnp.sum(out**2) + jnp.sum(aux.lse**2)

        def hessian_times(implementation):
            slopes = jax.grad(functools.partial(loss, implementation), argnums=(0, 1, 2, 3))
            primals = (*self._small(), _bias())
            return jax.jit(lambda *x: jax.jvp(slopes, x, tuple(y[::-1] for y in x))[1])(*primals)

        if not self.second_order:
            with pytest.raises((NotImplementedError, TypeError)):
                hessian_times(self.implementation)
            return
        for got, want in zip(hessian_times(self.implementation), hessian_times("reference"), strict=True):
            scale = float(jnp.abs(want).max())
            self._close(got, want, rtol=2e-4, atol=2e-5 * scale)

    def test_reverse_over_reverse(self):
        q, k, v = self._small()
        attend = lambda name, q: flexjax.flex_attention(q, k, v, mask_mod=_causal, implementation=name)

        def penalty(name, q):
            return jnp.sum(jax.grad(lambda q: jnp.sum(attend(name, q) ** 2))(q) ** 2)

        got, want = (jax.jit(jax.grad(functools.partial(penalty, n)))(q) for n in (self.implementation, "reference"))
        self._close(got, want, rtol=2e-4, atol=2e-5 * float(jnp.abs(want).max()))

    def test_export(self):
        attend = jax.jit(self._attention(score_mod=_biased(_bias()), mask_mod=_causal))
        exported = jax.export.deserialize(jax.export.export(attend)(*self._small()).serialize())
        self._close(exported.call(*self._small()), attend(*self._small()), rtol=1e-6, atol=1e-6)

    def test_extra_features_equal_longer_heads(self):
        """Features side by side or apart; the default scale is that of D alone."""
        q, k, v = self._small()
        more_q, more_k = jnp.sin(3 * q), jnp.cos(2 * k[:, :, :1])
        apart = self._attention(mask_mod=_causal)(q, k, v, query_extra=more_q, key_extra=more_k)
        side_by_side = (
            jnp.concatenate([q, more_q], -1),
            jnp.concatenate([k, jnp.repeat(more_k, 2, axis=2)], -1),
        )
        self._close(apart, self._attention(mask_mod=_causal, scale=8**-0.5)(*side_by_side, v), rtol=1e-5, atol=1e-6)

    def test_zero_cotangent_gives_zero_gradients(self):
        attend = self._attention(score_mod=_biased(_bias()), mask_mod=_causal)
        out, pull = jax.vjp(attend, *self._small())
        for g in pull(jnp.zeros_like(out)):
            np.testing.assert_array_equal(g, np.zeros_like(g))

    def test_block_mask_equals_mask_mod(self):
        q, k, v = self._small()
        block_mask = flexjax.create_block_mask(_causal, None, None, 20, 20, block_size=(8, 16))
        got = self._attention(block_mask=block_mask)(q, k, v)
        self._close(got, self._attention(mask_mod=_causal)(q, k, v), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("precise", "sinks", "gated"), [("float32", False, False), ("bfloat16", True, False), ("float32", False, True)]
    )
    def test_large_scores(self, precise: str, sinks: bool, gated: bool):
        large_scores.check(self.implementation, precise, sinks, gated)

    @pytest.mark.parametrize(
        "mod", ["slope", "table", *(pytest.param(mod, marks=pytest.mark.slow) for mod in ("pair", "dropout", "linear"))]
    )
    def test_gradients_of_captures_are_exact(self, mod: str):
        exact_captures.check(self.implementation, mod, self._jit)

    def test_nan_shows(self):
        """In the row where it is, and nowhere else. It comes from an array: XLA on a CPU may drop a NaN that is a literal."""
        q, k, v = self._small(64)
        bias = jnp.zeros((64, 64)).at[3, 5].set(jnp.nan)
        mod = lambda s, b, h, q, k: s + bias[q, k]
        out, aux = self._attention(score_mod=mod, return_aux=flexjax.AuxRequest(lse=True, max_scores=True))(q, k, v)
        rows = np.arange(q.shape[1]) == 3
        for x in (out, aux.lse[..., None], aux.max_scores[..., None]):
            np.testing.assert_array_equal(np.isnan(x).all(axis=(0, 2, 3)), rows)
            np.testing.assert_array_equal(np.isnan(x).any(axis=(0, 2, 3)), rows)

    def test_dropout_keeps_the_right_share(self):
        case = dataclasses.replace(CASES["dropout"], mask=None, name="dropout share")
        keep = BoundCase(case, "float32", self.implementation).keep()
        assert keep is not None
        deviation = np.sqrt(case.dropout * (1 - case.dropout) / keep.size)
        assert abs(keep.mean() - (1 - case.dropout)) < 5 * deviation
        per_column = keep.mean(axis=(0, 1, 2))
        assert per_column.std() < 2 * np.sqrt(case.dropout * (1 - case.dropout) / (keep.size / keep.shape[-1]))
        assert len({row.tobytes() for row in keep.reshape(-1, keep.shape[-1])}) == keep[..., 0].size

    def test_dropout_follows_its_key(self):
        q, k, v = self._small()
        attend = lambda seed: self._attention(dropout=flexjax.Dropout(0.5, jax.random.key(seed)))(q, k, v)
        np.testing.assert_array_equal(attend(1), attend(1))
        assert not np.array_equal(attend(1), attend(2))


class Conformance(TableConformance, TransformationConformance):
    """All of it."""


# ------------------------------------------------------------------------- mods of the small problem


def _bias() -> jax.Array:
    return array(np.random.default_rng(4).standard_normal(20), jnp.float32)


def _biased(bias: jax.Array):
    return lambda s, b, h, q, k: jnp.tanh(s) + bias[jnp.abs(q - k)]


def _causal(b, h, q, k):
    return q >= k


def _document(ids: jax.Array):
    return lambda b, h, q, k: ids[q] == ids[k]


def _is_single(problem: BoundCase, name: str) -> bool:
    """Whether a gradient stays single precision in float64 attention: its array is captured as float32."""
    captured = {"d:" + n for n, x in problem.constants.items() if x.dtype != "float64"}
    return name == "d:sinks" or name in captured
