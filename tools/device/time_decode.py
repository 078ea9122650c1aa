"""Times other configurations of the decode kernel on a GPU: `PYTHONPATH=. python3 tools/device/time_decode.py`.

Not collected by pytest. `python -m bench --suite decode` times the kernel as users get it, beside its peers; this tool takes
single cases of that suite, by the times of their kernels, and runs its three plain cases with other tiles, chunks and rings. A line
that fails says why and the others go on. About a minute on an H200, of which most is compilation.

    --only PATTERN       instead, the cases of the suite whose names match (shell pattern), as users get them, with a line for each kernel
    --sizes TEXT         with it, cases without a mod, mask or pages also with these sizes: keys of a tile, slots of the rings, keys of a
                         chunk, as "64,1,512;32,2,512"
    --instruction mma    the decode kernel on mma.sync; each result is compared with that of the kernel for Hopper, and the exit status
                         is 1 where one differs
    --card 8.0           with it, the tiles and the way of copying of another compute capability
    --steps N            measured steps (20)
"""

import argparse
import dataclasses
import fnmatch
import sys
from collections.abc import Iterator

import jax
import numpy as np

from bench import decode_peers
from bench.decode_cases import DECODE_SUITES, OWN_PEER, DecodeCase
from bench.decode_peers import Arrays, Outs, Run, compiled_case
from bench.kernel_times import kernel_times
from flexjax.backends.mosaic_gpu.decode import hopper as decode_hopper
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.decode import mma as decode_mma
from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
from flexjax.backends.mosaic_gpu.machine import mma_cards
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.types import KernelOptions

PLAIN = ("B16 S32k", "B1 S128k", "B64 S4k")
SIZES = ((64, 4, 512), (64, 4, 2048), (64, 2, 1024), (128, 2, 1024), (128, 2, 2048))
MMA_SIZES = ((64, 3, 512), (64, 3, 2048), (64, 2, 1024), (64, 4, 1024), (32, 3, 1024), (32, 4, 1024), (128, 1, 1024))
"""Keys of a tile, slots of the rings, keys of a chunk; the second of the kernel on mma.sync."""
MOST_ERROR = 5e-3
"""The largest norm of a difference from the kernel for Hopper, in norms of the result."""


def with_sizes(instruction: str | None, block_kv: int, stages: int, chunk: int) -> Run:
    """A decode kernel with another configuration, for a case without a mod: arrays of the case -> (out,).

    instruction   "mma" or None
    block_kv      keys of a tile
    stages        slots of the rings of key and value tiles
    chunk         keys of a work item
    """
    sizes: dict[str, int] = dict(block_kv=block_kv, page_rows=block_kv, stages=stages, chunk=chunk)

    def run(arrays: Arrays) -> Outs:
        """The result of the decode kernel for the first of the caches in `arrays`, in a tuple."""
        call = prepare(Arguments(*(arrays[name][0] for name in ("query", "key", "value"))))
        cores = jax.devices()[0].core_count
        if instruction is None:
            tile = dataclasses.replace(decode_hopper_tiles.decode_tile(call.plan), programs=cores, **sizes)
            assert decode_hopper_tiles.decode_fits(tile), sizes
            return (decode_hopper.forward(call.plan, call.operands, tile).out,)
        card = mma_cards.CARDS["9.0"]
        made = dataclasses.replace(decode_mma_tiles.mma_decode_tile(call.plan, card), **sizes)
        assert made.resident_ctas(card), (sizes, card)
        made = dataclasses.replace(made, programs=cores * made.resident_ctas(card))
        return (decode_mma.forward(call.plan, call.operands, made).out,)

    return run


def runs(
    only: str | None, sizes: tuple[tuple[int, int, int], ...], instruction: str | None
) -> Iterator[tuple[str, DecodeCase, Run]]:
    """(text, case, call) of each line of the table.

    only          shell pattern of case names; None: the cases of PLAIN
    sizes         with which cases without a mod, mask or pages run beside those that users get
    instruction   "mma" or None, which every call asks for
    """
    options = KernelOptions(instruction=instruction)  # pyright: ignore[reportArgumentType]  # argparse has checked it
    for case in DECODE_SUITES["decode"]:
        if not (fnmatch.fnmatch(case.name, only) if only is not None else case.name in PLAIN):
            continue
        yield case.name, case, decode_peers.flexjax(case, options)
        for each in () if case.mod or case.page or case.mean else sizes:
            text = "{}, {} keys, {} slots, chunks of {}".format(case.name, *each)
            yield text, case, with_sizes(instruction, *each)


def difference(case: DecodeCase, run: Run) -> float:
    """The norm of the difference between the first result of a call and that of the kernels for Hopper, in norms of the latter."""
    found = []
    for each in (run, None):
        compiled = compiled_case(OWN_PEER, case, each)
        found.append(np.asarray(compiled.run(compiled.make(compiled.given))[0], np.float32))
    return float(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1]))


def report(text: str, case: DecodeCase, run: Run, steps: int, by_kernel: bool) -> None:
    """Measures a call and prints its milliseconds for each cache of the case, and with `by_kernel` those of each kernel.

    text    the start of the line
    steps   measured calls
    """
    compiled = compiled_case(OWN_PEER, case, run)
    arrays = compiled.make(compiled.given)
    times = kernel_times(compiled.run, arrays, calls=steps)
    took = sum(times.values()) / case.copies
    print(f"{text:<50} {1e3 * took:8.4f} ms {case.counts('decode')['bytes'] / took / 1e12:5.2f} TB/s", flush=True)
    for name, part in times.items() if by_kernel else ():
        print(f"      {1e3 * part / case.copies:8.4f} ms  {name[:80]}", flush=True)


def same_bits(options: KernelOptions) -> bool:
    """Whether the result of one batch entry has the same bits alone and among 64 batch entries.

    options   of the calls
    """
    case = DecodeCase("bits", 64, 4096, mod="relative table")
    among = compiled_case(OWN_PEER, case, decode_peers.flexjax(case, options))
    arrays = among.make(among.given)
    alone = {n: x[:, 5:6] if n in ("query", "key", "value") else x for n, x in arrays.items()}
    alone["lengths"] = arrays["lengths"][5:6]
    call = jax.jit(decode_peers.flexjax(dataclasses.replace(case, batch=1), options))
    return bool((np.asarray(among.run(arrays)[0][5]) == np.asarray(call(alone)[0][0])).all())


def main() -> int:
    """Prints the table; returns 1 if a call failed or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    parser.add_argument("--sizes")
    parser.add_argument("--instruction", choices=["mma"])
    parser.add_argument("--card")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if args.card and args.instruction != "mma":
        parser.error("--card goes with --instruction mma")
    if args.card:
        mma_cards.CARDS["9.0"] = dataclasses.replace(mma_cards.CARDS[args.card], capability="9.0")
    failed = 0
    sizes = SIZES if args.instruction is None else MMA_SIZES
    if args.sizes or args.only:
        asked = [map(int, part.split(",")) for part in (args.sizes or "").split(";") if part]
        sizes = tuple((keys, slots, chunk) for keys, slots, chunk in asked)
    for text, case, run in runs(args.only, sizes, args.instruction):
        try:
            report(text, case, run, args.steps, args.only is not None)
            if args.instruction:
                found = difference(case, run)
                print(f"      differs from the kernels for Hopper by {found:.1e}", flush=True)
                failed += not found <= MOST_ERROR
        except Exception as error:  # the others are still worth measuring
            failed += 1
            print(f"{text:<50} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    equal = same_bits(KernelOptions(instruction=args.instruction))
    print("bits of a batch entry alone and among 64 are equal:", equal)
    return int(failed > 0 or not equal)


if __name__ == "__main__":
    sys.exit(main())
