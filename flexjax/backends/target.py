"""The hardware that a program is lowered for, and how to find it during lowering.

Only the platform is always known: jax lowers a primitive once for each platform that was asked for. The device of that
platform is looked up in these places, in this order:

    the mesh of the trace                 a mesh of devices or of a topology; an abstract mesh with an AbstractDevice
    the axis context of the module        the mesh of a shard_map
    the avals of the operands             arrays that are sharded over a mesh with explicit axes
    the client of the module              devices at hand, or those of a topology that arguments are placed on
    this process' devices                 an export for several platforms has no client

If none of them has a device of the platform, as in an export for "cuda" on a machine without a GPU, `kind` is None.

jax lowers a program once for all devices of a client, so all devices of a client count as devices of the first one's
kind.
"""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator

import jax
from jax.extend.backend import get_default_device
from jax.interpreters import mlir

HOPPER_KINDS = re.compile(r"\bG?H(20|100|200|800)\b")
"""Names of devices with compute capability 9.0, because an AbstractDevice has a name and no capability."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a pass is lowered for.

    platform    as lowering rules are registered: "cpu", "cuda", "rocm", "tpu" or the name of a plugin
    kind        jax's device_kind, e.g. "NVIDIA H200" or "TPU v6 lite"; None if unknown
    capability  compute capability of an NVIDIA GPU, e.g. "9.0"; None if unknown, and on other platforms
    cores       SMs of a GPU, TensorCores of a TPU; None if unknown
    automatic   XLA's partitioner splits the program over several such devices, and has no rule for what is lowered here
    """

    platform: str
    kind: str | None = None
    capability: str | None = None
    cores: int | None = None
    automatic: bool = False

    @property
    def name(self) -> str:
        """The device in error messages."""
        return self.kind or f"an unknown device of the platform {self.platform}"


def of_device(device: typing.Any, platform: str | None = None) -> Target:
    """The target of a jax.Device, a device of a topology or a jax.sharding.AbstractDevice.

    platform     of the lowering, if known; `device.platform` of a GPU does not tell CUDA from ROCm
    """
    kind = device.device_kind
    capability = getattr(device, "compute_capability", None)
    if platform is None:
        platform = _platform(device)
    if capability is None and platform == "cuda" and HOPPER_KINDS.search(kind):
        capability = "9.0"
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return Target(platform, kind, capability, cores)


def _platform(device: typing.Any) -> str:
    """The platform as lowering rules name it: `device.platform` is "gpu" for both CUDA and ROCm."""
    if device.platform != "gpu":
        return device.platform
    is_rocm = str(getattr(device, "compute_capability", "")).startswith("gfx") or device.device_kind.startswith("AMD")
    return "rocm" if is_rocm else "cuda"


def default() -> Target:
    """The target of an eager call whose arrays were not placed anywhere."""
    return of_device(get_default_device())


def of_platform(platform: str) -> Target:
    """The target of the first device of a platform in this process; of unknown kind if there is none."""
    found = _local_devices(platform)
    if found:
        return of_device(found[0])
    return Target("cuda" if platform == "gpu" else platform)


def of_lowering(ctx: mlir.LoweringRuleContext, platform: str) -> Target:
    """The target of a lowering rule for a platform; see the top of this file."""
    abstract = next((d for d in _abstract_devices(ctx) if _is_of(d, platform)), None)
    for device in _devices(ctx, platform):
        if abstract is None or device.device_kind == abstract.device_kind:
            return of_device(device, platform)
    return Target(platform) if abstract is None else of_device(abstract, platform)


@contextlib.contextmanager
def as_seen_by_pallas(target: Target) -> Iterator[None]:
    """Lowers the kernels inside this context for the target.

    Pallas reads the device from the abstract mesh, or else takes the default device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    seen = mesh.abstract_device or get_default_device()
    same = seen.device_kind == target.kind and _is_of(seen, target.platform)
    if same or target.kind is None or target.platform not in ("cuda", "tpu"):
        yield
        return
    platform = "gpu" if target.platform == "cuda" else target.platform
    device = jax.sharding.AbstractDevice(device_kind=target.kind, num_cores=target.cores, platform=platform)
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def _is_of(device: typing.Any, platform: str) -> bool:
    return _platform(device) == platform


def _abstract_devices(ctx: mlir.LoweringRuleContext) -> Iterator[typing.Any]:
    """The devices that the meshes name, in the order of the table at the top."""
    meshes: list[typing.Any] = [jax.sharding.get_abstract_mesh()]
    meshes.append(getattr(ctx.module_context.axis_context, "mesh", None))
    meshes.append(getattr(ctx.module_context.axis_context, "abstract_mesh", None))
    meshes += [getattr(getattr(aval, "sharding", None), "mesh", None) for aval in ctx.avals_in]
    for mesh in meshes:
        if isinstance(mesh, jax.sharding.Mesh):
            mesh = mesh.abstract_mesh
        device = getattr(mesh, "abstract_device", None)
        if device is not None:
            yield device


def _devices(ctx: mlir.LoweringRuleContext, platform: str) -> Iterator[typing.Any]:
    """Devices of the platform that the module may be lowered for, the likeliest first."""
    module = ctx.module_context
    client = getattr(module, "backend", None)
    found = [*(getattr(module.axis_context, "device_assignment", None) or ())]
    found += client.devices() if client is not None else []
    for device in (*found, *_local_devices(platform)):
        if _is_of(device, platform):
            yield device


def _local_devices(platform: str) -> list[typing.Any]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # this process has no device of the platform
        return []
