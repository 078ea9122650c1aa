"""The canonical order of a row, `KernelOptions.invariant`: its constants, and what it does not take.

A row is one query of one head. Its keys are numbered from where its document begins, in tiles of KEYS and splits of
SPLIT. A split adds up its tiles in ascending order; splits are added in ascending order. References are whole powers of
two and follow the row alone. What a tile shows no key of changes nothing, so a call may visit more tiles than it must.
"""

import dataclasses

from flexjax.ir.origin import UNKNOWN
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.types import KernelOptions

KEYS, ROWS, SPLIT = 128, 16, 2048
"""Keys of a tile, rows of a product and keys of a split; they are part of the bits."""
RISE = 8.0
"""The reference of a row rises where the maximum of a tile exceeds it by more than this power of two."""

POSITIONS = 1 << 20
"""Score programs are traced for so many positions, because what is known of positions decides how they are computed."""

TILES = f"{ROWS} rows (tokens and heads of one key head) x {KEYS} keys, in splits of {SPLIT} keys"
COST = {"xla": ", in 2 to 4 times the time of the forward pass"}
"""Against the same backend without the option, where it is more than a few percent (docs/same_bits.md)."""


def sizes_of_score(sizes: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The (batch, heads, q_len, kv_len) for which the score program of an invariant call is traced."""
    longest = max((n for n in sizes[2:] if n < UNKNOWN), default=0)
    return (*sizes[:2], max(POSITIONS, longest), max(POSITIONS, longest))


def refuses(plan: KernelPlan) -> str | None:
    """Which feature of the call has no canonical order, in a sentence; None if it has one."""
    refused = {
        "float8 inputs": plan.float8,
        "keys in 8 bits": plan.cache_dtype is not None,
        "`weights`": plan.weighted,
        "`expectations`": plan.expectations > 0,
        "`dropout`": plan.dropout is not None,
        "`query_extra` and `key_extra`": plan.extra_dim > 0,
        "block masks from user lists": plan.blocks is not None and plan.blocks.from_user_lists,
    }
    found = [name for name, given in refused.items() if given]
    return f"kernel_options.invariant does not take {found[0]}; leave out one of them." if found else None


def refuses_parts(what: str) -> str:
    """The refusal of an argument that divides the keys of a row over several calls."""
    return f"kernel_options.invariant does not take `{what}`, which adds up the keys of a row in another order."


def refuses_backend(name: str, plan: KernelPlan, platform: str | None) -> str | None:
    """Why the backend `name` does not run a plan in the canonical order; None if it does, or if the call asks not.

    platform   that the pass is lowered for; None: any
    """
    if not plan.options.invariant:
        return None
    if name == "xla" and platform in (None, "cpu"):
        parts = plan.partial or not (plan.origin is None or plan.origin.single)
        return "xla adds up parts of a call in another order than kernel_options.invariant asks for." if parts else None
    if name == "xla":
        return f"kernel_options.invariant runs on xla for a CPU; on {platform} products follow the shapes of a call."
    if name == "mosaic_gpu":
        return None  # its families of kernels say which of them do
    return f"{name} has no kernels for kernel_options.invariant yet; xla runs it on a CPU."


def as_invariant(plan: KernelPlan) -> KernelPlan:
    """The plan as an invariant one, which takes no options of tiles."""
    same = {name: getattr(plan.options, name) for name in ("instruction", "interpret")}
    return dataclasses.replace(plan, options=KernelOptions(invariant=True, **same))


def describe(name: str, plan: KernelPlan, refusal: str | None, documents: bool) -> str:
    """For explain, of the plan on the backend `name`: whether its bits follow the rest of the call.

    refusal     why the backend does not run `as_invariant(plan)`
    documents   whether the call has the offsets of documents
    """
    if plan.options.invariant:
        told = "bits: out and lse of a token follow its query and the keys that it sees, and not the rest of the call"
        packed = ". Documents of a row are told by Origin(documents=); a mask alone follows the packing"
        return told + ("" if documents else packed)
    more = refuses(plan) or refusal or f"kernel_options.invariant=True keeps them fixed{COST.get(name, '')}."
    return f"bits: out and lse of a token may follow the rest of the call. {more}"
