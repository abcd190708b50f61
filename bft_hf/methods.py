"""The model methods that a patched model answers in its own way, as objects that copies and pickles take along.

An object in the instance's dictionary stands in front of the class's method; it refers to its model, so a deep copy of the
model holds a copy that refers to the copy. Functions bound by hand would go on answering for the original.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .hub import marked
from .state import BFTState


class ResizeTokenEmbeddings:
    """`resize_token_embeddings` that also resizes the table of initial precisions."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        embeddings = type(self.model).resize_token_embeddings(self.model, *args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, BFTState) and module.config.initial_precision == "table":
                module.resize_table(embeddings.num_embeddings)
        return embeddings


class PrepareInputsForGeneration:
    """`prepare_inputs_for_generation` that takes `token_reliability` and grows it by ones for new tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self, input_ids: Tensor, *args: Any, token_reliability: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        inputs = type(self.model).prepare_inputs_for_generation(self.model, input_ids, *args, **kwargs)
        if token_reliability is not None:
            mask = kwargs.get("attention_mask")
            length = (input_ids if mask is None or mask.ndim != 2 else mask).shape[1]
            new_tokens = length - token_reliability.shape[1]
            inputs["token_reliability"] = nn.functional.pad(token_reliability, (0, new_tokens), value=1)
        return inputs


class InitWeights:
    """`_init_weights` that knows the filter's parameters, for those that a checkpoint lacks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, BFTState):
            module.reset_missing()
        else:
            type(self.model)._init_weights(self.model, module)


class SavePretrained:
    """`save_pretrained` whose config.json tells that the model is patched."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        states = (module for module in self.model.modules() if isinstance(module, BFTState))
        with marked(self.model.config, next(states).config):
            type(self.model).save_pretrained(self.model, *args, **kwargs)


METHODS = {
    "save_pretrained": SavePretrained,
    "_init_weights": InitWeights,
    "resize_token_embeddings": ResizeTokenEmbeddings,
    "prepare_inputs_for_generation": PrepareInputsForGeneration,
}


def override_methods(model: nn.Module) -> None:
    """Put the objects above in front of the methods of a transformers model that has them."""
    for name, override in METHODS.items():
        if hasattr(type(model), name):
            setattr(model, name, override(model))


def restore_methods(model: nn.Module) -> None:
    """Undo `override_methods`."""
    for name, override in METHODS.items():
        if isinstance(vars(model).get(name), override):
            delattr(model, name)
