"""The tables and the plot of a list of measurements, and sentences about those that are wrong."""

import math
from typing import Any

Row = dict[str, Any]  # problem, which, flops, and per peer a dict of `measure` or {"failed": why} or {"skipped": why}

OWN = "flexjax"


def markdown(rows: list[Row], peers: list[str], facts: dict[str, str], command: str) -> str:
    """The table of the cpu suite, a line for each workload and pass: medians, ratios to flexjax, GFLOP/s, memory, largest error."""
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
    """The table of the gpu suite, a line for each workload and pass: times, TFLOP/s, speed over the best peer, first call, errors."""
    others = [peer for peer in peers if not peer.startswith(OWN)]
    own = [peer for peer in peers if peer.startswith(OWN)]
    head = ["problem", "pass", *(f"{p}, ms" for p in peers), *(f"{p}, TFLOP/s" for p in own)]
    head += [f"{p} against the best peer" for p in own] + [f"{OWN}, first call, s", f"{OWN}, error", "largest error"]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", "---", *["---:"] * (len(head) - 2)]) + "|"]
    for row in rows:
        results = row["peers"]
        best = min((results[p]["median"] for p in others if "median" in results.get(p, {})), default=None)
        cells = [row["problem"], row["which"], *(_gpu_milliseconds(results.get(p, {})) for p in peers)]
        times = [results.get(p, {}).get("median") for p in own]
        cells += [f"{row['flops'] / t / 1e12:.0f}" if t else "-" for t in times]
        cells += [f"{best / t:.2f}" if best and t else "-" for t in times]
        mine = results.get(OWN, {})
        cells += [f"{mine['first_call']:.1f}" if "first_call" in mine else "-"]
        cells += [f"{mine['error']:.0e}" if "error" in mine else "-"]
        errors = [r["error"] for r in results.values() if "error" in r]
        lines.append("| " + " | ".join([*cells, f"{max(errors):.0e}" if errors else "-"]) + " |")
    about = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    how = {p: r["how"] for row in rows for p, r in row["peers"].items() if "how" in r}
    lines += [
        "",
        f"{facts.get('device', 'no device')}; {about}. Medians: " + "; ".join(f"{p}: {h}" for p, h in how.items()),
    ]
    lines += [f"`{command}`"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for p, r in row["peers"].items():
            if _reason(r):
                reasons.setdefault(f"{p} {'failed, ' if 'failed' in r else ''}{_reason(r)}", []).append(row["problem"])
    return "\n".join(
        lines + [f"- {reason}: {', '.join(dict.fromkeys(names))}" for reason, names in sorted(reasons.items())]
    )


def _gpu_milliseconds(result: Row) -> str:
    return f"{result['median'] * 1e3:.3f}" if "median" in result else _milliseconds(result)


def _reason(result: Row) -> str | None:
    return result.get("failed") or result.get("skipped")


def _milliseconds(result: Row) -> str:
    if "median" not in result:
        return "failed" if "failed" in result else "-"
    value = result["median"] * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(other: Row, own: Row) -> str:
    return f"{other['median'] / own['median']:.2f}" if "median" in other and "median" in own else "-"


def _megabytes(result: Row) -> str:
    return f"{result['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in result else "-"


def wrong(rows: list[Row], allowed: float) -> list[str]:
    """Sentences about results whose error exceeds `allowed`, and about measurements that failed."""
    found = []
    for row in rows:
        for peer, result in row["peers"].items():
            if "failed" in result:
                found.append(f"{peer}, {row['problem']}, {row['which']}: {result['failed']}")
            elif not result.get("error", 0.0) <= allowed:
                found.append(f"{peer}, {row['problem']}, {row['which']}: error {result['error']:.2g}")
    return found


def plot(rows: list[Row], peers: list[str], facts: dict[str, str], path: str) -> None:
    """Draws bars of median times, a group for each workload and a panel for each pass, to a file; needs matplotlib."""
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
