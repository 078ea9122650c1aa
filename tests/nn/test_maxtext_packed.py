"""MaxText's trainer on packed documents of its grain pipeline, by the script of docs/clients.md."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

if importlib.util.find_spec("maxtext") is None:
    pytest.skip("flexjax.nn.maxtext adapts to MaxText: pip install maxtext", allow_module_level=True)

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6
PAGE = (ROOT / "docs" / "clients.md").read_text()
(TRAIN, DOCUMENTS), (_, COMMANDS) = (
    map(textwrap.dedent, re.findall(rf"^ *```{kind}\n(.*?)^ *```", PAGE, re.M | re.S)[:2]) for kind in ("py", "sh")
)
INSTALL = "    flexjax.nn.maxtext.install()\n"
WITHOUT_IDS = """
    from maxtext.layers.attention_op import AttentionOp
    theirs = AttentionOp.apply_attention
    AttentionOp.apply_attention = lambda self, **given: theirs(self, **given | {"decoder_segment_ids": None})
"""
COUNT_DOCUMENTS = """
from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator
get_batch = MultiHostDataLoadIterator.__next__
def counted(self):
    batch = get_batch(self)
    print("documents", batch["inputs_segmentation"].max(axis=1).tolist())
    return batch
MultiHostDataLoadIterator.__next__ = counted
"""
"""Prints how many documents each row has."""
FASTER = f" steps={STEPS} learning_rate=0.02 warmup_steps_fraction=0.2 metrics_file=metrics enable_tensorboard=false"


def trained(script: str, out: pathlib.Path) -> tuple[np.ndarray, str]:
    """The losses of the steps that the commands of the page train with this train.py, and what they print."""
    out.mkdir()
    (out / "train.py").write_text(script)
    (out / "documents.py").write_text(DOCUMENTS)
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    where = dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), XLA_FLAGS="--xla_force_host_platform_device_count=1")
    command = ["bash", "-euc", COMMANDS.rstrip() + FASTER]
    run = functools.partial(subprocess.run, cwd=out, capture_output=True, text=True, timeout=600, check=False)
    done = run(command, env=os.environ | where | dict(PATH=path, PYTHONWARNINGS="ignore"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (out / "metrics").read_text().splitlines()
    return np.array([json.loads(line)["learning/loss"] for line in lines]), done.stdout


def test_packed_documents_of_grain_have_the_losses_of_the_dot_product(tmp_path: pathlib.Path) -> None:
    assert TRAIN.count(INSTALL) == 1
    theirs, _ = trained(TRAIN.replace(INSTALL, ""), tmp_path / "dot_product")
    ours, printed = trained(COUNT_DOCUMENTS + TRAIN, tmp_path / "flexjax")
    assert theirs.shape == (STEPS,)
    assert theirs[-1] < theirs[0] - 0.5
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    rows = [json.loads(line) for line in re.findall(r"^documents (.*)$", printed, re.M)]
    assert np.mean(rows) > 2, "rows have several documents"


@pytest.mark.slow
def test_without_ids_another_model_is_trained(tmp_path: pathlib.Path) -> None:
    """So the losses of the test above tell whether ids reach the attention."""
    packed, _ = trained(TRAIN, tmp_path / "packed")
    across, _ = trained(TRAIN.replace(INSTALL, INSTALL + WITHOUT_IDS), tmp_path / "across")
    assert np.abs(across - packed).max() > 1e-3
