"""`python -m bench --suite step`: one training step of a small language model on packed documents, by attention.

Eight layers of width 2048 (16 heads of 128, an MLP of four times the width), 16384 tokens of 12 documents of unequal lengths, bfloat16
products of float32 weights. The layers are a lax.scan of a jax.checkpoint that keeps the results of flexjax, so its forward pass runs
once a layer; in the row "forward twice", and with attentions whose results have no names, it runs again in the backward pass. A step
is the loss, its gradients and the new weights. The numbers of the documents are an argument of the step: block masks and dense masks are
made inside it, once for all layers.

There are no embeddings and no logits: input and target of each token are random vectors.

What differs is attention alone. `none` has no attention, but all other products, so that the rest of a column is what attention costs.
`cuDNN causal` lets tokens see earlier documents, which is another model, but what a user of a fixed causal mask pays.
"""

import functools
import time
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from bench.interleaved import milliseconds
from bench.suites import document_ids
from flexjax import masks

Array = jax.Array
Weights = dict[str, Array]
Attention = Callable[[Array, Array, Array], Array]
"""q, k and v [1, T, N, D] -> out [1, T, N, D]."""

ALLOWED_ERROR = 2e-2
"""The largest relative difference of the loss and of norms of gradients between attentions that compute the same, in bfloat16."""


class Size(typing.NamedTuple):
    """Sizes of the model and of its batch of one row: `tokens` tokens of `documents` documents."""

    layers: int = 8
    width: int = 2048
    heads: int = 16
    tokens: int = 16384
    documents: int = 12


SMALL = Size(layers=2, width=32, heads=2, tokens=96, documents=3)
"""A size that a CPU runs in seconds."""


# ------------------------------------------------------------------- attentions


def no_attention(ids: Array) -> Attention:
    """q * k + v: no attention, but gradients of all three that differ, as those of attention do; of a sum they would be equal, and the
    products for the gradients of three weights one. `ids`, the document of each token, is not read.
    """
    return lambda q, k, v: q * k + v


def by_flexjax(ids: Array, implementation: typing.Literal["xla"] | None = None) -> Attention:
    """flexjax with a block mask made here: causal, and inside documents.

    ids              int32 [T]: the document of each token
    implementation   as for flex_attention
    """
    tokens = ids.shape[0]
    block_mask = flexjax.create_block_mask(
        flexjax.and_masks(masks.causal, masks.document(ids)), None, None, tokens, tokens
    )
    return functools.partial(flexjax.flex_attention, block_mask=block_mask, implementation=implementation)


def cudnn_causal(ids: Array) -> Attention:
    """cuDNN's causal attention, which ignores `ids`, the document of each token."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def dense_mask(ids: Array, implementation: typing.Literal["xla", "cudnn"]) -> Attention:
    """jax.nn.dot_product_attention with the mask of `by_flexjax` (causal, and inside documents) as an array, bool [1, 1, T, T].

    ids              int32 [T]: the document of each token
    implementation   as for jax.nn
    """
    at = jnp.arange(ids.shape[0])
    mask = (ids[:, None] == ids) & (at[:, None] >= at)
    return functools.partial(jax.nn.dot_product_attention, mask=mask[None, None], implementation=implementation)


NONE, OWN, OWN_TWICE, OWN_XLA, CUDNN, CUDNN_DENSE, DENSE = (
    "none",
    "flexjax",
    "flexjax, forward twice",
    "flexjax, xla",
    "cuDNN causal, no documents",
    "cuDNN, dense mask",
    "jax.nn xla, dense mask",
)
ATTENTIONS: dict[str, Callable[[Array], Attention]] = {
    NONE: no_attention,
    OWN: by_flexjax,
    OWN_TWICE: by_flexjax,
    CUDNN: cudnn_causal,
    CUDNN_DENSE: functools.partial(dense_mask, implementation="cudnn"),
    OWN_XLA: functools.partial(by_flexjax, implementation="xla"),
    DENSE: functools.partial(dense_mask, implementation="xla"),
}
"""What is timed, by name: a function from the document of each token (int32 [T]) to an attention. They are timed in this order, so that
the first ones are done when the time ends."""
OTHER_MODELS = (NONE, CUDNN)
"""Those that do not compute attention inside documents."""
REFERENCES = (DENSE, CUDNN_DENSE, OWN_XLA)
"""The first of these that ran is what the others are compared with."""


# ------------------------------------------------------------------- the model


def first_weights(size: Size) -> Weights:
    """Random float32 weights by name, [layers, in, out] each: "query", "key", "value" and "out" from width to width, "up" to four times
    the width and "down" back. Normal numbers over the root of `in`, the same in each call.
    """
    shapes = {n: (size.width, size.width) for n in ("query", "key", "value", "out")}
    shapes |= {"up": (size.width, 4 * size.width), "down": (4 * size.width, size.width)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (size.layers, *shape)) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def normalised(x: Array) -> Array:
    """x over the root of its mean square along the last axis, in bfloat16."""
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)


def make_step(size: Size, name: str) -> Callable[..., tuple[Weights, Weights]]:
    """Makes the training step of the model with one attention: (weights, input, target, ids) -> (new weights, numbers to compare).

    name   of ATTENTIONS, which is called with ids inside the step, so the step also makes the block mask

    The step is a plain function to be jitted. input and target are bfloat16 [1, T, width], ids is int32 [T], the document of each
    token; weights are those of `first_weights`. New weights are those of gradient descent at rate 0.1. The numbers are "loss"
    and, by name of the weights, the norms of the gradients of "query", "key" and "value".
    """

    def loss(weights: Weights, tokens: Array, target: Array, ids: Array) -> Array:
        """The mean squared difference between the normalised output of the layers and the target, a float32 scalar; gradients are taken
        by `weights`.

        tokens, target   bfloat16 [1, T, width]: the input, and what the output is compared with
        ids              int32 [T]: the document of each token, from which the attention is made
        """
        attend = ATTENTIONS[name](ids)
        kept = () if name == OWN_TWICE else ("flexjax_out", "flexjax_lse")

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*kept))
        def layer(x: Array, stored: Weights) -> tuple[Array, None]:
            """(x after one layer, None): attention and the MLP, each on normalised input and added to x; `stored` is this layer's part of
            the weights.
            """
            w = {name: array.astype(jnp.bfloat16) for name, array in stored.items()}
            y = normalised(x)
            heads = (*y.shape[:-1], size.heads, size.width // size.heads)
            out = attend(*((y @ w[name]).reshape(heads) for name in ("query", "key", "value")))
            x = x + out.reshape(x.shape) @ w["out"]
            return x + jax.nn.gelu(normalised(x) @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, tokens, weights)
        return jnp.mean((normalised(x).astype(jnp.float32) - target) ** 2)

    def step(weights: Weights, tokens: Array, target: Array, ids: Array) -> tuple[Weights, Weights]:
        """One step of gradient descent at rate 0.1: (new weights, numbers to compare). The numbers are "loss" and, by "query", "key" and
        "value", the norms of the gradients of these weights.

        weights          those of `first_weights`
        tokens, target   bfloat16 [1, T, width]
        ids              int32 [T]: the document of each token
        """
        value, gradients = jax.value_and_grad(loss)(weights, tokens, target, ids)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        norms = {name: jnp.linalg.norm(gradients[name]) for name in ("query", "key", "value")}
        return new, {"loss": value, **norms}

    return step


def step_arguments(size: Size) -> tuple[Weights, Array, Array, Array]:
    """The arguments of the step for a model of this size, the same in each call: (weights, input, target, ids).

    weights         those of `first_weights`
    input, target   normal numbers, bfloat16 [1, T, width] with T = size.tokens
    ids             int32 [T], the document of each token, ascending from 0; the lengths of documents are drawn, none is empty
    """
    keys = jax.random.split(jax.random.key(1), 2)
    tokens, target = (jax.random.normal(key, (1, size.tokens, size.width), jnp.bfloat16) for key in keys)
    return first_weights(size), tokens, target, jnp.asarray(document_ids(size.tokens, size.documents, seed=0))


# ------------------------------------------------------------------- measurement


def compile_steps(
    size: Size, names: Sequence[str], until: float
) -> tuple[dict[str, typing.Any], dict[str, Weights], dict[str, str]]:
    """Compiles the step with each attention and runs it twice.

    size    of the model
    names   which of ATTENTIONS, in this order
    until   time.time() after which no further attention is begun

    Returns three dicts by name: the compiled steps; the numbers of a step ("loss" and norms of gradients); why the others are missing,
    text.

    One after the other, because XLA times products while it compiles, and because all steps then take the same products. An attention of
    cuDNN is left out where there is no GPU.
    """
    arguments = step_arguments(size)
    compiled, numbers, missing = {}, {}, {}
    for name in names:
        if time.time() > until:
            missing[name] = "not reached in the time given"
            continue
        if "cuDNN" in name and jax.default_backend() != "gpu":
            missing[name] = "needs an NVIDIA GPU"
            continue
        try:
            run = jax.jit(make_step(size, name)).lower(*arguments).compile()
            # two back to back, as they are timed, so that memory that does not suffice is seen here
            results = jax.block_until_ready([run(*arguments)[1] for _ in range(2)])
            compiled[name], numbers[name] = run, jax.device_get(results[0])
        except Exception as error:  # the others are still worth measuring, as when memory does not suffice
            text = (str(error).strip().splitlines() or [""])[0]
            missing[name] = f"failed, {type(error).__name__}: {text[:200]}"
    return compiled, numbers, missing


def largest_errors(numbers: dict[str, Weights]) -> dict[str, float]:
    """The largest relative difference of loss and norms from those of the reference, by name, for each attention of the same model but the
    reference; inf where one is no number. {} if no reference (REFERENCES) ran.

    numbers   the loss and the norms of gradients of each attention, by the names of ATTENTIONS
    """
    reference = next((name for name in REFERENCES if name in numbers), None)
    found = {}
    for name in numbers:
        if reference is not None and name not in (reference, *OTHER_MODELS):
            want, got = numbers[reference], numbers[name]
            error = max(abs(float(got[n]) - float(want[n])) / abs(float(want[n])) for n in want)
            found[name] = error if np.isfinite(error) else float("inf")
    return found


def main(small: bool = False, minutes: float = 60) -> int:
    """Prints the table. Returns 1 if flexjax failed or its numbers are not those of the reference, else 0.

    small     a model that a CPU trains in seconds, to try the suite
    minutes   attentions that are not begun by then are left out
    """
    size = SMALL if small else Size()
    compiled, numbers, missing = compile_steps(size, tuple(ATTENTIONS), time.time() + 60 * minutes)
    arguments = step_arguments(size)
    times = dict(zip(compiled, milliseconds([(run, arguments) for run in compiled.values()]), strict=True))
    errors = largest_errors(numbers)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, flexjax {flexjax.__version__}\n"
        f"{size.layers} layers, width {size.width}, {size.heads} heads, {size.tokens} tokens of {size.documents} documents; medians of "
        "interleaved wall-clock times\n\n"
        "| attention | step, ms | of that attention, ms | step / that of flexjax | largest error |\n|---|---:|---:|---:|---:|"
    )
    for name in ATTENTIONS:
        cells = [name, "-", "-", "-", "-"]
        if name in times:
            cells[1] = f"{times[name]:.1f}"
            cells[2] = f"{times[name] - times[NONE]:.1f}" if NONE in times else "-"
            cells[3] = f"{times[name] / times[OWN]:.2f}" if OWN in times else "-"
            cells[4] = f"{errors[name]:.0e}" if name in errors else "-"
        print(f"| {' | '.join(cells)} |")
    for name, reason in missing.items():
        print(f"- {name}: {reason}")
    own = (OWN, OWN_TWICE, OWN_XLA)
    wrong = [f"{n}: error {errors[n]:.2g}" for n in own if n in errors and not errors[n] <= ALLOWED_ERROR]
    wrong += [f"{n}: {missing[n]}" for n in own if missing.get(n, "").startswith("failed")]
    for text in wrong:
        print(text)
    return int(bool(wrong))
