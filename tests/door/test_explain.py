"""explain: every section, traced and abstract arrays, refusals, and the errors of the call that it explains."""

import functools
import html
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks, mods, paged
from flexjax.backends.target import DescribedDevice, Target
from flexjax.look import cards
from flexjax.look.explain_work import describe_work
from flexjax.paged.call import PagedArguments, prepare_paged
from flexjax.passes.dispatch import Run, backend
from tests.cases.calls import CASES
from tests.marks import some_slow

B, N, M, T, S, D = 2, 4, 2, 300, 300, 32


def qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.ones((B, T, N, D)), jnp.ones((B, S, M, D)), jnp.ones((B, S, M, D))


def test_sections() -> None:
    table = jnp.zeros((N, 2 * T))
    text = flexjax.explain(
        *qkv(), score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + T], mask_mod=masks.causal, sinks=jnp.zeros(N),
        dropout=flexjax.Dropout(0.1, jax.random.key(0)), query_extra=jnp.ones((B, T, N, 8)),
        key_extra=jnp.ones((B, S, 1, 8)),
    )  # fmt: skip
    head, score, mask, blocks, choice, work = text.split("\n\n")
    assert head == (
        "attention  B=2 N=4 M=2 T=300 S=300 D=32 E=32 float32 BTNH  scale=0.176777  extra features R=8  sinks  dropout"
    )
    assert score.splitlines()[:3] == [
        "score_mod: captures table float32[4,600]",
        "  x0 = load table[h, (q - kv) + 300]  [h,delta]  diagonal slice",
        "  -> s + x0  [b,h,q,kv,score]",
    ]
    assert re.search(r"derivative: \d+ steps", score)
    assert mask.startswith("mask_mod: captures nothing\n")
    assert blocks.splitlines()[0] == "blocks: █ full, ░ partial"
    assert blocks.splitlines()[-3:] == ["│█░ │", "│██░│", "└───┘"]
    assert choice.splitlines()[0] == "runs on: xla"
    assert work.splitlines()[0] == "work:"


@pytest.mark.parametrize("scale", [jnp.float32(0.3), jax.ShapeDtypeStruct((), jnp.float32)])
def test_a_captured_scale_is_not_shown_as_one(scale: object) -> None:
    assert flexjax.explain(*qkv(), scale=scale).splitlines()[0].endswith("scale=captured, multiplies the score")
    assert flexjax.explain(*qkv(), scale=0.25).splitlines()[0].endswith("scale=0.25")


def test_tiles_are_a_text_and_a_step_is_said_once() -> None:
    one = jnp.zeros((1, 64, 1, 8))
    assert "  tiles: forward 64 x 64\n" in flexjax.explain(one, one, one, implementation="xla", device="cpu")
    assert "  tiles: forward 128 x 128, of 4 heads\n" in flexjax.explain(*qkv(), mask_mod=masks.causal, device="cpu")
    shape = jax.ShapeDtypeStruct((2, 4096, 16, 300), jnp.bfloat16)
    ids = jnp.arange(4096) // 512
    text = flexjax.explain(shape, shape, shape, mask_mod=masks.document(ids), device="h100", implementation="xla")
    assert text.count("  block mask: blocks of 128 x 128 queries x keys become blocks of ") == 1


def test_refusals_are_listed() -> None:
    text = flexjax.explain(*qkv(), device="cpu")
    assert "  not mosaic_gpu: mosaic_gpu runs on an NVIDIA GPU; this call is for the platform cpu." in text
    assert "  not mosaic_tpu: mosaic_tpu runs on a TPU; this call is for the platform cpu." in text
    assert "not mosaic" not in flexjax.explain(*qkv(), implementation="xla")
    assert "runs on: reference" in flexjax.explain(*qkv(), implementation="reference")


@pytest.mark.parametrize(("q_len", "kv_len", "block"), [(300, 300, 128), (256, 130, (64, 32)), (5, 7, 128)])
def test_work_counts_positions_that_exist(q_len: int, kv_len: int, block: int | tuple[int, int]) -> None:
    """FLOPs of the visited blocks, cut off at the end of the matrix: 4 * B * N * positions * D."""
    mask = flexjax.create_block_mask(masks.causal, None, None, q_len, kv_len, block_size=block)
    q, k = jnp.ones((B, q_len, N, D)), jnp.ones((B, kv_len, M, D))
    text = flexjax.explain(q, k, k, block_mask=mask)
    tall, wide = mask.block_size
    visited = np.kron(np.asarray(mask.to_dense())[0, 0], np.ones((tall, wide)))[:q_len, :kv_len].sum()
    forward = 4 * B * N * visited * D / 1e9
    assert f"  forward {forward:.4g} GFLOP, backward {2.5 * forward:.4g} GFLOP" in text
    count = int(np.asarray(mask.to_dense()).sum())
    assert f"  blocks visited {count} of {mask.to_dense().size} (" in text
    size = 4 * B * D * 2 * (N * q_len + M * kv_len) / 1e6
    assert f"  query, key, value and out: {size:.4g} MB" in text


def test_no_mask_and_low_precision() -> None:
    text = flexjax.explain(*(x.astype(jnp.bfloat16) for x in qkv()))
    assert "score_mod: none" in text
    assert "mask_mod: none" in text
    assert "blocks: no mask, every tile is visited" in text
    assert f"  forward {4 * B * N * T * S * D / 1e9:.4g} GFLOP" in text
    assert f"{2 * B * D * 2 * (N * T + M * S) / 1e6:.4g} MB" in text


def test_many_heads_show_the_first() -> None:
    text = flexjax.explain(*qkv(), mask_mod=lambda b, h, q, kv: q + h >= kv)
    assert (
        f"blocks (the first of 4): █ full, ░ partial\nBlockMask(shape=(1, {N}, {T}, {S}), block_size=(128, 128)" in text
    )
    assert text.count("BlockMask(") == 1


def test_traced_block_masks() -> None:
    texts = []

    @jax.jit
    def step(ids: jax.Array) -> jax.Array:
        texts.append(flexjax.explain(*qkv(), mask_mod=masks.document(ids)))
        return ids

    step(jnp.zeros((B, T), jnp.int32))
    assert (
        "blocks: BlockMask(shape=(2, 1, 300, 300), block_size=(128, 128), traced), known when the program runs"
        in texts[0]
    )
    assert "work: depends on traced block lists" in texts[0]


def test_abstract_arrays_give_the_text_of_real_ones() -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]
    sinks = jnp.zeros(N)
    abstract = jax.ShapeDtypeStruct(sinks.shape, sinks.dtype)
    want = flexjax.explain(*qkv(), mask_mod=masks.causal, sinks=sinks)
    assert flexjax.explain(*shapes, mask_mod=masks.causal, sinks=abstract) == want
    assert flexjax.explain(*shapes, mask_mod=masks.causal, sinks=sinks) == want


BY_BATCH = masks.padding(jnp.array([100, 200]))
BESIDE_SHAPES = {
    "padding": lambda: {"mask_mod": BY_BATCH},
    "documents": lambda: {"mask_mod": masks.document(jnp.zeros((2, 300), jnp.int32))},
    "windows of heads": lambda: {"mask_mod": masks.sliding_window(jnp.array([1, 2, 3, 200]))},
    "a block mask": lambda: {"block_mask": flexjax.create_block_mask(BY_BATCH, 2, None, 300, 300)},
    "a part of one": lambda: {"block_mask": flexjax.create_block_mask(BY_BATCH, 2, None, 300, 300)[::-1]},
    "an origin": lambda: {"mask_mod": masks.causal, "origin": flexjax.Origin(query=np.array([3, 5]))},
}


@pytest.mark.parametrize("name", BESIDE_SHAPES)
def test_masks_of_batch_and_heads_are_known_beside_shapes(name: str) -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]
    text = flexjax.explain(*shapes, **BESIDE_SHAPES[name]())
    assert text == flexjax.explain(*qkv(), **BESIDE_SHAPES[name]())
    assert "traced" not in text


def test_nothing_runs() -> None:
    """A problem far too large to run, or to hold, is explained at once."""
    shape = jax.ShapeDtypeStruct((64, 1 << 20, 128, 128), jnp.bfloat16)
    text = flexjax.explain(shape, shape, shape)
    assert "T=1048576 S=1048576" in text


def test_errors() -> None:
    with pytest.raises(TypeError) as caught:
        flexjax.explain(*qkv(), softcap=3.0, window=2)
    assert str(caught.value) == (
        "explain() got unexpected arguments softcap, window; it takes those of flex_attention. In place of `softcap` write "
        "score_mod=flexjax.mods.softcap(cap). In place of `window` write mask_mod=flexjax.masks.sliding_window(window)."
    )
    with pytest.raises(ValueError, match=re.escape("`sinks` is float32[3]; expected float32[4]")) as caught:
        flexjax.explain(*qkv(), sinks=jnp.zeros(3))
    assert caught.value.__notes__[-1] == (
        "in explain(query=float32[2, 300, 4, 32], key=float32[2, 300, 2, 32], value=float32[2, 300, 2, 32], "
        "sinks=float32[3])"
    )
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    with pytest.raises(ValueError, match=re.escape("`query` is of shape (2, 3); expected 4 dims, [B, T, N, D].")):
        flexjax.explain(shape, shape, shape)


def test_a_mod_without_a_derivative_is_explained() -> None:
    looped = lambda s, b, h, q, kv: jax.lax.while_loop(lambda x: x > 1, lambda x: x * 0.5, s)
    text = flexjax.explain(*qkv(), score_mod=looped)
    assert "derivative: " in text
    assert not re.search(r"derivative: \d+ steps", text)


def test_entries_are_drawn_where_tokens_are_few() -> None:
    x = jax.ShapeDtypeStruct((1, 5, 1, 8), np.float32)
    text = flexjax.explain(x, x, x, mask_mod=masks.sliding_window(2))
    assert "entries: █ visible\n┌─────┐\n│█    │\n│██   │\n│ ██  │\n│  ██ │\n│   ██│\n└─────┘" in text
    long = jax.ShapeDtypeStruct((1, 129, 1, 8), np.float32)
    assert "entries" not in flexjax.explain(long, x, x, mask_mod=masks.causal)


def shapes_of_cache(P: int, page: int, dtype: str, heads: int = 8, dim: int = 128) -> Any:
    return jax.eval_shape(lambda: paged.empty(P, page, heads, dim, dtype=dtype))


def table_of(lengths: list[int], n: int, page: int) -> Any:
    pages = np.arange(len(lengths) * n, dtype=np.int32).reshape(-1, n)
    arrays: Any = pages, np.asarray(lengths, np.int32), np.zeros(pages.size, np.int32)
    return paged.PageTable(*arrays, page)


def prepare_paged_plan(query: Any, cache: Any, table: Any) -> Any:
    """The call of `paged_attention` on arrays of these shapes."""
    found: list[Any] = []

    def write(*arrays: Any) -> None:
        found.append(prepare_paged(PagedArguments(*arrays))[0].call)

    jax.eval_shape(write, query, cache, table)
    return found[0]


def test_a_paged_call() -> None:
    """Of shapes with a table that is known, of shapes alone, and in two passes."""
    query, cache = jax.ShapeDtypeStruct((2, 1, 32, 128), jnp.float32), shapes_of_cache(16, 64, "int8")
    text = flexjax.explain(query, cache, table_of([512, 100], 8, 64), implementation="xla")
    head, score, mask, choice, work = text.split("\n\n")
    assert head.startswith("attention  B=2 N=32 M=8 T=1 S=512 D=128 E=128 float32 BTNH")
    assert head.endswith("key_value_seq_lengths  pages of 64 tokens of int8")
    assert score == "score_mod: none"
    assert mask.startswith("mask_mod: captures nothing\n")
    assert choice.startswith("runs on: xla\n")
    assert choice.endswith("backward pass on: xla")
    assert work.splitlines() == [
        "work:",
        "  2 work items (tile rows), one after the other, 512 keys a step; keys are not split",
        f"  reads {612 * 8 * 256 / 1e6:.4g} MB of keys and values",
    ]
    table = jax.eval_shape(lambda: paged.table(2, 8, 16, 64))
    shared = flexjax.SharedPrefix(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2,), (1, 2), (1,))))  # type: ignore[arg-type]
    text = flexjax.explain(query, cache, table, shared=shared, implementation="xla")
    assert re.findall(r"pass \d .*", text) == ["pass 1 of 2: shared prefixes", "pass 2 of 2: own tokens"]
    many = jax.ShapeDtypeStruct((2, 40, 32, 128), jnp.bfloat16)
    plan = prepare_paged_plan(many, cache, table)
    gathered = Run(backend("mosaic_gpu"), plan.plan, Target("cuda", "NVIDIA H200", "9.0", 132), ())
    assert describe_work(plan, gathered).splitlines()[1] == (
        "  the keys and values of all pages of the table are gathered for the forward kernel, 4.194 MB"
    )
    with pytest.raises(TypeError) as caught:
        flexjax.explain(query, cache, table, layout="BTNH")  # type: ignore[call-arg]
    assert str(caught.value) == "explain() got unexpected arguments layout; it takes those of paged_attention."
    with pytest.raises(ValueError, match="expected a last dim of 128") as caught:
        flexjax.explain(jax.ShapeDtypeStruct((2, 1, 32, 64), jnp.float32), cache, table)
    assert caught.value.__notes__[0].startswith(
        "in explain(query=float32[2, 1, 32, 64], cache=Quantized(int8[16, 64, 8, 128], float32[16, 8]),"
    )


def of_two_key_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Shows keys to the query heads of two key heads: to each of the four query heads another quarter of 4096 keys."""
    return (h < 8) & (k // 1024 == h % 4)


@pytest.mark.parametrize(
    ("lengths", "mask_mod", "items", "splits", "ctas", "ms"),
    [
        ([32768] * 16, masks.causal, 4096, 32, 132, "0.498"),
        ([131072], masks.causal, 1024, 128, 132, "0.129"),
        ([32768], masks.sliding_window(1024), 8, 1, 8, "0.0214"),
        ([4096], of_two_key_heads, 8, 4, 8, "0.0214"),
    ],
)
def test_work_items_of_the_decode_kernel(
    lengths: list[int], mask_mod: Any, items: int, splits: int, ctas: int, ms: str
) -> None:
    """By its chunks of 1024 keys, only those with keys that a query sees; measured are 0.502 and 0.135 ms."""
    R, n = len(lengths), max(lengths) // 512
    found: list[str] = []

    def write(query: jax.Array, cache: paged.PagedCache) -> None:
        with jax.ensure_compile_time_eval():
            (part,) = prepare_paged(PagedArguments(query, cache, table_of(lengths, n, 512), mask_mod=mask_mod))
        run = Run(backend("mosaic_gpu"), part.call.plan, Target("cuda", "NVIDIA H200", "9.0", 132), ())
        found.append(describe_work(part.call, run))

    jax.eval_shape(write, jax.ShapeDtypeStruct((R, 1, 32, 128), jnp.bfloat16), shapes_of_cache(R * n, 512, "bfloat16"))
    _, first, second = found[0].splitlines()
    of_entry = f"at most {splits} split{'s' * (splits > 1)} of an entry"
    assert first == f"  {items} work items of 1024 keys of a key head, {of_entry}, on {ctas} CTAs"
    read, predicted = second.split("; ")
    assert predicted.startswith(f"predicted for an H200: {ms} ms")
    if mask_mod is of_two_key_heads:
        assert read == f"  reads {2 * 4096 * 256 * 2 / 1e6:.4g} MB of keys and values"


def test_autotune_leaves_pages_alone() -> None:
    message = (
        "autotune has no tiles to choose for paged_attention: its tiles do not depend on the batch, so that the bits of a request do not "
        "either. Time paged_attention with kernel_options inside the jitted call instead."
    )
    cache, table = paged.empty(1, 8, 1, 8, dtype="float32"), table_of([1], 1, 8)
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        flexjax.autotune(jnp.ones((1, 1, 1, 8)), cache, table)  # type: ignore[arg-type]


@pytest.mark.skipif(tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11), reason="the GPU kernels need jax 0.11")
@pytest.mark.parametrize(
    ("kind", "capability", "instruction", "said"),
    [
        ("NVIDIA H200", "9.0", None, "tiles: forward 128 x 128, backward fused 64 x 128"),
        ("NVIDIA H200", "9.0", "mma", "tiles: mma.sync with tma for compute capability 9.0: forward 128 x 64"),
        ("NVIDIA A100", "8.0", None, "tiles: mma.sync with cp.async for compute capability 8.0: forward 128 x 64"),
        ("NVIDIA B200", "10.0", "tcgen05", "tiles: tcgen05 for compute capability 10.0: forward 256 x 128"),
    ],
)
def test_the_kernels_of_a_card_are_named(kind: str, capability: str, instruction: Any, said: str) -> None:
    array = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    device = DescribedDevice(kind, None, "gpu", compute_capability=capability)
    options = flexjax.KernelOptions(instruction=instruction)
    mask = None if instruction is None and capability == "9.0" else masks.causal
    text = flexjax.explain(array, array, array, mask_mod=mask, device=device, kernel_options=options)
    assert f"\nruns on: mosaic_gpu\n  {said}" in text


@pytest.mark.skipif(tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11), reason="the GPU kernels need jax 0.11")
@pytest.mark.parametrize("name", cards.GPUS)
def test_the_name_of_a_gpu_answers_as_the_card_does(name: str) -> None:
    array = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    kind, cores = cards.GPUS[name]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    text = flexjax.explain(array, array, array, mask_mod=masks.causal, device=name)
    assert text == flexjax.explain(array, array, array, mask_mod=masks.causal, device=device)
    assert "\nruns on: mosaic_gpu\n" in text
    assert text == flexjax.explain(array, array, array, mask_mod=masks.causal, device=name.upper())


@pytest.mark.parametrize("name", cards.TPUS)
def test_the_name_of_a_chip_answers(name: str) -> None:
    array = jax.ShapeDtypeStruct((2, 4096, 8, 128), jnp.bfloat16)
    text = flexjax.explain(array, array, array, mask_mod=masks.causal, device=name)
    assert "\nruns on: mosaic_tpu\n" in text
    assert "backward pass on: mosaic_tpu" in text


def test_a_name_of_no_device_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="device") as caught:
        flexjax.explain(*qkv(), device="h1000")
    assert str(caught.value) == (
        "`device` is 'h1000'; expected a jax.Device, a platform, the name of a card or chip, or None. Platforms are 'cpu', 'gpu', "
        "'cuda', 'rocm', 'tpu'; cards 'a100', 'a30', 'a10', 'a40', 'l4', 'l40s', 'rtx4090', 'rtx5090', 'h100', 'h200', 'gh200', "
        "'b200', 'b300'; chips 'v4', 'v5e', 'v5p', 'v6e'."
    )


def test_the_text_is_shown_as_it_is_printed() -> None:
    text = flexjax.explain(*qkv(), mask_mod=masks.causal)
    assert isinstance(text, str)
    assert repr(text) == str(text) == f"{text}"
    assert text._repr_html_() == f"<pre>{html.escape(text)}</pre>"
    shape = jax.ShapeDtypeStruct((1, 1, 8, 128), jnp.float32)
    assert repr(flexjax.explain(shape, shapes_of_cache(1, 8, "float32"), table_of([1], 1, 8))).startswith(
        "attention  B=1"
    )


GLOBAL = jnp.arange(64.0)


class Biased:
    def __init__(self) -> None:
        self.rows = jnp.zeros((4, 64))

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.rows[h, q_idx]

    def method(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.rows[h, kv_idx]


def of_a_factory() -> Any:
    captured, layers = {"bias": jnp.ones(64), "other": jnp.zeros(64)}, [jnp.zeros((4, 64)), jnp.ones((4, 64))]
    return lambda s, b, h, i, j: s + captured["bias"][i] + layers[1][h, j]


NAMED = {
    "closure": (of_a_factory(), ["load bias[i]", "load layers[1][h, j]", "-> (s + x0) + x1"]),
    "global": (lambda s, b, h, q, k: s * GLOBAL[k], ["load GLOBAL[k]", "-> s * x0"]),
    "default": (lambda s, b, h, q, k, decay=GLOBAL: s * decay[q], ["load decay[q]"]),
    "numpy": ((lambda row: lambda s, b, h, q, k: s + row[q])(np.ones(64, np.float32)), ["load row[q]"]),
    "object": (Biased(), ["load rows[h, q_idx]", "-> score + x0"]),
    "method": (Biased().method, ["load rows[h, kv_idx]"]),
    "partial": (functools.partial(lambda s, b, h, q, k, *, w: s * w[h], w=jnp.ones(4)), ["load w[h]"]),
    "factory": (
        flexjax.chain_mods(mods.alibi(4), of_a_factory()),
        ["captures per_head", "load per_head[h]", "load bias["],
    ),
    "scalar": (
        (lambda gain: lambda s, b, h, q, k: s * gain)(jnp.float32(3)),
        ["captures gain float32[]", "-> s * gain"],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_arrays_and_arguments_have_the_users_names(name: str) -> None:
    mod, wanted = NAMED[name]
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    score = flexjax.explain(x, x, x, score_mod=mod).split("\n\n")[1]
    assert [text for text in wanted if text not in score] == []
    assert not re.search(r"%\d|\bc\d", score)


def test_an_index_past_the_end_is_noted() -> None:
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    table = jnp.zeros((4, 54))
    with pytest.warns(UserWarning, match="54 elements"):
        text = flexjax.explain(x, x, x, score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx])
    assert "  x0 = load table[h, q_idx]  [h,q]  row gather  axis 54, index reaches 63: clamped\n" in text
    away = lambda score, b, h, q_idx, kv_idx: score + table[h, jnp.clip(q_idx - kv_idx, 0, 53)]
    assert "load table[h, q_idx - kv_idx]  [h,delta]  diagonal gather  axis 54, index from -63 to 63: clamped\n" in (
        flexjax.explain(x, x, x, score_mod=away)
    )


@pytest.mark.parametrize("every", some_slow((1, 8), (8,)))
def test_an_ordinary_call_takes_forty_lines(every: int, capsys: pytest.CaptureFixture) -> None:
    """Each so many-th row of the table of cases, and calls with many blocks, tokens and arrays; prints the largest."""
    longest = (0, "")
    chosen = [case for case in CASES.values() if not case.slow][::every]
    for case in chosen:
        B, N, M, T, S, D, E = case.shape
        lengths = [(N, T, D), (M, S, D), (M, S, E)]
        shapes = [(B, l, n, d) if case.layout == "BTNH" else (B, n, l, d) for n, l, d in lengths]
        arrays = [jax.ShapeDtypeStruct(shape, case.dtypes[0]) for shape in shapes]
        score_mod, mask_mod = case.mods({name: jnp.asarray(x) for name, x in case.captured().items()})
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of short arrays
            text = flexjax.explain(*arrays, score_mod=score_mod, mask_mod=mask_mod, layout=case.layout)
        longest = max(longest, (len(text.splitlines()), case.name))
    x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.bfloat16)
    text = flexjax.explain(x, x, x, score_mod=mods.alibi(8), mask_mod=masks.causal)
    longest = max(longest, (len(text.splitlines()), "8192 tokens"))
    with capsys.disabled():
        print(f"\nthe longest text of explain: {longest[0]} lines, {longest[1]}")
    assert longest[0] <= 40


def test_a_picture_of_blocks_has_at_most_24_rows() -> None:
    x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.bfloat16)
    text = flexjax.explain(x, x, x, mask_mod=masks.causal)
    assert 16 <= text.count("│\n") <= 24
