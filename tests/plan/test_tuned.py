"""Files of measured tiles: round trips, joining, writers at once, what is no such file; the tables of the package; the lookup."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from flexjax.backends import target as targets
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.families import choose_kernel, hopper, kernel_plans
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes import dispatch
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan
from tests.arrays import array
from tests.plan.shipped_plans import FOLDER, PROBLEMS, plans

HERE = targets.default()
KIND = HERE.kind
assert KIND is not None

ROOT = pathlib.Path(__file__).resolve().parents[2]
TILE = {"block_q": 64, "block_kv": 32}
BACK = {"block_q_bwd": 16, "block_kv_bwd": 48}


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "WITHOUT_TILES", frozenset())  # the CPU of the tests stands for a device with tiles
    return tmp_path / "tuned.json"


def made(tile: dict[str, int], seconds: float = 1.0, day: int = 1, finished: bool = True) -> dict[str, typing.Any]:
    return dict(tile=tile, seconds=seconds, measured=f"2026-01-{day:02}T00:00:00Z", finished=finished)


def qkv(tokens: int = 96) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    return tuple(array(rng.standard_normal((1, tokens, 2, 8)), jnp.float32) for _ in range(3))


def plan(tokens: int = 96, **options: typing.Any) -> KernelPlan:
    return prepare(Arguments(*qkv(tokens), kernel_options=KernelOptions(**options))).plan


def name_of(made: KernelPlan, device: str | None = None) -> str:
    return tuned.digest(made, "xla", device or KIND, tuned.versions())


# ------------------------------------------------------------------- files


def test_what_is_written_is_read(cache: pathlib.Path) -> None:
    entries = {"a": {"forward": made(TILE)}, "b": {"backward": made(BACK), "plan": "p"}}
    tuned.write(cache, entries)
    assert tuned.read(cache) == entries
    tuned.write(cache, {"a": {"backward": made(BACK)}})
    assert tuned.read(cache) == entries | {"a": {"forward": made(TILE), "backward": made(BACK)}}
    assert sorted(p.name for p in cache.parent.iterdir()) == [".tuned.json.lock", "tuned.json"]


# fmt: off
JOINS = {
    "newer": (made(TILE, 1.0, day=1), made(BACK, 2.0, day=2), 1),
    "older": (made(TILE, 2.0, day=2), made(BACK, 1.0, day=1), 0),
    "of one time, faster": (made(TILE, 2.0), made(BACK, 1.0), 1),
    "of one time, slower": (made(TILE, 1.0), made(BACK, 2.0), 0),
    "newer, but cut off": (made(TILE, 2.0, day=1), made(BACK, 1.0, day=2, finished=False), 0),
    "older, but finished": (made(TILE, 1.0, day=2, finished=False), made(BACK, 2.0, day=1), 1),
}
# fmt: on


@pytest.mark.parametrize("case", JOINS)
def test_merge(cache: pathlib.Path, case: str) -> None:
    first, second, wins = JOINS[case]
    first, second = first | {"tile": {"block_q": 1}}, second | {"tile": {"block_q": 2}}
    other = cache.with_name("other.json")
    tuned.write(cache, {"a": {"forward": first}, "mine": {"forward": made(TILE)}})
    tuned.write(other, {"a": {"forward": second}, "theirs": {"backward": made(BACK)}})
    before = other.read_bytes()
    assert tuned.merge(cache, other) == 3
    assert other.read_bytes() == before
    found = tuned.read(cache)
    assert set(found) == {"a", "mine", "theirs"}
    assert found["a"] == {"forward": (first, second)[wins]}


WRITER = """
import sys
from flexjax.plan import tuned
for n in range(20):
    made = dict(tile=dict(block_q=1 + n), seconds=1.0, measured="2026-01-01T00:00:00Z", finished=True)
    tuned.write(sys.argv[1], {f"{sys.argv[2]} {n}": dict(forward=made)})
"""


@pytest.mark.slow
def test_writers_at_once(cache: pathlib.Path) -> None:
    if sys.platform == "win32":
        pytest.skip("Windows has no fcntl, with which writers of the file wait for each other: the last one wins")
    command = [sys.executable, "-c", WRITER, str(cache)]
    children = [subprocess.Popen([*command, f"child {n}"], cwd=ROOT) for n in range(3)]
    assert [child.wait(timeout=120) for child in children] == [0, 0, 0]
    assert set(tuned.read(cache)) == {f"child {c} {n}" for c in range(3) for n in range(20)}


# fmt: off
WRONG = {
    "cut off": ('{"format": 1, "entr', "Unterminated string starting at: line 1 column 15 (char 14)"),
    "another format": ('{"format": 7, "entries": {}}', 'expected {"format": 1, "entries": {...}}'),
    "a list": ("[]", 'expected {"format": 1, "entries": {...}}'),
    "nothing in it": ('{"format": 1, "entries": {"a": {}}}', "entry a has no tiles"),
    "unknown option": (
        json.dumps({"format": 1, "entries": {"a": {"forward": made({"blok": 1})}}}),
        "the forward tile of entry a is {'blok': 1}, not options among block_q, block_kv, num_stages",
    ),
    "no number": (
        json.dumps({"format": 1, "entries": {"a": {"backward": made({"block_q_bwd": True})}}}),
        "block_q_bwd of entry a is True, not a positive int",
    ),
    "no time": (
        json.dumps({"format": 1, "entries": {"a": {"forward": {"tile": TILE}}}}),
        "the forward tile of entry a lacks seconds or the time when it was measured",
    ),
}
# fmt: on


@pytest.mark.parametrize("case", WRONG)
def test_no_such_file(cache: pathlib.Path, case: str) -> None:
    text, why = WRONG[case]
    cache.write_text(text)
    sentence = f"`{cache}` is no file of measured tiles: {why}. Move it away or delete it."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        tuned.read(cache)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        tuned.merge(cache.with_name("new.json"), cache)
    assert not cache.with_name("new.json").exists()

    tuned.forget()  # the lookup leaves it alone
    with pytest.warns(UserWarning, match=f"^{re.escape('Measured tiles are not used. ' + sentence)}$"):
        assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()
    assert dispatch.with_measured_tiles(plan(), "xla", HERE) == plan()  # and warns once
    assert cache.read_text() == text

    aside = f"{cache}.0"  # a writer sets it aside
    with pytest.warns(UserWarning, match=f"^{re.escape(f'{sentence} It was set aside as `{aside}`.')}$"):
        tuned.write(cache, {"a": {"forward": made(TILE)}})
    assert pathlib.Path(aside).read_text() == text
    assert tuned.read(cache) == {"a": {"forward": made(TILE)}}


def test_where_the_file_of_the_user_is(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", "")
    assert tuned.cache_file() is None
    monkeypatch.delenv("FLEXJAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.cache_file() == tmp_path / "xdg" / "flexjax" / "tuned.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.cache_file() == tmp_path / ".cache" / "flexjax" / "tuned.json"


# ------------------------------------------------------------------- names


def test_names_of_problems() -> None:
    """Everything that changes the kernel changes the name; tiles, values and a rebuilt mod do not."""
    base = plan()
    assert name_of(base) == name_of(plan(block_q=64, block_kv_bwd=32))
    assert name_of(base) == name_of(plan(96))
    others = [plan(97), plan(deterministic=False), plan(interpret=True)]
    for field, value in (("dtype", "bfloat16"), ("batch", 2), ("scale", 0.5), ("layout", "BNTH"), ("has_sinks", True)):
        others.append(dataclasses.replace(base, **{field: value}))
    biased = []
    for seed in range(2):
        table = jnp.full(192, float(seed))
        score_mod = lambda s, b, h, q, kv, t=table: s + t[q - kv + 96]
        biased.append(prepare(Arguments(*qkv(), score_mod=score_mod)).plan)
    assert name_of(biased[0]) == name_of(biased[1])
    names = {name_of(p) for p in (base, biased[0], *others)} | {name_of(base, "another chip")}
    names |= {tuned.digest(base, "mosaic_gpu", KIND, tuned.versions())}
    names |= {tuned.digest(base, "xla", KIND, ("0.0", flexjax.__version__))}
    assert len(names) == len(others) + 5
    assert tuned.versions() == (jax.__version__, flexjax.__version__)


def test_a_field_that_a_later_version_adds_changes_no_digest() -> None:
    later = dataclasses.make_dataclass(
        "KernelPlan", [("later", int, dataclasses.field(default=0))], bases=(KernelPlan,), frozen=True
    )
    fields = {f.name: getattr(plan(), f.name) for f in dataclasses.fields(KernelPlan)}
    assert tuned.plan_text(later(**fields)) == tuned.plan_text(plan())
    assert tuned.plan_text(later(**fields, later=1)) == tuned.plan_text(plan()).replace(
        "deterministic:", "later: 1\ndeterministic:"
    )

    later_layout = dataclasses.make_dataclass(
        "BlockLayout", [("later", int, dataclasses.field(default=0))], bases=(BlockLayout,), frozen=True, repr=False
    )
    numbers = (1, 1, 128, 128, 3, 0, 3, 0)
    with_blocks = lambda blocks: tuned.plan_text(dataclasses.replace(plan(), blocks=blocks))
    assert with_blocks(later_layout(*numbers)) == with_blocks(BlockLayout(*numbers))
    assert len({with_blocks(x) for x in (BlockLayout(*numbers), later_layout(*numbers, later=1))}) == 2


# ------------------------------------------------------------------- the lookup


def test_the_lookup(cache: pathlib.Path) -> None:
    assert tuned.find(plan(), "xla", KIND) == ({}, "", "")
    tuned.write(cache, {name_of(plan()): {"forward": made(TILE), "backward": made(BACK)}})
    assert tuned.find(plan(), "xla", KIND) == (TILE | BACK, "user", "user")
    filled = dispatch.with_measured_tiles(plan(), "xla", HERE)
    assert filled.options == KernelOptions(**TILE, **BACK)
    assert hash(filled) == hash(dispatch.with_measured_tiles(plan(), "xla", HERE))
    # a tile that the call names, even in part, stays as it is
    assert dispatch.with_measured_tiles(plan(block_q=48), "xla", HERE).options == KernelOptions(block_q=48, **BACK)
    assert dispatch.with_measured_tiles(plan(block_kv_bwd=48), "xla", HERE).options == KernelOptions(
        **TILE, block_kv_bwd=48
    )
    # other problems, backends and devices are not touched
    for other in (plan(97), plan(deterministic=False), plan(interpret=True)):
        assert dispatch.with_measured_tiles(other, "xla", HERE) == other
    assert dispatch.with_measured_tiles(plan(), "mosaic_gpu", HERE) == plan()


def test_other_devices_and_versions_are_ignored(cache: pathlib.Path) -> None:
    jax_, own = tuned.versions()
    kind = KIND
    for device, of in (("NVIDIA H200", (jax_, own)), (kind, ("0.10.9", own)), (kind, (jax_, "0.0.1")), (kind, None)):
        tuned.write(cache, {tuned.digest(plan(), "xla", device, of): {"forward": made(TILE)}})
    assert len(tuned.read(cache)) == 4
    assert tuned.find(plan(), "xla", KIND) == ({}, "", "")


def test_a_tile_that_is_refused_is_not_used(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = prepare(Arguments(*qkv(300), mask_mod=masks.causal)).plan
    tuned.write(cache, {name_of(masked): {"forward": made({"block_q": 100})}})
    refuses = lambda plan, target: "Tiles of 100 queries are refused." if plan.options.block_q == 100 else None
    monkeypatch.setattr(dispatch.backend("xla"), "refuses", refuses)
    sentence = (
        "Measured tiles (block_q=100) are not used. Tiles of 100 queries are refused. Run flexjax.autotune again."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}$"):
        assert dispatch.with_measured_tiles(masked, "xla", HERE) == masked
    assert dispatch.with_measured_tiles(masked, "xla", HERE) == masked


def test_results_and_compilations(cache: pathlib.Path) -> None:
    """Tiles change neither the result nor how often a function is traced."""
    traces = []

    @jax.jit
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> typing.Any:
        traces.append(1)
        loss = lambda *x: jnp.sum(flexjax.flex_attention(*x) ** 2)
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    before = step(*qkv())
    program = jax.jit(flexjax.flex_attention).lower(*qkv()).as_text()
    tuned.write(cache, {name_of(plan()): {"forward": made(TILE), "backward": made(BACK)}})
    step(*qkv())
    assert len(traces) == 1  # what is compiled stays
    jax.clear_caches()
    assert jax.jit(flexjax.flex_attention).lower(*qkv()).as_text() != program
    after = step(*qkv())
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    count = len(traces)
    step(*qkv())
    assert len(traces) == count
    assert "tiles: forward 64 x 32" in flexjax.explain(*qkv())


# ------------------------------------------------------------------- the tables of the package

SHIPPED = {
    (entry["name"], entry["way"]): (key, entry)
    for path in FOLDER.glob("*.json")
    for key, entry in json.loads(path.read_text())["entries"].items()
}


def test_the_tables_are_read() -> None:
    assert {entry["device"] for _, entry in SHIPPED.values()} == {"NVIDIA H200"}
    assert len(tuned.shipped("NVIDIA H200")) == len(SHIPPED) >= 27
    assert tuned.shipped("NVIDIA A100") == {}


def backward_kernels(plan: KernelPlan) -> tuple:
    """The tiles of the kernels that run."""
    chosen = choose_kernel.backward_kernels(plan)
    return (chosen.tiles,) if isinstance(chosen, FusedKernel) else tuple(chosen)


@pytest.mark.parametrize("name", sorted({name for name, _ in SHIPPED}))
def test_the_tables_agree_with_the_heuristics(name: str) -> None:
    """Nothing was measured to be faster than what the heuristics choose: both must name one kernel, to its last slot."""
    assert name in PROBLEMS
    for way, plan in plans(name):
        key, entry = SHIPPED[name, way]
        assert key == tuned.digest(plan, "mosaic_gpu", "NVIDIA H200", None), "run python -m tests.plan.shipped_plans"
        found = tuned.find(plan, "mosaic_gpu", "NVIDIA H200")
        assert found.tiles == {
            n: v for which in tuned.PASSES if which in entry for n, v in entry[which]["tile"].items()
        }
        assert {found.forward, found.backward} <= {"package", ""}
        filled = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **found.tiles))
        own, given = (
            forward_hopper_tiles.forward_tile(kernel_plans.kernel_plan(p, hopper.HOPPER)) for p in (plan, filled)
        )
        assert given == own
        assert hopper.HOPPER.refuses(filled) is None
        assert backward_kernels(filled) == backward_kernels(plan)
        for which in tuned.PASSES:
            if which in entry:
                assert 0 < entry[which]["seconds"] < 0.1
                file, heading = entry[which]["source"].split(", ", 1)
                assert f"\n## {heading}\n" in (ROOT / file).read_text()


def test_the_user_comes_before_the_package(cache: pathlib.Path) -> None:
    ((_, plan),) = plans("full d128")
    mine = {"block_q": 64, "block_kv": 128, "num_stages": 2}
    name = tuned.digest(plan, "mosaic_gpu", "NVIDIA H200", tuned.versions())
    tuned.write(cache, {name: {"forward": made(mine)}})
    assert tuned.find(plan, "mosaic_gpu", "NVIDIA H200") == (
        mine | {"block_q_bwd": 64, "block_kv_bwd": 128},
        "user",
        "package",
    )
