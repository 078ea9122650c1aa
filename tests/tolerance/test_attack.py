"""Random attacks on the bound, a bounded number of them; `python -m lab.tolerance_attack` runs thousands."""

import numpy as np
import pytest

from tests.marks import some_slow
from tests.tolerance.attack import Attack, Found, Scene, scene_of

SCENES = [
    Scene(("alibi",), "causal", (512, 512, 8), (2, 1), 1e-6, False, "float32"),
    Scene(("gates", "key bias"), "full", (520, 576, 8), (4, 2), 1e-11, True, "float64"),
    *(scene_of(np.random.default_rng(n), large=n > 4) for n in range(10)),
]


def attacked(scene: Scene, draws: int) -> list[Found]:
    attack = Attack(scene, np.random.default_rng(7))
    with scene.x64:
        return [attack.draw() for _ in range(draws)]


@pytest.mark.parametrize("number", some_slow(range(len(SCENES)), (0,)))
def test_no_attack_takes_more_from_a_row_than_its_bound(number: int) -> None:
    found = attacked(SCENES[number], 24)
    assert [x for x in found if x.broken] == []
    if number < 2:
        assert sum(x.dropped for x in found) > 8
    if number == 0:
        assert max(x.worst for x in found) > 0.3
