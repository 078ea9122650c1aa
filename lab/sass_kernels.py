"""The kernels whose loops lab/sass_clocks.py simulates: their calls, the cards and their units, and how they are compiled."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import typing
from collections.abc import Sequence

from lab.tcgen05_counts import Issue


@dataclasses.dataclass(frozen=True)
class Units:
    """Clocks for which an instruction of one warp occupies a unit of its partition.

    fma, alu, mufu            float32 arithmetic; minimum, compare, select, integers and conversions to 16 bits; ex2
    mma                       mma.sync m16n8k16
    tensor_rate               operations a clock of a partition's tensor core, for WGMMA
    contention                clocks by which each instruction of the other units delays a WGMMA in flight, because both use the registers
    """

    fma: float
    alu: float
    mufu: float
    mma: float
    tensor_rate: float
    contention: float = 0.0


UNITS = {
    "A100": Units(fma=2, alu=2, mufu=8, mma=8, tensor_rate=512),
    "L40S": Units(fma=1, alu=2, mufu=8, mma=16, tensor_rate=256),
    "RTX 4090": Units(fma=1, alu=2, mufu=8, mma=32, tensor_rate=128),
    "RTX 5090": Units(fma=1, alu=2, mufu=8, mma=32, tensor_rate=128),
    "Hopper": Units(fma=1, alu=2, mufu=8, mma=8, tensor_rate=1024, contention=1.5),
    "B200": Units(fma=1, alu=2, mufu=8, mma=0, tensor_rate=2048),
}
"""The throughput table of the CUDA programming guide, "Arithmetic Instructions", as 32 lanes over a quarter of its results a clock.
mma: peak rates of the data sheets with float32 sums (A100 1024, L40S 512, RTX 256 FMA a clock of an SM). Two numbers of Hopper are fitted to
forward passes on an H200 (notes/card_model.md): mma.sync at half the rate of WGMMA, where arXiv 2402.13499 measures 63% of the peak; and
`contention`, which is what three operands take of two register banks."""
TARGETS = {
    "A100": "sm_80",
    "L40S": "sm_89",
    "RTX 4090": "sm_89",
    "RTX 5090": "sm_120",
    "Hopper": "sm_90",
    "B200": "sm_100",
}
"""Card -> the target that its kernels are compiled for."""


class Kernel(typing.NamedTuple):
    """A kernel to compile and to simulate.

    call          (mask, head dim) of the call
    card          key of UNITS
    instruction   KernelOptions.instruction
    file          the name that its SASS begins with
    warps         warps of a partition, one of each resident warpgroup
    product       clocks of one of the two products of a warpgroup's tile in the forward pass on tcgen05, where another warp issues them; else 0
    copied        bytes that TMA or the copies of the kernel write to and read from shared memory in a step of all of them
    issue         how the backward kernels on tcgen05 issue their products; None for the others
    """

    call: tuple[str, int]
    card: str
    instruction: str | None
    file: str
    warps: int
    copied: int = 0
    product: float = 0.0
    issue: Issue | None = None

    @property
    def pairs(self) -> bool:
        """Whether it is compiled with `KernelOptions(cta_pairs=True)`."""
        return self.issue is not None and self.issue.pairs


def _kernels(card: str, instruction: str | None) -> dict[str, Kernel]:
    """The forward and backward kernels, on Hopper also the tangent kernels, of full and causal attention at head dims 64 and 128, by name."""
    found = {}
    for mask in ("full", "causal"):
        for dim in (64, 128):
            key, call = f"{card} {instruction or 'wgmma'} {mask} d{dim}", (mask, dim)
            if instruction == "mma":
                keys = 32 if dim == 128 and TARGETS[card] in ("sm_89", "sm_120") else 64
                copied = 2 * keys * 2 * dim * 2  # two tiles of two CTAs
                for kernel, file in ("", "forward_mma"), (" dq", "backward_dq"), (" dkv", "backward_dkv"):
                    found[key + kernel] = Kernel(call, card, "mma", f"flexjax_{file}", 2, copied)
                continue
            groups, queries = 3 if call == ("full", 64) else 2, 128 if dim == 64 else 64
            found[key] = Kernel(call, card, None, "flexjax_forward", groups, 128 * 2 * dim * 2)
            # keys, values and their tangents, in tiles of 128 x 128 at d64 and 128 x 64 at d128
            found[key + " tangent"] = Kernel(call, card, None, "flexjax_tangent", 2, 4 * 64 * 128 * 2)
            # Q and dO come in, dQ in float32 goes out
            found[key + " fused"] = Kernel(call, card, None, "flexjax_backward_fused", 2, queries * dim * (2 + 2 + 4))
    return found


def _on_tcgen05() -> dict[str, Kernel]:
    """The kernels on tcgen05: forward with two query tiles of 128 rows, a softmax warpgroup each; backward, and dK/dV in pairs of CTAs."""
    found = {}
    for mask in ("full", "causal"):
        for dim in (64, 128):
            product = 2 * 128 * 128 * dim / (4 * UNITS["B200"].tensor_rate)
            name = f"B200 tcgen05 {mask} d{dim}"
            call, copied = (mask, dim), 128 * 2 * dim * 2
            found[name] = Kernel(call, "B200", "tcgen05", "flexjax_forward_tcgen05", 2, copied, product)
            for kernel, pairs in (("dq", False), ("dkv", False), *([("dkv", True)] if dim == 128 else [])):
                file, issue = f"flexjax_backward_{kernel}_tcgen05", Issue(dim, kernel, pairs)
                key = f"{name} {kernel}{' pairs' if pairs else ''}"
                found[key] = Kernel(call, "B200", "tcgen05", file, 2, copied, issue=issue)
    return found


KERNELS = _kernels("Hopper", None) | _on_tcgen05()
for _card in ("Hopper", "A100", "L40S", "RTX 4090", "RTX 5090"):
    KERNELS |= _kernels(_card, "mma")


def compile_kernel(name: str) -> None:
    """Compiles the passes of a kernel's call in this process; MOSAIC_GPU_DUMP_TO says where the SASS goes."""
    import jax
    import jax.numpy as jnp

    import flexjax
    from flexjax import masks
    from tests.backends.mosaic_gpu import compile_card, compile_hopper

    kernel = KERNELS[name]
    mask, dim = kernel.call
    instruction = typing.cast(typing.Any, kernel.instruction)
    options = flexjax.KernelOptions(instruction=instruction, cta_pairs=kernel.pairs)
    words: typing.Any = dict(mask_mod=masks.causal) if mask == "causal" else {}

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> object:
        """Output, gradients and tangent of the call."""
        call = lambda *a: flexjax.flex_attention(*a, implementation="mosaic_gpu", kernel_options=options, **words)
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(d_out), jax.jvp(call, (q, k, v), (d_out, d_out, d_out))[1]

    arrays = [jax.ShapeDtypeStruct((2, 8192, 2048 // dim, dim), jnp.bfloat16)] * 4
    if kernel.card == "Hopper":
        compile_hopper.compile_for_hopper(both, *arrays)
    else:
        compile_card.compile_for(TARGETS[kernel.card], both, *arrays)


def folder_of(folder: pathlib.Path, kernel: Kernel) -> pathlib.Path:
    """Where the SASS of the call of a kernel lies: all kernels of a call are compiled together."""
    mask, dim = kernel.call
    pairs = "-pairs" if kernel.pairs else ""
    return folder / f"{TARGETS[kernel.card]}-{kernel.instruction or 'wgmma'}-{mask}-d{dim}{pairs}"


def compiled(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Compiles the calls of these kernels, each in a child process."""
    for place, name in {folder_of(folder, KERNELS[n]): n for n in names}.items():
        place.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", MOSAIC_GPU_DUMP_TO=str(place))
        subprocess.run(
            [sys.executable, "-m", "lab.sass_clocks", "--child", str(folder), name], check=True, env=environment
        )
