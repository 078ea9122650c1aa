"""Lowering rules of the primitives of jax.random: a key is the atoms of its words, and its hash an operation on them.

A random key is one element of an array of atoms, a `Key` (values.py), so that rules which rearrange elements need not
know of keys. What jax computes from a key (`random_bits` and so on) is the function of the key's implementation, traced
on the words. The hash of the default implementation, threefry2x32, is an operation of programs. The implementations rbg
and unsafe_rbg ask XLA for bits, which has no meaning at one position; the mod is refused.
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
import numpy as np

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import Atom
from flexjax.trace.translation import Equation, Rule, Translation
from flexjax.trace.values import Key, Value, as_object, is_key_dtype, map_elements, object_array

Array = jax.Array


class Implementation(typing.Protocol):
    """A key implementation of jax (its PRNGImpl), on the words of one key: uint32 of the shape `key_shape`."""

    key_shape: tuple[int, ...]
    seed: Callable[[Array], Array]
    fold_in: Callable[[Array, Array], Array]
    split: Callable[[Array, tuple[int, ...]], Array]  # (words, shape) to words [*shape, *key_shape]
    random_bits: Callable[[Array, int, tuple[int, ...]], Array]  # (words, bit width, shape) to unsigned integers


def implementation(dtype: np.dtype) -> Implementation:
    return typing.cast(typing.Any, dtype)._impl


def word_type(shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of an array, those of its words if it is an array of keys."""
    return ((*shape, *implementation(dtype).key_shape), np.dtype("uint32")) if is_key_dtype(dtype) else (shape, dtype)


def words_of(atoms: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The words of an array of keys of that dtype; any other array as it is."""
    words = [word for key in atoms.ravel() for word in key.words] if is_key_dtype(dtype) else []
    return object_array(words).reshape(word_type(atoms.shape, dtype)[0]) if is_key_dtype(dtype) else atoms


def keys_of(words: Value, dtype: np.dtype) -> Value:
    """The array of keys of that dtype from their words; any other array as it is."""
    if not is_key_dtype(dtype):
        return words
    words = typing.cast(np.ndarray, words)
    out = np.empty(words.shape[: words.ndim - len(implementation(dtype).key_shape)], object)
    for place in np.ndindex(*out.shape):
        out[place] = Key(tuple(as_object(words[place]).ravel()), dtype)
    return out


def filled_key(word: int, dtype: np.dtype) -> Atom:
    """The key whose words are all one literal."""
    return typing.cast(Atom, Key((literal(word, "uint32"),) * math.prod(implementation(dtype).key_shape), dtype))


def on_words(bind: Callable[..., list[Array]], dtypes: Sequence[np.dtype]) -> Callable[..., list[Array]]:
    """`bind` with words in place of the keys that it takes and returns."""

    def run(*values: Array) -> list[Array]:
        wrap = lambda x, dtype: jax.random.wrap_key_data(x, impl=typing.cast(typing.Any, implementation(dtype)))
        given = [wrap(x, d) if is_key_dtype(d) else x for x, d in zip(values, dtypes, strict=True)]
        return [jax.random.key_data(x) if is_key_dtype(x.dtype) else x for x in bind(*given)]

    return run


def elementwise_on_keys(builder: Builder, prim: str, elements: Sequence[Atom], dtype: np.dtype) -> Atom:
    """The element that `select_n`, `eq` or `ne` makes of keys; ModError for any other primitive."""
    words = [e.words for e in elements if isinstance(e, Key)]
    if prim == "select_n":
        which = elements[0]
        made = (builder.op(prim, (which, *cases), "uint32") for cases in zip(*words, strict=True))
        return typing.cast(Atom, Key(tuple(made), dtype))
    if prim not in ("eq", "ne"):
        raise ModError(f"it applies `{prim}` to random keys.")
    first, *rest = (builder.op(prim, pair, "bool") for pair in zip(*words, strict=True))
    for truth in rest:
        first = builder.op("and" if prim == "eq" else "or", (first, truth), "bool")
    return first


# ------------------------------------------------------------------- the primitives of keys


def _traced(self: Translation, function: Callable[..., Array], args: Sequence[np.ndarray]) -> np.ndarray:
    """The atoms that a function of the implementation makes of arrays of atoms."""
    kinds = [jax.ShapeDtypeStruct(a.shape, a.ravel()[0].dtype) for a in args]
    # the function reads jax_threefry_partitionable, as it would where the mod is called
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), jax.numpy_dtype_promotion("standard"):
        closed = jax.make_jaxpr(function)(*kinds)
    (made,) = self.run_inlined(closed.jaxpr, closed.consts, args)
    return made


def _of_each(
    self: Translation, keys: np.ndarray, dtype: np.dtype, function: Callable[..., Array], *others: np.ndarray
) -> list[np.ndarray]:
    """What the function makes of each key and of the scalars of `others` that belong to it, in row-major order."""
    impl = implementation(dtype)
    return [
        _traced(self, function, [object_array(key.words).reshape(impl.key_shape), *map(as_object, scalars)])
        for key, *scalars in zip(keys.ravel(), *(o.ravel() for o in others), strict=True)
    ]


def _seed(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    seeds, aval = self.as_atoms(args[0]), eqn.outvars[0].aval
    impl = implementation(aval.dtype)
    words = [_traced(self, impl.seed, [as_object(seed)]) for seed in seeds.ravel()]
    return [keys_of(np.stack(words).reshape(*aval.shape, *impl.key_shape), aval.dtype)]


def _fold_in(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    aval = eqn.outvars[0].aval
    keys, numbers = (np.broadcast_to(self.as_atoms(a), aval.shape) for a in args)
    impl = implementation(aval.dtype)
    words = _of_each(self, keys, aval.dtype, impl.fold_in, numbers)
    return [keys_of(np.stack(words).reshape(*aval.shape, *impl.key_shape), aval.dtype)]


def _split(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    aval, shape = eqn.outvars[0].aval, tuple(eqn.params["shape"])
    impl = implementation(aval.dtype)
    words = _of_each(self, self.as_atoms(args[0]), aval.dtype, lambda key: impl.split(key, shape))
    return [keys_of(np.stack(words).reshape(*aval.shape, *impl.key_shape), aval.dtype)]


def _bits(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    aval, width, shape = eqn.outvars[0].aval, eqn.params["bit_width"], tuple(eqn.params["shape"])
    dtype = eqn.invars[0].aval.dtype
    impl = implementation(dtype)
    bits = _of_each(self, self.as_atoms(args[0]), dtype, lambda key: impl.random_bits(key, width, shape))
    return [np.stack(bits).reshape(aval.shape)]


def _wrap(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    return [keys_of(self.as_atoms(args[0]), eqn.outvars[0].aval.dtype)]


def _unwrap(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    return [words_of(self.as_atoms(args[0]), eqn.invars[0].aval.dtype)]


def _threefry2x32(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    operands, shape = [self.as_atoms(a) for a in args], eqn.outvars[0].aval.shape
    word = lambda n: lambda *atoms: self.builder.op("threefry2x32", atoms, "uint32", word=n)
    return [map_elements(word(n), operands, shape) for n in range(2)]


def _rng_bit_generator(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    raise ModError(
        "it draws random bits at each position from a key of another implementation than threefry2x32 "
        "(`rng_bit_generator`), whose bits "
        'XLA makes for whole arrays alone; pass a key as jax.random.key(seed, impl="threefry2x32") makes it, or draw '
        "the numbers outside "
        "the mod and index them."
    )


KEY_RULES: dict[str, Rule] = {
    "random_bits": _bits,
    "random_clone": lambda self, eqn, args: [self.as_atoms(args[0])],
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_split": _split,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
    "rng_bit_generator": _rng_bit_generator,
    "threefry2x32": _threefry2x32,
}
