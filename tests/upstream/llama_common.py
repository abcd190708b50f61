"""Transformers' common model tests for a tiny Llama; run.py copies this file into the package of those tests.

It stands for tests/models/llama/test_modeling_llama.py, which no sdist holds.
"""

from __future__ import annotations

import copy
import unittest
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_training_mixin import TrainingTesterMixin


class LlamaModelTester:
    """The sizes of the model under test, by the names that the common tests look for."""

    causal_lm_class = LlamaForCausalLM
    sequence_classification_class = LlamaForSequenceClassification

    def __init__(self) -> None:
        self.batch_size = 13
        self.seq_length = 7
        self.is_training = True
        self.hidden_size = 32
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.vocab_size = 99
        self.pad_token_id = 0

    def get_config(self) -> LlamaConfig:
        """A configuration, with fewer key-value heads than heads."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=self.pad_token_id,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[LlamaConfig, dict[str, Any]]:
        """A configuration and inputs whose later rows are padded on the right, as in transformers' own tester."""
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": input_ids.new_ones(input_ids.shape).tril()}


class LlamaModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    """The common tests, all inherited."""

    all_model_classes = (
        LlamaModel,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForQuestionAnswering,
        LlamaForTokenClassification,
    )
    model_tester: Any = None
    model_split_percents = (0.5, 0.7, 0.8)
    _torch_compile_train_cls = LlamaForCausalLM

    def setUp(self) -> None:
        self.model_tester = LlamaModelTester()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        """Of the generation tests, where a checkout lends them: keys and values of a patched model are wider."""
        config = copy.deepcopy(config)
        config.head_dim = past_key_values.layers[0].keys.shape[-1]
        super()._check_past_key_values_for_generate(batch_size, past_key_values, seq_length, config)
