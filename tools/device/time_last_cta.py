"""Who writes dQ in 16 bits, on a GPU: the last CTA that adds to a tile, or XLA afterwards:
`PYTHONPATH=. python3 tools/device/time_last_cta.py`.

Not collected by pytest. A line for each problem: milliseconds of the backward pass either way, timed alternately, and their
ratio; exit status 1 where a bit of a gradient differs between the two, or between two runs of the new one.

    --problems TEXT   those whose names contain one of these, by semicolons
    --repeats N       runs of the new way whose bits are compared; default 20
"""

import argparse
import sys
import typing


class Case(typing.NamedTuple):
    """A problem of self-attention with a fixed order of additions to dQ."""

    name: str
    mask: str  # "", "causal", "window", "documents", or "queries", where the last queries see no key
    tokens: int
    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    dtype: str = "bfloat16"
    traced: bool = False  # whether the ids of the documents are arguments of the call


CASES = (
    *(Case(f"causal d128 {n}", "causal", n, 16384 // n) for n in (1024, 2048, 4096, 8192)),
    *(Case(f"causal d64 {n}", "causal", n, 16384 // n, 32, 32, 64) for n in (1024, 2048, 4096, 8192)),
    Case("full d128 4096", "", 4096, 4),
    Case("full d64 4096", "", 4096, 4, 32, 32, 64),
    Case("window d128 16384", "window", 16384, 1),
    Case("window d64 16384", "window", 16384, 1, 32, 32, 64),
    Case("documents d128 16384", "documents", 16384, 1),
    Case("documents of the call d128 16384", "documents", 16384, 1, traced=True),
    Case("grouped causal d128 8192", "causal", 8192, 2, 32, 8),
    Case("odd causal d128 3001 float16", "causal", 3001, 2, dtype="float16"),
    Case("odd full d64 1999", "", 1999, 2, dim=64),
    Case("queries without keys d128 2000", "queries", 2000),
)


def main() -> int:
    """Prints the lines; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np

    import flexjax
    from flexjax import masks
    from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
    from flexjax.passes import lowered
    from tools.device.timed_cases import median_seconds

    def backward_of(case: Case, last_writes: bool) -> typing.Callable[[], typing.Any]:
        """The compiled backward pass on the residuals of one forward pass."""
        hopper_fused_choice.LAST_WRITES = last_writes
        lowered.forget()
        keys = jax.random.split(jax.random.key(0), 4)
        draw = lambda key, heads: jax.random.normal(key, (case.batch, case.tokens, heads, case.dim), case.dtype)
        q, k, v, d = (
            draw(key, n) for key, n in zip(keys, (case.heads, case.kv_heads, case.kv_heads, case.heads), strict=True)
        )
        ends = np.sort(np.random.default_rng(0).integers(0, case.tokens, 11))
        ids = np.searchsorted(ends, np.arange(case.tokens), side="right").astype(np.int32)

        def attend(q: typing.Any, k: typing.Any, v: typing.Any, ids: typing.Any) -> typing.Any:
            """Attention of the case."""
            mask = {
                "": None,
                "causal": masks.causal,
                "window": masks.sliding_window(1025),
                "documents": flexjax.and_masks(masks.causal, masks.document(ids)),
                "queries": lambda b, h, q, k: (q >= k) & (q < case.tokens - 700),
            }[case.mask]
            return flexjax.flex_attention(q, k, v, mask_mod=mask, implementation="mosaic_gpu")

        known = None if case.traced else ids
        attend_now = lambda q, k, v, given: attend(q, k, v, given if known is None else known)
        forward = jax.jit(lambda q, k, v, given: jax.vjp(lambda *x: attend_now(*x, given), q, k, v)[1])
        pull = forward(q, k, v, jnp.asarray(ids))
        run = jax.jit(lambda pull, d: pull(d)).lower(pull, d).compile()
        return lambda: run(pull, d)

    wrong = False
    for case in CASES:
        if not any(part in case.name for part in args.problems.split(";")):
            continue
        before, now = backward_of(case, False), backward_of(case, True)
        bits = lambda run: [np.asarray(x).view(np.uint16) for x in run()]
        expected = bits(before)
        differs = any(
            not np.array_equal(a, b) for _ in range(args.repeats) for a, b in zip(bits(now), expected, strict=True)
        )
        wrong |= differs
        old, new = (1e3 * seconds for seconds in median_seconds([before, now]))
        print(f"{case.name:34} {old:8.3f} {new:8.3f} {new / old:6.3f}{'  BITS DIFFER' if differs else ''}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
