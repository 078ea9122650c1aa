"""Compiles plans for TPUs on a machine without one: the compiler in libtpu is the real one, only running is impossible.

    python -m tests.backends.mosaic_tpu.aot CHIP [name ...]     one line per plan: ok or FAIL and why

Run as a child process: one process at a time may hold libtpu, unless told otherwise.
"""

# ruff: noqa: E402  (the environment is read when jax is imported)

import os
import sys
import time

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(_name, _value)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands, Wanted
from flexjax.trace.mod_ir import Program
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod
from flexjax.types import KernelOptions
from tests.backends.mosaic_tpu import plans
from tests.cases import CASES

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

Compilable = tuple[KernelPlan, Operands, Program | None, Wanted]
"""Plan, operands as arrays or ShapeDtypeStructs, derivative, wanted gradients."""


def compile_for(function, avals: list[jax.ShapeDtypeStruct], chip: str, devices: int = 1):
    """Compiles a function of replicated arrays; raises what the compiler raises."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    mesh = Mesh(np.array(found[:devices]), ("x",))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec())) for a in avals]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*placed).compile()


def of_case(name: str, dtype: str) -> Compilable:
    problem = plans.problem_of(CASES[name], dtype, KernelOptions())
    return problem.plan, problem.operands, problem.derivative, plans.wanted_of(problem)


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
    lists = BlockLists(*[num, index] * 4) if width else None
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


def entries() -> list[str]:
    """Names of all plans: the table of cases in both dtypes, and the large ones."""
    small = [f"{n}-{d}" for n, c in CASES.items() for d in c.dtypes if d in ("float32", "bfloat16")]
    return small + list(LARGE)


def compile_entry(entry: str, chip: str) -> None:
    plan, operands, derivative, wanted = LARGE[entry]() if entry in LARGE else of_case(*entry.rsplit("-", 1))
    backend = MosaicTpuBackend()
    reason = backend.refuses(plan)
    if reason is not None:
        print("refused", entry, chip, reason, flush=True)
        return
    leaves, tree = jax.tree.flatten(operands)
    length, value_dim = plan.q_len, plan.value_dim
    rows = (plan.batch, length, plan.q_heads) if plan.layout == "BTNH" else (plan.batch, plan.q_heads, length)

    def step(d_out: jax.Array, d_lse: jax.Array, *flat: jax.Array):
        given = jax.tree.unflatten(tree, flat)
        results = backend.forward(plan, given)
        return results, backend.backward(plan, given, results, d_out, d_lse, wanted, derivative)

    avals = [jax.ShapeDtypeStruct((*rows, value_dim), plan.dtype), jax.ShapeDtypeStruct(rows, "float32")]
    compile_for(step, [*avals, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)], chip)


def main(chip: str, names: list[str]) -> None:
    for entry in names or entries():
        start = time.time()
        try:
            compile_entry(entry, chip)
            print("ok", entry, chip, f"{time.time() - start:.1f}s", flush=True)
        except Exception as error:  # the child reports every plan, whatever the compiler raises
            text = str(error).replace("\n", " | ")[:600]
            print("FAIL", entry, chip, type(error).__name__, text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
