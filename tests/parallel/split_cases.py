"""The table of cases (tests/cases/calls.py) with its calls split over eight CPU devices; the child process of test_split_cases.py.

    python -m tests.parallel.split_cases            reads names of rows from stdin, and writes a line of JSON for each
    python -m tests.parallel.split_cases ROW ...    a line of JSON for each of these rows

A row is a case, a split and a kind of mesh axes, such as "packed-heads-explicit". One program computes out, lse, max_scores and the
gradients of inputs, sinks and captured arrays, and its collectives are read from the compiled text. One device gives what is right.

    batch, heads       the other axis of the mesh splits nothing, so sums over too many devices show
    sequence           context=, by the method of METHODS for the kind
    cube               all three at once

A batch or a number of heads of 1 is 2 here, because there is nothing to split.
"""

import dataclasses
import functools
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
from tests.bound_case import BoundCase
from tests.cases import CASES, Case
from tests.oracle import loss_of_expectations
from tests.parallel.collectives import collectives

DEVICES = 8
SPLITS = ("batch", "heads", "sequence", "cube")
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}
METHODS = {
    ("sequence", "auto"): "auto",
    ("sequence", "explicit"): "ring",
    ("sequence", "shard_map"): "all_gather",
    ("cube", "auto"): "ring",
    ("cube", "explicit"): "auto",
    ("cube", "shard_map"): "all_to_all",
}
"""How keys travel; "all_to_all" is "all_gather" where the heads of a device cannot be split once more."""

QUERIES, KEYS = ("q", "query_extra", "w", "u"), ("k", "v", "key_extra")
"""Arrays [B, heads, tokens, ...] over queries, and over keys and values."""

CAPTURE_DIMS: dict[tuple[str, str], str] = {
    ("head_gate", "gate"): "h", ("batch_head_scale", "log_scale"): "b h", ("head_slope", "slope"): "h",
    ("column_bias", "bias"): "h -", ("batch_column_bias", "bias"): "b -", ("head_pair_bias", "bias"): "h - -",
    ("full_pair_bias", "bias"): "b h - -", ("transposed_view", "bias"): "- h", ("fixed_plane", "bias"): "b h - -",
    ("relative_bias", "bias"): "h -", ("bucket_bias", "table"): "- h", ("coordinate_distance", "strength"): "h",
    ("window_per_head", "window"): "h", ("causal_documents", "doc"): "b -", ("key_lengths", "length"): "b",
    ("both_lengths", "length"): "b", ("dilation_by_head", "dilation"): "h", ("sigmoid", "logit"): "h", ("decayed", "rate"): "h",
    ("learned_gate", "gain"): "h", ("own_document", "doc"): "b -",
    ("chosen_blocks", "word"): "b - - -",
}  # fmt: skip
"""The dimensions of captured arrays that a mod indexes with plain b or h: arrays under jit are split there."""

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A case, split over the axes `parts` of a mesh: {"batch": 2, "sequence": 2, "heads": 2} without those that split nothing."""

    case: Case
    split: str
    kind: str

    @property
    def parts(self) -> dict[str, int]:
        batch, heads, *_ = self.case.shape
        if self.split == "batch":
            return {"batch": batch}
        if self.split == "heads":
            return {"heads": max(n for n in range(1, DEVICES + 1) if heads % n == 0)}
        if self.split == "sequence":
            return {"sequence": 4}
        parts = {"batch": min(n for n in (2, 3) if batch % n == 0), "sequence": 2}
        return parts | {"heads": max(n for n in (1, 2, 3) if heads % n == 0 and 2 * parts["batch"] * n <= DEVICES)}

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the axes of the mesh. "other" splits nothing."""
        count = int(np.prod([*self.parts.values()]))
        return (*self.parts, "other"), (*self.parts.values(), DEVICES // count)

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        names, sizes = self.axes
        devices = jax.devices()[: int(np.prod(sizes))]
        return jax.make_mesh(sizes, names, axis_types=(KINDS[self.kind],) * len(names), devices=devices)

    def count(self, axis: str) -> int:
        return self.parts.get(axis, 1)

    def place(self, axis: str) -> Any:
        """The number of this device along an axis, inside shard_map."""
        return jax.lax.axis_index(axis) if axis in self.parts else 0

    @property
    def method(self) -> str | None:
        """None: the sequence is whole."""
        if "sequence" not in self.parts:
            return None
        method = METHODS[self.split, self.kind]
        heads = [*self.case.shape[1:3], *([self.case.extra[0]] if self.case.extra else [])]
        divides = all(n % (self.count("heads") * self.count("sequence")) == 0 for n in heads)
        return "all_gather" if method == "all_to_all" and not divides else method

    @functools.cached_property
    def layout(self) -> flexjax.ContextLayout | None:
        if self.method is None:
            return None
        batch, heads, _, queries, keys, *_ = self.case.shape
        mask_mod = self.case.mods(BoundCase(self.case, "float32", "xla").constants)[1]
        return flexjax.context_layout(
            mask_mod, queries, keys, devices=self.count("sequence"), batch=batch, heads=heads,
            block_size=8 if max(queries, keys) < 100 else 16,
        )  # fmt: skip

    def spec(self, *dims: str) -> P:
        """Of an array with these dimensions: "b", "h", "t" (tokens), any other for one that is whole."""
        axes = {"b": "batch", "h": "heads", "t": "sequence"}
        return P(*(axes[d] if axes.get(d) in self.parts else None for d in dims))

    def spec_of(self, name: str, x: Any) -> P:
        """How the array of that name is split before the call: inputs like the work, captured arrays where a mod allows it."""
        if name in (*QUERIES, *KEYS):
            head = "h" if x.shape[1] % self.count("heads") == 0 else "-"
            return self.spec("b", head, "t", *"-" * (x.ndim - 3))
        if name == "sinks":
            return self.spec("h")
        found = [
            dims
            for (mod, array), dims in CAPTURE_DIMS.items()
            if mod in (self.case.score, self.case.mask, self.case.weights, *self.case.expectations) and array == name
        ]
        if not found or self.kind == "shard_map":
            return P()
        sizes = {"b": self.case.shape[0], "h": self.case.shape[1]}  # an array may have more rows than there are heads
        dims = found[0].split()
        return self.spec(*(d if sizes.get(d) == n else "-" for d, n in zip(dims, x.shape, strict=True)))


def row_of(name: str) -> Row:
    """The row "case-split-kind"."""
    case, split, kind = name.rsplit("-", 2)
    given = CASES[case]
    batch, heads, key_heads, *rest = given.shape
    heads, key_heads = (2, 2) if heads == 1 else (heads, key_heads)
    lengths: Any = tuple(None if ends is None else ends * (2 // batch or 1) for ends in given.lengths)
    shape: Any = (max(2, batch), heads, key_heads, *rest)
    return Row(dataclasses.replace(given, shape=shape, lengths=lengths), split, kind)


CRASHING = {
    f"{case}-{split}-shard_map"
    for case in ("no_keys", "no_keys_masked", "weights_without_keys", "expectations_without_keys")
    for split in ("batch", "heads")
}
"""Rows whose program XLA of jax 0.11.2 cannot compile on a CPU: it ends the process where devices sum arrays without elements, as
the gradients of no keys are, and jax's own transpose of shard_map asks for that sum."""
NAMES = tuple(
    name for case in CASES for split in SPLITS for kind in KINDS if (name := f"{case}-{split}-{kind}") not in CRASHING
)


# ------------------------------------------------------------------- the call


def attend(row: Row, given: Arrays, layout: flexjax.ContextLayout | None, device: bool) -> Arrays:
    """out [B, N, T, E], lse and max_scores [B, N, T].

    device   whether the arrays are those of one device, inside shard_map, but for captured ones
    """
    case, options = row.case, dict[str, Any]()
    batch, heads, _, queries, keys, *_ = case.shape
    own = (batch // row.count("batch"), heads // row.count("heads")) if device else (batch, heads)
    if device:
        here = {axis: row.place(axis) * n for axis, n in zip(("batch", "heads"), own, strict=True)}
        lengths = (None, None) if layout is not None else (queries or None, keys or None)
        origin = flexjax.Origin(batch=here["batch"], head=here["heads"], whole=(batch, heads, *lengths))
        options["origin"] = origin
        given = given | {name: _read_heads(row, given[name]) for name in KEYS if name in given}
    score_mod, mask_mod = case.mods(given)
    if case.block is None:
        options["mask_mod"] = mask_mod
    else:
        sizes = (own[0] if case.block.batch else None, own[1] if case.block.heads else None, queries, keys)
        placed = {"origin": options.pop("origin")} if device else {}
        options["block_mask"] = flexjax.create_block_mask(mask_mod, *sizes, block_size=case.block.size, **placed)
    for name, ends in zip(("query_seq_lengths", "key_value_seq_lengths"), case.lengths, strict=True):
        if ends is not None:
            of_all = jnp.asarray(ends, jnp.int32)
            options[name] = (
                jax.lax.dynamic_slice_in_dim(of_all, row.place("batch") * own[0], own[0]) if device else of_all
            )
    turned = lambda x: jnp.swapaxes(x, 1, 2) if case.layout == "BTNH" else x
    options |= {name: turned(given[name]) for name in ("query_extra", "key_extra") if name in given}
    if case.dropout:
        options |= {"dropout": flexjax.Dropout(case.dropout, jax.random.key(11))}
    if layout is not None:
        options["context"] = flexjax.ContextParallel("sequence", layout, row.method)  # type: ignore[arg-type]
    asked = flexjax.AuxRequest(lse=True, max_scores=True)
    if case.weights is not None:
        asked, options["weights"] = flexjax.AuxRequest(total=True), case.weighting(given)
    if case.expectations:
        asked = dataclasses.replace(asked, expectations=case.functions(given))
    out, aux = flexjax.flex_attention(
        *(turned(given[name]) for name in "qkv"), score_mod=score_mod, sinks=given.get("sinks"), scale=case.scale,
        layout=case.layout, return_aux=asked, implementation="xla", **options,
    )  # fmt: skip
    found = {"out": out, "lse": aux.total if case.weights else aux.lse, "max_scores": aux.max_scores}
    if aux.expectations is not None:
        found["expectations"] = jnp.stack(list(aux.expectations.values()), -1)
    return {name: turned(x) for name, x in found.items() if x is not None}


def _read_heads(row: Row, x: jax.Array) -> jax.Array:
    """The key heads that a device's query heads read, from all of them where the devices do not divide them."""
    heads, parts = row.case.shape[1], row.count("heads")
    count = row.case.shape[2] if x.shape[1] != (row.case.extra or (0,))[0] else x.shape[1]
    if count % parts == 0:
        return x
    own, group = heads // parts, heads // x.shape[1]
    assert group % own == 0, "a device reads a part of the query heads of one key head"
    return jax.lax.dynamic_slice_in_dim(x, row.place("heads") * own // group, 1, 1)


def loss(row: Row, floats: Arrays, rest: Arrays, layout: Any, device: bool = False) -> tuple[jax.Array, Arrays]:
    results = attend(row, floats | rest, layout, device)
    lse = jnp.where(jnp.isfinite(results["lse"]), results["lse"], 0.0)
    total = jnp.sum(results["out"] * rest["w"]) + jnp.sum(lse * rest["u"])
    if row.case.expectations:
        total += loss_of_expectations(results["expectations"], rest["u"])
    return total, results


def arrays_of(row: Row) -> tuple[Arrays, Arrays]:
    """(arrays that want a gradient, all others) of the whole call, heads first."""
    problem = BoundCase(row.case, "float32", "xla")
    inputs, learn, _ = problem.arrays()
    weights = {name: jnp.asarray(x) for name, x in row.case.poisoned().items() if name in ("w", "u")}
    fixed = {name: x for name, x in problem.constants.items() if name not in learn}
    return inputs | learn, fixed | weights


@functools.cache
def on_one_device(name: str) -> tuple[Arrays, Arrays]:
    """The gradients and the results of a case."""
    row = row_of(f"{name}-batch-auto")
    step = jax.jit(jax.grad(lambda *arrays: loss(row, *arrays, None), has_aux=True))
    return jax.tree.map(np.asarray, step(*arrays_of(row)))


def split_step(row: Row, known: Arrays) -> Callable[..., Any]:
    """A function of (floats, rest, layout) on arrays that are permuted and split: (gradients, results)."""

    def run(floats: Arrays, rest: Arrays, layout: Any) -> tuple[jax.Array, Arrays]:
        if row.kind != "shard_map":
            return loss(row, floats, rest | known, layout)

        def local(floats: Arrays, rest: Arrays) -> tuple[jax.Array, Arrays]:
            total, results = loss(row, floats, rest | known, layout, device=True)
            return jax.lax.psum(total, tuple(row.parts)), results

        specs = tuple({name: row.spec_of(name, x) for name, x in part.items()} for part in (floats, rest))
        names = ("out", "lse", *(["max_scores"] if row.case.weights is None else []))
        names += ("expectations",) * bool(row.case.expectations)
        rows = dict.fromkeys(names, row.spec("b", "h", "t"))
        return jax.shard_map(local, mesh=row.mesh, in_specs=specs, out_specs=(P(), rows))(floats, rest)

    return jax.grad(run, has_aux=True)


# ------------------------------------------------------------------- what is compared


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Of all numbers relative to the largest; infinite where other ones are infinite or NaN."""
    if got.shape != want.shape:
        return float("inf")
    wide, right = (np.asarray(x, np.float64) for x in (got, want))
    live = np.isfinite(right)
    if not np.array_equal(wide[~live], right[~live], equal_nan=True) or not np.isfinite(wide[live]).all():
        return float("inf")
    return float(np.abs(wide[live] - right[live]).max(initial=0) / max(np.abs(right[live]).max(initial=0), 1e-3))


def permuted(row: Row, name: str, x: Any, back: bool = False) -> Any:
    """An array over tokens in the order of the layout, or in that of the sequence."""
    if row.layout is None or name not in (*QUERIES, *KEYS):
        return x
    side: Any = "query" if name in QUERIES else "key"
    return (row.layout.unshard if back else row.layout.shard)(x, 2, side)


def run_row(name: str) -> dict[str, Any]:
    """distances of each result and gradient, whether they lie where they should, and the collectives."""
    row = row_of(name)
    want_grads, want = on_one_device(row.case.name)
    floats, rest = arrays_of(row)
    known = {} if row.case.traced else {n: x for n, x in rest.items() if n not in ("w", "u")}
    rest = {n: x for n, x in rest.items() if n not in known}
    put = lambda n, x: jax.device_put(permuted(row, n, x), NamedSharding(row.mesh, row.spec_of(n, x)))
    placed = [{n: put(n, x) for n, x in part.items()} for part in (floats, rest)]
    step, by_value = split_step(row, known), row.case.traced and row.layout is not None
    function = step if by_value else lambda floats, rest, _: step(floats, rest, row.layout)
    argument = row.layout if by_value else None
    with jax.set_mesh(row.mesh):
        program = jax.jit(function).lower(*placed, argument).compile()
        grads, results = program(*placed, argument)
    each = {n: distance(permuted(row, "u", np.asarray(x), True), want[n]) for n, x in results.items()}
    each |= {f"d:{n}": distance(permuted(row, n, np.asarray(x), True), want_grads[n]) for n, x in grads.items()}
    lies = {
        n: x.sharding.is_equivalent_to(placed[0][n].sharding, x.ndim) for n, x in grads.items() if n in "qkv" and x.size
    }
    out = results["out"]
    lies["out"] = not out.size or out.sharding.is_equivalent_to(placed[0]["q"].sharding, 4)
    return {
        "each": each, "lies": [n for n, right in lies.items() if not right],
        "collectives": [
            [c.kind, sorted(map(sorted, c.groups)), c.size, c.in_loop] for c in collectives(program.as_text())
        ],
    }  # fmt: skip


def answer(name: str) -> None:
    try:
        outcome = run_row(name)
    except Exception as error:  # the test says which sentence it expects, and the next row is asked all the same
        outcome = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps({"name": name} | outcome), flush=True)
    jax.clear_caches()


def main(*names: str) -> None:
    warnings.simplefilter("error")
    for name in names or map(str.strip, sys.stdin):
        answer(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
