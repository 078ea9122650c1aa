"""The first-hour suite without a GPU: its oracle, its verdicts, its processes, its report."""

import dataclasses
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax.tune.autotune import Tuning
from lab import __main__ as command
from lab import dense_oracle, first_hour, first_hour_cases, first_hour_pool, first_hour_report, first_hour_tasks
from tests.marks import some_slow

FAMILY = dict(options={}, verdict="ok", kernels="forward 128 x 128")


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small run checks one case."""
    monkeypatch.setattr(first_hour_cases, "SMALL", ("ALiBi, learned",))


def numbers(path) -> int:
    """The exit status of a run that checks numbers alone, in this process."""
    return first_hour.main(True, 2, ["numerics"], str(path), processes=False)


def test_the_numbers_are_right(one_case, tmp_path, capsys):
    assert numbers(tmp_path / "a.json") == 0
    found = json.loads((tmp_path / "a.json").read_text())
    (row,) = found["numerics"]["rows"]
    assert row["verdict"] == "ok"
    assert 0.01 < row["ratio"] < 0.6
    assert (tmp_path / "a.md").read_text().strip() in capsys.readouterr().out
    assert "**0 wrong, 0 failed**" in (tmp_path / "a.md").read_text()


def test_a_planted_wrong_result_is_caught(one_case, tmp_path, monkeypatch):
    attend = flexjax.flex_attention
    monkeypatch.setattr(flexjax, "flex_attention", lambda *a, **w: attend(*a, **w) * 1.02)
    assert numbers(tmp_path / "a.json") == 1
    text = (tmp_path / "a.md").read_text()
    assert "- WRONG: ALiBi, learned, bfloat16, default choice: WRONG: out " in text


def test_a_call_that_raises_is_a_failure_and_no_wrong_number(one_case, tmp_path, monkeypatch):
    def broken(*arrays: object, **words: object) -> None:
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(flexjax, "flex_attention", broken)
    assert numbers(tmp_path / "a.json") == 2
    assert "RuntimeError: a planted failure" in (tmp_path / "a.md").read_text()


@pytest.mark.parametrize("name", some_slow(first_hour_cases.CASES, ("sinks",)))
def test_the_oracle_is_the_reference(name: str):
    """In float64, results and all gradients, of a case with at most 48 tokens."""
    case = first_hour_cases.small(first_hour_cases.CASES[name])
    with jax.enable_x64(True):
        got, again = first_hour_tasks.run_case(name, case, "float64", dict(case.options), "reference")
    want = dense_oracle.attention(first_hour_cases.dense(name, case))
    assert set(got) == set(want) - (set() if case.lse else {"lse"})
    for result, x in got.items():
        np.testing.assert_allclose(x, want[result], rtol=1e-9, atol=1e-9, err_msg=result)
        assert x.tobytes() == again[result].tobytes()


def test_the_oracle_imports_nothing_of_the_package():
    for module in (dense_oracle,):
        with open(module.__file__ or "") as file:
            imported = [line for line in file if line.startswith(("import", "from"))]
        assert not any("jax" in line for line in imported)


def test_small_errors_of_all_numbers_are_wrong():
    """An error of 1.5% of every number is less than the largest rounding error allows, and its norm is not."""
    want = dense_oracle.with_rounding(
        first_hour_cases.dense("plain d64", first_hour_cases.small(first_hour_cases.CASES["plain d64"])), "bfloat16"
    )
    assert dense_oracle.compare(want.exact, want) == (0.0, [])
    _, sentences = dense_oracle.compare({"dq": want.exact["dq"] * 1.015}, want)
    assert [text.split(" in norm")[0].split(" by ")[0] for text in sentences] == ["dq differs"]
    spoiled = want.exact["out"].copy()
    spoiled[0, 1, 2, 3] += 0.5
    assert "out at (0, 1, 2, 3) is " in dense_oracle.compare({"out": spoiled}, want)[1][-1]
    spoiled[0, 0, 0, 0] = np.nan
    assert dense_oracle.compare({"out": spoiled}, want) == (np.inf, [f"out has 1 NaN of {spoiled.size}"])


def test_the_weights_that_kernels_round_make_no_wrong_gradient_of_a_bias():
    """KernelPlan.rounds_weights_alike: the cotangent is rounded weight * dP - p * delta. A run on an H100 called it wrong."""
    name = "key bias, learned"
    dense = first_hour_cases.dense(name, first_hour_cases.CASES[name])
    want = dense_oracle.with_rounding(dense, "bfloat16")
    bias = dense.score(np.zeros((2, 2, 256, 256))).scores
    scores = np.einsum("bhqd,bhkd->bhqk", dense.q, dense.k) / 128**0.5 + bias
    weights = np.exp2(scores / np.log(2.0) - np.ceil(scores.max(-1, keepdims=True) / np.log(2.0)))
    total = weights.sum(-1, keepdims=True)
    rounded = np.asarray(jnp.asarray(weights, jnp.bfloat16), np.float64) / total
    d_p = np.einsum("bhqe,bhke->bhqk", dense.d_out, dense.v)
    cotangent = rounded * d_p - weights / total * (rounded * d_p).sum(-1, keepdims=True)
    got = cotangent.sum((1, 2))
    error = got - want.exact["dlearned"]
    ratio, wrong = dense_oracle.compare({"dlearned": got}, want)
    assert wrong == []
    assert ratio > 0.2  # what is allowed has the size of what kernels do
    assert dense_oracle.compare({"dlearned": want.exact["dlearned"] + error * 1.1 / ratio}, want)[1]


def test_an_infinity_of_the_other_sign_is_wrong():
    """The lse of a row without visible keys is -inf."""
    exact = np.asarray([0.5, -np.inf])
    want = dense_oracle.Rounding({"lse": exact}, {"lse": 1e-6}, {})
    assert dense_oracle.compare({"lse": exact}, want) == (0.0, [])
    for wrong in ([0.5, np.inf], [0.5, 0.0], [-np.inf, -np.inf]):
        assert dense_oracle.compare({"lse": np.asarray(wrong)}, want)[0] == np.inf


def test_autotune_gets_the_mask_and_the_mod_of_a_workload(monkeypatch):
    """It tuned full attention in place of any mask but the causal one."""
    asked = {}
    tuning = Tuning(flexjax.KernelOptions(), (), True, "xla", None)
    monkeypatch.setattr(flexjax, "autotune", lambda *arrays, **words: asked.update(words) or tuning)
    first_hour_tasks.tune("gpu-tiny", "learned pair 128", {}, 1.0)
    problem = first_hour_tasks.workload("gpu-tiny", "learned pair 128")
    q, k = np.ogrid[:40, :40]
    np.testing.assert_array_equal(np.asarray(asked["mask_mod"](0, 0, q, k)), problem.allowed()(q, k))
    assert float(asked["score_mod"](jnp.float32(1.0), *(jnp.int32(n) for n in (0, 0, 3, 4)))) != 1.0


def test_float32_by_xla_may_be_rounded_to_tf32():
    """Both operands of each product of dense attention with 13 bits of mantissa cut off are no wrong numbers, with 16 they are."""
    case = first_hour_cases.small(first_hour_cases.CASES["float32"])
    dense = first_hour_cases.dense("float32", case)
    cut = lambda x, bits: (
        (np.asarray(x, np.float32).view(np.uint32) >> bits << bits).view(np.float32).astype(np.float64)
    )
    want = dense_oracle.with_rounding(dense, "tf32")
    verdicts = []
    for bits in (13, 17):
        q, k, v = (cut(x * 1.0001, bits) for x in (dense.q, dense.k, dense.v))
        got = dense_oracle.attention(dataclasses.replace(dense, q=q, k=k, v=v))
        verdicts.append(not dense_oracle.compare(got, want)[1])
    assert verdicts == [True, False]


SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
    word = json.loads(line)["task"]
    if word == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if word == "hang":
        time.sleep(60)
    print("noise", flush=True)
    print("answer: " + json.dumps(dict(word=word)), flush=True)
"""


def test_processes_that_die_or_hang_cost_one_task(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour_pool, "COMMAND", (sys.executable, "-S", "-c", SCRIPT))
    tasks = [dict(task=word, arguments={}) for word in ("a", "die", "b", "hang", "c")]
    answers = first_hour_pool.run_all(tasks, 1, time.time() + 60, str(tmp_path), most_seconds=0.7)
    assert answers[0] == dict(word="a")
    assert answers[1] == dict(failed="the process ended with 7: last words")
    assert answers[2] == dict(word="b")
    assert answers[3] == dict(failed="took longer than 1 s and was ended", ended_after=0.7)
    assert answers[4] == dict(word="c")
    (cut,) = first_hour_pool.run_all(tasks[3:4], 1, time.time() + 0.5, str(tmp_path))
    assert cut == dict(unreached=f"{first_hour_pool.UNREACHED}: it was running")
    late = first_hour_pool.run_all(tasks, 2, time.time() - 1, str(tmp_path))
    assert late == [dict(unreached=first_hour_pool.UNREACHED)] * 5


def test_a_process_that_cannot_start_is_a_failure(tmp_path, monkeypatch):
    """The exception ended the thread, and its tasks counted as not reached, which is no failure."""
    monkeypatch.setattr(first_hour_pool, "COMMAND", (str(tmp_path / "nothing"),))
    answers = first_hour_pool.run_all([dict(task="a", arguments={})] * 2, 1, time.time() + 60, str(tmp_path))
    assert [answer["failed"].split(":")[0] for answer in answers] == ["FileNotFoundError"] * 2


def test_the_report_names_what_was_refused_wrong_and_failed():
    rows = [
        dict(name="a", dtype="bfloat16", by="flexjax", verdict="ok", ratio=0.3, notes=["attention runs on xla"]),
        dict(name="b", dtype="bfloat16", by="flexjax", verdict="refused: no such tile", notes=[]),
        dict(name="c", dtype="bfloat16", by="flexjax", verdict="WRONG: dq is off", ratio=2.0, notes=[]),
        dict(name="d", dtype="bfloat16", by="flexjax", failed="took longer than 90 s and was ended"),
        dict(name="e", dtype="bfloat16", by="flexjax", unreached=first_hour_pool.UNREACHED),
    ]  # fmt: skip
    timed = dict(
        problem="causal", which="forward", flops=1e12,
        peers={"flexjax": dict(median=0.002, error=0.5), "torch": dict(failed="no torch")},
    )  # fmt: skip
    found = dict(
        command="it", minutes=9, took=3.0, facts=dict(card=dict(card="NVIDIA A100"), families=[FAMILY]),
        numerics=dict(rows=rows), times=dict(rows=[timed], peers=["flexjax", "torch"]), tune=dict(failed="OSError: full"),
    )  # fmt: skip
    assert first_hour_report.file_name(found) == "first-hour-nvidia-a100.json"
    assert first_hour_report.wrong(found, 2e-2) == [
        "c, bfloat16, flexjax: WRONG: dq is off",
        "flexjax, causal, timed: error 0.5",
    ]
    assert first_hour_report.failures(found) == [
        "tune: OSError: full", "numerics, d, bfloat16, flexjax: took longer than 90 s and was ended",
    ]  # fmt: skip
    lines = first_hour_report.markdown(found).splitlines()
    assert "| flexjax | bfloat16 | 1 | 1 | 1 | 1 | 1 | 2.00 |" in lines
    assert "- refused: no such tile: b, bfloat16, flexjax" in lines
    assert "| causal | forward | 2.000 | failed | 500 | - | - | 5e-01 | 5e-01 |" in lines


def test_kernels_that_are_the_same_run_once():
    asked = [dict(options=o, verdict=v, kernels=k) for o, v, k in (
        ({}, "ok", "mma.sync"), (dict(instruction="mma"), "ok", "mma.sync"), (dict(instruction="tcgen05"), "ok", "tcgen05"),
        (dict(instruction="wgmma"), "no such kernels", ""),
    )]  # fmt: skip
    kept = first_hour.families(dict(facts=dict(families=asked)))
    assert [f["options"] for f in kept] == [{}, dict(instruction="tcgen05")]
    assert first_hour.families(dict(facts=dict(failed="RuntimeError: no driver"))) == []
    again = [*asked[:1], asked[2], asked[1]]
    kept = first_hour.families(dict(facts=dict(families=again)))
    assert [f["options"] for f in kept] == [{}, dict(instruction="tcgen05")]


def test_every_way_to_ask_for_kernels_is_tried():
    from lab import first_hour_tasks

    asked = [family["options"] for family in first_hour_tasks.families()]
    assert asked == [
        {},
        dict(instruction="mma"),
        dict(instruction="tcgen05"),
        dict(instruction="tcgen05", cta_pairs=True),
    ]


def test_a_tpu_is_asked_by_one_process_at_a_time(monkeypatch):
    """And for its kernels, in one way."""
    from lab import first_hour_tasks

    seen = {}
    monkeypatch.setattr(first_hour_tasks, "on_tpu", lambda: True)
    monkeypatch.setattr(first_hour_tasks, "kernels_here", lambda: "mosaic_tpu")
    monkeypatch.setattr(flexjax, "explain", lambda *a, **w: seen.update(w) or "  tiles: forward 1024 x 1024")
    (family,) = first_hour_tasks.families()
    assert (family["options"], seen["implementation"]) == ({}, "mosaic_tpu")
    found = dict(facts=dict(platform="tpu", families=[family]))
    run = first_hour.Run(False, "", True)
    monkeypatch.setattr(
        first_hour, "run_all", lambda tasks, workers, *a: seen.update(workers=workers) or [{}] * len(tasks)
    )
    first_hour.numerics(run, found, 0.0)
    monkeypatch.setattr(
        first_hour.device, "measure_all", lambda s, p, peers, groups, *a: seen.update(groups=groups) or ([], {})
    )
    first_hour.times(run, found, 0.0)
    assert seen["workers"] == 1
    assert seen["groups"] == [[first_hour.device.REFERENCE], ["flexjax"], ["jax.nn"]]
    gpu = dict(facts=dict(platform="gpu", families=[family]))
    first_hour.times(run, gpu, 0.0)
    assert len(seen["groups"]) == 1


def test_the_suite_of_the_benchmarks_is_the_same_program(monkeypatch):
    from bench import __main__ as bench

    asked = []
    monkeypatch.setattr(bench.subprocess, "call", lambda words: asked.append(words) or 0)
    assert bench.main(["--suite", "first-hour", "--small", "--only", "facts"]) == 0
    assert asked == [[sys.executable, "-m", "lab", "--only", "facts", "--small"]]


def test_options_in_the_name_of_a_peer():
    from bench import gpu_peers

    options = dict(instruction="mma", deterministic=False)
    assert first_hour.peer_name(options) == "flexjax instruction=mma deterministic=False"
    assert gpu_peers.options_of(first_hour.peer_name(options)) == options
    measured = gpu_peers.adapter("flexjax instruction=mma")
    assert isinstance(measured, functools.partial)
    assert measured.args[0].keywords == dict(instruction="mma")


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    path = str(tmp_path / "report.json")
    assert command.main(["--small", "--minutes", "4", "--json", path]) == 0
    text = capsys.readouterr().out
    assert "| default choice | bfloat16 | 3 | 0 | 0 | 0 | 0 |" in text
    assert "| causal 128 | backward |" in text
    assert text.rstrip().endswith(f"Send back {path} and {tmp_path}/report.md.")
