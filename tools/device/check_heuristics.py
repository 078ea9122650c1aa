"""Whether the tiles that run by themselves are near the best:
`PYTHONPATH=. python3 tools/device/check_heuristics.py`.

Not collected by pytest. Runs `flexjax.autotune` on problems of the benchmark and prints how much longer the
heuristics' tile, its first candidate, takes than the fastest, for the forward pass and for both passes. Fails where
that is over 5%, or where the time was up before any other candidate was tried.

    --suite NAME      of bench/suites.py
    --problems TEXT   the problems of these names, separated by semicolons
    --seconds N       for each problem
    --within X        the most that a heuristic's tile may take, in times of the fastest
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

PROBLEMS = (
    "full d128;causal d128;causal d64;full d64;causal grouped d128;causal d256;window 1025 d128;12 documents d128;"
    "prefix 1024 d128;ALiBi causal d128;soft cap causal d128;relative bias causal d64"
)
PASSES = ("forward", "backward")


def search(problem: Any, seconds: float) -> Any:
    """The result of `flexjax.autotune` on the problem, with all its timings.

    seconds   that it may take
    """
    import jax

    import flexjax
    from bench import gpu_peers
    from bench.suites import MODS

    arrays, array = gpu_peers.on_device(problem)
    words: dict[str, Any] = {}
    if problem.mask != "full":
        allowed, length = problem.allowed(), problem.length
        words["block_mask"] = flexjax.create_block_mask(lambda b, h, q, kv: allowed(q, kv), None, None, length, length)
    if problem.mod:
        apply = MODS[problem.mod].apply
        words["score_mod"] = lambda s, b, h, q, kv: apply(array, s, h, q, kv)
    jax.clear_caches()
    return flexjax.autotune(arrays["q"], arrays["k"], arrays["v"], seconds=seconds, cache=False, **words)


def ratios(timings: Sequence[Any]) -> dict[str, float | None]:
    """For each pass: the time of its first candidate that ran over that of its fastest; None where fewer than two ran."""
    found: dict[str, float | None] = {}
    for which in PASSES:
        ran = [t.seconds for t in timings if t.which == which and t.seconds is not None]
        found[which] = ran[0] / min(ran) if len(ran) > 1 else None
    return found


def main() -> int:
    """Tunes every problem and prints the table; returns the exit status, 1 where a heuristic's tile takes more than
    --within times the fastest, or fewer than two tiles of a pass ran.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="gpu")
    parser.add_argument("--problems", default=PROBLEMS)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--within", type=float, default=1.05)
    arguments = parser.parse_args()
    from bench.suites import SUITES

    rows, failed = [], False
    for name in arguments.problems.split(";"):
        tuning = search(next(p for p in SUITES[arguments.suite] if p.name == name), arguments.seconds)
        print(f"\n{name}\n{tuning}", flush=True)
        cells = []
        for which, ratio in ratios(tuning.timings).items():
            tried = sum(t.which == which for t in tuning.timings)
            failed |= ratio is None or ratio > arguments.within
            cells.append(f"{'-' if ratio is None else f'{ratio:.3f}'} of {tried}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    print("\n| problem | forward: heuristics over fastest, of so many tiles | both passes |\n|---|---|---|")
    print("\n".join(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
