"""What each kernel of a step takes, on a GPU: `PYTHONPATH=. python3 tools/device/time_kernels.py --problems TEXT`.

Not collected by pytest. A step is the forward and backward pass together; one line per kernel, the median of several
steps.

    --problems TEXT   of the gpu suite (bench/suites.py), those whose names contain one of these, by semicolons
    --any-order       KernelOptions(deterministic=False)
"""

import argparse
import collections
import functools
import statistics
from collections.abc import Callable
from typing import Any

STEPS = 9


def forward_and_backward(
    attend: Callable[..., Any], learns: bool, /, q: Any, k: Any, v: Any, d_out: Any, array: Any
) -> Any:
    """The result of `attend` and the gradients of q, k, v, and of the captured array where it is learned.

    attend   (q, k, v, array) -> out
    learns   whether the gradient of the captured array is computed
    d_out    cotangent of the result
    array    the captured array of the problem's mod
    """
    import jax

    if learns:
        out, pull = jax.vjp(attend, q, k, v, array)
    else:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, array), q, k, v)
    return out, pull(d_out)


def main() -> None:
    """Prints, for each problem, the milliseconds of a step, the sum of those of its kernels, and of each kernel in the
    order of the step; a kernel that runs several times has a line for each.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="")
    parser.add_argument("--any-order", action="store_true")
    args = parser.parse_args()
    import jax
    from jax.experimental.mosaic.gpu import profiler

    from bench import gpu_peers
    from bench.suites import SUITES

    for problem in SUITES["gpu"]:
        if not any(part in problem.name for part in args.problems.split(";")):
            continue
        arrays, array = gpu_peers.on_device(problem)
        attend = gpu_peers.flexjax(problem, not args.any_order)

        step = jax.jit(functools.partial(forward_and_backward, attend, problem.learns))
        jax.block_until_ready(step(**arrays, array=array))
        measure = profiler.Cupti(finalize=False).measure(step, aggregate=False, iterations=STEPS)
        _, runs = measure(**arrays, array=array)
        times: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
        for run in runs:
            seen: collections.Counter[str] = collections.Counter()
            for name, took in run:
                times[name, seen[name]].append(took)
                seen[name] += 1
        print(f"{problem.name}: {sum(statistics.median(t) for t in times.values()):.3f} ms")
        for (name, _), took in times.items():
            print(f"    {statistics.median(took):8.3f} ms  {name[:90]}", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
