"""A call runs where its arrays are: the backend is chosen for each platform that a program is lowered for.

There is one platform here. The others are lowered for under an abstract mesh that names their device; test_topologies.py has
devices of topologies, which need compilers.
"""

import dataclasses
import pathlib
import re
import typing
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import FallbackWarning, masks
from flexjax.backends import target as targets
from flexjax.backends.target import Target
from flexjax.passes import dispatch
from tests.arrays import array

V6E = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
A100 = jax.sharding.AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
V100 = jax.sharding.AbstractDevice(device_kind="Tesla V100-SXM2-16GB", num_cores=80, platform="gpu")
PLATFORM = {V6E: "tpu", H200: "cuda", A100: "cuda", V100: "cuda", None: "cpu"}
KERNEL = {V6E: "tpu_custom_call", H200: "mosaic_gpu_v2", A100: "mosaic_gpu_v2", None: "custom_call_of_kernels"}

needs_gpu_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11, which needs Python 3.12"
)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())


def shape(dtype: str = "bfloat16", dim: int = 64, length: int = 256) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, 2, dim), jnp.dtype(dtype))


def program(function: Callable, device: typing.Any, x: jax.ShapeDtypeStruct, platforms: typing.Any = None) -> str:
    """The text of a function of one array, lowered for a device."""
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return (
            jax.jit(lambda x: function(x)).trace(x).lower(lowering_platforms=platforms or (PLATFORM[device],)).as_text()
        )


def attend(**words: typing.Any) -> Callable:
    return lambda q: flexjax.flex_attention(q, q, q, **words)


def gradient(**words: typing.Any) -> Callable:
    return jax.grad(lambda q: flexjax.flex_attention(q, q, q, **words).astype(jnp.float32).sum())


def said(function: Callable, device: typing.Any, x: jax.ShapeDtypeStruct) -> list[str]:
    """The warnings of a lowering."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program(function, device, x)
    assert all(w.category is FallbackWarning for w in found)
    return [str(w.message) for w in found]


# ------------------------------------------------------------------- the choice


@pytest.mark.parametrize("device", [V6E, pytest.param(H200, marks=needs_gpu_kernels)], ids=["v6e", "h200"])
def test_a_program_for_a_device_that_is_not_here_has_its_kernels(device: typing.Any) -> None:
    kernel = KERNEL[device]
    assert program(attend(mask_mod=masks.causal), device, shape()).count(kernel) == 1
    assert program(gradient(), device, shape()).count(kernel) > 1
    assert kernel not in program(attend(), device, shape(), ("cpu",))
    assert kernel not in program(attend(implementation="xla"), device, shape())


@pytest.mark.parametrize("other", ["tpu", pytest.param("cuda", marks=needs_gpu_kernels)])
def test_an_export_for_several_platforms_has_what_each_runs(other: str) -> None:
    x = array(np.random.default_rng(0).standard_normal(shape().shape), jnp.bfloat16)
    names = ("mosaic_gpu", "mosaic_tpu", "xla")
    done = jax.export.export(jax.jit(gradient(implementation=names)), platforms=["cpu", other])(x)
    assert {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}[other] in done.mlir_module()
    np.testing.assert_array_equal(done.call(x), jax.jit(gradient())(x))


def test_an_export_for_a_device_that_nobody_names_is_for_every_device() -> None:
    with pytest.warns(FallbackWarning) as found:
        done = jax.export.export(jax.jit(attend()), platforms=["cpu", "tpu"])(shape())
    assert "tpu_custom_call" not in done.mlir_module()
    assert found[0].filename == __file__  # the line that a user wrote, not one of flexjax
    assert [str(w.message) for w in found] == [
        "The forward pass of a call runs on xla, not on the kernels of mosaic_tpu, for an unknown device of the platform tpu. "
        "The program is lowered for the platform tpu without a device, so its kind is unknown. Lower it with arguments or a mesh "
        "on such a device or on its topology, or pass implementation='mosaic_tpu'. To get the kernels, change what is refused; "
        "to run on xla without this warning, pass implementation='xla'. "
        "in flex_attention(query=bfloat16[1, 256, 2, 64], key=bfloat16[1, 256, 2, 64], value=bfloat16[1, 256, 2, 64])"
    ]


@pytest.mark.parametrize("jitted", [False, True])
def test_a_refusal_at_lowering_has_the_call_once(jitted: bool) -> None:
    x = jnp.ones((1, 64, 2, 64), jnp.float32)
    run = attend(implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError) as caught:
        (jax.jit(run) if jitted else run)(x)
    assert str(caught.value) == (
        "No implementation accepts this call: mosaic_tpu: mosaic_tpu runs on a TPU; this call is for the platform cpu. "
        "Pass kernel_options=KernelOptions(interpret=True) to simulate it."
    )
    text = "in flex_attention(query=float32[1, 64, 2, 64], key=float32[1, 64, 2, 64], value=float32[1, 64, 2, 64])"
    assert caught.value.__notes__.count(text) == 1
    package = pathlib.Path(flexjax.__file__).parent
    assert not any(pathlib.Path(entry.path).is_relative_to(package) for entry in caught.traceback)


def test_what_no_platform_changes_is_refused_while_the_call_is_traced() -> None:
    with pytest.raises(
        NotImplementedError, match="mosaic_tpu computes float32 and bfloat16; query, key and value are float16"
    ):
        jax.eval_shape(attend(implementation="mosaic_tpu"), shape("float16"))


def reference_problem() -> tuple[dict[str, jax.Array], Callable]:
    rng = np.random.default_rng(3)
    draw = lambda *sizes: array(rng.standard_normal(sizes), jnp.float32)
    arrays = dict(q=draw(2, 24, 4, 8), k=draw(2, 20, 2, 8), v=draw(2, 20, 2, 6), sinks=draw(4), bias=draw(4, 44))
    arrays |= dict(query_extra=draw(2, 24, 4, 3), key_extra=draw(2, 20, 1, 3))
    block_mask = flexjax.create_block_mask(masks.causal, None, None, 24, 20, block_size=8)

    def run(arrays: dict[str, jax.Array], implementation: typing.Any) -> tuple[jax.Array, typing.Any]:
        return flexjax.flex_attention(
            arrays["q"], arrays["k"], arrays["v"], sinks=arrays["sinks"], block_mask=block_mask, dropout=flexjax.Dropout(0.3, jax.random.key(1)), query_extra=arrays["query_extra"], key_extra=arrays["key_extra"],
            score_mod=lambda s, b, h, i, j: jnp.tanh(s) + arrays["bias"][h, i - j + 20],
            return_aux=flexjax.AuxRequest(lse=True, max_scores=True), implementation=implementation,
        )  # fmt: skip

    return arrays, run


@pytest.mark.slow
def test_a_sequence_comes_to_the_reference_once_the_platform_is_known() -> None:
    arrays, run = reference_problem()

    def loss(arrays: dict[str, jax.Array], names: typing.Any) -> typing.Any:
        out, aux = run(arrays, names)
        return (out**2).sum() + (aux.lse**2).sum(), (out, aux.lse, aux.max_scores)

    step = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    made = [step(arrays, names) for names in ("reference", ("mosaic_tpu", "reference"))]
    for want, got in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    assert "tpu_custom_call" in program(attend(implementation=("mosaic_tpu", "reference")), V6E, shape())


# ------------------------------------------------------------------- the target


class Device(typing.NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str | None = None
    core_count: int | None = None


def test_targets_of_devices() -> None:
    rows = {
        Device("cpu", "cpu"): Target("cpu", "cpu"),
        Device("gpu", "NVIDIA H100 PCIe", "9.0", 114): Target("cuda", "NVIDIA H100 PCIe", "9.0", 114),
        Device("gpu", "AMD Instinct MI300X", "gfx942", 304): Target("rocm", "AMD Instinct MI300X", "gfx942", 304),
        H200: Target("cuda", "NVIDIA H200", "9.0", 132),
        A100: Target("cuda", "NVIDIA A100-SXM4-80GB", "8.0", 108),
        V6E: Target("tpu", "TPU v6 lite", None, 1),
    }
    for device, target in rows.items():
        assert targets.of_device(device) == target
    for kind in ("NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H800"):
        assert targets.of_device(Device("gpu", kind)).capability == "9.0"
    for kind, capability in (("NVIDIA A10G", "8.6"), ("NVIDIA RTX A6000", "8.6"), ("NVIDIA L40S", "8.9"),
                             ("NVIDIA GeForce RTX 4090", "8.9"), ("NVIDIA RTX 6000 Ada Generation", "8.9"),
                             ("NVIDIA B200", "10.0"), ("NVIDIA GB200", "10.0"), ("NVIDIA B300 SXM6 AC", "10.3"),
                             ("NVIDIA GB300", "10.3"), ("NVIDIA GeForce RTX 5090", "12.0"), ("NVIDIA GB10", "12.1")):  # fmt: skip
        assert targets.of_device(Device("gpu", kind)).capability == capability
    for kind in ("NVIDIA B2000", "NVIDIA GB100", "NVIDIA H1000", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080"):
        assert targets.of_device(Device("gpu", kind)).capability is None
    assert targets.default() == targets.of_platform("cpu")
    assert targets.of_platform("gpu") == Target("cuda")


@needs_gpu_kernels
def test_the_grid_has_a_program_for_each_sm_and_nothing_else_follows_the_gpu() -> None:
    from flexjax.backends.mosaic_gpu.forward import hopper as forward_hopper

    seen = []
    real = forward_hopper.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_hopper, "forward", lambda *given: seen.append(given[2]) or real(*given))
        for cores in (132, 114):
            device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=cores, platform="gpu")
            program(attend(), device, shape(), ("cuda",))
    assert [tile.programs for tile in seen] == [132, 114]
    assert seen[0] == dataclasses.replace(seen[1], programs=132)


# ------------------------------------------------------------------- warnings


def test_the_whole_warning_on_a_tpu_and_only_once() -> None:
    x = shape("float16", 32)
    call = "in flex_attention(query=float16[1, 256, 2, 32], key=float16[1, 256, 2, 32], value=float16[1, 256, 2, 32])"
    why = (
        "of a call runs on xla, not on the kernels of mosaic_tpu, for TPU v6 lite. mosaic_tpu computes float32 and bfloat16; "
        "query, key and value are float16. To get the kernels, change what is refused; to run on xla without this warning, pass "
        "implementation="
    )
    assert said(gradient(), V6E, x) == [
        f"The forward pass {why}'xla'. {call}",
        f"The backward pass {why}('mosaic_tpu', 'xla'). {call}",
    ]
    assert said(gradient(), V6E, x) == []


def _looped(s: jax.Array, *at: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: x > 100.0, lambda x: x * 0.5, s)


def _rows() -> Iterator[tuple[str, Callable, jax.ShapeDtypeStruct, tuple[str, ...]]]:
    both = ("forward pass", "backward pass")
    yield "float32 of highest precision", gradient(precision="highest"), shape("float32"), both
    yield "head dim 320", gradient(), shape(dim=320), ()
    yield "head dim 640", gradient(), shape(dim=640), both
    yield "a loop in the mod", attend(score_mod=_looped), shape(), ("forward pass",)
    yield "bfloat16", gradient(), shape(), ()


@needs_gpu_kernels
@pytest.mark.parametrize(("function", "x", "passes"), [pytest.param(*row, id=name) for name, *row in _rows()])
def test_what_leaves_the_kernels_of_a_gpu_says_so(
    function: Callable, x: jax.ShapeDtypeStruct, passes: tuple[str, ...]
) -> None:
    found = said(function, H200, x)
    assert [re.match("The (.*) of a call runs on xla, not on the kernels of mosaic_gpu, for NVIDIA H200. ", m)[1] for m in found] == [
        *passes
    ]  # fmt: skip
    assert said(function, None, x) == []


@pytest.mark.parametrize("device", [V6E, pytest.param(H200, marks=needs_gpu_kernels)], ids=["v6e", "h200"])
def test_derivatives_that_kernels_do_not_have_say_so(device: typing.Any) -> None:
    name = "mosaic_tpu" if device is V6E else "mosaic_gpu"
    tangent = lambda **words: lambda q: jax.jvp(attend(**words), (q,), (q,))[1]
    twice = lambda **words: jax.grad(lambda q: (gradient(**words)(q).astype(jnp.float32) ** 2).sum())
    for words in ({}, {"implementation": name}):
        dispatch._warned.clear()
        without = ["The tangent (forward mode)"] if device is V6E else []
        assert [m.split(" of a call")[0] for m in said(tangent(**words), device, shape())] == without
        assert [m.split(" of a call")[0] for m in said(twice(**words), device, shape())] == ["The second derivative"]
    assert said(tangent(implementation=(name, "xla")), device, shape("bfloat16", 32)) == []
    assert said(twice(implementation="xla"), device, shape("bfloat16", 32)) == []


@pytest.mark.slow
def test_eager_second_derivatives_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never lowered as a whole; arrays on a GPU are pretended."""
    dispatch._warned.clear()
    q = jnp.ones((1, 8, 1, 8))
    once = jax.grad(lambda q: (flexjax.flex_attention(q, q, q) ** 2).sum())
    monkeypatch.setattr(targets, "of_device", lambda *given: Target("cuda", "NVIDIA H200", "9.0", 132))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.grad(lambda q: (once(q) ** 2).sum())(q)
    assert any(str(w.message).startswith("The second derivative of a call runs on xla") for w in found)


def test_a_warning_that_is_an_error_is_one_again() -> None:
    dispatch._warned.clear()
    for _ in range(2):
        with pytest.raises(FallbackWarning):  # warnings are errors in these tests
            program(attend(), V100, shape())


@needs_gpu_kernels
def test_a_float64_table_stays_on_the_kernels() -> None:
    with jax.enable_x64(True):
        table = jnp.cos(jnp.arange(512.0))
        assert table.dtype == jnp.float64
        assert (
            said(gradient(score_mod=lambda s, b, h, i, j: s + table[i - j + 255] * np.float64(0.5)), H200, shape())
            == []
        )


@needs_gpu_kernels
def test_an_a100_has_kernels() -> None:
    for options in (None, flexjax.KernelOptions(instruction="mma")):
        assert said(gradient(kernel_options=options), A100, shape()) == []
        assert KERNEL[A100] in program(attend(kernel_options=options), A100, shape())
    assert KERNEL[A100] not in program(attend(implementation="xla"), A100, shape())


@needs_gpu_kernels
@pytest.mark.parametrize("kind", ["NVIDIA B200", "NVIDIA GB300", "NVIDIA GB10"])
def test_a_blackwell_card_that_is_only_named_has_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=148, platform="gpu")
    monkeypatch.setitem(PLATFORM, device, "cuda")
    assert said(gradient(), device, shape()) == []
    assert KERNEL[A100] in program(attend(), device, shape())


@needs_gpu_kernels
def test_a_float32_call_for_an_a100_says_that_xla_runs_it() -> None:
    assert said(attend(), A100, shape("float32")) == [
        "The forward pass of a call runs on xla, not on the kernels of mosaic_gpu, for NVIDIA A100-SXM4-80GB. The GPU kernels on mma.sync "
        "take bfloat16 and float16 inputs, not float32. To get the kernels, change what is refused; "
        "to run on xla without this warning, pass implementation='xla'. "
        "in flex_attention(query=float32[1, 256, 2, 64], key=float32[1, 256, 2, 64], value=float32[1, 256, 2, 64])"
    ]


def test_other_gpus_and_old_versions_of_jax_say_so() -> None:
    (v100,) = said(attend(), V100, shape())
    assert "the compute capability of Tesla V100-SXM2-16GB is not known." in v100
    if jax.__version_info__ < (0, 11):
        (h200,) = said(attend(), H200, shape())
        assert "The GPU kernels need jax 0.11 or later, which needs Python 3.12 or later (this is jax 0.10" in h200
        assert "In such a Python, in a checkout: `pip install -U '.[cuda13]'`." in h200


def test_explain_names_who_runs_each_pass() -> None:
    length = 1 << 20
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    table = jnp.zeros(2 * length)
    text = flexjax.explain(x, x, x, score_mod=lambda s, b, h, i, j: s + table[i - j + length], device=V6E)
    lines = text.split("\n\n")[-2].splitlines()
    assert lines == [
        "runs on: mosaic_tpu",
        "  not mosaic_gpu: mosaic_gpu runs on an NVIDIA GPU; this call is for the platform tpu.",
        "  tiles: forward 1024 x 1024, backward 1024 x 1024",
        "  bits: out and lse of a token may follow the rest of the call. mosaic_tpu has no kernels for "
        "kernel_options.invariant yet; xla runs it on a CPU.",
        "backward pass on: mosaic_tpu",
        "gradients of captured arrays on: xla",
        "  not mosaic_tpu: mosaic_tpu sums the gradient of a captured array (float32[2097152]) read at q - kv in VMEM, 64 MiB for "
        "these lengths, more than 8 MiB.",
        "tangent (forward mode) on: xla",
        "  not mosaic_tpu: The TPU kernels compute reverse mode only.",
    ]
    assert "runs on: xla" in flexjax.explain(x, x, x, device="cpu")
    for device in (3, "gpuu", "TPU"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
            flexjax.explain(x, x, x, device=device)  # type: ignore[arg-type]
        assert str(caught.value).startswith(
            f"`device` is {device!r}; expected a jax.Device, a platform, the name of a card or chip, or None. Platforms are 'cpu', "
        )
