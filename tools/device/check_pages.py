"""paged_attention on a GPU against its definition: `PYTHONPATH=. python3 tools/device/check_pages.py`.

Not collected by pytest. The checks of tests/backends/mosaic_gpu/test_pages.py, which run in the simulator there. About half a
minute on an H200.

    --instruction mma    the kernels on mma.sync
    --card 8.0           with it, the tiles and the way of copying of another compute capability
"""

import argparse
import dataclasses
import sys
import traceback
import typing

from flexjax.backends.mosaic_gpu import sm80_cards
from tests.backends.mosaic_gpu import test_pages


def main() -> int:
    """Prints a line for each check; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruction", choices=["mma"])
    parser.add_argument("--card")
    args = parser.parse_args()
    if args.card and args.instruction != "mma":
        parser.error("--card goes with --instruction mma")
    test_pages.INSTRUCTION = args.instruction
    if args.card:
        sm80_cards.CARDS["9.0"] = dataclasses.replace(sm80_cards.CARDS[args.card], capability="9.0")
    checks: dict[str, tuple[typing.Any, ...]] = {name: (test_pages.check_case, name) for name in test_pages.CASES}
    checks |= {
        check.__name__: (check,)
        for check in (
            test_pages.check_ragged,
            test_pages.check_tree,
            test_pages.check_bits,
            test_pages.check_many_queries,
            test_pages.check_many_ragged,
        )
    }
    checks |= {" ".join(map(str, row)): (test_pages.check_quantised, *row) for row in test_pages.QUANTISED}
    checks |= {f"prefill in pages of {row[0]}": (test_pages.check_prefill_in_pages, *row) for row in test_pages.PREFILL}
    failed = 0
    for name, (check, *arguments) in checks.items():
        try:
            check(*arguments, interpret=False)
            print(f"{name}: right", flush=True)
        except Exception:  # the others are still worth checking
            failed += 1
            print(f"{name}: WRONG\n{traceback.format_exc()}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
