"""Packing and padding-free batches: documents in one row give what they give apart, in values, filter and gradients."""

from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from test_backends import CONFIGS, FIELDS, flash, flex, on  # noqa: F401
from test_generation import moved
from torch.testing import assert_close

import bft_hf
from bft_hf import BFTConfig

BACKENDS = ["eager", "sdpa", "flex_attention", "flash_attention_2"]
LENGTHS = ((5, 1, 6), (4, 8))


def documents() -> list[list[torch.Tensor]]:
    """Token ids of the documents of two rows, one of a single token."""
    generator = torch.Generator().manual_seed(31)
    return [[torch.randint(3, 128, (n,), generator=generator) for n in row] for row in LENGTHS]


def packed(rows: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows as a packed batch: ids and positions that start anew, without a mask."""
    return {
        "input_ids": torch.stack([torch.cat(row) for row in rows]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(document)) for document in row]) for row in rows]),
    }


def labels_of(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Labels as trl makes them: nothing is predicted across the start of a document."""
    return ids.masked_fill(positions == 0, -100)


def run(model: Any, **inputs: Any) -> tuple[torch.Tensor, Any]:
    with torch.no_grad(), bft_hf.record(model) as trace:
        logits = model(**inputs, use_cache=False).logits
    return logits, trace


def assert_apart(model: Any, rows: list[list[torch.Tensor]], together: tuple[torch.Tensor, Any]) -> None:
    """Compare a packed pass, document by document, with a pass of each document alone."""
    for row, row_documents in enumerate(rows):
        start = 0
        for document in row_documents:
            part = slice(start, start + len(document))
            logits, trace = run(model, input_ids=document[None])
            assert_close(together[0][row, part], logits[0], rtol=1e-4, atol=1e-4)
            for name in FIELDS:
                for ours, theirs in zip(getattr(together[1], name), getattr(trace, name), strict=True):
                    if name == "effective_sample_size":
                        ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
                    assert_close(
                        ours[row, part], theirs[0], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                    )
            start += len(document)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("unit", "flex_attention"),
        ("exact", "flex_attention"),
        ("unit", "flash_attention_2"),
        ("exact", "flash_attention_2"),
    ]
    + [(name, backend) for name in CONFIGS for backend in ("eager", "sdpa")],
)
def test_packed_documents_give_what_they_give_apart(
    name: str,
    backend: str,
    flex: None,  # noqa: F811
    flash: None,  # noqa: F811
) -> None:
    """trl #3910: logits, precision, gain and effective sample size of a document do not know its neighbours in the row."""
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attn_implementation="eager"), CONFIGS[name])))
    rows = documents()
    together = run(model, **packed(rows))
    assert_apart(model, rows, together)
    leaked, _ = run(model, input_ids=packed(rows)["input_ids"])
    assert (leaked - together[0])[0, 5:].abs().max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["unit", "exact"])
def test_gradients_of_packed_documents_are_those_of_documents_apart(
    name: str,
    backend: str,
    flex: None,  # noqa: F811
    flash: None,  # noqa: F811
) -> None:
    """trl #3910: no gradient crosses from a document to its neighbour, tau and Q included."""
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attn_implementation="eager"), CONFIGS[name])))
    rows = documents()
    batch = packed(rows)
    labels = labels_of(batch["input_ids"], batch["position_ids"])

    def gradients() -> dict[str, torch.Tensor]:
        found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        model.zero_grad()
        return found

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )

    loss(model(**batch, use_cache=False).logits, labels).backward()
    together = gradients()
    for document in (document for row in rows for document in row if len(document) > 1):
        ids = document[None]
        loss(model(ids, use_cache=False).logits, labels_of(ids, torch.arange(len(document))[None])).backward()
    apart = gradients()
    for key, expected in apart.items():
        scale = expected.abs().max().item()
        assert scale > 0, key
        assert_close(together[key], expected, rtol=1e-3, atol=1e-4 * scale, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_padding_free_batch_of_trls_collator_gives_what_its_rows_give_apart(backend: str) -> None:
    """trl #3910: SFTTrainer's padding_free collator, with completions, as SFTTrainer hands its batch on."""
    collators = pytest.importorskip("trl.trainer.sft_trainer")
    collator = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = [documents()[0] + documents()[1]]
    examples = [
        {"input_ids": document.tolist(), "completion_mask": [0] * (len(document) // 2) + [1] * (-(-len(document) // 2))}
        for document in rows[0]
    ]
    batch = collator(examples)
    assert "attention_mask" not in batch and batch["input_ids"].shape == (1, 24)
    assert (batch["position_ids"] == 0).sum() == 5
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attn_implementation="eager"), BFTConfig.unit())))
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "position_ids")}
    assert_apart(model, rows, run(model, **inputs))
    model(**batch, use_cache=False).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_packed_batch_of_trls_collator_gives_what_its_documents_give_apart(backend: str) -> None:
    """trl #3910: packing=True gives rows of several documents, flattened by their seq_lengths."""
    collators = pytest.importorskip("trl.trainer.sft_trainer")
    collator = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = documents()
    examples = [
        {"input_ids": torch.cat(row).tolist(), "seq_lengths": [len(document) for document in row]} for row in rows
    ]
    batch = collator(examples)
    flat = [[document for row in rows for document in row]]
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attn_implementation="eager"), BFTConfig.unit())))
    inputs = {name: value for name, value in batch.items() if name in ("input_ids", "position_ids")}
    assert_apart(model, flat, run(model, **inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_reliability_of_a_packed_row_stays_within_its_document(
    backend: str,
    flex: None,  # noqa: F811
    flash: None,  # noqa: F811
) -> None:
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attn_implementation="eager"), BFTConfig.unit())))
    rows = documents()
    batch = packed(rows)
    rho = torch.ones(batch["input_ids"].shape)
    rho[0, 7:9] = 0  # in the third document of the first row, which begins at 6
    rho[0, 0] = 0  # the first token of the first document sees nothing
    together, trace = run(model, **batch, token_reliability=rho)
    alone, alone_trace = run(model, input_ids=rows[0][2][None], token_reliability=rho[:1, 6:])
    assert_close(together[:1, 6:], alone, rtol=1e-4, atol=1e-4)
    untouched, _ = run(model, **batch)
    assert_close(together[1], untouched[1], rtol=1e-4, atol=1e-4)
    assert (trace.gain[0][0, 0] == 0).all()
    for ours, theirs in zip(trace.gain, alone_trace.gain, strict=True):
        assert_close(ours[:1, 6:], theirs, rtol=1e-4, atol=1e-5)


def test_a_row_filled_up_with_pads_keeps_its_documents(tiny_llama: Any) -> None:
    """trl pads position_ids with 0: every pad is a document of its own, and none of its neighbours notices."""
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    rows = documents()[:1]
    batch = packed(rows)
    together = run(
        model,
        input_ids=torch.nn.functional.pad(batch["input_ids"], (0, 3)),
        position_ids=torch.nn.functional.pad(batch["position_ids"], (0, 3)),
    )
    assert together[0].isfinite().all()
    assert_apart(model, rows, together)


@pytest.mark.parametrize("mask_kind", ["boolean", "lowest"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_that_see_nothing_are_finite_and_keep_their_state(config: BFTConfig, backend: str, mask_kind: str) -> None:
    """transformers PR #25284: rows hidden from everything give no NaN in values or gradients, and leave none elsewhere."""
    if (backend, mask_kind) == ("eager", "boolean"):
        pytest.skip("transformers adds masks to eager scores: a boolean one hides nothing there")
    model = on(backend, moved(bft_hf.patch(make_tiny_llama(attention_bias=True), config)))
    ids = torch.stack([torch.cat(row) for row in documents()])
    seen = torch.ones(12, 12, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, :3] = hidden[1, 5] = hidden[1, 11] = True
    seen[hidden.nonzero()[:, 0], 0, hidden.nonzero()[:, 1]] = False
    seen &= ~hidden[:, None, None]
    mask = seen
    if mask_kind == "lowest":
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with bft_hf.record(model) as trace:
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert logits.isfinite().all()
    for gain, before, after in zip(trace.gain, trace.precision, trace.updated_precision, strict=True):
        assert (gain[hidden] == 0).all() and (gain[~hidden] > 0).all()
        assert torch.equal(before[hidden], after[hidden])
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    other = ids.clone()
    other[hidden] = 3 + other[hidden] % 7
    changed = model(other, attention_mask=mask, use_cache=False).logits
    assert_close(changed[~hidden], logits[~hidden], rtol=1e-5, atol=1e-5)
    changed[~hidden].square().mean().backward()
    assert any(not torch.equal(parameter.grad, gradient[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_packing_needs_no_cache_as_in_a_plain_model(tiny_llama: Any) -> None:
    """With a cache transformers makes no mask for packed documents: a patched model is then told nothing else than a plain one."""
    batch = packed(documents())
    model = tiny_llama(attn_implementation="eager")
    zeros = []
    for patch in (False, True):
        if patch:
            moved(bft_hf.patch(model, BFTConfig.unit()))
        for use_cache in (False, True):
            with torch.no_grad():
                weights = model(**batch, use_cache=use_cache, output_attentions=True).attentions
            zeros.append([(layer == 0) for layer in weights])
    for plain, ours in zip(zeros[0] + zeros[1], zeros[2] + zeros[3], strict=True):
        assert torch.equal(plain, ours)
