"""`python -m bench --suite mesh`: attention over all devices of this machine, beside one of them.

Four tables:

    batch and heads   split under jit; efficiency = one device's time for its share / the time on all devices
    sequence          split by ContextParallel; efficiency = one device's time for the whole problem / (devices x the time on all)
    memory            of a longer sequence on all devices by method="ring", over a shorter one on one device; as compiled
    layouts           seconds to make one on the host

Times are of both passes, medians of rounds in which one device and all devices alternate. `collectives` counts those in the
compiled program. `--small` runs everything with short sequences, to try the suite without GPUs.
"""

import re
import time
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flexjax
from bench.interleaved import milliseconds
from bench.suites import document_ids
from flexjax import masks
from flexjax.types import MaskMod, ScoreMod

AXIS = "devices"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

Attend = Callable[..., jax.Array]
Arrays = tuple[jax.Array, ...]


class Compiled(typing.NamedTuple):
    """A compiled step and the arrays that it is called with."""

    step: typing.Any
    arrays: Arrays

    def collectives(self) -> str:
        """The collectives in the compiled program with their number, such as "2 all-gather, 1 all-reduce"; "none" without any."""
        text = self.step.as_text()
        counts = {name: len(re.findall(rf"= [^=]*\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"

    def megabytes(self) -> float:
        """The memory that one device needs for arguments, results and temporaries, in units of 10^6 bytes."""
        used = self.step.memory_analysis()
        return (used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes) / 1e6


def both_passes(attend: Attend, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> typing.Any:
    """The compiled function of the arrays that returns (out, gradients of all arrays but the last).

    attend   from all arrays but the last to out
    arrays   those of the call, or their types; the last is the cotangent of out
    """

    def step(*given: jax.Array) -> typing.Any:
        """(out, gradients of all arrays but the last)."""
        out, pull = jax.vjp(attend, *given[:-1])
        return out, pull(given[-1])

    return jax.jit(step).lower(*arrays).compile()


def draw(batch: int, tokens: int, heads: int, dim: int) -> Arrays:
    """Random query, key, value and cotangent, bfloat16 [batch, tokens, heads, dim], the same in each call."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (batch, tokens, heads, dim), jnp.bfloat16) for key in keys)


def mesh_of_all(kind: AxisType) -> jax.sharding.Mesh:
    """A mesh of all devices of this machine along one axis, AXIS, of the type `kind`."""
    return jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(kind,))


# ------------------------------------------------------------------- batch and heads


def batch_and_heads(tokens: int) -> None:
    """Measures both passes of causal attention and prints the table "batch and heads": splits of the arrays alone, for which a user
    writes nothing in the call. Batch and heads are split in turn, each over automatic and over explicit axes.

    tokens   number of queries and of keys
    """
    count = len(jax.devices())
    print(
        "| split | axes | one device on its share, ms | all, ms | efficiency | collectives |\n|---|---|---:|---:|---:|---|"
    )
    for name, shape, spec in (
        ("batch, causal d128", (2 * count, tokens, 16, 128), (AXIS,)),
        ("heads, causal d128", (2, tokens, 8 * count, 128), (None, None, AXIS)),
    ):
        arrays = draw(*shape)
        attend = lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=masks.causal)
        axis = 0 if spec[0] else 2
        share = tuple(jax.lax.slice_in_dim(x, 0, x.shape[axis] // count, axis=axis) for x in arrays)
        one = Compiled(both_passes(attend, share), share)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = mesh_of_all(kind)
            spread = tuple(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x in arrays)
            every = Compiled(both_passes(attend, spread), spread)
            alone, together = milliseconds((one, every))
            row = f"{alone:.2f} | {together:.2f} | {alone / together:.2f} | {every.collectives()}"
            print(f"| {name} | {kind.name} | {row} |", flush=True)


# ------------------------------------------------------------------- sequence


def masks_of_sequence(tokens: int) -> dict[str, MaskMod]:
    """The mask mods of the table "sequence" by their name in the table, for sequences of `tokens` tokens: causal; causal with a window of
    a 32nd of the tokens; causal inside 22 documents, whose lengths are drawn with a fixed seed.
    """
    window = max(1, tokens // 32)
    ids = document_ids(tokens, 22, seed=0)
    return {
        "causal": masks.causal,
        f"window {window}": flexjax.and_masks(masks.causal, masks.sliding_window(window)),
        "22 documents": flexjax.and_masks(masks.causal, masks.document(ids)),
    }


def learned_bias(table: jax.Array, tokens: int) -> ScoreMod:
    """The score mod that adds table[h, q - k + tokens] to the score; the table is [heads, 2 * tokens]."""
    return lambda score, b, h, q, k: score + table[h, q - k + tokens]


def on_one(mask_mod: MaskMod, arrays: Arrays, table: jax.Array | None) -> Compiled:
    """Both passes of the whole problem on the first device.

    arrays   query, key, value and the cotangent of out, [1, T, heads, D]
    table    of `learned_bias`; None: no score mod
    """
    tokens = arrays[0].shape[1]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        """out [1, T, heads, D]; `bias` is empty or has the table of `learned_bias`, so that the table gets a gradient."""
        return flexjax.flex_attention(
            q, k, v, mask_mod=mask_mod, score_mod=learned_bias(bias[0], tokens) if bias else None
        )

    given = (*arrays[:3], *([table] if table is not None else []), arrays[3])
    return Compiled(both_passes(attend, given), given)


def on_all(
    mask_mod: MaskMod, arrays: Arrays, table: jax.Array | None, layout: flexjax.ContextLayout, method: str
) -> Compiled:
    """Both passes with the sequence split over all devices; call it with the mesh set.

    arrays   query, key, value and the cotangent of out, [1, T, heads, D]: whole arrays, which are permuted by `layout` here
    table    of `learned_bias`; None: no score mod
    method   that of ContextParallel
    """
    tokens, mesh = arrays[0].shape[1], jax.sharding.get_mesh()
    context = flexjax.ContextParallel(AXIS, layout, method=typing.cast(typing.Any, method))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        """out, permuted by the layout; `bias` is empty or has the table of `learned_bias`, so that the table gets a gradient."""
        score_mod = learned_bias(bias[0], tokens) if bias else None
        return flexjax.flex_attention(q, k, v, mask_mod=mask_mod, score_mod=score_mod, context=context)

    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    permuted = [put(layout.shard(x, axis=1), None, AXIS) for x in arrays]
    given = (*permuted[:3], *([put(table)] if table is not None else []), permuted[3])
    return Compiled(both_passes(attend, given), given)


def error(one: Compiled, every: Compiled, layout: flexjax.ContextLayout) -> float:
    """The largest difference of a result on all devices from that on one, relative to the largest value of that result, over out and all
    gradients. Runs both programs.

    one, every   the compiled step on one device, and on all
    layout       by which results over the sequence, those of rank 4, are permuted on all devices
    """
    worst = 0.0
    for a, b in zip(*(jax.tree.leaves(x.step(*x.arrays)) for x in (one, every)), strict=True):
        want, got = np.asarray(a, np.float32), np.asarray(b)
        got = np.asarray(layout.unshard(got, axis=1) if got.ndim == 4 else got, np.float32)
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


def sequence(tokens: int, heads: int = 8, dim: int = 128) -> None:
    """Measures both passes of one batch entry of `tokens` tokens, with `heads` heads of head dim `dim`, on one device and split over all,
    and prints the table "sequence": a line for each mask of `masks_of_sequence`, causal also with a learned relative bias, and below it
    what the bias costs on one device and on all.
    """
    count = len(jax.devices())
    arrays = draw(1, tokens, heads, dim)
    table = 0.1 * jax.random.normal(jax.random.key(1), (heads, 2 * tokens), jnp.float32)
    print(
        f"\nT={tokens}, {heads} heads, d{dim}, {count} devices\n\n"
        "| mask | method | one device, ms | all, ms | efficiency | heaviest over mean load | keys and values received, MB | "
        "share of all-gather | collectives | error |\n|---|---|---:|---:|---:|---:|---:|---:|---|---:|"
    )
    plain: list[float] = []
    for name, mask_mod in masks_of_sequence(tokens).items():
        layout = flexjax.context_layout(mask_mod, tokens, devices=count)
        loads, received = np.asarray(layout.loads), np.asarray(layout.blocks_received)
        key_bytes = received.max() * layout.block_size[1] * heads * 2 * dim * 2
        others = tokens * (count - 1) // count * heads * 2 * dim * 2
        for bias in (None, table) if name == "causal" else (None,):
            with jax.set_mesh(mesh_of_all(AxisType.Auto)):
                every = on_all(mask_mod, arrays, bias, layout, "auto")
            one = on_one(mask_mod, arrays, bias)
            alone, together = milliseconds((one, every))
            if name == "causal":
                plain += [alone, together]
            label = name if bias is None else f"{name}, learned relative bias"
            row = f"{alone:.2f} | {together:.2f} | {alone / together / count:.2f} | {loads.max() / loads.mean():.2f}"
            print(
                f"| {label} | auto | {row} | {key_bytes / 1e6:.1f} | {key_bytes / others:.2f} | {every.collectives()} | "
                f"{error(one, every, layout):.1e} |",
                flush=True,
            )
    alone, together, alone_bias, together_bias = plain
    ratio = (together_bias / together) / (alone_bias / alone)
    print(
        f"\nThe bias costs {alone_bias / alone:.2f} on one device, {together_bias / together:.2f} on all: ratio {ratio:.2f}."
    )


# ------------------------------------------------------------------- memory and layouts


def memory(tokens: int) -> None:
    """Prints the memory of a device in a ring over all devices with `tokens` tokens on each, beside that of one device alone with
    `tokens` tokens, both passes under a causal mask, 8 heads of dim 128. The programs are compiled and not run.
    """
    count = len(jax.devices())
    shape = lambda n: tuple(jax.ShapeDtypeStruct((1, n, 8, 128), jnp.bfloat16) for _ in range(4))
    attend = lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=masks.causal)
    alone = Compiled(both_passes(attend, shape(tokens)), ()).megabytes()
    layout = flexjax.context_layout(masks.causal, count * tokens, devices=count)
    with jax.set_mesh(mesh_of_all(AxisType.Auto)) as mesh:
        context = flexjax.ContextParallel(AXIS, layout, method="ring")
        split = NamedSharding(mesh or jax.sharding.get_mesh(), PartitionSpec(None, AXIS))
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in shape(count * tokens)]
        attend_all = lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=masks.causal, context=context)
        every = Compiled(both_passes(attend_all, given), ()).megabytes()
    print(
        f"\nring, causal, both passes: {every:.0f} MB a device at {count * tokens} tokens on {count} devices, {alone:.0f} MB at "
        f"{tokens} tokens on one: {every / alone:.2f} times"
    )


def layouts(lengths: Sequence[int]) -> None:
    """Prints how many seconds `context_layout` takes on the host, for each sequence length of `lengths` and each mask of
    `masks_of_sequence`, over all devices but at least four.
    """
    print("\n| tokens | causal, s | window, s | 22 documents, s |\n|---|---:|---:|---:|")
    for tokens in lengths:
        taken = []
        for mask_mod in masks_of_sequence(tokens).values():
            begin = time.perf_counter()
            flexjax.context_layout(mask_mod, tokens, devices=max(4, len(jax.devices())))
            taken.append(f"{time.perf_counter() - begin:.3f}")
        print(f"| {tokens} | {' | '.join(taken)} |", flush=True)


def main(small: bool = False) -> int:
    """Prints the tables. Returns 0.

    small   short sequences, to try the suite on virtual devices
    """
    print(
        f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}, flexjax {flexjax.__version__}\n"
    )
    batch_and_heads(256 if small else 8192)
    sequence(1024 if small else 131072, *((8, 16) if small else ()))
    memory(512 if small else 262144)
    layouts((4096,) if small else (131072, 1 << 20))
    return 0
