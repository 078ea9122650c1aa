"""Every example runs, small, and what it shows is true."""

import importlib.util
import pathlib
import types

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = ["--batch=2", "--length=128", "--layers=2", "--width=32", "--heads=2", "--reach=32", "--files=60"]
TINY += ["--sample=24", "--steps=80", "--seconds=600"]


def test_every_example_is_tested():
    tested = {"train_packed_lm", "alibi_window", "pair_bias_gradient", "block_diffusion", "topk_blocks"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_train_packed_lm(capsys):
    results = load("train_packed_lm").main(TINY)
    assert len(results["losses"]) == 80
    assert results["final"] < results["losses"][0] - 0.3
    assert results["held_out"] < results["losses"][0]
    assert results["leak"] < 1e-4
    assert results["compared"] >= 4
    assert results["sample"].startswith("def ")
    bias = results["params"]["layers"]["distance"]
    assert abs(bias[0] - bias[1]).max() > 1e-3  # they began equal; the gradient came through the captured array
    printed = capsys.readouterr()
    assert "documents alone and packed differ by at most" in printed.out
    assert "tokens/s" in printed.err


def test_packing_keeps_every_byte():
    example = load("train_packed_lm")
    files = [b"A" * 5, b"B" * 300, b"C", b"D" * 40]
    tokens, segments = example.pack(files, 64)
    seen = b""
    for row, ids in zip(tokens, segments, strict=True):
        for document in range(ids.max() + 1):
            piece = row[ids == document]
            assert piece[0] == example.START
            assert len(set(piece[1:].tolist())) == 1  # of one file alone, and not empty
            seen += bytes(piece[1:].astype("uint8"))
        assert (ids[:-1] <= ids[1:]).all() or ids[-1] == example.PADDING
    assert seen == b"".join(files)
    assert (segments[:-1] != example.PADDING).all()


def test_unigram_entropy():
    assert load("train_packed_lm").unigram_entropy([b"aabb"]) == pytest.approx(0.6931, abs=1e-4)


def test_alibi_window():
    results = load("alibi_window").main(length=700, window=100)
    assert results["error"] < 1e-5
    assert results["sparsity"] > 50


def test_pair_bias_gradient():
    results = load("pair_bias_gradient").main(length=70)
    assert max(results.values()) < 1e-4


def test_block_diffusion():
    results = load("block_diffusion").main(length=128, block=16)
    assert results["error"] < 1e-5


def test_topk_blocks():
    results = load("topk_blocks").main(length=256, block=32, keep=3)
    assert max(results.values()) < 1e-4
