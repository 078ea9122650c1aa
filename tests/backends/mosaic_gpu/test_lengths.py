"""Queries and keys that do not exist, on the simulated kernels: NaN in their slots reaches neither results nor gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

import flexjax
from flexjax import Implementation, KernelOptions

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
