"""What attention should take on a card: clocks of a step, steps of a call, and the clock of the card.

    seconds = makespan of the work items over the CTAs that the card holds / SM clock

A work item is one query tile (backward: one tile of keys, or of queries for dQ) with the tiles that it visits; each visit is a step.

**Steps of mma.sync and of WGMMA** come from machine code: lab/sass_clocks.py simulates the loop of each kernel instruction by
instruction and gives the clocks in which all resident warpgroups of an SM make one step each. Two numbers of that tool are fitted to forward
passes on an H200, both for Hopper: the rate of mma.sync, and what other instructions cost a WGMMA in flight.

**Steps on tcgen05** (10.0): the machine code of the softmax warps, simulated; forward, S, softmax and P V of a query tile follow one
another, two query tiles at a time; backward, the products of the issuing warp are simulated beside it (lab/sass_pipeline.py). Beside it,
as COUNTED, a count of what each unit has to do in a kernel like FlashAttention-4 (arXiv 2603.05451), which is a bound: tcgen05_counts.py.

**The clock** decides as much as the step: cards lower it under load. Measure it (card.py samples it while the first-hour suite runs), or
take `Card.clock`, what the card's large matrix product says.

notes/card_model.md has predictions beside measurements, with the error of each row. Not modelled: L2 and memory bandwidth, mods, launch.
"""

import dataclasses
import heapq
import typing

from bench.suites import Workload
from lab.card_steps import FAMILIES, Step, step_of
from lab.tcgen05_counts import TILE, tcgen05_backward, tcgen05_forward

Mask = typing.Literal["full", "causal", "window"]


@dataclasses.dataclass(frozen=True)
class Card:
    """A card.

    name         as jax's device_kind begins
    capability   compute capability
    sms          SMs
    boost        the clock of the data sheet's peak rate, in GHz
    tensor       bfloat16 operations with float32 sums a clock of an SM
    matmul       TFLOP/s of a large bfloat16 matrix product, measured; 0: not known
    bandwidth    bytes a second of the memory, by the data sheet
    source       where the numbers are from
    """

    name: str
    capability: str
    sms: int
    boost: float
    tensor: int
    matmul: float
    bandwidth: float
    source: str

    @property
    def peak(self) -> float:
        """TFLOP/s of the data sheet: SMs times operations a clock times the boost clock."""
        return self.sms * self.tensor * self.boost / 1e3

    @property
    def clock(self) -> float:
        """The clock under load in GHz: that at which a matrix product that uses MATMUL_SHARE of the tensor cores has the measured rate, at
        most `boost`; `boost` where no rate is known.
        """
        if not self.matmul:
            return self.boost
        return min(self.boost, 1e3 * self.matmul / (self.sms * self.tensor * MATMUL_SHARE))


MATMUL_SHARE = 0.82
"""The share of clocks in which the tensor cores multiply in a large matrix product of cuBLAS: measured on an H200, 675 TFLOP/s at 1.53 GHz."""
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("NVIDIA A100", "8.0", 108, 1.41, 2048, 0.0, 2.0e12, "NVIDIA A100 data sheet: 312 TFLOP/s, 80 GB SXM"),
        Card("NVIDIA L40S", "8.9", 142, 2.52, 1024, 0.0, 0.86e12, "NVIDIA L40S data sheet: 362 TFLOP/s"),
        Card("NVIDIA GeForce RTX 4090", "8.9", 128, 2.52, 512, 0.0, 1.01e12, "NVIDIA Ada whitepaper: 165 TFLOP/s with float32 sums"),
        Card("NVIDIA GeForce RTX 5090", "12.0", 170, 2.41, 512, 0.0, 1.79e12, "NVIDIA RTX Blackwell whitepaper: 210 TFLOP/s"),
        Card("NVIDIA H100", "9.0", 132, 1.83, 4096, 0.0, 3.35e12, "NVIDIA H100 data sheet: 989 TFLOP/s, SXM"),
        Card("NVIDIA H200", "9.0", 132, 1.83, 4096, 675.0, 4.8e12, "NVIDIA H200 data sheet; matmul: notes/card_model.md"),
        Card("NVIDIA B200", "10.0", 148, 1.85, 8192, 1610.0, 8.0e12, "NVIDIA HGX B200: 2250 TFLOP/s; matmul: cuBLAS 8192, pyptx.dev"),
    )
}  # fmt: skip


def card_of(kind: str) -> Card | None:
    """The card whose name a jax device_kind begins with; None for one that is not in CARDS."""
    return next((card for name, card in CARDS.items() if kind.startswith(name)), None)


# ------------------------------------------------------------------- a call

FIXED = {1: 2500.0, 2: 1500.0}
"""Clocks of a work item outside of its steps, by how many an SM runs at the same time: the first product and softmax with nothing beside
them, and the results; with two CTAs the other one goes on meanwhile."""


class Call(typing.NamedTuple):
    """Self-attention of one shape.

    mask                    "full", "causal", or "window", causal with `window` keys
    batch, heads, tokens    of the call
    dim                     head dim
    window                  keys of a window, itself included
    """

    mask: Mask
    batch: int
    heads: int
    tokens: int
    dim: int
    window: int = 0

    def visible(self) -> int:
        """Pairs of a query and a key that the mask shows, in one head."""
        T = self.tokens
        if self.mask == "full":
            return T * T
        n = min(self.window, T) if self.mask == "window" else T
        return n * (n + 1) // 2 + (T - n) * n

    def flops(self, backward: bool = False) -> float:
        """Operations of a pass: 4 B N D forward and 10 B N D backward for each pair that the mask shows."""
        return (10.0 if backward else 4.0) * self.batch * self.heads * self.dim * self.visible()

    def visits(self, rows: int, columns: int, by_keys: bool = False) -> list[tuple[int, int]]:
        """(plain, masked) of each work item of one head, in the order of the tokens: how many of the visited tiles need no mask and how
        many need one. Tiles of which the mask hides everything are not visited. Items and tiles at the end of the tokens are taken as
        whole ones.

        rows, columns   tokens of a work item and of a visited tile
        by_keys         whether items own keys and visit queries
        """
        T, found = self.tokens, []
        for first in range(0, T, rows):
            plain = masked = 0
            for other in range(0, T, columns):
                q, k = ((other, columns), (first, rows)) if by_keys else ((first, rows), (other, columns))
                lowest, highest = q[0] - (k[0] + k[1] - 1), q[0] + q[1] - 1 - k[0]  # of query minus key in the tile
                end = {"full": T, "causal": T, "window": self.window}[self.mask]
                if self.mask == "full" or (lowest >= 0 and highest < end):
                    plain += 1
                elif highest >= 0 and lowest < end:
                    masked += 1
            found.append((plain, masked))
        return found


def makespan(durations: list[float], slots: int) -> float:
    """When the last of the work items ends, if each begins, in this order, on the slot that is free first.

    durations   of the items, in the unit of the result
    slots       items that run at the same time
    """
    free = [0.0] * slots
    for took in durations:
        heapq.heapreplace(free, free[0] + took)
    return max(free)


def clocks(call: Call, step: Step, sms: int, by_keys: bool = False, together: int = 1) -> float:
    """SM clocks of one kernel of a call: the makespan of its work items, the longest ones first, each with its steps and FIXED clocks.

    step       clocks of a step, the tile, and how many items an SM runs at the same time
    sms        SMs of the card
    by_keys    whether items own keys and visit queries
    together   heads whose items are launched side by side, the longest items of all of them first; then come the next heads. It divides
               batch * heads
    """
    each = sorted(
        (
            p * step.plain + m * step.masked + FIXED[step.slots]
            for p, m in call.visits(step.rows, step.columns, by_keys)
        ),
        reverse=True,
    )
    group = [took for took in each for _ in range(together)]
    return makespan(group * (call.batch * call.heads // together), sms * step.slots)


def heads_together(call: Call) -> int:
    """Heads, counted over the batch, whose query tiles the forward kernels launch side by side, as TileScheduler.heads_at_once: the
    largest divisor of batch * heads so that the keys and values of these heads, of 16 bits, take at most 24 MB of the L2; at least 1.
    """
    heads, size = call.batch * call.heads, call.tokens * call.dim * 4
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * size <= 24e6))


# ------------------------------------------------------------------- predictions


COUNTED = "counted"
"""The `instruction` of `predict` for a kernel on tcgen05 like FlashAttention-4, by count."""


def call_of(workload: Workload) -> Call | None:
    """The call of a workload; None where it has a score mod, another mask, or key heads that several query heads share."""
    mask, w = workload.mask, workload
    if w.mod is not None or w.heads != w.kv_heads or (mask != "full" and mask != "causal" and mask != "window"):
        return None
    return Call(mask, w.batch, w.heads, w.length, w.dim, w.parameter)


class Prediction(typing.NamedTuple):
    """What a pass of a call should take.

    clocks    SM clocks of all its kernels
    seconds   at the clock that was asked for
    tflops    operations of the call over that time, in 1e12
    """

    clocks: float
    seconds: float
    tflops: float


def predict(
    card: Card,
    call: Call,
    backward: bool = False,
    instruction: str | None = None,
    clock: float = 0.0,
    pairs: bool = False,
) -> Prediction | None:
    """What a pass should take, as a Prediction; None if card_steps.STEPS has no steps for the card, the instruction or the head
    dim.

    card          of CARDS
    call          its mask, sizes and head dim
    backward      whether the backward pass is meant, all its kernels together, or the forward pass
    instruction   as of KernelOptions; None: WGMMA on Hopper, else mma.sync. COUNTED: a kernel like FlashAttention-4, by count, which
                  gives a Prediction for any card and head dim
    clock         of the SMs in GHz; 0: `card.clock`
    pairs         KernelOptions.cta_pairs: dK/dV on tcgen05 at head dim 128 by pairs of CTAs
    """
    ghz = clock or card.clock
    asked = instruction or ("wgmma" if card.capability == "9.0" else "mma")
    if asked == COUNTED:
        total = clocks(
            call, _counted_step(call.dim, backward), card.sms, backward, 1 if backward else heads_together(call)
        )
    else:
        family = "RTX 4090" if "4090" in card.name else FAMILIES.get(card.capability, "")
        keys = "dkv pairs" if pairs and asked == "tcgen05" and call.dim == 128 else "dkv"
        kernels = [""] if not backward else ["fused"] if asked == "wgmma" else ["dq", keys]
        steps = [step_of(family, asked, call.mask, call.dim, kernel) for kernel in kernels]
        if any(step is None for step in steps):
            return None
        total = sum(
            clocks(
                call,
                step,
                card.sms // (2 if k == "dkv pairs" else 1),
                k not in ("", "dq"),
                1 if backward else heads_together(call),
            )
            for k, step in zip(kernels, steps, strict=True)
            if step
        )
    seconds = total / (ghz * 1e9)
    return Prediction(total, seconds, call.flops(backward) / seconds / 1e12)


def _counted_step(dim: int, backward: bool) -> Step:
    """A step of the kernels on tcgen05 by count, with pairs of CTAs backward from head dim 128 on, as FlashAttention-4 has them; a mask costs
    nothing, because masked tiles are few and the FMA units are not the bound.
    """
    found = tcgen05_backward(dim, pairs=dim >= 128).step if backward else tcgen05_forward(dim).step
    return Step(found, found, TILE if backward else 2 * TILE, TILE)
