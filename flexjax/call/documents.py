"""`Origin.documents`: packed documents, as mods of the row that see positions in a document.

    q_idx of a mod   = q - start of the document of q      and so kv_idx
    mask             = (q and kv lie in one document) & mask_mod

So every backend runs them. The canonical order (plan/invariant.py) takes the offsets too: tiles begin with documents.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.call.arguments import Arguments
from flexjax.errors import bad_argument
from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.made_for import carry, sizes_of
from flexjax.types import MaskMod, Origin, Weights

Array = jax.Array


def by_documents(arguments: Arguments, batch: int, q_len: int, kv_len: int) -> tuple[Arguments, Array | None]:
    """(arguments whose mods know of documents and whose origin does not, offsets int32 [B, n + 1]); the arguments as
    they are, and None, without documents. Raises ValueError.
    """
    origin = arguments.origin
    if not isinstance(origin, Origin) or origin.documents is None:
        return arguments, None
    offsets = _checked(origin, arguments, batch, (q_len, kv_len))
    start, position = _of_tokens(offsets, q_len)
    read = lambda x, b, i: batched_value_at(x if x.shape[0] > 1 else x[0], b, i)

    def moved(mod: typing.Any) -> typing.Any:
        """The mod, if it is a function, of positions in a document."""
        if not callable(mod):
            return mod  # None, or refused where it is traced

        @functools.wraps(mod)
        def in_document(*at: Array) -> object:
            *score, b, h, q_idx, kv_idx = at
            return mod(*score, b, h, read(position, b, q_idx), read(position, b, kv_idx))

        return carry(in_document, [s for s in sizes_of(mod) if s.axis in ("batch", "heads")])

    weights, aux = arguments.weights, arguments.return_aux
    if isinstance(weights, Weights):
        weights = dataclasses.replace(weights, function=moved(weights.function))
    elif weights is not None:
        weights = moved(weights)
    if aux is not None and aux.expectations:
        aux = dataclasses.replace(aux, expectations={name: moved(f) for name, f in aux.expectations.items()})
    inside: MaskMod | None = moved(arguments.mask_mod)
    if inside is not None and not callable(inside):
        return arguments, None

    def documents(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        # a token outside of all documents begins at -1, which equals no other start
        begins = read(start, b, q_idx)
        same = (begins == read(start, b, kv_idx)) & (begins >= 0)
        return same if inside is None else same & inside(b, h, q_idx, kv_idx)

    made = documents if inside is None else functools.wraps(inside)(documents)
    changed = dataclasses.replace(
        arguments,
        score_mod=moved(arguments.score_mod),
        weights=weights,
        return_aux=aux,
        mask_mod=made,
        origin=dataclasses.replace(origin, documents=None),
    )
    return changed, jnp.broadcast_to(jnp.asarray(offsets), (batch, offsets.shape[1]))


def _checked(origin: Origin, arguments: Arguments, batch: int, lengths: tuple[int, int]) -> np.ndarray | Array:
    """The offsets, int32 [1 or B, n + 1]; a numpy array if they are known."""
    given, name = origin.documents, "origin.documents"
    advice = "Give where each document begins, and where the last one ends."
    if not isinstance(given, np.ndarray | Array) or not jnp.issubdtype(given.dtype, jnp.integer):
        got = f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray | Array) else repr(given)
        raise bad_argument(name, got, "int32 [n + 1] or [B, n + 1]", advice)
    fits = given.ndim in (1, 2) and given.shape[-1] >= 2 and given.shape[:-1] in ((), (1,), (batch,))
    if not fits:
        raise bad_argument(name, f"{given.dtype}{list(given.shape)}", f"[n + 1] or [{batch}, n + 1]", advice)
    if lengths[0] != lengths[1]:
        raise bad_argument(
            name, f"given for {lengths[0]} queries and {lengths[1]} keys", "as many queries as keys",
            "Documents are runs of whole rows.",
        )  # fmt: skip
    if arguments.block_mask is not None:
        raise bad_argument(
            "block_mask", "given beside origin.documents", "None",
            "Pass its mask_mod: which tokens share a document is a part of the mask.",
        )  # fmt: skip
    for field in ("query", "key"):
        start = getattr(origin, field)
        if not isinstance(start, int) or start != 0:
            raise bad_argument(
                f"origin.{field}", "given beside documents", "0", "Documents say where positions count from."
            )
    by_row = given.ndim == 2 and given.shape[0] > 1
    if by_row and not (isinstance(origin.batch, int) and origin.batch == 0):
        raise bad_argument(
            "origin.batch", "given beside documents of each batch entry", "0", "Mods read entries of the whole."
        )
    if isinstance(given, Tracer) or not getattr(given, "is_fully_addressable", True):
        return jnp.clip(jnp.atleast_2d(given), 0, lengths[0]).astype(jnp.int32)
    with jax.ensure_compile_time_eval():
        known = np.atleast_2d(np.asarray(given)).astype(np.int64)
    falls = (np.diff(known) < 0).any()
    if (known < 0).any() or (known > lengths[0]).any() or falls:
        raise bad_argument(
            name, f"offsets from {known.min()} to {known.max()}" + (", that fall" if falls else ""),
            f"offsets from 0 to {lengths[0]} that do not fall", "Fill a short row with its last offset.",
        )  # fmt: skip
    return known.astype(np.int32)


def _of_tokens(offsets: np.ndarray | Array, tokens: int) -> tuple[Array, Array]:
    """(where the document of each token begins, -1 outside of all; position in it), int32 [1 or B, tokens]."""
    xp: typing.Any = np if isinstance(offsets, np.ndarray) else jnp
    at = xp.arange(
        max(1, tokens), dtype=np.int32
    )  # a call without tokens reads none, but jax indexes no axis of size 0
    # the last offset that is not past a token; offsets that repeat are documents of no tokens
    number = (offsets[:, None, :] <= at[:, None]).sum(-1).astype(np.int32)
    begins = xp.take_along_axis(offsets, xp.maximum(number - 1, 0), axis=1)
    inside = (number > 0) & (number < offsets.shape[1])
    found = xp.where(inside, begins, -1), xp.where(inside, at - begins, 0)
    start, position = (jnp.asarray(x.astype(np.int32)) for x in found)
    return start, position
