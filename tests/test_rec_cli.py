"""The command bft-rec from its flags to the files it leaves, resumed, in two processes, and every way in which it refuses."""

import csv
import gzip
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModel

import bft_hf
from bft_hf.rec.data import Split
from bft_hf.rec.metrics import summarize
from bft_hf.rec.training import Trainer
from bft_hf.recipes.rec import build_model, main
from bft_hf.recipes.rec_arguments import LEARNED, parse
from bft_hf.recipes.records import read_run

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "recipes" / "configs"
ITEMS = 53
TINY = [
    "--hidden_size",
    "8",
    "--num_layers",
    "1",
    "--num_heads",
    "1",
    "--max_length",
    "12",
    "--batch_size",
    "16",
    "--epochs",
    "2",
    "--learning_rate",
    "0.01",
]


def histories(users: int = 90, seed: int = 0) -> dict[str, list[str]]:
    """Walks around a ring of items named like goods; now and then one is left out."""
    rng = np.random.default_rng(seed)
    rows = {}
    for user in range(users):
        steps = rng.choice([1, 1, 1, 2], size=rng.integers(4, 15))
        rows[f"user-{user}"] = [f"thing{i % ITEMS:02d}" for i in rng.integers(ITEMS) + np.cumsum(steps)]
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "ring.txt.gz"
    lines = "".join(f"{user} {' '.join(items)}\n" for user, items in histories().items())
    path.write_bytes(gzip.compress(lines.encode()))
    return str(path)


@pytest.fixture
def run(data: str, tmp_path: Path) -> Callable[..., Path]:
    def command(*flags: str, name: str = "out", status: int = 0) -> Path:
        assert main(["--data", data, *TINY, "--output_dir", str(tmp_path / name), *flags]) == status
        return tmp_path / name

    return command


@contextmanager
def interrupted_at(epoch: int) -> Iterator[None]:
    """Training is interrupted as this epoch is to begin."""
    original = Trainer._epoch

    def interrupted(self: Trainer, number: int) -> None:
        if number == epoch:
            raise KeyboardInterrupt
        original(self, number)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Trainer, "_epoch", interrupted)
        yield


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("method", ["plain", "bft"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_run_leaves_results_ranks_model_and_names(
    name: str, method: str, run: Any, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("--model", name, "--method", method, "--seed", "3")
    results = results_of(out)
    assert (results["task"], results["model"], results["method"], results["seed"]) == ("rec", name, method, 3)
    assert shlex.split(results["command"])[:3] == ["bft-rec", "--data", data]
    assert {"torch", "transformers", "accelerate", "bft-hf"} <= set(results["versions"])
    about = results["data"]
    assert (about["users"], about["items"], about["evaluated_users"], about["k_core"]) == (90, ITEMS, 90, 0)
    assert "no timestamps" in about["order"] and about["test_items_never_trained_on"] >= 0
    assert [entry["epoch"] for entry in results["epochs"]] == [1, 2]
    assert results["epochs"][0]["loss"] != results["epochs"][1]["loss"]
    assert results["settings"]["batch_size"] == 16 and results["settings"]["loss"] == "full"
    assert {"epoch", "epoch_cpu", "training", "evaluation", "total"} <= set(results["seconds"])
    best = results["epochs"][results["best_epoch"] - 1]["validation"]
    assert best == pytest.approx({key: results["validation"][key] for key in best})
    for part in ("validation", "test"):
        row = results[part]
        assert {f"{metric}@{k}" for metric in ("hr", "ndcg") for k in (5, 10, 20)} | {"mrr", "coverage@10", "n"} == set(
            row
        )
        assert row["n"] == 90 and row["hr@5"] <= row["hr@10"] <= row["hr@20"]
    for strata in results["strata"].values():
        assert sum(row["n"] for row in strata.values()) == 90
    # The users' ranks hold the same test.
    with gzip.open(out / "per_user.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    columns = ["user", "item", "rank", "frequency", "item_quartile", "history_length"]
    assert list(rows[0]) == columns + ["precision"] * (method == "bft")
    again = summarize(np.array([int(row["rank"]) for row in rows]))
    assert again == pytest.approx({key: results["test"][key] for key in again})
    assert [row["item"] for row in rows] == [items[-1] for items in histories().values()]
    q0 = [int(row["rank"]) for row in rows if row["item_quartile"] == "Q0"]
    assert summarize(np.array(q0))["mrr"] == pytest.approx(results["strata"]["item_frequency"]["Q0"]["mrr"])
    # The model loads by its Auto class, with its items' names, and ranks as it did.
    model = AutoModel.from_pretrained(out)
    assert bft_hf.is_patched(model) == (method == "bft") == (results["parameters"]["bft"] > 0)
    assert (results["bft_config"] is None) == (method == "plain")
    user = next(iter(histories().values()))
    found = model.recommend([user[:-1]], k=ITEMS)[0]
    position = [row.item for row in found].index(user[-1]) + 1
    assert position == int(rows[0]["rank"])
    if method == "bft":
        assert float(rows[0]["precision"]) == pytest.approx(found[0].precision, rel=1e-4)
        kept = results["filter"]
        assert kept["gain"].keys() == kept["log_initial_precision"].keys() == kept["positions"].keys()
        assert all(0 < gain < 1 for layers in kept["gain"].values() for gain in layers) and len(kept["gain"]) > 1
    else:
        assert "filter" not in results
    assert not (out / "training.pt").exists()
    shown = capsys.readouterr().out
    assert "epoch 2: loss" in shown and "test items Q0" in shown and "history 6-10" in shown


def test_arms_begin_with_the_same_weights(data: str) -> None:
    plain, patched = (
        build_model(parse(["--data", data, *TINY, "--method", method]), ITEMS).state_dict()
        for method in ("plain", "bft")
    )
    assert set(plain) < set(patched)
    assert all(torch.equal(value, patched[name]) for name, value in plain.items())
    other = build_model(parse(["--data", data, *TINY, "--seed", "1"]), ITEMS).state_dict()
    assert not torch.equal(other["embed_items.weight"], plain["embed_items.weight"])


def test_training_learns_the_ring(run: Any) -> None:
    learned = results_of(run("--epochs", "25", "--dropout", "0", "--patience", "0"))
    popular = results_of(run("--model", "popularity", name="popular"))
    assert learned["test"]["ndcg@5"] > 0.5 > 0.3 > popular["test"]["ndcg@5"]
    assert popular["data"] == learned["data"] and popular["bft_config"] is None
    followed = results_of(run("--model", "transitions", name="followed"))
    assert followed["test"]["ndcg@5"] > 0.5 and followed["model"] == "transitions"


@pytest.mark.parametrize("flags", [["--method", "bft"], ["--model", "transitions"]], ids=["learned", "counted"])
def test_choosing_leaves_the_test_alone(
    flags: list[str], run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = results_of(run(*flags, name="plain_seed=1"))
    monkeypatch.setattr("bft_hf.rec.data.Split.targets", validation_alone(Split.targets))
    monkeypatch.setattr("bft_hf.recipes.rec.data_summary", lambda *_: {})
    capsys.readouterr()
    out = run(*flags, "--test", "false", name="chosen_seed=1")
    results = results_of(out)
    assert "test" not in results and results["validation"] == both["validation"] and results["flags"]["test"] is False
    assert (results["per_user"], both["per_user"]) == ("validation", "test")
    shown = capsys.readouterr().out
    assert "validation items Q0" in shown and "\ntest" not in shown
    with gzip.open(out / "per_user.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows] == [items[-2] for items in histories().values()]
    again = summarize(np.array([int(row["rank"]) for row in rows]))
    assert again == pytest.approx({key: results["validation"][key] for key in again})
    assert [int(row["history_length"]) for row in rows] == [len(items) - 2 for items in histories().values()]
    # What bft-bench reads of it.
    record = read_run(out)
    assert np.mean(record.numbers["validation_ndcg@10"]) == pytest.approx(again["ndcg@10"], abs=1e-4)
    for name, kind in {"item_quartile": "item_frequency", "history_length": "history_length"}.items():
        counts = {label: row["n"] for label, row in results["strata"][kind].items()}
        assert Counter(record.strata[name]) == counts and len(counts) > 1


def validation_alone(targets: Callable[[Split, str], np.ndarray]) -> Callable[[Split, str], np.ndarray]:
    """The held-out items of a split that has those of validation to give and no others."""

    def refuse(split: Split, part: str) -> np.ndarray:
        assert part == "validation"
        return targets(split, part)

    return refuse


def test_early_stopping_keeps_the_best_epoch(run: Any) -> None:
    results = results_of(run("--epochs", "60", "--patience", "2", "--learning_rate", "0.05"))
    scores = [entry["validation"]["ndcg@10"] for entry in results["epochs"]]
    assert results["stopped_early"] and len(scores) < 60
    assert results["best_epoch"] == int(np.argmax(scores)) + 1 == len(scores) - 2
    assert results["validation"]["ndcg@10"] == pytest.approx(max(scores))


@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "bft"],
        ["--loss", "sampled", "--negatives", "8", "--schedule", "cosine", "--warmup_steps", "3"],
        ["--model", "bert4rec"],
    ],
    ids=["bft", "sampled", "cloze"],
)
def test_a_resumed_run_is_bit_by_bit_the_uninterrupted_one(
    flags: list[str], run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags, "--epochs", "4", "--patience", "0"]
    whole = run(*flags, name="whole")
    with interrupted_at(3):
        half = run(*flags, name="half", status=130)
    assert "--resume goes on" in capsys.readouterr().err
    assert sorted(path.name for path in half.iterdir()) == ["training.pt"]
    run(*flags, "--resume", name="half")
    assert "going on after epoch 2" in capsys.readouterr().out
    assert (half / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (half / "per_user.csv.gz").read_bytes() == (whole / "per_user.csv.gz").read_bytes()
    losses = [[entry["loss"] for entry in results_of(folder)["epochs"]] for folder in (half, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    # A finished run is left as it is; another run's checkpoint is refused.
    before = (half / "results.json").read_bytes()
    run(*flags, "--resume", name="half")
    assert "finished" in capsys.readouterr().out and (half / "results.json").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Trainer._epoch

    def interrupted(self: Trainer, epoch: int) -> None:
        original(self, epoch)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_epoch", interrupted)
    run(status=130)
    capsys.readouterr()
    run("--resume", "--batch_size", "32", status=2)
    assert "of a run with other settings or data" in capsys.readouterr().err
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
    run("--resume", "--mixed_precision", "bf16", status=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "of a run with other settings or data" in capsys.readouterr().err
    run(status=2)
    assert "exists and is not empty: give another one, --overwrite, or --resume" in capsys.readouterr().err
    # How much is evaluated at once changes nothing: with less memory one may go on.
    run("--resume", "--evaluation_batch_size", "16", status=130)
    assert "going on after epoch 1" in capsys.readouterr().out
    checkpoint = tmp_path / "out" / "training.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])
    run("--resume", status=2)
    assert "training.pt is not whole: start anew with --overwrite" in capsys.readouterr().err


def test_fewer_epochs_than_were_evaluated_are_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with interrupted_at(3):
        run("--epochs", "4", "--evaluate_every", "4", status=130)
    capsys.readouterr()
    run("--epochs", "2", "--evaluate_every", "4", "--resume", status=2)
    assert "2 epochs are done and none of them was evaluated" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_what_is_not_ours_is_left_alone(flag: str, data: str, tmp_path: Path) -> None:
    """Somebody's own model and README make no folder of bft-rec's."""
    names = ("README.md", "config.json", "model.safetensors", "main.py")
    for name in names:
        (tmp_path / name).write_text("mine")
    status = main(["--data", data, "--model", "popularity", "--output_dir", str(tmp_path), flag])
    assert status == (2 if flag == "--resume" else 0)
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_an_output_folder_that_cannot_be_made_is_one_line(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for model in ("popularity", "sasrec"):
        flags = ["--data", data, "--model", model, "--output_dir", str(tmp_path / "file" / "out")]
        assert main([*TINY, *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith("bft-rec: --output_dir: ") and error.count("\n") == 1


def test_two_processes_follow_one(run: Any, data: str, tmp_path: Path) -> None:
    """Losses, metrics, ranks and weights; dropout draws by process, so it is off. The last batch has a single window."""
    flags = ["--dropout", "0", "--method", "bft", "--batch_size", "89", "--epochs", "2", "--loss", "sampled"]
    alone = run(*flags, name="alone")
    out = tmp_path / "two"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "accelerate" / "ddp_cpu.yaml")]
    command = ["--main_process_port", "0", "-m", "bft_hf.recipes.rec", "--data", data, *TINY, "--output_dir", str(out)]
    done = subprocess.run(
        [sys.executable, *launcher, *command, *flags], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("epoch 2: loss") == 1
    one, two = results_of(alone), results_of(out)
    assert (one["processes"], two["processes"]) == (1, 2)
    for first, second in zip(one["epochs"], two["epochs"], strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert second["validation"] == pytest.approx(first["validation"], abs=1e-3)
    torch.testing.assert_close(
        load_file(out / "model.safetensors"), load_file(alone / "model.safetensors"), rtol=0, atol=1e-4
    )
    assert two["test"] == pytest.approx(one["test"], abs=1e-3)


def test_other_formats_orders_and_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.csv"
    rows = [(user, item, t // 3) for user, items in histories().items() for t, item in enumerate(items)]
    path.write_text("u,i,t\n" + "".join(f"{user},{item},{t}\n" for user, item, t in rows))
    columns = ["--user_column", "u", "--item_column", "i", "--time_column", "t"]
    out = tmp_path / "out"
    flags = ["--data", str(path), *columns, *TINY, "--epochs", "1", "--k_core", "6", "--output_dir", str(out)]
    assert main([*flags, "--ties", "shuffle", "--ties_seed", "5"]) == 0
    about = results_of(out)["data"]
    assert about["order"] == "by timestamp, ties shuffled with seed 5" and about["k_core"] == 6
    assert about["users"] < 90 and about["users_with_test_and_validation_at_one_time"] > 0
    assert main([*flags, "--overwrite", "--model", "hstu", "--time_bias"]) == 0
    assert results_of(out)["model_config"]["time_buckets"] == 128
    capsys.readouterr()
    assert (
        main(["recommend", "--model", str(out), "--history", "thing01 thing02", "--timestamps", "1 2", "--k", "2"]) == 0
    )
    assert main(["recommend", "--model", str(out), "--history", "thing01 thing02"]) == 2
    assert "time bias" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    titles = folder / "titles.tsv"
    titles.write_text("thing03\tThe third thing\nunheard-of\tNo thing\n")
    out = str(folder / "out")
    flags = ["--epochs", "20", "--method", "bft", "--dropout", "0", "--patience", "0", "--item_titles", str(titles)]
    assert main(["--data", data, *TINY, *flags, "--output_dir", out]) == 0
    return out


def test_recommend_prints_names_scores_and_certainty(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--model", trained, "--history", "thing00 thing01 thing02", "--k", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("After thing00 thing01 thing02 (final precision ") and len(lines) == 4
    assert "thing03" in lines[1] and "The third thing" in lines[1] and " ± " in lines[1]
    assert main(["recommend", "--model", trained, "--history", "thing00", "--history", "thing05", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["history"] for row in rows] == [["thing00"], ["thing05"]]
    first = rows[1]["recommendations"][0]
    assert "thing05" not in [row["item"] for row in rows[1]["recommendations"]]
    assert len(rows[0]["recommendations"]) == 10 and first["item"] == "thing06" and first["score_std"] > 0


def test_recommend_may_include_what_was_seen(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["recommend", "--model", trained, "--history", "thing05", "--k", str(ITEMS)]
    counts = []
    for more in ([], ["--include_seen"]):
        assert main([*flags, *more]) == 0
        counts.append(capsys.readouterr().out.count("score"))
    assert counts == [ITEMS - 1, ITEMS]


def test_recommend_reads_histories_from_a_file(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "histories.txt"
    path.write_text("thing00 thing01\n\nthing05 'no such thing'\n")
    flags = ["recommend", "--model", trained, "--histories", str(path), "--k", "1"]
    assert main([*flags, "--skip_unknown"]) == 0
    assert capsys.readouterr().out.count("After") == 2
    assert main(flags) == 2
    assert "unknown item 'no such thing'" in capsys.readouterr().err


BAD: list[tuple[list[str], str]] = [
    ([], "--data is missing"),
    (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    (["--dropuot", "0.1"], "unknown flag --dropuot, did you mean --dropout?"),
    (["--model", "gru"], "unknown --model 'gru': choose from sasrec, bert4rec, hstu"),
    (["--method", "sft"], "unknown --method 'sft': choose from plain, bft"),
    (["--epochs", "0"], "--epochs must be at least 1"),
    (["--epochs", "many"], "invalid int value"),
    (["--dropout", "1"], r"--dropout must be in [0, 1)"),
    (["--learning_rate", "nan"], "--learning_rate must be a finite number"),
    (["--learning_rate", "0"], "--learning_rate must be a positive number"),
    (["--process_noise", "1"], "add --method bft"),
    (["--method", "bft", "--model", "popularity"], "is no transformer"),
    (["--method", "bft", "--process_noise", "-1"], "--process_noise must be a positive number"),
    (["--mask_probability", "0.3"], "add --model bert4rec"),
    (["--time_bias"], "add --model hstu"),
    (["--model", "hstu", "--time_bias"], "the data has none"),
    (["--ties", "shuffle"], "has lost which of them fell on one day"),
    (["--k_core", "500"], "the 500-core is empty"),
    (["--hidden_size", "9", "--num_heads", "2"], "no multiple of num_attention_heads"),
    (["--config_overrides", "hidden=3"], "SASRecConfig has no field 'hidden'"),
    (["--config_overrides", "hidden"], "'hidden' is no name=value"),
    (["--method", "bft", "--bft_overrides", "granularity=word"], "granularity is 'word'"),
    (["--method", "bft", "--bft_overrides", "grain=word"], "BFTConfig has no field 'grain'"),
    (["--method", "bft", "--bft_config", "none.json"], "--bft_config none.json: no such file"),
    (["--item_titles", "none.tsv"], "--item_titles none.tsv: no such file"),
    (["--overwrite", "--resume"], "give one of them"),
    (["--data_format", "json"], "not JSON"),
    (["--config_overrides", "num_attention_heads=0"], "num_attention_heads is 0: it has to be at least 1"),
    (["--config_overrides", "intermediate_size=-1"], "the model's configuration: "),
    (
        ["--model", "bert4rec", "--config_overrides", "mask_probability=5"],
        "mask_probability is 5: it has to be in (0, 1)",
    ),
    (["--config", "on.yaml"], "--config on.yaml: unknown flag 'True'"),
    (["--config", "none.yaml"], "--config none.yaml: no such file"),
    (["--learning_rate", "1e30", "--epochs", "3"], "lower --learning_rate, or clip by --max_grad_norm 1"),
    (["recommend", "--history", "1"], "the following arguments are required: --model"),
    (["recommend", "--model", "nowhere", "--history", "1"], "nowhere: no such folder"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[" ".join(flags) or "none" for flags, _ in BAD])
def test_bad_input_is_one_line_and_status_2(
    flags: list[str],
    message: str,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    Path("on.yaml").write_text("on: true\n")
    argv = flags
    if flags[:1] != ["recommend"]:
        given = [] if not flags or "--data" in flags else ["--data", data]
        argv = [*TINY, *given, *flags, "--output_dir", str(out)]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("bft-rec: ") and error.count("\n") == 1 and message in error
    assert not (out / "results.json").exists()
    if "1e30" not in flags:
        assert not out.exists()


def test_malformed_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("1 2 3 4\n5\n")
    assert main(["--data", str(path), "--output_dir", str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr().err
        == f"bft-rec: --data: {path}, line 2: user '5' without an item, expected `user item item ...`\n"
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("rec_*.yaml")), ids=lambda path: path.stem)
def test_shipped_settings_run(path: Path, data: str, tmp_path: Path) -> None:
    """Each as it is but for the data and the size."""
    out = tmp_path / "out"
    flags = [*TINY, "--config", path.name, "--data", data, "--epochs", "1", "--evaluate_every", "1"]
    assert main([*flags, "--output_dir", str(out)]) == 0
    assert results_of(out)["test"]["n"] == 90


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name in ("--data", "--k_core", "--bft_learning_rate", "--resume", "bft-rec recommend"):
        assert name in shown
