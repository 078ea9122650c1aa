"""Small public types of the door: what a caller may ask for and gets back."""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax

from flexjax.errors import bad_argument


@dataclasses.dataclass(frozen=True)
class AuxRequest:
    """What `flex_attention(..., return_aux=)` returns beside the output.

    lse          natural-log sum of exponentials of the scores, [B, T, N] (BNT for BNTH), differentiable; float32, float64 for
                 float64 inputs
    max_scores   largest score of each row, same dtype and shape, no gradient
    """

    lse: bool = False
    max_scores: bool = False

    def __post_init__(self) -> None:
        _check_flags("return_aux", self, ("lse", "max_scores"))


class AuxOutput(typing.NamedTuple):
    """The requested extras; None for what was not asked."""

    lse: jax.Array | None = None
    max_scores: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """How to run, never what to compute. None lets the backend choose; one that has no use for an option goes without.

    Options tuned for one backend do not break the call on another: xla takes the nearest tile that fits its loops. A kernel
    backend refuses, in a sentence, a tile that it cannot run; the default dispatch then goes on to the next backend, and a
    call that names only that one raises NotImplementedError.

    block_q, block_kv          tile of the forward pass, in tokens; under a block mask xla's tiles are one of its blocks high
                               and as many whole blocks wide as block_kv holds
    block_q_bwd, block_kv_bwd  tile of the backward pass, likewise
    num_stages                 key tiles in flight in the forward pass (GPU)
    deterministic              False allows additions in any order in the backward pass where that is faster
    interpret                  run a kernel in the simulator of its platform, on the CPU; that of GPU kernels comes to a
                               standstill where XLA has few threads (PJRT_NPROC=32 in the environment gives it more)

    Example: flex_attention(q, k, v, kernel_options=KernelOptions(block_q=128, block_kv=64)). Other options are another program,
    which is compiled. flexjax.autotune finds the fastest tiles of a call by timing them.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_q_bwd: int | None = None
    block_kv_bwd: int | None = None
    num_stages: int | None = None
    deterministic: bool = True
    interpret: bool = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "block_q_bwd", "block_kv_bwd", "num_stages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise bad_argument(
                    f"kernel_options.{name}", repr(value), "a positive int or None", "None lets the backend choose."
                )
        _check_flags("kernel_options", self, ("deterministic", "interpret"))


def _refusing_unknown_names(init: Callable[..., None]) -> Callable[..., None]:
    """KernelOptions.__init__ with a ValueError that lists the options instead of Python's TypeError."""
    known = [f.name for f in dataclasses.fields(KernelOptions)]

    @functools.wraps(init)
    def checked(self: KernelOptions, *values: object, **options: object) -> None:
        for name in options:
            if name not in known:
                raise ValueError(f"`kernel_options` has no option `{name}`; expected one of {', '.join(known)}.")
        init(self, *values, **options)

    return checked


KernelOptions.__init__ = _refusing_unknown_names(KernelOptions.__init__)


def _check_flags(owner: str, options: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise bad_argument(f"{owner}.{name}", repr(value), "True or False", "Pass a Python bool.")
