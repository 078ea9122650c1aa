"""torch FlexAttention on the workloads of the gpu suite, in a process of its own, without jax on the device.

device.py calls `facts` once and `measure` for each workload.
"""

# pyright: reportMissingImports=false
# peers are optional: they are measured where they are installed

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.inputs import alone, random_arrays, sample_rows
from bench.suites import MODS, Workload, document_ids, neighbours

ROUNDS, BACK_TO_BACK = 7, 10
"""Of a timing: measurements, of which the median counts, and calls in each."""


def facts() -> dict[str, str]:
    """{"torch": its version}. Sets torch up for the suite (recompilation limit, gradients asked for twice), so it is called once before
    any measurement. Raises RuntimeError if torch finds no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    torch._dynamo.config.cache_size_limit = 1000
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    return dict(torch=torch.__version__)


def measure(problem: Workload, folder: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Measures torch FlexAttention on one workload, compilation of the kernel and of the block mask included in the first call.

    folder   the folder of the run, which has the lock on the device

    Returns ({"forward", "backward", "first_call": seconds, "how": how the passes were measured}, {"out", "dq", "dk", "dv" and, if the
    workload learns, "learned": float32 sample rows}). The backward pass is timed alone; first_call has both passes. Resets torch's
    compiler first.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # without this, each workload checks the guards of all earlier ones
    device = "cuda"
    q, k, v, d_out, stored = _operands(problem)
    start = time.perf_counter()
    mask = _mask(problem, device)
    length = problem.length
    block_mask = (
        None if mask is None else torch.compile(create_block_mask)(mask, None, None, length, length, device=device)
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    mod, grouped = _mod(problem, stored), problem.heads != problem.kv_heads
    call = lambda: compiled(q, k, v, score_mod=mod, block_mask=block_mask, enable_gqa=grouped)
    return _timed(problem, folder, call, (q, k, v, stored), d_out, start)


def measure_flash(problem: Workload, folder: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Measures torch's FlashAttention-2 (scaled_dot_product_attention) on a workload whose mask is full or causal and which has no score
    mod. Any other mask counts as full, and a score mod is ignored.

    folder   the folder of the run, which has the lock on the device

    Returns ({"forward", "backward", "first_call": seconds, "how": how the passes were measured}, {"out", "dq", "dk", "dv" and, if the
    workload learns, "learned": float32 sample rows}).
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, d_out, _ = _operands(problem)
    attend = torch.nn.functional.scaled_dot_product_attention
    start = time.perf_counter()
    causal, grouped = problem.mask == "causal", problem.heads != problem.kv_heads
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _timed(
            problem,
            folder,
            lambda: attend(q, k, v, is_causal=causal, enable_gqa=grouped),
            (q, k, v, None),
            d_out,
            start,
        )


def _operands(problem: Workload) -> tuple[Any, ...]:
    """The tensors of a workload on the GPU: q, k, v and d_out, contiguous [B, heads, T, D] in the dtype of the workload, and what the score
    mod reads or None. q, k and v want gradients, and so does what the mod reads if the workload learns.
    """
    arrays, array = random_arrays(problem)
    q, k, v, d_out = (
        tensor(arrays[n], problem.dtype).transpose(1, 2).contiguous().requires_grad_(n != "d_out")
        for n in ("q", "k", "v", "d_out")
    )
    stored = None
    if array is not None and problem.mod:
        stored = tensor(array, MODS[problem.mod].stored).requires_grad_(problem.learns)
    return q, k, v, d_out, stored


def _timed(
    problem: Workload, folder: str, call: Callable[[], Any], operands: tuple[Any, ...], d_out: Any, start: float
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Times the forward and the backward pass of one attention, and takes sample rows of its results.

    problem    the workload; `learns` says whether the array that the score mod reads has a gradient too
    folder     the folder of the run, whose lock is held while the passes are timed
    call       runs the forward pass on the operands, without arguments: out [B, heads, T, D]
    operands   q, k, v and what the score mod reads or None, tensors that want gradients
    d_out      the cotangent of out
    start      time.perf_counter() before anything of the attention was compiled; `first_call` counts from here to the end of
               the first forward and backward pass

    Returns ({forward, backward, first_call: seconds, how: text}, {out, dq, dk, dv and, if the workload learns, learned: float32
    numpy arrays at the sample rows}).
    """
    import torch

    wanted = operands if problem.learns else operands[:3]
    out = call()
    pull = lambda: torch.autograd.grad(out, wanted, d_out, retain_graph=True)
    gradients = pull()
    torch.cuda.synchronize()
    first_call = time.perf_counter() - start
    rows = sample_rows(problem.length)
    pick = lambda x: x.transpose(1, 2)[:, rows].detach().float().cpu().numpy()
    samples = {n: pick(x) for n, x in zip(("out", "dq", "dk", "dv"), (out, *gradients[:3]), strict=True)}
    if problem.learns:
        learned = gradients[3] if gradients[3].ndim < 3 else gradients[3][:, rows]
        samples["learned"] = learned.detach().float().cpu().numpy()
    del gradients
    with alone(folder):
        times = dict(forward=events(call), backward=events(pull))
    torch.cuda.empty_cache()
    return dict(**times, how="events around ten launches", first_call=first_call), samples


def tensor(x: np.ndarray, dtype: str) -> Any:
    """A torch tensor on the GPU with the numbers of the numpy array `x`.

    dtype   the name of the dtype of x, which the tensor has too; numbers are not converted

    bfloat16 is copied as int16 bits, because torch does not know numpy's bfloat16.
    """
    import torch

    bits = torch.from_numpy(x.view(np.int16)) if dtype == "bfloat16" else torch.from_numpy(x)
    return bits.to("cuda").view(getattr(torch, dtype))


def events(call: Callable[[], object]) -> float:
    """The median seconds of a call, by CUDA events: of ROUNDS measurements of BACK_TO_BACK calls each. Three calls before the first
    measurement warm up.
    """
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(BACK_TO_BACK):
            call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / BACK_TO_BACK)
    return float(np.median(times)) * 1e-3


def _mask(problem: Workload, device: str) -> Any:
    """The workload's mask as a function of torch tensors (b, h, q, kv) -> bool, that of the same name in suites.MASKS; None for full
    attention.

    device   torch's name of the device on which the mask keeps the document of each token
    """
    n, side = problem.parameter, math.isqrt(problem.length)
    if problem.mask == "documents":
        import torch

        ids = torch.tensor(document_ids(problem.length, n, problem.seed), device=device)
        return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
    return {
        "full": None,
        "causal": lambda b, h, q, kv: q >= kv,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < n),
        "prefix": lambda b, h, q, kv: (q >= kv) | (kv < n),
        "dilated": lambda b, h, q, kv: (q >= kv) & (q - kv < n) & ((q - kv) % 4 == 0),
        "canvas": lambda b, h, q, kv: (
            neighbours(q // side, kv // side, side, n) & neighbours(q % side, kv % side, side, n)
        ),
    }[problem.mask]


def _mod(problem: Workload, array: Any) -> Any:
    """The workload's score mod as a function of torch tensors, that of the same name in suites.MODS; None without one.

    array   the tensor that the mod reads, None if it reads none
    """
    import torch

    if problem.mod is None:
        return None
    if problem.mod == "softcap":
        return lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0)
    if problem.mod == "checkerboard":

        def checkerboard(
            s: "torch.Tensor", b: object, h: object, q: "torch.Tensor", kv: "torch.Tensor"
        ) -> "torch.Tensor":
            """Halves the score `s` at even distances between query and key and doubles it at odd ones; b and h are not read."""
            s = torch.where((kv - q) % 2 == 0, s * 0.5, s)
            return torch.where((kv - q) % 2 == 1, s * 2.0, s)

        return checkerboard
    half = problem.length
    return {
        "alibi": lambda s, b, h, q, kv: s + array[h] * (kv - q),
        "relative": lambda s, b, h, q, kv: s + array[q - kv + half],
        "head_relative": lambda s, b, h, q, kv: s + array[h, q - kv + half],
        "pair": lambda s, b, h, q, kv: s + array[h, q, kv],
    }[problem.mod]
