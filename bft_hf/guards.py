"""Checks that stand around methods of PEFT and of Trainer, put there once these are imported, before or after bft_hf.

Neither library has a place where a plugin could say that a checkpoint does not fit, and both drop the tensors they do not
know, with a warning at most. Both take seconds to import, so `import bft_hf` imports neither: it leaves word with the import
system, which calls back when one of them has come. Models and checkpoints that are plain pass through every check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import wrapt

from .adapters import check_base, keep_configuration, replace_card
from .hub import check_resume
from .patching import get_config
from .weights import forget_derived


def check_training_checkpoint(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Around Trainer._load_from_checkpoint: a patched checkpoint goes on patched, a plain one plain.

    It runs before the optimizer's state is read, which would only say that its groups differ, and with save_only_model
    there is none to say so.
    """
    check_resume(args[0] if args else kwargs["resume_from_checkpoint"], get_config(trainer.model))
    return wrapped(*args, **kwargs)


def check_prompt(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around PeftModel.get_prompt, which makes the keys and values of prefix tuning: they have no precision."""
    if model.active_peft_config.peft_type == "PREFIX_TUNING" and get_config(model) is not None:
        raise NotImplementedError(
            "prefix tuning puts keys without a precision into the cache of a patched model: use LoRA or prompt tuning, or call "
            "bft_hf.unpatch(model) first"
        )
    return wrapped(*args, **kwargs)


def renew_derived(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around PEFT's hotswap: it writes into the weights' storage, which leaves no mark that anything derived could see."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        forget_derived()


GUARDS: dict[str, dict[str, Callable[..., Any]]] = {
    "peft.peft_model": {
        "PeftModel.get_prompt": check_prompt,
        "PeftModel.save_pretrained": keep_configuration,
        "PeftModel.load_adapter": check_base,
        "PeftModel._upload_modified_files": replace_card,
    },
    "peft.utils.hotswap": {"hotswap_adapter_from_state_dict": renew_derived},
    "transformers.integrations.peft": {"PeftAdapterMixin.load_adapter": check_base},
    "transformers.trainer": {"Trainer._load_from_checkpoint": check_training_checkpoint},
}
"""What stands around which method or function, by the module that defines it."""


def _put_up(guards: dict[str, Callable[..., Any]], module: Any) -> None:
    for method, guard in guards.items():
        wrapt.wrap_function_wrapper(module, method, guard)


for _module, _guards in GUARDS.items():
    wrapt.register_post_import_hook(functools.partial(_put_up, _guards), _module)
