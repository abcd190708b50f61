"""bft-bench on a recipe of a few lines, every run a process: done once, taken up again, shared out, stopped, refused."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from bft_hf.recipes import runner
from bft_hf.recipes.bench import main
from bft_hf.recipes.command import UsageError
from bft_hf.recipes.filter_flags import parse_overrides
from bft_hf.recipes.grid import GRIDS, differences, flags_of, parse_name, read_grid, to_argv
from bft_hf.recipes.records import read_whole
from bft_hf.recipes.runs import last_checkpoint, last_lines, read_record

RECIPE = """
import argparse, json, os, shlex, sys, time
from pathlib import Path
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("output_dir", "overwrite", "resume_from_checkpoint", "method", "noise", "seed", "steps", "wait", "names"):
    parser.add_argument("--" + name, nargs="+" if name == "names" else None)
args = parser.parse_args()
out, steps = Path(args.output_dir), int(args.steps or 2)
if out.is_dir() and any(out.iterdir()) and not (args.overwrite or args.resume_from_checkpoint):
    sys.exit("the folder is not empty")
out.mkdir(parents=True, exist_ok=True)
with open(out.parent / "starts.txt", "a") as file:
    file.write(out.name + "\\n")
first = int(args.resume_from_checkpoint.rsplit("-", 1)[1]) if args.resume_from_checkpoint else 0
for step in range(first, steps):
    (out / f"checkpoint-{step + 1}").mkdir(exist_ok=True)
    (out / f"checkpoint-{step + 1}" / "trainer_state.json").write_text("{}")
    print(f"\\rstep {step + 1}", end="", flush=True)
    if args.wait:
        while not Path(args.wait).exists():
            time.sleep(0.02)
if args.method == "broken" and not Path("mended").exists():
    sys.exit("ValueError: the method is broken")
(out / "model.safetensors").write_bytes(bytes(1000))
(out / "predictions.jsonl").write_text('{"id": 1, "f1": 0.5}\\n')
results = {"command": shlex.join(["recipe", *sys.argv[1:]]), "seed": int(args.seed), "first": first,
           "threads": os.environ.get("OMP_NUM_THREADS"), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
           "word": os.environ.get("WORD")}
(out / "part").write_text(json.dumps(results))
os.replace(out / "part", out / "results.json")
"""

GRID = """
command: python recipe.py
base: {steps: 2, names: [a, b]}
axes:
  arm:
    sft: {method: sft}
    bft: {method: bft}
  noise: [0, 0.3]
  seed: [1, 2]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the recipe and a grid of eight runs."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner, "GRACE", 5.0)
    return tmp_path


def results(name: str, root: str = "outputs/grid") -> dict[str, Any]:
    return json.loads(Path(root, name, "results.json").read_text())


def starts(root: str = "outputs/grid") -> list[str]:
    """Names of the runs in the order in which their processes began."""
    file = Path(root, "starts.txt")
    return file.read_text().split() if file.exists() else []


def edit(old: str, new: str) -> None:
    text = Path("grid.yaml").read_text()
    assert old in text
    Path("grid.yaml").write_text(text.replace(old, new))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def in_background(*argv: str) -> int:
    """The bench in a process of its own, forked: to import torch once more would take most of the test's time."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        status = 99
        try:
            sys.stdout = sys.stderr = open("bench.out", "a")  # noqa: SIM115 - the process ends here
            # Whoever starts pytest in the background of a shell lets it ignore the interrupt.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = main(argv)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return process


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_every_run_is_done_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid.yaml"]) == 0
    names = [f"{arm}_noise={noise}_seed={seed}" for seed in (1, 2) for noise in ("0", "0.3") for arm in ("sft", "bft")]
    # The axis named last varies slowest: all arms on seed 1 before the first on seed 2.
    assert starts() == names
    flags = flags_of(results("bft_noise=0.3_seed=2")["command"])
    assert flags["method"] == ["bft"] and flags["noise"] == ["0.3"] and flags["seed"] == ["2"]
    assert flags["names"] == ["a", "b"] and flags["steps"] == ["2"]
    record = read_record(Path("outputs/grid/bft_noise=0.3_seed=2"))
    assert record["status"] == "finished" and record["axes"] == {"arm": "bft", "noise": 0.3, "seed": 2}
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("[3/8] sft_noise=0.3_seed=1 finished in ") and "; 5 to go, about " in line for line in lines
    )
    assert lines[-1] == "8 finished"

    assert main(["grid.yaml"]) == 0
    assert starts() == names
    assert main(["grid.yaml", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8 finished"


def test_listed_commands_run_by_hand_count(capsys: pytest.CaptureFixture[str]) -> None:
    edit("command:", "env: {WORD: 'two words'}\ncommand:")
    assert main(["grid.yaml", "--list", "--only", "bft_*", "--root", "by hand"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and not Path("by hand").exists()
    for line in lines:
        subprocess.run(["sh", "-c", line.replace("python", sys.executable, 1)], check=True)
    assert results("bft_noise=0_seed=1", "by hand")["word"] == "two words"
    assert main(["grid.yaml", "--list", "--root", "by hand"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["grid.yaml", "--root", "by hand"]) == 0
    assert len(starts("by hand")) == 8


def test_numbers_and_files_are_compared_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    edit("steps: 2", "steps: 2.0e+0, wait: ./recipe.py")
    words = [
        "--steps",
        "2",
        "--names",
        "a",
        "b",
        "--wait",
        str(Path.cwd() / "recipe.py"),
        "--noise=0.30",
        "--seed",
        "1",
    ]
    words += ["--method", "sft", "--output_dir", "outputs/grid/sft_noise=0.3_seed=1"]
    subprocess.run([sys.executable, "recipe.py", *words], check=True)
    assert main(["grid.yaml", "--list", "--only", "sft_noise=0.3_seed=1"]) == 0
    assert capsys.readouterr().out == ""


def test_changed_flags_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grid.yaml", "--only", "*seed=1"]) == 0
    edit("{method: sft}", "{method: sft, steps: 3}")
    capsys.readouterr()
    assert main(["grid.yaml"]) == 2
    error = capsys.readouterr().err
    assert "sft_noise=0_seed=1 was done with other flags (steps 3 in the grid, 2 in the run), and 1 more" in error
    assert len(error.splitlines()) == 1 and len(starts()) == 4
    assert main(["grid.yaml", "--only", "*seed=1", "--changed", "keep"]) == 0 and len(starts()) == 4
    assert main(["grid.yaml", "--only", "*seed=1", "--changed", "rerun"]) == 0 and len(starts()) == 6
    # Afresh: the checkpoints there are of another run.
    assert results("sft_noise=0_seed=1")["first"] == 0 and flags_of(results("sft_noise=0_seed=1")["command"])[
        "steps"
    ] == ["3"]
    edit("base:", "unchecked: [names]\nbase:")
    edit("[a, b]", "[c]")
    assert main(["grid.yaml", "--only", "*seed=1"]) == 0 and len(starts()) == 6


def test_a_failure_is_written_down_and_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    edit("{method: bft}", "{method: broken}")
    assert main(["grid.yaml", "--only", "*seed=1", "--jobs", "2"]) == 1
    output = capsys.readouterr()
    assert "2 finished, 2 failed" in output.out and "failed: bft_noise=0_seed=1, bft_noise=0.3_seed=1" in output.err
    record = read_record(Path("outputs/grid/bft_noise=0_seed=1"))
    assert record["status"] == "failed" and record["exit_status"] == 1 and record["attempts"] == 1
    assert record["last_lines"][-1].endswith("ValueError: the method is broken")
    assert main(["grid.yaml", "--only", "*seed=1", "--skip-failed"]) == 1
    assert len(starts()) == 4
    # A failed run is tried again from its checkpoint; where that fails too, the next time afresh.
    assert main(["grid.yaml", "--only", "*seed=1"]) == 1
    assert [read_record(Path("outputs/grid/bft_noise=0_seed=1"))[key] for key in ("attempts", "resumed")] == [2, True]
    Path("mended").touch()
    assert main(["grid.yaml", "--only", "*seed=1"]) == 0
    assert results("bft_noise=0_seed=1")["first"] == 0


def test_no_results_is_a_failure() -> None:
    Path("recipe.py").write_text("print('done nothing')")
    assert main(["grid.yaml", "--only", "sft_noise=0_seed=1"]) == 1
    record = read_record(Path("outputs/grid/sft_noise=0_seed=1"))
    assert (record["why"], record["exit_status"]) == ("left no results.json", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_stops_the_runs_and_the_next_bench_goes_on(number: int) -> None:
    argv = ["grid.yaml", "--set", "wait=go", "--only", "*noise=0_seed=1", "--jobs", "2"]
    process = in_background(*argv)
    names = ["sft_noise=0_seed=1", "bft_noise=0_seed=1"]
    wait_for(lambda: all(last_checkpoint(Path("outputs/grid", name)) for name in names))
    children = [read_record(Path("outputs/grid", name))["pid"] for name in names]
    os.kill(process, number)
    assert status_of(process) == 130
    assert "interrupted; the same command goes on from here" in Path("bench.out").read_text()
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert [read_record(Path("outputs/grid", name))["status"] for name in names] == ["interrupted"] * 2
    # A checkpoint that was being written when the run was killed is passed over.
    Path("outputs/grid", names[0], "checkpoint-2").mkdir()
    Path("go").touch()
    assert main(argv) == 0
    assert results(names[0])["first"] == 1 and len(starts()) == 4


def test_a_bench_that_was_killed_leaves_no_run_done_twice(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["grid.yaml", "--set", "wait=go", "--only", "sft_noise=0_seed=1"]
    name = Path("outputs/grid/sft_noise=0_seed=1")
    process = in_background(*argv)
    wait_for(lambda: last_checkpoint(name))
    os.kill(process, signal.SIGKILL)
    status_of(process)
    # Its run goes on without it: another process in the same folder would spoil both.
    assert (name / "bench.lock").exists()
    assert main(argv) == 0
    assert "is still at it, though its bft-bench is gone" in capsys.readouterr().out and len(starts()) == 1
    os.killpg(read_record(name)["pid"], signal.SIGKILL)
    Path("go").touch()
    assert main(argv) == 0
    assert results(name.name)["first"] == 1 and len(starts()) == 2 and not (name / "bench.lock").exists()


def test_two_benches_share_a_grid() -> None:
    processes = [in_background("grid.yaml", "--jobs", "2") for _ in range(2)]
    assert [status_of(process) for process in processes] == [0, 0]
    assert len(starts()) == len(set(starts())) == 8
    text = Path("bench.out").read_text()
    assert text.count("8 finished") == 2


def test_a_lock_of_another_machine_is_respected_until_it_goes_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock._identity import _host

    grid, root = read_grid("grid.yaml"), Path("outputs/grid")
    runs = grid.runs(only=["sft_noise=0_seed=1"])
    folder = root / runs[0].name
    folder.mkdir(parents=True)
    lock = runner.Runner(grid, runs, root, lease=1.5)._lock(runs[0])
    lock.acquire()
    # The same lock as another machine would have written it.
    content = (folder / "bench.lock").read_text()
    host = _host.host_name()
    assert host in content
    assert runner.Runner(grid, runs, root, lease=1.5).run() == {runs[0].name: "elsewhere"} and starts() == []
    lock._stop_heartbeat()
    (folder / "bench.lock").write_text(content.replace(host, "elsewhere"))
    said: list[str] = []
    assert runner.Runner(grid, runs, root, lease=1.5, say=said.append).run() == {runs[0].name: "finished"}
    assert len(starts()) == 1


def test_threads_and_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert main(["grid.yaml", "--only", "sft_noise=0_*", "--jobs", "2"]) == 0
    assert results("sft_noise=0_seed=1")["threads"] == "4"
    assert main(["grid.yaml", "--only", "bft_noise=0_*", "--threads", "3", "--gpus", "4,5"]) == 0
    assert results("bft_noise=0_seed=1")["threads"] == "3"
    assert {results(f"bft_noise=0_seed={seed}")["gpu"] for seed in (1, 2)} == {"4", "5"}


def test_keep_results_drops_what_is_big() -> None:
    assert main(["grid.yaml", "--only", "sft_noise=0_seed=1", "--keep", "results"]) == 0
    assert main(["grid.yaml", "--only", "sft_noise=0_seed=2"]) == 0
    left = [sorted(path.name for path in Path("outputs/grid", f"sft_noise=0_seed={seed}").iterdir()) for seed in (1, 2)]
    assert left[0] == ["bench.json", "log.txt", "predictions.jsonl", "results.json"]
    assert {"model.safetensors", "checkpoint-2"} < {*left[1]}


def test_launch_stands_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    edit("command: python recipe.py", "launch: accelerate launch --num_processes 2\ncommand: bft-sft")
    assert main(["grid.yaml", "--list", "--only", "sft_noise=0_seed=1"]) == 0
    line = capsys.readouterr().out
    # A launcher takes a module, not the console script.
    assert line.startswith("accelerate launch --num_processes 2 -m bft_hf.recipes.sft --steps 2")
    edit(
        "launch: accelerate launch --num_processes 2\ncommand: bft-sft",
        "launch: env WORD=hello\ncommand: python recipe.py",
    )
    assert main(["grid.yaml", "--only", "sft_noise=0_seed=1"]) == 0
    assert results("sft_noise=0_seed=1")["word"] == "hello"


def test_stages_exclusions_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    edit("axes:", "exclude: [{arm: sft, noise: 0.3}]\nstages:\n  1: {arm: [bft], seed: [2]}\n  all: {}\naxes:")
    grid = read_grid("grid.yaml", ["steps=7", "learning-rate=1e-3", "names=[c]"])
    assert [run.name for run in grid.runs(["1"])] == ["bft_noise=0_seed=2", "bft_noise=0.3_seed=2"]
    every = [run.name for run in grid.runs()]
    # The first stage's runs first, and none twice.
    assert every[:2] == ["bft_noise=0_seed=2", "bft_noise=0.3_seed=2"] and len(every) == len(set(every)) == 6
    assert grid.runs()[0].flags == {
        "steps": 7, "learning_rate": 1e-3, "names": ["c"], "method": "bft", "noise": 0, "seed": 2
    }  # fmt: skip


REFUSED = {
    "no grid": (["none.yaml"], "none.yaml: no such grid (the package has "),
    "YAML": (["broken.yaml"], "broken.yaml, line 2: not readable as YAML"),
    "list": (["list.yaml"], "a grid must be lines of `name: value`, found list"),
    "key": (["key.yaml"], "unknown key 'axis', did you mean axes?"),
    "no axes": (["noaxes.yaml"], "noaxes.yaml: axes must be lines of `name: value`, found NoneType"),
    "launch": (["launch.yaml"], "launch.yaml: launch: No closing quotation"),
    "twice": (["twice.yaml"], "axes: seed: every value must be a text or a number, and stand there once"),
    "label": (["label.yaml"], "axes: arm: 'a_b' cannot be part of a run's name"),
    "bookkeeping": (["output.yaml"], "output_dir is for bft-bench to give: leave it out"),
    "exclude": (["exclude.yaml"], "exclude: unknown arm 'stf', did you mean sft?"),
    "stage": (["grid.yaml", "--stage", "9"], "grid: no stage '9' (it has none)"),
    "only": (["grid.yaml", "--only", "gce*"], "no run is left by --only gce*"),
    "set": (["grid.yaml", "--set", "steps"], "--set steps: expected flag=value"),
    "set an axis": (["grid.yaml", "--set", "method=gce"], "--set method: the axis arm sets it"),
    "command": (["command.yaml"], "command: no command 'bft-nothing' beside this Python or on PATH"),
    "jobs": (["grid.yaml", "--jobs", "0"], "argument --jobs: expected a positive integer, got 0"),
    "gpus": (["grid.yaml", "--jobs", "3", "--gpus", "0,1"], "--jobs 3 needs as many --gpus, got 0,1"),
    "flag": (["grid.yaml", "--job", "2"], "unrecognized arguments: --job 2 (bft-bench --help lists the flags)"),
    "root": (["grid.yaml", "--root", "recipe.py"], "--root recipe.py is a file: give a folder"),
    "results": (
        ["grid.yaml", "--root", "bad"],
        "results.json is no result of a run: remove it to have the run done again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_status_2(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, expected = REFUSED[case]
    axes = "axes: {seed: [1]}\n"
    files = {
        "broken.yaml": "command: x\naxes: [: 3\n",
        "list.yaml": "- command\n",
        "key.yaml": "command: x\naxis: {seed: [1]}\n",
        "noaxes.yaml": "command: x\n",
        "launch.yaml": f'command: x\nlaunch: "run \'it"\n{axes}',
        "twice.yaml": "command: x\naxes: {seed: [1, 1.0]}\n",
        "label.yaml": "command: x\naxes: {arm: {a_b: {}}}\n",
        "output.yaml": f"command: x\nbase: {{output_dir: y}}\n{axes}",
        "exclude.yaml": "command: x\naxes: {arm: {sft: {}}}\nexclude: [{arm: stf}]\n",
        "command.yaml": f"command: bft-nothing\n{axes}",
        "bad/sft_noise=0_seed=1/results.json": "{",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = sorted(folder.rglob("*"))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error.startswith("bft-bench: ") and expected in error
    assert sorted(folder.rglob("*")) == before


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert main(["grid.yaml"]) == 2
    assert "pip install 'bft-hf[bench]'" in capsys.readouterr().err and not Path("outputs").exists()


@pytest.mark.parametrize("axes", ["noise arm learning_rate", "learning_rate noise", "arm seed", "seed learning_rate"])
def test_names_of_any_order_of_axes_are_read_back(axes: str) -> None:
    """Runs started from --list leave nothing but their folder's name to tell what they are."""
    labels = {"arm": "[sft, bft]", "noise": "[0, 0.3]", "learning_rate": "[1e-4, 2e-4]", "seed": "[1, 2]"}
    lines = [f"  {axis}: {labels[axis]}" for axis in axes.split()]
    Path("order.yaml").write_text("\n".join(["command: bft-sft", "axes:", *lines]))
    runs = read_grid("order.yaml").runs()
    assert len({run.name for run in runs}) == len(runs) == 2 ** len(lines)
    assert all(parse_name(run.name) == run.axes for run in runs)


def test_names_are_read_back() -> None:
    assert parse_name("bft+gce_noise=0.3_learning_rate=1e-3_seed=1") == {
        "arm": "bft+gce", "noise": 0.3, "learning_rate": 1e-3, "seed": 1
    }  # fmt: skip
    assert parse_name("seed=1_kind=unigram") == {"seed": 1, "kind": "unigram"}
    for name in ("bft_noise", "bft_noise=0.3.lock_x", "_seed=1", ""):
        with pytest.raises(UsageError, match="no run's name"):
            parse_name(name)


def test_last_lines_of_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n 10%\r 20%\r 30%\n\nlast \n")
    assert last_lines(tmp_path / "log") == ["one", " 30%", "last"]
    assert last_lines(tmp_path / "none") == []


SHIPPED = sorted(file.name for file in GRIDS.glob("*.yaml"))


def test_every_shipped_grid_is_of_a_recipe_whose_flags_are_checked() -> None:
    assert {read_grid(grid).command for grid in SHIPPED} == {"bft-sft", "bft-rec"}


@pytest.mark.parametrize("grid", [grid for grid in SHIPPED if read_grid(grid).command == "bft-sft"])
def test_flags_of_the_shipped_grids_are_the_recipes(grid: str) -> None:
    from bft_hf.recipes.arguments import METHODS, full_parser

    found = read_grid(grid)
    known = {action.dest for action in full_parser()._actions}
    for run in found.runs():
        assert {*run.flags} <= known, {*run.flags} - known
        assert run.flags["method"] in METHODS
        assert shlex.split(shlex.join(map(str, run.axes.values())))


@pytest.mark.parametrize("name", ["squad_noise", "squad_ablations"])
def test_stored_runs_are_runs_of_their_grid(name: str) -> None:
    folder = REPOSITORY / "docs" / "results" / name
    if not (REPOSITORY / "docs").is_dir():
        pytest.skip("no docs/ beside tests/, as in the sdist")
    stored = {record.name: record for record in read_whole([folder])}
    [dataset] = {flags_of(record.results["command"])["dataset"][0] for record in stored.values()}
    grid = read_grid(f"{name}.yaml", [f"dataset={dataset}"])
    runs = {run.name: run for run in grid.runs() if run.name in stored}
    assert runs.keys() == stored.keys()
    # A start that is given by its numbers, or as it was the default then, is the start that was computed.
    written_otherwise = ("process_noise", "initial_precision")
    for label, run in runs.items():
        results = stored[label].results
        assert run.axes == stored[label].axes
        assert differences(run, results["command"], [*grid.unchecked, *written_otherwise]) == []
        assert (results["bft_config"] is not None) == run.flags["method"].startswith("bft")
        if results["bft_config"]:
            start = [results["bft_config"][key] for key in ("initial_process_noise", "initial_precision_value")]
            assert start == [run.flags.get("process_noise", 100), run.flags.get("initial_precision", 0.01)]
            overrides = parse_overrides("bft_overrides", run.flags.get("bft_overrides"))
            assert overrides.items() <= results["bft_config"].items()


@pytest.mark.parametrize("grid", [grid for grid in SHIPPED if read_grid(grid).command == "bft-rec"])
def test_runs_of_the_shipped_recommender_grids_are_models_the_recipe_builds(grid: str) -> None:
    from bft_hf import get_config
    from bft_hf.recipes.rec import build_model
    from bft_hf.recipes.rec_arguments import parse

    seen = set()
    for run in read_grid(grid).runs():
        arguments = parse(to_argv(run.flags))
        assert arguments.seed == run.axes["seed"] and arguments.loss_dtype == "bfloat16"  # of the settings' file
        if run.axes["seed"] != 1:
            continue
        model = build_model(arguments, num_items=20)
        config = get_config(model)
        assert (config is None) == (arguments.method == "plain")
        changes = parse_overrides("bft_overrides", arguments.bft_overrides)
        assert changes.items() <= (config.to_dict() if config else {}).items()
        seen.add((arguments.data, type(model).__name__, str(config)))
    assert len(seen) == sum(run.axes["seed"] == 1 for run in read_grid(grid).runs())
    assert all("--test false" in shlex.join(to_argv(run.flags)) for run in read_grid("rec_ablations.yaml").runs())


def test_smoke_grid_runs_and_reports(stories260k: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real recipe, in a process of its own; one of the grid's four runs."""
    argv = ["smoke.yaml", "--set", f"model_name_or_path={stories260k}", "--only", "bft_*_seed=1"]
    assert main(argv) == 0, Path("outputs/smoke/bft_noise=0.3_seed=1/log.txt").read_text()
    left = {path.name for path in Path("outputs/smoke/bft_noise=0.3_seed=1").iterdir()}
    assert left == {"bench.json", "log.txt", "predictions.jsonl", "results.json"}
    assert main(argv) == 0 and capsys.readouterr().out.endswith("1 finished\n")
    assert main(["report", "outputs/smoke"]) == 0
    text = capsys.readouterr().out
    assert "## answer_nll (lower is better)" in text and "## f1 (higher is better)" in text and "n = 8" in text
