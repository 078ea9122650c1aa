"""Machine code of GPU kernels with its control words: the instructions, and the loops that multiply matrices.

It reads the `.sass_ctrl` files that Mosaic GPU leaves where MOSAIC_GPU_DUMP_TO says; lab/sass_clocks.py simulates the loops.
"""

import re
import typing
from collections.abc import Sequence


class Instruction(typing.NamedTuple):
    """One instruction of SASS with its control word.

    text            without its predicate
    stall           clocks until the next instruction of the warp may issue
    waits           barriers on which it waits
    writes, reads   the barrier that it opens when its result is there, and when its operands are read; None: none
    """

    text: str
    stall: int
    waits: tuple[int, ...]
    writes: int | None
    reads: int | None

    @property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.text.split()[0].split(".")[0]


LINE = re.compile(r"\s*(\S+):(\S+):(\S+):\S+:(\d+)\s+/\*[0-9a-f]{4,}\*/\s+(.*)$")


def read(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """(the instructions of a `.sass_ctrl` file, the index of the instruction after each label)."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, found = re.match(r"\s*\.(L_x_\d+):", line), LINE.match(line)
        if label:
            labels[label[1]] = len(code)
        if found:
            waits, reads, writes, stall, body = found.groups()
            number = lambda field: None if field == "-" else int(field)
            words = re.sub(r"^@!?U?P\w+\s+", "", body.strip())
            code.append(Instruction(words, max(1, int(stall)), _barriers(waits), number(writes), number(reads)))
    return code, labels


def _barriers(field: str) -> tuple[int, ...]:
    """The barriers of a field of the control word: "-", "2", "2&1" or a mask in hexadecimal digits."""
    if field == "-":
        return ()
    if field.startswith("0x"):
        return tuple(i for i in range(6) if int(field, 16) >> i & 1)
    return tuple(int(n) for n in field.split("&"))


def target(instruction: Instruction, labels: dict[str, int]) -> int | None:
    """The index that a branch leads to, None for other instructions."""
    found = re.match(r"BRA\b.*\.(L_x_\d+)", instruction.text)
    return labels.get(found[1]) if found else None


MATRIX = ("HMMA", "HGMMA", "QGMMA")


def step_loops(code: Sequence[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """(first, last) index of each innermost loop that multiplies matrices, in the order of the code; where a warp of its own multiplies
    (tcgen05), of each that computes 16 exponentials or more.

    Code after EXIT retries waits and leads back into loops; it is no loop.
    """
    ends = [i for i, x in enumerate(code) if x.name == "EXIT"]
    multiplies = any(x.name in MATRIX for x in code)
    found = []
    for i, instruction in enumerate(code):
        first = target(instruction, labels)
        if first is None or first > i or any(first <= e <= i for e in ends):
            continue
        names = [x.name for x in code[first : i + 1]]
        if any(name in MATRIX for name in names) or (not multiplies and names.count("MUFU") >= 16):
            found.append((first, i))
    return [(a, b) for a, b in found if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)]


def without_rare(code: Sequence[Instruction], labels: dict[str, int], loop: tuple[int, int]) -> list[Instruction]:
    """The instructions of a loop, but for those that a forward branch skips where 16 or more of them are multiplications and none is an
    exponential or a product of matrices: the rescaling of the output, which few steps need (`lazy_rescale`).
    """
    first, last = loop
    kept, i = [], first
    while i <= last:
        kept.append(code[i])
        to = target(code[i], labels)
        if to is not None and i < to <= last:
            names = [x.name for x in code[i + 1 : to]]
            if names.count("FMUL") >= 16 and not {*MATRIX, "MUFU"} & set(names):
                i = to - 1
        i += 1
    return kept
