"""The plans of the tables that come with the package: problems of the bench's gpu suite, as calls of flex_attention.

python -m tests.plan.shipped_plans          writes the names of the entries anew, after a change of what a plan's text is
"""

import json
import pathlib
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import flexjax
from bench.suites import MODS, SUITES
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import KernelPlan

FOLDER = pathlib.Path(flexjax.__file__).parent / "plan" / "tuned"
PROBLEMS = {p.name: p for p in SUITES["gpu"]}


def plans(name: str) -> Iterator[tuple[str, KernelPlan]]:
    """(how the mask is given, plan) of a problem."""
    p = PROBLEMS[name]
    arrays = [jax.ShapeDtypeStruct((p.batch, p.length, n, p.dim), p.dtype) for n in (p.heads, p.kv_heads, p.kv_heads)]
    arguments: dict[str, typing.Any] = {}
    if p.mod is not None:
        mod = MODS[p.mod]
        array = None if mod.shape is None else jnp.zeros(mod.shape(p), mod.stored)
        arguments["score_mod"] = lambda s, b, h, q, kv: mod.apply(array, s, h, q, kv)
    allowed = p.allowed()
    mask = lambda b, h, q, kv: allowed(q, kv)
    ways: dict[str, dict[str, typing.Any]] = {"no mask": {}}
    if p.mask != "full":
        block_mask = flexjax.create_block_mask(mask, None, None, p.length, p.length)
        ways = {"mask_mod": {"mask_mod": mask}, "block_mask": {"block_mask": block_mask}}
    for way, more in ways.items():
        found: list[KernelPlan] = []
        filled: typing.Any = arguments | more
        jax.eval_shape(
            lambda q, k, v, filled=filled, found=found: found.append(prepare(Arguments(q, k, v, **filled)).plan),
            *arrays,
        )
        yield way, found[0]


def keyed(entries: typing.Iterable[dict[str, typing.Any]]) -> dict[str, dict[str, typing.Any]]:
    """Entries by the digest of the problem that each names."""
    made = {}
    for entry in entries:
        plan = dict(plans(entry["name"]))[entry["way"]]
        made[tuned.digest(plan, entry["backend"], entry["device"], None)] = entry
    return made


def main() -> None:
    for path in FOLDER.glob("*.json"):
        found = json.loads(path.read_text())
        found["entries"] = keyed(found["entries"].values())
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
