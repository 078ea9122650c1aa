"""Every kind of forward plan compiles to Hopper machine code, spills no register and keeps its matrix products in flight.

Compiled in a child process, which this file also is: `python test_forward_compiles.py name...`.
"""

import dataclasses
import pathlib
import sys
import typing

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
from flexjax.plan.kernel_plan import Lengths  # noqa: E402
from tests.backends.mosaic_gpu import compile_hopper  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)


def causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return q >= k


def checkerboard(s: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k - q) % 2 == 0, s * 0.5, s), s)


def cases() -> dict[str, dict[str, typing.Any]]:
    table, pair = jnp.zeros((2, 1024)), jnp.zeros((2, 256, 256), jnp.bfloat16)
    segments = jnp.zeros((1, 256), jnp.int32)
    slopes = jnp.ones(2)
    whole, wide = jnp.zeros((1, 2, 256, 256), jnp.bfloat16), jnp.zeros((256, 256))
    short = jnp.zeros((2, 200, 256), jnp.bfloat16)
    dynamic = {"dynamic_scheduler": True, "persistent": False}
    three = {"groups": 3, "ping_pong": False, "overlap": True, "lazy_rescale": True, "query_slots": 2}
    return {
        "full 128": {"dim": 128},
        "causal 64": {"mask": causal, "dim": 64},
        "causal 128": {"mask": causal, "dim": 128},
        "causal 256": {"mask": causal, "dim": 256},
        "causal 512": {"mask": causal, "dim": 512},
        "causal 576, odd": {
            "mask": causal,
            "dim": 576,
            "value_dim": 504,
            "q_len": 200,
            "kv_len": 250,
            "layout": "BNTH",
        },
        "odd": {"mask": causal, "dim": 72, "value_dim": 40, "q_len": 200, "kv_len": 250},
        "blocks of 64": {"mask": causal, "dim": 128, "block": (64, 64)},
        "documents": {"mask": lambda b, h, q, k: (q >= k) & (segments[b, q] == segments[b, k]), "dim": 128},
        "alibi": {"mask": causal, "dim": 128, "score": lambda s, b, h, q, k: s + slopes[h] * (k - q)},
        "soft cap": {"mask": causal, "dim": 128, "score": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)},
        "relative table": {"mask": causal, "dim": 128, "score": lambda s, b, h, q, k: s + table[h, q - k + 256]},
        "gather": {"dim": 128, "score": lambda s, b, h, q, k: s + table[h, jnp.clip(q - k, -30, 30) + 100]},
        "pair bias": {"mask": causal, "dim": 128, "score": lambda s, b, h, q, k: s + pair[h, q, k]},
        "pair bias of each batch": {"dim": 64, "score": lambda s, b, h, q, k: s + whole[b, h, q, k]},
        "pair bias, float32": {"dim": 128, "score": lambda s, b, h, q, k: s + wide[q, k]},
        "pair bias that ends in a tile": {"dim": 128, "q_len": 200, "score": lambda s, b, h, q, k: s + short[h, q, k]},
        "dynamic scheduler": {"mask": causal, "dim": 128, "tile": dynamic},
        "dynamic scheduler, pair bias": {
            "mask": causal,
            "dim": 64,
            "score": lambda s, b, h, q, k: s + pair[h, q, k],
            "tile": {**dynamic, "query_slots": 1},
        },
        "polynomials": {
            "mask": causal,
            "dim": 128,
            "score": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30),
            "tile": {"polynomials": 2},
        },
        "checkerboard": {"dim": 64, "score": checkerboard, "dtype": "float16"},
        "checkerboard under a mask": {"mask": causal, "dim": 128, "score": checkerboard},
        "three groups": {"dim": 64, "tile": three},
        "three groups under a mask": {
            "mask": causal,
            "dim": 64,
            "q_len": 384,
            "block": (192, 128),
            "tile": {**three, "prefetch_key_barrier": True},
        },
        "three groups, relative table": {
            "dim": 64,
            "score": lambda s, b, h, q, k: s + table[h, q - k + 256],
            "tile": three,
        },
        "three groups, soft cap": {
            "dim": 64,
            "q_len": 250,
            "score": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30),
            "tile": three,
        },
        "pages of 64": {"page": 64, "mask": causal, "dim": 128, "kv_len": 512},
        "pages of 128": {
            "page": 128,
            "mask": causal,
            "dim": 64,
            "kv_len": 512,
        },  # as contiguous keys with lengths are read
        "pages of 8, ALiBi": {
            "page": 8,
            "mask": causal,
            "dim": 256,
            "kv_len": 512,
            "score": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        },
        "float8": {"mask": causal, "dim": 128, "float8": True},
        "float8, ALiBi": {"dim": 128, "float8": True, "score": lambda s, b, h, q, k: s + slopes[h] * (k - q)},
        "float8, wide": {"mask": causal, "dim": 256, "float8": True},
        "float8, odd": {"mask": causal, "dim": 72, "value_dim": 104, "q_len": 200, "kv_len": 250, "float8": True},
        "float8, three groups": {"dim": 128, "tile": {"groups": 3, "ping_pong": False}, "float8": True},
        "float8, three groups under a mask": {
            "mask": causal,
            "dim": 128,
            "q_len": 384,
            "block": (192, 128),
            "score": lambda s, b, h, q, k: s * jnp.maximum(slopes[h], 1e-12),
            "tile": {"groups": 3, "ping_pong": False},
            "float8": True,
        },
        "a part, merged with others": {"mask": causal, "dim": 256, "plan": {"partial": True}},
        "sinks": {"mask": causal, "dim": 128, "sinks": True, "max_scores": True, "layout": "BNTH", "dtype": "float16"},
    }


NAMES = tuple(cases())
MAY_SPILL = {"float8, three groups": 24, "float8, three groups under a mask": 24, "causal 576, odd": 4}
"""Bytes that a thread may spill: once for a work item, outside of the loops over its key tiles."""


def in_pages(operands: typing.Any, page: int) -> typing.Any:
    """The operands of a call with all keys in pages, which keep their order."""
    batch, length = operands.key.shape[:2]
    pool = lambda x: x.reshape(-1, page, *x.shape[2:])
    pages = jnp.arange(batch * length // page, dtype=jnp.int32).reshape(batch, -1)
    lengths = Lengths(None, jnp.full(batch, length, jnp.int32))
    return operands._replace(key=pool(operands.key), value=pool(operands.value), pages=pages, lengths=lengths)


def compile_cases(names: list[str]) -> None:
    from flexjax.backends.mosaic_gpu.forward import hopper as forward_hopper
    from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
    from tests.cases.on_hopper import forward_problem

    for name in names:
        case = cases()[name]
        fields, of_plan, page = case.pop("tile", {}), case.pop("plan", {}), case.pop("page", 0)
        float8 = case.pop("float8", False)
        made = forward_problem(interpret=False, **case)
        plan = dataclasses.replace(made.plan, float8=float8, **of_plan)
        operands = in_pages(made.operands, page) if page else made.operands
        if page:
            plan = dataclasses.replace(plan, page=page, stored_pages=operands.key.shape[0])
        tile = dataclasses.replace(forward_hopper_tiles.forward_tile(plan), **fields)
        if float8:
            narrow = (x.astype(jnp.float8_e4m3fn) for x in operands[:3])
            operands = operands._replace(**dict(zip(("query", "key", "value"), narrow, strict=True)))

        def run(operands: typing.Any, plan: typing.Any = plan, tile: typing.Any = tile) -> typing.Any:
            return forward_hopper.forward(plan, operands, tile)

        print(f"case {name}", file=sys.stderr, flush=True)
        compile_hopper.compile_for_hopper(run, operands)


@pytest.mark.parametrize("part", range(3))
def test_no_spills(part: int) -> None:
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    names = list(NAMES[part::3])
    spilled = {name: sum(kernels.values()) for name, kernels in compile_hopper.spills(__file__, names).items()}
    assert list(spilled) == names
    assert {n: b for n, b in spilled.items() if b > MAY_SPILL.get(n, 0)} == {}


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
