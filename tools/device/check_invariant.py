"""Compares bits of `KernelOptions(invariant=True)` on a GPU, and times it: `PYTHONPATH=. python3 tools/device/check_invariant.py`.

Not collected by pytest. First a line for each call with what the option costs: the time of a pass, and that of the same call
without. Then a line for each way to compute the tokens of problems (tests/door/same_bits.py): of how many problems, and how many
numbers of out and lse have other bits than in one full pass, which must be 0. Programs are compiled side by side. The exit status is 1 where bits
differ or a way raises.

    --seconds N    begin no way after so many seconds (35); those that run then end first
    --only TEXT    only ways whose names have this text
    --from N       the ways from number N on, those that the time did not suffice for
    --costs N      so many lines of costs (6)
    --interpret    ways in the simulator on a CPU, small, no costs
"""

import argparse
import concurrent.futures
import dataclasses
import statistics
import sys
import time
import typing

import jax
import jax.numpy as jnp

import flexjax
from flexjax import KernelOptions, masks, mods, paged
from tests.door.same_bits import CUT, WAYS, Found, Problem, differences, full

BASE = Problem(T=1000, N=4, M=2, D=128, E=128, dtype="bfloat16", score="", implementation="mosaic_gpu")
PROBLEMS = {
    "d128 causal": BASE,
    "d64 ALiBi": dataclasses.replace(BASE, D=64, E=64, score="alibi"),
    "d128 ALiBi window sinks": dataclasses.replace(BASE, score="alibi", mask="window", sinks=True),
    "d64 float16 window": dataclasses.replace(BASE, D=64, E=64, dtype="float16", mask="window"),
    "d128 soft cap": dataclasses.replace(BASE, score="softcap"),
    "d256 wave": dataclasses.replace(BASE, D=256, E=256, score="wave"),
    "d96 prefix": dataclasses.replace(BASE, D=96, E=96, mask="prefix"),
}


class Cost(typing.NamedTuple):
    """A call that is timed with the option and without; of pages: one token of each request."""

    name: str
    dim: int
    score: str = ""
    mask: typing.Any = masks.causal
    T: int = 2048
    batch: int = 8
    pages: bool = False
    gradients: bool = False


COSTS = (
    Cost("d128 causal", 128),
    Cost("d64 causal", 64),
    Cost("d128 ALiBi causal", 128, "alibi"),
    Cost("d64 ALiBi causal", 64, "alibi"),
    Cost("d128 causal, both passes", 128, gradients=True),
    Cost("d256 causal", 256),
    Cost("d128 soft cap causal", 128, "softcap"),
    Cost("d128 decode, 64 requests of 2000", 128, batch=64, pages=True),
    Cost("d128 window of 500", 128, mask=masks.sliding_window(500)),
    Cost("d128 full", 128, mask=None),
)
HEADS, KEY_HEADS, PAGE = 16, 4, 64


def score_of(name: str) -> typing.Any:
    return {"alibi": mods.alibi(HEADS), "softcap": mods.softcap(20.0)}.get(name)


def program(cost: Cost, invariant: bool) -> typing.Any:
    """The call as a compiled function without arguments."""
    options = {"kernel_options": KernelOptions(invariant=invariant), "implementation": "mosaic_gpu"}
    keys = jax.random.split(jax.random.key(0), 3)
    made = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    mods_of = {"score_mod": score_of(cost.score), "mask_mod": cost.mask}
    if cost.pages:
        number = cost.T // PAGE
        pools = (made(key, cost.batch * number, PAGE, KEY_HEADS, cost.dim) for key in keys[1:])
        table = jnp.arange(cost.batch * number, dtype=jnp.int32).reshape(cost.batch, number)
        uses = paged.table(cost.batch, number, cost.batch * number, PAGE).uses
        held = paged.PageTable(table, jnp.full(cost.batch, 2000, jnp.int32), uses)
        arrays = (made(keys[0], cost.batch, 1, HEADS, cost.dim), paged.PagedCache(*pools), held)
        call = lambda q, cache, table: flexjax.paged_attention(q, cache, table, **mods_of, **options)
    else:
        heads = (HEADS, KEY_HEADS, KEY_HEADS)
        arrays = tuple(made(key, cost.batch, cost.T, n, cost.dim) for key, n in zip(keys, heads, strict=True))
        attend = lambda q, k, v: flexjax.flex_attention(q, k, v, **mods_of, **options)
        loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
        call = jax.grad(loss, argnums=(0, 1, 2)) if cost.gradients else attend
    compiled = jax.jit(call).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def line_of(cost: Cost, calls: tuple[typing.Any, typing.Any]) -> str:
    times: tuple[list[float], list[float]] = ([], [])
    jax.block_until_ready([call() for call in calls])
    for _ in range(7):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(8)])
            found.append((time.perf_counter() - start) / 8)
    plain, fixed = (1e3 * statistics.median(x) for x in times)
    return f"{cost.name:34} {fixed:8.3f} ms, without {plain:8.3f}: {fixed / plain:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=35)
    parser.add_argument("--only", default="")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--costs", type=int, default=6)
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    more: dict[str, typing.Any] = {}
    if args.interpret:
        more = {"options": KernelOptions(invariant=True, interpret=True), "T": 140, "N": 2, "M": 1}
    problems = {name: dataclasses.replace(p, **more) for name, p in PROBLEMS.items()}
    rows = [
        (name, way)
        for way in WAYS
        for name, p in problems.items()
        if "mesh" not in way  # one device
        and not ("packed" in way and p.score)  # refused
        and (p.cuts or not way.startswith(CUT))
    ]
    # a row of each problem and of each way among the first ones
    rows.sort(key=lambda row: (list(WAYS).index(row[1]) + list(problems).index(row[0])) % 7)
    rows = [(n, *row) for n, row in enumerate(rows) if args.only in row[1] and n >= args.first]
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    failed, late = 0, 0
    table: dict[str, list[int]] = {}
    with concurrent.futures.ThreadPoolExecutor(1 if args.interpret else 8) as pool:
        costs = [] if args.interpret else COSTS[: args.costs]
        timed = [tuple(pool.submit(program, cost, invariant) for invariant in (True, False)) for cost in costs]
        for cost, (fixed, plain) in zip(costs, timed, strict=True):
            try:
                print(line_of(cost, (plain.result(), fixed.result())), flush=True)
            except Exception as error:  # the others are still worth timing
                failed += 1
                print(f"{cost.name}: {type(error).__name__}: {error}"[:300], flush=True)
        whole: dict[str, concurrent.futures.Future[Found]] = {
            name: pool.submit(full, p) for name, p in problems.items()
        }

        def compare(name: str, way: str) -> int | None:
            if time.perf_counter() - began > args.seconds:
                return None
            return differences(problems[name], way, whole[name].result())

        found = {row: pool.submit(compare, *row[1:]) for row in rows}
        for (number, name, way), result in found.items():
            try:
                count = result.result()
            except Exception as error:
                failed += 1
                print(f"{number:3} {name}, {way}: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            if count is None:
                late += 1
                continue
            failed += count > 0
            table.setdefault(way, []).append(count)
            if count:
                print(f"{number:3} {name}, {way}: {count} numbers differ", flush=True)
    for way in (way for way in WAYS if way in table):
        print(f"{way:34} {len(table[way])} problems, {sum(table[way])} numbers differ")
    checked = sum(map(len, table.values()))
    print(f"{checked} compared, {failed} failed, {late} left by the time, {time.perf_counter() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
