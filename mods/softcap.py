"""Soft caps: scores squashed smoothly into a bounded range."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import positive_number, positive_number_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def softcap(cap: ArrayLike) -> ScoreMod:
    """cap[h] * tanh(score / cap[h])

    cap:  finite number above 0, or floating `[]` or `[N]`, which is slower on GPUs.
    A call of other sizes raises ValueError. Chain it before mods that write `-inf`, which it would turn into `-cap`.
    Source: Bello et al., arXiv:1611.09940; Gemma Team, "Gemma 2", arXiv:2408.00118, section 2.
    """
    bound = positive_number_or_vector("softcap", "cap", cap, "Gemma 2 uses 50.")

    @named(f"softcap_{bound:g}" if isinstance(bound, float) else "softcap", *of_array("cap", bound, "N"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        most = head_value(bound, h, score)
        return most * jnp.tanh(score / most)

    return score_mod


@without_frames
def softcap_approx(cap: float) -> ScoreMod:
    """cap * tanh_approx(score / cap)

    cap:  finite number above 0. The error is at most `1e-4 * cap`. Take it where `tanh` is slow. Source: as `softcap`.
    """
    bound = positive_number("softcap_approx", "cap", cap, "Gemma 2 uses 50.")

    @named(f"softcap_approx_{bound:g}")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return bound * tanh_approx(score / bound)

    return score_mod


TANH_APPROX_REACHES_ONE = 4.971786858528029
"""The point where numerator and denominator of `tanh_approx` are equal."""


def tanh_approx(x: Array) -> Array:
    """x * (135135 + 17325 y + 378 y^2 + y^3) / (135135 + 62370 y + 3150 y^2 + 28 y^3),  y = x^2

    Lambert's continued fraction cut after the 13, up to abs(x) = 4.9718, where it reaches 1, and 1 beyond; its error is
    below 1e-4. Its derivative is set to `1 - tanh_approx(x) ** 2`, as that of `tanh`: smooth and never negative.
    """
    return _fraction(x)


@jax.custom_jvp
def _fraction(x: Array) -> Array:
    x = jnp.clip(x, -TANH_APPROX_REACHES_ONE, TANH_APPROX_REACHES_ONE)
    y = x * x
    above = x * (135135 + y * (17325 + y * (378 + y)))
    below = 135135 + y * (62370 + y * (3150 + y * 28))
    return jnp.clip(above / below, -1, 1)


@_fraction.defjvp
def _fraction_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value = _fraction(*primals)
    return value, (1 - value * value) * tangents[0]
