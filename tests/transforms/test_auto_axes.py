"""Arrays that are split over automatic mesh axes under jit, on eight CPU devices in a child process.

    python -m tests.transforms.test_auto_axes [gspmd] [CASE ...]      a line of JSON for each case

Each case is compared with one device: out, gradients of everything, and where they lie. What is communicated, and how often
loops go round, is read from the compiled programs.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import masks, mods
from tests.arrays import array
from tests.conftest import QUICK_TO_COMPILE

B, N, T, D = 8, 8, 16, 4
Outcome = dict[str, Any]


# ------------------------------------------------------------------- what the child runs


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


@dataclasses.dataclass(frozen=True)
class Case:
    """specs: of query; key and value; the table of each head; ids of each batch entry. All else is on every device."""

    specs: tuple[P, P, P, P]
    key_heads: int = N


BOTH = ("x", "y")
BATCH, HEADS, BATCH_HEADS, WHOLE = P(BOTH), P(None, None, BOTH), P("y", None, "x"), P()
CASES = {
    "batch": Case((BATCH, BATCH, WHOLE, P(BOTH))),
    "heads": Case((HEADS, HEADS, P(BOTH), WHOLE)),
    "batch and heads": Case((BATCH_HEADS, BATCH_HEADS, P("x"), P("y"))),
    "grouped heads": Case((BATCH_HEADS, BATCH_HEADS, P("x"), P("y")), key_heads=2),
    "key heads that are whole": Case((HEADS, WHOLE, P(BOTH), WHOLE), key_heads=2),
    "one key head": Case((P(None, None, "y"), WHOLE, WHOLE, WHOLE), key_heads=1),
}


def arrays(key_heads: int) -> tuple[jax.Array, ...]:
    """query, key, value, sinks, a table for each head, a table that all share, ids."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, D), (B, T, key_heads, D), (B, T, key_heads, D), (N,), (N, 2 * T), (2 * T,))
    ids = np.sort(rng.integers(0, 3, (B, T)), -1)
    return (*(array(rng.standard_normal(s), jnp.float32) for s in shapes), jnp.asarray(ids, jnp.int32))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array, table: jax.Array, shared: jax.Array, ids: jax.Array
) -> jax.Array:
    alibi = mods.alibi(N)

    def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        return alibi(s, b, h, i, j) + table[h, i - j + T] + shared[i - j + T] * (b + 1)

    mask_mod = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)
    return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, sinks=sinks)


def loss(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = attend(*given)
    return (out * jnp.cos(jnp.arange(D))).sum() + (out**2).sum(), out


def collectives(text: str) -> list[str]:
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(re.findall(rf"= .*? ({kinds})(?:-start)?\(", text))


def distance(got: Any, want: Any) -> float:
    """Of all numbers, relative to the largest of each array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()) for a, b in pairs)


def run_case(name: str) -> Outcome:
    """Runs a case of CASES on a mesh: error against one device, the collectives, and whether results are split as the inputs
    are.
    """
    case = CASES[name]
    given = arrays(case.key_heads)
    query, key, table, ids = case.specs
    specs = (query, key, key, WHOLE, table, WHOLE, ids)
    placed = [jax.device_put(x, NamedSharding(mesh_of(), s)) for x, s in zip(given, specs, strict=True)]
    step = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)
    program = jax.jit(step).lower(*placed).compile()
    grads, out = program(*placed)
    return {
        "distance": distance((grads, out), jax.jit(step)(*given)),
        "collectives": collectives(program.as_text()),
        "out": out.sharding.is_equivalent_to(placed[0].sharding, 4),
        "primals": [
            g.sharding.is_equivalent_to(x.sharding, g.ndim) for g, x in zip(grads[:3], placed[:3], strict=True)
        ],
    }


def run_trips() -> Outcome:
    """How often the loops of a forward pass go round, on one device and on each of eight."""
    x = jnp.ones((B, 4096, N, 8))
    count = lambda *a: [int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"', text(*a))]
    attend = lambda q: flexjax.flex_attention(q, q, q, mask_mod=masks.causal)
    text = lambda q: jax.jit(attend).lower(q).compile().as_text()
    split = [jax.device_put(x, NamedSharding(mesh_of(), s)) for s in (BATCH, HEADS, BATCH_HEADS)]
    return {"one": count(x), "eight": [count(q) for q in split]}


def run_transformations() -> Outcome:
    """In float64 with a context of its own, which the threads of XLA do not see."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x = array(rng.standard_normal((4, T, 4, D)))
        table = array(rng.standard_normal((4, 2 * T)))
        placed = jax.device_put(x, NamedSharding(mesh_of(), P("y", None, "x")))

        def run(x: jax.Array, table: jax.Array) -> jax.Array:
            mod = lambda s, b, h, i, j: s + table[h, i - j + T] + 0.1 * h
            return flexjax.flex_attention(x, x, x, score_mod=mod, mask_mod=masks.causal)

        def layers(x: jax.Array, table: jax.Array) -> jax.Array:
            layer = jax.checkpoint(lambda x: x + run(x, table))
            return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

        gradient = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1))
        mapped = lambda x, table: jax.vmap(lambda s: run(x * s, table * s))(jnp.arange(1.0, 3.0))
        tangent = lambda x, table: jax.jvp(run, (x, table), (jnp.cos(x), jnp.sin(table)))[1]
        functions = {"scan": gradient(layers), "vmap": gradient(mapped), "jvp": tangent}
        outcome: Outcome = {n: distance(jax.jit(f)(placed, table), jax.jit(f)(x, table)) for n, f in functions.items()}
        outcome["eager"] = distance(run(placed, table), run(x, table))
        return outcome


def run_placements() -> Outcome:
    """Every way in which a program comes to several devices, and counts of devices that are no power of two."""
    x = arrays(N)[0]
    run = lambda x: flexjax.flex_attention(x, x, x, score_mod=mods.alibi(N), mask_mod=masks.causal)
    want = run(x)
    auto, spec = mesh_of(), BATCH_HEADS
    where = NamedSharding(auto, spec)
    three = jax.sharding.Mesh(np.array(jax.devices()[5::-1]).reshape(3, 2), ("x", "y"))
    found = {
        "in_shardings": distance(jax.jit(run, in_shardings=where)(np.asarray(x)), want),
        "six devices": distance(jax.jit(run)(jax.device_put(x[:6], NamedSharding(three, P("x", None, "y")))), want[:6]),
    }
    few = x[:, :, :2]
    attend = lambda q, k: flexjax.flex_attention(q, k, k, mask_mod=masks.causal)
    heads, whole = (jax.device_put(a, NamedSharding(auto, s)) for a, s in ((x, HEADS), (few, WHOLE)))
    found["key heads that are whole"] = distance(jax.jit(attend)(heads, whole), attend(x, few))
    with jax.set_mesh(auto):
        found["mesh that is set"] = distance(jax.jit(run)(jax.device_put(x, spec)), want)
    return {"distance": max(found.values())}


def run_warnings() -> Outcome:
    """What is said, and what explain says."""
    x = arrays(N)[0]
    auto = mesh_of()
    placed = jax.device_put(x, NamedSharding(auto, P("x", "y")))
    run = lambda x: flexjax.flex_attention(x, x, x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    partly = jax.shard_map(run, mesh=auto, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    said: Outcome = {}

    @contextlib.contextmanager
    def listen(name: str) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield
        said[name] = [f"{w.category.__name__}: {w.message}" for w in heard]

    with listen("gather"):
        for _ in range(2):
            jax.clear_caches()
            said["distance"] = distance(jax.jit(run)(placed), run(x))
    with listen("nothing"):
        jax.jit(run)(jax.device_put(x, NamedSharding(auto, BATCH_HEADS)))
    with listen("part of a mesh"):
        jax.jit(partly)(x)
    with listen("export"):
        jax.export.export(jax.jit(run, in_shardings=NamedSharding(auto, P("x"))))(shape)
    for name, spec in (("explain", P("x", "y")), ("explain nothing", P("y", None, "x")), ("explain whole", P())):
        given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(auto, spec))
        said[name] = [s for s in flexjax.explain(given, given, given).split("\n\n") if s.startswith("devices")]
    said["explain one device"] = "devices:" in flexjax.explain(shape, shape, shape)
    return said


def run_programs() -> Outcome:
    """The call of the rule in programs as they are lowered."""
    where = NamedSharding(mesh_of(), P("x"))

    def calls(scale: float, sharding: Any = where, around: Callable = lambda f: f, **tiles: Any) -> list[str]:
        options = flexjax.KernelOptions(**tiles)
        mod = lambda s, b, h, i, j: s * scale
        run = around(lambda x: flexjax.flex_attention(x, x, x, score_mod=mod, kernel_options=options))
        x = jax.ShapeDtypeStruct((B, T, N, D), jnp.float32, sharding=sharding)
        lowered = jax.jit(run).lower(x).as_text()
        assert lowered.count("CustomSPMDPartitioning") == lowered.count("flexjax_call")
        return re.findall(r'flexjax_call = "(\w+)"', lowered)

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    mapped = functools.partial(jax.shard_map, mesh=mesh_of(), in_specs=P("x"), out_specs=P("x"))
    again, others = calls(2.0), calls(3.0)
    return {
        "count": len(again),
        "same": again == calls(2.0),
        "others": again != others,
        "tiles": len({*again, *calls(2.0, block_q=8), *calls(2.0, block_kv_bwd=8), *calls(2.0, split=2)}),
        "one device": calls(2.0, one),
        "shard_map": calls(2.0, where, mapped),
    }


RUNS: dict[str, Callable[[], Outcome]] = {
    **{name: functools.partial(run_case, name) for name in CASES},
    "trips": run_trips,
    "transformations": run_transformations,
    "placements": run_placements,
    "warnings": run_warnings,
    "programs": run_programs,
}


SLOW = ("batch", "heads", "grouped heads", "key heads that are whole", "one key head")
"""Cases that are left to the slow run: "batch and heads" splits both at once, and run_placements has key heads that are whole."""
EVERYDAY = ("batch and heads", "programs")
"""Outcomes of the default run: a case, and what the programs that XLA splits look like."""


def main(*given: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*GSPMD.*")
    if "gspmd" in given:
        jax.config.update("jax_use_shardy_partitioner", False)
    for name in [n for n in given if n != "gspmd"]:
        print(json.dumps({"name": name} | RUNS[name]()), flush=True)


# ------------------------------------------------------------------- tests


def child(*given: str) -> dict[str, Outcome]:
    """Runs `main` on eight CPU devices in a process of its own; returns the outcomes by name."""
    flags = {"xla_force_host_platform_device_count": "8"} | QUICK_TO_COMPILE
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in flags.items())}
    command = [sys.executable, "-m", "tests.transforms.test_auto_axes", *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return child(*EVERYDAY)


@pytest.fixture(scope="module")
def slow_outcomes() -> dict[str, Outcome]:
    return child(*[name for name in RUNS if name not in (*EVERYDAY, *SLOW)])


def assert_split(name: str, outcome: Outcome) -> None:
    """Asserts that a case is right and computed in shares, with sums as its only collectives."""
    assert outcome["distance"] < 1e-5
    assert outcome["out"]
    assert all(outcome["primals"])  # of query, key and value; how the others' gradients lie is left to XLA
    # None of the forward pass and of the gradients of query and what is split as it is. A sum over each set of axes: of those that split the batch for the table of each head, of all axes for what all share.
    sums = {"batch and heads": 2, "grouped heads": 2}.get(name, 1)
    assert outcome["collectives"] == ["all-reduce"] * sums


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_batch_and_heads_are_split_without_a_collective(name: str, outcomes: dict[str, Outcome]) -> None:
    """Right values, and only the gradients of what devices share are summed."""
    assert_split(name, outcomes[name])


@pytest.mark.slow
def test_loops_are_shorter_on_more_devices(slow_outcomes: dict[str, Outcome]) -> None:
    trips = slow_outcomes["trips"]
    assert sum(trips["one"]) > 0
    for each in trips["eight"]:
        assert sum(each) < sum(trips["one"])


@pytest.mark.slow
def test_transformations(slow_outcomes: dict[str, Outcome]) -> None:
    for name, distance in slow_outcomes["transformations"].items():
        assert distance < 1e-12, name


@pytest.mark.slow
def test_placements(slow_outcomes: dict[str, Outcome]) -> None:
    assert slow_outcomes["placements"]["distance"] < 1e-5


CALL = "in flex_attention(query=float32[{0}], key=float32[{0}], value=float32[{0}])"
ALL_OF_IT = "FallbackWarning: Every device computes all of a call, and gathers first what is split: "


@pytest.mark.slow
def test_what_is_gathered_is_said_once(slow_outcomes: dict[str, Outcome]) -> None:
    said = slow_outcomes["warnings"]
    whole = CALL.format("8, 16, 8, 4")
    each = ", ".join(f"{name} 6.14 kB (split over tokens)" for name in ("query", "key", "value"))
    assert said["distance"] < 1e-5
    assert said["nothing"] == []
    assert said["gather"] == [
        f"FallbackWarning: Each device receives 18.4 kB before the forward pass of a call: {each}. Attention keeps a split of the "
        f"batch and of the heads, and gathers other splits. Split the batch or the heads instead, or name the axis that splits the tokens in "
        f"context=flexjax.ContextParallel(axis). {whole}"
    ]
    assert said["part of a mesh"] == [
        f"{ALL_OF_IT}jax.shard_map over the axes x leaves y to XLA, which has no partitioning rules inside it. Pass "
        f"jax.shard_map all axes, to have the batch and the heads split. {CALL.format('4, 16, 8, 4')}"
    ]
    assert said["export"] == [
        f"{ALL_OF_IT}an exported program holds no partitioning rules. Make the axes explicit (jax.make_mesh with "
        f"AxisType.Explicit, then jax.set_mesh), or use jax.shard_map, to have the batch and the heads split. {whole}"
    ]
    assert said["explain"] == [
        f"devices: x 2 x y 4\n  the work is split by batch over x\n  each device receives 18.4 kB: {each}"
    ]
    assert said["explain nothing"] == [
        "devices: x 2 x y 4\n  the work is split by batch over y and heads over x\n  nothing is gathered"
    ]
    assert said["explain whole"] == ["devices: x 2 x y 4\n  every device computes all of it\n  nothing is gathered"]
    assert said["explain one device"] is False


def test_programs_have_the_rule_where_xla_splits_them(outcomes: dict[str, Outcome]) -> None:
    """The call names what it computes, because its address is all that the text of the program has of it."""
    assert outcomes["programs"] == {
        "count": 1,
        "same": True,
        "others": True,
        "tiles": 4,
        "one device": [],
        "shard_map": [],
    }


@pytest.mark.slow
@pytest.mark.parametrize("given", [SLOW, ("gspmd", *CASES)], ids=["the rest", "the older partitioner"])
def test_more_cases(given: tuple[str, ...]) -> None:
    for name, outcome in child(*given).items():
        assert_split(name, outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
