"""Every supported family through one matrix: exactness, the oracle, the cache, saving, adapters, checkpointing, precision, padding."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families_page
import pytest
import torch
from conftest import lora_config
from reference import Settings, reference_model
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

import bft_hf
from bft_hf import BFTConfig, architectures, one_token
from bft_hf.architectures import ARCHITECTURES
from bft_hf.filter import probe_signs
from bft_hf.sample_size import NUM_PROBES
from bft_hf.state import BFTState

WINDOW = 4
LAYER_TYPES = ["sliding_attention", "full_attention"]

COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,  # its root, by which Gemma multiplies embeddings in float32, is a whole number
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": LAYER_TYPES,
        "no_rope_layers": [1, 0],
    },
    "gemma": {},
    "phi3": {
        "sliding_window": WINDOW,
        "resid_pdrop": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granite": {
        "residual_multiplier": 0.6,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": LAYER_TYPES,
        "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 11},
    "olmo2": {},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "arcee": {},
}
"""What each family's tiny configuration has beyond the common fields: its own features, switched on."""

EAGER_ONLY = {"gemma2"}
"""transformers has no sdpa for them: their scores are soft-capped."""

REGISTERED = "arcee"
"""Not in the table: docs/families.md registers it."""

everywhere = pytest.mark.parametrize(
    "family", [*(name for name, row in ARCHITECTURES.items() if not row.built_in), REGISTERED]
)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    bft_hf.register_architecture(REGISTERED, gate_projection=None)
    yield
    forget_registered()


def forget_registered() -> None:
    ARCHITECTURES.pop(REGISTERED, None)
    architectures._registered.discard(REGISTERED)


@functools.cache
def plain_model(family: str, **changes: Any) -> Any:
    """A random model of a family in float64 and evaluation mode; not to be changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = CONFIG_MAPPING[family](**COMMON | FAMILIES[family] | changes)
        # What transformers would choose for experts, grouped_mm, knows no float64.
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        for parameter in model.parameters():  # norms and biases off their start values
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.to(torch.float64).eval()


def make_plain(
    family: str, dtype: torch.dtype = torch.float64, implementation: str | None = None, **changes: Any
) -> Any:
    """A copy of that model."""
    model = copy.deepcopy(plain_model(family, **changes)).to(dtype)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model


def make_patched(family: str, config: BFTConfig | None = None, **options: Any) -> Any:
    """Patched, and with the filter's parameters off their start values."""
    model = bft_hf.patch(make_plain(family, **options), config or BFTConfig.unit())
    for index, parameter in enumerate(bft_hf.bft_parameters(model).values()):
        parameter.data.add_(0.3 * index - 0.4)
    return model


def ids(batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(3, COMMON["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Tensor:
    return model(**(inputs or {"input_ids": ids()})).logits


def distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference, relative to that of the second."""
    return ((one - other).double().norm() / other.double().norm()).item()


# --- The plain model, and back to it ----------------------------------------------------------------------------------


@everywhere
def test_identity_start_is_the_plain_model_and_the_unit_start_is_not(family: str) -> None:
    plain = make_plain(family)
    expected = logits(plain)
    near, nearer = (
        distance(logits(bft_hf.patch(make_plain(family), config)), expected)
        for config in (
            BFTConfig.identity(),
            BFTConfig.unit(initial_precision_value=1e-6, initial_process_noise=1e6),
        )
    )
    unit = distance(logits(bft_hf.patch(make_plain(family), BFTConfig.unit())), expected)
    assert near < 1e-3
    assert nearer < near / 10
    assert unit > 20 * near
    switched_off = BFTConfig.unit(kriging=False, gain=False)
    assert distance(logits(bft_hf.patch(make_plain(family), switched_off)), expected) < 1e-6


@everywhere
def test_unpatch_restores_exactly(family: str) -> None:
    model = make_plain(family)
    before = logits(model)
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    bft_hf.patch(model, BFTConfig.unit())
    assert distance(logits(model), before) > 1e-3
    bft_hf.unpatch(model)
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes


# --- The oracle -------------------------------------------------------------------------------------------------------


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with a family: its norms, rotary angles, softmax and router stay in float64, where 1e-9 can be compared."""
    softmax = nn.functional.softmax

    def wide_softmax(input: Tensor, dim: int, dtype: Any = None, **kwargs: Any) -> Tensor:
        return softmax(input, dim, dtype=torch.promote_types(input.dtype, dtype or input.dtype), **kwargs)

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight + 1 if "Gemma" in type(self).__name__ else self.weight
        epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return weight * hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon)

    def rotary(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        rope = self.config.rope_parameters
        theta = (rope if layer_type is None else rope[layer_type])["rope_theta"]
        half = torch.arange(0, COMMON["head_dim"], 2, dtype=torch.float64)
        angles = position_ids[..., None].double() * theta ** (-half / COMMON["head_dim"])
        return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)

    def router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        chances, chosen = scores.softmax(-1).topk(self.top_k, dim=-1)
        if getattr(self, "norm_topk_prob", True):
            chances = chances / chances.sum(-1, keepdim=True)
        return scores, chances, chosen

    def widen(family: str) -> None:
        module = sys.modules[type(plain_model(family)).__module__]
        monkeypatch.setattr(nn.functional, "softmax", wide_softmax)
        for name, cls in list(vars(module).items()):
            if name.endswith("RMSNorm"):
                monkeypatch.setattr(cls, "forward", norm)
            elif name.endswith("RotaryEmbedding"):
                monkeypatch.setattr(cls, "forward", rotary)
            elif name.endswith("TopKRouter"):
                monkeypatch.setattr(cls, "forward", router)

    return widen


ORACLE_CONFIGS = {
    "unit": BFTConfig.unit(),
    "absolute, token": BFTConfig.unit(observation_units="absolute", differentiate_jacobian=True),
    "absolute, channel": BFTConfig.unit(
        granularity="channel", observation_units="absolute", effective_sample_size="exact", differentiate_jacobian=True
    ),
    "relative, channel": BFTConfig.unit(granularity="channel", prior_scale="neighbours", separate_key_precision=True),
}


@everywhere
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("config", ORACLE_CONFIGS.values(), ids=ORACLE_CONFIGS.keys())
def test_values_and_gradients_are_the_oracles(
    family: str, implementation: str, config: BFTConfig, all_in_float64: Callable[[str], None]
) -> None:
    if implementation == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers has no sdpa for this family")
    all_in_float64(family)
    hold_to_oracle(make_patched(family, config, implementation=implementation).double(), config)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("family", ["llama", "phi3", "arcee", "mixtral"], ids=["gated", "fused", "plain", "routed"])
@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_every_ffn_is_the_oracles_with_every_activation(
    family: str, activation: str, granularity: str, all_in_float64: Callable[[str], None]
) -> None:
    all_in_float64(family)
    config = BFTConfig.unit(granularity=granularity, differentiate_jacobian=True)
    model = make_patched(family, config, hidden_act=activation, implementation="sdpa").double()
    hold_to_oracle(model, config)
    with bft_hf.record(model) as tracked:
        model(input_ids=ids())
    for without_gradients in (torch.no_grad, torch.inference_mode):  # J comes by closed forms there
        with bft_hf.record(model) as trace, without_gradients():
            model(input_ids=ids())
        for one, other in zip(trace.jacobian, tracked.jacobian, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-12)


def hold_to_oracle(model: Any, config: BFTConfig) -> None:
    """Compare logits, everything that record() shows and the gradient of every parameter of a float64 model."""
    mask = torch.ones(2, 11, dtype=torch.long)
    if model.config._attn_implementation == "sdpa":  # plain eager attention makes NaN of a fully masked row in float64
        mask[1, :3] = 0
    kept = mask.bool()
    inputs = {"input_ids": ids(), "attention_mask": mask}
    with bft_hf.record(model) as trace:
        output = model(**inputs)

    state = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    settings = {name: value for name, value in vars(config).items() if name in Settings.__dataclass_fields__}
    reference = reference_model(
        state, model.config, Settings(**settings, num_probes=NUM_PROBES), **inputs, signs=probe_signs
    )
    tight = {"rtol": 1e-9, "atol": 1e-9}
    assert_close(output.logits[kept], reference.logits[kept], **tight)
    for name in ("precision", "observation_precision", "gain", "updated_precision", "jacobian"):
        for ours, theirs in zip(getattr(trace, name), getattr(reference, name), strict=True):
            assert_close(ours[kept], theirs.detach()[kept], **tight, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("effective_sample_size", "residual_variance"):
        for ours, theirs in zip(getattr(trace, name), getattr(reference, name), strict=True):
            assert_close(ours.transpose(1, 2)[kept], theirs.detach().transpose(1, 2)[kept], **tight)

    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.logits.shape, generator=generator, dtype=torch.float64) * kept[..., None]
    (output.logits * weights).sum().backward()
    (reference.logits * weights).sum().backward()
    for name, parameter in model.named_parameters():
        expected = state[name].grad
        if model.config.tie_word_embeddings and name == "model.embed_tokens.weight":
            head = state["lm_head.weight"].grad
            expected = expected if head is None else expected + head
        scale = expected.abs().max().item()
        assert scale > 0, f"{name} is dead"
        assert_close(
            parameter.grad,
            expected,
            rtol=1e-8,
            atol=1e-8 * scale,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


@everywhere
def test_copies_and_pickles_are_patched_models_of_their_own(family: str) -> None:
    model = make_patched(family)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with bft_hf.record(again) as trace, bft_hf.record(model) as untouched:
            assert torch.equal(logits(again), logits(model))
        assert all(map(torch.equal, trace.jacobian, untouched.jacobian))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_experts_show_the_same_jacobian_however_they_run(family: str, granularity: str) -> None:
    shown = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = make_patched(family, BFTConfig.unit(granularity=granularity), dtype=torch.float32)
        model.set_experts_implementation(implementation)
        with bft_hf.record(model) as trace:
            output = logits(model)
        shown[implementation] = (output, *trace.jacobian)
    for implementation in ("batched_mm", "grouped_mm"):
        for one, other in zip(shown[implementation], shown["eager"], strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-4)
    model.config._experts_implementation = "deepgemm"
    with pytest.raises(NotImplementedError, match=r"set_experts_implementation\('grouped_mm'\)"):
        logits(model)


def test_experts_jacobian_sees_adapters_on_their_parameters() -> None:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model = peft.get_peft_model(make_patched("mixtral", dtype=torch.float32), lora_config(**options)).eval()
    with bft_hf.record(model) as apart:
        expected = logits(model)
    with model.disable_adapter(), bft_hf.record(model) as without:
        logits(model)
    merged = model.merge_and_unload()
    with bft_hf.record(merged) as together:
        assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)
    assert_close(together.jacobian[0], apart.jacobian[0], rtol=1e-3, atol=1e-4)
    assert distance(without.jacobian[0], apart.jacobian[0]) > 1e-2
    bft_hf.unpatch(merged)
    logits(merged)


# --- Decoding ---------------------------------------------------------------------------------------------------------


@everywhere
def test_decoding_by_the_cache_is_one_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token and in pieces, past the sliding window; the short way of a single token is among them."""
    short: list[int] = []
    update = one_token.OneTokenCall.update

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        short.append(self._state.slot)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(one_token.OneTokenCall, "update", counted)
    model = make_patched(family, dtype=torch.float32)
    row = ids(batch=2, tokens=14)
    whole = logits(model, input_ids=row)
    for pieces in ([1] * 14, [3, 1, 1, 5, 1, 1, 2]):
        cache, parts = None, []
        for piece in row.split(pieces, dim=1):
            with torch.no_grad():
                output = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert bool(short) == (family not in EAGER_ONLY)  # eager attention is always given a mask
    generated = model.generate(row[:1, :6], max_new_tokens=6, do_sample=False, pad_token_id=0)
    again = model.generate(row[:1, :6], max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(generated, again)
    fixed = model.generate(
        row[:1, :6], max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static"
    )
    assert torch.equal(fixed, generated)


@everywhere
def test_a_token_of_no_reliability_is_a_masked_one(family: str) -> None:
    model = make_patched(family, dtype=torch.float32)
    reliability = torch.ones(2, 11)
    reliability[0, 3] = 0
    positions = torch.arange(11).expand(2, 11)
    unreliable = logits(model, input_ids=ids(), token_reliability=reliability)
    masked = logits(model, input_ids=ids(), attention_mask=reliability.long(), position_ids=positions)
    kept = reliability.bool()
    assert_close(unreliable[kept], masked[kept], rtol=1e-4, atol=1e-4)
    assert distance(unreliable[kept], logits(model, input_ids=ids())[kept]) > 1e-3


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral"])
def test_compiled_whole(family: str) -> None:
    model = make_patched(family, dtype=torch.float32)
    if ARCHITECTURES[family].experts:
        model.set_experts_implementation("grouped_mm")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(logits(compiled, input_ids=ids(), use_cache=False), logits(model), rtol=1e-5, atol=1e-5)


def test_a_function_of_ones_own_can_take_precisions_behind_the_cap() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    def own(*args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(*args, **kwargs)

    AttentionInterface.register("own", own)
    AttentionMaskInterface.register("own", eager_mask)
    model = make_patched("gemma2", dtype=torch.float32, implementation="eager")
    expected = logits(model)
    model.config._attn_implementation = "own"
    with pytest.raises(NotImplementedError, match="own attention takes no key precisions"):
        logits(model)
    own.adds_mask_behind_cap = True  # type: ignore[attr-defined]
    assert torch.equal(logits(model), expected)


def test_kernels_that_cap_scores_are_refused() -> None:
    model = make_patched("gemma2", dtype=torch.float32)
    model.config._attn_implementation = "flash_attention_2"  # not installed; it is refused before it is called
    with pytest.raises(NotImplementedError, match=r"set_attn_implementation\('eager'\)"):
        logits(model)


@everywhere
def test_a_left_padded_row_is_the_row_alone(family: str) -> None:
    model = make_patched(family, dtype=torch.float32)
    row = ids(batch=1, tokens=9)
    alone = logits(model, input_ids=row)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), row], dim=1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    shown = logits(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, 4:]
    assert_close(shown, alone, rtol=1e-4, atol=1e-4)
    assert distance(logits(model, input_ids=padded)[:, 4:], alone) > 1e-3


# --- Saving, adapters, training ---------------------------------------------------------------------------------------


@everywhere
def test_saved_and_loaded_by_auto_classes(family: str, tmp_path: Path) -> None:
    model = make_patched(family, BFTConfig.unit(initial_precision_value=0.7), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert bft_hf.get_config(again) == bft_hf.get_config(model)
    assert again.config.model_type == family
    state, loaded = model.state_dict(), again.state_dict()
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    assert torch.equal(logits(again), logits(model))
    bft_hf.unpatch(again).save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not bft_hf.is_patched(plain)
    assert_close(logits(plain), logits(make_plain(family, dtype=torch.float32)))


@everywhere
def test_lora_trains_and_merges(family: str) -> None:
    peft = pytest.importorskip("peft")
    # PEFT's "all-linear" finds nothing in a model of experts with the oldest supported versions, patched or not.
    targets = {"target_modules": ["q_proj", "v_proj", "o_proj"]} if ARCHITECTURES[family].experts else {}
    model = peft.get_peft_model(make_patched(family, dtype=torch.float32), lora_config(**targets))
    model.eval()
    before = logits(model)
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-2))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert any(".bft." in name for name in trained)
    for _ in range(2):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if name in trained:
            assert not torch.equal(parameter, trained[name]), name
    after = logits(model)
    assert distance(after, before) > 1e-3
    with bft_hf.record(model) as apart:
        logits(model)
    merged = model.merge_and_unload()
    with bft_hf.record(merged) as together:
        assert_close(logits(merged), after, rtol=1e-3, atol=1e-4)
    for one, other in zip(apart.jacobian, together.jacobian, strict=True):  # J sees the adapter before and after
        assert_close(one, other, rtol=1e-3, atol=1e-5)


@everywhere
def test_checkpointing_gives_the_same_gradients(family: str) -> None:
    gradients = []
    for use_reentrant in (None, False, True):
        model = make_patched(family).train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # Phi3 drops parts of its updates out
            model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert_close(other[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@everywhere
def test_bfloat16_is_near_float32(family: str) -> None:
    wide = make_patched(family, dtype=torch.float32)
    narrow = make_patched(family, dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in bft_hf.bft_parameters(narrow).values())
    plain = distance(logits(make_plain(family, dtype=torch.bfloat16)), logits(make_plain(family, dtype=torch.float32)))
    assert distance(logits(narrow), logits(wide)) < 2.5 * plain + 0.01
    narrow(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in narrow.parameters() if p.grad is not None)


def test_residual_dropout_acts_on_what_enters_and_on_nothing_that_is_observed() -> None:
    model = make_patched("phi3")
    with bft_hf.record(model) as quiet:
        expected = logits(model)
    with bft_hf.record(model.train()) as dropped, torch.random.fork_rng(devices=[]):
        assert distance(logits(model), expected) > 1e-2
    assert torch.equal(dropped.gain[0], quiet.gain[0])
    assert not torch.equal(dropped.jacobian[0], quiet.jacobian[0])  # taken at the state that did enter


@everywhere
def test_every_layer_takes_part(family: str) -> None:
    """No layer is left as it was, and each reads its neighbour's precision."""
    model = make_patched(family)
    states = [module for module in model.modules() if isinstance(module, BFTState)]
    assert [state.layer_index for state in states] == [0, 1]
    with bft_hf.record(model) as trace:
        logits(model)
    assert len(trace.gain) == 2
    assert not torch.equal(trace.precision[0], trace.precision[1])


def test_in_a_vision_language_model_the_language_model_is_patched_and_saved(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma3"](
        text_config=CONFIG_MAPPING["gemma3_text"](**COMMON | FAMILIES["gemma3_text"]),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=0,
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    expected = logits(model)
    bft_hf.patch(model, BFTConfig.unit())
    assert distance(logits(model), expected) > 1e-3
    with pytest.raises(NotImplementedError, match="save the language model inside"):
        model.save_pretrained(tmp_path / "whole")
    language = model.model.language_model
    language.save_pretrained(tmp_path / "language")
    again = AutoModel.from_pretrained(tmp_path / "language")
    with torch.no_grad():
        assert torch.equal(again(ids()).last_hidden_state, language(ids()).last_hidden_state)
    assert torch.equal(logits(bft_hf.unpatch(model)), expected)


# --- Families beyond the table ----------------------------------------------------------------------------------------


def test_parallel_residuals_are_refused_with_the_reason() -> None:
    fields = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    for family in ("gpt_neox", "falcon", "phi"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields))
        with pytest.raises(
            ValueError, match="Model is not supported: its attention and FFN read the same state"
        ) as error:
            bft_hf.patch(model, BFTConfig.unit())
        assert "\n" not in str(error.value)


def test_an_unknown_family_is_answered_with_the_two_lines_to_try() -> None:
    forget_registered()
    try:
        model = make_plain(REGISTERED)
        with pytest.raises(ValueError, match="ArceeForCausalLM holds no decoder of a supported family") as error:
            bft_hf.patch(model, BFTConfig.unit())
        lines = str(error.value).splitlines()[1:]
        assert lines == [
            "    bft_hf.register_architecture('arcee', like='llama', gate_projection=None)",
            "    bft_hf.patch(model)",
        ]
        exec("\n".join(line.strip() for line in lines), {"bft_hf": bft_hf, "model": model})
        assert bft_hf.is_patched(model)
    finally:
        bft_hf.register_architecture(REGISTERED, gate_projection=None)


def test_what_an_unknown_family_lacks_is_named() -> None:
    nemotron = AutoModelForCausalLM.from_config(CONFIG_MAPPING["nemotron"](**COMMON))
    with pytest.raises(ValueError, match=r"register_architecture\('nemotron'.*has no 'mlp.gate_proj'"):
        bft_hf.patch(nemotron, BFTConfig.unit())
    try:
        bft_hf.register_architecture("nemotron", gate_projection=None)
        with pytest.raises(ValueError, match="layers.0 has a layer norm as 'input_layernorm'"):
            bft_hf.patch(nemotron, BFTConfig.unit())
    finally:
        ARCHITECTURES.pop("nemotron")
        architectures._registered.discard("nemotron")


def test_the_page_has_the_rows() -> None:
    if not families_page.PAGE.is_file():
        pytest.skip("no docs/ beside tests/")
    assert families_page.parts()[1] == families_page.table(), "run python tests/families_page.py"
    for name, row in ARCHITECTURES.items():
        assert row.built_in or architectures.registered(name) or row.reading.startswith("K multiplies "), name


def test_registering_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="'llama' is supported already"):
        bft_hf.register_architecture("llama", like="gemma")
    with pytest.raises(ValueError, match=r"like='gpt' is no supported family: choose one of arcee, gemma, "):
        bft_hf.register_architecture("seed_oss", like="gpt")
    with pytest.raises(ValueError, match="an architecture has no 'gate'"):
        bft_hf.register_architecture("seed_oss", gate=None)
    with pytest.raises(ValueError, match="give base_model, decoder_layer and attention"):
        bft_hf.register_architecture("my_model")
    row = bft_hf.register_architecture("llama", reading=ARCHITECTURES["llama"].reading)
    assert row == ARCHITECTURES["llama"]
    architectures._registered.discard("llama")
