"""Programs for a share of the batch and the heads: the indices of the whole, the classes of the loads, what is split."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.program import classify_load
from flexjax.ir.split_axes import Share, share_of_program, split_dims
from flexjax.trace.trace_mod import trace_score_mod
from tests.arrays import array

B, N, T, S = 2, 6, 3, 5
SIZES = {"b": B, "h": N}
TABLE = array(np.random.default_rng(0).standard_normal((N, T + S)), jnp.float32)
PAIR = jnp.cos(TABLE)
WIDE = jnp.arange((N + 1) * S, dtype=jnp.float32).reshape(N + 1, S)


def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """TABLE with plain h; PAIR with h in two ways; WIDE has no entry for each head; b and h as numbers."""
    return s * (h + 10 * b) + TABLE[h, i - j + S - 1] + PAIR[h, j] * PAIR[h // 2, i] + WIDE[h, j]


def test_every_share_computes_what_the_whole_does() -> None:
    traced = trace_score_mod(score_mod, (B, N, T, S))
    assert traced.derivative is not None
    assert split_dims((traced.program, traced.derivative), SIZES) == (("h", None), (None, None), (None, None))
    part = share_of_program((traced.program, traced.derivative), Share(B, 2, N, 3))
    assert part.starts == ("b", "h")
    (table, *rest), program = traced.arrays, part.programs[0]
    assert [str(c) for c in program.captures] == ["float32[2,8]", "float32[6,8]", "float32[7,5]", "int32[]", "int32[]"]
    assert part.programs[1].captures == program.captures
    for share_b, share_h in itertools.product(range(2), range(3)):
        own = table[2 * share_h : 2 * share_h + 2]
        captures = [own, *rest, jnp.int32(share_b), jnp.int32(2 * share_h)]
        for h, (i, j) in itertools.product(range(2), ((0, 4), (2, 1))):
            at = [jnp.int32(x) for x in (0, h, i, j)]
            got = call_program(program, captures, at, jnp.float32(0.5))
            right = score_mod(jnp.float32(0.5), *(jnp.int32(x) for x in (share_b, 2 * share_h + h, i, j)))
            np.testing.assert_allclose(got, right, rtol=1e-6)


def test_loads_keep_their_classes() -> None:
    traced = trace_score_mod(score_mod, (B, N, T, S))
    part = share_of_program((traced.program,), Share(B, 1, N, 3))
    assert part.starts == ("h",)
    classes = lambda program: sorted(str(classify_load(load)) for load in program.loads if load.index)
    assert classes(part.programs[0]) == classes(traced.program)
    assert "diagonal slice" in classes(traced.program)


def test_nothing_is_added_where_only_split_dimensions_are_read() -> None:
    traced = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + S - 1], (B, N, T, S))
    part = share_of_program((traced.program,), Share(B, 2, N, 3))
    assert part.starts == ()
    assert [str(c) for c in part.programs[0].captures] == ["float32[2,8]"]
