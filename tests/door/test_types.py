"""Types at the door: pyright accepts a good program, and finds each mistake of a bad one on its own line."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is a developer tool: pip install '.[dev]'"
)
ROOT = pathlib.Path(__file__).parents[2]

HEAD = """
import functools
from collections.abc import Callable
import jax
import jax.numpy as jnp
import numpy as np
import flexjax
from flexjax import masks, mods
from jax import Array

q = k = v = jnp.ones((1, 8, 2, 4))
shape = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
ids = np.zeros(8, np.int32)

def near(width: int, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    return q_idx - kv_idx < width

def window(width: int) -> Callable[[Array, Array, Array, Array], Array]:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width

def no_types(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def two(q_idx: Array, kv_idx: Array) -> Array:
    return q_idx >= kv_idx

class Window:
    def __call__(self, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return q_idx >= kv_idx

def configured(implementation: flexjax.Implementation, layout: flexjax.Layout, mask: flexjax.MaskMod) -> Array:
    return flexjax.flex_attention(q, k, v, mask_mod=mask, implementation=implementation, layout=layout)
"""

GOOD = (
    "flexjax.flex_attention(q, k, v).sum()",
    "out, aux = flexjax.flex_attention(q, k, v, return_aux=flexjax.AuxRequest(lse=True)); out.sum(); aux.lse",
    "flexjax.flex_attention(ids, ids, ids, sinks=ids).sum()",
    "flexjax.flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).sum()",
    "flexjax.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: (ids[i] == ids[j]) & jnp.greater_equal(i, j))",
    "flexjax.flex_attention(q, k, v, mask_mod=lambda *at: True)",
    "flexjax.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: jnp.where(i < j, -jnp.inf, score))",
    "flexjax.flex_attention(q, k, v, mask_mod=functools.partial(near, 3))",
    "flexjax.flex_attention(q, k, v, mask_mod=jax.jit(functools.partial(near, 3)))",
    "flexjax.flex_attention(q, k, v, mask_mod=window(3))",
    "flexjax.flex_attention(q, k, v, mask_mod=no_types)",
    "flexjax.flex_attention(q, k, v, mask_mod=Window())",
    "flexjax.flex_attention(q, k, v, mask_mod=masks.causal, score_mod=mods.alibi(2), scale=0.5)",
    "flexjax.flex_attention(q, k, v, mask_mod=masks.sliding_window(3), score_mod=mods.identity)",
    "flexjax.flex_attention(q, k, v, mask_mod=flexjax.and_masks(masks.causal, flexjax.not_mask(window(3))))",
    "flexjax.flex_attention(q, k, v, score_mod=flexjax.chain_mods(mods.softcap(30.0), mods.alibi(2)))",
    "flexjax.flex_attention(q, k, v, layout='BNTH', implementation='xla')",
    "flexjax.flex_attention(q, k, v, implementation=['mosaic_gpu', 'xla'])",
    "block_mask = flexjax.create_block_mask(masks.causal, None, None, 8, 8)",
    "flexjax.flex_attention(q, k, v, block_mask=block_mask)",
    "flexjax.and_masks(block_mask.mask_mod, masks.causal)",
    "configured('xla', 'BTNH', masks.causal).sum()",
    "flexjax.explain(shape, shape, shape, mask_mod=masks.causal, sinks=shape, device='cpu').upper()",
    "flexjax.autotune(shape, shape, shape, mask_mod=masks.causal, seconds=1).options.block_q",
    "flexjax.dot_product_attention(q, k, v, is_causal=True).sum()",
    "out, residual = flexjax.dot_product_attention(q, k, v, return_residual=True); residual.sum()",
)
BAD = {
    "flexjax.flex_attention(q, k, v, mask_mod=lambda q_idx, kv_idx: q_idx >= kv_idx)": "too few positional parameters",
    "flexjax.flex_attention(q, k, v, mask_mod=two)": "expected 4 but received 2",
    "flexjax.flex_attention(q, k, v, mask_mod=masks.sliding_window)": "too few positional parameters",
    "flexjax.flex_attention(q, k, v, score_mod=masks.causal)": "expected 5 but received 4",
    "flexjax.flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: None)": '"None" is incompatible',
    "flexjax.flex_attention(q, k, v, layout='BHTN')": "'BHTN'",
    "flexjax.flex_attention(q, k, v, implementation='cudnn')": "'cudnn'",
    "flexjax.flex_attention(q, k, v, implementation=['xla', 'cudnn'])": "'cudnn'",
    "flexjax.flex_attention(q, k, v, score_mode=mods.identity)": "No overloads",
    "flexjax.flex_attention(q, k, v, return_aux=flexjax.AuxRequest(lse=True)).sum()": '"sum"',
    "flexjax.create_block_mask(two, None, None, 8, 8)": "expected 4 but received 2",
    "flexjax.and_masks(masks.causal, two)": "expected 4 but received 2",
    "flexjax.explain(shape, shape, shape, mask_mod=two)": "expected 4 but received 2",
    "flexjax.explain(shape, shape, shape, mask=masks.causal)": '"mask"',
    "flexjax.autotune(q, k, v, layout='TBNH')": "'TBNH'",
    "flexjax.dot_product_attention(q, k, v, return_residual=True).sum()": '"sum"',
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """For each program, the text of each line that pyright finds an error in, with the message; one run for both."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {"good": (HEAD, *GOOD), "bad": (HEAD, *BAD)}
    for name, lines in programs.items():
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n")
    settings = {
        "include": ["."],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "basic",
        "reportUnusedExpression": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--outputjson",
        "--project",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2, done.stderr
    errors: dict[str, list[tuple[str, str]]] = {name: [] for name in programs}
    for error in report["generalDiagnostics"]:
        path = pathlib.Path(error["file"])
        line = path.read_text().splitlines()[error["range"]["start"]["line"]]
        errors[path.stem].append((line, error["message"]))
    return errors


@pytest.mark.pyright
@needs_pyright
def test_good_programs_have_no_errors(found: dict[str, list[tuple[str, str]]]) -> None:
    assert found["good"] == []


@pytest.mark.pyright
@needs_pyright
@pytest.mark.parametrize("line", BAD)
def test_each_bad_line_is_an_error(found: dict[str, list[tuple[str, str]]], line: str) -> None:
    messages = [message for where, message in found["bad"] if where == line]
    assert len(messages) == 1, found["bad"]
    assert BAD[line] in messages[0]


@pytest.mark.pyright
@needs_pyright
def test_nothing_else_is_an_error(found: dict[str, list[tuple[str, str]]]) -> None:
    assert {where for where, _ in found["bad"]} == set(BAD)
