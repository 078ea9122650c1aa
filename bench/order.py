"""`python -m bench --suite order`, on a GPU: the backward pass in a fixed order compared with any order.

The order is that in which CTAs add their parts to dQ: fixed gives the same bits each time, any order is that in which the CTAs
finish. Published tables use powers of two as lengths, where a schedule may be at its best. This suite uses lengths and head
counts that fill the SMs badly, and prints the worst ratio of fixed over any order. Each time is that of back-to-back launches;
measurements of the two orders alternate.
"""

import concurrent.futures
import statistics
import sys
import time
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks

ROUNDS, SECONDS = 5, 0.02
"""Number of measurements of each order, and the least duration of one in seconds."""
FEW = 4 * 132
"""Heads times key tiles; below this number the CTAs fill the SMs of an H100 or H200 fewer than four times."""


class Case(typing.NamedTuple):
    """A workload of the suite: causal attention, batch 1, as many keys as queries, bfloat16.

    dim      head dim
    heads    number of query heads and of key heads
    tokens   number of queries and of keys
    """

    dim: int
    heads: int
    tokens: int

    @property
    def limit(self) -> float:
        """The largest allowed ratio, time in a fixed order over time in any order: 1.25 if heads times key tiles of 128 are fewer than
        FEW, else 1.15.
        """
        return 1.25 if self.heads * -(-self.tokens // 128) < FEW else 1.15

    def __str__(self) -> str:
        """The case in words, such as "causal d128 16 heads 2560"."""
        return f"causal d{self.dim} {self.heads} heads {self.tokens}"


LENGTHS: dict[tuple[int, int], tuple[int, ...]] = {
    (128, 4): (2048, 4096, 7168, 10240, 18432),
    (128, 8): (3072, 5632),
    (128, 16): (2048, 2560, 5120, 6144, 9216, 10240, 12288, 14336, 18432, 20480),
    (128, 32): (2048, 4608, 10240),
    (128, 64): (2560, 5120),
    (64, 4): (4096, 10240, 20480),
    (64, 8): (2048, 5120),
}
"""Causal attention alone: elsewhere both settings run the same program (hopper_fused_choice.adds_in_order)."""
CASES = [Case(*key, tokens) for key, lengths in LENGTHS.items() for tokens in lengths]


class Compiled(typing.NamedTuple):
    """The compiled passes of a case.

    forward    (q, k, v) -> the pull-back of jax.vjp, which has the residuals
    backward   (pull-back, d_out) -> the gradients of q, k and v
    """

    forward: typing.Any
    backward: typing.Any


def build(case: Case, deterministic: bool) -> Compiled:
    """Compiles the two passes of a case for the default device, apart, so that the backward pass is timed alone.

    deterministic   whether dQ additions have a fixed order
    """
    options = flexjax.KernelOptions(deterministic=deterministic)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """out of the case, [1, T, heads, D], by the Mosaic GPU kernels alone: raises NotImplementedError if they refuse it."""
        out: typing.Any = flexjax.flex_attention(
            q, k, v, mask_mod=masks.causal, kernel_options=options, implementation="mosaic_gpu"
        )
        return out

    array = jax.ShapeDtypeStruct((1, case.tokens, case.heads, case.dim), jnp.bfloat16)
    forward = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1]).lower(array, array, array)
    backward = jax.jit(lambda pull, d_out: pull(d_out)).lower(forward.out_info, array)
    return Compiled(forward.compile(), backward.compile())


def seconds(case: Case, both: tuple[Compiled, Compiled]) -> tuple[float, float]:
    """Times the backward pass of a case in a fixed order and in any order; returns the seconds of one call in each.

    both   the compiled passes, fixed order first

    Each time is the median of ROUNDS measurements, which alternate between the two orders; a measurement is back-to-back calls, at least
    four, for at least SECONDS.
    """
    keys = jax.random.split(jax.random.key(case.tokens), 4)
    q, k, v, d_out = (jax.random.normal(key, (1, case.tokens, case.heads, case.dim), jnp.bfloat16) for key in keys)
    pulls = [compiled.forward(q, k, v) for compiled in both]
    times: tuple[list[float], list[float]] = ([], [])
    jax.block_until_ready([compiled.backward(pull, d_out) for compiled, pull in zip(both, pulls, strict=True)])
    for _ in range(ROUNDS):
        for compiled, pull, taken in zip(both, pulls, times, strict=True):
            count, begin = 0, time.perf_counter()
            while count < 2 or time.perf_counter() - begin < SECONDS:
                done = [compiled.backward(pull, d_out) for _ in range(4)]
                jax.block_until_ready(done)
                count += 4
            taken.append((time.perf_counter() - begin) / count)
    return statistics.median(times[0]), statistics.median(times[1])


def compile_all(cases: Sequence[Case]) -> dict[Case, tuple[Compiled, Compiled]]:
    """The compiled passes of every case, fixed order first; several compile at a time, and nothing runs meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        orders = [threads.map(lambda case, fixed=fixed: build(case, fixed), cases) for fixed in (True, False)]
        return {case: (fixed, any_order) for case, fixed, any_order in zip(cases, *orders, strict=True)}


def main() -> int:
    """Runs all cases; prints one line for each, then the worst ratio for each limit. Returns 1 if any case exceeds its limit,
    else 0.
    """
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, flexjax {flexjax.__version__}")
    return report(compile_all(CASES))


def report(compiled: dict[Case, tuple[Compiled, Compiled]]) -> int:
    """Times the compiled cases one after the other; prints a line of a Markdown table for each, then the worst and the median ratio of the
    cases of each limit. Returns 1 if any case exceeds its limit, else 0.
    """
    print("| problem | fixed ms | any ms | fixed / any | allowed |\n|---|---|---|---|---|")
    found: dict[Case, float] = {}
    for case, both in compiled.items():
        a, b = seconds(case, both)
        found[case] = a / b
        over = " (over)" if a / b > case.limit else ""
        print(f"| {case} | {1e3 * a:.3f} | {1e3 * b:.3f} | {a / b:.2f}{over} | {case.limit} |", flush=True)
    for limit in sorted({case.limit for case in found}):
        ratios = {case: ratio for case, ratio in found.items() if case.limit == limit}
        worst = max(ratios, key=lambda case: ratios[case])
        print(f"allowed {limit}: worst {ratios[worst]:.2f} ({worst}), median {statistics.median(ratios.values()):.2f}")
    return int(any(ratio > case.limit for case, ratio in found.items()))


if __name__ == "__main__":
    sys.exit(main())
