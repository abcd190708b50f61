#!/usr/bin/env python
"""Run transformers' own common model tests on plain and on patched Llamas: what passes plain must pass patched.

    python tests/upstream/run.py                  plain, patched, and patched with log tau and log Q moved off their start
    python tests/upstream/run.py -k resize        further words go to pytest
    python tests/upstream/run.py --bft-config '{"granularity": "channel"}'
    python tests/upstream/run.py --checkout ~/transformers/tests    with the generation and export tests, see below

The tests come from the sdist of the transformers version that is installed, fetched by pip and kept in build/upstream;
nothing is installed. The sdist has tests/test_*.py and nothing below: no model's own test file (`llama_common.py` stands
for Llama's), no generation and no export tests. Those can be lent from the tests folder of a checkout of about the same
version. `patching.py` patches every model that a test builds; the tests themselves are unchanged.

The exit status is 1 if a test that passes plain fails patched and is no exception below, or if an exception is none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "upstream"
MODES = ("plain", "patched", "moved")

EXCEPTIONS = {
    "test_from_pretrained_no_checkpoint": "gives from_pretrained a patched model's state_dict with a plain configuration and no "
    "folder, so nothing says that the result is to be patched: it is a plain model, and the loader lists our keys as unexpected",
}
"""Tests that pass plain and may fail patched or moved, each with the reason."""

STUBS = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
}
"""What tests/test_modeling_common.py imports and the sdist lacks."""

LENT_FOLDERS = ("generation", "exporters")


@dataclass
class Run:
    """One run of the tests: outcomes by name, which tests had a patched model, and in which one made a forward pass."""

    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    patched: set[str] = field(default_factory=set)
    filtered: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def passed(self) -> set[str]:
        """Names of the tests that passed."""
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}

    def failed(self) -> set[str]:
        """Names of the tests that failed."""
        return {name for name, outcome in self.outcomes.items() if outcome == "failed"}


def pip_download(folder: Path, *words: str) -> None:
    """Let pip fetch something into a folder, without its dependencies and without installing it."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), *words], check=True)


def prepare(checkout: Path | None) -> tuple[Path, list[str]]:
    """A folder with the package `tests` of the installed transformers, and what has to be on the import path beside it."""
    version = importlib.metadata.version("transformers")
    downloads = CACHE / "downloads"
    sdist = downloads / f"transformers-{version}.tar.gz"
    if not sdist.exists():
        print(f"Fetching the sdist of transformers {version}", flush=True)
        pip_download(downloads, "--no-binary", "transformers", "--no-build-isolation", f"transformers=={version}")
    path = []
    if importlib.util.find_spec("parameterized") is None:
        if not list(downloads.glob("parameterized-*.whl")):
            pip_download(downloads, "parameterized")
        path = [str(wheel) for wheel in downloads.glob("parameterized-*.whl")]

    root = CACHE / (version if checkout is None else f"{version}-checkout")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    prefix = f"transformers-{version}/tests/"
    with tarfile.open(sdist) as archive:
        for member in archive:
            if member.isfile() and member.name.startswith(prefix):
                member.name = "tests/" + member.name.removeprefix(prefix)
                archive.extract(member, root, filter="data")
    tests = root / "tests"
    if checkout is not None:
        for name in LENT_FOLDERS:
            if (checkout / name).is_dir():
                shutil.copytree(checkout / name, tests / name)
    for name, text in STUBS.items():
        stub = tests / name
        stub.parent.mkdir(exist_ok=True)
        if not stub.exists():
            stub.write_text(text)
    shutil.copy(HERE / "llama_common.py", tests)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p patching --disable-warnings\n")
    return root, path


def run(mode: str, root: Path, path: list[str], workers: int, bft_config: str, words: list[str]) -> Run:
    """One run of the tests in a process of its own, as `--bft mode` of patching.py."""
    report = root / f"{mode}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/llama_common.py", "--bft", mode, "--bft-config", bft_config]
    command += ["-n", str(workers), "-q", "--no-header", "--no-summary", f"--junit-xml={report}", *words]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "HF_", "RUN_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(HERE), *path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if not report.exists():
        sys.exit(f"{done.stdout.decode()[-4000:]}\nThe {mode} run wrote no report.")
    result = Run(seconds=time.monotonic() - start)
    for case in ElementTree.parse(report).iter("testcase"):
        name, outcome = case.attrib["name"], "passed"
        for kind, said in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            element = case.find(kind)
            if element is not None:
                outcome = said
                lines = element.attrib.get("message", "").strip().splitlines()
                result.messages[name] = lines[0][:200] if lines else ""
        result.outcomes[name] = outcome
        marks = {entry.attrib["name"] for entry in case.iter("property")}
        result.patched |= {name} if "bft_models" in marks else set()
        result.filtered |= {name} if "bft_passes" in marks else set()
    return result


def report(runs: dict[str, Run]) -> bool:
    """Print the table and what newly fails; whether all is well."""
    version = importlib.metadata.version("transformers")
    plain = runs["plain"]
    print(f"\ntransformers {version}: {len(plain.outcomes)} common model tests on a tiny Llama")
    print("             passed  failed  skipped   of the passed: patched a model  ran one   newly failing  seconds")
    wrong = []
    for mode, result in runs.items():
        counts = [list(result.outcomes.values()).count(outcome) for outcome in ("passed", "failed", "skipped")]
        # A test that is now skipped or gone was not passed either, and one that is skipped plain must not fail.
        new = sorted((plain.passed() - result.passed()) | (result.failed() - plain.failed()))
        ours = [len(tests & result.passed()) for tests in (result.patched, result.filtered)]
        print(
            f"    {mode:8}{counts[0]:7}{counts[1]:8}{counts[2]:9}{ours[0]:33}{ours[1]:9}{len(new):16}{result.seconds:9.0f}"
        )
        wrong += [(mode, name) for name in new if name not in EXCEPTIONS]
    for name in sorted(plain.failed()):
        print(f"fails plain, so it says nothing: {name}: {plain.messages[name]}")
    for mode, name in wrong:
        outcome = runs[mode].outcomes.get(name, "missing")
        print(f"NEW  {mode:8} {name}: {outcome}: {runs[mode].messages.get(name, '')}")
    for name, reason in EXCEPTIONS.items():
        if (
            name in plain.outcomes
            and len(runs) == len(MODES)
            and all(name in result.passed() for result in runs.values())
        ):
            print(f"NO EXCEPTION ANY MORE  {name}: {reason}")
            wrong.append(("", name))
        elif name in plain.outcomes:
            print(f"exception: {name}: {reason}")
    nothing = [
        mode for mode, result in runs.items() if not result.passed() or (mode != "plain" and not result.filtered)
    ]
    for mode in nothing:
        print(f"NOTHING  {mode}: no test passed, or none ran a patched model")
    return not wrong and not nothing


def main() -> None:
    """Parse the command line, run the tests in every mode, report."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], epilog="Further arguments go to pytest.", allow_abbrev=False
    )
    parser.add_argument("--modes", default=",".join(MODES), help="which runs, of %(default)s; plain always runs")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist (default %(default)s)")
    parser.add_argument("--bft-config", default="{}", metavar="JSON", help="fields of BFTConfig for the patched runs")
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help="tests folder of a checkout of transformers")
    arguments, words = parser.parse_known_args()
    modes = arguments.modes.split(",")
    if set(modes) - set(MODES):
        parser.error(f"--modes are some of {','.join(MODES)}")
    root, path = prepare(arguments.checkout)
    runs = {}
    for mode in dict.fromkeys(["plain", *modes]):
        print(f"Running the tests: {mode}", flush=True)
        runs[mode] = run(mode, root, path, arguments.workers, arguments.bft_config, words)
    sys.exit(0 if report(runs) else 1)


if __name__ == "__main__":
    main()
