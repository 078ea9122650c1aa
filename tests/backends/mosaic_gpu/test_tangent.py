"""Forward mode on the simulated GPU kernels: the table of small calls, calls of several tiles, duality with the backward pass."""

import collections
import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.cases.small import PROBLEMS, direction, dot
from tests.marks import some_slow

Array = jax.Array
Arrays = dict[str, Array]
FAMILIES = {"wgmma": None, "mma": "mma"}
MAIN = ("query", "key", "value")
LSE, TOTAL = flexjax.AuxRequest(lse=True), flexjax.AuxRequest(total=True)


@dataclasses.dataclass(frozen=True)
class LargeCall:
    """A call of several tiles; fields as of SmallCall."""

    arguments: Callable[[Arrays], dict[str, typing.Any]] = lambda a: {}
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    tokens: tuple[int, int] = (150, 170)
    dims: tuple[int, int] = (32, 32)
    dtype: str = "bfloat16"
    moving: tuple[str, ...] | None = None  # None: every array

    def arrays(self) -> Arrays:
        (n, m), (t, s), (d, e) = self.heads, self.tokens, self.dims
        shapes = {"query": (t, n, d), "key": (s, m, d), "value": (s, m, e)}
        shapes = {name: (self.batch, *shape) for name, shape in shapes.items()} | dict(self.shapes)
        rng = np.random.default_rng(0)
        return {n: array(rng.standard_normal(x), self.dtype if n in MAIN else jnp.float32) for n, x in shapes.items()}


def documents(a: Arrays) -> dict:
    ids = jnp.asarray(np.repeat(np.arange(4), 48)[None], jnp.int32)
    mask = flexjax.and_masks(masks.causal, masks.document(ids[:, :160], ids[:, :160]))
    return dict(block_mask=flexjax.create_block_mask(mask, 1, None, 160, 160, block_size=64))


def chosen_lists(a: Arrays) -> dict:
    num, index = jnp.asarray([[[1, 2]]]), jnp.asarray([[[[1, 0], [0, 1]]]])
    return dict(block_mask=flexjax.BlockMask.from_kv_blocks(num, index, block_size=(128, 128), q_len=150, kv_len=170))


def table_of(a: Arrays) -> dict:
    bias = lambda s, b, h, q, k: jnp.tanh(s) * 2 + a["table"][h, q - k + 200]
    return dict(score_mod=bias, mask_mod=masks.causal)


def summed(a: Arrays) -> dict:
    return dict(score_mod=lambda s, b, h, q, k: s + 0.1 * jnp.dot(a["rows"][q], a["columns"][k]))


def silu(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
    return jax.nn.silu(s) / 16


LARGE = {
    "plain": LargeCall(),
    "grouped heads": LargeCall(lambda a: dict(mask_mod=masks.causal), heads=(4, 2), batch=2),
    "queries alone": LargeCall(moving=("query",)),
    "keys alone": LargeCall(moving=("key",)),
    "values alone": LargeCall(moving=("value",)),
    "table": LargeCall(table_of, (("table", (2, 400)),)),
    "table alone": LargeCall(table_of, (("table", (2, 400)),), moving=("table",)),
    "pair bias": LargeCall(
        lambda a: dict(score_mod=lambda s, b, h, q, k: s + a["pair"][h, q, k]), (("pair", (2, 150, 170)),)
    ),
    "vectors": LargeCall(summed, (("rows", (150, 72)), ("columns", (170, 72)))),
    "documents": LargeCall(documents, tokens=(160, 160)),
    "window": LargeCall(lambda a: dict(mask_mod=masks.sliding_window(40)), tokens=(160, 160)),
    "lists": LargeCall(chosen_lists),
    "dropout": LargeCall(lambda a: dict(dropout=flexjax.Dropout(0.3, jax.random.key(1)))),
    "wide": LargeCall(dims=(192, 160)),
    "float16": LargeCall(lambda a: dict(mask_mod=masks.causal), dtype="float16"),
    "float32": LargeCall(lambda a: dict(mask_mod=masks.causal), dtype="float32"),
    "origin": LargeCall(lambda a: dict(mask_mod=masks.causal, origin=flexjax.Origin(query=20))),
    "weights": LargeCall(lambda a: dict(weights=silu, mask_mod=masks.causal)),
    "weights, values alone": LargeCall(lambda a: dict(weights=silu), moving=("value",)),
    "weights of a table": LargeCall(lambda a: dict(weights=silu, **table_of(a)), (("table", (2, 400)),)),
}
WITHIN: dict[str, float] = collections.defaultdict(lambda: 6e-3, float32=3e-5, float16=1e-3)
"""By dtype, the norm of the error over that of the tangent."""


def moved(
    arguments: Callable[[Arrays], dict], arrays: Arrays, tangents: Arrays, **more: typing.Any
) -> tuple[Array, Array]:
    """The tangents of out and of lse, or of the total."""

    def run(moving: Arrays) -> tuple[Array, Array]:
        given = {**arrays, **moving}
        words = arguments(given)
        main = [jnp.swapaxes(given[n], 1, 2) if words.get("layout") == "BNTH" else given[n] for n in MAIN]
        aux = TOTAL if "weights" in words else LSE
        out, found = flexjax.flex_attention(*main, return_aux=aux, **words, **more)
        stat = found.total if "weights" in words else found.lse
        return out, jnp.where(jnp.isfinite(stat), stat, 0)

    return jax.jvp(run, ({n: arrays[n] for n in tangents},), (tangents,))[1]


def compared(arguments: Callable[[Arrays], dict], arrays: Arrays, tangents: Arrays, family: str, within: float) -> None:
    """The kernels against jax's own derivative of the dense definition in float32."""
    options = flexjax.KernelOptions(interpret=True, instruction=FAMILIES[family])
    got = moved(arguments, arrays, tangents, implementation="mosaic_gpu", kernel_options=options)
    wide = lambda xs: {n: x.astype(jnp.float32) for n, x in xs.items()}
    want = jax.jit(lambda a, t: moved(arguments, a, t, implementation="reference"))(wide(arrays), wide(tangents))
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_less(np.linalg.norm(x - y), within * np.linalg.norm(y) + 1e-6)


def rounded(arrays: Arrays) -> Arrays:
    """Queries, keys, values and extra features in 16 bits."""
    extra = (*MAIN, "query_extra", "key_extra")
    return {n: x.astype(jnp.bfloat16) if n in extra else x for n, x in arrays.items()}


SMALL = [(name, family) for name in PROBLEMS for family in FAMILIES]


@pytest.mark.parametrize(("name", "family"), some_slow(SMALL, [("sinks", "wgmma"), ("reads", "mma")]))
def test_small_calls(name: str, family: str) -> None:
    arrays = PROBLEMS[name].arrays()
    tangents = rounded(direction(arrays))
    compared(PROBLEMS[name].arguments, rounded(arrays), tangents, family, 1e-2)


TILES = [(name, family) for name in LARGE for family in FAMILIES if (name, family) != ("float32", "mma")]


@pytest.mark.parametrize(("name", "family"), some_slow(TILES, [("documents", "wgmma"), ("weights", "mma")]))
def test_several_tiles(name: str, family: str) -> None:
    call = LARGE[name]
    arrays = call.arrays()
    tangents = {n: t for n, t in direction(arrays).items() if call.moving is None or n in call.moving}
    compared(call.arguments, arrays, tangents, family, WITHIN[call.dtype])


@pytest.mark.parametrize("family", some_slow(FAMILIES, []))
def test_duality(family: str) -> None:
    """<ct, J t> is <J^T ct, t>: the tangent kernel and the backward kernels are transposes of each other."""
    call = dataclasses.replace(LARGE["table"], dtype="float32" if family == "wgmma" else "bfloat16")
    arrays, tangents = call.arrays(), direction(call.arrays())
    options = flexjax.KernelOptions(interpret=True, instruction=FAMILIES[family])

    def run(a: Arrays) -> tuple[Array, Array]:
        words = dict(**call.arguments(a), return_aux=LSE, implementation="mosaic_gpu", kernel_options=options)
        out, aux = flexjax.flex_attention(*(a[n] for n in MAIN), **words)
        return out.astype(jnp.float32), aux.lse

    results, pushed = jax.jvp(run, (arrays,), (tangents,))
    cotangents = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in results)
    (pulled,) = jax.vjp(run, arrays)[1](cotangents)
    wide = lambda xs: jax.tree.map(lambda x: x.astype(jnp.float32), xs)
    left, right = dot(cotangents, pushed), dot(wide(pulled), wide(tangents))
    size = sum(jnp.linalg.norm(c) * jnp.linalg.norm(t) for c, t in zip(cotangents, pushed, strict=True))
    assert abs(left - right) < (1e-5 if family == "wgmma" else 1e-3) * size


def test_explain_says_which_kernel_runs() -> None:
    sentence = "No tile of the tangent kernel, which keeps tangents beside their operands, fits bfloat16 head dims 320 and 320."
    x, narrow = (jax.ShapeDtypeStruct((1, 256, 2, dim), jnp.bfloat16) for dim in (320, 64))
    text = flexjax.explain(x, x, x, device="h200")
    assert f"tangent (forward mode) on: xla\n  not mosaic_gpu: {sentence}" in text
    for card, kernel in (("h200", "WGMMA 128 x 128"), ("a100", "mma.sync 128 x 64"), ("l4", "mma.sync 128 x 64")):
        text = flexjax.explain(narrow, narrow, narrow, device=card)
        assert f"tangent (forward mode) on: mosaic_gpu, tangent by {kernel}" in text
