"""Calls whose sequence is split over devices (`context=`).

What needs eight devices runs in a child process (context_cases.py), and what needs two processes in two (context_processes.py).
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import ContextParallel, masks
from flexjax.context import device as context_device
from flexjax.context import forward as context_forward
from flexjax.context import lists as context_lists
from tests.arrays import array
from tests.conftest import QUICK_TO_COMPILE
from tests.context.context_cases import CASES, SLOW, Case, Outcome
from tests.marks import some_slow

needs_two = pytest.mark.skipif(
    jax.device_count() < 2, reason="tests/conftest.py makes two devices of a CPU only; this platform has one"
)


def environment(devices: int) -> dict[str, str]:
    flags = {"xla_force_host_platform_device_count": str(devices)} | QUICK_TO_COMPILE
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in flags.items())}


# ------------------------------------------------------------------- eight devices


def child(*given: str) -> dict[str, Outcome]:
    command = [sys.executable, "-m", "tests.context.context_cases", *given]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return child(*CASES)


KINDS = {
    "neighbours": {"collective-permute"},
    "ring": {"collective-permute"},
    "all_gather": {"all-gather", "all-to-all"},
    "all_to_all": {"all-to-all"},
    "auto": {"collective-permute", "all-gather", "all-to-all"},
}


def assert_right(case: Case, outcome: Outcome) -> None:
    bound = {"bfloat16": 2e-2, "float64": 1e-12}.get(case.dtype, 1e-5)
    assert outcome["distance"] < bound, outcome["each"]
    assert outcome["same"], "the same call gave other bits"
    assert outcome["lies"], "gradients lie otherwise than their arrays"
    found = dict(outcome["collectives"])
    sums = found.pop("all-reduce", [0, 0, 0])
    sets = 1 + (case.dp is not None) + (case.tp is not None)
    assert (
        sums[0] <= sets + 3 * case.traced
    )  # gradients of what devices share, and whether a traced mask needs other blocks
    assert set(found) <= KINDS[case.method]
    if not case.traced and case.method != "ring":
        assert all(kind[2] == 0 for kind in found.values()), "communication in a loop"


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name: str, outcomes: dict[str, Outcome]) -> None:
    assert_right(CASES[name], outcomes[name])


@pytest.mark.slow
def test_communication_is_in_proportion_to_the_mask() -> None:
    """A block of 32 keys and values of two heads of four features has 2048 bytes; a device has four of them."""
    block = 32 * 2 * 8 * 4
    assert child("forward")["forward"] == {
        "window": {"collective-permute": [1, 2 * block, 0]},  # 64 keys from the neighbour
        "documents": {},
        "ring": {"collective-permute": [2, 4 * block, 2]},  # keys and values, in a loop
        "all_gather": {"all-gather": [1, 32 * block, 0]},
    }


@pytest.mark.slow
def test_blocks_that_tolerance_leaves_out_are_not_sent() -> None:
    """A block of 16 keys and values of two heads of four features has 1024 bytes; a device has four of them."""
    found = child("tolerance")["tolerance"]
    assert found["distance"] < 1e-5
    assert found["skipped"] == {"collective-permute": [1, 2 * 1024, 0]}  # 32 keys from the neighbour
    assert found["argument"] == found["skipped"]
    assert found["whole"] == {"collective-permute": [7, 28 * 1024, 0]}
    # the keys, which the backward pass has sent again, and their gradients
    assert found["both passes"]["collective-permute"] == [3, 3 * 2048, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_cases(name: str) -> None:
    assert_right(SLOW[name], child(name)[name])


# ------------------------------------------------------------------- two processes


@pytest.mark.slow
def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.context.context_processes", address]
    start = functools.partial(
        subprocess.Popen, env=environment(4), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    processes = [start([*command, str(i)]) for i in range(2)]
    results = [p.communicate(timeout=500) for p in processes]
    for process, (out, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert float(re.findall(r"worst (\S+)", out)[0]) < 1e-4


# ------------------------------------------------------------------- two devices, in this process

T, N, D = 16, 2, 4


def two(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("sp",), axis_types=(kind,), devices=jax.devices()[:2])


def qkv(length: int = T) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [array(rng.standard_normal((1, length, N, D)), jnp.float32) for _ in range(3)]


def placed(arrays: list[jax.Array], mesh: jax.sharding.Mesh) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in arrays]


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def documents(ids: jax.Array) -> Callable:
    return flexjax.and_masks(masks.causal, masks.document(ids))


@pytest.mark.slow
@needs_two
def test_new_documents_compile_nothing_and_a_layout_for_others_drops_nothing() -> None:
    rng = np.random.default_rng(1)
    given = qkv(32)
    split = lambda: array(np.sort(rng.integers(0, 6, 32)), jnp.int32)

    whole = jax.jit(lambda ids: flexjax.flex_attention(*given, mask_mod=documents(ids)))

    @jax.jit
    def call(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, layout: flexjax.ContextLayout) -> jax.Array:
        arrays = [layout.shard(x) for x in (q, k, v)]
        out = flexjax.flex_attention(*arrays, mask_mod=documents(ids), context=ContextParallel("sp", layout))
        return layout.unshard(out)

    with jax.set_mesh(two()):
        for _ in range(6):
            ids, others = split(), split()
            layout = flexjax.context_layout(documents(ids), 32, devices=2, block_size=2)
            assert layout.rounds is not None
            assert layout.rounds.width < 8  # of 8 blocks
            close(call(*given, ids, layout), whole(ids))
            close(call(*given, others, layout), whole(others))
    assert call._cache_size() <= 3


@needs_two
@pytest.mark.parametrize("kind", some_slow(["shard_map", "Explicit", "Auto"], ["Auto"]))
def test_forward_mode_and_second_derivatives(kind: str) -> None:
    mesh = two(AxisType.Auto if kind == "shard_map" else AxisType[kind])
    layout = flexjax.context_layout(masks.causal, T, devices=2, block_size=4)
    spec = P(None, "sp")
    given, tangents = qkv(), [jnp.cos(3 * x) for x in qkv()]
    want = lambda *a: flexjax.flex_attention(*a, mask_mod=masks.causal)
    context = ContextParallel("sp", layout, "all_gather" if kind == "shard_map" else "auto")
    got: Callable = lambda *a: flexjax.flex_attention(*a, mask_mod=masks.causal, context=context)
    if kind == "shard_map":
        got = jax.shard_map(got, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    arrays, moved = ([*placed([layout.shard(x) for x in xs], mesh)] for xs in (given, tangents))
    gradient = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum())
    with jax.set_mesh(mesh):
        if kind != "shard_map":  # there the second derivatives below are a jvp too
            out = jax.jit(lambda a, t: jax.jvp(got, a, t))(arrays, moved)
            wanted = jax.jit(lambda a, t: jax.jvp(want, a, t))(given, tangents)
            close([layout.unshard(np.asarray(x)) for x in out], wanted)
        second = jax.jit(lambda a, t: jax.jvp(gradient(got), a, t)[1])
        if kind == "Auto":
            with pytest.raises(NotImplementedError) as error:
                second(arrays, moved)
            assert str(error.value) == (
                "Second derivatives of a call with context= are not computed over automatic mesh axes. Make the axes explicit, or "
                "call it inside jax.shard_map."
            )
        else:
            wanted = jax.jit(lambda a, t: jax.jvp(gradient(want), a, t)[1])(given, tangents)
            close(layout.unshard(np.asarray(second(arrays, moved))), wanted)


@pytest.mark.slow
@needs_two
def test_rows_that_visit_received_keys_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are few, a stage of their own has all their keys: no partial results, and none is merged."""
    monkeypatch.setattr(context_forward, "merged", None)
    window = flexjax.and_masks(masks.causal, masks.sliding_window(7))
    layout = flexjax.context_layout(window, 64, devices=2, block_size=4)
    given, sinks = qkv(64), array([0.5, -0.5])

    def loss(context: Any, *a: jax.Array) -> jax.Array:
        return (flexjax.flex_attention(*a[:3], mask_mod=window, sinks=a[3], context=context) ** 2).sum()

    gradient = lambda context: jax.jit(jax.value_and_grad(functools.partial(loss, context), argnums=(0, 1, 2, 3)))
    mesh = two()
    with jax.set_mesh(mesh):
        total, got = gradient(ContextParallel("sp", layout))(*placed([layout.shard(x) for x in given], mesh), sinks)
    wanted, want = gradient(None)(*given, sinks)
    close((total, [layout.unshard(np.asarray(x)) for x in got[:3]], got[3]), (wanted, list(want[:3]), want[3]))


@needs_two
def test_block_lists_that_are_made_under_jit_are_known() -> None:
    """The program has the rounds that the lists need, and no ring beside them for blocks that these rounds may lack."""
    made = flexjax.create_block_mask(masks.causal, None, None, T, T, block_size=4)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)

    def call(q: jax.Array) -> jax.Array:
        mask = flexjax.BlockMask.from_kv_blocks(*lists, block_size=4, mask_mod=masks.causal, q_len=T, kv_len=T)
        return flexjax.flex_attention(q, q, q, block_mask=mask, context=ContextParallel("sp", LAYOUT, "neighbours"))

    split = jax.jit(jax.shard_map(call, mesh=two(), in_specs=P(None, "sp"), out_specs=P(None, "sp")))
    text = split.lower(jax.ShapeDtypeStruct((1, T, N, D), jnp.float32)).as_text()
    assert text.count("stablehlo.collective_permute") == 1  # keys and values in one message


@needs_two
def test_explain_says_what_a_device_receives_and_computes() -> None:
    window = flexjax.and_masks(masks.causal, masks.sliding_window(7))
    layout = flexjax.context_layout(window, 64, devices=2, block_size=4)
    shape = jax.ShapeDtypeStruct((1, 64, N, D), jnp.float32, sharding=NamedSharding(two(), P(None, "sp")))
    text = flexjax.explain(shape, shape, shape, mask_mod=window, context=ContextParallel("sp", layout), device="cpu")
    said, stages = text.split("all-gather\n  each device receives ")
    assert "\n\ndevices: the sequence over sp 2, method neighbours (auto)\n  ContextLayout(" in said
    assert "0 ████████████████████████ work 1.00   receives 0 key blocks" in said or "receives 2 key blocks" in said
    assert stages == (
        "2 key blocks, 512 B of keys and values (1 batch entries, 2 key heads), in 1 round (from 1 place before it): 0.250 of an "
        "all-gather. Of the blocks 1 to 2 are needed: all messages of a round are as wide as its widest\n"
        "  the backward pass receives them again and sends their gradients back in float32\n"
        "  stage 1: queries that visit own keys alone, while others travel, 32 queries x 32 keys a device, on xla\n"
        "    not mosaic_gpu: mosaic_gpu runs on an NVIDIA GPU; this call is for the platform cpu.\n"
        "    not mosaic_tpu: mosaic_tpu runs on a TPU; this call is for the platform cpu.\n"
        "  stage 2: queries that visit received keys, with all keys that they visit, 8 queries x 16 keys a device, on xla"
    )
    with pytest.raises(NotImplementedError) as refusal:
        flexjax.autotune(shape, shape, shape, context=ContextParallel("sp", layout))  # type: ignore[call-arg]
    assert str(refusal.value) == (
        "autotune times one device. A call with context= is computed in stages, whose plans `flexjax.explain(..., context=...)` names. "
        "Time flex_attention with kernel_options inside the jitted call instead."
    )


@needs_two
def test_a_ring_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for long shards, whose devices also classify their blocks themselves."""
    monkeypatch.setattr(context_device, "PART_BLOCKS", 1)
    monkeypatch.setattr(context_lists, "MOST_BLOCKS", 0)
    layout = flexjax.context_layout(masks.causal, 32, devices=2, block_size=2)
    given = qkv(32)
    loss = lambda context, *a: (flexjax.flex_attention(*a, mask_mod=masks.causal, context=context) ** 2).sum()
    gradient = lambda context: jax.jit(jax.grad(functools.partial(loss, context), argnums=(0, 1, 2)))
    mesh = two()
    with jax.set_mesh(mesh):
        got = gradient(ContextParallel("sp", layout, "ring"))(*placed([layout.shard(x) for x in given], mesh))
    close([layout.unshard(np.asarray(x)) for x in got], gradient(None)(*given))


@needs_two
def test_vmap() -> None:
    layout = flexjax.context_layout(masks.causal, T, devices=2, block_size=4)
    call = lambda q, k, v: flexjax.flex_attention(q, k, v, mask_mod=masks.causal, context=ContextParallel("sp", layout))
    given = [jnp.stack([x, 2 * x]) for x in qkv()]
    arrays = [jnp.asarray(layout.shard(x, axis=2)) for x in given]
    want = jax.vmap(lambda *a: flexjax.flex_attention(*a, mask_mod=masks.causal))(*given)
    with jax.set_mesh(two(AxisType.Explicit)):
        got = jax.jit(jax.vmap(call))(*arrays)
    close(layout.unshard(np.asarray(got), axis=2), want)
    with jax.set_mesh(two()), pytest.raises(NotImplementedError) as error:
        jax.jit(jax.vmap(call))(*arrays)
    assert str(error.value) == (
        "A call with context= is not mapped by jax.vmap over automatic mesh axes. Make the mapped axis a part of the batch, make the "
        "axes explicit, or call it inside jax.shard_map."
    )


@needs_two
def test_programs_without_partitioning_rules() -> None:
    mesh = two()
    call = lambda q: flexjax.flex_attention(q, q, q, mask_mod=masks.causal, context=ContextParallel("sp", LAYOUT))
    where = NamedSharding(mesh, P(None, "sp"))
    shape = jax.ShapeDtypeStruct((1, T, N, D), jnp.float32)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError) as error:
        jax.export.export(jax.jit(call, in_shardings=where))(shape)
    assert str(error.value) == (
        "A call with context= over automatic mesh axes needs a partitioning rule of XLA, which exported programs, programs for TPUs and "
        "jax.shard_map over some axes of a mesh do not have. Make the axes explicit (jax.make_mesh with AxisType.Explicit, then "
        "jax.set_mesh), or call it inside jax.shard_map over all axes. in flex_attention(query=float32[1, 16, 2, 4], "
        "key=float32[1, 16, 2, 4], value=float32[1, 16, 2, 4], mask_mod=causal)"
    )
    split = jax.shard_map(call, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    exported = jax.export.export(jax.jit(split, in_shardings=where))(shape)
    x = qkv()[0]
    got = exported.call(placed([LAYOUT.shard(x)], mesh)[0])
    close(LAYOUT.unshard(np.asarray(got)), flexjax.flex_attention(x, x, x, mask_mod=masks.causal))


LAYOUT = flexjax.context_layout(masks.causal, T, devices=2, block_size=4)
ADVICE = "Run the call with the mesh set (jax.set_mesh), or inside jax.shard_map over these axes."


def bad(**more: Any) -> dict[str, Any]:
    return {"context": ContextParallel("sp", LAYOUT), "mask_mod": masks.causal} | more


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such axis": (
        bad(context=ContextParallel("tp", LAYOUT)),
        f"`context.axis` is 'tp'; expected axes of the mesh, which has 'sp'. {ADVICE}",
    ),
    "no axis": (
        bad(context=ContextParallel((), LAYOUT)),
        "`context.axis` is (); expected an axis name or a tuple of names. Name mesh axes.",
    ),
    "another device count": (
        bad(context=ContextParallel("sp", flexjax.context_layout(None, T, devices=4))),
        "`context.layout` is for 4 devices; expected a layout for 2, the size of 'sp'. Pass devices=2 to context_layout.",
    ),
    "another length": (
        bad(context=ContextParallel("sp", flexjax.context_layout(None, 32, devices=2, block_size=4))),
        "`context.layout` is for 32 rows of query on all devices together; expected a layout for the 16 that the call has. Permute and "
        "pad the arrays with layout.shard.",
    ),
    "another method": (
        bad(context=ContextParallel("sp", LAYOUT, "fastest")),  # type: ignore[arg-type]
        "`context.method` is 'fastest'; expected 'auto', 'neighbours', 'ring', 'all_gather', 'all_to_all'. 'auto' models the bytes.",
    ),
    "no context": (
        bad(context="sp"),
        "`context` is a str; expected a flexjax.ContextParallel. Pass ContextParallel('axis', layout).",
    ),
    "no layout": (
        bad(context=ContextParallel("sp", 4)),  # type: ignore[arg-type]
        "`context.layout` is an int; expected a layout or None. Make one with context_layout.",
    ),
    "two masks": (
        bad(block_mask=flexjax.create_block_mask(masks.causal, None, None, T, T)),
        "`mask_mod` and `block_mask` are both given; expected one of them. A block mask contains its mask_mod: to restrict it further, "
        "build one of and_masks(block_mask.mask_mod, mask_mod).",
    ),
    "a block mask of other lengths": (
        bad(mask_mod=None, block_mask=flexjax.create_block_mask(masks.causal, None, None, 32, 32)),
        "`block_mask` is made for q_len=32, kv_len=32; expected q_len=16, kv_len=16. Build it for these lengths with create_block_mask, "
        "or slice it.",
    ),
    "a block mask of each head without the origin of the heads": (
        bad(mask_mod=None, block_mask=flexjax.create_block_mask(masks.causal, None, N, T, T), origin=flexjax.Origin(head=2)),
        "`block_mask` is made without an origin beside `origin`; expected one made with the same origin. Pass origin= to "
        "create_block_mask too.",
    ),
    "a block mask of another origin": (
        bad(
            mask_mod=None,
            block_mask=flexjax.create_block_mask(masks.causal, None, N, T, T, origin=flexjax.Origin(head=4)),
            origin=flexjax.Origin(head=2),
        ),
        "`origin` is another than that of block_mask; expected the same, or None. None takes that of the block mask.",
    ),
    "a block mask with an origin of keys": (
        bad(mask_mod=None, block_mask=flexjax.create_block_mask(masks.causal, None, None, T, T, origin=flexjax.Origin(key=4))),
        "`block_mask` is made with an origin of queries or keys beside context; expected one of the whole sequence. context= places "
        "the sequence.",
    ),
    "an origin of the sequence": (
        bad(origin=flexjax.Origin(query=4)),
        "`origin` is one of queries or keys beside context; expected an origin of batch and heads. context= places the sequence.",
    ),
}  # fmt: skip


@needs_two
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, text = BAD[name]
    with jax.set_mesh(two()), pytest.raises(ValueError, match="expected") as error:
        flexjax.flex_attention(*qkv(), **arguments)
    assert str(error.value) == text


def test_a_call_without_a_mesh() -> None:
    with pytest.raises(ValueError, match="mesh") as error:
        flexjax.flex_attention(*qkv(), mask_mod=masks.causal, context=ContextParallel("sp", LAYOUT))
    assert str(error.value) == f"`context.axis` is 'sp'; expected axes of the mesh, which has none. {ADVICE}"


@needs_two
def test_no_tokens_to_split() -> None:
    with jax.set_mesh(two()), pytest.raises(ValueError, match="key") as error:
        flexjax.flex_attention(*(qkv(n)[0] for n in (T, 0, 0)), context=ContextParallel("sp"))
    assert str(error.value) == (
        "`key` is 0 rows; expected tokens to split over the devices. Leave context= out for a call without queries or keys."
    )


@needs_two
def test_what_a_call_cannot_have() -> None:
    ids = jnp.zeros(T, jnp.int32)
    q, k, v = qkv()
    call = lambda context, ids, **more: flexjax.flex_attention(
        q, k, v, mask_mod=documents(ids), context=context, **more
    )
    with jax.set_mesh(two()):
        with pytest.raises(ValueError, match="unknown") as error:
            jax.jit(lambda ids: call(ContextParallel("sp", None, "neighbours"), ids))(ids)
        assert str(error.value) == (
            "`context.method` is 'neighbours'; expected 'ring', 'all_gather', 'all_to_all' or 'auto'. Arrays of the mask or lengths are traced, so "
            "which blocks travel is unknown while the call is traced. Only a layout that context_layout made outside of jit, from the "
            "values of these arrays, knows."
        )
        with pytest.raises(NotImplementedError) as refusal:
            call(ContextParallel("sp"), ids, implementation="reference")
        assert str(refusal.value) == (
            "reference: It is dense and runs on one device; context= splits the sequence over several."
        )
        with pytest.raises(ValueError, match="divide") as error:
            flexjax.flex_attention(q, k[:, :, :1], v[:, :, :1], context=ContextParallel("sp", None, "all_to_all"))
        assert str(error.value) == (
            "`context.method` is 'all_to_all'; expected a method that keeps heads together, because 2 does not divide their numbers. The call has 2 query and 1 key heads on each device; "
            "use 'ring' or 'all_gather'."
        )
        counts, blocks = jnp.ones((1, 1, 4), jnp.int32), jnp.zeros((1, 1, 4, 1), jnp.int32)
        lists = flexjax.BlockMask.from_kv_blocks(counts, blocks, block_size=4, kv_len=T)
        with pytest.raises(NotImplementedError) as refusal:
            flexjax.flex_attention(q, k, v, block_mask=lists, key_value_seq_lengths=3, context=ContextParallel("sp"))
        assert str(refusal.value) == (
            "A call with context= takes no lengths beside a block mask from user lists (BlockMask.from_kv_blocks), whose full blocks no "
            "mask cuts. Hide tokens past a length with mask_mod, or pass lists without them."
        )
        with pytest.raises(ValueError, match="rows") as error:
            flexjax.flex_attention(q[:, :15], k, v, context=ContextParallel("sp"))
        assert str(error.value) == (
            "`query` is 15 rows on 2 devices; expected a number of rows that the devices divide into whole blocks. Make a layout with "
            "context_layout, which pads."
        )
    with jax.set_mesh(two(AxisType.Explicit)):
        split = jax.device_put(jnp.concatenate([q, q]), P("sp"))
        with pytest.raises(ValueError, match="split") as error:
            flexjax.flex_attention(split, split, split, context=ContextParallel("sp"))
        assert str(error.value) == (
            "`query` is split as P('sp', None, None, None); expected its tokens split over 'sp' or not at all, its batch and heads over "
            "other axes, its head dim whole. Reshard it, or name other axes in context."
        )
