"""Train a recommender: epochs of windows, softmax cross entropy over the catalogue, early stopping, resumable bit by bit."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..patching import is_patched, param_groups
from .batches import NO_LABEL, TrainingWindows
from .data import Split
from .evaluation import Ranking, model_scorer, rank_users
from .losses import BLOCK_BYTES, blocked_cross_entropy, proposal, sampled_cross_entropy
from .metrics import summarize

CHOICES = {
    "loss": ("full", "sampled"),
    "schedule": ("constant", "linear", "cosine"),
    "loss_dtype": ("float32", "bfloat16"),
}
SELECTED_BY = "ndcg@10"


class TrainingError(ValueError):
    """Training cannot go on; one line that names the remedy."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; every field goes into the results.

    Attributes:
        epochs: At most.
        batch_size: Windows a step, over all processes.
        learning_rate: Of AdamW, at its peak.
        bft_learning_rate: Of log tau and log Q.
        weight_decay: On matrices, the item embeddings included.
        warmup_steps: Steps in which the learning rate rises from 0.
        schedule: What it does afterwards, to 0 at the end of all epochs: "constant", "linear", "cosine".
        max_grad_norm: Gradients are clipped to it; 0 for never.
        loss: "full", every item of the catalogue competes, or "sampled", a sample of it does.
        negatives: Items sampled a step, for "sampled".
        negatives_power: They are drawn by (1 + frequency) to this power.
        mask_last: Share of windows whose last item alone is hidden, for cloze models.
        patience: Stop after so many evaluations without a better NDCG@10 on validation; 0 for never.
        evaluate_every: Epochs between evaluations.
        evaluation_batch_size: Users ranked at once.
        loss_dtype: Of the full loss's logits, "float32" or "bfloat16".
        block_bytes: Memory of the full loss's block of logits.
        seed: Decides the order, the dropout and what is hidden or sampled.

    Raises:
        ValueError: `loss`, `schedule` or `loss_dtype` is none of those named.
    """

    epochs: int = 100
    batch_size: int = 256
    learning_rate: float = 1e-3
    bft_learning_rate: float = 1e-2
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    max_grad_norm: float = 0.0
    loss: str = "full"
    negatives: int = 1024
    negatives_power: float = 0.5
    mask_last: float = 0.1
    patience: int = 5
    evaluate_every: int = 1
    evaluation_batch_size: int = 256
    loss_dtype: str = "float32"
    block_bytes: int = BLOCK_BYTES
    seed: int = 42

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose from {', '.join(allowed)}")

    def factor(self, step: int, steps: int) -> float:
        """The learning rate's factor in a step, counted from 0, of so many."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        if self.schedule == "linear":
            return 1 - progress
        return (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1.0


@dataclass
class TrainingRecord:
    """What happened.

    Attributes:
        epochs: One entry an epoch: "epoch" from 1, "loss" (a target's mean), "seconds" and "cpu_seconds" of its training, where
            it was evaluated "validation" (metrics) and "evaluation_seconds".
        best_epoch: Whose weights the model has at the end.
        stopped_early: Whether patience ended it.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    stopped_early: bool = False

    def seconds_per_epoch(self, name: str = "seconds") -> float:
        """The median over epochs."""
        return statistics.median(entry[name] for entry in self.epochs)


class Objective(nn.Module):
    """Recommender and loss in one forward pass, so that DistributedDataParallel sees every parameter used within it."""

    def __init__(self, model: Any, settings: TrainingSettings, item_frequency: np.ndarray) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        log_q = proposal(torch.from_numpy(item_frequency[1:]), settings.negatives_power)
        self.register_buffer("log_q", log_q.float(), persistent=False)

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, negatives: Tensor | None) -> Tensor:
        """Sum of the loss over the labelled positions."""
        hidden = self.model(**inputs).last_hidden_state
        labelled = labels != NO_LABEL
        states, targets = hidden[labelled], labels[labelled] - 1
        items = slice(1, self.model.config.num_items + 1)
        weight, bias = self.model.item_embeddings()[items], self.model.item_bias()
        bias = None if bias is None else bias[items]
        if not len(targets):  # a process without a window of the last batch still has to take part
            return hidden.sum() * 0 + weight.sum() * 0 + (0 if bias is None else bias.sum() * 0)
        if negatives is None:
            dtype = getattr(torch, self.settings.loss_dtype)
            return blocked_cross_entropy(states, weight, targets, bias, self.settings.block_bytes, dtype)
        return sampled_cross_entropy(states, weight, targets, negatives, self.log_q, bias)


@dataclass
class Trainer:
    """Trains one recommender on one split.

    Every process draws the same batches and takes every n-th window, so that n processes do the steps that one would. Random
    numbers are seeded anew for each epoch, so that what `checkpoint` holds after an epoch is all that going on needs.

    Attributes:
        model: Trained in place; at the end it has the weights of the best epoch.
        split: Trains on the training parts, chooses the epoch by validation.
        settings: How.
        checkpoint: A file to write after each epoch, or None.
        say: Takes lines of progress.
        accelerator: accelerate's `Accelerator`; a new one by default.
    """

    model: Any
    split: Split
    settings: TrainingSettings
    checkpoint: Path | None = None
    say: Callable[[str], None] = print
    accelerator: Any = None

    def __post_init__(self) -> None:
        if self.accelerator is None:
            from accelerate import Accelerator

            self.accelerator = Accelerator()
        self.windows = TrainingWindows.of(self.split, self.model, self.settings.mask_last)
        self.steps_per_epoch = len(self.windows.epoch(self.settings.batch_size, np.random.default_rng(0)))
        groups = param_groups(
            self.model, self.settings.learning_rate, self.settings.bft_learning_rate, self.settings.weight_decay
        )
        for group in groups:
            group["peak"] = group["lr"]
        optimizer = torch.optim.AdamW(groups, lr=self.settings.learning_rate)
        objective = Objective(self.model, self.settings, self.split.item_frequency)
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.record = TrainingRecord()
        self._best: dict[str, Tensor] = {}

    def train(self, resume: bool = False) -> TrainingRecord:
        """Train to the end, or until validation stops getting better.

        Args:
            resume: Go on from `checkpoint`; from the start where there is none yet.

        Raises:
            TrainingError: the loss is not finite, the checkpoint is of another run or not whole, or no epoch was evaluated.
        """
        if resume and self.checkpoint is not None and self.checkpoint.exists():
            self._resume()
        while len(self.record.epochs) < self.settings.epochs and not self.record.stopped_early:
            self._epoch(len(self.record.epochs) + 1)
        if not self._best:
            raise TrainingError(
                f"{len(self.record.epochs)} epochs are done and none of them was evaluated: ask for more epochs, or evaluate sooner"
            )
        self.model.load_state_dict(self._best)
        return self.record

    def rank(self, part: str, details: bool = False) -> Ranking:
        """Evaluate the model as it is, users shared between the processes.

        Args:
            part: "validation" or "test".
            details: Also give the recommended items and, with a filter, the precisions.
        """
        start, end = self.split.inputs(part)
        order = np.argsort(end - start, kind="stable")
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        precision = np.full(len(order), np.nan) if details and is_patched(self.model) else None
        ranking = rank_users(
            self.split,
            part,
            model_scorer(self.model, self.split, part, precision),
            batch_size=self.settings.evaluation_batch_size,
            recommend=details,
            order=order[rank::world],
        )
        ranking = replace(ranking, precision=precision)
        if world == 1:
            return ranking
        from accelerate.utils import gather_object

        columns = (ranking.ranks, ranking.recommended, ranking.precision)
        for users, *pieces in gather_object([(order[rank::world], *columns)]):
            for column, piece in zip(columns, pieces, strict=True):
                if column is not None:
                    column[users] = piece[users]
        return ranking

    def _epoch(self, epoch: int) -> None:
        settings = self.settings
        # One stream a process for dropout, the same one in all of them for whatever decides a batch.
        torch.manual_seed(_seed_of(settings.seed, epoch, self.accelerator.process_index))
        rng = np.random.default_rng([settings.seed, epoch])
        started, cpu_started = time.perf_counter(), time.process_time()
        batches = self.windows.epoch(settings.batch_size, rng)
        self.objective.train()
        losses: list[Tensor] = []  # read at the end: every look at one would make an accelerator wait
        count = 0
        for index, chosen in enumerate(self._progress(batches, epoch)):
            loss, labels = self._step((epoch - 1) * self.steps_per_epoch + index, chosen, rng)
            losses.append(loss)
            count += labels
        total = torch.stack(losses).double().sum().item()
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            total, count = (sum(values) for values in zip(*gather_object([(total, count)]), strict=True))
        mean = total / count
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss is {mean} in epoch {epoch}: lower --learning_rate, or clip by --max_grad_norm 1"
            )
        entry: dict[str, Any] = {
            "epoch": epoch,
            "loss": mean,
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
        }
        line = f"epoch {epoch}: loss {mean:.4f}, {entry['seconds']:.1f} s"
        self.record.epochs.append(entry)
        if epoch % settings.evaluate_every == 0 or epoch == settings.epochs:
            started = time.perf_counter()
            entry["validation"] = summarize(self.rank("validation").ranks)
            entry["evaluation_seconds"] = time.perf_counter() - started
            line += (
                f"; validation HR@10 {entry['validation']['hr@10']:.4f}, NDCG@10 {entry['validation']['ndcg@10']:.4f}"
            )
            line += self._judge(entry)
        self.say(line)
        self._save()

    def _step(self, step: int, chosen: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, int]:
        settings, device = self.settings, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.windows.batch(chosen, rng)
        negatives = None
        if settings.loss == "sampled":
            negatives = self._negatives(rng).to(device)
        # A process beyond the windows of a small last batch takes one that trains nothing.
        mine = {name: value[rank::world] for name, value in batch.items()}
        if not len(mine["labels"]):
            mine = {name: value[:1] for name, value in batch.items()}
            mine["labels"] = torch.full_like(mine["labels"], NO_LABEL)
        count = int((mine["labels"] != NO_LABEL).sum())
        mine = {name: value.to(device) for name, value in mine.items()}
        labels = mine.pop("labels")
        loss = self.objective(mine, labels, negatives)
        # By the targets that a batch has on average, not by its own: batches are of like length, and a mean of each would
        # give the targets of short histories more weight. DDP takes the mean over processes where a sum is meant.
        scale = world / (settings.batch_size * self.windows.targets_per_window)
        self.accelerator.backward(loss * scale)
        if settings.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.objective.parameters(), settings.max_grad_norm)
        factor = settings.factor(step, self.steps_per_epoch * settings.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), count

    def _negatives(self, rng: np.random.Generator) -> Tensor:
        if not hasattr(self, "_cumulative"):
            log_q = self.accelerator.unwrap_model(self.objective).log_q
            self._cumulative = np.cumsum(log_q.cpu().double().exp().numpy())
        draws = rng.random(self.settings.negatives) * self._cumulative[-1]
        return torch.from_numpy(np.searchsorted(self._cumulative, draws, side="right"))

    def _judge(self, entry: dict[str, Any]) -> str:
        """Keep the weights of a better epoch, and stop after too many worse ones."""
        evaluated = [e for e in self.record.epochs if "validation" in e]
        if self.record.best_epoch:
            best = self.record.epochs[self.record.best_epoch - 1]["validation"][SELECTED_BY]
        else:
            best = -math.inf
        if entry["validation"][SELECTED_BY] > best:
            self.record.best_epoch = entry["epoch"]
            self._best = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            return " (best)"
        since = sum(e["epoch"] > self.record.best_epoch for e in evaluated)
        self.record.stopped_early = bool(self.settings.patience) and since >= self.settings.patience
        return ""

    def _progress(self, batches: list[np.ndarray], epoch: int) -> Any:
        from tqdm import tqdm

        hidden = True if not self.accelerator.is_main_process else None  # None: on a terminal only
        return tqdm(batches, desc=f"epoch {epoch}", leave=False, disable=hidden)

    def _fingerprint(self) -> str:
        """Of whatever a run must share with the one that it goes on from; the number of epochs may grow."""
        free = ("epochs", "patience", "evaluation_batch_size")
        settings = {name: value for name, value in asdict(self.settings).items() if name not in free}
        settings["mixed_precision"] = self.accelerator.mixed_precision
        if self.settings.schedule != "constant":
            settings["epochs"] = self.settings.epochs
        config = self.model.config.to_dict()
        parts = [
            sorted(settings.items()),
            sorted((k, str(v)) for k, v in config.items() if k != "transformers_version"),
        ]
        digest = hashlib.sha256(repr(parts).encode())
        digest.update(self.split.data.items.tobytes())
        digest.update(self.split.data.offsets.tobytes())
        return digest.hexdigest()

    def _save(self) -> None:
        if self.checkpoint is None or not self.accelerator.is_main_process:
            return
        state = {
            "fingerprint": self._fingerprint(),
            "model": self.model.state_dict(),
            "best": self._best,
            "optimizer": self.optimizer.state_dict(),
            "record": asdict(self.record),
        }
        partial = self.checkpoint.with_name(self.checkpoint.name + ".part")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def _resume(self) -> None:
        assert self.checkpoint is not None
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            raise TrainingError(f"{self.checkpoint} is not whole: start anew with --overwrite") from None
        if state["fingerprint"] != self._fingerprint():
            raise TrainingError(
                f"{self.checkpoint} is of a run with other settings or data: give these, or start anew with --overwrite"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.record = TrainingRecord(**state["record"])
        self._best = state["best"]
        self.record.stopped_early = False  # more patience, or more epochs, may have been asked for
        since = len([e for e in self.record.epochs if "validation" in e and e["epoch"] > self.record.best_epoch])
        if self.settings.patience and since >= self.settings.patience:
            self.record.stopped_early = True
        self.say(f"going on after epoch {len(self.record.epochs)}")


def _seed_of(*parts: int) -> int:
    """One seed from several, alike for none of their neighbours."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
