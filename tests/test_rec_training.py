"""Training settings and what a step does with them: the schedule, groups of parameters, equal weight for every target."""

from typing import Any

import numpy as np
import pytest
import torch

import bft_hf
from bft_hf import rec
from bft_hf.rec.data import Interactions, Split, leave_one_out
from bft_hf.rec.training import Trainer, TrainingSettings


@pytest.fixture
def split() -> Split:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 20, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    users = tuple(map(str, range(40)))
    items = rng.integers(1, 31, offsets[-1])
    return leave_one_out(Interactions(users, tuple(map(str, range(1, 31))), items, offsets, None, "as drawn"))


def make(split: Split, patched: bool = False, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    config = rec.SASRecConfig(
        num_items=30, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=12, dropout=0.0
    )
    model = rec.SASRecForNextItem(config)
    if patched:
        bft_hf.patch(model)
    return Trainer(model, split, TrainingSettings(**{"batch_size": 8, "epochs": 1, **settings}), say=lambda text: None)


def test_schedules() -> None:
    def factors(**settings: Any) -> list[float]:
        return [TrainingSettings(**settings).factor(step, 10) for step in range(10)]

    assert factors() == [1.0] * 10
    assert factors(schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1, *(1 - i / 8 for i in range(8))])
    cosine = factors(schedule="cosine")
    assert cosine[0] == 1 and cosine[5] == pytest.approx(0.5) and cosine == sorted(cosine, reverse=True)
    for field, value in {"loss": "bce", "schedule": "step", "loss_dtype": "float16"}.items():
        with pytest.raises(ValueError, match=f"{field} is '{value}': choose from"):
            TrainingSettings(**{field: value})


def test_the_filter_s_parameters_have_their_own_rate_and_no_decay(split: Split) -> None:
    trainer = make(split, True, learning_rate=1e-3, bft_learning_rate=5e-2, weight_decay=0.1)
    ours = {id(parameter) for parameter in bft_hf.bft_parameters(trainer.model).values()}
    groups = trainer.optimizer.param_groups
    found = [(group["lr"], group["weight_decay"]) for group in groups for p in group["params"] if id(p) in ours]
    assert ours and set(found) == {(5e-2, 0.0)} and len(found) == len(ours)
    before = {name: p.detach().clone() for name, p in bft_hf.bft_parameters(trainer.model).items()}
    trainer.train()
    assert any(not torch.equal(before[name], p) for name, p in bft_hf.bft_parameters(trainer.model).items())
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert {rate for key, rate in rates.items() if key in ours} == {5e-2} != set(rates.values()) == {1e-3, 5e-2}


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_targets_weigh_alike_whatever_their_batch(split: Split, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without steps between, the gradients of an epoch's batches add up to those of one batch of everything."""
    trainer = make(split, loss=loss, negatives=5, negatives_power=0.0)
    monkeypatch.setattr(trainer, "_negatives", lambda rng: torch.arange(5))
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    monkeypatch.setattr(trainer.optimizer, "zero_grad", lambda: None)
    windows = trainer.windows
    counts = 0
    for chosen in windows.epoch(8, np.random.default_rng(0)):
        _, labels = trainer._step(0, chosen, np.random.default_rng(0))
        counts += labels
    parts = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad()
    trainer._step(0, np.arange(len(windows.starts)), np.random.default_rng(0))
    whole = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert counts == round(windows.targets_per_window * len(windows.starts))
    assert max(float(grad.abs().max()) for grad in whole) > 1e-3


def test_the_mean_loss_begins_at_that_of_chance_and_falls(split: Split) -> None:
    record = make(split, epochs=3, learning_rate=1e-2).train()
    losses = [entry["loss"] for entry in record.epochs]
    assert losses[0] == pytest.approx(np.log(30), abs=0.3) and losses == sorted(losses, reverse=True)
    assert record.seconds_per_epoch() > 0 and record.best_epoch in (1, 2, 3)


def test_clipping_bounds_what_a_step_sees(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    for limit in (0.0, 1e-3):
        trainer = make(split, max_grad_norm=limit)
        monkeypatch.setattr(trainer.optimizer, "zero_grad", lambda: None)
        trainer._step(0, np.arange(8), np.random.default_rng(0))
        grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        norms.append(float(torch.cat(grads).norm()))
    assert norms[1] == pytest.approx(1e-3, rel=1e-3) and norms[0] > 1e-2
