"""Calls lower for GPUs and TPUs on a machine without one: those that once did not, and a few random ones.

.ci/run lowers random calls for minutes: python -m tests.backends.lowering_fuzz
"""

import typing

import jax
import jax.numpy as jnp
import pytest

from flexjax.backends.mosaic_gpu import support
from tests.backends import lowering_fuzz
from tests.backends.lowering_fuzz import KERNELS, TARGETS
from tests.cases.random_programs import RandomCall, draw

GPU = jax.__version_info__ >= support.OLDEST_JAX


def of(target: str) -> typing.Any:
    needs = pytest.mark.skipif(not GPU, reason="the GPU kernels need jax 0.11, which needs Python 3.12")
    return pytest.param(target, marks=[needs] if TARGETS[target].platform == "cuda" else [])


def call(
    score: str,
    query: tuple[int, ...] = (1, 256, 4, 64),
    tokens: int = 256,
    heads: int = 2,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    texts: dict[str, str] | None = None,
    **captured: tuple[int, ...],
) -> RandomCall:
    """A call with gradients of all captured arrays, which are float32 unless their names begin with `ids`."""
    arrays = {
        n: jax.ShapeDtypeStruct(s, jnp.int32 if n.startswith("ids") else jnp.float32) for n, s in captured.items()
    }
    key = (query[0], tokens, heads, query[3])
    floats = tuple(n for n, a in arrays.items() if a.dtype == jnp.float32)
    texts = {"score_mod": f"lambda s, b, h, i, j: {score}", **(texts or {})}
    wanted = ("query", "key", "value", *floats)
    return RandomCall(query, key, (*key[:3], value_dim or key[3]), dtype, arrays, texts, wanted, False)


PAIR = (2, 256, 256)
COMPUTED_HEADS = {
    "a head for a group": call("s + bias[h // 2, i, j]", bias=PAIR),
    "heads in turn, odd lengths, float16": call(
        "s + bias[h % 2, i, j]", (1, 203, 4, 64), 251, dtype="float16", bias=(2, 203, 251)
    ),
    "batch entries times heads": call("s + bias[b * 4 + h, i, j]", (2, 256, 4, 64), bias=(8, 256, 256)),
    "two axes, a table of heads, read twice": call(
        "s + bias[(b + h) % 3, ids[h], i, j] * bias[0, ids[h], j, i]", (2, 256, 4, 64), bias=(3, *PAIR), ids=(4,)
    ),
    "an origin and lengths": call(
        "s + bias[h // 2 + b, i, j]", (2, 256, 4, 64), bias=(3, 512, 512), ids=(2,),
        texts={"origin": "flexjax.Origin(query=ids)", "key_value_seq_lengths": "ids"},
    ),
    "a gain, beside dropout": call(
        "jnp.tanh(s * bias[3 - h, i, j])", bias=(4, 256, 256),
        texts={"dropout": "flexjax.Dropout(0.25, jax.random.key(0))"},
    ),
}  # fmt: skip
OTHERS = {
    # one query: a gather of a single row
    "coarse bias of one query": ("tpu", call("s + bias[h, i // 8, j // 8]", (1, 1, 4, 64), bias=(4, 1, 32))),
    # blocks of the bias are no whole vectors and not all of it
    "bias larger than the matrix": (
        "v5e",
        call("s + bias[h, i, j]", (2, 5, 2, 40), 5, 1, bias=(2, 8, 130)),
    ),
    "blocks of 96, no known chip": (
        "tpu", call("s", texts={"mask_mod": "lambda b, h, i, j: (i * 7 + j * 3) % 2 == 0", "blocks": "(96, 96)"}),
    ),
    # warpgroups split the columns of the wide gradient alone
    "narrow values": ("ampere", call("s", (1, 64, 4, 160), value_dim=8)),
    "narrow queries": ("rtx", call("s", (1, 64, 4, 8), value_dim=160)),
}  # fmt: skip


@pytest.mark.parametrize("target", [of("hopper"), of("ampere"), of("tpu")])
@pytest.mark.parametrize("name", COMPUTED_HEADS)
def test_gradients_of_a_bias_whose_head_is_computed(name: str, target: str) -> None:
    if target == "tpu" and COMPUTED_HEADS[name].dtype == "float16":
        pytest.skip("mosaic_tpu has no float16")
    assert lowering_fuzz.lower(COMPUTED_HEADS[name], TARGETS[target]) == (KERNELS, "")


@pytest.mark.parametrize(
    ("target", "name"), [pytest.param(*of(t).values, n, marks=of(t).marks) for n, (t, _) in OTHERS.items()]
)
def test_calls_that_once_failed(target: str, name: str) -> None:
    assert lowering_fuzz.lower(OTHERS[name][1], TARGETS[target]) == (KERNELS, "")


@pytest.mark.parametrize(
    "target", [of(t) for t in ("hopper", "tpu", "hopper-mma", "v5e", "blackwell", "ampere", "v6e", "rtx")]
)
def test_random_calls(target: str) -> None:
    said, outcome = lowering_fuzz.failure("default", 0, target)
    assert outcome != "failed", said


def test_what_fails_is_printed_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering_fuzz, "draw", lambda text: call("s + bias[h // 2, i, j]", bias=PAIR))
    monkeypatch.setattr(lowering_fuzz, "lower", lambda call, target: 1 // 0)
    said, outcome = lowering_fuzz.failure("seed", 7, "tpu")
    assert outcome == "failed"
    for line in (
        "seed 'seed', call 7, for tpu",
        "bias = float32[2, 256, 256]",
        "score_mod=lambda s, b, h, i, j: s + bias[h // 2, i, j]",
    ):
        assert line in said
    assert "ZeroDivisionError" in said


def test_only_a_refusal_of_the_backend_counts_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call("s + bias[h, i, j]", bias=(4, 256, 256), dtype="float16")
    outcome, why = lowering_fuzz.lower(given, TARGETS["tpu"])
    assert (outcome, why) == (
        "call refused", "mosaic_tpu: mosaic_tpu computes float32 and bfloat16; query, key and value are float16. mosaic_tpu "
        "runs on a TPU; the default device is a cpu.",
    )  # fmt: skip

    def from_pallas(*given: object, **options: object) -> None:
        raise NotImplementedError("Only take_along_axis-like gathers supported")

    monkeypatch.setattr(RandomCall, "attend", from_pallas)
    with pytest.raises(NotImplementedError, match="take_along_axis"):
        lowering_fuzz.lower(given, TARGETS["tpu"])


def test_a_text_draws_the_same_call_again() -> None:
    assert str(draw("a 1")) == str(draw("a 1")) != str(draw("a 2"))
