"""Which requests begin with the same tokens, and where these are: `SharedPrefix`, the argument `shared` of `paged_attention`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.errors import bad_argument, kind_of
from flexjax.paged.table import check_int32, described

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Groups of requests that begin with the same tokens; a pytree.

    group            int32 [R]: the group of each request; a number outside 0 .. groups - 1 for a request without a group
    prefix_pages     int32 [groups, n]: the pages of the tokens that the requests of a group share, for example the row of `table.pages`
                     of one of its requests. n may be less than that of the table
    prefix_lengths   int32 [groups]: how many tokens each group shares, clipped to 0 .. n * page; they need not fill their last page

    A request that has fewer tokens than its group shares is attended by itself. Nothing checks that the tokens of a group are the same:
    attention reads `prefix_pages` in the place of each request's own pages.

    Example, requests 1 and 2 continue request 0, which has 4096 tokens:

        table = paged.fork(table, jnp.asarray([-1, 0, 0, -1]))
        shared = SharedPrefix(jnp.asarray([0, 0, 0, -1]), table.pages[:1], jnp.asarray([4096]))
    """

    group: Array
    prefix_pages: Array
    prefix_lengths: Array


jax.tree_util.register_dataclass(SharedPrefix, data_fields=["group", "prefix_pages", "prefix_lengths"], meta_fields=[])


def check_shared(shared: object, requests: int, page: int) -> SharedPrefix:
    """The argument `shared` with prefix_lengths clipped to 0 .. n * page. Raises ValueError for another type, and for arrays that do not
    fit.

    requests   R, the number of requests of the call
    page       tokens of a page of the cache
    """
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
