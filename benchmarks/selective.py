"""Answers of trained models to held-out SQuAD questions, with how sure they were: what `bft-audit selective` reads.

Adapters that bft-sft left, or whole models; about five minutes each on one core that multiplies bfloat16:

    python benchmarks/selective.py outputs/squad_noise/bft_noise=0.3_seed=1 --output selective
    bft-audit selective selective/bft_noise=0.3_seed=1
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from bft_hf.recipes.evaluation import evaluate_answers
from bft_hf.recipes.loading import load_trained
from bft_hf.recipes.questions import load_questions

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "squad" / "train-v1.1.json.gz"
DRAWN = 300  # as many as squad_noise.yaml evaluates on, of which the first are answered


def main() -> int:
    """Answer the questions with every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders of bft-sft")
    parser.add_argument("--output", type=Path, required=True, help="gets a folder for each")
    parser.add_argument("--questions", type=int, default=150)
    args = parser.parse_args()
    drawn = load_questions(str(DATA), split="validation", limit=DRAWN, max_context_chars=400, seed=0)
    rows = drawn.to_list()[: args.questions]
    for folder in args.models:
        model, tokenizer = load_trained(str(folder))
        with torch.autocast("cpu", torch.bfloat16):
            found = evaluate_answers(
                model, tokenizer, rows, max_new_tokens=16, max_length=512, record_uncertainty=True, desc=folder.name
            )
        predictions = args.output / folder.name / "predictions.jsonl"
        predictions.parent.mkdir(parents=True, exist_ok=True)
        predictions.write_text("".join(json.dumps(row) + "\n" for row in found.per_question))
        print(folder.name, found.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
