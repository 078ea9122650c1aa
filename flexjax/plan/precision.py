"""The precision of products of float32, as `jax.lax.dot_general` takes it, and its name in a plan.

    name of a plan                    what it asks for
    "default", "high", "highest"      a jax.lax.Precision
    "TF32_TF32_F32", ...              a jax.lax.DotAlgorithmPreset

A precision is a lower bound of accuracy: a backend may be more exact. Inputs of 16 bits are multiplied exactly and summed in float32,
so their plans always say "default".
"""

import jax

from flexjax.errors import bad_argument

DEFAULT = "default"


def precision_name(given: object, dtype: str) -> str:
    """The name, for the plan, of the argument `precision` of a call: "default", "high", "highest" or the name of a
    jax.lax.DotAlgorithmPreset.

    given   None: what jax.config.jax_default_matmul_precision says now, "default" if it says nothing. A jax.lax.Precision or one of its
            names, of which "bfloat16" and "fastest" mean "default", "tensorfloat32" means "high" and "float32" means "highest". A
            jax.lax.DotAlgorithmPreset or its name; its DEFAULT is "default". Or a pair of two that have the same name, of which the
            second may be None for "default"
    dtype   name of the dtype of query, key and value; for "bfloat16" and "float16" the result is always "default"

    Raises ValueError for any other `given`, also for a pair that begins with None, whatever the dtype.
    """
    found = _name(jax.config.jax_default_matmul_precision if given is None else given)  # pyright: ignore[reportAttributeAccessIssue]  # made when jax is imported
    if found is None:
        raise bad_argument(
            "precision",
            repr(given),
            'None, "default", "high", "highest", another name of a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, or a '
            "pair of two equal ones",
            "None follows jax.default_matmul_precision.",
        )
    return DEFAULT if dtype in ("bfloat16", "float16") else found


def _name(given: object) -> str | None:
    """The name in a plan of the precision `given`, of which the dtype of the inputs is not yet considered: "default" for None. For a pair
    (tuple or list) the name that both have. None for what is no precision, for a pair of two that differ, and for a pair that begins with
    None; None as the second of a pair is "default".
    """
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
    """The precision with this name, as jax.lax.dot_general takes it: a DotAlgorithmPreset for a name of one, else a Precision.

    name   what `precision_name` returns
    """
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    return jax.lax.Precision(name)
