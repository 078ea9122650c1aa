"""Compiles for NVIDIA cards other than Hopper on a machine without a GPU; one process compiles for one of them.

Needs the wheels that compile_hopper.py names. The descriptions have what the compilers read: compute capability and limits.
"""

import typing

import jax
from jax.experimental import topologies

SPECIFICATION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {sm_memory}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.5
  device_memory_size: 40000000000
  shared_memory_per_block_optin: {cta_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


class Described(typing.NamedTuple):
    """A card: its name, compute capability, SMs, threads of an SM, bytes of shared memory of an SM and of a CTA."""

    name: str
    capability: str
    cores: int
    threads: int
    sm_memory: int
    cta_memory: int


CARDS = {
    "sm_80": Described("NVIDIA A100-SXM4-80GB", "8.0", 108, 2048, 167936, 166912),
    "sm_86": Described("NVIDIA A10", "8.6", 72, 1536, 102400, 101376),
    "sm_89": Described("NVIDIA L40S", "8.9", 142, 1536, 102400, 101376),
    "sm_90": Described("NVIDIA H100 80GB HBM3", "9.0", 132, 2048, 233472, 232448),
    "sm_100": Described("NVIDIA B200", "10.0", 148, 2048, 233472, 232448),
    "sm_103": Described("NVIDIA B300", "10.3", 148, 2048, 233472, 232448),
    "sm_120": Described("NVIDIA GeForce RTX 5090", "12.0", 170, 1536, 102400, 101376),
}


def topology(card: str) -> typing.Any:
    """One GPU that is not there; `card` a key of CARDS."""
    d = CARDS[card]
    major, minor = d.capability.split(".")
    extension = "NONE" if int(major) < 9 else "ACCELERATED_FEATURES"
    text = SPECIFICATION.format(**d._asdict(), major=major, minor=minor, extension=extension)
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")


def compile_for(card: str, function: typing.Callable, *args: typing.Any) -> typing.Any:
    """The function compiled for one GPU at the shapes of `args`."""
    mesh = topologies.make_mesh(topo=topology(card), mesh_shape=(1,), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    return jax.jit(function).lower(*args).compile()
