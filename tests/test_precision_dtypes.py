"""Half-precision models: the filter stays float32, the residual stream does not become it, and nothing overflows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama

import bft_hf
from bft_hf import BFTConfig

HALVES = [torch.bfloat16, torch.float16]
IDS = torch.randint(3, 128, (2, 13), generator=torch.Generator().manual_seed(71))
MASK = torch.ones_like(IDS)
MASK[0, :6] = 0
CONFIGS = {
    "unit": BFTConfig.unit(),
    "exact": BFTConfig.unit(effective_sample_size="exact"),
    "absolute neighbours": BFTConfig.unit(observation_units="absolute", prior_scale="neighbours"),
    "channel": BFTConfig.unit(granularity="channel"),
    "mlp": BFTConfig.unit(initial_precision="mlp"),
    "identity": BFTConfig.identity(),
}


def halved(model: Any, dtype: torch.dtype) -> Any:
    """Cast as from_pretrained loads: the rotary frequencies, which no checkpoint holds, stay float32."""
    frequencies = model.get_submodule("model.rotary_emb").inv_freq.clone()
    model.to(dtype)
    model.get_submodule("model.rotary_emb").inv_freq = frequencies
    return model


def run(model: Any, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(**({"input_ids": IDS, "attention_mask": MASK, "output_hidden_states": True} | inputs))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONFIGS)
def test_residual_stream_and_logits_keep_the_models_dtype(
    name: str, dtype: torch.dtype, backend: str, tiny_llama: Callable[..., Any]
) -> None:
    plain = run(tiny_llama(dtype=dtype, attn_implementation=backend))
    model = bft_hf.patch(tiny_llama(dtype=dtype, attn_implementation=backend), CONFIGS[name])
    seen: list[torch.dtype] = []
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            module.register_forward_hook(
                lambda _, args, output: seen.append((output[0] if isinstance(output, tuple) else output).dtype)
            )
    output = run(model)
    assert len(seen) == 12 and set(seen) == {dtype}
    assert [h.dtype for h in output.hidden_states] == [h.dtype for h in plain.hidden_states] == [dtype] * 4
    assert output.logits.dtype == plain.logits.dtype
    assert output.logits.isfinite().all() and all(h.isfinite().all() for h in output.hidden_states)
    if name != "identity":
        assert (output.logits - plain.logits)[MASK.bool()].abs().max() > 0.1


@pytest.mark.parametrize(
    "cast",
    [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float16)],
)
def test_casts_leave_tau_and_q_exact_in_float32(cast: Callable[[Any], Any], tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_precision="mlp"))
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.12345678
    before = {name: p.detach().clone() for name, p in bft_hf.bft_parameters(model).items()}
    identities = {name: id(p) for name, p in bft_hf.bft_parameters(model).items()}
    cast(model)
    for name, parameter in bft_hf.bft_parameters(model).items():
        assert (
            parameter.dtype == torch.float32
            and torch.equal(parameter, before[name])
            and id(parameter) == identities[name]
        )
    assert {p.dtype for p in model.model.layers[0].mlp.parameters()} < {torch.float16, torch.bfloat16}
    assert not torch.equal(before["model.layers.0.bft.log_process_noise"].half().float(), torch.tensor([0.12345678]))
    run(model.float())


def test_half_precision_reads_tau_and_q_in_full(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(dtype=torch.bfloat16), BFTConfig.unit(initial_precision_value=1.2345678))
    with bft_hf.record(model) as trace:
        run(model)
    torch.testing.assert_close(trace.precision[0], torch.full((2, 13), 1.2345678))
    assert all(value.dtype == torch.float32 for value in trace.precision + trace.gain)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_masked_rows_keep_their_state_on_every_backend(
    dtype: torch.dtype, backend: str, tiny_llama: Callable[..., Any]
) -> None:
    """Plain eager attention reads the future in a fully masked row; the filter gives it gain 0."""
    model = bft_hf.patch(tiny_llama(dtype=dtype, attn_implementation=backend), BFTConfig.unit())
    first = run(model)
    with bft_hf.record(model) as trace:
        second = run(model, input_ids=IDS.clone().index_fill_(1, torch.arange(6, 13), 5))
    hidden = MASK[0] == 0
    for one, other in zip(first.hidden_states, second.hidden_states, strict=True):
        assert one.isfinite().all() and torch.equal(one[0, hidden], other[0, hidden])
        assert not torch.equal(one[0, ~hidden], other[0, ~hidden])
    for layer in range(3):
        assert (trace.gain[layer][0, hidden] == 0).all() and (trace.gain[layer][MASK.bool()] > 0).all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_gradients_are_finite_beside_masked_rows(
    sample_size: str, dtype: torch.dtype, backend: str, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(dtype=dtype, attn_implementation=backend)
    bft_hf.patch(model, BFTConfig.unit(effective_sample_size=sample_size)).train()
    model(input_ids=IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
        assert parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_single_token_has_one_observation(name: str, dtype: torch.dtype, tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(dtype=dtype), CONFIGS[name])
    with bft_hf.record(model) as trace:
        output = run(model, input_ids=IDS[:, :1], attention_mask=None)
    assert output.logits.isfinite().all()
    for n, gain, rss in zip(trace.effective_sample_size, trace.gain, trace.residual_variance, strict=True):
        torch.testing.assert_close(n, torch.ones_like(n), rtol=0.01, atol=0.01)
        assert (gain > 0).all() and (gain <= 1).all() and (rss >= 0).all() and (rss < 0.05).all()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_values_that_are_all_alike_have_no_residual_variance(
    dtype: torch.dtype, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(dtype=dtype, attention_bias=True)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
        torch.nn.init.constant_(layer.self_attn.v_proj.bias, 0.7)
    bft_hf.patch(model, BFTConfig.unit())
    with bft_hf.record(model) as trace:
        output = run(model)
    assert output.logits.isfinite().all()
    kept = MASK.bool()
    for rss, gain in zip(trace.residual_variance, trace.gain, strict=True):
        assert (rss >= 0).all() and (rss.transpose(1, 2)[kept] < (1e-5 if dtype == torch.float32 else 0.02)).all()
        assert gain.isfinite().all() and (gain <= 1).all()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_values_without_any_power_are_finite(dtype: torch.dtype, tiny_llama: Callable[..., Any]) -> None:
    for config in CONFIGS.values():
        model = tiny_llama(dtype=dtype)
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
        bft_hf.patch(model, config).train()
        with bft_hf.record(model) as trace:
            loss = model(input_ids=IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100)).loss
        loss.backward()
        assert all((rss == 0).all() for rss in trace.residual_variance)
        assert all(gain.isfinite().all() for gain in trace.gain)
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_large_values_do_not_overflow_float16(tiny_llama: Callable[..., Any]) -> None:
    """|v|^2 passes float16's 65,504 at a root mean square of 256."""
    model = tiny_llama(attention_bias=True, dtype=torch.float16)
    for layer in model.model.layers:
        layer.self_attn.v_proj.bias.data.copy_(torch.linspace(-1000, 1000, 16))
        layer.self_attn.o_proj.weight.data.mul_(1e-3)
    assert run(model).logits.isfinite().all()
    bft_hf.patch(model, BFTConfig.unit())
    with bft_hf.record(model) as trace:
        output = run(model)
    assert output.logits.isfinite().all()
    assert all(values.isfinite().all() for values in trace.gain + trace.residual_variance + trace.effective_sample_size)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e3])
def test_half_precision_follows_float32_whatever_q(
    dtype: torch.dtype, noise: float, tiny_llama: Callable[..., Any]
) -> None:
    """lam_bar is about 1 / Q: without the shift of the key bias, log Q would cost every score its digits."""
    config = BFTConfig.unit(initial_process_noise=noise, initial_precision_value=1 / noise)
    kept = MASK.bool()
    expected = run(bft_hf.patch(tiny_llama(), config)).logits[kept]
    error = (run(halved(bft_hf.patch(tiny_llama(), config), dtype)).logits[kept].float() - expected).abs().max()
    plain = (run(halved(tiny_llama(), dtype)).logits[kept].float() - run(tiny_llama()).logits[kept]).abs().max()
    assert error < 4 * plain


@pytest.mark.parametrize("dtype", HALVES)
def test_generation_in_half_precision_agrees_with_the_row_alone(
    dtype: torch.dtype, tiny_llama: Callable[..., Any]
) -> None:
    model = halved(bft_hf.patch(tiny_llama(), BFTConfig.unit()), dtype)
    positions = (MASK.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = model(input_ids=IDS, attention_mask=MASK, position_ids=positions).logits[0, 6:].float()
        alone = model(input_ids=IDS[:1, 6:]).logits[0].float()
        exact = bft_hf.patch(tiny_llama(), BFTConfig.unit())(input_ids=IDS[:1, 6:]).logits[0]
    assert (padded - alone).abs().max() < 2 * (alone - exact).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_keeps_the_filter_in_float32(name: str, dtype: torch.dtype, tiny_llama: Callable[..., Any]) -> None:
    """Mixed-precision training (Trainer's bf16=True) runs float32 weights under autocast."""
    plain = tiny_llama()
    model = bft_hf.patch(tiny_llama(), CONFIGS[name])
    with torch.autocast("cpu", dtype=dtype):
        expected = run(plain)
        with bft_hf.record(model) as trace:
            output = run(model)
    assert [h.dtype for h in output.hidden_states] == [h.dtype for h in expected.hidden_states]
    assert output.logits.dtype == expected.logits.dtype and output.logits.isfinite().all()
    for field in (
        "precision",
        "observation_precision",
        "gain",
        "updated_precision",
        "jacobian",
        "effective_sample_size",
    ):
        for value in getattr(trace, field):
            assert value.dtype == torch.float32, field
    # Nor may they have passed through half precision on the way.
    for value in trace.precision[1:] + trace.jacobian + trace.observation_precision:
        kept = value[MASK.bool()]
        assert not torch.equal(kept.to(dtype).float(), kept)


def test_coefficients_made_under_autocast_are_those_made_outside(tiny_llama: Callable[..., Any]) -> None:
    first, second = bft_hf.patch(tiny_llama(), BFTConfig.unit()), bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(first)  # fills the cache
    with bft_hf.record(first) as one, bft_hf.record(second) as other:
        run(first)
        run(second)
    for ours, theirs in zip(one.jacobian, other.jacobian, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_sample_sizes_and_tau_under_autocast_are_near_float32s(
    sample_size: str, tiny_llama: Callable[..., Any]
) -> None:
    """Scores of a few units, rounded to bfloat16, would be off by a hundredth and the weights with them."""
    model = bft_hf.patch(
        tiny_llama(num_hidden_layers=1), BFTConfig.unit(effective_sample_size=sample_size, initial_precision="mlp")
    )
    captured: dict[str, torch.Tensor] = {}
    attention = bft_hf.attention.KrigingCall.read

    def read(self: Any, output: Any, query: Any, key: Any, mask: Any, scaling: float, head_dim: int) -> Any:
        captured.update(query=query, key=key, mask=mask, scaling=torch.tensor(scaling))
        return attention(self, output, query, key, mask, scaling, head_dim)

    with pytest.MonkeyPatch.context() as patcher, bft_hf.record(model) as trace:
        patcher.setattr(bft_hf.attention.KrigingCall, "read", read)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(model, attention_mask=None)
    query, key = captured["query"].double(), captured["key"].double().repeat_interleave(2, dim=1)
    scores = (query @ key.transpose(-1, -2) * captured["scaling"]).masked_fill(
        torch.ones(13, 13, dtype=torch.bool).triu(1), -torch.inf
    )
    n = 1 / scores.softmax(-1).square().sum(-1)
    if sample_size == "exact":
        torch.testing.assert_close(trace.effective_sample_size[0].double(), n, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        fresh = model.model.layers[0].bft.initial_precisions(model.get_input_embeddings()(IDS), IDS)[0]
    assert torch.equal(trace.precision[0], fresh)


def test_autocast_computes_the_jacobian_in_float32(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.update(residual=args[0]))
    layer.mlp.gate_proj.register_forward_hook(lambda *a: seen.update(gate=a[2]))
    layer.mlp.up_proj.register_forward_hook(lambda *a: seen.update(up=a[2]))
    with torch.autocast("cpu", dtype=torch.bfloat16), bft_hf.record(model) as trace:
        run(model)
    z, u, h = (seen[name].double() for name in ("gate", "up", "residual"))
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    down, gate, up, scale = (
        w.detach().double() for w in (mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, norm.weight)
    )
    sigmoid = z.sigmoid()
    slope = sigmoid * (1 + z * (1 - sigmoid))
    diagonal = (slope * u) @ (down.T * gate) + (z * sigmoid) @ (down.T * up)
    inverse_rms = (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    expected = (diagonal * scale * inverse_rms).mean(-1)
    torch.testing.assert_close(trace.jacobian[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_training_under_autocast_gives_every_parameter_a_float32_gradient(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit()).train()
    labels = IDS.masked_fill(MASK == 0, -100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS, attention_mask=MASK, labels=labels).loss
    loss.backward()
    half = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=IDS, attention_mask=MASK, labels=labels).loss.backward()
    for name in half:
        assert half[name].dtype == torch.float32 and half[name].isfinite().all() and half[name].abs().max() > 0
    ours = [name for name in half if ".bft." in name]
    for name in ours:
        torch.testing.assert_close(half[name], model.get_parameter(name).grad, rtol=0.3, atol=3e-3)


def test_float64_model_computes_in_float64() -> None:
    model = bft_hf.patch(make_tiny_llama(dtype=torch.float64), BFTConfig.unit()).double()
    with bft_hf.record(model) as trace:
        output = run(model)
    assert output.logits.dtype == torch.float64
    assert all(value.dtype == torch.float64 for value in trace.precision + trace.gain)
