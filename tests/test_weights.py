"""Effective weights of linear modules, and Jacobian coefficients that never outlive the weights they came from."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter
from torch import nn

import bft_hf
from bft_hf import BFTConfig
from bft_hf.weights import DerivedFromWeights, effective_weight

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(51))


def lora(model: nn.Module, **options: Any) -> Any:
    """Every linear module with a LoRA that is not zero."""
    torch.manual_seed(7)
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**options))


def lora_linear(**options: Any) -> Any:
    torch.manual_seed(3)
    return lora(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), target_modules=["0"], **options)


def inner(model: Any) -> Any:
    (layer,) = (module for module in model.modules() if isinstance(module, LoraLayer))
    return layer


@torch.no_grad()
def by_unit_vectors(module: nn.Module, width: int) -> torch.Tensor:
    training = module.training
    module.eval()
    weight = (module(torch.eye(width)) - module(torch.zeros(1, width))).T
    module.train(training)
    return weight


def check(module: nn.Module, width: int = 6) -> torch.Tensor:
    """The effective weight is what the module does to unit vectors."""
    weight = effective_weight(module)
    torch.testing.assert_close(weight, by_unit_vectors(module, width), rtol=1e-5, atol=1e-5)
    return weight.detach().clone()


def test_linear_gives_its_own_weight_with_gradient() -> None:
    linear = nn.Linear(6, 4)
    assert effective_weight(linear) is linear.weight
    check(linear)


def test_lora_active_disabled_and_merged() -> None:
    model = lora_linear()
    layer = inner(model)
    base = layer.get_base_layer().weight.detach().clone()
    active = check(layer)
    assert (active - base).abs().max() > 1e-2
    with model.disable_adapter():
        assert torch.equal(check(layer), base)
    assert torch.equal(check(layer), active)
    layer.merge()
    torch.testing.assert_close(check(layer), active)
    assert torch.equal(effective_weight(layer), layer.get_base_layer().weight)
    layer.unmerge()
    torch.testing.assert_close(check(layer), active)


def test_lora_scaling_and_gradients() -> None:
    model = lora_linear()
    layer = inner(model)
    first = check(layer)
    layer.set_scale("default", 3.0)
    second = check(layer)
    base = layer.get_base_layer().weight
    torch.testing.assert_close(second - base, 3.0 * (first - base))
    effective_weight(layer).square().sum().backward()
    for parameter in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0


def test_rank_stabilised_lora() -> None:
    check(inner(lora_linear(use_rslora=True)))


@pytest.mark.parametrize("merge_one", [False, True])
def test_two_adapters(merge_one: bool) -> None:
    model = lora_linear()
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=9, target_modules=["0"], init_lora_weights=False))
    layer = inner(model)
    only_first = check(layer)
    model.set_adapter("second")
    only_second = check(layer)
    model.base_model.set_adapter(["default", "second"])
    both = check(layer)
    assert (only_first - only_second).abs().max() > 1e-2 and (both - only_first).abs().max() > 1e-2
    base = layer.get_base_layer().weight.detach()
    torch.testing.assert_close(both, only_first + only_second - base)
    if merge_one:
        layer.merge(adapter_names=["second"])
        check(layer)


def test_dropout_of_the_adapter_is_no_part_of_its_weight() -> None:
    layer = inner(lora_linear(lora_dropout=0.5).train())
    assert torch.equal(check(layer), check(layer))
    dora = inner(lora_linear(lora_dropout=0.5, use_dora=True).train())
    assert torch.equal(check(dora), check(dora)) and dora.training


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_dora_is_read_by_probing(adapter: str) -> None:
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    config = LoraConfig(r=3, target_modules=["0"], use_dora=True, init_lora_weights=False)
    layer = inner(get_peft_model(base, config, adapter_name=adapter))
    before = check(layer)
    with torch.no_grad():
        layer.lora_magnitude_vector[adapter].weight.mul_(2)
    torch.testing.assert_close(check(layer), 2 * before)  # no sum of a weight and a low-rank product


class HalvedLinear(nn.Module):
    """A linear module of a class nobody knows, as quantised ones are."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.packed = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed / 2).T + self.bias


def test_unknown_linear_module_is_read_by_probing() -> None:
    module = HalvedLinear(6, 4)
    torch.testing.assert_close(check(module), module.packed.detach() / 2)


def test_subclass_of_linear_is_not_taken_for_a_linear() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    module = Doubled(6, 4)
    torch.testing.assert_close(check(module), 2 * module.weight.detach())


# --- The cache of coefficients, seen through what record() shows -------------------------------------------------------


def jacobians(model: Any) -> list[torch.Tensor]:
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(input_ids=IDS)
    return trace.jacobian


def assert_fresh(model: Any, stale: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """What the model shows is what a copy of it that has cached nothing shows, and not what it showed before."""
    expected = jacobians(copy.deepcopy(model))
    shown = jacobians(model)
    for ours, theirs in zip(shown, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    if stale is not None:
        for ours, before in zip(shown, stale, strict=True):
            assert (ours - before).abs().max() > 1e-5
    return shown


@pytest.fixture(params=["token", "channel"])
def model(request: pytest.FixtureRequest, tiny_llama: Callable[..., Any]) -> Any:
    """A patched model that has computed and cached its coefficients."""
    patched = bft_hf.patch(tiny_llama(), BFTConfig.unit(granularity=request.param))
    assert_fresh(patched)
    return patched


def test_a_copy_really_starts_without_a_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = bft_hf.filter.gated_jacobian_coefficients
    monkeypatch.setattr(bft_hf.filter, "gated_jacobian_coefficients", lambda *a: calls.append(1) or compute(*a))
    jacobians(model)
    assert not calls  # the original's are kept
    jacobians(copy.deepcopy(model))
    assert len(calls) == 3


@pytest.mark.parametrize("fused", [True, False])
def test_every_step_of_adamw_renews_them(fused: bool, model: Any) -> None:
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-2), fused=fused)
    shown = jacobians(model)
    for _ in range(3):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = assert_fresh(model, shown)


def test_jacobian_after_fused_steps_is_the_derivative(tiny_llama: Callable[..., Any]) -> None:
    """Against autograd, independently of any cache."""
    from reference import jacobian_diagonal

    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-2), fused=True)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen: list[torch.Tensor] = []
    norm = model.model.layers[1].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    shown = jacobians(model)[1]
    handle.remove()
    weights = dict(model.model.layers[1].state_dict())
    expected = jacobian_diagonal(seen[0], weights, norm.variance_epsilon).mean(-1)
    torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-6)


def test_load_state_dict_renews_them(model: Any, tiny_llama: Callable[..., Any]) -> None:
    other = tiny_llama(seed=1).state_dict()
    for assign in (False, True):
        stale = jacobians(model)
        state = {name: other.get(name, tensor) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        assert_fresh(model, stale)
        other = tiny_llama(seed=2).state_dict()


def test_writes_in_place_and_new_parameters_renew_them(model: Any) -> None:
    stale = jacobians(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(1.5)
    stale = assert_fresh(model, stale)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(1.5)
    stale = assert_fresh(model, stale)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = nn.Parameter(layer.mlp.gate_proj.weight * 1.5)
    assert_fresh(model, stale)


def test_writes_through_data_count_from_the_next_change_of_mode(model: Any) -> None:
    stale = jacobians(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(2)
    model.train()
    assert_fresh(model, stale)


def test_a_new_weight_at_a_freed_ones_address_renews_them(tiny_llama: Callable[..., Any]) -> None:
    """Allocators hand out the same address again, and every new tensor's version is 0."""
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    projection = model.model.layers[0].mlp.up_proj
    memory = projection.weight.detach().numpy().copy()
    projection.weight = nn.Parameter(torch.from_numpy(memory))
    stale = jacobians(model)
    memory *= -1.5
    address, version = projection.weight.data_ptr(), projection.weight._version
    projection.weight = nn.Parameter(torch.from_numpy(memory))
    assert (projection.weight.data_ptr(), projection.weight._version) == (address, version)
    expected, shown = jacobians(copy.deepcopy(model)), jacobians(model)
    assert (expected[0] - stale[0]).abs().max() > 1e-5
    torch.testing.assert_close(shown[0], expected[0], rtol=1e-6, atol=1e-7)


def test_adapters_switched_merged_and_rescaled_renew_them(model: Any) -> None:
    plain = jacobians(model)
    adapted = lora(model)
    first = assert_fresh(adapted, plain)
    with adapted.disable_adapter():
        off = assert_fresh(adapted, first)
        for ours, before in zip(off, plain, strict=True):
            torch.testing.assert_close(ours, before)
    assert_fresh(adapted, off)
    adapted.merge_adapter()
    merged = assert_fresh(adapted, off)
    for ours, before in zip(merged, first, strict=True):
        torch.testing.assert_close(ours, before, rtol=1e-4, atol=1e-5)
    adapted.unmerge_adapter()
    assert_fresh(adapted, off)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.set_adapter("second")
    assert_fresh(adapted, first)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("second", 4.0)
    second = assert_fresh(adapted, first)
    adapted.set_adapter("default")
    assert_fresh(adapted, second)
    unloaded = adapted.merge_and_unload()
    assert_fresh(unloaded, off)


def test_an_adapter_swapped_in_place_renews_them(model: Any, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    config = bft_hf.get_config(model)
    other = lora(bft_hf.patch(tiny_llama(), config))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    other.save_pretrained(tmp_path)
    adapted = lora(model)
    stale = jacobians(adapted)
    hotswap_adapter(adapted, str(tmp_path), "default")
    for ours, expected in zip(assert_fresh(adapted, stale), jacobians(other), strict=True):
        torch.testing.assert_close(ours, expected)


def test_copies_of_data_parallel_do_not_share_what_they_derive() -> None:
    """nn.DataParallel's copies carry their weights as attributes, and one holder among them."""
    linear, holder = torch.nn.Linear(3, 3), DerivedFromWeights()
    own = holder.get([linear], lambda: linear.weight.clone())
    for factor in (2, 3):
        replica = linear._replicate_for_data_parallel()
        replica.weight = linear.weight.detach() * factor
        derived = holder.get([replica], lambda replica=replica: replica.weight.clone())
        torch.testing.assert_close(derived, own * factor)
    assert holder.get([linear], lambda: pytest.fail("computed again")) is own


def test_training_an_adapter_renews_them(tiny_llama: Callable[..., Any]) -> None:
    adapted = lora(bft_hf.patch(tiny_llama(), BFTConfig.unit()), modules_to_save=["bft"])
    optimizer = torch.optim.AdamW(bft_hf.param_groups(adapted, 1e-2), fused=True)
    shown = jacobians(adapted)
    for _ in range(2):
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = assert_fresh(adapted, shown)


def test_output_weight_behind_absolute_units_is_renewed(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(observation_units="absolute"))
    optimizer = torch.optim.AdamW([layer.self_attn.o_proj.weight for layer in model.model.layers], lr=0.05, fused=True)

    def observed(which: Any) -> list[torch.Tensor]:
        with torch.no_grad(), bft_hf.record(which) as trace:
            which(input_ids=IDS)
        return trace.observation_precision

    stale = observed(model)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    for ours, theirs, before in zip(observed(model), observed(copy.deepcopy(model)), stale, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert (ours - before).abs().max() > 1e-4
    adapted = lora(model)
    on = observed(adapted)
    with adapted.disable_adapter():
        off = observed(adapted)
        for ours, theirs in zip(off, observed(copy.deepcopy(adapted)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert all((ours - theirs).abs().max() > 1e-4 for ours, theirs in zip(on, off, strict=True))


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("units", ["relative", "absolute"])
def test_what_an_evaluation_in_inference_mode_cached_serves_training(
    units: str, granularity: str, tiny_llama: Callable[..., Any]
) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(granularity=granularity, observation_units=units))
    fresh = copy.deepcopy(model)
    with torch.inference_mode():
        model(input_ids=IDS)
    for one in (model, fresh):
        one(input_ids=IDS, labels=IDS).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "config", [bft_hf.BFTConfig.unit(), bft_hf.BFTConfig.unit(granularity="channel", observation_units="absolute")]
)
def test_values_kept_by_an_inference_mode_pass_serve_training(
    config: bft_hf.BFTConfig, tiny_llama: Callable[..., Any]
) -> None:
    model, fresh = bft_hf.patch(tiny_llama(), config), bft_hf.patch(tiny_llama(), config)
    ids = torch.tensor([[5, 9, 30, 7]])
    with torch.inference_mode():
        model(ids)
    for one in (model, fresh):
        one(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
