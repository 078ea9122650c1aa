"""Whole models of MaxText, tiny, with flexjax.nn.maxtext.install and with MaxText's own dot product."""

import importlib.util
import os
import pathlib
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn
from tests.cases.small import launches
from tests.marks import some_slow

if importlib.util.find_spec("maxtext") is None:
    pytest.skip("flexjax.nn.maxtext adapts to MaxText: pip install maxtext", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what MaxText imports is deprecated in places
    import maxtext
    import optax
    from flax import linen
    from maxtext.configs import pyconfig
    from maxtext.inference.maxengine import maxengine
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS, VOCABULARY = 16, 64
TINY = dict(
    base_emb_dim=32, base_num_query_heads=4, base_num_kv_heads=2, base_mlp_dim=32, base_num_decoder_layers=2, head_dim=8,
    vocab_size=VOCABULARY, max_target_length=TOKENS, per_device_batch_size=1, attention="dot_product", dtype="float32",
    dataset_type="synthetic", hardware="cpu", skip_jax_distributed_system=True, enable_checkpointing=False, run_name="tiny",
)  # fmt: skip
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, base_moe_mlp_dim=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
CONFIGS = {
    "llama": {},
    "gemma3": dict(
        model_name="gemma3-4b", base_num_decoder_layers=6, sliding_window_size=4, attn_logits_soft_cap=2.0
    ),
    "llama4": dict(
        model_name="llama4-17b-16e", base_num_decoder_layers=4, chunk_attn_window_size=4, scan_layers=False, **EXPERTS
    ),
    "gpt-oss": dict(
        model_name="gpt-oss-20b", base_num_decoder_layers=2, sliding_window_size=4, inhomogeneous_layer_cycle_interval=2,
        **EXPERTS,
    ),
    "deepseek": dict(
        decoder_block="deepseek", attention_type="mla", base_num_kv_heads=4, first_num_dense_layers=1, shared_experts=1,
        **LATENT, **EXPERTS,
    ),
}  # fmt: skip


def config_of(folder: pathlib.Path, **options: object) -> typing.Any:
    given = TINY | dict(override_model_config=True, base_output_directory=str(folder)) | options
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(["", base, *(f"{k}={v}" for k, v in given.items())])


@pytest.mark.parametrize("name", some_slow(CONFIGS, ["llama"]))
def test_a_model_has_the_loss_and_gradients_of_the_dot_product(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, **CONFIGS[name])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    rows = max(2, mesh.size)
    tokens = jax.random.randint(jax.random.key(0), (rows, TOKENS), 0, VOCABULARY)
    ids = jnp.asarray(np.repeat([[1, 2, 0]], rows, 0).repeat([8, 5, 3], axis=1))  # two documents and padding
    given = tokens, jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape), ids
    calls = []
    real = flexjax.nn.maxtext.flex_attention
    monkeypatch.setattr(flexjax.nn.maxtext, "flex_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    with mesh, linen.logical_axis_rules(config.logical_axis_rules):
        model = models.transformer_as_linen(config, mesh, quant=None, model_mode="train")
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        weights = model.init(keys, *given, enable_dropout=False)

        def loss(weights: object) -> jax.Array:
            out = model.apply(weights, *given, enable_dropout=False)
            return jnp.mean(out.astype(jnp.float32) ** 2 * (ids != 0)[..., None])

        wanted, expected = jax.jit(jax.value_and_grad(loss))(weights)
        assert not calls
        with flexjax.nn.maxtext.install():
            got, found = jax.jit(jax.value_and_grad(lambda weights: loss(weights)))(weights)
    assert calls
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(np.abs(b).max(), 1e-2))


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "made"), [("true", 1), ("false", 2)])
def test_layers_make_no_block_mask_in_a_loop_or_again(scan: str, made: int, tmp_path: pathlib.Path) -> None:
    """Of layers that are not scanned XLA merges the rest (tests/transforms/test_checkpoint.py)."""
    config = config_of(tmp_path, scan_layers=scan)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    given = [jnp.ones((max(2, mesh.size), TOKENS), jnp.int32)] * 3
    with flexjax.nn.maxtext.install(), jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        model = models.transformer_as_linen(config, mesh, quant=None, model_mode="train")
        weights = jax.eval_shape(lambda: model.init({"params": jax.random.key(0)}, *given, enable_dropout=False))
        loss = lambda weights, *given: model.apply(weights, *given, enable_dropout=False).sum()
        found = launches(jax.jit(jax.grad(loss)).trace(weights, *given).jaxpr.jaxpr)
    assert [name for name in found if name.endswith("block_lists")] == ["flexjax_block_lists"] * made


# ------------------------------------------------------------------- training and decoding

STEPS = 30


def test_thirty_steps_have_the_losses_of_the_dot_product(tmp_path: pathlib.Path) -> None:
    """From the same weights, on packed rows. Losses differ by rounding, which the steps amplify."""
    config = config_of(tmp_path)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    rows = 2 * mesh.size
    tokens = jax.random.randint(jax.random.key(0), (rows, TOKENS), 0, VOCABULARY)
    ids = np.repeat([[1, 2, 3]], rows, 0).repeat([8, 5, 3], axis=1)
    positions = np.concatenate([np.arange(n) for n in (8, 5, 3)])
    given = tokens, jnp.broadcast_to(positions, tokens.shape), jnp.asarray(ids)
    descent = optax.adamw(1e-2)
    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        model = models.transformer_as_linen(config, mesh, quant=None, model_mode="train")
        first = jax.jit(lambda: model.init({"params": jax.random.key(0)}, *given, enable_dropout=False))()

        def loss(weights: typing.Any) -> jax.Array:
            logits = model.apply(weights, *given, enable_dropout=False)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, axis=1))
            return jnp.mean(each)

        def losses() -> np.ndarray:
            def step(state: typing.Any, _: None) -> tuple[typing.Any, jax.Array]:
                weights, moments = state
                value, gradients = jax.value_and_grad(loss)(weights)
                updates, moments = descent.update(gradients, moments, weights)
                return (optax.apply_updates(weights, updates), moments), value

            run = jax.jit(lambda weights: jax.lax.scan(step, (weights, descent.init(weights)), None, STEPS)[1])
            return np.asarray(run(first))

        expected = losses()
        with flexjax.nn.maxtext.install():
            found = losses()
    assert expected[-1] < 0.2 * expected[0]
    rounding = np.finfo(np.float32).eps
    np.testing.assert_allclose(found, expected, rtol=64 * rounding)  # measured: 1 at first, 16 at the end


@pytest.mark.slow
def test_greedy_decoding_has_the_tokens_of_the_dot_product(tmp_path: pathlib.Path) -> None:
    """With MaxText's engine: the prompt fills the one cache, generated tokens the other."""
    result = maxengine.engine_api.ResultTokens
    if getattr(maxengine.engine_api, "_IS_STUB", False):  # without jetstream, MaxText's stand-in is no pytree
        jax.tree_util.register_pytree_node(
            result, lambda r: ((r.data, r.log_prob), None), lambda _, x: result(data=x[0], log_prob=x[1])
        )
    config = config_of(tmp_path, max_target_length=32, max_prefill_predict_length=16, decode_sampling_strategy="greedy")

    def decoded() -> tuple[np.ndarray, np.ndarray]:
        engine = maxengine.MaxEngine(config)
        weights, state = engine.load_params(rng=jax.random.key(0)), engine.init_decode_state()
        for slot, length in enumerate((11, 16)[: engine.max_concurrent_decodes]):
            prompt = (slot + 3 * jnp.arange(1, 17)) % VOCABULARY
            prefix, _ = engine.prefill(params=weights, padded_tokens=prompt, true_length=length)
            state = engine.insert(prefix, state, slot=slot)
        tokens, logits = [], []
        for _ in range(12):
            state, new = engine.generate(weights, state)
            tokens.append(np.asarray(new.data[:, 0]))
            logits.append(np.asarray(state["logits"]))
        return np.stack(tokens), np.stack(logits)

    expected, wanted = decoded()
    with flexjax.nn.maxtext.install():
        found, got = decoded()
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) > 6, "the test says something"
    np.testing.assert_allclose(got, wanted, atol=1e-5)
