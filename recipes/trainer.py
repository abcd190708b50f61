"""TRL's SFTTrainer with a learning rate of its own for tau and Q, and defaults that follow the device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from accelerate.utils import DistributedType, is_peft_model
from torch import Tensor, nn
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig, SFTTrainer

import bft_hf
from bft_hf.callbacks import BFTCallback

from .collator import reliability_collator
from .losses import TOKEN_LOSSES, excess_of_labels, mean_token_loss, token_loss

FUSED_HEAD = hasattr(trl.trainer.utils, "add_fused_lm_head")
# What configurations call a factor on the logits, or a cap.
LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


@dataclass
class BFTSFTConfig(SFTConfig):
    """SFTConfig whose gradient_checkpointing and bf16, where not given, are on with an accelerator and off on a CPU.

    SFTConfig's own defaults turn both on, and bf16 then raises on a CPU. It also has the losses of `recipes.losses`, which
    are trained and evaluated with as TRL does with its own.
    """

    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={"help": "Trade compute for memory. Default: on with an accelerator, off on a CPU."},
    )
    token_loss: str | None = field(
        default=None,
        metadata={
            "help": f"Loss of a label instead of loss_type's: {', '.join(TOKEN_LOSSES)}.",
            "choices": [*TOKEN_LOSSES],
        },
    )
    focal_gamma: float = field(default=2.0, metadata={"help": "Exponent of the focal loss, 0 or more."})
    gce_q: float = field(default=0.7, metadata={"help": "q of generalised cross entropy, in (0, 1]."})
    sce_alpha: float = field(default=0.1, metadata={"help": "Weight of cross entropy in symmetric cross entropy."})
    sce_beta: float = field(default=1.0, metadata={"help": "Weight of its reverse in symmetric cross entropy."})
    noise_floor: float = field(
        default=1e-5,
        metadata={
            "help": "c of forward_correction, above 0: a label of probability c counts half. r / ((1 - r) V), if a share r of "
            "the labels is any of V tokens."
        },
    )
    smoothing_epsilon: float = field(
        default=0.1,
        metadata={"help": "Share of the uniform distribution in label_smoothing, in [0, 1); needs no full logits."},
    )
    log_filter: bool = field(
        default=True,
        metadata={
            "help": "With a patched model, log gain, precision and Q of each layer (BFTCallback) at logging steps."
        },
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.gce_q <= 1.0:
            raise ValueError(f"gce_q must be in (0, 1], got {self.gce_q}")
        if not 0.0 <= self.smoothing_epsilon < 1.0:
            raise ValueError(f"smoothing_epsilon must be in [0, 1), got {self.smoothing_epsilon}")
        if not 0.0 < self.noise_floor < math.inf:
            raise ValueError(f"noise_floor must be a number above 0, got {self.noise_floor}")
        for name in ("focal_gamma", "sce_alpha", "sce_beta"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number, 0 or more, got {getattr(self, name)}")
        on_accelerator = torch.accelerator.is_available() and not self.use_cpu
        if getattr(self, "bf16", None) is None:
            self.bf16: bool | None = on_accelerator and not self.fp16 and is_torch_bf16_gpu_available()
        if not on_accelerator:
            self.dataloader_pin_memory: bool = False
        # transformers 5.23 renamed the field; the old name still works there, with a warning that no user can act on.
        name = "activation_checkpointing"
        if name not in {spec.name for spec in fields(self)}:
            name = "gradient_checkpointing"
        if getattr(self, name) is None:
            chosen = self.gradient_checkpointing
            setattr(self, name, on_accelerator if chosen is None else chosen)
        super().__post_init__()


class BFTSFTTrainer(SFTTrainer):
    """SFTTrainer in which tau and Q of a patched model have a parameter group of their own.

    At a learning rate fit for weights (2e-5) log Q moves by .002 in a hundred steps: without its own group a patched model
    stays at its start. The group follows the same schedule. A model that is not patched is trained as SFTTrainer does. At
    logging steps `BFTCallback` reports mean gain, precision, effective sample size and Q by layer (`log_filter`). A column
    `reliability` of the training data reaches a patched model's filter (`ReliabilityCollator`).

    Args:
        model: An object, patched already: a name would be loaded by TRL with device_map="auto".
        args: SFTTrainer's; a `BFTSFTConfig` may ask for a loss of `recipes.losses`.
        bft_learning_rate: Peak learning rate of the group; None leaves every parameter where SFTTrainer puts it.
        card: Gives the text of the model card for the Hub id or folder where the model will be; None keeps TRL's.
        **kwargs: SFTTrainer's.
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        *,
        bft_learning_rate: float | None = 2e-2,
        card: Callable[[str], str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.bft_learning_rate = bft_learning_rate
        self.card = card
        self.token_loss = token_loss(args)
        if args is not None and self.token_loss is not None:
            _check_token_loss(args, kwargs)
            if not FUSED_HEAD:
                args.loss_type = "nll"  # the chunked one of TRL 1.7 and later has no logits
                kwargs["compute_loss_func"] = mean_token_loss(self.token_loss)
        columns = getattr(kwargs.get("train_dataset"), "column_names", None) or []
        if kwargs.get("data_collator") is None and "reliability" in columns and bft_hf.is_patched(model):
            # Otherwise TRL's collator would leave the column out without a word.
            pad_token_id = getattr(kwargs.get("processing_class"), "pad_token_id", None)
            kwargs["data_collator"] = reliability_collator(pad_token_id, args)
        super().__init__(model, args, **kwargs)
        if FUSED_HEAD and self.token_loss is not None and self.token_loss.needs_excess:
            _check_head(self.model, self.accelerator.distributed_type)
        known = any(isinstance(callback, BFTCallback) for callback in self.callback_handler.callbacks)
        if getattr(self.args, "log_filter", True) and not known:  # a plain model is left alone by the callback
            self.add_callback(BFTCallback(self))

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column `reliability`, which `ReliabilityCollator` turns into token_reliability."""
        super()._set_signature_columns_if_needed()
        if "reliability" not in self._signature_columns:
            self._signature_columns.append("reliability")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, with the trainable tau and Q moved into a group of their own.

        Moved after the fact, so that whatever `--optim` makes of the weights (decay, LoRA+, layer-wise) stays its business.
        """
        created = self.optimizer is None
        super().create_optimizer(model)
        if created and self.bft_learning_rate is not None:
            move_to_own_group(self.optimizer, self.model if model is None else model, self.bft_learning_rate)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """SFTTrainer's loss, or the token loss in its place; on a CPU the LM head runs on the trained positions alone.

        TRL's fused head does so where there is Triton and scores every position elsewhere. Of a question, five tokens in two
        hundred are trained, and the head of a small model is a third of a step. The loss and its gradients are the same.
        """
        kept = self._trained_positions(inputs, return_outputs)
        if not FUSED_HEAD or (kept is None and self.token_loss is None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if kept is not None:
            inputs = {**inputs, "shift_labels": inputs["labels"][:, 1:][kept][None]}
        top = self.accelerator.unwrap_model(model)
        top = top.get_base_model() if is_peft_model(top) else top
        hidden_states: list[Tensor] = []

        def read(module: nn.Module, args: Any, output: Any) -> Any:
            if kept is not None:
                output.last_hidden_state = output.last_hidden_state[:, :-1][kept][None]
            hidden_states[:] = [output.last_hidden_state]
            return output

        def scored(*args: Any, **kwargs: Any) -> Any:
            """The model, with minus the token loss where the fused head gives the log-probability of a label.

            TRL sums -log_probs, counts, accumulates and averages over devices as ever. Where there is no label log_probs is
            0, and so is every token loss of 0.
            """
            outputs = model(*args, **kwargs)
            if self.token_loss is None or not kwargs.get("fused_lm_head"):
                return outputs
            extra = {}
            if self.token_loss.needs_excess:
                states, labels = hidden_states[0], kwargs.get("shift_labels")
                if labels is None:
                    states, labels = states[:, :-1], kwargs["labels"][:, 1:]
                extra["excess"] = excess_of_labels(states, labels, top.get_output_embeddings())
            outputs.log_probs = -self.token_loss.function(outputs.log_probs, **extra)
            return outputs

        handle = top.base_model.register_forward_hook(read)
        try:
            return super().compute_loss(scored, inputs, return_outputs, num_items_in_batch)
        finally:
            handle.remove()

    def _trained_positions(self, inputs: dict[str, Any], return_outputs: bool) -> Tensor | None:
        """Where a label other than -100 is predicted from, (row, token - 1); None where TRL's head is left to find out."""
        plain = self.label_smoother is None and self.compute_loss_func is None and not return_outputs
        if (
            not plain
            or _is_prompt_learning(self.model)
            or "shift_labels" in inputs
            or inputs["labels"].device.type != "cpu"
        ):
            return None
        kept = inputs["labels"][:, 1:] != -100
        return kept if kept.any() else None

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Write this command's card where TRL would write its own, in checkpoints and before a push too."""
        if self.card is None:
            super().create_model_card(model_name, *args, **kwargs)
        elif self.is_world_process_zero():
            where = getattr(self, "hub_model_id", None) or self.args.output_dir
            Path(self.args.output_dir, "README.md").write_text(self.card(where), encoding="utf-8")


def _is_prompt_learning(model: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens, which have no labels, before each row."""
    return is_peft_model(model) and model.active_peft_config.is_prompt_learning


def _check_token_loss(args: SFTConfig, given: dict[str, Any]) -> None:
    """Refuse what TRL would compute instead of the token loss."""
    parallel = getattr(args, "parallelism_config", None)
    rivals = {
        "loss_type=dft": args.loss_type == "dft",
        "label_smoothing_factor": args.label_smoothing_factor > 0,
        "compute_loss_func": given.get("compute_loss_func") is not None,
        "use_liger_kernel": not FUSED_HEAD and args.use_liger_kernel,
        "sequence parallelism": parallel is not None and parallel.sp_enabled,
    }
    for other in (name for name, used in rivals.items() if used):
        raise ValueError(f"token_loss={args.token_loss} does not go with {other}: leave one of the two out")


def _check_head(model: Any, distributed: DistributedType) -> None:
    """Refuse to smooth labels where a label's logit and their mean cannot be read off the LM head's weight."""
    config = model.config.get_text_config()
    reasons = {
        f"whose configuration has {name}": getattr(config, name, None) not in (None, 1.0) for name in LOGIT_CHANGES
    }
    reasons["whose weights are sharded"] = distributed in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    reasons["with learned prompts"] = _is_prompt_learning(model)
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ValueError(f"token_loss=label_smoothing is not for a model {reason}: use label_smoothing_factor instead")


def move_to_own_group(optimizer: torch.optim.Optimizer, model: nn.Module, learning_rate: float) -> None:
    """Move tau and Q from the groups they are in to one with `learning_rate` and no weight decay.

    Which parameters these are is `bft_hf.param_groups`' knowledge; a model without any leaves the optimizer as it is.

    Args:
        optimizer: Not stepped yet.
        model: The model it trains, PEFT's wrapper included.
        learning_rate: Of the new group, the peak of its schedule.
    """
    groups = bft_hf.param_groups(model, learning_rate, bft_learning_rate=learning_rate)
    own = {id(p): p for group in groups if group.get("name") == "bft" for p in group["params"] if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
    if not held:
        return
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in own]
    optimizer.add_param_group({"params": held, "lr": learning_rate, "weight_decay": 0.0, "name": "bft"})
