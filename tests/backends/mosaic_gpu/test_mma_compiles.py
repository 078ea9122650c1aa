"""The kernels on mma.sync compile for every card that they are for, and their PTX computes what it should.

The whole tables:  python -m tests.backends.mosaic_gpu.aot_cards,  python -m tests.backends.mosaic_gpu.on_ptx_machine
"""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from tests.backends.mosaic_gpu import aot_cards, compile_hopper, ptx_machine
from tests.cases import CASES

needs_compilers = pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))
PTX = """
.visible .entry twice_mosaic_gpu_kernel(
	.param .u64 .ptr .align 256 twice_param_0,
	.param .u64 .ptr .align 256 twice_param_1
)
{
	ld.param.b64 	%rd1, [twice_param_0];
	ld.param.b64 	%rd2, [twice_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 16;
	add.s64 	%rd4, %rd1, %rd3;
	mov.b32 	%r2, __dynamic_shmem__0;
	shl.b32 	%r3, %r1, 4;
	add.s32 	%r4, %r2, %r3;
	cp.async.cg.shared.global [%r4], [%rd4], 16;
	cp.async.commit_group;
	cp.async.wait_group 	PENDING;
	BARRIER
	xor.b32 	%r5, %r3, 528;
	add.s32 	%r6, %r2, %r5;
	ld.shared.b32 	%r7, [%r6];
	add.rn.f32 	%r8, %r7, %r7;
	mul.wide.u32 	%rd5, %r1, 4;
	add.s64 	%rd6, %rd2, %rd5;
	st.global.b32 	[%rd6], %r8;
	ret;
}
"""


def doubled(pending: str, barrier: str, order: str) -> bool:
    """Whether each thread reads and doubles what a thread of another warp copied."""
    given, found = np.arange(256, dtype=np.float32), np.zeros(64, np.float32)
    ptx_machine.run(
        PTX.replace("PENDING", pending).replace("BARRIER", barrier), [given, found], 1, 64, 1024, order=order
    )
    return bool((found == 2 * given[::4][np.arange(64) ^ 33]).all())


def test_the_machine_sees_missing_waits_and_barriers() -> None:
    for order in ("together", "up", "down"):
        assert doubled("0", "bar.sync 0;", order)
    with pytest.raises(AssertionError, match="a thread ends before its copies"):
        doubled("1", "bar.sync 0;", "together")
    assert not doubled("0", "", "up")
    with pytest.raises(AssertionError, match="outside of the arrays"):
        ptx_machine.run(PTX.replace("PENDING", "0").replace("BARRIER", ""), [np.zeros(4, np.float32)] * 2, 1, 64, 1024)
    with pytest.raises(NotImplementedError, match="lop9"):
        ptx_machine.run(
            PTX.replace("PENDING", "0").replace("BARRIER", "lop9.b32 %r1, %r2, %r3;"),
            [np.zeros(256, np.float32)] * 2,
            1,
            64,
            1024,
        )


def said(*kernels: str, spilled: int = 12) -> str:
    """What the compilers say of kernels for 8.x."""
    return "".join(
        textwrap.dedent(f"""
        shared memory of {name}: 81920 bytes
        ptxas info    : Function properties for {name}_mosaic_gpu_kernel
            0 bytes stack frame, {spilled} bytes spill stores, 16 bytes spill loads
        ptxas info    : Used 255 registers
            /*0010*/  HMMA.16816.F32.BF16 R4, R8, R2, R4 ;  LDSM.16.M88.4 R4, [R2] ;  LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        """)
        for name in kernels
    )


def test_every_card_has_its_instructions() -> None:
    both = said(aot_cards.FORWARD, *aot_cards.BACKWARD[:2])
    lines = aot_cards.judged("sm_80", "ok a-b 1s", both).splitlines()
    assert lines[0] == "ok a-b 1s on sm_80"
    assert lines[1] == (
        "    flexjax_forward_mma: 255 registers, 12 bytes spilled, 81920 bytes of shared memory, 1 HMMA, 1 LDSM, 1 LDGSTS"
    )
    assert len(lines) == 4
    assert aot_cards.judged("sm_80", "ok decode a 1s", said(aot_cards.DECODES)).startswith("ok")
    line = aot_cards.judged("sm_80", "ok a-b 1s", said(aot_cards.FORWARD, *aot_cards.BACKWARD[2:], spilled=300))
    assert line.splitlines()[0] == (
        "FAIL a-b 1s on sm_80: flexjax_forward_mma spills, flexjax_backward_dk spills, flexjax_backward_dv spills, no dQ kernel"
    )
    spilling = said(aot_cards.FORWARD, *aot_cards.BACKWARD[:2], spilled=aot_cards.MAY_SPILL["noise"])
    assert aot_cards.judged("sm_80", "ok noise-float16 1s", spilling).startswith("ok")
    assert aot_cards.judged("sm_80", "ok a-b 1s", spilling).startswith("FAIL")
    crowded = said(aot_cards.FORWARD, *aot_cards.BACKWARD[:2], "flexjax_capture_gradient", spilled=2048)
    line = aot_cards.judged("sm_80", "ok entropy-float16 1s", crowded).splitlines()[0]
    assert line == "FAIL entropy-float16 1s on sm_80: " + ", ".join(
        f"{name} spills" for name in (aot_cards.FORWARD, *aot_cards.BACKWARD[:2])
    )
    # of a kernel that an earlier call of the process compiled, only its launch is said
    launched = f"shared memory of {aot_cards.FORWARD}: 81920 bytes\n" + said(*aot_cards.BACKWARD[:2])
    assert aot_cards.judged("sm_80", "ok a-b 1s", launched).splitlines()[0] == "ok a-b 1s on sm_80"
    line = aot_cards.judged("sm_120", "ok decode a 1s", said(aot_cards.DECODES)).splitlines()[0]
    name = aot_cards.DECODES
    assert line == f"FAIL decode a 1s on sm_120: {name} has no UTMALDG, {name} has LDGSTS"
    always = {card: set(aot_cards.ALWAYS_SAMPLED.get(card, ())) for card in aot_cards.SAMPLED_CARDS}
    chosen = {card: set(aot_cards.sampled(card)) - always[card] for card in aot_cards.SAMPLED_CARDS}
    assert all(names <= set(aot_cards.TABLE) for names in (*chosen.values(), *always.values()))
    assert len(set.union(*chosen.values())) == sum(map(len, chosen.values())) > len(CASES) // 3


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(
    compile_hopper.missing_disassembler() is not None, reason=str(compile_hopper.missing_disassembler())
)
@pytest.mark.parametrize("card", aot_cards.SAMPLED_CARDS)
def test_sample_compiles(card: str) -> None:
    lines = list(aot_cards.sweep(card, aot_cards.sampled(card)))
    print("\n".join(lines))
    failed = [line for line in lines if line.startswith("FAIL")]
    assert not failed, "\n".join(failed)


@pytest.mark.aot
@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("how", ["together,late", "up,early", "down,late"])
def test_machine_code_computes_attention(how: str) -> None:
    names = ["causal, two batches, grouped heads", "pair bias", "decode blocks", "decode pages of 8, int8"]
    run_on_ptx_machine("on_ptx_machine", f"--{how}", *names)


@pytest.mark.aot
@pytest.mark.slow
@needs_compilers
def test_machine_code_computes_exact_gradients_of_captured_arrays() -> None:
    """The rounding of the weights is an instruction that the simulator does not run."""
    names = ["exact temperature of each head", "exact relative table, odd", "exact pair bias"]
    run_on_ptx_machine("on_ptx_machine_backward", *names)


@pytest.mark.aot
@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("how", ["together,late", "down,late"])
def test_machine_code_sums_in_shared_memory(how: str) -> None:
    """The simulator has one copy of the sums; on the device each thread has one, or lanes take turns."""
    run_on_ptx_machine("on_ptx_machine_backward", f"--{how}", "gather", "2-D table, odd, with dropout")


@pytest.mark.aot
@pytest.mark.slow
@needs_compilers
def test_machine_code_computes_logistic_weights() -> None:
    """A simulated thread has no warp to vote in."""
    run_on_ptx_machine("on_ptx_machine", "sigmoid(s - 9)", "sigmoid(s + 3)", "silu")


def run_on_ptx_machine(module: str, *arguments: str) -> None:
    """Runs a module of this folder in a process of its own, and asserts that all problems among its arguments are right."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.backends.mosaic_gpu.{module}", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    wanted = ["ok" for name in arguments if not name.startswith("--")]
    assert [line.split()[0] for line in lines] == wanted, run.stdout[-2000:] + run.stderr[-2000:]
