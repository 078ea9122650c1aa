"""The table and the plot of a list of measurements."""

import math
from typing import Any

Row = dict[str, Any]  # problem, which, flops, and per peer a dict of `measure` or {"failed": why} or {"skipped": why}

OWN = "flexjax"


def markdown(rows: list[Row], peers: list[str], facts: dict[str, str], command: str) -> str:
    """A line for each problem and pass: medians, ratios to flexjax, its speed, memory, the worst error."""
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
    """Sentences about results that are not attention, and about measurements that failed."""
    found = []
    for row in rows:
        for peer, result in row["peers"].items():
            if "failed" in result:
                found.append(f"{peer}, {row['problem']}, {row['which']}: {result['failed']}")
            elif not result.get("error", 0.0) <= allowed:
                found.append(f"{peer}, {row['problem']}, {row['which']}: error {result['error']:.2g}")
    return found


def plot(rows: list[Row], peers: list[str], facts: dict[str, str], path: str) -> None:
    """Bars of median times, a group a problem, a panel a pass; needs matplotlib."""
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
    figure.suptitle(f"{facts['device']}, jax {facts['jax']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
