"""A case of the tables as functions of arrays: what a test calls, transforms and differentiates."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax.types import KernelOptions
from tests import oracle
from tests.arrays import array
from tests.cases import Case

Arrays = dict[str, Any]


def x64(dtype: str) -> contextlib.AbstractContextManager:
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class BoundCase:
    """A case in one dtype under one implementation, as functions of arrays.

    Arrays are heads-first, [B, heads, length, ...], whatever the layout that is passed on.
    """

    case: Case
    dtype: str
    implementation: str
    kernel_options: KernelOptions | None = None

    def arrays(self) -> tuple[Arrays, Arrays, Arrays]:
        """(inputs, learned captures, integer captures that travel as arguments)."""
        inputs = {
            name: array(x, "float32" if name == "sinks" else self.dtype)
            for name, x in self.case.poisoned().items()
            if name not in ("w", "u")
        }
        captured = self.constants
        learn = oracle.learned(self.case, captured)
        rest = {name: x for name, x in captured.items() if name not in learn}
        return inputs, learn, rest if self.case.traced else {}

    @functools.cached_property
    def constants(self) -> Arrays:
        """Every captured array; float32 ones widened in the float64 runs that a row does not name itself."""
        return {
            name: array(x, "float64" if self.widens and x.dtype == "float32" else x.dtype)
            for name, x in self.case.captured().items()
        }

    @property
    def widens(self) -> bool:
        """A mod that computes on a captured float32 array does so in float32, which float64 attention would show."""
        return self.dtype == "float64" and self.dtype not in self.case.dtypes

    @functools.cached_property
    def block_mask(self) -> flexjax.BlockMask | None:
        """Built once, outside of any jit, unless the case is traced."""
        if self.case.block is None or self.case.traced:
            return None
        return self._build_block_mask(self.constants)

    def _build_block_mask(self, captured: Arrays) -> flexjax.BlockMask:
        B, N, _, T, S, _, _ = self.case.shape
        block = self.case.block
        assert block is not None
        mask_mod = self.case.mods(captured)[1]
        return flexjax.create_block_mask(
            mask_mod, B if block.batch else None, N if block.heads else None, T, S, block_size=block.size
        )

    def attend(self, inputs: Arrays, learn: Arrays, rest: Arrays, value: jax.Array | None = None) -> Arrays:
        """out [B, N, T, E], lse and max_scores [B, N, T]; `value` replaces that of the inputs.

        Of a case with weights lse is the total, and there are no max_scores.
        """
        case = self.case
        captured = {**self.constants, **rest, **learn}
        score_mod, mask_mod = case.mods(captured)
        options: Arrays = dict(score_mod=score_mod, scale=case.scale, layout=case.layout)
        asked = flexjax.AuxRequest(lse=True, max_scores=True)
        if case.weights is not None:
            options["weights"] = case.weighting(captured)
            asked = flexjax.AuxRequest(total=True)
        if case.expectations:
            asked = dataclasses.replace(asked, expectations=case.functions(captured))
        if case.block is None:
            options["mask_mod"] = mask_mod
        else:
            options["block_mask"] = self._build_block_mask(captured) if case.traced else self.block_mask
        for name, ends in zip(("query_seq_lengths", "key_value_seq_lengths"), case.lengths, strict=True):
            if ends is not None:
                options[name] = jnp.asarray(ends, jnp.int32)
        if case.tolerance is not None:
            options["tolerance"] = case.tolerance
        if case.sinks:
            options["sinks"] = inputs["sinks"]
        if case.dropout:
            options |= dict(dropout=flexjax.Dropout(case.dropout, jax.random.key(11)))
        if self.kernel_options is not None:
            options["kernel_options"] = self.kernel_options
        if case.extra:
            options |= {name: self._turned(inputs[name]) for name in ("query_extra", "key_extra")}
        out, aux = flexjax.flex_attention(
            *(self._turned(x) for x in (inputs["q"], inputs["k"], inputs["v"] if value is None else value)),
            return_aux=asked,
            implementation=self.implementation,
            **options,
        )
        found = dict(out=out, lse=aux.total if case.weights else aux.lse, max_scores=aux.max_scores)
        if aux.expectations is not None:
            found["expectations"] = jnp.stack([aux.expectations[name] for name in case.expectations], -1)
        return {n: self._turned(x) for n, x in found.items() if x is not None}

    def loss(self, inputs: Arrays, learn: Arrays, rest: Arrays) -> tuple[jax.Array, Arrays]:
        """`oracle.loss_value` of the results, and the results."""
        weights = self.case.poisoned()
        results = self.attend(inputs, learn, rest)
        lse = jnp.where(jnp.isfinite(results["lse"]), results["lse"], 0.0)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        total = jnp.sum(results["out"].astype(wide) * weights["w"].astype(wide))
        if self.case.expectations:
            total += oracle.loss_of_expectations(results["expectations"], weights["u"].astype(wide))
        return total + jnp.sum(lse * weights["u"].astype(wide)), results

    def keep(self) -> np.ndarray | None:
        """bool [B, N, T, S]: what dropout keeps, read off the output for values that are unit vectors."""
        if not self.case.dropout:
            return None
        B, N, M, _, S, _, _ = self.case.shape
        units = jnp.broadcast_to(jnp.eye(S, dtype=self.dtype), (B, M, S, S))
        probs = jax.jit(functools.partial(self.attend, value=units))(*self.arrays())["out"]
        assert probs.shape[:2] == (B, N)
        return np.asarray(probs != 0)

    def _turned(self, x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2) if self.case.layout == "BTNH" else x
