"""The checks around PEFT and Trainer stand whichever of the libraries is imported first, and though nothing is ever patched."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.peft_model
import peft.utils.hotswap  # noqa: F401
import pytest
import transformers.integrations.peft
import transformers.trainer  # noqa: F401
import wrapt
from peft import LoraConfig, get_peft_model

import bft_hf
from bft_hf.guards import GUARDS

ORDERS = {
    "bft_hf first": "import bft_hf\nassert not {'peft', 'transformers.trainer'} & set(sys.modules)",
    "bft_hf last": "import peft, transformers.trainer\nimport bft_hf",
}
SCRIPT = """
import sys, torch
{imports}
from peft import PeftModel
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
folder = sys.argv[1]
refused = []
def plain():
    return LlamaForCausalLM.from_pretrained(folder + "/plain")
def train():
    arguments = TrainingArguments(folder, max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    Trainer(plain(), arguments, train_dataset=[]).train(resume_from_checkpoint=folder + "/patched")
for attempt in (lambda: PeftModel.from_pretrained(plain(), folder + "/adapter"), train):
    try:
        attempt()
    except ValueError as error:
        refused.append(str(error))
print(*refused, sep="\\n")
"""


@pytest.mark.parametrize("order", ORDERS)
def test_checks_are_up_in_every_order_of_imports_and_without_a_patch(
    order: str, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path / "plain")
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    model.save_pretrained(tmp_path / "patched")
    get_peft_model(model, LoraConfig(target_modules="all-linear", modules_to_save=["bft"])).save_pretrained(
        tmp_path / "adapter"
    )
    script = SCRIPT.format(imports=ORDERS[order])
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    adapter, checkpoint = done.stdout.strip().splitlines()
    assert "use bft_hf.load_adapter(model, adapter)" in adapter
    assert "call bft_hf.patch(model) before training goes on" in checkpoint


def test_each_method_is_guarded_once() -> None:
    for module, guards in GUARDS.items():
        for path in guards:
            *owner, name = path.split(".")
            guarded = vars(functools.reduce(getattr, owner, sys.modules[module]))[name]
            assert isinstance(guarded, wrapt.FunctionWrapper), path
            assert not isinstance(guarded.__wrapped__, wrapt.FunctionWrapper), path
