"""Every example runs, small, and what it shows is true."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = ["--batch=2", "--length=64", "--layers=2", "--width=32", "--heads=2", "--reach=32", "--files=40"]
TINY += ["--sample=8", "--steps=60", "--seconds=600"]


SHARED = "small_training"  # what examples import, and no example itself
TRAINED: dict[str, dict[str, int]] = {
    "long_context_window": {"length": 512, "window": 64, "steps": 12, "width": 32},
    "extrapolation": {"length": 32, "longer": 128, "steps": 25, "width": 32, "batch": 4},
    "vision_natten": {"side": 64, "steps": 20, "width": 24},
    "train_nnx": {"length": 64, "steps": 12, "width": 32, "batch": 2},
    "moe_on_a_mesh": {"length": 32, "steps": 20, "width": 32},
    "train_on_a_mesh": {"length": 120, "steps": 20, "width": 32},
    "train_chosen_blocks": {"length": 128, "block": 16, "keep": 3, "steps": 20, "width": 32},
    "train_sigmoid": {"length": 64, "steps": 40, "width": 32},
    "long_context_tolerance": {"length": 1024, "short": 128, "steps": 25, "width": 64, "times": 1},
    "train_recommender": {"events": 12, "candidates": 8, "steps": 400},
    "train_meanflow": {"steps": 60, "width": 32, "batch": 32, "layers": 1, "samples": 64},
}
"""Examples that train, with the arguments of a small run."""

CLAIMS: dict[str, Callable[[dict[str, float]], bool]] = {
    "train_sigmoid": lambda got: got["sigmoid"] < got["softmax"] + 0.15 and got["moved"] > 1e-3,
    "long_context_tolerance": lambda got: got["apart"] < 1e-6 and got["gradients"] < 1e-5 and got["share"] < 0.8,
    "train_recommender": lambda got: got["time"] > got["place"] + 0.05 and got["learned"] > 0.05,
    "train_meanflow": lambda got: got["after"] < 0.7 * got["before"],
}
"""What a small run shows besides a loss that falls."""


def test_every_example_is_tested():
    tested = {
        "serve_lm",
        "same_bits",
        "train_packed_lm",
        "alibi_window",
        "pair_bias_gradient",
        "block_diffusion",
        "topk_blocks",
        "fp8_keys",
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | set(TRAINED) | {SHARED}


def test_the_gallery_names_every_example():
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in text for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_training_examples_learn(name: str, tmp_path: pathlib.Path):
    """In a process of its own, with four devices, as the line in the example's docstring starts it."""
    if name == "train_nnx":
        pytest.importorskip("flax", reason="the model of this example is one of flax: pip install '.[nn]'")
    code = f"import json, {name}; print(json.dumps({name}.main(**{TRAINED[name]})))"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    where = dict(
        os.environ, PYTHONPATH=f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}", XLA_FLAGS=flags, TMPDIR=str(tmp_path)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=where)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    if name == "extrapolation":
        assert results["ALiBi beyond"] < 4.2  # 4.85 nats is where training begins
    else:
        assert results["last"] < results["first"] - (0.01 if name in {"vision_natten", "train_recommender"} else 0.15)
    assert results.get("devices", 4) == 4
    assert results.get("apart", 0.0) < 1e-3
    assert CLAIMS.get(name, bool)(results), results
    assert (tmp_path / f"{name}.png").stat().st_size > 2000
    assert "step" in done.stderr


@pytest.mark.slow
def test_serve_lm(monkeypatch, capsys):
    """Every request gets the tokens of decoding without a cache, by one compiled step, also those that waited for pages."""
    monkeypatch.syspath_prepend(EXAMPLES)
    results = load("serve_lm").main(steps=12, requests=6, slots=3, wanted=8, width=32, layers=1, seed=1)
    assert results["same"] == [True] * 6
    assert results["traces"] == 1
    assert results["waited"] > 0
    assert results["losses"][-1] < results["losses"][0]
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.slow
def test_same_bits(capsys):
    """The sampler's log-probabilities are those of the training step, which moves the policy; without the option they are not."""
    main = load("same_bits").main
    results = main(requests=4, steps=150)
    assert results["tokens"] > 500
    assert results["difference"] == 0.0
    assert results["change"] > 1e-4
    assert main(requests=4, steps=150, invariant=False)["difference"] > 0.0
    assert "largest difference of log-probabilities 0.0" in capsys.readouterr().out


@pytest.mark.slow
def test_fp8_keys():
    results = load("fp8_keys").main(length=200)
    assert results["error"] < 0.03 < results["unscaled"]


@pytest.mark.slow
def test_train_packed_lm(capsys):
    results = load("train_packed_lm").main(TINY)
    assert len(results["losses"]) == 60
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


@pytest.mark.slow
def test_pair_bias_gradient():
    results = load("pair_bias_gradient").main(length=70)
    assert max(results.values()) < 1e-4


@pytest.mark.slow
def test_block_diffusion():
    results = load("block_diffusion").main(length=128, block=16)
    assert results["error"] < 1e-5


@pytest.mark.slow
def test_topk_blocks():
    results = load("topk_blocks").main(length=256, block=32, keep=3)
    assert max(results.values()) < 1e-4
