"""Cycles that the TPU compiler estimates for the kernels at B1 T4096 D128 bfloat16. Estimates, not measurements.

    python -m tests.backends.mosaic_tpu.estimate CHIP HEADS [PEER:]PASS,KIND[,q,kv,part] ...
    python -m tests.backends.mosaic_tpu.estimate --spills CHIP HEADS PASS,KIND ...      registers stored, loaded; bundles

PASS is fwd or bwd, KIND full, causal, alibi or softcap; PEER is splash, splash+lse or flash, the kernels that come with jax, which know
full and causal. What is read from memory counts as not taken in the compiler's simulation of a kernel, so causal visits are
estimated with twins whose order is arithmetic on the program ids: of ours, the same kernel bodies and the visits of the real
lists; of splash, the same kernels and the idle steps that it has above the diagonal, without its tables. The simulation itself
can give up (None). Each estimate runs in a child process.
"""

import functools
import glob
import os
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu import (
    backward_dkv,
    backward_dq,
    block_sparse_order,
    forward,
    list_shape,
    support,
    visit_order,
    vmem,
)
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, BlockLists, Operands, Results, Wanted
from tests.backends.mosaic_tpu import aot

LENGTH, DIM = 4096, 128


def in_child(chip: str, heads: int, what: str, arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tests.backends.mosaic_tpu.estimate", "--child", chip, str(heads), what],
        env={**os.environ, **aot.ENVIRONMENT, "LIBTPU_INIT_ARGS": arguments}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def spills(chip: str, heads: int, what: str) -> dict[str, tuple[int, int, int]]:
    """{kernel: (vector registers stored, loaded, bundles)} of the final schedule."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
        in_child(chip, heads, what, dump)
        found = {}
        for path in glob.glob(folder + "/*flexjax*-final_bundles.txt"):
            if "analysis" in path:
                continue
            with open(path) as file:
                text = file.read()
            stored, loaded = (len(re.findall(rf"{op} \[vmem:\[#allocation\d+_spill", text)) for op in ("vst", "vld"))
            found[re.findall(r"-(flexjax\w+)", path)[0]] = (
                stored,
                loaded,
                len(re.findall(r"(?m)^\s*0x[0-9a-f]+\s+:", text)),
            )
        return found


def estimate(chip: str, heads: int, what: str) -> dict[str, int] | None:
    """{operation: cycles}, None where the simulation gave up."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-m", "tests.backends.mosaic_tpu.estimate", "--child", chip, str(heads), what],
            env={**os.environ, **aot.ENVIRONMENT, "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        found: dict[str, int] = {}
        for path in glob.glob(folder + "/*"):
            with open(path) as file:
                pairs = re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', file.read())
            found |= {name: int(cycles) for name, cycles in pairs}
        return found if child.returncode == 0 else None


class CausalTwin(block_sparse_order.BlockSparseOrder):
    """The tiles on and below the diagonal of a square, one after another as in the lists, counted without them."""

    prefetched = 0
    chunks = 1

    def __init__(self, plan, geometry, group, key_major, lists):
        self.geometry, self.group, self.key_major = geometry, group, key_major
        assert geometry.block_q == geometry.block_kv
        self.kinds = frozenset({visit_order.IDLE, visit_order.FULL, visit_order.PARTIAL, visit_order.EDGE})
        self.overhang = False
        self.shape = list_shape.list_shape(plan, geometry, group, key_major)
        self.sub_blocks, self.words = self.shape.sub_blocks, self.shape.words
        self.block_rows_per_word = 32 // self.sub_blocks[1]
        self.block_sizes = (128, 128)
        self.list_heads = self.list_batch = 1

    def prefetch_arrays(self, chunk):
        return (), None

    def grid(self, visits_at_run_time):
        g = self.geometry
        visits = g.q_tiles * (g.q_tiles + 1) // 2
        grid = (g.batch, g.heads // (self.group if self.key_major else 1), visits)
        return (*grid, self.group) if self.key_major else grid

    def _row_and_place(self, v):
        """Which row of tiles visit v is in, and its number there: comparisons alone, which the simulation follows."""
        n = self.geometry.q_tiles
        lengths = range(n, 0, -1) if self.key_major else range(1, n + 1)
        starts = np.concatenate([[0], np.cumsum(list(lengths))])[:-1]
        row, start = jnp.int32(0), jnp.int32(0)
        for number, first in enumerate(starts[1:], 1):
            row = jnp.where(v >= np.int32(first), np.int32(number), row)
            start = jnp.where(v >= np.int32(first), np.int32(first), start)
        return row, v - start

    def tile_at(self, *ids):
        row, place = self._row_and_place(ids[2])
        if self.key_major:
            return ids[0], ids[1] * np.int32(self.group) + ids[3], row + place, row
        return ids[0], ids[1], row, place

    def visit(self, refs):
        ids = [pl.program_id(n) for n in range(4 if self.key_major else 3)]
        b, h, i, j = self.tile_at(*ids)
        row, place = self._row_and_place(ids[2])
        kind = jnp.where(i == j, np.int32(visit_order.PARTIAL), np.int32(visit_order.FULL))
        words = tuple((i * 7 + j * 13 + n) * 77777 for n in range(2 * self.words))
        end = np.int32(self.geometry.q_tiles - 1) - row if self.key_major else row
        return visit_order.TileVisit(
            b, h, i, j, place == 0, place == end, kind, words, ids[3] if self.key_major else np.int32(0)
        )


def ours(chip: str, heads: int, what: str) -> None:
    name, kind, *sizes = what.split(",")
    score = {"alibi": aot._alibi, "softcap": aot._softcap}.get(kind)
    mask = aot._causal if kind in ("causal", "alibi") else None
    plan, operands, derivative, _ = aot.large(
        (heads, heads), LENGTH, DIM, score=score, mask=mask, width=32 if mask else 0, layout="BNTH"
    )
    if sizes:
        tiles = vmem.VmemTiles(*map(int, sizes))
        vmem.forward_tiles = lambda *_: tiles
        vmem.backward_tiles = lambda *_: tiles
    launch = forward.launch

    def launch_without_tables(call, body):
        # A computed table may be placed where the simulation cannot follow; its values do not matter to it.
        call.hoisted.scalar_tables = (jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, 1), jnp.int32))
        return launch(call, body)

    for module in (forward, backward_dq, backward_dkv):
        module.launch = launch_without_tables
        if mask is not None:
            module.make_order = CausalTwin
    calls = Run(support.MosaicTpuBackend(), plan, aot.target_of(chip))

    def given(q, k, v):
        return Operands(q, k, v, None, None, None, operands.score_captures, (), (), BlockLists(*[None] * 4))

    def run(q, k, v, lse, out, d_out):
        if name == "fwd":
            return calls.forward(given(q, k, v))
        wanted = Wanted(True, True, True, False, False, False, tuple(False for _ in operands.score_captures))
        results = Results(out, lse, None)
        return calls.backward(BackwardInputs(given(q, k, v), results, d_out, None, wanted, derivative))

    line = jax.ShapeDtypeStruct((1, heads, LENGTH), "float32")
    q = operands.query
    aot.compile_for(aot.without_the_door(run, chip), [q, q, q, line, q, q], chip)


def splash(chip: str, heads: int, what: str, lse_too: bool = False) -> None:
    """Tiles of q x kv, kv worked on in parts; the forward pass gives lse only if `lse_too`; one backward kernel (fused) unless the parts are given as negative."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    name, kind, *sizes = what.split(",")
    q_block, kv_block, part = map(int, sizes) if sizes else (1024, 1024, 512)
    fused, part = part > 0, abs(part)
    causal = kind == "causal"

    def next_tile(h, i, j, data_next, block_mask, mask_next, next_i=False):
        if not causal:
            return (i if next_i else j), None, True, False
        below = j * kv_block < (i + 1) * q_block
        first_q, last_kv = j * kv_block // q_block, ((i + 1) * q_block - 1) // kv_block
        return (jnp.maximum(i, first_q) if next_i else jnp.minimum(j, last_kv)), None, below, False

    kernel._next_nonzero = next_tile
    positions = np.arange(LENGTH, dtype=np.int32) if causal else None
    info = MaskInfo(None, None, None, None, positions)
    mask = (lambda q, k: q >= k) if causal else None
    sizes_of = kernel.BlockSizes(
        block_q=q_block, block_kv=kv_block, block_kv_compute=part, block_q_dkv=q_block, block_kv_dkv=kv_block,
        block_kv_dkv_compute=part, block_q_dq=None if fused else q_block, block_kv_dq=None if fused else kv_block,
        use_fused_bwd_kernel=fused,
    )  # fmt: skip

    def run(q, k, v, lse, out, d_out):
        if name == "fwd":
            # It has no scale of its own.
            return kernel._splash_attention_forward(
                info,
                q * jnp.bfloat16(DIM**-0.5),
                k,
                v,
                None,
                None,
                -1e30,
                False,
                sizes_of,
                None,
                lse_too,
                mask,
                None,
                False,
            )
        kept = (q, k, v, None, None, out, lse, info, info)
        return kernel._splash_attention_bwd(False, -1e30, False, sizes_of, None, mask, None, False, kept, d_out)[3:6]

    x, line = (jax.ShapeDtypeStruct((heads, LENGTH, *d), t) for d, t in (((DIM,), "bfloat16"), ((), "float32")))
    aot.compile_for(aot.without_the_door(run, chip), [x, x, x, line, x, x], chip)


def flash(chip: str, heads: int, what: str) -> None:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    name, kind, *sizes = what.split(",")
    q, kv, part = map(int, sizes) if sizes else (1024, 1024, 512)
    sizes_of = kernel.BlockSizes(q, kv, part, 1, q, kv, part, min(part, q), kv, part, q)
    causal = kind == "causal"

    def run(q, k, v, lse, out, d_out):
        if name == "fwd":
            return kernel._flash_attention(q, k, v, None, None, False, causal, DIM**-0.5, sizes_of, False)
        kept = (q, k, v, None, None, out, lse, lse)
        return kernel._flash_attention_bwd(False, causal, DIM**-0.5, sizes_of, False, kept, d_out)[:3]

    x, line = (jax.ShapeDtypeStruct((1, heads, LENGTH, *d), t) for d, t in (((DIM,), "bfloat16"), ((), "float32")))
    aot.compile_for(aot.without_the_door(run, chip), [x, x, x, line, x, x], chip)


def child(chip: str, heads: int, what: str) -> None:
    peer, _, rest = what.rpartition(":")
    with_lse = functools.partial(splash, lse_too=True)
    {"": ours, "splash": splash, "splash+lse": with_lse, "flash": flash}[peer](chip, heads, rest)


def main(chip: str, heads: int, wanted: list[str]) -> None:
    for what in wanted:
        found = estimate(chip, heads, what)
        print(chip, heads, what, None if found is None else sum(found.values()), found, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "--spills":
        for asked in sys.argv[4:]:
            print(sys.argv[2], asked, spills(sys.argv[2], int(sys.argv[3]), asked), flush=True)
    else:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
