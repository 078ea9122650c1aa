"""`python -m bench --suite maxtext`: a training step of MaxText with its own attentions and with flexjax.nn.maxtext.install.

A Llama of MaxText's config and model classes, sixteen layers of width 2048 (16 heads of 128 on 8 key heads, an MLP of 8192, 32000
words: 1.1 billion weights), bfloat16 products of float32 weights. A step is the loss of random tokens, its gradients and new weights by
gradient descent in the memory of the old ones. First two rows of 8192 tokens, then one of 16384. The remat_policy is custom with
`context: device`, with which flexjax runs forward once a layer. MaxText's own attentions run twice, cudnn_flash_jax because MaxText
names its results outside of its derivative rule; beside them is a row of flexjax with the remat_policy full.

Segment ids and positions are arguments of the step, so rows of one document and packed rows run the same program. MaxText's
cudnn_flash_jax does not read segment ids; on packed rows it trains another model, in which tokens see earlier documents. Its flash reads
them on a GPU as a dense mask of tokamax's Triton kernel. Its cudnn_flash_te needs TransformerEngine and is left out.

With the wheels of MaxText 0.2.5 and of what it imports in a folder W, beside jax, flax, optax and orbax (tokamax 0.0.12, because later
ones import xprof):

    python3 -m pip install -q --no-index --no-deps --target SITE W/*.whl
    XLA_PYTHON_CLIENT_MEM_FRACTION=.92 PYTHONPATH=SITE:. python3 -m bench --suite maxtext --minutes 5
"""

import contextlib
import importlib
import logging
import os
import statistics
import tempfile
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
import flexjax.nn
from bench.interleaved import milliseconds
from bench.suites import document_ids
from flexjax import masks

Array = jax.Array
Numbers = dict[str, float]
"""The loss, and by name of the weights the norm of their gradient."""

ALLOWED_ERROR = 2e-2
"""The largest relative difference of the loss and of norms of gradients between attentions that compute the same, in bfloat16."""
RATE = 1e-3


class Size(typing.NamedTuple):
    """Sizes of the model and of its batch: `rows` rows of `tokens` tokens, in packed rows of `documents` documents each."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    kv_heads: int = 8
    mlp: int = 8192
    words: int = 32000
    rows: int = 2
    tokens: int = 8192
    documents: int = 12


SIZES = (Size(), Size(rows=1, tokens=16384))
"""Of one model, so that its weights are made once."""
SMALL = (Size(layers=2, width=64, heads=4, kv_heads=2, mlp=96, words=128, rows=2, tokens=96, documents=3),)
"""A size that a CPU runs in seconds."""


class Variant(typing.NamedTuple):
    """attention   of MaxText's config
    own            the implementation of flexjax; None: MaxText's own attention
    reads_ids      whether it keeps to the documents of a packed row
    remat          MaxText's remat_policy
    """

    attention: str
    own: typing.Literal["default", "xla"] | None = None
    reads_ids: bool = True
    remat: typing.Literal["custom", "full"] = "custom"


OWN, TWICE, OWN_XLA = "flexjax", "flexjax, forward twice", "flexjax, xla"
CUDNN, DENSE, FLASH = "cudnn_flash_jax", "dot_product", "flash"
VARIANTS = {
    OWN: Variant(DENSE, "default"),
    CUDNN: Variant(CUDNN, reads_ids=False),
    DENSE: Variant(DENSE),
    TWICE: Variant(DENSE, "default", remat="full"),
    FLASH: Variant(FLASH),
    OWN_XLA: Variant(DENSE, "xla"),
}
"""What is run, in this order; the last one only to compare with, where dot_product fails, and it is not timed."""
ON_GPU = (CUDNN, FLASH)
ROUNDS, SECONDS = 5, 0.3
"""Rounds of measurements, each of every step, after one that does not count; the least duration of a measurement."""
RESERVE = 20
"""Seconds before the end from which on no program is compiled."""
ONE, PACKED = "one document", "packed"


class Batch(typing.NamedTuple):
    """int32 [rows, T] each: the tokens; their positions in their documents; the numbers of their documents, from 1."""

    tokens: Array
    positions: Array
    ids: Array


# ------------------------------------------------------------------- the model


def batches(size: Size) -> dict[str, Batch]:
    """The same random tokens as rows of one document (ONE) and as packed rows (PACKED)."""
    tokens = jax.random.randint(jax.random.key(1), (size.rows, size.tokens), 0, size.words)
    found = {}
    for name, documents in ((ONE, 1), (PACKED, size.documents)):
        ids = np.stack([document_ids(size.tokens, documents, seed) for seed in range(size.rows)])
        first = np.stack([np.searchsorted(row, row) for row in ids])  # of the document of each token
        positions = np.arange(size.tokens) - first
        found[name] = Batch(tokens, jnp.asarray(positions, jnp.int32), jnp.asarray(ids + 1))
    return found


@contextlib.contextmanager
def maxtext_model(size: Size, variant: Variant) -> Iterator[typing.Any]:
    """Makes MaxText's Llama of this size on the first device, as a Linen module; within the context its mesh is set."""
    options = dict(
        base_emb_dim=size.width, base_num_query_heads=size.heads, base_num_kv_heads=size.kv_heads, base_mlp_dim=size.mlp,
        base_num_decoder_layers=size.layers, head_dim=size.width // size.heads, vocab_size=size.words,
        max_target_length=size.tokens, per_device_batch_size=size.rows / jax.device_count(),
        dtype="bfloat16", dataset_type="synthetic", hardware="gpu" if jax.default_backend() == "gpu" else "cpu",
        skip_jax_distributed_system=True, enable_checkpointing=False, run_name="bench",
        jax_cache_dir="", attention=variant.attention, remat_policy=variant.remat, context="device",
    )  # fmt: skip
    # by name, because the environment of the type checker has neither
    base, pyconfig, models, utils = (
        importlib.import_module(name)
        for name in ("maxtext", "maxtext.configs.pyconfig", "maxtext.models.models", "maxtext.utils.maxtext_utils")
    )
    linen = importlib.import_module("flax.linen")
    importlib.import_module(
        "absl.flags"
    ).FLAGS.mark_as_parsed()  # tokamax reads flags of a command line that is not its own
    path = os.path.join(base.__path__[0], "configs", "base.yml")
    with tempfile.TemporaryDirectory() as folder:
        config = pyconfig.initialize(["", path, f"base_output_directory={folder}", *(f"{k}={v}" for k, v in options.items())])  # fmt: skip
    mesh = jax.sharding.Mesh(utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
    with mesh, linen.logical_axis_rules(config.logical_axis_rules):
        yield models.transformer_as_linen(config, mesh, quant=None, model_mode="train")


def first_weights(size: Size) -> typing.Any:
    """MaxText's initial weights, a tree of float32 arrays, the same in each call."""
    with maxtext_model(size, VARIANTS[DENSE]) as model:
        batch = Batch(*(x[:, :128] for x in batches(size)[ONE]))  # init attends too
        init = lambda *given: model.init({"params": jax.random.key(0)}, *given, enable_dropout=False)
        return jax.jit(init)(*batch)


def make_step(model: typing.Any) -> Callable[[typing.Any, Batch], tuple[typing.Any, dict[str, Array]]]:
    """Makes the training step (weights, batch) -> (new weights, Numbers as arrays), to be jitted."""

    def loss(weights: typing.Any, batch: Batch) -> Array:
        logits = model.apply(weights, *batch, enable_dropout=False).astype(jnp.float32)
        target = jnp.roll(batch.tokens, -1, axis=1)[..., None]
        hit = jnp.take_along_axis(logits, target, -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - hit)

    def step(weights: typing.Any, batch: Batch) -> tuple[typing.Any, dict[str, Array]]:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        norms = {
            jax.tree_util.keystr(path, simple=True, separator="/"): jnp.linalg.norm(leaf.astype(jnp.float32).ravel())
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
        }
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), {"loss": value, **norms}

    return step


# ------------------------------------------------------------------- measurement


class Trained:
    """The weights that all steps share: a step gives its memory away, and takes the new ones."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.first = self.weights = None

    def restart(self) -> None:
        """Puts the initial weights back."""
        self.weights = None  # first, for the memory
        if self.first is None:
            self.first = jax.device_get(first_weights(self.size))
        self.weights = jax.device_put(self.first, jax.devices()[0], may_alias=False)

    def numbers_after(self, compiled: typing.Any, batch: Batch) -> dict[str, Array]:
        """Numbers of one step with the compiled step."""
        self.weights, numbers = compiled(self.weights, batch)
        return numbers


class Outcome(typing.NamedTuple):
    """What is known of the variants, by name; Numbers by packing too. `missing` says why there is nothing."""

    compiled: dict[str, typing.Any]
    numbers: dict[str, dict[str, Numbers]]
    missing: dict[str, str]


def installed(variant: Variant) -> contextlib.AbstractContextManager[typing.Any]:
    """flexjax in the place of MaxText's attention where the variant asks for it."""
    if variant.own is None:
        return contextlib.nullcontext()
    return flexjax.nn.maxtext.install(implementation="xla" if variant.own == "xla" else None)


def compiled_step(size: Size, variant: Variant, weights: typing.Any) -> typing.Any:
    """The compiled step of a variant: (weights, which it gives away, batch) -> (new weights, Numbers as arrays)."""
    with installed(variant), maxtext_model(size, variant) as model:
        return jax.jit(make_step(model), donate_argnums=0).lower(weights, batches(size)[ONE]).compile()


def run_variants(size: Size, trained: Trained, until: float) -> Outcome:
    """Compiles each variant and takes one step from the initial weights with each packing, one variant after the other.

    until   time.time() by which they end: none is begun that would take longer, if it took as long as the longest so far
    """
    found, longest, begin = Outcome({}, {}, {}), 0.0, time.time()
    for name, variant in VARIANTS.items():
        longest, begin = max(longest, time.time() - begin), time.time()
        if name == OWN_XLA and DENSE in found.numbers:
            continue
        if begin + longest > until:
            found.missing[name] = "not reached in the time given"
            continue
        if name in ON_GPU and jax.default_backend() != "gpu":
            found.missing[name] = "needs an NVIDIA GPU"
            continue
        try:
            trained.restart()
            step, numbers = compiled_step(size, variant, trained.weights), {}
            for packing, batch in batches(size).items():
                if packing != ONE:
                    trained.restart()
                numbers[packing] = {k: float(v) for k, v in trained.numbers_after(step, batch).items()}
            found.numbers[name], found.compiled[name] = numbers, step
        except Exception as error:  # the others are still worth measuring, as when memory does not suffice
            found.missing[name] = said(error)
    return found


def said(error: Exception) -> str:
    """The failure as a line for the report."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"failed, {type(error).__name__}: {text[:200]}"


class Errors(typing.NamedTuple):
    """Relative differences from the reference: of the loss, and the largest of a gradient's norm; inf where one is no number."""

    loss: float
    norms: float


def errors_of(numbers: dict[str, dict[str, Numbers]]) -> dict[tuple[str, str], Errors]:
    """By variant and packing, the differences from dot_product, or else from flexjax's xla. The reference and what is another model are
    left out.
    """
    reference = next((name for name in (DENSE, OWN_XLA) if name in numbers), None)
    found = {}
    for name in numbers if reference else ():
        for packing, got in numbers[name].items():
            if name != reference and (packing == ONE or VARIANTS[name].reads_ids):
                want = numbers[reference or name][packing]
                each = {n: abs(got[n] - want[n]) / max(abs(want[n]), 1e-9) for n in want}
                each = {n: error if np.isfinite(error) else float("inf") for n, error in each.items()}
                found[name, packing] = Errors(each.pop("loss"), max(each.values()))
    return found


def peak_bytes(compiled: typing.Any) -> int:
    """The memory of a run as XLA plans it: arguments, results and what is needed between at once."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


def mask_milliseconds(size: Size) -> dict[str, float]:
    """By packing, the time of a program that only makes the block mask of the segment ids, as one layer does."""

    @jax.jit
    def block_mask(ids: Array) -> typing.Any:
        mask_mod = flexjax.and_masks(lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0), masks.causal)
        return flexjax.create_block_mask(mask_mod, size.rows, None, size.tokens, size.tokens)

    given = batches(size)
    return dict(zip(given, milliseconds([(block_mask, (batch.ids,)) for batch in given.values()]), strict=True))


def step_milliseconds(
    size: Size, trained: Trained, compiled: dict[str, typing.Any], until: float
) -> tuple[dict[tuple[str, str], float], list[str]]:
    """By variant and packing, the interleaved median of a step; and lines on what failed. Without dot_product where all together fail.

    until   time.time() after which no round begins but the first two
    """
    given, lines = batches(size), []
    names = [name for name in compiled if name != OWN_XLA]
    for timed in (names, [name for name in names if name != DENSE]):
        taken: dict[tuple[str, str], list[float]] = {(name, packing): [] for name in timed for packing in given}
        try:
            trained.restart()
            for number in range(1 + ROUNDS):
                if number < 2 or time.time() < until:
                    for (name, packing), times in taken.items():
                        count, begin = 0, time.perf_counter()
                        while count == 0 or time.perf_counter() - begin < SECONDS:
                            jax.block_until_ready(trained.numbers_after(compiled[name], given[packing]))
                            count += 1
                        times.append(1e3 * (time.perf_counter() - begin) / count)
            return {case: statistics.median(times[1:]) for case, times in taken.items()}, lines
        except Exception as error:
            lines.append(f"- times of {', '.join(timed)}: {said(error)}")
    return {}, lines


def table(
    size: Size,
    found: Outcome,
    times: dict[tuple[str, str], float],
    errors: dict[tuple[str, str], Errors],
    masks_alone: dict[str, float],
) -> list[str]:
    """The lines of the report of one size.

    found         what ran
    times         milliseconds of a step, by variant and packing
    errors        those of `errors_of`
    masks_alone   those of `mask_milliseconds`
    """
    tokens = size.rows * size.tokens
    lines = [
        f"{size.layers} layers, width {size.width}, {size.heads} heads on {size.kv_heads}, {size.rows} x {size.tokens} tokens; packed: "
        f"{size.documents} documents a row; medians of interleaved wall-clock times\n",
        "| attention | rows | step, ms | tokens/s | tokens/s / flexjax | peak memory, GB | error of the loss | of gradient norms |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for packing in (ONE, PACKED):
        for name, variant in VARIANTS.items():
            if name not in found.compiled:
                continue
            rows = packing if packing == ONE or variant.reads_ids else f"{packing}, another model"
            cells = [name, rows, "-", "-", "-", f"{peak_bytes(found.compiled[name]) / 1e9:.2f}", "-", "-"]
            ms, own = times.get((name, packing)), times.get((OWN, packing))
            if ms is not None:
                cells[2], cells[3] = f"{ms:.1f}", f"{1e3 * tokens / ms:.0f}"
                cells[4] = "-" if own is None else f"{own / ms:.2f}"
            if (name, packing) in errors:
                cells[6:] = [f"{error:.0e}" for error in errors[name, packing]]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | {reason.replace('|', '/')} {'| - ' * 6}|" for name, reason in found.missing.items()]
    for packing, ms in masks_alone.items():
        share = ""
        if (OWN, packing) in times:
            share = f", {100 * ms / times[OWN, packing]:.2f} % of a flexjax step, whose layers share one"
        lines.append(f"- block mask of the ids alone, {packing}: {ms:.3f} ms{share}")
    return lines


def main(small: bool = False, minutes: float = 60) -> int:
    """Prints the tables. Returns 1 if flexjax failed or its numbers are not those of the reference, else 0.

    small     a model that a CPU trains in seconds, to try the suite
    minutes   the suite ends by then, unless one program takes longer to compile than all before it
    """
    until = time.time() + 60 * minutes
    if isinstance(version := maxtext_version(), str):
        print(
            f"{jax.devices()[0].device_kind}, jax {jax.__version__}, flexjax {flexjax.__version__}, MaxText {version}"
        )
    else:
        print(f"The suite maxtext needs MaxText: {said(version)}")
        return 1
    wrong = []
    trained = Trained((SMALL if small else SIZES)[0])
    for size in SMALL if small else SIZES:
        found = run_variants(size, trained, until - RESERVE)
        errors = errors_of(found.numbers)
        times, lost = step_milliseconds(size, trained, found.compiled, until) if found.compiled else ({}, [])
        try:
            alone = mask_milliseconds(size) if found.compiled and time.time() < until else {}
        except Exception as error:
            alone, lost = {}, [*lost, f"- block mask alone: {said(error)}"]
        print("\n".join(["", *table(size, found, times, errors, alone), *lost]), flush=True)
        wrong += [f"{n}, {p}: errors {e}" for (n, p), e in errors.items() if n == OWN and not max(e) <= ALLOWED_ERROR]
        wrong += [f"{n}: {found.missing[n]}" for n in (OWN,) if found.missing.get(n, "").startswith("failed")]
    for text in wrong:
        print(text)
    return int(bool(wrong))


def maxtext_version() -> str | Exception:
    """The version of the installed MaxText, or why it cannot be imported; from then on its log and its warnings are silent, and a call
    of flexjax that does not run on its kernels fails.
    """
    warnings.simplefilter("ignore")  # what MaxText imports is deprecated in places
    warnings.simplefilter("error", flexjax.FallbackWarning)
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            module: types.ModuleType = importlib.import_module("maxtext.models.models")
    except Exception as error:
        return error
    assert module.__name__
    return importlib.import_module("importlib.metadata").version("maxtext")
