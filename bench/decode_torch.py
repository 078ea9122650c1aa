"""torch FlexAttention on the cases of the decode suite with contiguous caches, in a process of its own, without jax on the device.

torch chooses its kernel for few queries (flex_decoding) by itself. device.py calls `measure` for each case.
"""

# pyright: reportMissingImports=false
# peers are optional: they are measured where they are installed

import math
import time
from typing import Any

import numpy as np

from bench.decode_cases import HIDDEN_DOCUMENT, SOFT_CAP, WINDOW, DecodeCase
from bench.inputs import alone
from bench.torch_flex import events, tensor


def measure(case: DecodeCase, folder: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Measures torch FlexAttention on one case.

    folder   the folder of the run, which has the lock on the device

    Returns ({"decode": seconds of one call on one copy, "how": how it was measured, "first_call": seconds of compiling and the first
    calls of all copies, block mask included}, {"out": float32 [entries, T, N, D], the outputs of the requests case.entries() on the last
    copy}).
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # without this, each case checks the guards of all earlier ones
    torch.cuda.empty_cache()
    given = case.arrays()
    small = {n: tensor(x, str(x.dtype)) for n, x in given.items() if n not in ("query", "key", "value")}
    query, key, value = (
        _repeated(given[n], shape).transpose(2, 3).contiguous()
        for n, shape in (("query", case.query_shape()), ("key", case.cache_shape()), ("value", case.cache_shape()))
    )
    if case.mean:  # torch multiplies what no length covers by 0
        gone = torch.arange(case.keys, device="cuda") >= small["lengths"][:, None]
        for x in (key, value):
            x.masked_fill_(gone[None, :, None, :, None], 0)
    start = time.perf_counter()
    score_mod, mask_mod = _mods(case, small)
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, case.batch, None, case.q_len, case.keys, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.q_heads != case.kv_heads
    call = lambda: [
        compiled(query[n], key[n], value[n], score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)
        for n in range(case.copies)
    ]
    with torch.no_grad():
        out = call()[-1]
        torch.cuda.synchronize()
        first_call = time.perf_counter() - start
        samples = {"out": out[case.entries()].transpose(1, 2).float().cpu().numpy()}
        with alone(folder):
            took = events(call)
    return dict(decode=took / case.copies, how="events around ten launches", first_call=first_call), samples


def _repeated(numbers: np.ndarray, shape: tuple[int, ...]) -> Any:
    """A bfloat16 tensor of that shape on the GPU, filled with the flat numpy array `numbers`, bfloat16, again and again, as
    decode_peers.make_arrays does.
    """
    size = math.prod(shape)
    return tensor(numbers, "bfloat16").repeat(-(-size // numbers.size))[:size].reshape(shape)


def _mods(case: DecodeCase, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """(score_mod, mask_mod) of a case as functions of torch tensors, None where it has none.

    Their q counts the queries of the call from 0, as torch does. A case with random lengths gets one mask, which hides the keys past a
    length, whatever its mod is.

    arrays   the tensors that the mods read, by the names of `case.arrays()`
    """
    import torch

    first = case.first_query()
    if case.mean:
        return None, lambda b, h, q, k: k < arrays["lengths"][b]
    mods = {
        "ALiBi": lambda s, b, h, q, k: s + arrays["slopes"][h] * (k - q - first),
        "soft cap": lambda s, b, h, q, k: SOFT_CAP * torch.tanh(s / SOFT_CAP),
        "relative table": lambda s, b, h, q, k: s + arrays["table"][h, q + first - k + case.keys],
    }
    masks = {
        "documents": lambda b, h, q, k: arrays["ids"][b, k] != HIDDEN_DOCUMENT,
        "window": lambda b, h, q, k: (q + first >= k) & (q + first - k < WINDOW),
        "causal": lambda b, h, q, k: q + first >= k,
        "tree": lambda b, h, q, k: (k < first) | arrays["ancestors"][q, torch.clamp(k - first, min=0)],
    }
    return mods.get(case.mod or ""), masks.get(case.mod or "")
