"""BigBird's mask on blocks of tokens: a window of blocks, global blocks and random blocks."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.made_for import Size
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

    length:         number of queries, and of keys.
    block:          tokens in a block; the last one may be shorter.
    window_blocks:  odd: blocks in the window, the query's own included.
    global_blocks:  blocks at the start that see, and are seen by, everyone.
    random_blocks:  random blocks of each block of queries, or all that are left where there are fewer.
    seed:           of the random table, which all heads and batch entries share.
    Source: Zaheer et al., "Big Bird", arXiv:2007.14062, section 2, with the defaults of its base model.
    Raises ValueError if a number is not an int, below 0 (the first three: 1), or `window_blocks` is even.
    Picture of `big_bird(5, 1, window_blocks=1, global_blocks=1, random_blocks=1)`, 5 x 5:

        # # # # #
        # # . . #
        # . # # .
        # . # # .
        # # . . #
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

    @named(
        f"big_bird_{block}_{window_blocks}_{global_blocks}_{random_blocks}",
        Size("queries", 1, length, "`length`"),
        Size("keys", length, length, "`length`"),
    )
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        i, j = q_idx // block, kv_idx // block
        seen = (i - j <= reach) & (j - i <= reach) | (i < global_blocks) | (j < global_blocks)
        for r in range(random_blocks):
            seen = seen | (table[i, r] == j)
        return seen

    return mask_mod


def _random_blocks(blocks: int, reach: int, global_blocks: int, count: int, seed: int) -> np.ndarray:
    """The random key blocks of each query block: int32 `[blocks, count]`; `reach` is the window on each side."""
    rng = np.random.default_rng(seed)
    # its own number, which is seen anyway, fills the row of a global block and a row with few candidates
    table = np.repeat(np.arange(blocks, dtype=np.int32)[:, None], count, axis=1)
    for row in range(global_blocks, blocks):
        window = range(max(row - reach, global_blocks), min(row + reach + 1, blocks))
        candidates = blocks - global_blocks - len(window)
        chosen = rng.choice(candidates, min(candidates, count), replace=False) + global_blocks
        table[row, : len(chosen)] = np.where(chosen < window.start, chosen, chosen + len(window))
    return table
