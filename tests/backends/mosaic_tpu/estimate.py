"""Cycles that the TPU compiler estimates for the kernels at B1 T4096 D128 bfloat16. Estimates, not measurements.

    python -m tests.backends.mosaic_tpu.estimate CHIP HEADS PASS,KIND[,q,kv,part] ...

PASS is fwd or bwd, KIND full, causal, alibi or softcap. What is read from memory counts as not taken in the compiler's simulation
of a kernel, so causal visits are estimated with a twin of the block lists whose order is arithmetic on the program ids: the
same kernel bodies, with idle steps above the diagonal that the real lists do not have. The simulation itself can give up
(None). Each estimate runs in a child process.
"""

import glob
import os
import re
import subprocess
import sys
import tempfile

PASSES = ("fwd", "bwd")


def estimate(chip: str, heads: int, what: str) -> dict[str, int] | None:
    """{operation: cycles}, None where the simulation gave up."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-m", "tests.backends.mosaic_tpu.estimate", "--child", chip, str(heads), what],
            env={**os.environ, "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        found: dict[str, int] = {}
        for path in glob.glob(folder + "/*"):
            with open(path) as file:
                pairs = re.findall(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', file.read())
            found |= {name: int(cycles) for name, cycles in pairs}
        return found if child.returncode == 0 else None


def child(chip: str, heads: int, what: str) -> None:
    from tests.backends.mosaic_tpu import aot  # sets the environment before jax is imported

    import jax  # isort: skip
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl

    from flexjax.backends.mosaic_tpu import backward, backward_dkv, forward, support, tables, vmem
    from flexjax.plan.kernel_plan import BlockLists, Operands, Results, Wanted

    class CausalTwin(tables.ListedOrder):
        """All tiles of a square, those above the diagonal idle, without lists."""

        prefetch = 0
        chunks = 1

        def __init__(self, plan, geometry, group, by_keys, lists):
            self.geometry, self.group, self.by_keys = geometry, group, by_keys
            self.kinds = frozenset({tables.IDLE, tables.FULL, tables.PARTIAL, tables.EDGE})
            self.ragged = False
            self.shape = tables.list_shape(plan, geometry, group, by_keys)
            self.sub_blocks, self.words = self.shape.sub_blocks, self.shape.words
            self.rows_a_word = 32 // self.sub_blocks[1]
            self.block_sizes = (128, 128)
            self.list_heads = self.list_batch = 1

        def tables(self, chunk):
            return (), None

        def grid(self, count):
            g = self.geometry
            square = (g.batch, g.heads // (self.group if self.by_keys else 1), g.q_tiles, g.q_tiles)
            return (*square, self.group) if self.by_keys else square

        def semantics(self):
            return ("parallel", "parallel") + ("arbitrary",) * (3 if self.by_keys else 2)

        def where(self, *ids):
            if self.by_keys:
                return ids[0], ids[1] * np.int32(self.group) + ids[4], jnp.maximum(ids[3], ids[2]), ids[2]
            return ids[0], ids[1], ids[2], jnp.minimum(ids[3], ids[2])

        def visit(self, refs):
            ids = [pl.program_id(n) for n in range(5 if self.by_keys else 4)]
            b, h, i, j = self.where(*ids)
            on = ids[3] >= ids[2] if self.by_keys else ids[3] <= ids[2]
            below = jnp.where(on, np.int32(tables.FULL), np.int32(tables.IDLE))
            kind = jnp.where(ids[2] == ids[3], np.int32(tables.PARTIAL), below)
            words = tuple((i * 7 + j * 13 + n) * 77777 for n in range(2 * self.words))
            last = ids[3] == np.int32(self.geometry.q_tiles - 1)
            return tables.Visit(b, h, i, j, ids[3] == 0, last, kind, words, ids[4] if self.by_keys else np.int32(0))

    name, kind, *sizes = what.split(",")
    score = {"alibi": aot._alibi, "softcap": aot._softcap}.get(kind)
    mask = aot._causal if kind in ("causal", "alibi") else None
    plan, operands, derivative, _ = aot.large(
        (heads, heads), 4096, 128, score=score, mask=mask, width=32 if mask else 0, layout="BNTH"
    )
    if sizes:
        tiles = vmem.Tiles(*map(int, sizes))
        vmem.forward_tiles = lambda *_: tiles
        vmem.backward_tiles = lambda *_: tiles
    launch = forward.launch

    def launch_without_tables(title, body, order, feeds, *rest):
        # A computed table may be placed where the simulation cannot follow; its values do not matter to it.
        feeds.tables = (jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, 1), jnp.int32))
        return launch(title, body, order, feeds, *rest)

    for module in (forward, backward, backward_dkv):
        module.launch = launch_without_tables
        if mask is not None:
            module.make_order = CausalTwin
    backend = support.MosaicTpuBackend()

    def given(q, k, v):
        return Operands(q, k, v, None, None, None, operands.score_captures, (), (), BlockLists(*[None] * 8))

    def run(q, k, v, lse, out, d_out):
        if name == "fwd":
            return backend.forward(plan, given(q, k, v))
        wanted = Wanted(True, True, True, False, False, False, tuple(False for _ in operands.score_captures))
        return backend.backward(plan, given(q, k, v), Results(out, lse, None), d_out, None, wanted, derivative)

    line = jax.ShapeDtypeStruct((1, heads, 4096), "float32")
    q = operands.query
    aot.compile_for(run, [q, q, q, line, q, q], chip)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        for wanted_kind in sys.argv[3:]:
            print(sys.argv[1], wanted_kind, estimate(sys.argv[1], int(sys.argv[2]), wanted_kind), flush=True)
