"""The gpu suite without a GPU: its workloads, its float32 reference, its table."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import device, gpu_peers, inputs, report, suites

TINY = suites.SUITES["gpu-tiny"]


def test_every_gradient_of_a_mod_follows_the_plain_problem_of_its_shape():
    problems = suites.SUITES["gpu"]
    assert len({p.name for p in problems}) == len(problems)
    for before, problem in itertools.pairwise(problems):
        if problem.learns:
            shape = lambda p: (p.mask, p.batch, p.length, p.heads, p.kv_heads, p.dim, p.dtype)
            assert shape(before) == shape(problem)
            assert before.mod is None


@pytest.mark.parametrize("name", suites.MODS)
def test_mods_take_scalars_and_arrays(name: str):
    mod = suites.MODS[name]
    problem = suites.Workload("x", "full", 0, 8, heads=2, kv_heads=2, dim=4, mod=name, dtype="bfloat16")
    _, array = inputs.random_arrays(problem)
    stored = None if array is None else jnp.asarray(array)
    q, kv = jnp.arange(8)[:, None], jnp.arange(8)
    s = jnp.linspace(-2.0, 2.0, 64).reshape(8, 8)
    together = mod.apply(stored, s, jnp.int32(1), q, kv)
    alone = jnp.stack(
        [mod.apply(stored, s[i, j], jnp.int32(1), jnp.int32(i), jnp.int32(j)) for i, j in ((0, 0), (7, 2), (3, 6))]
    )
    np.testing.assert_allclose(together[jnp.array([0, 7, 3]), jnp.array([0, 2, 6])], alone, rtol=1e-6)


def test_no_two_rows_of_a_large_array_are_equal():
    problem = suites.Workload("x", "full", 0, 40960, heads=2, kv_heads=2, dim=64, dtype="float16")
    arrays, _ = inputs.random_arrays(problem)
    rows = arrays["q"].reshape(-1, 64)
    assert rows.size > 4_194_301
    assert len(np.unique(rows[:, :8], axis=0)) == len(rows)


@pytest.mark.slow
def test_the_answers_are_those_of_dense_attention():
    problem = TINY[1]
    arrays, array = gpu_peers.on_device(problem)
    with jax.default_matmul_precision("highest"):
        got = gpu_peers._reference(problem, arrays, array)
        wide = {n: x.astype(jnp.float32) for n, x in arrays.items()}

        def dense(q, k, v, bias):
            index = jnp.arange(problem.length)
            s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8 + bias
            s = jnp.where(problem.allowed()(index[:, None], index), s, -jnp.inf)
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

        out, pull = jax.vjp(dense, wide["q"], wide["k"], wide["v"], array.astype(jnp.float32))
        want = dict(zip(("out", "dq", "dk", "dv", "learned"), (out, *pull(wide["d_out"])), strict=True))
    for name in want:  # the gradient of the bias is rounded to the bias' bfloat16
        np.testing.assert_allclose(got[name], want[name], atol=2e-2 if name == "learned" else 2e-5)


def test_table_and_peers_left_out():
    rows = [
        dict(problem="causal", which="forward", flops=4e12, peers={
            "jax.nn": dict(median=0.009, error=3e-3, how="cupti"),
            "torch": dict(skipped="is not asked"),
            "flexjax": dict(median=0.008, error=4e-3, first_call=2.5, how="cupti"),
        }),
    ]  # fmt: skip
    lines = report.on_gpu(rows, ["jax.nn", "torch", "flexjax"], dict(device="A GPU", jax="1"), "it").splitlines()
    assert lines[2] == "| causal | forward | 9.000 | - | 8.000 | 500 | 1.12 | 2.5 | 4e-03 | 4e-03 |"
    assert lines[4:] == [
        "A GPU; jax 1. Medians: jax.nn: cupti; flexjax: cupti",
        "`it`",
        "- torch is not asked: causal",
        "best peer / flexjax, forward: worst 1.12 (causal), median 1.12 of 1",
    ]


def test_the_worst_ratio_and_the_median_are_told():
    assert report.worst_and_median(dict(a=1.0, b=0.5, c=0.9)) == "worst 0.50 (b), median 0.90 of 3"


def test_the_sweep_has_every_1024_tokens_and_odd_heads():
    """Each workload is one that no table has twice."""
    sweep = suites.SUITES["gpu-sweep"]
    assert len({p.name for p in sweep}) == len(sweep)
    for heads, dim in ((16, 128), (32, 64)):
        found = [p.length for p in sweep if (p.heads, p.dim) == (heads, dim)]
        assert found == list(range(1024, 20481, 1024))
    assert {p.heads for p in sweep if p.length == 8192} >= {1, 2, 3, 12, 64}
    assert any(p.length % 128 for p in sweep)


def test_other_processes_on_the_device_are_told(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho python3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(device, "measure_all", lambda *_: ([], {"device": "A GPU"}))
    monkeypatch.setattr(report, "on_gpu", lambda *_: "a table")
    assert command.main(["--suite", "gpu-tiny"]) == 1
    told = "Other processes were on the device before the first measurement: python3.\n"
    assert capsys.readouterr().err == told
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert command.main(["--suite", "gpu-tiny"]) == 0


def test_a_slow_peer_leaves_time_for_the_others(monkeypatch):
    ends = {}

    class Slow:
        now, running, results = "", True, {}

        def __init__(self, suite, peer, problems, folder):
            self.peer, self.results = peer, {}

        def poll_results(self, until):
            self.running = time.time() < until
            ends[self.peer] = until

    monkeypatch.setattr(device, "PeerProcess", Slow)
    monkeypatch.setattr(device, "_peer_result", lambda *_: {})
    start = time.time()
    device.measure_all("gpu-tiny", [], ["a", "b"], [["a"], ["b"]], start + 1.2, lambda _: None)
    assert ends["a"] == pytest.approx(start + 0.6, abs=0.1)
    assert ends["b"] == pytest.approx(start + 1.2, abs=0.1)


@pytest.mark.slow
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(device, "other_processes", lambda: [])
    assert command.main(["--suite", "gpu-tiny", "--peers", "flexjax", "--together", "--minutes", "5"]) == 0
    assert "| learned pair 128 | backward |" in capsys.readouterr().out
