"""SmolLM2-135M, a real pretrained Llama: what patching it costs and what it changes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Settings, reference_llama
from transformers import AutoModelForCausalLM

import bft_hf
from bft_hf import BFTConfig
from bft_hf.filter import probe_signs
from bft_hf.recipes.questions import load_questions, tokenize_questions
from bft_hf.sample_size import NUM_PROBES


@pytest.fixture(scope="module")
def questions(shared_data: Path, _smollm2: tuple[Any, Any]) -> list[dict[str, Any]]:
    """100 SQuAD questions with their first answers, tokenized, the longest first."""
    rows = load_questions(
        str(shared_data / "squad" / "dev-v1.1-a.json.gz"), split="all", limit=100, max_context_chars=500
    )
    tokenized = [dict(row) for row in tokenize_questions(rows, _smollm2[1])]
    assert len(tokenized) == 100 and all(any(label != -100 for label in row["labels"]) for row in tokenized)
    return sorted(tokenized, key=lambda row: -len(row["input_ids"]))


def left_padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = (torch.full((len(rows), width), value) for value in (0, -100, 0))
    for i, row in enumerate(rows):
        start = width - len(row["input_ids"])
        ids[i, start:], labels[i, start:] = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        mask[i, start:] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
    }


@torch.inference_mode()
def answer_nll(model: Any, rows: list[dict[str, Any]], batch_size: int = 10) -> float:
    """The mean over questions of the mean negative log-likelihood of an answer's tokens, in nats."""
    losses = []
    for start in range(0, len(rows), batch_size):
        batch = left_padded(rows[start : start + batch_size])
        labels = batch.pop("labels")
        keep = int((labels != -100).sum(-1).max()) + 1
        logits = model.eval()(**batch, logits_to_keep=keep, use_cache=False).logits.float()
        targets = labels[:, -keep + 1 :]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
        losses.append(loss.sum(-1) / (targets != -100).sum(-1))
    return torch.cat(losses).mean().item()


def test_new_parameters_are_few(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    before = sum(parameter.numel() for parameter in model.parameters())
    bft_hf.patch(model, BFTConfig.unit())
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    assert 0 < added == 30 < 1e-3 * before


@torch.inference_mode()
def test_identity_start_keeps_the_answer_nll(smollm2: tuple[Any, Any], questions: list[dict[str, Any]]) -> None:
    model, _ = smollm2
    plain = answer_nll(model, questions)
    found = {}
    for name, config in {"identity": BFTConfig.identity(), "unit": BFTConfig.unit()}.items():
        with bft_hf.patched(model, config):
            found[name] = answer_nll(model, questions)
    print(f"\nanswer NLL on 100 questions: plain {plain:.4f}, " + ", ".join(f"{n} {v:.4f}" for n, v in found.items()))
    assert abs(found["identity"] - plain) < 0.005 * plain
    assert abs(found["identity"] - plain) < abs(found["unit"] - plain)
    assert abs(found["unit"] - plain) > 0.005 * plain
    assert answer_nll(model, questions[:10]) == answer_nll(bft_hf.unpatch(model), questions[:10])


def test_bfloat16_keeps_the_residual_stream_and_comes_back(
    smollm2: tuple[Any, Any], questions: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, _ = smollm2
    expected = answer_nll(model, questions[-20:])
    with bft_hf.patched(model, BFTConfig.identity()):
        model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert bft_hf.get_config(half) == BFTConfig.identity()
    batch = left_padded(questions[-4:])
    batch.pop("labels")
    with torch.inference_mode(), bft_hf.record(half) as trace:
        output = half(**batch, output_hidden_states=True)
    assert {state.dtype for state in output.hidden_states} == {torch.bfloat16} == {output.logits.dtype}
    assert len(output.hidden_states) == 31 and all(state.isfinite().all() for state in output.hidden_states)
    assert {value.dtype for value in trace.precision + trace.gain} == {torch.float32}
    assert {p.dtype for p in bft_hf.bft_parameters(half).values()} == {torch.float32}
    assert answer_nll(half, questions[-20:]) == pytest.approx(expected, rel=0.05)


@torch.inference_mode()
def test_left_padded_row_equals_the_row_alone(smollm2: tuple[Any, Any], questions: list[dict[str, Any]]) -> None:
    model, _ = smollm2
    bft_hf.patch(model, BFTConfig.unit())
    batch = left_padded([questions[-1], questions[-40]])
    batch.pop("labels")
    length = int(batch["attention_mask"][0].sum())
    assert length < batch["input_ids"].shape[1]
    padded = model(**batch).logits[0, -length:]
    alone = model(input_ids=batch["input_ids"][:1, -length:]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=2e-3)
    assert copy.deepcopy(model.config).num_hidden_layers == 30


@torch.inference_mode()
def test_greedy_with_a_cache_equals_greedy_without(smollm2: tuple[Any, Any], questions: list[dict[str, Any]]) -> None:
    model, tokenizer = smollm2
    bft_hf.patch(model, BFTConfig.identity(initial_process_noise=100.0))
    batch = left_padded(questions[-3:])
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": tokenizer.pad_token_id}
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))
    assert cached.shape[1] > batch["input_ids"].shape[1]


def test_float64_agrees_with_the_oracle(smollm2: tuple[Any, Any]) -> None:
    """transformers takes norms and rotary angles in float32, which is what is left of a difference."""
    model, tokenizer = smollm2
    text = "The Normans were the people who in the 10th and 11th centuries gave their name to Normandy"
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :14]
    bft_hf.patch(model, BFTConfig.unit())
    try:
        model.double()
        with torch.no_grad(), bft_hf.record(model) as trace:
            logits = model(ids, use_cache=False).logits
            settings = Settings(num_probes=NUM_PROBES)
            reference = reference_llama(model.state_dict(), model.config, settings, ids, signs=probe_signs)
    finally:
        model.float()
    torch.testing.assert_close(logits, reference.logits, rtol=0, atol=2e-4)
    for ours, theirs in zip(trace.gain, reference.gain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
