"""The tangent kernels compile to machine code of each kind of card, spill no register and keep their products in flight.

Compiled in a child process, which this file also is: `python test_tangent_compiles.py card:name...`.
"""

import pathlib
import sys
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
import flexjax  # noqa: E402
from flexjax import masks  # noqa: E402
from tests.backends.mosaic_gpu import compile_card, compile_hopper  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

Arrays = dict[str, typing.Any]
MAIN = ("query", "key", "value")
needs_compilers = pytest.mark.skipif(compile_hopper.missing() is not None, reason=str(compile_hopper.missing()))


def relative(a: Arrays) -> dict:
    return dict(mask_mod=masks.causal, score_mod=lambda s, b, h, q, k: s + a["table"][h, q - k + 256])


def pair(a: Arrays) -> dict:
    return dict(score_mod=lambda s, b, h, q, k: s + a["pair"][h, q, k])


def cap(a: Arrays) -> dict:
    return dict(score_mod=lambda s, b, h, q, k: 30 * jnp.tanh(s / 30))


CASES: dict[str, tuple[dict, Callable[[Arrays], dict]]] = {
    "full 128": (dict(dim=128), lambda a: {}),
    "causal 64": (dict(dim=64), lambda a: dict(mask_mod=masks.causal)),
    "causal 128": (dict(dim=128), lambda a: dict(mask_mod=masks.causal)),
    "causal 256": (dict(dim=256), lambda a: dict(mask_mod=masks.causal)),
    "odd": (dict(dim=72, tokens=200), lambda a: dict(mask_mod=masks.causal)),
    "queries alone": (dict(dim=128, moving=("query",)), lambda a: {}),
    "relative table": (dict(dim=128, table=(2, 1024)), relative),
    "pair bias": (dict(dim=128, pair=(2, 256, 256)), pair),
    "soft cap": (dict(dim=128), cap),
    "soft cap 64": (dict(dim=64), cap),
    "relative table 64": (dict(dim=64, table=(2, 1024)), relative),
    "weights": (dict(dim=128), lambda a: dict(weights=lambda s, b, h, q, k: jax.nn.silu(s) / 16)),
}


MAY_SPILL = {"sm_120:causal 256": 236}
"""Bytes that a thread may spill."""


def compile_cases(labels: list[str]) -> None:
    """Compiles each CARD:NAME; all have one card."""
    for label in labels:
        card, _, name = label.partition(":")
        sizes, words = CASES[name]
        shapes = {n: s for n, s in sizes.items() if n in ("table", "pair")}
        main = jax.ShapeDtypeStruct((1, sizes.get("tokens", 256), 2, sizes["dim"]), jnp.bfloat16)
        arrays = dict.fromkeys(MAIN, main) | {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}

        def tangent(arrays: Arrays, tangents: Arrays, words: Callable[[Arrays], dict] = words) -> typing.Any:
            def attend(moved: Arrays) -> typing.Any:
                given = {**arrays, **moved}
                return flexjax.flex_attention(*(given[n] for n in MAIN), implementation="mosaic_gpu", **words(given))

            return jax.jvp(attend, ({n: arrays[n] for n in tangents},), (tangents,))

        print(f"case {label}", file=sys.stderr, flush=True)
        moving = {n: arrays[n] for n in sizes.get("moving", arrays)}
        if card == "sm_90":
            compile_hopper.compile_for_hopper(tangent, arrays, moving)
        else:
            compile_card.compile_for(card, tangent, arrays, moving)


KERNELS = {"sm_90": "flexjax_tangent", "sm_80": "flexjax_tangent_mma", "sm_120": "flexjax_tangent_mma"}


def spilled(card: str, names: list[str]) -> dict[str, int]:
    """By CARD:NAME, the bytes that the tangent kernel spills, where these are more than it may."""
    labels = [f"{card}:{name}" for name in names]
    found = {label: kernels[KERNELS[card]] for label, kernels in compile_hopper.spills(__file__, labels).items()}
    assert list(found) == labels
    return {label: b for label, b in found.items() if b > MAY_SPILL.get(label, 0)}


@needs_compilers
def test_no_spills() -> None:
    assert spilled("sm_90", ["causal 128"]) == {}


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("card", KERNELS)
def test_no_spills_in_any_case(card: str) -> None:
    assert spilled(card, list(CASES)) == {}


if __name__ == "__main__":
    compile_cases(sys.argv[1:])
