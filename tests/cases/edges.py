"""Calls at the edges of what a tile can be, to be compiled and not run: head dims, lengths, groups, dtypes, options.

They are rows like those of tests/cases/calls.py, with the dtype. `random_case` draws more of them: every option of a call at
once, in sizes that the table does not have.
"""

import numpy as np

from tests.cases import Block, Capture, Case, documents, integers, normal

Row = tuple[Case, str]


def _plain(name: str, shape: tuple[int, ...], dtype: str = "bfloat16", **fields) -> tuple[str, Row]:
    return name, (Case(name, shape, **fields), dtype)  # pyright: ignore[reportArgumentType]


def _square(dim: int, value_dim: int, length: int = 2048, heads: tuple[int, int] = (2, 2)) -> tuple[int, ...]:
    return (1, *heads, length, length, dim, value_dim)


EDGES: dict[str, Row] = dict(
    [
        *(_plain(f"dim_{d}", _square(d, d)) for d in (8, 16, 80, 96, 192, 256, 320, 512, 1024)),
        *(_plain(f"dim_{d}_causal_float32", _square(d, d), "float32", mask="causal") for d in (8, 80, 256, 512, 1024)),
        *(_plain(f"dim_{d}_bnth", _square(d, d), layout="BNTH", mask="causal") for d in (8, 80, 96)),
        *(
            _plain(f"dims_{d}_{e}", _square(d, e), mask="causal", score="softcap")
            for d, e in ((8, 512), (512, 8), (64, 256), (192, 128), (576, 512))
        ),
        *(
            _plain(f"lengths_{t}_{s}", (1, 2, 2, t, s, 64, 64), mask="key_lengths", captures=(("length", integers(s, 1)),))
            for t, s in ((1, 1), (1, 100000), (17, 100000), (100000, 17), (100000, 1), (4099, 2053))
        ),
        _plain("length_100000", (1, 1, 1, 100000, 100000, 64, 64), mask="causal"),
        _plain("length_100000_float32", (1, 1, 1, 100000, 100000, 128, 128), "float32", mask="causal"),
        *(
            _plain(f"group_{g}", (1, 2 * g, 2, 3000, 3000, 128, 128), mask="causal", score="alibi", layout=layout)
            for g, layout in ((1, "BNTH"), (4, "BTNH"), (7, "BTNH"), (16, "BTNH"), (32, "BNTH"))
        ),
        _plain("group_7_float32", (2, 14, 2, 1500, 1500, 80, 80), "float32", mask="causal", score="softcap"),
        _plain("one_group_of_64", (1, 64, 1, 1024, 1024, 256, 256), mask="causal", sinks=True),
        _plain(
            "everything_wide", (2, 8, 2, 2048, 2048, 256, 128), mask="causal_documents", score="relative_bias", sinks=True,
            extra=(1, 64), scale=0.1, dropout=0.1, block=Block(64, batch=True),
            captures=(("bias", normal(8, 4095)), ("doc", documents(9, 2, 2048))),
        ),
        *(
            _plain(
                f"expectations_{dtype}", (1, 8, 4, 4096, 4096, 128, 128), dtype, mask="causal", score="relative_bias", block=Block(128),
                expectations=("of_score", "distance", "learned_gate"),
                captures=(("bias", normal(8, 8191)), ("gain", normal(8)), ("key_value", normal(4096))),
            )
            for dtype in ("bfloat16", "float32")
        ),
    ]
)  # fmt: skip

DIMS = (1, 8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256, 320, 512, 1000)
LENGTHS = (1, 2, 7, 17, 100, 127, 128, 129, 300, 511, 1000, 1024, 2048, 2049, 4096, 5000)
BLOCKS = (16, 32, 64, 128, 256, 512, (64, 128), (128, 16), (32, 256), (1024, 128), (8, 128), (384, 128), (96, 64))


def random_case(seed: int) -> Row:
    """A call with random sizes and options, its mods among those of tests/cases/mods.py."""
    rng = np.random.default_rng(seed)
    pick = lambda values: values[int(rng.integers(len(values)))]
    batch, kv_heads, group = pick((1, 1, 2, 3)), pick((1, 2, 3)), pick((1, 1, 2, 4, 7, 8, 16))
    heads, t, s = kv_heads * group, pick(LENGTHS), pick(LENGTHS)
    s = pick((t, s))
    dim = pick(DIMS)
    value_dim = pick((dim, dim, pick(DIMS)))
    captures: dict[str, Capture] = {}
    scores: dict[str | None, tuple[Capture, ...]] = {
        None: (), "alibi": (), "softcap": (), "square": (), "root_of_distance": (), "chain": (),
        "head_gate": (normal(heads),), "row_bias": (normal(t),), "column_bias": (normal(heads, s),),
        "pair_bias": (normal(t, s),), "head_pair_bias": (normal(heads, t, s),), "relative_bias": (normal(heads, t + s),),
        "distance_bias": (normal(max(t, s)),), "clipped_relative_bias": (normal(33),), "log_bucket_bias": (normal(6),),
    }  # fmt: skip
    masks: dict[str | None, tuple[Capture, ...]] = {
        None: (), "causal": (), "window": (), "prefix": (), "some_rows_off": (), "chunked": (), "by_batch_and_head": (),
        "nothing": (), "key_lengths": (integers(s, batch),), "documents": (documents(5, max(t, s)),),
        "causal_documents": (documents(5, batch, max(t, s)),), "flagged_keys": (Capture("flags", (s,), "bool"),),
    }  # fmt: skip
    names = {"head_gate": "gate", "key_lengths": "length", "documents": "doc", "causal_documents": "doc"}
    names |= {"flagged_keys": "flag", "log_bucket_bias": "table"}
    score, mask = pick([*scores]), pick([*masks])
    for chosen, wanted in ((score, scores[score]), (mask, masks[mask])):
        captures |= {names.get(chosen or "", "bias"): capture for capture in wanted}
    own = mask in ("by_batch_and_head", "key_lengths", "causal_documents")  # one that depends on b and h
    block = (
        Block(pick(BLOCKS), batch=own or pick((True, False)), heads=own or pick((True, False)))
        if mask and pick((0, 1))
        else None
    )
    case = Case(
        f"random_{seed}", (batch, heads, kv_heads, t, s, dim, value_dim), score=score, mask=mask,
        captures=tuple(captures.items()), layout=pick(("BTNH", "BNTH")), block=block, sinks=pick((False, False, True)), dropout=pick((0.0, 0.0, 0.0, 0.3)),
        extra=(kv_heads, pick((8, 64))) if pick((0, 0, 0, 1)) else None, scale=0.1,
    )  # fmt: skip
    return case, pick(("bfloat16", "bfloat16", "float32"))
