"""Clocks of a step of each kernel on each card, from their machine code, and the tiles of the kernels: rows of data for card_model.py.

`STEPS` is what lab/sass_clocks.py prints. The tiles are those that the kernels' own choice takes at head dims 64 and 128;
tests/lab/test_card_model.py compares them.
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
    "Hopper wgmma full d64": (2958, 2958),  # alu 684, fma 408, issue 1188, mufu 1584, shared 1264, tensor 1536
    "Hopper wgmma full d64 fused": (3763, 3763),  # alu 620, fma 396, issue 1378, mufu 1024, shared 3336, tensor 2560
    "Hopper wgmma full d128": (2996, 2996),  # alu 460, fma 270, issue 808, mufu 1056, shared 1824, tensor 2048
    "Hopper wgmma full d128 fused": (3200, 3200),  # alu 396, fma 202, issue 974, mufu 512, shared 3200, tensor 2560
    "Hopper wgmma causal d64": (2230, 2602),  # alu 440, fma 344, issue 832, mufu 1056, shared 928, tensor 1024
    "Hopper wgmma causal d64 fused": (4199, 4199),  # alu 1124, fma 402, issue 1672, mufu 1024, shared 3400, tensor 2560
    "Hopper wgmma causal d128": (2996, 3392),  # alu 436, fma 282, issue 812, mufu 1056, shared 1824, tensor 2048
    "Hopper wgmma causal d128 fused": (3408, 3408),  # alu 660, fma 210, issue 1134, mufu 512, shared 3208, tensor 2560
    "Hopper wgmma full d64 tangent": (3765, 3765),  # alu 428, fma 582, issue 1272, mufu 1024, shared 2176, tensor 2560
    "Hopper wgmma full d128 tangent": (
        3203,
        3203,
    ),  # of 128 x 64; alu 200, fma 312, issue 828, mufu 512, shared 2560, tensor 2560
    "Hopper wgmma causal d64 tangent": (
        3745,
        4120,
    ),  # alu 452, fma 556, issue 1274, mufu 1024, shared 2176, tensor 2560
    "Hopper wgmma causal d128 tangent": (
        3200,
        3415,
    ),  # of 128 x 64; alu 204, fma 308, issue 828, mufu 512, shared 2560, tensor 2560
    "B200 tcgen05 full d64": (
        2653,
        2653,
    ),  # alu 1188, fma 784, issue 1648, mufu 1600, shared 320, tmem 640, tensor 1024, chain 2653
    "B200 tcgen05 full d128": (
        3367,
        3367,
    ),  # alu 1304, fma 790, issue 1732, mufu 1600, shared 576, tmem 896, tensor 2048, chain 3367
    "B200 tcgen05 causal d64": (
        2657,
        3338,
    ),  # alu 1216, fma 762, issue 1650, mufu 1600, shared 320, tmem 640, tensor 1024, chain 2657
    "B200 tcgen05 causal d128": (
        3395,
        3910,
    ),  # alu 1312, fma 784, issue 1732, mufu 1600, shared 576, tmem 896, tensor 2048, chain 3395
    "B200 tcgen05 full d64 dq": (1546, 1546),  # alu 548, fma 6, issue 470, mufu 1024, shared 1160, tensor 768, tmem 320
    "B200 tcgen05 full d64 dkv": (
        1637,
        1637,
    ),  # alu 688, fma 10, issue 608, mufu 1024, shared 1416, tensor 1024, tmem 384
    "B200 tcgen05 full d128 dq": (
        2312,
        2312,
    ),  # alu 548, fma 6, issue 470, mufu 1024, shared 2312, tensor 1536, tmem 320
    "B200 tcgen05 full d128 dkv": (
        2696,
        2696,
    ),  # alu 688, fma 10, issue 608, mufu 1024, shared 2696, tensor 2048, tmem 384
    "B200 tcgen05 full d128 dkv pairs": (2304, 2304),  # alu 704, mufu 1024, shared 2184, tensor 2048, tmem 384
    "B200 tcgen05 causal d64 dq": (
        1542,
        1966,
    ),  # alu 584, fma 28, issue 512, mufu 1024, shared 1184, tensor 768, tmem 320
    "B200 tcgen05 causal d64 dkv": (
        1654,
        1767,
    ),  # alu 748, fma 28, issue 636, mufu 1024, shared 1440, tensor 1024, tmem 384
    "B200 tcgen05 causal d128 dq": (
        2336,
        2336,
    ),  # alu 584, fma 28, issue 512, mufu 1024, shared 2336, tensor 1536, tmem 320
    "B200 tcgen05 causal d128 dkv": (
        2720,
        2720,
    ),  # alu 748, fma 28, issue 636, mufu 1024, shared 2720, tensor 2048, tmem 384
    "B200 tcgen05 causal d128 dkv pairs": (2304, 2304),  # alu 764, mufu 1024, shared 2208, tensor 2048, tmem 384
    "Hopper mma full d64": (2948, 2948),  # alu 536, fma 316, issue 1190, mufu 1088, shared 1600, tensor 2048
    "Hopper mma full d64 dq": (3505, 3505),  # alu 252, fma 398, issue 1264, mufu 1024, shared 2304, tensor 3072
    "Hopper mma full d64 dkv": (2600, 2600),  # alu 264, fma 210, issue 890, mufu 512, shared 1856, tensor 2048
    "Hopper mma full d128": (4800, 4800),  # alu 544, fma 316, issue 1534, mufu 1088, shared 3144, tensor 4096
    "Hopper mma full d128 dq": (3313, 3313),  # alu 192, fma 212, issue 1010, mufu 512, shared 3072, tensor 3072
    "Hopper mma full d128 dkv": (5272, 5272),  # alu 292, fma 214, issue 1408, mufu 512, shared 5272, tensor 4096
    "Hopper mma causal d64": (3053, 3269),  # alu 548, fma 324, issue 1246, mufu 1088, shared 1616, tensor 2048
    "Hopper mma causal d64 dq": (3515, 3572),  # alu 272, fma 430, issue 1320, mufu 1024, shared 2328, tensor 3072
    "Hopper mma causal d64 dkv": (2676, 2715),  # alu 316, fma 240, issue 942, mufu 512, shared 1880, tensor 2048
    "Hopper mma causal d128": (5180, 4959),  # alu 560, fma 324, issue 1590, mufu 1088, shared 3152, tensor 4096
    "Hopper mma causal d128 dq": (3658, 3838),  # alu 212, fma 240, issue 1064, mufu 512, shared 3096, tensor 3072
    "Hopper mma causal d128 dkv": (5304, 5296),  # alu 288, fma 216, issue 1460, mufu 512, shared 5304, tensor 4096
    "A100 mma full d64": (3142, 3142),  # alu 612, fma 640, issue 1140, mufu 1088, shared 1648, tensor 2048
    "A100 mma full d64 dq": (3323, 3323),  # alu 348, fma 788, issue 1230, mufu 1024, shared 2328, tensor 3072
    "A100 mma full d64 dkv": (2764, 2764),  # alu 296, fma 412, issue 840, mufu 512, shared 1880, tensor 2048
    "A100 mma full d128": (5383, 5383),  # alu 608, fma 628, issue 1500, mufu 1088, shared 3200, tensor 4096
    "A100 mma full d128 dq": (3548, 3548),  # alu 192, fma 400, issue 920, mufu 512, shared 3096, tensor 3072
    "A100 mma full d128 dkv": (5272, 5272),  # alu 400, fma 436, issue 1338, mufu 512, shared 5272, tensor 4096
    "A100 mma causal d64": (3031, 2982),  # alu 632, fma 684, issue 1176, mufu 1088, shared 1664, tensor 2048
    "A100 mma causal d64 dq": (3351, 3505),  # alu 340, fma 816, issue 1308, mufu 1024, shared 2352, tensor 3072
    "A100 mma causal d64 dkv": (2643, 2702),  # alu 320, fma 436, issue 920, mufu 512, shared 1904, tensor 2048
    "A100 mma causal d128": (5467, 5170),  # alu 692, fma 676, issue 1550, mufu 1088, shared 3232, tensor 4096
    "A100 mma causal d128 dq": (3385, 3595),  # alu 192, fma 432, issue 1008, mufu 512, shared 3120, tensor 3072
    "A100 mma causal d128 dkv": (5296, 5328),  # alu 380, fma 456, issue 1410, mufu 512, shared 5296, tensor 4096
    "L40S mma full d64": (4647, 4647),  # alu 612, fma 320, issue 1140, mufu 1088, shared 1648, tensor 4096
    "L40S mma full d64 dq": (3166, 3166),  # alu 232, fma 208, issue 704, mufu 512, shared 2072, tensor 3072
    "L40S mma full d64 dkv": (4096, 4096),  # alu 348, fma 214, issue 908, mufu 512, shared 2712, tensor 4096
    "L40S mma full d128": (4202, 4202),  # alu 364, fma 180, issue 826, mufu 576, shared 1904, tensor 4096
    "L40S mma full d128 dq": (3154, 3154),  # alu 188, fma 108, issue 564, mufu 256, shared 2328, tensor 3072
    "L40S mma full d128 dkv": (4153, 4153),  # alu 272, fma 122, issue 742, mufu 256, shared 2904, tensor 4096
    "L40S mma causal d64": (4529, 4562),  # alu 632, fma 342, issue 1176, mufu 1088, shared 1664, tensor 4096
    "L40S mma causal d64 dq": (3172, 3318),  # alu 264, fma 232, issue 758, mufu 512, shared 2096, tensor 3072
    "L40S mma causal d64 dkv": (4101, 4096),  # alu 380, fma 236, issue 950, mufu 512, shared 2736, tensor 4096
    "L40S mma causal d128": (4240, 4279),  # alu 396, fma 188, issue 854, mufu 576, shared 1920, tensor 4096
    "L40S mma causal d128 dq": (3221, 3237),  # alu 220, fma 134, issue 620, mufu 256, shared 2352, tensor 3072
    "L40S mma causal d128 dkv": (4232, 4424),  # alu 308, fma 136, issue 782, mufu 256, shared 2928, tensor 4096
    "RTX 4090 mma full d64": (8409, 8409),  # alu 612, fma 320, issue 1140, mufu 1088, shared 1648, tensor 8192
    "RTX 4090 mma full d64 dq": (6146, 6146),  # alu 232, fma 208, issue 704, mufu 512, shared 2072, tensor 6144
    "RTX 4090 mma full d64 dkv": (8196, 8196),  # alu 348, fma 214, issue 908, mufu 512, shared 2712, tensor 8192
    "RTX 4090 mma full d128": (8429, 8429),  # alu 364, fma 180, issue 826, mufu 576, shared 1904, tensor 8192
    "RTX 4090 mma full d128 dq": (6144, 6144),  # alu 188, fma 108, issue 564, mufu 256, shared 2328, tensor 6144
    "RTX 4090 mma full d128 dkv": (8204, 8204),  # alu 272, fma 122, issue 742, mufu 256, shared 2904, tensor 8192
    "RTX 4090 mma causal d64": (8657, 8260),  # alu 632, fma 342, issue 1176, mufu 1088, shared 1664, tensor 8192
    "RTX 4090 mma causal d64 dq": (6235, 6278),  # alu 264, fma 232, issue 758, mufu 512, shared 2096, tensor 6144
    "RTX 4090 mma causal d64 dkv": (8192, 8192),  # alu 380, fma 236, issue 950, mufu 512, shared 2736, tensor 8192
    "RTX 4090 mma causal d128": (8290, 8262),  # alu 396, fma 188, issue 854, mufu 576, shared 1920, tensor 8192
    "RTX 4090 mma causal d128 dq": (6261, 6303),  # alu 220, fma 134, issue 620, mufu 256, shared 2352, tensor 6144
    "RTX 4090 mma causal d128 dkv": (8192, 8238),  # alu 308, fma 136, issue 782, mufu 256, shared 2928, tensor 8192
    "RTX 5090 mma full d64": (8368, 8368),  # alu 1192, fma 288, issue 1642, mufu 1088, shared 1600, tensor 8192
    "RTX 5090 mma full d64 dq": (6162, 6162),  # alu 724, fma 200, issue 1100, mufu 512, shared 2072, tensor 6144
    "RTX 5090 mma full d64 dkv": (8319, 8319),  # alu 976, fma 200, issue 1394, mufu 512, shared 2712, tensor 8192
    "RTX 5090 mma full d128": (8228, 8228),  # alu 1464, fma 152, issue 1622, mufu 576, shared 1880, tensor 8192
    "RTX 5090 mma full d128 dq": (6169, 6169),  # alu 924, fma 104, issue 1094, mufu 256, shared 2328, tensor 6144
    "RTX 5090 mma full d128 dkv": (8218, 8218),  # alu 1228, fma 104, issue 1380, mufu 256, shared 2904, tensor 8192
    "RTX 5090 mma causal d64": (8414, 8281),  # alu 1308, fma 298, issue 1708, mufu 1088, shared 1616, tensor 8192
    "RTX 5090 mma causal d64 dq": (6176, 6184),  # alu 736, fma 208, issue 1126, mufu 512, shared 2096, tensor 6144
    "RTX 5090 mma causal d64 dkv": (8583, 8192),  # alu 1044, fma 208, issue 1432, mufu 512, shared 2736, tensor 8192
    "RTX 5090 mma causal d128": (8328, 8400),  # alu 1252, fma 162, issue 1514, mufu 576, shared 1872, tensor 8192
    "RTX 5090 mma causal d128 dq": (6144, 6168),  # alu 1004, fma 112, issue 1160, mufu 256, shared 2352, tensor 6144
    "RTX 5090 mma causal d128 dkv": (8386, 8192),  # alu 1532, fma 112, issue 1552, mufu 256, shared 2928, tensor 8192
}
"""Kernel of lab/sass_clocks.py -> clocks of a step without and with a mask; written by that tool, 2026-11-23, jax 0.11.2."""
FAMILIES = {"8.0": "A100", "8.9": "L40S", "9.0": "Hopper", "10.0": "B200", "12.0": "RTX 5090"}
"""Compute capability -> the cards of STEPS; "RTX 4090" is one of its own."""


def step_of(family: str, instruction: str, mask: str, dim: int, kernel: str) -> Step | None:
    """A kernel's loop with its tile; None where STEPS has none.

    family        card of STEPS
    instruction   "wgmma", "mma" or "tcgen05"
    mask          "full", or any other for masked tiles too
    dim           head dim
    kernel        "" forward, "fused", or "dq" and "dkv"; "dkv pairs" for pairs of CTAs, whose rows are those of both

    The tiles are those that families/choose_kernel.py takes at head dims 64 and 128.
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
        return Step(*found, rows=128 if kernel in ("dq", "dkv") else 256, columns=128)
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
