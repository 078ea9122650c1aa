"""The tables and the plot of a list of measurements, and sentences about those that are wrong.

row      the measurements of one workload and pass, a dict: problem (the name of the workload), which (the pass), flops, and
         peers, which has a result for each peer
peer     an implementation that is timed; flexjax is one
result   a dict: median (seconds), error and other numbers of `measure`, or {"failed": why}, or {"skipped": why}
facts    the device and versions, by name, for the line below the table
command  the command line that made the measurements
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.decode_cases import FLOORS, Floor

Row = dict[str, Any]
"""A row of measurements, or the result of one peer; see the top of the file."""

OWN = "flexjax"


def markdown(rows: list[Row], peers: list[str], facts: dict[str, str], command: str) -> str:
    """The table of the cpu suite as Markdown text, with a line for each row, and below it facts and why results are
    missing.

    rows, facts, command   see the top of the file
    peers                  names of the peers, in the order of the columns

    The columns are median times, ratios to flexjax, GFLOP/s of flexjax, peak memory and the largest error of any peer;
    "-" where there is none.
    """
    others = [peer for peer in peers if peer != OWN]
    head = ["problem", "pass", *(f"{p}, ms" for p in peers), *(f"{p} / {OWN}" for p in others)]
    head += [f"{OWN}, GFLOP/s", *(f"{p}, peak MB" for p in peers), "largest error"]
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join(["---", "---", *["---:"] * (len(head) - 2)]) + "|",
    ]
    for row in rows:
        own = row["peers"].get(OWN, {})
        cells = [row["problem"], row["which"], *(_milliseconds(row["peers"].get(p, {})) for p in peers)]
        cells += [_ratio(row["peers"].get(p, {}), own) for p in others]
        cells += [f"{row['flops'] / own['median'] / 1e9:.0f}" if "median" in own else "-"]
        cells += [_megabytes(row["peers"].get(p, {})) for p in peers]
        errors = [r["error"] for r in row["peers"].values() if "error" in r]
        cells += [f"{max(errors):.0e}" if errors else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    about = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("device", "cores"))
    lines += ["", f"{facts['device']}, {facts['cores']} cores; {about}. Medians. `{command}`"]
    reasons = {f"{p}, {row['problem']}: {_reason(r)}" for row in rows for p, r in row["peers"].items() if _reason(r)}
    return "\n".join(lines + [f"- {reason}" for reason in sorted(reasons)])


def on_gpu(rows: list[Row], peers: list[str], facts: dict[str, str], command: str) -> str:
    """The table of a gpu suite as Markdown text, with a line for each row, and below it facts, why results are missing, and for each pass
    the worst and the median ratio of the fastest other peer to ours.

    rows, facts, command   see the top of the file
    peers                  names of the peers, in the order of the columns; those that begin with "flexjax" are ours

    The columns are median times, TFLOP/s of ours, speed of ours over the fastest other peer, seconds of the first call,
    and errors; "-" where there is none.
    """
    others = [peer for peer in peers if not peer.startswith(OWN)]
    own = [peer for peer in peers if peer.startswith(OWN)]
    head = ["problem", "pass", *(f"{p}, ms" for p in peers), *(f"{p}, TFLOP/s" for p in own)]
    head += [f"{p} against the best peer" for p in own] + [f"{OWN}, first call, s", f"{OWN}, error", "largest error"]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", "---", *["---:"] * (len(head) - 2)]) + "|"]
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    odd = {(problem, p) for problem, p, _ in _measured_otherwise(rows)}
    for row in rows:
        results = row["peers"]
        usual = {p: r for p, r in results.items() if "median" in r and (row["problem"], p) not in odd}
        best = min((usual[p]["median"] for p in others if p in usual), default=None)
        cells = [row["problem"], row["which"], *(_gpu_milliseconds(results.get(p, {})) for p in peers)]
        times = [usual.get(p, {}).get("median") for p in own]
        cells += [f"{row['flops'] / t / 1e12:.0f}" if t else "-" for t in times]
        cells += [f"{best / t:.2f}" if best and t else "-" for t in times]
        for p, t in zip(own, times, strict=True):
            if best and t:
                ratios.setdefault((row["which"], p), {})[row["problem"]] = best / t
        mine = results.get(OWN, {})
        cells += [f"{mine['first_call']:.1f}" if "first_call" in mine else "-"]
        cells += [f"{mine['error']:.0e}" if "error" in mine else "-"]
        errors = [r["error"] for r in results.values() if "error" in r]
        lines.append("| " + " | ".join([*cells, f"{max(errors):.0e}" if errors else "-"]) + " |")
    lines += _below(rows, facts, command)
    lines += [f"best peer / {p}, {which}: {worst_and_median(found)}" for (which, p), found in ratios.items()]
    return "\n".join(lines)


def worst_and_median(ratios: dict[str, float]) -> str:
    """ "worst 0.79 (the problem's name), median 0.93 of 27" of ratios by the names of their problems, at least one."""
    worst = min(ratios, key=lambda name: ratios[name])
    return f"worst {ratios[worst]:.2f} ({worst}), median {statistics.median(ratios.values()):.2f} of {len(ratios)}"


def _below(rows: list[Row], facts: dict[str, str], command: str) -> list[str]:
    """The lines below the table of a suite on a GPU, the first of them empty: the device, how times were measured, the command, and for
    each reason why results are missing the workloads.
    """
    about = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    measured = "; ".join(f"{p}: {h}" for p, h in _usual(rows).items())
    lines = ["", f"{facts.get('device', 'no device')}; {about}. Medians: {measured}", f"`{command}`"]
    reasons: dict[str, list[str]] = {}
    for problem, p, how in _measured_otherwise(rows):
        reasons.setdefault(f"{p} was measured as {how}, no ratio", []).append(problem)
    for row in rows:
        for p, r in row["peers"].items():
            if _reason(r):
                reasons.setdefault(f"{p} {'failed, ' if 'failed' in r else ''}{_reason(r)}", []).append(row["problem"])
    return lines + [f"- {reason}: {', '.join(dict.fromkeys(names))}" for reason, names in sorted(reasons.items())]


def _usual(rows: list[Row]) -> dict[str, str]:
    """How most times of each peer were measured."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for p, r in row["peers"].items():
            if "how" in r:
                found.setdefault(p, []).append(r["how"])
    return {p: statistics.mode(each) for p, each in found.items()}


def _measured_otherwise(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(workload, peer, how) of each time that was measured otherwise than most of its peer, such as by the wall clock while another
    process used the GPU.
    """
    usual = _usual(rows)
    return [
        (row["problem"], p, r["how"])
        for row in rows
        for p, r in row["peers"].items()
        if r.get("how", usual.get(p)) != usual.get(p)
    ]


def of_decode(rows: list[Row], peers: list[str], facts: dict[str, str], command: str, cudnn: Sequence[str]) -> str:
    """The table of the decode suite as Markdown text. Below it come facts, why results are missing, the cases in which ours is slower
    than the floor, and as last line the worst and the median ratio of cuDNN to ours, or that no case has both.

    rows, facts, command   see the top of the file; a row has `bytes`, those of the keys and values that a call has to read
    peers                  names of the peers, in the order of the columns
    cudnn                  those of them that are cuDNN

    The columns are, for each peer, the time and bytes a second; the fastest time of cuDNN over ours; the most time that ours may take on
    an H200 (`decode_cases.FLOORS`); seconds of tracing and compiling ours; its error, relative to the largest value; "-" where there is none.
    """
    head = [
        "case",
        *(f"{p}, {unit}" for p in peers for unit in ("ms", "TB/s")),
        f"cuDNN / {OWN}",
        "floor, ms",
        f"{OWN}, first call, s",
        f"{OWN}, error",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"]
    ratios: dict[str, float] = {}
    odd = {(problem, p) for problem, p, _ in _measured_otherwise(rows)}
    comparable = lambda problem, p, result: "median" in result and (problem, p) not in odd
    own_times = {
        r["problem"]: 1e3 * r["peers"][OWN]["median"]
        for r in rows
        if comparable(r["problem"], OWN, r["peers"].get(OWN, {}))
    }
    missed = []
    for row in rows:
        results, cells = row["peers"], [row["problem"]]
        for p in peers:
            result = results.get(p, {})
            cells += [_gpu_milliseconds(result)]
            cells += [f"{row['bytes'] / result['median'] / 1e12:.2f}" if "median" in result else "-"]
        best = min(
            (results[p]["median"] for p in cudnn if comparable(row["problem"], p, results.get(p, {}))), default=None
        )
        own = results.get(OWN, {})
        if best is not None and comparable(row["problem"], OWN, own):
            ratios[row["problem"]] = best / own["median"]
        cells += [f"{ratios[row['problem']]:.2f}" if row["problem"] in ratios else "-"]
        floor = FLOORS.get(row["problem"], Floor()).milliseconds(row["bytes"], own_times)
        cells += [f"{floor:.3f}" if floor else "-"]
        cells += [f"{own['first_call']:.1f}" if "first_call" in own else "-"]
        if floor and own_times.get(row["problem"], 0.0) > floor:
            missed.append(row["problem"])
        lines.append("| " + " | ".join([*cells, f"{own['error']:.0e}" if "error" in own else "-"]) + " |")
    lines += _below(rows, facts, command)
    if missed:
        lines.append(f"- slower than the floor of an H200: {', '.join(missed)}")
    if not ratios:
        return "\n".join([*lines, f"No case has times of both cuDNN and {OWN}."])
    return "\n".join([*lines, f"cuDNN / {OWN}: {worst_and_median(ratios)}"])


def _gpu_milliseconds(result: Row) -> str:
    """The median time of a result in milliseconds with three decimals; "failed" or "-" if it has none."""
    return f"{result['median'] * 1e3:.3f}" if "median" in result else _milliseconds(result)


def _reason(result: Row) -> str | None:
    """Why a result has no time: the reason of the failure or of the skip; None if it has one."""
    return result.get("failed") or result.get("skipped")


def _milliseconds(result: Row) -> str:
    """The median time of a result in milliseconds with about three digits; "failed" or "-" if it has none."""
    if "median" not in result:
        return "failed" if "failed" in result else "-"
    value = result["median"] * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(other: Row, own: Row) -> str:
    """The median time of `other` over that of `own`, with two decimals; "-" if either has none."""
    return f"{other['median'] / own['median']:.2f}" if "median" in other and "median" in own else "-"


def _megabytes(result: Row) -> str:
    """The peak memory of a result in MiB; "-" if it has none."""
    return f"{result['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in result else "-"


def wrong(rows: list[Row], allowed: float) -> list[str]:
    """Sentences about measurements that failed and about results whose error exceeds `allowed` (relative to the largest
    value) or is NaN.

    A result that was skipped, or that has no error, is not wrong.
    """
    found = []
    for row in rows:
        for peer, result in row["peers"].items():
            if "failed" in result:
                found.append(f"{peer}, {row['problem']}, {row['which']}: {result['failed']}")
            elif not result.get("error", 0.0) <= allowed:
                found.append(f"{peer}, {row['problem']}, {row['which']}: error {result['error']:.2g}")
    return found


def plot(rows: list[Row], peers: list[str], facts: dict[str, str], path: str) -> None:
    """Draws bars of median times to the file `path`, a panel for each pass and a group of bars for each workload; needs
    matplotlib.

    rows, facts   see the top of the file
    peers         names of the peers, a bar each; none where a peer has no time

    The axis of times is logarithmic.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys(row["which"] for row in rows))
    figure, axes = plt.subplots(1, len(passes), figsize=(6 * len(passes), 4.5), squeeze=False, sharey=True)
    for axis, which in zip(axes[0], passes, strict=True):
        chosen = [row for row in rows if row["which"] == which]
        width = 0.8 / len(peers)
        for i, peer in enumerate(peers):
            heights = [row["peers"].get(peer, {}).get("median", math.nan) * 1e3 for row in chosen]
            axis.bar([x + i * width for x in range(len(chosen))], heights, width, label=peer)
        centres = [x + 0.4 - width / 2 for x in range(len(chosen))]
        axis.set_xticks(centres, [row["problem"] for row in chosen], rotation=30, ha="right")
        axis.set_yscale("log")
        axis.set_title(which)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("median, ms")
    axes[0][0].legend()
    figure.suptitle(f"{facts.get('device', '')}, jax {facts.get('jax', '')}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
