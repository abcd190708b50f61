"""What the start of the filter does to a pretrained model before any training: answer NLL by start, calibrated and not.

Questions of SQuAD's training articles that bft-sft keeps for evaluation; calibrated on eight others, on all their tokens or
on those that predict the answer. From a clone with the tests' data beside it, about ten minutes on one core:

    python benchmarks/starts.py --output docs/results/starts.json
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bft_hf
from bft_hf import BFTConfig
from bft_hf.recipes.evaluation import sequence_nll
from bft_hf.recipes.intervals import hierarchical_bootstrap, written
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.recipes.questions import answer_tokens, load_questions, prompt_tokens, tokenize_example

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "squad" / "train-v1.1.json.gz"
BATCH = 16

STARTS: dict[str, dict[str, Any]] = {
    "Q 1 (unit)": {},
    "Q 10": {"initial_process_noise": 10.0},
    "Q 100, tau .01": {"initial_process_noise": 100.0, "initial_precision_value": 0.01},
    "Q .37": {"initial_process_noise": 0.37},
    "Q .1": {"initial_process_noise": 0.1},
    "exact n": {"effective_sample_size": "exact"},
    "no kriging": {"kriging": False},
    "nu0 4": {"prior_degrees_of_freedom": 4.0},
    "absolute": {"observation_units": "absolute"},
    "neighbours": {"prior_scale": "neighbours"},
}


class Bench:
    """A model, questions to score it on and rows to calibrate it on."""

    def __init__(self, questions: int, rows: int) -> None:
        self.model, self.tokenizer = load_model_and_tokenizer("smollm2-135m")
        limits: dict[str, Any] = {"max_context_chars": 400}
        scored = load_questions(str(DATA), split="validation", limit=questions, seed=0, **limits)
        self.ids = [row["id"] for row in scored]
        self.prompts = [prompt_tokens(self.tokenizer, row["context"], row["question"])[0] for row in scored]
        self.answers = [answer_tokens(self.tokenizer, row["answers"][0]) for row in scored]
        train = load_questions(str(DATA), split="train", limit=rows, seed=1, **limits)
        self.rows = [tokenize_example(self.tokenizer, row) for row in train]

    def answer_nll(self) -> list[float]:
        """Mean NLL of each answer's tokens, in nats."""
        scores: list[float] = []
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            for start in range(0, len(self.prompts), BATCH):
                part = slice(start, start + BATCH)
                scores += sequence_nll(self.model, self.prompts[part], self.answers[part], self.tokenizer.pad_token_id)
        return scores

    def batches(self, answers_alone: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Rows to calibrate on, one a batch; `calibrate` counts the tokens that `labels` keep, where they are given."""
        for row in self.rows:
            batch = {"input_ids": torch.tensor([row["input_ids"]])}
            if answers_alone:
                batch["labels"] = torch.tensor([row["labels"]])
            yield batch


def main() -> int:
    """Measure every start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="to calibrate on")
    args = parser.parse_args()
    bench = Bench(args.questions, args.rows)
    plain = np.array(bench.answer_nll())
    results: list[dict[str, Any]] = []

    def note(start: str, calibrated: str) -> None:
        scores = bench.answer_nll()
        interval = hierarchical_bootstrap((np.array(scores) - plain)[None])
        config = bft_hf.get_config(bench.model)
        scale = None if config is None or config.gain_scale is None else [round(s, 4) for s in config.gain_scale]
        result = {
            "start": start,
            "calibrated": calibrated,
            "answer_nll": float(np.mean(scores)),
            "difference": interval.mean,
            "interval": [interval.low, interval.high],
            "gain_scale": scale,
            "per_question": scores,
        }
        results.append(result)
        difference = written(interval.mean, interval.low, interval.high, signed=True)
        print(f"| {start} | {calibrated} | {result['answer_nll']:.3f} | {difference} |", flush=True)

    print("| start | calibrated on | answer NLL | difference to plain, 95 % |\n| --- | --- | ---: | --- |")
    note("plain", "")
    for name, settings in STARTS.items():
        for calibrated in ("", "all tokens", "answers"):
            bft_hf.patch(bench.model, BFTConfig.unit(**settings))
            if calibrated:
                bft_hf.calibrate(bench.model, bench.batches(calibrated == "answers"))
            note(name, calibrated)
            bft_hf.unpatch(bench.model)
    asked = {"questions": args.questions, "rows": args.rows, "ids": bench.ids}
    args.output.write_text(json.dumps(asked | {"starts": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
