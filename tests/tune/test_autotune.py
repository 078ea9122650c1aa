"""autotune: what it times, in which order and for how long; what it keeps; what it refuses. With the tiles of xla."""

import functools
import importlib
import io
import itertools
import json
import logging
import pathlib
import re
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from flexjax.backends import target as targets
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.passes import dispatch
from flexjax.plan import tuned
from flexjax.tune import time_tiles
from tests.arrays import array

MODULE = importlib.import_module("flexjax.tune.autotune")  # flexjax.autotune is the function
FORWARD, BACKWARD = tuned.PASSES["forward"], tuned.PASSES["backward"]


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "WITHOUT_TILES", frozenset())  # the CPU of the tests stands for a device with tiles
    return tmp_path / "tuned.json"


def qkv(tokens: int = 160) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    return tuple(array(rng.standard_normal((1, tokens, 2, 8)), jnp.float32) for _ in range(3))


def candidates(**arguments: typing.Any) -> list[dict[str, int]]:
    return dispatch.backend("xla").tile_candidates(prepare(Arguments(*qkv(), **arguments)).plan, targets.default())


def parts(names: tuple[str, ...], found: list[dict[str, int]]) -> list[dict[str, int]]:
    picked = [{n: c[n] for n in names if n in c} for c in found]
    return [t for n, t in enumerate(picked) if t not in picked[:n]]


class Scripted:
    """A clock that stands, and candidates that take as long as `seconds(which, number)` says, each trial ten times that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, int], float | None]) -> None:
        self.now, self.tried, self.seconds = 100.0, [], seconds
        monkeypatch.setattr(time_tiles, "clock", lambda: self.now)
        monkeypatch.setattr(time_tiles, "time_tile", self._time)

    def _time(
        self, call: typing.Any, plan: typing.Any, name: str, which: str, tile: dict, *_: typing.Any
    ) -> typing.Any:
        number = sum(t[0] == which for t in self.tried)
        self.tried.append((which, tile, plan.options))
        took = self.seconds(which, number)
        self.now += 10 * (took or 0.1)
        return time_tiles.Trial(time_tiles.Timing(which, tile, took, 1, "" if took else "it does not fit"), None)


# ------------------------------------------------------------------- the real thing


@pytest.mark.slow
@pytest.mark.parametrize("mask_mod", [None, masks.causal], ids=["plain", "causal"])
def test_it_times_every_candidate(cache: pathlib.Path, mask_mod: typing.Any) -> None:
    found = flexjax.autotune(*qkv(), mask_mod=mask_mod, seconds=300.0, progress=False)
    every = candidates(mask_mod=mask_mod)
    assert [t.tile for t in found.timings if t.which == "forward"] == parts(FORWARD, every)
    assert [t.tile for t in found.timings if t.which == "backward"] == parts(BACKWARD, every)
    assert all(t.seconds is not None and t.seconds > 0 and t.calls >= 3 and not t.skipped for t in found.timings)
    assert (found.finished, found.backend, found.kept) == (True, "xla", cache)
    for names in (FORWARD[:2], BACKWARD):
        assert {n: getattr(found.options, n) for n in names} in parts(names, every)

    def step(options: KernelOptions | None) -> typing.Any:
        loss = lambda *x: jnp.sum(flexjax.flex_attention(*x, mask_mod=mask_mod, kernel_options=options) ** 2)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv())

    by_itself = step(None)  # finds the tiles in the file
    assert all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(by_itself), jax.tree.leaves(step(found.options)), strict=True)
    )
    cache.unlink()
    tuned.forget()
    for a, b in zip(jax.tree.leaves(by_itself), jax.tree.leaves(step(None)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_shapes_instead_of_arrays(cache: pathlib.Path) -> None:
    """Every kind of array, and the same entry as with arrays of that shape."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(40)]
    rest = dict(
        sinks=jax.ShapeDtypeStruct((2,), jnp.float32),
        query_extra=jax.ShapeDtypeStruct((1, 40, 2, 4), jnp.float32),
        key_extra=jax.ShapeDtypeStruct((1, 40, 1, 4), jnp.float32),
        dropout=flexjax.Dropout(0.1, jax.ShapeDtypeStruct((), jax.random.key(0).dtype)),
    )
    # a second or two for what would take longer: one candidate of the forward pass at least
    found = flexjax.autotune(*shapes, **rest, seconds=0.01, backward=False)
    assert found.timings[0].seconds is not None
    (name,) = tuned.read(cache)
    filled: typing.Any = dict(
        sinks=jnp.ones(2), query_extra=jnp.ones((1, 40, 2, 4)), key_extra=jnp.ones((1, 40, 1, 4)),
        dropout=flexjax.Dropout(0.1, jax.random.key(3)),
    )  # fmt: skip
    plan = prepare(Arguments(*qkv(40), **filled)).plan
    assert name == tuned.digest(plan, "xla", targets.default().kind, tuned.versions())


# ------------------------------------------------------------------- the search


def test_the_fastest_is_chosen(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"forward": [1.0, 0.9, 0.5, 0.7], "backward": [3.0, 2.0, 2.5, 2.6]}
    script = Scripted(monkeypatch, lambda which, n: (times[which] + [9.0] * 20)[n])
    found = flexjax.autotune(*qkv(), seconds=1e6, implementation="xla")
    every = candidates()
    best = parts(FORWARD, every)[2] | parts(BACKWARD, every)[1]
    assert found.options == KernelOptions(**best)
    assert all(options.block_q == best["block_q"] for which, _, options in script.tried if which == "backward")
    (entry,) = tuned.read(cache).values()
    assert {k: entry[k] for k in ("device", "backend", "jax", "flexjax")} == dict(
        device=targets.default().kind, backend="xla", jax=jax.__version__, flexjax=flexjax.__version__
    )
    assert entry["plan"] == "B=1 N=2 M=2 T=160 S=160 D=8 E=8 float32 BTNH"
    for which, names, seconds in (("forward", FORWARD[:2], 0.5), ("backward", BACKWARD, 2.0)):
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry[which].pop("measured"))
        assert entry[which] == dict(tile={n: best[n] for n in names}, seconds=seconds, finished=True)


def test_the_backends_own_tile_stays_unless_another_is_faster_by_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, lambda which, n: 1.0 if n == 0 else 0.985)
    found = flexjax.autotune(*qkv(), seconds=1e6, backward=False)
    assert found.options == KernelOptions(**parts(FORWARD, candidates())[0])


class Turns:
    """Two candidates whose calls take `seconds`, after first trials in which the other one looked faster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float]) -> None:
        self.now, self.ran, self.seconds = 0.0, [], seconds
        script = Scripted(monkeypatch, lambda which, n: (2 * seconds[0], seconds[1])[n] if n < 2 else 9.0)
        alone = script._time
        monkeypatch.setattr(time_tiles, "clock", lambda: self.now)
        monkeypatch.setattr(
            time_tiles,
            "time_tile",
            lambda *given: alone(*given)._replace(run=functools.partial(self.run, len(script.tried) - 1)),
        )

    def run(self, number: int) -> None:
        self.ran.append(number)
        self.now += self.seconds[number]


@pytest.mark.parametrize("steady", [0.5, 0.985, 1.2])
def test_the_first_candidate_may_have_run_while_the_device_woke_up(
    monkeypatch: pytest.MonkeyPatch, steady: float
) -> None:
    """The second is faster than the first was; it is chosen if it is when their times are interleaved."""
    turns = Turns(monkeypatch, (0.01, 0.01 * steady))
    found = flexjax.autotune(*qkv(), seconds=1e6, backward=False, cache=False)
    chosen = int(steady < time_tiles.MARGIN)
    assert found.options == KernelOptions(**parts(FORWARD, candidates())[chosen])
    assert [t.seconds for t in found.timings[:3]] == [pytest.approx(0.01), pytest.approx(0.01 * steady), 9.0]
    assert [t.calls for t in found.timings[:3]] == [turns.ran.count(0), turns.ran.count(1), 1]
    assert (turns.ran[0], turns.ran[-1]) == (0, 1)
    assert min(turns.ran.count(0), turns.ran.count(1)) >= 30
    assert sum(a != b for a, b in itertools.pairwise(turns.ran)) == 2 * time_tiles.ROUNDS - 1
    assert turns.now < 1.2


def test_turns_of_long_calls_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not take the time of the backward pass."""
    turns = Turns(monkeypatch, (0.7, 0.6))
    found = flexjax.autotune(*qkv(), seconds=1e6, backward=False, cache=False)
    assert turns.ran == [0, 1]
    assert [t.seconds for t in found.timings[:2]] == [pytest.approx(0.7), pytest.approx(0.6)]
    assert found.options == KernelOptions(**parts(FORWARD, candidates())[1])


def test_turns_that_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns(monkeypatch, (0.01, 0.01))

    def fail(number: int) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(turns, "run", fail)
    with caplog.at_level(logging.WARNING):
        found = flexjax.autotune(*qkv(), seconds=1e6, backward=False, cache=False)
    assert [t.seconds for t in found.timings[:2]] == [0.02, 0.01]
    assert found.options == KernelOptions(**parts(FORWARD, candidates())[1])
    said = "autotune does not time its choice again: ValueError: RESOURCE_EXHAUSTED: out of memory"
    assert said in [r.getMessage() for r in caplog.records]


def test_it_stops_when_the_time_is_up(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial takes 10 s: of 100 s the forward pass gets 40, the backward pass what is left."""
    count = len(parts(FORWARD, candidates(mask_mod=None)))
    assert count > 4
    script = Scripted(monkeypatch, lambda which, n: 1.0)
    found = flexjax.autotune(*qkv(), seconds=100.0)
    assert [which for which, *_ in script.tried].count("forward") == 4
    assert script.now <= 200.0
    assert not found.finished
    assert str(found).splitlines()[-1] == "  the time was up before every candidate was tried"
    (entry,) = tuned.read(cache).values()
    assert entry["forward"]["finished"] is False
    # no time at all: the backend's own forward tile is timed, and nothing else
    script.tried.clear()
    found = flexjax.autotune(*qkv(), seconds=1e-9, cache=False)
    assert [(which, tile) for which, tile, _ in script.tried] == [("forward", parts(FORWARD, candidates())[0])]
    assert found.options.block_q_bwd is None


def test_ctrl_c_keeps_what_was_measured(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = len(parts(FORWARD, candidates()))

    def stop_in(which: str, number: int) -> float:
        if (which, number) == ("backward", 1):
            raise KeyboardInterrupt
        return 1.0

    closed = []
    monkeypatch.setattr(MODULE.ProgressBar, "close", lambda bar: closed.append(bar))
    script = Scripted(monkeypatch, stop_in)
    with pytest.raises(KeyboardInterrupt):
        flexjax.autotune(*qkv(), seconds=1e6)
    assert len(script.tried) == forwards + 2
    (entry,) = tuned.read(cache).values()
    assert [entry[which]["finished"] for which in tuned.PASSES] == [True, False]
    assert entry["backward"]["tile"] == parts(BACKWARD, candidates())[0]
    assert len(closed) == 1


def test_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of calls that are waited for; no more of them than the limits say."""
    call = prepare(Arguments(*qkv()))
    took = {"now": 0.0, "call": 0.0}
    monkeypatch.setattr(time_tiles, "clock", lambda: took["now"])

    def ready(x: typing.Any) -> typing.Any:
        took["now"] += took["call"]
        return x

    monkeypatch.setattr(time_tiles.jax, "block_until_ready", ready)

    def timing(seconds: float, limit: float) -> typing.Any:
        took.update(now=0.0, call=seconds)
        return time_tiles.time_tile(
            call, call.plan, dispatch.on_xla(call.plan, targets.default()), "forward", {}, (0, 1, 2), limit
        ).timing

    assert timing(0.001, 100.0)[2:4] == (pytest.approx(0.001), 200)
    assert timing(0.01, 100.0)[2:4] == (pytest.approx(0.01), 50)
    assert timing(0.1, 100.0)[2:4] == (pytest.approx(0.1), 5)  # half a second
    assert timing(1.0, 100.0)[2:4] == (pytest.approx(1.0), 3)
    assert timing(10.0, 100.0)[2:4] == (pytest.approx(10.0), 1)  # seconds: once is enough
    assert timing(0.001, 0.0025)[2:4] == (pytest.approx(0.001), 2)  # the warm-up counts too
    assert timing(0.001, 0.0)[2:4] == (pytest.approx(0.001), 1)


def test_candidates_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = time_tiles.attention

    def attention(problem: typing.Any, operands: typing.Any) -> typing.Any:
        if problem.plan.options.block_q == parts(FORWARD, candidates())[0]["block_q"]:
            raise NotImplementedError("too large.\nThe rest is long.")
        return real(problem, operands)

    monkeypatch.setattr(time_tiles, "attention", attention)
    with caplog.at_level(logging.WARNING):
        found = flexjax.autotune(*qkv(), seconds=300.0, backward=False, cache=False)
    first = parts(FORWARD, candidates())[0]
    assert found.timings[0] == ("forward", first, None, 0, "NotImplementedError: too large.")
    assert found.options.block_q not in (None, first["block_q"])
    text = f"block_q={first['block_q']} block_kv={first['block_kv']}"
    assert f"autotune leaves out {text}: NotImplementedError: too large." in [r.getMessage() for r in caplog.records]
    assert f"  forward               -     {text}  NotImplementedError: too large." in str(found).splitlines()


def test_a_tile_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_tiles", lambda *_: [{"block_q": 100}, {"block_kv": 128}])
    sentence = "Tiles of 100 queries are refused."
    refuses = lambda plan, target: sentence if plan.options.block_q == 100 else None
    monkeypatch.setattr(dispatch.backend("xla"), "refuses", refuses)
    found = flexjax.autotune(*qkv(300), mask_mod=masks.causal, backward=False, cache=False)
    assert found.timings[0] == ("forward", {"block_q": 100}, None, 0, sentence)
    assert found.options == KernelOptions(block_kv=128)


def test_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, lambda which, n: None)
    monkeypatch.setattr(MODULE, "_tiles", lambda *_: [{"block_q": 7}])
    with pytest.raises(RuntimeError) as caught:
        flexjax.autotune(*qkv(), backward=False)
    assert str(caught.value) == "No candidate of xla runs. block_q=7: it does not fit"
    assert caught.value.__notes__ == [
        "in autotune(query=float32[1, 160, 2, 8], key=float32[1, 160, 2, 8], value=float32[1, 160, 2, 8])"
    ]


def test_tiles_that_the_call_names_are_kept(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search in part of the candidates says nothing about the best: it is not written."""
    script = Scripted(monkeypatch, lambda which, n: 1.0 / (n + 1))
    found = flexjax.autotune(*qkv(), kernel_options=KernelOptions(block_q=32, deterministic=False), backward=False)
    assert all(options.block_q == 32 and not options.deterministic for _, _, options in script.tried)
    assert set(found.timings[0].tile) == {"block_kv"}
    assert (found.options.block_q, found.options.deterministic) == (32, False)
    assert found.kept is None
    assert not cache.exists()


def test_where_it_is_kept(tmp_path: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, lambda which, n: 1.0)
    assert flexjax.autotune(*qkv(), cache=False).kept is None
    mine = tmp_path / "deep" / "mine.json"
    assert flexjax.autotune(*qkv(), cache=mine).kept == mine
    assert not cache.exists()
    assert json.loads(mine.read_text())["format"] == 1
    monkeypatch.setenv("FLEXJAX_CACHE_DIR", "")
    assert flexjax.autotune(*qkv()).kept is None


# ------------------------------------------------------------------- what is shown


def test_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        terminal = False

        def isatty(self) -> bool:
            return self.terminal

    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(MODULE, "_tiles", lambda name, plan, which: [{"block_q": 8}, {"block_q": 16}])
    Scripted(monkeypatch, lambda which, n: 1.0)
    arguments: typing.Any = dict(backward=False, cache=False, seconds=100.0)
    flexjax.autotune(*qkv(), **arguments)
    flexjax.autotune(*qkv(), **arguments, progress=False)
    assert stream.getvalue() == ""
    lines = [
        "[........................] 0/2, 100 s left, now block_q=8",
        "[############............] 1/2, 90 s left, best 1000.000 ms, now block_q=16",
        "",
    ]
    Scripted(monkeypatch, lambda which, n: 1.0)
    flexjax.autotune(*qkv(), **arguments, progress=True)
    assert stream.getvalue().split("\r\x1b[K") == ["", *lines]
    stream.seek(0)
    stream.truncate()
    stream.terminal = True
    Scripted(monkeypatch, lambda which, n: 1.0)
    flexjax.autotune(*qkv(), **arguments)
    assert stream.getvalue().split("\r\x1b[K") == ["", *lines]


def test_the_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stderr is no terminal; each text covers the one before it, without escape codes."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr("sys.stderr", stream)
    bar = MODULE.ProgressBar(2, None)
    bar.show(0, 100.0, None, "block_q=8")
    bar.close()
    text = "[........................] 0/2, 100 s left, now block_q=8"
    assert stream.getvalue() == f"\r{text}\r{' ' * len(text)}"
    MODULE.ProgressBar(2, False).show(0, 1.0, None, "x")
    assert stream.getvalue().count("\r") == 2


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, lambda which, n: 0.002 if n == 1 else 0.003)
    tiles = {"forward": [{"block_q": 8}, {"block_q": 16}], "backward": [{"block_kv_bwd": 4}]}
    monkeypatch.setattr(MODULE, "_tiles", lambda name, plan, which: tiles[which])
    tuning = flexjax.autotune(*qkv(), cache=False)
    assert repr(tuning) == str(tuning)
    assert tuning._repr_html_() == f"<pre>{tuning}</pre>"
    assert str(tuning).splitlines() == [
        "xla: best block_q=16 block_kv_bwd=4",
        "  forward           3.000 ms  block_q=8",
        "* forward           2.000 ms  block_q=16",
        "* both passes       3.000 ms  block_kv_bwd=4",
    ]


# ------------------------------------------------------------------- what it refuses

# fmt: off
BAD: dict[str, tuple[dict[str, typing.Any], str]] = {
    "backward": ({"backward": 1}, "`backward` is 1; expected True, False or None. None times it where there are gradients."),
    "seconds": ({"seconds": 0}, "`seconds` is 0; expected a positive, finite number. For example 60."),
    "endless": ({"seconds": float("inf")}, "`seconds` is inf; expected a positive, finite number. For example 60."),
    "no number": ({"seconds": "60"}, "`seconds` is '60'; expected a positive, finite number. For example 60."),
    "cache": ({"cache": 3}, "`cache` is 3; expected True, False or a path. True is the user's file."),
    "progress": ({"progress": "yes"}, "`progress` is 'yes'; expected True, False or None. None draws a bar on a terminal."),
    "simulator": (
        {"kernel_options": KernelOptions(interpret=True), "implementation": "xla"},
        "`kernel_options.interpret` is True; expected False. The time of a simulated kernel says nothing about the kernel.",
    ),
    "layout": ({"layout": "TBN"}, "`layout` is 'TBN'; expected 'BTNH' or 'BNTH'. BTNH is [batch, tokens, heads, dim]."),
}
# fmt: on


def test_a_file_that_cannot_be_written_loses_no_search(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a file").write_text("")
    path = tmp_path / "a file" / "tuned.json"
    with pytest.warns(
        UserWarning, match=r"^autotune keeps no tiles: .*a file.*Pass `options` of its result as kernel_options"
    ):
        found = flexjax.autotune(*qkv(), seconds=0.01, backward=False, cache=path)
    assert found.kept is None
    assert found.options.block_q is not None


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    arguments, sentence = BAD[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
        flexjax.autotune(*qkv(), **arguments)
    assert str(caught.value) == sentence


def test_other_refusals() -> None:
    with pytest.raises(TypeError) as caught:
        flexjax.autotune(*qkv(), mask=3)
    assert str(caught.value) == (
        "autotune() got unexpected arguments mask; it takes those of flex_attention. In place of `mask` write mask_mod=lambda b, h, q_idx, "
        "kv_idx: mask[b, h, q_idx, kv_idx] for bools, score_mod=flexjax.mods.pair_bias(mask) for numbers that are added."
    )
    with pytest.raises(NotImplementedError) as refused:
        flexjax.autotune(*qkv(), implementation="reference")
    assert str(refused.value) == "The reference implementation has no tiles to choose."
    sentence = (
        "`query` is traced; expected an array or a jax.ShapeDtypeStruct. Call autotune outside of jit, and pass shapes."
    )
    with pytest.raises(ValueError) as traced:  # noqa: PT011  # the whole message is compared
        jax.jit(lambda q: flexjax.autotune(q, *qkv()[1:]).options.block_q)(qkv()[0])
    assert str(traced.value) == sentence


NEEDS_NEW_JAX = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[NEEDS_NEW_JAX] if n == "mosaic_gpu" else []) for n in sorted(dispatch.TABLE)]
)
def test_every_backend_has_candidates_of_both_passes(name: str) -> None:
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
    plan = prepare(Arguments(x, x, x, mask_mod=masks.causal)).plan
    found = dispatch.backend(name).tile_candidates(plan, targets.default())
    assert found
    for candidate in found:
        assert {"block_q", "block_kv", *BACKWARD} <= set(candidate) <= {*FORWARD, *BACKWARD}
        KernelOptions(**candidate)
