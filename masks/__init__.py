"""Ready-made masks: functions `(b, h, q_idx, kv_idx) -> bool` of int32 scalars, and factories of them. One idea a file.

In a docstring, `mask = ...` is the formula, and a picture shows the mask for each query (line) and key (column).
"""

from flexjax.masks.batched import batched as batched
from flexjax.masks.big_bird import big_bird as big_bird
from flexjax.masks.block_causal import block_causal as block_causal
from flexjax.masks.block_diffusion import block_diffusion as block_diffusion
from flexjax.masks.causal import causal as causal
from flexjax.masks.causal import causal_offset as causal_offset
from flexjax.masks.chunked import block_diagonal as block_diagonal
from flexjax.masks.chunked import chunked as chunked
from flexjax.masks.dilated import dilated_two_sided_window as dilated_two_sided_window
from flexjax.masks.dilated import dilated_window as dilated_window
from flexjax.masks.document import document as document
from flexjax.masks.full import full as full
from flexjax.masks.full import noop_mask as noop_mask
from flexjax.masks.global_tokens import global_tokens as global_tokens
from flexjax.masks.local_global import local_global as local_global
from flexjax.masks.media import interleaved_media as interleaved_media
from flexjax.masks.media import media_intervals as media_intervals
from flexjax.masks.natten import natten_2d as natten_2d
from flexjax.masks.natten import natten_2d_morton as natten_2d_morton
from flexjax.masks.natten import natten_2d_tiled as natten_2d_tiled
from flexjax.masks.padding import left_padding as left_padding
from flexjax.masks.padding import padding as padding
from flexjax.masks.padding import query_padding as query_padding
from flexjax.masks.per_document import per_document as per_document
from flexjax.masks.prefix_lm import prefix_lm as prefix_lm
from flexjax.masks.shared_prefix import shared_prefix as shared_prefix
from flexjax.masks.sliding_tile import sliding_tile_2d as sliding_tile_2d
from flexjax.masks.sliding_tile import sliding_tile_3d as sliding_tile_3d
from flexjax.masks.streaming import streaming as streaming
from flexjax.masks.strided import strided as strided
from flexjax.masks.strided import strided_fixed as strided_fixed
from flexjax.masks.tree import tree as tree
from flexjax.masks.window import sliding_window as sliding_window
from flexjax.masks.window import two_sided_window as two_sided_window
