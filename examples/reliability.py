"""Ask questions among retrieved passages, tell the model how far to trust each, and see how likely the right answer gets.

Filter settings: `kriging=False, gain=False, propagate=False` leaves the pretrained function as it is: reliability alone acts.
"""

import argparse

from datasets import Dataset

from bft_hf import BFTConfig, patch
from bft_hf.noise.distractors import add_distractors
from bft_hf.noise.reliability import retriever_reliability
from bft_hf.recipes.evaluation import evaluate_answers
from bft_hf.recipes.likelihood import likelihood_reliability
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.recipes.questions import load_questions

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a Hub id, a folder, or smollm2-135m")
parser.add_argument("--data", default="demo", help="questions, JSONL with question, answers and context or ctxs")
parser.add_argument("--questions", type=int, default=16)
arguments = parser.parse_args()

model, tokenizer = load_model_and_tokenizer(arguments.model)
questions = load_questions(arguments.data, split="all", limit=arguments.questions, seed=0)
rows = add_distractors(questions, 4, seed=0, source=("ctxs", "bm25"))
by_retriever = retriever_reliability(rows)
by_model = likelihood_reliability(rows, model, tokenizer)  # before it is patched
by_oracle = rows.map(  # what a perfect retriever would say
    lambda row: {"passages": [{**one, "reliability": [1.0 if one["gold"] else 0.05]} for one in row["passages"]]}
)


def show(name: str, rows: Dataset, **options: bool) -> None:
    """Print the negative log-likelihood of the right answers."""
    result = evaluate_answers(model, tokenizer, rows, max_length=1024, generate_first=0, **options)
    print(f"{name:22} answer NLL {result.answer_nll:.3f}")


show("plain", rows)
patch(model, BFTConfig(kriging=False, gain=False, propagate=False))
show("patched, nothing told", rows)
show("retriever's scores", by_retriever, reliability=True)
show("the model's opinion", by_model, reliability=True)
show("an oracle's", by_oracle, reliability=True)
