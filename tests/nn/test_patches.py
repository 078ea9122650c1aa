"""Installed puts back what it replaced, and `import flexjax` imports none of the libraries that adapters are for."""

import subprocess
import sys
import types

import pytest

from flexjax.nn.patches import Installed


def test_installed_twice_and_taken_back_from_the_inside() -> None:
    library = types.SimpleNamespace(f=1, g=2)
    with pytest.raises(KeyError), Installed([(library, "f", 3)]):  # noqa: PT012
        inner = Installed([(library, "f", 4), (library, "g", 5)])
        assert (library.f, library.g) == (4, 5)
        inner.uninstall()
        inner.uninstall()
        assert (library.f, library.g) == (3, 2)
        raise KeyError
    assert (library.f, library.g) == (1, 2)


def test_flexjax_imports_no_library() -> None:
    names = ("keras", "flax", "equinox", "maxtext", "gemma")
    code = f"import sys, flexjax; print([name for name in {names} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
