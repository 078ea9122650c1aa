"""The GPU kernels against the oracle, on a GPU: `PYTHONPATH=. python3 tools/device/check_device.py`.

Not collected by pytest: it needs a Hopper GPU and minutes. Tasks are shared out over worker processes, because
compiling is what takes the time; a process that dies is replaced, and the task that it was running counts as failed.
A task is a tuple of strings, its kind first:

    conformance   the cases of `tests/cases/calls.py`, results and gradients, bit for bit the same twice
    large_scores  scores that are very large (tests/cases/large_scores.py)
    origins       calls on a part of a larger problem (tests/cases/placed.py)
    golden        the cases of a folder of golden files (`--golden DIR`), where one is given
    soak          what time is left: random masks, mods, shapes and dtypes against dense float32 attention

The *verdict* of a task is "ok", "refused: why" or "FAILED what".
"""

import argparse
import collections
import dataclasses
import fnmatch
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

DTYPES = ("bfloat16", "float16")
IMPLEMENTATION = "mosaic_gpu"
INSTRUCTION, CARD, SOAK_DTYPES = "CHECK_INSTRUCTION", "CHECK_CARD", "CHECK_SOAK_DTYPES"
"""Variables by which workers learn `--instruction`, `--card` and `--dtypes`."""


def apply_environment() -> None:
    """Makes every call of this process on mosaic_gpu ask for the instruction of the environment, with the tiles and the way of copying
    that the kernels on mma.sync have on its card.
    """
    import flexjax

    instruction, card = os.environ.get(INSTRUCTION), os.environ.get(CARD)
    if card:
        from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS

        CARDS["9.0"] = dataclasses.replace(CARDS[card], capability="9.0")
    if instruction:
        attend = flexjax.flex_attention

        @functools.wraps(attend)
        def asking(*arrays: Any, kernel_options: Any = None, **options: Any) -> Any:
            """flex_attention with the instruction among its options, where the call does not name another backend."""
            if options.get("implementation", IMPLEMENTATION) != IMPLEMENTATION:
                return attend(*arrays, kernel_options=kernel_options, **options)
            asked = dataclasses.replace(kernel_options or flexjax.KernelOptions(), instruction=instruction)
            return attend(*arrays, kernel_options=asked, **options)

        flexjax.flex_attention = asking


# ------------------------------------------------------------------------------------------ the tasks


def conformance(name: str, dtype: str) -> str:
    """Runs a case of tests/cases/calls.py and compares it with the oracle: "ok" or "refused: why".

    Raises AssertionError on a wrong result.
    """
    from tests.cases import CASES

    try:
        return _conform(CASES[name], dtype)
    except NotImplementedError as refusal:
        return f"refused: {refusal}"


def _conform(case: Any, dtype: str) -> str:
    """Runs a case, results and gradients, twice, and compares the two runs and the oracle; returns "ok".

    Raises AssertionError on a wrong result, NotImplementedError where the kernels refuse the case.
    """
    import jax
    import numpy as np

    from tests.backends.conformance import Conformance
    from tests.bound_case import BoundCase

    suite = Conformance()
    suite.implementation = IMPLEMENTATION
    problem = BoundCase(case, dtype, IMPLEMENTATION)
    step = jax.jit(jax.grad(problem.loss, argnums=(0, 1), has_aux=True))
    arrays = problem.arrays()
    (d_inputs, d_learn), results = first = step(*arrays)
    again = step(*arrays)
    same = [
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    ]
    assert all(same), "two runs differ in their bits"
    suite._check_dtypes(results, problem)
    everything = results | {"d:" + n: x for n, x in (d_inputs | d_learn).items()}
    if case.dropout:
        _dropout_beside_xla(problem, everything)
    else:
        suite._compare(everything, problem)
    return "ok"


def _dropout_beside_xla(problem: Any, got: dict[str, Any]) -> None:
    """Compares results and gradients with those of xla in float32, which drops the same entries.

    got   name -> result of the kernels
    """
    import jax
    import numpy as np

    exact = dataclasses.replace(problem, dtype="float32", implementation="xla")
    (d_inputs, d_learn), results = jax.jit(jax.grad(exact.loss, argnums=(0, 1), has_aux=True))(*exact.arrays())
    want = results | {"d:" + n: x for n, x in (d_inputs | d_learn).items()}
    for name, x in got.items():
        _close(name, np.asarray(x, np.float64), np.asarray(want[name], np.float64), problem.dtype)


def check_large_scores(dtype: str, sinks: str, gated: str) -> str:
    """Runs tests/cases/large_scores.py in this dtype and compares the results; returns "ok".

    sinks   "sinks" for a call with sinks, else ""
    gated   "gated" for a score_mod that ends in a product with a number of the head, else ""
    """
    from tests.cases import large_scores

    large_scores.check(IMPLEMENTATION, dtype, sinks == "sinks", gated == "gated")
    return "ok"


def origins(name: str, dtype: str) -> str:
    """Compares a row of tests/cases/placed.py with the dense reference, results and gradients; returns "ok".

    Raises AssertionError where they differ.
    """
    from tests.cases import placed

    placed.assert_as_reference(name, IMPLEMENTATION, dtype, 0.05, interpret=False)
    return "ok"


def golden(folder: str, name: str, dtype: str) -> str:
    """Runs a golden case and compares it with its stored result: "ok" or "refused: why".

    folder   of the golden files
    name     of the case
    """
    import jax.numpy as jnp

    run, cases, expected = _golden(folder)
    try:
        worst, failures = run.check_attention(cases.CASES[name], cases, expected, jnp.dtype(dtype), IMPLEMENTATION)
    except NotImplementedError as refusal:
        return f"refused: {refusal}"
    assert not failures, f"{worst:.3g} of what is allowed: " + "; ".join(failures)
    return "ok"


@functools.cache
def _golden(folder: str) -> tuple[Any, Any, Any]:
    """(module run.py of the folder, its cases, its stored results)."""
    spec = importlib.util.spec_from_file_location("golden_run", os.path.join(folder, "run.py"))
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    return run, *run.load_cases(folder)


# --------------------------------------------------------------------------------------------- the soak


def random_problem(seed: int) -> dict[str, Any]:
    """A random problem, fully determined by its seed: name -> plain value."""
    import numpy as np

    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    kv_heads = int(pick(1, 2, 3, 4))
    q_len = int(rng.integers(1, 700))
    row = dict(
        seed=seed,
        batch=int(pick(1, 1, 2, 3)),
        kv_heads=kv_heads,
        heads=kv_heads * int(pick(1, 1, 2, 3, 4)),
        q_len=q_len,
        kv_len=q_len if rng.random() < 0.5 else int(rng.integers(1, 700)),
        dim=int(pick(8, 16, 40, 64, 64, 72, 128, 128, 192, 256)),
        value_dim=None if rng.random() < 0.7 else int(pick(8, 24, 64, 128, 256)),
        dtype=str(pick(*DTYPES)),
        layout=str(pick("BTNH", "BNTH")),
        mask=str(pick(*_masks(None, 1, 1, 1, 1))),
        mod=str(pick(*_mods(1, 1, 1, 1))),
        blocks=bool(rng.random() < 0.5),
        sinks=bool(rng.random() < 0.2),
        deterministic=bool(rng.random() < 0.8),
    )
    if rng.random() < 0.4:  # drawn last, so that all else is what the seed has always given
        row["mod"] = str(pick(*_computed_mods(1, 1, 1, 1)))
    dtypes = os.environ.get(SOAK_DTYPES, ",".join(DTYPES)).split(",")
    return row if row["dtype"] in dtypes else row | dict(dtype=dtypes[seed % len(dtypes)])


def _masks(rng: Any, B: int, N: int, T: int, S: int) -> dict[str, Callable[[], Any]]:
    """Makers of masks, by name. Each draws random numbers from `rng` and returns a mask_mod, or None for no mask.

    B, N, T, S   batch entries, heads, queries, keys
    """
    import jax.numpy as jnp
    import numpy as np

    def documents(by_batch: bool) -> Any:
        """A mask_mod by which tokens see those of their own document; with `by_batch` each batch entry has documents
        of its own.
        """
        ids = jnp.asarray(np.sort(rng.integers(0, 5, (B, max(T, S)) if by_batch else max(T, S))), jnp.int32)
        at = (lambda b, i: ids[b, i]) if by_batch else (lambda b, i: ids[i])
        return lambda b, h, q, k: at(b, q) == at(b, k)

    def lengths() -> Any:
        """A mask_mod that ends the keys of each batch entry at a random length."""
        length = jnp.asarray(rng.integers(0, S + 1, B), jnp.int32)
        return lambda b, h, q, k: k < length[b]

    def window() -> Any:
        """A mask_mod: a causal window of a random width."""
        width = int(rng.integers(1, S + 1))
        return lambda b, h, q, k: (q >= k) & (q - k < width)

    def head_windows() -> Any:
        """A mask_mod: a causal window of a random width for each head."""
        width = jnp.asarray(rng.integers(1, S + 1, N), jnp.int32)
        return lambda b, h, q, k: (q >= k) & (q - k < width[h])

    def prefix() -> Any:
        """A mask_mod: causal, and every query sees a random number of first keys."""
        n = int(rng.integers(0, S + 1))
        return lambda b, h, q, k: (k < n) | (q >= k)

    def flags() -> Any:
        """A mask_mod by which each key is visible or hidden at random, for all queries."""
        flag = jnp.asarray(rng.integers(0, 2, S), bool)
        return lambda b, h, q, k: flag[k]

    def strided() -> Any:
        """A mask_mod by which queries see the keys at distances that are multiples of a random number."""
        n = int(rng.integers(2, 9))
        return lambda b, h, q, k: (q - k) % n == 0

    return dict(
        none=lambda: None,
        causal=lambda: lambda b, h, q, k: q >= k,
        suffix=lambda: lambda b, h, q, k: q + (S - T) >= k,
        window=window,
        head_windows=head_windows,
        prefix=prefix,
        documents=lambda: documents(False),
        batch_documents=lambda: documents(True),
        lengths=lengths,
        flags=flags,
        strided=strided,
        odd_rows_off=lambda: lambda b, h, q, k: (q % 2 == 0) & (k <= q + 3),
    )


def _mods(B: int, N: int, T: int, S: int) -> dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """(shape of the captured array that learns, maker of the score_mod over it), by name.

    B, N, T, S   batch entries, heads, queries, keys
    """
    import jax.numpy as jnp

    return dict(
        none=((), lambda c: None),
        softcap=((), lambda c: lambda s, b, h, q, k: 5 * jnp.tanh(s / 5)),
        gain=((), lambda c: lambda s, b, h, q, k: s * (1 + 0.3 * c)),
        alibi=((N,), lambda c: lambda s, b, h, q, k: s - 0.1 * c[h] * jnp.abs(q - k)),
        batch_head=((B, N), lambda c: lambda s, b, h, q, k: s * jnp.exp(0.2 * c[b, h])),
        row=((T,), lambda c: lambda s, b, h, q, k: s * (1 + 0.3 * c[q])),
        column=((N, S), lambda c: lambda s, b, h, q, k: s + c[h, k]),
        relative=((N, T + S), lambda c: lambda s, b, h, q, k: s + c[h, q - k + S]),
        clipped=((33,), lambda c: lambda s, b, h, q, k: s + c[jnp.clip(q - k + 16, 0, 32)]),
        modular=((16, 8), lambda c: lambda s, b, h, q, k: s + c[q % 16, k % 8]),
        pair=((T, S), lambda c: lambda s, b, h, q, k: s + c[q, k]),
        head_pair=((N, T, S), lambda c: lambda s, b, h, q, k: jnp.tanh(s + c[h, q, k])),
        transposed=((S, T), lambda c: lambda s, b, h, q, k: s + c[k, q]),
        checkerboard=((), lambda c: lambda s, b, h, q, k: jnp.where((q - k) % 2 == 0, s * 0.5, s * 2.0)),
    )


def _computed_mods(B: int, N: int, T: int, S: int) -> dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """Like `_mods`, of captured arrays that are read at computed indices, and of rows that are closed."""
    import jax.numpy as jnp

    pairs = (N + 1) // 2
    return dict(
        pair_of_group=((pairs, T, S), lambda c: lambda s, b, h, q, k: s + c[h // 2, q, k]),
        pair_of_modulo=((2, T, S), lambda c: lambda s, b, h, q, k: s + c[h % 2, q, k]),
        pair_of_batch_head=((B * N, T, S), lambda c: lambda s, b, h, q, k: s + c[b * N + h, q, k]),
        coarse=((N, T // 8 + 1, S // 8 + 1), lambda c: lambda s, b, h, q, k: s + c[h, q // 8, k // 8]),
        slope_of_group=((pairs,), lambda c: lambda s, b, h, q, k: s - 0.1 * c[h // 2] * jnp.abs(q - k)),
        gain_of_group=((pairs,), lambda c: lambda s, b, h, q, k: s * jnp.exp(0.2 * c[h // 2])),
        backwards=((S,), lambda c: lambda s, b, h, q, k: s + c[S - 1 - k]),
        bucket_of_group=((pairs, 33), lambda c: lambda s, b, h, q, k: s + c[h // 2, jnp.clip(q - k + 16, 0, 32)]),
        closed_rows=((S,), lambda c: lambda s, b, h, q, k: jnp.where((q % 5 < 3) | (h == 2), s + c[k], -jnp.inf)),
    )


def _all_mods(B: int, N: int, T: int, S: int) -> dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]]:
    return _mods(B, N, T, S) | _computed_mods(B, N, T, S)


def rounding_of_learned(row: dict[str, Any], arrays: dict[str, Any], learn: Any, sinks: Any, mods: tuple) -> float:
    """The norm that the rounding of the weights gives the error of the gradient of `learn`: the root of the mean square over DRAWS
    random roundings (docs/gradients.md).

    arrays   q, k, v and w, the cotangent of out, in [B, N, T, D] order, float32
    mods     score_mod as a function of `learn`, and mask_mod or None
    """
    import jax
    import jax.numpy as jnp

    q, k, v, w = (arrays[n] for n in "qkvw")
    B, N, T, D = q.shape
    S = k.shape[2]
    k, v = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
    at = jnp.meshgrid(*map(jnp.arange, (B, N, T, S)), indexing="ij")
    raw = jnp.einsum("bhtd,bhsd->bhts", q, k) * D**-0.5
    on = jnp.ones(raw.shape, bool) if mods[1] is None else jnp.vectorize(mods[1])(*at)
    scores = lambda c: raw if mods[0](c) is None else jnp.vectorize(mods[0](c))(raw, *at)
    made, pull = jax.vjp(scores, learn)
    top = sinks[:, None] if row["sinks"] else -jnp.inf
    lse = jnp.logaddexp(jax.nn.logsumexp(jnp.where(on, made, -jnp.inf), -1), top)[..., None]
    p = jnp.where(on & jnp.isfinite(lse), jnp.exp(made - lse), 0.0)
    size = p * jnp.abs(jnp.einsum("bhtd,bhsd->bhts", w, v))

    def squared_norm(key: Any) -> Any:
        off = size * jax.random.uniform(key, p.shape, minval=-1.0)
        # both passes round alike in bfloat16, each for itself in float16
        shared = -p * off.sum(-1, keepdims=True)
        return jnp.sum(pull(shared + off if row["dtype"] == "bfloat16" else shared)[0] ** 2)

    squares = jax.jit(lambda keys: jax.lax.map(squared_norm, keys))(jax.random.split(jax.random.key(0), DRAWS))
    return UNIT[row["dtype"]] * float(jnp.mean(squares)) ** 0.5


DRAWS = 8
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""The largest relative error of a weight rounded to that type."""
SIGMAS = 4.0
"""How many times `rounding_of_learned` an error may be."""


def soak(seed: int) -> str:
    """Runs the random problem of this seed, forward and gradients, against dense float32 attention on the same
    device.

    Returns "ok" or "refused: why"; raises AssertionError on a wrong result.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexjax

    row = random_problem(seed)
    rng = np.random.default_rng(seed + 10**9)
    B, N, M, T, S, D = (row[n] for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", "dim"))
    E, dtype = row["value_dim"] or D, row["dtype"]
    turn = (lambda x: x) if row["layout"] == "BNTH" else (lambda x: jnp.swapaxes(x, 1, 2))
    mask_mod = _masks(rng, B, N, T, S)[row["mask"]]()
    shape, mod_of = _all_mods(B, N, T, S)[row["mod"]]
    shapes = dict(q=(B, N, T, D), k=(B, M, S, D), v=(B, M, S, E), w=(B, N, T, E))
    drawn = {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items()}
    w = drawn.pop("w")
    learn = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    sinks = jnp.asarray(rng.standard_normal(N), jnp.float32)
    masks = dict(mask_mod=mask_mod)
    if mask_mod is not None and row["blocks"]:
        masks = dict(block_mask=flexjax.create_block_mask(mask_mod, B, N, T, S))

    def loss(arrays: dict[str, Any], learn: Any, sinks: Any, **how: Any) -> Any:
        """(a scalar of out and lse, (out, lse)) of the problem.

        arrays         q, k, v in [B, N, T, D] order
        learn, sinks   the learned captured array, and the sinks
        how            further arguments of flex_attention
        """
        out, aux = flexjax.flex_attention(
            *(turn(arrays[n]) for n in "qkv"),
            score_mod=mod_of(learn),
            sinks=sinks if row["sinks"] else None,
            layout=row["layout"],
            return_aux=flexjax.AuxRequest(lse=True),
            **how,
        )
        finite = jnp.where(jnp.isfinite(aux.lse), aux.lse, 0.0)
        return jnp.sum(turn(out).astype(jnp.float32) * w) + jnp.sum(finite), (turn(out), aux.lse)

    own = functools.partial(
        loss,
        **masks,
        implementation=IMPLEMENTATION,
        kernel_options=flexjax.KernelOptions(deterministic=row["deterministic"]),
    )
    step = jax.jit(jax.value_and_grad(own, argnums=(0, 1, 2), has_aux=True))
    try:
        first = step(drawn, learn, sinks)
    except NotImplementedError as refusal:
        return f"refused: {refusal}"
    again = step(drawn, learn, sinks)
    if row["deterministic"]:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"two runs differ in their bits: {row}"
    with jax.default_matmul_precision("highest"):
        dense = functools.partial(loss, mask_mod=mask_mod, implementation="reference")
        in_float32 = {n: x.astype(jnp.float32) for n, x in drawn.items()}
        want = jax.jit(jax.value_and_grad(dense, argnums=(0, 1, 2), has_aux=True))(in_float32, learn, sinks)
        more = SIGMAS * rounding_of_learned(
            row, in_float32 | dict(w=w.astype(jnp.float32)), learn, sinks, (mod_of, mask_mod)
        )
    flat = lambda r: dict(out=r[0][1][0], lse=r[0][1][1], **r[1][0], learn=r[1][1], sinks=r[1][2])
    for name, x in flat(first).items():
        try:
            _close(
                name,
                np.asarray(x, np.float64),
                np.asarray(flat(want)[name], np.float64),
                dtype,
                more * (name == "learn"),
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; {row}") from None
    return "ok"


def _close(name: str, got: Any, want: Any, dtype: str, more: float = 0.0) -> None:
    """Raises AssertionError where `got` has a NaN, is infinite where `want` is not or the other way round, or differs
    too much from `want`.

    The norm of the difference may be 2% (bfloat16) or 0.4% (float16) of norm(want) + 0.05 sqrt(n), for n numbers, and `more`. The
    second term is for sums that cancel, of terms of about 1.
    """
    import numpy as np

    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    assert not np.isnan(got).any(), f"{name}: {int(np.isnan(got).sum())} NaN"
    live = np.isfinite(want)
    assert np.array_equal(np.isfinite(got), live), f"{name}: infinite at other places than expected"
    gap, size = (np.linalg.norm(np.where(live, x, 0)) for x in (np.where(live, got, 0) - np.where(live, want, 0), want))
    allowed = dict(bfloat16=2e-2, float16=4e-3)[dtype] * (size + 0.05 * max(got.size, 1) ** 0.5) + more
    assert gap <= allowed, f"{name}: error {gap:.3g} exceeds {allowed:.3g} (norm {size:.3g}, {got.size} numbers)"


# ------------------------------------------------------------------------------------ sharing them out

Task = tuple[str, ...]


def run_task(task: Task) -> str:
    """The verdict of a task; raises where its result is wrong."""
    kind, *rest = task
    return dict(
        conformance=conformance,
        large_scores=check_large_scores,
        origins=origins,
        golden=golden,
        soak=lambda seed: soak(int(seed)),
    )[kind](*rest)


def worker(tasks: list[Task], first_seed: int, until: float) -> None:
    """Runs the tasks in this process, then soak tasks from seed `first_seed` on, until time.time() is `until`.

    It prints '> task' before each task and a line of JSON with the verdict after it.
    """

    def everything() -> Iterator[Task]:
        """The given tasks, then soak tasks without end."""
        yield from tasks
        seed = first_seed
        while True:
            yield ("soak", str(seed))
            seed += 1

    import jax

    apply_environment()
    for i, task in enumerate(everything()):
        if time.time() > until:
            break
        print(">", json.dumps(task), flush=True)
        start = time.monotonic()
        try:
            verdict = run_task(task)
        except Exception as error:
            verdict = f"FAILED {type(error).__name__}: {str(error).strip()[:600]}"
            if not isinstance(error, AssertionError):
                verdict += " | " + " < ".join(
                    f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]
                )
        print(json.dumps(dict(task=task, verdict=verdict, seconds=time.monotonic() - start)), flush=True)
        if i % 16 == 15:
            jax.clear_caches()


def _spawn(index: int, tasks: list[Task], seed: int, until: float, folder: str) -> tuple[subprocess.Popen, str]:
    """Starts a worker process; returns (the process, path of its files without their suffix).

    index    number of the worker
    tasks    to run in it
    seed     of its first soak task
    until    time.time() at which it begins no more tasks
    folder   for what it reads and prints
    """
    path = os.path.join(folder, f"worker{index}-{seed}")
    with open(path + ".tasks", "w") as file:
        json.dump(dict(tasks=tasks, seed=seed, until=until), file)
    # What xla compiles here is only the reference: quickly made is better than fast.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS=flags)
    command = [sys.executable, os.path.abspath(__file__), "--worker", path + ".tasks"]
    with open(path + ".out", "w") as out, open(path + ".err", "w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment), path


def share_out(shares: list[list[Task]], until: float, folder: str) -> list[dict[str, Any]]:
    """Runs one worker for each share of the tasks and returns every result; waits half a minute past `until` for
    tasks that are running.

    shares   the tasks of each worker
    until    time.time() at which workers stop
    folder   for the workers' files

    A result is a dict of task, verdict and seconds.
    """
    running = {i: _spawn(i, share, (i + 1) * 10**6, until, folder) for i, share in enumerate(shares)}
    results: list[dict[str, Any]] = []
    while running:
        time.sleep(0.5)
        for i, (process, path) in list(running.items()):
            late = time.time() > until + 30
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            process.wait()
            del running[i]
            done, open_task = _read(path)
            results += done
            if open_task is None and process.returncode == 0:
                continue
            with open(path + ".err") as err:
                last = (err.read().strip().splitlines() or [""])[-1][:300]
            task = open_task or ["worker", str(i)]
            verdict = "unfinished" if late else f"FAILED process ended with {process.returncode}: {last}"
            results.append(dict(task=task, verdict=verdict, seconds=0.0))
            rest = [t for t in shares[i] if list(t) not in [list(r["task"]) for r in results]]
            seeds = [int(r["task"][1]) for r in results if r["task"][0] == "soak"]
            seed = max([s for s in seeds if s // 10**6 == i + 1], default=(i + 1) * 10**6) + 1
            if time.time() < until - 20:
                running[i] = _spawn(i, rest, seed, until, folder)
    return results


def _read(path: str) -> tuple[list[dict[str, Any]], list[str] | None]:
    """(results that a worker has printed, the task that it was running at the end or None).

    path   of the worker's files without their suffix
    """
    done, open_task = [], None
    with open(path + ".out") as file:
        for line in file:
            if line.startswith("> "):
                open_task = json.loads(line[2:])
            elif line.startswith("{"):
                done.append(json.loads(line))
                open_task = None
    return done, open_task


def summary(results: list[dict[str, Any]]) -> list[str]:
    """Lines of text: how many tasks of each kind have which verdict, the reasons of refusals, and each failure."""
    lines = []
    for kind in dict.fromkeys(r["task"][0] for r in results):
        mine = [r for r in results if r["task"][0] == kind]
        verdicts = collections.Counter(r["verdict"].split(":")[0].split(" ")[0] for r in mine)
        lines.append(f"{kind}: " + ", ".join(f"{n} {v}" for v, n in sorted(verdicts.items())))
        if mine and kind != "worker":
            lines[-1] += f"; slowest {max(r['seconds'] for r in mine):.0f} s"
        reasons = collections.Counter(r["verdict"] for r in mine if r["verdict"].startswith("refused"))
        lines += [f"  {n} x {reason[:200]}" for reason, n in reasons.most_common()]
        lines += [f"  {' '.join(r['task'])}: {r['verdict']}" for r in mine if r["verdict"].startswith("FAILED")]
    return lines


def main() -> int:
    """Runs all tasks, or the one that the arguments name, and prints the summary; returns the exit status, 1 where a
    task failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--golden", help="folder of run.py, cases.py and expected.npz")
    parser.add_argument("--only", default="*", help="comma-separated shell patterns of conformance cases; '' for none")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of the conformance cases and of the soak")
    parser.add_argument("--json", help="write every verdict there")
    parser.add_argument("--golden-only", default="*", help="comma-separated shell patterns of golden cases")
    parser.add_argument("--soak-seed", type=int, help="run one random problem here and say what became of it")
    parser.add_argument("--instruction", choices=("mma", "tcgen05"), help="KernelOptions(instruction=) of every call")
    parser.add_argument("--card", help="compute capability whose tiles and way of copying the kernels on mma.sync take")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.card and args.instruction != "mma":
        parser.error("--card goes with --instruction mma")
    for name, value in ((INSTRUCTION, args.instruction), (CARD, args.card), (SOAK_DTYPES, args.dtypes)):
        if value:
            os.environ[name] = value
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.worker:
        with open(args.worker) as file:
            job = json.load(file)
        worker([tuple(t) for t in job["tasks"]], job["seed"], job["until"])
        return 0
    if args.soak_seed is not None:
        apply_environment()
        print(random_problem(args.soak_seed))
        print(soak(args.soak_seed))
        return 0
    import flexjax.passes.dispatch
    from tests.cases import CASES
    from tests.cases.placed import PLACED

    assert IMPLEMENTATION in flexjax.passes.dispatch.NAMES
    until = time.time() + args.seconds - 35
    names = [n for n in CASES if any(fnmatch.fnmatch(n, pattern) for pattern in args.only.split(","))]
    tasks: list[Task] = [("conformance", n, d) for n in names for d in args.dtypes.split(",")]
    # both dtypes of a case to one process: it computes the expected values once
    per = len(args.dtypes.split(","))
    groups = [tasks[i : i + per] for i in range(0, len(tasks), per)]
    dtypes = args.dtypes.split(",")
    groups.append(
        [
            ("large_scores", dtype, sinks, gated)
            for dtype in dtypes
            for sinks in ("", "sinks")
            for gated in ("", "gated")
        ]
    )
    groups += [[("origins", name, dtype) for dtype in dtypes] for name in PLACED]
    if args.golden:
        _, cases, _ = _golden(args.golden)
        chosen = [n for n in cases.CASES if any(fnmatch.fnmatch(n, p) for p in args.golden_only.split(","))]
        groups += [[("golden", args.golden, n, "bfloat16")] for n in chosen]
    with tempfile.TemporaryDirectory() as folder:
        shares = [[t for g in groups[i :: args.workers] for t in g] for i in range(args.workers)]
        results = share_out(shares, until, folder)
        for line in summary(results):
            print(line, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if any(r["verdict"].startswith("FAILED") for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
