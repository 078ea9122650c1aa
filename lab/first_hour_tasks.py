"""What a process of the first-hour suite does on the card: `TASKS`, by name. Each takes plain values and returns a dict for JSON.

    facts       the card, the versions, and which kernels take a plain call, with which options
    numerics    a case of first_hour_cases.py against the float64 oracle, run twice for equal bits
    ceilings    a large matrix product and a large read: what any kernel can reach here
    sustained   a workload back to back for a second, with the SM clock meanwhile
    tune        flexjax.autotune on a workload

A process reads a task from each line of its input (first_hour_pool.py) and prints a line of JSON for it.
"""

import dataclasses
import itertools
import json
import platform
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from bench import gpu_peers
from bench.suites import SUITES, Workload
from flexjax import masks
from flexjax.types import Implementation, KernelOptions
from lab import dense_oracle, first_hour_cases
from lab.card import Card
from lab.first_hour_cases import Case
from lab.first_hour_pool import MARK, Answer, Task

Options = dict[str, typing.Any]
"""Fields of KernelOptions that differ from the default."""


def on_tpu() -> bool:
    return jax.devices()[0].platform == "tpu"


def kernels_here() -> typing.Literal["mosaic_gpu", "mosaic_tpu"]:
    """The backend with the kernels of this device; those of GPUs where it is neither a GPU nor a TPU."""
    return "mosaic_tpu" if on_tpu() else "mosaic_gpu"


# ------------------------------------------------------------------- the card


def facts() -> Answer:
    """{"card": ..., "versions": ..., "families": ..., "platform": that of jax}. Runs a matrix product first.

    card       text by name: the name of the card, its compute capability and, where jax or NVML says, driver, highest SM clock, power
               limit, SMs and memory
    versions   text by package; those that are not installed are left out
    families   what `families` returns: for each way to ask for GPU kernels what came of a plain call
    """
    device = jax.devices()[0]
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((128, 128), jnp.bfloat16)))
    card = Card.open()
    versions = dict(
        python=platform.python_version(), jax=jax.__version__, jaxlib=_version("jaxlib"), flexjax=flexjax.__version__
    )
    versions |= {
        name: _version(name)
        for name in ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "libtpu", "torch", "triton")
    }
    about = {"card": device.device_kind} | (card.facts() if card is not None else {})
    about["compute capability"] = str(getattr(device, "compute_capability", "none"))
    cores = getattr(device, "core_count", None)
    about |= {"cores" if on_tpu() else "SMs": str(cores)} if cores else {}
    memory = (device.memory_stats() or {}).get("bytes_limit")
    about |= {"memory for jax": f"{memory / 2**30:.0f} GiB"} if memory else {}
    versions = {n: v for n, v in versions.items() if v}
    return dict(card=about, versions=versions, families=families(), platform=device.platform)


def _version(package: str) -> str | None:
    """The version of an installed package, as its metadata says; None where it is not installed. It is not imported."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def families() -> list[Answer]:
    """Which ways to ask for kernels this card takes for a plain call: causal, bfloat16, 4096 tokens. Nothing runs; `explain` says it.

    Returns a dict for each way: `options` (fields of KernelOptions), `verdict` ("ok", or the first line of the refusal, a
    NotImplementedError) and, only for "ok", `kernels`: what `flexjax.explain` says about tiles and the backward pass, in one line.
    Other errors are raised.

    Tried are the default, options {}, and on a GPU each value of KernelOptions.instruction but None, and tcgen05 with pairs of CTAs.
    """
    annotation = typing.get_type_hints(KernelOptions)["instruction"]
    named = [
        v for part in (annotation, *typing.get_args(annotation)) for v in typing.get_args(part) if isinstance(v, str)
    ]
    found: list[Answer] = []
    shape = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    tried: list[Options] = [{}, *(dict(instruction=name) for name in dict.fromkeys(named))]
    tried.append(dict(instruction="tcgen05", cta_pairs=True))
    tried = tried[:1] if on_tpu() else tried
    for options in tried:
        asked: typing.Any = dict(
            mask_mod=masks.causal, implementation=kernels_here(), kernel_options=KernelOptions(**options)
        )
        try:
            text = flexjax.explain(shape, shape, shape, **asked)
        except NotImplementedError as refusal:
            found.append(dict(options=options, verdict=_first_line(refusal)))
            continue
        lines = [line.strip() for line in text.splitlines() if "tiles" in line or "backward pass on" in line]
        found.append(dict(options=options, verdict="ok", kernels="; ".join(lines)))
    return found


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type if it has no text; at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ------------------------------------------------------------------- numbers


def numerics(name: str, dtype: str, options: Options, kernels: bool, small: bool) -> Answer:
    """Runs a case twice, output, lse and all gradients, and compares the first run with the oracle and the bits of the two.

    name      in first_hour_cases.CASES
    dtype     of q, k and v
    options   fields of KernelOptions; the case's own are added, and win
    kernels   whether the kernels must run it; else whichever backend the default choice takes
    small     whether the case is reduced for a CPU

    Returns verdict ("ok", "WRONG: what", "refused: why"); notes, the first lines of the fallback warnings; and, unless it is refused,
    ratio: the largest difference over what rounding explains.
    """
    case = first_hour_cases.CASES[name]
    case = first_hour_cases.small(case) if small else case
    asked = options | dict(case.options)
    try:
        return _compared(name, case, dtype, asked, kernels)
    except NotImplementedError as refusal:
        return dict(verdict=f"refused: {_first_line(refusal)}", notes=[])


def _compared(name: str, case: Case, dtype: str, options: Options, kernels: bool) -> Answer:
    """What `numerics` returns for a case that runs: verdict "ok" or "WRONG: what", ratio and notes. Raises NotImplementedError where the
    kernels refuse the case.

    case      that of `name`, already reduced if it is to be small
    options   fields of KernelOptions, those of the case included. Unless they say deterministic=False, two runs must have equal bits
    kernels   whether the kernels must run it; float32 is otherwise compared at what XLA multiplies it in
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first, second = run_case(name, case, dtype, options, kernels_here() if kernels else None)
    notes = sorted({_first_line(w.message) for w in warned if issubclass(w.category, flexjax.FallbackWarning)})  # pyright: ignore[reportArgumentType]
    of_xla = "bfloat16" if on_tpu() else "tf32"  # how XLA multiplies float32 by default
    rounding = of_xla if dtype == "float32" and not kernels else dtype
    want = dense_oracle.with_rounding(first_hour_cases.dense(name, case), rounding)
    ratio, wrong = dense_oracle.compare(first, want)
    fixed = options.get("deterministic", True)
    differ = [n for n in first if first[n].tobytes() != second[n].tobytes()] if fixed else []
    wrong += [f"two runs differ in the bits of {', '.join(differ)}"] if differ else []
    return dict(verdict=f"WRONG: {'; '.join(wrong)}" if wrong else "ok", ratio=ratio, notes=notes)


def run_case(
    name: str, case: Case, dtype: str, options: Options, implementation: Implementation | None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results of two runs of a case: two dicts of float64 numpy arrays by the names of dense_oracle.Results, [B, heads, tokens, dim]
    in either layout: out, dq, dk, dv; lse [B, heads, tokens], dsinks and dlearned if the case has them.

    name             of the case. It is the seed of the arrays (`first_hour_cases.drawn`), so `first_hour_cases.dense` must get the
                     same name and case for the oracle
    case             that of `name`, or `small` of it; its own `options` are not read
    dtype            of q, k, v and the cotangent of out. Sinks and the array that the score function reads ("c", whose gradient is
                     dlearned) are float32, or float64 with "float64"; captured integers are int32
    options          all fields of KernelOptions for the call, those of `case.options` included
    implementation   of flex_attention; None: its default choice

    Slots of q, k and v past a length hold NaN, because what they hold must not matter; the cotangents are numbers there too. Raises
    NotImplementedError where the kernels refuse the case.
    """
    given, captured = first_hour_cases.drawn(name, case)
    for end, names in zip(case.lengths, (("q",), ("k", "v")), strict=True):
        for b, n in enumerate(end or ()):
            for array in names:
                given[array][b, :, n:] = np.nan
    turned = (lambda x: x) if case.layout == "BNTH" else (lambda x: jnp.swapaxes(x, 1, 2))
    stored = "float64" if dtype == "float64" else "float32"
    kept = {n: jnp.asarray(x, stored if n == "c" else None) for n, x in captured.items()}
    learned = {n: kept.pop(n) for n in ("c",) if n in kept}
    inputs = {n: turned(jnp.asarray(given[n], dtype)) for n in "qkv"} | learned
    inputs |= dict(sinks=jnp.asarray(given["sinks"], stored)) if case.sinks else {}
    lengths = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), case.lengths, strict=True))
    words: typing.Any = {n: jnp.asarray(x, jnp.int32) for n, x in lengths.items() if x is not None}
    words |= dict(layout=case.layout, implementation=implementation, kernel_options=KernelOptions(**options))

    def attend(inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        """(out, lse) of the case, in its layout, from `inputs`: q, k, v and, if the case has them, sinks and the array "c". lse is None
        unless the case has it.
        """
        reads = kept | ({"c": inputs["c"]} if "c" in inputs else {})
        mods: typing.Any = {}
        if case.mask is not None:
            mods["mask_mod"] = lambda b, h, q, k: first_hour_cases.MASKS[case.mask or ""](reads, b, h, q, k)
        if case.score is not None:
            apply = first_hour_cases.SCORES[case.score].apply
            mods["score_mod"] = lambda s, b, h, q, k: apply(jnp.tanh, reads, s, b, h, q, k)
        mods |= dict(sinks=inputs["sinks"]) if case.sinks else {}
        arrays = (inputs["q"], inputs["k"], inputs["v"])
        if not case.lse:
            return flexjax.flex_attention(*arrays, **mods, **words), None
        out, more = flexjax.flex_attention(*arrays, return_aux=flexjax.AuxRequest(lse=True), **mods, **words)
        return out, more.lse

    def both(inputs: dict[str, jax.Array], d_out: jax.Array, d_lse: jax.Array) -> typing.Any:
        """((out, lse or None), gradients of the inputs by their names) of the case, in its layout, for the cotangents d_out and d_lse.
        d_lse counts where lse is finite; it is not read if the case has no lse.
        """
        (out, lse), pull = jax.vjp(attend, inputs)
        cotangent = None if lse is None else jnp.where(jnp.isfinite(lse), d_lse, 0.0).astype(lse.dtype)
        return (out, lse), pull((d_out, cotangent))[0]

    step = jax.jit(both)
    d_lse = jnp.asarray(given["d_lse"])
    d_lse = d_lse if case.layout == "BNTH" else jnp.swapaxes(d_lse, 1, 2)
    cotangents = turned(jnp.asarray(given["d_out"], dtype)), d_lse
    runs = []
    for _ in range(2):
        (out, lse), gradients = step(inputs, *cotangents)
        named = dict(out=out, lse=lse) | {"dlearned" if n == "c" else f"d{n}": x for n, x in gradients.items()}
        axes = lambda n, x: x if n in ("dsinks", "dlearned") or case.layout == "BNTH" else jnp.swapaxes(x, 1, 2)
        runs.append({n: np.asarray(axes(n, x), np.float64) for n, x in named.items() if x is not None})
    return runs[0], runs[1]


# ------------------------------------------------------------------- times


def _times(call: Callable[[], object], seconds: float) -> tuple[float, int]:
    """(seconds of a call, number of calls) of back-to-back calls, by the wall clock: four at a time until `seconds` have passed, after
    one that is not timed.
    """
    jax.block_until_ready(call())
    count, start, result = 0, time.perf_counter(), None
    while count == 0 or time.perf_counter() - start < seconds:
        for _ in range(4):
            result = call()
        jax.block_until_ready(result)
        count += 4
    return (time.perf_counter() - start) / count, count


def _watched(call: Callable[[], object], seconds: float) -> Answer:
    """Runs a call back to back for about `seconds`, after two that are not timed: {"seconds": of one call} and, where NVML says, clock
    (MHz), quartiles, power (W) and reasons of the card meanwhile (card.Load).
    """
    jax.block_until_ready(call())
    card = Card.open()
    if card is None:
        return dict(seconds=_times(call, seconds)[0])
    with card.watched() as loads:
        took, _ = _times(call, seconds)
    return dict(seconds=took) | (loads[0]._asdict() if loads else {})


def ceilings(seconds: float, small: bool) -> Answer:
    """What any kernel can reach here: by "matmul bfloat16 N", "matmul float16 N" (square, N = 8192, small 256) and "memory read" (a sum
    over 2 GiB, small 16 MiB of float32) a dict of rate, unit ("FLOP/s" or "B/s"), seconds of one call and, where NVML says, clock,
    quartiles, power and reasons (card.Load).

    seconds   for each of them
    """
    n = 256 if small else 8192
    found: Answer = {}
    for dtype in ("bfloat16", "float16"):
        x = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(dtype)
        product = jax.jit(lambda x: x @ x)
        load = _watched(lambda x=x, product=product: product(x), seconds)
        found[f"matmul {dtype} {n}"] = load | dict(rate=2.0 * n**3 / load["seconds"], unit="FLOP/s")
    y = jnp.ones(2**22 if small else 2**29, jnp.float32)
    total = jax.jit(jnp.sum)
    load = _watched(lambda: total(y), seconds)
    found["memory read"] = load | dict(rate=4.0 * y.size / load["seconds"], unit="B/s")
    return found


def workload(suite: str, name: str) -> Workload:
    """The workload of that name in a suite, one of suites.SUITES; raises StopIteration if there is none."""
    return next(p for p in SUITES[suite] if p.name == name)


def sustained(suite: str, name: str, options: Options, seconds: float) -> Answer:
    """The forward pass, and both passes, of a workload back to back: {"forward": a dict, "both": a dict}, each with seconds of one call
    and, where NVML says, clock, quartiles, power and reasons (card.Load).

    suite, name   of the workload
    options       fields of KernelOptions
    seconds       for each of the two
    """
    problem = workload(suite, name)
    arrays, array = gpu_peers.on_device(problem)
    attend = gpu_peers.flexjax(problem, **options)
    forward = jax.jit(lambda q, k, v: attend(q, k, v, array))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> typing.Any:
        """(out, gradients of q, k and v), by the forward and the backward pass; the gradient of what the score mod reads is not computed."""
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, array), q, k, v)
        return out, pull(d_out)

    step = jax.jit(both)
    qkv = arrays["q"], arrays["k"], arrays["v"]
    return dict(
        forward=_watched(lambda: forward(*qkv), seconds),
        both=_watched(lambda: step(*qkv, arrays["d_out"]), seconds),
    )


def tune(suite: str, name: str, options: Options, seconds: float) -> Answer:
    """What `flexjax.autotune` finds for a workload in `seconds`; nothing is written to the user's file.

    suite, name   of the workload
    options       fields of KernelOptions

    Returns a dict. backend: its name. passes: for each pass that was timed, by name, a dict of `default` (seconds of the tile that ran
    first, which is the default one if it runs), `fastest` (seconds of the fastest tile), `gain` (the first over the second), `tile`
    (fields of the fastest tile) and `timed` (number of tiles that ran). options: the fields of KernelOptions that differ from the
    defaults after tuning. finished: whether all candidates were tried.
    """
    problem = workload(suite, name)
    arrays, array = gpu_peers.on_device(problem)
    words: typing.Any = dict(mask_mod=gpu_peers.mask_mod_of(problem), score_mod=gpu_peers.score_mod_of(problem, array))
    found = flexjax.autotune(
        arrays["q"], arrays["k"], arrays["v"],
        seconds=seconds, cache=False, progress=False, kernel_options=KernelOptions(**options), **words,
    )  # fmt: skip
    passes: Answer = {}
    for which, timings in itertools.groupby(found.timings, key=lambda t: t.which):
        ran = [t for t in timings if t.seconds is not None]
        if ran:
            fastest = min(ran, key=lambda t: t.seconds or 0.0)
            default = ran[0].seconds or 0.0
            passes[which] = dict(
                default=default,
                fastest=fastest.seconds,
                tile=dict(fastest.tile),
                timed=len(ran),
                gain=default / (fastest.seconds or 1.0),
            )
    chosen = {
        f.name: v for f in dataclasses.fields(KernelOptions) if (v := getattr(found.options, f.name)) != f.default
    }
    return dict(backend=found.backend, passes=passes, options=chosen, finished=found.finished)


TASKS: dict[str, Callable[..., Answer]] = dict(
    facts=facts, numerics=numerics, ceilings=ceilings, sustained=sustained, tune=tune
)


def run_here(task: Task) -> Answer:
    """Runs a task in this process; returns its answer.

    task   a dict of `task`, a name in TASKS, and `arguments`, the keywords of that function

    The answer is what the function returns, or {"failed": why} if it raises an Exception, whose traceback goes to stderr; both with
    `seconds_taken`.
    """
    start = time.monotonic()
    try:
        answer = TASKS[task["task"]](**task["arguments"])
    except Exception as error:
        traceback.print_exc()
        answer = dict(failed=f"{type(error).__name__}: {_first_line(error)}")
    return answer | dict(seconds_taken=time.monotonic() - start)


def main() -> int:
    """Runs the task of each line of stdin, a JSON object of `task` and `arguments`, and prints its answer as a line of MARK and JSON;
    returns 0 at the end of stdin.
    """
    for line in sys.stdin:
        print(MARK + json.dumps(run_here(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
