"""See what the filter makes of a text: gain, precision and effective sample size, token by token."""

import argparse
from pathlib import Path

import torch

import bft_hf
from bft_hf.recipes.models import load_model_and_tokenizer

TEXT = "The Rhine ends in the North Sea. The Danube ends in the Black Sea. The Rhine ends in the North"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a Hub id, a folder, or smollm2-135m")
parser.add_argument("--data", help="a text file to read instead of two sentences about rivers")
arguments = parser.parse_args()

model, tokenizer = load_model_and_tokenizer(arguments.model)
text = Path(arguments.data).read_text(encoding="utf-8") if arguments.data else TEXT
tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)

# The unit start: untrained, the default would show gains close to 1.
with bft_hf.patched(model, bft_hf.BFTConfig.unit()), bft_hf.record(model) as trace, torch.no_grad():
    model(**tokens)

gain = torch.stack(trace.gain)[:, 0]  # (layer, token)
keys = torch.stack(trace.effective_sample_size)[:, 0].mean(1)  # (layer, head, token) -> (layer, token)
print(f"{'token':>14}  mean gain  lowest (layer)  mean n  final precision")
for place, token in enumerate(tokens["input_ids"][0]):
    low = gain[:, place].argmin().item()
    print(
        f"{tokenizer.decode([token])!r:>14}  {gain[:, place].mean():9.3f}  {gain[low, place]:6.3f} ({trace.layers[low]:2})"
        f"  {keys[:, place].mean():6.1f}  {trace.final_precision[0, place]:15.2f}"
    )
assert not bft_hf.is_patched(model)  # the block undid the patch, bit for bit
