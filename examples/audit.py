"""Plant wrong answers in a training set, and find them again by what a model makes of its tokens."""

import argparse
import json

import pandas

from bft_hf.recipes.audit import main
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.recipes.questions import load_questions, tokenize_questions
from bft_hf.recipes.scores import score_rows

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a Hub id, a folder, or smollm2-135m")
parser.add_argument("--data", default="demo", help="questions: a Hub id, SQuAD JSON, JSONL; or demo")
arguments = parser.parse_args()

# Of 24 questions, every sixth gets the answer of another.
questions = load_questions(arguments.data, split="train", limit=24, seed=1).to_list()
planted = questions[::6]
answers = [question["answers"] for question in planted]
for question, wrong in zip(planted, answers[1:] + answers[:1], strict=True):
    question["answers"] = wrong
with open("questions.jsonl", "w") as file:
    file.writelines(json.dumps(question) + "\n" for question in questions)

# From the command line's side: tables and a page in the folder `audit`. Its model would be one trained on these rows.
flags = ["--model_name_or_path", arguments.model, "--dataset", "questions.jsonl", "--row_score", "mean"]
assert main([*flags, "--output_dir", "audit", "--overwrite"]) == 0
ranked = pandas.read_parquet("audit/rows.parquet")
places = sorted(ranked.index[ranked["id"] == question["id"]][0] + 1 for question in planted)
print(f"The planted answers are at the ranks {places} of {len(ranked)}")

# From Python, on any tokenized rows with labels: what the model expected in place of a token.
model, tokenizer = load_model_and_tokenizer(arguments.model)
asked = load_questions("questions.jsonl", split="all").filter(lambda row: row["id"] == planted[0]["id"])
scores = score_rows(model, tokenize_questions(asked, tokenizer))[0]
for label, rival, loss in zip(scores.labels, scores.rivals, scores.loss, strict=True):
    print(f"{tokenizer.decode([label])!r}: loss {loss:.2f}, the likeliest other is {tokenizer.decode([rival])!r}")
