"""Compiles a jitted function to machine code for Hopper on a machine without a GPU; to be used in a child process.

Without the right wheels the process may abort, and one process compiles for one architecture only.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import typing

ROOT = pathlib.Path(__file__).parents[3]


def missing() -> str | None:
    """Why this machine cannot, or None."""
    for name in ("jax_cuda13_plugin", "nvidia"):
        if importlib.util.find_spec(name) is None:
            return f"compiling for a GPU needs the wheels jax-cuda13-plugin, nvidia-cuda-nvcc and nvidia-nvvm (no `{name}`)"
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if not any(list(root.glob("*/bin/ptxas")) for root in roots):
        return "compiling for a GPU needs the wheel nvidia-cuda-nvcc (no ptxas)"
    if not any(list(root.glob("*/nvvm")) + list(root.glob("*/lib/libnvvm*")) for root in roots):
        return "compiling for a GPU needs the wheel nvidia-nvvm (no libdevice)"
    return None


def missing_disassembler() -> str | None:
    """Why this machine cannot compile for a GPU and read its machine code, or None."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if missing() is None and not any(list(root.glob("*/bin/nvdisasm")) for root in roots):
        return "reading machine code needs the wheel nvidia-cuda-nvdisasm"
    return missing()


def compile_for_hopper(
    function: typing.Callable, *args: typing.Any, donate_argnums: tuple[int, ...] = ()
) -> typing.Any:
    """The function compiled for one GPU at the shapes of `args`."""
    import jax
    from jax.experimental import topologies

    mesh = topologies.make_mesh(topo=topology(1), mesh_shape=(1,), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    return jax.jit(function, donate_argnums=donate_argnums).lower(*args).compile()


def compile_on_hoppers(make: typing.Callable, count: int, args: typing.Any, specs: typing.Any) -> str:
    """Compiles for several GPUs: `make(devices)` gives the function and the mesh over which `specs` split its arguments.

    Returns the program of a device.
    """
    import jax

    devices = topology(count).devices
    function, mesh = make(devices)
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for a, spec in zip(args, specs, strict=True)
    ]
    return jax.jit(function).lower(*placed).compile().as_text()


def topology(count: int) -> typing.Any:
    """So many GPUs that are not there."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jax.experimental import topologies

    config = (pathlib.Path(__file__).parent / "hopper.textproto").read_text()
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}")


def spills(file: str, names: typing.Sequence[str], seconds: float = 600) -> dict[str, dict[str, int]]:
    """For each of the cases `names` that the module `file` compiles as its command line asks, and names on stderr before ("case NAME"), the
    bytes that each of its kernels spills, as ptxas says.

    Fails where a case has no report, where the process fails, and where ptxas serialises the products of a step (C7510, C7513).
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, file, *names],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
    log = "\n" + done.stdout
    assert done.returncode == 0, log[-4000:]
    found = {}
    for part in log.split("\ncase ")[1:]:
        kernels = re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", part)
        assert kernels, f"ptxas says nothing of {part[-4000:]}"
        name = part.partition("\n")[0]
        found[name] = {kernel: max(int(n) for k, n in kernels if k == kernel) for kernel, _ in kernels}
    assert len(found) == len(names), log[-4000:]
    assert "C7510" not in log
    assert "C7513" not in log, "the products of a step are serialised"
    return found
