"""The report of the first-hour suite: JSON with every answer, a short Markdown page, and what was wrong or failed.

`found` is what first_hour.main has collected: facts, and for each stage the dict that it returned.
"""

import collections
import json
import math
import re
import typing

from bench import report
from bench.suites import SUITES
from lab import card_model

Found = dict[str, typing.Any]
"""What the stages gave, by their names; see first_hour.py."""


def file_name(found: Found) -> str:
    """The name of the JSON file: first-hour-<card>.json, the card in lower case with "-" for what is no letter or digit; "unknown"
    without facts about the card.
    """
    card = found["facts"].get("card", {}).get("card", "unknown")
    return f"first-hour-{re.sub(r'[^A-Za-z0-9]+', '-', card).strip('-').lower()}.json"


def markdown_path(path: str) -> str:
    """The path of the Markdown file beside a JSON file: .md in place of .json at its end, or after a path without it."""
    return path.removesuffix(".json") + ".md"


def write(found: Found, path: str) -> None:
    """Writes what was found to the JSON file `path`, and `markdown` of it to the file of `markdown_path`; both are replaced."""
    with open(path, "w") as file:
        json.dump(found, file, indent=1, default=str)
    with open(markdown_path(path), "w") as file:
        file.write(markdown(found) + "\n")


# ------------------------------------------------------------------- verdicts


def wrong(found: Found, allowed: float) -> list[str]:
    """Sentences, each once, about numbers that were wrong: cases whose verdict begins with "WRONG", and timed results of flexjax whose
    error is above `allowed` or NaN. A result without an error counts as right.

    allowed   the largest error of a timed result, over the largest value
    """
    rows = found.get("numerics", {}).get("rows", [])
    lines = [f"{_of(row)}: {row['verdict']}" for row in rows if row.get("verdict", "").startswith("WRONG")]
    for row in found.get("times", {}).get("rows", []):
        for peer, result in row["peers"].items():
            if peer.startswith(report.OWN) and not result.get("error", 0.0) <= allowed:
                lines.append(f"{peer}, {row['problem']}, timed: error {result['error']:.2g}")
    return list(dict.fromkeys(lines))


def failures(found: Found) -> list[str]:
    """Sentences, each once, about what failed in another way than by a wrong number: stages, and tasks of flexjax that raised, died or
    hung. What the time did not reach, and other peers, are left out.
    """
    lines = [
        f"{name}: {stage['failed']}" for name, stage in found.items() if isinstance(stage, dict) and "failed" in stage
    ]
    for name in ("numerics", "sustained", "tune"):
        rows = found.get(name, {}).get("rows", [])
        lines += [f"{name}, {_of(row)}: {row['failed']}" for row in rows if "failed" in row]
    for row in found.get("times", {}).get("rows", []):
        for peer, result in row["peers"].items():
            if peer.startswith(report.OWN) and "failed" in result and "not reached" not in result["failed"]:
                lines.append(f"times, {peer}, {row['problem']}: {result['failed']}")
    return list(dict.fromkeys(lines))


def _of(row: Found) -> str:
    """Which case or workload a row is about, in which dtype, by which flexjax: name, dtype and by, joined by commas, those that the row
    has.
    """
    return ", ".join(str(row[n]) for n in ("name", "dtype", "by") if n in row)


# ------------------------------------------------------------------- the page


def markdown(found: Found) -> str:
    """The page as Markdown text: first how many numbers were wrong and what failed, then the card, the versions and the kernels that it
    takes, then a section for each stage of SECTIONS that ran and did not fail.
    """
    about = found["facts"]
    lines = [f"# First hour on {about.get('card', {}).get('card', 'an unknown card')}", ""]
    bad, failed = wrong(found, 2e-2), failures(found)
    lines += [
        f"**{len(bad)} wrong, {len(failed)} failed**, {found.get('took', 0.0):.0f} s of {60 * found['minutes']:.0f} s",
        "",
    ]
    lines += (
        [f"- WRONG: {text}" for text in bad] + [f"- failed: {text}" for text in failed] + [""] * bool(bad or failed)
    )
    for title in ("card", "versions"):
        lines += [", ".join(f"{n} {v}" for n, v in about.get(title, {}).items()), ""]
    lines += ["## Which kernels", "", "| asked for | answer |", "|---|---|"]
    for family in about.get("families", []):
        options = ", ".join(f"{n}={v!r}" for n, v in family["options"].items()) or "nothing"
        lines.append(f"| {options} | {family.get('kernels') or family['verdict']} |")
    for name, section in SECTIONS.items():
        stage = found.get(name)
        if stage is not None and "failed" not in stage:
            lines += ["", *section(found)]
    return "\n".join(lines)


def _numerics(found: Found) -> list[str]:
    """Markdown lines of the section "Numbers": a table of how many cases have which verdict, for each way to ask for kernels and each
    dtype, then the sentences of refusals and notes, each with the first four cases that have it.
    """
    rows = found["numerics"]["rows"]
    lines = ["## Numbers", "", "Results and gradients against a float64 oracle; 1 is what rounding explains.", ""]
    lines += [
        "| by | dtype | ok | refused | WRONG | failed | not reached | largest difference |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[Found]] = collections.defaultdict(list)
    for row in rows:
        groups[row["by"], row["dtype"]].append(row)
    for (by, dtype), mine in groups.items():
        kinds = collections.Counter(_kind(row) for row in mine)
        ratio = max((row["ratio"] for row in mine if math.isfinite(row.get("ratio", math.inf))), default=0.0)
        counts = [str(kinds[k]) for k in ("ok", "refused", "WRONG", "failed", "unreached")]
        lines.append(f"| {by} | {dtype} | {' | '.join(counts)} | {ratio:.2f} |")
    said: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        if _kind(row) == "refused":
            said[row["verdict"]].append(_of(row))
        for note in row.get("notes", []):
            said[note].append(_of(row))
    return [
        *lines,
        "",
        *(f"- {text}: {'; '.join(names[:4])}{' ...' if len(names) > 4 else ''}" for text, names in said.items()),
    ]


def _kind(row: Found) -> str:
    """The kind of the answer in a row of numerics: "failed", "unreached", or that of its verdict: "ok", "refused" or "WRONG"."""
    for kind in ("failed", "unreached"):
        if kind in row:
            return kind
    return row["verdict"].split(":")[0]


def _ceilings(found: Found) -> list[str]:
    """Markdown lines of the section "Ceilings": for the matrix products and the read the rate, with clock and power meanwhile."""
    lines = ["## Ceilings", "", "| what | rate | SM clock | power | held back by |", "|---|---:|---:|---:|---|"]
    for name, row in found["ceilings"].items():
        if isinstance(row, dict):
            scale, unit = (1e12, "TFLOP/s") if row["unit"] == "FLOP/s" else (1e9, "GB/s")
            lines.append(f"| {name} | {row['rate'] / scale:.4g} {unit} | {_load(row)} |")
    return lines


def _load(row: Found) -> str:
    """The last three cells of a table row: SM clock, power and what held the clock back; "-" in each if NVML gave no clock.

    row   an answer that has clock, power and reasons beside its times or rate, or none of the three
    """
    if "clock" not in row:
        return "- | - | -"
    return f"{row['clock']:.0f} MHz | {row['power']:.0f} W | {', '.join(row['reasons']) or 'nothing'}"


def _times(found: Found) -> list[str]:
    """Markdown lines of the section "Times": the table of the gpu suite (report.on_gpu); [] if no workload was timed."""
    stage = found["times"]
    if not stage["rows"]:
        return []
    return ["## Times", "", report.on_gpu(stage["rows"], stage["peers"], stage.get("facts", {}), found["command"])]


def _sustained(found: Found) -> list[str]:
    """Markdown lines of the section "Back to back": a table of workloads whose calls ran back to back for a while, with a line for each
    pass: milliseconds and TFLOP/s, the milliseconds that card_model.py predicts at the SM clock of the row (at the card's where NVML
    said none), clock and power.

    A workload that failed or that the time did not reach has a line that says so.
    """
    lines = ["## Back to back", "", "Predicted by lab/card_model.py at the clock of the row.", ""]
    lines += [
        "| workload | by | pass | ms | TFLOP/s | predicted, ms | measured over predicted | SM clock | power | held back by |"
    ]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|---:|---|"]
    for row in found["sustained"]["rows"]:
        if "forward" in row and "both" in row:
            for name, load, took, flops, predicted in _passes(found, row):
                told = [f"{1e3 * predicted:.3f}", f"{took / predicted:.2f}"] if predicted else ["-", "-"]
                cells = [row["name"], row["by"], name, f"{1e3 * took:.3f}", f"{flops / took / 1e12:.0f}", *told]
                lines.append(f"| {' | '.join(cells)} | {_load(load)} |")
        else:
            why = row.get("unreached") or row.get("failed", "")
            lines.append(f"| {row['name']} | {row['by']} | {why} | - | - | - | - | - | - | - |")
    return lines


def _passes(found: Found, row: Found) -> list[tuple[str, Found, float, float, float]]:
    """(name, load, seconds, operations, predicted seconds) for "forward" and "backward" of a row of the stage "sustained", one call each.
    The prediction is 0.0 where card_model.py has none; operations are those that the mask leaves.

    found   whose facts name the card
    row     with the answers "forward" and "both" of first_hour_tasks.sustained; options of the kernels are read from its "by"

    Backward seconds are those of both passes less the forward ones, and its load (clock, power) is that of both.
    """
    workload = next(p for problems in SUITES.values() for p in problems if p.name == row["name"])
    call, card = card_model.call_of(workload), card_model.card_of(found["facts"].get("card", {}).get("card", ""))
    options = dict(word.split("=", 1) for word in row["by"].split()[1:])
    instruction, pairs = options.get("instruction"), options.get("cta_pairs") == "True"
    seconds = row["forward"]["seconds"], row["both"]["seconds"] - row["forward"]["seconds"]
    lines = []
    for name, which, took in zip(("forward", "backward"), ("forward", "both"), seconds, strict=True):
        load = row[which]
        clock = load.get("clock", 0.0) / 1e3
        expected = None
        if call is not None and card is not None:
            expected = card_model.predict(card, call, name == "backward", instruction, clock, pairs)
        flops = call.flops(name == "backward") if call is not None else workload.flops(name)
        lines.append((name, load, max(took, 1e-9), flops, expected.seconds if expected else 0.0))
    return lines


def _tune(found: Found) -> list[str]:
    """Markdown lines of the section "Tiles": for each workload and pass that autotune timed, the default and the fastest tile.

    A workload that the time did not reach has a line that says so; one that failed has none (`failures` names it).
    """
    lines = [
        "## Tiles",
        "",
        "| workload | by | pass | default, ms | fastest, ms | default over fastest | fastest tile | timed |",
    ]
    lines.append("|---|---|---|---:|---:|---:|---|---:|")
    for row in found["tune"]["rows"]:
        for which, one in row.get("passes", {}).items():
            tile = " ".join(f"{n}={v}" for n, v in one["tile"].items())
            cells = (
                row["name"],
                row["by"],
                which,
                f"{1e3 * one['default']:.3f}",
                f"{1e3 * one['fastest']:.3f}",
                f"{one['gain']:.3f}",
            )
            lines.append(f"| {' | '.join(cells)} | {tile} | {one['timed']} |")
        if "unreached" in row:
            lines.append(f"| {row['name']} | {row['by']} | {row['unreached']} | - | - | - | - | - |")
    return lines


SECTIONS = dict(numerics=_numerics, ceilings=_ceilings, times=_times, sustained=_sustained, tune=_tune)
"""Stage -> the function that writes its section from `found`, where the answer of the stage is found[stage]; `markdown` calls it only for
a stage that ran and did not fail."""
