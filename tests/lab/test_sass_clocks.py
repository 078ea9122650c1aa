"""The simulator of a kernel's loop, on a few lines of SASS whose clocks are known."""

import pytest

from lab import sass_clocks, sass_code
from lab.sass_clocks import UNITS


def lines(*rows: str) -> str:
    """SASS with control words: "waits:reads:writes:yield:stall" and the instruction, or a label."""
    text, address = [], 0
    for row in rows:
        if row.startswith("."):
            text.append(f"{row}:")
            continue
        control, instruction = row.split(" ", 1)
        text.append(f"   {control}        /*{address:04x}*/                   {instruction} ")
        address += 16
    return "\n".join(text)


def body(*rows: str) -> list[sass_code.Instruction]:
    return sass_code.read(lines(*rows))[0]


def step(*rows: str, warps: int = 1, card: str = "Hopper", copied: int = 0) -> float:
    return sass_clocks.simulate(body(*rows), UNITS[card], warps, copied).step


def test_control_words_are_read():
    code, labels = sass_code.read(
        lines("-:-:1:Y:02 MUFU.EX2 R1, R2", ".L_x_7", "0x1e:3:-:-:12 @!P0 FADD R1, R1, R2", "2&1:-:-:Y:01 EXIT")
    )
    assert [x.name for x in code] == ["MUFU", "FADD", "EXIT"]
    assert (code[0].writes, code[0].stall) == (1, 2)
    assert (code[1].waits, code[1].reads, code[1].stall) == ((1, 2, 3, 4), 3, 12)
    assert code[2].waits == (2, 1)
    assert labels == {"L_x_7": 1}


def test_units_bound_a_step():
    ex2 = ["-:-:-:Y:01 MUFU.EX2 R1, R2"] * 64
    assert step(*ex2) == pytest.approx(64 * 8)
    assert step(*ex2, warps=2) == pytest.approx(2 * 64 * 8)
    assert step(*["-:-:-:Y:01 FMNMX R1, R2, R3, PT"] * 64) == pytest.approx(64 * 2)
    assert step(*["-:-:-:Y:01 FFMA R1, R2, R3, R4"] * 64, card="A100") == pytest.approx(64 * 2)
    assert step(*["-:-:-:Y:01 F2FP.BF16.F32.PACK_AB R1, R2, R3"] * 64) == pytest.approx(64 * 2)
    assert step(*["-:-:-:Y:06 HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 64, card="A100") == pytest.approx(64 * 8)
    assert step("-:-:-:Y:04 FADD R1, R1, R2", copied=128 * 1000) == 1000
    kept = sass_clocks.simulate(body(*ex2), UNITS["Hopper"], 2)
    assert kept.units == dict(issue=128.0, mufu=1024.0, shared=0.0)


def test_a_warp_waits_for_its_results_and_another_one_uses_the_time():
    chain = ["-:-:0:Y:01 MUFU.EX2 R1, R1", "0:-:-:Y:04 FADD R1, R1, R2"]
    alone = step(*chain)
    latency = sass_clocks.LATENCIES["mufu"]
    assert alone == 8 + latency + 4
    assert step(*chain * 60, warps=2) == pytest.approx(60 * alone, rel=0.15)  # as many steps of both


def test_products_of_warpgroups_run_beside_the_warp():
    product = ["-:-:-:Y:01 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"] * 7
    product += ["-:-:-:Y:01 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"]
    wait = ["-:-:-:Y:02 WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    work = ["-:-:-:Y:01 FFMA R1, R2, R3, R4"] * 200
    latency, contention = sass_clocks.LATENCIES["wgmma"], UNITS["Hopper"].contention
    assert step(*product, *wait, *work) == pytest.approx(8 * 64 + 200 + latency, abs=15)
    beside = step(*product, *work, *wait)
    assert beside == pytest.approx(8 * 64 + 200 * contention + latency, abs=15)  # each delays the products
    both = step(*product, *wait, *work, warps=2)
    assert both == pytest.approx(2 * (8 * 64 + 200 * contention), rel=0.1)
    from_registers = sass_clocks.unit_of(
        body("-:-:-:Y:01 HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88")[0], UNITS["Hopper"]
    )
    assert (from_registers.clocks, from_registers.shared) == (32, 16)


def test_the_loop_is_found_and_what_is_rare_left_out():
    rescale = ["-:-:-:Y:01 FMUL R1, R1, R2"] * 20
    code, labels = sass_code.read(
        lines(
            "-:-:-:Y:01 MOV R1, R2", ".L_x_1", "-:-:-:Y:06 HMMA.16816.F32.BF16 R4, R8, R12, R4", "-:-:-:Y:05 @!P1 BRA `(.L_x_2)",
            *rescale, ".L_x_2", "-:-:-:Y:01 FADD R1, R1, R2", "-:-:-:Y:05 @P0 BRA `(.L_x_1)", "-:-:-:Y:05 EXIT", ".L_x_3",
            "-:-:-:Y:05 BRA `(.L_x_1)",
        )
    )  # fmt: skip
    assert sass_code.step_loops(code, labels) == [(1, 24)]
    kept = sass_code.without_rare(code, labels, (1, 24))
    assert [x.name for x in kept] == ["HMMA", "BRA", "FADD", "BRA"]


def test_softmax_warps_of_tcgen05_have_a_loop_without_products():
    code, labels = sass_code.read(
        lines(".L_x_1", *["-:-:-:Y:01 MUFU.EX2 R1, R2"] * 16, "-:-:-:Y:05 @P0 BRA `(.L_x_1)", "-:-:-:Y:05 EXIT")
    )
    assert sass_code.step_loops(code, labels) == [(0, 16)]
    load = sass_clocks.unit_of(body("-:-:0:Y:01 LDTM.16dp256bit.x4 R4, tmem[UR4]")[0], UNITS["B200"])
    assert (load.unit, load.clocks) == ("tmem", 16)  # 2 KB at 128 bytes a clock
