"""Processes that run tasks one after the other, so that a kernel that hangs or that ends its process costs one task and no more.

A task is a dict: `task`, the name of a function in first_hour_tasks.TASKS, and `arguments`, its keywords. An answer is the dict that the
function returns, with `seconds_taken`; {"failed": why} where it raised, where its process died or could not start, or where it took too
long; and {"unreached": why} where the time was up before it began.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Sequence

Task = dict[str, typing.Any]
Answer = dict[str, typing.Any]
UNREACHED = "not reached in the time given"
COMMAND = (sys.executable, "-m", "lab.first_hour_tasks")
"""What a worker's process runs."""
MARK = "answer: "
"""What the line of an answer begins with; libraries may print other lines."""


class Worker:
    """A process of first_hour_tasks.py, started when the first task comes and again after it died."""

    def __init__(self, folder: str, number: int):
        """Nothing runs yet: `run` starts the process.

        folder   for what the process writes to stderr, and for the compilation cache that all workers of the folder share
        number   of the worker, in the name of the file of stderr
        """
        self._errors = os.path.join(folder, f"worker-{number}.err")
        self._environment = dict(
            os.environ,
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            TF_CPP_MIN_LOG_LEVEL="3",
            JAX_COMPILATION_CACHE_DIR=os.path.join(folder, "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread()

    def run(self, task: Task, seconds: float) -> Answer:
        """The answer of a task; {"failed": why} where the process dies or `seconds` pass. The process is then ended, and `ended_after`
        beside "failed" says that time was the reason. It starts a process if none runs, and waits for the answer; lines that do not begin
        with MARK are dropped.

        Raises OSError where a process cannot start, and ValueError for an answer that is no JSON.
        """
        process, lines = self._started()
        assert process.stdin is not None
        until = time.monotonic() + seconds
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        except OSError:
            return self._died()
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                return dict(failed=f"took longer than {seconds:.0f} s and was ended", ended_after=seconds)
            if line is None:
                return self._died()
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])

    def _started(self) -> tuple[subprocess.Popen[str], "queue.Queue[str | None]"]:
        """(the process, the queue of the lines of its stdout), for `run`. Starts a process, and a thread that reads its stdout, if none
        runs or the last one has ended; None in the queue is the end of the lines. Its stderr goes to the worker's file in the folder,
        which is emptied when a process starts.

        Raises OSError if the process cannot start. `run` does not catch it; `run_all` makes {"failed": why} of it.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            with open(self._errors, "w") as errors:
                self._process = subprocess.Popen(
                    COMMAND,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environment,
                )  # fmt: skip
            self._lines = queue.Queue()
            self._reader = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
            self._reader.start()
        return self._process, self._lines

    def _died(self) -> Answer:
        """Ends the process, which died during a task, and returns the answer of that task: {"failed": why}.

        `why` has its exit status (negative: the signal) and the last line that it wrote to stderr, at most 300 characters of it, or "no
        word". It waits until the process has ended. The next task starts another one.
        """
        status = self._process.wait() if self._process is not None else None
        self.close()
        with open(self._errors) as file:
            last = (file.read().strip().splitlines() or ["no word"])[-1][:300]
        return dict(failed=f"the process ended with {status}: {last}")

    def close(self) -> None:
        """Ends the process, if one runs: kills it, waits for it and for the thread that reads it, and closes its pipes. The next task
        starts another one.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # a pipe with words that the process did not read
                        pipe.close()
            self._process = None


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    """Puts the lines of a process's stdout into the queue as they come, and None at their end. A thread of each worker runs it, because a
    read of the pipe has no timeout.
    """
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def run_all(
    tasks: Sequence[Task],
    workers: int,
    until: float,
    folder: str,
    most_seconds: float = 120.0,
) -> list[Answer]:
    """Runs all tasks in several processes and returns their answers, in the order of the tasks. It returns when the last one has its
    answer or the time is up.

    workers        the most processes at once
    until          time.time() after which no task begins, and at which running ones are ended (a task that begins in the last
                   second has one second)
    folder         for the stderr of each process, and the compilation cache that they share
    most_seconds   after which a task is ended
    """
    answers: list[Answer] = [dict(unreached=UNREACHED) for _ in tasks]
    numbers = iter(range(len(tasks)))
    lock = threading.Lock()

    def serve(number: int) -> None:
        """Runs tasks by the worker `number` until there is none or the time is up, and ends its process. Puts their answers into
        `answers`; runs in a thread of its own.
        """
        worker = Worker(folder, number)
        try:
            while time.time() < until:
                with lock:
                    i = next(numbers, None)
                if i is None:
                    return
                left = until - time.time()
                try:
                    answer = worker.run(tasks[i], min(most_seconds, max(1.0, left)))
                except Exception as error:  # a process that cannot start, or an answer that is no JSON
                    answer = dict(failed=f"{type(error).__name__}: {error}")
                    worker.close()
                cut = "ended_after" in answer and left < most_seconds  # the run's time was up, not the task's
                answers[i] = dict(unreached=f"{UNREACHED}: it was running") if cut else answer
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(min(workers, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
