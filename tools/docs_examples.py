"""Draws pictures of masks and arrays of examples: `PYTHONPATH=.:examples python tools/docs_examples.py`.

It writes docs/images/examples/NAME.svg in the style of the thumbnails (tools/docs_gallery.py). The other pictures on the page of
examples are those that the scripts save.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import topk_blocks
from docs_gallery import LEVELS, svg

import flexjax
from flexjax import masks, mods, paged

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images" / "examples"
SIDE = 288
"""Largest width and height, in pixels."""

N = 72
Q, KV = np.arange(N)[:, None], np.arange(N)[None]


def graded(values: np.ndarray, seen: np.ndarray | bool = True) -> np.ndarray:
    """The numbers as levels, the largest strongest, and 0 where they are not seen."""
    values = np.asarray(values, np.float64)
    seen = np.broadcast_to(seen, values.shape)
    least, most = values[seen].min(), values[seen].max()
    return np.where(seen, np.rint((values - least) / (most - least) * (LEVELS - 1)) + 1, 0).astype(int)


def packed_documents() -> np.ndarray:
    documents = masks.document(lengths=np.array([17, 30, 9, 16]))
    return LEVELS * np.asarray(flexjax.and_masks(masks.causal, documents)(0, 0, Q, KV))


def tiles_of_documents() -> np.ndarray:
    """Packed documents, each in tiles of keys from its own start; the strength is the number of the tile."""
    offsets = np.array([0, 17, 47, 56, 72])
    start = np.repeat(offsets[:-1], np.diff(offsets))
    tiles = 1 + (KV - start) // 6 % LEVELS
    return np.where((Q >= KV) & (start[:, None] == start), tiles, 0)


def devices_of_rows() -> np.ndarray:
    """A causal mask, each row in the strength of the device that owns it."""
    devices = 4
    layout = flexjax.context_layout(masks.causal, N, devices=devices, block_size=N // 8)
    owner = np.zeros(N, int)
    positions = np.asarray(layout.positions)
    owner[positions[positions >= 0]] = (np.arange(len(positions)) // (len(positions) // devices))[positions >= 0]
    return np.where(Q >= KV, (owner[:, None] + 1) * LEVELS // devices, 0)


def pages_in_use() -> np.ndarray:
    """Steps x pages of the pool: which request holds a page, of four slots that are refilled when a request is done."""
    slots, page, pool = 4, 8, 36
    table, rows = paged.table(slots, 24, pool, page), []
    wanted = np.random.default_rng(0).integers(20, 150, slots)
    lengths = np.zeros(slots, np.int32)
    for _ in range(36):
        table, granted = paged.allocate(table, jnp.asarray(lengths + 8))
        lengths = np.where(granted, lengths + 8, lengths).astype(np.int32)
        holder = np.zeros(pool, int)
        for slot, held in enumerate(np.asarray(table.pages)):
            holder[held[(held >= 0) & (held < pool)]] = (slot + 1) * LEVELS // slots
        rows.append(holder)
        done = lengths >= wanted
        table, lengths = paged.release(table, jnp.asarray(done)), np.where(done, 0, lengths)
    return np.array(rows)


def pair_bias() -> np.ndarray:
    pair, w = jax.random.normal(jax.random.key(0), (N // 3, N // 3, 8)), jax.random.normal(jax.random.key(1), (8,))
    bias = np.repeat(np.repeat(pair @ w, 3, 0), 3, 1)
    return graded(bias, KV < 60)


def chosen_blocks() -> np.ndarray:
    blocks = 24
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 8 * blocks, 1, 16))
    count, chosen = topk_blocks.chosen_blocks(q, k, 8, 4)
    found = np.zeros((blocks, blocks), int)
    for row in range(blocks):
        found[row, chosen[0, 0, row, : count[0, 0, row]]] = LEVELS
    return found


def unions_of_choices() -> np.ndarray:
    """What each query chose and sees, strong, in what its tile of 12 queries visits."""
    tile, block, rng = 12, 6, np.random.default_rng(1)
    own = np.arange(N) // block
    far = np.where(rng.random(N) < 0.3, rng.random(N), np.repeat(rng.random(N // tile), tile)) * (own + 1)
    chosen = np.stack([own, np.zeros(N, int), far.astype(int)], -1).astype(np.int32)[None, None]
    make = lambda **more: flexjax.BlockMask.from_chosen_blocks(jnp.asarray(chosen), (tile, block), **more)
    on = np.asarray(make(mask_mod=masks.causal).to_mask())[0, 0]
    blocks = np.asarray(make().to_mask())[0, 0].reshape(N // tile, tile, -1).any(1)
    return np.where(on, LEVELS, 2 * np.repeat(blocks, tile, 0))


def key_scales() -> np.ndarray:
    """The logarithm of the scale of each key, of four heads."""
    k = jax.random.normal(jax.random.key(0), (N, 4, 64)) * jnp.exp(2 * jax.random.normal(jax.random.key(1), (N, 4, 1)))
    return np.repeat(graded(jnp.log(jnp.max(jnp.abs(k), axis=-1)).T), 6, axis=0)


def alibi_window() -> np.ndarray:
    window = masks.sliding_window(24)(0, 0, Q, KV)
    return graded(mods.alibi(4)(jnp.ones((N, N)), 0, 0, jnp.asarray(Q), jnp.asarray(KV)), np.asarray(window))


PICTURES = {
    "long_context_window": lambda: LEVELS * np.asarray(masks.streaming(4, 12)(0, 0, Q, KV)),
    "train_packed_lm": packed_documents,
    "train_on_a_mesh": devices_of_rows,
    "serve_lm": pages_in_use,
    "same_bits": tiles_of_documents,
    "pair_bias_gradient": pair_bias,
    "block_diffusion": lambda: LEVELS * np.asarray(masks.block_diffusion(N // 2, 6)(0, 0, Q, KV)),
    "topk_blocks": chosen_blocks,
    "train_chosen_blocks": unions_of_choices,
    "fp8_keys": key_scales,
    "alibi_window": alibi_window,
}

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, levels in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(svg(levels(), SIDE))
