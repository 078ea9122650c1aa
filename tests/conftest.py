"""Settings of every test: two CPU devices, quick compiling, reproducible hypothesis, no slow tests unless asked for."""

import argparse
import ast
import gc
import hashlib
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

SECOND_DEVICE = {"xla_force_host_platform_device_count": "2"}  # for tests of meshes
QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": "0",
    "xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_parallel_codegen_split_count": "1",  # more modules of LLVM for a program cost more, on as many cores as workers
    "xla_cpu_prefer_vector_width": "128",
}
"""Most programs of the tests run once, and compiling them takes most of the time; these settings shorten it. XLA_FLAGS with
one of them, whatever its value, leaves all of them to XLA_FLAGS."""


def add_xla_flags() -> None:
    """Before jax is imported."""
    given = os.environ.get("XLA_FLAGS", "")
    quick = {} if any(name in given for name in QUICK_TO_COMPILE) else QUICK_TO_COMPILE
    added = [f"--{name}={value}" for name, value in (SECOND_DEVICE | quick).items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


add_xla_flags()
# The simulator of GPU kernels holds a thread of XLA's pool at every barrier that a simulated warpgroup waits for; with a
# pool of one thread a core, two cores come to a standstill.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("MPLBACKEND", "agg")

pytest.register_assert_rewrite("tests.backends.conformance", "tests.cases.on_hopper", "tests.compare")

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=60)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and only them")
    parser.addoption(
        "--minutes", type=float, help="in an order mixed over all files, skip what would begin after so many minutes"
    )
    parser.addoption(
        "--mixed-by", default="", metavar="TEXT", help="another text, another order of the tests of --minutes"
    )
    parser.addoption(
        "--cpu-seconds",
        type=float,
        help="fail if the run takes more at the usual pace of a core, in the processes of all workers and their children",
    )


COMPILED = pytest.StashKey[str]()
"""Where this run keeps the programs that it compiled: a folder that the process which began the run makes and removes."""


def pytest_configure(config: pytest.Config) -> None:
    """Compiles each program once a run. The files have many small ones in common: operations of jax.numpy on usual shapes."""
    worker = getattr(config, "workerinput", None)
    folder = (
        worker["compiled"] if worker else config.stash.setdefault(COMPILED, tempfile.mkdtemp(prefix="flexjax-tests-"))
    )
    if worker or getattr(config.option, "dist", "no") == "no":  # not in the process that only hands tests to workers
        import jax

        # children do not inherit it: some are asked what a compiler prints
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.monitoring.register_event_duration_secs_listener(_note_program)


SECONDS_TO_COMPILE: list[float] = []
"""Of each program that this process compiled, or read from the folder, and holds."""


def _note_program(event: str, seconds: float, **details: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        SECONDS_TO_COMPILE.append(seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["compiled"] = node.config.stash[COMPILED]


def pytest_unconfigure(config: pytest.Config) -> None:
    if COMPILED in config.stash:
        shutil.rmtree(config.stash[COMPILED], ignore_errors=True)


CPU_SECONDS = pytest.StashKey[float]()
"""Of this process, its workers and their children, user and system. The processes that others run beside change it little."""

USUAL_PACE = 0.15
"""CPU seconds of `pace` on the cores that the bar is meant for."""
PACES: list[float] = []


def pace() -> float:
    """CPU seconds of work that is always the same. Cores whose caches and clock others share take a multiple at times."""
    text, began = pathlib.Path(argparse.__file__).read_text(), time.process_time()
    for _ in range(4):
        compile(ast.parse(text), "argparse", "exec")
    return time.process_time() - began


def pytest_runtest_logreport() -> None:
    """Once a minute, in the process that began the run."""
    if "PYTEST_XDIST_WORKER" not in os.environ and time.monotonic() - BEGAN >= 60 * len(PACES):
        PACES.append(pace())


def at_usual_pace(seconds: float) -> float:
    return seconds * USUAL_PACE / max(USUAL_PACE, statistics.median(PACES or [USUAL_PACE]))


@pytest.hookimpl(wrapper=True, trylast=True)  # after pytest-xdist has waited for its workers, before the summary
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    seconds = session.config.stash[CPU_SECONDS] = sum(os.times()[:4])
    bar = session.config.getoption("--cpu-seconds")
    if bar is not None and at_usual_pace(seconds) > bar and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    seconds, bar = config.stash.get(CPU_SECONDS, 0.0), config.getoption("--cpu-seconds")
    said = f"{seconds:.0f} CPU seconds, {at_usual_pace(seconds):.0f} at the usual pace of a core"
    if bar is not None and at_usual_pace(seconds) > bar:
        said += f", more than --cpu-seconds {bar:g}: mark tests slow, or compile less (CONTRIBUTING.md says what takes the time)"
    terminalreporter.write_line(said)


BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"not begun within {minutes:g} minutes")


def is_slow(item: pytest.Item) -> bool:
    """By its mark, or because its class (see tests/backends/conformance.py) leaves the test, or this row of it, to the slow run."""
    names = getattr(getattr(item, "cls", None), "slow_tests", ())
    return (
        item.get_closest_marker("slow") is not None or item.name in names or getattr(item, "originalname", "") in names
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the slow tests unless `-m` or a full test name is given; `--slow` runs them alone."""
    if moved := [
        item.nodeid for item in items if " at 0x" in item.nodeid
    ]:  # each process would name them in another way
        raise pytest.UsageError(f"Test ids hold addresses; give ids: {moved[:3]}")
    if config.getoption("--minutes") is not None:
        text = config.getoption("--mixed-by")
        items.sort(key=lambda item: hashlib.sha256((text + item.nodeid).encode()).hexdigest())
    if config.getoption("-m") or any("::" in arg for arg in config.args):
        return
    wanted = bool(config.getoption("--slow"))
    chosen, others = [], []
    for item in items:
        (chosen if is_slow(item) == wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Tracing makes so many objects that Python looks for cycles all the time, among all that was imported: seldom instead."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def _forget_lowered_passes() -> None:
    """A test may replace what lowers them."""
    from flexjax.passes import lowered

    lowered.forget()


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Between files, when there are many: together they fill the memory, and small ones are of use to the next file."""
    yield
    if len(SECONDS_TO_COMPILE) > 1500:  # two gigabytes. Each time takes four seconds
        import jax

        jax.clear_caches()
        gc.collect()
        SECONDS_TO_COMPILE.clear()
