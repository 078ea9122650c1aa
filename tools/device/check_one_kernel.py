"""The fused backward kernel of 128 queries beside two kernels, on a GPU:
`PYTHONPATH=. python3 tools/device/check_one_kernel.py`.

Not collected by pytest. The tables of cases have no head dim that this kernel wants, and random problems are too
small for its fixed order to be chosen. All gradients of the problems below, on inputs that are random each time, are
compared with those of two kernels; each runs twice, to compare the bits.
"""

import concurrent.futures
import secrets
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import KernelOptions, flex_attention, masks
from flexjax.backends.mosaic_gpu.backward import hopper_fused_tiles
from flexjax.plan.kernel_plan import KernelPlan

TOLERANCE, GROUPED = 2e-3, 4e-3  # of the norm of a gradient; partial dK and dV of grouped heads are rounded once more


class Problem(typing.NamedTuple):
    """A call of flex_attention.

    batch           entries
    lengths         (queries, keys)
    heads           (of queries, of keys)
    dims            head dims (of queries and keys, of values)
    layout, dtype   of the arrays
    deterministic   of KernelOptions
    words           captured array (None without one) -> further arguments of flex_attention
    captured        (shape, dtype) of the captured array; None: there is none
    """

    batch: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    layout: str = "BTNH"
    dtype: str = "bfloat16"
    deterministic: bool = True
    words: typing.Callable[[typing.Any], dict[str, typing.Any]] = lambda array: {}
    captured: tuple[tuple[int, ...], str] | None = None

    def arrays(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """Normal random numbers: query, key, value, the captured array if there is one, and the cotangent of the
        result.
        """
        (q_len, kv_len), (heads, kv_heads), (dim, value_dim) = self.lengths, self.heads, self.dims

        def draw(tokens: int, heads: int, dim: int) -> jax.Array:
            """Normal random numbers in the problem's layout and dtype."""
            rest = (tokens, heads) if self.layout == "BTNH" else (heads, tokens)
            return jnp.asarray(rng.standard_normal((self.batch, *rest, dim), np.float32), self.dtype)

        main = draw(q_len, heads, dim), draw(kv_len, kv_heads, dim), draw(kv_len, kv_heads, value_dim)
        more = ()
        if self.captured is not None:
            shape, dtype = self.captured
            more = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype),)
        return (*main, *more, draw(q_len, heads, value_dim))

    def gradients(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients of query, key, value and the captured array.

        arrays   query, key, value, the captured array if there is one, and the cotangent of the result
        """

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> jax.Array:
            """The result of attention; `more` is the captured array, if there is one."""
            options = KernelOptions(deterministic=self.deterministic)
            words = self.words(more[0] if more else None)
            fixed = dict(layout=self.layout, kernel_options=options, implementation="mosaic_gpu")
            return flex_attention(q, k, v, **fixed, **words)

        return jax.vjp(attend, *arrays[:-1])[1](arrays[-1])


def causal(array: typing.Any) -> dict[str, typing.Any]:
    """Arguments of flex_attention: a causal mask. `array` is not read."""
    return {"mask_mod": masks.causal}


def sloped(array: typing.Any) -> dict[str, typing.Any]:
    """Arguments of flex_attention: a causal mask, and a slope by distance with a learned factor for each head,
    `array` [heads].
    """
    return {"mask_mod": masks.causal, "score_mod": lambda s, b, h, q, kv: s + array[h] * (kv - q) / 16}


def of_distances(array: typing.Any) -> dict[str, typing.Any]:
    """Arguments of flex_attention: a score_mod that adds a learned number for each head and distance, `array`
    [heads, distances].
    """
    middle = array.shape[1] // 2
    return {"score_mod": lambda s, b, h, q, kv: s + array[h, q - kv + middle].astype(jnp.float32)}


def of_tokens(array: typing.Any) -> dict[str, typing.Any]:
    """Arguments of flex_attention: a score_mod that adds a number for each head and query, and one for each head and
    key.

    array   [2, heads, tokens], learned
    """
    return {"score_mod": lambda s, b, h, q, kv: s + array[0, h, q] + array[1, h, kv]}


def windows_of_heads(array: typing.Any) -> dict[str, typing.Any]:
    """Arguments of flex_attention: a causal window whose width differs from head to head, and sinks. `array` is not
    read.
    """
    return {"mask_mod": lambda b, h, q, kv: (q - kv < (h + 1) * 200) & (q >= kv), "sinks": jnp.ones(4)}


PROBLEMS = {
    "full, odd": Problem(2, (4801, 4321), (8, 8)),
    "causal, odd, float16": Problem(2, (8190, 8190), (8, 8), dtype="float16", words=causal),
    "shifted": Problem(2, (9001, 7003), (16, 16), layout="BNTH", words=lambda _: {"mask_mod": masks.causal_offset(-1998)}),
    "dims of 50 and 40": Problem(2, (8192, 8192), (8, 8), dims=(50, 40), words=causal),
    "grouped, any order": Problem(2, (1000, 1333), (12, 3), deterministic=False, words=causal),
    "window, any order": Problem(
        *(1, (2000, 2000), (4, 4), (64, 48), "BNTH", "float16", False),
        words=lambda _: {"mask_mod": masks.sliding_window(300)},
    ),
    "slopes": Problem(2, (6001, 6001), (16, 16), words=sloped, captured=((16,), "float32")),
    "slopes, grouped, any order": Problem(
        2, (1501, 1501), (16, 4), deterministic=False, words=sloped, captured=((16,), "float32")
    ),
    "table of distances": Problem(2, (1100, 1100), (16, 16), words=of_distances, captured=((16, 2200), "float32")),
    "table of distances in bfloat16": Problem(2, (1100, 1100), (16, 8), words=of_distances, captured=((16, 2200), "bfloat16")),
    "biases of tokens": Problem(1, (1111, 777), (16, 16), words=of_tokens, captured=((2, 16, 1111), "float32")),
    "sinks, lists of each head": Problem(2, (1024, 1024), (4, 4), deterministic=False, words=windows_of_heads),
}  # fmt: skip


def lowered(problem: Problem, arrays: tuple[jax.Array, ...], fused: bool) -> tuple[typing.Any, list[int]]:
    """(the lowered program of the problem's gradients, queries of a tile of each fused kernel in it).

    fused   whether the fused kernel may be chosen; False: two kernels

    The heuristics are as before at the return; with `fused` they still choose, and the list is empty if they take two
    kernels. The order of additions is the one that the problem asks for, also where the other is faster.
    """
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice

    found: list[int] = []
    choose, in_order = hopper_fused_choice.fused_is_faster, hopper_fused_choice.adds_in_order

    def watched(plan: KernelPlan) -> bool:
        """Whether the fused kernel is taken; notes the queries of its tile in `found`."""
        tiles = hopper_fused_tiles.fused_tiles(plan) if fused and choose(plan) else None
        found.extend([] if tiles is None else [tiles.queries])
        return tiles is not None

    hopper_fused_choice.fused_is_faster = watched
    hopper_fused_choice.adds_in_order = lambda plan, tiles: plan.options.deterministic
    try:
        return jax.jit(problem.gradients).lower(*arrays), found
    finally:
        hopper_fused_choice.fused_is_faster, hopper_fused_choice.adds_in_order = choose, in_order


def norm(x: jax.Array) -> float:
    """The Euclidean norm of the array, in float32."""
    return float(jnp.linalg.norm(x.astype(jnp.float32)))


def compare(two: typing.Any, one: typing.Any, arrays: tuple[jax.Array, ...], problem: Problem) -> tuple[bool, str]:
    """(whether the gradients of the fused kernel are those of two kernels, within TOLERANCE of their norms, or GROUPED, text to
    print).

    two, one   compiled programs with two backward kernels and with the fused one, which must give the same bits when run again if the
               problem says so
    arrays     what both run on
    """
    tolerance = TOLERANCE if problem.heads[0] == problem.heads[1] else GROUPED
    expected, got, again = two(*arrays), one(*arrays), one(*arrays)
    errors = [norm(x.astype(jnp.float32) - y.astype(jnp.float32)) / norm(y) for x, y in zip(got, expected, strict=True)]
    same = all(bool((x == y).all()) for x, y in zip(got, again, strict=True))
    right = max(errors) <= tolerance and (same or not problem.deterministic)  # a NaN is not <=
    return right, f"{' '.join(f'{e:.1e}' for e in errors)}{'' if same else ', other bits when run again'}"


def main() -> int:
    """Compiles and compares every problem; returns the exit status, 1 where a gradient is wrong, a deterministic
    problem gives other bits when run again, or the fused kernel did not run once with tiles of 128 queries. Inputs are
    random each time.
    """
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = []
        for name, problem in PROBLEMS.items():
            arrays = problem.arrays(rng)
            two, one = (lowered(problem, arrays, fused) for fused in (False, True))
            compiled = [pool.submit(program.compile) for program, _ in (two, one)]
            running.append((name, problem, arrays, compiled, one[1]))
        for name, problem, arrays, compiled, queries in running:
            right, said = compare(*(c.result() for c in compiled), arrays, problem)
            right &= queries == [128]
            wrong += not right
            print(f"{'ok' if right else 'WRONG'} {name}, tiles of {queries} queries: {said}", flush=True)
    print(f"{len(PROBLEMS) - wrong} of {len(PROBLEMS)} agree")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
