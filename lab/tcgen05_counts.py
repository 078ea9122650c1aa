"""What the kernels on tcgen05 (10.0, 10.3) have to do in a step, in clocks of each unit of an SM: counted, because no such card was at hand.

Two query tiles of 128 rows and one key tile of 128, as in FlashAttention-4 (arXiv 2603.05451). What is counted is the least time of each
unit; a step takes at least the longest, and at least the chain of steps of one query tile.

Of our own kernels `products` has the products of a step: their clocks in the tensor core, and of shared memory for their operands, for one
CTA and for a pair of CTAs that share each instruction (cta_group::2). lab/sass_pipeline.py simulates the rest of a step beside them.
"""

import dataclasses
import typing

EX2, SHARED_BYTES, TMEM_BYTES, LANES = 16, 128, 512, 128
"""Of an SM, a clock, from 8.0 to 10.0: ex2 (the throughput table of the CUDA programming guide; 10.3 has twice as many, says NVIDIA's page
on Blackwell Ultra); bytes of shared memory; bytes of tensor memory to registers (a warp reads its 32 lanes of 4 bytes); float32
operations, 64 on 8.0."""
PRODUCT_RATE = 8192
"""Operations of the products of 16 bits, of an SM, a clock."""


class Counts(typing.NamedTuple):
    """Clocks that each unit of an SM needs for a step; the step takes at least the longest of them.

    tensor   products
    mufu     ex2 that are not polynomials
    issue    instructions of the softmax, one a clock of each of four partitions
    shared   bytes of operands, and of what is staged
    tmem     scores, probabilities and gradients between tensor memory and registers
    chain    what one query tile does in order: products, softmax and the handovers between warps
    """

    tensor: float
    mufu: float
    issue: float
    shared: float
    tmem: float
    chain: float

    @property
    def step(self) -> float:
        """The least clocks of a step: the largest of the fields, `chain` included."""
        return max(self)

    @property
    def bound(self) -> str:
        """The name of the field that is the largest, such as "mufu"; the first of equals."""
        return max(self._fields, key=lambda name: getattr(self, name))


TILE = 128
"""Queries of a tile, and keys, in the kernels on tcgen05."""
HANDOVER = 100.0
"""Clocks from an arrival at an mbarrier, through tcgen05.ld or tcgen05.mma, to the first result: about what published microbenchmarks of
TMEM (arXiv 2512.02189) say for each; four of them are in the chain of a forward step."""


def tcgen05_forward(dim: int, polynomials: float = 0.25) -> Counts:
    """The Counts of a step of two query tiles of 128 rows with a softmax warpgroup each, over one key tile of 128.

    dim           head dim of keys and values
    polynomials   share of the exponentials that are polynomials on the FMA units (FlashAttention-4: 0.1 to 0.25)

    Instructions of a softmax warp, for the 128 scores of a row: 64 maxima of three operands, 64 packed FMA, an ex2 or 4.5 of a polynomial
    of degree 3 in packed form for each, 64 conversions, 64 packed additions, 40 of copies, barriers and the maximum.
    """
    product = 2 * TILE * TILE * dim / PRODUCT_RATE
    scores = TILE * TILE
    exponentials = scores * (1 - polynomials) / EX2
    instructions = 4 * TILE / 2 + TILE * (1 - polynomials) + 4.5 * TILE * polynomials + 40
    operands = 2 * TILE * dim * 2 + TILE * dim * 2  # S: queries and keys; P V: values, P is in tensor memory
    moved = scores * 4 + scores * 2
    maxima = TILE / 2 * 2  # three operands, at half rate
    chain = 2 * product + maxima + exponentials + 4 * HANDOVER
    return Counts(
        2 * 2 * product, 2 * exponentials, 2 * instructions, 2 * operands / SHARED_BYTES, 2 * moved / TMEM_BYTES, chain
    )


def tcgen05_backward(dim: int, pairs: bool = True) -> Counts:
    """The Counts of a step of 128 queries and 128 keys with five products: S and dP, dV, dK and dQ, which leaves through shared memory.

    dim      head dim of keys and values
    pairs    whether two CTAs share the right operands of their products, except for dQ, which contracts over the keys of both; they
             exchange dS, and each adds half as much to dQ

    `chain` is at most `tensor` here, because products of one step run beside the softmax of another. With dim 128 and without pairs,
    shared memory takes 3328 clocks, as FlashAttention-4 counts; with pairs 2304, where its paper counts 2688.
    """
    scores, tokens = TILE * TILE, TILE * dim * 2
    right = tokens / 2 if pairs else tokens
    operands = (
        2 * (tokens + right) + 2 * right + scores * 2 + tokens
    )  # S, dP; dV, dK with the left one in tensor memory; dQ
    staged = scores * 2 + 2 * TILE * dim * 4 / (2 if pairs else 1)  # dS; dQ written and read
    instructions = (
        TILE * (1 + 1 + 0.5 + 0.5 + 0.5 + 0.5) + 60
    )  # FMA and ex2; packed: dP - delta, times P; two conversions
    moved = 2 * scores * 4 + 2 * scores * 2 + TILE * dim * 4
    products = 5 * 2 * TILE * TILE * dim / PRODUCT_RATE
    chain = products / 5 * 3 + scores / EX2 + 4 * HANDOVER
    return Counts(
        products,
        scores / EX2,
        instructions,
        (operands + staged) / SHARED_BYTES,
        moved / TMEM_BYTES,
        min(chain, products),
    )


# ------------------------------------------------------------------- our own kernels


@dataclasses.dataclass(frozen=True)
class Issue:
    """How a kernel issues its products.

    dim      head dim of keys and values
    kernel   "" forward, "dq" or "dkv"
    pairs    whether two CTAs share each instruction
    whole    backward: whether S and dP of both halves of a visited tile are one instruction, N = 128, instead of two, N = 64
    tmem     backward: whether the own tokens, the left operand of S and dP, lie in tensor memory
    """

    dim: int
    kernel: str = ""
    pairs: bool = False
    whole: bool = False
    tmem: bool = False


class Product(typing.NamedTuple):
    """A product of 128 rows of a CTA: its clocks in the tensor core, and those of shared memory for its operands, which pass at the same
    time.
    """

    tensor: float
    shared: float

    @property
    def clocks(self) -> float:
        """The clocks that the product takes: those of the tensor core or those of shared memory, whichever are more."""
        return max(self)


def product(columns: int, depth: int, left: bool, pairs: bool) -> Product:
    """The Product of one CTA's instructions: a result of 128 rows and `columns` columns, contracted over `depth`, with operands of 16
    bits.

    left     whether the left operand comes from shared memory (else from tensor memory)
    pairs    whether each CTA reads half of the right operand
    """
    operands = (TILE * depth if left else 0) + columns * depth / (2 if pairs else 1)
    return Product(2 * TILE * columns * depth / PRODUCT_RATE, 2 * operands / SHARED_BYTES)


def products(issue: Issue) -> dict[str, list[Product]]:
    """The products of a step of our kernels, by the name of the result: "S" and "P V" of two query tiles and a key tile forward; "S",
    "dP" and either "dQ" or "dV" and "dK" of both halves of a visited tile backward. A list has one Product for each instruction sequence.
    """
    dim, pairs = issue.dim, issue.pairs
    if not issue.kernel:
        return {"S": 2 * [product(TILE, dim, True, pairs)], "P V": 2 * [product(dim, TILE, False, pairs)]}
    left = not issue.tmem
    scores = [product(TILE, dim, left, pairs)] if issue.whole else 2 * [product(TILE // 2, dim, left, pairs)]
    sums = 2 * [product(dim, TILE // 2, False, pairs)]
    return {"S": scores, "dP": scores} | ({"dQ": sums} if issue.kernel == "dq" else {"dV": sums, "dK": sums})
