"""Reliability from the model's own likelihood of the question: against the formula, one passage at a time."""

import math
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from test_questions import SMOLLM2_CHAT_TEMPLATE, byte_tokenizer

import bft_hf
from bft_hf.recipes.likelihood import REQUEST, likelihood_reliability

PASSAGES = ["the red box stands in the hall", "bread and milk", "a box of bread in the hall of a house by the sea, red"]


def rows(*counts: int, question: str = "Which box is red?") -> Dataset:
    """A row for each count, of so many passages."""
    passages = [{"text": text, "gold": text == PASSAGES[0], "score": None, "reliability": [0.5]} for text in PASSAGES]
    return Dataset.from_list([{"id": str(n), "question": question, "passages": passages[:n]} for n in counts])


def log_likelihood(model: Any, tokenizer: Any, passage: str, question: str) -> float:
    """log p(question | passage), by a pass of its own."""
    text = f"Passage: {passage}\n\n{REQUEST}"
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        front = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        front = tokenizer(f"{text}\n\nQuestion:\n")["input_ids"]
    back = tokenizer(question, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([front + back])).logits[0].log_softmax(-1)
    return sum(scores[len(front) - 1 + place, token].item() for place, token in enumerate(back))


def numbers(dataset: Dataset) -> list[list[float]]:
    return [[passage["reliability"][0] for passage in row["passages"]] for row in dataset]


@pytest.fixture(params=[None, SMOLLM2_CHAT_TEMPLATE], ids=["text", "chat"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return byte_tokenizer(request.param)


@pytest.fixture
def model() -> Any:
    model = make_tiny_llama(dtype=torch.float64, vocab_size=512, max_position_embeddings=512)
    with torch.no_grad():  # likelihoods that differ
        model.lm_head.weight.mul_(40)
    return model.train()


def test_reliability_is_the_posterior_over_the_best(model: Any, tokenizer: Any) -> None:
    rated = likelihood_reliability(rows(3, 1, 2), model, tokenizer, floor=0.0, batch_size=2, progress=False)
    assert model.training
    model.eval()
    logs = [log_likelihood(model, tokenizer, passage, "Which box is red?") for passage in PASSAGES]
    assert max(logs) - min(logs) > 0.05
    for found, n in zip(numbers(rated), (3, 1, 2), strict=True):
        assert found == pytest.approx([math.exp(log - max(logs[:n])) for log in logs[:n]], rel=1e-4)
    assert numbers(rows(1)) == [[0.5]] and numbers(rated)[1] == [1.0]


def test_the_floor_and_the_question_mark(model: Any, tokenizer: Any) -> None:
    free = numbers(likelihood_reliability(rows(3), model, tokenizer, floor=0.0, progress=False))[0]
    floor = 0.9
    held = likelihood_reliability(rows(3, question="Which box is red ?"), model, tokenizer, floor=floor, progress=False)
    assert numbers(held)[0] == pytest.approx([max(value, floor) for value in free])
    assert min(free) < 0.8


def test_long_passages_are_cut_and_the_question_is_not(model: Any, tokenizer: Any) -> None:
    long = rows(2).map(lambda row: {"passages": [{**one, "text": one["text"] * 200} for one in row["passages"]]})
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    rated = likelihood_reliability(long, model, tokenizer, max_length=300, progress=False)
    assert 290 < max(seen) <= 304 and max(numbers(rated)[0]) == 1.0


def test_what_cannot_be_rated_is_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no column 'passages'"):
        likelihood_reliability(rows(2).remove_columns("passages"), model, tokenizer)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got -1"):
        likelihood_reliability(rows(2), model, tokenizer, floor=-1)
    with pytest.raises(ValueError, match="patched already"):
        likelihood_reliability(rows(2), bft_hf.patch(model), tokenizer)
