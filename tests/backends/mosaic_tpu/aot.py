"""Compiles calls for TPUs on a machine without one: the compiler in libtpu is the real one, only running is impossible.

    python -m tests.backends.mosaic_tpu.aot CHIP [name ...]     one line per call: ok, refused or FAIL, how long or why

CHIP is v5e, v5p, v6e, tpu7x or `all`; `--sample` takes what a run of CI does. Each chip has a child
process; where the compiler ends the process, that call has failed, and a new child goes on with the next.
"""

import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flexjax
from flexjax import paged
from flexjax.backends import target as targets
from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, BlockLayout, BlockLists, KernelPlan, Operands, Wanted
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from flexjax.types import KernelOptions
from tests.backends import children
from tests.bound_case import BoundCase
from tests.cases import CASES, Case, on_mesh
from tests.cases.edges import EDGES, Row, random_case

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # not those of conftest.py
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What a child is started with: libtpu without a TPU, several processes at a time."""

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

Compilable = tuple[KernelPlan, Operands, Program | None, Wanted]
"""Plan, operands as arrays or ShapeDtypeStructs, derivative, wanted gradients."""


def _devices(chip: str) -> list:
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices


def target_of(chip: str) -> Target:
    return targets.of_device(_devices(chip)[0])


def compile_for(function, avals: Sequence[jax.ShapeDtypeStruct | jax.Array], chip: str):
    """Compiles a function for one chip, as a user does; raises what the compiler raises."""
    mesh = Mesh(np.array(_devices(chip)[:1]), ("x",))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec())) for a in avals]
    return jax.jit(function).lower(*placed).compile()


def without_the_door(function: Callable, chip: str) -> Callable:
    """A function that calls kernels directly, with what the door's primitives tell Pallas of the chip."""

    def step(*args):
        with targets.as_seen_by_pallas(target_of(chip)):
            return function(*args)

    return step


def compile_case(case: Case, dtype: str, chip: str) -> str:
    """A case as the suite runs it, through the front door: results and all gradients. Returns the program."""
    problem = BoundCase(case, dtype, "mosaic_tpu")
    leaves, tree = jax.tree.flatten(problem.arrays())

    def step(*flat: jax.Array):
        return jax.grad(problem.loss, argnums=(0, 1), has_aux=True)(*jax.tree.unflatten(tree, flat))

    return compile_for(step, leaves, chip).as_text()


def large(
    heads: tuple[int, int],
    length: int,
    dim: int,
    dtype: str = "bfloat16",
    score=None,
    mask=None,
    width: int = 0,
    learn: bool = False,
    layout: str = "BTNH",
    list_heads: int = 1,
) -> Compilable:
    """A problem of real size, as shapes; `width` is that of the four block lists (0: no lists)."""
    n, m = heads
    sizes = (1, n, length, length)
    scored = None if score is None else trace_score_mod(score, sizes, "float32")
    masked = None if mask is None else trace_mask_mod(mask, sizes)
    blocks = BlockLayout(1, list_heads, 128, 128, width, width, width, width) if width else None
    plan = KernelPlan(
        1,
        n,
        m,
        length,
        length,
        dim,
        dim,
        dtype,
        layout,
        dim**-0.5,
        score=scored.program if scored else None,
        mask=masked.program if masked else None,
        blocks=blocks,
    )
    shape = (lambda h: (1, length, h, dim)) if layout == "BTNH" else (lambda h: (1, h, length, dim))
    array = lambda h: jax.ShapeDtypeStruct(shape(h), dtype)
    rows = -(-length // 128)
    num, index = (jax.ShapeDtypeStruct((1, list_heads, rows, *w), jnp.int32) for w in ((), (width,)))
    lists = BlockLists(*[num, index] * 2) if width else None
    captured = scored.arrays if scored else ()
    operands = Operands(
        array(n), array(m), array(m), None, None, None, captured, masked.arrays if masked else (), (), lists
    )
    wanted = Wanted(True, True, True, False, False, False, tuple(learn for _ in captured))
    return plan, operands, scored.derivative if scored else None, wanted


def _causal(b, h, q, k):
    return q >= k


def _alibi(s, b, h, q, k):
    return s + jnp.exp2(-(h + 1.0)) * (k - q)


def _softcap(s, b, h, q, k):
    return 30.0 * jnp.tanh(s / 30.0)


def _relative(length: int, heads: int):
    table = jnp.zeros((heads, 2 * length), jnp.float32)
    return lambda s, b, h, q, k: s + table[h, q - k + length]


def _documents(length: int):
    ids = jnp.asarray(np.arange(length) // 5000, jnp.int32)
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def _window(b, h, q, k):
    return (q >= k) & (q - k < 4096)


LARGE = {
    "full_64": lambda: large((8, 8), 4096, 64),
    "full_128": lambda: large((8, 8), 4096, 128),
    "full_256": lambda: large((8, 8), 4096, 256),
    "full_256_float32": lambda: large((4, 4), 4096, 256, "float32"),
    "causal_128": lambda: large((8, 8), 4096, 128, mask=_causal, width=32),
    "causal_128_bnth": lambda: large((8, 8), 4096, 128, mask=_causal, width=32, layout="BNTH"),
    "causal_float32": lambda: large((8, 2), 4096, 128, "float32", mask=_causal, width=32),
    "causal_mqa": lambda: large((16, 1), 4096, 128, mask=_causal, width=32),
    "causal_80": lambda: large((8, 8), 3000, 80, mask=_causal, width=24),
    "alibi": lambda: large((8, 8), 4096, 128, score=_alibi, mask=_causal, width=32),
    "softcap": lambda: large((8, 4), 4096, 256, score=_softcap, mask=_causal, width=32),
    "relative": lambda: large((8, 8), 4096, 128, score=_relative(4096, 8), mask=_causal, width=32, learn=True),
    "long_causal": lambda: large((8, 1), 131072, 128, mask=_causal, width=1024),
    "million_window": lambda: large((8, 1), 1 << 20, 128, mask=_window, width=34),
    "million_documents": lambda: large((8, 1), 1 << 20, 128, mask=_documents(1 << 20), width=48),
    "window_per_head": lambda: large((8, 8), 32768, 128, mask=_window, width=34, list_heads=8),
}


PAGED: dict[str, tuple[int, int, int, str, dict]] = {  # page, T, key heads, dtype, arguments
    "paged_16": (16, 1, 8, "bfloat16", dict(score_mod=_alibi)),
    "paged_64": (64, 4, 8, "bfloat16", dict(mask_mod=None, score_mod=_softcap)),
    "paged_128": (128, 1, 4, "bfloat16", dict(mask_mod=lambda b, h, q, k: _window(b, h, q, k) | (k < 4))),
    "paged_16_int8": (16, 1, 8, "int8", dict(score_mod=_alibi)),
    "paged_64_float8": (64, 40, 4, "float8_e4m3fn", dict(score_mod=_softcap)),
    "paged_64_int8_one_head": (64, 1, 1, "int8", dict(mask_mod=_window)),
}
POOL = 1 << 20
"""Tokens of the pool of these calls, whose requests have 4096 at most."""


TABLE: dict[str, Row] = {
    f"{name}-{dtype}": (case, dtype) for name, case in CASES.items() for dtype in ("float32", "bfloat16")
}
RANDOM = 40
"""How many random calls are among the entries; `random_N` can be asked for with any N."""


def entries() -> list[str]:
    """Names of all calls: the table of cases in both dtypes, edges and random calls, the large ones, those on a mesh or with keys in
    pages.
    """
    return [*TABLE, *EDGES, *(f"random_{n}" for n in range(RANDOM)), *LARGE, *ON_MESH, *PAGED]


def row_of(entry: str) -> Row:
    found = TABLE.get(entry) or EDGES.get(entry)
    return found or random_case(int(entry.removeprefix("random_")))


def sampled(chip: str) -> list[str]:
    """What a run of CI compiles for a chip.

    The table on v5e, and again each call on one of the others; a million tokens, meshes and pages everywhere; the other large calls
    on one chip each; of the edges and the random calls a sixth, on one chip each.
    """
    chips = list(TOPOLOGIES)

    def mine(entry: str) -> bool:
        number = zlib.crc32(entry.encode())
        if entry in TABLE:
            return chip == "v5e" or chips[1 + number % (len(chips) - 1)] == chip
        if entry in ON_MESH or entry in PAGED or entry.startswith("million"):
            return True
        here = chips[number % len(chips)] == chip
        return here and (entry in LARGE or number // len(chips) % 6 == 0)

    return [entry for entry in entries() if mine(entry)]


def compile_large(entry: str, chip: str) -> str:
    plan, operands, derivative, wanted = LARGE[entry]()
    backend, target = MosaicTpuBackend(), target_of(chip)
    reason = backend.refuses(plan, target)
    if reason is not None:
        raise NotImplementedError(reason)
    run = Run(backend, plan, target)
    leaves, tree = jax.tree.flatten(operands)
    length, value_dim = plan.q_len, plan.value_dim
    rows = (plan.batch, length, plan.q_heads) if plan.layout == "BTNH" else (plan.batch, plan.q_heads, length)

    def step(d_out: jax.Array, d_lse: jax.Array, *flat: jax.Array):
        given = jax.tree.unflatten(tree, flat)
        results = run.forward(given)
        return results, run.backward(BackwardInputs(given, results, d_out, d_lse, wanted, derivative))

    avals = [jax.ShapeDtypeStruct((*rows, value_dim), plan.dtype), jax.ShapeDtypeStruct(rows, "float32")]
    return compile_for(without_the_door(step, chip), [*avals, *leaves], chip).as_text()


ON_MESH = {"mesh": False, "mesh_check_vma": True}


def compile_on_mesh(entry: str, chip: str) -> str:
    """The call of on_mesh.py for four chips."""
    mesh = on_mesh.mesh_of(_devices(chip)[:4])
    specs = zip(on_mesh.arrays("bfloat16"), on_mesh.IN_SPECS, strict=True)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in specs]
    return jax.jit(on_mesh.sharded(mesh, KernelOptions(), ON_MESH[entry])).lower(*avals).compile().as_text()


def compile_paged(entry: str, chip: str) -> str:
    """A step of decoding over pages, through the front door. Its temporaries do not grow with the pool, but for the scales, which may be
    stored anew, 512 bytes for those of a page.
    """
    page, queries, kv_heads, stored, arguments = PAGED[entry]
    aval = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    pool = aval(stored, POOL // page, page, kv_heads, 128)
    scales = () if stored == "bfloat16" else (aval("float32", POOL // page, kv_heads),)

    def step(query: jax.Array, pages: jax.Array, lengths: jax.Array, *pools: jax.Array | flexjax.Quantized):
        table = paged.PageTable(pages, lengths, jnp.zeros(POOL // page, jnp.int32), page)
        cache = paged.PagedCache(*pools)
        return flexjax.paged_attention(query, cache, table, implementation="mosaic_tpu", **arguments)

    rows = aval("bfloat16", 8, queries, 16, 128), aval("int32", 8, 4096 // page), aval("int32", 8)
    leaves, tree = jax.tree.flatten((*rows, *(flexjax.Quantized(pool, *scales) if scales else pool for _ in range(2))))
    compiled = compile_for(lambda *flat: step(*jax.tree.unflatten(tree, flat)), leaves, chip)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    most = pool.size * pool.dtype.itemsize / 100 + 2 * sum(x.shape[0] * 512 for x in scales)
    assert memory.temp_size_in_bytes < most, f"{memory.temp_size_in_bytes} bytes of temporaries"
    return text


def outcome(entry: str, chip: str) -> str:
    """A line that starts with ok, refused or FAIL."""
    start = time.time()
    try:
        if entry in LARGE:
            text = compile_large(entry, chip)
        elif entry in ON_MESH:
            text = compile_on_mesh(entry, chip)
        elif entry in PAGED:
            text = compile_paged(entry, chip)
        else:
            text = compile_case(*row_of(entry), chip)
    except NotImplementedError as error:
        return f"refused {entry} {chip} {error}"
    except Exception as error:  # whatever the compiler raises
        return f"FAIL {entry} {chip} {type(error).__name__} " + str(error).replace("\n", " | ")[:600]
    kernels = (("flexjax_forward",), ("flexjax_dq", "flexjax_dkv"))[: 1 if entry in PAGED else 2]
    absent = [names for names in kernels if not any(n in text for n in names)]
    if absent:
        return f"FAIL {entry} {chip} compiled without the kernel " + " or ".join(absent[0])
    return f"ok {entry} {chip} {time.time() - start:.1f}s"


def child(chip: str, names: list[str]) -> None:
    for entry in names:
        print("begin", entry, flush=True)
        print(outcome(entry, chip), flush=True)


def sweep(
    chip: str,
    names: Sequence[str],
    command: Callable[[str, Sequence[str]], list[str]] | None = None,
    seconds: float = 600,
) -> Iterator[str]:
    """The outcomes, one line each, whatever becomes of the children; `seconds` is the longest that one call may take."""
    command = command or (
        lambda chip, names: [sys.executable, "-m", "tests.backends.mosaic_tpu.aot", "--child", chip, *names]
    )
    found = children.sweep(names, lambda left: command(chip, left), ENVIRONMENT, seconds, chip)
    return (line for line, _ in found)


def main(arguments: list[str]) -> int:
    sample = "--sample" in arguments
    chosen, *names = [a for a in arguments if a != "--sample"]
    worst = 0
    for chip in TOPOLOGIES if chosen == "all" else (chosen,):
        began, count = time.time(), {"ok": 0, "refused": 0, "FAIL": 0}
        for line in sweep(chip, names or (sampled(chip) if sample else entries())):
            count[line.split()[0]] += 1
            print(line, flush=True)
        print(chip, *(f"{n} {kind}" for kind, n in count.items()), f"in {time.time() - began:.0f} s", flush=True)
        worst = max(worst, int(count["FAIL"] > 0))
    return worst


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
