"""What is installed is what lies in the tree, under the names users import."""

import doctest
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sinkcache

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(sinkcache.__path__, "sinkcache.")]
    return ["sinkcache", *(name for name in names if not name.endswith("__main__"))]  # importing that would run it


def _sources() -> set[str]:
    """The files an installed sinkcache has, by their names inside the wheel."""
    library = {
        str(path.relative_to(ROOT)) for place in ("*.py", "planner/*.py") for path in (ROOT / "sinkcache").glob(place)
    }
    policies = {f"sinkcache/policies/{path.name}" for path in (ROOT / "policies").glob("*.py")}
    return {*library, *policies, "sinkcache/py.typed"}


def test_each_subpackage_is_listed():
    folders = [path.parent for top in ("sinkcache", "policies") for path in (ROOT / top).rglob("__init__.py")]
    found = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    found = {f"sinkcache.{name}" if name.startswith("policies") else name for name in found}
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_policies_are_linked_not_copied():
    link = ROOT / "sinkcache" / "policies"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "policies"


def test_policies_have_one_name():
    command = [sys.executable, "-c", "import policies"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "ImportError: import sinkcache.policies" in outcome.stderr


def test_wheel_holds_the_library_and_nothing_else(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("sinkcache", "policies"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    outcome = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    with zipfile.ZipFile(tmp_path / outcome.stdout.splitlines()[-1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == _sources()


def test_each_lower_bound_is_one_that_ci_runs():
    pins = dict(line.split("==") for line in (ROOT / "constraints/oldest.txt").read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-").lower(): pin for name, pin in pins.items()}
    for requirement in PROJECT["project"]["dependencies"]:
        [(name, bound)] = re.findall(r"^([a-z-]+)>=([\d.]+)", requirement)
        assert f"{pins[name]}.".startswith(f"{bound}."), requirement


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs an optional package: {error.name}")
    assert doctest.testmod(module).failed == 0
