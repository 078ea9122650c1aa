"""What the backend refuses, and that it says so in a sentence."""

import dataclasses

import jax.numpy as jnp
import pytest

from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan, Wanted
from flexjax.trace.trace_mod import trace_mask_mod, trace_score_mod

PLAN = KernelPlan(1, 2, 2, 256, 256, 16, 16, "float32", "BTNH", 0.25)
V6E = Target("tpu", "TPU v6 lite")
SIZES = (1, 2, 256, 256)
BIG = jnp.zeros(4096, jnp.float32)


def _score(mod):
    return trace_score_mod(mod, SIZES, "float32").program


REFUSED = {
    "float16": (dict(dtype="float16"), "float32 and bfloat16"),
    "float64": (dict(dtype="float64"), "float32 and bfloat16"),
    "empty": (dict(kv_len=0), "no empty arrays"),
    "second order": (dict(differentiable=True), "second derivatives"),
    "wide heads": (dict(head_dim=2048), "up to 1024"),
    "gather at the score": (
        dict(score=_score(lambda s, b, h, q, k: s + BIG[s.astype(jnp.int32)])),
        "index computed from the score",
    ),
    "bessel of the score": (dict(score=_score(lambda s, b, h, q, k: jnp.i0(s))), "cannot run this score_mod"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name: str):
    fields, said = REFUSED[name]
    reason = MosaicTpuBackend().refuses(dataclasses.replace(PLAN, **fields), V6E)
    assert reason is not None
    assert said in reason
    assert reason.endswith(".")


@pytest.mark.parametrize("block", [(20, 64), (1, 1), (100, 200), (264, 16)], ids=str)
def test_accepts_blocks_of_any_size(block: tuple[int, int]):
    mask = trace_mask_mod(lambda b, h, q, k: q >= k, SIZES).program
    blocks = BlockLayout(1, 1, *block, 1, 1, 1, 1)
    assert (
        MosaicTpuBackend().refuses(dataclasses.replace(PLAN, mask=mask, blocks=blocks, q_len=512, kv_len=512), V6E)
        is None
    )


def test_accepts_general_gathers():
    table, ids = jnp.zeros((300, 300)), jnp.zeros(256, jnp.int32)
    score = _score(lambda s, b, h, q, k: s + table[ids[q], ids[k]])
    mask = trace_mask_mod(lambda b, h, q, k: ids[(q * k) % 256] == 0, SIZES).program
    assert MosaicTpuBackend().refuses(dataclasses.replace(PLAN, score=score, mask=mask), V6E) is None


def test_gradient_too_long_for_vmem_is_refused():
    length = 1 << 20
    table = jnp.zeros(2 * length, jnp.float32)
    traced = trace_score_mod(lambda s, b, h, q, k: s + table[q - k + length], (1, 2, length, length), "float32")
    plan = dataclasses.replace(PLAN, q_len=length, kv_len=length, score=traced.program)
    backend = MosaicTpuBackend()
    assert backend.refuses(plan, V6E) is None
    wanted = Wanted(True, True, True, False, False, False, (True,))
    reason = backend.refuses_backward(plan, V6E, wanted, traced.derivative)
    assert reason is not None
    assert "q - kv" in reason


def test_automatic_axes_are_refused() -> None:
    """Mosaic cannot be split by the partitioner, and libtpu does not ask partitioning rules."""
    backend = MosaicTpuBackend()
    assert backend.refuses(PLAN, V6E) is None
    assert backend.refuses(PLAN, dataclasses.replace(V6E, automatic=True)) == (
        "XLA cannot split the kernels of mosaic_tpu over automatic mesh axes, and has no partitioning rules on a TPU. Make the "
        "axes explicit (jax.make_mesh with AxisType.Explicit, then jax.set_mesh), or call flex_attention inside jax.shard_map "
        "over all axes."
    )
