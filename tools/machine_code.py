"""Shows whether a change leaves the machine code of the GPU kernels as it was, on a machine without a GPU.

    python -m tools.machine_code > before.txt                      the conformance table: a line `entry kernel hash` a kernel
    python -m tools.machine_code --against before.txt [ENTRY ...]  how many are the same, and which differ
    python -m tools.machine_code --sass [--against FILE] ENTRY ... hashes of the machine code itself (SASS) instead

An entry is CASE-DTYPE, a call of the conformance table (tests/cases/calls.py) with one dtype. The first hash is over
the Mosaic GPU module as it leaves Python, without locations and names of functions: equal modules make equal machine
code. Where modules differ, compare the SASS. A kernel is compared with those of its entry, whatever it is called.
Needs the wheels that tests/backends/mosaic_gpu/compile_hopper.py names.
"""

import argparse
import collections
import hashlib
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator, Sequence

import jax

from tests.backends import children
from tests.backends.mosaic_gpu import aot, compile_hopper

NAME = re.compile(r"@(\w+)_mosaic_gpu\b")
PTX = re.compile(r"\.version .*?\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(.*?\n}\n", re.DOTALL)


def digest(data: bytes) -> str:
    """The first 16 hex digits of the SHA-256 hash of the data."""
    return hashlib.sha256(data).hexdigest()[:16]


def canonical(module: typing.Any) -> tuple[str, str]:
    """(name of the kernel, the text of its MLIR module without locations and names)."""
    text = module.operation.get_asm(enable_debug_info=False)
    found = NAME.search(text)
    name = found[1] if found else "?"
    text = re.sub(
        r"mosaic_gpu\.dump_basename = \"[^\"]*\"", "", text
    )  # the name and how many came before in the process
    text = re.sub(rf"@{name}(_mosaic_gpu)?\b", "@kernel", text)
    return name, re.sub(r"^module @\w+", "module @kernel", text, flags=re.MULTILINE)


def lower_only(names: Sequence[str]) -> None:
    """Lowers each entry and prints a line `kernel NAME HASH` for each of its kernels, in this process; no assembler
    runs. It replaces functions of jax for the rest of the process.

    names   entries of the conformance table
    """
    from jax.experimental.mosaic.gpu import core

    serialize = core._run_serde_pass

    def hashing(module: typing.Any, **options: typing.Any) -> typing.Any:
        """Replaces jax's function that writes a kernel's module as bytecode: prints the hash of the module first."""
        name, text = canonical(module)
        print("kernel", name, digest(text.encode()), flush=True)
        return serialize(module, **options)

    core._run_serde_pass = hashing
    jax.stages.Lowered.compile = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    aot.child(names)


def text_sections(cubin: bytes) -> bytes:
    """The instructions in an ELF file, `cubin`: the bytes of its sections .text.*, one after the other."""
    table, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(count)]
    label = lambda header: cubin[headers[names][4] + header[0] :][:6]
    return b"".join(cubin[h[4] : h[4] + h[5]] for h in headers if label(h) == b".text.")


def assembled(ptx: str) -> str:
    """The hash (`digest`) of the SASS that ptxas, from the NVIDIA wheels on sys.path, makes of the PTX text for sm_90a.
    Raises CalledProcessError where ptxas fails.
    """
    wheel = next(pathlib.Path(root) for root in sys.path if list(pathlib.Path(root).glob("nvidia/*/bin/ptxas")))
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(next(wheel.glob("nvidia/*/bin/ptxas"))), "--gpu-name=sm_90a", "--opt-level=3", str(source)]
        subprocess.run([*command, "-o", str(target)], check=True, capture_output=True)
        return digest(text_sections(target.read_bytes()))


def kernels(names: Sequence[str], sass: bool) -> Iterator[tuple[str, str, str]]:
    """(entry, kernel, hash) of each kernel of these entries, which child processes lower or (`sass`) compile.

    A call that is refused or fails has one line, whose hash is that of its message.
    """
    command = lambda left: [sys.executable, "-m", "tools.machine_code", "--child", *(["--sass"] * sass), *left]
    environment = {**aot.ENVIRONMENT, "MOSAIC_GPU_DUMP_PTXAS": "", "MOSAIC_GPU_DUMP_PTX": "1" if sass else ""}
    for line, said in children.sweep(names, command, environment):
        kind, entry, *rest = line.split(" ", 2)
        if kind != "ok":
            yield entry, kind, digest(" ".join(rest).encode())
        elif sass:
            for found in PTX.finditer("\n".join(said) + "\n"):
                yield entry, found[1], assembled(found[0])
        else:
            yield from ((entry, *line.split()[1:]) for line in said if line.startswith("kernel "))  # pyright: ignore[reportReturnType]


def main() -> int:
    """Prints the hashes, or with `--against` compares them; returns the exit status.

    It is 1 where a kernel of the named entries differs from the file or the file has one more, else 0. Ends the process
    with a message for unknown entries and without the wheels.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="CASE-DTYPE; all by default")
    parser.add_argument("--against", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--sass", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.entries or list(aot.TABLE)
    if given.child:
        (aot.child if given.sass else lower_only)(names)
        return 0
    if unknown := set(names) - set(aot.TABLE):
        parser.error(f"no such entries in the conformance table: {', '.join(sorted(unknown))}")
    if reason := compile_hopper.missing():
        sys.exit(reason)
    before: dict[str, list[str]] = collections.defaultdict(list)
    for line in given.against.read_text().splitlines() if given.against else ():
        entry, _, code = line.split()
        before[entry].append(code)
    same, differ = 0, 0
    for entry, kernel, code in kernels(names, given.sass):
        if given.against is None:
            print(entry, kernel, code, flush=True)
        elif code in before[entry]:
            before[entry].remove(code)
            same += 1
        else:
            differ += 1
            print("differs", entry, kernel, code, flush=True)
    gone = sum(len(before[name]) for name in names)
    if given.against is not None:
        print(f"{same} kernels identical, {differ} differ, {gone} of the file without a counterpart", flush=True)
    return int(differ + gone > 0)


if __name__ == "__main__":
    sys.exit(main())
