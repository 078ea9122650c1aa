"""The door: what is exported, the signatures, docstrings, and what importing it does not import."""

import dataclasses
import inspect
import pydoc
import re
import subprocess
import sys
import types

import pytest

import flexjax
from flexjax.call.arguments import Arguments, Keywords
from flexjax.jax_nn import Options
from flexjax.paged.call import PagedArguments, PagedKeywords
from flexjax.types import AuxOutput, AuxRequest, KernelOptions

# fmt: off
NAMES = {
    "flex_attention", "create_block_mask", "BlockMask", "and_masks", "or_masks", "not_mask", "chain_mods", "AuxRequest",
    "AuxOutput", "Origin", "Weights", "Dropout", "Quantized", "FallbackWarning", "KernelOptions", "autotune", "explain", "dot_product_attention", "masks", "mods", "weights",
    "ScoreMod", "MaskMod", "Layout", "Implementation", "profile", "attention_weights", "nn", "visualize",
    "context_layout", "ContextLayout", "merge_attention_states", "made_for", "paged", "paged_attention", "ContextParallel", "SharedPrefix",
}
FUNCTIONS = [
    "flex_attention", "paged_attention", "dot_product_attention", "create_block_mask", "context_layout", "merge_attention_states", "and_masks", "or_masks", "not_mask",
    "chain_mods", "made_for", "explain", "autotune", "profile", "attention_weights",
]
ALIASES = {"Layout", "Implementation"}

SIGNATURES = {
    "flex_attention": "query, key, value, *, score_mod=None, weights=None, mask_mod=None, block_mask=None, scale=None, sinks=None, "
        "layout='BTNH', kernel_options=None, dropout=None, "
        "query_extra=None, key_extra=None, query_seq_lengths=None, "
        "key_value_seq_lengths=None, origin=None, precision=None, tolerance=None, score_bound=None, "
        "return_aux=None, implementation=None, context=None",
    "paged_attention": "query, cache, table, *, score_mod=None, weights=None, mask_mod=<function causal>, query_seq_lengths=None, cu_q_lens=None, "
        "scale=None, sinks=None, shared=None, origin=None, kernel_options=None, tolerance=None, score_bound=None, return_aux=None, implementation=None",
    "attention_weights": "query, key, *, score_mod=None, weights=None, mask_mod=None, block_mask=None, scale=None, sinks=None, layout='BTNH', "
        "origin=None",
    "merge_attention_states": "outs, lses, axis=0",
    "create_block_mask": "mask_mod, batch, heads, q_len, kv_len, *, block_size=128, exact=None, origin=None, tolerance=None, "
    "score_mod=None, score_bound=None, scale=None",
    "BlockMask.from_kv_blocks": "kv_num_blocks, kv_indices, full_kv_num_blocks=None, full_kv_indices=None, *, "
        "block_size=128, mask_mod=None, q_len=None, kv_len=None",
    "and_masks": "*mask_mods",
    "or_masks": "*mask_mods",
    "not_mask": "mask_mod",
    "chain_mods": "*score_mods",
    "autotune": "query, key, value, *, backward=None, seconds=60.0, return_aux=None, implementation=None, cache=True, "
        "progress=None, **arguments",
    "explain": "query, key, value, *, return_aux=None, implementation=None, device=None, context=None, **arguments",
}
BLOCK_MASK = {
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
    "full_q_num_blocks", "full_q_indices", "to_dense", "sparsity", "shape", "__getitem__", "mask_mod", "block_size",
    "from_kv_blocks", "to_string", "plot", "_repr_html_",
}
# fmt: on


def public() -> dict[str, object]:
    return {n: v for n, v in vars(flexjax).items() if not n.startswith("_")}


def test_names() -> None:
    """Beside submodules, which Python itself adds when they are imported."""
    mine = {
        n
        for n, v in public().items()
        if not isinstance(v, types.ModuleType) or n in ("masks", "mods", "nn", "paged", "visualize", "weights")
    }
    assert mine == NAMES
    assert set(flexjax.__all__) == NAMES
    assert len(flexjax.__all__) == len(NAMES)
    assert dir(flexjax) == sorted(flexjax.__all__)
    assert isinstance(flexjax.__version__, str)


def test_help_lists_the_functions_first() -> None:
    """In the text above PACKAGE CONTENTS, in the order of __all__; then help prints each function's own text."""
    text = pydoc.plain(pydoc.render_doc(flexjax))
    top = text[: text.index("PACKAGE CONTENTS")]
    places = [re.search(rf"(?<![.\w]){name}\b", top[top.index("Functions") :]) for name in flexjax.__all__]
    assert all(places), top
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    assert flexjax.__all__[: len(FUNCTIONS)] == FUNCTIONS
    section = text[text.index("\nFUNCTIONS\n") :]
    assert all(f"    {name}(" in section for name in FUNCTIONS)


def test_the_help_of_flex_attention_answers_what_users_ask() -> None:
    text = inspect.getdoc(flexjax.flex_attention) or ""
    for heading in ("Example, ", "What retraces. ", "What is fast. ", "How calls are sharded. ", "Hidden positions. "):
        assert f"\n{heading}" in text


def test_explain_and_autotune_take_the_keywords_of_flex_attention() -> None:
    """By the types: the names that a type checker allows are those of flex_attention, none more and none less."""
    named = {"query", "key", "value", "return_aux", "implementation"}
    of_meshes = {"context"}  # explain names it itself, and autotune times one device
    want = set(inspect.signature(flexjax.flex_attention).parameters) - named - of_meshes
    assert set(Keywords.__annotations__) == want
    assert {f.name for f in dataclasses.fields(Arguments)} == want | named - {"implementation"}
    for function in (flexjax.explain, flexjax.autotune):
        assert named <= set(inspect.signature(function).parameters)
        assert all(name in (function.__doc__ or "") for name in named)
    paged = {f.name for f in dataclasses.fields(PagedArguments)}
    assert paged == set(PagedKeywords.__annotations__) | {"query", "cache", "table", "return_aux"}
    taken = set(inspect.signature(flexjax.dot_product_attention).parameters)
    assert set(Options.__annotations__) == taken - {"query", "key", "value", "bias", "mask", "return_residual"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found: object = flexjax
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert re.sub(" at 0x[0-9a-f]+", "", str(inspect.Signature(bare))) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", sorted(NAMES - ALIASES))
def test_docstrings(name: str) -> None:
    found = getattr(flexjax, name)
    assert found.__doc__
    assert found.__doc__.strip()
    if inspect.isclass(found):
        methods = [v for n, v in vars(found).items() if inspect.isfunction(v) and not n.startswith("_")]
        assert all(m.__doc__ for m in methods)


def test_every_argument_of_flex_attention_is_documented() -> None:
    text = flexjax.flex_attention.__doc__ or ""
    for name in inspect.signature(flexjax.flex_attention).parameters:
        assert name in text, name
    for name in inspect.signature(flexjax.dot_product_attention).parameters:
        assert name in (flexjax.dot_product_attention.__doc__ or ""), name
    for options in (KernelOptions, AuxRequest):
        for name in inspect.signature(options).parameters:
            assert name in (options.__doc__ or ""), name


def test_block_mask_has_what_the_design_lists() -> None:
    mask = flexjax.create_block_mask(flexjax.masks.causal, None, None, 4, 4)
    assert not {n for n in BLOCK_MASK if not hasattr(mask, n)}


def test_small_types() -> None:
    assert AuxOutput() == (None, None, None, None, None)
    assert AuxOutput._fields == tuple(inspect.signature(AuxRequest).parameters)
    assert KernelOptions(block_q=64) == KernelOptions(block_q=64)
    assert hash(KernelOptions()) == hash(KernelOptions())
    with pytest.raises(AttributeError):
        KernelOptions().block_q = 3  # type: ignore[misc]


def test_options_travel() -> None:
    """Copied, pickled, replaced."""
    import copy
    import pickle

    options = KernelOptions(block_q=64, interpret=True)
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, block_q=32) == KernelOptions(block_q=32, interpret=True)


def test_importing_the_package_imports_little() -> None:
    """No kernel language, no plots, no test tools; and running on a CPU imports none either. Where jax has a plugin for GPUs or TPUs,
    passes/dispatch.py imports the kernel language early, and says why.
    """
    script = """
import importlib.util, sys
plugin = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu"))
import flexjax
import jax.numpy as jnp
x = jnp.ones((1, 4, 1, 4))
for run in range(2):
    found = [n for n in sys.modules if n.split(".")[0] in ("matplotlib", "pytest", "hypothesis", "tqdm", "flax")]
    found += [n for n in sys.modules if n.startswith("jax.experimental.pallas") and not plugin]
    found += [n for n in sys.modules if n.startswith(("flexjax.backends.mosaic", "bench"))]
    assert not found, (run, found)
    flexjax.flex_attention(x, x, x, mask_mod=flexjax.masks.causal, implementation="xla")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
