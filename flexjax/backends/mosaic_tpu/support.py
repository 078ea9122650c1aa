"""The mosaic_tpu backend (see backends/base.py): which plans it runs, with which tiles.

It refuses a plan in a sentence, from the plan alone. Which captured arrays want a gradient is known only later:
`backward` raises NotImplementedError with the sentence of `refuses_backward` for a gradient that the kernels cannot
compute. A plan whose mask blocks no tile fits runs with blocks of 128 tokens (rewrites/mask_blocks.py).
"""

from flexjax.backends.base import Backend, rule_not_linear
from flexjax.backends.mosaic_tpu import capture_gradients, diagonals, layouts, split_program, vmem
from flexjax.backends.mosaic_tpu.backward import backward
from flexjax.backends.mosaic_tpu.forward import forward
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.list_shape import PAGES_BYTES, block_layout, list_shape
from flexjax.backends.mosaic_tpu.split_program import Unsupported, split_for
from flexjax.backends.target import Target
from flexjax.ir import program as ir
from flexjax.ir.program import Load, Program
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.rewrite import Rewrite, Steps, chain
from flexjax.rewrites import join_heads, mask_blocks, pack_heads

DIAGONAL_BYTES = 8 << 20  # bytes of VMEM that the sums along the diagonals of a head may take


class MosaicTpuBackend(Backend):
    """Attention as Pallas Mosaic TPU kernels."""

    name = "mosaic_tpu"
    slow_to_lower = True

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """The sentence of the refusal; without a target, the chip with the most VMEM decides."""
        if target is not None and target.automatic:
            return AUTOMATIC
        return _refusal(plan, vmem.chip_of(target))

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """The sentence of the refusal; `derivative` is None without score_mod."""
        if plan.page:
            return "mosaic_tpu has no gradients of a call with keys in pages."
        plan = mask_blocks.plan_with_blocks(plan, *_kernel_blocks(plan))
        return _backward_refusal(plan, wanted, derivative, vmem.chip_of(target))

    def refuses_tangent(self, plan: KernelPlan, target: Target, moving: Wanted, derivative: Program | None) -> str:
        return "The TPU kernels compute reverse mode only."

    def rewrites(self, plan: KernelPlan, target: Target, backward: bool = False) -> Steps:
        """Joins or packs the heads of few queries, and joins those of pages; then come mask blocks that a tile fits."""
        chip = vmem.chip_of(target)

        def in_rows(plan: KernelPlan) -> Rewrite | None:
            steps = (rewrite(plan) for rewrite in (join_heads.rewrite, pack_heads.rewrite))
            runs = (step for step in steps if step is not None and (plan.page or _refusal(step.plan, chip) is None))
            return next(runs, None)

        blocks = lambda plan: mask_blocks.rewrite(plan, *_kernel_blocks(plan))
        return chain(plan, blocks) if backward else chain(plan, in_rows, blocks)

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Tiles that fit the target's VMEM, the default tiles first.

        The n-th forward tile comes with the n-th backward tile, or the last one. The dicts have the sizes of the
        forward pass alone if no backward tile fits. Raises NoTile if no tile suits the plan's mask blocks or the runs
        of its origin.
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
        """Such as "forward 256 x 512, backward 256 x 256", queries x keys; None for calls that run as another plan."""
        if plan.page or join_heads.joined_plan(plan) is not None or pack_heads.packed_plan(plan) is not None:
            return None
        first = self.tile_candidates(plan, target)[0]
        texts = [
            f"{which} {first['block_q' + end]} x {first['block_kv' + end]}"
            for which, end in (("forward", ""), ("backward", "_bwd"))
            if f"block_q{end}" in first
        ]
        return ", ".join(texts)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass of the plan by the forward kernel (see Results)."""
        return forward(plan, operands, vmem.chip_of(target))

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients in the dtypes of captured arrays and sinks, of all others in the plan's dtype.

        Raises NotImplementedError, with the sentence, for those that `refuses_backward` refuses.
        """
        chip = vmem.chip_of(target)
        reason = _backward_refusal(plan, given.wanted, given.derivative, chip)
        if reason is not None:
            raise NotImplementedError(reason)
        return backward(plan, given, chip)


# ------------------------------------------------------------------- refusals

AUTOMATIC = (
    "XLA cannot split the kernels of mosaic_tpu over automatic mesh axes, and has no partitioning rules on a TPU. "
    "Make the axes explicit (jax.make_mesh with AxisType.Explicit, then jax.set_mesh), or call flex_attention inside "
    "jax.shard_map over all axes."
)


def _kernel_blocks(plan: KernelPlan) -> tuple[int, int]:
    """The sizes (queries, keys) of the mask blocks with which the kernels run the plan; (0, 0) without a block mask."""
    if plan.blocks is None:
        return 0, 0

    def suits(block: int, length: int) -> bool:
        try:
            vmem.tile_size(128, length, block, 128)
        except vmem.NoTile:
            return False
        return block % 8 == 0 or block >= length

    pairs = ((plan.blocks.block_q, plan.q_len), (plan.blocks.block_kv, plan.kv_len))
    block_q, block_kv = (block if suits(block, length) else 128 for block, length in pairs)
    return block_q, block_kv


def _refusal(plan: KernelPlan, chip: vmem.Chip) -> str | None:
    """The sentence of the refusal, None if the kernels can run the plan on the chip."""
    # Pages run with heads joined, and have no backward pass.
    if plan.page:
        reason, joined = _page_refusal(plan), join_heads.joined_plan(plan)
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
        return (
            f"mosaic_tpu takes head dims up to 1024; this call has {plan.head_dim + plan.extra_dim} and "
            f"{plan.value_dim}."
        )
    if plan.extra_dim and _heads_do_not_divide(plan):
        return (
            f"mosaic_tpu needs the heads of key ({plan.kv_heads}) and key_extra ({plan.extra_heads}) to divide each "
            "other."
        )
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
    """The sentence that says why the kernel cannot read the pages of a plan, None if it can.

    The kernel reads a page [page, M, D] as [page * M, D], which has to be the same memory. For other dtypes, head dims
    and numbers of heads XLA stores the two shapes differently, and would copy the whole pool at each call.
    """
    dims, heads, bytes_ = (plan.head_dim, plan.value_dim), plan.kv_heads, plan.cache_dtype is not None
    if bytes_ and (heads == 2 or plan.page * heads % 32):
        return (
            "mosaic_tpu reads quantised pages in place where key heads are not 2, and tokens of a page times key "
            f"heads a multiple of 32; this cache has {heads} key heads and pages of {plan.page} tokens."
        )
    whole = heads % 8 == 0 or (heads == 1 and (bytes_ or plan.dtype == "bfloat16"))
    if any(dim % vmem.LANES for dim in dims) or not (whole or (set(dims) == {vmem.LANES} and heads in (1, 2, 4))):
        return (
            "mosaic_tpu reads pages in place where head dims are multiples of 128 and the key heads a multiple of 8, "
            f"and for head dims of 128 also where they are 1, 2 or 4; this cache has {heads} key heads, and head dims "
            f"of {dims[0]} and {dims[1]}."
        )
    numbers = plan.batch * (plan.kv_len // plan.page)
    if 4 * numbers > PAGES_BYTES:
        return (
            f"mosaic_tpu keeps the page numbers of a call in SMEM, up to {PAGES_BYTES // 4} of them; this table has "
            f"{plan.batch} x {plan.kv_len // plan.page}. Use larger pages or shorter tables."
        )
    return None


# The most runs, over all batch entries and heads, whose positions a kernel keeps in SMEM, four bytes each.
OFFSETS = 1 << 14


def _origin_refusal(plan: KernelPlan) -> str | None:
    """The sentence that says why the kernels cannot run at the origin of the plan, None if they can."""
    origin, blocks = plan.origin, plan.blocks
    assert origin is not None
    if blocks is not None and blocks.from_user_lists and _kernel_blocks(plan) != (blocks.block_q, blocks.block_kv):
        return (
            "mosaic_tpu cannot change the blocks of a block mask from user lists beside an origin; "
            f"these are {blocks.block_q} x {blocks.block_kv}, and its tiles take "
            f"{' x '.join(map(str, _kernel_blocks(plan)))}."
        )
    runs = (origin.query_runs + origin.key_runs) * plan.batch * plan.q_heads
    if not origin.single and runs > OFFSETS:
        return (
            f"mosaic_tpu takes at most {OFFSETS} runs of queries and keys over all batch entries and heads, not {runs}."
        )
    return None


def _heads_do_not_divide(plan: KernelPlan) -> bool:
    """Whether the heads of key and key_extra cannot be repeated to the larger number."""
    low, high = sorted((plan.kv_heads, plan.extra_heads))
    return low == 0 or high % low != 0


def _backward_refusal(plan: KernelPlan, wanted: Wanted, derivative: Program | None, chip: vmem.Chip) -> str | None:
    """The sentence for wanted gradients of an accepted plan, which has the blocks of `_kernel_blocks`."""
    if plan.score is not None and derivative is None:
        return "mosaic_tpu needs the derivative of score_mod, and there is none."
    if derivative is None:
        return None
    if derivative.takes_cotangent:
        return rule_not_linear("TPU")
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
    """Why the kernels cannot compute the gradient of the captured array that `load` reads; None if they can.

    `load_class` is "scalar", "row", "column", "diagonal" or "tile"; `derivative` has the load.
    """
    shown = derivative.captures[load.capture]
    if any("score" in ir.axes_of(a) for a in load.index):
        return f"mosaic_tpu has no gradient for a captured array ({shown}) read at an index computed from the score."
    if any(ir.loops_of(ir.axes_of(a)) for a in load.index):
        return f"mosaic_tpu has no gradient for a captured array ({shown}) of which score_mod reads a vector in a loop."
    if load_class == ir.DIAGONAL and plan.origin is not None and not plan.origin.single:
        return (
            f"mosaic_tpu has no gradient for a captured array ({shown}) read at q - kv where the origin has several "
            "runs of queries or keys."
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
                "mosaic_tpu splits the block lists of a head for this many blocks, and so cannot sum the gradient of "
                f"a captured array ({shown}) read at q - kv."
            )
    size = 4 * plan.batch * plan.q_heads * plan.q_len * plan.kv_len
    if load_class == ir.TILE and size > split_program.DENSE_LIMIT:
        return (
            f"mosaic_tpu needs {size / 2**30:.1f} GiB for the gradient of a captured array ({shown}) read at each "
            f"(q, kv), more than {split_program.DENSE_LIMIT >> 30} GiB."
        )
    return None
