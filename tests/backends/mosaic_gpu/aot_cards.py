"""Compiles calls for NVIDIA cards other than Hopper, and the kernels on mma.sync for Hopper, on a machine without a GPU.

    python -m tests.backends.mosaic_gpu.aot_cards [--sample] [--gradients] [CARD ...] [ENTRY ...]

CARD is a key of compile_card.CARDS, ENTRY one of aot.TABLE; all of both by default. A line for each call on each card: ok, refused or
FAIL, registers, bytes spilled and the instructions counted in its PTX, for cards with tcgen05 also in its machine code. FAIL: the
compilers refuse, the kernel is not there, it lacks an instruction that it should have, or it spills more than MOST_SPILLED.
--gradients: both passes, and what each kernel spills. A child process for each card, as in aot.py.
"""

import re
import sys
import time
import typing
import zlib
from collections.abc import Iterator, Sequence

import jax

import flexjax
from tests.backends import children
from tests.backends.mosaic_gpu import aot, compile_card
from tests.bound_case import BoundCase
from tests.cases import CASES

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1", "XLA_FLAGS": ""}
MMA, CP_ASYNC, TMA = "mma.sync.aligned.m16n8k16", "cp.async.cg.shared.global", "cp.async.bulk.tensor"
TCGEN05 = ("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "UTCHMMA", "LDTM", "STTM", TMA)
"""Instructions of the kernel on tcgen05, in PTX and in machine code."""
CAPABILITY = {card: float(d.capability) for card, d in compile_card.CARDS.items()}
INSTRUCTION: dict[str, typing.Literal["mma", "tcgen05"]] = {
    card: "tcgen05" if 10 <= capability < 12 else "mma" for card, capability in CAPABILITY.items()
}
"""Card -> the option that chooses its kernels."""
EXPECTED = {
    card: TCGEN05 if INSTRUCTION[card] == "tcgen05" else (MMA, "ldmatrix", CP_ASYNC if capability < 9 else TMA)
    for card, capability in CAPABILITY.items()
}
"""Card -> instructions that its kernel has."""
FORBIDDEN = {card: ("wgmma", TMA if capability < 9 else CP_ASYNC) for card, capability in CAPABILITY.items()}
SAMPLED_CARDS = ("sm_80", "sm_89", "sm_120", "sm_90", "sm_100", "sm_103")
ALL_HIDDEN = ("nothing", "nothing_blocks", "poison_everywhere")
"""Cases whose mask hides everything, so that the compilers leave out the products."""
GRADIENTS, DECODE = "--gradients", "flexjax_forward_decode_mma"
MOST_SPILLED = 256
"""Bytes of spills that pass: a few registers before and after the loops of the largest tiles."""


def sampled(card: str) -> list[str]:
    """What a run of CI compiles for a card: every eighth case, others for other cards, each in one dtype."""
    first = list(compile_card.CARDS).index(card)
    names = list(CASES)[first::8]
    return [f"{name}-{aot.DTYPES[zlib.crc32(name.encode()) % len(aot.DTYPES)]}" for name in names]


def compile_entry(card: str, entry: str, gradients: bool) -> None:
    """Compiles the forward pass of a call, or both passes."""
    name, dtype = aot.TABLE[entry]
    problem = BoundCase(CASES[name], dtype, "mosaic_gpu", flexjax.KernelOptions(instruction=INSTRUCTION[card]))
    leaves, tree = jax.tree.flatten(problem.arrays())
    function = jax.grad(problem.loss, argnums=(0, 1), has_aux=True) if gradients else problem.loss
    compile_card.compile_for(card, lambda *flat: function(*jax.tree.unflatten(tree, flat)), *leaves)


def outcome(card: str, entry: str, gradients: bool) -> str:
    """Compiles a call; its line, not yet judged."""
    start = time.time()
    try:
        compile_entry(card, entry, gradients)
    except NotImplementedError as error:
        return f"refused {entry} {error}"
    except Exception as error:  # whatever the compilers raise
        return f"FAIL {entry} {type(error).__name__} " + str(error).replace("\n", " | ")[:600]
    return f"ok {entry} {time.time() - start:.1f}s"


def child(card: str, names: Sequence[str]) -> None:
    gradients = GRADIENTS in names
    for entry in names:
        if entry != GRADIENTS:
            print("begin", entry, flush=True)
            print(outcome(card, entry, gradients), flush=True)


def judged(card: str, line: str, said: str) -> str:
    """The line of a call, with what its compilers said counted; FAIL by the rules of the file's docstring."""
    if not line.startswith("ok"):
        return f"{line} on {card}"
    counts = {name: len(re.findall(rf"\b{re.escape(name)}", said)) for name in (*EXPECTED[card], *FORBIDDEN[card])}
    spills = dict(aot.SPILLS.findall(said))
    if DECODE in spills:  # a call of few queries, which runs the decode kernel on mma.sync on every card
        return f"{line} on {card}: decode kernel, {spills[DECODE]} bytes spilled"
    spilled = spills.pop(f"flexjax_forward_{INSTRUCTION[card]}", None)
    registers = re.search(r"Used (\d+) registers", said)
    expected = () if line.split()[1].rsplit("-", 1)[0] in ALL_HIDDEN else EXPECTED[card]
    wrong = [f"no {n}" for n in expected if not counts[n]]
    wrong += [n for n in FORBIDDEN[card] if counts[n]]
    wrong += ["no forward kernel"] if spilled is None else ["spills"] if int(spilled) > MOST_SPILLED else []
    text = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    text += "".join(f", {name.removeprefix('flexjax_')} spills {n}" for name, n in spills.items())
    line = f"{line} on {card}: {registers[1] if registers else '?'} registers, {spilled} bytes spilled, {text}"
    return f"FAIL{line[2:]}: {', '.join(wrong)}" if wrong else line


def sweep(card: str, names: Sequence[str], gradients: bool = False) -> Iterator[str]:
    """The judged line of each call."""
    module = [sys.executable, "-m", "tests.backends.mosaic_gpu.aot_cards", "--child", card]
    command = lambda left: [*module, *left, *([GRADIENTS] if gradients else [])]
    environment = ENVIRONMENT | ({"MOSAIC_GPU_DUMP_SASS": "1"} if INSTRUCTION[card] == "tcgen05" else {})
    for line, said in children.sweep(names, command, environment):
        yield judged(card, line, "\n".join(said))


def main(arguments: list[str]) -> int:
    """Compiles what the arguments name; returns the exit status."""
    sample, gradients = "--sample" in arguments, GRADIENTS in arguments
    named = [a for a in arguments if not a.startswith("--")]
    cards = [a for a in named if a in compile_card.CARDS] or list(SAMPLED_CARDS if sample else compile_card.CARDS)
    entries = [a for a in named if a not in compile_card.CARDS]
    began, count = time.time(), dict.fromkeys(children.KINDS, 0)
    for card in cards:
        for line in sweep(card, entries or (sampled(card) if sample else list(aot.TABLE)), gradients):
            count[line.split()[0]] += 1
            print(line, flush=True)
    print(*(f"{n} {kind}" for kind, n in count.items()), f"in {time.time() - began:.0f} s", flush=True)
    return int(count["FAIL"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
