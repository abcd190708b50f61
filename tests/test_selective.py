"""Selective answering: areas and errors against other implementations and by hand, and the subcommand."""

import json

import numpy as np
import pytest
from torchmetrics.functional.classification import binary_calibration_error

from bft_hf.recipes.audit import main
from bft_hf.recipes.intervals import hierarchical_bootstrap
from bft_hf.recipes.selective import (
    COVERAGES,
    SCORES,
    UNCALIBRATED,
    Answers,
    aurc,
    calibrated,
    expected_calibration_error,
    measure,
    read_answers,
    selective_risk,
)


def ones(count):
    return np.ones((1, count))


def test_the_risk_is_that_of_the_answers_given():
    wrong = np.array([True, False, False, True])
    suspicion = np.array([4.0, 1.0, 2.0, 3.0])
    assert selective_risk(suspicion, wrong) == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert aurc(suspicion, wrong, ones(4))[0] == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert selective_risk(-suspicion, wrong) == pytest.approx([1, 1, 2 / 3, 1 / 2])


def test_ties_count_as_the_mean_over_their_orders():
    generator = np.random.default_rng(0)
    suspicion, wrong = np.array([0.0, 1, 1, 1, 2, 2]), np.array([True, False, True, True, False, True])
    orders = [selective_risk(suspicion + generator.random(6) * 0.1, wrong) for _ in range(4000)]
    assert selective_risk(suspicion, wrong) == pytest.approx(np.mean(orders, 0), abs=0.02)
    assert aurc(np.zeros(6), wrong, ones(6))[0] == pytest.approx(wrong.mean())  # no information


def test_a_weight_is_a_repetition():
    generator = np.random.default_rng(0)
    suspicion, wrong = generator.random(20), generator.random(20) < 0.5
    weights = generator.multinomial(20, np.full(20, 1 / 20), size=3)
    for row, area, error in zip(
        weights, aurc(suspicion, wrong, weights), expected_calibration_error(suspicion, wrong, weights), strict=True
    ):
        s, w = np.repeat(suspicion, row), np.repeat(wrong, row)
        assert area == pytest.approx(aurc(s, w, ones(20))[0])
        assert error == pytest.approx(expected_calibration_error(s, w, ones(20))[0])


def test_the_calibration_error_is_torchmetrics():
    import torch

    generator = np.random.default_rng(0)
    probability, wrong = generator.random(200), generator.random(200) < 0.4
    theirs = binary_calibration_error(torch.tensor(probability), torch.tensor(wrong).int(), n_bins=10, norm="l1").item()
    assert expected_calibration_error(probability, wrong, ones(200))[0] == pytest.approx(theirs, abs=1e-6)


def test_calibration_is_fitted_on_other_questions():
    generator = np.random.default_rng(0)
    suspicion = generator.normal(size=400)
    wrong = generator.random(400) < 1 / (1 + np.exp(-2 * suspicion))
    ids = np.array([f"q{n // 2}" for n in range(400)], dtype=object)  # each question twice
    before = calibrated(suspicion, wrong, ids)
    assert expected_calibration_error(before, wrong, ones(400))[0] < 0.1
    flipped = wrong.copy()
    flipped[10:12] = ~flipped[10:12]
    after = calibrated(suspicion, flipped, ids)
    assert after[10:12] == pytest.approx(before[10:12])
    assert np.abs(after - before).max() > 0
    assert calibrated(suspicion[:6], np.ones(6, dtype=bool), ids[:6]) == pytest.approx(np.ones(6))


def write_predictions(path, seed=0, count=200, plain=False, signal="mean_gain"):
    """Predictions of which one score knows much and the log-probability little."""
    generator = np.random.default_rng(seed)
    with open(path, "w") as file:
        for number in range(count):
            ease = generator.normal()
            right = generator.random() < 1 / (1 + np.exp(-2 * ease))
            row = {
                "id": f"q{number}", "prediction": "x", "answers": ["y"], "exact_match": float(right), "f1": float(right) or 0.6,
                "answer_nll": 1.0, "truncated": False, "log_probability": -3 * generator.random() - 0.3 * (ease < 0),
                "token_entropy": generator.random(), "final_precision": 3 + generator.random(), "mean_gain": generator.random(),
                "answer_tokens": int(generator.integers(1, 6)),
            }  # fmt: skip
            row[signal] = 0.5 + 0.1 * ease + 0.01 * generator.normal()
            if plain:
                row["final_precision"] = row["mean_gain"] = None
            file.write(json.dumps(row) + "\n")
    return path


def test_a_score_that_knows_more_is_found_to(tmp_path):
    runs = [read_answers(write_predictions(tmp_path / f"{seed}.jsonl", seed)) for seed in range(2)]
    found = measure(runs, resamples=200)
    scores = found["scores"]
    assert found["n"] == 400 and found["risk"] == pytest.approx(np.mean([run.wrong.mean() for run in runs]))
    assert (
        scores["mean_gain"]["auroc_minus_log_probability"][1] > 0 > scores["mean_gain"]["aurc_minus_log_probability"][2]
    )
    assert abs(scores["final_precision"]["auroc"][0] - 0.5) < 0.1 < scores["mean_gain"]["auroc"][0] - 0.5
    assert found["best_aurc"] < scores["mean_gain"]["aurc"][0] < scores["token_entropy"]["aurc"][0]
    assert len(scores["mean_gain"]["curve"]) == len(COVERAGES)
    assert scores["mean_gain"]["curve"][0] < scores["mean_gain"]["curve"][-1] == pytest.approx(found["risk"])
    assert 0 < scores["mean_gain"]["ece"] < scores[UNCALIBRATED]["ece"] < 1
    assert set(scores[UNCALIBRATED]) == {"ece", "ece_minus_log_probability"}


def test_the_share_of_wrong_answers_has_the_interval_of_a_mean(tmp_path):
    runs = [read_answers(write_predictions(tmp_path / f"{seed}.jsonl", seed)) for seed in range(3)]
    interval = hierarchical_bootstrap(np.stack([run.wrong for run in runs]).astype(float))
    found = measure(runs, resamples=20)
    assert found["risk_interval"] == [interval.low, interval.high] and interval.mean == pytest.approx(found["risk"])
    # Paired by question, in whatever order the answers stand.
    order = np.random.default_rng(0).permutation(200)
    trust = {name: values[order] for name, values in runs[1].trust.items()}
    runs[1] = Answers(runs[1].source, runs[1].ids[order], trust, runs[1].wrong[order])
    assert measure(runs, resamples=20)["risk_interval"] == found["risk_interval"]
    other = read_answers(write_predictions(tmp_path / "other.jsonl", count=150))
    assert measure([runs[0], other], resamples=20)["risk_interval"] is None


def test_the_direction_of_a_score_is_not_taken_from_the_data(tmp_path):
    """A precision that is high where answers are wrong stays below one half."""
    path = write_predictions(tmp_path / "p.jsonl", signal="final_precision")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["final_precision"] = 1 - row["final_precision"]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert measure([read_answers(path)], resamples=50)["scores"]["final_precision"]["auroc"][0] < 0.3


def test_scores_point_towards_trust():
    row = {"log_probability": -2.0, "token_entropy": 1.0, "final_precision": 4.0, "mean_gain": 0.5, "answer_tokens": 2}
    assert {name: score(row) for name, score in SCORES.items()} == {
        "log_probability": -2.0,
        "log_probability_per_token": -1.0,
        "token_entropy": -1.0,
        "final_precision": 4.0,
        "mean_gain": 0.5,
    }


def test_the_subcommand_reads_files_and_folders_and_writes_numbers(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    write_predictions(tmp_path / "run" / "predictions.jsonl")
    other = write_predictions(tmp_path / "other.jsonl", seed=1)
    flags = ["--resamples", "50", "--output", str(tmp_path / "numbers.json")]
    assert main(["selective", str(tmp_path / "run"), str(other), *flags]) == 0
    printed = capsys.readouterr().out
    assert "400 answers" in printed and "interval above zero: mean_gain" in printed
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["files"] == [str(tmp_path / "run"), str(other)] and numbers["resamples"] == 50
    assert numbers["command"] == f"bft-audit selective {tmp_path / 'run'} {other} {' '.join(flags)}"
    low, high = numbers["risk_interval"]
    assert f"400 answers, {numbers['risk']:.3f} [{low:.3f}, {high:.3f}] wrong" in printed
    assert main(["selective", str(other), "--resamples", "50", "--markdown"]) == 0
    assert (
        f"| log_probability | {measure([read_answers(other)], 50)['scores']['log_probability']['auroc'][0]:.3f} ["
        in capsys.readouterr().out
    )


def test_a_plain_models_answers_are_measured_without_the_filter(tmp_path, capsys):
    path = write_predictions(tmp_path / "plain.jsonl", plain=True)
    assert set(read_answers(path).trust) == {"log_probability", "log_probability_per_token", "token_entropy"}
    assert main(["selective", str(path), "--resamples", "50"]) == 0
    patched = write_predictions(tmp_path / "patched.jsonl")
    assert main(["selective", str(path), str(patched)]) == 2
    assert "need the same scores" in capsys.readouterr().err


def test_an_answer_is_right_by_exact_match_or_by_f1(tmp_path, capsys):
    path = write_predictions(tmp_path / "p.jsonl")
    assert 0 < read_answers(path).wrong.mean() < 1
    assert main(["selective", str(path), "--correct", "f1"]) == 2  # every F1 of them is above a half
    assert "0 of 200 answers are wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("[1, 2]", "is not a predictions.jsonl of bft-sft"),
        ("{broken", "is not a predictions.jsonl of bft-sft"),
        (
            '{"prediction": "x", "exact_match": 1.0}',
            "0 of 1 answers have an uncertainty: run bft-sft with --record_uncertainty",
        ),
        ('{"prediction": null}', "0 of 0 answers have an uncertainty"),
    ],
)
def test_what_is_no_predictions_is_refused_in_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["selective", str(path)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
