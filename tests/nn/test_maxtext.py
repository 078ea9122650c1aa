"""flexjax.nn.maxtext.install beside MaxText's own dot product: AttentionOp called as its layers call it."""

import importlib.util
import inspect
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn
from tests.cases.small import launches

if importlib.util.find_spec("maxtext") is None:
    pytest.skip("flexjax.nn.maxtext adapts to MaxText: pip install maxtext", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what MaxText imports is deprecated in places
    from flax import nnx
    from maxtext.common.common_types import DEFAULT_MASK_VALUE, AttentionType
    from maxtext.layers.attention_op import AttentionOp
    from maxtext.layers.nnx_decoders import NNXDecoder

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, TOKENS, HEADS, DIM = 2, 16, 4, 8
CONFIG = types.SimpleNamespace(  # what AttentionOp reads of MaxText's config
    attention_type="global",
    causal_block_size=4,
    matmul_precision="default",
    ici_context_autoregressive_parallelism=0,
    moba=False,
    head_dim=DIM,
    context_parallel_strategy="all_gather",
    context_sharding="context",
    ulysses_context_sharding="ulysses",
    context_parallel_load_balance=False,
    logical_axis_rules=[],
    shard_mode="auto",
    debug_sharding=False,
    enable_dropout=False,
    use_mla_absorbed_mqa=False,
)
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
IDS = jnp.asarray(np.repeat([[1, 2, 3, 0]], BATCH, 0).repeat([7, 4, 3, 2], axis=1), jnp.int32)
IMAGE = jnp.asarray(np.isin(np.arange(TOKENS), [2, 3, 4, 8, 9]))[None].repeat(BATCH, 0)
INDEXER = jnp.where(jax.random.bernoulli(jax.random.key(9), 0.5, (BATCH, TOKENS, TOKENS)) | jnp.eye(TOKENS, dtype=bool), 0.0, DEFAULT_MASK_VALUE)  # fmt: skip
SINKS = jnp.array([0.3, -0.2, 1.0, 0.0])


def attention_op(kind: str = "global", kv_heads: int = 2, **options: object) -> AttentionOp:
    sizes = {"sliding_window_size": 3, "chunk_attn_window_size": 4, "attention_type": AttentionType(kind)} | options
    return AttentionOp(CONFIG, MESH, "dot_product", TOKENS, HEADS, kv_heads, **sizes)


def arrays(q_len: int = TOKENS, kv_len: int = TOKENS, kv_heads: int = 2, value_dim: int = DIM) -> list[jax.Array]:
    shapes = [(q_len, HEADS, DIM), (kv_len, kv_heads, DIM), (kv_len, kv_heads, value_dim)]
    return [jax.random.normal(jax.random.key(i), (BATCH, *shape)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ({}, {}),
        ({"attn_logits_soft_cap": 2.0}, {}),
        ({"attn_logits_soft_cap": 0.0, "float32_qk_product": True}, {"ids": None}),
        ({"kind": "local_sliding"}, {}),
        ({"kind": "local_sliding"}, {"sinks": SINKS}),
        ({"kind": "chunk"}, {}),
        ({"kind": "full"}, {}),
        ({"kind": "full"}, {"ids": None}),
        ({"kind": "mla", "kv_heads": 4}, {"value_dim": 6}),
        ({"kind": "block_diffusion"}, {}),
        ({}, {"bidirectional_mask": IMAGE}),
        ({"kind": "local_sliding"}, {"bidirectional_mask": IMAGE, "indexer_mask": INDEXER}),
    ],
    ids=str,
)
def test_values_and_gradients_of_packed_rows(op: dict[str, object], call: dict[str, object]) -> None:
    layer = attention_op(**op)
    options = dict(call)
    ids, value_dim, sinks = options.pop("ids", IDS), options.pop("value_dim", DIM), options.pop("sinks", None)
    qkv = arrays(kv_heads=op.get("kv_heads", 2), value_dim=value_dim)

    def loss(qkv: list[jax.Array], sinks: jax.Array | None) -> jax.Array:
        sinks = None if sinks is None else nnx.Param(sinks)
        return jnp.sum(jnp.sin(layer(*qkv, ids, None, "train", sinks=sinks, **options)))

    run = jax.value_and_grad(loss, argnums=(0,) if sinks is None else (0, 1))
    theirs = run(qkv, sinks)
    with flexjax.nn.maxtext.install():
        ours = run(qkv, sinks)
    assert (loss(qkv, sinks) == theirs[0]).all(), "MaxText's own method is back"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


def test_no_gradient_crosses_documents() -> None:
    q, k, v = arrays()
    with flexjax.nn.maxtext.install():
        grad = jax.grad(lambda v: attention_op()(q, k, v, IDS, None, "train")[:, 7:11].sum())(v)
    assert (np.asarray(grad[:, :7]) == 0).all()
    assert (np.asarray(grad[:, 11:]) == 0).all()
    assert (np.abs(grad[:, 7:11]) > 0).all()


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_a_decoding_step_adds_both_caches(kind: str, sinks: jax.Array | None) -> None:
    q, k, v = arrays(q_len=1)
    filled = jnp.arange(TOKENS) < jnp.array([[16], [12]])
    prefill = (k, v, filled.astype(jnp.int32))
    ar = (k[::-1], v[::-1], (jnp.arange(TOKENS) > 11).astype(jnp.int32)[None].repeat(BATCH, 0), None)
    layer = attention_op(kind)
    step = lambda: layer(q, None, None, None, None, "autoregressive", [prefill, ar], sinks=sinks)
    theirs = step()
    with flexjax.nn.maxtext.install():
        ours = step()
    shown = np.isfinite(np.asarray(theirs)).all(axis=(1, 2, 3))
    np.testing.assert_allclose(ours[shown], theirs[shown], atol=5e-6)


def test_hidden_caches_give_no_nan() -> None:
    q, k, v = arrays(q_len=1)
    empty = jnp.zeros((BATCH, TOKENS), jnp.int32)
    with flexjax.nn.maxtext.install():
        out = attention_op()(q, None, None, None, None, "autoregressive", [(k, v, empty), (k, v, empty, None)])
    assert (np.asarray(out) == 0).all()


def test_a_previous_chunk_places_the_queries() -> None:
    q, k, v = arrays(q_len=6)
    layer = attention_op("local_sliding")
    prefill = lambda: layer(q, None, None, None, None, "prefill", [(k[:, :14], v[:, :14], IDS[:, :14]), None], k[:, :8])
    with MESH:
        theirs = prefill()
        with flexjax.nn.maxtext.install():
            ours = prefill()
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_the_largest_logits_are_recorded() -> None:
    q, k, v = arrays()
    seen = []
    layer = attention_op(attn_logits_soft_cap=2.0)
    layer(q, k, v, IDS, None, "train", record_max_logits=True)
    seen.append(layer.max_logits[...])
    with flexjax.nn.maxtext.install():
        layer(q, k, v, IDS, None, "train", record_max_logits=True)
    np.testing.assert_allclose(layer.max_logits[...], seen[0], atol=2e-6)


@pytest.mark.parametrize(("policy", "kept", "forwards"), [("custom", "context", 1), ("custom", "out_proj", 2), ("full", "", 2)])  # fmt: skip
def test_what_is_computed_again_for_the_backward_pass(policy: str, kept: str, forwards: int) -> None:
    """Out and lse where the policy keeps the context, and never block lists."""
    options = types.SimpleNamespace(remat_policy=policy, tensors_on_device=[kept], tensors_to_offload=[])
    with flexjax.nn.maxtext.install():
        policy = NNXDecoder.get_remat_policy(types.SimpleNamespace(config=options))
        attend = jax.checkpoint(lambda *qkv: attention_op()(*qkv, IDS + 0, None, "train"), policy=policy)
        program = jax.jit(jax.grad(lambda *qkv: attend(*qkv).sum(), (0, 1, 2))).trace(*arrays()).jaxpr
    found = launches(program.jaxpr)
    assert found.count("flexjax_forward") == forwards
    assert found.count("flexjax_block_lists") == 1


def test_the_signature_is_that_of_maxtext() -> None:
    theirs = inspect.signature(AttentionOp.apply_attention)
    with flexjax.nn.maxtext.install():
        ours = inspect.signature(AttentionOp.apply_attention)
    bare = lambda s: [(p.name, p.kind, p.default) for p in s.parameters.values()]
    assert bare(ours) == bare(theirs)


@pytest.mark.parametrize(
    ("op", "call", "said"),
    [
        (
            {"dropout_rate": 0.1},
            {},
            "attention dropout, which MaxText's dot product leaves out too; set dropout_rate=0",
        ),
        ({"kind": "compressed"}, {}, "compressed attention, whose keys are two sequences"),
        ({}, {"compress_ratio": 4}, "compressed attention, whose keys are two sequences"),
    ],
)
def test_what_has_no_meaning_is_refused(op: dict[str, object], call: dict[str, object], said: str) -> None:
    with flexjax.nn.maxtext.install(), pytest.raises(NotImplementedError) as error:
        attention_op(**op)(*arrays(), IDS, None, "train", **call)
    assert str(error.value) == f"flexjax.nn.maxtext does not compute {said}."


def test_usp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attention_op()
    layer.config = types.SimpleNamespace(**vars(CONFIG) | {"context_parallel_strategy": "usp"})
    monkeypatch.setattr(AttentionOp, "_context_parallel_size", lambda self: 2)
    with flexjax.nn.maxtext.install(), pytest.raises(NotImplementedError) as error:
        layer(*arrays(), IDS, None, "train")
    assert str(error.value) == (
        "flexjax.nn.maxtext does not compute context parallelism over the two axes of context_parallel_strategy='usp'; "
        "set it to 'all_gather' or 'ring'."
    )
