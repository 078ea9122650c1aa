"""Runs the PTX of a kernel on the CPU, a CTA at a time, all threads of it as numpy vectors.

Pallas's simulator replaces ldmatrix, mma.sync and cp.async by array operations, so it cannot see a wrong address in shared memory or
a fragment in the wrong lane. This machine executes the instructions that LLVM emits for compute capability 8.x. It knows what the
kernels on mma.sync use and raises NotImplementedError for any other instruction.

Threads wait at barriers as on a GPU. Between barriers their order is a choice (`order`), and so is when a copy by cp.async arrives
(`arrival`): a kernel is right only if its results depend on neither.

    order    "together": threads that are furthest behind go first; "up", "down": a warp runs as far as it can before the next one
    arrival  "late": at the wait of the thread that began it; "early": at once

Reads and writes outside of the arrays raise AssertionError, and shared memory begins as NaN. Results of a race may still agree.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

WARP = 32
ARRAY_GAP = 1 << 20
"""Bytes between two arrays in global memory, which no instruction may touch."""
FIRST_ADDRESS = 1 << 40
SHARED_BASE = 1024
NAMED_BARRIERS = 16
"""Barriers of a CTA; after their numbers come those at which the lanes of each warp meet."""

Vector = np.ndarray
"""One element for each thread: uint32, uint64, uint16 or bool."""


class Instruction(typing.NamedTuple):
    """An instruction: guard ("%p1", "!%p1" or ""), name with its suffixes, operands as text, its line."""

    guard: str
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass
class Kernel:
    """A parsed kernel: blocks of instructions, in the order of the text; labels are numbers of blocks."""

    parameters: list[str]
    blocks: list[list[Instruction]]
    labels: dict[str, int]


def parse(text: str) -> Kernel:
    """The kernel of a PTX module that has one."""
    head, body = text.split(".entry", 1)[1].split("\n}", 1)[0].split("{", 1)
    parameters = re.findall(r"\.param[^,\n)]*?\s(\w+)(?=[,\n)])", head)
    body = re.sub(r"//[^\n]*|^\s*\.(loc|file)\b[^\n]*", "", body, flags=re.MULTILINE)
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for statement in re.split(r"(?<=[;:{}])\s*\n|(?<=;)\s", re.sub(r"\n\s*\n", "\n", body)):
        statement = " ".join(statement.split())
        while statement.startswith(("{ ", "} ")):
            statement = statement[2:]
        if not statement or statement in "{}" or statement.startswith((".reg", ".shared")):
            continue
        if re.fullmatch(r"\$?[\w$]+:", statement):
            labels[statement[:-1]] = len(blocks)
            blocks.append([])
            continue
        match = re.fullmatch(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*?);?", statement)
        assert match, statement
        operands = tuple(x.strip() for x in re.split(r",\s*(?![^{]*\})", match[3]) if x.strip())
        made = Instruction(match[1] or "", tuple(match[2].replace("::", ".").split(".")), operands, statement)
        blocks[-1].append(made)
        if made.name[0] in ("bra", "ret", "bar", "barrier", "exit"):
            blocks.append([])
    return Kernel(parameters, blocks, labels)


def run(
    text: str,
    arrays: Sequence[np.ndarray],
    grid: int,
    threads: int,
    shared_bytes: int,
    order: str = "together",
    arrival: str = "late",
) -> None:
    """Runs every CTA of a launch, one after the other.

    text           PTX
    arrays         what the parameters of the kernel point to; written in place
    grid, threads  CTAs, and threads of each
    shared_bytes   dynamic shared memory of a CTA
    """
    kernel = parse(text)
    memory = GlobalMemory.of(arrays)
    for cta in range(grid):
        Cta(kernel, memory, cta, threads, shared_bytes, order, arrival).run()
    memory.copy_back(arrays)


@dataclasses.dataclass
class GlobalMemory:
    """The arrays in one space of addresses, with gaps between them that hold NaN.

    data    bytes from FIRST_ADDRESS on
    exists  whether a byte belongs to an array
    starts  address of each array
    """

    data: np.ndarray
    exists: np.ndarray
    starts: list[int]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> "GlobalMemory":
        offsets, end = [], ARRAY_GAP
        for x in arrays:
            offsets.append(end)
            end += -(-x.nbytes // 256) * 256 + ARRAY_GAP
        data, exists = np.full(end, 0xFF, np.uint8), np.zeros(end, bool)
        for x, start in zip(arrays, offsets, strict=True):
            data[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            exists[start : start + x.nbytes] = True
        return cls(data, exists, [FIRST_ADDRESS + n for n in offsets])

    def copy_back(self, arrays: Sequence[np.ndarray]) -> None:
        for x, start in zip(arrays, self.starts, strict=True):
            first = start - FIRST_ADDRESS
            x.reshape(-1).view(np.uint8)[:] = self.data[first : first + x.nbytes]


@dataclasses.dataclass
class Copy:
    """A cp.async of several threads that has not arrived for those in `waiting`."""

    waiting: Vector
    group: Vector
    target: Vector
    source: Vector
    size: Vector


# ------------------------------------------------------------------- rounding


def _floats(x: Vector) -> Vector:
    return x.view(np.float32)


def _bits(x: Vector) -> Vector:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def _narrow(x: Vector, kind: str) -> Vector:
    """float32 rounded to "bf16" or "f16", as uint16."""
    return _floats(x).astype(ml_dtypes.bfloat16 if kind.startswith("bf16") else np.float16).view(np.uint16)


def _wide(x: Vector, kind: str) -> Vector:
    """uint16 bits of "bf16" or "f16" as float32."""
    return x.astype(np.uint16).view(ml_dtypes.bfloat16 if kind.startswith("bf16") else np.float16).astype(np.float32)


INTEGERS = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
}  # fmt: skip
COMPARE: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | (a != a) | (b != b), "neu": lambda a, b: (a != b) | (a != a) | (b != b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b), "nan": lambda a, b: (a != a) | (b != b), "num": lambda a, b: (a == a) & (b == b),
}  # fmt: skip
UNARY: dict[str, Callable] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "tanh": np.tanh, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos,
    "rsqrt": lambda x: 1 / np.sqrt(x), "neg": np.negative, "abs": np.abs,
}  # fmt: skip


def _maximum(name: tuple[str, ...], a: Vector, b: Vector) -> Vector:
    return np.maximum(a, b) if "NaN" in name else np.fmax(a, b)


BINARY: dict[str, Callable[[tuple[str, ...], Vector, Vector], Vector]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b,
    "div": lambda _, a, b: a / b,
    "max": _maximum,
    "min": lambda name, a, b: np.minimum(a, b) if "NaN" in name else np.fmin(a, b),
}


class Cta:
    """The threads of one CTA, their registers and shared memory."""

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, number: int, threads: int, shared: int, order: str, arrival: str
    ) -> None:
        self.kernel, self.memory, self.number, self.threads = kernel, memory, number, threads
        self.order, self.arrival = order, arrival
        self.shared = np.full(SHARED_BASE + shared, 0xFF, np.uint8)
        self.registers: dict[str, Vector] = {}
        self.at = np.zeros(threads, np.int64)
        self.blocked = np.full(threads, -1)
        self.done = np.zeros(threads, bool)
        self.copies: list[Copy] = []
        self.groups = np.zeros(threads, np.int64)
        self.mask = np.ones(threads, bool)

    def run(self) -> None:
        """Runs until every thread has returned."""
        warp = np.arange(self.threads) // WARP
        with np.errstate(all="ignore"):
            while not self.done.all():
                ready = (self.blocked < 0) & ~self.done
                assert ready.any(), "all threads wait at a barrier"
                if self.order != "together":
                    first = warp[ready].min() if self.order == "up" else warp[ready].max()
                    ready &= warp == first
                self.mask = ready & (self.at == self.at[ready].min())
                self._block(int(self.at[self.mask][0]))

    def _block(self, number: int) -> None:
        self.at[self.mask] = number + 1
        for instruction in self.kernel.blocks[number]:
            before = self.mask
            if instruction.guard:
                on = self.registers[instruction.guard.lstrip("!")]
                self.mask = before & (~on if instruction.guard[0] == "!" else on)
            if self.mask.any():
                try:
                    self._execute(instruction)
                except Exception as error:
                    raise type(error)(f"{error}, in `{instruction.text}`") from error
            self.mask = before

    # ----------------------------------------------------------------- operands

    def get(self, operand: str, dtype: typing.Any = np.uint32) -> Vector:
        """The value of an operand, one for each thread, in an integer dtype, bool, or float32."""
        if operand in self.registers:
            value = self.registers[operand]
        elif operand.startswith("%tid"):
            value = np.arange(self.threads, dtype=np.uint32) * np.uint32(operand == "%tid.x")
        elif operand.startswith("%ctaid"):
            value = np.full(self.threads, self.number if operand == "%ctaid.x" else 0, np.uint32)
        elif operand.startswith("0f"):
            value = np.full(self.threads, int(operand[2:], 16), np.uint32)
        elif re.fullmatch(r"-?\d+|-?0x[0-9a-fA-F]+", operand):
            return np.full(self.threads, int(operand, 0)).astype(np.int64).astype(dtype)
        elif operand.startswith("__dynamic_shmem"):
            return np.full(self.threads, SHARED_BASE, dtype)
        else:
            raise NotImplementedError(f"operand {operand}")
        if dtype == np.float32:
            return _floats(value)
        return (
            value
            if value.dtype == dtype or value.dtype == bool
            else value.view(np.dtype(dtype))
            if (value.dtype.itemsize == np.dtype(dtype).itemsize)
            else value.astype(dtype)
        )

    def set(self, operand: str, value: Vector) -> None:
        """Writes a register in the threads of the mask."""
        if operand == "_":
            return
        if value.dtype == np.float32:
            value = _bits(value)
        if value.dtype.kind == "i":
            value = value.view(value.dtype.str.replace("i", "u"))
        if operand not in self.registers or self.mask.all():
            self.registers[operand] = np.array(value)
        else:
            self.registers[operand] = np.where(self.mask, value, self.registers[operand].astype(value.dtype))

    def address(self, operand: str) -> Vector:
        """The address of a memory operand, `[%rd1+16]`."""
        match = re.fullmatch(r"\[(\S+?)(?:\+(-?\d+))?\]", operand)
        assert match, operand
        base = self.get(match[1], np.uint64).astype(np.uint64)
        return (base.astype(np.int64) + int(match[2] or 0)).astype(np.int64)

    # ----------------------------------------------------------------- memory

    def place(self, addresses: Vector, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """(a memory, [n, size] places in it) of so many bytes from each of n addresses."""
        places = addresses[:, None] + np.arange(size)
        if (addresses < FIRST_ADDRESS).all():
            inside = (places >= SHARED_BASE) & (places < len(self.shared))
            assert inside.all(), f"{what} outside of shared memory"
            return self.shared, places
        places = places - FIRST_ADDRESS
        inside = (places >= 0) & (places < len(self.memory.data))
        assert inside.all(), f"{what} outside of the arrays"
        assert self.memory.exists[places].all(), f"{what} outside of the arrays"
        return self.memory.data, places

    def read(self, addresses: Vector, size: int) -> Vector:
        """[n, size] bytes at n addresses."""
        memory, places = self.place(addresses, size, "read")
        return memory[places]

    def write(self, addresses: Vector, data: np.ndarray) -> None:
        """Writes [n, size] bytes at n addresses."""
        memory, places = self.place(addresses, data.shape[1], "write")
        memory[places] = data

    def _land(self, due: Callable[[Copy], Vector]) -> None:
        """Lets copies arrive in the threads of `due`."""
        left = []
        for copy in self.copies:
            now = copy.waiting & due(copy)
            if now.any():
                data = np.zeros((int(now.sum()), 16), np.uint8)
                full = copy.size[now] > 0
                if full.any():
                    assert (copy.size[now][full] == 16).all()
                    data[full] = self.read(copy.source[now][full], 16)
                self.write(copy.target[now], data)
                copy.waiting = copy.waiting & ~now
            if copy.waiting.any():
                left.append(copy)
        self.copies = left

    # ----------------------------------------------------------------- instructions

    def _execute(self, instruction: Instruction) -> None:
        name, operands = instruction.name, instruction.operands
        special = getattr(self, f"_{name[0]}", None)
        if special is not None:
            special(name, *operands)
        elif name[-1] == "f32" and name[0] in UNARY:
            self.set(operands[0], UNARY[name[0]](self.get(operands[1], np.float32)))
        elif name[-1] == "f32" and name[0] in BINARY:
            a, b = (self.get(x, np.float32) for x in operands[1:3])
            self.set(operands[0], BINARY[name[0]](name, a, b))
        elif name[-1] in ("bf16x2", "f16x2") and name[0] in BINARY:
            self._halves(name[-1], lambda a, b: BINARY[name[0]](name, a, b), *operands)
        else:
            self._integer(name, operands)

    def _integer(self, name: tuple[str, ...], operands: tuple[str, ...]) -> None:
        """Integer arithmetic and bits."""
        kind = name[-1]
        if kind == "pred":
            a, b = self.get(operands[1], bool), self.get(operands[-1], bool)
            self.set(operands[0], {"and": a & b, "or": a | b, "xor": a ^ b, "not": ~a}[name[0]])
            return
        dtype = np.dtype(INTEGERS[kind])
        if name[0] in ("shl", "shr"):
            a, n = self.get(operands[1], dtype), self.get(operands[2], np.uint32)
            bits = dtype.itemsize * 8
            fill = a >> np.array(bits - 1, dtype) if name[0] == "shr" else np.zeros_like(a)
            small = np.minimum(n, bits - 1).astype(dtype)
            moved = a << small if name[0] == "shl" else a >> small
            self.set(operands[0], np.where(n >= bits, fill if dtype.kind == "i" else 0, moved).astype(dtype))
            return
        values = [self.get(x, dtype) for x in operands[1:]]
        if name[:2] == ("mul", "wide") or name[:2] == ("mad", "wide"):
            wide = np.int64 if dtype.kind == "i" else np.uint64
            found = values[0].astype(wide) * values[1].astype(wide)
            found = found + self.get(operands[3], wide) if name[0] == "mad" else found
            self.set(operands[0], found)
            return
        if name[:2] == ("mul", "hi"):
            wide = np.int64 if dtype.kind == "i" else np.uint64
            self.set(operands[0], (values[0].astype(wide) * values[1].astype(wide) >> 32).astype(dtype))
            return
        operations: dict[str, Callable[..., Vector]] = {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
            "mad": lambda a, b, c: a * b + c, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
            "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative, "abs": np.abs,
            "rem": np.fmod, "div": lambda a, b: (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)
            if a.dtype.kind == "i" else a // b,
        }  # fmt: skip
        if name[0] not in operations:
            raise NotImplementedError(".".join(name))
        self.set(operands[0], operations[name[0]](*values).astype(dtype))

    def _fma(self, name: tuple[str, ...], target: str, *operands: str) -> None:
        if name[-1] in ("bf16x2", "f16x2"):
            self._halves(name[-1], lambda a, b, c: a * b + c, target, *operands)
            return
        a, b, c = (self.get(x, np.float32).astype(np.float64) for x in operands)
        self.set(target, (a * b + c).astype(np.float32))

    def _halves(self, kind: str, operation: Callable[..., Vector], target: str, *operands: str) -> None:
        """Arithmetic on two numbers of 16 bits in 32, rounded once."""
        found = np.zeros(self.threads, np.uint32)
        for shift in (np.uint32(0), np.uint32(16)):
            parts = [_wide((self.get(x) >> shift).astype(np.uint16), kind).astype(np.float64) for x in operands]
            found |= _narrow(operation(*parts).astype(np.float32), kind).astype(np.uint32) << shift
        self.set(target, found)

    def _prmt(self, name: tuple[str, ...], target: str, low: str, high: str, selector: str) -> None:
        both = self.get(low).astype(np.uint64) | self.get(high).astype(np.uint64) << np.uint64(32)
        chosen, found = self.get(selector), np.zeros(self.threads, np.uint32)
        for n in range(4):
            nibble = chosen >> np.uint32(4 * n) & np.uint32(15)
            assert (nibble < 8).all(), "prmt that copies signs"
            byte = (both >> (nibble.astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
            found |= byte << np.uint32(8 * n)
        self.set(target, found)

    def _movmatrix(self, name: tuple[str, ...], target: str, source: str) -> None:
        warps = self._warps()
        rows = np.ascontiguousarray(self.get(source).reshape(-1, WARP)[warps]).view(np.uint16).reshape(-1, 8, 8)
        self._spread(target, np.ascontiguousarray(rows.swapaxes(1, 2)).view(np.uint32).reshape(-1, WARP), warps)

    def _mov(self, name: tuple[str, ...], target: str, source: str) -> None:
        if source.startswith("{"):
            low, high = (
                self.get(x.strip(), np.uint16 if name[1] == "b32" else np.uint32) for x in source[1:-1].split(",")
            )
            whole = np.uint32 if name[1] == "b32" else np.uint64
            shift = np.array(16 if name[1] == "b32" else 32, whole)
            self.set(target, low.astype(whole) | high.astype(whole) << shift)
        elif target.startswith("{"):
            parts = [x.strip() for x in target[1:-1].split(",")]
            value = self.get(source, np.uint32 if name[1] == "b32" else np.uint64)
            half, bits = (np.uint16, 16) if name[1] == "b32" else (np.uint32, 32)
            for n, part in enumerate(parts):
                self.set(part, (value >> np.array(bits * n, value.dtype)).astype(half))
        elif name[1] == "pred":
            self.set(target, self.get(source, bool))
        else:
            self.set(target, self.get(source, np.float32 if name[1] == "f32" else INTEGERS[name[1]]))

    def _cvta(self, name: tuple[str, ...], target: str, source: str) -> None:
        self.set(target, self.get(source, np.uint64))

    def _setp(self, name: tuple[str, ...], target: str, *operands: str) -> None:
        dtype = np.float32 if name[-1] == "f32" else INTEGERS[name[-1]]
        found = COMPARE[name[1]](*(self.get(x, dtype) for x in operands[:2]))
        if len(operands) > 2:
            other = self.get(operands[2].lstrip("!"), bool)
            other = ~other if operands[2][0] == "!" else other
            found = {"and": found & other, "or": found | other, "xor": found ^ other}[name[2]]
        self.set(target, found)

    def _selp(self, name: tuple[str, ...], target: str, yes: str, no: str, condition: str) -> None:
        dtype = np.float32 if name[-1] == "f32" else INTEGERS[name[-1]]
        self.set(target, np.where(self.get(condition, bool), self.get(yes, dtype), self.get(no, dtype)))

    def _cvt(self, name: tuple[str, ...], target: str, *sources: str) -> None:
        to, of = name[-2], name[-1]
        if to in ("bf16x2", "f16x2"):
            high, low = (_narrow(self.get(x), to).astype(np.uint32) for x in sources)
            self.set(target, high << np.uint32(16) | low)
        elif to in ("bf16", "f16"):
            self.set(target, _narrow(self.get(sources[0]), to))
        elif of in ("bf16", "f16"):
            self.set(target, _wide(self.get(sources[0], np.uint16), of))
        elif to == "f32":
            self.set(target, self.get(sources[0], INTEGERS[of]).astype(np.float32))
        elif of == "f32":
            value = self.get(sources[0], np.float32)
            value = np.trunc(value) if "rzi" in name else np.rint(value)
            if to == "f32":
                self.set(target, value.astype(np.float32))
            else:
                info = np.iinfo(INTEGERS[to])
                self.set(
                    target, np.clip(np.nan_to_num(value), info.min, info.max).astype(np.int64).astype(INTEGERS[to])
                )
        else:
            self.set(target, self.get(sources[0], INTEGERS[of]).astype(INTEGERS[to]))

    def _bfe(self, name: tuple[str, ...], target: str, source: str, first: str, length: str) -> None:
        value, n = self.get(source, np.uint32), self.get(length)
        self.set(target, value >> self.get(first) & ((np.uint32(1) << n) - np.uint32(1)))

    def _ld(self, name: tuple[str, ...], target: str, source: str) -> None:
        if name[1] == "param":
            place = self.kernel.parameters.index(source[1:-1])
            self.set(target, np.full(self.threads, self.memory.starts[place], np.uint64))
            return
        targets = [x.strip() for x in target.strip("{}").split(",")]
        dtype = np.dtype(INTEGERS[name[-1]])
        addresses = self.address(source)[self.mask]
        data = self.read(addresses, dtype.itemsize * len(targets)).view(dtype)
        for n, one in enumerate(targets):
            value = np.zeros(self.threads, dtype)
            value[self.mask] = data[:, n]
            self.set(one, value.astype({"u8": np.uint16, "b8": np.uint16, "s8": np.int16}.get(name[-1], dtype)))

    def _st(self, name: tuple[str, ...], target: str, source: str) -> None:
        sources = [x.strip() for x in source.strip("{}").split(",")]
        dtype = np.dtype(INTEGERS[name[-1]])
        data = np.stack([self.get(x, dtype)[self.mask] for x in sources], axis=1)
        self.write(self.address(target)[self.mask], np.ascontiguousarray(data).view(np.uint8))

    def _cp(self, name: tuple[str, ...], *operands: str) -> None:
        assert name[1] == "async", name
        if name[2] == "commit_group":
            self.groups[self.mask] += 1
        elif name[2] == "wait_group":
            pending, mask = int(operands[0]), self.mask
            self._land(lambda copy: mask & (copy.group < self.groups - pending))
        elif name[2] == "wait_all":
            mask = self.mask
            self._land(lambda copy: mask)
        else:
            assert operands[2] == "16", operands
            size = self.get(operands[3]) if len(operands) > 3 else np.full(self.threads, 16, np.uint32)
            addresses = self.address(operands[0]), self.address(operands[1])
            self.copies.append(Copy(self.mask.copy(), self.groups.copy(), *addresses, size))
            if self.arrival == "early":
                self._land(lambda copy: self.mask)

    def _bar(self, name: tuple[str, ...], number: str, count: str | None = None) -> None:
        threads = self.threads if count is None else int(self.get(count)[0])
        wanted = self.get(number, np.int32)
        if name[1] == "warp":
            assert (wanted == -1).all(), "not all lanes"
            threads, wanted = WARP, NAMED_BARRIERS + np.arange(self.threads, dtype=np.int32) // WARP
        self.blocked[self.mask] = wanted[self.mask]
        for one in np.unique(wanted[self.mask]):
            here = self.blocked == one
            if here.sum() == threads:
                self.blocked[here] = -1

    _barrier = _bar

    def _bra(self, name: tuple[str, ...], label: str) -> None:
        self.at[self.mask] = self.kernel.labels[label]

    def _ret(self, name: tuple[str, ...]) -> None:
        self.done |= self.mask
        assert not any((copy.waiting & self.mask).any() for copy in self.copies), "a thread ends before its copies"

    # ----------------------------------------------------------------- instructions of a warp

    def _warps(self) -> Vector:
        """Numbers of the warps of the mask, which has all of their threads."""
        found = self.mask.reshape(-1, WARP)
        assert (found.all(axis=1) == found.any(axis=1)).all(), "threads of a warp are apart"
        return np.flatnonzero(found.all(axis=1))

    def _spread(self, target: str, value: Vector, warps: Vector) -> None:
        """Writes a register, [warps, 32]."""
        whole = np.zeros((self.threads // WARP, WARP), value.dtype)
        whole[warps] = value
        self.set(target, whole.reshape(-1))

    def _shfl(self, name: tuple[str, ...], target: str, source: str, by: str, clamp: str, members: str) -> None:
        warps, value = self._warps(), self.get(source).reshape(-1, WARP)
        distance, lanes = self.get(by).reshape(-1, WARP)[warps], np.arange(WARP)
        assert name[2] in ("bfly", "idx"), name
        places = lanes ^ distance if name[2] == "bfly" else distance
        self._spread(target, np.take_along_axis(value[warps], places.astype(np.int64) % WARP, axis=1), warps)

    def _vote(self, name: tuple[str, ...], target: str, source: str, members: str) -> None:
        warps, value = self._warps(), self.get(source, bool).reshape(-1, WARP)
        assert name[2] in ("any", "all"), name
        found = value[warps].any(axis=1) if name[2] == "any" else value[warps].all(axis=1)
        self._spread(target, np.repeat(found[:, None], WARP, axis=1), warps)

    def _ldmatrix(self, name: tuple[str, ...], target: str, source: str) -> None:
        warps = self._warps()
        targets = [x.strip() for x in target.strip("{}").split(",")]
        addresses = self.address(source).reshape(-1, WARP)[warps, : 8 * len(targets)]
        assert (addresses % 16 == 0).all(), "a row of ldmatrix is not aligned"
        rows = self.read(addresses.reshape(-1), 16).view(np.uint16).reshape(len(warps), len(targets), 8, 8)
        if "trans" in name:
            rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(len(warps), len(targets), WARP)
        for n, one in enumerate(targets):
            self._spread(one, pairs[:, n], warps)

    def _mma(self, name: tuple[str, ...], target: str, *sources: str) -> None:
        assert name[3] == "m16n8k16", name
        warps, places = self._warps(), _fragments()
        registers = lambda text: np.stack(
            [self.get(x.strip()).reshape(-1, WARP)[warps] for x in text.strip("{}").split(",")], axis=-1
        )
        kind = name[-2]
        a, b = (np.ascontiguousarray(registers(x)).view(np.uint16) for x in sources[:2])  # [warps, 32, registers * 2]
        left = _wide(np.ascontiguousarray(a.reshape(len(warps), -1)[:, places["a"]]), kind)
        right = _wide(np.ascontiguousarray(b.reshape(len(warps), -1)[:, places["b"]]), kind)
        total = _floats(np.ascontiguousarray(registers(sources[2]).reshape(len(warps), -1)[:, places["c"]]))
        found = _bits(left @ right + total).reshape(len(warps), -1)
        back = np.empty_like(found)
        back[:, places["c"].reshape(-1)] = found
        for n, one in enumerate(target.strip("{}").split(",")):
            self._spread(one.strip(), back.reshape(len(warps), WARP, 4)[:, :, n], warps)


@functools.cache
def _fragments() -> dict[str, np.ndarray]:
    """For the operands of mma.m16n8k16: [rows, columns] -> place among the elements of the warp, lane by lane."""

    def places(rows: int, columns: int, elements: int, at: Callable[[int, int], tuple[int, int]]) -> np.ndarray:
        found = np.zeros((rows, columns), np.int64)
        for lane in range(WARP):
            for n in range(elements):
                found[at(lane, n)] = lane * elements + n
        return found

    return {
        "a": places(16, 16, 8, lambda l, n: (l // 4 + 8 * (n // 2 % 2), l % 4 * 2 + n % 2 + 8 * (n // 4))),
        "b": places(16, 8, 4, lambda l, n: (l % 4 * 2 + n % 2 + 8 * (n // 2), l // 4)),
        "c": places(16, 8, 4, lambda l, n: (l // 4 + 8 * (n // 2), l % 4 * 2 + n % 2)),
    }
