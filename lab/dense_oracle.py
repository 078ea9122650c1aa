"""Dense attention and its gradients in numpy, float64, by the formulas: what the first-hour suite compares a card's results with.

    s = scale * q . k        z = score_mod(s)        p = softmax of z over the visible keys and the sink        out = p v
    dv = p^T d_out           dp = d_out v^T          dz = p (dp - rowsum(d_out out) + d_lse)                    ds = dz * dz/ds

It imports neither jax nor anything of the compiler, and runs on the host, so that no mistake of a kernel, of the compiler or of XLA can
be here too. Score functions bring their own derivatives (first_hour_cases.py). Arrays are [B, heads, tokens, dim].

`Rounding` says how much of a difference is rounding: it repeats the computation with relative errors of the dtype's size, drawn at
random, where kernels round (probabilities, dS, results).
"""

import dataclasses
import typing
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Results = dict[str, np.ndarray]
"""float64: out [B, N, T, E]; lse [B, N, T]; dq, dk, dv; dsinks [N] with sinks; dlearned, the gradient of what score_mod reads."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-9, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance of 1 from the next larger number of a dtype. TF32, in which XLA multiplies float32 on a GPU by default, has that of float16;
twice as much is allowed, because both operands of every product are rounded to it and not only what is drawn here."""
DRAWS = 4
"""How many times rounding errors are drawn."""
FEWEST = 64
"""The fewest numbers of a result whose norm is compared too: over many numbers rounding averages out, and a small error of all does not."""


class Modified(typing.NamedTuple):
    """A score function at all entries.

    scores     [B, N, T, S], modified
    slope      d modified / d score, broadcastable to the scores
    pullback   from d loss / d modified [B, N, T, S] to the gradient of the array that the function reads; None: it reads none
    """

    scores: Array
    slope: Array
    pullback: Callable[[Array], Array] | None = None


ScoreFunction = Callable[[Array], Modified]
"""From raw scores [B, N, T, S] to the modified ones with their derivatives."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """One attention problem with float64 arrays.

    q, k, v         [B, N, T, D], [B, M, S, D], [B, M, S, E]; M divides N
    d_out, d_lse    cotangents of out [B, N, T, E] and of lse [B, N, T]
    visible         bool, broadcastable to [B, N, T, S]
    score           the score function; None: scores stay as they are
    sinks           [N]: logits of a column without a value; None: there are none
    rows            bool, broadcastable to [B, N, T]: the queries that exist. Others have lse -inf also with sinks
    """

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: Array
    visible: Array
    score: ScoreFunction | None = None
    sinks: Array | None = None
    rows: Array | None = None


Round = Callable[[Array], Array]


def attention(problem: Dense, rounded: Round = lambda x: x, alike: bool = False) -> Results:
    """The Results of a problem: output, lse and all gradients of sum(out * d_out) + sum(lse * d_lse over finite lse), in float64 by the
    formulas at the top of this file. dsinks and dlearned are there only with sinks and with a score function that reads an array.

    rounded   applied to what kernels round: probabilities, dS, out, dq, dk and dv
    alike     whether dlearned takes the rounded probabilities where they multiply d_probs, as the kernels have it for bfloat16
              (KernelPlan.rounds_weights_alike): its sums along a row stay exact, and its elements do not
    """
    q, d_out = problem.q, problem.d_out
    B, N, T, D = q.shape
    M = problem.k.shape[1]
    k, v = (np.repeat(x, N // M, axis=1) for x in (problem.k, problem.v))
    S, scale = k.shape[2], D**-0.5
    exists = np.ones((B, N, T), bool) if problem.rows is None else np.broadcast_to(problem.rows, (B, N, T))
    visible = np.broadcast_to(problem.visible, (B, N, T, S)) & exists[..., None]
    raw = np.einsum("bhqd,bhkd->bhqk", q, k, optimize=True) * scale
    modified = Modified(raw, np.ones(())) if problem.score is None else problem.score(raw)
    scores = np.where(visible, modified.scores, -np.inf)
    top = scores.max(axis=-1, initial=-np.inf)
    sinks = None if problem.sinks is None else np.where(exists, problem.sinks[None, :, None], -np.inf)
    top = top if sinks is None else np.maximum(top, sinks)
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - shift[..., None])
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        total = total if sinks is None else total + np.exp(sinks - shift)
        lse = np.log(total) + shift
    lse = np.where(total > 0, lse, -np.inf)
    over = 1.0 / np.where(total == 0, 1.0, total)
    probs = weights * over[..., None]
    kept = rounded(probs)
    out = rounded(np.einsum("bhqk,bhke->bhqe", kept, v, optimize=True))

    d_lse = np.where(np.isfinite(lse), problem.d_lse, 0.0)
    delta = np.einsum("bhqe,bhqe->bhq", d_out, out) - d_lse
    d_probs = np.einsum("bhqe,bhke->bhqk", d_out, v, optimize=True)
    d_modified = probs * (d_probs - delta[..., None])
    d_raw = rounded(np.where(visible, d_modified * modified.slope, 0.0))
    grouped = lambda x: x.reshape(B, M, N // M, *x.shape[2:]).sum(axis=2)
    results = dict(
        out=out,
        lse=lse,
        dq=rounded(np.einsum("bhqk,bhkd->bhqd", d_raw, k, optimize=True) * scale),
        dk=rounded(grouped(np.einsum("bhqk,bhqd->bhkd", d_raw, q, optimize=True)) * scale),
        dv=rounded(grouped(np.einsum("bhqk,bhqe->bhke", kept, d_out, optimize=True))),
    )
    if sinks is not None:
        p_sink = np.where(exists, np.exp(sinks - shift) * over, 0.0)
        results["dsinks"] = (-p_sink * delta).sum(axis=(0, 2))
    if modified.pullback is not None:
        d_learned = (kept if alike else probs) * d_probs - probs * delta[..., None]
        results["dlearned"] = modified.pullback(np.where(visible, d_learned, 0.0))
    return results


class Rounding(typing.NamedTuple):
    """What a result may differ from the exact one by.

    exact     the results in float64
    allowed   for each result by its name the largest difference of an element that is rounding
    norms     by name the largest norm of the difference that is rounding; none for lse and for results of fewer than FEWEST numbers
    """

    exact: Results
    allowed: dict[str, float]
    norms: dict[str, float]


def with_rounding(problem: Dense, dtype: str) -> Rounding:
    """The exact results of a problem, and how far results of `dtype` may be from them.

    problem   in float64
    dtype     a key of EPS: what kernels round to. Float32 and float64 are treated as having a step of 2^-16, because kernels may multiply
              float32 as sums of bfloat16 parts, whose products err by 2^-17

    Rounding errors are drawn DRAWS times, with fixed seeds. An element may differ by three times the largest difference that they make
    anywhere in its result, half a step of the largest value of the result, and 1e-6. The norm of a difference may be twice the largest
    norm that the drawn errors make, and 1e-6.
    """
    exact = attention(problem)
    step = max(EPS[dtype], 2.0**-16)
    noise, norms = ({name: 0.0 for name in exact} for _ in range(2))
    for draw in range(DRAWS):
        rng = np.random.default_rng((0, draw))
        rounded = lambda x, rng=rng: x * (1.0 + 0.5 * step * rng.uniform(-1.0, 1.0, x.shape))
        for name, x in attention(problem, rounded, dtype == "bfloat16").items():
            live = np.isfinite(exact[name])
            gap = np.abs(np.where(live, x, 0.0) - np.where(live, exact[name], 0.0))
            noise[name] = max(noise[name], float(gap.max(initial=0.0)))
            norms[name] = max(norms[name], float(np.sqrt((gap**2).sum())))
    allowed: dict[str, float] = {}
    for name, x in exact.items():
        largest = float(np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0))
        allowed[name] = 3.0 * noise[name] + 0.5 * step * largest + 1e-6
    lasting = {n: 2.0 * x + 1e-6 for n, x in norms.items() if exact[n].size >= FEWEST and n != "lse"}
    return Rounding(exact, allowed, lasting)


def compare(got: Results, want: Rounding) -> tuple[float, list[str]]:
    """(ratio, a sentence for each thing that is wrong; [] if nothing is).

    got   results by name, of the shapes of `want.exact`; results that are not there are not compared

    A result is wrong where its shape differs, it has NaN, it has an infinity elsewhere or of the other sign, or an element or the norm of
    the difference exceeds what `want` allows. The ratio is the largest difference or norm over what is allowed, so at most 1 if nothing
    is wrong, and inf for a wrong shape, NaN or a wrong infinity.
    """
    worst, wrong = 0.0, []
    for name, x in got.items():
        exact, allowed = want.exact[name], want.allowed[name]
        x = np.asarray(x, np.float64)
        if x.shape != exact.shape:
            worst, wrong = np.inf, [*wrong, f"{name} has shape {x.shape}, not {exact.shape}"]
            continue
        if np.isnan(x).any():
            worst, wrong = np.inf, [*wrong, f"{name} has {int(np.isnan(x).sum())} NaN of {x.size}"]
            continue
        if not np.array_equal(np.where(np.isfinite(x), 0.0, x), np.where(np.isfinite(exact), 0.0, exact)):
            worst, wrong = np.inf, [*wrong, f"{name} is infinite at other places than it should, or of the other sign"]
            continue
        gap = np.abs(np.where(np.isfinite(x), x, 0.0) - np.where(np.isfinite(exact), exact, 0.0))
        ratio = float(gap.max(initial=0.0)) / allowed
        norm, most = float(np.sqrt((gap**2).sum())), want.norms.get(name, np.inf)
        worst = max(worst, ratio, norm / most)
        if norm > most:
            wrong.append(f"{name} differs by {norm:.2e} in norm where {most:.2e} is rounding")
        if ratio > 1.0:
            at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
            wrong.append(
                f"{name} at {at} is {x[at]:.6g} and not {exact[at]:.6g}: {float(gap.max()):.2e} where {allowed:.2e} is rounding"
            )
    return worst, wrong
