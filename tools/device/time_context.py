"""What a split sequence costs on the GPUs of a machine: `PYTHONPATH=. python3 tools/device/time_context.py`.

Not collected by pytest: it needs two GPUs or more. For each case (bfloat16, head dim 128) it prints the time of forward and backward pass
on one GPU and on all, the speed on all divided by the number of GPUs times the speed on one, what a device receives, how even the work
is, and the error of outputs and gradients against those of one GPU. Then the memory of a long call by "ring" divided by that of the
part of one device computed on one GPU, from XLA's account of the compiled programs. Times are wall-clock, medians over rounds in each
of which every program is timed once.

    --tokens N        sequence length (131072)
    --heads N         query and key heads (8)
    --cases TEXT      those whose names contain one of these, by commas
    --method NAME     of ContextParallel ("auto")
    --rounds N        how often each program is timed (5)
    --forward         time the forward pass alone
    --merged          also time the program that computes all rows in both stages of "neighbours" and merges them, where few rows
                      visit received keys
    --memory N        tokens of the long call, 0 for none (1048576)
"""

import argparse
import functools
import re
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks
from flexjax.context import lists as context_lists

CALLS = 5
"""Calls back to back whose mean is one time of a program."""


def documents(tokens: int) -> np.ndarray:
    """The document of each token: lengths between some and half of the sequence, 22 documents in 131072 tokens."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(8.5, 1.2, 4000).astype(int) + 16, tokens // 2)
    ends = np.cumsum(lengths)
    return np.searchsorted(ends[ends < tokens], np.arange(tokens), side="right").astype(np.int32)


def cases(tokens: int) -> dict[str, tuple[Callable, bool]]:
    """By name: mask_mod, and whether there is a learned relative bias."""
    return {
        "causal": (masks.causal, False),
        "causal, relative bias": (masks.causal, True),
        "window 4096": (lambda b, h, i, j: (i >= j) & (i - j < 4096), False),
        "documents": (flexjax.and_masks(masks.causal, masks.document(documents(tokens))), False),
        "prefix": (lambda b, h, i, j: (i >= j) | (j < tokens // 4), False),
    }


def step_of(mask_mod: Callable, biased: bool, tokens: int, forward: bool, context: Any = None) -> Callable:
    """The function that is timed: (q, k, v, table) -> out with `forward`, otherwise -> (gradients, out).

    biased    whether the learned relative bias `table` is added to the scores, and has a gradient too
    tokens    sequence length
    context   ContextParallel of the call; None: it is not split
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        """The result of attention."""
        mod = (lambda s, b, h, i, j: s + table[h, i - j + tokens - 1]) if biased else None
        return flexjax.flex_attention(q, k, v, score_mod=mod, mask_mod=mask_mod, context=context)

    def loss(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(a scalar of the result of attention, the result)."""
        out = attend(*given)
        return (out.astype(jnp.float32) * jnp.cos(jnp.arange(out.shape[-1]))).sum(), out

    return attend if forward else jax.grad(loss, argnums=(0, 1, 2, 3) if biased else (0, 1, 2), has_aux=True)


def received(text: str) -> float:
    """Megabytes that a device receives in all collectives of a program, from the text of its HLO."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute"
    size = {"f32": 4, "bf16": 2, "s32": 4}
    total = 0
    for shapes in re.findall(rf"= (.*?) (?:{kinds})(?:-done)?\(", text):
        of = re.findall(r"(f32|bf16|s32)\[([\d,]*)\]", shapes)
        total += sum(size[d] * int(np.prod([int(n) for n in s.split(",") if n])) for d, s in of)
    return total / 1e6


def gap(got: Any, want: Any) -> float:
    """The largest difference over the largest magnitude, of all arrays."""
    in_float32 = lambda x: np.asarray(x.astype(jnp.float32) if hasattr(x, "astype") else x, np.float32)
    pairs = [(in_float32(a), in_float32(b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def compare(name: str, options: argparse.Namespace) -> float:
    """Times the case `name` and prints its line; returns the error of its results against those of one GPU (`gap`)."""
    tokens, heads, n = options.tokens, options.heads, jax.device_count()
    mask_mod, biased = cases(tokens)[name]
    began = time.perf_counter()
    layout = flexjax.context_layout(mask_mod, tokens, devices=n)
    made = time.perf_counter() - began
    mesh = jax.make_mesh((n,), ("sp",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 4)
    given = [jax.random.normal(key, (1, tokens, heads, 128), jnp.bfloat16) for key in keys[:3]]
    table = jax.random.normal(keys[3], (heads, 2 * tokens - 1), jnp.float32)
    one = [*given, table]
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    all_of_them = [*(place(layout.shard(x), P(None, "sp")) for x in given), place(table, P())]
    make = functools.partial(step_of, mask_mod, biased, tokens, options.forward)
    context = flexjax.ContextParallel("sp", layout, options.method)

    def over_all(few: float) -> Any:
        """The program over all GPUs; few: the share of a device's query blocks up to which rows get a stage of their own."""
        with unittest.mock.patch.object(context_lists, "FEW", few), jax.set_mesh(mesh):
            return jax.jit(make(context=context)).lower(*all_of_them).compile()

    split = over_all(context_lists.FEW)
    alone = jax.jit(make()).lower(*one).compile()
    got, want = split(*all_of_them), alone(*one)
    back = lambda x: layout.unshard(np.asarray(x.astype(jnp.float32))) if x.ndim == 4 else np.asarray(x)
    error = gap(jax.tree.map(back, got), want)
    del got, want
    programs = {"one": (alone, one), "all": (split, all_of_them)}
    if options.merged:
        programs["merged"] = (over_all(-1.0), all_of_them)
        jax.block_until_ready(programs["merged"][0](*all_of_them))
    times: dict[str, list[float]] = {which: [] for which in programs}
    for _ in range(options.rounds):
        for which, (run, arrays) in programs.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                out = run(*arrays)
            jax.block_until_ready(out)
            times[which].append(1e3 * (time.perf_counter() - start) / CALLS)
    t1, tn = (statistics.median(times[which]) for which in ("one", "all"))
    merged = f", merged {statistics.median(times['merged']):.2f} ms" if options.merged else ""
    speed = statistics.median(a / b / n for a, b in zip(times["one"], times["all"], strict=True))
    loads, blocks = np.asarray(layout.loads), np.asarray(layout.blocks_received)
    share = blocks.mean() / max(1, layout.key_blocks.size - layout.key_blocks.shape[1])
    print(
        f"{name:22s} one {t1:8.2f} ms, {n} GPUs {tn:8.2f} ms{merged}, speed / ({n} x one) {speed:.3f}; receives {received(split.as_text()):.1f} MB "
        f"(needs {share:.3f} of an all-gather's blocks); heaviest over mean {loads.max() / loads.mean():.3f}; layout {made:.2f} s; "
        f"differs {error:.1e}",
        flush=True,
    )
    return error


def memory(options: argparse.Namespace) -> None:
    """Prints the bytes of the long call on a device of all, by "ring", over those of its n-th part on one GPU."""
    n, heads = jax.device_count(), options.heads
    mesh = jax.make_mesh((n,), ("sp",), axis_types=(AxisType.Auto,))
    size = lambda c: sum(getattr(c.memory_analysis(), f"{x}_size_in_bytes") for x in ("temp", "argument", "output"))
    shape = lambda tokens, s: jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16, sharding=s)
    empty = lambda s: jax.ShapeDtypeStruct((heads, 1), jnp.float32, sharding=s)
    with jax.set_mesh(mesh):
        layout = flexjax.context_layout(masks.causal, options.memory, devices=n)
        context = flexjax.ContextParallel("sp", layout, "ring")
        spread, whole = NamedSharding(mesh, P(None, "sp")), NamedSharding(mesh, P())
        step = step_of(masks.causal, False, options.memory, False, context)
        split = size(jax.jit(step).lower(*[shape(options.memory, spread)] * 3, empty(whole)).compile())
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tokens = options.memory // n
    step = step_of(masks.causal, False, tokens, False)
    alone = size(jax.jit(step).lower(*[shape(tokens, here)] * 3, empty(here)).compile())
    print(
        f"memory of {options.memory} tokens on {n} by ring over {tokens} on one: {split / alone:.2f} ({split / 1e9:.2f} GB)"
    )


def main() -> int:
    """Times the chosen cases, then compares the memory; returns the exit status, 1 where an error is 3e-2 or more."""
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 131072), ("heads", 8), ("rounds", 5), ("memory", 1 << 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", default="")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--merged", action="store_true")
    options = parser.parse_args()
    chosen = [name for name in cases(options.tokens) if any(part in name for part in options.cases.split(","))]
    worst = max((compare(name, options) for name in chosen), default=0.0)
    if options.memory:
        memory(options)
    return int(not worst < 3e-2)


if __name__ == "__main__":
    sys.exit(main())
