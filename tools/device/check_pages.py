"""paged_attention on a GPU against its definition: `PYTHONPATH=. python3 tools/device/check_pages.py`.

Not collected by pytest. The checks of tests/backends/mosaic_gpu/test_pages.py and the tests of tests/paged/test_on_kernels.py that count no
copies, all of which run in the simulator there. Each line ends with the seconds of its check.

    --instruction mma    the kernels on mma.sync
    --card 8.0           with it, the tiles and the way of copying of another compute capability
    --only TEXT          the checks whose names match one of these shell patterns, separated by commas
"""

import argparse
import dataclasses
import fnmatch
import functools
import sys
import time
import traceback
import typing

from flexjax.backends.mosaic_gpu.machine import mma_cards
from tests.backends.mosaic_gpu import test_pages
from tests.paged import test_on_kernels


def main() -> int:
    """Prints a line for each check; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruction", choices=["mma"])
    parser.add_argument("--card")
    parser.add_argument("--only", default="*")
    args = parser.parse_args()
    if args.card and args.instruction != "mma":
        parser.error("--card goes with --instruction mma")
    test_pages.INSTRUCTION = args.instruction
    if args.card:
        mma_cards.CARDS["9.0"] = dataclasses.replace(mma_cards.CARDS[args.card], capability="9.0")
    checks: dict[str, tuple[typing.Any, ...]] = {name: (test_pages.check_case, name) for name in test_pages.CASES}
    checks |= {
        check.__name__: (check,)
        for check in (
            test_pages.check_ragged,
            test_pages.check_tree,
            test_pages.check_bits,
            test_pages.check_steps,
            test_pages.check_many_queries,
            test_pages.check_many_ragged,
        )
    }
    checks |= {" ".join(map(str, row)): (test_pages.check_quantised, *row) for row in test_pages.QUANTISED}
    prefill = test_pages.check_prefill_in_pages
    checks |= {
        f"prefill in pages of {page}, head dim {dim}": (prefill, page, hole, dim)
        for page, hole, dim in test_pages.PREFILL
    }
    runs = {name: functools.partial(check, *arguments, interpret=False) for name, (check, *arguments) in checks.items()}
    test_on_kernels.INTERPRET, test_on_kernels.INSTRUCTION = False, args.instruction
    gpu = test_on_kernels.GPU
    runs["a prompt in any cut"] = lambda: test_on_kernels.test_a_prompt_in_any_cut(gpu)
    runs["hidden places"] = lambda: test_on_kernels.test_what_lies_in_hidden_places_does_not_matter(gpu)
    runs["a shared prefix"] = lambda: test_on_kernels.test_a_shared_prefix(gpu)
    for n in (3, 32, 33):
        at_the_ends = test_on_kernels.test_lengths_at_the_ends_of_pages_and_chunks
        runs[f"lengths at ends of pages and chunks, {n} queries"] = functools.partial(at_the_ends, gpu, n)
    for group, n in ((7, 9), (5, 13), (12, 1), (71, 1)):
        few = functools.partial(test_on_kernels.test_rows_that_fill_no_tile, gpu, group, n)
        runs[f"{group * n} rows of groups of {group}"] = few
    for n in (1, 5):
        quantised = functools.partial(test_on_kernels.test_a_quantised_cache_against_float64, n)
        runs[f"a quantised cache against float64, {n} queries"] = quantised
    for n in (1, 5):
        bits = test_on_kernels.test_bits_of_a_request_whose_keys_are_split
        runs[f"bits of a request whose keys are split, {n} queries"] = functools.partial(bits, gpu, n)
    runs = {name: run for name, run in runs.items() if any(fnmatch.fnmatch(name, p) for p in args.only.split(","))}
    failed = 0
    for name, check in runs.items():
        began = time.monotonic()
        try:
            check()
            print(f"{name}: right ({time.monotonic() - began:.0f} s)", flush=True)
        except Exception:  # the others are still worth checking
            failed += 1
            print(f"{name}: WRONG\n{traceback.format_exc()}", flush=True)
    print(f"{len(runs) - failed} of {len(runs)} right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
