"""The collectives of training steps on a mesh of data and tensor parallelism; the child process of test_shared_sums.py.

    python -m tests.parallel.shared_sums STEP ...      a line of JSON for each step, such as "ids|scan"

"fsdp" splits the batch, "tensor" the heads: of query, key and value, and of what a mask, a score or the lengths read by b or h. A step is
a call of CALLS, once, rematerialised, or twice in a scan; its forward pass and its gradients, over automatic and over explicit axes.
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import nn
from tests.parallel.collectives import collectives

B, T, N, D = 8, 256, 4, 8
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
FSDP, TENSOR, ROWS = "fsdp", "tensor", P("fsdp", None, "tensor")
Arrays = dict[str, Any]

IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, T)), -1).astype(np.int32)
ARRAYS: dict[str, tuple[Any, P]] = {
    "ids": (IDS, P(FSDP)),
    "whole_ids": (IDS, P()),
    "lengths": (np.arange(B, dtype=np.int32) * 30 + 1, P(FSDP)),
    "window": (np.arange(N, dtype=np.int32) * 20 + 9, P(TENSOR)),
    "slope": (np.linspace(0.1, 1, N, dtype=np.float32), P(TENSOR)),
    "bias": (np.cos(np.arange(B * T, dtype=np.float32)).reshape(B, T), P(FSDP)),
    "table": (np.sin(np.arange(N * 33, dtype=np.float32)).reshape(N, 33), P(TENSOR)),
}
"""What calls capture, and how it is split."""
LEARNED = ("slope", "bias", "table")


def same(ids: Any) -> Callable:
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


CALLS: dict[str, Callable[[Arrays], Arrays]] = {
    "ids": lambda x: {"mask_mod": same(x["ids"])},
    "ids of all devices": lambda x: {"mask_mod": same(x["whole_ids"])},
    "ids and b": lambda x: {"mask_mod": lambda b, h, i, j: (x["ids"][b, i] == x["ids"][b, j]) | (j <= b)},
    "ids, computed in the mask": lambda x: {"mask_mod": lambda b, h, i, j: same(x["ids"] // 2)(b, h, i, j)},
    "ids and windows": lambda x: {"mask_mod": lambda b, h, i, j: same(x["ids"])(b, h, i, j) & (i - j < x["window"][h])},
    "windows": lambda x: {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < x["window"][h])},
    "block mask": lambda x: {"block_mask": flexjax.create_block_mask(same(x["ids"]), B, None, T, T)},
    "exact block mask": lambda x: {"block_mask": flexjax.create_block_mask(same(x["ids"]), B, N, T, T, exact=True)},
    "part of a block mask": lambda x: {"block_mask": flexjax.create_block_mask(same(x["whole_ids"]), B, 1, T, T)[:, :, :]},
    "lengths": lambda x: {"key_value_seq_lengths": x["lengths"], "query_seq_lengths": x["lengths"]},
    "lengths in the mask": lambda x: {"mask_mod": lambda b, h, i, j: j < x["lengths"][b]},
    "learned": lambda x: {"score_mod": lambda s, b, h, i, j: s * x["slope"][h] + x["bias"][b, j]},
    "learned, computed in the score": lambda x: {"score_mod": lambda s, b, h, i, j: s * jnp.exp(x["table"]).sum(1)[h]},
    "ids and learned": lambda x: {
        "mask_mod": same(x["ids"]),
        "score_mod": lambda s, b, h, i, j: s * x["slope"][h] + x["bias"][b, j] + x["table"][h, jnp.clip(i - j, 0, 32)],
    },
    "segments": lambda x: {
        "attend": nn.segment_attention, "segment_ids": x["ids"], "window": x["window"], "softcap": 2 + x["slope"],
    },
}  # fmt: skip


def one(call: str, q: Any, k: Any, v: Any, x: Arrays) -> Any:
    options = {"attend": flexjax.flex_attention} | CALLS[call](x)
    return options.pop("attend")(q, k, v, **options)


def twice(call: str, q: Any, k: Any, v: Any, x: Arrays) -> Any:
    body = jax.checkpoint(lambda q, _: (one(call, q, k, v, x), None))
    return jax.lax.scan(body, q, length=2)[0]


AROUND: dict[str, Callable] = {"once": one, "remat": jax.checkpoint(one, static_argnums=0), "scan": twice}


def of_kind(kind: str, call: str, around: str) -> tuple[dict[str, list], list[np.ndarray]]:
    """(the collectives of the forward pass and of the gradients, the results of both)."""
    mesh = jax.make_mesh((4, 2), (FSDP, TENSOR), axis_types=(KINDS[kind],) * 2)

    def forward(q: Any, k: Any, v: Any, d: Any, x: Arrays) -> Any:
        return AROUND[around](call, q, k, v, x)

    def gradients(q: Any, k: Any, v: Any, d: Any, x: Arrays) -> Any:
        learned = {n: x[n] for n in LEARNED}
        back = jax.vjp(lambda q, k, v, learned: AROUND[around](call, q, k, v, x | learned), q, k, v, learned)[1]
        return back(d)

    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        rows = np.random.default_rng(1).standard_normal((4, B, T, N, D), np.float32)
        given = (*(put(x, ROWS) for x in rows), {n: put(x, spec) for n, (x, spec) in ARRAYS.items()})
        programs = {f.__name__: jax.jit(f).lower(*given).compile() for f in (forward, gradients)}
        found = {n: collectives(p.as_text()) for n, p in programs.items()}
        results = [np.asarray(x) for p in programs.values() for x in jax.tree.leaves(p(*given))]
    return {n: [[c.kind, sorted(map(sorted, c.groups))] for c in each] for n, each in found.items()}, results


def main(*names: str) -> None:
    warnings.simplefilter("error", flexjax.FallbackWarning)
    for name in names:
        (auto, want), (explicit, got) = (of_kind(kind, *name.split("|")) for kind in KINDS)
        apart = max(float(np.abs(a - b).max() / (1e-3 + np.abs(b).max())) for a, b in zip(got, want, strict=True))
        print(json.dumps({"name": name, "auto": auto, "explicit": explicit, "apart": apart}), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(*sys.argv[1:])
