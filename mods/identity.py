"""The score mod that changes nothing."""

from jax import Array

from flexjax.mod_tools.refusals import no_factory


@no_factory
def identity(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """score"""
    return score
