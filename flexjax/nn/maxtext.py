"""`install`: flexjax in the place of the attention of an installed MaxText, training and decoding."""

import functools
import importlib
import math
import types
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.attention import flex_attention
from flexjax.combine import and_masks
from flexjax.context.context_parallel import ContextParallel
from flexjax.context.layout import context_layout
from flexjax.mod_tools.settings import own
from flexjax.nn.patches import Installed
from flexjax.nn.placed_masks import Placed, negative_is_padding
from flexjax.types import AuxRequest, Implementations, KernelOptions, MaskMod

Array = jax.Array
Results = tuple[Array, Array | None, Array | None]
Policy = Callable[..., typing.Any]
Split = tuple[ContextParallel, np.ndarray | None]


def install(*, implementation: Implementations | None = None, kernel_options: KernelOptions | None = None) -> Installed:
    """From now on MaxText attends by flexjax.flex_attention; it also is a context manager, which ends that.

        flexjax.nn.maxtext.install()

    Replaced is AttentionOp.apply_attention, whatever `attention=` the config names, for all models. Honoured are
    packed rows (a token attends its own document), the attention types global, local_sliding, chunk, mla, full and
    block_diffusion, soft caps (0 is none), sinks, bidirectional tokens, previous chunks, indexer masks, the two caches
    of decoding, and record_max_logits. A remat_policy that keeps `context` keeps flexjax's out and lse. Tokens may be
    split over the context axis, in order, load-balanced or striped; keys travel as ContextParallel's "auto", or as its
    "ring" with context_parallel_strategy="ring".
    NotImplementedError refuses in a sentence: compressed attention, MoBA, ragged attention, dropout, strategy "usp". A
    query that may see no key gives 0; MaxText's dot product gives the mean of all values. ImportError: no MaxText.
    """
    # by name, because type checkers take `import maxtext` for this module
    op = importlib.import_module("maxtext.layers.attention_op")
    attend = functools.partial(_apply, op, implementation=implementation, kernel_options=kernel_options)

    # the names and defaults of MaxText, which AttentionOp.__call__ passes by keyword
    @own
    def apply_attention(
        self: typing.Any,
        query: Array,
        key: Array,
        value: Array,
        decoder_segment_ids: Array | None,
        segment_positions: Array | None,
        lengths: Array | None,
        model_mode: str,
        use_ragged_attention: bool = False,
        previous_chunk: Array | None = None,
        bidirectional_mask: Array | None = None,
        sinks: Array | None = None,
        indexer_mask: Array | None = None,
        compressed_mask: Array | None = None,
        record_max_logits: bool = False,
        decoder_segment_ids_kv: Array | None = None,
        pad_kv_total: int = 0,
        compress_ratio: int = 0,
        *,
        qk_product_einsum: Callable[..., Array],
        wv_product_einsum: Callable[..., Array],
    ) -> Results:
        """query [B, T, N, D], already scaled; key [B, S, M, D]; value [B, S, M, E] -> (out, max, sum); max and sum are
        None outside of decoding.

        segment_positions    not read: the order of the tokens is known without them
        the einsums          replaced: flexjax multiplies in the precision of the config
        """
        decoding = model_mode == op.MODEL_MODE_AUTOREGRESSIVE
        split = self._context_parallel_size() > 1 and not decoding  # the one token of a step is not split
        reasons = {
            "compressed attention, whose keys are two sequences": compressed_mask is not None
            or bool(pad_kv_total or compress_ratio)
            or self.attention_type == op.AttentionType.COMPRESSED,
            "MoBA, whose mask needs the keys themselves; flexjax.BlockMask.from_chosen_blocks is for a layer of your "
            "own": bool(self.config.moba),
            "ragged attention; set use_ragged_attention=False, the ids of the cache say the same": use_ragged_attention
            and decoding,
            "attention dropout, which MaxText's dot product leaves out too; set dropout_rate=0": self.dropout_rate > 0,
            "context parallelism over the two axes of context_parallel_strategy='usp'; set it to 'all_gather' or "
            "'ring'": split and self.config.context_parallel_strategy == "usp",
        }
        for reason, asked in reasons.items():
            if asked:
                raise NotImplementedError(f"flexjax.nn.maxtext does not compute {reason}.")
        # MaxText reorders the tokens of training alone
        balanced = model_mode == op.MODEL_MODE_TRAIN and self._load_balanced_context_parallel()
        axes = _context(op, self, query.shape[1], balanced) if split else (None, None)
        call = _Call(self, query.shape[1], decoding, decoder_segment_ids, decoder_segment_ids_kv, previous_chunk, *axes)
        return attend(call, query, key, value, bidirectional_mask, sinks, indexer_mask, record_max_logits)

    decoder = importlib.import_module("maxtext.layers.nnx_decoders").NNXDecoder
    theirs = decoder.get_remat_policy
    policy = lambda self: _as_context(theirs(self))
    return Installed([(op.AttentionOp, "apply_attention", apply_attention), (decoder, "get_remat_policy", policy)])


def _as_context(policy: Policy | None) -> Policy:
    """The policy of jax.checkpoint that treats the out and lse of flexjax as `policy` treats the name "context", and
    keeps block lists: they are small, and all layers have the same."""

    def as_context(primitive: typing.Any, *avals: typing.Any, **params: typing.Any) -> typing.Any:
        name = params.get("name")
        if name == "flexjax_lists":
            return True
        if name in ("flexjax_out", "flexjax_lse"):
            params["name"] = "context"
        return policy is not None and policy(primitive, *avals, **params)

    return as_context


class _Call(typing.NamedTuple):
    op: typing.Any  # the AttentionOp
    q_len: int
    decoding: bool
    ids: Array | None
    kv_ids: Array | None
    previous_chunk: Array | None
    context: ContextParallel | None
    place: np.ndarray | None  # int32 [T]: where striped tokens stand in the row

    def in_order(self, x: Array, axis: int = 1) -> Array:
        """In the order that masks read: that of the row, or of striped tokens."""
        layout = None if self.context is None else self.context.layout
        return x if layout is None else layout.unshard(x, axis)


def _apply(
    module: types.ModuleType,
    call: _Call,
    query: Array,
    key: typing.Any,
    value: typing.Any,
    bidirectional_mask: Array | None,
    sinks: typing.Any,
    indexer_mask: Array | None,
    record_max_logits: bool,
    *,
    implementation: Implementations | None,
    kernel_options: KernelOptions | None,
) -> Results:
    op, hidden = call.op, module.DEFAULT_MASK_VALUE
    key, value = (x.dequant() if isinstance(x, module.KVTensor) else x for x in (key, value))
    op.check_attention_inputs(query, key, value)
    call = call._replace(**jax.tree.map(call.in_order, dict(ids=call.ids, kv_ids=call.kv_ids)))
    placed = _placed(call, query.shape[0], query.shape[2], key.shape[1])
    or_mask = None if bidirectional_mask is None else _same_block(module, bidirectional_mask, call, key.shape[1])
    masks = [_mask_mod(module, call, placed, or_mask)]
    if indexer_mask is not None:
        kept = call.in_order(call.in_order(indexer_mask >= hidden / 2), 2)
        masks.append(lambda b, h, q, kv: kept[b, q, kv])
    given = [mask for mask in masks if mask is not None]
    dtype = query.dtype
    if op.float32_qk_product:
        dtype = jnp.promote_types(dtype, jnp.float32)
    # an nnx.Param, where the model has sinks
    logits = sinks.get_value() if hasattr(sinks, "get_value") else sinks
    out, aux = flex_attention(
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        score_mod=placed.score_mod(op.attn_logits_soft_cap, None),
        mask_mod=and_masks(*given) if given else None,
        scale=1.0,  # MaxText has scaled the query
        sinks=logits,
        precision=op.config.matmul_precision,
        return_aux=AuxRequest(lse=call.decoding, max_scores=record_max_logits),
        context=call.context,
        implementation=implementation,
        kernel_options=kernel_options,
    )
    if aux.max_scores is not None:
        op.max_logits = module.nnx.Intermediate(jnp.maximum(aux.max_scores.max(axis=1), hidden))
    out = out.astype(query.dtype)
    if aux.lse is None:
        return out, None, None
    # MaxText adds two caches as out * exp(max - both) * sum, which a finite number keeps from NaN where both are hidden
    top = jnp.maximum(aux.lse, hidden)[..., None]
    return out, top, jnp.ones_like(top)


def _context(module: types.ModuleType, op: typing.Any, tokens: int, balanced: bool) -> Split:
    """Over which mesh axes the tokens are split, in which order; and the places of striped ones."""
    names, devices, config = op._logical_to_mesh_axes((module.Q_LENGTH,))[0], op._context_parallel_size(), op.config
    axes = tuple(name for name in ([names] if isinstance(names, str) else names) if op.mesh.shape[name] > 1)
    layout = place = None
    ring = config.context_parallel_strategy == "ring"
    if balanced:  # by MaxText's train_utils
        strategy = config.context_parallel_reorder_strategy.value
        if strategy == "striped" or (strategy == "auto" and ring and config.packing and config.hardware[:3] == "gpu"):
            place = np.arange(tokens, dtype=np.int32).reshape(-1, devices).T.ravel()
        else:  # device r has the r-th run from both ends
            block = math.gcd(tokens // (2 * devices), 128)
            layout = context_layout(None, tokens, devices=devices, block_size=block, balance="zigzag")
    return ContextParallel(axes, layout, "ring" if ring else "auto"), place


def _placed(call: _Call, batch: int, heads: int, kv_len: int) -> Placed:
    first = 0
    at = None if call.place is None else jnp.broadcast_to(call.place, (batch, kv_len))
    ids, kv_ids = call.ids, call.ids if call.kv_ids is None else call.kv_ids
    if call.previous_chunk is not None:
        first = call.previous_chunk.shape[1]
        ids = None if ids is None else ids[:, first : first + call.q_len]
    elif call.decoding and call.q_len == 1:
        first = kv_len - 1  # the query stands at the end of the cache
    if call.decoding:
        ids = kv_ids = None  # they say which slots are filled; _mask_mod reads them
    return Placed(
        function="flexjax.nn.maxtext", heads=heads, ids=ids, kv_ids=kv_ids, is_padding=negative_is_padding,
        at=at, kv_at=at, first=first,
    )  # fmt: skip


def _mask_mod(module: types.ModuleType, call: _Call, placed: Placed, or_mask: MaskMod | None) -> MaskMod | None:
    """The mask of AttentionOp.generate_attention_mask."""
    op, kinds, ids = call.op, module.AttentionType, call.ids
    kind = op.attention_type
    masks: list[MaskMod] = []
    if call.decoding and ids is not None:
        masks.append(lambda b, h, q, kv: ids[b, kv] == module.DECODING_ACTIVE_SEQUENCE_INDICATOR)
    if kind == kinds.BLOCK_DIFFUSION and not call.decoding:
        size = op.causal_block_size
        masks.append(lambda b, h, q, kv: placed.query(b, q) // size >= placed.key(b, kv) // size)
    causal = not call.decoding and kind not in (kinds.FULL, kinds.BLOCK_DIFFUSION)
    window = chunk = None
    if causal or ids is not None:  # without both, MaxText hides nothing
        window = op.sliding_window_size if kind == kinds.LOCAL_SLIDING else None
        chunk = op.chunk_attn_window_size if kind == kinds.CHUNK else None
        if kind == kinds.LOCAL_SLIDING and window is None:
            raise ValueError("`sliding_window_size` is None; expected an int for local_sliding attention. Set it.")
        causal = causal or window is not None or chunk is not None
    return placed.mask_mod(*masks, causal=causal, window=window, chunk=chunk, or_mask=or_mask)


def _same_block(module: types.ModuleType, bidirectional_mask: Array, call: _Call, kv_len: int) -> MaskMod:
    """True within each run of tokens that `bidirectional_mask`, bool [B, T], marks."""
    tokens = bidirectional_mask.shape[1]
    if (tokens, tokens) != (call.q_len, kv_len):
        raise NotImplementedError(
            f"flexjax.nn.maxtext: bidirectional_mask has {tokens} tokens in a call of {call.q_len} queries and "
            f"{kv_len} keys; it computes whole rows only."
        )
    row = np.arange(tokens) if call.place is None else call.place
    in_row = call.in_order(bidirectional_mask)[:, np.argsort(row)]
    blocks = module._make_block_mask_indices(in_row)[:, row]
    return lambda b, h, q, kv: (blocks[b, q] == blocks[b, kv]) & (blocks[b, q] > 0)
