"""The decode suite without a GPU: its cases, its float32 reference, its table."""

import importlib.util
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import decode_cases, decode_peers, device, inputs, kernel_times, report
from bench.decode_cases import DecodeCase

CASES = decode_cases.DECODE_SUITES["decode"]
TINY = {case.name: case for case in decode_cases.DECODE_SUITES["decode-tiny"]}


def test_cases_are_sound():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.mod for case in CASES} == {None, *decode_cases.SCORE_MODS, *decode_cases.MASKS}
    for case in CASES:
        lengths = case.lengths()
        assert lengths.min() >= case.q_len
        assert lengths.max() <= case.keys
        assert case.counts("decode")["bytes"] <= 2 * 2 * np.prod(case.cache_shape())
        if case.page:  # a pool has no keys that do not exist
            assert case.keys % case.page == case.shared % case.page == 0
            assert lengths.min() == case.keys


def test_floors_are_of_cases() -> None:
    names = {case.name for case in CASES}
    assert set(decode_cases.FLOORS) <= names
    assert {floor.of for floor in decode_cases.FLOORS.values()} <= names | {""}
    assert sum(bool(x) for floor in decode_cases.FLOORS.values() for x in floor[:3]) == len(decode_cases.FLOORS)
    of = decode_cases.FLOORS["B16 S32k, window"], decode_cases.FLOORS["B16 S32k, pages of 16"]
    assert [floor.milliseconds(1e9, {"B16 S32k": 0.49}) for floor in of] == [0.06, pytest.approx(0.7)]
    assert of[1].milliseconds(1e9, {}) is None


def test_pages_are_shuffled_and_shared():
    case = TINY["int8, shared"]
    pages = case.arrays()["pages"]
    assert pages.shape == (3, 8)
    assert (pages[:, :6] == pages[0, :6]).all()
    assert sorted(np.unique(pages)) == list(range(case.number_of_pages())) == list(range(6 + 3 * 2))
    assert (np.diff(pages[0]) != 1).any()


def test_bytes_are_those_that_attention_reads():
    size = dict(batch=4, keys=4096, kv_heads=2, dim=8)
    row = 2 * 2 * 8  # numbers of the keys and values of a token
    assert DecodeCase("x", **size).counts("decode")["bytes"] == 4 * 4096 * row * 2
    assert DecodeCase("x", **size, mod="window", q_len=2).counts("decode")["bytes"] == 4 * 1025 * row * 2
    shared = DecodeCase("x", **size, page=8, stored="int8", shared=4000)
    assert shared.counts("decode")["bytes"] == (4 * 96 + 4000) * row


@pytest.mark.parametrize("mod", ["relative table", "soft cap", "tree"])
def test_the_reference_and_the_dense_mods_agree(mod: str):
    """Dense masks and biases, which some peers get, say what the mods say."""
    case = DecodeCase("x", 2, 12, q_len=3, q_heads=4, kv_heads=2, dim=8, mod=mod)
    arrays = decode_peers.make_arrays(case, decode_cases.CUDNN, case.arrays())
    (got,) = decode_peers.reference(case, arrays)
    numbers = {name: np.asarray(x).astype(np.float64) for name, x in arrays.items()}
    query, key, value = (numbers[n][0] for n in ("query", "key", "value"))
    key, value = np.repeat(key, 2, 2), np.repeat(value, 2, 2)
    s = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(8) + numbers.get("bias", 0.0)
    s = np.where(numbers.get("mask", 1.0), s, -np.inf)
    if mod == "soft cap":
        s = decode_cases.SOFT_CAP * np.tanh(s / decode_cases.SOFT_CAP)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), value)
    np.testing.assert_allclose(got, want, atol=2e-2 if "bias" in arrays else 1e-5)  # a bias is bfloat16


def test_an_answer_is_compared_with_the_reference(tmp_path):
    case = TINY["ragged"]
    for peer in (inputs.REFERENCE, decode_cases.OWN_PEER):
        result, samples = decode_peers.adapter(peer, [case])(case, str(tmp_path))
        np.savez(device._sample_path(str(tmp_path), peer, case), **samples)
    assert result["decode"] > 0
    compared = device._peer_result(case, decode_cases.OWN_PEER, {case.name: result}, str(tmp_path))
    assert compared["error"] < 1e-2
    skipped = device._peer_result(TINY["tree in pages"], decode_cases.TORCH, {}, str(tmp_path))
    assert skipped == {"skipped": "takes no pages"}


def test_table():
    rows = [
        dict(problem="B1 S128k", which="decode", bytes=4e9, peers={
            "jax.nn": dict(median=1e-3, error=3e-3, how="cupti"),
            "flexjax": dict(median=0.8e-3, error=4e-3, how="cupti", first_call=2.34),
        }),
        dict(problem="pages", which="decode", bytes=4e9, peers={
            "jax.nn": dict(skipped="takes no pages"),
            "jax paged": dict(median=1e-3, error=3e-3, how="cupti"),
            "flexjax": dict(median=2e-3, error=4e-3, how="cupti"),
        }),
    ]  # fmt: skip
    names = ["jax.nn", "jax paged", "flexjax"]
    lines = report.of_decode(rows, names, dict(device="A GPU", jax="1"), "it", names[:2]).splitlines()
    assert lines[2] == "| B1 S128k | 1.000 | 4.00 | - | - | 0.800 | 5.00 | 1.25 | 1.176 | 2.3 | 4e-03 |"
    assert lines[3] == "| pages | - | - | 1.000 | 4.00 | 2.000 | 2.00 | 0.50 | - | - | 4e-03 |"
    assert lines[-2:] == ["- jax.nn takes no pages: pages", "cuDNN / flexjax: worst 0.50 (pages), median 0.88 of 2"]
    rows[0]["peers"]["flexjax"]["median"] = 1.2e-3
    lines = report.of_decode(rows, names, dict(device="A GPU", jax="1"), "it", names[:2]).splitlines()
    assert lines[-2] == "- slower than the floor of an H200: B1 S128k"
    assert report.of_decode([], names, {}, "it", names[:2]).endswith("No case has times of both cuDNN and flexjax.")
    window = dict(median=12e-3, error=4e-3, how="launches back to back")
    rows.append(
        dict(
            problem="window", which="decode", bytes=4e9, peers={"jax.nn": rows[0]["peers"]["jax.nn"], "flexjax": window}
        )
    )
    lines = report.of_decode(rows, names, dict(device="A GPU", jax="1"), "it", names[:2]).splitlines()
    assert lines[4] == "| window | 1.000 | 4.00 | - | - | 12.000 | 0.33 | - | - | - | 4e-03 |"
    assert "- flexjax was measured as launches back to back, no ratio: window" in lines
    assert lines[-1] == "cuDNN / flexjax: worst 0.50 (pages), median 0.67 of 2"


@pytest.mark.parametrize("losses", [2, 3])
def test_cupti_is_asked_again_where_it_loses_records(losses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def by_cupti(call: typing.Any, *operands: typing.Any, calls: int, aggregate: bool) -> list[float]:
        asked.append(calls)
        if len(asked) <= losses:
            raise ValueError("the calls launch different kernels")
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(kernel_times, "_by_cupti", by_cupti)
    seconds, how = kernel_times.device_time(jnp.sin, jnp.ones(3), calls=3)
    assert how == ("cupti" if losses < 3 else "launches back to back")
    assert (seconds == 2e-3) == (losses < 3)


@pytest.mark.slow
def test_the_command(capsys):
    peers = "jax.nn,tokamax,flexjax"
    assert command.main(["--suite", "decode-tiny", "--peers", peers, "--together", "--minutes", "5"]) == 0
    printed = capsys.readouterr().out
    assert "| int8, shared | - | - | - | - | " in printed
    assert "- jax.nn takes no pages: tree in pages, int8, shared" in printed
    if importlib.util.find_spec("tokamax") is None:
        assert "- tokamax is not installed (No module named 'tokamax'): ragged" in printed
