"""AttentionOp of MaxText whose tokens are split over a context axis by flexjax, beside its dot product on one device."""

import importlib.util
import os
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn
from tests.conftest import QUICK_TO_COMPILE
from tests.parallel.collectives import collectives

if importlib.util.find_spec("maxtext") is None:
    pytest.skip("flexjax.nn.maxtext adapts to MaxText: pip install maxtext", allow_module_level=True)
from tests.marks import some_slow
from tests.nn import test_maxtext as single

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what MaxText imports is deprecated in places
    from flax import linen
    from maxtext.common.common_types import AttentionType, ReorderStrategy
    from maxtext.layers.attention_op import AttentionOp

pytestmark = pytest.mark.filterwarnings("ignore", "error::flexjax.FallbackWarning")

DEVICES = jax.device_count()
BATCH, TOKENS = single.BATCH, 16 * DEVICES
RULES = [("activation_q_length", "context"), ("prefill_activation_length", "context"), ("activation_batch_attn", None)]
IDS = jnp.asarray(np.repeat([[1, 2, 3, 0]], BATCH, 0).repeat([TOKENS // 2 - 3, 9, TOKENS // 2 - 8, 2], axis=1), jnp.int32)  # fmt: skip
IMAGE = jnp.asarray(np.isin(np.arange(TOKENS) % 17, [2, 3, 4, 8, 9]))[None].repeat(BATCH, 0)
KEPT = jax.random.bernoulli(jax.random.key(9), 0.5, (BATCH, TOKENS, TOKENS)) | jnp.eye(TOKENS, dtype=bool)
INDEXER = jnp.where(KEPT, 0.0, single.DEFAULT_MASK_VALUE)
WEIGHTS = jax.random.normal(jax.random.key(5), (BATCH, TOKENS, single.HEADS, single.DIM))
BOTH_ENDS = np.concatenate([np.r_[r * 8 : r * 8 + 8, TOKENS - r * 8 - 8 : TOKENS - r * 8] for r in range(DEVICES)])
ORDERS = {  # the options of the config, and which token each row holds
    "in order": (dict(context_parallel_load_balance=False), np.arange(TOKENS)),
    "both ends": (dict(context_parallel_load_balance=True), BOTH_ENDS),
    "striped": (
        dict(context_parallel_load_balance=True, context_parallel_strategy="ring", hardware="gpu"),
        np.concatenate([np.arange(r, TOKENS, DEVICES) for r in range(DEVICES)]),
    ),
}


def layers(order: str, kind: str = "global", **options: object) -> tuple[AttentionOp, AttentionOp]:
    """The same layer on one device with the dot product, and over the context axis of all devices."""
    usual = dict(context_parallel_reorder_strategy=ReorderStrategy.AUTO, packing=True, hardware="cpu")
    config = types.SimpleNamespace(**vars(single.CONFIG) | usual | ORDERS[order][0])
    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    make = lambda config, mesh: AttentionOp(
        config, mesh, "dot_product", TOKENS, single.HEADS, 2, attention_type=AttentionType(kind),
        sliding_window_size=11, chunk_attn_window_size=12, **options,
    )  # fmt: skip
    return make(single.CONFIG, single.MESH), make(config, mesh)


def over_tokens(mesh: jax.sharding.Mesh, x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context")))


MASKS = {
    "global": ("global", {}),
    "window, sinks": ("local_sliding", {"sinks": single.SINKS}),
    "chunk": ("chunk", {}),
    "block diffusion": ("block_diffusion", {}),
    "bidirectional": ("local_sliding", {"bidirectional_mask": IMAGE}),
    "indexer": ("global", {"indexer_mask": INDEXER}),
}


@pytest.mark.parametrize(
    ("order", "name"), some_slow([(o, m) for o in ORDERS for m in MASKS], [("both ends", "indexer"), ("striped", "bidirectional")])
)  # fmt: skip
def test_values_and_gradients(order: str, name: str) -> None:
    kind, masks = MASKS[name]
    one, split = layers(order, kind)
    rows, places = ORDERS[order][1], np.argsort(ORDERS[order][1])

    def run(layer: AttentionOp, order: np.ndarray) -> object:
        def loss(qkv: list[jax.Array], ids: jax.Array, given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = layer(*qkv, ids, None, "train", **given)
            return jnp.sum(jnp.sin(out) * WEIGHTS[:, order]), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    qkv = single.arrays(TOKENS, TOKENS)
    (_, out), gradients = run(one, np.arange(TOKENS))(qkv, IDS, masks)
    given = {name: x if name == "sinks" else x[:, rows] for name, x in masks.items()}
    if "indexer_mask" in given:
        given["indexer_mask"] = given["indexer_mask"][:, :, rows]
    arguments = [over_tokens(split.mesh, x[:, rows]) for x in qkv], over_tokens(split.mesh, IDS[:, rows]), given
    with flexjax.nn.maxtext.install(), jax.set_mesh(split.mesh), linen.logical_axis_rules(RULES):
        step = run(split, rows).lower(*arguments).compile()
        (_, ours), found = step(*arguments)
    np.testing.assert_allclose(ours[:, places], out, atol=5e-6)
    for a, b in zip(found, gradients, strict=True):
        np.testing.assert_allclose(a[:, places], b, atol=3e-5)
    moved = [x for x in collectives(step.as_text()) if x.kind == "all-gather"]
    assert all(x.size <= max(qkv[1].nbytes, INDEXER.nbytes // 4) for x in moved), "keys, values, marks; never queries"


@pytest.mark.parametrize("first", [0, TOKENS // 2])
def test_prefill_is_in_order(first: int) -> None:
    """Whatever context_parallel_load_balance says: MaxText reorders the batches of training alone."""
    one, split = layers("both ends", "local_sliding")
    q, k, v = single.arrays(TOKENS, TOKENS)
    prefill = lambda layer, q, k, v: layer(
        q, None, None, None, None, "prefill", [(k, v, IDS), None], k[:, :first] if first else None
    )
    with single.MESH:
        wanted = prefill(one, q[:, first:], k, v)
    given = [over_tokens(split.mesh, x) for x in (q[:, first:], k, v)]
    with flexjax.nn.maxtext.install(), jax.set_mesh(split.mesh), linen.logical_axis_rules(RULES):
        found = jax.jit(lambda *qkv: prefill(split, *qkv))(*given)
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_a_decoding_step() -> None:
    one, split = layers("both ends", "local_sliding")
    q, k, v = single.arrays(1, TOKENS)
    filled = (jnp.arange(TOKENS) < jnp.array([[TOKENS], [12]])).astype(jnp.int32)
    step = lambda layer: layer(
        q, None, None, None, None, "autoregressive", [(k, v, filled), (k[::-1], v[::-1], filled[:, ::-1], None)]
    )
    wanted = step(one)
    with flexjax.nn.maxtext.install(), jax.set_mesh(split.mesh), linen.logical_axis_rules(RULES):
        np.testing.assert_allclose(jax.jit(lambda: step(split))(), wanted, atol=5e-6)


@pytest.mark.slow
@pytest.mark.skipif(DEVICES == 8, reason="this is what it runs")
def test_on_eight_devices() -> None:
    flags = {"xla_force_host_platform_device_count": "8"} | QUICK_TO_COMPILE
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in flags.items())}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
