"""The harness of the benchmarks: its counts, its check of the numbers, its table; not any speed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import inputs, measure, report, suites
from bench.peers import PEERS

TINY = suites.SUITES["tiny"]


@pytest.mark.parametrize(
    ("mask", "parameter", "pairs"),
    [
        ("full", 0, 50 * 50),
        ("causal", 0, 50 * 51 // 2),
        ("window", 4, 1 + 2 + 3 + 4 * 47),
        ("documents", 1, 50 * 51 // 2),
    ],
)
def test_visited_pairs(mask: str, parameter: int, pairs: int):
    assert suites.Workload("x", mask, parameter, 50).visited() == pairs


@pytest.mark.parametrize("size", [4, 5])
def test_the_two_definitions_of_a_canvas_agree(size: int):
    allowed = suites.Workload("canvas", "canvas", size, 81).allowed()
    q, kv = np.arange(81)[:, None], np.arange(81)[None]
    by_numpy = allowed(q, kv)
    assert np.array_equal(by_numpy, allowed(jnp.asarray(q), jnp.asarray(kv)))
    assert (by_numpy.sum(1) == size * size).all()


def test_flops_count_kept_pairs_only():
    problem = suites.Workload("x", "causal", 0, 10, batch=2, heads=3, dim=7)
    assert problem.flops("forward") == 4 * 2 * 3 * 7 * 55
    assert problem.flops("forward+backward") == 3.5 * problem.flops("forward")


def test_documents_are_sorted_and_none_is_empty():
    ids = suites.document_ids(100, 16)
    assert np.array_equal(np.unique(ids), np.arange(16))
    assert (np.diff(ids) >= 0).all()


@pytest.mark.parametrize("problem", TINY, ids=lambda p: p.name)
@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_computes_the_same_attention(problem: suites.Workload, peer: str):
    attend = PEERS[peer](problem)
    q, k, v, d_out = (jnp.asarray(x) for x in problem.arrays().values())
    out, pull = jax.vjp(jax.jit(attend), q, k, v)
    want = measure.rows_by_numpy(problem, np.arange(problem.length))
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(pull(d_out)[0], want[1], atol=1e-5)


def test_the_error_check_sees_an_error():
    problem = TINY[0]
    out, d_q = measure.rows_by_numpy(problem, inputs.sample_rows(problem.length))
    assert measure._error(problem, [out, d_q]) == 0.0
    assert measure._error(problem, [out, d_q * 1.01]) == pytest.approx(0.01)
    out[0, 0] = np.nan
    assert measure._error(problem, [out, d_q]) == float("inf")


FACTS = dict(device="Some CPU", cores="2", python="3.11", jax="0.10", numpy="2.0")
ROWS = [
    dict(
        problem="causal 64", which="forward", flops=2e6,
        peers=dict(
            dense=dict(median=0.002, peak_bytes=2**28, error=1e-7),
            flexjax=dict(median=0.001, peak_bytes=2**27, error=2e-7),
        ),
    ),
    dict(
        problem="long", which="forward", flops=4e9,
        peers=dict(dense=dict(skipped="too large"), flexjax=dict(failed="no memory")),
    ),
]  # fmt: skip


def test_table():
    assert report.markdown(ROWS, ["dense", "flexjax"], FACTS, "the command").splitlines() == [
        "| problem | pass | dense, ms | flexjax, ms | dense / flexjax | flexjax, GFLOP/s "
        "| dense, peak MB | flexjax, peak MB | largest error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        "| causal 64 | forward | 2 | 1 | 2.00 | 2 | 256 | 128 | 2e-07 |",
        "| long | forward | - | failed | - | - | - | - | - |",
        "",
        "Some CPU, 2 cores; python 3.11, jax 0.10, numpy 2.0. Medians. `the command`",
        "- dense, long: too large",
        "- flexjax, long: no memory",
    ]


def test_wrong_numbers_and_failures_are_told():
    assert report.wrong(ROWS, 1e-5) == ["flexjax, long, forward: no memory"]
    assert report.wrong(ROWS[:1], 1.5e-7) == ["flexjax, causal 64, forward: error 2e-07"]


def test_plot(tmp_path):
    report.plot(ROWS[:1], ["dense", "flexjax"], FACTS, str(tmp_path / "times.png"))
    assert (tmp_path / "times.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    path = tmp_path / "times.json"
    flags = ["--suite", "tiny", "--only", "causal 64", "--passes", "forward", "--peers", "dense,flexjax"]
    assert command.main([*flags, "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert "| causal 64 | forward |" in table
    assert "`python -m bench --suite tiny --only 'causal 64'" in table
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["peers"]) == {"dense", "flexjax"}
    assert all(result["peak_bytes"] > 0 and result["calls"] >= 5 for result in row["peers"].values())


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--peers", "dense,sparse"])
    assert "no such peer or pass: sparse" in capsys.readouterr().err
