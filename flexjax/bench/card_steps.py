"""Clocks of a step of each kernel on each card, from their machine code, and the tiles of the kernels: rows of data for card_model.py.

`STEPS` is what tools/sass_clocks.py prints. The tiles are those that the kernels' own choice takes at head dims 64 and 128;
tests/bench/test_card_model.py compares them.
"""

import typing


class Step(typing.NamedTuple):
    """The loop of a kernel, for all warpgroups that an SM holds.

    plain, masked   clocks of a step without and with a mask
    rows            rows of a work item: queries, or keys of a fused or dK/dV kernel
    columns         tokens of a visited tile
    slots           work items that an SM runs at the same time
    """

    plain: float
    masked: float
    rows: int
    columns: int
    slots: int = 1


STEPS: dict[str, tuple[float, float]] = {
    "B200 tcgen05 full d64": (
        3211,
        3211,
    ),  # alu 752, fma 296, issue 1134, mufu 2624, shared 320, tmem 640, tensor 1024, chain 3034
    "B200 tcgen05 full d128": (
        3805,
        3805,
    ),  # alu 880, fma 296, issue 1218, mufu 2624, shared 576, tmem 896, tensor 2048, chain 3805
    "B200 tcgen05 causal d64": (
        3196,
        4291,
    ),  # alu 748, fma 296, issue 1134, mufu 2624, shared 320, tmem 640, tensor 1024, chain 3091
    "B200 tcgen05 causal d128": (
        3817,
        4535,
    ),  # alu 876, fma 296, issue 1218, mufu 2624, shared 576, tmem 896, tensor 2048, chain 3817
    "Hopper wgmma full d64": (2229, 2229),  # alu 492, fma 408, issue 1188, mufu 1968, shared 1264, tensor 1536
    "Hopper wgmma full d64 fused": (3336, 3336),  # alu 364, fma 396, issue 1378, mufu 1536, shared 3336, tensor 2560
    "Hopper wgmma full d128": (2062, 2062),  # alu 332, fma 270, issue 808, mufu 1312, shared 1824, tensor 2048
    "Hopper wgmma full d128 fused": (3200, 3200),  # alu 268, fma 202, issue 974, mufu 768, shared 3200, tensor 2560
    "Hopper wgmma causal d64": (2075, 2188),  # alu 312, fma 344, issue 832, mufu 1312, shared 928, tensor 1024
    "Hopper wgmma causal d64 fused": (3868, 3868),  # alu 868, fma 402, issue 1672, mufu 1536, shared 3400, tensor 2560
    "Hopper wgmma causal d128": (2120, 2104),  # alu 308, fma 282, issue 812, mufu 1312, shared 1824, tensor 2048
    "Hopper wgmma causal d128 fused": (3208, 3208),  # alu 532, fma 210, issue 1134, mufu 768, shared 3208, tensor 2560
    "Hopper mma full d64": (2688, 2688),  # alu 408, fma 316, issue 1190, mufu 1344, shared 1600, tensor 1536
    "Hopper mma full d64 dq": (3000, 3000),  # alu 124, fma 398, issue 1264, mufu 1280, shared 2304, tensor 2304
    "Hopper mma full d64 dkv": (2327, 2327),  # alu 136, fma 210, issue 890, mufu 768, shared 1856, tensor 1536
    "Hopper mma full d128": (4266, 4266),  # alu 416, fma 316, issue 1534, mufu 1344, shared 3144, tensor 3072
    "Hopper mma full d128 dq": (3072, 3072),  # alu 128, fma 212, issue 1010, mufu 640, shared 3072, tensor 2304
    "Hopper mma full d128 dkv": (5272, 5272),  # alu 164, fma 214, issue 1408, mufu 768, shared 5272, tensor 3072
    "Hopper mma causal d64": (2698, 3058),  # alu 420, fma 324, issue 1246, mufu 1344, shared 1616, tensor 1536
    "Hopper mma causal d64 dq": (3083, 2994),  # alu 144, fma 430, issue 1320, mufu 1280, shared 2328, tensor 2304
    "Hopper mma causal d64 dkv": (2431, 2348),  # alu 188, fma 240, issue 942, mufu 768, shared 1880, tensor 1536
    "Hopper mma causal d128": (4236, 4885),  # alu 432, fma 324, issue 1590, mufu 1344, shared 3152, tensor 3072
    "Hopper mma causal d128 dq": (3261, 3718),  # alu 148, fma 240, issue 1064, mufu 640, shared 3096, tensor 2304
    "Hopper mma causal d128 dkv": (5304, 5296),  # alu 160, fma 216, issue 1460, mufu 768, shared 5304, tensor 3072
    "A100 mma full d64": (3167, 3167),  # alu 484, fma 640, issue 1140, mufu 1344, shared 1648, tensor 2048
    "A100 mma full d64 dq": (3317, 3317),  # alu 220, fma 788, issue 1230, mufu 1280, shared 2328, tensor 3072
    "A100 mma full d64 dkv": (2638, 2638),  # alu 168, fma 412, issue 840, mufu 768, shared 1880, tensor 2048
    "A100 mma full d128": (5383, 5383),  # alu 480, fma 628, issue 1500, mufu 1344, shared 3200, tensor 4096
    "A100 mma full d128 dq": (3549, 3549),  # alu 128, fma 400, issue 920, mufu 640, shared 3096, tensor 3072
    "A100 mma full d128 dkv": (5272, 5272),  # alu 272, fma 436, issue 1338, mufu 768, shared 5272, tensor 4096
    "A100 mma causal d64": (3115, 2802),  # alu 504, fma 684, issue 1176, mufu 1344, shared 1664, tensor 2048
    "A100 mma causal d64 dq": (3431, 3460),  # alu 212, fma 816, issue 1308, mufu 1280, shared 2352, tensor 3072
    "A100 mma causal d64 dkv": (2785, 2678),  # alu 192, fma 436, issue 920, mufu 768, shared 1904, tensor 2048
    "A100 mma causal d128": (5497, 5168),  # alu 564, fma 676, issue 1550, mufu 1344, shared 3232, tensor 4096
    "A100 mma causal d128 dq": (3386, 3586),  # alu 128, fma 432, issue 1008, mufu 640, shared 3120, tensor 3072
    "A100 mma causal d128 dkv": (5296, 5328),  # alu 252, fma 456, issue 1410, mufu 768, shared 5296, tensor 4096
    "L40S mma full d64": (4640, 4640),  # alu 484, fma 320, issue 1140, mufu 1344, shared 1648, tensor 4096
    "L40S mma full d64 dq": (3166, 3166),  # alu 168, fma 208, issue 704, mufu 640, shared 2072, tensor 3072
    "L40S mma full d64 dkv": (4096, 4096),  # alu 220, fma 214, issue 908, mufu 768, shared 2712, tensor 4096
    "L40S mma full d128": (4188, 4188),  # alu 300, fma 180, issue 826, mufu 704, shared 1904, tensor 4096
    "L40S mma full d128 dq": (3154, 3154),  # alu 156, fma 108, issue 564, mufu 320, shared 2328, tensor 3072
    "L40S mma full d128 dkv": (4149, 4149),  # alu 208, fma 122, issue 742, mufu 384, shared 2904, tensor 4096
    "L40S mma causal d64": (4533, 4231),  # alu 504, fma 342, issue 1176, mufu 1344, shared 1664, tensor 4096
    "L40S mma causal d64 dq": (3136, 3159),  # alu 200, fma 232, issue 758, mufu 640, shared 2096, tensor 3072
    "L40S mma causal d64 dkv": (4102, 4096),  # alu 252, fma 236, issue 950, mufu 768, shared 2736, tensor 4096
    "L40S mma causal d128": (4238, 4355),  # alu 332, fma 188, issue 854, mufu 704, shared 1920, tensor 4096
    "L40S mma causal d128 dq": (3222, 3270),  # alu 188, fma 134, issue 620, mufu 320, shared 2352, tensor 3072
    "L40S mma causal d128 dkv": (4159, 4379),  # alu 244, fma 136, issue 782, mufu 384, shared 2928, tensor 4096
    "RTX 4090 mma full d64": (8575, 8575),  # alu 484, fma 320, issue 1140, mufu 1344, shared 1648, tensor 8192
    "RTX 4090 mma full d64 dq": (6146, 6146),  # alu 168, fma 208, issue 704, mufu 640, shared 2072, tensor 6144
    "RTX 4090 mma full d64 dkv": (8196, 8196),  # alu 220, fma 214, issue 908, mufu 768, shared 2712, tensor 8192
    "RTX 4090 mma full d128": (8308, 8308),  # alu 300, fma 180, issue 826, mufu 704, shared 1904, tensor 8192
    "RTX 4090 mma full d128 dq": (6144, 6144),  # alu 156, fma 108, issue 564, mufu 320, shared 2328, tensor 6144
    "RTX 4090 mma full d128 dkv": (8204, 8204),  # alu 208, fma 122, issue 742, mufu 384, shared 2904, tensor 8192
    "RTX 4090 mma causal d64": (8288, 8566),  # alu 504, fma 342, issue 1176, mufu 1344, shared 1664, tensor 8192
    "RTX 4090 mma causal d64 dq": (6155, 6144),  # alu 200, fma 232, issue 758, mufu 640, shared 2096, tensor 6144
    "RTX 4090 mma causal d64 dkv": (8192, 8192),  # alu 252, fma 236, issue 950, mufu 768, shared 2736, tensor 8192
    "RTX 4090 mma causal d128": (8290, 8272),  # alu 332, fma 188, issue 854, mufu 704, shared 1920, tensor 8192
    "RTX 4090 mma causal d128 dq": (6259, 6184),  # alu 188, fma 134, issue 620, mufu 320, shared 2352, tensor 6144
    "RTX 4090 mma causal d128 dkv": (8192, 8217),  # alu 244, fma 136, issue 782, mufu 384, shared 2928, tensor 8192
    "RTX 5090 mma full d64": (8192, 8192),  # alu 1064, fma 288, issue 1642, mufu 1344, shared 1600, tensor 8192
    "RTX 5090 mma full d64 dq": (6162, 6162),  # alu 660, fma 200, issue 1100, mufu 640, shared 2072, tensor 6144
    "RTX 5090 mma full d64 dkv": (8319, 8319),  # alu 848, fma 200, issue 1394, mufu 768, shared 2712, tensor 8192
    "RTX 5090 mma full d128": (8224, 8224),  # alu 1400, fma 152, issue 1622, mufu 704, shared 1880, tensor 8192
    "RTX 5090 mma full d128 dq": (6168, 6168),  # alu 892, fma 104, issue 1094, mufu 320, shared 2328, tensor 6144
    "RTX 5090 mma full d128 dkv": (8218, 8218),  # alu 1164, fma 104, issue 1380, mufu 384, shared 2904, tensor 8192
    "RTX 5090 mma causal d64": (8802, 8452),  # alu 1180, fma 298, issue 1708, mufu 1344, shared 1616, tensor 8192
    "RTX 5090 mma causal d64 dq": (6176, 6184),  # alu 672, fma 208, issue 1126, mufu 640, shared 2096, tensor 6144
    "RTX 5090 mma causal d64 dkv": (8192, 8218),  # alu 916, fma 208, issue 1432, mufu 768, shared 2736, tensor 8192
    "RTX 5090 mma causal d128": (8356, 8404),  # alu 1188, fma 162, issue 1514, mufu 704, shared 1872, tensor 8192
    "RTX 5090 mma causal d128 dq": (6144, 6168),  # alu 972, fma 112, issue 1160, mufu 320, shared 2352, tensor 6144
    "RTX 5090 mma causal d128 dkv": (8386, 8192),  # alu 1468, fma 112, issue 1552, mufu 384, shared 2928, tensor 8192
}
"""Kernel of tools/sass_clocks.py -> clocks of a step without and with a mask; written by that tool, 2026-11-23, jax 0.11.2."""
FAMILIES = {"8.0": "A100", "8.9": "L40S", "9.0": "Hopper", "10.0": "B200", "12.0": "RTX 5090"}
"""Compute capability -> the cards of STEPS; "RTX 4090" is one of its own."""


def step_of(family: str, instruction: str, mask: str, dim: int, kernel: str) -> Step | None:
    """A kernel's loop with its tile; None where STEPS has none.

    family        card of STEPS
    instruction   "wgmma", "mma" or "tcgen05"
    mask          "full", or any other for masked tiles too
    dim           head dim
    kernel        "" forward, "fused", or "dq" and "dkv"

    The tiles are those that choose_kernel.py takes at head dims 64 and 128.
    """
    masked = "full" if mask == "full" else "causal"
    found = STEPS.get(" ".join([family, instruction, masked, f"d{dim}", *([kernel] if kernel else [])]))
    if found is None:
        return None
    if instruction == "wgmma":
        if kernel == "fused":
            return Step(*found, rows=128, columns=128 if dim == 64 else 64)
        return Step(*found, rows=192 if (masked, dim) == ("full", 64) else 128, columns=128)
    if instruction == "tcgen05":
        return Step(*found, rows=256, columns=128)
    columns, slots = (SMALL_TILES if family in SMALL_CARDS else TILES)[kernel, dim]
    return Step(*found, rows=128, columns=columns, slots=slots)


TILES = {
    ("", 64): (64, 2),
    ("", 128): (64, 2),
    ("dq", 64): (64, 2),
    ("dq", 128): (32, 2),
    ("dkv", 64): (32, 2),
    ("dkv", 128): (64, 1),
}
"""Of the kernels on mma.sync, all with 128 rows a CTA: (kernel, head dim) -> visited tokens and CTAs of an SM."""
SMALL_TILES = {
    ("", 64): (64, 2),
    ("", 128): (32, 2),
    ("dq", 64): (64, 1),
    ("dq", 128): (32, 1),
    ("dkv", 64): (64, 1),
    ("dkv", 128): (32, 1),
}
"""The same on SMALL_CARDS, with 99 KB of shared memory."""
SMALL_CARDS = ("L40S", "RTX 4090", "RTX 5090")
