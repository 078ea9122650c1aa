"""Programmable attention for JAX: score and mask functions in plain JAX, fused into block-sparse flash attention.

Functions

    flex_attention         attention with a score function and a mask function; the one to start with
    paged_attention        the same over a cache in pages, for requests of different lengths
    dot_product_attention  the same with the arguments of jax.nn.dot_product_attention
    create_block_mask      the blocks of a mask function, to be shared by several calls
    context_layout         how a sequence that is split over devices is shared out, for a mask
    merge_attention_states attention over all keys, from calls that have some of them
    and_masks, or_masks, not_mask, chain_mods
                           compose mask functions and score functions
    made_for               says of a mod of your own which sizes of a call it is made for
    explain                says what a call will do and why, as text
    autotune               times the tiles of a call and keeps the fastest
    profile                compares the measured time of a call with the roofline of its device
    attention_weights      the matrix of probabilities of a small problem

Modules

    masks                  mask functions: causal, windows, documents, prefixes, trees and others
    mods                   score functions: ALiBi, soft caps, T5 and learned biases and others
    weights                weights in place of a softmax: sigmoid, SiLU, retention and others
    paged                  a cache in pages: allocate, fork, append, release
    nn                     adapters for flax, equinox and trainers
    visualize              pictures of masks, scores and weights

Types

    BlockMask              what create_block_mask returns and flex_attention takes
    ContextLayout          what context_layout returns
    ContextParallel        says that the sequence of a call is split over mesh axes
    Dropout                which probabilities of a call are set to 0
    Weights                weights of values that are no softmax, with a divisor of each row
    Quantized              a float8 query, key or value with its scales
    Origin                 where the arrays of a call lie in a larger problem
    SharedPrefix           which requests of paged_attention begin with the same tokens
    AuxRequest, AuxOutput  extra results: lse, the largest score and the sum of weights of each row
    KernelOptions          tiles, order of additions, simulation
    FallbackWarning        a call on a GPU or TPU does not run on its kernels
    ScoreMod, MaskMod      protocols of score functions and mask functions, for type checkers
    Layout, Implementation the strings that `layout` and `implementation` take, for type checkers

What is listed here is public; nothing else is.
"""

from flexjax import masks as masks
from flexjax import mods as mods
from flexjax import nn as nn
from flexjax import paged as paged
from flexjax import visualize as visualize
from flexjax import weights as weights
from flexjax.attention import flex_attention as flex_attention
from flexjax.block_mask.block_mask import BlockMask as BlockMask
from flexjax.block_mask.block_mask import create_block_mask as create_block_mask
from flexjax.combine import and_masks as and_masks
from flexjax.combine import chain_mods as chain_mods
from flexjax.combine import not_mask as not_mask
from flexjax.combine import or_masks as or_masks
from flexjax.context.context_parallel import ContextParallel as ContextParallel
from flexjax.context.layout import ContextLayout as ContextLayout
from flexjax.context.layout import context_layout as context_layout
from flexjax.errors import FallbackWarning as FallbackWarning
from flexjax.jax_nn import dot_product_attention as dot_product_attention
from flexjax.look.attention_weights import attention_weights as attention_weights
from flexjax.look.explain import explain as explain
from flexjax.look.profile import profile as profile
from flexjax.merge_states import merge_attention_states as merge_attention_states
from flexjax.mod_tools.made_for import made_for as made_for
from flexjax.paged.call import paged_attention as paged_attention
from flexjax.paged.shared_prefix import SharedPrefix as SharedPrefix
from flexjax.tune.autotune import autotune as autotune
from flexjax.types import AuxOutput as AuxOutput
from flexjax.types import AuxRequest as AuxRequest
from flexjax.types import Dropout as Dropout
from flexjax.types import Implementation as Implementation
from flexjax.types import KernelOptions as KernelOptions
from flexjax.types import Layout as Layout
from flexjax.types import MaskMod as MaskMod
from flexjax.types import Origin as Origin
from flexjax.types import Quantized as Quantized
from flexjax.types import ScoreMod as ScoreMod
from flexjax.types import Weights as Weights

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 functions first, then the modules, then types
    "flex_attention",
    "paged_attention",
    "dot_product_attention",
    "create_block_mask",
    "context_layout",
    "merge_attention_states",
    "and_masks",
    "or_masks",
    "not_mask",
    "chain_mods",
    "made_for",
    "explain",
    "autotune",
    "profile",
    "attention_weights",
    "masks",
    "mods",
    "weights",
    "paged",
    "nn",
    "visualize",
    "BlockMask",
    "ContextLayout",
    "ContextParallel",
    "Dropout",
    "Weights",
    "Quantized",
    "Origin",
    "SharedPrefix",
    "AuxRequest",
    "AuxOutput",
    "KernelOptions",
    "FallbackWarning",
    "ScoreMod",
    "MaskMod",
    "Layout",
    "Implementation",
]


def __dir__() -> list[str]:
    return __all__  # without the submodules that Python adds
