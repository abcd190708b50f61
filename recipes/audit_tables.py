"""The tables of an audit: a row for every trained token, one for every training row, and what they found."""

import argparse
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .command import UsageError
from .detection import METRICS, Run, compare
from .intervals import written
from .scores import RowScores
from .suspicion import AGGREGATES, COMBINED, by_row, combined, suspicions

if TYPE_CHECKING:
    import pandas
    from datasets import Dataset

IGNORE_INDEX = -100
PREFIX = "suspicion_"
# Not a seed that --noise is likely to have, whose draws decide what is found: corruption put into the calibration rows must
# be another.
CALIBRATION_SEED = 7919


@dataclass(frozen=True)
class Rows:
    """What is audited.

    Attributes:
        questions: As `load_questions` gives them.
        tokenized: The same rows tokenized. Where it is known which labels are corrupted, they have `corrupted`, `eligible`
            (labels that could have been) and `true` (the labels before), each one a token.
        copies: Copies of some of them, with corruption put in, to fit the combined score on; empty where it is not made.
        places: The number of each copy's row.
        kind: Of the corruption, for a check.
        rate: Of it; 0 where nothing was corrupted.
    """

    questions: "Dataset"
    tokenized: list[dict[str, Any]]
    copies: list[dict[str, Any]]
    places: np.ndarray
    kind: str = ""
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Names a check's folder."""
        return f"{self.kind}_noise={self.rate:g}"

    @property
    def known(self) -> bool:
        """Whether it is known which labels are corrupted."""
        return bool(self.tokenized) and "corrupted" in self.tokenized[0]


def prepare(options: argparse.Namespace, tokenizer: Any) -> list[Rows]:
    """Read, tokenize and, for a check, corrupt the rows, as `bft-sft` does with the same flags.

    Returns:
        The rows once for every kind and rate of --noise; without it, once, as they are.

    Raises:
        UsageError: An unknown kind of noise.
        ValueError: As `load_questions`, `add_distractors`, `tokenize_questions` and `corrupt_labels` raise it.
    """
    from bft_hf.noise.labels import LABEL_NOISES

    from .question_files import read_questions
    from .questions import tokenize_questions

    for kind in options.noise_kind:
        if kind not in LABEL_NOISES:
            raise UsageError(f"unknown --noise_kind {kind!r}: choose from {', '.join(LABEL_NOISES)}")
    source = read_questions(options.dataset, split=options.split)
    questions = source.sample(options.train_examples, options.max_context_chars, options.seed)
    if options.distractors:
        from bft_hf.noise.distractors import add_distractors, passages_of

        questions = add_distractors(
            questions,
            options.distractors,
            seed=options.seed,
            source=options.distractor_source,
            corpus=passages_of(source.rows) if options.distractor_source != "ctxs" else None,
            gold_position=options.gold_position,
        )
    spans = options.distractors > 0 or "span_shift" in options.noise_kind
    clean = tokenize_questions(questions, tokenizer, options.max_length, spans=spans).to_list()
    count = min(options.calibration_examples, len(clean)) if options.noise or options.score == COMBINED else 0
    places = np.sort(np.random.default_rng(options.seed).permutation(len(clean))[:count])
    kinds = options.noise_kind if options.noise else options.noise_kind[:1]
    result = []
    for kind, rate in itertools.product(kinds, options.noise or [0.0]):
        rows = _corrupt(clean, rate, kind, options.seed, options, tokenizer) if rate else clean
        some = [rows[place] for place in places]
        seed = CALIBRATION_SEED + options.seed
        copies = _corrupt(some, options.calibration_noise, kind, seed, options, tokenizer) if some else []
        result.append(Rows(questions, rows, copies, places, kind, rate))
    return result


def _corrupt(
    rows: Sequence[dict[str, Any]], rate: float, kind: str, seed: int, options: argparse.Namespace, tokenizer: Any
) -> list[dict[str, Any]]:
    from datasets import Dataset

    from bft_hf.noise.labels import corrupt_labels

    from .questions import end_of_turn

    spared = {end_of_turn(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    known = ("corrupted", "eligible", "true")
    corrupted = corrupt_labels(
        Dataset.from_list([{name: value for name, value in row.items() if name not in known} for row in rows]),
        rate,
        seed=seed,
        vocab_size=len(tokenizer),
        kind=kind,
        eos_token_ids=spared - {tokenizer.pad_token_id},
        pad_token_id=tokenizer.pad_token_id,
        special_token_ids=tokenizer.all_special_ids,
    ).to_list()
    for row, before in zip(corrupted, rows, strict=True):
        row["true"] = before["labels"]
        row["eligible"] = [label != IGNORE_INDEX and label not in spared for label in before["labels"]]
        if options.noise_inputs:
            pairs = zip(row["input_ids"], row["labels"], strict=True)
            row["input_ids"] = [token if label == IGNORE_INDEX else label for token, label in pairs]
    return corrupted


class Scorer:
    """Makes tables of tokens with one model; it is moved to the device it is to run on.

    Args:
        model: Patched or plain.
        tokenizer: The model's.
        options: Of `bft-audit`.
    """

    def __init__(self, model: Any, tokenizer: Any, options: argparse.Namespace) -> None:
        import torch
        from transformers.utils import is_torch_bf16_gpu_available

        accelerator = None if options.use_cpu else torch.accelerator.current_accelerator()
        self.model = model.to(accelerator or "cpu")
        self.tokenizer = tokenizer
        self.batch_size = options.batch_size
        self.bf16 = options.bf16
        if self.bf16 is None:
            self.bf16 = accelerator is not None and is_torch_bf16_gpu_available()

    @property
    def vocab_size(self) -> int:
        """How many tokens the distributions are over."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def __call__(
        self, lists: Sequence[Sequence[Mapping[str, Any]]], desc: str = "Scoring"
    ) -> "tuple[list[pandas.DataFrame], pandas.DataFrame | None]":
        """Score lists of tokenized rows, those with the same inputs in one pass.

        Returns:
            The passages of the first list, where its rows say where they are and the model is patched: `row`, `id`,
            `place`, `gold`, `precision` and `gain` (means over the passage). And for each list a table with a line for every trained token: `row` (from 0), `id`, `position`, `token_id`, `token`,
            `loss`, `probability`, `entropy`, `rival_id`, `rival`, `rival_probability`; for a patched model `precision`,
            `gain`, `input_precision`, `input_gain`; and for rows with known corruption `corrupted`, `eligible`,
            `true_token`.
        """
        import torch

        from .scores import score_rows

        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            scored = score_rows(
                self.model,
                [row for rows in lists for row in rows],
                batch_size=self.batch_size,
                pad_token_id=self.tokenizer.pad_token_id,
                desc=desc,
            )
        ends = np.cumsum([len(rows) for rows in lists])
        tables = [self._table(rows, scored[end - len(rows) : end]) for rows, end in zip(lists, ends, strict=True)]
        return tables, _passages(lists[0], scored)

    def _table(self, rows: Sequence[Mapping[str, Any]], scored: Sequence[RowScores]) -> "pandas.DataFrame":
        import pandas

        if not rows:
            return pandas.DataFrame()
        counts = [len(row.loss) for row in scored]
        columns: dict[str, Any] = {
            "row": np.repeat(np.arange(len(scored)), counts),
            "id": np.repeat(np.array([row.id for row in scored], dtype=object), counts),
        }
        sources = {"position": "positions", "token_id": "labels", "rival_id": "rivals"}
        sources |= {name: name for name in ("loss", "probability", "entropy", "rival_loss")}
        if scored[0].precision is not None:
            sources |= {name: name for name in ("precision", "gain", "input_precision", "input_gain")}
        for name, source in sources.items():
            values = [getattr(row, source) for row in scored]
            columns[name] = np.concatenate([value.mean(1) if value.ndim == 2 else value for value in values])
        columns["rival_probability"] = np.exp(-columns.pop("rival_loss"))
        if "corrupted" in rows[0]:
            at = [(row, place) for row, score in zip(rows, scored, strict=True) for place in score.positions]
            columns["corrupted"] = np.array([row["corrupted"][place] for row, place in at], dtype=bool)
            columns["eligible"] = np.array([row["eligible"][place] for row, place in at], dtype=bool)
            columns["true_token"] = self._texts([row["true"][place] for row, place in at])
        table = pandas.DataFrame(columns)
        table.insert(4, "token", self._texts(table["token_id"]))
        table.insert(table.columns.get_loc("rival_id") + 1, "rival", self._texts(table["rival_id"]))
        return table

    def _texts(self, tokens: Any) -> list[str]:
        """Each token by itself as text; a part of a character as the vocabulary writes it."""
        known: dict[int, str] = {}
        for token in {int(token) for token in tokens}:
            text = self.tokenizer.decode([token])
            known[token] = str(self.tokenizer.convert_ids_to_tokens(token)) if "\ufffd" in text or not text else text
        return [known[int(token)] for token in tokens]


def _passages(rows: Sequence[Mapping[str, Any]], scored: Sequence[RowScores]) -> "pandas.DataFrame | None":
    import pandas

    lines = [
        {"row": number, "id": score.id, "place": place, "gold": gold, **passage}
        for number, (row, score) in enumerate(zip(rows, scored, strict=False))
        if score.passages
        for place, (gold, passage) in enumerate(zip(row["passage_gold"], score.passages, strict=True))
    ]
    return pandas.DataFrame(lines) if lines else None


def passage_detection(passages: "pandas.DataFrame", resamples: int) -> dict[str, dict[str, list[float]]]:
    """Measure how well low precision and low gain find the distractors among passages; chance is an AUROC of one half.

    Raises:
        ValueError: There is no distractor, or nothing else.
    """
    scores = {"precision": -np.log(passages["precision"].to_numpy()), "gain": -passages["gain"].to_numpy()}
    run = Run(scores, ~passages["gold"].to_numpy(), passages["id"].to_numpy())
    result = compare([run], baseline=None, resamples=resamples)
    return {name: {metric: value.as_list() for metric, value in row.items()} for name, row in result.values.items()}


def add_suspicions(
    tokens: "pandas.DataFrame", known: "pandas.DataFrame", rows: Rows, vocab_size: int, options: argparse.Namespace
) -> dict[str, float] | None:
    """Give a table of tokens its scores, `suspicion` (the chosen one), and `rank` from 1.

    Args:
        tokens: Of `rows.tokenized`; is changed.
        known: Of `rows.copies`.
        rows: What was scored.
        vocab_size: Of the model.
        options: Of `bft-audit`.

    Returns:
        The weights of the combined score, where there are copies to fit it on.

    Raises:
        UsageError: The chosen score is not to be had of this model.
        ValueError: As `combined`.
    """
    scores = suspicions(tokens, vocab_size)
    weights = None
    if rows.copies:
        known = known.assign(row=rows.places[known["row"].to_numpy()])[known["eligible"].to_numpy()]
        scores[COMBINED], weights = combined(tokens, known, known["corrupted"].to_numpy(), options.seed)
    if options.score not in scores:
        raise UsageError(f"--score {options.score} needs a patched model, and {options.model_name_or_path} is plain")
    for name, values in scores.items():
        tokens[PREFIX + name] = values
    tokens["suspicion"] = scores[options.score]
    tokens["rank"] = tokens["suspicion"].rank(ascending=False, method="first").astype(int)
    return weights


def rank_rows(tokens: "pandas.DataFrame", rows: Rows, options: argparse.Namespace) -> "pandas.DataFrame":
    """Make the table of rows, the most suspicious first; rows without a trained token are left out.

    Returns:
        `rank` from 1, `id`, `suspicion`, `question`, `answer` (the first reference as the data has it), `context`, `trained` (what is
        trained, token by token), `worst_token`, `tokens`, `mean_loss`, `max_loss`, `truncated`, for a patched model
        `precision` and `gain` (means), and `corrupted_tokens` where known; `row` numbers the rows as they came.
    """
    grouped = tokens.groupby("row", sort=True)
    table = grouped.agg(
        id=("id", "first"),
        tokens=("loss", "size"),
        mean_loss=("loss", "mean"),
        max_loss=("loss", "max"),
        trained=("token", "".join),
        **{name: (name, "mean") for name in ("precision", "gain") if name in tokens},
        **({"corrupted_tokens": ("corrupted", "sum")} if rows.known else {}),
    )
    table["worst_token"] = tokens.loc[grouped["suspicion"].idxmax().to_numpy(), "token"].to_numpy()
    table["suspicion"] = by_row(tokens["suspicion"].to_numpy(), tokens["row"].to_numpy(), options.row_score)
    places = table.index.to_numpy()
    table["truncated"] = [bool(rows.tokenized[place]["truncated"]) for place in places]
    questions = rows.questions.select(places)
    table["question"], table["context"] = list(questions["question"]), list(questions["context"])
    table["answer"] = [answers[0] for answers in questions["answers"]]
    table = table.reset_index().sort_values(["suspicion", "row"], ascending=[False, True], ignore_index=True)
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    first = ["rank", "id", "suspicion", "question", "answer", "trained", "worst_token"]
    return table[[*first, *(name for name in table if name not in first)]]


def noise_summary(tokens: "pandas.DataFrame", rows: Rows, options: argparse.Namespace) -> dict[str, Any]:
    """What one kind and rate of --noise did to the rows."""
    return {
        "rate": rows.rate,
        "kind": rows.kind,
        "in_inputs": options.noise_inputs,
        "corrupted_tokens": int(tokens["corrupted"].sum()),
        "eligible_tokens": int(tokens["eligible"].sum()),
        "corrupted_rows": int(tokens.groupby("row")["corrupted"].any().sum()),
    }


def detection(checks: Sequence["pandas.DataFrame"], resamples: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Measure how well each score finds what is corrupted.

    Args:
        checks: Tables of tokens with known corruption, one a run.
        resamples: Of the bootstrap over rows, and over runs where there are several.

    Returns:
        For "tokens" (those that could be corrupted), "rows_by_max" and "rows_by_mean" (rows with a corrupted token; absent where
        every row has one, or none), for each score: "auroc", "average_precision", and for all but the loss
        "..._minus_loss"; each [value, low, high].

    Raises:
        ValueError: No label is corrupted, or all are, or the checks have not the same scores.
    """
    levels: dict[str, list[Run]] = {"tokens": []}
    for table in checks:
        scores = {name[len(PREFIX) :]: table[name].to_numpy() for name in table if name.startswith(PREFIX)}
        rows, ids, corrupted, eligible = (table[name].to_numpy() for name in ("row", "id", "corrupted", "eligible"))
        levels["tokens"].append(Run({n: s[eligible] for n, s in scores.items()}, corrupted[eligible], ids[eligible]))
        by_id = table.groupby("row", sort=True).agg(id=("id", "first"), wrong=("corrupted", "any"))
        for how in AGGREGATES:
            by = {name: by_row(values, rows, how) for name, values in scores.items()}
            levels.setdefault(f"rows_by_{how}", []).append(Run(by, by_id["wrong"].to_numpy(), by_id["id"].to_numpy()))
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for level, runs in levels.items():
        if level != "tokens" and any(run.wrong.all() or not run.wrong.any() for run in runs):
            continue
        result = compare(runs, resamples=resamples)
        found[level] = {
            name: {metric: result.values[name][metric].as_list() for metric in METRICS}
            | {f"{metric}_minus_loss": value.as_list() for metric, value in result.differences.get(name, {}).items()}
            for name in result.values
        }
    return found


def markdown(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> str:
    """The tables of `detection` in Markdown."""
    lines = []
    for level, scores in found.items():
        lines += [f"{level.replace('_', ' ')}:", "", "| score | AUROC | minus loss | average precision | minus loss |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name, row in sorted(scores.items(), key=lambda item: -item[1]["auroc"][0]):
            keys = ("auroc", "auroc_minus_loss", "average_precision", "average_precision_minus_loss")
            cells = [written(*row[k]) if k in row else "" for k in keys]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def read_check(folder: Path) -> "pandas.DataFrame":
    """The tokens of an audit with known corruption.

    Raises:
        UsageError: There is none in the folder.
    """
    import pandas

    try:
        table = pandas.read_parquet(folder / "tokens.parquet")
    except (OSError, ValueError):
        raise UsageError(
            f"{folder} holds no audit (no tokens.parquet that can be read): give an --output_dir"
        ) from None
    if "corrupted" not in table:
        raise UsageError(f"{folder}: that audit had no --noise, so nothing is known to be corrupted in it")
    return table


def write(
    folder: Path,
    tokens: "pandas.DataFrame",
    ranked: "pandas.DataFrame",
    result: Mapping[str, Any],
    options: argparse.Namespace,
    passages: "pandas.DataFrame | None" = None,
) -> None:
    """Write an audit's files, all of them or none: they are made beside the folder and moved."""
    from .audit_page import page
    from .results import write_json

    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder, prefix=".audit-"))
    try:
        by_suspicion = tokens.sort_values("rank", ignore_index=True)
        tables = {"rows": ranked, "tokens": by_suspicion, **({} if passages is None else {"passages": passages})}
        for name, table in tables.items():
            table.to_csv(beside / f"{name}.csv", index=False)
            table.to_parquet(beside / f"{name}.parquet", index=False)
        write_json(beside / "audit.json", result)
        (beside / "audit.html").write_text(page(ranked.head(options.top), tokens, result), encoding="utf-8")
        for file in sorted(beside.iterdir()):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # only where nothing was written
