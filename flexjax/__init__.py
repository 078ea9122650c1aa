"""flexjax: programmable attention for JAX. What is imported here is public; nothing else is."""

from flexjax import masks as masks
from flexjax import mods as mods
from flexjax import nn as nn
from flexjax import visualize as visualize
from flexjax.attention import flex_attention as flex_attention
from flexjax.attention_weights import attention_weights as attention_weights
from flexjax.autotune import autotune as autotune
from flexjax.block_mask.block_mask import BlockMask as BlockMask
from flexjax.block_mask.block_mask import create_block_mask as create_block_mask
from flexjax.combine import and_masks as and_masks
from flexjax.combine import chain_mods as chain_mods
from flexjax.combine import not_mask as not_mask
from flexjax.combine import or_masks as or_masks
from flexjax.errors import FallbackWarning as FallbackWarning
from flexjax.explain import explain as explain
from flexjax.jax_nn import dot_product_attention as dot_product_attention
from flexjax.profile import profile as profile
from flexjax.types import AuxOutput as AuxOutput
from flexjax.types import AuxRequest as AuxRequest
from flexjax.types import KernelOptions as KernelOptions

__version__ = "0.1.0"
