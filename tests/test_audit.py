"""bft-audit: its scores against cleanlab's, its statistics against scikit-learn's, and the command from flags to page."""

import html.parser
import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score
from test_questions import byte_tokenizer

import bft_hf
from bft_hf.recipes import audit_tables
from bft_hf.recipes.audit import main, verdict
from bft_hf.recipes.audit_page import shade
from bft_hf.recipes.detection import Run, auroc, average_precision, compare
from bft_hf.recipes.suspicion import Combination, by_row, combined, suspicions


def token_table(count=60, rows=12, seed=0):
    """Tokens with the columns of a patched model's table."""
    generator = np.random.default_rng(seed)
    loss = generator.exponential(2.0, count)
    table = pandas.DataFrame({"row": np.sort(generator.integers(0, rows, count)), "loss": loss})
    table["probability"] = np.exp(-loss)
    table["rival_probability"] = (1 - table["probability"]) * generator.random(count)
    for name in ("entropy", "precision", "gain", "input_precision", "input_gain"):
        table[name] = generator.random(count) + 0.1
    return table


# Scores and statistics


def test_label_quality_is_cleanlabs():
    rank = pytest.importorskip("cleanlab.rank", reason="pip install cleanlab")
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.full(7, 0.3), size=200)
    labels = generator.integers(0, 7, size=200)
    others = probabilities.copy()
    others[np.arange(200), labels] = -1
    own = probabilities[np.arange(200), labels]
    with np.errstate(divide="ignore"):
        table = pandas.DataFrame(
            {
                "loss": -np.log(own),
                "probability": own,
                "rival_probability": others.max(1),
                "entropy": -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(1),
            }
        )
    scores = suspicions(table, vocab_size=7)
    for name in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
        quality = rank.get_label_quality_scores(labels, probabilities, method=name)
        assert scores[name] == pytest.approx(1 - quality, abs=1e-9), name


def test_a_rows_score_by_max_is_cleanlabs_sentence_score():
    cleanlab = pytest.importorskip("cleanlab.token_classification.rank", reason="pip install cleanlab")
    generator = np.random.default_rng(0)
    rows = np.repeat(np.arange(5), [3, 1, 4, 2, 5])
    probabilities, labels = generator.dirichlet(np.ones(4), size=15), generator.integers(0, 4, size=15)
    cut = np.flatnonzero(np.diff(rows)) + 1
    expected, _ = cleanlab.get_label_quality_scores(
        [part.tolist() for part in np.split(labels, cut)], np.split(probabilities, cut)
    )
    suspicion = 1 - probabilities[np.arange(15), labels]
    assert by_row(suspicion, rows, "max") == pytest.approx(1 - expected)
    assert by_row(suspicion, rows, "mean") == pytest.approx([part.mean() for part in np.split(suspicion, cut)])


def test_a_plain_models_tokens_have_no_scores_of_the_filter():
    table = token_table()
    assert {"precision", "input_gain"} <= set(suspicions(table, 10))
    plain = table.drop(columns=["precision", "gain", "input_precision", "input_gain"])
    assert not {"precision", "gain", "input_precision", "input_gain"} & set(suspicions(plain, 10))


def test_what_the_filter_is_unsure_of_is_suspicious():
    table = token_table()
    scores = suspicions(table, 10)
    for name in ("precision", "gain", "input_precision", "input_gain"):
        assert np.argmax(scores[name]) == table[name].argmin()
    assert np.argmax(scores["loss"]) == table["loss"].argmax()


@pytest.mark.parametrize("digits", [0, 6])  # 0: nearly all are ties
def test_metrics_agree_with_scikit_learn(digits):
    generator = np.random.default_rng(1)
    wrong = generator.random(80) < 0.3
    scores = np.round(generator.normal(size=80) + wrong, digits)
    weights = generator.multinomial(80, np.full(80, 1 / 80), size=5)
    for row, area, precision in zip(
        weights, auroc(scores, wrong, weights), average_precision(scores, wrong, weights), strict=True
    ):
        assert area == pytest.approx(roc_auc_score(wrong, scores, sample_weight=row))
        assert precision == pytest.approx(average_precision_score(wrong, scores, sample_weight=row))


def runs_with(difference, count=1, seed=0, items=400):
    generator = np.random.default_rng(seed)
    runs = []
    for number in range(count):
        wrong = generator.random(items) < 0.2
        base = generator.normal(size=items) + wrong
        scores = {"loss": base, "other": base + difference * wrong + generator.normal(size=items) * 0.3}
        runs.append(Run(scores, wrong, np.array([f"{number}-{item // 4}" for item in range(items)], dtype=object)))
    return runs


def test_a_known_difference_is_found_and_none_is_not_invented():
    found = compare(runs_with(1.0), resamples=300).differences["other"]
    assert found["auroc"].low > 0 and found["average_precision"].low > 0
    assert found["auroc"].low < found["auroc"].value < found["auroc"].high
    # Noise alone makes a score worse, if anything.
    assert compare(runs_with(0.0), resamples=300).differences["other"]["auroc"].low < 0
    covered = [
        compare(runs_with(0.0, seed=seed), resamples=200).differences["other"]["auroc"].low > 0 for seed in range(20)
    ]
    assert sum(covered) <= 2


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    # Two normals one deviation apart: AUROC = Phi(1 / sqrt(2)) = .7602.
    inside = 0
    for seed in range(60):
        estimate = compare(runs_with(0.0, seed=seed, items=300), resamples=200).values["loss"]["auroc"]
        inside += estimate.low < 0.7602 < estimate.high
    assert 51 <= inside <= 60


def test_runs_are_averaged_and_their_spread_widens_the_interval():
    alike = [runs_with(0.0, seed=seed)[0] for seed in range(3)]
    single = [compare([run], resamples=300).values["loss"]["auroc"] for run in alike]
    together = compare(alike, resamples=300).values["loss"]["auroc"]
    assert together.value == pytest.approx(np.mean([one.value for one in single]))
    apart = [
        Run({"loss": run.scores["loss"] * sign}, run.wrong, run.groups)
        for run, sign in zip(alike, (1, 1, -1), strict=False)
    ]
    spread = compare(apart, resamples=300).values["loss"]["auroc"]
    assert spread.high - spread.low > 3 * (together.high - together.low)


def test_what_cannot_be_compared_is_refused():
    run = runs_with(0.0)[0]
    with pytest.raises(ValueError, match="400 of 400 items are wrong"):
        compare([Run(run.scores, np.ones(400, dtype=bool), run.groups)])
    with pytest.raises(ValueError, match="need the same scores"):
        compare([run, Run({"loss": run.scores["loss"]}, run.wrong, run.groups)])


# The combination


def test_the_combination_finds_what_no_single_score_does():
    table = token_table(600, rows=100)
    corrupted = table["loss"].to_numpy() / 2 + 4 * table["entropy"].to_numpy() > 4
    combination = Combination(table, corrupted)
    assert roc_auc_score(corrupted, combination(table)) > max(
        roc_auc_score(corrupted, scores) for scores in suspicions(table, 10).values()
    )
    assert combination.weights["loss"] > 0 and combination.weights["entropy"] < 0.1 + combination.weights["loss"] * 9
    assert next(iter(combination.weights)) == "loss"


def test_no_row_is_ranked_by_weights_that_were_fitted_on_it():
    tokens, known = token_table(300, rows=30), token_table(300, rows=30, seed=1)
    corrupted = np.random.default_rng(2).random(300) < 0.3
    before, _ = combined(tokens, known, corrupted)
    row = 7
    own = known["row"] == row
    flipped = np.where(own, ~corrupted, corrupted)
    after, _ = combined(tokens, known, flipped)
    here = (tokens["row"] == row).to_numpy()
    assert after[here] == pytest.approx(before[here])
    assert after[~here] != pytest.approx(before[~here])
    # Rows that gave no calibration rows are ranked by all of those.
    few, _ = combined(tokens, known[known["row"] < 15], corrupted[known["row"] < 15])
    whole = Combination(known[known["row"] < 15], corrupted[known["row"] < 15])
    outside = (tokens["row"] >= 15).to_numpy()
    assert few[outside] == pytest.approx(whole(tokens[outside]))


def test_a_combination_needs_corruption():
    with pytest.raises(ValueError, match="0 of 60 labels of the calibration rows were corrupted"):
        Combination(token_table(), np.zeros(60, dtype=bool))
    with pytest.raises(ValueError, match="at least 5 are needed"):
        combined(token_table(), token_table(rows=3), np.arange(60) < 5)


# The command

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A patched and a plain model, and questions to audit."""
    from conftest import make_tiny_llama

    root = tmp_path_factory.mktemp("audit")
    tokenizer = byte_tokenizer()
    for name in ("patched", "plain"):
        model = make_tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512)
        if name == "patched":
            bft_hf.patch(model, bft_hf.BFTConfig.unit())
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    words = ["sea", "the river", "Rhine &amp;", EVIL, "=1+1", "line\nbreak"]
    rows = [
        {
            "id": f"q{n}",
            "context": f"Passage {n} of {EVIL}.",
            "question": f"What is {n} {EVIL}?",
            "answers": [words[n % 6]],
        }
        for n in range(24)
    ]
    (root / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return root


def run(folder: Path, *flags: str, model: str = "patched", out: str = "out") -> int:
    given = ["--model_name_or_path", str(folder / model), "--dataset", str(folder / "rows.jsonl"), "--use_cpu"]
    return main([*given, "--output_dir", str(folder / out), "--resamples", "50", *flags])


@pytest.fixture(scope="module")
def checked(folder) -> Path:
    """The output of a check at two rates."""
    assert run(folder, "--noise", "0.2", "0.5", "--seed", "3", "--calibration_noise", "0.3", out="checked") == 0
    return folder / "checked"


def test_a_plain_audit_ranks_by_the_loss(folder, capsys):
    assert run(folder, "--overwrite") == 0
    result = json.loads((folder / "out" / "audit.json").read_text())
    assert (result["score"], result["rows"], result["noise"], result["detection"]) == ("loss", 24, None, None)
    rows, tokens = (pandas.read_parquet(folder / "out" / f"{name}.parquet") for name in ("rows", "tokens"))
    assert rows["suspicion"].is_monotonic_decreasing and rows["rank"].tolist() == list(range(1, 25))
    assert rows["suspicion"].tolist() == pytest.approx(rows["max_loss"].tolist())
    assert tokens["suspicion"].tolist() == pytest.approx(tokens["loss"].tolist())
    assert tokens["rank"].tolist() == list(range(1, len(tokens) + 1))
    assert set(rows["id"]) == {f"q{n}" for n in range(24)}
    row = rows[rows["id"] == "q3"].iloc[0]
    assert (
        row["trained"] == f"{EVIL}</s>" and row["question"] == f"What is 3 {EVIL}?" and row["tokens"] == len(EVIL) + 1
    )
    assert "corrupted" not in tokens and "corrupted_tokens" not in rows
    csv = pandas.read_csv(folder / "out" / "rows.csv")
    assert csv["answer"].tolist() == rows["answer"].tolist()
    printed = capsys.readouterr().out
    assert "the plain loss" in printed and repr(rows["id"].iloc[0]) in printed
    assert sorted(file.name for file in (folder / "out").iterdir()) == [
        "audit.html", "audit.json", "rows.csv", "rows.parquet", "tokens.csv", "tokens.parquet",
    ]  # fmt: skip


def test_a_check_corrupts_the_labels_that_training_would(folder, checked):
    from bft_hf.noise.labels import corrupt_labels
    from bft_hf.recipes.questions import load_questions, tokenize_questions

    tokenizer = byte_tokenizer()
    questions = tokenize_questions(load_questions(str(folder / "rows.jsonl"), split="all", seed=3), tokenizer)
    trained = corrupt_labels(
        questions, 0.2, seed=3, vocab_size=len(tokenizer), eos_token_ids=[2], pad_token_id=0, special_token_ids=tokenizer.all_special_ids
    )  # fmt: skip
    tokens = pandas.read_parquet(checked / "uniform_noise=0.2" / "tokens.parquet").sort_values(["row", "position"])
    labels = [label for row in trained["labels"] for label in row if label != -100]
    assert tokens["token_id"].tolist() == labels
    assert tokens["corrupted"].sum() == sum(map(sum, trained["corrupted"])) > 0
    more = pandas.read_parquet(checked / "uniform_noise=0.5" / "tokens.parquet").sort_values(["row", "position"])
    assert more["corrupted"].to_numpy()[tokens["corrupted"].to_numpy()].all()
    assert (tokens["true_token"] != tokens["token"])[tokens["corrupted"]].all()
    assert not tokens.loc[tokens["token"] == "</s>", "eligible"].any()
    result = json.loads((checked / "uniform_noise=0.2" / "audit.json").read_text())
    assert result["noise"]["corrupted_tokens"] == tokens["corrupted"].sum()
    table = tokens[tokens["eligible"]]
    assert result["detection"]["tokens"]["loss"]["auroc"][0] == pytest.approx(
        roc_auc_score(table["corrupted"], table["loss"])
    )
    assert {"combined", "self_confidence", "precision", "gain"} <= set(result["detection"]["tokens"])
    assert set(result["combined_weights"]) == {"loss", "entropy", "precision", "gain", "input_precision", "input_gain"}
    by_row = table.groupby("row").agg(worst=("loss", "max"), wrong=("corrupted", "any"))
    if "rows_by_max" in result["detection"]:
        whole = tokens.groupby("row").agg(worst=("loss", "max"), wrong=("corrupted", "any"))
        assert result["detection"]["rows_by_max"]["loss"]["auroc"][0] == pytest.approx(
            roc_auc_score(whole["wrong"], whole["worst"])
        )
    assert len(by_row) == 24


def test_one_pass_serves_every_rate_and_the_calibration(folder, monkeypatch):
    from bft_hf.recipes import scores

    seen = []
    original = scores._score_batch
    monkeypatch.setattr(
        scores,
        "_score_batch",
        lambda model, rows, batch, pad: (seen.append(len(batch)), original(model, rows, batch, pad))[1],
    )
    assert run(folder, "--noise", "0.2", "0.5", "--calibration_noise", "0.3", out="counted") == 0
    assert sum(seen) == 24
    seen.clear()
    assert run(folder, "--noise", "0.2", "--noise_inputs", "--calibration_noise", "0.3", out="inputs") == 0
    assert sum(seen) > 24
    tokens = pandas.read_parquet(folder / "inputs" / "tokens.parquet").sort_values(["row", "position"])
    clean = pandas.read_parquet(folder / "counted" / "uniform_noise=0.2" / "tokens.parquet").sort_values(
        ["row", "position"]
    )
    assert tokens["token_id"].tolist() == clean["token_id"].tolist()
    assert tokens["input_precision"].tolist() != pytest.approx(clean["input_precision"].tolist())


def test_checks_are_put_together(checked, capsys):
    assert (
        main(
            [
                "compare",
                str(checked / "uniform_noise=0.2"),
                str(checked / "uniform_noise=0.5"),
                "--resamples",
                "50",
                "--markdown",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    results = [json.loads((checked / f"uniform_noise={rate}" / "audit.json").read_text()) for rate in ("0.2", "0.5")]
    mean = np.mean([result["detection"]["tokens"]["loss"]["auroc"][0] for result in results])
    assert f"| loss | {mean:.3f} [" in printed


def test_the_command_says_whether_something_beat_the_loss():
    tokens = {
        "loss": {"auroc": [0.9, 0.8, 0.95]},
        "gain": {"auroc": [0.91, 0.8, 0.95], "auroc_minus_loss": [0.01, -0.1, 0.1]},
    }
    assert verdict({"tokens": tokens}).startswith("No score found the corruption better")
    tokens["gain"]["auroc_minus_loss"] = [0.05, 0.01, 0.1]
    assert verdict({"tokens": tokens}).startswith(
        "Better than the plain loss, by an interval above zero: gain (tokens, auroc). Of 1 comparisons, uncorrected"
    )


def test_a_plain_model_and_an_adapter_are_audited(folder):
    peft = pytest.importorskip("peft", reason="pip install peft")
    from transformers import AutoModelForCausalLM

    assert run(folder, model="plain", out="plain-out") == 0
    plain = pandas.read_parquet(folder / "plain-out" / "tokens.parquet")
    assert "precision" not in plain
    base = bft_hf.patch(AutoModelForCausalLM.from_pretrained(folder / "plain"), bft_hf.BFTConfig.unit())
    config = peft.LoraConfig(
        target_modules=["v_proj"], task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["bft"]
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "results.json").write_text(json.dumps({"model": str(folder / "plain")}))
    assert run(folder, model="adapter", out="adapter-out") == 0
    tokens = pandas.read_parquet(folder / "adapter-out" / "tokens.parquet")
    assert "precision" in tokens
    assert tokens["loss"].tolist() != pytest.approx(plain["loss"].tolist())
    from bft_hf.recipes.scores import score_rows

    first = tokens[tokens["row"] == 0].sort_values("position")
    tokenizer = byte_tokenizer()
    from bft_hf.recipes.questions import load_questions, tokenize_example

    row = tokenize_example(tokenizer, load_questions(str(folder / "rows.jsonl"), split="all")[0])
    assert first["loss"].tolist() == pytest.approx(
        score_rows(adapted, [row], progress=False)[0].loss.tolist(), rel=1e-4
    )


class Page(html.parser.HTMLParser):
    """Counts tags and collects what would leave the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.outside: list[str] = []
        self.values: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.outside += [value for name, value in attributes if name in ("src", "href", "action", "srcset")]
        self.values.append(dict(attributes))


def test_the_page_is_self_contained_and_escapes_the_data(checked):
    text = (checked / "uniform_noise=0.2" / "audit.html").read_text()
    page = Page(text)
    assert page.tags["script"] == 1 and page.outside == []
    assert not re.search(r"https?://|url\(|@import", text)
    assert EVIL not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    policy = next(values["content"] for values in page.values if values.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert page.tags["details"] == 24
    headings = [values for values in page.values if "data-numeric" in values]
    assert len(headings) == page.tags["button"] == 9
    assert [values.get("aria-sort") for values in headings] == ["ascending", *[None] * 8]
    ranks = [values["data-value"] for values in page.values if values.get("data-name") == "Rank"]
    assert ranks == [str(number) for number in range(1, 25)]
    assert "prefers-color-scheme: dark" in text and "max-width: 44rem" in text
    assert 'class="s4"' in text


def test_the_scripts_hash_is_the_scripts(checked):
    import base64
    import hashlib

    text = (checked / "uniform_noise=0.2" / "audit.html").read_text()
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)[1]
    assert f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" in text


def test_shades_follow_the_rank():
    assert [shade(rank, 1000) for rank in (1, 10, 11, 50, 51, 100, 101, 250, 251)] == [
        "s4", "s4", "s3", "s3", "s2", "s2", "s1", "s1", "",
    ]  # fmt: skip
    assert shade(1, 5) == "s4"


def test_top_bounds_the_page_and_not_the_tables(folder):
    assert run(folder, "--top", "3", out="top") == 0
    assert Page((folder / "top" / "audit.html").read_text()).tags["details"] == 3
    assert len(pandas.read_parquet(folder / "top" / "rows.parquet")) == 24


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise", "1.5"], "--noise must be a number in (0, 1], got 1.5"),
        (["--noise", "0.1", "0.1"], "--noise names 0.1 twice"),
        (["--noise", "0.1", "--noise_kind", "odd"], "unknown --noise_kind 'odd': choose from"),
        (["--noise_inputs"], "--noise_inputs puts nothing into the inputs without --noise RATE"),
        (["--score", "odd"], "invalid choice: 'odd'"),
        (["--batch_size", "0"], "--batch_size must be a positive integer, got 0"),
        (["--train_examples", "99"], "99 were asked for"),
        (["--model_name_or_path", "/no/such/folder"], "--model_name_or_path /no/such/folder: no such folder"),
        (["--dataset", "/no/such.jsonl"], "--dataset /no/such.jsonl: no such file"),
        (["--base_modle", "x"], "unrecognized arguments: --base_modle"),
    ],
)
def test_a_command_that_cannot_run_says_so_in_one_line_and_leaves_nothing(folder, capsys, flags, message):
    assert run(folder, *flags, out="refused") == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.startswith("bft-audit: ")
    assert len([line for line in printed.splitlines() if line.startswith("bft-audit: ")]) == 1
    assert not (folder / "refused").exists()


def test_scores_of_the_filter_are_not_to_be_had_of_a_plain_model(folder, capsys):
    assert run(folder, "--score", "precision", model="plain", out="refused") == 2
    assert "--score precision needs a patched model" in capsys.readouterr().err
    assert run(folder, "--score", "precision", out="by-precision") == 0
    tokens = pandas.read_parquet(folder / "by-precision" / "tokens.parquet")
    assert tokens["precision"].is_monotonic_increasing


def test_results_are_not_overwritten_unasked_and_a_failure_leaves_the_old_ones(folder, capsys, monkeypatch):
    assert run(folder, out="twice") == 0
    before = (folder / "twice" / "audit.json").read_text()
    assert run(folder, out="twice") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    monkeypatch.setattr("bft_hf.recipes.audit_page.page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(folder, "--overwrite", out="twice")
    assert (folder / "twice" / "audit.json").read_text() == before
    assert not list((folder / "twice").glob(".audit-*"))


def test_what_is_no_check_is_not_compared(folder, checked, capsys):
    assert main(["compare", str(folder / "plain")]) == 2
    assert "holds no audit" in capsys.readouterr().err
    assert run(folder, out="unchecked") == 0
    assert main(["compare", str(checked / "uniform_noise=0.2"), str(folder / "unchecked")]) == 2
    assert "that audit had no --noise" in capsys.readouterr().err


def test_part_of_a_character_is_written_as_the_vocabulary_has_it():
    tokenizer = byte_tokenizer()
    scorer = audit_tables.Scorer.__new__(audit_tables.Scorer)
    scorer.tokenizer = tokenizer
    tokens = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert scorer._texts([*tokens, tokenizer("a", add_special_tokens=False)["input_ids"][0]]) == ["Ã", "©", "a"]


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--noise" in printed and "compare" in printed and "selective" in printed
