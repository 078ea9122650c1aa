"""Queries and keys that do not exist, on the simulated kernels: NaN in their slots reaches neither results nor gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import Implementation, KernelOptions
from tests.marks import some_slow

B, T, S, D = 2, 40, 128, 16


def test_slots_past_the_lengths_hold_nan() -> None:
    """Without a mask, with a sink; a batch entry without keys; cotangents of rows that do not exist are NaN too."""
    rng = np.random.default_rng(0)
    draw = lambda tokens: rng.standard_normal((B, tokens, 1, D)).astype(np.float32)
    q, k, v, d_out = draw(T), draw(S), draw(S), draw(T)
    queries, keys = (40, 33), (65, 0)
    for b in range(B):
        q[b, queries[b] :] = d_out[b, queries[b] :] = k[b, keys[b] :] = v[b, keys[b] :] = np.nan

    def results(implementation: Implementation) -> Any:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
            out, aux = flexjax.flex_attention(
                q, k, v, sinks=sinks, query_seq_lengths=jnp.asarray(queries), key_value_seq_lengths=jnp.asarray(keys),
                implementation=implementation, return_aux=flexjax.AuxRequest(lse=True),
                kernel_options=KernelOptions(interpret=implementation == "mosaic_gpu"),
            )  # fmt: skip
            assert aux.lse is not None
            return out, aux.lse

        made, pull = jax.vjp(run, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), jnp.ones(1))
        return *made, *pull((jnp.asarray(d_out, jnp.bfloat16), jnp.asarray(d_out[..., 0])))

    for got, want in zip(results("mosaic_gpu"), results("reference"), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want[np.isfinite(want)]).max())
        np.testing.assert_array_equal(got == 0, want == 0)


MANY = [
    (None, "none", "BTNH"), (None, "causal", "BNTH"), ("mma", "causal", "BNTH"), ("8.0", "blocks", "BNTH"),
    ("tcgen05", "causal", "BTNH"), (None, "blocks", "BTNH"), (None, "causal", "BTNH"), ("8.0", "blocks", "BTNH"),
]  # fmt: skip
"""Families of kernels (8.0: those that copy by cp.async), what the call masks, and the layout of its arrays."""


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # of what is hidden
@pytest.mark.parametrize(("family", "masked", "layout"), some_slow(MANY, MANY[6:7]))
def test_many_queries_over_a_buffer(family: Any, masked: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 rows of a key head read the buffer in place: NaN past the lengths reaches nothing, and the bits are those of a buffer of
    another length, and of one whose keys are copied.
    """
    from flexjax.backends.mosaic_gpu.families import choose_kernel
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS

    if family == "8.0":
        monkeypatch.setitem(CARDS, "9.0", dataclasses.replace(CARDS["8.0"], capability="9.0"))
    simulated = KernelOptions(interpret=True, instruction="mma" if family == "8.0" else family)
    lengths, tokens = (131, 0, 190), 72
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, k, v, bias = draw(3, tokens, 2, 16), draw(3, 384, 1, 16), draw(3, 384, 1, 32), jnp.asarray(draw(2, 384))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = np.nan
    mask = None if masked == "none" else flexjax.masks.causal
    viewed, views = [], choose_kernel.views_as_pages
    in_layout = lambda x: x if layout == "BTNH" else np.swapaxes(x, 1, 2)

    def results(keys: int, implementation: Implementation, in_place: bool = True) -> Any:
        maybe = lambda *given: viewed.append(views(*given)) or (in_place and viewed[-1])
        monkeypatch.setattr(choose_kernel, "views_as_pages", maybe)
        origin = flexjax.Origin(query="end")
        blocks = None
        if masked == "blocks":
            blocks = flexjax.create_block_mask(mask, 3, 1, tokens, keys, block_size=(72, 64))
            origin = None
        out, aux = flexjax.flex_attention(
            *(jnp.asarray(in_layout(x), jnp.bfloat16) for x in (q, k[:, :keys], v[:, :keys])), layout=layout,
            score_mod=lambda score, b, h, q, kv: score + bias[h, kv],
            mask_mod=mask if blocks is None else None, block_mask=blocks, origin=origin,
            key_value_seq_lengths=jnp.asarray(lengths), implementation=implementation,
            return_aux=flexjax.AuxRequest(lse=True, max_scores=True),
            kernel_options=simulated if implementation == "mosaic_gpu" else None,
        )  # fmt: skip
        return [np.asarray(x, np.float32) for x in (out, aux.lse, aux.max_scores)]

    found = [results(keys, "mosaic_gpu") for keys in (256, 195)] + [results(200, "mosaic_gpu", in_place=False)]
    assert viewed == [True] * 3
    for got, want in zip(found[0], results(256, "reference"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-2)
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)
