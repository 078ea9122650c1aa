"""Times other configurations of the decode kernel on a GPU: `PYTHONPATH=. python3 tools/device/time_decode.py`.

Not collected by pytest. `python -m flexjax.bench --suite decode` times the kernel as users get it, beside its peers; this tool takes
single cases of that suite, by the times of their kernels, and runs its three plain cases with other tiles, chunks and rings. A line
that fails says why and the others go on. About a minute on an H200, of which most is compilation.

    --only PATTERN   instead, the cases of the suite whose names match (shell pattern), as users get them, with a line for each kernel
    --steps N        measured steps (20)
"""

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Iterator

import jax
import numpy as np

from flexjax.backends.mosaic_gpu import decode_sm90, decode_tiles
from flexjax.bench.decode_cases import DECODE_SUITES, OWN_PEER, DecodeCase
from flexjax.bench.decode_peers import PEERS, Arrays, Outs, Run, compiled_case
from flexjax.bench.kernel_times import kernel_times
from flexjax.prepare import prepare

PLAIN = ("B16 S32k", "B1 S128k", "B64 S4k")
SIZES = ((64, 4, 512), (64, 4, 2048), (64, 2, 1024), (128, 2, 1024), (128, 2, 2048))
"""Keys of a tile, slots of the rings, keys of a chunk."""


def with_sizes(block_kv: int, stages: int, chunk: int) -> Run:
    """The decode kernel with another configuration, for a case without a mod: arrays of the case -> (out,).

    block_kv   keys of a tile
    stages     slots of the rings of key and value tiles
    chunk      keys of a work item
    """

    def run(arrays: Arrays) -> Outs:
        """The result of the decode kernel for the first of the caches in `arrays`, in a tuple."""
        call = prepare(*(arrays[name][0] for name in ("query", "key", "value")), return_aux=None)
        tile = decode_tiles.decode_tile(call.plan)
        sizes: dict[str, int] = dict(block_kv=block_kv, page_rows=block_kv, stages=stages, chunk=chunk)
        tile = dataclasses.replace(tile, programs=jax.devices()[0].core_count, **sizes)
        assert decode_tiles.decode_fits(tile), sizes
        return (decode_sm90.forward(call.plan, call.operands, tile).out,)

    return run


def runs(only: str | None) -> Iterator[tuple[str, DecodeCase, Run | None]]:
    """(text, case, call) of each line of the table; the call is None where it is the one that users get.

    only   shell pattern of case names; None: the cases of PLAIN, as users get them and with each of SIZES
    """
    for case in DECODE_SUITES["decode"]:
        if only is not None and fnmatch.fnmatch(case.name, only):
            yield case.name, case, None
        if only is None and case.name in PLAIN:
            yield case.name, case, None
            for sizes in SIZES:
                yield "{}, {} keys, {} slots, chunks of {}".format(case.name, *sizes), case, with_sizes(*sizes)


def report(text: str, case: DecodeCase, run: Run | None, steps: int, by_kernel: bool) -> None:
    """Measures a call and prints its milliseconds for each cache of the case, and with `by_kernel` those of each kernel.

    text    the start of the line
    run     the call; None: the one that users get
    steps   measured calls
    """
    compiled = compiled_case(OWN_PEER, case, run)
    arrays = compiled.make(compiled.given)
    times = kernel_times(compiled.run, arrays, calls=steps)
    took = sum(times.values()) / case.copies
    print(f"{text:<50} {1e3 * took:8.4f} ms {case.counts('decode')['bytes'] / took / 1e12:5.2f} TB/s", flush=True)
    for name, part in times.items() if by_kernel else ():
        print(f"      {1e3 * part / case.copies:8.4f} ms  {name[:80]}", flush=True)


def same_bits() -> bool:
    """Whether the result of one batch entry has the same bits alone and among 64 batch entries."""
    case = DecodeCase("bits", 64, 4096, mod="relative table")
    among = compiled_case(OWN_PEER, case)
    arrays = among.make(among.given)
    alone = {n: x[:, 5:6] if n in ("query", "key", "value") else x for n, x in arrays.items()}
    alone["lengths"] = arrays["lengths"][5:6]
    call = jax.jit(PEERS[OWN_PEER](dataclasses.replace(case, batch=1)))
    return bool((np.asarray(among.run(arrays)[0][5]) == np.asarray(call(alone)[0][0])).all())


def main() -> int:
    """Prints the table; returns 1 if a call failed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    failed = 0
    for text, case, run in runs(args.only):
        try:
            report(text, case, run, args.steps, args.only is not None)
        except Exception as error:  # the others are still worth measuring
            failed += 1
            print(f"{text:<50} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    equal = same_bits()
    print("bits of a batch entry alone and among 64 are equal:", equal)
    return int(failed > 0 or not equal)


if __name__ == "__main__":
    sys.exit(main())
