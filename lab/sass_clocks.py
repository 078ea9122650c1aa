"""Clocks of a step of the attention kernels, from their machine code, on a machine without a GPU.

    python -m lab.sass_clocks compile FOLDER [KERNEL ...]   compiles KERNELS for their cards and leaves their SASS there
    python -m lab.sass_clocks FOLDER [KERNEL ...]           a line for each loop: clocks of a step, and of each unit

An SM has four partitions, each of which issues one instruction a clock, and the four warps of a warpgroup lie on one each. So one partition
with one warp of every resident warpgroup is simulated, clock by clock:

    issue      in order within a warp; SASS carries the clocks after which the next instruction may issue, and the barriers on which
               an instruction waits for results of unknown latency
    units      each instruction occupies one (`unit_of`): FMA, ALU, MUFU, tensor cores, shared memory. Shared memory serves all four
               partitions, so one of its clocks is counted for each 128 bytes of all of them
    WGMMA      runs beside the warp until WARPGROUP.DEPBAR waits for its group, takes the clocks of its operations at the full rate, and
               is delayed by each instruction of another unit that issues meanwhile (`Units.contention`)

A step takes at least the clocks in which shared memory delivers everything: what instructions move, the operands of WGMMA, and copies.

Not simulated: arrival of TMA's copies (taken to be in time; their writes to shared memory are in `KERNELS`), named barriers of the
ping-pong (warpgroups start staggered instead and keep that distance by themselves), branches that lower the reference of the softmax
rarely (`rare`). LATENCIES are guesses from published measurements; most of them hide behind the other warp.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import sys
import typing
from collections.abc import Iterator, Sequence

from lab.sass_code import Instruction, read, step_loops, without_rare
from lab.sass_kernels import KERNELS, UNITS, Kernel, Units, compile_kernel, compiled, folder_of

LATENCIES = dict(shared=26, mufu=24, shuffle=24, memory=40, barrier=20, wgmma=30, other=20)
"""Clocks from the end of an instruction's turn at its unit to its result, where SASS does not say them."""
QUEUE = 4
"""How many instructions wait at MUFU or shared memory before a warp can issue no further one to it."""
HANDOVER = 100
"""Clocks from an arrival at an mbarrier, through tcgen05.ld or tcgen05.mma, to the first result; as in tcgen05_counts.py."""
STEPS = 12
"""Steps of a run; the last two thirds are measured."""
STARTS = (300.0, 500.0, 900.0, 1300.0)
"""How many clocks after one another warps begin, in each run."""
SHARED_BYTES = 128
"""Bytes a clock of an SM's shared memory."""


# ------------------------------------------------------------------- simulation


class Use(typing.NamedTuple):
    """What an instruction does to the units.

    unit      name of the unit; "" for none
    clocks    for which it occupies the unit
    latency   from then to its result
    shared    clocks of shared memory that a WGMMA takes beside it
    """

    unit: str
    clocks: float = 0.0
    latency: float = LATENCIES["other"]
    shared: float = 0.0


ARITHMETIC = ("FFMA", "FMUL", "FADD", "IMAD")
NO_UNIT = (
    "BRA",
    "NOP",
    "VOTE",
    "VOTEU",
    "R2UR",
    "CS2R",
    "ELECT",
    "BSSY",
    "BSYNC",
    "WARPSYNC",
    "BAR",
    "WARPGROUP",
    "SYNCS",
)


def unit_of(instruction: Instruction, units: Units) -> Use:
    """What an instruction does to the units of its partition."""
    name, text = instruction.name, instruction.text
    if name in ARITHMETIC:
        return Use("fma", units.fma)
    if name == "MUFU":
        return Use("mufu", units.mufu, LATENCIES["mufu"])
    if name == "HMMA":
        return Use("tensor", units.mma)
    if name == "HGMMA":
        shape = re.match(r"HGMMA\.64x(\d+)x(\d+)", text)
        assert shape is not None
        n, k = int(shape[1]), int(shape[2])
        left = 0 if re.match(r"HGMMA\S+ R\d+, R\d+", text) else 64 * k * 2  # from registers, or from shared memory
        return Use("tensor", 16 * n * k * 2 / units.tensor_rate, LATENCIES["wgmma"], (left + n * k * 2) / SHARED_BYTES)
    if name == "QGMMA":
        shape = re.match(r"QGMMA\.64x(\d+)x(\d+)", text)
        assert shape is not None
        n, k = int(shape[1]), int(shape[2])
        left = 0 if re.match(r"QGMMA\S+ R\d+, R\d+", text) else 64 * k
        return Use("tensor", 8 * n * k * 2 / units.tensor_rate, LATENCIES["wgmma"], (left + n * k) / SHARED_BYTES)
    if name in ("LDSM", "LDS", "STSM", "STS"):
        matrices = re.search(r"\.MT?88\.(\d)", text)
        words = int(matrices[1]) if matrices else 4 if ".128" in text else 2 if ".64" in text else 1
        return Use("shared", words * 4 * 32 * 4 / SHARED_BYTES, LATENCIES["shared"])  # all four partitions
    if name in ("LDTM", "STTM"):
        shape = re.match(r"\w+\.(\d+)dp(\d+)bit\.x(\d+)", text)
        lanes, bits, times = (int(n) for n in shape.groups()) if shape else (32, 32, 32)
        return Use(
            "tmem", lanes * bits * times / 8 / 128, LATENCIES["memory"]
        )  # 32 lanes of 4 bytes a clock of a partition
    if name == "SHFL":
        return Use("shared", 4, LATENCIES["shuffle"])
    if name in ("LDG", "LD", "LDL"):
        return Use("shared", 4, LATENCIES["memory"])
    if name in NO_UNIT or name.startswith("U"):
        return Use("", 0, LATENCIES["barrier"])
    return Use("alu", units.alu)


@dataclasses.dataclass
class Warp:
    """A warp of the simulated partition: where it is, when it may issue, and when its barriers open.

    groups   the clocks at which its groups of WGMMA end
    """

    ready: float
    at: int = 0
    barriers: dict[int, float] = dataclasses.field(default_factory=dict)
    groups: list[float] = dataclasses.field(default_factory=list)

    def waits(self, instruction: Instruction, now: float) -> bool:
        """Whether the instruction cannot issue yet for reasons of this warp."""
        if self.ready > now or any(self.barriers.get(n, 0.0) > now for n in instruction.waits):
            return True
        depth = re.match(r"WARPGROUP\.DEPBAR\S*\s+\w+,\s*(0x\w+)", instruction.text)
        return depth is not None and sum(end > now for end in self.groups) > int(depth[1], 16)


class Clocks(typing.NamedTuple):
    """Clocks of one step of all warps, in the steady state, and of each unit in it ("issue": instructions)."""

    step: float
    units: dict[str, float]


def simulate(body: Sequence[Instruction], units: Units, warps: int, copied: int = 0) -> Clocks:
    """The mean of runs in which the warps start at other distances from one another, because these distances decide how well one
    warp's softmax hides behind another's products.

    body     the instructions of a step
    warps    of the partition
    copied   bytes that copies move through shared memory in a step of all warps
    """
    uses = [unit_of(x, units) for x in body]
    spent: dict[str, float] = dict(issue=float(warps * len(body)), shared=copied / SHARED_BYTES)
    for use in uses:
        spent["shared"] += warps * use.shared
        if use.unit:
            spent[use.unit] = spent.get(use.unit, 0.0) + warps * use.clocks
    distances = STARTS if warps > 1 else STARTS[:1]
    delay = units.contention if any(x.name in ("HGMMA", "QGMMA") for x in body) else 0.0
    mean = sum(_run(body, uses, [n * apart for n in range(warps)], delay) for apart in distances) / len(distances)
    return Clocks(max(mean, *spent.values()), dict(sorted(spent.items())))


def _run(body: Sequence[Instruction], uses: Sequence[Use], starts: Sequence[float], delay: float) -> float:
    """Clocks in which as many steps end as there are warps, after the first third of STEPS steps of each.

    starts   the clocks at which the warps begin
    delay    of the WGMMA in flight, by an instruction of another unit
    """
    crew = [Warp(ready=start) for start in starts]
    free: dict[str, float] = collections.defaultdict(float)
    now, last, ends = 0.0, 0, list[float]()
    while len(ends) < STEPS * len(crew):
        issued = False
        for n in (*range(last, len(crew)), *range(last)):  # the warp that issued last goes on while it can
            warp = crew[n]
            instruction, use = body[warp.at], uses[warp.at]
            slack = QUEUE * use.clocks if use.unit in ("mufu", "shared") else 0.0
            held = use.unit in ("fma", "alu") or instruction.name == "HMMA"
            if warp.waits(instruction, now) or ((held or slack) and free[use.unit] > now + slack):
                continue
            if delay and use.unit in ("fma", "alu", "mufu") and free["tensor"] > now:
                free["tensor"] += delay
                for other in crew:
                    other.groups = [end + delay if end > now + LATENCIES["wgmma"] else end for end in other.groups]
            issue_one(warp, instruction, use, now, free)
            if warp.at == len(body) - 1:
                ends.append(now)
            warp.at = (warp.at + 1) % len(body)
            last, issued = n, True
            break
        now += 1 if issued else max(1.0, min(w.ready for w in crew) - now)
    first = len(ends) // 3
    return len(crew) * (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def issue_one(warp: Warp, instruction: Instruction, use: Use, now: float, free: dict[str, float]) -> None:
    """Issues an instruction of a warp: takes its unit, opens its barriers later, and says when the warp may go on.

    free   unit -> the clock from which it is free
    """
    end = now + use.latency
    if use.unit:
        free[use.unit] = max(free[use.unit], now) + use.clocks
        end = free[use.unit] + use.latency
    if instruction.name in ("HGMMA", "QGMMA") and "gsb0" in instruction.text:
        warp.groups.append(end)
    if instruction.writes is not None:
        warp.barriers[instruction.writes] = end
    if instruction.reads is not None:
        warp.barriers[instruction.reads] = now + 10
    pause = LATENCIES["barrier"] if instruction.text.startswith("BAR.SYNC") else 0
    warp.ready = now + max(instruction.stall, pause)


# ------------------------------------------------------------------- the command


def loops_of(folder: pathlib.Path, kernel: Kernel) -> list[Clocks]:
    """The clocks of a kernel's loops: that of tiles without a mask and that of masked ones, or one for both."""
    (path,) = folder_of(folder, kernel).glob(f"{kernel.file}_[0-9]*.sass_ctrl")
    code, labels = read(path.read_text())
    bodies = [without_rare(code, labels, loop) for loop in step_loops(code, labels)]
    units = UNITS[kernel.card]
    if kernel.issue is not None:
        from lab import sass_pipeline  # which imports this file

        return [sass_pipeline.simulate(body, units, kernel.issue, kernel.copied) for body in bodies]
    found = [simulate(body, units, kernel.warps, kernel.copied) for body in bodies]
    if not kernel.product:
        return found
    # S of a tile, its softmax with no other warp beside it, and P V follow one another, with HANDOVER before each and after
    chains = [2 * kernel.product + simulate(body, units, 1).step + 4 * HANDOVER for body in bodies]
    tensor = 2 * kernel.warps * kernel.product
    return [
        Clocks(max(c.step, chain, tensor), c.units | dict(tensor=tensor, chain=chain))
        for c, chain in zip(found, chains, strict=True)
    ]


def table(folder: pathlib.Path, names: Sequence[str]) -> Iterator[str]:
    """A line for each kernel, as card_steps.STEPS has them: its name, the clocks of a step without and with a mask, and as a comment the
    clocks of its units in the first.
    """
    for name in names:
        found = loops_of(folder, KERNELS[name])
        units = ", ".join(f"{unit} {clocks:.0f}" for unit, clocks in found[0].units.items())
        yield f'"{name}": ({found[0].step:.0f}, {found[-1].step:.0f}),  # {units}'


def main() -> int:
    """Compiles, or prints the table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="[compile] FOLDER [KERNEL ...]")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    compiles = given.words[0] == "compile"
    folder, *names = given.words[1:] if compiles else given.words
    names = names or list(KERNELS)
    if given.child:
        compile_kernel(names[0])
    elif compiles:
        compiled(pathlib.Path(folder), names)
    else:
        for line in table(pathlib.Path(folder), names):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
