"""BFTSFTTrainer against TRL's SFTTrainer, and its methods against their formulas on whole logits."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from datasets import Dataset
from distributed.ddp import tokenizer
from peft import LoraConfig, PromptTuningConfig
from scipy import stats
from torch import Tensor
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

import bft_hf
from bft_hf import BFTCallback
from bft_hf.recipes.arguments import METHODS
from bft_hf.recipes.command import UsageError
from bft_hf.recipes.losses import TOKEN_LOSSES, label_losses, mean_token_loss, token_loss
from bft_hf.recipes.trainer import FUSED_HEAD, BFTSFTConfig, BFTSFTTrainer

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
LORA = LoraConfig(r=2, init_lora_weights=False, modules_to_save=["bft"], task_type="CAUSAL_LM")


def rows() -> Dataset:
    """24 rows of 5 to 12 tokens, of which each trains a number of its own."""
    generator = torch.Generator().manual_seed(7)
    data = []
    for i in range(24):
        ids = torch.randint(3, 128, (5 + i % 8,), generator=generator).tolist()
        skipped = 1 + i % 4
        data.append({"input_ids": ids, "labels": [-100] * skipped + ids[skipped:]})
    return Dataset.from_list(data)


def make_trainer(
    method: str,
    folder: Path,
    kind: type[SFTTrainer] = BFTSFTTrainer,
    data: Dataset | None = None,
    eval_dataset: Dataset | None = None,
    peft_config: Any = None,
    **options: Any,
) -> SFTTrainer:
    """One arm on a tiny Llama, as bft-sft makes it; the same seed whatever the kind."""
    set_seed(0)
    model = make_tiny_llama()
    if METHODS[method].patched:
        bft_hf.patch(model, bft_hf.BFTConfig.unit())
    config = BFTSFTConfig if kind is BFTSFTTrainer else SFTConfig
    args = config(output_dir=str(folder), **(QUIET | options))
    METHODS[method].configure(args)
    own = {"bft_learning_rate": 2e-2 if METHODS[method].patched else None} if kind is BFTSFTTrainer else {}
    return kind(
        model,
        args,
        train_dataset=rows() if data is None else data,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        peft_config=peft_config,
        **own,
    )


def losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parameters(trainer: SFTTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def farthest(ours: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert ours.keys() == others.keys()
    return max((ours[name] - others[name]).abs().max().item() for name in ours)


def loss_and_gradients(loss: Callable[[], Tensor], trainer: SFTTrainer) -> tuple[Tensor, dict[str, Tensor]]:
    trainer.model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_equal_losses(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, gradient in theirs[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def by_logits(trainer: SFTTrainer, logits: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
    """The arm's loss from whole logits."""
    if trainer.args.token_loss is not None:
        return mean_token_loss(token_loss(trainer.args))(SimpleNamespace(logits=logits), labels, count)
    kept = labels[:, 1:] != -100
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0][kept]
    weight = log_probs.exp().detach() if trainer.args.loss_type == "dft" else 1.0
    return -(weight * log_probs).sum() / (kept.sum() if count is None else count)


# NEFTune's noise and RAFT's data leave the loss as it is.
LOSSES = [
    name for name, method in METHODS.items() if name == "bft" or method.training.keys() & {"token_loss", "loss_type"}
]


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", LOSSES)
def test_the_loss_of_a_method_is_its_formulas(method: str, peft_config: Any, tmp_path: Path) -> None:
    """With num_items_in_batch and without, values and every parameter's gradient."""
    trainer = make_trainer(method, tmp_path, peft_config=peft_config)
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = trainer.model.train()
    for count in (None, torch.tensor(50)):
        ours = loss_and_gradients(lambda c=count: trainer.compute_loss(model, dict(batch), False, c), trainer)
        theirs = loss_and_gradients(
            lambda c=count: by_logits(trainer, model(**inputs).logits, batch["labels"], c), trainer
        )
        assert_equal_losses(ours, theirs)
    if method != "bft":
        plain = make_trainer("bft" if METHODS[method].patched else "sft", tmp_path, peft_config=peft_config)
        other = loss_and_gradients(lambda: plain.compute_loss(model, dict(batch)), trainer)
        assert abs(other[0] - ours[0]) > 1e-3


@pytest.mark.parametrize("count", [None, 17])
def test_trls_dft_in_float64_is_minus_p_log_p_with_a_fixed_p(count: int | None, tmp_path: Path) -> None:
    """TRL's own lines on log-probabilities in float64; its fused head keeps single precision, whatever the model's."""
    trainer = make_trainer("dft", tmp_path, kind=SFTTrainer)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    ids = torch.randint(0, 11, (2, 7), generator=generator)
    labels = ids.clone()
    labels[0, :3] = labels[1, 4:] = -100
    kept, items = labels[:, 1:] != -100, None if count is None else torch.tensor(count)

    def model(**inputs: Any) -> SimpleNamespace:
        """What the fused head gives, without its rounding."""
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        unused = torch.zeros(kept.shape)
        return SimpleNamespace(
            log_probs=log_probs * kept, label_mask=kept, entropy=unused, is_top1=unused, aux_loss=None
        )

    if FUSED_HEAD:
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        loss = trainer.compute_loss(model, batch, False, items)
    else:
        loss = trainer.compute_loss_func(SimpleNamespace(logits=logits), labels, num_items_in_batch=items)
    [gradient] = torch.autograd.grad(loss, logits)

    p = logits.detach().softmax(-1)[:, :-1]
    one_hot = torch.eye(11, dtype=torch.float64)[labels[:, 1:].clamp(min=0)]
    right, number = (p * one_hot).sum(-1), int(kept.sum()) if count is None else count
    torch.testing.assert_close(loss.detach(), -(right * right.log())[kept].sum() / number, rtol=1e-12, atol=0)
    expected = right[..., None] * (p - one_hot) * kept[..., None] / number
    torch.testing.assert_close(gradient[:, :-1], expected, rtol=1e-10, atol=1e-14)
    assert not gradient[:, -1].any()


@pytest.mark.parametrize("method", ["neftune", "bft+neftune"])
def test_neftunes_noise_is_uniform_within_its_bound_and_in_training_alone(method: str, tmp_path: Path) -> None:
    """arXiv:2310.05914, algorithm 1: uniform in +-alpha / sqrt(L d), L the length of the batch and d its width."""
    data = Dataset.from_list([row for row in rows() if len(row["input_ids"]) == 12])
    options: dict[str, Any] = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "neftune_noise_alpha": 7.0}
    trainer = make_trainer(method, tmp_path, data=data, eval_dataset=data, **options)
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    embedded: list[Tensor] = []
    layers = trainer.model.model
    # The Trainer's own hook adds the noise after this one has seen the embeddings, and before the first layer has.
    layers.embed_tokens.register_forward_hook(lambda _, args, output: embedded.append(output.detach()))
    layers.layers[0].register_forward_pre_hook(
        lambda layer, args: found[layer.training].append(args[0].detach() - embedded.pop())
    )
    trainer.train()
    assert len(found[True]) == 3 == len(found[False]) and not any(noise.any() for noise in found[False])
    noise, bound = torch.cat([part.flatten() for part in found[True]]), 7.0 / math.sqrt(12 * 32)
    assert 0.99 * bound < noise.abs().max() < bound * (1 + 1e-5)
    assert stats.kstest(noise.numpy(), stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3
    assert not torch.equal(found[True][0], found[True][1])


@pytest.mark.parametrize("method", [*LOSSES, "sft", "smoothed by TRL"])
def test_losses_label_by_label_sum_to_the_trainers(method: str, tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.2} if method == "smoothed by TRL" else {}
    trainer = make_trainer("sft" if options else method, tmp_path, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    model, kept = trainer.model.train(), batch["labels"][:, 1:] != -100

    def label_by_label() -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        values = label_losses(trainer.args)(logits[:, :-1][kept], batch["labels"][:, 1:][kept])
        assert values.shape == (kept.sum(),)
        return values.sum()

    ours = loss_and_gradients(label_by_label, trainer)
    mean = loss_and_gradients(lambda: trainer.compute_loss(model, dict(batch)) * kept.sum(), trainer)
    assert_equal_losses(ours, mean)


@pytest.mark.parametrize("method", ["gce", "label_smoothing", "bft+gce"])
def test_packed_documents_have_the_loss_they_have_apart(method: str, tmp_path: Path) -> None:
    packing = {"packing": True, "max_length": 32, "dataset_kwargs": None, "per_device_train_batch_size": 1}
    trainer = make_trainer(method, tmp_path, **packing)
    batch = next(iter(trainer.get_train_dataloader()))
    ids, labels, positions = (batch[name] for name in ("input_ids", "labels", "position_ids"))
    starts = [*torch.nonzero(positions[0] == 0)[:, 0].tolist(), ids.shape[1]]
    assert len(starts) > 3 and "attention_mask" not in batch
    model, count = trainer.model.train(), (labels != -100).sum()

    def apart() -> Tensor:
        pieces = [slice(first, last) for first, last in pairwise(starts) if last - first > 1]
        return sum(by_logits(trainer, model(ids[:, s]).logits, labels[:, s], count) for s in pieces)

    ours = loss_and_gradients(lambda: trainer.compute_loss(model, dict(batch), False, count), trainer)
    assert_equal_losses(ours, loss_and_gradients(apart, trainer))


@pytest.mark.parametrize("method", LOSSES)
def test_accumulated_batches_train_as_the_large_one(method: str, tmp_path: Path) -> None:
    runs = []
    for size, steps in ((4, 1), (2, 2), (2, 1)):
        trainer = make_trainer(
            method,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=3,
        )
        trainer.train()
        runs.append((losses(trainer), parameters(trainer)))
    (large, its), (small, smalls), (_, others) = runs
    assert len(large) == 3 and small == pytest.approx(large, rel=1e-4, abs=1e-6)
    assert farthest(its, smalls) < 2e-4 < 1e-3 < farthest(its, others)


@pytest.mark.parametrize("method", LOSSES)
def test_a_batch_without_labels_costs_nothing(method: str, tmp_path: Path) -> None:
    if not FUSED_HEAD and method in ("sft", "bft", "dft", "neftune"):
        pytest.skip("the loss is this TRL's own, a mean over no label")
    trainer = make_trainer(method, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for count in (None, torch.tensor(0), torch.tensor(7)):
        value, gradients = loss_and_gradients(
            lambda c=count: trainer.compute_loss(trainer.model, dict(batch), False, c), trainer
        )
        assert value == 0 and not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("method", ["sft", "dft", "neftune"])
def test_eight_steps_are_trls(method: str, tmp_path: Path) -> None:
    """Whatever BFTSFTTrainer adds leaves a plain arm as SFTTrainer trains it."""
    ours, theirs = (make_trainer(method, tmp_path, kind, max_steps=8) for kind in (BFTSFTTrainer, SFTTrainer))
    start = parameters(ours)
    for trainer in (ours, theirs):
        set_seed(1)
        trainer.train()
    assert len(losses(ours)) == 8 and losses(ours) == pytest.approx(losses(theirs), abs=1e-5)
    assert farthest(parameters(ours), parameters(theirs)) < 2e-5
    assert farthest(parameters(ours), start) > 2e-3
    for metric in ("entropy", "mean_token_accuracy", "num_tokens"):
        values = [[entry[metric] for entry in t.state.log_history if "loss" in entry] for t in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.skipif(not FUSED_HEAD, reason="this TRL has no fused head to spare positions in")
@pytest.mark.parametrize("method", ["sft", "dft", *TOKEN_LOSSES])
def test_on_a_cpu_the_head_sees_trained_positions_alone(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl.trainer.utils

    trainer = make_trainer(method, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    scored, apply = [], trl.trainer.utils._ChunkedLogProbFunction.apply

    def spy(hidden: Tensor, *args: Any) -> Any:
        scored.append(len(hidden))
        return apply(hidden, *args)

    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", spy)
    ours = loss_and_gradients(lambda: trainer.compute_loss(trainer.model, dict(batch)), trainer)
    monkeypatch.setattr(trainer, "_trained_positions", lambda *args: None)
    everywhere = loss_and_gradients(lambda: trainer.compute_loss(trainer.model, dict(batch)), trainer)
    assert_equal_losses(ours, everywhere)
    trained = int((batch["labels"][:, 1:] != -100).sum())
    assert scored == [trained, batch["labels"][:, 1:].numel()] and trained < scored[1]


def test_evaluation_takes_the_methods_loss_too(tmp_path: Path) -> None:
    trainer = make_trainer("gce", tmp_path, data=rows(), per_device_eval_batch_size=24)
    logits_loss = trainer.evaluate(rows())["eval_loss"]
    batch = trainer.data_collator(list(rows()))
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits_loss == pytest.approx(by_logits(trainer, logits, batch["labels"]).item(), rel=1e-5)


def test_predict_gives_the_models_logits(tmp_path: Path) -> None:
    """compute_loss is asked for outputs: they are logits for every position, whatever the loss."""
    trainer = make_trainer("gce", tmp_path, prediction_loss_only=False)
    data = Dataset.from_list([row for row in rows() if len(row["input_ids"]) == 12])
    logits = trainer.predict(data).predictions
    with torch.no_grad():
        expected = trainer.model(torch.tensor(data["input_ids"])).logits
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gce", {"label_smoothing_factor": 0.1}),
        ("gce", {"loss_type": "dft"}),
        ("bft+gce", {"label_smoothing_factor": 0.1}),
    ],
)
def test_two_losses_at_once_are_refused(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not go with") as error:
        make_trainer(method, tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"gce_q": 0.0},
        {"gce_q": 1.1},
        {"focal_gamma": -1.0},
        {"sce_beta": math.inf},
        {"smoothing_epsilon": 1.0},
        {"noise_floor": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BFTSFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.skipif(not FUSED_HEAD, reason="this TRL computes every logit")
def test_smoothing_is_refused_where_logits_are_capped_or_prompts_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        make_trainer("label_smoothing", tmp_path, peft_config=prompts)
    from transformers import LlamaConfig

    monkeypatch.setattr(LlamaConfig, "final_logit_softcapping", 30.0, raising=False)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        make_trainer("label_smoothing", tmp_path)


@pytest.mark.parametrize("method", ["sft", "gce"])
def test_learned_prompts_train(method: str, tmp_path: Path) -> None:
    """PEFT puts virtual tokens before a row within the model: the head's positions are not the labels' then."""
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    trainer = make_trainer(method, tmp_path, peft_config=config, max_steps=2)
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ours = loss_and_gradients(lambda: trainer.compute_loss(trainer.model, dict(batch)), trainer)
    theirs = loss_and_gradients(
        lambda: by_logits(trainer, trainer.model(**inputs).logits[:, 3:], batch["labels"]), trainer
    )
    assert_equal_losses(ours, theirs)


# --- methods ------------------------------------------------------------------------------------------------------------


def test_a_number_given_by_a_flag_stays_and_another_loss_is_refused(tmp_path: Path) -> None:
    def config(**options: Any) -> BFTSFTConfig:
        return BFTSFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)

    for given, trained in ((None, 5.0), (10.0, 10.0)):
        args = config(neftune_noise_alpha=given)
        METHODS["neftune"].configure(args)
        assert METHODS["neftune"].settings(args) == {"neftune_noise_alpha": trained}
    args = config(gce_q=0.4)
    METHODS["gce"].configure(args)
    assert METHODS["gce"].settings(args) == {"token_loss": "gce", "gce_q": 0.4}
    assert METHODS["sft"].settings(config()) == {}
    for method, options in (("gce", {"token_loss": "focal"}), ("focal", {"token_loss": "gce"})):
        with pytest.raises(UsageError, match=r"--token_loss"):
            METHODS[method].configure(config(**options))


def test_raft_alone_has_distractors_and_loses_gold_passages() -> None:
    odd = {name for name, method in METHODS.items() if method.needs_distractors or method.gold_probability < 1}
    assert odd == {"raft"} and METHODS["raft"].distractors == 4 and METHODS["raft"].gold_probability == 0.8


# --- reliability of the data --------------------------------------------------------------------------------------------


def test_a_column_of_reliability_reaches_the_filter_of_a_patched_model(tmp_path: Path) -> None:
    def train(method: str, reliability: float | None) -> list[float]:
        data = rows() if reliability is None else rows().add_column("reliability", [reliability] * 24)
        trainer = make_trainer(method, tmp_path, data=data, max_steps=2)
        trainer.train()
        return losses(trainer)

    assert train("bft", 1.0) == pytest.approx(train("bft", None), abs=1e-6)
    assert train("bft", 0.1) != pytest.approx(train("bft", None), abs=1e-4)
    assert train("bft+gce", 0.1) != pytest.approx(train("bft+gce", None), abs=1e-5)
    assert train("gce", 0.1) == train("gce", None)


# --- what the filter does, in the logs ----------------------------------------------------------------------------------


def logged(trainer: SFTTrainer) -> list[set[str]]:
    return [{key for key in entry if key.startswith("bft/")} for entry in trainer.state.log_history if "loss" in entry]


def test_the_filter_is_logged_for_patched_models_unless_turned_off(tmp_path: Path) -> None:
    runs = {}
    for name, method, options in (
        ("on", "bft", {}),
        ("every second", "bft", {"logging_steps": 2}),
        ("off", "bft", {"log_filter": False}),
        ("plain", "sft", {}),
    ):
        trainer = make_trainer(method, tmp_path, max_steps=4, **options)
        trainer.train()
        runs[name] = (logged(trainer), parameters(trainer))
    layers = {f"bft/{quantity}/layer_{i:02d}" for quantity in ("gain", "precision") for i in range(3)}
    assert all(layers <= keys for keys in runs["on"][0]) and len(runs["on"][0]) == 4
    assert len(runs["every second"][0]) == 2 and all(layers <= keys for keys in runs["every second"][0])
    assert not any(runs["off"][0]) and not any(runs["plain"][0])
    assert farthest(runs["on"][1], runs["off"][1]) == 0


def test_a_callback_of_ones_own_is_not_doubled(tmp_path: Path) -> None:
    trainer = make_trainer("bft", tmp_path)
    assert sum(isinstance(callback, BFTCallback) for callback in trainer.callback_handler.callbacks) == 1
    own = BFTCallback(trainer)
    again = BFTSFTTrainer(
        trainer.model, trainer.args, train_dataset=rows(), processing_class=tokenizer(), callbacks=[own]
    )
    assert [c for c in again.callback_handler.callbacks if isinstance(c, BFTCallback)] == [own]
