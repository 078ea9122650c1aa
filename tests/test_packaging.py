"""What is installed is what is in the tree, and importing it needs jax and numpy alone."""

import os
import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def python(*arguments: str, **options) -> str:
    """Output of a fresh interpreter; its stderr is in the failure."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_first_import():
    """It pulls in no extra, has the version of the package, and leaves the platform to a program that sets it afterwards."""
    extras = ("matplotlib", "hypothesis", "pytest", "scipy.stats", "IPython")
    code = (
        f"import sys, flexjax; print([m for m in {extras} if m in sys.modules]); print(flexjax.__version__); "
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert python("-c", code, cwd=ROOT).splitlines() == ["[]", declared, "False"]


def test_masks_and_mods_are_the_folders_at_the_top():
    for name in ("masks", "mods"):
        link = ROOT / "flexjax" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("flexjax-*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_else(wheel: pathlib.Path):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = set()
    for top, prefix in (("flexjax", "flexjax"), ("masks", "flexjax/masks"), ("mods", "flexjax/mods")):
        for path in (ROOT / top).rglob("*"):
            parts = path.relative_to(ROOT / top).parts
            if (
                path.is_file()
                and "__pycache__" not in parts
                and not (top == "flexjax" and parts[0] in ("masks", "mods"))
            ):
                wanted.add("/".join((prefix, *parts)))
    assert inside == wanted
    assert not [name for name in inside if not name.endswith((".py", ".json", "py.typed"))]
    assert "flexjax/py.typed" in inside


@pytest.mark.slow
def test_the_index_can_show_the_wheel(wheel: pathlib.Path):
    pytest.importorskip("twine")
    assert "PASSED" in python("-m", "twine", "--no-color", "check", "--strict", str(wheel))


def test_a_citation_names_the_version_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {declared['version']}" in lines
    assert f"license: {declared['license']}" in lines


@pytest.mark.slow
def test_wheel_installs_and_runs_outside_the_tree(wheel: pathlib.Path, tmp_path: pathlib.Path):
    site = tmp_path / "site"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    code = (
        "import flexjax, jax.numpy as jnp; from flexjax import masks, mods; x = jnp.ones((1, 40, 2, 8)); "
        "print(flexjax.__file__); "
        "print(flexjax.flex_attention(x, x, x, score_mod=mods.alibi(2), mask_mod=masks.causal).shape)"
    )
    where, shape = python("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}).splitlines()
    assert pathlib.Path(where).is_relative_to(site)
    assert shape == "(1, 40, 2, 8)"


def test_the_extras_that_messages_name():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert (extras["cuda13"], extras["tpu"]) == (["jax[cuda13]"], ["jax[tpu]"])
