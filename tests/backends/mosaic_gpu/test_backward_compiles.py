"""Every kind of backward plan compiles to Hopper machine code and spills no register.

Compiled in a child process, which this file also is: `python test_backward_compiles.py name...`.
"""

import dataclasses
import pathlib
import sys
import typing
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
import flexjax  # noqa: E402
from flexjax import weights  # noqa: E402
from tests.backends.mosaic_gpu import compile_hopper  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)


def causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return q >= k


def cases() -> dict[str, dict[str, typing.Any]]:
    slopes, table = jnp.ones(2), jnp.zeros((2, 1024))
    documents = jnp.zeros(1024, jnp.int32)
    alibi = lambda c, s, b, h, q, k: s + c[0][h] * (k - q)
    small = {"q_len": 256, "kv_len": 256}
    pair = lambda c, s, b, h, q, k: s + c[0][h, q, k].astype(jnp.float32)
    bias = lambda dtype, *shape: jnp.zeros(shape, dtype)
    return {
        "full 128": {"dim": 128},
        "causal 64": {"mask": causal, "dim": 64},
        "causal 128": {"mask": causal, "dim": 128},
        "causal 256": {"mask": causal, "dim": 256},
        "alibi 512": {"mask": causal, "dim": 512, "captured": (slopes,), "score": alibi},
        "causal 504, odd": {"mask": causal, "dim": 504, "value_dim": 264, "q_len": 200, "kv_len": 250, "layout": "BNTH"},
        "odd": {"mask": causal, "dim": 72, "value_dim": 40, "q_len": 200, "kv_len": 250},
        "blocks of 64": {"mask": causal, "dim": 128, "block": (64, 64)},
        "alibi": {"mask": causal, "dim": 128, "captured": (slopes,), "score": alibi},
        "dropout": {
            "dim": 64,
            "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
        },
        "relative table": {
            **small, "dim": 64, "captured": (table,), "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 256],
        },
        "table of two dimensions": {
            "dim": 64, "q_len": 289, "kv_len": 289, "captured": (jnp.zeros((2, 33, 33)),),
            "score": lambda c, s, b, h, q, k: s + c[0][h, q // 17 - k // 17 + 16, q % 17 - k % 17 + 16],
        },
        "table of two dimensions, tiles of a diagonal": {
            "dim": 64, "q_len": 512, "kv_len": 512, "heads": 1, "captured": (jnp.zeros((1, 31, 63)),),
            "score": lambda c, s, b, h, q, k: s + c[0][h, q // 32 - k // 32 + 15, q % 32 - k % 32 + 31],
        },
        "gain by a gather": {
            **small, "dim": 64, "mask": causal, "captured": (jnp.zeros(50),),
            "score": lambda c, s, b, h, q, k: s * c[0][(q * 7 + k * 3) % 50],
        },
        "pair bias 64": {"dim": 64, "captured": (bias("bfloat16", 2, 256, 256),), "score": pair},
        "pair bias 128": {"dim": 128, "captured": (bias("bfloat16", 2, 256, 256),), "score": pair},
        "pair bias under a mask": {"dim": 128, "mask": causal, "captured": (bias("bfloat16", 2, 256, 256),), "score": pair},
        "pair bias 256": {"dim": 256, "captured": (bias("bfloat16", 2, 256, 256),), "score": pair},
        "pair bias, float32": {"dim": 128, "mask": causal, "captured": (bias("float32", 2, 256, 256),), "score": pair},
        "pair bias of all batch entries": {
            "dim": 64, "batch": 2, "captured": (bias("bfloat16", 2, 256, 256),), "score": pair,
        },
        "pair bias, odd": {
            "dim": 64, "q_len": 200, "kv_len": 250, "captured": (bias("bfloat16", 2, 200, 250),), "score": pair,
        },
        "pair bias of each batch entry": {
            "dim": 64, "batch": 2, "captured": (bias("float16", 2, 2, 256, 256),),
            "score": lambda c, s, b, h, q, k: s + c[0][b, h, q, k].astype(jnp.float32),
        },
        "gain of each pair": {
            "dim": 128, "captured": (bias("bfloat16", 2, 256, 256),),
            "score": lambda c, s, b, h, q, k: 4.0 * jnp.tanh(s * c[0][h, q, k].astype(jnp.float32) / 4.0),
        },
        "one kernel 128": {"dim": 128, "mask": causal, "fused": True},
        "one kernel 64": {"dim": 64, "mask": causal, "fused": True},
        "one kernel 64, full": {"dim": 64, "fused": True},
        "one kernel 64, any order": {"dim": 64, "mask": causal, "fused": True, "deterministic": False},
        "one kernel 64, full, any order": {"dim": 64, "fused": True, "deterministic": False},
        "one kernel 64, downward": {"dim": 64, "mask": causal, "fused": True, "upward": False},
        "one kernel 64, odd": {
            "dim": 64, "mask": causal, "q_len": 200, "kv_len": 250, "fused": True, "deterministic": False,
        },
        "one kernel 128, any order": {"dim": 128, "mask": causal, "fused": True, "deterministic": False},
        "one kernel 64, alibi": {"dim": 64, "mask": causal, "captured": (slopes,), "score": alibi, "fused": True},
        "one kernel 64, alibi, any order": {
            "dim": 64, "mask": causal, "captured": (slopes,), "score": alibi, "fused": True, "deterministic": False,
        },
        "one kernel 64, relative table": {
            **small, "dim": 64, "captured": (table.astype(jnp.bfloat16),), "fused": True,
            "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 256].astype(jnp.float32),
        },
        "one kernel 64, relative table, float32": {
            "dim": 64, "mask": causal, "captured": (table,), "fused": True,
            "score": lambda c, s, b, h, q, k: s + c[0][h, q - k + 256],
        },
        "one kernel 64, documents, any order": {
            "dim": 64, "mask": lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), "fused": True,
            "deterministic": False,
        },
        "one kernel 64, two biases of each query": {
            **small, "dim": 64, "captured": (bias("float32", 2, 256), bias("float32", 2, 256)), "fused": True,
            "score": lambda c, s, b, h, q, k: s + c[0][h, q] * c[1][h, k] + c[1][h, q],
        },
        "one kernel 64, bias of each query and key": {
            **small, "dim": 64, "mask": causal, "captured": (bias("float32", 2, 256), bias("float32", 2, 256)), "fused": True,
            "score": lambda c, s, b, h, q, k: s + c[0][h, q] + c[1][h, k],
        },
        "one kernel 128, grouped": {**small, "dim": 128, "heads": 4, "kv_heads": 1, "mask": causal, "fused": True},
        "one kernel 128, grouped, divided": {
            **small, "dim": 128, "heads": 4, "kv_heads": 1, "mask": causal, "fused": True, "shares": 2,
        },
        "one kernel, alibi": {
            "dim": 128, "mask": causal, "captured": (slopes,), "score": alibi, "fused": True, "deterministic": False,
        },
        "weights, squared ReLU": {"mask": causal, "weights": weights.relu_squared(1024)},
        "weights, retention": {"weights": weights.retention(jnp.linspace(0.9, 0.99, 16))},
    }  # fmt: skip


NAMES = tuple(cases())
TOO_MUCH = ("one kernel 64, two biases of each query",)
"""For tiles of 128 queries."""
SPILLS = {
    "gain of each pair": {"flexjax_backward_dkv": 4},
    "one kernel 128": {"flexjax_backward_fused": 8},
    "one kernel 128, any order": {"flexjax_backward_fused": 8},
    "one kernel 128, grouped": {"flexjax_backward_fused": 56},
    "one kernel 128, grouped, divided": {"flexjax_backward_fused": 56},
    "one kernel 64": {"flexjax_backward_fused": 12},
    "one kernel 64, any order": {"flexjax_backward_fused": 24},
    "one kernel 64, downward": {"flexjax_backward_fused": 12},
    "one kernel 64, odd": {"flexjax_backward_fused": 12},
    "one kernel 64, alibi": {"flexjax_backward_fused": 48},
    "one kernel 64, alibi, any order": {"flexjax_backward_fused": 56},
    "one kernel 64, relative table": {"flexjax_backward_fused": 8},
    "one kernel 64, relative table, float32": {"flexjax_backward_fused": 48},
    "one kernel 64, documents, any order": {"flexjax_backward_fused": 152},
    "one kernel 64, bias of each query and key": {"flexjax_backward_fused": 160},
    "weights, squared ReLU": {"flexjax_backward_fused": 8},
}
"""Bytes that a thread may spill, 0 for what is not named; see lab/logs/hopper_backward.md. One kernel: numbers that do not change in its loop,
written before it and read once a step."""


def compile_cases(names: list[str]) -> None:
    for name in names:
        compile_case(name, **cases()[name])


def compile_case(name: str, **case: typing.Any) -> None:
    """Compiles one case, and leaves what it chose in place of the modules to no other."""
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice as choice
    from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import fused_tiles
    from flexjax.backends.mosaic_gpu.families import hopper_backward
    from flexjax.backends.mosaic_gpu.machine import dq_order
    from flexjax.plan.kernel_plan import BackwardInputs
    from flexjax.types import KernelOptions
    from tests.cases.on_hopper import backward_problem, with_extra

    weighted = "weights" in case
    # small problems are upward, too
    shares, upward = case.pop("shares", 1), 100.0 if case.pop("upward", True) else 0.0
    fused, options = case.pop("fused", weighted), KernelOptions(deterministic=case.pop("deterministic", True))
    choices = {"fused_is_faster": lambda plan: fused}
    if not weighted:
        choices |= {"adds_in_order": lambda plan, tiles: plan.options.deterministic, "shares_of": lambda plan: shares}
    with mock.patch.multiple(choice, **choices):
        if weighted:
            print(f"case {name}", file=sys.stderr, flush=True)
            compile_weights(**case)
            return
        with mock.patch.object(dq_order, "MOST_UPWARD_DELAY", upward):
            made = backward_problem(**case)
            plan = dataclasses.replace(made.plan, options=options)
            tiles = fused_tiles(plan) if fused else None

            def run(*arrays: typing.Any) -> typing.Any:
                return with_extra(hopper_backward.backward, plan, BackwardInputs(*arrays, *made.given[4:]))

            print(f"case {name}{f', {tiles.queries} queries' if tiles else ''}", file=sys.stderr, flush=True)
            compile_hopper.compile_for_hopper(run, *made.given[:4])


def compile_weights(weights: typing.Any, mask: typing.Any = None) -> None:
    """The gradients of a weighted call, by the kernel for all of them: their program wants weights beside their derivatives."""

    def total(*arrays: jax.Array) -> jax.Array:
        out = flexjax.flex_attention(*arrays, weights=weights, mask_mod=mask, implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    compile_hopper.compile_for_hopper(jax.grad(total, (0, 1, 2)), *3 * [jnp.zeros((2, 1024, 16, 128), jnp.bfloat16)])


@pytest.mark.parametrize("part", range(3))
def test_no_spills(part: int) -> None:
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    names = list(NAMES[part::3])
    spilled = compile_hopper.spills(__file__, names, 900)
    for name, (line, kernels) in zip(names, spilled.items(), strict=True):
        queries = 128 if "64" in name and name not in TOO_MUCH else 64
        assert line == (f"{name}, {queries} queries" if name.startswith("one kernel") else name)
        assert {k: b for k, b in kernels.items() if b > SPILLS.get(name, {}).get(k, 0)} == {}, name
        assert "flexjax_backward_fused" in kernels or not name.startswith(("one kernel", "weights")), name


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
