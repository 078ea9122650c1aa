"""What a factory of masks or score mods returns can be pickled and copied, and is then the same function to a call."""

import copy
import pickle
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods
from tests.arrays import array
from tests.door.test_retrace import compilations
from tests.masks import test_masks
from tests.mods import test_mods

__all__ = ["compilations"]  # a fixture
COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy}
INDEX = jax.ShapeDtypeStruct((), jnp.int32)
SCORE = jax.ShapeDtypeStruct((), jnp.float32)
IDS = np.array([0, 0, 1, 1, 1, 2], np.int32)
COMBINED = {
    "and": flexjax.and_masks(masks.causal, masks.document(IDS)),
    "or": flexjax.or_masks(masks.sliding_window(2), flexjax.not_mask(masks.prefix_lm(3))),
    "per document": masks.per_document(masks.prefix_lm(2), IDS),
}
CHAINED = flexjax.chain_mods(mods.alibi(4), mods.softcap(5.0), mods.pair_bias(np.ones((6, 6), np.float32)))


def every() -> dict[str, tuple[typing.Callable, tuple]]:
    of_masks = {f"{p.id}": (p.values[0].mask, (INDEX,) * 4) for p in test_masks.ALL_CASES}
    of_masks |= {name: (mask, (INDEX,) * 4) for name, mask in COMBINED.items()}
    of_mods = {f"{p.id}": (p.values[0].mod, (SCORE, *(INDEX,) * 4)) for p in test_mods.ALL_CASES}
    return {**of_masks, **of_mods, "chain": (CHAINED, (SCORE, *(INDEX,) * 4))}


@pytest.mark.parametrize("module", [masks, mods])
def test_all_that_is_ready_made_is_pickled_by_name(module: typing.Any) -> None:
    made = [x for name, x in vars(module).items() if callable(x) and not name.startswith("_")]
    assert len(made) > 15
    for function in made:
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_copy_has_the_same_program_and_name() -> None:
    for name, (mod, types) in every().items():
        wanted = jax.make_jaxpr(mod)(*types)
        for how, made in COPIES.items():
            got = made(mod)
            assert (got.__name__, got.__doc__) == (mod.__name__, mod.__doc__), (name, how)
            found = jax.make_jaxpr(got)(*types)
            assert str(found) == str(wanted), (name, how)
            for a, b in zip(found.consts, wanted.consts, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_compiles_nothing_and_gives_the_same_bits(how: str, compilations: list[str]) -> None:
    x = array(np.random.default_rng(0).standard_normal((1, 6, 4, 8)), jnp.float32)
    run = lambda mask, mod: flexjax.flex_attention(x, x, x, mask_mod=mask, score_mod=mod)
    for mask in COMBINED.values():
        wanted = run(mask, CHAINED)
        copied = COPIES[how](mask), COPIES[how](CHAINED)  # of an array, deepcopy compiles a copy
        before = len(compilations)
        got = run(*copied)
        assert len(compilations) == before
        np.testing.assert_array_equal(got, wanted)


def test_another_process_reads_it() -> None:
    stored = pickle.dumps((COMBINED["and"], CHAINED))
    code = "import pickle, sys; mask, mod = pickle.load(sys.stdin.buffer); print(mask.__name__, mod.__name__, bool(mask(0, 0, 4, 2)))"
    done = subprocess.run([sys.executable, "-c", code], input=stored, capture_output=True, check=True)
    name = "chain_mods(alibi_4, softcap_5, pair_bias)"
    assert done.stdout.decode().strip() == f"and_masks(causal, document) {name} True"


def test_what_another_version_pickled_is_refused() -> None:
    function, (stored, attributes) = masks.sliding_window(4).__reduce__()
    module, path, number, closed, *rest = stored
    with pytest.raises(ValueError, match=r"was pickled by another version of it\. Make it again with its factory\.$"):
        function((module, path, number, {"other": 1, **closed}, *rest), attributes)
