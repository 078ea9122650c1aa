"""Names of cards and chips that `device=` of explain takes, so that it answers before one is rented.

A name stands for the device that jax would report: its device_kind, and the number of its SMs as far as data sheets
say it. Where it is None, kernels are planned for the SMs of their reference card.
"""

import dataclasses

from flexjax.backends import target as targets
from flexjax.backends.target import KINDS, Target

# Name -> (device_kind, SMs).
GPUS: dict[str, tuple[str, int | None]] = {
    "a100": ("NVIDIA A100-SXM4-80GB", 108),
    "a30": ("NVIDIA A30", 56),
    "a10": ("NVIDIA A10", 72),
    "a40": ("NVIDIA A40", 84),
    "l4": ("NVIDIA L4", None),
    "l40s": ("NVIDIA L40S", 142),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 128),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 170),
    "h100": ("NVIDIA H100 80GB HBM3", 132),
    "h200": ("NVIDIA H200", 132),
    "gh200": ("NVIDIA GH200 480GB", 132),
    "b200": ("NVIDIA B200", 148),
    "b300": ("NVIDIA B300", None),
}
# Name -> device_kind. jax describes each by one TensorCore, whose memory is the same in all chips of a kind.
TPUS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


def named(name: str) -> Target | None:
    """The target of a card or chip, in upper or lower case, None for another name. A device here knows more."""
    word = name.lower()
    if word in GPUS:
        kind, cores = GPUS[word]
        made = Target("cuda", kind, next(number for number, kinds in KINDS.items() if kinds.search(kind)), cores)
    elif word in TPUS:
        made = Target("tpu", TPUS[word], None, 1)
    else:
        return None
    here = targets.of_platform(made.platform)
    return dataclasses.replace(made, cores=here.cores) if here.kind == made.kind else made
