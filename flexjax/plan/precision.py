"""The precision of products of float32, as `jax.lax.dot_general` takes it, and its name in a plan.

The name is that of a jax.lax.Precision ("default", "high", "highest") or of a jax.lax.DotAlgorithmPreset. A precision
is a lower bound of accuracy. Inputs of 16 bits are multiplied exactly and summed in float32: "default".
"""

import jax

from flexjax.errors import bad_argument

DEFAULT = "default"


def precision_name(given: object, dtype: str) -> str:
    """The name, for the plan, of the argument `precision` of a call; ValueError for what is no precision."""
    config = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    found = _name(config if given is None else given)
    if found is None:
        raise bad_argument(
            "precision",
            repr(given),
            'None, "default", "high", "highest", another name of a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, or '
            "a pair of two equal ones",
            "None follows jax.default_matmul_precision.",
        )
    return DEFAULT if dtype in ("bfloat16", "float16") else found


def _name(given: object) -> str | None:
    """As `precision_name` for float32; None for what is no precision and for a pair of two that differ."""
    if given is None:
        return DEFAULT
    if isinstance(given, tuple | list):
        return (
            _name(given[0]) if len(given) == 2 and given[0] is not None and _name(given[0]) == _name(given[1]) else None
        )
    if isinstance(given, jax.lax.DotAlgorithmPreset):
        return DEFAULT if given is jax.lax.DotAlgorithmPreset.DEFAULT else given.name
    if not isinstance(given, str | jax.lax.Precision):
        return None
    if isinstance(given, str) and given in jax.lax.DotAlgorithmPreset.__members__:
        return _name(jax.lax.DotAlgorithmPreset[given])
    try:
        return jax.lax.Precision(given).name.lower()
    except ValueError:
        return None


def for_dot_general(name: str) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset:
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    return jax.lax.Precision(name)
