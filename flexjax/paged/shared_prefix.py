"""`SharedPrefix`, the argument `shared` of `paged_attention`: which requests begin with the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.errors import bad_argument, kind_of
from flexjax.mod_tools.numpy_arrays import unwrapped
from flexjax.paged.table import check_int32, described

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Groups of requests that begin with the same tokens; a pytree. Nothing checks that the tokens are the same.

    group            int32 [R]: the group of each request; outside 0 .. groups - 1 for a request without a group
    prefix_pages     int32 [groups, n]: the pages of these tokens, such as a row of `table.pages`
    prefix_lengths   int32 [groups]: how many tokens each group shares, clipped to 0 .. n * page

    Requests 1 and 2 continue request 0, which has 4096 tokens:

        table = paged.fork(table, jnp.asarray([-1, 0, 0, -1]))
        shared = SharedPrefix(jnp.asarray([0, 0, 0, -1]), table.pages[:1], jnp.asarray([4096]))
    """

    group: Array
    prefix_pages: Array
    prefix_lengths: Array

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, unwrapped(getattr(self, field.name)))


jax.tree_util.register_dataclass(SharedPrefix, data_fields=["group", "prefix_pages", "prefix_lengths"], meta_fields=[])


def check_shared(shared: object, requests: int, page: int) -> SharedPrefix:
    """`shared` with clipped prefix_lengths. Raises ValueError."""
    if not isinstance(shared, SharedPrefix):
        raise bad_argument("shared", kind_of(shared), "a flexjax.SharedPrefix or None", "None shares nothing.")
    pages = shared.prefix_pages
    if not isinstance(pages, Array | np.ndarray) or pages.ndim != 2 or pages.dtype != jnp.int32 or not pages.size:
        raise bad_argument(
            "shared.prefix_pages", described(pages), "int32 [groups, n], neither of them 0", "Cast or reshape it."
        )
    group = check_int32("shared.group", shared.group, (requests,))
    lengths = check_int32("shared.prefix_lengths", shared.prefix_lengths, (pages.shape[0],))
    return SharedPrefix(group, jnp.asarray(pages), jnp.clip(lengths, 0, pages.shape[1] * page))
