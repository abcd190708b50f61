"""Batches that carry a dataset's `reliability` to a patched model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

IGNORE_INDEX = -100


@dataclass
class ReliabilityCollator(DataCollatorForLanguageModeling):
    """TRL's collator, and `token_reliability` from the column `reliability`.

    The column holds rho in [0, 1] (`bft_hf.patch`: 0 is masked as evidence, 1 is no change): a number for each of
    `input_ids`, or one number for the row, which is then that of its prompt: the tokens before the first label. One number
    for every token of a row would cancel out of the filter's weights. Padding gets 1; it is masked anyway. Without the
    column, batches are TRL's.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows.

        Raises:
            ValueError: Some rows have a reliability and others none, there are not as many numbers as tokens, one is outside
                [0, 1], or `padding_free` is set, whose batches are packed without the column.
        """
        given = [example.get("reliability") for example in examples]
        batch = super().torch_call([{k: v for k, v in example.items() if k != "reliability"} for example in examples])
        if all(value is None for value in given):
            return batch
        if self.padding_free:
            raise ValueError("reliability does not go with padding_free or packing: turn both off")
        rows = [by_token(example) for example in examples]
        reliability = torch.ones(batch["input_ids"].shape, dtype=torch.float32)
        for place, row in enumerate(rows):
            reliability[place, : len(row)] = torch.tensor(row)
        return {**batch, "token_reliability": reliability}


def reliability_collator(pad_token_id: int | None, args: Any = None) -> ReliabilityCollator:
    """The collator, padding as an SFTConfig says.

    Args:
        pad_token_id: Padding is masked, so with None it is token 0.
        args: The SFTConfig; None is its defaults.
    """
    options = {name: getattr(args, name) for name in ("padding_free", "pad_to_multiple_of") if hasattr(args, name)}
    return ReliabilityCollator(pad_token_id=pad_token_id or 0, **options)


def by_token(row: Mapping[str, Any]) -> list[float]:
    """The reliability of each of a tokenized row's `input_ids`; see `ReliabilityCollator`.

    Raises:
        ValueError: There is none, or it does not fit.
    """
    value, count = row.get("reliability"), len(row["input_ids"])
    if value is None:
        raise ValueError("a row without reliability among rows that have one: give each row a number, 1 where unknown")
    if isinstance(value, Sequence):
        values = [float(number) for number in value]
    else:
        labels = row.get("labels", row["input_ids"])
        first = next((place for place, label in enumerate(labels) if label != IGNORE_INDEX), count)
        values = [float(value)] * first + [1.0] * (count - first)
    if len(values) != count:
        raise ValueError(
            f"a row of {count} tokens has {len(values)} numbers as its reliability: give one, or one a token"
        )
    if not all(0.0 <= number <= 1.0 for number in values):
        raise ValueError("reliability must be in [0, 1]: 0 is masked as evidence, 1 is no change")
    return values
