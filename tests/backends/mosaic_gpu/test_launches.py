"""How many kernels XLA launches for a call over pages, compiled for Hopper: few beside attention, however the queries come. And how much
memory it takes for calls that read a cache: none that grows with the cache.

Compiled in a child process, which this file also is: `python test_launches.py name...`.
"""

import os
import pathlib
import re
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

ROOT = pathlib.Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
import flexjax  # noqa: E402
from flexjax import paged  # noqa: E402
from tests.backends.mosaic_gpu import compile_hopper  # noqa: E402

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

PAGE, COLUMNS, HEADS, KEY_HEADS, DIM = 64, 64, 32, 8, 128
MOST = {"one query": 4, "ragged": 12, "ragged, many queries": 32, "shared prefix": 17, "documents": 19}
"""Kernels, and copies by XLA, beside those of attention; with the two that merge partial results."""
LAYERS = 4
OF_LAYERS = ("one query", "documents")
"""Calls of MOST that are also counted for LAYERS layers, each with a cache of its own, that share the table and the mask."""

BUFFERS = {"512 queries": 512, "8 queries and dropout": 8}
"""Queries of calls on a contiguous buffer of keys with lengths, which the forward kernel runs."""
CACHES = ("bfloat16", "int8")


def step(name: str) -> tuple[typing.Callable, list[jax.ShapeDtypeStruct]]:
    """A call and the shapes of its arrays."""
    requests, tokens = 16, {"ragged": 200, "ragged, many queries": 2048}.get(name, 16)
    pool = requests * COLUMNS
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def call(query, key, value, pages, lengths, ends, group, prefix, prefix_length, documents):
        table = paged.PageTable(pages, lengths, jnp.zeros(pool, jnp.int32), PAGE)
        given: dict[str, typing.Any] = {"implementation": "mosaic_gpu"}
        if name == "shared prefix":
            given["shared"] = flexjax.SharedPrefix(group, prefix, prefix_length)
        if name.startswith("ragged"):
            given["cu_q_lens"] = ends
        else:
            query = query[:, None]
        if name.startswith("documents"):
            given["mask_mod"] = lambda b, h, q_idx, kv_idx: documents[b, q_idx] == documents[b, kv_idx]
        out = flexjax.paged_attention(query, paged.PagedCache(key, value), table, **given)
        for _ in range(LAYERS - 1 if name.endswith(" in layers") else 0):
            out = flexjax.paged_attention(out, paged.PagedCache(key, value), table, **given)
        return out

    rows = bf16(tokens, HEADS, DIM), bf16(pool, PAGE, KEY_HEADS, DIM), bf16(pool, PAGE, KEY_HEADS, DIM)
    table = i32(requests, COLUMNS), i32(requests), i32(requests + 1), i32(requests), i32(1, COLUMNS), i32(1)
    table = *table, i32(requests, COLUMNS * PAGE)
    return call, [*rows, *table]


def launches(name: str) -> tuple[int, int]:
    """(kernels of attention, other kernels and copies) of a call."""
    call, arrays = step(name)
    make = lambda devices: (call, Mesh(np.array(devices), ("x",)))
    text = compile_hopper.compile_on_hoppers(make, 1, arrays, [PartitionSpec()] * len(arrays))
    entry = text[text.index("\nENTRY") :]
    kinds = re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = (?:\([^)]*\)|\S+) ([\w\-]+)\(", entry, re.MULTILINE)
    assert not {"while", "conditional", "call"} & set(kinds), "a loop launches its kernels in each round"
    others = ("fusion", "copy", "sort", "scatter", "gather", "reduce", "reduce-window", "transpose", "concatenate")
    return kinds.count("custom-call"), sum(kinds.count(kind) for kind in others)


def temporaries(name: str) -> tuple[int, int]:
    """(bytes of temporaries, bytes of keys and values) of a call of BUFFERS."""
    batch, keys, queries = 4, 32768, BUFFERS[name]
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    dropout = {"dropout": flexjax.Dropout(0.1, jax.random.key(0))} if "dropout" in name else {}
    attend = lambda q, k, v, lengths: flexjax.flex_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="mosaic_gpu", **dropout
    )
    cache = bf16(batch, keys, KEY_HEADS, DIM)
    arrays = bf16(batch, queries, HEADS, DIM), cache, cache, jax.ShapeDtypeStruct((batch,), jnp.int32)
    memory = compile_hopper.compile_for_hopper(attend, *arrays).memory_analysis()
    return memory.temp_size_in_bytes, 2 * cache.size * 2


def served(stored: str) -> tuple[int, int, int, int]:
    """(bytes of temporaries, bytes of the pools, bytes that results share with donated arrays, copies of a pool) of a step of serving with
    a donated cache: room for a token, its key and value, attention.
    """
    requests = 16
    pool = requests * COLUMNS
    cache = jax.eval_shape(lambda: paged.empty(pool, PAGE, KEY_HEADS, DIM, dtype=stored))
    table = jax.eval_shape(lambda: paged.table(requests, COLUMNS, pool, PAGE))
    rows = lambda heads: jax.ShapeDtypeStruct((requests, 1, heads, DIM), jnp.bfloat16)

    def step(query, key, value, cache, table):
        table, granted = paged.allocate(table, table.lengths + 1)
        cache, table = paged.append(cache, table, key, value)
        return flexjax.paged_attention(query, cache, table, implementation="mosaic_gpu"), cache, table, granted

    given = rows(HEADS), rows(KEY_HEADS), rows(KEY_HEADS), cache, table
    compiled = compile_hopper.compile_for_hopper(step, *given, donate_argnums=(3, 4))
    pool_of = max(jax.tree.leaves(cache.key), key=lambda x: x.ndim)
    memory, shape = compiled.memory_analysis(), ",".join(map(str, pool_of.shape))
    copies = re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|convert)\(", compiled.as_text())
    pools = pool_of.size * pool_of.dtype.itemsize * 2
    return memory.temp_size_in_bytes, pools, memory.alias_size_in_bytes, len(copies)


def in_child(*arguments: str) -> str:
    """What a child process with these arguments prints."""
    reason = compile_hopper.missing()
    if reason:
        pytest.skip(reason)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_keys_with_lengths_are_not_copied() -> None:
    """Contiguous keys whose slots past a length may hold NaN."""
    found = re.findall(r"^found (.+): (\d+) (\d+)$", in_child(*BUFFERS), re.MULTILINE)
    assert [name for name, *_ in found] == list(BUFFERS)
    for name, temporary, cache in found:
        assert int(temporary) < int(cache) / 100, f"{name}: {temporary} bytes of temporaries"


def test_a_step_of_serving_does_not_copy_its_cache() -> None:
    found = re.findall(r"^found (.+): (\d+) (\d+) (\d+) (\d+)$", in_child(*CACHES), re.MULTILINE)
    assert [name for name, *_ in found] == list(CACHES)
    for name, temporary, pools, shared, copies in found:
        assert int(temporary) < int(pools) / 100, f"{name}: {temporary} bytes of temporaries"
        assert int(shared) >= int(pools), name
        assert int(copies) == 0, name


@pytest.mark.slow
def test_launches() -> None:
    """Few kernels beside attention; and layers that share table and mask launch what they share once, and each its merge of two."""
    names = *MOST, *(f"{name} in layers" for name in OF_LAYERS)
    found = re.findall(r"^found (.+): (\d+) (\d+)$", in_child(*names), re.MULTILINE)
    assert [name for name, *_ in found] == list(names)
    numbers = {name: (int(attention), int(others)) for name, attention, others in found}
    for name in OF_LAYERS:
        attention, others = numbers.pop(f"{name} in layers")
        assert (attention, others) == (LAYERS, numbers[name][1] + 2 * (LAYERS - 1)), name
    for name, (attention, others) in numbers.items():
        assert attention == (2 if name in ("ragged, many queries", "shared prefix") else 1), name
        assert others <= MOST[name], f"{name}: {others} kernels"


if __name__ == "__main__":
    for each in sys.argv[1:]:
        numbers = served if each in CACHES else temporaries if each in BUFFERS else launches
        print(f"found {each}: {' '.join(map(str, numbers(each)))}", flush=True)
