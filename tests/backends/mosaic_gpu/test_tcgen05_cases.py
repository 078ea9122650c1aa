"""What of the conformance table the kernels on tcgen05 refuse, and what of it runs on mma.sync: the list of docs/cards.md."""

import collections
import typing

import pytest

import flexjax
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.backward import tcgen05_tiles as backward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.families import kernel_plans
from flexjax.backends.mosaic_gpu.families.choose_family import family_of
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import KernelPlan
from tests.bound_case import BoundCase
from tests.cases import CASES

CARDS = [Target("cuda", "NVIDIA B200", "10.0", 148), Target("cuda", "NVIDIA B300", "10.3", 148)]
EMPTY = "The GPU kernels do not take empty arrays."
REFUSED = {
    "no_keys": EMPTY,
    "no_queries": EMPTY,
    "no_keys_masked": EMPTY,
    "weights_without_keys": EMPTY,
    "expectations_without_keys": EMPTY,
    "dim_320": "The GPU kernels on tcgen05 take head dims up to 256, not 320 and 264.",
}
ON_MMA = {"forward": {"one_query", "lse_only_short"}, "backward": {"dim_192", "dim_256", "wide_expectations"}}
"""Few queries beside many keys, which the decode kernel splits; and a backward pass above head dim 128."""


class _PreparedError(Exception):
    """Carries the plan of a call out of it."""


def plan_of(name: str, monkeypatch: pytest.MonkeyPatch) -> KernelPlan:
    """The plan of a case in bfloat16 on tcgen05."""

    def stop(*arrays: typing.Any, implementation: object, **arguments: typing.Any) -> typing.NoReturn:
        raise _PreparedError(prepare(Arguments(*arrays, **arguments)).plan)

    problem = BoundCase(CASES[name], "bfloat16", "mosaic_gpu", flexjax.KernelOptions(instruction="tcgen05"))
    arrays = problem.arrays()
    with monkeypatch.context() as patched:
        patched.setattr(flexjax, "flex_attention", stop)
        with pytest.raises(_PreparedError) as found:
            problem.attend(*arrays)
    return found.value.args[0]


@pytest.mark.slow
def test_which_cases_are_refused_and_which_run_on_mma(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: dict[str, str] = {}
    on_mma: dict[str, set[str]] = collections.defaultdict(set)
    for name in CASES:
        plan = plan_of(name, monkeypatch)
        (reason,) = {support.refuses(plan, card, (0, 11, 2)) for card in CARDS}
        if reason is not None:
            refused[name] = reason
            continue
        text = support.BACKEND.tile_sizes(plan, CARDS[0])
        backward = backward_tcgen05_tiles.backward_tiles(
            kernel_plans.kernel_plan(plan, family_of(None, plan.options), backward=True)
        )
        assert ("by tcgen05" in text) == (backward is not None)  # explain says what runs
        if not text.startswith("tcgen05 "):
            on_mma["forward"].add(name)
        if backward is None:
            on_mma["backward"].add(name)
    assert refused == REFUSED
    assert on_mma == ON_MMA
