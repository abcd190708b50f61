"""The wheel, the sdist and the editable install each hold every package, its data and a console script that starts."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SOURCES = {"bft_hf": "bft_hf", "noise": "bft_hf/noise", "recipes": "bft_hf/recipes"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed; fail with all of it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def package_files() -> set[str]:
    """The paths that an installation has to have, as the repository's folders say."""
    return {
        f"{package}/{path.relative_to(REPOSITORY / folder).as_posix()}"
        for folder, package in SOURCES.items()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def copy_sources(target: Path) -> None:
    """Copy what a build reads, so that build folders left in the repository cannot add to it."""
    target.mkdir()
    for name in [*SOURCES, "tests"]:
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ["pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"]:
        shutil.copy(REPOSITORY / name, target)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("build")
    copy_sources(folder / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", folder, "source", cwd=folder)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def test_the_wheel_holds_the_sources_and_nothing_else(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licence = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert names == package_files()
    assert len(licence) == 1


def test_the_sdist_holds_the_sources_and_the_tests(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {
        name.replace("bft_hf/noise/", "noise/").replace("bft_hf/recipes/", "recipes/") for name in package_files()
    }
    assert sources <= names
    assert {"LICENSE", "README.md", "tests/conftest.py", "tests/test_packaging.py"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_install_and_import(kind: str, distributions: dict[str, Path], tmp_path: Path) -> None:
    environment, source = tmp_path / "venv", tmp_path / "source"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site_packages = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # The heavy dependencies come from the environment that runs this test. Its own editable install of this repository
    # does not come along: of a folder that is only on the path, .pth files are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation"]
    if kind == "editable":
        copy_sources(source)
        run(*pip, "--editable", source, cwd=tmp_path)
    else:
        run(*pip, distributions[kind], cwd=tmp_path)

    inspected = """
import bft_hf, bft_hf.noise, bft_hf.recipes, pathlib
print(bft_hf.__file__, bft_hf.noise.__file__, bft_hf.recipes.__file__)
recipes = pathlib.Path(bft_hf.recipes.__file__).parent
print(*recipes.glob("configs/*.yaml"))
print(*recipes.glob("data/*.gz"))
"""
    modules, configs, data = run(python, "-c", inspected, cwd=tmp_path).splitlines()[-3:]
    home = source if kind == "editable" else site_packages
    assert all(Path(path).is_relative_to(home) for path in modules.split()), modules
    assert configs
    assert data

    for command in PYPROJECT["project"]["scripts"]:
        assert "usage" in run(environment / "bin" / command, "--help", cwd=tmp_path).lower()


def test_the_oldest_constraints_are_the_floors() -> None:
    project = PYPROJECT["project"]
    requirements = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["sft"]])
    floors = {r.name: next(s.version for s in r.specifier if s.operator == ">=") for r in requirements}
    lines = (REPOSITORY / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    del floors["torch"], oldest["torch"]  # torch's floor is tried by hand: CONTRIBUTING.md
    assert {name: re.sub(r"(\.0)+$", "", version) for name, version in oldest.items()} == {
        name: re.sub(r"(\.0)+$", "", version) for name, version in floors.items()
    }
