"""Reliability on its way from a dataset's column or a retriever's scores to a patched model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_evaluation import make_rows
from test_questions import byte_tokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import bft_hf
from bft_hf.noise.distractors import add_distractors
from bft_hf.noise.reliability import reliability_of_scores, retriever_reliability
from bft_hf.recipes.collator import ReliabilityCollator, reliability_collator
from bft_hf.recipes.evaluation import evaluate_answers
from bft_hf.recipes.questions import tokenize_example, tokenize_questions
from bft_hf.recipes.trainer import BFTSFTConfig, BFTSFTTrainer

ROWS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "reliability": 0.5},
    {
        "input_ids": [5, 6, 7, 8, 9, 4],
        "labels": [-100, 6, -100, 8, 9, 4],
        "reliability": [0.0, 1.0, 0.25, 1.0, 1.0, 1.0],
    },
]


def without_reliability(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "reliability"} for row in rows]


# The collator


def test_a_number_is_the_prompts_and_a_list_the_tokens() -> None:
    batch = ReliabilityCollator(pad_token_id=0)(ROWS)
    expected = torch.tensor([[0.5, 0.5, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.25, 1.0, 1.0, 1.0]])
    assert torch.equal(batch.pop("token_reliability"), expected)
    plain = DataCollatorForLanguageModeling(pad_token_id=0)(without_reliability(ROWS))
    assert batch.keys() == plain.keys() and all(torch.equal(batch[key], plain[key]) for key in plain)


def test_without_the_column_batches_are_trls() -> None:
    assert "token_reliability" not in ReliabilityCollator(pad_token_id=0)(without_reliability(ROWS))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], without_reliability(ROWS)[1]], "a row without reliability among rows that have one"),
        ([{**ROWS[0], "reliability": [1.0, 0.5]}], "a row of 4 tokens has 2 numbers"),
        ([{**ROWS[0], "reliability": 1.5}], r"must be in \[0, 1\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReliabilityCollator(pad_token_id=0)(rows)


def test_padding_free_is_refused() -> None:
    with pytest.raises(ValueError, match="does not go with padding_free or packing"):
        ReliabilityCollator(pad_token_id=0, padding_free=True)(ROWS)


@pytest.mark.parametrize("through", ["trainer", "recipe"])
def test_batches_are_padded_as_the_configuration_says(through: str, tiny_llama: Any, tmp_path: Path) -> None:
    config = BFTSFTConfig(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to="none", pad_to_multiple_of=16,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    if through == "recipe":
        batch = reliability_collator(None, config)(ROWS)
    else:
        model = bft_hf.patch(tiny_llama(vocab_size=512), bft_hf.BFTConfig.unit())
        rows = Dataset.from_list([{**ROWS[0], "reliability": [0.5] * 4}, ROWS[1]])
        trainer = BFTSFTTrainer(model, config, train_dataset=rows, processing_class=byte_tokenizer())
        batch = next(iter(trainer.get_train_dataloader()))
    assert batch["token_reliability"].shape == batch["input_ids"].shape == (2, 16)
    with pytest.raises(ValueError, match="does not go with padding_free"):
        reliability_collator(0, BFTSFTConfig(str(tmp_path), padding_free=True))(ROWS)


# Training


def test_the_trainer_hands_the_column_to_the_model(tiny_llama: Any, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = bft_hf.patch(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512), bft_hf.BFTConfig.unit())
    questions = Dataset.from_list([{**row, "reliability": [0.1]} for row in make_rows(4)])
    rows = tokenize_questions(questions, tokenizer, reliability=True)
    assert all(min(row) == 0.1 for row in rows["reliability"])
    config = BFTSFTConfig(
        str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, use_cpu=True,
        dataset_kwargs={"skip_prepare_dataset": True}, report_to="none",
    )  # fmt: skip
    collator = ReliabilityCollator(pad_token_id=tokenizer.pad_token_id)
    trainer = BFTSFTTrainer(
        model, config, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, data_collator=collator
    )
    (batch,) = trainer.get_eval_dataloader()
    assert batch["token_reliability"].shape == batch["input_ids"].shape

    def loss(**reliability: torch.Tensor) -> torch.Tensor:
        ids = batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"], **reliability).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])

    with torch.no_grad():
        expected = loss(token_reliability=batch["token_reliability"]).item()
        assert abs(expected - loss().item()) > 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    first = next(iter(trainer.get_train_dataloader()))
    assert torch.equal(first["token_reliability"].sort(0).values, batch["token_reliability"].sort(0).values)
    loss_in_training = trainer.compute_loss(model.train(), dict(batch))
    assert loss_in_training.item() == pytest.approx(expected, rel=1e-5)


# Evaluation


def with_distractors(count: int = 5) -> list[dict]:
    corpus = [
        "A tale of two cities, and then some.",
        "Nothing at all happened.",
        "In a hole in the ground there lived one.",
    ]
    rows = add_distractors(Dataset.from_list(make_rows(count)), 2, seed=0, source="random", corpus=corpus).to_list()
    for row in rows:
        for place, passage in enumerate(row["passages"]):
            passage["reliability"] = [0.1 + 0.4 * place]
    return rows


def test_answers_and_likelihoods_are_those_of_an_unpadded_pass_with_reliability(tiny_llama: Any) -> None:
    tokenizer = byte_tokenizer()
    model = bft_hf.patch(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512), bft_hf.BFTConfig.unit())
    rows = with_distractors()
    options: dict[str, Any] = {"batch_size": 3, "max_new_tokens": 4, "progress": False}
    told = evaluate_answers(model, tokenizer, rows, **options, reliability=True, record_uncertainty=True)
    for row, question in zip(rows, told.per_question, strict=True):
        example = tokenize_example(tokenizer, row, reliability=True)
        ids, trust = torch.tensor([example["input_ids"]]), torch.tensor([example["reliability"]])
        with torch.no_grad():
            loss = model(ids, labels=torch.tensor([example["labels"]]), token_reliability=trust).loss.item()
            prompt = sum(label == -100 for label in example["labels"])
            made = model.generate(
                ids[:, :prompt], token_reliability=trust[:, :prompt], attention_mask=torch.ones(1, prompt).long(),
                max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
            )  # fmt: skip
            trust = torch.nn.functional.pad(trust[:, :prompt], (0, made.shape[1] - prompt), value=1.0)
            logits = model(made, token_reliability=trust).logits[0, prompt - 1 : -1].log_softmax(-1)
        assert question["log_probability"] == pytest.approx(
            logits.gather(1, made[0, prompt:, None]).sum().item(), rel=1e-4
        )
        assert question["answer_nll"] == pytest.approx(loss, rel=1e-4)
        assert question["prediction"] == tokenizer.decode(made[0, prompt:], skip_special_tokens=True).strip()
        assert question["distractors_given"] == 2 and question["gold_truncated"] is False
    untold = evaluate_answers(model, tokenizer, rows, **options)
    assert untold.answer_nll != pytest.approx(told.answer_nll, rel=1e-3)


def test_uncertainty_stands_beside_answers_and_nowhere_else(tiny_llama: Any) -> None:
    tokenizer = byte_tokenizer()
    model = bft_hf.patch(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512), bft_hf.BFTConfig.unit())
    options: dict[str, Any] = {"max_new_tokens": 4, "progress": False, "generate_first": 2}
    plain = evaluate_answers(model, tokenizer, make_rows(3), **options).per_question
    sure = evaluate_answers(model, tokenizer, make_rows(3), **options, record_uncertainty=True).per_question
    keys = {"log_probability", "token_entropy", "final_precision", "mean_gain", "answer_tokens"}
    for before, after in zip(plain, sure, strict=True):
        assert {key: value for key, value in after.items() if key not in keys} == before
    assert all(row[key] is not None for row in sure[:2] for key in keys)
    assert all(sure[2][key] is None for key in keys)
    assert all(row["answer_tokens"] == 4 for row in sure[:2])


# A retriever's scores


def test_scores_become_shares_of_the_best() -> None:
    assert reliability_of_scores([4.0, 1.0, 0.0]) == [1.0, 0.25, 0.05]
    assert reliability_of_scores([4.0, -1.0], floor=0.0) == [1.0, 0.0]
    assert reliability_of_scores([0.0, -2.0]) == [1.0, 1.0]
    assert reliability_of_scores([]) == []


def passages(*scores: float | None) -> list[dict]:
    texts = ["the red box in the hall", "the red box", "bread and milk"]
    return [
        {"text": text, "gold": text == texts[1], "score": score, "reliability": [1.0]}
        for text, score in zip(texts, scores, strict=True)
    ]


def test_given_scores_serve_where_every_passage_has_one_and_bm25_elsewhere(tmp_path: Path) -> None:
    question = {"question": "Which red box is in the hall?", "answers": ["x"]}
    rows = Dataset.from_list(
        [{**question, "passages": passages(2.0, 4.0, 3.0)}, {**question, "passages": passages(2.0, None, 3.0)}]
    )
    given, scored = retriever_reliability(rows, cache_dir=tmp_path, progress=False)
    assert [passage["reliability"] for passage in given["passages"]] == [[0.5], [1.0], [0.75]]
    numbers = [passage["reliability"][0] for passage in scored["passages"]]
    assert numbers[0] == 1.0 > numbers[1] > numbers[2] == 0.05
    assert all(passage["score"] is not None for passage in scored["passages"])
    with pytest.raises(ValueError, match="no column 'passages'"):
        retriever_reliability(rows.remove_columns("passages"))
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 2"):
        retriever_reliability(rows, floor=2)
