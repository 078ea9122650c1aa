"""The functions of AuxRequest(expectations=): checked, traced with score_mod as one program, and their sums by name.

The program of a call with functions f_1 .. f_n gives the new score s', or its weight, and then f_i(s'), which count 0
where s' is -inf. Its derivative program has the derivatives of each (trace/derivative.py).
"""

import functools
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from flexjax.errors import bad_argument
from flexjax.mod_tools.made_for import Reach, check_sizes
from flexjax.mod_tools.signatures import SCORE_ARGUMENTS
from flexjax.plan.kernel_plan import FLOAT8
from flexjax.trace.trace_mod import check_callable, check_function
from flexjax.types import AuxRequest, ScoreMod

Array = jax.Array


def functions_of(return_aux: AuxRequest | None) -> Mapping[str, ScoreMod]:
    """The functions that a call asks expectations of, by name."""
    return {} if return_aux is None else return_aux.expectations or {}


def functions_by_argument(return_aux: AuxRequest | None) -> dict[str, ScoreMod]:
    """The same, by what an error calls each."""
    return {f"return_aux.expectations[{name!r}]": f for name, f in functions_of(return_aux).items()}


def check_expectations(return_aux: AuxRequest | None, dtype: str, reach: Reach | None) -> tuple[ScoreMod, ...]:
    """The functions, in the order in which they were given. Raises ValueError.

    dtype   of the inputs
    reach   how far the indices count, for arrays that are too short; None: not known
    """
    given = functions_by_argument(return_aux)
    if given and dtype == FLOAT8:
        raise bad_argument(
            "return_aux.expectations", f"given for {FLOAT8} inputs", "None", "Cast query, key and value to bfloat16."
        )
    for shown, function in given.items():
        check_callable(shown, function, SCORE_ARGUMENTS)
        if reach is not None:
            check_sizes(shown, function, reach)
        check_function(shown, function, "float64" if dtype == "float64" else "float32", integers=True)
    return tuple(given.values())


def weighted(score_mod: ScoreMod | None, weights: ScoreMod) -> ScoreMod:
    """weights(score_mod(score, ..), ..), and 0 with gradients of 0 where score_mod gives -inf."""
    if score_mod is None:
        return weights
    both = with_functions(score_mod, weights, ())
    return functools.wraps(score_mod)(lambda score, *at: both(score, *at)[0])


def with_functions(
    score_mod: ScoreMod | None, weights: ScoreMod | None, functions: tuple[ScoreMod, ...]
) -> Callable[..., tuple[Array, ...]]:
    """(s' or weights(s'), each of `functions` of s'), with the arguments of score_mod; s' is what score_mod gives.

    All but s' are 0, with gradients of 0, where s' is -inf.
    """

    def several(score: Array, *at: Array) -> tuple[Array, ...]:
        given = [typing.cast(typing.Any, f) for f in functions]
        if score_mod is None:
            first = score if weights is None else weights(score, *at)  # pyright: ignore[reportCallIssue]
            return first, *(jnp.asarray(f(score, *at)).astype(score.dtype) for f in given)
        new = jnp.asarray(score_mod(score, *at), score.dtype)  # pyright: ignore[reportCallIssue]
        hidden = new == -jnp.inf
        # the inner select keeps NaN out of derivatives, as of -inf * sigmoid(-inf)
        seen = jnp.where(hidden, jnp.zeros_like(new), new)
        counts = lambda x: jnp.where(hidden, jnp.zeros_like(x), x)
        first = new if weights is None else counts(weights(seen, *at))  # pyright: ignore[reportCallIssue]
        return first, *(counts(jnp.asarray(f(seen, *at)).astype(score.dtype)) for f in given)

    return several if score_mod is None else functools.wraps(score_mod)(several)


@jax.jit  # one dispatch in an eager call, whose backward pass transfers nothing
def _columns(sums: Array) -> list[Array]:
    return [sums[..., i] for i in range(sums.shape[-1])]


def named(return_aux: AuxRequest, sums: Array) -> dict[str, Array]:
    """`sums` [.., n] as an array for each name."""
    return dict(zip(functions_of(return_aux), _columns(sums), strict=True))
