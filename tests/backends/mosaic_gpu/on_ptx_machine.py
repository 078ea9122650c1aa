"""Kernels for compute capability 8.x on the machine of ptx_machine.py: the launch of a kernel, compiled and executed on the CPU.

    python -m tests.backends.mosaic_gpu.on_ptx_machine [--ORDER,ARRIVAL] NAME ...     a line for each; all problems by default

NAME is a problem of tests/cases/hopper_forward.py, one of WEIGHTS, or "decode " and one of test_decode.py or of PAGES, which run the decode kernel. To be used in a process of its own, because compilers may end it and it compiles for one card only. `execute` stands in for
`kernel_parts.launch`.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from tests.backends.mosaic_gpu import compile_card, ptx_machine

CARD = "sm_80"
DUMPS = "MOSAIC_GPU_DUMP_TO"


class Launch(typing.NamedTuple):
    """A compiled launch: its PTX, the operands (numbers among inputs and results) that the kernel's parameters point to, CTAs,
    threads of a CTA, bytes of shared memory.
    """

    ptx: str
    parameters: list[int]
    grid: int
    threads: int
    shared: int


def compiled(run: Callable, inputs: tuple, name: str) -> Launch:
    """The launch of the kernel `name` in the program run(*inputs)."""
    folder = pathlib.Path(os.environ[DUMPS])
    before = set(folder.glob("*.ptx"))
    compile_card.compile_for(CARD, run, *inputs)
    (path,) = (p for p in set(folder.glob("*.ptx")) - before if p.name.startswith(name))
    log = path.with_suffix(".mlir-passes.log")
    text = log.read_text()
    host = text[text.index("IR Dump Before GpuLaunchLoweringPass") :]
    constants = {n: int(v) for n, v in re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) :", host)}
    at = {n: int(v) for n, v in re.findall(r"(%\w+) = llvm\.getelementptr %\w+\[(\d+)\]", host)}
    loads = {n: at.get(of, 0) for n, of in re.findall(r"(%\w+) = llvm\.load (%\w+)", host)}
    launch = re.search(
        r"gpu\.launch_func.*?blocks in \((%\w+), .*?\) threads in \((%\w+), .*?dynamic_shared_memory_size (%\w+) args\((.*?)\)",
        host,
    )
    assert launch
    parameters = [loads[n] for n in re.findall(r"(%\w+) :", launch[4])]
    log.unlink()
    return Launch(path.read_text(), parameters, *(constants[launch[n]] for n in (1, 2, 3)))


class Execution(typing.NamedTuple):
    """How launches are executed: the order of threads and the arrival of copies (ptx_machine.py)."""

    order: str
    arrival: str


@contextlib.contextmanager
def execute(*modules: typing.Any, how: Execution) -> Iterator[list[str]]:
    """A context in which the launches of these modules run on the machine; yields the names of the kernels that ran."""
    before, ran = [m.launch for m in modules], []

    def launch(kernel: Callable, inputs: tuple, outputs: tuple, scratch: tuple, **options: typing.Any) -> typing.Any:
        """`kernel_parts.launch`, on the machine."""
        run = lambda inputs: kernel_parts.launch(kernel, inputs, outputs, scratch, **options)
        made = compiled(run, (inputs,), options["name"])
        shapes, structure = jax.tree.flatten(outputs)
        operands = [np.array(x) for x in jax.tree.leaves(inputs)]
        operands += [
            np.full(x.shape, np.nan, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, x.dtype)
            for x in shapes
        ]
        used = [operands[n] for n in made.parameters]
        ptx_machine.run(made.ptx, used, made.grid, made.threads, made.shared, *how)
        ran.append(options["name"])
        return jax.tree.unflatten(structure, [jnp.asarray(x) for x in operands[len(operands) - len(shapes) :]])

    for module in modules:
        module.launch = launch
    try:
        yield ran
    finally:
        for module, old in zip(modules, before, strict=True):
            module.launch = old


def outcome(name: str, how: Execution) -> str:
    """Runs a problem; a line that begins with ok or FAIL."""
    if name.startswith(DECODE):
        return decode_outcome(name.removeprefix(DECODE), how)
    if name in WEIGHTS:
        return weights_outcome(name, how)

    from flexjax.backends.mosaic_gpu.forward import launch as forward_launch
    from flexjax.backends.mosaic_gpu.forward import mma as forward_mma
    from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
    from tests.cases.hopper_forward import FORWARD
    from tests.cases.on_hopper import assert_results_close, forward_problem

    start = time.time()
    made = forward_problem(**FORWARD[name])
    plan = dataclasses.replace(made.plan, options=dataclasses.replace(made.plan.options, interpret=False))
    device = targets.of_device(compile_card.topology(CARD).devices[0], "cuda")
    tile = forward_mma_tiles.forward_tile(plan, CARDS[compile_card.CARDS[CARD].capability])
    try:
        with execute(forward_launch, how=how), targets.as_seen_by_pallas(device):
            assert_results_close(made, forward_mma.forward(plan, made.operands, tile))
    except AssertionError as error:
        return f"FAIL {name}: {str(error)[:600]}"
    return f"ok {name} {tile.block_q} x {tile.block_kv} {time.time() - start:.1f} s"


WEIGHTS = {"sigmoid(s - 9)": -9.0, "sigmoid(s + 3)": 3.0, "silu": None}
"""Of which warps vote (thread_tiles.logistic_tile): addends of a sigmoid. Some queries of the first warps are long, so that both outcomes occur."""


def weights_outcome(name: str, how: Execution) -> str:
    """Runs a forward pass with logistic weights; a line that begins with ok or FAIL."""
    import flexjax
    from flexjax.backends.mosaic_gpu.forward import launch as forward_launch
    from flexjax.backends.mosaic_gpu.forward import mma as forward_mma
    from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
    from flexjax.call.arguments import Arguments
    from flexjax.call.prepare import prepare

    start, rng, bias = time.time(), np.random.default_rng(0), WEIGHTS[name]
    q, k, v = rng.standard_normal((3, 1, 128, 1, 64)).astype(np.float32)
    q[:, :40:7] *= 40
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    weights = flexjax.weights.silu(128) if bias is None else flexjax.weights.sigmoid(bias)
    call = prepare(Arguments(*arrays, weights=weights))
    device = targets.of_device(compile_card.topology(CARD).devices[0], "cuda")
    tile = forward_mma_tiles.forward_tile(call.plan, CARDS[compile_card.CARDS[CARD].capability])
    with execute(forward_launch, how=how), targets.as_seen_by_pallas(device):
        found = forward_mma.forward(call.plan, call.operands, tile).out.astype(jnp.float32)
    want = flexjax.flex_attention(*(x.astype(jnp.float32) for x in arrays), weights=weights, implementation="reference")
    error = float((jnp.linalg.norm(found - want, axis=-1) / jnp.linalg.norm(want, axis=-1)).max())
    if not error < 5e-3:
        return f"FAIL {name}: a row is off by {error:.2g} of its norm"
    return f"ok {name} {tile.block_q} x {tile.block_kv} {time.time() - start:.1f} s"


DECODE = "decode "
PAGES: dict[str, dict[str, typing.Any]] = {
    "lengths": {},
    "pages of 16": {"page": 16},
    "pages of 8, int8": {"page": 8, "stored": "int8", "dim": 128},
    "pages of 16, int8, head dim 64": {"page": 16, "stored": "int8", "dim": 64},
    "pages of 48, float8 and float16": {"page": 48, "stored": "float8_e4m3fn", "dim": 128, "dtype": "float16"},
}
"""Fields for `test_decode.ragged`."""


def decode_outcome(name: str, how: Execution) -> str:
    """Runs a problem of the decode kernel; a line that begins with ok or FAIL. Those of PAGES are compared with the simulator."""
    from flexjax.backends.mosaic_gpu.decode import call as decode_call
    from flexjax.backends.mosaic_gpu.decode import mma as decode_mma
    from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
    from tests.backends.mosaic_gpu import test_decode
    from tests.cases.on_hopper import assert_results_close, run_forward

    start, card = time.time(), CARDS[compile_card.CARDS[CARD].capability]
    problems = {**test_decode.SIMULATED, **test_decode.SLOW}
    made = None if name in PAGES else test_decode.problem(problems[name])
    simulated, operands = test_decode.ragged([2, 1, 0], 240, **PAGES[name]) if made is None else made[:2]
    plan = dataclasses.replace(simulated, options=dataclasses.replace(simulated.options, interpret=False))
    tile = dataclasses.replace(decode_mma_tiles.mma_decode_tile(plan, card), programs=3, chunk=128)
    device = targets.of_device(compile_card.topology(CARD).devices[0], "cuda")
    try:
        with execute(decode_call, how=how), targets.as_seen_by_pallas(device):
            got = decode_mma.forward(plan, operands, tile)
        if made is not None:
            assert_results_close(made, got)
        else:
            want = run_forward(decode_mma.forward, simulated, operands, tile)
            for x, y in zip((got.out, got.lse), (want.out, want.lse), strict=True):
                np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=1e-2, atol=2e-3)
    except AssertionError as error:
        return f"FAIL {DECODE}{name}: {str(error)[:600]}"
    return f"ok {DECODE}{name} {tile.used_rows} x {tile.block_kv} {time.time() - start:.1f} s"


def main(arguments: list[str], outcome: Callable[[str, Execution], str], problems: Iterable[str]) -> int:
    """Prints outcome(name, how) for the problems that the arguments name, by default all; returns the exit status, 1 where one failed.

    arguments   [--ORDER,ARRIVAL] NAME ...; without the first, threads run together and copies arrive late
    """
    how, names = Execution("together", "late"), list(arguments)
    if names and names[0].startswith("--"):
        how = Execution(*names.pop(0)[2:].split(","))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ[DUMPS] = os.environ.get("KEEP_DUMPS", folder)
        for name in names or problems:
            line = outcome(name, how)
            failed += line.startswith("FAIL")
            print(line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    from tests.backends.mosaic_gpu import test_decode
    from tests.backends.mosaic_gpu.test_mma_forward import TAKEN

    DECODES = [DECODE + name for name in (*test_decode.SIMULATED, *test_decode.SLOW, *PAGES)]
    sys.exit(main(sys.argv[1:], outcome, [*TAKEN, *WEIGHTS, *DECODES]))
