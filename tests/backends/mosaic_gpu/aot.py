"""Compiles calls for Hopper on a machine without a GPU, through the front door: results and all gradients.

    python -m tests.backends.mosaic_gpu.aot [--sample] [name ...]     one line per call: ok, refused or FAIL, and what it spills

Needs the wheels that compile_hopper.py names. Each part has a child process; where a compiler ends the process, that call
has failed and a new child goes on with the next.
"""

import functools
import itertools
import math
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks
from flexjax.types import KernelOptions
from tests.backends import children
from tests.backends.mosaic_gpu import compile_hopper
from tests.bound_case import BoundCase
from tests.cases import CASES, on_mesh

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": ""}  # not those of conftest.py
DTYPES = ("bfloat16", "float16")
TABLE = {f"{name}-{dtype}": (name, dtype) for name in CASES for dtype in DTYPES}
ON_MESH = (
    "mesh", "mesh_check_vma", "mesh_explicit", "mesh_auto", "mesh_one_kernel", "mesh_one_kernel_check_vma", "mesh_window",
)  # fmt: skip
"""Calls inside shard_map, and on arrays that explicit or automatic axes split; one kernel: dense attention, whose backward pass is the
fused one; window: a sequence that is split over two GPUs."""
SPILLS = re.compile(r"Function properties for (\w+)_mosaic_gpu_kernel\s.*? (\d+) bytes spill stores", re.DOTALL)

MAY_SPILL = {
    "narrower_values": {"flexjax_backward_fused": 8},
    "mesh_window": {"flexjax_backward_fused": 24},
    "interpolated": {"flexjax_capture_gradient": 20},
    "decayed_weights": {"flexjax_capture_gradient": 16},
    "four_expectations": {"flexjax_capture_gradient": 8},
    "expectations_of_weights": {
        "flexjax_capture_gradient": 40,
        "flexjax_backward_dkv": 360,
        "flexjax_backward_dq": 92,
    },
    "expectations_bnth": {"flexjax_forward": 56, "flexjax_capture_gradient": 1016, "flexjax_backward_dq": 128},
    "dilated_expectations": {"flexjax_capture_gradient": 188},
    "wide_expectations": {"flexjax_forward": 8},
}
"""Case -> kernel -> bytes that a thread may spill: numbers that do not change in the loop of the fused kernel, as in
test_backward_compiles.py. Those of mesh_window are written before the loop and read after it; those of interpolated are places of knots.
Those of decayed_weights are of the hash of dropout beside the derivative of an exponential; those of expectations of both selects on
-inf of weights, and of that hash, beside two groups of derivatives."""


def sampled() -> list[str]:
    """What a run of CI compiles: each case in one of the dtypes, and the call on a mesh."""
    return [*(f"{name}-{DTYPES[zlib.crc32(name.encode()) % len(DTYPES)]}" for name in CASES), *ON_MESH]


def compile_on_mesh(entry: str) -> None:
    """The call of on_mesh.py, or dense attention, for four GPUs."""
    check_vma = entry.endswith("check_vma")

    def masked(devices: Sequence[jax.Device]) -> tuple[Callable, jax.sharding.Mesh]:
        mesh = on_mesh.mesh_of(devices)
        return on_mesh.sharded(mesh, KernelOptions(), check_vma, "mosaic_gpu", 64), mesh

    def dense(devices: Sequence[jax.Device]) -> tuple[Callable, jax.sharding.Mesh]:
        mesh = on_mesh.mesh_of(devices)
        attend = lambda q: flexjax.flex_attention(q, q, q, implementation="mosaic_gpu")
        run = jax.shard_map(attend, mesh=mesh, in_specs=on_mesh.SPLIT, out_specs=on_mesh.SPLIT, check_vma=check_vma)
        return jax.grad(lambda q: run(q).astype(jnp.float32).sum()), mesh

    def split(devices: Sequence[jax.Device]) -> tuple[Callable, jax.sharding.Mesh]:
        kind = jax.sharding.AxisType.Explicit if entry == "mesh_explicit" else jax.sharding.AxisType.Auto
        return functools.partial(on_mesh.results, "mosaic_gpu", KernelOptions(), 64), on_mesh.mesh_of(devices, kind)

    if entry in ("mesh_explicit", "mesh_auto"):
        text = compile_hopper.compile_on_hoppers(split, 4, on_mesh.arrays("bfloat16"), on_mesh.IN_SPECS)
        found = re.findall(r"= \(?(\w+)\[.*? (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
        # with explicit axes each device makes the lists of a traced mask from the whole of its integer arrays
        allowed = {"all-gather"} if entry == "mesh_explicit" else set()
        moved = [
            (dtype, what) for dtype, what in found if what != "all-reduce" and not (dtype == "s32" and what in allowed)
        ]
        assert not moved, moved
    elif entry == "mesh_window":
        compile_window()
    elif "one_kernel" in entry:
        query = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
        compile_hopper.compile_on_hoppers(dense, 4, [query], [on_mesh.SPLIT])
    else:
        compile_hopper.compile_on_hoppers(masked, 4, on_mesh.arrays("bfloat16"), on_mesh.IN_SPECS)


def compile_window() -> None:
    """Both passes of a window over two GPUs: no pass over all rows beside the kernels, but the one that converts dQ on one GPU too.

    Few rows visit received keys. What they change is written into the arrays of the other rows, without a copy.
    """
    tokens, heads, dim = 8192, 2, 128
    mask_mod = flexjax.and_masks(masks.causal, masks.sliding_window(500))
    layout = flexjax.context_layout(mask_mod, tokens, devices=2)
    context = flexjax.ContextParallel("sp", layout)

    def make(devices: Sequence[jax.Device]) -> tuple[Callable, jax.sharding.Mesh]:
        mesh = jax.sharding.Mesh(devices, ("sp",), axis_types=(jax.sharding.AxisType.Auto,))

        def both_passes(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> object:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                out, pull = jax.vjp(lambda *a: flexjax.flex_attention(*a, mask_mod=mask_mod, context=context), q, k, v)
                return out, pull(d_out)

        return both_passes, mesh

    x = jax.ShapeDtypeStruct((1, tokens, heads, dim), jnp.bfloat16)
    text = compile_hopper.compile_on_hoppers(make, 2, [x] * 4, [jax.sharding.PartitionSpec(None, "sp")] * 4)
    passes = []
    for line in text[text.index("\nENTRY") :].splitlines():
        match = re.match(
            r"\s+(?:ROOT )?%([\w.\-]+) = \(?(\w+)\[([\d,]+)\].*? (fusion|copy|convert|concatenate)\(", line
        )
        if (
            match
            and math.prod(map(int, match[3].split(","))) >= tokens // 2 * heads * dim
            and "scatter" not in match[1]
        ):
            passes.append((match[1], match[2]))
    assert [dtype for _, dtype in passes] == ["bf16"], passes


def compile_entry(entry: str) -> None:
    if entry in ON_MESH:
        compile_on_mesh(entry)
        return
    name, dtype = TABLE[entry]
    problem = BoundCase(CASES[name], dtype, "mosaic_gpu", KernelOptions())
    leaves, tree = jax.tree.flatten(problem.arrays())

    def step(*flat: jax.Array) -> object:
        return jax.grad(problem.loss, argnums=(0, 1), has_aux=True)(*jax.tree.unflatten(tree, flat))

    compile_hopper.compile_for_hopper(step, *leaves)


def outcome(entry: str) -> str:
    start = time.time()
    try:
        compile_entry(entry)
    except NotImplementedError as error:
        return f"refused {entry} {error}"
    except Exception as error:  # whatever the compilers raise
        return f"FAIL {entry} {type(error).__name__} " + str(error).replace("\n", " | ")[:600]
    return f"ok {entry} {time.time() - start:.1f}s"


def child(names: Sequence[str]) -> None:
    for entry in names:
        print("begin", entry, flush=True)
        print(outcome(entry), flush=True)


def sweep(names: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """(outcome, bytes spilled by each kernel) of each call; those on a mesh last.

    Calls on a mesh share kernels, which a process compiles once, so each has a process of its own.
    """
    command = lambda left: [sys.executable, "-m", "tests.backends.mosaic_gpu.aot", "--child", *left]
    in_one_process = [[n for n in names if n in TABLE], *([n] for n in names if n not in TABLE)]
    for line, said in itertools.chain.from_iterable(children.sweep(n, command, ENVIRONMENT) for n in in_one_process):
        spilled: dict[str, int] = {}
        for kernel, count in SPILLS.findall("\n".join(said)):
            spilled[kernel] = max(spilled.get(kernel, 0), int(count))
        yield judged(line, spilled), spilled


def judged(line: str, spilled: dict[str, int]) -> str:
    """The outcome, FAIL where a kernel is missing or spills more than MAY_SPILL."""
    if not line.startswith("ok"):
        return line
    allowed = MAY_SPILL.get(line.split()[1].rsplit("-", 1)[0], {})
    text = ", ".join(f"{kernel} spills {n}" for kernel, n in spilled.items() if n > allowed.get(kernel, 0))
    kernels = ("flexjax_forward", "flexjax_backward")
    absent = "".join(f"no {name} kernel " for name in kernels if not any(k.startswith(name) for k in spilled))
    return ("FAIL" + line[2:] if text or absent else line) + f" {absent}{text}".rstrip()


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if a != "--sample"] or (sampled() if "--sample" in arguments else list(TABLE))
    began, count = time.time(), dict.fromkeys(children.KINDS, 0)
    for line, _ in sweep(names):
        count[line.split()[0]] += 1
        print(line, flush=True)
    print(*(f"{n} {kind}" for kind, n in count.items()), f"in {time.time() - began:.0f} s", flush=True)
    return int(count["FAIL"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
