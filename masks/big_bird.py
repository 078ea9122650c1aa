"""BigBird's mask on blocks of tokens: a window of blocks, global blocks and random blocks."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def big_bird(
    length: int,
    block: int = 64,
    *,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
) -> MaskMod:
    """mask = near | first | random, with `i = q_idx // block` and `j = kv_idx // block`:

        near   = abs(i - j) <= window_blocks // 2
        first  = (i < global_blocks) | (j < global_blocks)
        random = j in table[i], `random_blocks` blocks that are neither near nor first

    length:         int of at least 1: number of queries, and of keys.
    block:          int of at least 1: tokens in a block; the last one may be shorter.
    window_blocks:  odd int of at least 1: blocks in the window, the query's own included.
    global_blocks:  int of at least 0: blocks at the start that see, and are seen by, everyone.
    random_blocks:  int of at least 0: random blocks of each block of queries, without repetition; all blocks
                    that are left where there are fewer.
    seed:           int of at least 0: the same seed gives the same table, here `[blocks, random_blocks]`,
                    which the mask captures.  All heads and batch entries share it.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062, section 2,
    in its block form; the defaults are those of its base model.

    Raises ValueError if a number is below its least, not an int, or `window_blocks` is even.

    Picture of `big_bird(8, 1, window_blocks=3, global_blocks=1, random_blocks=1)`, 8 x 8:

        # # # # # # # #
        # # # . . . . #
        # # # # . . # .
        # . # # # . # .
        # . # # # # . .
        # . # . # # # .
        # # . . . # # #
        # # . . . . # #
    """
    length = integer("big_bird", "length", length, 1, "It is the number of tokens.")
    block = integer("big_bird", "block", block, 1, "It counts the tokens of a block.")
    window_blocks = integer("big_bird", "window_blocks", window_blocks, 1, "It counts the query's own too.")
    global_blocks = integer("big_bird", "global_blocks", global_blocks, 0, "Pass 0 for none.")
    random_blocks = integer("big_bird", "random_blocks", random_blocks, 0, "Pass 0 for none.")
    seed = integer("big_bird", "seed", seed, 0, "Any such number gives one fixed table.")
    if window_blocks % 2 == 0:
        raise ValueError(
            f"`big_bird`: `window_blocks` is {window_blocks}; expected an odd int. "
            "The window has the query's block in its middle."
        )
    reach = window_blocks // 2
    table = jnp.asarray(_random_blocks(-(-length // block), reach, global_blocks, random_blocks, seed), jnp.int32)

    @named(f"big_bird_{block}_{window_blocks}_{global_blocks}_{random_blocks}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key's block is in the window, global, or random for the query's block, or the query's block is global."""
        i, j = q_idx // block, kv_idx // block
        seen = (i - j <= reach) & (j - i <= reach) | (i < global_blocks) | (j < global_blocks)
        for r in range(random_blocks):
            seen = seen | (table[i, r] == j)
        return seen

    return mask_mod


def _random_blocks(blocks: int, reach: int, global_blocks: int, count: int, seed: int) -> np.ndarray:
    """Draws the random key blocks of each query block: int32 `[blocks, count]`.

    blocks:          number of blocks of the sequence
    reach:           number of blocks of the window on each side of the query's own
    global_blocks:   number of blocks at the start that are global, so that they are not drawn
    count:           number of random blocks for each query block
    seed:            of numpy's random generator

    A row with fewer candidates than `count`, and the row of a global block, is filled with its own number, which is
    seen anyway.
    """
    rng = np.random.default_rng(seed)
    table = np.repeat(np.arange(blocks, dtype=np.int32)[:, None], count, axis=1)
    for row in range(global_blocks, blocks):
        window = range(max(row - reach, global_blocks), min(row + reach + 1, blocks))
        candidates = blocks - global_blocks - len(window)
        chosen = rng.choice(candidates, min(candidates, count), replace=False) + global_blocks
        table[row, : len(chosen)] = np.where(chosen < window.start, chosen, chosen + len(window))
    return table
