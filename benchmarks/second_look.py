"""Answers of finished bft-sft runs to other questions than they were compared on while settings were chosen.

Each run's folder (an adapter or a whole model, with its results.json) is loaded and evaluated again, without training; what
is written, one folder a run, is what `bft-bench report` and `bft-bench pack` read. Finished ones are not evaluated again.

    python benchmarks/second_look.py RUNS --output outputs/dev-a [--only 'sft_noise=0.3_*']
"""

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from small_models import REPOSITORY

from bft_hf.recipes.evaluation import evaluate_answers
from bft_hf.recipes.loading import load_trained
from bft_hf.recipes.questions import load_questions
from bft_hf.recipes.results import write_json

DATA = REPOSITORY.parent / "shared" / "data" / "squad" / "dev-v1.1-a.json.gz"


def look(run: Path, rows: Dataset, options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run's results with another evaluation, and its rows."""
    results = json.loads((run / "results.json").read_text())
    flags = results["flags"]
    model, tokenizer = load_trained(str(run))
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        evaluation = evaluate_answers(
            model,
            tokenizer,
            rows,
            batch_size=16,
            max_new_tokens=flags["max_new_tokens"],
            generate_first=options.f1_questions,
        )
    results["after"] = evaluation.summary()
    results["data"] |= {"evaluation": str(options.dataset), "eval_examples": len(rows)}
    results["seconds"]["evaluation_after"] = round(time.perf_counter() - begin, 2)
    return results, evaluation.per_question


def main() -> int:
    """Look at the runs that were not looked at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--dataset", type=Path, default=DATA)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--f1_questions", type=int, default=100)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="only runs of such a name; repeatable")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = load_questions(str(options.dataset), split="all", limit=options.questions, max_context_chars=400)
    for run in sorted(path.parent for path in options.runs.glob("*/results.json")):
        folder = options.output / run.name
        wanted = any(fnmatchcase(run.name, pattern) for pattern in options.only or ["*"])
        if not wanted or (folder / "results.json").exists():
            continue
        results, questions = look(run, rows, options)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
        write_json(folder / "results.json", results)
        print(f"{run.name}: answer NLL {results['after']['answer_nll']:.3f}, F1 {results['after']['f1']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
