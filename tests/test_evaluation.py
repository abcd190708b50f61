"""Scores checked against other implementations, and generation against a loop written out by hand."""

import dataclasses
import random
import warnings
from pathlib import Path

import evaluate
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_questions import byte_tokenizer
from torchmetrics.functional.text import squad as torchmetrics_squad
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bft_hf.recipes import evaluation
from bft_hf.recipes.evaluation import evaluate_answers, exact_match, f1, normalize_answer
from bft_hf.recipes.models import SMOLLM2_CHAT_TEMPLATE, load_model_and_tokenizer
from bft_hf.recipes.questions import answer_tokens, end_of_turn, prompt_tokens, tokenize_example

METRIC = Path(evaluation.__file__).parent / "metrics" / "question_answering.py"
WORDS = ["the", "The", "a", "an", "cat", "Cat,", "black", "sea", "1,024", "don't", "U.S.", "—", "!", "", " ", "été"]
texts = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


def make_rows(count: int = 5) -> list[dict]:
    words = ["sea", "river bank", "Rhine", "a longer answer here", "x"]
    return [
        {
            "id": str(n),
            "context": "once upon a time " * (n % 3 + 1),
            "question": "Who was it?",
            "answers": [words[n % 5], "it"],
        }
        for n in range(count)
    ]


@pytest.fixture(params=["plain", "chat"])
def model_and_tokenizer(request, tiny_llama):
    tokenizer = byte_tokenizer(SMOLLM2_CHAT_TEMPLATE if request.param == "chat" else None)
    return tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer


def greedy_by_hand(model, tokenizer, row: dict, count: int) -> str:
    tokens, _ = prompt_tokens(tokenizer, row["context"], row["question"])
    made: list[int] = []
    for _ in range(count):
        made.append(model(torch.tensor([tokens + made])).logits[0, -1].argmax().item())
        if made[-1] in (end_of_turn(tokenizer), tokenizer.eos_token_id):
            made.pop()
            break
    return tokenizer.decode(made, skip_special_tokens=True).strip()


# Scores


def test_normalisation_is_squads():
    assert normalize_answer("The  U.S. Navy, (a fleet)") == "us navy fleet"
    assert normalize_answer("another theme") == "another theme"  # articles as words only


@given(prediction=texts, references=st.lists(texts, min_size=1, max_size=3))
@example(prediction="the", references=["a"])
@settings(max_examples=200)
def test_scores_agree_with_torchmetrics(prediction, references):
    theirs = torchmetrics_squad(
        {"prediction_text": prediction, "id": "0"},
        {"answers": {"answer_start": [0] * len(references), "text": references}, "id": "0"},
    )
    assert exact_match(prediction, references) == pytest.approx(theirs["exact_match"].item() / 100)
    assert f1(prediction, references) == pytest.approx(theirs["f1"].item() / 100)


def test_the_best_reference_counts_and_words_count_as_often_as_they_are_shared():
    assert exact_match("sea", ["the Sea.", "x"]) == 1.0
    assert exact_match("black sea", ["sea", "x"]) == 0.0
    assert f1("black sea", ["sea", "the black sea, Europe"]) == pytest.approx(0.8)
    assert f1("sea sea", ["sea"]) == pytest.approx(2 / 3)
    assert f1("river", ["sea"]) == 0.0


def test_the_metric_loads_from_its_path_and_agrees_with_the_functions(tmp_path):
    metric = evaluate.load(str(METRIC), cache_dir=str(tmp_path))
    generator = random.Random(0)
    predictions = [" ".join(generator.choices(WORDS, k=3)) for _ in range(50)]
    references = [[" ".join(generator.choices(WORDS, k=2)) for _ in range(generator.randint(1, 3))] for _ in range(50)]
    scores = metric.compute(predictions=predictions, references=references)
    pairs = list(zip(predictions, references, strict=True))
    assert scores["exact_match"] == pytest.approx(sum(exact_match(*pair) for pair in pairs) / 50)
    assert scores["f1"] == pytest.approx(sum(f1(*pair) for pair in pairs) / 50)
    assert 0 < scores["exact_match"] < scores["f1"] < 1


# Generation and likelihood


def test_answers_and_likelihoods_equal_those_computed_one_by_one_without_padding(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    rows = make_rows()
    result = evaluate_answers(model, tokenizer, rows, batch_size=3, max_new_tokens=6, progress=False)
    assert [question["id"] for question in result.per_question] == [row["id"] for row in rows]
    for row, prediction, question in zip(rows, result.predictions, result.per_question, strict=True):
        assert prediction == greedy_by_hand(model, tokenizer, row, 6)
        whole = tokenize_example(tokenizer, row)
        ids = torch.tensor([whole["input_ids"]])
        loss = model(ids, labels=torch.tensor([whole["labels"]])).loss.item()
        assert question["answer_nll"] == pytest.approx(loss, rel=1e-4)
    assert len(set(result.predictions)) > 1
    assert result.answer_nll == pytest.approx(sum(q["answer_nll"] for q in result.per_question) / 5)
    assert result.f1 == pytest.approx(sum(q["f1"] for q in result.per_question) / 5)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_results_do_not_depend_on_the_batch_size(model_and_tokenizer, batch_size):
    model, tokenizer = model_and_tokenizer
    expected = evaluate_answers(model, tokenizer, make_rows(), batch_size=4, max_new_tokens=5, progress=False)
    result = evaluate_answers(model, tokenizer, make_rows(), batch_size=batch_size, max_new_tokens=5, progress=False)
    assert result.predictions == expected.predictions
    assert result.answer_nll == pytest.approx(expected.answer_nll, rel=1e-5)


@pytest.mark.parametrize("count", [0, 2, 9])
def test_only_the_first_rows_are_answered(model_and_tokenizer, count):
    whole = evaluate_answers(*model_and_tokenizer, make_rows(), batch_size=3, max_new_tokens=5, progress=False)
    part = evaluate_answers(
        *model_and_tokenizer, make_rows(), batch_size=3, max_new_tokens=5, generate_first=count, progress=False
    )
    assert part.answer_nll == pytest.approx(whole.answer_nll) and part.n == 5
    assert part.predictions == whole.predictions[:count] and part.n_generated == min(count, 5)
    answered = [question["f1"] for question in part.per_question if question["f1"] is not None]
    assert part.f1 == (sum(answered) / len(answered) if count else None)
    assert [question["prediction"] for question in part.per_question[count:]] == [None] * max(0, 5 - count)


def test_the_end_of_turn_counts_in_the_likelihood(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    row = make_rows(1)[0]
    with torch.no_grad():
        tokens = tokenize_example(tokenizer, row)["input_ids"]
        answer = answer_tokens(tokenizer, row["answers"][0])
        log_probabilities = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses = [-log_probabilities[place - 1, tokens[place]].item() for place in range(-len(answer), 0)]
    result = evaluate_answers(model, tokenizer, [row], max_new_tokens=2, progress=False)
    assert result.answer_nll == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert result.answer_nll != pytest.approx(sum(losses[:-1]) / len(losses[:-1]), rel=1e-3)


def test_the_models_own_generation_settings_do_not_leak_in_nor_warn(model_and_tokenizer, caplog):
    model, tokenizer = model_and_tokenizer
    expected = evaluate_answers(model, tokenizer, make_rows(), max_new_tokens=8, progress=False).predictions
    own = GenerationConfig(
        do_sample=True, temperature=3.0, top_k=7, repetition_penalty=5.0, max_length=9, num_beams=2, min_new_tokens=3,
        suppress_tokens=[10, 11, 12],
    )  # fmt: skip
    model.generation_config = own
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        assert evaluate_answers(model, tokenizer, make_rows(), max_new_tokens=8, progress=False).predictions == expected
    assert not caplog.records
    assert model.generation_config is own
    prompt = torch.tensor([prompt_tokens(tokenizer, make_rows()[0]["context"], "Who was it?")[0]])
    leaky = model.generate(prompt, generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, num_beams=1))
    assert tokenizer.decode(leaky[0, prompt.shape[1] :], skip_special_tokens=True).strip() != expected[0]


def test_each_modules_training_mode_comes_back_also_after_an_error(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    model.train()
    model.lm_head.eval()
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda module, *_: seen.append(module.training))
    evaluate_answers(model, tokenizer, make_rows(2), max_new_tokens=2, progress=False)
    assert not any(seen)
    handle.remove()
    handle = model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_answers(model, tokenizer, make_rows(2), max_new_tokens=2, progress=False)
    handle.remove()
    assert model.training
    assert model.model.layers[0].training
    assert not model.lm_head.training


def test_no_logits_are_made_for_prompt_tokens(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    lengths = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: lengths.append(output.shape[1]))
    rows = make_rows()
    evaluate_answers(model, tokenizer, rows, batch_size=8, max_new_tokens=2, progress=False)
    longest = max(len(answer_tokens(tokenizer, row["answers"][0])) for row in rows)
    assert max(lengths) == longest + 1
    assert longest + 1 < min(len(prompt_tokens(tokenizer, row["context"], row["question"])[0]) for row in rows)


def test_a_prediction_ends_at_the_end_of_turn():
    tokenizer = byte_tokenizer(SMOLLM2_CHAT_TEMPLATE)

    class Scripted:
        device = torch.device("cpu")

        def generate(self, input_ids, **_):
            tail = [*tokenizer(" sea", add_special_tokens=False)["input_ids"], end_of_turn(tokenizer)]
            tail += tokenizer("more", add_special_tokens=False)["input_ids"]
            return torch.cat([input_ids, torch.tensor([tail])], 1)

    for ends, text in (([end_of_turn(tokenizer)], "sea"), ([2], "seamore")):
        (tokens,) = evaluation._generate(Scripted(), [[7, 8]], None, ends, 0)
        assert evaluation._text(tokenizer, tokens, ends) == text
        assert tokens == Scripted().generate(torch.tensor([[7]]))[0, 1:].tolist()[: len(tokens)]


def test_long_passages_are_cut_to_the_models_limit(tiny_llama):
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=260)
    rows = [make_rows()[0], {**make_rows()[1], "context": "word " * 100}]
    lengths = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = evaluate_answers(model, tokenizer, rows, max_new_tokens=4, progress=False)
    assert [question["truncated"] for question in result.per_question] == [False, True]
    assert 240 < max(lengths) <= 260


def test_a_peft_model_is_evaluated_like_its_base(tiny_llama):
    peft = pytest.importorskip("peft", reason="pip install peft")
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    expected = evaluate_answers(model, tokenizer, make_rows(), max_new_tokens=4, progress=False)
    model.generation_config.repetition_penalty = 5.0
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    result = evaluate_answers(adapted, tokenizer, make_rows(), max_new_tokens=4, progress=False)
    assert result.predictions == expected.predictions
    assert result.answer_nll == pytest.approx(expected.answer_nll)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    changed = evaluate_answers(adapted, tokenizer, make_rows(), max_new_tokens=4, progress=False)
    assert changed.answer_nll != pytest.approx(expected.answer_nll, rel=1e-3)


def test_training_goes_on_after_an_evaluation(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    evaluate_answers(model, tokenizer, make_rows(2), max_new_tokens=2, progress=False)
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_result_is_frozen_and_sums_up_without_rows(model_and_tokenizer):
    result = evaluate_answers(*model_and_tokenizer, make_rows(2), max_new_tokens=2, progress=False)
    assert set(result.summary()) == {"exact_match", "f1", "answer_nll", "n", "n_generated"}
    assert result.n == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.f1 = 1.0
    with pytest.raises(ValueError, match="no question to evaluate on"):
        evaluate_answers(*model_and_tokenizer, [], progress=False)


def test_a_trained_model_finds_its_own_story_likelier_than_noise(stories260k):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories260k), AutoTokenizer.from_pretrained(stories260k)
    row = {**make_rows()[0], "answers": ["Once upon a time, there was a little girl named Lily."]}
    odd = {**row, "id": "odd", "answers": ["Lily little upon girl was, a there a Once named time."]}
    result = evaluate_answers(model, tokenizer, [row, odd], max_new_tokens=4, progress=False)
    assert result.per_question[0]["answer_nll"] < result.per_question[1]["answer_nll"] - 0.5


@pytest.mark.slow
def test_smollm2_from_the_wheel_saves_and_comes_back(smollm2, tmp_path):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, its_tokenizer = load_model_and_tokenizer(str(tmp_path))
    assert not hasattr(again.config, "quantization_config")
    for (name, tensor), (other, loaded) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(tensor, loaded)
    assert its_tokenizer.chat_template == tokenizer.chat_template
    assert its_tokenizer.pad_token == tokenizer.pad_token


@pytest.mark.slow
def test_smollm2_untrained_leaves_room_on_the_demo(smollm2):
    from bft_hf.recipes.questions import load_questions

    rows = load_questions("demo", split="validation", limit=8)
    result = evaluate_answers(*smollm2, rows, max_new_tokens=16, progress=False)
    assert 0 < result.f1 < 0.5
