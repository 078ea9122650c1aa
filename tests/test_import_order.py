"""Imports point one way: a room may import those below it, never one above.  Read from the syntax trees."""

import ast
import functools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# from the top of a call to its bottom; rooms of one row may import each other, but never in a circle
ORDER = (
    ("lab",),
    ("bench",),
    ("door",),
    ("visualize",),
    ("nn", "look", "tune"),
    ("jax_nn", "paged"),
    ("attention",),
    ("context",),
    ("passes",),
    ("call", "backends"),
    ("rewrites",),
    ("parallel",),
    ("plan", "block_mask"),
    ("tolerance",),
    ("trace",),
    ("analysis",),
    ("ir",),
    ("weights",),
    ("merge_states", "combine", "types", "errors", "partition", "varying", "integers"),
    ("mods",),
    ("masks",),
    ("mod_tools",),
)
RANK = {room: rank for rank, row in enumerate(ORDER) for room in row}
TOPS = ("flexjax", "bench", "lab")
BACKENDS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")
GPU_ORDER = (
    ("support",),
    ("families",),
    ("captures", "decode", "tangent"),
    ("backward", "forward"),
    ("programs",),
    ("machine",),
    ("lowering",),
)
GPU_RANK = {room: rank for rank, row in enumerate(GPU_ORDER) for room in row}
BACKEND_MAY_IMPORT = (
    "flexjax.plan",
    "flexjax.rewrites",
    "flexjax.block_mask",
    "flexjax.trace",
    "flexjax.backends.base",
    "flexjax.backends.target",
    "flexjax.backends.tile_math",
    "flexjax.ir",
    "flexjax.analysis",
    "flexjax.types",
    "flexjax.errors",
    "flexjax.integers",
    "flexjax.varying",
)


def modules() -> dict[str, pathlib.Path]:
    """Module name -> file, over the package, the two folders that are packaged with it, and the two that are not."""
    found = {}
    for top in (*TOPS, "masks", "mods"):
        prefix = top if top in TOPS else f"flexjax.{top}"
        for path in sorted((ROOT / top).rglob("*.py")):
            if top == "flexjax" and path.relative_to(ROOT / top).parts[0] in ("masks", "mods"):
                continue  # reached through the symlinks
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            found[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def imports(name: str) -> set[str]:
    """Names of the modules that a file imports anywhere in it, those of the package in full."""
    targets = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute in this package (line {node.lineno})"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                targets.add(inner if inner in MODULES else node.module)
    return targets


def own_imports(name: str) -> set[str]:
    return {target for target in imports(name) if target.split(".")[0] in TOPS}


def room(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "flexjax":
        return parts[0]
    return parts[1] if len(parts) > 1 else "door"


def test_every_room_has_its_place():
    unknown = {room(name) for name in MODULES} - set(RANK)
    assert not unknown, f"add {sorted(unknown)} to ORDER in this file"


@pytest.mark.parametrize("here", sorted(set(map(room, MODULES))))
def test_imports_point_down(here: str):
    for name in (name for name in MODULES if room(name) == here):
        above = [t for t in own_imports(name) if room(t) != here and RANK[room(t)] < RANK[here]]
        assert above == [], f"{name} imports what is above it"


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("flexjax.backends.mosaic_gpu.")])
def test_rooms_of_the_gpu_kernels_point_down(name: str):
    here = name.split(".")[3]
    for target in own_imports(name):
        there = target.split(".")[3] if target.startswith("flexjax.backends.mosaic_gpu.") else here
        assert here == there or GPU_RANK[here] < GPU_RANK[there], f"{name} imports {target}"


def test_no_circles():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "circle: " + " -> ".join((*path[path.index(name) :], name))
        if name in done or name not in MODULES:
            return
        for target in own_imports(name) - {name}:
            visit(target, (*path, name))
        done.add(name)

    for name in MODULES:
        if room(name) != "lab":  # sass_clocks and sass_pipeline import each other
            visit(name, ())


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[1:2] == ["backends"]])
def test_a_backend_sees_only_plan_and_operands(name: str):
    parts = name.split(".")
    own = ".".join(parts[:3]) if len(parts) > 2 and parts[2] in BACKENDS else "flexjax.backends"
    for target in own_imports(name):
        allowed = any(target == a or target.startswith(a + ".") for a in (own, *BACKEND_MAY_IMPORT))
        assert allowed, f"{name} imports {target}"


@pytest.mark.parametrize("name", [n for n in MODULES if room(n) in ("masks", "mods", "mod_tools")])
def test_masks_and_mods_import_nothing_of_the_compiler(name: str):
    """Each folder imports itself and the tools that both share; the tools import nothing else of flexjax."""
    for target in own_imports(name):
        assert room(target) in (room(name), "mod_tools"), f"{name} imports {target}; write it as a user would"


@pytest.mark.parametrize("name", MODULES)
def test_few_dependencies(name: str):
    """At import time: the standard library, jax and numpy."""
    extras = {"matplotlib"} if room(name) in ("bench", "block_mask", "masks", "mods", "look") else set()
    if room(name) in ("bench", "lab"):  # peers, imported where they are measured; ml_dtypes comes with jax
        extras |= {"torch", "tokamax", "dew_flash_attn", "ml_dtypes"}
    if (
        name == "flexjax.nn.equinox_adapter"
    ):  # a subclass of equinox's; flexjax.nn imports this file when it is asked for
        extras |= {"equinox"}
    if room(name) == "lab":  # it compiles the cases of the tests
        extras |= {"tests"}
    allowed = {*TOPS, "jax", "jaxlib", "numpy", *sys.stdlib_module_names, *extras}
    top_level = {
        alias.name.split(".")[0]
        for node in ast.parse(MODULES[name].read_text()).body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert top_level.isdisjoint(extras - {"equinox"}), f"{name}: import {sorted(top_level & extras)} where it is used"
    foreign = {target.split(".")[0] for target in imports(name)} - allowed
    assert not foreign, f"{name} imports {sorted(foreign)}"


def test_the_door_only_re_exports():
    body = ast.parse(MODULES["flexjax"].read_text()).body
    for node in body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__version__", "__all__")
        listing = isinstance(node, ast.FunctionDef) and node.name == "__dir__"  # what tab completion shows
        assert doc or named or listing or isinstance(node, ast.ImportFrom), (
            f"line {node.lineno} of the door is no import"
        )
        if isinstance(node, ast.ImportFrom):
            assert all(a.asname == a.name for a in node.names), f"line {node.lineno}: write `import x as x`"
