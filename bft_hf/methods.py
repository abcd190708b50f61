"""The model methods that a patched model answers in its own way, as objects that copies and pickles take along.

An object in the instance's dictionary stands in front of the class's method; it refers to its model, so a deep copy of the
model holds a copy that refers to the copy. Functions bound by hand would go on answering for the original.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .architectures import find_base_model
from .attention import widened
from .cards import TAGS, write_missing_card
from .hub import ADAPTER_FILE, marked
from .state import BFTState
from .stream import pass_length


class Override:
    """A method of `model`'s class, called by way of this object. Subclasses set `name` and may add keyword arguments."""

    name: str
    keywords: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def original(self) -> Any:
        """The class's own method, bound."""
        return getattr(type(self.model), self.name).__get__(self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's method and `keywords`: generate() looks there for what it may be given."""
        signature = inspect.signature(self.original)
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in self.keywords]
        *known, last = signature.parameters.values()
        variadic = last.kind is inspect.Parameter.VAR_KEYWORD
        return signature.replace(parameters=[*known, *ours, last] if variadic else [*known, last, *ours])


class ResizeTokenEmbeddings(Override):
    """Also resizes the table of initial precisions."""

    name = "resize_token_embeddings"

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        embeddings = self.original(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, BFTState) and module.config.initial_precision == "table":
                module.resize_table(embeddings.num_embeddings)
        return embeddings


class PrepareInputsForGeneration(Override):
    """Takes `token_reliability` and grows it by ones for new tokens."""

    name = "prepare_inputs_for_generation"
    keywords = ("token_reliability",)

    def __call__(
        self, input_ids: Tensor, *args: Any, token_reliability: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        inputs = self.original(input_ids, *args, **kwargs)
        if token_reliability is not None:
            new_tokens = pass_length(inputs) - token_reliability.shape[1]
            inputs["token_reliability"] = nn.functional.pad(token_reliability, (0, new_tokens), value=1)
        return inputs


class InitWeights(Override):
    """Knows the filter's parameters, for those that a checkpoint lacks."""

    name = "_init_weights"

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, BFTState):
            module.reset_missing()
        else:
            self.original(module)


class SavePretrained(Override):
    """Lets the folder's configuration tell that the model is patched, and leaves a model card where there is none."""

    name = "save_pretrained"

    def __call__(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        states = (module for module in self.model.modules() if isinstance(module, BFTState))
        config = next(states).config
        adapter_alone = getattr(self.model, "_hf_peft_config_loaded", False)  # of model.add_adapter
        if not adapter_alone and getattr(self.model.config, "quantization_config", None) is not None:
            raise NotImplementedError(
                "the checkpoint of a patched model cannot hold quantised weights: save its adapter (get_peft_model), or call "
                "bft_hf.unpatch(model) first"
            )
        with marked(self.model.config, config):
            self.original(save_directory, is_main_process, *args, **kwargs)
        if is_main_process and os.path.isdir(save_directory):
            if adapter_alone:
                Path(save_directory, ADAPTER_FILE).write_text(config.to_json_string(), encoding="utf-8")
            write_missing_card(self.model, save_directory, kwargs.get("repo_id"))


class UploadModifiedFiles(Override):
    """What push_to_hub calls last: puts our card in the place of the one that it generates for a model without any."""

    name = "_upload_modified_files"

    def __call__(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        write_missing_card(self.model, working_dir, repo_id)
        return self.original(working_dir, repo_id, *args, **kwargs)


class CandidateGenerator(Override):
    """Keeps `token_reliability` from a plain assistant, which does not know it: it only drafts, so no token changes."""

    name = "_get_candidate_generator"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(self.original).bind(*args, **kwargs).arguments
        assistant = arguments.get("assistant_model")
        if assistant is not None and not any(isinstance(module, BFTState) for module in assistant.modules()):
            model_kwargs = arguments["model_kwargs"]
            arguments["model_kwargs"] = {k: v for k, v in model_kwargs.items() if k != "token_reliability"}
        return self.original(**arguments)


class InitContinuousBatching(Override):
    """Refuses here, in the caller's thread: the batching loop would only log what goes wrong in its own."""

    name = "init_continuous_batching"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "continuous batching (generate_batch, paged attention) has no room for a patched model's wider keys and values: "
            "use model.generate() with a padded batch, or bft_hf.unpatch(model)"
        )


class StaticCacheShape(Override):
    """Chunked prefill allocates a static cache before it sees a key: with the widened heads of the patched layers."""

    name = "_get_static_cache_init_shape"

    def __call__(self) -> Any:
        shape = self.original()
        if shape is None:
            return None
        num_heads, head_dim = shape
        layers = find_base_model(self.model)[0].layers
        head_dims = [head_dim] * len(layers) if isinstance(head_dim, int) else list(head_dim)
        for index, layer in enumerate(layers):
            state = layer._modules.get("bft")  # PEFT's wrapper around it included
            if state is not None:
                head_dims[index] = widened(state.config, head_dims[index])
        return num_heads, head_dims


OVERRIDES = (
    CandidateGenerator,
    InitContinuousBatching,
    StaticCacheShape,
    ResizeTokenEmbeddings,
    PrepareInputsForGeneration,
    InitWeights,
    SavePretrained,
    UploadModifiedFiles,
)


def override_methods(model: nn.Module) -> None:
    """Put the objects above in front of the methods of a transformers model that has them."""
    for override in OVERRIDES:
        if hasattr(type(model), override.name):
            setattr(model, override.name, override(model))
    if hasattr(model, "add_model_tags"):  # they go into every card, those of PEFT, TRL and push_to_hub too
        model.add_model_tags(list(TAGS))


def restore_methods(model: nn.Module) -> None:
    """Undo `override_methods`."""
    for override in OVERRIDES:
        if isinstance(vars(model).get(override.name), override):
            delattr(model, override.name)
    if getattr(model, "model_tags", None):
        model.model_tags = [tag for tag in model.model_tags if tag not in TAGS]
        if not model.model_tags:
            del model.model_tags
