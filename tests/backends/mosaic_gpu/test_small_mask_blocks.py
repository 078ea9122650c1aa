"""Masks in blocks that are no multiples of the kernels' tiles, in the simulator: what the door prepares."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import BlockMask, KernelOptions, masks
from flexjax.backends.mosaic_gpu.support import BACKEND
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import BackwardInputs, Wanted
from tests.arrays import array

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

T = 200
WINDOW = jnp.asarray(70)


CPU = Target("cpu")


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(array(rng.standard_normal((1, T, n, 16)), jnp.bfloat16) for n in (2, 1, 1))


def listed() -> BlockMask:
    """Lists that a user made: some blocks off, some on whatever the mask says."""
    kinds = np.random.default_rng(0).integers(0, 3, (1, 2, 7, 7))
    index = [np.argsort(kinds != kind, -1, kind="stable") for kind in (1, 2)]
    partial, full = ((kinds == kind).sum(-1) for kind in (1, 2))
    options: typing.Any = {"block_size": 32, "mask_mod": masks.causal, "q_len": T, "kv_len": T}
    return BlockMask.from_kv_blocks(partial, index[0], full, index[1], **options)


def made(block_size: typing.Any) -> BlockMask:
    window = lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
    return flexjax.create_block_mask(window, None, None, T, T, block_size=block_size)


def reference(block_mask: BlockMask, *x: jax.Array) -> jax.Array:
    return flexjax.flex_attention(*x, block_mask=block_mask, implementation="reference")


@pytest.mark.parametrize(
    ("block_size", "slopes"), [(16, False), (32, False), (96, False), ((32, 128), False), ("lists", True)], ids=str
)
def test_it_runs_on_the_kernels(block_size: typing.Any, slopes: bool) -> None:
    block_mask = listed() if block_size == "lists" else made(block_size)
    given: typing.Any = {"block_mask": block_mask, "kernel_options": KernelOptions(interpret=True)}
    call = prepare(Arguments(*arrays(), **given))
    assert BACKEND.refuses(call.plan, CPU) is None
    found = jax.jit(lambda operands: Run(BACKEND, call.plan, CPU).forward(operands))(call.operands)
    want, transpose = jax.vjp(lambda *x: reference(block_mask, *x), *arrays())
    close(found.out, want)
    if slopes:
        wanted = Wanted(True, True, True, False, False, False, ())
        assert BACKEND.refuses_backward(call.plan, CPU, wanted, None) is None
        run = jax.jit(
            lambda o, r, d: Run(BACKEND, call.plan, CPU).backward(BackwardInputs(o, r, d, None, wanted, None))
        )
        for one, other in zip(run(call.operands, found, want)[:3], transpose(want), strict=True):
            close(one, other)


def test_lists_in_any_order_whose_last_block_overhangs() -> None:
    """The keys past the last one were counted where the last entry of a row was another block."""
    num, index = np.full((1, 1, 2), 2), np.tile([1, 0], (1, 1, 2, 1))
    mask = BlockMask.from_kv_blocks(num * 0, index, num, index, block_size=128, q_len=T, kv_len=T)
    given: typing.Any = {"block_mask": mask, "kernel_options": KernelOptions(interpret=True)}
    call = prepare(Arguments(*arrays(), **given))
    close(jax.jit(lambda o: Run(BACKEND, call.plan, CPU).forward(o))(call.operands).out, reference(mask, *arrays()))


def test_rebuilt_lists_in_any_order_whose_last_block_overhangs() -> None:
    """The same for a mask of two full blocks whose arrays a user replaced."""
    num, index = np.full((1, 1, 2), 2), np.tile([0, 1], (1, 1, 2, 1))
    made = BlockMask.from_kv_blocks(num * 0, index, num, index, block_size=128, q_len=T, kv_len=T)
    mask = dataclasses.replace(made, full_kv_indices=made.full_kv_indices[..., ::-1])
    given: typing.Any = {"block_mask": mask, "kernel_options": KernelOptions(interpret=True)}
    call = prepare(Arguments(*arrays(), **given))
    close(jax.jit(lambda o: Run(BACKEND, call.plan, CPU).forward(o))(call.operands).out, reference(mask, *arrays()))


def close(got: jax.Array, want: jax.Array) -> None:
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.04, rtol=0.04)
