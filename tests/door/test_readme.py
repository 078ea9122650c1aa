"""README.md: its python blocks run as they are pasted, in order, in a fresh namespace, and do what the text says."""

import inspect
import pathlib
import re
import textwrap
import tomllib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods
from tests.cases.small import by_definition

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def fenced(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


class Printed:
    """Stands in for `print` in the namespace of the blocks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, *values: object) -> None:
        self.texts.append(" ".join(map(str, values)))


@pytest.fixture(scope="module")
def pasted() -> tuple[types.SimpleNamespace, list[str]]:
    """What the blocks define, and what they print."""
    printed = Printed()
    names: dict[str, Any] = {"print": printed}
    for block in fenced("python"):
        exec(compile(block, "README.md", "exec"), names)
    return types.SimpleNamespace(**names), printed.texts


def test_the_first_example(pasted: tuple[types.SimpleNamespace, list[str]]) -> None:
    names, _ = pasted
    want = by_definition(names.q, names.k, names.v, score_mod=mods.alibi(names.N), mask_mod=masks.causal)
    assert names.out.shape == (names.B, names.T, names.N, names.D)
    np.testing.assert_allclose(names.out.astype(np.float32), want.astype(np.float32), atol=0.03)


def test_the_table_is_trained(pasted: tuple[types.SimpleNamespace, list[str]]) -> None:
    """The loss falls as the comment beside it says, and each head's table is largest one token back."""
    names, printed = pasted
    losses = [float(text) for text in printed[:10]]
    assert losses == sorted(losses, reverse=True)
    first, last = (float(x) for x in re.findall(r"# falls from ([\d.]+) to ([\d.]+)", README)[0])
    assert (losses[0], losses[-1]) == pytest.approx((first, last), abs=0.015)
    assert (jnp.argmax(names.table, axis=-1) == 1).all()
    assert (names.table[:, 1] > 3).all()


def test_the_segment_ids_matter(pasted: tuple[types.SimpleNamespace, list[str]]) -> None:
    """They are traced by `step`: the distances between documents get no gradient, and one document is another loss."""
    names, _ = pasted
    assert not bool(names.table[:, 100:].any())
    step = lambda ids: names.step(names.table, names.q, names.k, names.v, ids)
    _, apart = step(names.segment_ids)
    moved, together = step(jnp.zeros_like(names.segment_ids))
    assert bool(moved[:, 100:].any())
    assert float(together) != float(apart)
    assert names.step._cache_size() == 1  # other ids are the same program


def test_explain_prints_the_map(pasted: tuple[types.SimpleNamespace, list[str]]) -> None:
    _, printed = pasted
    (picture,) = fenced("text")
    assert len(printed) == 11
    assert picture in printed[-1]


def test_it_is_short_enough_to_be_read() -> None:
    """Words as `wc -w` counts them: of the whole file, tables and code included."""
    words = len(README.split())
    print(f"README.md: {words} words")
    assert words <= 900


def test_names_and_counts() -> None:
    """What the text calls by name is there, and there are as many masks and mods as it says."""
    for name in set(re.findall(r"flexjax\.(\w+)", README)):
        assert name == "bench" or hasattr(flexjax, name), name
    factories = lambda module: [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
    helpers = {"alibi_slopes", "t5_buckets", "tanh_approx"}
    assert len(factories(masks)) == 34
    assert len(set(factories(mods)) - helpers) == 16
    assert "34 masks and sixteen score functions" in README


def test_the_example_of_flex_attention() -> None:
    """The lines of its docstring that are indented more than the text, without the formula in front."""
    lines = inspect.getdoc(flexjax.flex_attention) or ""
    example = textwrap.dedent(re.findall(r"^Example.*?:\n\n((?: {4}.*\n|\n)+)", lines, re.MULTILINE)[0])
    arrays = {n: jnp.ones((1, 5, 2, 4)) for n in ("query", "key", "value")}
    scope: dict[str, Any] = {**arrays, "N": 2, "T": 5, "jnp": jnp, "flexjax": flexjax}
    exec("from flexjax import flex_attention\n" + example, scope)
    np.testing.assert_allclose(scope["out"], arrays["value"], atol=1e-6)


def test_the_commands_are_marked() -> None:
    """.ci/run and whoever tries the repository read them off these lines."""
    for kind in ("main", "test"):
        assert len(re.findall(rf"^<!-- {kind} command -->\n```bash\n[^\n]+\n```$", README, re.MULTILINE)) == 1


def test_the_install_lines_name_extras_that_are_there() -> None:
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra in set(re.findall(r"pip install '\.\[(\w+)\]'", README)):
        assert extra in project["optional-dependencies"], extra
    assert project["requires-python"] == ">=3.11"
    assert jax.__version_info__ >= (0, 10, 2)
