"""Calls on float8 in the kernel for Hopper: which it multiplies as float8, the order of keys, and what the simulated kernel computes."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes.dispatch import choose
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

HOPPER = Target("cuda", "NVIDIA H100 80GB HBM3", capability="9.0", cores=132)
AMPERE = Target("cuda", "NVIDIA A100-SXM4-40GB", capability="8.0", cores=108)


def planned(
    q_len: int = 8192, heads: int = 16, dim: int = 128, kv_len: int | None = None, **words: typing.Any
) -> KernelPlan:
    """The plan of a call on float8; `by`: the scales of query, key and value."""
    by = words.pop("by", (None, None, None))
    kv_heads = words.pop("kv_heads", heads)
    q = jax.ShapeDtypeStruct((2, q_len, heads, dim), FLOAT8)
    k = jax.ShapeDtypeStruct((2, kv_len or q_len, kv_heads, dim), FLOAT8)
    found: list[KernelPlan] = []

    def call(q: jax.Array, k: jax.Array) -> None:
        main = [x if s is None else flexjax.Quantized(x, s) for x, s in zip((q, k, k), by, strict=True)]
        found.append(prepare(Arguments(*main, return_aux=words.pop("return_aux", None), **words)).plan)

    jax.eval_shape(call, q, k)
    return found[0]


TABLE = jnp.zeros(20000)
BY_HEAD = (np.ones((2, 16), np.float32), None, np.ones((2, 16), np.float32))
MULTIPLIED: dict[str, tuple[int, typing.Callable[[], KernelPlan]]] = {
    "full": (3, lambda: planned()),
    "causal": (3, lambda: planned(mask_mod=masks.causal)),
    "scales": (3, lambda: planned(mask_mod=masks.causal, by=BY_HEAD)),
    "few query tiles": (2, lambda: planned(512, 2, mask_mod=masks.causal)),
    "a table": (2, lambda: planned(score_mod=lambda s, b, h, q, k: s + TABLE[q - k + 8191])),
    "head dim 256": (2, lambda: planned(2048, dim=256)),
}
WIDENED: dict[str, tuple[Target, str, typing.Callable[[], KernelPlan]]] = {
    "another card": (AMPERE, "Only the kernel for Hopper multiplies float8_e4m3fn.", planned),
    "head dim 64": (
        HOPPER, "At head dims up to 64 products of float8_e4m3fn are not faster than those of bfloat16.", lambda: planned(dim=64),
    ),
    "head dim 320": (
        HOPPER, "Head dims 320 and 320 take two CTAs, which do not multiply float8_e4m3fn.", lambda: planned(dim=320),
    ),
    "head dim 144": (
        HOPPER, "The head dim of value is 144; above 128 the products of float8_e4m3fn take multiples of 64.", lambda: planned(dim=144),
    ),
    "one query": (
        HOPPER, "The decode kernel, for few queries, does not multiply float8_e4m3fn.", lambda: planned(1, kv_len=8192),
    ),
    "scales of blocks of values": (
        HOPPER,
        "Scales of blocks of values would multiply softmax weights before these are rounded to float8_e4m3fn.",
        lambda: planned(by=(None, None, np.ones((2, 64, 16), np.float32))),
    ),
    "max_scores": (
        HOPPER, "The kernel that multiplies float8_e4m3fn does not return max_scores.",
        lambda: planned(return_aux=flexjax.AuxRequest(max_scores=True)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MULTIPLIED)
def test_what_is_multiplied_as_float8(name: str) -> None:
    from flexjax.backends.mosaic_gpu.families import choose_kernel, hopper
    from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan

    groups, make = MULTIPLIED[name]
    run = choose(make(), None, HOPPER)
    assert (run.backend.name, run.plan.float8, run.steps) == ("mosaic_gpu", True, ())
    tile = choose_kernel.forward_kernel(kernel_plan(run.plan, hopper.HOPPER))
    assert (tile.groups, tile.float8, tile.overlap, tile.sum_columns) == (groups, True, False, 8)


@pytest.mark.parametrize("name", WIDENED)
def test_other_calls_run_in_bfloat16(name: str) -> None:
    target, why, make = WIDENED[name]
    run = choose(make(), None, target)
    assert (run.backend.name, run.plan.float8, run.plan.dtype) == ("mosaic_gpu", False, "bfloat16")
    assert [step.why for step in run.steps] == [f"in bfloat16: {why}"]


def test_weights_meet_the_values_of_their_keys() -> None:
    """The columns of P that a thread converts into a word are the keys that `key_major` puts there."""
    from flexjax.backends.mosaic_gpu.forward import hopper_float8 as products
    from flexjax.backends.mosaic_gpu.machine import simulator
    from flexjax.backends.mosaic_gpu.machine.registers import TILE, _constants_of, lowered

    keys, rows = 128, 64
    value = jnp.arange(keys, dtype=jnp.float32).astype(jnp.bfloat16).reshape(1, keys, 1, 1)
    order = np.asarray(products.key_major(value, "BTNH")).reshape(keys).astype(int)
    held = {at: None for _, _, at in _constants_of(lowered(TILE), (rows, keys))}
    for _, item, (row, column) in _constants_of(lowered(products.BYTES), (rows, keys)):
        key = column - item + products.WORD[item]
        assert (row, key) in held  # the first thread has it
        for lane in range(
            4
        ):  # lane j of a row has columns 4 j further in an operand of bytes, 2 j further in an accumulator
            assert order[column + 4 * lane] == key + 2 * lane
    with simulator.running(True):
        simulated = products.weights(jnp.broadcast_to(jnp.arange(keys, dtype=jnp.float32), (rows, keys)))
    rounded = jnp.arange(keys, dtype=jnp.float32).astype(FLOAT8).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(simulated[0], np.float32), np.asarray(rounded)[order])


def test_values_are_padded_with_zeros() -> None:
    from flexjax.backends.mosaic_gpu.forward import hopper_float8 as products

    value = jnp.full((2, 3, 130, 16), 2.0).astype(FLOAT8)
    made = np.asarray(products.key_major(value, "BNTH"), np.float32)
    assert made.shape == (2, 3, 16, 256)
    assert (made == 2).sum(-1).tolist() == np.full((2, 3, 16), 130).tolist()
    assert (made == 0).sum(-1).tolist() == np.full((2, 3, 16), 126).tolist()


# ------------------------------------------------------------------- the simulated kernel

SIMULATED: dict[str, dict[str, typing.Any]] = {
    "causal, scales by head": {"mask_mod": masks.causal, "by": ((2, 4), (2, 2), (2, 2)), "size": 1e-4},
    "scales by block, odd lengths": {
        "mask_mod": masks.causal, "by": ((1, 2, 4), (2, 4, 2), (2, 2)), "size": 100.0, "q_len": 90, "kv_len": 148,
    },
    "192 queries": {"mask_mod": masks.causal, "by": ((2, 4), None, (2, 2)), "q_len": 200, "kv_len": 136, "block_q": 192},
    "ALiBi, no mask": {"score_mod": lambda s, b, h, q, k: s - 0.1 * jnp.abs(q - k), "by": (None, None, None), "layout": "BNTH"},
    "large scores": {"score_mod": lambda s, b, h, q, k: s + jnp.where(k % 3 == 0, -1e9, 0.0), "by": (None, (2, 2), None)},
    "lengths": {"by": (None, None, None), "lengths": (70, 100)},
    "two tiles of columns": {"mask_mod": masks.causal, "by": (None, None, (2, 2)), "dim": 192},
}  # fmt: skip


@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulated_kernel(name: str) -> None:
    check_case(name, interpret=True)


def check_case(name: str, interpret: bool) -> None:
    """Compares a call of SIMULATED with the attention of the same numbers in bfloat16. Weights are rounded by up to 2^-4, and out is a mean
    of many. tools/device/check_sanitizer.py runs it on a GPU.
    """
    case = dict(SIMULATED[name])
    size = case.pop("size", 1.0)  # of the scales of values
    by, layout, lengths = case.pop("by"), case.pop("layout", "BTNH"), case.pop("lengths", None)
    dim, block_q = case.pop("dim", 96), case.pop("block_q", None)
    q_len, kv_len = case.pop("q_len", 128), case.pop("kv_len", 128)
    rng = np.random.default_rng(5)

    def array(length: int, heads: int) -> jax.Array:
        x = jnp.asarray(rng.standard_normal((2, length, heads, dim)) + 0.5, jnp.float32).astype(FLOAT8)
        return x if layout == "BTNH" else jnp.swapaxes(x, 1, 2)

    main: list[typing.Any] = [array(q_len, 4), array(kv_len, 2), array(kv_len, 2)]
    for n, shape in enumerate(by):
        if shape is not None:
            scales = jnp.asarray(rng.uniform(0.3, 1.5, shape), jnp.float32) * (size if n == 2 else 1)
            main[n] = flexjax.Quantized(main[n], scales)
    if lengths is not None:
        case |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": jnp.asarray([lengths[1], 64], jnp.int32)}
    call = lambda implementation, options: flexjax.flex_attention(
        *main, layout=layout, implementation=implementation, kernel_options=options,
        return_aux=flexjax.AuxRequest(lse=True), **case,
    )  # fmt: skip
    out, aux = call("mosaic_gpu", KernelOptions(interpret=interpret, block_q=block_q))
    want, exact = call("xla", None)
    out, want = (np.asarray(x, np.float64) for x in (out, want))
    assert np.linalg.norm(out - want) < 0.03 * np.linalg.norm(want)
    assert np.linalg.norm(out - want) > 1e-3 * np.linalg.norm(want)  # the products were of float8
    # sums of rounded weights differ by as much
    np.testing.assert_allclose(np.asarray(aux.lse), np.asarray(exact.lse), atol=0.03)


def test_many_equal_weights_keep_their_sum() -> None:
    check_equal_weights(640, interpret=True)


def check_equal_weights(tokens: int, interpret: bool) -> None:
    """A mean of ones is 1 and lse is log(tokens), whatever the number of keys. On a GPU, where WGMMA adds products of float8 with few bits,
    tools/device/check_sanitizer.py runs it with many; the simulator adds exactly anyway.
    """
    q, k = jnp.zeros((1, 128, 1, 96), FLOAT8), jnp.zeros((1, tokens, 1, 96), FLOAT8)
    options = KernelOptions(interpret=interpret, block_q=128)  # not the decode kernel
    out, aux = flexjax.flex_attention(
        q,
        k,
        jnp.ones_like(k),
        implementation="mosaic_gpu",
        kernel_options=options,
        return_aux=flexjax.AuxRequest(lse=True),
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    np.testing.assert_allclose(np.asarray(aux.lse), np.log(tokens), atol=2e-3)
