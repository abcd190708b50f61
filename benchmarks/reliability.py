"""What reliability is worth in retrieval: answer NLL with distractors, by what the filter is told of the passages.

Natural Questions with their gold passage and k others, SmolLM2-135M as it is or with an adapter, in the plain model and in one
patched near its own function; the passages' reliability is absent, a retriever's (BM25 over the prompt's passages), the model's own (how likely it finds the
question given each passage), or an oracle's: 1 for the gold passage and a constant for the others, which no user has, so it is what a perfect retriever could
bring. "shuffled": the same numbers handed to other passages of the prompt, which tells what reading all of them less brings. From a clone with the tests' data beside it:

    python benchmarks/reliability.py --output docs/results/reliability
    python benchmarks/reliability.py --output docs/results/reliability --table     # again from what is there
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bft_hf
from bft_hf import BFTConfig
from bft_hf.noise.distractors import add_distractors
from bft_hf.noise.reliability import retriever_reliability
from bft_hf.recipes.evaluation import evaluate_answers
from bft_hf.recipes.intervals import hierarchical_bootstrap, written
from bft_hf.recipes.likelihood import likelihood_reliability
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.recipes.questions import load_questions

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "nq"
STARTS: dict[str, dict[str, Any]] = {
    "identity": {"kriging": False, "gain": False, "propagate": False},
    "Q 100": {"initial_process_noise": 100.0, "initial_precision_value": 0.01},
    "unit": {},
}
"""In "identity" nothing changes the pretrained function but reliability, as the keys' weight."""
PRUNED = "best by likelihood"
"""The rival: a plain model that reads the passage with the highest likelihood alone."""
TOLD = (
    "none",
    "retriever",
    "shuffled retriever",
    "oracle 0.2",
    "shuffled oracle 0.2",
    "likelihood",
    "shuffled likelihood",
    PRUNED,
)


def rate(row: dict[str, Any], others: float) -> dict[str, Any]:
    """Reliability 1 for a row's gold passage, `others` for each distractor."""
    rated = [{**passage, "reliability": [1.0 if passage["gold"] else others]} for passage in row["passages"]]
    return {"passages": rated}


def shuffle(row: dict[str, Any]) -> dict[str, Any]:
    """The passages' numbers dealt to other places, by a generator of the row's own."""
    seed = int.from_bytes(hashlib.sha256(str(row["id"]).encode()).digest()[:8], "little")
    order = np.random.default_rng(seed).permutation(len(row["passages"]))
    numbers = [row["passages"][place]["reliability"] for place in order]
    return {
        "passages": [{**passage, "reliability": one} for passage, one in zip(row["passages"], numbers, strict=True)]
    }


def keep_best(row: dict[str, Any]) -> dict[str, Any]:
    """The most reliable passage alone."""
    return {"passages": [max(row["passages"], key=lambda passage: passage["reliability"][0])]}


def told(rows: Any, what: str, by_likelihood: Callable[[], Any]) -> Any:
    """The rows with the reliability of `TOLD`; `by_likelihood` gives those that the model has rated."""
    if what == "none":
        return rows
    if what.startswith("shuffled "):
        return told(rows, what.removeprefix("shuffled "), by_likelihood).map(shuffle)
    if what == PRUNED:
        return by_likelihood().map(keep_best)
    if what == "likelihood":
        return by_likelihood()
    if what.startswith("oracle "):
        return rows.map(rate, fn_kwargs={"others": float(what.removeprefix("oracle "))})
    return retriever_reliability(rows, progress=False)


def rate_by_model(rows: Any, model: Any, tokenizer: Any) -> Any:
    """The rows with the reliability that the model, not patched, gives their passages."""
    with torch.autocast("cpu", torch.bfloat16):
        return likelihood_reliability(rows, model, tokenizer)


def run(arguments: argparse.Namespace) -> None:
    """Measure every cell that has no file yet, each into one of its own."""
    model, tokenizer = load_model_and_tokenizer("smollm2-135m")
    if arguments.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(arguments.adapter)).merge_and_unload()
    questions = load_questions(str(DATA / arguments.data), split="all", limit=arguments.questions, seed=0)
    questions = questions.select(range(arguments.skip, len(questions)))
    for k in arguments.distractors:
        rows = add_distractors(questions, k, seed=0, source=("ctxs", "bm25"), progress=False)

        by_likelihood = functools.cache(functools.partial(rate_by_model, rows, model, tokenizer))
        for start, what in itertools.product(("plain", *arguments.starts), arguments.reliability):
            name = f"k={k}_{start}_{what}".replace(" ", "-")
            path = arguments.output / f"{name}.json"
            is_told = what not in ("none", PRUNED)
            fits = what == "none" or (k > 0 and is_told == (start != "plain"))
            if path.exists() or not fits:
                continue
            data = told(rows, what, by_likelihood)
            if start != "plain":
                bft_hf.patch(model, BFTConfig.unit(**STARTS[start]))
            with torch.autocast("cpu", torch.bfloat16):
                result = evaluate_answers(
                    model, tokenizer, data, batch_size=8, max_length=1280, generate_first=arguments.generate,
                    max_new_tokens=16, reliability=is_told, desc=name,
                )  # fmt: skip
            if start != "plain":
                bft_hf.unpatch(model)
            summary = {"k": k, "start": start, "reliability": what, "data": arguments.data, **result.summary()}
            per_question = {key: [row[key] for row in result.per_question] for key in ("id", "answer_nll", "f1")}
            path.write_text(json.dumps({**summary, "per_question": per_question}) + "\n")


def table(folder: Path, without: Path | None = None) -> str:
    """Markdown: every cell beside the plain model, its own start without reliability, and its own numbers shuffled, paired by question.

    Questions that were measured in the folder `without` are left out.
    """
    seen: set[str] = set()
    for path in without.glob("k=*.json") if without else ():
        seen.update(json.loads(path.read_text())["per_question"]["id"])
    cells = {}
    for path in sorted(folder.glob("k=*.json")):
        cell = json.loads(path.read_text())
        asked = cell["per_question"]
        kept = [place for place, one in enumerate(asked["id"]) if one not in seen]
        cell["per_question"] = {name: [values[place] for place in kept] for name, values in asked.items()}
        cell["answer_nll"] = float(np.mean(cell["per_question"]["answer_nll"]))
        cells[cell["k"], cell["start"], cell["reliability"]] = cell
    lines = ["| k | model | reliability | answer NLL | less plain | less no reliability | less its numbers shuffled |"]
    lines += ["| ---: | --- | --- | ---: | --- | --- | --- |"]

    def difference(cell: dict[str, Any], other: dict[str, Any] | None) -> str:
        if other is None or other is cell:
            return ""
        mine, theirs = (np.array(c["per_question"]["answer_nll"]) for c in (cell, other))
        interval = hierarchical_bootstrap((mine - theirs)[None])
        return written(interval.mean, interval.low, interval.high, signed=True)

    for (k, start, what), cell in cells.items():
        others = (k, "plain", "none"), (k, start, "none"), (k, start, f"shuffled {what}")
        columns = [str(k), start, what, f"{cell['answer_nll']:.3f}", *(difference(cell, cells.get(o)) for o in others)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder, a JSON a cell; what is there is not run again"
    )
    parser.add_argument("--data", default="eval_dense_top5.jsonl.gz", help="file of shared/data/nq")
    parser.add_argument("--adapter", type=Path, help="LoRA of a plain bft-sft run, merged into the model")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them, the first ones")
    parser.add_argument("--generate", type=int, default=0, help="answer so many questions, for F1")
    parser.add_argument("--distractors", type=int, nargs="*", default=[0, 4])
    parser.add_argument("--starts", nargs="*", choices=STARTS, default=["identity", "Q 100"])
    parser.add_argument("--reliability", nargs="*", choices=TOLD, default=list(TOLD))
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--without", type=Path, help="a folder of runs whose questions the table leaves out")
    arguments = parser.parse_args()
    if not arguments.table:
        arguments.output.mkdir(parents=True, exist_ok=True)
        run(arguments)
    print(table(arguments.output, arguments.without))
    return 0


if __name__ == "__main__":
    sys.exit(main())
