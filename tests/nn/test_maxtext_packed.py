"""MaxText's trainer on packed documents of its grain pipeline, by the script of docs/clients.md."""

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
TRAIN = textwrap.dedent(
    re.findall(r"^ *```py\n(.*?)^ *```", (ROOT / "docs" / "clients.md").read_text(), re.M | re.S)[0]
)
INSTALL = "flexjax.nn.maxtext.install()\n"
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
OPTIONS = dict(
    run_name="packed", dataset_type="grain", packing="true", grain_file_type="arrayrecord", grain_worker_count=0, steps=STEPS,
    tokenizer_type="sentencepiece", max_target_length=256, per_device_batch_size=2, dtype="float32", attention="dot_product",
    base_emb_dim=32, base_num_query_heads=4, base_num_kv_heads=2, base_mlp_dim=64, base_num_decoder_layers=2, head_dim=8,
    learning_rate=0.02, warmup_steps_fraction=0.2, hardware="cpu", skip_jax_distributed_system="true", enable_checkpointing="false",
    enable_tensorboard="false",
)  # fmt: skip


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Array records of the paragraphs of docs/, as MaxText reads them."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from maxtext.input_pipeline.protos import example_pb2

    folder = tmp_path_factory.mktemp("documents")
    writer = ArrayRecordWriter(str(folder / "pages.array_record"), "group_size:1")
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in page.read_text().split("\n\n"):
            if 40 < len(text) < 400:
                example = example_pb2.Example()
                example.features.feature["text"].bytes_list.value.append(text.encode())
                writer.write(example.SerializeToString())
    writer.close()
    return folder


def trained(script: str, documents: pathlib.Path, out: pathlib.Path) -> tuple[np.ndarray, str]:
    """The losses of the steps that the script trains, and what it prints."""
    (package,) = importlib.util.find_spec("maxtext").submodule_search_locations  # type: ignore[union-attr]
    out.mkdir()
    places = dict(
        base_output_directory=out, metrics_file=out / "metrics", grain_train_files=documents / "*.array_record",
        tokenizer_path=f"{package}/assets/tokenizers/tokenizer.llama2",
    )  # fmt: skip
    (out / "train.py").write_text(script)
    options = [f"{name}={value}" for name, value in (OPTIONS | places).items()]
    command = [sys.executable, "-W", "ignore", str(out / "train.py"), f"{package}/configs/base.yml", *options]
    where = os.environ | dict(
        JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), XLA_FLAGS="--xla_force_host_platform_device_count=1"
    )
    done = subprocess.run(command, env=where, cwd=out, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (out / "metrics").read_text().splitlines()
    return np.array([json.loads(line)["learning/loss"] for line in lines]), done.stdout


def test_packed_documents_of_grain_have_the_losses_of_the_dot_product(
    documents: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert TRAIN.count(INSTALL) == 1
    theirs, _ = trained(TRAIN.replace(INSTALL, ""), documents, tmp_path / "dot_product")
    ours, printed = trained(COUNT_DOCUMENTS + TRAIN, documents, tmp_path / "flexjax")
    assert theirs.shape == (STEPS,)
    assert theirs[-1] < theirs[0] - 0.5
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    rows = [json.loads(line) for line in re.findall(r"^documents (.*)$", printed, re.M)]
    assert np.mean(rows) > 2, "rows have several documents"


@pytest.mark.slow
def test_without_ids_another_model_is_trained(documents: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """So the losses of the test above tell whether ids reach the attention."""
    packed, _ = trained(TRAIN, documents, tmp_path / "packed")
    across, _ = trained(TRAIN.replace(INSTALL, INSTALL + WITHOUT_IDS), documents, tmp_path / "across")
    assert np.abs(across - packed).max() > 1e-3
