"""Small calls as functions of their floating arrays; each file of tests/transforms is a transformation over this table."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax import masks
from tests.arrays import array

Array = jax.Array
Arrays = dict[str, Array]

B, N, M, T, S, D = 2, 4, 2, 9, 11, 4


@dataclasses.dataclass(frozen=True)
class SmallCall:
    """Attention as a function of named floating arrays.

    shapes     of the arrays beside query, key and value
    arguments  (arrays) -> keyword arguments of flex_attention
    """

    name: str
    arguments: Callable[[Arrays], dict[str, Any]]
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    heads: int = N
    value_dim: int = D

    def arrays(self, seed: int = 0) -> Arrays:
        """In the default float of the moment."""
        rng = np.random.default_rng(seed)
        main = {"query": (B, T, self.heads, D), "key": (B, S, M, D), "value": (B, S, M, self.value_dim)}
        shapes = main | dict(self.shapes)
        return {name: array(rng.standard_normal(shape), jnp.result_type(float)) for name, shape in shapes.items()}

    def run(self, arrays: Arrays, implementation: str = "xla") -> tuple[Array, Array]:
        """out and lse (0 where it is -inf)."""
        main = [arrays[n] for n in ("query", "key", "value")]
        arguments = self.arguments(arrays)
        if arguments.get("layout") == "BNTH":
            main = [jnp.swapaxes(x, 1, 2) for x in main]
        asked = flexjax.AuxRequest(lse=True, max_scores=True)
        out, aux = flexjax.flex_attention(*main, **arguments, return_aux=asked, implementation=implementation)
        return out, jnp.where(jnp.isfinite(aux.lse), aux.lse, 0)

    def loss(self, arrays: Arrays, implementation: str = "xla") -> Array:
        """A scalar whose gradient has no simple structure."""
        out, lse = self.run(arrays, implementation)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return (out * weights).sum() + (out**2).sum() + (jnp.sin(lse) * 0.3).sum()


def _reads(arrays: Arrays) -> Callable:
    """A score_mod that reads by row, column, diagonal, head and element."""
    row, column, diagonal, gate, pair = (arrays[n] for n in ("row", "column", "diagonal", "gate", "pair"))

    def score_mod(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
        biased = score * gate[h] + row[q] * column[kv] + diagonal[q - kv + S - 1]
        return jnp.tanh(biased) + pair[h, q, kv]

    return score_mod


def _documents() -> flexjax.BlockMask:
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (B, S)), axis=-1).astype(np.int32)
    document = masks.document(jnp.asarray(ids)[:, :T], jnp.asarray(ids))
    return flexjax.create_block_mask(flexjax.and_masks(document, masks.causal), B, None, T, S, block_size=4)


def _late(b: Array, h: Array, q: Array, kv: Array) -> Array:
    """The first rows see nothing."""
    return (q >= 3) & (kv < 9)


def _bump(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
    return score + 0.1 * score * score


# fmt: off
TABLE = (
    SmallCall("plain", lambda a: {}),
    SmallCall("causal", lambda a: dict(mask_mod=masks.causal)),
    SmallCall("blocks", lambda a: dict(block_mask=flexjax.create_block_mask(masks.causal, None, None, T, S, block_size=4))),
    SmallCall("reads", lambda a: dict(score_mod=_reads(a), mask_mod=masks.causal),
            (("row", (T,)), ("column", (S,)), ("diagonal", (T + S - 1,)), ("gate", (N,)), ("pair", (N, T, S)))),
    SmallCall("documents", lambda a: dict(block_mask=_documents(), score_mod=_bump)),
    SmallCall("sinks", lambda a: dict(sinks=a["sinks"], mask_mod=_late), (("sinks", (N,)),)),
    SmallCall("empty_rows", lambda a: dict(mask_mod=_late, score_mod=_bump)),
    SmallCall("dropout", lambda a: dict(dropout=flexjax.Dropout(0.4, jax.random.key(7)), mask_mod=masks.causal)),
    SmallCall("extra", lambda a: dict(query_extra=a["query_extra"], key_extra=a["key_extra"], score_mod=_bump),
            (("query_extra", (B, T, N, 3)), ("key_extra", (B, S, 1, 3)))),
    SmallCall("bnth", lambda a: dict(layout="BNTH", mask_mod=masks.causal, sinks=a["sinks"]), (("sinks", (N,)),)),
    SmallCall("lengths", lambda a: dict(query_seq_lengths=array([7, T]), key_value_seq_lengths=jnp.asarray([S, 5]),
                                      score_mod=_bump, sinks=a["sinks"]), (("sinks", (N,)),)),
    SmallCall("wide_value", lambda a: dict(scale=a["scale"], score_mod=_bump), (("scale", ()),), heads=6, value_dim=7),
)
# fmt: on
PROBLEMS = {problem.name: problem for problem in TABLE}


def direction(arrays: Arrays, seed: int = 100) -> Arrays:
    """A random tangent for each array."""
    rng = np.random.default_rng(seed)
    return {name: array(rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}


def dot(a: Any, b: Any) -> Array:
    """The inner product of two trees."""
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))  # type: ignore[return-value]


def assert_same_to_rounding(got: Any, want: Any) -> None:
    """Two float32 programs of the same values: XLA merges the operations of each in its own way, eager ones not at all."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(y).max())


def launches(jaxpr: Any, inside: str = "") -> list[str]:
    """Names of the primitives of attention in a jaxpr and the jaxprs in it, "loop/" in front of those inside loops."""
    names = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        names += [inside + name] if name.startswith("flexjax_") else []
        deeper = "loop/" if name in ("scan", "while") else inside
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                names += launches(inner, deeper) if hasattr(inner, "eqns") else []
    return names


# The arrays are small: compiling is what takes the time.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def by_definition(*arrays: Array, **options: Any) -> Any:
    """flex_attention by the reference, compiled as one program: called eagerly it is forty."""
    return jax.jit(functools.partial(flexjax.flex_attention, **options, implementation="reference"))(*arrays)


to_mask = jax.jit(flexjax.BlockMask.to_mask)
"""The method as one program: called eagerly it is twenty."""
