"""What the answers should be, in float64.

`attention_values` computes them with numpy from the definition.  `expected` adds gradients: it is
`flexjax.backends.reference.definition` in x64 mode, differentiated by jax.  `tests/backends/test_reference.py` checks its values
against the numpy ones and its gradients against finite differences of the numpy ones.

Everything is [B, heads, length, ...] whatever the layout of the case.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.reference.definition import reference_attention
from tests.arrays import array
from tests.cases import Case

Arrays = dict[str, Any]

# the arrays are small: compiling is what takes the time
_quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def learned(case: Case, captured: Arrays) -> Arrays:
    """The part of `captured` that wants a gradient."""
    return {name: captured[name] for name in case.wanted()}


def float64_inputs(case: Case) -> tuple[Arrays, Arrays]:
    """(inputs, captures): floating arrays as float64, the others untouched.

    Slots past a length are 0 in the inputs: what they hold must not matter, and `tests/bound_case.py` gives NaN.
    """
    inputs = {name: np.nan_to_num(x.astype(np.float64)) for name, x in case.poisoned().items()}
    captured = {
        name: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in case.captured().items()
    }
    return inputs, captured


# ------------------------------------------------------------------------------------- values, by numpy


def attention_values(
    case: Case, inputs: Arrays, captured: Arrays, keep: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """out [B, N, T, E], lse and max_scores [B, N, T], by numpy; the mods run under x64, entry by entry.

    keep  bool [B, N, T, S]: which probabilities dropout keeps

    Of a case with weights lse is the total, 0 in rows that do not exist. `expectations` are [B, N, T, n].
    """
    rows, entries = existing(case)
    scores = np.where(entries, _masked_scores(case, inputs, captured), -np.inf)
    B, N, T, S = scores.shape
    if case.weights is not None:
        weights = _weights(case, captured, scores)
        sums = _expectations(case, captured, scores, weights)
        kept = weights if keep is None else weights * keep / (1 - case.dropout)
        out = np.einsum("bhqk,bhke->bhqe", kept, _repeated(inputs["v"], N))
        top = scores.max(axis=-1, initial=-np.inf)
        return dict(out=out, lse=weights.sum(-1), max_scores=top) | sums
    columns = scores
    if "sinks" in inputs:
        sink = np.broadcast_to(inputs["sinks"][None, :, None, None], (B, N, T, 1))
        columns = np.concatenate([scores, sink], axis=-1)
    top = columns.max(axis=-1, initial=-np.inf, keepdims=True)
    weights = np.exp(columns - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    probs = (weights / np.where(total == 0, 1.0, total))[..., :S]
    sums = _expectations(case, captured, scores, probs)
    if keep is not None:
        probs = probs * keep / (1 - case.dropout)
    value = _repeated(inputs["v"], N)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0.0)
    return dict(
        out=np.einsum("bhqk,bhke->bhqe", probs, value),
        lse=np.where(rows, lse[..., 0], -np.inf),
        max_scores=scores.max(axis=-1, initial=-np.inf),
        **sums,
    )


def loss_of_expectations(sums: Any, u: Any) -> Any:
    """The part of the loss that is of expectations [B, N, T, n], from `u` of the inputs."""
    return (sums * u[..., None] * (np.arange(1, 1 + sums.shape[-1], dtype=np.float32) / 4)).sum()


def existing(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Which rows [B, 1, T] and which entries [B, 1, T, S] exist by the lengths of the case, bool."""
    B, _, _, T, S, _, _ = case.shape
    ends = [np.full(B, n) if end is None else np.asarray(end) for n, end in zip((T, S), case.lengths, strict=True)]
    rows, columns = (np.arange(n) < end[:, None] for n, end in zip((T, S), ends, strict=True))
    return rows[:, None], (rows[:, :, None] & columns[:, None])[:, None]


def _repeated(x: np.ndarray, heads: int) -> np.ndarray:
    """[B, M, S, D] -> [B, N, S, D]."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def _masked_scores(case: Case, inputs: Arrays, captured: Arrays) -> np.ndarray:
    """[B, N, T, S] scores after the mod, -inf where the mask is off."""
    N, D = case.shape[1], case.shape[5]
    scores = np.einsum("bhqe,bhke->bhqk", inputs["q"], _repeated(inputs["k"], N))
    if case.extra:
        scores += np.einsum("bhqe,bhke->bhqk", inputs["query_extra"], _repeated(inputs["key_extra"], N))
    scores = scores * (1 / math.sqrt(D) if case.scale is None else case.scale)
    if scores.size == 0:
        return scores
    with jax.enable_x64(True):
        modded, on = _entry_by_entry(case)(captured, scores)
    return np.where(on, modded, -np.inf)


def _weights(case: Case, captured: Arrays, scores: np.ndarray) -> np.ndarray:
    """The weights of scores [B, N, T, S] that are -inf at hidden entries, 0 there."""
    return _at_entries(case.weighting, captured, scores)


def _expectations(case: Case, captured: Arrays, scores: np.ndarray, probs: np.ndarray) -> dict[str, np.ndarray]:
    """`expectations` [B, N, T, n] of probabilities, or weights, of scores [B, N, T, S] that are -inf at hidden entries."""
    found = []
    for name in case.expectations:
        function = lambda captured, name=name: case.functions(captured)[name]
        found.append((probs * _at_entries(function, captured, scores)).sum(-1))
    return {"expectations": np.stack(found, -1)} if found else {}


def _at_entries(make: Callable[[Arrays], Any], captured: Arrays, scores: np.ndarray) -> np.ndarray:
    """The function `make(captured)` at each entry of scores [B, N, T, S]; 0 where they are -inf."""
    if scores.size == 0:
        return scores
    on = scores != -np.inf

    def evaluate(captured: Arrays, scores: jax.Array) -> jax.Array:
        at = [i.ravel() for i in jnp.indices(scores.shape, dtype=jnp.int32)]
        return jax.vmap(make(captured))(scores.ravel(), *at).reshape(scores.shape)

    with jax.enable_x64(True):
        return np.where(on, _quick_jit(evaluate)(captured, np.where(on, scores, 0.0)), 0.0)


@functools.cache
def _entry_by_entry(case: Case) -> Callable[[Arrays, np.ndarray], tuple[jax.Array, jax.Array]]:
    """(captured, scores [B, N, T, S]) -> modified scores and mask, every entry on its own."""

    def evaluate(captured: Arrays, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        score_mod, mask_mod = case.mods(captured)
        at = [i.ravel() for i in jnp.indices(scores.shape, dtype=jnp.int32)]
        modded = scores.ravel() if score_mod is None else jax.vmap(score_mod)(scores.ravel(), *at)
        on = jnp.ones(scores.size, bool) if mask_mod is None else jax.vmap(mask_mod)(*at)
        return modded.reshape(scores.shape), on.reshape(scores.shape)

    return _quick_jit(evaluate)


def loss_value(inputs: Arrays, results: dict[str, np.ndarray]) -> float:
    """The scalar whose gradients are compared: `sum(out * w) + sum(lse * u over rows with a finite lse)`."""
    lse = np.where(np.isfinite(results["lse"]), results["lse"], 0.0)
    more = loss_of_expectations(results["expectations"], inputs["u"]) if "expectations" in results else 0.0
    return float(np.sum(results["out"] * inputs["w"]) + np.sum(lse * inputs["u"]) + more)


# ---------------------------------------------------------------------------- gradients, by jax in float64


def reference_results(
    case: Case, inputs: Arrays, captured: Arrays, keep: jax.Array | None = None
) -> dict[str, jax.Array]:
    """`reference_attention` on heads-first arrays, with lengths as a mask."""
    rows, entries = existing(case) if any(case.lengths) else (True, None)
    score_mod, mask_mod = case.mods(captured)
    extras = {name: inputs[name] for name in ("sinks", "query_extra", "key_extra") if name in inputs}
    out, lse, max_scores, *sums = reference_attention(
        inputs["q"], inputs["k"], inputs["v"], score_mod=score_mod, mask_mod=mask_mod, scale=case.scale,
        layout="BNTH", dropout_rate=case.dropout, dropout_keep=keep, mask=entries, weights=case.weighting(captured),
        expectations=tuple(case.functions(captured).values()), **extras,
    )  # fmt: skip
    lse = jnp.where(rows, lse, -jnp.inf if case.weights is None else 0.0)
    return dict(out=out, lse=lse, max_scores=max_scores) | ({"expectations": sums[0]} if sums else {})


def expected(case: Case, keep: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """out, lse, max_scores and the gradient of the loss to every input and learned capture ('d:q', ...).

    In float64.  Computed once however many backends ask, except with dropout: `keep` is a backend's own.
    """
    return _expected(case) if keep is None else _differentiate(case, keep)


@functools.cache
def _expected(case: Case) -> dict[str, np.ndarray]:
    return _differentiate(case, None)


def expected_values(case: Case, keep: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """out, lse and max_scores of `expected` by numpy, where no gradient is asked for: to compile one takes as long as the test."""
    return attention_values(case, *float64_inputs(case), keep)


def _differentiate(case: Case, keep: np.ndarray | None) -> dict[str, np.ndarray]:
    """Results and gradients ("d:" and the input's name) of a case in float64, by name.

    keep   which probabilities dropout keeps, None without dropout
    """
    inputs, captured = float64_inputs(case)
    weights = {name: inputs.pop(name) for name in ("w", "u")}

    def loss(inputs: Arrays, learn: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
        results = reference_results(case, inputs, {**constants, **learn}, keep)
        lse = jnp.where(jnp.isfinite(results["lse"]), results["lse"], 0)
        total = jnp.sum(results["out"] * weights["w"]) + jnp.sum(lse * weights["u"])
        if case.expectations:
            total += loss_of_expectations(results["expectations"], weights["u"])
        return total, results

    with jax.enable_x64(True):
        constants = {name: array(x) for name, x in captured.items()}
        step = _quick_jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        (d_inputs, d_learn), results = step(inputs, learned(case, captured))
        gradients = {"d:" + name: x for name, x in (d_inputs | d_learn).items()}
        return {name: np.asarray(x) for name, x in (results | gradients).items()}


# --------------------------------------------------------------------- what plain low precision achieves


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _through(x: jax.Array, value_dtype: str, cotangent_dtype: str) -> jax.Array:
    """`x` rounded to one dtype on the way forward, its cotangent to another on the way back."""
    return x.astype(value_dtype).astype(x.dtype)


def _through_fwd(x, value_dtype, cotangent_dtype):
    return _through(x, value_dtype, cotangent_dtype), None


def _through_bwd(value_dtype, cotangent_dtype, _, g):
    return (g.astype(cotangent_dtype).astype(g.dtype),)


_through.defvjp(_through_fwd, _through_bwd)


@functools.cache
def plain_low_precision(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Dense attention in low precision: softmax in float32; p, ds and results in `dtype`.

    Its distance from `expected` is the error that a fused kernel may double.  Sinks stay float32. On the CPU, wherever the
    kernels run: a GPU rounds the operands of float32 products, and the yardstick would not be the same.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        return _plain_low_precision(case, dtype)


def _plain_low_precision(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """Results and gradients of a case by plain attention in a dtype below float32, by name, as float32."""
    inputs = {name: array(np.nan_to_num(x)) for name, x in case.poisoned().items()}
    weights = {name: inputs.pop(name) for name in ("w", "u")}
    captured = {name: array(x) for name, x in case.captured().items()}

    def loss(inputs: Arrays, learn: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
        results = _eager(case, inputs, {**captured, **learn}, dtype)
        lse = jnp.where(jnp.isfinite(results["lse"]), results["lse"], 0)
        total = jnp.sum(results["out"] * weights["w"]) + jnp.sum(lse * weights["u"])
        if case.expectations:
            total += loss_of_expectations(results["expectations"], weights["u"])
        return total, results

    step = _quick_jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (d_inputs, d_learn), results = step(inputs, learned(case, captured))
    everything = results | {"d:" + name: x for name, x in (d_inputs | d_learn).items()}
    return {name: np.asarray(x, np.float32) for name, x in everything.items()}


def _eager(case: Case, inputs: Arrays, captured: Arrays, dtype: str) -> dict[str, jax.Array]:
    """Heads-first float32 arrays that hold `dtype` values; see `plain_low_precision`."""
    B, N, _, T, S, D, _ = case.shape
    narrow = {name: x if name == "sinks" else _through(x, dtype, dtype) for name, x in inputs.items()}
    repeat = lambda x: jnp.repeat(x, N // x.shape[1], axis=1)
    scores = jnp.einsum("bhqe,bhke->bhqk", narrow["q"], repeat(narrow["k"]))
    if case.extra:
        scores += jnp.einsum("bhqe,bhke->bhqk", narrow["query_extra"], repeat(narrow["key_extra"]))
    scale = 1 / math.sqrt(D) if case.scale is None else case.scale
    scores = _through(scores * scale, "float32", dtype)
    score_mod, mask_mod = case.mods(captured)
    index = jnp.indices((B, N, T, S), dtype=jnp.int32)
    rows, entries = existing(case)
    on = jnp.broadcast_to(entries, (B, N, T, S))
    if mask_mod is not None:
        on = on & jax.vmap(mask_mod)(*(i.ravel() for i in index)).reshape(on.shape)
    if score_mod is not None and on.size:
        place = jnp.unravel_index(jnp.argmax(on), on.shape)
        spots = [jnp.where(on, i, at).ravel() for i, at in zip(index, place, strict=True)]
        modded = jax.vmap(score_mod)(jnp.where(on, scores, scores[place]).ravel(), *spots)
        scores = modded.astype(jnp.float32).reshape(on.shape)
    scores = jnp.where(on, scores, -jnp.inf)
    if case.weights is not None:
        return _plain_weights(case, captured, scores, repeat(narrow["v"]), dtype)
    sinks = narrow["sinks"] if case.sinks else jnp.full(N, -jnp.inf)
    out, lse = _softmax_of_values(scores, repeat(narrow["v"]), sinks, dtype)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, initial=-jnp.inf))
    probs = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]))
    sums = _plain_expectations(case, captured, scores, probs)
    return dict(out=_through(out, dtype, dtype), lse=jnp.where(rows, lse, -jnp.inf), max_scores=top) | sums


def _plain_weights(
    case: Case, captured: Arrays, scores: jax.Array, value: jax.Array, dtype: str
) -> dict[str, jax.Array]:
    """Results of weights in place of a softmax, rounded to `dtype` where they multiply the values."""
    weighting, on = case.weighting(captured), scores != -jnp.inf
    assert weighting is not None
    at = [i.ravel() for i in jnp.indices(scores.shape, dtype=jnp.int32)]
    found = jax.vmap(weighting)(jnp.where(on, scores, 0.0).ravel(), *at).reshape(scores.shape)
    weights = jnp.where(on, found.astype(jnp.float32), 0.0)
    out = jnp.einsum("bhqk,bhke->bhqe", _through(weights, dtype, "float32"), value)
    sums = _plain_expectations(case, captured, scores, weights)
    return dict(out=_through(out, dtype, dtype), lse=weights.sum(-1)) | sums


def _plain_expectations(case: Case, captured: Arrays, scores: jax.Array, probs: jax.Array) -> dict[str, jax.Array]:
    """In float32, of scores that are -inf at hidden entries, which count as the first visible one."""
    if not case.expectations:
        return {}
    on = scores != -jnp.inf
    place = jnp.unravel_index(jnp.argmax(on), on.shape)
    at = [
        jnp.where(on, i, first).ravel() for i, first in zip(jnp.indices(on.shape, dtype=jnp.int32), place, strict=True)
    ]
    given = jnp.where(on, scores, scores[place]).ravel()
    values = [jax.vmap(f)(given, *at).astype(jnp.float32).reshape(on.shape) for f in case.functions(captured).values()]
    return {"expectations": jnp.stack([jnp.where(on, probs * x, 0.0).sum(-1) for x in values], -1)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _softmax_of_values(
    scores: jax.Array, value: jax.Array, sinks: jax.Array, dtype: str
) -> tuple[jax.Array, jax.Array]:
    """out [B, N, T, E] and lse [B, N, T] of scores [B, N, T, S], value [B, N, S, E] and sinks [N].

    Its gradient is the one of flash attention (Dao et al. 2022, algorithm 4), which every fused kernel uses: the
    row sum of p * dp is taken from the output, and the output that is kept is in `dtype`.
    """
    return _softmax_fwd(scores, value, sinks, dtype)[0]


def _softmax_fwd(scores, value, sinks, dtype):
    """Output and lse of softmax attention with sinks, rounded where a fused kernel of `dtype` rounds, and what the gradient
    needs.
    """
    top = jnp.maximum(jnp.max(scores, axis=-1, initial=-jnp.inf), sinks[:, None])
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    sunk = jnp.exp(sinks[:, None] - shift)
    total = jnp.sum(weights, axis=-1) + sunk
    safe = jnp.where(total == 0, 1.0, total)
    probs = weights / safe[..., None]
    narrow = _through(weights, dtype, dtype)  # before the division, as no fused kernel knows the sum so early
    out = _through(jnp.einsum("bhqk,bhke->bhqe", narrow, value) / safe[..., None], dtype, dtype)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + shift)
    return (out, lse), (probs, sunk / safe, value, out)


def _softmax_bwd(dtype, kept, cotangents):
    """Gradients of scores, value and sinks, rounded where a fused kernel of `dtype` rounds."""
    (probs, sunk, value, out), (d_out, d_lse) = kept, cotangents
    shared = d_lse - jnp.sum(d_out * out, axis=-1)
    d_probs = jnp.einsum("bhqe,bhke->bhqk", d_out, value)
    d_value = jnp.einsum("bhqk,bhqe->bhke", _through(probs, dtype, dtype), d_out)
    return probs * (d_probs + shared[..., None]), d_value, jnp.sum(sunk * shared, axis=(0, 2))


_softmax_of_values.defvjp(_softmax_fwd, _softmax_bwd)
