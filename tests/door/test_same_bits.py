"""`KernelOptions(invariant=True)`: the same bits of a token whatever the call is, and sentences for what is refused."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexjax
from flexjax import paged
from tests.door.same_bits import CUT, INVARIANT, WAYS, Problem, differences, full
from tests.marks import some_slow

SMALL = Problem(T=300)
EVERYDAY = ("chunks of 7", "pages of 16, one by one", "captured gradients")


@pytest.mark.parametrize("way", some_slow(WAYS, EVERYDAY))
def test_a_way_gives_the_bits_of_the_full_pass(way: str) -> None:
    assert differences(SMALL, way) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_way_gives_the_bits_of_the_full_pass_in_bfloat16(way: str) -> None:
    assert differences(dataclasses.replace(SMALL, dtype="bfloat16", mask="window", sinks=True), way) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["chunks of 128", "pages of 64, chunks of 100"])
def test_rows_of_several_splits(way: str) -> None:
    assert differences(Problem(T=4500, N=2, M=1, score=""), way) == 0


@pytest.mark.slow
def test_subnormal_outputs_do_not_follow_gradients() -> None:
    p = Problem(T=301, D=8, dtype="float16", score="alibi", mask="prefix", seed=60)
    assert differences(p, "captured gradients") == 0


PROBLEMS = st.builds(
    Problem,
    T=st.integers(1, 420),
    N=st.just(4),
    M=st.sampled_from((1, 2, 4)),
    D=st.sampled_from((8, 64)),
    E=st.sampled_from((16, 40)),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    score=st.sampled_from(("", "alibi", "softcap", "alibi softcap wave")),
    mask=st.sampled_from(("causal", "window", "prefix")),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(problem=PROBLEMS, way=st.sampled_from(sorted(WAYS)))
def test_any_way_gives_the_bits_of_the_full_pass(problem: Problem, way: str) -> None:
    if not problem.cuts and way.startswith(CUT):
        problem = dataclasses.replace(problem, mask="causal")
    assert differences(problem, way) == 0


@pytest.mark.slow
def test_meshes_of_8_devices() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.door.same_bits"]
    said = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [f"{way} 8 0" for way in WAYS if "mesh" in way]


def test_without_the_option_the_same_ways_differ() -> None:
    assert differences(dataclasses.replace(SMALL, options=None), "chunks of 7") > 0


def test_it_is_attention() -> None:
    p = dataclasses.replace(SMALL, T=200, sinks=True, mask="window")
    reference = dataclasses.replace(p, options=None)
    _, out, lse = full(p)
    _, want, want_lse = full(reference)
    assert np.abs(out - want).max() < 2e-6
    assert np.abs(lse - want_lse).max() < 2e-6


# ------------------------------------------------------------------- what is refused


X = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
ONE = "leave out one of them."


def refusal(**keywords: object) -> str:
    arguments = {"query": X, "key": X, "value": X, "kernel_options": INVARIANT} | keywords
    with pytest.raises((NotImplementedError, ValueError)) as error:
        jax.eval_shape(lambda: flexjax.explain(**arguments))  # pyright: ignore[reportArgumentType]
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"dropout": flexjax.Dropout(0.5, jax.random.key(0))}, "`dropout`"),
        ({"weights": lambda s, b, h, q, kv: s}, "`weights`"),
        ({"return_aux": flexjax.AuxRequest(expectations={"f": lambda s, b, h, q, kv: s})}, "`expectations`"),
        ({"query_extra": X, "key_extra": X}, "`query_extra` and `key_extra`"),
        (
            dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float8_e4m3fn)),
            "float8 inputs",
        ),
    ],
)
def test_a_feature_without_a_canonical_order_is_refused(given: dict, what: str) -> None:
    assert refusal(**given) == f"kernel_options.invariant does not take {what}; {ONE}"


def test_user_lists_are_refused() -> None:
    blocks = flexjax.BlockMask.from_kv_blocks(
        jnp.ones((1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1, 1), jnp.int32), block_size=64, q_len=64, kv_len=64
    )
    assert refusal(block_mask=blocks) == f"kernel_options.invariant does not take block masks from user lists; {ONE}"


def test_keys_in_8_bits_and_shared_prefixes_are_refused() -> None:
    table = paged.table(1, 4, 4, 16)
    cache = paged.empty(4, 16, 2, 16, dtype=jnp.int8, scales=1.0)
    q = jnp.zeros((1, 1, 2, 16), jnp.bfloat16)
    with pytest.raises(NotImplementedError) as error:
        flexjax.paged_attention(q, cache, table, kernel_options=INVARIANT)
    assert str(error.value) == f"kernel_options.invariant does not take keys in 8 bits; {ONE}"
    shared = flexjax.SharedPrefix(jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(NotImplementedError) as error:
        flexjax.paged_attention(q, cache, table, shared=shared, kernel_options=INVARIANT)
    assert (
        str(error.value)
        == "kernel_options.invariant does not take `shared`, which adds up the keys of a row in another order."
    )


@pytest.mark.parametrize("name", ["block_q", "block_kv", "num_stages", "split"])
def test_tile_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="invariant") as error:
        flexjax.KernelOptions(invariant=True, **{name: 64})  # pyright: ignore[reportArgumentType]
    assert str(error.value) == (
        f"`kernel_options.{name}` is 64 beside invariant=True; expected None. Its tiles and splits are a part of the bits."
    )


NO_KERNELS = "has no kernels for kernel_options.invariant yet; xla runs it on a CPU."
NO_ORDER = "mosaic_gpu: The GPU kernels on mma.sync have no canonical order (kernel_options.invariant) yet; those for Hopper do."
REFUSED = {
    "h200": "mosaic_gpu: With kernel_options.invariant the GPU kernels take bfloat16 and float16, not float32.",
    "a100": NO_ORDER,
    "b200": NO_ORDER,
    "v5e": f"mosaic_tpu: mosaic_tpu {NO_KERNELS}",
}


@pytest.mark.parametrize("device", REFUSED)
def test_no_backend_of_a_gpu_or_tpu_takes_float32(device: str) -> None:
    platform = "tpu" if device == "v5e" else "cuda"
    said = refusal(device=device)
    assert said.startswith("No implementation accepts this call: ")
    assert said.endswith(
        f"xla: kernel_options.invariant runs on xla for a CPU; on {platform} products follow the shapes of a call."
    )
    assert REFUSED[device] in said


def test_the_reference_and_simulated_kernels_refuse() -> None:
    for name, options in (
        ("reference", INVARIANT),
        ("mosaic_tpu", flexjax.KernelOptions(invariant=True, interpret=True)),
    ):
        x = jnp.zeros((1, 4, 1, 8))
        with pytest.raises(NotImplementedError) as error:
            flexjax.flex_attention(x, x, x, kernel_options=options, implementation=name)
        assert str(error.value).startswith(f"No implementation accepts this call: {name}: {name} {NO_KERNELS}")


def test_autotune_has_nothing_to_choose() -> None:
    with pytest.raises(NotImplementedError) as error:
        flexjax.autotune(X, X, X, kernel_options=INVARIANT)
    assert str(error.value) == "autotune has no tiles to choose beside kernel_options.invariant, which fixes them."


def test_context_is_refused() -> None:
    context = flexjax.ContextParallel("x")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with jax.set_mesh(mesh):
        said = refusal(context=context)
    assert said == "kernel_options.invariant does not take `context`, which adds up the keys of a row in another order."


def test_explain_says_whose_bits_are_fixed() -> None:
    follows = "bits: out and lse of a token may follow the rest of the call. "
    text = flexjax.explain(X, X, X)
    assert (
        follows + "kernel_options.invariant=True keeps them fixed, in 2 to 4 times the time of the forward pass."
        in text
    )
    text = flexjax.explain(X, X, X, weights=lambda s, b, h, q, kv: s)
    assert follows + f"kernel_options.invariant does not take `weights`; {ONE}" in text
    text = flexjax.explain(X, X, X, kernel_options=INVARIANT)
    assert (
        "bits: out and lse of a token follow its query and the keys that it sees, and not the rest of the call" in text
    )
    assert "tiles: 16 rows (tokens and heads of one key head) x 128 keys, in splits of 2048 keys" in text


def test_sinks_of_each_copy_under_vmap() -> None:
    p = dataclasses.replace(SMALL, T=40, sinks=True)
    q, k, v = (x[None] for x in p.qkv)
    sinks = jnp.asarray([[0.5, 1, 2, 3], [-1, 0, 1, 2]], jnp.float32)
    keywords = p.keywords | {"score_mod": p.score_mod()}
    del keywords["sinks"]
    call = lambda s: flexjax.flex_attention(q, k, v, sinks=s, **keywords)
    both, one = jax.jit(jax.vmap(call))(sinks), jax.jit(call)(sinks[1])
    assert np.array_equal(both[0][1], one[0])
    assert np.array_equal(both[1].lse[1], one[1].lse)
