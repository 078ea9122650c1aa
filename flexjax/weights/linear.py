"""Linear attention in its quadratic form: the score is the weight."""

from jax import Array

from flexjax.mod_tools.signatures import named
from flexjax.types import Weights
from flexjax.weights.divisors import total_itself


@named("linear")
def _score(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    return score


linear = Weights(_score, total_itself)
"""s,  out divided by the total

Pass features of queries and keys that are not negative, such as `1 + jax.nn.elu(x)`, and `scale=1`.
Source: Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236.
"""
