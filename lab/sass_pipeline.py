"""Clocks of a step of the kernels on tcgen05, whose products a warp of its own issues: softmax warps, issuing warp and tensor core together.

lab/sass_clocks.py simulates the instructions of the softmax warps. Here the products run beside them:

    a wait of a warp at an mbarrier   ends HOP clocks after the last product before the commit of that barrier
    the issuing warp                  runs its program (`program_of`) in order, and waits there for arrivals of the warps, HOP clocks late
    a product                         begins when the one before has ended, and takes the longer of its clocks in the tensor core and of those in
                                      which shared memory delivers its operands

What a pair of CTAs (cta_group::2) changes: half of the right operand comes from each CTA's shared memory, and an arrival or a commit also
crosses to the other SM, which takes CROSSING clocks more.
"""

import collections
import typing
from collections.abc import Sequence

from lab import tcgen05_counts
from lab.sass_clocks import HANDOVER, QUEUE, SHARED_BYTES, STARTS, STEPS, Clocks, Use, Warp, issue_one, unit_of
from lab.sass_code import Instruction
from lab.sass_kernels import Units
from lab.tcgen05_counts import Issue, Product

HOP = HANDOVER
"""Clocks from the end of a product to the load of its result, and from an arrival to the first clock of the product that waited for it."""
CROSSING = 180
"""Clocks more where it crosses to the other SM of a pair: the latency of distributed shared memory on Hopper (arXiv 2402.13499)."""


class Wait(typing.NamedTuple):
    """The issuing warp waits for an arrival of a warp: the `number`-th of its body, from 0."""

    warp: int
    number: int


class Commit(typing.NamedTuple):
    """The `number`-th wait of a warp ends when the products so far have."""

    warp: int
    number: int


Program = list[Product | Wait | Commit]


def program_of(issue: Issue) -> Program:
    """What the issuing warp does in a step, from the first wait on: forward/tcgen05_issue.py, backward/tcgen05_issue.py."""
    each = tcgen05_counts.products(issue)
    scores = each["S"][0]
    if not issue.kernel:
        return [x for t in (0, 1) for x in (Wait(t, 0), each["P V"][t], scores, Commit(t, 0))]
    both = issue.kernel == "dkv"
    add = each["dK" if both else "dQ"][0]
    found: Program = []
    if issue.whole:
        if both:
            found += [x for t in (0, 1) for x in (Wait(t, 0), add)] + [scores, Commit(0, 0), Commit(1, 0)]
        found += [x for t in (0, 1) for x in (Wait(t, int(both)), add)]
        found += [] if both else [scores, Commit(0, 0), Commit(1, 0)]
        return [*found, scores, Commit(0, 1), Commit(1, 1)]
    for half in (0, 1):
        found += [Wait(half, 0), add, scores, Commit(half, 0)]
        found += [Wait(half, 1), add] if both else []
        found += [scores, Commit(half, 1)]
    return found


class _Cta:
    """The tensor core and the issuing warp of a CTA while the warps of a partition run.

    opens      (warp, number) -> clocks at which the waits of that number end, one for each step
    arrived    (warp, number) -> clocks at which the issuing warp learns of arrivals, one for each step
    """

    def __init__(self, program: Program, warps: int, extra: float) -> None:
        self.program, self.at, self.step, self.free, self.ready, self.extra = program, 0, 0, 0.0, 0.0, extra
        commits = [x for x in program if isinstance(x, Commit)]
        # S and dP of the first step are there at the start
        self.opens = {(x.warp, x.number): [0.0] for x in commits}
        self.arrived: dict[tuple[int, int], list[float]] = {(w, n): [] for w in range(warps) for n in (0, 1)}

    def issue(self) -> None:
        """Goes on in the program until it waits for an arrival that has not come."""
        while True:
            todo = self.program[self.at]
            if isinstance(todo, Wait):
                came = self.arrived[todo]
                if len(came) <= self.step:
                    return
                self.ready = max(self.ready, came[self.step])
            elif isinstance(todo, Product):
                self.free = max(self.free, self.ready) + todo.clocks
            else:
                self.opens[todo].append(max(self.free, self.ready) + HOP + self.extra)
            self.at += 1
            if self.at == len(self.program):
                self.at, self.step = 0, self.step + 1


def simulate(body: Sequence[Instruction], units: Units, issue: Issue, copied: int = 0) -> Clocks:
    """Clocks of a step of both softmax warps of a partition, and of each unit in it; the mean of runs in which they start at other distances.

    body     the instructions of a step, in which waits and arrivals at mbarriers are SYNCS
    issue    how its products are issued
    copied   bytes that copies write to shared memory in a step
    """
    program = program_of(issue)
    uses = [unit_of(x, units) for x in body]
    products = [x for x in program if isinstance(x, Product)]
    spent = dict(tensor=sum(x.tensor for x in products), issue=2.0 * len(body))
    spent["shared"] = sum(x.shared for x in products) + copied / SHARED_BYTES
    for use in uses:
        if use.unit:
            spent[use.unit] = spent.get(use.unit, 0.0) + 2 * use.clocks
    extra = CROSSING if issue.pairs else 0.0
    mean = sum(_run(body, uses, apart, _Cta(program, 2, extra)) for apart in STARTS) / len(STARTS)
    return Clocks(max(mean, *spent.values()), dict(sorted(spent.items())))


def _run(body: Sequence[Instruction], uses: Sequence[Use], apart: float, cta: _Cta) -> float:
    """Clocks in which both warps make a step, after the first third of STEPS steps: the mean over those of the first warp."""
    crew = [Warp(ready=0.0), Warp(ready=apart)]
    waits, arrivals = _numbered(body, "TRYWAIT"), _numbered(body, "ARRIVE")
    steps, ends, now, last = [0, 0], list[float](), 0.0, 0  # ends: of the first warp's steps
    free: dict[str, float] = collections.defaultdict(float)
    while len(ends) < STEPS:
        for n in (last, 1 - last):
            warp = crew[n]
            instruction, use = body[warp.at], uses[warp.at]
            if warp.at in waits:
                opens = cta.opens[Commit(n, waits[warp.at])]
                if len(opens) <= steps[n] or opens[steps[n]] > now:
                    continue
            slack = QUEUE * use.clocks if use.unit in ("mufu", "shared") else 0.0
            held = use.unit in ("fma", "alu")
            if warp.waits(instruction, now) or ((held or slack) and free[use.unit] > now + slack):
                continue
            issue_one(warp, instruction, use, now, free)
            if warp.at in arrivals:
                cta.arrived[n, arrivals[warp.at]].append(now + HOP + cta.extra)
                cta.issue()
            if warp.at == len(body) - 1:
                ends += [now] if n == 0 else []
                steps[n] += 1
            warp.at = (warp.at + 1) % len(body)
            last = n
            break
        now += 1
    first = len(ends) // 3
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def _numbered(body: Sequence[Instruction], word: str) -> dict[int, int]:
    """Index of each SYNCS with this word in the body -> its number among them."""
    return {i: n for n, i in enumerate(i for i, x in enumerate(body) if x.name == "SYNCS" and word in x.text)}
