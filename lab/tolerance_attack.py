"""Attacks on the proof of `tolerance=`: random programs, masks, heads, sinks, keys and tolerances against float64.

python -m lab.tolerance_attack [CASES] [SEED] [MINUTES] [WEIGHTED]     default 10000 0 60 0; with 1 of weights in place
of a softmax; exit status 1 if a row lost more than it may
"""

import collections
import sys
import time

import numpy as np

DRAWS = 50
"""Cases of a scene, which is compiled once."""


def main(cases: int, seed: int, minutes: int, weighted: int) -> int:
    """Runs the cases, as many as the minutes give; 1 if one breaks its tolerance."""
    from tests.tolerance.attack import Attack, Found, scene_of

    r, start = np.random.default_rng(seed), time.perf_counter()
    found: dict[str, list[Found]] = collections.defaultdict(list)
    broken, done, scenes = 0, 0, 0
    while done < cases and time.perf_counter() - start < 60 * minutes:
        scene, scenes = scene_of(r, weighted=bool(weighted)), scenes + 1
        attack = Attack(scene, r)
        with scene.x64:
            for _ in range(min(DRAWS, cases - done)):
                case, done = attack.draw(), done + 1
                found[case.kind].append(case)
                if case.broken:
                    broken += 1
                    print(f"broken, {case.worst:.4g} of the tolerance: {case.kind} keys in {scene}", flush=True)
    print("| keys | cases | with visible entries left out | visited | worst of the tolerance |\n|---|---|---|---|---|")
    everything = [case for kind in found.values() for case in kind]
    for kind, some in [*sorted(found.items()), ("all", everything)]:
        left, visited = sum(x.dropped for x in some), np.mean([x.share for x in some])
        print(f"| {kind} | {len(some)} | {left} | {visited:.2f} | {max(x.worst for x in some):.3g} |")
    print(f"{done} cases of {scenes} programs, seed {seed}, {broken} broken, {time.process_time():.0f} CPU s")
    return int(broken > 0)


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:]]
    sys.exit(main(*(numbers + [10000, 0, 60, 0][len(numbers) :])))
