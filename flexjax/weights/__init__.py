"""Ready-made weights in place of a softmax, for `weights=`: functions of the score, some with a divisor of each row.

The first line of a docstring is the formula of the weight of a score s. docs/weights.md has their sources side by side.
"""

from flexjax.weights.weightings import linear as linear
from flexjax.weights.weightings import power as power
from flexjax.weights.weightings import relu_squared as relu_squared
from flexjax.weights.weightings import retention as retention
from flexjax.weights.weightings import sigmoid as sigmoid
from flexjax.weights.weightings import silu as silu
