"""Compiles calls for NVIDIA cards other than Hopper, and the kernels on mma.sync for Hopper, on a machine without a GPU.

    JAX_PLATFORMS=cpu python -m tests.backends.mosaic_gpu.aot_cards [--sample] [CARD ...] [ENTRY ...]

CARD is a key of INSTRUCTION: a card of compile_card.CARDS, of which sm_100 and sm_103 compile the kernels on tcgen05, or sm_100-mma or
sm_103-mma, which compile the kernels on mma.sync that these two cards run by default. ENTRY is one of TABLE: a call of aot.TABLE, results and
all gradients; "workload " and one of the gpu suite of the benchmarks, both passes at full size; "pairs " and one of PAIRED, the same with pairs of CTAs; "decode " and a case of test_decode.py;
or "prefill " and one of PREFILLED, a chunk of a prefill over keys in pages; all by default. A line for each call on each card, ok,
refused or FAIL, and below it one for each kernel that multiplies: registers, bytes spilled, bytes of shared memory, columns of tensor
memory, and the instructions counted in its machine code. FAIL: the compilers refuse,
a kernel is not there, lacks an instruction that it should have or has one of another family, or spills more than it may. A child
process for each card, as in aot.py.
"""

import dataclasses
import re
import sys
import time
import typing
import zlib
from collections.abc import Iterator, Sequence

import jax

import flexjax
from bench.suites import MODS, SUITES
from flexjax import paged
from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.shared_memory import scratch_bytes, tmem_columns
from tests.backends import children
from tests.backends.mosaic_gpu import aot, compile_card, test_decode
from tests.bound_case import BoundCase
from tests.cases import CASES
from tests.cases.on_hopper import forward_problem
from tools.device import time_mma_backward

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1", "XLA_FLAGS": ""}
DECODE, PREFILL = "decode ", "prefill "
PREFILLED = {f"page {page}, head dim {dim}": (page, dim) for page in (8, 16, 64) for dim in (64, 128, 192)}
"""Tokens of a page, and head dim."""
WORKLOAD, PAIRS = "workload ", "pairs "
PAIRED = ("full d128", "causal d128", "causal grouped d128", "12 documents d128", "ALiBi causal d128")
"""Workloads whose dK/dV kernel gets pairs of CTAs on tcgen05."""
TABLE = [
    *aot.TABLE,
    *(DECODE + name for name in test_decode.compiled()),
    *(PREFILL + name for name in PREFILLED),
    *(WORKLOAD + problem.name for problem in SUITES["gpu"]),
    *(PAIRS + name for name in PAIRED),
]
BY_MMA = {f"{card}-mma": card for card, d in compile_card.CARDS.items() if 10 <= float(d.capability) < 12}
"""The name of a card of 10.x with the kernels on mma.sync -> the card."""
INSTRUCTION: dict[str, typing.Literal["mma", "tcgen05"]] = {
    **{card: "tcgen05" if card in BY_MMA.values() else "mma" for card in compile_card.CARDS},
    **dict.fromkeys(BY_MMA, "mma"),
}
"""Name of a card -> the option that chooses its kernels."""
FORWARD, DECODES = "flexjax_forward_mma", "flexjax_forward_decode_mma"
BACKWARD = ("flexjax_backward_dq", "flexjax_backward_dkv", "flexjax_backward_dk", "flexjax_backward_dv")
TCGEN05 = ("flexjax_forward_tcgen05", "flexjax_backward_dq_tcgen05", "flexjax_backward_dkv_tcgen05")
KERNELS = (FORWARD, DECODES, *BACKWARD, *TCGEN05, "flexjax_capture_gradient")
"""The kernels that multiply. Of a call with gradients a forward kernel, dQ, and dK/dV or dK and dV must be there."""
LDMATRIX, CP_ASYNC, TMA, WGMMA = "LDSM", "LDGSTS", "UTMALDG", "HGMMA"
ON_TCGEN05, ON_PAIRS = ("UTCHMMA", "LDTM", "STTM", TMA), ("UTCHMMA.2CTA", "UTCBAR.2CTA.MULTICAST", "UTMALDG.5D.2CTA")
COUNTED = ("HMMA", LDMATRIX, CP_ASYNC, *ON_TCGEN05, *ON_PAIRS, WGMMA)
"""Instructions as the disassembler names them."""
COPYING = {name: CP_ASYNC if name in ("sm_80", "sm_86", "sm_89") else TMA for name in INSTRUCTION}
"""Name of a card -> the instruction that copies tiles."""
SAMPLED_CARDS = ("sm_80", "sm_89", "sm_120", "sm_90", "sm_100", "sm_103", "sm_100-mma", "sm_103-mma")
ALWAYS_SAMPLED = {
    "sm_100-mma": [WORKLOAD + name for name in ("causal d128", "12 documents d128", "causal d256")],
    "sm_103-mma": [WORKLOAD + name for name in ("window 1025 d128", "ALiBi causal d128")],
}
"""Name of a card -> what every run of CI compiles for it."""
ALL_HIDDEN = ("nothing", "nothing_blocks", "poison_everywhere")
"""Cases whose mask hides everything, so that the compilers leave out the products."""
MOST_SPILLED = 256
"""Bytes of spills that pass: a few registers before and after the loops of the largest tiles."""
MAY_SPILL = {"noise": 768, "random_entries": 768, "relu_squared_weights": 512, "zero_divisors": 512}
"""Case -> bytes of spills that pass instead, in the backward kernels of tcgen05, whose tiles have one size: the state of a hash; a pair
bias, a mask of remainders and both selects on -inf of weights; and two masks of remainders."""
CROWDED_SPILL = {"flexjax_capture_gradient": 2048, **dict.fromkeys(TCGEN05, 4096)}
"""Bytes of spills that pass beside expectations in kernels that have no smaller tile for them: those of captured arrays, and of tcgen05."""


def sampled(card: str) -> list[str]:
    """What a run of CI compiles for a card: every eighth entry, others for other cards, each call in one dtype. For a card of BY_MMA it is
    every 64th, and the entries of ALWAYS_SAMPLED.
    """
    first, step = list(compile_card.CARDS).index(BY_MMA.get(card, card)), 8
    if card in BY_MMA:  # entries that no card of compile_card.CARDS has
        first, step = len(compile_card.CARDS) + 8 * list(BY_MMA).index(card), 64
    calls = [f"{name}-{aot.DTYPES[zlib.crc32(name.encode()) % len(aot.DTYPES)]}" for name in CASES]
    always = ALWAYS_SAMPLED.get(card, [])
    return [*always, *(x for x in [*calls, *TABLE[len(aot.TABLE) :]][first::step] if x not in always)]


def compile_entry(card: str, entry: str) -> None:
    """Compiles a call or a workload with its gradients, a case of the decode kernel, or a chunk of a prefill."""
    if entry.startswith(DECODE):
        compile_decode(card, entry.removeprefix(DECODE))
        return
    if entry.startswith(PREFILL):
        compile_prefill(card, *PREFILLED[entry.removeprefix(PREFILL)])
        return
    if entry.startswith((WORKLOAD, PAIRS)):
        pairs = entry.startswith(PAIRS)
        compile_workload(card, entry.removeprefix(PAIRS if pairs else WORKLOAD), pairs)
        return
    name, dtype = aot.TABLE[entry]
    problem = BoundCase(CASES[name], dtype, "mosaic_gpu", flexjax.KernelOptions(instruction=INSTRUCTION[card]))
    leaves, tree = jax.tree.flatten(problem.arrays())
    step = jax.grad(problem.loss, argnums=(0, 1), has_aux=True)
    compile_card.compile_for(BY_MMA.get(card, card), lambda *flat: step(*jax.tree.unflatten(tree, flat)), *leaves)


def compile_decode(card: str, name: str) -> None:
    """Compiles a case of test_decode.py with the tile of a card."""
    from flexjax.backends.mosaic_gpu.decode import mma as decode_mma
    from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS

    case = test_decode.compiled()[name]
    page, stored = case.pop("page", 0), case.pop("stored", None)
    given: dict[str, typing.Any] = dict(q_len=1, heads=8, kv_heads=2, kv_len=576, block=None, interpret=False)
    made = forward_problem(**{**given, **case})
    plan, operands = test_decode.in_pages(made, page, stored) if page else (made.plan, made.operands)
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, instruction="mma"))
    described = CARDS[compile_card.CARDS[BY_MMA.get(card, card)].capability]
    why = decode_mma_tiles.mma_decode_refuses(plan, described)
    if why is not None:
        raise NotImplementedError(why)
    tile = decode_mma_tiles.mma_decode_tile(plan, described)
    device = targets.of_device(compile_card.topology(BY_MMA.get(card, card)).devices[0], "cuda")
    with targets.as_seen_by_pallas(device):
        compile_card.compile_for(
            BY_MMA.get(card, card), lambda operands: decode_mma.forward(plan, operands, tile), operands
        )


def compile_prefill(card: str, page: int, dim: int) -> None:
    """Compiles 256 queries of each of 16 requests over a pool of 2^17 tokens, and asserts that the program copies neither the pool nor the
    2^16 tokens of each request that the table has columns for.
    """
    requests, heads, kv_heads, pool = 16, 32, 8, 2**17
    cache = jax.eval_shape(lambda: paged.empty(pool // page, page, kv_heads, dim, dtype="bfloat16"))
    table = jax.eval_shape(lambda: paged.table(requests, 2**16 // page, pool // page, page))
    query = jax.ShapeDtypeStruct((requests, 256, heads, dim), "bfloat16")
    options = flexjax.KernelOptions(instruction=INSTRUCTION[card])
    attend = lambda *given: flexjax.paged_attention(*given, implementation="mosaic_gpu", kernel_options=options)
    memory = compile_card.compile_for(BY_MMA.get(card, card), attend, query, cache, table).memory_analysis()
    most = 0.1 * 2 * cache.key.size * cache.key.dtype.itemsize
    assert memory.temp_size_in_bytes < most, memory


def compile_workload(card: str, name: str, pairs: bool) -> None:
    """Compiles both passes of a workload of the benchmarks, with pairs of CTAs if asked for."""
    if pairs and INSTRUCTION[card] != "tcgen05":
        raise NotImplementedError("Pairs of CTAs are for tcgen05.")
    (problem,) = (x for x in SUITES["gpu"] if x.name == name)
    mod = MODS[problem.mod] if problem.mod else None
    shaped = lambda heads: jax.ShapeDtypeStruct((problem.batch, problem.length, heads, problem.dim), problem.dtype)
    arrays: list[typing.Any] = [shaped(n) for n in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)]
    if mod is not None and mod.shape is not None:
        arrays.append(jax.ShapeDtypeStruct(mod.shape(problem), mod.stored))
    both, _ = time_mma_backward.step(problem, instruction=INSTRUCTION[card], cta_pairs=pairs)
    compile_card.compile_for(BY_MMA.get(card, card), lambda *given: both(*given, *[None] * (5 - len(given))), *arrays)


def outcome(card: str, entry: str) -> str:
    """Compiles a call; its line, not yet judged."""
    start = time.time()
    try:
        compile_entry(card, entry)
    except NotImplementedError as error:
        return f"refused {entry} {error}"
    except Exception as error:  # whatever the compilers raise
        return f"FAIL {entry} {type(error).__name__} " + str(error).replace("\n", " | ")[:600]
    return f"ok {entry} {time.time() - start:.1f}s"


def say_shared_memory() -> None:
    """Makes every launch of this process print the bytes of shared memory of its CTAs and their columns of tensor memory, beside what the
    compilers print.
    """
    from flexjax.backends.mosaic_gpu.backward import tcgen05 as backward_tcgen05  # noqa: F401  # who launch
    from flexjax.backends.mosaic_gpu.decode import mma as decode_mma  # noqa: F401  # who launch
    from flexjax.backends.mosaic_gpu.families import mma_backward  # noqa: F401  # who launch
    from flexjax.backends.mosaic_gpu.forward import mma as forward_mma  # noqa: F401  # who launch
    from flexjax.backends.mosaic_gpu.forward import tcgen05 as forward_tcgen05  # noqa: F401  # who launch

    launch = kernel_parts.launch

    def said(kernel: typing.Any, inputs: tuple, outputs: tuple, scratch: tuple, **options: typing.Any) -> typing.Any:
        """`launch`."""
        print(f"shared memory of {options['name']}: {scratch_bytes(scratch)} bytes", flush=True)
        print(f"tensor memory of {options['name']}: {tmem_columns(scratch)} columns", flush=True)
        return launch(kernel, inputs, outputs, scratch, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("flexjax.backends.mosaic_gpu.") and getattr(module, "launch", None) is launch:
            module.__dict__["launch"] = said


def child(card: str, names: Sequence[str]) -> None:
    say_shared_memory()
    for entry in names:
        print("begin", entry, flush=True)
        print(outcome(card, entry), flush=True)


class Compiled(typing.NamedTuple):
    """A kernel, from what its compilers said: registers, bytes spilled, bytes of shared memory, columns of tensor memory, instructions
    counted by name.
    """

    registers: int
    spilled: int
    shared: int
    tensor: int
    counts: dict[str, int]


def kernels_of(said: str) -> dict[str, Compiled]:
    """The kernels of KERNELS by name, from the output of the compilers for one call. A kernel that was compiled several times, with other
    tiles, is there once, with the most registers, spills and memory, and the fewest of each instruction.
    """
    memory: dict[tuple[str, str], int] = {}
    for kind, name, count in re.findall(r"(shared|tensor) memory of (\w+): (\d+) ", said):
        memory[kind, name] = max(memory.get((kind, name), 0), int(count))
    found: dict[str, Compiled] = {}
    parts = re.split(r"Function properties for (\w+)_mosaic_gpu_kernel", said)
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        if name not in KERNELS:
            continue
        registers, spilled = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes spill stores", part)
        counts = {n: len(re.findall(rf"\b{n}\b", part)) for n in COUNTED}
        numbers = [0 if x is None else int(x[1]) for x in (registers, spilled)]
        if name in found:
            old = found[name]
            numbers = [max(pair) for pair in zip(numbers, old[:2], strict=True)]
            counts = {n: min(count, old.counts[n]) for n, count in counts.items()}
        found[name] = Compiled(*numbers, memory.get(("shared", name), 0), memory.get(("tensor", name), 0), counts)
    return found


def judged(card: str, line: str, said: str) -> str:
    """The line of a call with a line for each kernel; FAIL by the rules of the file's docstring."""
    if not line.startswith("ok"):
        return f"{line} on {card}"
    found = kernels_of(said)
    case = line.split()[1].rsplit("-", 1)[0]
    wrong = [
        f"{name} {what}" for name, kernel in found.items() for what in _wrong(card, name, kernel, case in ALL_HIDDEN)
    ]
    wrong += [f"{name} spills" for name, kernel in found.items() if kernel.spilled > _most_spilled(case, name)]
    for name, kernel in found.items():
        paired = name == TCGEN05[2] and line.startswith(f"ok {PAIRS}")
        wrong += [f"{name} has {'no ' if paired else ''}{n}" for n in ON_PAIRS if paired != (kernel.counts[n] > 0)]
    # A process compiles equal kernels once, and says nothing the second time: what was launched is there, too.
    there = {*found, *re.findall(r"shared memory of (\w+):", said)}
    if f"flexjax_forward_{INSTRUCTION[card]}" not in there and DECODES not in there:
        wrong.append("no forward kernel")
    if not line.startswith((f"ok {DECODE}", f"ok {PREFILL}")):
        wrong += [] if {BACKWARD[0], TCGEN05[1]} & there else ["no dQ kernel"]
        wrong += [] if {BACKWARD[1], TCGEN05[2]} & there or set(BACKWARD[2:]) <= there else ["no dK/dV kernel"]
    line = f"{line} on {card}"
    lines = [f"FAIL{line[2:]}: {', '.join(wrong)}" if wrong else line]
    for name, kernel in found.items():
        text = ", ".join(f"{n} {instruction}" for instruction, n in kernel.counts.items() if n)
        text = f"{kernel.tensor} columns of tensor memory, {text}" if kernel.tensor else text
        lines.append(
            f"    {name}: {kernel.registers} registers, {kernel.spilled} bytes spilled, {kernel.shared} bytes of shared memory, {text}"
        )
    return "\n".join(lines)


def _most_spilled(case: str, kernel: str) -> int:
    most = MAY_SPILL.get(case, MOST_SPILLED)
    return CROWDED_SPILL.get(kernel, most) if case in CASES and CASES[case].expectations else most


def _wrong(card: str, name: str, kernel: Compiled, hidden: bool) -> list[str]:
    """What a kernel lacks or has that it should not. A decode kernel whose tiles are bytes has no LDSM.

    hidden   whether the mask hides everything
    """
    expected = ON_TCGEN05 if name in TCGEN05 else ("HMMA", *(() if name == DECODES else (LDMATRIX,)), COPYING[card])
    wrong = [] if hidden else [f"has no {n}" for n in expected if not kernel.counts[n]]
    return wrong + [f"has {n}" for n in {WGMMA, CP_ASYNC, TMA} - {COPYING[card]} if kernel.counts[n]]


def sweep(card: str, names: Sequence[str]) -> Iterator[str]:
    """The judged line of each call."""
    command = lambda left: [sys.executable, "-m", "tests.backends.mosaic_gpu.aot_cards", "--child", card, *left]
    for line, said in children.sweep(names, command, ENVIRONMENT):
        yield judged(card, line, "\n".join(said))


def main(arguments: list[str]) -> int:
    """Compiles what the arguments name; returns the exit status."""
    sample = "--sample" in arguments
    named = [a for a in arguments if a != "--sample"]
    cards = [a for a in named if a in INSTRUCTION] or list(SAMPLED_CARDS if sample else INSTRUCTION)
    entries = [a for a in named if a not in INSTRUCTION]
    began, count = time.time(), dict.fromkeys(children.KINDS, 0)
    for card in cards:
        for line in sweep(card, entries or (sampled(card) if sample else TABLE)):
            count[line.split()[0]] += 1
            print(line, flush=True)
    print(*(f"{n} {kind}" for kind, n in count.items()), f"in {time.time() - began:.0f} s", flush=True)
    return int(count["FAIL"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
