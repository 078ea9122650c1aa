"""The mosaic_tpu backend (see backends/base.py): which plans it runs, with which tiles.

It refuses a plan in a sentence, from the plan alone. Which captured arrays want a gradient is known only later: `backward`
raises NotImplementedError with the sentence of `refuses_backward` for a gradient that the kernels cannot compute.

The methods of the backend do what backends/base.py says of them. A plan whose mask blocks no tile fits runs with blocks of 128
tokens (plan/mask_blocks.py).

A Chip (vmem.py) is a generation of TPUs, whose VMEM decides the tiles.
"""

import contextlib

from jax.interpreters import mlir

from flexjax.backends.base import BackwardInputs
from flexjax.backends.mosaic_tpu import capture_gradients, diagonals, layouts, split_program, vmem
from flexjax.backends.mosaic_tpu.backward import backward
from flexjax.backends.mosaic_tpu.forward import forward
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.list_shape import PAGES_BYTES, block_layout, list_shape
from flexjax.backends.mosaic_tpu.split_program import Unsupported, split_for
from flexjax.backends.target import Target
from flexjax.ir import program as ir
from flexjax.ir.program import Load, Program
from flexjax.plan import mask_blocks
from flexjax.plan.join_heads import join_operands, joined_plan, split_results
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.pack_heads import pack_operands, packed_plan, unpack_results

DIAGONAL_BYTES = 8 << 20
"""VMEM that the sums along the diagonals of a head may take."""


class MosaicTpuBackend:
    """Attention as Pallas Mosaic TPU kernels."""

    name = "mosaic_tpu"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """The sentence that says why no kernel runs the plan on the target, None if one does. A target that XLA's partitioner
        splits over devices is refused; without a target, the chip with the most VMEM decides.
        """
        if target is not None and target.automatic:
            return AUTOMATIC
        return _refusal(plan, vmem.chip_of(target))

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """The sentence that says why the kernels cannot compute the wanted gradients of an accepted plan; None if they can.
        Calls with keys in pages have no gradients.

        derivative   program of score_mod's derivatives; None without score_mod
        """
        if plan.page:
            return "mosaic_tpu has no gradients of a call with keys in pages."
        plan = mask_blocks.plan_with_blocks(plan, *_kernel_blocks(plan))
        return _backward_refusal(plan, wanted, derivative, vmem.chip_of(target))

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Tiles that fit the target's VMEM, each a dict of block_q, block_kv, block_q_bwd and block_kv_bwd in tokens; the default
        tiles first.

        The n-th forward tile comes with the n-th backward tile, or the last one where these are fewer; backward tiles beyond the
        number of forward tiles are left out. If no backward tile fits, the dicts have the sizes of the forward pass alone; if no
        forward tile fits, the list is empty. Raises NoTile if no tile suits the plan's mask blocks or the runs of its origin.
        """
        plan = mask_blocks.plan_with_blocks(plan, *_kernel_blocks(plan))
        chip = vmem.chip_of(target)
        forward_tiles = vmem.forward_candidates(plan, chip)
        backward_tiles = vmem.backward_candidates(plan, chip, plan.score)
        sizes = list(dict.fromkeys((f.q, f.kv) for f in forward_tiles))  # they may differ in their strips alone
        if not backward_tiles:
            return [{"block_q": q, "block_kv": kv} for q, kv in sizes]
        pairs = [(f, backward_tiles[min(n, len(backward_tiles) - 1)]) for n, f in enumerate(sizes)]
        return [{"block_q": q, "block_kv": kv, "block_q_bwd": b.q, "block_kv_bwd": b.kv} for (q, kv), b in pairs]

    def tile_sizes(self, plan: KernelPlan, target: Target) -> str | None:
        """The tiles of both passes, queries x keys, as text such as "forward 256 x 512, backward 256 x 256"; None for calls of few queries,
        which run as another plan.
        """
        if plan.page or joined_plan(plan) is not None or packed_plan(plan) is not None:
            return None
        first = self.tile_candidates(plan, target)[0]
        texts = [
            f"{which} {first['block_q' + end]} x {first['block_kv' + end]}"
            for which, end in (("forward", ""), ("backward", "_bwd"))
            if f"block_q{end}" in first
        ]
        return ", ".join(texts)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass of the plan by the forward kernel (see Results).

        A plan that `joined_plan` (plan/join_heads.py) or else `packed_plan` (plan/pack_heads.py) rewrites, as a call of
        few queries, runs rewritten, unless the kernel refuses that; with keys in pages it always runs joined.
        """
        chip = vmem.chip_of(target)
        for rewrite, given, results in (
            (joined_plan, join_operands, split_results),
            (packed_plan, pack_operands, unpack_results),
        ):
            made = rewrite(plan)
            if made is not None and (plan.page or _refusal(made, chip) is None):
                rows = mask_blocks.with_blocks(made, given(plan, operands), *_kernel_blocks(made))
                return results(plan, forward(*rows, chip))
        return forward(*mask_blocks.with_blocks(plan, operands, *_kernel_blocks(plan)), chip)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands in their shapes, None for the others: those of captured arrays and of sinks in the
        dtypes of these, all others in the plan's dtype. Raises NotImplementedError, with the sentence, for those that
        `refuses_backward` refuses.

        given   operands, results, cotangents, what is wanted and the derivative program
        """
        chip = vmem.chip_of(target)
        plan, operands = mask_blocks.with_blocks(plan, given.operands, *_kernel_blocks(plan))
        reason = _backward_refusal(plan, given.wanted, given.derivative, chip)
        if reason is not None:
            raise NotImplementedError(reason)
        return backward(plan, given._replace(operands=operands), chip)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """An empty context: nothing about the lowered module changes."""
        return contextlib.nullcontext()


# ------------------------------------------------------------------- refusals

AUTOMATIC = (
    "XLA cannot split the kernels of mosaic_tpu over automatic mesh axes, and has no partitioning rules on a TPU. Make the axes "
    "explicit (jax.make_mesh with AxisType.Explicit, then jax.set_mesh), or call flex_attention inside jax.shard_map over all axes."
)


def _kernel_blocks(plan: KernelPlan) -> tuple[int, int]:
    """The sizes (queries, keys) of the mask blocks with which the kernels run the plan; (0, 0) without a block mask.

    Along each axis that is the size of the mask's own blocks, or 128 tokens if no tile has whole such blocks or divides one, or
    if the size is no multiple of 8 and less than the length.
    """
    if plan.blocks is None:
        return 0, 0

    def suits(block: int, length: int) -> bool:
        """Whether some tile fits mask blocks of `block` tokens along an axis of `length` tokens."""
        try:
            vmem.tile_size(128, length, block, 128)
        except vmem.NoTile:
            return False
        return block % 8 == 0 or block >= length

    pairs = ((plan.blocks.block_q, plan.q_len), (plan.blocks.block_kv, plan.kv_len))
    block_q, block_kv = (block if suits(block, length) else 128 for block, length in pairs)
    return block_q, block_kv


def _refusal(plan: KernelPlan, chip: vmem.Chip) -> str | None:
    """The sentence that says why the kernels cannot run the plan on the chip, None if they can.

    Checked are pages, the origin, the dtype, empty arrays, second derivatives, head dims, numbers of heads, whether each
    program can be split between XLA and a kernel, and whether a tile of each pass fits the chip's VMEM. A plan with keys
    in pages is checked with its heads joined (plan/join_heads.py), as it runs, and without a backward pass.
    """
    if plan.page:
        reason, joined = _page_refusal(plan), joined_plan(plan)
        if reason is not None or joined is None:
            return reason
        plan = joined
    if plan.origin is not None:
        reason = _origin_refusal(plan)
        if reason is not None:
            return reason
    plan = mask_blocks.plan_with_blocks(plan, *_kernel_blocks(plan))
    if plan.dtype not in ("float32", "bfloat16"):
        return f"mosaic_tpu computes float32 and bfloat16; query, key and value are {plan.dtype}."
    if not all((plan.batch, plan.q_heads, plan.kv_heads, plan.q_len, plan.kv_len, plan.head_dim, plan.value_dim)):
        return "mosaic_tpu takes no empty arrays; some dimension of query, key or value is 0."
    if plan.differentiable:
        return "mosaic_tpu has no second derivatives; its kernels cannot be differentiated again."
    if plan.head_dim + plan.extra_dim > 1024 or plan.value_dim > 1024:
        return f"mosaic_tpu takes head dims up to 1024; this call has {plan.head_dim + plan.extra_dim} and {plan.value_dim}."
    if plan.extra_dim and _heads_do_not_divide(plan):
        return f"mosaic_tpu needs the heads of key ({plan.kv_heads}) and key_extra ({plan.extra_heads}) to divide each other."
    for name, program in (("score_mod", plan.score), ("mask_mod", plan.mask), ("dropout", plan.dropout)):
        if program is None:
            continue
        try:
            split_for(program, plan)
        except Unsupported as why:
            return f"mosaic_tpu cannot run this {name}: {why}."
    try:
        vmem.forward_tiles(plan, chip)
        if not plan.page:
            vmem.backward_tiles(plan, chip, plan.score)
    except vmem.NoTile as why:
        return f"mosaic_tpu has no tile for this call: {why}."
    return None


def _page_refusal(plan: KernelPlan) -> str | None:
    """The sentence that says why the kernel cannot read the pages of a plan, None if it can: pages that XLA stores in another form
    than the kernel reads or copies, or more page numbers than fit SMEM.

    The kernel reads a page [page, M, D] as [page * M, D], which has to be the same memory. For other dtypes, head dims and numbers
    of heads XLA stores the two shapes differently, and would copy the whole pool at each call.
    """
    dims, heads, bytes_ = (plan.head_dim, plan.value_dim), plan.kv_heads, plan.cache_dtype is not None
    if bytes_ and (heads == 2 or plan.page * heads % 32):
        return (
            "mosaic_tpu reads quantised pages in place where key heads are not 2, and tokens of a page times key heads a multiple of 32; "
            f"this cache has {heads} key heads and pages of {plan.page} tokens."
        )
    whole = heads % 8 == 0 or (heads == 1 and (bytes_ or plan.dtype == "bfloat16"))
    if any(dim % vmem.LANES for dim in dims) or not (whole or (set(dims) == {vmem.LANES} and heads in (1, 2, 4))):
        return (
            "mosaic_tpu reads pages in place where head dims are multiples of 128 and the key heads a multiple of 8, and for head dims "
            f"of 128 also where they are 1, 2 or 4; this cache has {heads} key heads, and head dims of {dims[0]} and {dims[1]}."
        )
    numbers = plan.batch * (plan.kv_len // plan.page)
    if 4 * numbers > PAGES_BYTES:
        return (
            f"mosaic_tpu keeps the page numbers of a call in SMEM, up to {PAGES_BYTES // 4} of them; this table has {plan.batch} x "
            f"{plan.kv_len // plan.page}. Use larger pages or shorter tables."
        )
    return None


OFFSETS = 1 << 14
"""The most runs, counted over all batch entries and heads, whose positions a kernel keeps in SMEM, four bytes each."""


def _origin_refusal(plan: KernelPlan) -> str | None:
    """The sentence that says why the kernels cannot run at the origin of the plan, None if they can: a block mask from user lists whose
    blocks no tile fits, or more than OFFSETS runs.
    """
    origin, blocks = plan.origin, plan.blocks
    assert origin is not None
    if blocks is not None and blocks.from_user_lists and _kernel_blocks(plan) != (blocks.block_q, blocks.block_kv):
        return (
            "mosaic_tpu cannot change the blocks of a block mask from user lists beside an origin; "
            f"these are {blocks.block_q} x {blocks.block_kv}, and its tiles take {' x '.join(map(str, _kernel_blocks(plan)))}."
        )
    runs = (origin.query_runs + origin.key_runs) * plan.batch * plan.q_heads
    if not origin.single and runs > OFFSETS:
        return (
            f"mosaic_tpu takes at most {OFFSETS} runs of queries and keys over all batch entries and heads, not {runs}."
        )
    return None


def _heads_do_not_divide(plan: KernelPlan) -> bool:
    """Whether key and key_extra have numbers of heads of which neither divides the other, so that the heads of both cannot be repeated to
    the larger number; True also if one is 0.
    """
    low, high = sorted((plan.kv_heads, plan.extra_heads))
    return low == 0 or high % low != 0


def _backward_refusal(plan: KernelPlan, wanted: Wanted, derivative: Program | None, chip: vmem.Chip) -> str | None:
    """The sentence that says why the kernels cannot compute the wanted gradients of an accepted plan on the chip, None if they
    can.

    plan         with the mask blocks of `_kernel_blocks`
    wanted       which operands get a gradient; only those of captured arrays are read
    derivative   program of score_mod's derivatives; None without score_mod

    Reasons: score_mod has no derivative, the derivative program cannot be split, no tile fits, or `_capture_refusal` of a wanted
    read.
    """
    if plan.score is not None and derivative is None:
        return "mosaic_tpu needs the derivative of score_mod, and there is none."
    if derivative is None:
        return None
    try:
        split_for(derivative, plan)
        tiles = vmem.backward_tiles(plan, chip, derivative)
    except Unsupported as why:
        return f"mosaic_tpu cannot run the derivative of this score_mod: {why}."
    except vmem.NoTile as why:
        return f"mosaic_tpu has no tile for the backward pass of this call: {why}."
    for number, load_class in capture_gradients.wanted_load_kinds(derivative, wanted.score_captures).items():
        load = capture_gradients.load_of(derivative, number)
        reason = _capture_refusal(plan, TileGeometry.of(plan, tiles, 0), load, load_class, derivative)
        if reason is not None:
            return reason
    return None


def _capture_refusal(
    plan: KernelPlan, geometry: TileGeometry, load: Load, load_class: str, derivative: Program
) -> str | None:
    """The sentence that says why the kernels cannot compute the gradient of the captured array that `load` reads; None
    if they can.

    geometry     of the dq kernel
    load_class   the class of the load: "scalar", "row", "column", "diagonal" or "tile"
    derivative   the program that the load belongs to

    Reasons: an index depends on the score; a read at q - kv where the origin has several runs, where the sums along
    diagonals exceed DIAGONAL_BYTES, or where launches split a head; or a read at each (q, kv) needs more than
    DENSE_LIMIT bytes.
    """
    shown = derivative.captures[load.capture]
    if any("score" in ir.axes_of(a) for a in load.index):
        return f"mosaic_tpu has no gradient for a captured array ({shown}) read at an index computed from the score."
    if load_class == ir.DIAGONAL and plan.origin is not None and not plan.origin.single:
        return (
            f"mosaic_tpu has no gradient for a captured array ({shown}) read at q - kv where the origin has several runs of "
            "queries or keys."
        )
    if load_class == ir.DIAGONAL:
        size = 4 * diagonals.SKEW * geometry.diagonals
        if size > DIAGONAL_BYTES:
            return (
                f"mosaic_tpu sums the gradient of a captured array ({shown}) read at q - kv in VMEM, "
                f"{size >> 20} MiB for these lengths, more than {DIAGONAL_BYTES >> 20} MiB."
            )
        group = layouts.FoldedShapes.of(plan).group
        if (
            block_layout(plan, geometry) is not None
            and not list_shape(plan, geometry, group, False).launches_hold_heads
        ):
            return (
                f"mosaic_tpu splits the block lists of a head for this many blocks, and so cannot sum the gradient of a "
                f"captured array ({shown}) read at q - kv."
            )
    size = 4 * plan.batch * plan.q_heads * plan.q_len * plan.kv_len
    if load_class == ir.TILE and size > split_program.DENSE_LIMIT:
        return (
            f"mosaic_tpu needs {size / 2**30:.1f} GiB for the gradient of a captured array ({shown}) read at each "
            f"(q, kv), more than {split_program.DENSE_LIMIT >> 30} GiB."
        )
    return None
