"""The device that a program is lowered for, and how lowering rules find it.

jax tells a lowering rule only the platform: it lowers a primitive once for each platform that was asked for. The device
of that platform is looked up in these places, in this order:

    the mesh of the trace                 a mesh of devices or of a topology; an abstract mesh with an AbstractDevice
    the axis context of the module        the mesh of a shard_map
    the avals of the operands             arrays that are sharded over a mesh with explicit axes
    the client of the module              devices at hand, or those of a topology that arguments are placed on
    the devices of this process           an export for several platforms has no client

If none of them has a device of the platform, as in an export for "cuda" on a machine without a GPU, `kind` is None. jax
lowers a program once for all devices of a client, so they are taken to be of one kind, the first device's.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence

import jax
from jax.extend.backend import get_default_device
from jax.interpreters import mlir

from flexjax.types import KernelOptions

Device = jax.Device | jax.sharding.AbstractDevice
"""A device of this process or of a topology, or a description of one."""

# Compute capability -> names of devices that have it, because an AbstractDevice has a name and no capability.
KINDS = {
    "8.0": re.compile(r"\bA(30|100|800)\b"),
    "8.6": re.compile(r"\bA(2|10|16|40)G?\b|\bRTX A\d{4}\b|\bRTX 30\d0\b"),
    "8.9": re.compile(r"\bL(4|40|40S|20)\b|\bRTX 40\d0\b|\bAda\b"),
    "9.0": re.compile(r"\bG?H(20|100|200|800)\b"),
    "10.0": re.compile(r"\bG?B200\b"),
    "10.3": re.compile(r"\bG?B300\b"),
    "12.0": re.compile(r"\bRTX 50\d0\b|\bRTX PRO \d{4}\b"),
    "12.1": re.compile(r"\bGB10\b"),
}


@dataclasses.dataclass(frozen=True)
class DescribedDevice(jax.sharding.AbstractDevice):
    """A GPU that is not there, with the compute capability that Mosaic compiles for, such as "9.0"."""

    compute_capability: str


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a pass is lowered for, or what is known of it; None where it is not known."""

    platform: str  # as lowering rules are registered: "cpu", "cuda", "rocm", "tpu" or the name of a plugin
    kind: str | None = None  # jax's device_kind, e.g. "NVIDIA H200" or "TPU v6 lite"
    capability: str | None = None  # compute capability of an NVIDIA GPU, e.g. "9.0", or e.g. "gfx942" of an AMD GPU
    cores: int | None = None  # SMs of a GPU, TensorCores of a TPU
    # XLA's partitioner splits the program over several such devices, and has no rule for what is lowered here
    automatic: bool = False

    @property
    def name(self) -> str:
        """The device in error messages."""
        return self.kind or f"an unknown device of the platform {self.platform}"


def of_device(device: Device, platform: str | None = None) -> Target:
    """`platform` is that of the lowering rule, if known, because `device.platform` is "gpu" for both CUDA and ROCm."""
    kind = device.device_kind
    capability = getattr(device, "compute_capability", None)
    if platform is None:
        platform = _platform(device)
    if capability is None and platform == "cuda":
        capability = next((number for number, names in KINDS.items() if names.search(kind)), None)
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return Target(platform, kind, capability, cores)


def _platform(device: Device) -> str:
    """ "cuda" or "rocm" for a GPU, else `device.platform`."""
    if device.platform != "gpu":
        return device.platform
    is_rocm = str(getattr(device, "compute_capability", "")).startswith("gfx") or device.device_kind.startswith("AMD")
    return "rocm" if is_rocm else "cuda"


def known_device(target: Target | None, options: KernelOptions) -> Target | None:
    """The target where kernels run on a device of known kind; None in the simulator, and where it is not known."""
    return None if options.interpret or target is None or target.kind is None else target


def default() -> Target:
    """Of jax's default device, on which a call outside of jit runs if its arrays were not placed."""
    return of_device(get_default_device())


def of_platform(platform: str) -> Target:
    """Of this process's first device of a platform; without one all but `platform` is unknown, and "gpu" is "cuda"."""
    found = _local_devices(platform)
    if found:
        return of_device(found[0])
    return Target("cuda" if platform == "gpu" else platform)


def of_lowering(ctx: mlir.LoweringRuleContext, platform: str) -> Target:
    """Looked up in the places that the top of this file lists, for a rule that is registered for `platform`."""
    # A device at hand of the kind that a mesh names describes it, because it knows more.
    abstract = next((d for d in _abstract_devices(ctx) if _is_of(d, platform)), None)
    for device in _devices(ctx, platform):
        if abstract is None or device.device_kind == abstract.device_kind:
            return of_device(device, platform)
    return Target(platform) if abstract is None else of_device(abstract, platform)


@contextlib.contextmanager
def as_seen_by_pallas(target: Target) -> Iterator[None]:
    """A context in which Pallas lowers kernels for the target, which need not be a device of this process.

    Pallas lowers for the AbstractDevice of the abstract mesh, or else for the default device, so the context sets that
    AbstractDevice, unless Pallas sees such a device anyway or the kind of the target is unknown.
    """
    mesh = jax.sharding.get_abstract_mesh()
    seen = mesh.abstract_device or get_default_device()
    same = seen.device_kind == target.kind and _is_of(seen, target.platform)
    if (
        target.platform == "cuda" and target.capability is not None
    ):  # Mosaic takes a device that does not say for Hopper
        same = same and getattr(seen, "compute_capability", "9.0") == target.capability
    if same or target.kind is None or target.platform not in ("cuda", "tpu"):
        yield
        return
    platform = "gpu" if target.platform == "cuda" else target.platform
    device = DescribedDevice(target.kind, target.cores, platform, target.capability or "9.0")
    if platform == "tpu":
        device = jax.sharding.AbstractDevice(device_kind=target.kind, num_cores=target.cores, platform=platform)
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def _is_of(device: Device, platform: str) -> bool:
    return _platform(device) == platform


def _abstract_devices(ctx: mlir.LoweringRuleContext) -> Iterator[Device]:
    """The devices that meshes name, of any platform: the mesh of the trace, of a shard_map, of the operands' avals."""
    around = ctx.module_context.axis_context
    meshes: list[object] = [jax.sharding.get_abstract_mesh()]
    meshes += [getattr(around, "mesh", None), getattr(around, "abstract_mesh", None)]
    meshes += [getattr(getattr(aval, "sharding", None), "mesh", None) for aval in ctx.avals_in]
    for mesh in meshes:
        if isinstance(mesh, jax.sharding.Mesh):
            mesh = mesh.abstract_mesh
        device = getattr(mesh, "abstract_device", None)
        if device is not None:
            yield device


def _devices(ctx: mlir.LoweringRuleContext, platform: str) -> Iterator[Device]:
    """Those that the module is assigned to, those of its client, those of this process; a device may come twice."""
    module = ctx.module_context
    client = getattr(module, "backend", None)
    found: list[Device] = [*(getattr(module.axis_context, "device_assignment", None) or ())]
    found += client.devices() if client is not None else []
    for device in (*found, *_local_devices(platform)):
        if _is_of(device, platform):
            yield device


def _local_devices(platform: str) -> Sequence[Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:
        return []
