"""A pytest plugin that patches every Llama that transformers' tests build, the way a user would: once it is built.

The outermost constructor patches, so `LlamaModel` within `LlamaForCausalLM` does not; `from_pretrained` and `from_config`
patch what they return, not what they are still filling. A folder saved from a patched model has to come back patched by
itself. Were it patched only here, `moved` would tell: its values would be start values.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

STEPS = (0.8, -1.3, 0.5)
"""By how much `moved` moves log tau and the log Q of the layers, in turn."""

COUNTS = {"bft_models": 0, "bft_passes": 0}
"""Models patched and passes of patched models in the running test. Global, since Dynamo does not trace what closures hold."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the runs that run.py makes."""
    parser.addoption("--bft", choices=("plain", "patched", "moved"), default="plain")
    parser.addoption("--bft-config", default="{}")


def pytest_configure(config: pytest.Config) -> None:
    """Start patching, in every worker of pytest-xdist."""
    torch.set_num_threads(1)
    mode = config.getoption("--bft")
    config.pluginmanager.register(
        Patcher(mode, json.loads(config.getoption("--bft-config"))) if mode != "plain" else Seeds()
    )


class Seeds:
    """Gives a test the same random numbers in every run."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Seed by the test's name."""
        from transformers import set_seed

        set_seed(zlib.crc32(item.name.encode()))
        return (yield)


class Patcher(Seeds):
    """Patches models as they are built, and counts them and their forward passes."""

    def __init__(self, mode: str, settings: dict[str, Any]) -> None:
        from transformers import PreTrainedModel
        from transformers.models.llama import modeling_llama

        import bft_hf
        from bft_hf import stream

        self.config = bft_hf.BFTConfig.unit(**settings)
        self.mode = mode
        self.depth = 0
        for value in vars(modeling_llama).values():
            if isinstance(value, type) and issubclass(value, modeling_llama.LlamaPreTrainedModel):
                value.__init__ = self._constructor(value.__init__)
        for name, loads in (("from_pretrained", True), ("_from_config", False)):
            factory = self._factory(getattr(PreTrainedModel, name).__func__, loads)
            setattr(PreTrainedModel, name, classmethod(factory))

        start = stream.Stream.__init__

        @functools.wraps(start)
        def count(*args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                COUNTS["bft_passes"] += 1
            start(*args, **kwargs)

        stream.Stream.__init__ = count  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Also note in the report that patched models ran."""
        from transformers import set_seed

        set_seed(zlib.crc32(item.name.encode()))
        COUNTS.update(dict.fromkeys(COUNTS, 0))
        try:
            return (yield)
        finally:
            item.user_properties += [(name, count) for name, count in COUNTS.items() if count]

    def _constructor(self, construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def constructor(model: Any, *args: Any, **kwargs: Any) -> None:
            self._nested(construct, model, *args, **kwargs)
            if not self.depth:
                self._patch(model)

        return constructor

    def _factory(self, make: Callable[..., Any], loads: bool) -> Callable[..., Any]:
        @functools.wraps(make)
        def factory(cls: type, *args: Any, **kwargs: Any) -> Any:
            result = self._nested(make, cls, *args, **kwargs)
            if not self.depth:
                # A loaded model has the values of its folder: moved ones, if it was saved patched, and else none of ours.
                self._patch(result[0] if isinstance(result, tuple) else result, move=not loads)
            return result

        return factory

    def _nested(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.depth -= 1

    def _patch(self, model: Any, move: bool = True) -> None:
        import bft_hf

        if bft_hf.is_patched(model) or not hasattr(model.config, "hidden_act"):
            return
        bft_hf.patch(model, self.config)
        COUNTS["bft_models"] += 1
        if move and self.mode == "moved":
            with torch.no_grad():
                logarithms = (p for name, p in bft_hf.bft_parameters(model).items() if ".log_" in f".{name}")
                for index, parameter in enumerate(logarithms):
                    parameter.add_(STEPS[index % len(STEPS)])
