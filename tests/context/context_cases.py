"""Calls whose sequence is split over eight CPU devices, compared with one device; a child process of test_context.py.

    python -m tests.context.context_cases [CASE ...]      a line of JSON for each case

Values and the gradients of everything are compared in one program. What is communicated, how many bytes, and whether a loop does it,
is read from the compiled program.
"""

import dataclasses
import functools
import json
import re
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
from flexjax import masks, mods
from tests.arrays import array

B, D, E = 2, 4, 4
Outcome = dict[str, Any]
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}


@dataclasses.dataclass(frozen=True)
class Case:
    """kind: how the mesh is used; mesh: its axes; sp, dp, tp: those of the sequence, the batch and the heads.

    lse      whether statistics are asked for and count in the loss; with `expectations` those too
    traced   whether the mask captures traced ids; layout: whether the layout is made from them, and passed as an argument
    """

    kind: str
    mask: str
    mod: str = "none"
    method: str = "auto"
    mesh: tuple[tuple[str, int], ...] = (("sp", 8),)
    sp: str | tuple[str, ...] = "sp"
    dp: str | None = None
    tp: str | None = None
    lengths: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    block: int = 4
    balance: str = "auto"
    sinks: bool = False
    lse: bool = False
    expectations: bool = False
    dropout: bool = False
    extra: bool = False
    form: str = "BTNH"
    traced: bool = False
    layout: bool = True
    given: str = "mask_mod"
    dtype: str = "float32"

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.sp,) if isinstance(self.sp, str) else self.sp

    @property
    def devices(self) -> int:
        return int(np.prod([dict(self.mesh)[name] for name in self.axes]))

    def spec(self, *names: str | None) -> P:
        """Of an array with these dimensions: b, t, h, or None."""
        of = {"b": self.dp, "t": self.sp, "h": self.tp, None: None}
        return P(*(of[name] for name in names))


def arrays(case: Case) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    (t, s), (n, m) = case.lengths, case.heads
    shapes = {
        "q": (B, t, n, D),
        "k": (B, s, m, D),
        "v": (B, s, m, E),
        "table": (n, t + s),
        "sinks": (n,),
        "gate": (B, s),
    }
    if case.extra:
        shapes |= {"qx": (B, t, n, 2), "kx": (B, s, m, 2)}
    made = {name: array(rng.standard_normal(shape), case.dtype) for name, shape in shapes.items()}
    made["weight"] = array(rng.standard_normal((B, t, n, E)), jnp.float32)
    return made | {"ids": array(np.sort(rng.integers(0, 5, (B, max(t, s))), -1), jnp.int32)}


def mask_of(case: Case, ids: jax.Array) -> Callable | None:
    shift = case.lengths[1] - case.lengths[0]
    causal = lambda b, h, i, j: i + shift >= j
    return {
        "full": None,
        "causal": causal,
        "window": lambda b, h, i, j: (i + shift >= j) & (i + shift - j < 11),
        "documents": lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j),
        "prefix": lambda b, h, i, j: (i >= j) | (j < 13),
        "heads": lambda b, h, i, j: jnp.where(h % 2 == b, i + shift >= j, i + shift - j < 5),
        "nothing": lambda b, h, i, j: (i >= j) & (i > 40),
    }[case.mask]


def mod_of(case: Case, given: dict[str, jax.Array]) -> Callable | None:
    table, gate, n, s = given["table"], given["gate"], case.heads[0], case.lengths[1]
    alibi = mods.alibi(n)
    return {
        "none": None,
        "alibi": alibi,
        "table": lambda x, b, h, i, j: x + table[h, i - j + s],
        "gate": lambda x, b, h, i, j: jnp.tanh(x + table[h, i - j + s]) + gate[b, j] * (h + 1),
    }[case.mod]


def functions_of(case: Case, given: dict[str, jax.Array]) -> dict[str, Callable] | None:
    gate = given["gate"]
    distance = lambda s, b, h, i, j: (i - j) / 16 + h
    return {"gated": lambda s, b, h, i, j: s * gate[b, j], "distance": distance} if case.expectations else None


SEQUENCES = {"q": "query", "qx": "query", "weight": "query", "k": "key", "v": "key", "kx": "key"}
FLOATS = ("q", "k", "v", "table", "gate", "sinks", "qx", "kx")


def attend(case: Case, given: dict[str, jax.Array], **more: Any) -> tuple[jax.Array, jax.Array | None]:
    turn = lambda x: x if case.form == "BTNH" else jnp.swapaxes(x, 1, 2)
    arguments: dict[str, Any] = {"score_mod": mod_of(case, given), "sinks": given["sinks"] if case.sinks else None}
    mask_mod = mask_of(case, given["ids"])
    heads = {"documents": (B, None), "heads": (B, case.heads[0])}.get(case.mask, (None, None))
    if case.given == "mask_mod":
        arguments["mask_mod"] = mask_mod
    else:
        block_mask = flexjax.create_block_mask(mask_mod, *heads, *case.lengths, block_size=6)
        if case.given == "lists":
            lists = (
                getattr(block_mask, f) for f in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
            )
            lengths = dict(zip(("q_len", "kv_len"), case.lengths, strict=True))
            block_mask = flexjax.BlockMask.from_kv_blocks(*lists, block_size=6, mask_mod=mask_mod, **lengths)
        arguments["block_mask"] = block_mask
    if case.dropout:
        arguments |= {"dropout": flexjax.Dropout(0.3, jax.random.key(1))}
    if case.extra:
        arguments |= {"query_extra": turn(given["qx"]), "key_extra": turn(given["kx"])}
    functions = functions_of(case, given)
    aux = flexjax.AuxRequest(lse=True, max_scores=True, expectations=functions) if case.lse else None
    qkv = (turn(given[name]) for name in "qkv")
    out = flexjax.flex_attention(*qkv, layout=case.form, return_aux=aux, **arguments, **more)
    if aux is None:
        return turn(out), None
    found = (out[1].lse, out[1].max_scores, *(out[1].expectations or {}).values())
    stats = jnp.stack([jnp.where(jnp.isfinite(x), x, 0) for x in found])
    return turn(out[0]), stats if case.form == "BTNH" else jnp.swapaxes(stats, 2, 3)


def loss(
    case: Case, floats: dict[str, jax.Array], rest: dict[str, jax.Array], **more: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    out, stats = attend(case, floats | rest, **more)
    out = out.astype(jnp.float32)
    total = (out * rest["weight"] + jnp.sin(out) * rest["weight"]).sum()
    if stats is not None:
        total = total + (stats[0] * rest["weight"][..., 0]).sum() + (jnp.sin(stats[2:]) * rest["weight"][..., 1]).sum()
    return total, (out, stats)


def mesh_of(case: Case) -> jax.sharding.Mesh:
    names, sizes = zip(*case.mesh, strict=True)
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, axis_types=(KINDS[case.kind],) * len(names), devices=jax.devices()[:count])


def specs_of(case: Case) -> dict[str, P]:
    whole = case.kind == "shard_map"
    by = lambda *names: P() if whole else case.spec(*(None if n == "t" else n for n in names))
    kv = "h" if case.tp is None or case.heads[1] % dict(case.mesh)[case.tp] == 0 else None
    return {
        **dict.fromkeys(("q", "qx", "weight"), case.spec("b", "t", "h", None)),
        **dict.fromkeys(("k", "v", "kx"), case.spec("b", "t", kv, None)),
        "table": by("h", None), "sinks": case.spec("h"), "gate": by("b", None), "ids": by("b", None),
    }  # fmt: skip


def layout_of(case: Case, given: dict[str, jax.Array]) -> flexjax.ContextLayout | None:
    if not case.layout:
        return None
    mask_mod = mask_of(case, given["ids"])
    make = functools.partial(flexjax.context_layout, devices=case.devices, block_size=case.block, balance=case.balance)
    return make(mask_mod, *case.lengths, batch=B, heads=case.heads[0])


def split_step(case: Case, mesh: jax.sharding.Mesh, known: jax.Array) -> Callable:
    """A function of (floats, rest, layout) on permuted arrays: (gradients, (out, stats))."""

    def context(layout: flexjax.ContextLayout | None) -> flexjax.ContextParallel:
        return flexjax.ContextParallel(case.sp, layout, case.method)  # type: ignore[arg-type]

    def run(floats: dict, rest: dict, layout: Any) -> Any:
        rest = rest if case.traced else rest | {"ids": known}
        if case.kind != "shard_map":
            return loss(case, floats, rest, context=context(layout))
        own = (dict(mesh.shape).get(case.dp, 1), dict(mesh.shape).get(case.tp, 1))
        first = lambda axis, count, parts: 0 if axis is None else jax.lax.axis_index(axis) * (count // parts)
        specs = specs_of(case)

        def local(floats: dict, rest: dict) -> Any:
            origin = flexjax.Origin(
                batch=first(case.dp, B, own[0]), head=first(case.tp, case.heads[0], own[1]),
                whole=(B, case.heads[0], None, None),
            )  # fmt: skip
            total, (out, stats) = loss(case, floats, rest, context=context(layout), origin=origin)
            return jax.lax.psum(total, tuple(n for n in (*case.axes, case.dp, case.tp) if n)), (out, stats)

        rows = case.spec("b", "t", "h")
        results = (P(), (rows, None if not case.lse else P(None, *rows)))
        given = tuple({name: specs[name] for name in x} for x in (floats, rest))
        vary = lambda x: x if case.traced else {k: v for k, v in x.items() if k != "ids"}
        given = (given[0], vary(given[1]))
        body = local if case.traced else (lambda floats, rest: local(floats, rest | {"ids": known}))
        return jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=results)(floats, vary(rest))

    return jax.grad(run, has_aux=True)


def collectives(text: str) -> dict[str, list[int]]:
    """Kind -> [count, bytes of the results, count inside loops], of a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    size = {"f32": 4, "f64": 8, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1}
    loops = set(re.findall(r"body=%?([\w.\-]+)", text))
    found: dict[str, list[int]] = {}
    computation = ""
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        computation = head.group(1) if head else computation
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match.group(1))
            count = sum(size[d] * int(np.prod([int(n) for n in s.split(",") if n])) for d, s in shapes)
            entry = found.setdefault(match.group(2), [0, 0, 0])
            entry[0] += 1
            entry[1] += count
            entry[2] += computation in loops
    return found


def distance(got: Any, want: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    scale = lambda x: max(float(np.abs(x).max()), 1e-30)
    wide = lambda x: np.asarray(x).astype(np.float64)
    return max(float(np.abs(wide(a) - wide(b)).max()) / scale(wide(b)) for a, b in pairs)


def used(case: Case, name: str) -> bool:
    needs = {
        "table": case.mod in ("table", "gate"),
        "gate": case.mod == "gate" or case.expectations,
        "sinks": case.sinks,
        "qx": case.extra,
        "kx": case.extra,
    }
    return needs.get(name, True)


def run_case(case: Case) -> Outcome:
    given = arrays(case)
    layout = layout_of(case, given)
    floats = {name: given[name] for name in FLOATS if name in given and used(case, name)}
    rest = {name: x for name, x in given.items() if name not in floats}
    want = jax.jit(jax.grad(functools.partial(loss, case), has_aux=True))(floats, rest)
    mesh, specs = mesh_of(case), specs_of(case)
    shard = lambda name, x: layout.shard(x, 1, SEQUENCES[name]) if layout is not None and name in SEQUENCES else x
    back = lambda name, x: layout.unshard(x, 1, SEQUENCES[name]) if layout is not None and name in SEQUENCES else x
    place = lambda name, x: jax.device_put(shard(name, x), NamedSharding(mesh, specs.get(name, P())))
    placed = [{name: place(name, x) for name, x in part.items()} for part in (floats, rest)]
    step = split_step(case, mesh, given["ids"])
    argument = layout if case.traced else None
    function = step if case.traced else lambda a, b, _: step(a, b, layout)
    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(*placed, argument).compile()
        grads, (out, stats) = program(*placed, argument)
        again = program(*placed, argument)
    same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((grads, (out, stats))), strict=True)
    )
    grads = {name: back(name, np.asarray(g)) for name, g in grads.items()}
    out = back("q", np.asarray(out))
    got = (
        grads,
        (out, None if stats is None else np.moveaxis(back("q", np.moveaxis(np.asarray(stats), 0, -1)), -1, 0)),
    )
    each = {name: distance(grads[name], want[0][name]) for name in grads} | {"out": distance(got[1], want[1])}
    lies = grads and all(
        g.sharding.is_equivalent_to(placed[0][n].sharding, g.ndim) for n, g in again[0].items() if n in "qkv"
    )
    return {
        "distance": max(each.values()), "each": each, "same": same, "lies": bool(lies),
        "collectives": collectives(program.as_text()),
    }  # fmt: skip


CUBE = (("dp", 2), ("sp", 2), ("tp", 2))
METHODS = ("neighbours", "ring", "all_gather", "all_to_all")
SWAPPED: dict[str, Any] = {"mesh": (("a", 2), ("tp", 2), ("c", 2)), "sp": ("c", "a"), "tp": "tp"}
"""The axes of the sequence in another order than that of the mesh."""
CUBED: dict[str, Any] = {"mesh": CUBE, "dp": "dp", "tp": "tp"}

CASES = {
    "causal": Case("auto", "causal", "table", "neighbours", sinks=True, balance="zigzag", **SWAPPED),
    "expectations": Case("shard_map", "causal", "gate", "neighbours", sinks=True, lse=True, expectations=True),
}
SLOW = {
    "all_to_all": Case("explicit", "heads", "gate", "all_to_all", heads=(8, 4), sinks=True, **CUBED),
    "ring": Case("auto", "prefix", "gate", "ring", sinks=True, block=8, **CUBED),
    "all_gather": Case("shard_map", "heads", "gate", "all_gather", lengths=(29, 53), dropout=True, **CUBED),
    "window": Case("auto", "window", "alibi", "neighbours", lse=True, block=2),
    "documents": Case("shard_map", "documents", "none", "neighbours", lengths=(61, 61), traced=True),
    "fewer key heads": Case("auto", "causal", "table", "neighbours", heads=(4, 1), block=8, **CUBED),
    "queries and keys": Case("auto", "window", "table", "neighbours", lengths=(37, 97)),
    "keys and queries": Case("shard_map", "full", "table", "ring", lengths=(97, 37)),
    "extra": Case("explicit", "causal", "table", "neighbours", extra=True, form="BNTH", sinks=True),
    "extra ring": Case("auto", "causal", "table", "ring", extra=True, form="BNTH", sinks=True, lse=True),
    "rows that see nothing": Case("auto", "nothing", "gate", "neighbours", lse=True),
    "no mask": Case("explicit", "full", "alibi", lengths=(50, 50)),
    "block mask": Case("auto", "documents", "none", given="block_mask"),
    "lists": Case("auto", "heads", "none", "neighbours", given="lists", lengths=(62, 62)),
    "lists on a cube": Case("explicit", "heads", "none", "neighbours", given="lists", **CUBED),
    "short": Case("auto", "causal", "none", lengths=(5, 5)),
    "bfloat16": Case("auto", "causal", "table", "neighbours", dtype="bfloat16"),
    "float64": Case("auto", "causal", "table", "neighbours", dtype="float64"),
}
EXPECTED: dict[str, Any] = {"lse": True, "expectations": True, "sinks": True}
SLOW |= {
    "expectations all_to_all": Case(
        "explicit", "heads", "gate", "all_to_all", heads=(8, 4), lengths=(61, 61), **EXPECTED, **CUBED
    ),
    "expectations ring": Case("auto", "prefix", "gate", "ring", block=8, **EXPECTED, **CUBED),
    "expectations documents": Case(
        "auto", "documents", "alibi", "neighbours", traced=True, lengths=(61, 61), **EXPECTED
    ),
    "expectations of rows that see nothing": Case("auto", "nothing", "gate", lse=True, expectations=True),
    "expectations float64": Case("explicit", "window", "alibi", "all_gather", dtype="float64", **EXPECTED),
}
FEW_ROWS: dict[str, Any] = {"lengths": (128, 128), "sinks": True, "lse": True, "extra": True, "mesh": (("sp", 4),)}
for _kind in KINDS:
    SLOW[f"few rows of a window {_kind}"] = Case(
        _kind, "window", "gate", "neighbours", form="BNTH", expectations=True, **FEW_ROWS
    )
    SLOW[f"few rows of documents {_kind}"] = Case(
        _kind, "documents", "gate", "neighbours", block=8, dropout=True, **FEW_ROWS
    )
    for _method in METHODS:
        whole = {"heads": (8, 8), "lengths": (97, 97), "sinks": True}
        SLOW[f"causal {_kind} {_method}"] = Case(_kind, "causal", "table", _method, **whole)
        both: dict[str, Any] = {"heads": (8, 4), "dropout": True, "lse": True}
        SLOW[f"cube {_kind} {_method}"] = Case(_kind, "heads", "gate", _method, **both, **CUBED)
    SLOW[f"documents {_kind}"] = Case(_kind, "documents", "alibi", traced=True)
    SLOW[f"documents {_kind} without a layout"] = Case(_kind, "documents", "alibi", traced=True, layout=False)
    SLOW[f"two axes {_kind}"] = Case(_kind, "prefix", "gate", "ring", lse=True, **SWAPPED)


def run_forward() -> Outcome:
    """What the forward passes of some calls communicate on eight devices: 1024 tokens, two heads of 4 features, blocks of 32."""
    case = Case("auto", "none", lengths=(1024, 1024), heads=(2, 2), block=32)
    window = lambda b, h, i, j: (i >= j) & (i - j < 64)
    ids = array(np.repeat(np.arange(8), 128))
    documents = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    shape = jax.ShapeDtypeStruct((1, 1024, 2, D), jnp.float32, sharding=NamedSharding(mesh_of(case), P(None, "sp")))
    found: Outcome = {}
    for name, mask_mod, method in (
        ("window", window, "auto"),
        ("documents", documents, "auto"),
        ("ring", window, "ring"),
        ("all_gather", window, "all_gather"),
    ):
        layout = flexjax.context_layout(mask_mod, 1024, devices=8, block_size=32)
        context = flexjax.ContextParallel("sp", layout, method)  # type: ignore[arg-type]
        run = functools.partial(flexjax.flex_attention, mask_mod=mask_mod, context=context)
        with jax.set_mesh(mesh_of(case)):
            text = jax.jit(run).lower(shape, shape, shape).compile().as_text()
        found[name] = collectives(text)
    return found


def run_tolerance() -> Outcome:
    """Causal attention that falls by 1 a token, 512 tokens on eight devices, with a block mask made with tolerance, with one
    without and with tolerance= itself: what they communicate, and how far values and gradients are from dense ones.
    """
    case, length = Case("auto", "none", lengths=(512, 512), heads=(2, 2), block=16), 512
    rng, found = np.random.default_rng(0), {}
    arrays = [array(rng.uniform(-1, 1, (1, length, 2, D)), jnp.float32) for _ in range(4)]
    layout = flexjax.context_layout(masks.causal, length, devices=8, block_size=16, balance="contiguous")
    context = flexjax.ContextParallel("sp", layout)
    made = functools.partial(flexjax.create_block_mask, masks.causal, None, None, length, length, block_size=16)

    def loss(attend: Callable, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v)
        return jnp.sum(out * g), out

    def split(mask: flexjax.BlockMask, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flexjax.flex_attention(q, k, v, score_mod=mods.distance_penalty(1.0), block_mask=mask, context=context)

    def asked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flexjax.flex_attention(
            q, k, v, score_mod=mods.distance_penalty(1.0), mask_mod=masks.causal, context=context, score_bound=2.0,
            tolerance=2.0**-24,
        )  # fmt: skip

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        far = np.arange(length)[:, None] - np.arange(length)
        s = jnp.einsum("btnd,bsnd->bnts", q, k) * D**-0.5 - np.abs(far)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(jnp.where(far >= 0, s, -jnp.inf), -1), v)

    step = lambda attend: jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2), has_aux=True))
    skipped = made(score_mod=mods.distance_penalty(1.0), score_bound=2.0, tolerance=2.0**-24)
    with jax.set_mesh(mesh_of(case)):
        placed = [jax.device_put(x, NamedSharding(mesh_of(case), P(None, "sp"))) for x in arrays]
        whole = jax.jit(functools.partial(split, made())).lower(*placed[:3]).compile()
        few = jax.jit(functools.partial(split, skipped)).lower(*placed[:3]).compile()
        argument = jax.jit(asked).lower(*placed[:3]).compile()
        both = step(asked).lower(*placed).compile()
        (_, out), grads = both(*placed)
    for name, program in (("whole", whole), ("skipped", few), ("argument", argument), ("both passes", both)):
        found[name] = collectives(program.as_text())
    (_, want), wanted = step(dense)(*arrays)
    return found | {"distance": distance((out, grads), (want, wanted))}


def main(*given: str) -> None:
    warnings.simplefilter("error")
    for name in given:
        if name in ("forward", "tolerance"):
            print(json.dumps({"name": name} | (run_forward() if name == "forward" else run_tolerance())), flush=True)
            continue
        case = (CASES | SLOW)[name]
        with jax.enable_x64(case.dtype == "float64"):
            print(json.dumps({"name": name} | run_case(case)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
