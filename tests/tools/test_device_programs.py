"""Runs the device check where there is a Hopper GPU; what it needs no GPU for is tested everywhere."""

import importlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import flexjax
from bench import torch_flex
from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice, hopper_fused_tiles
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from tests.marks import some_slow
from tools.device import check_one_kernel, check_sanitizer, time_mma

SCRIPT = pathlib.Path(__file__).parents[2] / "tools/device/check_device.py"


def _script():
    spec = importlib.util.spec_from_file_location("check_device", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sanitizer_knows_its_cases():
    from tests.cases import CASES
    from tools.device.check_sanitizer import FEATURES

    assert len(set(FEATURES)) == len(FEATURES)
    assert set(FEATURES) <= set(CASES)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPT.parent.glob("*.py")))
def test_what_a_script_imports_is_there(script):
    importlib.import_module(f"tools.device.{script}")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("tool", check_sanitizer.PLANTED)
def test_the_kernels_with_a_planted_mistake_can_be_traced(tool):
    made = jax.make_jaxpr(check_sanitizer.planted_kernel(tool))(np.ones(128, np.float32))
    assert made.out_avals == [jax.core.ShapedArray((128,), np.dtype("float32"))]


@pytest.mark.parametrize("name", some_slow(check_one_kernel.PROBLEMS, [*check_one_kernel.PROBLEMS][::4]))
def test_one_kernel_of_128_queries_is_checked(name):
    """Each problem of that check is one for which the kernel is chosen."""
    problem = check_one_kernel.PROBLEMS[name]
    *main, _ = problem.arrays(np.random.default_rng(0))
    words = problem.words(main[3] if main[3:] else None)
    options = flexjax.KernelOptions(deterministic=problem.deterministic)
    plan = prepare(Arguments(*main[:3], layout=problem.layout, kernel_options=options, **words)).plan
    assert hopper_fused_choice.fused_is_faster(plan)
    assert hopper_fused_tiles.fused_tiles(plan).queries == 128


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12")
@pytest.mark.parametrize("script", ["check_device", "check_pages", "time_decode"])
@pytest.mark.parametrize("more", [[], ["--instruction", "tcgen05"]])
def test_the_tiles_of_another_card_are_those_of_mma_sync(script, more, monkeypatch):
    """Other kernels would run with the tiles of the card at hand."""
    monkeypatch.setattr(sys, "argv", [script, "--card", "8.0", *more])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"tools.device.{script}").main()
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("causal d128", {"error": "RuntimeError: does not compile"}),
        ("full d64", {"Flex": ["full d64", "full d64"]}),
    ],
)
def test_a_torch_process_answers_each_time_also_where_a_workload_does_not_compile(name, answer, monkeypatch, capsys):
    """One line says that it has compiled, and one answers each line of the input."""

    def calls(problem):
        if problem.name == "causal d128":
            raise RuntimeError("does not compile")
        return {"Flex": (lambda: problem.name, lambda: problem.name)}

    monkeypatch.setattr(time_mma, "torch_calls", calls)
    monkeypatch.setattr(torch_flex, "facts", dict)
    monkeypatch.setattr(torch_flex, "events", lambda call, count: call())
    monkeypatch.setattr(sys, "stdin", io.StringIO("time\ntime\n"))
    time_mma.serve_torch(name)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "compiled"
    assert [json.loads(line.removeprefix("answer ")) for line in lines] == [answer] * 2


def test_a_torch_process_is_asked_once_it_has_compiled(tmp_path, monkeypatch):
    """One that died, or was ended because it had not compiled, says so."""
    script = tmp_path / "torch.py"
    script.write_text(
        "import sys\n"
        "print('noise')\n"
        "if sys.argv[2] != 'slow':\n"
        "    print('compiled', flush=True)\n"
        "for line in sys.stdin:\n"
        "    if sys.argv[2] == 'dies':\n"
        "        sys.exit(3)\n"
        """    print('noise\\nanswer {"FA2": [1, 2]}', flush=True)\n"""
    )
    monkeypatch.setattr(time_mma, "__file__", str(script))
    for name, answer in dict(quick={"FA2": [1, 2]}, dies={"error": "has ended with 3"}).items():
        torch = time_mma.Torch(name, {})
        assert torch.compiled.wait(60)
        assert torch.measure() == answer
        torch.end()
    torch = time_mma.Torch("slow", {})
    torch.end()
    assert torch.measure() == {"error": "has ended with -9"}


class TorchProcess:
    """Answers with values that are given."""

    def __init__(self, events, name, answers):
        self.events, self.name, self.answers = events, name, iter(answers)

    def measure(self):
        self.events.append(self.name)
        return next(self.answers)


def test_torch_and_ours_are_measured_in_turns_and_the_least_counts():
    events, times = [], iter([5.0, 3.0, 4.0])
    first = TorchProcess(events, "first", [{"FA2": [3, 7]}, {"FA2": [4, 6]}, {"FA2": [5, 8]}])
    second = TorchProcess(events, "second", [{"error": "no"}] * 3)
    ours = {"default": lambda: events.append("ours") or next(times)}
    assert time_mma.in_turns(3, [first, second], ours) == ({"FA2": [3, 6]}, {"default": 3.0}, {"no"})
    assert events == ["first", "second", "ours"] * 3


def test_random_problems_are_drawn_from_their_seed_alone(monkeypatch):
    check = _script()
    rows = [check.random_problem(seed) for seed in range(300)]
    assert rows == [check.random_problem(seed) for seed in range(300)]
    assert {row["mask"] for row in rows} == set(check._masks(None, 1, 1, 1, 1))
    assert {row["mod"] for row in rows} == set(check._all_mods(1, 1, 1, 1))
    monkeypatch.setenv(check.SOAK_DTYPES, "float16")
    assert [check.random_problem(seed) for seed in range(300)] == [row | {"dtype": "float16"} for row in rows]


def test_a_wrong_result_is_seen():
    check = _script()
    want = np.random.default_rng(0).standard_normal((4, 32))
    check._close("x", want * 1.001, want, "float16")
    with pytest.raises(AssertionError, match="x: error"):
        check._close("x", want * 1.03, want, "bfloat16")
    with pytest.raises(AssertionError, match="1 NaN"):
        check._close("x", np.where(want == want[0, 0], np.nan, want), want, "bfloat16")


def test_the_summary_counts_and_tells():
    results = [
        dict(task=["conformance", "plain", "bfloat16"], verdict="ok", seconds=1.0),
        dict(task=["conformance", "seven", "bfloat16"], verdict="FAILED AssertionError: d:k", seconds=2.0),
    ]
    assert _script().summary(results) == [
        "conformance: 1 FAILED, 1 ok; slowest 2 s",
        "  conformance seven bfloat16: FAILED AssertionError: d:k",
    ]


@pytest.mark.slow
def test_the_stages_of_a_first_call_are_timed():
    script = SCRIPT.with_name("time_first_call.py")
    command = [sys.executable, script, "--suite", "gpu-tiny", "--problems", "learned pair 128"]
    where = dict(os.environ, PYTHONPATH=str(SCRIPT.parents[2]))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=where)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = done.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == "learned pair 128"
    assert len(cells) == 13
    assert all(float(x) >= 0 for x in cells[1:])


def test_heuristics_are_judged_by_the_fastest_tile():
    from flexjax.tune.time_tiles import Timing
    from tools.device import check_heuristics

    seconds = dict(forward=(2.0, None, 1.6, 2.4), backward=(1.0,))
    timings = [Timing(which, {}, s, 3) for which, row in seconds.items() for s in row]
    assert check_heuristics.ratios(timings) == {"forward": 1.25, "backward": None}


@pytest.mark.slow
def test_on_the_device():
    device = jax.devices()[0]
    if not getattr(device, "compute_capability", "").startswith("9"):
        pytest.skip(f"needs a Hopper GPU; the default device is a {device.platform}")
    command = [sys.executable, SCRIPT, "--seconds", "600"]
    assert subprocess.run(command, check=False, env=dict(os.environ, PYTHONPATH=".")).returncode == 0
