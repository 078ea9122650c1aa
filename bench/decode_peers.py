"""The implementations (peers) of the decode suite that run in jax, and the float32 reference that all are compared with.

A peer turns a case into a function (`Run`) that computes one decode step: from the arrays of the case by name (`make_arrays`) to a tuple
of outputs [B, T, N, D], one for each copy of the query and the cache (`DecodeCase.copies`). A cache in pages has one copy. cuDNN and
tokamax get masks and biases as dense arrays that are made beforehand, since they have no other form for them: the time of making these is
left out. Keys and values past a length are NaN for flexjax, which must not read them, and 0 for the others, which multiply them by 0.
"""

# pyright: reportMissingImports=false
# peers are optional: they are measured where they are installed

import functools
import math
import time
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode_cases import (
    CUDNN,
    CUDNN_PAGES,
    HIDDEN_DOCUMENT,
    LARGEST,
    MASKS,
    OWN_PEER,
    SCORE_MODS,
    SOFT_CAP,
    TOKAMAX,
    WINDOW,
    DecodeCase,
)
from bench.inputs import REFERENCE, alone
from bench.kernel_times import device_time
from flexjax.types import KernelOptions, MaskMod, Quantized, ScoreMod

Array = jax.Array
Arrays = dict[str, Array]
Outs = tuple[Array, ...]
Run = Callable[[Arrays], Outs]
Measured = tuple[dict[str, typing.Any], dict[str, np.ndarray]]
COMPILING = 4
"""How many cases compile at the same time."""


# ------------------------------------------------------------------- arrays


def make_arrays(case: DecodeCase, peer: str, given: Arrays) -> Arrays:
    """The arrays of a call, by name: query [copies, B, T, N, D]; key and value [copies, B, S, M, D], or in pages [P, page, M, D]; the
    other arrays of `given`; and for cuDNN and tokamax "mask", bool, or "bias", bfloat16, [1 or B, 1 or N, T, S].

    peer    the name of the peer, which decides what stands past a length (see the top of the file) and who gets "mask" or "bias"
    given   the arrays of `case.arrays()`. "query", "key" and "value" are flat there, and are repeated until they fill the shapes
            above; the others, such as lengths and page numbers, are returned as they are

    Nothing is random here: the same `given` makes the same arrays. "mask" is made for a case with a mask_mod, "bias" for one with a
    score_mod that adds to the score; neither is made for other cases.

    A quantised cache has its numbers divided by `case.scale()`, clipped and, for int8, rounded.
    """
    made = dict(given)
    made["query"] = _repeated(given["query"], case.query_shape())
    for name in ("key", "value"):
        made[name] = _repeated(given[name], case.cache_shape())
        if case.mean:
            exists = jnp.arange(case.keys) < given["lengths"][:, None]
            absent = jnp.nan if peer == OWN_PEER else 0.0
            made[name] = jnp.where(exists[:, :, None, None], made[name], jnp.asarray(absent, made[name].dtype))
        if case.stored in LARGEST:
            most = LARGEST[case.stored]
            scaled = jnp.clip(made[name].astype(jnp.float32) / case.scale(), -most, most)
            made[name] = (jnp.round(scaled) if case.stored == "int8" else scaled).astype(case.stored)
    if peer in (CUDNN, TOKAMAX):
        made |= _dense_mods(case, given)
    return made


def _repeated(numbers: Array, shape: tuple[int, ...]) -> Array:
    """An array of that shape, filled with the flat array `numbers` again and again; the last repetition is cut where the shape is full."""
    size = math.prod(shape)
    return jax.lax.slice(jnp.tile(numbers, -(-size // numbers.size)), (0,), (size,)).reshape(shape)


def mods_of(case: DecodeCase, arrays: Arrays) -> tuple[ScoreMod | None, MaskMod | None]:
    """(score_mod, mask_mod) of a case, None where it has none; they take scalars and arrays that broadcast.

    arrays   those that the mods read, by the names of `case.arrays()`
    """
    first = case.first_query()
    mods: dict[str, ScoreMod] = {
        "ALiBi": lambda s, b, h, q, k: s + arrays["slopes"][h] * (k - q),
        "soft cap": lambda s, b, h, q, k: SOFT_CAP * jnp.tanh(s / SOFT_CAP),
        "relative table": lambda s, b, h, q, k: s + arrays["table"][h, q - k + case.keys],
    }
    masks: dict[str, MaskMod] = {
        "documents": lambda b, h, q, k: arrays["ids"][b, k] != HIDDEN_DOCUMENT,
        "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "causal": lambda b, h, q, k: q >= k,
        "tree": lambda b, h, q, k: (k < first) | arrays["ancestors"][q - first, jnp.maximum(k - first, 0)],
    }
    assert set(mods) == set(SCORE_MODS)
    assert set(masks) == set(MASKS)
    return mods.get(case.mod or ""), masks.get(case.mod or "")


def _dense_mods(case: DecodeCase, given: Arrays) -> Arrays:
    """The mod of a case as a dense array [1 or B, 1 or N, T, S]: {"mask": bool}, {"bias": bfloat16}, or {} without a mod and for "soft
    cap", which depends on the score.

    given   the arrays of `case.arrays()`, of which the mod reads some
    """
    score_mod, mask_mod = mods_of(case, given)
    batch = case.batch if case.mod == "documents" else 1
    heads = case.q_heads if case.mod in SCORE_MODS else 1
    b, h = jnp.arange(batch)[:, None, None, None], jnp.arange(heads)[:, None, None]
    at = case.first_query() + jnp.arange(case.q_len)[:, None], jnp.arange(case.keys)
    shape = (batch, heads, case.q_len, case.keys)
    if mask_mod is not None:
        return {"mask": jnp.broadcast_to(jnp.asarray(mask_mod(b, h, *at)), shape)}
    if score_mod is not None and case.mod != "soft cap":
        return {"bias": jnp.broadcast_to(jnp.asarray(score_mod(jnp.float32(0), b, h, *at)), shape).astype(jnp.bfloat16)}
    return {}


# ------------------------------------------------------------------- peers


def flexjax(case: DecodeCase, options: KernelOptions | None = None) -> Run:
    """flexjax as a user calls it: flex_attention, or paged_attention for a cache in pages. On a GPU the call raises if the Mosaic GPU
    kernels refuse it, because a fallback would be measured in their place.

    options   of the call; None: the defaults
    """
    import flexjax as package
    from flexjax import masks, paged

    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else None
    asked: dict[str, typing.Any] = {"implementation": implementation, "kernel_options": options}
    tree = None
    if case.mod == "tree":  # made beforehand, because all layers of a model share it
        parents = np.array([-1, *((n - 1) // 2 for n in range(1, case.q_len))], np.int32)
        tree = masks.tree(parents, case.first_query(), queries_follow_context=True)

    def mods(arrays: Arrays) -> dict[str, typing.Any]:
        """{"score_mod", "mask_mod"}: the mods of the case, which read `arrays`, as arguments of the call; None where it has none. "tree"
        has the mask_mod that was made beforehand.
        """
        score_mod, mask_mod = mods_of(case, arrays)
        return {"score_mod": score_mod, "mask_mod": tree or mask_mod}

    def contiguous(arrays: Arrays) -> Outs:
        """Calls flex_attention once for each copy; returns the outputs of all copies, [B, T, N, D] each."""
        given = mods(arrays)
        if case.mean:
            given["key_value_seq_lengths"] = arrays["lengths"]
        if case.mod:
            whole = (None, None, case.keys, case.keys)
            given["origin"] = package.Origin(query=case.first_query(), whole=whole)
        return tuple(
            package.flex_attention(*(arrays[x][n] for x in ("query", "key", "value")), **asked, **given)
            for n in range(case.copies)
        )

    def in_pages(arrays: Arrays) -> Outs:
        """Calls paged_attention once on the cache in pages, with scales, a shared prefix or ragged queries if the case has them; returns
        (out [B, T, N, D],).
        """
        pools = [arrays["key"], arrays["value"]]
        if case.stored in LARGEST:
            scales = jnp.full(case.kv_heads, case.scale(), jnp.float32)
            pools = [Quantized(pool, scales) for pool in pools]
        cache = paged.PagedCache(pools[0], pools[1])
        table = paged.PageTable(arrays["pages"], arrays["lengths"], jnp.ones(case.number_of_pages(), jnp.int32))
        given, query = mods(arrays), arrays["query"][0]
        if case.shared:
            prefix = arrays["pages"][:1, : case.shared // case.page]
            group = jnp.zeros(case.batch, jnp.int32)
            given["shared"] = package.SharedPrefix(group, prefix, jnp.asarray([case.shared], jnp.int32))
        if case.ragged:
            given["cu_q_lens"] = case.q_len * jnp.arange(case.batch + 1, dtype=jnp.int32)
            query = query.reshape(-1, *query.shape[2:])
        out = package.paged_attention(query, cache, table, **asked, **given)
        return (out.reshape(arrays["query"].shape[1:]),)

    return in_pages if case.page else contiguous


def jax_nn(case: DecodeCase) -> Run:
    """cuDNN through jax.nn.dot_product_attention, which takes lengths, and masks and biases as dense arrays; no pages and no soft cap."""
    return _each_copy(case, functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))


def tokamax(case: DecodeCase) -> Run:
    """tokamax's Mosaic GPU kernel, which takes lengths, masks and biases as dense arrays, and soft caps; no pages. Raises ImportError if
    tokamax is not installed.
    """
    import tokamax as package

    given = dict(logits_soft_cap=SOFT_CAP) if case.mod == "soft cap" else {}
    return _each_copy(case, functools.partial(package.dot_product_attention, implementation="mosaic", **given))


def _each_copy(case: DecodeCase, attend: Callable[..., Array]) -> Run:
    """The function that calls `attend` once for each copy of the query and the contiguous cache.

    attend   has the arguments of jax.nn.dot_product_attention: query, key, value and, where the case has them, "mask", "bias" and
             the two sequence lengths
    """

    def run(arrays: Arrays) -> Outs:
        """Calls `attend` once for each copy; returns the outputs of all copies, [B, T, N, D] each."""
        given = {name: arrays[name] for name in ("mask", "bias") if name in arrays}
        if case.mean:
            given["query_seq_lengths"] = jnp.full(case.batch, case.q_len, jnp.int32)
            given["key_value_seq_lengths"] = arrays["lengths"]
        return tuple(attend(*(arrays[x][n] for x in ("query", "key", "value")), **given) for n in range(case.copies))

    return run


def jax_paged(case: DecodeCase) -> Run:
    """cuDNN on pages, through a function of jax that is not public. It ignores a mod; `DecodeCase.skipped` leaves such cases out."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    attend: Callable[..., typing.Any] = cudnn.paged_attention

    def run(arrays: Arrays) -> Outs:
        """Calls cuDNN on the cache in pages; returns (out [B, T, N, D],)."""
        pages = arrays["pages"][:, None, :, None]
        counts = jnp.full(case.batch, case.q_len, jnp.int32)
        out = attend(
            arrays["query"][0], arrays["key"], arrays["value"], counts, arrays["lengths"], pages, pages,
            scale=case.dim**-0.5, mask_type=cudnn.MaskType.PADDING,
        )  # fmt: skip
        return (out,)

    return run


PEERS: dict[str, Callable[[DecodeCase], Run]] = {
    CUDNN: jax_nn,
    CUDNN_PAGES: jax_paged,
    TOKAMAX: tokamax,
    OWN_PEER: flexjax,
}


# ------------------------------------------------------------------- measurement


def adapter(peer: str, cases: Sequence[DecodeCase]) -> Callable[[DecodeCase, str], Measured]:
    """The function (case, folder) -> (times, sample outputs by name) that measures `peer`; it takes each of the cases once.

    peer    a name of PEERS, or REFERENCE for the float32 reference, which is not timed: its times are {}
    cases   what will be measured, in this order; COMPILING of them compile at a time from now on
    folder  that of the run, which has the lock on the device

    The times are {"decode": seconds of one call, "how": how it was measured, "first_call": seconds of tracing and compiling}. Raises
    ImportError at once if the peer is not installed.
    """
    if peer == TOKAMAX:
        import tokamax as _  # noqa: F401
    threads = ThreadPoolExecutor(COMPILING)
    ahead = {case.name: threads.submit(compiled_case, peer, case) for case in cases}

    def measure(case: DecodeCase, folder: str) -> Measured:
        """({"decode": seconds of one call on one copy, "how": how it was measured, "first_call": seconds of tracing and compiling},
        {"out": float32 [entries, T, N, D], the outputs of the requests case.entries() on the last copy}); for the reference the first
        dict is {}.

        folder   that of the run, which has the lock on the device

        Waits until the case is compiled and until no other process uses the device. A case is measured once, because its compiled program
        is dropped.
        """
        compiled = ahead.pop(case.name).result()
        with alone(folder):
            arrays = compiled.make(compiled.given)
            outs = compiled.run(arrays)
            if peer == REFERENCE:
                return {}, {"out": np.asarray(outs[0])}
            samples = {"out": np.asarray(outs[-1][np.array(case.entries())].astype(jnp.float32))}
            took, how = device_time(compiled.run, arrays)
        return dict(decode=took / case.copies, how=how, first_call=compiled.seconds), samples

    return measure


class Compiled(typing.NamedTuple):
    """A case, compiled.

    given     case.arrays()
    make      from `given` to the arrays of the call
    run       the call
    seconds   of tracing and compiling `run`
    """

    given: Arrays
    make: Callable[[Arrays], Arrays]
    run: Run
    seconds: float


def compiled_case(peer: str, case: DecodeCase, run: Run | None = None) -> Compiled:
    """Compiles the call of a peer on a case, and the function that makes its arrays.

    peer   a name of PEERS or REFERENCE
    run    compiled in place of the peer's call, on the same arrays; None: the peer's call
    """
    given = typing.cast(Arrays, case.arrays())
    make = functools.partial(make_arrays, case, peer)
    maker = jax.jit(make).lower(given).compile()
    start = time.perf_counter()
    call = run or (functools.partial(reference, case) if peer == REFERENCE else PEERS[peer](case))
    lowered = jax.jit(call).lower(jax.eval_shape(make, given))
    # XLA would time products for the reference while others are measured
    options: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"} if peer == REFERENCE else {}
    return Compiled(given, maker, lowered.compile(options), time.perf_counter() - start)


# ------------------------------------------------------------------- the reference


def reference(case: DecodeCase, arrays: Arrays) -> Outs:
    """(out,): dense attention of the requests case.entries() on the last copy, float32 [entries, T, N, D]. arrays: from `make_arrays`."""
    with jax.default_matmul_precision("highest"):
        return (jnp.stack([dense(case, int(case.lengths()[b]), arrays, jnp.int32(b)) for b in case.entries()]),)


def dense(case: DecodeCase, length: int, arrays: Arrays, b: Array) -> Array:
    """out of request b (an int32 scalar) on the last copy, float32 [T, N, D], by dense attention with the mods of the case.

    length   the number of keys of the request, an int
    arrays   from `make_arrays`
    """
    T, N, M, D = case.q_len, case.q_heads, case.kv_heads, case.dim
    query = arrays["query"][-1, b].astype(jnp.float32).reshape(T, M, N // M, D)
    key, value = (_keys_of(case, arrays, name, b)[:length] for name in ("key", "value"))
    s = jnp.einsum("tmgd,smd->mgts", query, key) * D**-0.5
    at = b, jnp.arange(N).reshape(M, N // M, 1, 1), length - T + jnp.arange(T)[:, None], jnp.arange(length)
    score_mod, mask_mod = mods_of(case, arrays)
    s = s if score_mod is None else jnp.asarray(score_mod(s, *at))
    s = s if mask_mod is None else jnp.where(mask_mod(*at), s, -jnp.inf)
    return jnp.einsum("mgts,smd->tmgd", jax.nn.softmax(s, -1), value).reshape(T, N, D)


def _keys_of(case: DecodeCase, arrays: Arrays, name: str, b: Array) -> Array:
    """The keys (`name` is "key") or values ("value") of request b in the last copy of the cache, float32 [S, M, D], multiplied by the
    scale if they are quantised. S is `case.keys`, also where the request is shorter.

    arrays   of the call, from `make_arrays`
    """
    if not case.page:
        return arrays[name][-1, b].astype(jnp.float32)
    stored = arrays[name][arrays["pages"][b]].astype(jnp.float32).reshape(case.keys, case.kv_heads, case.dim)
    return stored * case.scale() if case.stored in LARGEST else stored
