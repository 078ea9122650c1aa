"""The script that measures load classes reads what it says, and the page has its rows."""

import importlib.util
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import flexjax

ROOT = pathlib.Path(__file__).parents[2]


def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        "time_load_classes", ROOT / "tools" / "device" / "time_load_classes.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["time_load_classes"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


CLASSES = script().CLASSES


@pytest.mark.parametrize("kind", CLASSES, ids=[kind.name for kind in CLASSES])
def test_each_mod_reads_its_class(kind) -> None:
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    table = jnp.zeros(kind.table(64, 2))
    buckets = None if kind.buckets is None else jnp.asarray(kind.buckets(64))
    score_mod = lambda s, b, h, q, kv: kind.apply(s, b, h, q, kv, table, buckets)
    text = flexjax.explain(x, x, x, score_mod=score_mod)
    (shape,) = {kind.table(64, 2)}
    (name,) = re.findall(rf"(\w+) float32\[{','.join(map(str, shape))}\]", text)
    assert re.search(rf"load {name}\[.*\]  {kind.name}$", text, re.MULTILINE), text


def test_the_page_has_the_rows_of_the_script() -> None:
    page = (ROOT / "docs" / "writing_mods.md").read_text()
    for kind in CLASSES:
        assert f"| {kind.read} | {kind.name} | {kind.kernel} |" in page
