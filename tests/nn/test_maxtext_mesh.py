"""A tiny Llama of MaxText on eight CPU devices: what its compiled step gathers, and context parallelism."""

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn
from tests.conftest import QUICK_TO_COMPILE
from tests.parallel.collectives import collectives

BATCH, TOKENS, HEAD_DIM, VOCABULARY = 8, 32, 8, 64
LENGTHS = (10, 17, 5)  # of the documents of a row; no end is at the end of a device's tokens
SPLIT = dict(ici_fsdp_parallelism=2, ici_tensor_parallelism=2, ici_context_parallelism=2)
MESHES = {
    "fsdp and tensor": dict(ici_fsdp_parallelism=4, ici_tensor_parallelism=2),
    "context, in order": SPLIT | dict(context_parallel_load_balance=False),
    "context, both ends": SPLIT,
    "context, ring": SPLIT | dict(context_parallel_strategy="ring", hardware="gpu", packing=False),
}


# ------------------------------------------------------------------- in the child


class Ran(typing.NamedTuple):
    """The compiled text, the loss and the gradients of one attention."""

    text: str
    loss: float
    gradients: list[np.ndarray]


def both(options: dict[str, object]) -> tuple[Ran, Ran]:
    """With dot_product and with flexjax, the same weights and batch."""
    import maxtext
    from flax import linen
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import max_utils, maxtext_utils

    given = dict(
        base_emb_dim=32, base_num_query_heads=4, base_num_kv_heads=2, base_mlp_dim=48, base_num_decoder_layers=2,
        head_dim=HEAD_DIM, vocab_size=VOCABULARY, max_target_length=TOKENS, per_device_batch_size=1, dtype="float32",
        attention="dot_product", dataset_type="synthetic", hardware="cpu", skip_jax_distributed_system=True,
        enable_checkpointing=False, run_name="tiny", override_model_config=True,
    ) | options  # fmt: skip
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    with tempfile.TemporaryDirectory() as folder:
        config = pyconfig.initialize(["", base, f"base_output_directory={folder}", *(f"{k}={v}" for k, v in given.items())])  # fmt: skip
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    ids = np.repeat(np.arange(len(LENGTHS)) + 1, LENGTHS)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TOKENS))
    batch = [jnp.broadcast_to(x, (BATCH, TOKENS)).astype(jnp.int32) for x in (tokens, positions, ids)]
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, TOKENS, VOCABULARY)), jnp.float32)
    ways = max_utils.reordered_cp_size(config, mesh)
    if ways > 1:
        batch, weight = jax.tree.map(lambda x: max_utils.reorder_sequence(x, ways), (batch, weight))
    with jax.set_mesh(mesh), linen.logical_axis_rules(config.logical_axis_rules):
        model = models.transformer_as_linen(config, mesh, quant=None, model_mode="train")
        init = lambda: model.init({"params": jax.random.key(0)}, *batch, enable_dropout=False)
        axes = linen.get_partition_spec(jax.eval_shape(init))
        where = linen.logical_to_mesh_sharding(axes, mesh, config.logical_axis_rules)
        weights = jax.jit(init, out_shardings=where)()
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "context"))
        batch, weight = jax.device_put((batch, weight), rows)

        def run() -> Ran:
            def loss(weights: typing.Any, batch: list[jax.Array], weight: jax.Array) -> jax.Array:
                return jnp.mean((model.apply(weights, *batch, enable_dropout=False) - weight) ** 2)

            step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, where))
            step = step.lower(weights, batch, weight).compile()
            value, gradients = step(weights, batch, weight)
            return Ran(step.as_text(), float(value), [np.asarray(x) for x in jax.tree.leaves(gradients)])

        theirs = run()
        with flexjax.nn.maxtext.install():
            return theirs, run()


def wide_gathers(text: str) -> list[str]:
    """The shapes with a head axis that a program gathers: [.., heads, .., D] of query, key and value."""
    found = re.findall(r"= \(?(\w+\[[\d,]*\])[^=]* all-gather(?:-start)?\(", text)
    return [shape for shape in found if shape.count(",") >= 3]


def main(*names: str) -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", flexjax.FallbackWarning)
    for name in names:
        theirs, ours = both(MESHES[name])
        pairs = zip(ours.gradients, theirs.gradients, strict=True)
        gathers = [[[x.size, x.in_loop] for x in collectives(r.text) if x.kind == "all-gather"] for r in (theirs, ours)]
        apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        found = dict(losses=[theirs.loss, ours.loss], apart=apart, gathers=gathers, wide=wide_gathers(ours.text))
        print(json.dumps({"name": name} | found), flush=True)


# ------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason="pip install maxtext")
@pytest.mark.parametrize("name", MESHES)
def test_a_step_on_eight_devices(name: str) -> None:
    flags = {"xla_force_host_platform_device_count": "8"} | QUICK_TO_COMPILE
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in flags.items())}
    command = [sys.executable, "-m", "tests.nn.test_maxtext_mesh", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(*found["losses"], rtol=1e-6)
    assert found["apart"] < 2e-5
    if name == "fsdp and tensor":
        theirs, ours = ([tuple(x) for x in each] for each in found["gathers"])
        assert collections.Counter(ours) == collections.Counter(theirs), "the weights, and no query, key, value or ids"
        assert theirs
        assert found["wide"] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
