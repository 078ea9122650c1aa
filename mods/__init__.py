"""Ready-made score mods: functions `(score, b, h, q_idx, kv_idx) -> score` of scalars, and factories of them.

The first line of a docstring is the formula of the new score.
"""

from flexjax.mods.alibi import alibi as alibi
from flexjax.mods.alibi import alibi_slopes as alibi_slopes
from flexjax.mods.bias import pair_bias as pair_bias
from flexjax.mods.bias import relative_table as relative_table
from flexjax.mods.checkerboard import checkerboard as checkerboard
from flexjax.mods.distance import distance_penalty as distance_penalty
from flexjax.mods.distance import log_distance_penalty as log_distance_penalty
from flexjax.mods.head_gate import head_gate as head_gate
from flexjax.mods.identity import identity as identity
from flexjax.mods.softcap import softcap as softcap
from flexjax.mods.softcap import softcap_approx as softcap_approx
from flexjax.mods.softcap import tanh_approx as tanh_approx
from flexjax.mods.t5 import t5_bias as t5_bias
from flexjax.mods.t5 import t5_buckets as t5_buckets
from flexjax.mods.temperature import log_n_scaling as log_n_scaling
from flexjax.mods.temperature import scalable_softmax as scalable_softmax
from flexjax.mods.temperature import temperature as temperature
from flexjax.mods.token_scales import key_scales as key_scales
from flexjax.mods.token_scales import query_scales as query_scales
