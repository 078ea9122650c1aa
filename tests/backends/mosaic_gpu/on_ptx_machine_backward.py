"""The backward kernels for compute capability 8.x on the machine of ptx_machine.py.

    python -m tests.backends.mosaic_gpu.on_ptx_machine_backward [--ORDER,ARRIVAL] NAME ...     a line for each problem

Problems are those of test_mma_backward.py and of tests/cases/hopper_backward.py, without gradients that are scattered by atomic
additions. "exact " before a name with captured arrays: with exact gradients of them (KernelPlan.exact_captures), whose rounded weights the
simulator makes by other operations. To be used in a process of its own, as on_ptx_machine.py.
"""

import dataclasses
import sys
import time

import jax.numpy as jnp

from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu.backward import mma_dkv, mma_dq, row_statistics
from flexjax.backends.mosaic_gpu.captures import mma as captures_mma
from flexjax.backends.mosaic_gpu.families import mma_backward
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS
from flexjax.plan.kernel_plan import BackwardInputs
from tests.backends.mosaic_gpu import compile_card
from tests.backends.mosaic_gpu.on_ptx_machine import CARD, Execution, execute, main
from tests.backends.mosaic_gpu.test_mma_backward import REFUSED, SMALL
from tests.cases.hopper_backward import BACKWARD, BY_PLACES, CAPTURED
from tests.cases.on_hopper import assert_gradients_close, backward_problem, with_extra

EXACT = "exact "
PROBLEMS = {n: case for n, case in {**SMALL, **BACKWARD, **CAPTURED, **BY_PLACES}.items() if REFUSED not in n}
PROBLEMS |= {EXACT + n: case for n, case in CAPTURED.items() if n in PROBLEMS}


def outcome(name: str, how: Execution) -> str:
    """Runs a problem; a line that begins with ok or FAIL."""
    start = time.time()
    made = backward_problem(**PROBLEMS[name])
    exact = name.startswith(EXACT)
    options = dataclasses.replace(made.plan.options, interpret=False)
    plan = dataclasses.replace(made.plan, options=options, exact_captures=exact)
    given = BackwardInputs(*made.given)
    if exact:
        assert plan.rounds_weights_alike
        rounding = jnp.zeros_like(given.results.out)
        given = given._replace(results=given.results._replace(rounding=rounding))
    device = targets.of_device(compile_card.topology(CARD).devices[0], "cuda")
    kernels = lambda plan, given: mma_backward.backward(plan, given, CARDS[compile_card.CARDS[CARD].capability])
    modules = row_statistics, mma_dq, mma_dkv, captures_mma
    try:
        with execute(*modules, how=how) as ran, targets.as_seen_by_pallas(device):
            got = with_extra(kernels, plan, given)
        assert_gradients_close(got, made.expected, tolerance=3e-2 if "captured" in PROBLEMS[name] else 8e-3)
    except AssertionError as error:
        return f"FAIL {name}: {str(error)[:600]}"
    return f"ok {name} {', '.join(ran)} {time.time() - start:.1f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], outcome, PROBLEMS))
