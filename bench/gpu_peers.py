"""The implementations (peers) of the gpu suite that run in jax, and the float32 reference that all are compared with.

A peer turns a workload into a function (q, k, v, array) -> out, where `array` is what the workload's score mod reads, or None.
"""

# pyright: reportMissingImports=false
# peers are optional: they are measured where they are installed

import functools
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.inputs import REFERENCE, alone, random_arrays, sample_rows
from bench.kernel_times import device_time as device_time
from bench.suites import FA3, MODS, Workload, document_ids
from flexjax.types import MaskMod, ScoreMod

Attention = Callable[..., jax.Array]
"""q [B, T, N, D], k and v [B, T, M, D], what the mod reads or None -> out [B, T, N, D]."""
Sums = tuple[jax.Array, jax.Array, jax.Array | None]
"""The sums over the chunks of queries so far: dk, dv, and the gradient of what the mod reads."""
Measured = tuple[dict[str, Any], dict[str, np.ndarray]]
"""(times by name, sample rows by name), as `measure` returns them."""


def flexjax(problem: Workload, deterministic: bool = True, **fields: Any) -> Attention:
    """flexjax.flex_attention as a user calls it; the block mask is made beforehand, and there is none for full
    attention.

    deterministic   whether the backward pass adds in a fixed order
    fields          other fields of KernelOptions
    """
    import flexjax as package

    block_mask, mask_mod, length = None, mask_mod_of(problem), problem.length
    if mask_mod is not None:
        block_mask = package.create_block_mask(mask_mod, None, None, length, length)
    options = package.KernelOptions(deterministic=deterministic, **fields)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, array: jax.Array | None) -> jax.Array:
        """Attention of one call: q [B, T, N, D], k and v [B, T, M, D]; `array` is what the score mod reads."""
        score_mod = score_mod_of(problem, array)
        return package.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, kernel_options=options)

    return attend


def mask_mod_of(problem: Workload) -> MaskMod | None:
    """The mask of a workload as a mask_mod; None for full attention."""
    if problem.mask == "full":
        return None
    allowed = problem.allowed()
    return lambda b, h, q, kv: jnp.asarray(allowed(q, kv))


def score_mod_of(problem: Workload, array: jax.Array | None) -> ScoreMod | None:
    """The mod of a workload as a score_mod; None for a workload without one.

    array   what it reads
    """
    if not problem.mod:
        return None
    apply = MODS[problem.mod].apply
    return lambda s, b, h, q, kv: apply(array, s, h, q, kv)


def jax_nn(problem: Workload) -> Attention:
    """cuDNN's attention (on a TPU XLA's) through jax.nn.dot_product_attention, for workloads with a full, causal or window mask and no score mod; those of
    other workloads are ignored (`Workload.skipped` leaves such workloads out).
    """
    implementation = "xla" if jax.default_backend() == "tpu" else "cudnn"
    options: dict[str, Any] = dict(implementation=implementation, **_mask_arguments(problem))
    return lambda q, k, v, array: jax.nn.dot_product_attention(q, k, v, **options)


def tokamax(problem: Workload) -> Attention:
    """tokamax's Mosaic GPU kernels, for workloads with a full, causal or window mask and no score mod but the soft cap; others are ignored
    (`Workload.skipped` leaves such workloads out). Raises ImportError if tokamax is not installed.
    """
    import tokamax as package

    options: dict[str, Any] = dict(implementation="mosaic", **_mask_arguments(problem))
    if problem.mod == "softcap":
        options["logits_soft_cap"] = 30.0
    return lambda q, k, v, array: package.dot_product_attention(q, k, v, **options)


def flash_attention_3(problem: Workload) -> Attention:
    """FlashAttention-3 inside jax (the package dew-flash-attn-cu13), for workloads with a full, causal or window mask, or documents, each a
    sequence of its own (varlen), and no score mod; `Workload.skipped` leaves others out. Its backward pass adds in any order. Raises
    ImportError if the package is not installed.
    """
    import dew_flash_attn as package

    if problem.mask != "documents":
        window = (problem.parameter - 1, 0) if problem.mask == "window" else (-1, -1)
        causal = problem.mask in ("causal", "window")
        return lambda q, k, v, array: package.flash_mha(q, k, v, is_causal=causal, window_size=window)
    lengths = np.bincount(document_ids(problem.length, problem.parameter, problem.seed))
    starts = np.concatenate([[0], np.cumsum(np.tile(lengths, problem.batch))]).astype(np.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, array: jax.Array | None) -> jax.Array:
        """Attention inside the documents of all batch entries, one after the other; the arguments of `Attention`."""
        packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return package.flash_mha_varlen(*packed, starts, int(lengths.max()), is_causal=True).reshape(q.shape)

    return attend


def _mask_arguments(problem: Workload) -> dict[str, Any]:
    """The workload's mask as keyword arguments of `jax.nn.dot_product_attention`: {"is_causal": True} for the mask causal; for a window
    also "local_window_size", (keys to the left, 0), the query's own key not counted; {} for any other mask.
    """
    words = dict(is_causal=True) if problem.mask in ("causal", "window") else {}
    return words | (dict(local_window_size=(problem.parameter - 1, 0)) if problem.mask == "window" else {})


# any order: gradients may be added up in any order, `KernelOptions(deterministic=False)`
PEERS: dict[str, Callable[[Workload], Attention]] = {
    "jax.nn": jax_nn,
    "tokamax": tokamax,
    FA3: flash_attention_3,
    "flexjax": flexjax,
    "flexjax any order": functools.partial(flexjax, deterministic=False),
}


def facts() -> dict[str, str]:
    """{"device": the kind of the first device, "jax": the version of jax}; runs a matrix product first, so that the device is awake."""
    device = jax.devices()[0]
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((128, 128), jnp.bfloat16)))
    return dict(device=device.device_kind, jax=jax.__version__)


def adapter(peer: str) -> Callable[[Workload, str], Measured]:
    """The function (workload, folder) -> (times by name, sample rows by name) for a peer: `measure` of it, or `reference`, which is not
    timed, for the name REFERENCE.

    A peer that is not in PEERS is flexjax with the options in its name (`options_of`). Raises ImportError at once if the peer is not
    installed.
    """
    if peer == REFERENCE:
        return reference
    for name, package in (("tokamax", "tokamax"), (FA3, "dew_flash_attn")):
        if peer == name:
            importlib.import_module(package)
    return functools.partial(measure, PEERS.get(peer) or functools.partial(flexjax, **options_of(peer)))


def options_of(peer: str) -> dict[str, Any]:
    """The fields of KernelOptions in the name of a peer: {"instruction": "mma"} of "flexjax instruction=mma". "True" and "False" become
    bools, other values stay text; {} for a name of one word.
    """
    pairs = (word.split("=", 1) for word in peer.split()[1:])
    return {name: {"True": True, "False": False}.get(value, value) for name, value in pairs}


def measure(make: Callable[[Workload], Attention], problem: Workload, folder: str) -> Measured:
    """Measures one peer on a workload.

    make     the peer, from the workload to its attention function
    folder   the folder of the run, which has the lock on the device

    Returns ({"forward", "backward", "first_call": seconds, "how": how the passes were measured}, {"out", "dq", "dk", "dv" and, if the
    workload learns, "learned": float32 sample rows}). The time of the backward pass is that of both passes less that of the forward
    pass; the first call is that of both, with its compilation. The lock is held while passes are timed.
    """
    arrays, array = on_device(problem)
    start = time.perf_counter()
    attend = make(problem)

    def both(
        q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, array: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Output and gradients, by name, from the forward and the backward pass with the cotangent d_out: "out", "dq", "dk", "dv", and
        "learned" (of `array`) only if the workload learns.
        """
        if not problem.learns:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, array), q, k, v)
            return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(d_out)), strict=True))
        out, pull = jax.vjp(attend, q, k, v, array)
        return dict(zip(("out", "dq", "dk", "dv", "learned"), (out, *pull(d_out)), strict=True))

    step = jax.jit(both)
    results = jax.block_until_ready(step(**arrays, array=array))
    first_call = time.perf_counter() - start
    samples = sampled(problem, results)
    del results
    forward = jax.jit(attend)
    operands = (arrays["q"], arrays["k"], arrays["v"], array)
    jax.block_until_ready(forward(*operands))
    with alone(folder):
        forward_time, how = device_time(forward, *operands)
        both_time, _ = device_time(lambda: step(**arrays, array=array))
    times = dict(forward=forward_time, backward=both_time - forward_time)
    return dict(**times, how=how, first_call=first_call), samples


def on_device(problem: Workload) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """The random arrays of the workload (inputs.random_arrays) on the device: (q, k, v and d_out by name, what the mod reads or
    None).
    """
    arrays, array = random_arrays(problem)
    return {name: jnp.asarray(x) for name, x in arrays.items()}, None if array is None else jnp.asarray(array)


def sampled(problem: Workload, results: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The sample rows of each result, float32, by name; a learned array of fewer than three axes as a whole.

    results   "out", "dq", "dk", "dv" [B, T, heads, D], and "learned" for the gradient of what the mod reads, whose second axis is taken
              as queries if it has three
    """
    rows = sample_rows(problem.length)
    pick = lambda name, x: x if name == "learned" and x.ndim < 3 else x[:, rows]
    return {name: np.asarray(pick(name, x).astype(jnp.float32)) for name, x in results.items()}


# ------------------------------------------------------------------------------------------ the reference


def reference(problem: Workload, folder: str) -> Measured:
    """Computes dense attention and its gradients in float32, a chunk of queries at a time; returns ({}, sample rows by name).

    folder   of the run. It keeps the device busy for seconds, so it holds the lock meanwhile as if it were timed
    """
    arrays, array = on_device(problem)
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(functools.partial(_reference, problem)).lower(arrays, array).compile()
    with alone(folder):
        return {}, sampled(problem, compiled(arrays, array))


def _reference(problem: Workload, arrays: dict[str, jax.Array], array: jax.Array | None) -> dict[str, jax.Array]:
    """Output and gradients of a workload in float32, by name: "out", "dq", "dk", "dv", and "learned" if the workload
    learns.

    arrays   q, k, v and d_out by name
    array    what the score mod reads, None if it reads none

    gcd(length, 128) queries are computed at a time, each with all keys; the scale is 1 / sqrt(head dim).
    """
    B, T, N, D = arrays["q"].shape
    M, size = problem.kv_heads, math.gcd(T, 128)
    split = lambda x: jnp.moveaxis(x.reshape(B, T // size, size, M, N // M, D), 1, 0)
    k, v = (arrays[n].astype(jnp.float32) for n in ("k", "v"))
    kv, head = jnp.arange(T), jnp.arange(N).reshape(1, M, N // M, 1, 1)
    apply = MODS[problem.mod].apply if problem.mod else lambda array, s, h, q, kv: s
    learned = array if problem.learns else None

    def chunk(sums: Sums, inputs: tuple[jax.Array, ...]) -> tuple[Sums, tuple[jax.Array, jax.Array]]:
        """(the new sums, (out, dq) of one chunk of queries), for lax.scan: the sums with the chunk's terms of dk, dv and the gradient of
        the learned array added. out and dq are [B, size, M, N // M, D].

        inputs   (queries of the chunk and their d_out, [B, size, M, N // M, D] each, the position of the first query)
        """
        d_k, d_v, d_learned = sums
        q, d_out, first = inputs[0].astype(jnp.float32), inputs[1].astype(jnp.float32), inputs[2]
        at = (first + jnp.arange(size))[:, None]
        raw = jnp.einsum("bqmgd,bkmd->bmgqk", q, k) / math.sqrt(D)
        modified = lambda s, a: apply(array if a is None else a, s, head, at, kv)
        if learned is None:
            scores, pull = jax.vjp(lambda s: modified(s, None), raw)
        else:
            scores, pull = jax.vjp(modified, raw, learned)
        on = problem.allowed()(at, kv)
        p = jax.nn.softmax(jnp.where(on, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bmgqk,bkmd->bqmgd", p, v)
        d_v = d_v + jnp.einsum("bmgqk,bqmgd->bkmd", p, d_out)
        d_p = jnp.einsum("bqmgd,bkmd->bmgqk", d_out, v)
        delta = jnp.einsum("bqmgd,bqmgd->bmgq", d_out, out)[..., None]
        d_raw, *more = pull(jnp.where(on, p * (d_p - delta), 0.0))
        if more:
            d_learned = d_learned + more[0].astype(jnp.float32)
        d_raw = d_raw / math.sqrt(D)
        d_q = jnp.einsum("bmgqk,bkmd->bqmgd", d_raw, k)
        return (d_k + jnp.einsum("bmgqk,bqmgd->bkmd", d_raw, q), d_v, d_learned), (out, d_q)

    start = (jnp.zeros_like(k), jnp.zeros_like(v), None if learned is None else jnp.zeros(learned.shape, jnp.float32))
    inputs = (split(arrays["q"]), split(arrays["d_out"]), jnp.arange(0, T, size))
    (d_k, d_v, d_learned), (out, d_q) = jax.lax.scan(chunk, start, inputs)
    joined = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, T, N, D)
    results = dict(out=joined(out), dq=joined(d_q), dk=d_k, dv=d_v)
    return results if d_learned is None else results | dict(learned=d_learned)
