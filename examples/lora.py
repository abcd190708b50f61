"""Fine-tune a patched model with LoRA on answers of which some are wrong, save the adapter, and bring it back."""

import argparse

import torch
from peft import LoraConfig

import bft_hf
from bft_hf.noise.labels import corrupt_labels
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.recipes.questions import load_questions, tokenize_questions
from bft_hf.recipes.trainer import BFTSFTConfig, BFTSFTTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a Hub id, a folder, or smollm2-135m")
parser.add_argument("--data", default="demo", help="questions: a Hub id, SQuAD JSON, JSONL; or demo")
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

model, tokenizer = load_model_and_tokenizer(arguments.model)
questions = load_questions(arguments.data, split="train", limit=64, seed=0)
rows = tokenize_questions(questions, tokenizer, max_length=512)
rows = corrupt_labels(rows, 0.3, seed=0, vocab_size=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id])
labels = sum(label != -100 for row in rows for label in row["labels"])
print(f"{sum(map(sum, rows['corrupted']))} of {labels} labels are wrong")

model = bft_hf.patch(model)  # before LoRA
settings = {"per_device_train_batch_size": 4, "logging_steps": 5, "learning_rate": 1e-3, "bf16": False}
trainer = BFTSFTTrainer(
    model,
    BFTSFTConfig("outputs/lora", max_steps=arguments.steps, **settings),
    train_dataset=rows.select_columns(["input_ids", "labels"]),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, target_modules="all-linear", modules_to_save=["bft"]),  # "bft" keeps tau and Q
)
trainer.train()
trainer.save_model("outputs/lora/adapter")

base, _ = load_model_and_tokenizer(arguments.model)
again = bft_hf.load_adapter(base, "outputs/lora/adapter").eval()  # patches the plain base as the adapter's own was
prompt = torch.tensor([rows[0]["input_ids"]])
with torch.no_grad():
    print("largest difference:", (again(prompt).logits - trainer.model.eval()(prompt).logits).abs().max().item())
