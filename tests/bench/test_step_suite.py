"""The step suite without a GPU: the same numbers from every attention of the same model, and its table."""

import time

import pytest

from bench import __main__ as command
from bench import step

TINY = step.Size(layers=1, width=16, heads=2, tokens=32, documents=3)


@pytest.mark.slow
def test_numbers_are_those_of_a_dense_mask():
    compiled, numbers, missing = step.compile_steps(TINY, (step.OWN, step.DENSE), time.time() + 600)
    assert not missing
    assert set(compiled) == set(numbers) == {step.OWN, step.DENSE}
    errors = step.largest_errors(numbers)
    assert set(errors) == {step.OWN}
    assert errors[step.OWN] < step.ALLOWED_ERROR / 4
    numbers[step.OWN]["value"] = numbers[step.OWN]["value"] * (1 + 2 * step.ALLOWED_ERROR)
    numbers[step.CUDNN] = numbers[step.OWN]  # another model
    assert set(step.largest_errors(numbers)) == {step.OWN}
    assert step.largest_errors(numbers)[step.OWN] > step.ALLOWED_ERROR


def test_what_is_not_there_is_said(capsys):
    assert command.main(["--suite", "step", "--small", "--minutes", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7:] == [f"- {name}: not reached in the time given" for name in step.ATTENTIONS]
    assert "| flexjax | - | - | - | - |" in lines


@pytest.mark.slow
def test_the_command(capsys):
    assert command.main(["--suite", "step", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| flexjax") and " - " not in line for line in lines) == 3
    assert "- cuDNN, dense mask: needs an NVIDIA GPU" in lines
