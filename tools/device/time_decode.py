"""Times and checks attention of few queries over long caches on a GPU: `PYTHONPATH=. python3 tools/device/time_decode.py`.

Not collected by pytest. Each line is one call: the sum of the times of its kernels (CUPTI, median over the steps), bytes of
the existing keys and values a second, the same for cuDNN where it has the case, and the largest error of the first and the
last batch entry against dense float32 attention. A line that fails says why and the others go on. About three minutes on
an H200, of which most is compilation.

    --cases TEXT      those whose names contain one of these, by semicolons
    --steps N         measured steps (20)
    --variants        also other tiles, chunks and stages of the three plain calls
"""

import argparse
import collections
import dataclasses
import statistics
import sys
import typing
from collections.abc import Callable, Iterator

Arrays = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `mods` makes the keyword arguments of flex_attention from the arrays of the call and the case itself.

    copies   caches that a step reads in turn, so that none stays in the L2
    mean     mean of lognormal lengths, one of `longest`; 0: full lengths
    page     keys of a page; 0: contiguous
    """

    name: str
    batch: int
    keys: int
    q_len: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    mods: Callable[["Case", Arrays], dict[str, typing.Any]] | None = None
    copies: int = 1
    mean: int = 0
    longest: int = 0
    page: int = 0

    def lengths(self) -> typing.Any:
        """Keys of each batch entry, int32 [batch] of numpy."""
        import numpy as np

        if not self.mean:
            return np.full(self.batch, self.keys, np.int32)
        found = np.random.default_rng(0).lognormal(0.0, 1.0, self.batch)
        found = np.clip(found / found.mean() * self.mean, self.q_len, self.longest).astype(np.int32)
        found[self.batch // 2] = self.longest
        return found

    def bytes(self) -> int:
        """Bytes of the existing keys and values."""
        return int(self.lengths().astype(float).sum()) * self.kv_heads * self.dim * 2 * 2


def alibi(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    slopes = arrays["slopes"]
    return {"score_mod": lambda s, b, h, q, k: s + slopes[h] * (k - q)}


def soft_cap(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    import jax.numpy as jnp

    return {"score_mod": lambda s, b, h, q, k: 20.0 * jnp.tanh(s / 20.0)}


def relative(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    table = arrays["table"]
    return {"score_mod": lambda s, b, h, q, k: s + table[h, q - k + case.keys]}


def documents(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    ids = arrays["ids"]
    return {"mask_mod": lambda b, h, q, k: ids[b, k] != 3}


def window(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    first = case.keys - case.q_len
    return {"mask_mod": lambda b, h, q, k: (q + first >= k) & (q + first - k < 1024)}


def causal(case: Case, arrays: Arrays) -> dict[str, typing.Any]:
    first = case.keys - case.q_len
    return {"mask_mod": lambda b, h, q, k: q + first >= k}


def cases() -> list[Case]:
    """Every call that is timed."""
    long = dict(batch=16, keys=32768)
    plain = [Case("b16_32k", **long), Case("b1_128k", 1, 131072), Case("b64_4k", 64, 4096)]
    modded = [
        Case(f"b16_32k {mod.__name__}", **long, mods=mod) for mod in (alibi, soft_cap, relative, documents, window)
    ]
    groups = [Case(f"b16_32k group {n}", **long, q_heads=8 * n) for n in (1, 3, 6, 7, 8)]
    queries = [Case(f"b16_32k {n} queries", **long, q_len=n, mods=causal) for n in (1, 4, 8, 16)]
    ragged = [Case(f"ragged b64 in {s // 1024}k", 64, s, mean=4096, longest=32768) for s in (32768, 131072)]
    paged = [Case(f"b16_32k pages of {n}", **long, page=n) for n in (128, 64, 16)]
    other = [
        Case("b1_8k", 1, 8192, copies=16),
        Case("b16_32k head dim 64", **long, dim=64),
        Case("b16_16k head dim 256", 16, 16384, dim=256),
    ]
    return [*plain, *modded, *groups, *queries, *ragged, *paged, *other]


def arrays_of(case: Case) -> Arrays:
    """The arrays of a call on the device, bfloat16 [copies, batch, tokens, heads, dim]; pages are shuffled, and what no length
    covers is NaN.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    @jax.jit
    def make(seed: typing.Any, lengths: typing.Any) -> tuple:
        """Query, key and value."""
        keys = jax.random.split(seed, 3)
        query = jax.random.normal(keys[0], (case.copies, case.batch, case.q_len, case.q_heads, case.dim), jnp.bfloat16)
        shape = (case.copies, case.batch, case.keys, case.kv_heads, case.dim)
        exists = (jnp.arange(case.keys) < lengths[:, None])[None, :, :, None, None]
        key, value = (jnp.where(exists, jax.random.normal(n, shape, jnp.bfloat16), jnp.nan) for n in keys[1:])
        return query, key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)

    lengths = jnp.asarray(case.lengths())
    query, key, value = make(jax.random.key(0), lengths)
    rng = np.random.default_rng(0)
    found = {"query": query, "key": key, "value": value, "lengths": lengths}
    found["slopes"] = jnp.asarray(2.0 ** -np.linspace(1, 16, case.q_heads), jnp.float32)
    found["table"] = jnp.asarray(rng.normal(size=(case.q_heads, 2 * case.keys)), jnp.float32)
    found["ids"] = jnp.asarray(np.sort(rng.integers(0, 8, (case.batch, case.keys))), jnp.int32)
    if case.page:
        number = case.batch * case.keys // case.page
        order = rng.permutation(number).astype(np.int32)
        place = np.empty_like(order)
        place[order] = np.arange(number)
        for name in ("key", "value"):
            pages = found[name].reshape(number, case.page, case.kv_heads, case.dim)
            found[f"{name}_pages"] = pages[jnp.asarray(place)][None]
        found["pages"] = jnp.asarray(order.reshape(case.batch, -1))
    return found


# ------------------------------------------------------------------- calls


def flexjax_call(case: Case, change: Callable[..., typing.Any] | None) -> Callable[[Arrays], typing.Any]:
    """The call by flexjax: arrays -> out [copies, batch, q_len, q_heads, dim].

    change   from the configuration of the decode kernel to another; None: the call goes through flex_attention
    """
    import jax
    import jax.numpy as jnp

    import flexjax
    from flexjax.backends.mosaic_gpu import decode_sm90, decode_tiles
    from flexjax.prepare import prepare

    def one(arrays: Arrays, query: typing.Any, key: typing.Any, value: typing.Any) -> typing.Any:
        """One cache."""
        given = case.mods(case, arrays) if case.mods else {}
        if case.mean:
            given["key_value_seq_lengths"] = arrays["lengths"]
        if change is None and not case.page:
            given["kernel_options"] = flexjax.KernelOptions(split="auto")
            return flexjax.flex_attention(query, key, value, implementation="mosaic_gpu", **given)
        like = jax.ShapeDtypeStruct((case.batch, case.keys, case.kv_heads, case.dim), query.dtype)
        stand_in = jnp.zeros(like.shape, like.dtype) if case.page else None  # unread, so XLA removes it
        call = prepare(query, *((stand_in, stand_in) if case.page else (key, value)), return_aux=None, **given)
        plan, operands = call.plan, call.operands
        if case.page:
            plan = dataclasses.replace(plan, page=case.page)
            operands = operands._replace(key=key, value=value, pages=arrays["pages"])
        tile = dataclasses.replace(decode_tiles.decode_tile(plan), programs=jax.devices()[0].core_count)
        return decode_sm90.forward(plan, operands, change(tile) if change else tile).out

    def run(arrays: Arrays) -> typing.Any:
        """All caches, one after the other."""
        names = ("key_pages", "value_pages") if case.page else ("key", "value")
        outs = [one(arrays, arrays["query"][n], *(arrays[name][n] for name in names)) for n in range(case.copies)]
        return jnp.stack(outs) if case.copies > 1 else outs[0][None]

    return run


def cudnn_call(case: Case) -> Callable[[Arrays], typing.Any] | None:
    """The call by cuDNN; None where it has no such call."""
    import jax
    import jax.numpy as jnp

    if case.page or (case.mods is not None and case.mods is not causal):
        return None
    if case.mods is causal and case.q_len > 1:
        return None  # its causal mask begins at the first key

    def run(arrays: Arrays) -> typing.Any:
        """All caches, one after the other."""
        lengths = {}
        if case.mean:
            full = jnp.full((case.batch,), case.q_len, jnp.int32)
            lengths = {"query_seq_lengths": full, "key_value_seq_lengths": arrays["lengths"]}
        outs = [
            jax.nn.dot_product_attention(
                arrays["query"][n], arrays["key"][n], arrays["value"][n], implementation="cudnn", **lengths
            )
            for n in range(case.copies)
        ]
        return jnp.stack(outs) if case.copies > 1 else outs[0][None]

    return run


def dense(case: Case, arrays: Arrays, b: int) -> typing.Any:
    """out of one batch entry of the last cache by dense attention in float32, [q_len, q_heads, dim]."""
    import jax
    import jax.numpy as jnp

    given = case.mods(case, arrays) if case.mods else {}
    length = int(arrays["lengths"][b])
    group = case.q_heads // case.kv_heads
    query = arrays["query"][-1, b].astype(jnp.float32)
    numbers = jnp.arange(case.q_len, dtype=jnp.int32), jnp.arange(length, dtype=jnp.int32)

    def head(h: int) -> typing.Any:
        """out of one query head, [q_len, dim]."""
        key, value = (arrays[name][-1, b, :length, h // group].astype(jnp.float32) for name in ("key", "value"))
        s = jnp.dot(query[:, h], key.T, precision="highest") * case.dim**-0.5
        if "score_mod" in given:
            score = given["score_mod"]
            along_keys = jax.vmap(lambda s, q, k: score(s, b, h, q, k), (0, None, 0))
            s = jax.vmap(along_keys, (0, 0, None))(s, *numbers)
        if "mask_mod" in given:
            mask = given["mask_mod"]
            along_keys = jax.vmap(lambda q, k: mask(b, h, q, k), (None, 0))
            s = jnp.where(jax.vmap(along_keys, (0, None))(*numbers), s, -jnp.inf)
        return jnp.dot(jax.nn.softmax(s, -1), value, precision="highest")

    return jnp.stack([head(h) for h in range(case.q_heads)], 1)


# ------------------------------------------------------------------- measurement


def milliseconds(run: Callable[[Arrays], typing.Any], arrays: Arrays, steps: int) -> tuple[float, dict[str, float]]:
    """(sum over the kernels of a step, the same by name of the kernel), medians in ms."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    step = jax.jit(run)
    jax.block_until_ready(step(arrays))
    _, runs = profiler.Cupti(finalize=False).measure(step, aggregate=False, iterations=steps)(arrays)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for one in runs:
        sums: dict[str, float] = collections.defaultdict(float)
        for name, took in one:
            sums[name] += took
        for name, took in sums.items():
            times[name].append(took)
    return statistics.median(sum(t for _, t in one) for one in runs), {
        n: statistics.median(t) for n, t in times.items()
    }


def changes() -> Iterator[tuple[str, Callable[..., typing.Any]]]:
    """(text, change of the configuration) of the variants."""
    from flexjax.backends.mosaic_gpu.decode_tiles import decode_fits

    for block_kv, stages, chunk in ((64, 4, 512), (64, 4, 2048), (64, 2, 1024), (128, 2, 1024), (128, 2, 2048)):

        def change(tile: typing.Any, sizes: tuple[int, int, int] = (block_kv, stages, chunk)) -> typing.Any:
            """The configuration with these sizes."""
            other = dataclasses.replace(tile, block_kv=sizes[0], page_rows=sizes[0], stages=sizes[1], chunk=sizes[2])
            assert decode_fits(other), sizes
            return other

        yield f"{block_kv} keys, {stages} stages, chunks of {chunk}", change


def report(case: Case, text: str, change: Callable[..., typing.Any] | None, steps: int) -> None:
    """Prints the line of one call, and of cuDNN's where there is one and `change` is None."""
    import jax
    import jax.numpy as jnp

    arrays = arrays_of(case)
    moved = case.bytes() * case.copies
    run = flexjax_call(case, change)
    took, kernels = milliseconds(run, arrays, steps)
    out = jax.jit(run)(arrays)[-1].astype(jnp.float32)
    errors = [float(jnp.abs(out[b] - dense(case, arrays, b)).max()) for b in sorted({0, case.batch - 1})]
    peer = cudnn_call(case) if change is None else None
    other = ""
    if peer is not None:
        try:
            theirs, _ = milliseconds(peer, arrays, steps)
            other = f"  cuDNN {theirs / case.copies:8.4f} ms {moved / theirs / 1e9:5.2f} TB/s"
        except Exception as error:  # cuDNN refuses some shapes in many ways
            other = f"  cuDNN {type(error).__name__}: {str(error).splitlines()[0][:60]}"
    print(
        f"{case.name + text:<34} {took / case.copies:8.4f} ms {moved / took / 1e9:5.2f} TB/s  error {max(errors):.1e}{other}",
        flush=True,
    )
    for name, part in kernels.items():
        print(f"      {part / case.copies:8.4f} ms  {name[:80]}", flush=True)
    del arrays
    jax.clear_caches()


def same_bits() -> None:
    """Prints whether one batch entry alone has the bits that it has among 64."""
    import jax
    import numpy as np

    case = Case("bits", 64, 4096, mods=relative)
    arrays = arrays_of(case)
    among = jax.jit(flexjax_call(case, None))(arrays)[0, 5]
    alone = {n: x[:, 5:6] if n in ("query", "key", "value") else x for n, x in arrays.items()}
    single = jax.jit(flexjax_call(dataclasses.replace(case, batch=1), None))(alone)[0, 0]
    print("bits of a batch entry alone and among 64 are equal:", bool((np.asarray(among) == np.asarray(single)).all()))


def main() -> int:
    """Prints the table; returns 1 if a call failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    failed = 0
    for case in cases():
        if not any(part in case.name for part in args.cases.split(";")):
            continue
        variants: list[tuple[str, typing.Any]] = [("", None)]
        if args.variants and case.name in ("b16_32k", "b1_128k", "b64_4k"):
            variants += [(f", {text}", change) for text, change in changes()]
        for text, change in variants:
            try:
                report(case, text, change, args.steps)
            except Exception as error:  # the others are still worth measuring
                failed += 1
                print(f"{case.name + text:<34} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    same_bits()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
