"""Scores that are large: additive masks of -1e10 or -1e30 that leave nothing of some rows, and a key that wins by as much.

Each batch entry has another number. Of rows that are hidden as a whole the result is the average of the values, as of any row
of equal scores, and nothing that is differentiated may be NaN for their sake. Their own gradient is not asked for: lse has no
room for the logarithm of how many scores are equal.
"""

import jax
import jax.numpy as jnp
import numpy as np

import flexjax

NUMBERS = (-1e8, -1e9, -1e10, -1e30, float(np.finfo(np.float32).min), -np.inf, 106159712.0, 1.15e8, 1e9, 1e30)
QUERIES, KEYS, HEADS, DIM = 128, 256, 2, 64
HIDDEN = 40
"""From this query on, rows are hidden."""
HALF, PINNED, RISING = 21, 20, 22
"""A row of which half the keys are hidden, one whose key 5 is larger by the number, and one that has it on the first keys and the next
larger number on a later one."""
STEPS = {"float32": 64, "float16": 16, "bfloat16": 4}
"""Tolerance in roundings of a number of the size of the largest: sums of 256 terms, and terms larger than what they add up to."""


def _bias() -> np.ndarray:
    bias = np.zeros((len(NUMBERS), QUERIES, KEYS), np.float32)
    for b, number in enumerate(NUMBERS):
        bias[b, HIDDEN:] = number
        bias[b, HALF, KEYS // 2 :] = -abs(number)
        bias[b, RISING, : KEYS // 2] = number
        bias[b, RISING, 200] = np.nextafter(np.float32(number), np.float32(np.inf))
        bias[b, PINNED, 5] = abs(number) if abs(number) < 1e38 else 0.0
    return bias


def inputs(dtype: str) -> list[jax.Array]:
    """q, k, v and the cotangent of the output; products of q and k stay below 4, which rounds away beside 1e8."""
    rng = np.random.default_rng(5)
    draw = lambda length: rng.standard_normal((len(NUMBERS), length, HEADS, DIM))
    q, k, v, d_out = draw(QUERIES), draw(KEYS), draw(KEYS), draw(QUERIES)
    d_out[:, [RISING, *range(HIDDEN, QUERIES)]] = 0
    return [jnp.asarray(x, dtype) for x in (q / 2, k, v, d_out)]


SINKS = np.asarray([0.5, -1.0], np.float32)
GATES = np.asarray([0.7, 0.3], np.float32)
"""Of the heads: a score that ends in such a product is rounded once more, or not at all where a compiler merges the product with
the subtraction of the largest."""


def expected(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, sinks: bool, gated: bool
) -> dict[str, np.ndarray]:
    """Results and gradients: scores rounded to float32 as they are with the bias, the rest in float64."""
    wide_q, wide_k, wide_v, wide_d = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    s = (np.einsum("btnd,bsnd->bnts", wide_q, wide_k) * DIM**-0.5).astype(np.float32)
    s = s + _bias()[:, None]
    gates = (GATES if gated else np.ones_like(GATES))[:, None, None]
    s = (s * gates).astype(np.float64)
    sink = np.where(sinks, SINKS, -np.inf)[:, None, None]
    largest = np.maximum(s.max(axis=-1, keepdims=True), sink)
    dead = np.isneginf(largest)
    safe = np.where(dead, 0, largest)
    p = np.exp(s - safe)
    total = np.where(dead, 1, p.sum(axis=-1, keepdims=True) + np.exp(sink - safe))
    p = p / total
    out = np.einsum("bnts,bsnd->btnd", p, wide_v)
    ds = p * (np.einsum("btnd,bsnd->bnts", wide_d, wide_v) - np.einsum("btnd,btnd->bnt", wide_d, out)[..., None])
    ds = ds * gates
    return {
        "out": out,
        "lse": np.moveaxis((largest + np.log(total))[..., 0], 1, 2),
        "max_scores": np.moveaxis(s.max(axis=-1), 1, 2),
        "dq": np.einsum("bnts,bsnd->btnd", ds, wide_k) * DIM**-0.5,
        "dk": np.einsum("bnts,btnd->bsnd", ds, wide_q) * DIM**-0.5,
        "dv": np.einsum("bnts,btnd->bsnd", p, wide_d),
        "dbias": ds.sum(axis=1),
    }


def found(
    implementation: str, dtype: str, sinks: bool, gated: bool, options: flexjax.KernelOptions | None = None
) -> dict[str, jax.Array]:
    """The same from a backend; the largest scores are asked for where there are sinks."""
    gates = jnp.asarray(GATES)

    def score_mod(score: jax.Array, bias: jax.Array, h: jax.Array) -> jax.Array:
        return (score + bias) * gates[h] if gated else score + bias

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        out, aux = flexjax.flex_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, q, k: score_mod(s, bias[b, q, k], h),
            sinks=jnp.asarray(SINKS) if sinks else None,
            return_aux=flexjax.AuxRequest(lse=True, max_scores=sinks),
            implementation=implementation,
            **({} if options is None else {"kernel_options": options}),
        )
        return out, {"lse": aux.lse} | ({"max_scores": aux.max_scores} if sinks else {})

    *given, d_out = inputs(dtype)

    def step(*given: jax.Array) -> dict[str, jax.Array]:
        out, pull, aux = jax.vjp(attend, *given, has_aux=True)
        return {"out": out, **aux, **dict(zip(("dq", "dk", "dv", "dbias"), pull(d_out), strict=True))}

    run = step if options is not None and options.interpret else jax.jit(step)  # the simulator of GPUs does not trace
    return run(*given, jnp.asarray(_bias()))


def check(
    implementation: str,
    dtype: str,
    sinks: bool,
    gated: bool = False,
    options: flexjax.KernelOptions | None = None,
) -> None:
    """Asserts that output and gradients of an implementation agree with `expected` beside each large number of NUMBERS."""
    want, got = expected(*inputs(dtype), sinks, gated), found(implementation, dtype, sinks, gated, options)
    step = STEPS[dtype] * float(jnp.finfo(dtype).eps)
    for name in got:
        for b, number in enumerate(NUMBERS):
            values, right = np.asarray(got[name][b], np.float64), want[name][b]
            where = f"{name} beside {number:g}"
            np.testing.assert_allclose(values, right, rtol=step, atol=step * _size(right), err_msg=where)


def _size(values: np.ndarray) -> float:
    """The largest of the numbers that are no mask's."""
    return float(np.abs(values[np.abs(values) < 1e3]).max(initial=1.0))
