"""bft-bench report and pack on runs whose numbers are known: tables, refusals, and the same bytes from the packed runs."""

import csv
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bft_hf.recipes.bench import main
from bft_hf.recipes.comparison import Comparison, lower_is_better
from bft_hf.recipes.records import read_all

QUESTIONS = 60
SEEDS = (1, 2, 3, 4, 5)
GAIN = 0.2  # of bft's F1 at noise .3, and nowhere else


def numbers(arm: str, noise: float, seed: int) -> "np.ndarray[Any, Any]":
    """F1 of every question: harder with noise, a little luck in each seed, and GAIN where it was planted."""
    easy = np.random.default_rng(0).uniform(0.3, 0.6, QUESTIONS)
    luck = np.random.default_rng([seed, ord(arm[0]), round(10 * noise)]).normal(0, 0.03, QUESTIONS)
    return easy - noise / 2 + luck + (GAIN if arm == "bft" and noise == 0.3 else 0.0)


def write_run(root: Path, arm: str, noise: float, seed: int, **changes: Any) -> Path:
    folder = root / f"{arm}_noise={noise:g}_seed={seed}"
    folder.mkdir(parents=True)
    values = numbers(arm, noise, seed)
    rows = [
        {
            "id": f"question-{i}",
            "prediction": "a",
            "answers": ["a", "b"],
            "f1": value if i < 50 else None,
            "answer_nll": 2 - value,
            "truncated": False,
            "kind": "easy" if i % 2 else "hard",
        }
        for i, value in enumerate(values)
    ]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    results = {
        "command": f"bft-sft --method {arm} --max_steps 60 --noise {noise:g} --seed {seed} --output_dir {folder}",
        "seed": seed,
        "after": {"f1": 0.5, "answer_nll": 1.5, "n": QUESTIONS},
        "versions": {"torch": "2"},
        "device": "cpu",
        **changes,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two arms at three rates of noise with five seeds."""
    monkeypatch.chdir(tmp_path)
    for arm in ("sft", "bft"):
        for noise in (0, 0.1, 0.3):
            for seed in SEEDS:
                write_run(tmp_path / "runs", arm, noise, seed)
    # What others leave beside runs is none.
    (tmp_path / "runs" / "bft_noise=0_seed=9").mkdir()
    (tmp_path / "runs" / "log.txt").write_text("")
    return tmp_path / "runs"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*argv: str) -> str:
        assert main(["report", *argv]) == 0
        return capsys.readouterr().out

    return run


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def section(text: str, heading: str) -> str:
    """From a heading to the next of any level."""
    return text.split(f"# {heading}")[1].split("\n#")[0]


def cells(text: str, *first: str) -> list[str]:
    """The cells of the one table row that starts with these."""
    found = [line for line in text.splitlines() if line.startswith(f"| {' | '.join(first)} |")]
    assert len(found) == 1, (first, text)
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_a_planted_difference_is_found_and_no_other(runs: Path, report: Callable[..., str]) -> None:
    text = report("runs", "--baseline", "sft")
    assert text.startswith("    bft-bench report runs --baseline sft\n\n30 runs of:\n\n    bft-sft --max_steps 60\n")
    assert "| bft | `--method bft` | 1, 2, 3, 4, 5 |" in text
    assert "so nothing here is a claim" not in text and "Not there" not in text
    differences = section(text, "f1: less sft, paired by seed and question")
    assert "`bft-bench report runs --baseline sft`; seeds 1, 2, 3, 4, 5; n = 50" in differences
    assert cells(differences, "noise=0", "bft")[-1] == "undecided"
    found = cells(differences, "noise=0.3", "bft")
    assert found[3] == "yes" and found[6:] == ["5", "50", "better"] and found[2].startswith("+0.")
    # Less of it is better, and it was planted with the other sign.
    nll = cells(section(text, "answer_nll: less sft, paired by seed and question"), "noise=0.3", "bft")
    assert nll[2].startswith("-0.") and nll[6:] == ["5", "60", "better"]
    changed = section(text, "f1: change from noise=0 to noise=0.3")
    assert cells(changed, "all runs", "sft")[2].startswith("-0.1")


def test_tables_hold_the_means(runs: Path, report: Callable[..., str]) -> None:
    report("runs", "--baseline", "sft", "--out", "out")
    means = {(row["metric"], row["arm"], row["noise"]): row for row in rows_of(Path("out/means.csv"))}
    expected = np.mean([numbers("bft", 0.3, seed)[:50] for seed in SEEDS])
    row = means["f1", "bft", "0.3"]
    assert float(row["mean"]) == pytest.approx(expected, abs=1e-4) and (row["seeds"], row["n"]) == ("5", "50")
    assert float(row["low"]) < expected < float(row["high"])
    pair = [[numbers(arm, 0.3, seed) for seed in SEEDS] for arm in ("bft", "sft")]
    difference = next(
        row for row in rows_of(Path("out/differences.csv")) if (row["metric"], row["noise"]) == ("answer_nll", "0.3")
    )
    assert float(difference["mean"]) == pytest.approx(-np.mean(np.subtract(*pair)), abs=2e-4)
    # Paired: far narrower than either mean, which has the spread of the questions.
    assert float(difference["high"]) - float(difference["low"]) < 0.5 * (float(row["high"]) - float(row["low"]))
    change = next(row for row in rows_of(Path("out/changes.csv")) if (row["metric"], row["arm"]) == ("f1", "sft"))
    fall = [numbers("sft", 0.3, seed)[:50] - numbers("sft", 0, seed)[:50] for seed in SEEDS]
    assert float(change["mean"]) == pytest.approx(np.mean(fall), abs=2e-4) and change["over"] == "noise"
    less = next(row for row in rows_of(Path("out/changes_less_baseline.csv")) if row["metric"] == "f1")
    assert float(less["mean"]) == pytest.approx(GAIN, abs=0.03)


def test_packed_runs_give_the_same_bytes(
    runs: Path, report: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    from_folders = report("runs", "--baseline", "sft")
    assert main(["pack", "runs", "packed/grid"]) == 0
    assert "30 runs in packed/grid, the largest " in capsys.readouterr().out
    files = sorted(Path("packed/grid").iterdir())
    assert len(files) == 30 and all(file.suffix == ".json" and file.stat().st_size < 50_000 for file in files)
    content = files[0].read_bytes()
    assert main(["pack", "runs", "packed/grid"]) == 0 and files[0].read_bytes() == content
    capsys.readouterr()
    shutil.rmtree(runs)
    from_packed = report("packed/grid", "--baseline", "sft")
    assert from_packed == from_folders.replace("report runs", "report packed/grid")

    report("packed/grid", "--baseline", "sft", "--out", "one")
    report("packed/grid", "--out=two", "--baseline", "sft")
    for file in Path("one").iterdir():
        assert file.read_bytes() == Path("two", file.name).read_bytes(), file.name
    assert {file.name for file in Path("one").iterdir()} == {
        "report.md", "means.csv", "differences.csv", "changes.csv", "changes_less_baseline.csv", "changes_to_each.csv",
        "changes_to_each_less_baseline.csv", "f1_over_noise.svg", "f1_change_over_noise.svg", "answer_nll_over_noise.svg",
        "answer_nll_change_over_noise.svg",
    }  # fmt: skip
    assert "![f1 over noise](f1_over_noise.svg)" in Path("one/report.md").read_text()
    assert b"<svg" in Path("one/f1_over_noise.svg").read_bytes()
    assert "--out" not in Path("one/report.md").read_text()


def test_a_large_run_is_packed_tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs", "sft", 0, 1)
    rows = [{"id": f"a-long-name-of-a-question-{i}", "f1": i % 7 / 7} for i in range(3000)]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["pack", "runs", "packed"]) == 0
    [file] = Path("packed").iterdir()
    assert file.name.endswith(".json.gz") and file.stat().st_size < 50_000
    assert read_all(["packed"])[0].numbers["f1"] == [round(i % 7 / 7, 4) for i in range(3000)]


def test_fewer_seeds_are_no_claim(runs: Path, report: Callable[..., str]) -> None:
    for folder in runs.glob("*_seed=[45]"):
        shutil.rmtree(folder)
    text = report("runs", "--baseline", "sft")
    assert "**3 seeds: fewer than 5, so nothing here is a claim.**" in text
    assert "| better, no claim (3 seeds) |" in text and "| better |" not in text
    for folder in runs.glob("*_seed=[23]"):
        shutil.rmtree(folder)
    text = report("runs", "--baseline", "sft", "--out", "out") and Path("out/report.md").read_text()
    assert "| better, no claim (1 seed) |" in text
    assert {row["note"] for row in rows_of(Path("out/differences.csv"))} == {
        "one seed: the interval leaves out how much another would differ"
    }


def test_missing_runs_are_named_and_pairs_are_of_shared_seeds(runs: Path, report: Callable[..., str]) -> None:
    shutil.rmtree(runs / "bft_noise=0.3_seed=2")
    for seed in SEEDS:
        shutil.rmtree(runs / f"sft_noise=0.1_seed={seed}")
    text = report("runs", "--baseline", "sft")
    assert "Not there: sft noise=0.1 seed=1; " in text and "; bft noise=0.3 seed=2." in text
    differences = section(text, "f1: less sft, paired by seed and question")
    assert cells(differences, "noise=0.1", "bft")[2] == "(no seed in common)"
    assert cells(differences, "noise=0.3", "bft")[6:] == ["4", "50", "better, no claim (4 seeds)"]
    assert "(no run)" in text and "(4 seeds)" in section(text, "f1 (higher is better)")


def test_other_questions_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "bft_noise=0.3_seed=2" / "predictions.jsonl"
    file.write_text(file.read_text().replace("question-7", "question-77"))
    assert main(["report", "runs", "--baseline", "sft", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "of different questions (2 are in one only)" in error
    assert "bft_noise=0.3_seed=2" in error and not Path("out").exists()


def test_distractors_within_a_run_are_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for arm, drop in (("sft", 0.3), ("bft", 0.1)):
        for seed in SEEDS:
            folder = write_run(tmp_path / "runs", arm, 0, seed)
            values = numbers(arm, 0, seed)
            rows = [
                {"id": i, "f1": value - drop * k / 4, "distractors": k}
                for k in (0, 2, 4)
                for i, value in enumerate(values)
            ]
            (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report("runs", "--baseline", "sft")
    changed = section(text, "f1: change from distractors=0 to distractors=4")
    assert cells(changed, "noise=0", "sft", "-0.300 [-0.300, -0.300]", "5") and "10 runs of:" in text
    assert cells(changed, "noise=0", "bft", "+0.200 [+0.200, +0.200]", "yes")[-1] == "better"
    assert main(["pack", "runs", "packed"]) == 0 and len(list(Path("packed").iterdir())) == 10
    assert "distractors=4" in report("packed")

    report("packed", "--baseline", "sft", "--out", "out")
    assert "![f1 change over distractors](f1_change_over_distractors.svg)" in Path("out/report.md").read_text()
    drops = {(row["arm"], row["distractors"]): float(row["mean"]) for row in rows_of(Path("out/changes_to_each.csv"))}
    assert drops == pytest.approx(
        {("sft", "2"): -0.15, ("sft", "4"): -0.3, ("bft", "2"): -0.05, ("bft", "4"): -0.1}, abs=1e-3
    )
    less = {row["distractors"]: float(row["mean"]) for row in rows_of(Path("out/changes_to_each_less_baseline.csv"))}
    assert less == pytest.approx({"2": 0.1, "4": 0.2}, abs=1e-3)


def test_no_change_is_drawn_where_no_run_has_a_partner(runs: Path, report: Callable[..., str]) -> None:
    """Numbers of noise and, in the same places, of questions: nothing else is alike at both ends."""
    for folder in runs.glob("*_noise=*_seed=?"):
        if (file := folder / "predictions.jsonl").exists():
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            later = {"of": 10 * float(folder.name.split("noise=")[1].split("_")[0])}
            file.write_text("".join(json.dumps(row | later) + "\n" for row in rows))
    report("runs", "--axis", "of", "--metric", "f1", "--out", "out")
    figures = {file.name for file in Path("out").glob("*.svg")}
    assert figures == {"f1_over_noise.svg", "f1_over_of.svg"} and "change_over" not in Path("out/report.md").read_text()


def test_the_drop_over_distractors_is_drawn_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any
) -> None:
    """What stands at each number of distractors is read off the figure's own lines."""
    monkeypatch.chdir(tmp_path)
    for arm, drop in (("sft", 0.3), ("bft", 0.1)):
        for seed in SEEDS:
            folder = write_run(tmp_path / "runs", arm, 0, seed)
            rows = [
                {"id": i, "f1": 0.5 - drop * k / 4 + i % 7 / 90 * k, "distractors": k}
                for k in (0, 2, 4)
                for i in range(49)
            ]
            (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = []
    monkeypatch.setattr("bft_hf.recipes.figures.svg", lambda figure: kept.append(figure) or b"<svg/>")
    report("runs", "--baseline", "sft", "--metric", "f1", "--out", "out")
    plots = {plot.get_ylabel(): plot for figure in kept for plot in figure.axes}
    assert [*plots] == ["f1", "f1 less sft", "f1: change", "f1: change less sft's"]

    def lines(title: str) -> dict[str, tuple[list[float], list[float]]]:
        """By arm the means and the widths of the intervals."""
        found = {}
        for bars in plots[title].containers:
            [widths] = bars.lines[2]
            ends = [segment[:, 1] for segment in widths.get_segments()]
            found[bars.get_label()] = (list(bars.lines[0].get_ydata()), [top - bottom for bottom, top in ends])
        return found

    mean = 3 / 90  # of i % 7 / 90
    changes = lines("f1: change")
    assert changes["sft"][0] == pytest.approx([0, -0.15 + 2 * mean, -0.3 + 4 * mean], abs=1e-3)
    assert changes["bft"][0] == pytest.approx([0, -0.05 + 2 * mean, -0.1 + 4 * mean], abs=1e-3)
    # The questions' own spread grows with k; the arms' difference has none of it.
    none, some, more = changes["bft"][1]
    assert none == 0 < some < more
    means, widths = lines("f1: change less sft's")["bft"]
    assert means == pytest.approx([0, 0.1, 0.2], abs=1e-3) and max(widths) < 0.2 * some
    assert lines("f1")["sft"][0] == pytest.approx([0.5, 0.35 + 2 * mean, 0.2 + 4 * mean], abs=1e-3)


def test_recommenders_are_read_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "sasrec_seed=1"
    folder.mkdir(parents=True)
    table = "user,item,rank,frequency,item_quartile,history_length\nu1,i,1,5,Q0,3\nu2,j,3,9,Q0,4\nu3,k,10.5,9,Q3,4\nu4,k,11,1,Q3,4\n"
    (folder / "per_user.csv.gz").write_bytes(gzip.compress(table.encode()))
    results = {"command": "bft-rec --seed 1", "test": {"hr@10": 0.5}}
    (folder / "results.json").write_text(json.dumps(results))
    [record] = read_all(["runs"])
    assert record.numbers == {"hr@10": [1.0, 1.0, 0.0, 0.0], "ndcg@10": [1.0, 0.5, 0.0, 0.0]}
    text = report("runs", "--by", "item_quartile", "--metric", "hr@10", "ndcg@10")
    assert "| arm | item_quartile=Q0 | item_quartile=Q3 | item_quartile=all |" in text
    assert cells(section(text, "hr@10 (higher is better)"), "sasrec")[1].startswith("1.000")
    assert cells(section(text, "ndcg@10 (higher is better)"), "sasrec")[3].startswith("0.375")
    # The length of the history, by the strata that the results have, in their order.
    table = table.replace("u2,j,3,9,Q0,4", "u2,j,3,9,Q0,11").replace("Q3,4\n", "Q3,10\n")
    (folder / "per_user.csv.gz").write_bytes(gzip.compress(table.encode()))
    results["strata"] = {"history_length": {"1-5": {}, "6-10": {}, "11-20": {}}}
    (folder / "results.json").write_text(json.dumps(results))
    assert read_all(["runs"])[0].strata["history_length"] == ["1-5", "11-20", "6-10", "6-10"]
    text = report("runs", "--by", "history_length", "--metric", "hr@10")
    names = [f"history_length={name}" for name in ("1-5", "6-10", "11-20", "all")]
    assert f"| arm | {' | '.join(names)} |" in text
    assert main(["pack", "runs", "packed"]) == 0 and read_all(["packed"])[0].strata == read_all(["runs"])[0].strata
    # Ranks of validation's items are called so, and are not compared with the test's.
    (tmp_path / "runs" / "chosen_seed=1").mkdir()
    (tmp_path / "runs" / "chosen_seed=1" / "per_user.csv.gz").write_bytes((folder / "per_user.csv.gz").read_bytes())
    chosen = {"command": "bft-rec --test false", "validation": {"hr@10": 0.5}, "per_user": "validation"}
    (tmp_path / "runs" / "chosen_seed=1" / "results.json").write_text(json.dumps(chosen))
    assert list(read_all(["runs"])[0].numbers) == ["validation_hr@10", "validation_ndcg@10"]
    assert main(["report", "runs"]) == 2
    assert "## validation_hr@10 (higher is better)" in report("runs", "--arms", "chosen")


def test_questions_are_divided_by_what_they_have(runs: Path, report: Callable[..., str]) -> None:
    text = report("runs", "--by", "kind", "--metric", "answer_nll", "--arms", "bft", "sft")
    assert "kind=easy" in text and "kind=hard" in text and "kind=all" in text and "less" not in text
    assert "seeds 1, 2, 3, 4, 5; n = 30 or 60" in text
    only = report("runs", "--axis", "kind", "--metric", "answer_nll", "--arms", "bft")
    assert (
        "kind=all" not in only and "n = 30\n" in only and "sft" not in only.split("\n\n", 1)[1].replace("bft-sft", "")
    )


def test_numbers_by_token_class(runs: Path, report: Callable[..., str]) -> None:
    """By condition: classes of runs with other rates of noise are none to be averaged over."""
    for folder in runs.glob("bft*_seed=?"):
        if (folder / "results.json").exists():
            results = json.loads((folder / "results.json").read_text())
            seed = results["seed"]
            results["token_classes"] = {"clean": {"labels": 90, "gain": 0.9 + seed / 100}}
            if "noise=0.3" in folder.name:
                results["token_classes"]["corrupted"] = {"labels": 30 + seed, "gain": 0.5, "cosine": -0.25}
            (folder / "results.json").write_text(json.dumps(results))
    # Divided questions leave a run's classes in one piece.
    report("runs", "--by", "kind", "--metric", "f1", "--out", "out")
    text = Path("out/report.md").read_text()
    gain = section(text, "gain by token class")
    assert cells(gain, "condition") == ["condition", "arm", "clean", "corrupted", "corrupted / clean"]
    assert cells(gain, "noise=0", "bft") == ["noise=0", "bft", "0.9300 (0.9100 to 0.9500)", "", ""]
    noisy = ["0.9300 (0.9100 to 0.9500)", "0.5000 (0.5000 to 0.5000)", "0.5378 (0.5263 to 0.5495)"]
    assert cells(gain, "noise=0.3", "bft") == ["noise=0.3", "bft", *noisy]
    assert cells(section(text, "labels by token class"), "noise=0.3", "bft")[3] == "33.00 (31.00 to 35.00)"
    # Neither a ratio of what is negative, nor an arm or a condition without numbers.
    cosine = section(text, "cosine by token class").split("Mean")[0].split("n = ")[-1]
    assert [line for line in cosine.splitlines() if line.startswith("| noise")] == [
        "| noise=0.3 | bft | -0.2500 (-0.2500 to -0.2500) |"
    ]
    assert not Path("out/labels_by_token_class.svg").exists() and "labels_by_token_class.svg" not in text
    figure = Path("out/gain_by_token_class.svg").read_text()
    assert "corrupted" in figure and "noise=0.3" in figure and "kind" not in figure
    rows = [row for row in rows_of(Path("out/token_classes.csv")) if row["name"] == "gain" and row["noise"] == "0.3"]
    assert len(rows) == 10 and rows[0]["kind"] == ""
    assert sorted(row["value"] for row in rows if row["class"] == "clean") == ["0.91", "0.92", "0.93", "0.94", "0.95"]


def test_different_libraries_are_said(runs: Path, report: Callable[..., str]) -> None:
    assert "different" not in report("runs").split("Intervals")[0]
    shutil.rmtree(runs / "bft_noise=0_seed=1")
    write_run(runs, "bft", 0, 1, versions={"torch": "3"}, device="cuda:0")
    assert "The runs were made with different versions of libraries and devices." in report("runs")


def test_arms_of_mixed_flags_are_said(runs: Path, report: Callable[..., str]) -> None:
    assert "different flags" not in report("runs")
    file = runs / "bft_noise=0_seed=1" / "results.json"
    file.write_text(file.read_text().replace("--max_steps 60", "--max_steps 60 --token_classes 24"))
    assert "different flags" not in report("runs")
    file.write_text(file.read_text().replace("--max_steps 60", "--max_steps 40"))
    assert "Runs of one arm have different flags (bft)" in report("runs")


def test_holm_stands_between_an_interval_and_a_claim(runs: Path) -> None:
    estimates = Comparison(read_all(["runs"]), baseline="sft").differences("f1")
    raw, corrected = [e.interval.p for e in estimates if e.interval], [e.p_holm or 0 for e in estimates]
    assert len(raw) == 3 and min(corrected) == pytest.approx(3 * min(raw))


def test_direction_by_name() -> None:
    assert all(map(lower_is_better, ("answer_nll", "nll", "eval_loss", "mean_rank", "perplexity")))
    assert not any(map(lower_is_better, ("f1", "exact_match", "ndcg@10", "hr@10", "annllike")))


REFUSED = {
    "nowhere": (["report", "nowhere"], "nowhere: no such folder"),
    "empty": (["report", "empty"], "empty holds no finished run"),
    "baseline": (["report", "runs", "--baseline", "stf"], "no run has the arm 'stf' (there is bft, sft)"),
    "metric": (["report", "runs", "--metric", "f2"], "not every run has f2 for its questions (all have "),
    "axis": (
        ["report", "runs", "--axis", "nothing"],
        "its questions have no 'nothing' (they have f1, answer_nll, kind)",
    ),
    "twice": (["report", "runs", "copy"], "are the same run: leave one of them out"),
    "axes": (["report", "runs", "other"], "has other axes than"),
    "name": (["report", "name"], "'what_is' is no run's name"),
    "no questions": (["report", "noquestions"], "has neither predictions.jsonl nor per_user.csv.gz"),
    "not packed": (["report", "json"], "is no run packed by this version of bft-bench pack"),
    "same id": (["report", "sameid"], "two of its questions have the same id"),
    "pack nothing": (["pack", "empty", "out"], "empty holds no finished run"),
    "pack into a file": (["pack", "runs", "file"], "cannot write to file"),
    "flag": (["report", "runs", "--base", "sft"], "unrecognized arguments: --base sft"),
    "diverged": (["report", "diverged"], "sft_noise=0_seed=1: f1 is not finite for some questions"),
    "no root": (["report"], "the following arguments are required: ROOT"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_status_2(case: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, expected = REFUSED[case]
    results = '{"command": "bft-sft"}'
    files = {
        "empty/notes.txt": "",
        "file": "",
        "name/what_is/results.json": results,
        "noquestions/sft_noise=0_seed=1/results.json": results,
        "json/sft.json": results,
        "sameid/sft_noise=0_seed=1/results.json": results,
        "sameid/sft_noise=0_seed=1/predictions.jsonl": '{"id": 1, "f1": 1}\n{"id": 1, "f1": 0}\n',
        "diverged/sft_noise=0_seed=1/results.json": results,
        "diverged/sft_noise=0_seed=1/predictions.jsonl": '{"id": 1, "f1": 1}\n{"id": 2, "f1": NaN}\n',
        "other/sft_k=0_seed=1/results.json": results,
        "other/sft_k=0_seed=1/predictions.jsonl": '{"id": 1, "f1": 1}\n',
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    shutil.copytree(runs / "sft_noise=0_seed=1", "copy/sft_noise=0_seed=1")
    before = sorted(Path().rglob("*"))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error.startswith("bft-bench: ") and expected in error
    assert sorted(Path().rglob("*")) == before


def test_a_narrow_interval_shows_its_width(tmp_path: Path, report: Callable[..., str]) -> None:
    """A thousandth of a hit rate is what a recommender's arms differ by."""
    for arm, shift in (("sft", 0.0), ("bft", 0.00123)):
        for seed in SEEDS:
            folder = write_run(tmp_path / "narrow", arm, 0, seed)
            noise = np.random.default_rng([seed, ord(arm[0])]).normal(0, 1e-4, QUESTIONS)
            rows = [{"id": f"q{i}", "f1": 0.3 + shift + float(x)} for i, x in enumerate(noise)]
            (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(str(tmp_path / "narrow"), "--baseline", "sft", "--metric", "f1")
    line = next(line for line in text.splitlines() if "better" in line and "| bft |" in line)
    numbers = line.split("|")[3].strip()
    low, high = (float(part) for part in numbers[numbers.index("[") + 1 : -1].split(","))
    assert 0.0011 < low < high < 0.0013


def test_a_small_loss_is_no_zero(tmp_path: Path, report: Callable[..., str]) -> None:
    for arm in ("plain", "bft"):
        (tmp_path / "runs" / f"{arm}_seed=1").mkdir(parents=True)
        rows = [{"id": i, "hr@10": 0.5 - (arm == "bft") * (0.0012 + 0.0107 * (-1) ** i)} for i in range(400)]
        folder = tmp_path / "runs" / f"{arm}_seed=1"
        (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "results.json").write_text('{"command": "bft-rec"}')
    [line] = [line for line in report(str(tmp_path / "runs"), "--baseline", "plain").splitlines() if "worse" in line]
    assert line.startswith("| all runs | bft | -0.0012 [-0.0022, -0.0001] | yes |")
