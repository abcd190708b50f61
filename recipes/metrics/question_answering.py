"""The metric "question_answering" for `evaluate.load`, from a local path, without the Hub."""

import datasets
import evaluate

from bft_hf.recipes.evaluation import exact_match, f1

_DESCRIPTION = (
    """Exact match and F1 of answers, best over the references, after SQuAD's normalisation, both in [0, 1]."""
)

_USAGE = """
Args:
    predictions (list[str]): one answer a question.
    references (list[list[str]]): for each question, its reference answers, one at least.
Returns:
    exact_match (float), f1 (float): means over the questions, in [0, 1].
Examples:
    >>> metric = evaluate.load("recipes/metrics/question_answering.py")
    >>> metric.compute(predictions=["the Black Sea"], references=[["Black Sea"]])
    {'exact_match': 1.0, 'f1': 1.0}
"""

_CITATION = """@inproceedings{rajpurkar2016squad,
  title = {SQuAD: 100,000+ Questions for Machine Comprehension of Text},
  author = {Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy},
  booktitle = {EMNLP},
  year = {2016}
}"""


class QuestionAnswering(evaluate.Metric):
    """Exact match and F1 of answers to questions."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_USAGE,
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        return {
            "exact_match": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "f1": sum(f1(*pair) for pair in pairs) / len(pairs),
        }
