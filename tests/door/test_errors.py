"""Every message of the door, whole; the same inside jit; and the user's call in a note."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
import flexjax.nn
import flexjax.visualize
from flexjax import masks
from flexjax.errors import ModError, kind_of, with_article
from flexjax.types import AuxRequest, KernelOptions

Arrays = dict[str, jax.Array]

B, N, M, T, S, D = 2, 4, 2, 6, 10, 8


def arrays() -> Arrays:
    f32 = jnp.float32
    return dict(
        q=jnp.ones((B, T, N, D), f32), k=jnp.ones((B, S, M, D), f32), v=jnp.ones((B, S, M, D), f32),
        sinks=jnp.ones(N, f32), qx=jnp.ones((B, T, N, 3), f32), kx=jnp.ones((B, S, 1, 3), f32),
    )  # fmt: skip


def attend(a: Arrays, **keywords: Any) -> Any:
    main = {n: keywords.pop(n, a[n]) for n in ("q", "k", "v")}
    return flexjax.flex_attention(main["q"], main["k"], main["v"], **keywords)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad call, its message, and whether it can be made on traced arrays."""

    name: str
    call: Callable[[Arrays], Any]
    message: str
    traced: bool = True


def block_mask(
    batch: int | None = None, heads: int | None = None, q_len: int = T, kv_len: int = S, mod: Any = None
) -> Any:
    return flexjax.create_block_mask(mod or masks.causal, batch, heads, q_len, kv_len)


OPTIONS = ", ".join(field.name for field in dataclasses.fields(KernelOptions))
NAMES = "'mosaic_gpu', 'mosaic_tpu', 'xla', 'reference'"
COUNTS = (
    "In layout BTNH dim 2 counts heads; if yours is the other, swap dims 1 and 2 or pass layout= to flex_attention."
)
typed = lambda count: jax.random.split(jax.random.key(0), count)
by_batch = lambda b, h, q, kv: q + b >= kv
by_head = lambda b, h, q, kv: q + h >= kv

# fmt: off
CALLS = [
    # ---- arrays
    Bad("layout", lambda a: attend(a, layout="NTHB"), "`layout` is 'NTHB'; expected 'BTNH' or 'BNTH'. BTNH is [batch, tokens, heads, dim]."),
    Bad("query_list", lambda a: attend(a, q=[[1.0]]), "`query` is a list; expected an array. Pass a jax.Array or a numpy array."),
    Bad("key_none", lambda a: attend(a, k=None), "`key` is None; expected an array. Pass a jax.Array or a numpy array."),
    Bad("integers", lambda a: attend(a, q=a["q"].astype(jnp.int32)), "`query` is int32[2, 6, 4, 8]; expected one of float64, float32, bfloat16, float16, float8_e4m3fn. Cast it, for example x.astype(jnp.float32)."),
    Bad("integer_value", lambda a: attend(a, v=a["v"].astype(jnp.int8)), "`value` is int8[2, 10, 2, 8]; expected one of float64, float32, bfloat16, float16, float8_e4m3fn. Cast it, for example x.astype(jnp.float32)."),
    Bad("dtypes", lambda a: attend(a, k=a["k"].astype(jnp.bfloat16)), "`key` is of dtype bfloat16; expected float32, that of query. Cast them to one dtype."),
    Bad("query_rank", lambda a: attend(a, q=a["q"][0]), "`query` is of shape (6, 4, 8); expected 4 dims, [B, T, N, D]. Add a batch axis with x[None] or use jax.vmap."),
    Bad("key_rank", lambda a: attend(a, k=a["k"][0]), "`key` is of shape (10, 2, 8); expected 4 dims, [B, S, M, D]. Add a batch axis with x[None] or use jax.vmap."),
    Bad("value_rank", lambda a: attend(a, v=a["v"][None], layout="BNTH"), "`value` is of shape (1, 2, 10, 2, 8); expected 4 dims, [B, M, S, E]. Map over its first axes with jax.vmap."),
    Bad("key_batch", lambda a: attend(a, k=jnp.repeat(a["k"], 2, 0)), "`key` is of shape (4, 10, 2, 8); expected a batch of 2 like query's, or 1. Repeat or slice it."),
    Bad("value_batch", lambda a: attend(a, v=jnp.repeat(a["v"], 2, 0)), "`value` is of shape (4, 10, 2, 8); expected a batch of 2 like query's, or 1. Repeat or slice it."),
    Bad("head_dim", lambda a: attend(a, k=a["k"][..., :5]), "`key` is of shape (2, 10, 2, 5); expected a last dim of 8, query's head dim. Project both to one head dim."),
    Bad("value_tokens", lambda a: attend(a, v=a["v"][:, :7]), "`value` is of shape (2, 7, 2, 8); expected the tokens and heads of key, (10, 2). Make them agree. Both are read in layout BTNH; is one of them in the other?"),
    Bad("value_in_the_other_layout", lambda a: attend(a, v=jnp.swapaxes(a["v"], 1, 2)), "`value` is of shape (2, 2, 10, 8); expected the tokens and heads of key, (10, 2). Make them agree. Both are read in layout BTNH; is one of them in the other?"),
    Bad("group", lambda a: attend(a, q=a["q"][:, :, :3]), "`key` is of shape (2, 10, 2, 8) with 2 heads; expected a number of heads that divides query's 3. " + COUNTS),
    Bad("bnth_as_btnh", lambda a: attend(a, **{n: jnp.swapaxes(a[n], 1, 2) for n in "qkv"}), "`key` is of shape (2, 2, 10, 8) with 10 heads; expected a number of heads that divides query's 6. " + COUNTS),
    Bad("btnh_as_bnth", lambda a: attend(a, layout="BNTH"), "`key` is of shape (2, 10, 2, 8) with 10 heads; expected a number of heads that divides query's 6. In layout BNTH dim 1 counts heads; if yours is the other, swap dims 1 and 2 or pass layout= to flex_attention."),
    Bad("no_query_heads", lambda a: attend(a, q=a["q"][:, :, :0]), "`query` is of shape (2, 6, 0, 8) without heads; expected at least one head. " + COUNTS),
    Bad("no_key_heads", lambda a: attend(a, k=a["k"][:, :, :0], v=a["v"][:, :, :0]), "`key` is of shape (2, 10, 0, 8) with 0 heads; expected a number of heads that divides query's 4. " + COUNTS),
    # ---- sinks and extra features
    Bad("sinks_shape", lambda a: attend(a, sinks=a["sinks"][:3]), "`sinks` is float32[3]; expected float32[4], a logit for each query head. Reshape it."),
    Bad("sinks_rank", lambda a: attend(a, sinks=a["sinks"][None]), "`sinks` is float32[1, 4]; expected float32[4], a logit for each query head. Reshape it."),
    Bad("sinks_dtype", lambda a: attend(a, sinks=a["sinks"].astype(jnp.int32)), "`sinks` is int32[4]; expected float32[4], a logit for each query head. Cast it, for example sinks.astype(jnp.float32)."),
    Bad("sinks_layout", lambda a: attend(a, q=jnp.swapaxes(a["q"], 1, 2), k=a["k"][:, :2], v=a["v"][:, :2], sinks=a["sinks"]), "`sinks` is float32[4]; expected float32[6], a logit for each query head. Query's other middle dim has 4: if the arrays are in layout BNTH, pass layout='BNTH'."),
    Bad("sinks_list", lambda a: attend(a, sinks=[0.0] * 4), "`sinks` is a list; expected an array. Pass a jax.Array or a numpy array."),
    Bad("no_key_extra", lambda a: attend(a, query_extra=a["qx"]), "`key_extra` is None; expected an array, since query_extra is given. Pass both or neither."),
    Bad("no_query_extra", lambda a: attend(a, key_extra=a["kx"]), "`query_extra` is None; expected an array, since key_extra is given. Pass both or neither."),
    Bad("query_extra_heads", lambda a: attend(a, query_extra=a["qx"][:, :, :1], key_extra=a["kx"]), "`query_extra` is float32[2, 6, 1, 3]; expected float32 of 4 dims with the batch, tokens and heads of query, (2, 6, 4, 8). Make them agree."),
    Bad("query_extra_dtype", lambda a: attend(a, query_extra=a["qx"].astype(jnp.float16), key_extra=a["kx"]), "`query_extra` is float16[2, 6, 4, 3]; expected float32 of 4 dims with the batch, tokens and heads of query, (2, 6, 4, 8). Make them agree."),
    Bad("key_extra_tokens", lambda a: attend(a, query_extra=a["qx"], key_extra=a["kx"][:, :9]), "`key_extra` is float32[2, 9, 1, 3]; expected float32 of 4 dims with the batch (or 1) and tokens of key, (2, 10, 2, 8). Make them agree."),
    Bad("key_extra_dim", lambda a: attend(a, query_extra=a["qx"], key_extra=a["kx"][..., :2]), "`key_extra` is of shape (2, 10, 1, 2); expected a last dim of 3, that of query_extra. Make them agree."),
    Bad("key_extra_heads", lambda a: attend(a, query_extra=a["qx"], key_extra=jnp.repeat(a["kx"], 3, 2)), "`key_extra` is of shape (2, 10, 3, 3) with 3 heads; expected a number of heads that divides query's 4. One head serves all."),
    # ---- block masks
    Bad("mask_type", lambda a: attend(a, block_mask=masks.causal), "`block_mask` is a function; expected a flexjax.BlockMask. A plain mask function goes to mask_mod=."),
    Bad("mask_array", lambda a: attend(a, block_mask=np.ones((6, 10), bool)), "`block_mask` is bool[6, 10]; expected a flexjax.BlockMask. A plain mask function goes to mask_mod=."),
    Bad("mask_lengths", lambda a: attend(a, block_mask=block_mask(q_len=7)), "`block_mask` is made for q_len=7, kv_len=10; expected q_len=6, kv_len=10. Build it for these lengths with create_block_mask, or slice it."),
    Bad("mask_kv_len", lambda a: attend(a, block_mask=block_mask(kv_len=S + 1)), "`block_mask` is made for q_len=6, kv_len=11; expected q_len=6, kv_len=10. Build it for these lengths with create_block_mask, or slice it."),
    Bad("mask_and_layout", lambda a: attend(a, q=jnp.ones((B, 4, 20, D)), k=jnp.ones((B, 4, 20, D)), v=jnp.ones((B, 4, 20, D)), block_mask=block_mask(q_len=20, kv_len=20)), "`block_mask` is made for q_len=20, kv_len=20; expected q_len=4, kv_len=4. These are the heads of query and key: if the arrays are in layout BNTH, pass layout='BNTH'."),
    Bad("mask_batch", lambda a: attend(a, block_mask=block_mask(3, mod=by_batch)), "`block_mask` is made for batch=3; expected batch=2 or 1. Build it with batch=2, or None to share it."),
    Bad("mask_batch_of_one", lambda a: attend(a, **{n: a[n][:1] for n in "qkv"}, block_mask=block_mask(3, mod=by_batch)), "`block_mask` is made for batch=3; expected batch=1. Build it with batch=1, or None to share it."),
    Bad("block_mask_as_mask_mod", lambda a: attend(a, mask_mod=block_mask()), "`mask_mod` is a BlockMask; expected a function mask_mod(b, h, q_idx, kv_idx). Pass a block mask as block_mask=."),
    Bad("array_as_mask_mod", lambda a: attend(a, mask_mod=np.ones((T, S), bool)), "`mask_mod` is bool[6, 10]; expected a function mask_mod(b, h, q_idx, kv_idx). Write a function that indexes the array."),
    Bad("mask_heads", lambda a: attend(a, block_mask=block_mask(None, 2, mod=by_head)), "`block_mask` is made for heads=2; expected heads=4 or 1. Build it with heads=4, or None to share it."),
    Bad("mask_of_one_head", lambda a: attend(a, block_mask=block_mask(None, 1, mod=by_head)), "`block_mask` is made for heads=1 by a mask_mod that depends on `h`; expected heads=4. Build it with heads=4."),
    Bad("mask_of_one_entry", lambda a: attend(a, block_mask=block_mask(1, mod=by_batch)), "`block_mask` is made for batch=1 by a mask_mod that depends on `b`; expected batch=2. Build it with batch=2."),
    Bad("stacked_masks", lambda a: attend(a, block_mask=jax.tree.map(lambda x: x[None], block_mask())), "`block_mask` is a stack of block masks, kv_num_blocks [1, 1, 1, 1]; expected one, kv_num_blocks [B, H, q_blocks]. Call flex_attention under jax.vmap, with the block mask among the mapped arguments."),
    Bad("two_masks", lambda a: attend(a, block_mask=block_mask(), mask_mod=masks.causal), "`mask_mod` and `block_mask` are both given; expected one of them. A block mask contains its mask_mod: to restrict it further, build one of and_masks(block_mask.mask_mod, mask_mod)."),
    # ---- scale, dropout, options
    Bad("scale_text", lambda a: attend(a, scale="big"), "`scale` is 'big'; expected a finite float. None means 1 / sqrt(head dim)."),
    Bad("scale_infinite", lambda a: attend(a, scale=float("inf")), "`scale` is inf; expected a finite float. None means 1 / sqrt(head dim)."),
    Bad("scale_of_heads", lambda a: attend(a, scale=a["sinks"]), "`scale` is float32[4]; expected a real scalar. A factor for each head or position goes into score_mod."),
    Bad("scale_complex", lambda a: attend(a, scale=a["sinks"][0] * 1j), "`scale` is complex64[]; expected a real scalar. A factor for each head or position goes into score_mod."),
    Bad("scale_and_no_mod", lambda a: attend(a, scale=a["sinks"][0], score_mod=5), "`score_mod` is an int; expected a function score_mod(score, b, h, q_idx, kv_idx). Ready-made ones are in flexjax.mods."),
    Bad("scale_and_mask_as_mod", lambda a: attend(a, scale=a["sinks"][0], score_mod=lambda b, h, q, kv: q), "`score_mod` has the signature (b, h, q, kv); expected 5 positional arguments, score_mod(score, b, h, q_idx, kv_idx). If it is a mask_mod, pass it as mask_mod=."),
    Bad("rate_one", lambda a: attend(a, dropout=flexjax.Dropout(1.0, None)), "`dropout.rate` is 1.0; expected a Python float in [0, 1). 0.0 means no dropout."),
    Bad("rate_negative", lambda a: attend(a, dropout=flexjax.Dropout(-0.1, None)), "`dropout.rate` is -0.1; expected a Python float in [0, 1). 0.0 means no dropout."),
    Bad("rate_text", lambda a: attend(a, dropout=flexjax.Dropout("0.1", None)), "`dropout.rate` is '0.1'; expected a Python float in [0, 1). 0.0 means no dropout."),
    Bad("dropout_number", lambda a: attend(a, dropout=0.1), "`dropout` is 0.1; expected a flexjax.Dropout or None. Write flexjax.Dropout(rate, key)."),
    Bad("one_dropout", lambda a: attend(a, dropout=flexjax.Dropout(0.1, typed(1)[0], 1)), "`dropout.broadcast` is 1; expected True or False. Pass a Python bool."),
    Bad("no_key", lambda a: attend(a, dropout=flexjax.Dropout(0.1, None)), "`dropout.key` is None; expected a jax random key, because the rate is positive. Pass jax.random.key(seed)."),
    Bad("key_number", lambda a: attend(a, dropout=flexjax.Dropout(0.1, 0)), "`dropout.key` is an int; expected one key. Pass jax.random.key(seed)."),
    Bad("many_keys", lambda a: attend(a, dropout=flexjax.Dropout(0.1, typed(3))), "`dropout.key` is key<fry>[3]; expected one key. Pass jax.random.key(seed), not a batch of keys."),
    Bad("key_floats", lambda a: attend(a, dropout=flexjax.Dropout(0.1, jnp.zeros(2))), "`dropout.key` is float32[2]; expected one key. Pass jax.random.key(seed), not a batch of keys."),
    Bad("aux", lambda a: attend(a, return_aux=True), "`return_aux` is True; expected None or flexjax.AuxRequest(...). For example AuxRequest(lse=True)."),
    Bad("options", lambda a: attend(a, kernel_options={"block_q": 64}), f"`kernel_options` is {{'block_q': 64}}; expected None or flexjax.KernelOptions(...). Its fields are {OPTIONS}."),
    Bad("implementation", lambda a: attend(a, implementation="cudnn"), f"`implementation` is 'cudnn'; expected None, or one or several of {NAMES}. None takes the first backend that accepts the call."),
    Bad("implementations", lambda a: attend(a, implementation=("xla", "triton")), f"`implementation` is ('xla', 'triton'); expected None, or one or several of {NAMES}. None takes the first backend that accepts the call."),
    Bad("no_implementation", lambda a: attend(a, implementation=()), f"`implementation` is (); expected None, or one or several of {NAMES}. None takes the first backend that accepts the call."),
    Bad("implementation_number", lambda a: attend(a, implementation=5), f"`implementation` is 5; expected None, or one or several of {NAMES}. None takes the first backend that accepts the call."),
]

OBJECTS = [
    Bad("unknown_option", lambda _: KernelOptions(block=64), f"`kernel_options` has no option `block`; expected one of {OPTIONS}."),  # type: ignore[call-arg]
    Bad("zero_tile", lambda _: KernelOptions(block_q=0), "`kernel_options.block_q` is 0; expected a positive int or None. None lets the backend choose."),
    Bad("float_tile", lambda _: KernelOptions(block_kv=64.0), "`kernel_options.block_kv` is 64.0; expected a positive int or None. None lets the backend choose."),  # type: ignore[arg-type]
    Bad("bool_tile", lambda _: KernelOptions(block_q_bwd=True), "`kernel_options.block_q_bwd` is True; expected a positive int or None. None lets the backend choose."),
    Bad("text_tile", lambda _: KernelOptions(block_kv_bwd="64"), "`kernel_options.block_kv_bwd` is '64'; expected a positive int or None. None lets the backend choose."),  # type: ignore[arg-type]
    Bad("split", lambda _: KernelOptions(split=0), "`kernel_options.split` is 0; expected \"auto\", a positive int or None. \"auto\" lets the backend choose the chunk."),
    Bad("instruction", lambda _: KernelOptions(instruction="wgmma"), "`kernel_options.instruction` is 'wgmma'; expected \"mma\", \"tcgen05\" or None. None lets the backend choose."),  # type: ignore[arg-type]
    Bad("stages", lambda _: KernelOptions(num_stages=-1), "`kernel_options.num_stages` is -1; expected a positive int or None. None lets the backend choose."),
    Bad("pairs", lambda _: KernelOptions(cta_pairs=None), "`kernel_options.cta_pairs` is None; expected True or False. Pass a Python bool."),  # type: ignore[arg-type]
    Bad("deterministic", lambda _: KernelOptions(deterministic=1), "`kernel_options.deterministic` is 1; expected True or False. Pass a Python bool."),  # type: ignore[arg-type]
    Bad("interpret", lambda _: KernelOptions(interpret="yes"), "`kernel_options.interpret` is 'yes'; expected True or False. Pass a Python bool."),  # type: ignore[arg-type]
    Bad("aux_lse", lambda _: AuxRequest(lse=1), "`return_aux.lse` is 1; expected True or False. Pass a Python bool."),  # type: ignore[arg-type]
    Bad("aux_max", lambda _: AuxRequest(max_scores=None), "`return_aux.max_scores` is None; expected True or False. Pass a Python bool."),  # type: ignore[arg-type]
]

drop_in = lambda a, **keywords: flexjax.dot_product_attention(keywords.pop("q", a["q"]), keywords.pop("k", a["k"]), a["v"], **keywords)
WINDOW = "expected an integer, or two numbers: (left, right). 0 sees no neighbour."
INTEGERS = "Cast it, for example x.astype(jnp.float32): jax.nn rounds probabilities to the dtype of key, here to 0 or 1."
CUDNN = "flexjax has kernels of its own and does not call cuDNN; None runs them on the GPUs that they support."
DROP_IN = [
    Bad("no_query", lambda a: drop_in(a, q=None), "`query` is None; expected an array. Pass a jax.Array or a numpy array."),
    Bad("weights_dtype", lambda a: flexjax.attention_weights(a["q"].astype(jnp.float8_e5m2), a["k"]), "`query` is float8_e5m2[2, 6, 4, 8]; expected one of float64, float32, bfloat16, float16, float8_e4m3fn. Cast it, for example x.astype(jnp.float32)."),
    Bad("rank", lambda a: drop_in(a, q=a["q"][None]), "`query` is of shape (1, 2, 6, 4, 8); expected 1 to 4 dims, [B, tokens, heads, dim]. Use jax.vmap for more."),
    Bad("ranks", lambda a: drop_in(a, q=a["q"][0]), "`key` is of shape (2, 10, 2, 8); expected a batch of 1 like query's, or 1. Repeat or slice it."),
    Bad("integer_query", lambda a: drop_in(a, q=a["q"].astype(jnp.int32)), "`query` is int32[2, 6, 4, 8]; expected a floating array. " + INTEGERS),
    Bad("integer_key", lambda a: drop_in(a, k=a["k"].astype(jnp.int8)), "`key` is int8[2, 10, 2, 8]; expected a floating array. " + INTEGERS),
    Bad("cudnn", lambda a: drop_in(a, implementation="cudnn"), f"`implementation` is 'cudnn'; expected None, or one or several of {NAMES}. {CUDNN}"),
    Bad("cudnn_or_xla", lambda a: drop_in(a, implementation=["cudnn", "xla"]), f"`implementation` is ['cudnn', 'xla']; expected None, or one or several of {NAMES}. {CUDNN}"),
    Bad("no_window", lambda a: drop_in(a, local_window_size=()), "`local_window_size` is (); " + WINDOW),
    Bad("window_text", lambda a: drop_in(a, local_window_size="3"), "`local_window_size` is '3'; " + WINDOW),
    Bad("window_nan", lambda a: drop_in(a, local_window_size=float("nan")), "`local_window_size` is nan; " + WINDOW),
    Bad("window_fraction", lambda a: drop_in(a, local_window_size=1.5), "`local_window_size` is 1.5; " + WINDOW),
    Bad("window_fraction_of_jax", lambda a: drop_in(a, local_window_size=a["sinks"][0]), "`local_window_size` is float32[]; " + WINDOW),
    Bad("window_of_arrays", lambda a: drop_in(a, local_window_size=(a["sinks"], 2)), "`local_window_size` is (float32[4], 2); " + WINDOW),
    Bad("window_pair", lambda a: drop_in(a, local_window_size=(1, 2, 3)), "`local_window_size` is (1, 2, 3); " + WINDOW),
    Bad("bias_dtype", lambda a: drop_in(a, bias=jnp.ones((T, S), jnp.complex64)), "`bias` is of dtype complex64; expected a real dtype. Pass its real part, bias.real."),
    Bad("q_lengths", lambda a: drop_in(a, query_seq_lengths=jnp.ones(3, jnp.int32)), "`query_seq_lengths` is int32[3]; expected int32[2], one for each batch entry. Reshape it."),
    Bad("kv_lengths", lambda a: drop_in(a, key_value_seq_lengths=jnp.ones(2)), "`key_value_seq_lengths` is float32[2]; expected int32[2], one for each batch entry. Reshape it."),
    Bad("mask_dtype", lambda a: drop_in(a, mask=jnp.ones((T, S))), "`mask` is of dtype float32; expected bool, True where attended. Compare it with != 0."),
    Bad("mask_shape", lambda a: drop_in(a, mask=jnp.ones((T, 4), bool)), "`mask` is of shape (6, 4); expected one that broadcasts to [B, N, T, S] = [2, 4, 6, 10]. Reshape it."),
    Bad("bias_shape", lambda a: drop_in(a, bias=jnp.ones((2, 2, T, S))), "`bias` is of shape (2, 2, 6, 10); expected one that broadcasts to [B, N, T, S] = [2, 4, 6, 10]. Reshape it."),
    Bad("bias_rank", lambda a: drop_in(a, bias=jnp.ones((1, 2, 4, T, S))), "`bias` is of shape (1, 2, 4, 6, 10); expected one that broadcasts to [B, N, T, S] = [2, 4, 6, 10]. Reshape it."),
    Bad("passed_on", lambda a: drop_in(a, q=a["q"][:, :, :3]), "`key` is of shape (2, 10, 2, 8) with 2 heads; expected a number of heads that divides query's 3. " + COUNTS),
]
# fmt: on


def rows(table: list[Bad]) -> list[Any]:
    return [pytest.param(bad, id=bad.name) for bad in table]


@pytest.mark.parametrize("bad", rows(CALLS + OBJECTS + DROP_IN))
def test_the_message(bad: Bad) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is compared
        bad.call(arrays())
    assert str(caught.value) == bad.message


@pytest.mark.parametrize("bad", rows(CALLS + DROP_IN))
def test_the_message_inside_jit(bad: Bad) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        jax.jit(bad.call).trace(arrays())
    assert str(caught.value) == bad.message


def test_traced_numbers() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        jax.jit(lambda x: attend(arrays(), dropout=flexjax.Dropout(x, None)))(0.5)
    message = "`dropout.rate` is traced; expected a Python float in [0, 1). Make it a static argument of jit."
    assert str(caught.value) == message


def test_what_is_accepted() -> None:
    """Numbers of numpy and of JAX, numpy arrays, wide heads."""
    a = arrays()
    want = attend(a, scale=0.5)
    for scale in (np.float32(0.5), np.asarray(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)):
        np.testing.assert_array_equal(attend(a, scale=scale), want)
    for implementation in ("xla", "reference"):
        got = attend(a, scale=jnp.asarray(2), score_mod=flexjax.mods.softcap(3.0), implementation=implementation)
        want_capped = attend(a, scale=2, score_mod=flexjax.mods.softcap(3.0), implementation=implementation)
        np.testing.assert_array_equal(got, want_capped)
    np.testing.assert_array_equal(attend({n: np.asarray(x) for n, x in a.items()}, scale=0.5), want)
    assert attend(a, dropout=flexjax.Dropout(np.float32(0.5), jax.random.key(0))).shape == want.shape
    assert attend(a, dropout=flexjax.Dropout(0, None)).shape == want.shape
    wide = {n: jnp.tile(a[n], (1, 1, 1, 40)) for n in "qkv"}
    assert attend(wide, mask_mod=masks.causal).shape == (B, T, N, 320)
    assert attend(a, implementation=["mosaic_gpu", "xla"], scale=0.5).shape == want.shape


# ------------------------------------------------------------------- backends that cannot


def test_a_backend_that_cannot() -> None:
    advice = "Pass kernel_options=KernelOptions(interpret=True) to simulate it."
    with jax.default_device(jax.local_devices(backend="cpu")[0]), pytest.raises(NotImplementedError) as caught:
        attend(arrays(), implementation=("mosaic_gpu", "mosaic_tpu"))
    assert str(caught.value) == (
        "No implementation accepts this call: mosaic_gpu: mosaic_gpu runs on an NVIDIA GPU; this call is for the platform cpu. "
        f"{advice} mosaic_tpu: mosaic_tpu runs on a TPU; this call is for the platform cpu. {advice}"
    )


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the kernels take this version of jax")
def test_a_version_of_jax_without_the_kernels_and_no_gpu() -> None:
    with jax.default_device(jax.local_devices(backend="cpu")[0]), pytest.raises(NotImplementedError) as caught:
        attend(arrays(), implementation="mosaic_gpu")
    assert str(caught.value).endswith(
        "In such a Python, in a checkout: `pip install -U '.[cuda13]'`. mosaic_gpu runs on an NVIDIA GPU; the default device is "
        "a cpu."
    )


@pytest.mark.parametrize(
    "options", [{"return_aux": AuxRequest(lse=True)}, {"kernel_options": KernelOptions(block_q=8)}]
)
def test_arguments_of_a_jitted_call(options: dict[str, Any]) -> None:
    a = arrays()
    run = functools.partial(flexjax.flex_attention, a["q"], a["k"], a["v"])
    for want, got in zip(jax.tree.leaves(run(**options)), jax.tree.leaves(jax.jit(run)(**options)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


# ------------------------------------------------------------------- mods

# name of the argument, the mod, a piece of what is said
MODS = [
    ("score_mod", lambda score, b, h, q: score, "(score, b, h, q_idx, kv_idx)"),
    ("mask_mod", lambda b, h, q: q > 0, "(b, h, q_idx, kv_idx)"),
    ("score_mod", lambda score, b, h, q, kv: q, "int32"),
    ("mask_mod", lambda b, h, q, kv: q, "int32"),
    ("score_mod", lambda score, b, h, q, kv: jnp.ones(3), "float32[3]"),
    ("mask_mod", lambda b, h, q, kv: jnp.ones((2, 2), bool), "bool[2, 2]"),
    ("score_mod", lambda score, b, h, q, kv: (score, score), "one scalar"),
    ("mask_mod", lambda b, h, q, kv: q >= kv and q > 3, "write `(q >= kv) & (q > 3)`"),
    ("score_mod", 3, "int"),
    ("mask_mod", jnp.ones((6, 10), bool), "mask_mod(b, h, q_idx, kv_idx)"),
]


@pytest.mark.parametrize(("name", "mod", "piece"), MODS)
def test_a_mod_that_is_refused(name: str, mod: Any, piece: str) -> None:
    """The argument comes first; the wording is tested with the tracer."""
    for run in (attend, jax.jit(functools.partial(attend, **{name: mod})).trace):
        with pytest.raises(ModError) as caught:
            run(arrays(), **({name: mod} if run is attend else {}))
        assert str(caught.value).startswith(f"`{name}` ")
        assert piece in str(caught.value)


def test_a_mistake_inside_a_mod_is_the_users_own_exception() -> None:
    def broken(score: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
        return score + undefined  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError, match="name 'undefined' is not defined") as caught:
        attend(arrays(), score_mod=broken, mask_mod=masks.causal)
    assert caught.value.__notes__[-1:] == [
        "in flex_attention(query=float32[2, 6, 4, 8], key=float32[2, 10, 2, 8], value=float32[2, 10, 2, 8], "
        "score_mod=broken, mask_mod=causal)"
    ]


def test_the_note_shows_the_whole_call() -> None:
    a = arrays()
    with pytest.raises(ValueError, match="sinks") as caught:
        attend(
            a, sinks=a["sinks"][:2], layout="BTNH", scale=0.5, block_mask=block_mask(),
            dropout=flexjax.Dropout(0.5, jax.random.key(0)), return_aux=AuxRequest(lse=True), query_extra=a["qx"], key_extra=a["kx"],
        )  # fmt: skip
    assert caught.value.__notes__[-1:] == [
        "in flex_attention(query=float32[2, 6, 4, 8], key=float32[2, 10, 2, 8], value=float32[2, 10, 2, 8], "
        "block_mask=BlockMask(1, 1, 6, 10), scale=0.5, sinks=float32[2], "
        "dropout=Dropout(0.5, key<fry>[]), "
        "query_extra=float32[2, 6, 4, 3], key_extra=float32[2, 10, 1, 3], "
        "return_aux=AuxRequest(lse=True))"
    ]


def test_keywords_that_were_replaced_say_what_to_write() -> None:
    with pytest.raises(TypeError) as caught:
        attend(arrays(), dropout_rate=0.1, dropout_key=jax.random.key(0), broadcast_dropout=True)
    assert str(caught.value) == (
        "flex_attention() got unexpected arguments broadcast_dropout, dropout_key, dropout_rate; help(flexjax.flex_attention) lists those "
        "that it takes. In place of `broadcast_dropout` write dropout=flexjax.Dropout(rate, key, broadcast=True). In place of "
        "`dropout_key` and `dropout_rate` write dropout=flexjax.Dropout(rate, jax.random.key(seed))."
    )


def test_an_unknown_keyword() -> None:
    with pytest.raises(TypeError) as caught:
        attend(arrays(), softcap=30.0)
    assert str(caught.value) == (
        "flex_attention() got unexpected arguments softcap; help(flexjax.flex_attention) lists those that it takes. In place of `softcap` "
        "write score_mod=flexjax.mods.softcap(cap)."
    )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "function", [flexjax.merge_attention_states, flexjax.paged.empty, flexjax.nn.attention_fn, flexjax.visualize.mask]
)
def test_help_is_asked_of_a_name_that_there_is(function: Callable) -> None:
    with pytest.raises(TypeError) as caught:
        function(unknown=1)
    named = re.search(r"help\((.*)\) lists", str(caught.value))
    assert named is not None
    assert eval(named[1], {"flexjax": flexjax}) is function


def test_a_mod_without_a_derivative_says_so_when_it_is_needed() -> None:
    """Forward works; the gradient raises the sentence, a ValueError."""
    a = arrays()
    count = jnp.int32(3)

    def looped(score: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda s: s > 1.0, lambda s: s * 0.5 + 0 * count, score)

    assert bool(jnp.isfinite(attend(a, score_mod=looped)).all())
    with pytest.raises(ValueError, match=r"derivative|differentiat"):
        jax.grad(lambda q: attend(a, q=q, score_mod=looped).sum())(a["q"])


def test_arrays_of_more_heads_than_tokens_are_warned_of():
    torch_like = jax.ShapeDtypeStruct((2, 8, 1024, 64), np.float32)
    message = (
        '`query` has shape (2, 8, 1024, 64), which layout "BTNH" reads as 8 tokens and 1024 heads. If it is [batch, heads, '
        'tokens, dim], as in torch, swap dims 1 and 2 or pass layout="BNTH" to flex_attention.'
    )
    for attention in (flexjax.flex_attention, flexjax.dot_product_attention):
        with pytest.warns(UserWarning, match="^" + re.escape(message) + "$") as caught:
            jax.eval_shape(lambda q, attention=attention: attention(q, q, q), torch_like)
        assert [w.filename for w in caught] == [__file__], "the user's file"
    jax.eval_shape(lambda q: flexjax.flex_attention(q, q, q, layout="BNTH"), torch_like)
    one_token = jax.ShapeDtypeStruct((2, 1, 1024, 64), np.float32)
    jax.eval_shape(lambda q: flexjax.flex_attention(q, q, q), one_token)


@pytest.mark.parametrize(
    ("value", "text"), [(3, "an int"), (None, "None"), ([1], "a list"), (np.ones(1), "float64[1]"), ("x", "a str")]
)
def test_what_a_value_is_called(value: object, text: str) -> None:
    assert kind_of(value) == text
    assert with_article("uint8") == "a uint8"
    assert with_article("int32") == "an int32"
