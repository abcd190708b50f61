"""Checkpoints written by earlier versions compute what they computed then, whatever the defaults are now.

A folder of tests/data is never rewritten. `python tests/test_old_checkpoints.py NAME` adds one for the present format.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import bft_hf
from bft_hf import BFTConfig

DATA = Path(__file__).parent / "data"
FOLDERS = sorted(folder for folder in DATA.iterdir() if folder.is_dir())
IDS = torch.tensor([[5, 9, 30, 7, 5, 21, 3, 14]])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_and_gain_are_those_of_the_version_that_wrote_it(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad(), bft_hf.record(model) as trace:
        logits = model(IDS).logits
    torch.testing.assert_close(logits[0], torch.tensor(expected["logits"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack(trace.gain)[:, 0], torch.tensor(expected["gain"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_configuration_matters(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(IDS).logits
    filter_state = {name: value for name, value in model.state_dict().items() if ".bft." in name}
    other = bft_hf.patch(bft_hf.unpatch(model), BFTConfig.unit(kriging=False))
    other.load_state_dict(filter_state, strict=False)
    assert (other(IDS).logits - logits).abs().max() > 1e-3


def write(name: str) -> None:
    """Write a checkpoint of a few kB with filter parameters off their start values, and what it computes."""
    from conftest import make_tiny_llama

    model = make_tiny_llama(
        seed=11,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    bft_hf.patch(model, BFTConfig.unit())
    with torch.no_grad():
        for number, parameter in enumerate(bft_hf.bft_parameters(model).values()):
            parameter += 0.3 * (number + 1)
        with bft_hf.record(model) as trace:
            logits = model(IDS).logits
    folder = DATA / name
    model.save_pretrained(folder)
    expected = {"logits": logits[0].tolist(), "gain": torch.stack(trace.gain)[:, 0].tolist()}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    write(sys.argv[1])
