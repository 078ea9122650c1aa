"""Writes docs/speed.md and the table of speed in README.md from the tables in lab/results/: `python3 tools/docs_speed.py`.

Each number is copied from a results file; what is written here says what a table shows, on which card, when, and by which command.
tests/docs/test_speed.py fails if the page or the table is out of date.
"""

import dataclasses
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "results"
PAGE, README, CLIENTS = ROOT / "docs" / "speed.md", ROOT / "README.md", ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin: written by tools/docs_speed.py -->", "<!-- end -->"

HEAD = """# Speed

Written by `python3 tools/docs_speed.py` from `lab/results/` of the checkout, which has more. Rows of a table are of one run on
one machine, unless the text above it says otherwise. Ratios are the time of a peer over that of flexjax: above 1 flexjax is
faster. The backward pass is both passes less the forward pass. It adds in a fixed order, so that the same inputs give the same
bits, except in columns of *any order*: `KernelOptions(deterministic=False)`, which changes long causal masks alone.

Unless the text says otherwise inputs are random normal bfloat16, batch 2 of 8192 tokens (windows and documents: 16384), with 16
heads of 128, 32 of 64 or 8 of 256; *grouped* is 32 query and 8 key heads.
"""
H200 = "One H200, jax 0.11.2"
H100 = "One H100 80 GB, jax 0.11.2"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a results file, and what a reader of the page has to know of it."""

    title: str
    file: str
    section: str  # the line of its heading
    number: int  # which table of the section, from 0
    where: str  # card, versions, date
    text: str
    command: str | None = None  # None: the indented line between the table and the one above it
    columns: tuple[int, ...] | None = None  # None: all

    def read(self) -> tuple[str, list[list[str]]]:
        """(its command, its rows of cells: the header, the alignments, the data). ValueError if one of them is missing."""
        lines = (RESULTS / self.file).read_text().splitlines()
        if lines.count(self.section) != 1:
            raise ValueError(f"{self.file} has {lines.count(self.section)} lines {self.section!r}, expected one.")
        lines = lines[lines.index(self.section) + 1 :]
        level = len(self.section.partition(" ")[0])
        ends = [i for i, line in enumerate(lines) if re.match(rf"#{{1,{level}}} ", line)]
        lines = lines[: ends[0]] if ends else lines
        inside = [line.startswith("|") for line in lines]
        starts = [i for i, here in enumerate(inside) if here and not (i and inside[i - 1])]
        if self.number >= len(starts):
            raise ValueError(
                f"{self.section!r} of {self.file} has {len(starts)} tables, asked for number {self.number}."
            )
        start = starts[self.number]
        end = next((i for i in range(start, len(lines)) if not inside[i]), len(lines))
        above = max((i + 1 for i in range(start) if inside[i]), default=0)
        commands = [line.strip() for line in lines[above:start] if line.startswith("    ")]
        if self.command is None and len(commands) != 1:
            raise ValueError(
                f"Table {self.number} of {self.section!r} in {self.file} has the commands {commands}, expected one."
            )
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[start:end]]
        if self.columns is not None:
            rows = [[row[i] for i in self.columns] for row in rows]
        return commands[0] if self.command is None else self.command, rows

    def markdown(self) -> str:
        """Its section of the page."""
        command, rows = self.read()
        said = wrapped(f"{self.where}. {self.text}")
        shown = [f"    {command}"] if command else []
        return "\n\n".join([f"### {self.title}", said, *shown, table(rows)])


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


BESIDE_FA3, ONCE_MORE = "## Beside FlashAttention-3, 2026-11-26", "### Once more at a later commit of that day"
LATEST = "## Beside FlashAttention-3, 2026-11-29"
PEERS, DECODING = "## Times beside peers", "## Decoding, 2026-11-23"
FA3 = (
    "FlashAttention-3 inside jax is dew-flash-attn-cu13 0.3.6, which adds gradients in any order here; documents are its varlen call. "
    "Milliseconds, ratios in brackets."
)
KERNEL_TIMES = "Times of the kernels themselves (CUPTI), medians of rounds in an order drawn anew. "
SUSTAINED_TIMES = (
    "Each program alone, without a pause, by the wall clock, at the clocks of a GPU that has worked for a while. "
)
SWEEP_COMMAND = "PYTHONPATH=.:FA3 python3 tools/device/time_beside_fa3.py --suite gpu-sweep --rounds 3"
SWEEP_TEXT = (
    "Causal attention at every 1024 from 1024 to 20480 tokens (16384 in all up to there), 8192 tokens with 1 to 64 heads, and 12 heads at "
    "1000, 3000, 5000 and 9999 tokens: 34 problems at each head dim, in nine processes that measured one after the other. "
    "FlashAttention-3's time over ours, times of kernels."
)
PEERS_WHERE = "torch 2.11.0 with triton 3.6.0, tokamax 0.0.17"
PEERS_TEXT = (
    "jax.nn is cuDNN, torch is FlexAttention. Milliseconds: times of kernels for the peers in jax (CUPTI, 20 calls), of ten launches back "
    "to back between events for torch (7 rounds). The run is one with `--together`: programs compile while others are measured, which makes "
    "peers slower. "
)
DECODE_TEXT = "32 query and 8 key heads of 128, one query each unless a row says otherwise; times of kernels (CUPTI), TB/s of keys and values read. "
MASKS_THAT_HIDE, MMA = (
    "## Masks that hide most entries of a block",
    "## The kernels on mma.sync, on a Hopper GPU, 2026-11-23",
)
TRITON = "## The kernels on mma.sync beside FlexAttention in Triton"

# fmt: off
SUSTAINED = Table(
    "Beside FlashAttention-3, at sustained clocks", "H200.md", LATEST, 0, f"{H200}, 2026-11-29", SUSTAINED_TIMES + FA3
)
SWEEP = Table(
    "Lengths and head counts that no other table has",
    "H200.md", BESIDE_FA3, 1, f"{H200}, 2026-11-26", SWEEP_TEXT, SWEEP_COMMAND,
)
BY_IDS = Table(
    "Documents that are known, and documents by ids of the call", "H100.md",
    "## Documents that are known, and documents by ids of the call", 0, f"{H100}, 2026-11-25",
    "12 documents of 16384 tokens, 16 heads of 128; times of kernels, medians of four rounds, FlashAttention-3's (varlen) over ours in "
    "brackets. *By ids*: the number of each token's document is an argument of the jitted call, and the lists of blocks are derived in it. "
    "The results file names no command.",
    "",
)

MAXTEXT = Table(
    "A training step of MaxText", "H200.md", "## A training step of MaxText, 2026-11-29", 0, f"{H200}, MaxText 0.2.5, 2026-11-29",
    "A Llama of 1.1 billion weights (16 layers, width 2048, 16 query and 8 key heads of 128), random tokens, gradient descent; packed: 12 documents "
    "a row. Medians by the wall clock; errors are against dot_product. cudnn_flash_jax does not read segment ids: on packed rows it trains another "
    "model. In the rows *flexjax* results are kept for the backward pass, in *forward twice* they are not.",
)

PARTS: dict[str, list[Table]] = {
    "An H200": [
        SUSTAINED,
        Table(
            "Beside FlashAttention-3, one call at a time",
            "H200.md", BESIDE_FA3, 0, f"{H200}, 2026-11-26", KERNEL_TIMES + FA3,
        ),
        SWEEP,
        Table(
            "Programs over the same call without them",
            "H200.md", LATEST, 1, f"{H200}, 2026-11-29",
            "Time over time, after sustained work. Where the array is learned, the backward pass has its gradient.",
        ),
        Table(
            "A first call, from trace to result",
            "H200.md", BESIDE_FA3, 2, f"{H200}, 2026-11-26",
            "Both passes, seconds; *again* is a second program with the same attention in that process.",
            "PYTHONPATH=. python3 tools/device/time_first_call.py",
        ),
        Table(
            "Beside cuDNN, torch and tokamax: plain attention, windows, documents",
            "H200.md", PEERS, 0, f"{H200}, {PEERS_WHERE}, 2026-11-21 and 22", PEERS_TEXT + "A star: not reached in the time.",
            columns=(0, 1, 2, 3, 4, 5, 6, 9, 10, 13),
        ),
        Table(
            "Beside torch: ALiBi, soft cap, a learned pair bias",
            "H200.md", PEERS, 1, f"{H200}, {PEERS_WHERE}, 2026-11-21 and 22",
            PEERS_TEXT + "Timed alone, torch took 1.54 ms for ALiBi forward: a ratio of 1.90 where this table has 2.28. tokamax has a soft "
            "cap, and took 1.001 and 4.072 ms.",
            columns=(0, 1, 2, 3, 4, 5, 6, 9),
        ),
        Table(
            "Beside cuDNN and torch: head dim 64",
            "H200.md", PEERS, 2, f"{H200}, {PEERS_WHERE}, 2026-11-22",
            PEERS_TEXT + "Timed alone, torch took 0.110 and 0.221 ms for f16 of 4096 tokens. f16: 4 heads; the checkerboard: batch 8, 8 heads, 2048 "
            "tokens; plain, relative and learned: 16 heads.",
            columns=(0, 1, 2, 3, 4, 5, 8, 9, 12),
        ),
        Table(
            "Decoding", "H200.md", DECODING, 0, f"{H200}, 2026-11-23",
            DECODE_TEXT + "Rows of 8-bit pages and of shared tokens are of a run of their own.",
        ),
        Table(
            "Decoding beside cuDNN and torch", "H200.md", DECODING, 1, f"{H200}, torch 2.11.0, 2026-11-23",
            DECODE_TEXT + "*jax paged* is cuDNN on pages, by a function of jax that is not public. A prefill counts its keys once. The run is one "
            "with `--together`: a star marks what another program disturbed.",
        ),
        Table(
            "Two devices: batch or heads", "H200.md", "## Many devices, 2026-11-23", 0, "Two H200 of one host, jax 0.11.2, 2026-11-23",
            "Both passes. Efficiency: the time of one device on its share over that of all.",
        ),
        Table(
            "Two devices: a sequence of 131072 tokens", "H200.md", "## Many devices, 2026-11-23", 3,
            "Two H200 of one host, jax 0.11.2, 2026-11-23",
            "Both passes, 8 heads of 128, wall clock, a context layout; the window in one run, the rest in another. Efficiency: half the time of one "
            "device over that of both.",
            "PYTHONPATH=. python3 tools/device/time_context.py --cases causal,documents",
        ),
        Table(
            "A training step", "H200.md", "## A training step, 2026-11-29", 0, f"{H200}, 2026-11-29",
            "Eight layers, 2048 wide, 16 heads of 128, 16384 tokens of 12 packed documents, medians of interleaved wall-clock times. The checkpointed scan keeps "
            "`flexjax_out` and `flexjax_lse`; in the row *forward twice* it does not.",
        ),
        MAXTEXT,
        Table(
            "float32", "H200.md", "## float32, 2026-11-23", 0, f"{H200}, 2026-11-23",
            "Both passes, 4096 tokens, 16 heads, beside dense attention of `jax.nn` in TF32; errors relative to the largest element, of all gradients.",
        ),
        Table(
            "Head dims above 256", "H200.md", "## Head dims above 256, 2026-11-23", 0, f"{H200}, 2026-11-23",
            "Causal, two CTAs for a head; TFLOP/s of visited positions, and the speed over dense attention of `jax.nn` on xla.",
        ),
        Table(
            "The kernels of other cards, on this one", "H200.md", MMA, 0, f"{H200}, torch 2.11, 2026-11-23",
            "By mma.sync, with the tiles of 9.0; speed over kernels of torch on the same GPU: FlashAttention-2 multiplies by mma.sync too, "
            "FlexAttention by WGMMA as shipped and by mma.sync with DISABLE_MMA_V3=1.",
            "PYTHONPATH=. python3 tools/device/time_mma.py --seconds 215",
        ),
        Table(
            "xla on a GPU", "H200.md", "## xla on an H200, 2026-11-23", 0, f"{H200}, 2026-11-23",
            "Both passes beside dense attention of `jax.nn`, 16 heads of 128 unless a row says otherwise; MiB of XLA's temporary memory, ours and that of "
            "`jax.nn`. Blocks of 2048 are the default, but under a window.",
        ),
    ],
    "An H100": [
        Table(
            "Beside FlashAttention-3, one call at a time", "H100.md", BESIDE_FA3, 0, f"{H100}, 2026-11-26", KERNEL_TIMES + FA3
        ),
        Table(
            "Beside FlashAttention-3, at sustained clocks", "H100.md", BESIDE_FA3, 1, f"{H100}, 2026-11-26", SUSTAINED_TIMES + FA3,
            "PYTHONPATH=.:FA3 python3 tools/device/time_sustained.py --each 0.5",
        ),
        Table(
            "Lengths and head counts that no other table has", "H100.md", BESIDE_FA3, 2, f"{H100}, 2026-11-26", SWEEP_TEXT, SWEEP_COMMAND
        ),
        Table(
            "Beside FlashAttention-3 on another H100 of the kind", "H100.md", ONCE_MORE, 0, f"{H100}, 2026-11-26",
            KERNEL_TIMES + FA3, "PYTHONPATH=.:FA3 python3 tools/device/time_beside_fa3.py --rounds 5",
        ),
        BY_IDS,
        Table(
            "Masks that hide most entries of a block", "H100.md", MASKS_THAT_HIDE, 0, f"{H100}, 2026-11-25",
            "TFLOP/s of visible entries; *whole*: the same call without the split by residues. 16 heads of 128, 32 of 64, 16384 tokens, batch 2; "
            "the neighbourhood: 4096 tokens, batch 8.",
        ),
        Table(
            "Exact gradients of captured arrays", "H100.md", BESIDE_FA3, 3, f"{H100}, 2026-11-26",
            "Both passes, causal; the error is that of the captured gradient, relative.",
            "PYTHONPATH=. python3 tools/device/time_exact_gradients.py",
        ),
        Table(
            "A training step", "H100.md", BESIDE_FA3, 4, f"{H100}, 2026-11-26",
            "Eight layers, 2048 wide, 16 heads of 128, 16384 tokens of 12 packed documents, medians by the wall clock.",
        ),
        Table(
            "float8", "H100.md", "## float8", 0, f"{H100}, 2026-11-26",
            "Forward, 16384 tokens in all, 16 heads of 128 or 8 of 256: milliseconds in bfloat16 and in float8, and their ratio, of the kernel (CUPTI) and of "
            "the whole call after sustained work, with XLA's transposition of the values.",
        ),
        Table(
            "Decoding", "H100.md", "## Decoding", 0, f"{H100}, 2026-11-25",
            DECODE_TEXT + "*jax paged* is cuDNN on pages, by a function of jax that is not public. The run is one with `--together`; a star marks what "
            "lost its records there.",
        ),
        Table(
            "The kernels of other cards beside FlexAttention in Triton", "H100.md", TRITON, 0, f"{H100}, torch 2.11.0, triton 3.6.0, 2026-11-25",
            "By mma.sync; milliseconds, the least of three rounds in turns, Triton's time over ours in brackets. Triton as shipped multiplies by WGMMA, which "
            "the other cards lack; with DISABLE_MMA_V3=1 it multiplies by mma.sync.",
        ),
    ],
    "A CPU": [
        Table(
            "Beside dense attention", "CPU.md", "## Times and memory beside dense attention, 2026-11-21", 0,
            "Two cores of a Xeon, jax 0.10.2, 2026-11-21",
            "One entry, 4 heads of 64, float32: the time of dense `jnp` attention and of `jax.nn.dot_product_attention` over ours, and peak memory of the process.",
        ),
        Table(
            "Block lists of a million tokens", "CPU.md", "## Block lists of a million tokens, 2026-11-26", 0, "One core of a Xeon, jax 0.10.2, 2026-11-26",
            "`create_block_mask` with blocks of 128. Lists are as wide as the longest row, so a few long documents make them large.",
        ),
    ],
}
# fmt: on

README_ROWS = {
    "full d128": "full, 16 heads of 128",
    "causal d128": "causal, 16 of 128",
    "causal, grouped heads d128": "causal, 32 and 8 of 128",
    "causal d64": "causal, 32 of 64",
    "full d64": "full, 32 of 64",
    "causal d256": "causal, 8 of 256",
    "window of 1025 d128": "window of 1025 in 16384",
    "12 documents d128": "12 documents in 16384",
}
"""Rows of SUSTAINED that README.md shows -> what it calls them."""


def page() -> str:
    """docs/speed.md."""
    parts = [[f"## {name}", *(one.markdown() for one in tables)] for name, tables in PARTS.items()]
    return "\n\n".join([HEAD.strip(), *(x for part in parts for x in part)]) + "\n"


def in_brackets(cell: str) -> str:
    return cell.partition("(")[2].partition(")")[0]


def in_readme() -> str:
    """The table of README.md, with the weakest ratios that other runs found."""
    command, rows = SUSTAINED.read()
    by_name = {row[0]: row[1:] for row in rows[2:]}
    out = [
        ["problem", "FlashAttention-3, ms", "flexjax, ms", "ratio, above 1: flexjax faster"],
        ["---", "---:", "---:", "---:"],
    ]
    for name, shown in README_ROWS.items():
        peer, forward, backward, _ = by_name[name]
        ours = ", ".join(cell.partition(" ")[0] for cell in (forward, backward))
        out.append([shown, peer, ours, f"{in_brackets(forward)}, {in_brackets(backward)}"])
    _, sweep = SWEEP.read()
    dim, which, worst, *_ = min(sweep[2:], key=lambda row: float(row[2].partition(",")[0]))
    ratio, _, problem = worst.partition(", ")
    _, by_ids = BY_IDS.read()
    ids = [in_brackets(row[-1]) for row in by_ids[2:] if row[0] == "1"]
    above = (
        f"{SUSTAINED.where}, bfloat16, batch 2 of 8192 tokens unless said, forward and backward (fixed order of additions); "
        f"`{command}`:"
    )
    below = (
        f"Weaker, in other runs: the worst of 204 ratios of a sweep of causal shapes, on that card that day, is {ratio} "
        f"({which.partition(',')[0]}, head dim {dim}, {problem}). Documents by ids of the call, batch 1, on an H100, 2026-11-25: "
        f"{ids[0]} forward, {ids[1]} backward."
    )
    return "\n\n".join([wrapped(above), table(out), wrapped(below)])


def in_clients() -> str:
    """The table of docs/clients.md, with what it shows."""
    command, rows = MAXTEXT.read()
    return "\n\n".join([wrapped(f"{MAXTEXT.where}, `{command}`. {MAXTEXT.text}"), table(rows)])


def with_table(text: str, made: str) -> str:
    """A page with `made` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no line {BEGIN!r} with {END!r} after it.")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(with_table(README.read_text(), in_readme()))
    CLIENTS.write_text(with_table(CLIENTS.read_text(), in_clients()))
    print(PAGE, README, CLIENTS)
