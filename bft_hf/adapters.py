"""Adapters of patched models: they keep their base's BFTConfig beside them, and refuse a base that is not patched with it.

PEFT drops, without a word, those tensors of an adapter for which the model has no place: put on a plain base, an adapter that
was trained on a patched one would lose tau and Q and answer like nothing that was ever trained. So `guards` puts the functions
below around PEFT's own: they write `bft_config.json` beside the adapter of a patched base, and compare it when one is
loaded. Adapters that have nothing to do with the filter are saved and loaded as ever.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .cards import write_missing_card
from .config import BFTConfig
from .hub import ADAPTER_FILE
from .patching import bft_parameters, get_config, patch

if TYPE_CHECKING:
    import peft

_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")


def load_adapter(model: nn.Module, adapter: str | os.PathLike[str], **kwargs: Any) -> peft.PeftModel:
    """Put an adapter that was trained on a patched base on its base, patching that first where it is plain.

    Args:
        model: the base, plain or patched.
        adapter: the adapter's folder or Hub id.
        **kwargs: of `PeftModel.from_pretrained`: `adapter_name`, `is_trainable`, `revision`, ...

    Returns:
        The PEFT model around `model`.

    Raises:
        ValueError: the model is patched with another configuration than the adapter's base was, or it is plain and the
            adapter has no `bft_config.json`.
    """
    import peft

    config = adapter_config(adapter, **kwargs)
    if config is not None:
        patch(model, config)
    elif get_config(model) is None:
        raise ValueError(
            f"{adapter} has no {ADAPTER_FILE}: if its base was patched, call bft_hf.patch(model, config) with the base's "
            "configuration first; if its base was plain, use PeftModel.from_pretrained"
        )
    return peft.PeftModel.from_pretrained(model, adapter, **kwargs)


def adapter_config(adapter: str | os.PathLike[str], **kwargs: Any) -> BFTConfig | None:
    """The BFTConfig beside an adapter in a folder or on the Hub; None where there is none."""
    from transformers.utils import cached_file

    file = cached_file(
        str(adapter),
        ADAPTER_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **{name: kwargs[name] for name in _HUB_OPTIONS if kwargs.get(name) is not None},
    )
    return None if file is None else BFTConfig.from_json_string(Path(file).read_text(encoding="utf-8"))


def keep_configuration(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around PeftModel.save_pretrained: the base's BFTConfig stands beside the adapter, and a card where there is none."""
    config = get_config(model)
    if config is None or not kwargs.get("is_main_process", True):
        return wrapped(*args, **kwargs)
    save_directory = args[0] if args else kwargs["save_directory"]
    os.makedirs(save_directory, exist_ok=True)
    write_missing_card(model, save_directory)  # first: PEFT adds what it has to say to a card that is there
    result = wrapped(*args, **kwargs)
    lost = [name for name, p in bft_parameters(model).items() if p.requires_grad and ".modules_to_save." not in name]
    if lost:
        warnings.warn(
            f"{len(lost)} trained parameters of the filter are not in the adapter, as {lost[0]}: call bft_hf.patch before "
            'get_peft_model, and give LoraConfig(modules_to_save=["bft"])',
            stacklevel=3,
        )
    for name in model.peft_config:
        folder = Path(save_directory, "" if name == "default" else name)
        if (folder / "adapter_config.json").exists():
            (folder / ADAPTER_FILE).write_text(config.to_json_string(), encoding="utf-8")
    return result


def check_base(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the load_adapter of PEFT and of transformers: the base has to be patched as the adapter's own was.

    Raises:
        ValueError: it is plain, or patched with another configuration, or has no place for some of the filter's parameters.
    """
    from transformers import PreTrainedModel

    given = args[0] if args else kwargs.get("model_id", kwargs.get("peft_model_id"))
    wanted, present = None if given is None else adapter_config(given, **kwargs), get_config(model)
    if wanted is not None and present is None:
        raise ValueError(_on_plain_base(given))
    if wanted is not None and present != wanted:
        raise ValueError(
            f"the base of the adapter {given} was patched with another configuration than this model ({ADAPTER_FILE} tells): "
            "call bft_hf.load_adapter with the plain base, or bft_hf.unpatch(model) first"
        )
    result = wrapped(*args, **kwargs)
    if lost := [name for name in getattr(result, "unexpected_keys", None) or () if ".bft." in name]:
        if present is None:
            raise ValueError(_on_plain_base(given))
        if isinstance(model, PreTrainedModel):
            raise ValueError(
                f"transformers' own load_adapter does not put back {lost[0]} of the adapter {given}: use "
                "bft_hf.load_adapter(model, adapter)"
            )
        raise ValueError(
            f"this base has no place for {lost[0]} of the adapter {given}: patch it as the adapter's own base was"
        )
    return result


def _on_plain_base(model_id: Any) -> str:
    return (
        f"the adapter {model_id} was trained on a base patched by bft_hf, and this base is plain: use "
        "bft_hf.load_adapter(model, adapter), or call bft_hf.patch(model, config) before PeftModel.from_pretrained"
    )


def replace_card(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around what PeftModel.push_to_hub calls last: our card stands where PEFT's would."""
    if get_config(model) is not None:
        names = ("working_dir", "repo_id")
        working_dir, repo_id = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(names))
        write_missing_card(model, working_dir, repo_id)
    return wrapped(*args, **kwargs)
