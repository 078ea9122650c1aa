"""Cost and error of exact gradients of captured arrays on a GPU: `PYTHONPATH=. python3 tools/device/time_exact_gradients.py`.

Not collected by pytest. Each line is one program whose captured array is differentiated, bfloat16, both passes: milliseconds
with and without what rounding took from out (medians over rounds in each of which both programs are timed once), their ratio, and
the relative error of the captured array's gradient against that of the same inputs in float32 by xla, with 2048 tokens.
"""

import statistics
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from flexjax.plan import problem

ROUNDS = 7
STEPS = 5

Loss = typing.Callable[..., typing.Any]


def loss(name: str, tokens: int) -> tuple[Loss, jax.Array]:
    """(function (q, k, v, d_out, captured, implementation) -> gradients of q, k, v and captured; the captured array).

    name     of the score_mod: "slopes", "table" (a number for each head and distance) or "rows" (for each head and key)
    tokens   queries and keys
    """
    rng = np.random.default_rng(1)
    captured, score_mod = {
        "slopes": (
            jnp.asarray(rng.uniform(0.01, 0.3, 16), jnp.float32),
            lambda a: lambda s, b, h, q, k: s - a[h] * jnp.abs(q - k),
        ),
        "table": (
            jnp.asarray(rng.normal(size=(16, 2 * tokens)), jnp.float32),
            lambda a: lambda s, b, h, q, k: s + a[h, q - k + tokens],
        ),
        "rows": (
            jnp.asarray(rng.normal(size=(16, tokens)), jnp.float32),
            lambda a: lambda s, b, h, q, k: s + a[h, k],
        ),
    }[name]

    def gradients(
        q: typing.Any, k: typing.Any, v: typing.Any, d: typing.Any, a: typing.Any, backend: str
    ) -> typing.Any:
        """Gradients of q, k, v and the captured array."""

        def scalar(q: typing.Any, k: typing.Any, v: typing.Any, a: typing.Any) -> typing.Any:
            """The sum of the result of attention times d."""
            out = flexjax.flex_attention(
                q, k, v, score_mod=score_mod(a), mask_mod=flexjax.masks.causal, implementation=backend
            )
            return (out.astype(jnp.float32) * d.astype(jnp.float32)).sum()

        return jax.grad(scalar, (0, 1, 2, 3))(q, k, v, a)

    return gradients, captured


def arrays_of(tokens: int, dim: int) -> tuple[jax.Array, ...]:
    """q, k, v and d_out, bfloat16 [1, tokens, 16, dim]."""
    return tuple(
        jax.random.normal(key, (1, tokens, 16, dim), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)
    )


def main() -> None:
    """Times every score_mod at head dims 64 and 128 and prints a line for each."""
    exact = problem.Problem.for_captures
    for dim in (64, 128):
        for name in ("slopes", "table", "rows"):
            tokens = 8192
            arrays = arrays_of(tokens, dim)
            steps = []
            for method in (exact, lambda self: self):
                problem.Problem.for_captures = method
                jax.clear_caches()
                gradients, captured = loss(name, tokens)
                step = jax.jit(lambda q, k, v, d, a, run=gradients: run(q, k, v, d, a, "mosaic_gpu"))
                jax.block_until_ready(step(*arrays, captured))
                steps.append((step, captured))
            problem.Problem.for_captures = exact
            times: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for number, (step, captured) in enumerate(steps):
                    begin = time.perf_counter()
                    for _ in range(STEPS):
                        out = step(*arrays, captured)
                    jax.block_until_ready(out)
                    times[number].append((time.perf_counter() - begin) / STEPS)
            ours, plain = (1e3 * statistics.median(t) for t in times)
            short = 2048
            arrays = arrays_of(short, dim)
            gradients, captured = loss(name, short)
            got = jax.jit(lambda *x, run=gradients: run(*x, "mosaic_gpu")[3])(*arrays, captured)
            in_float32 = [x.astype(jnp.float32) for x in arrays]
            with jax.default_matmul_precision("highest"):
                want = jax.jit(lambda *x, run=gradients: run(*x, "xla")[3])(*in_float32, captured)
            error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            print(
                f"d{dim} {name}: {ours:.3f} ms, without {plain:.3f} ms, {ours / plain - 1:+.1%}, error {error:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
