"""The oracle itself: against transformers' Llama where precision plays no part, and against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import (
    Settings,
    attention_observation,
    causal_visibility,
    feed_forward,
    jacobian_diagonal,
    reference_llama,
    rms_norm,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

STORIES = Path(__file__).resolve().parents[2] / "shared" / "data" / "stories260K"
DEGENERATE = Settings(effective_sample_size="exact", kriging=False, gain=False)
UNIT = Settings(effective_sample_size="exact")

# transformers computes norms and rotary angles in float32 whatever the model's dtype; this is what that leaves.
FLOAT32_ROUNDING = 2e-5


def tiny_config(**changes: object) -> LlamaConfig:
    values = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    return LlamaConfig(**(values | changes))


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """A random float64 Llama, norm weights and biases off their start values, so that leaving one out shows."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter) if "norm" in name else torch.randn_like(parameter))
    return model


def tokens(batch: int = 2, length: int = 9, vocabulary: int = 50, seed: int = 0) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def weights_of(model: LlamaForCausalLM) -> dict[str, Tensor]:
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


def with_filter(model: LlamaForCausalLM, log_tau: float = 0.3, log_noise: float = -0.4) -> dict[str, Tensor]:
    """The state dict with filter parameters that differ by layer."""
    state = weights_of(model)
    state["model.layers.0.bft.log_initial_precision"] = torch.tensor([log_tau], dtype=torch.float64)
    for layer in range(model.config.num_hidden_layers - 1):
        name = f"model.layers.{layer}.bft.log_process_noise"
        state[name] = torch.tensor([log_noise + 0.5 * layer], dtype=torch.float64)
    return state


def largest(a: Tensor) -> float:
    return float(a.detach().abs().max())


def spread(a: Tensor, b: Tensor) -> float:
    return largest(a - b)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
    ],
    ids=["grouped", "tied", "ungrouped", "biases", "wide-heads"],
)
def test_without_gain_and_kriging_the_oracle_is_transformers_llama(changes: dict[str, object]) -> None:
    model, ids = tiny_llama(**changes), tokens()
    plain = model(ids, output_hidden_states=True)
    oracle = reference_llama(weights_of(model), model.config, DEGENERATE, ids)
    assert spread(plain.logits, oracle.logits) < FLOAT32_ROUNDING * largest(plain.logits)
    assert len(plain.hidden_states) == len(oracle.hidden_states)
    for ours, theirs in zip(oracle.hidden_states, plain.hidden_states, strict=True):
        assert spread(ours, theirs) < FLOAT32_ROUNDING * largest(theirs)


def test_at_the_unit_start_the_oracle_is_not_transformers_llama() -> None:
    model, ids = tiny_llama(), tokens()
    oracle = reference_llama(weights_of(model), model.config, UNIT, ids)
    assert spread(model(ids).logits, oracle.logits) > 0.05


def test_left_padding_and_position_ids_follow_transformers() -> None:
    model, ids = tiny_llama(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain = model(ids, attention_mask=mask, position_ids=positions).logits
    oracle = reference_llama(weights_of(model), model.config, DEGENERATE, ids, mask, positions).logits
    unpadded = reference_llama(weights_of(model), model.config, DEGENERATE, ids).logits
    real = mask.bool()
    assert spread(plain[real], oracle[real]) < FLOAT32_ROUNDING * largest(plain)
    assert spread(plain[1, 4:], unpadded[1, 4:]) > 0.05


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"the pretrained weights {STORIES} are not here")
def test_without_gain_and_kriging_the_oracle_is_the_pretrained_stories_llama() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float64).eval()
    ids = tokens(1, 24, model.config.vocab_size)
    ids[:, 0] = model.config.bos_token_id
    plain = model(ids).logits
    oracle = reference_llama(weights_of(model), model.config, DEGENERATE, ids).logits
    unit = reference_llama(weights_of(model), model.config, UNIT, ids).logits
    assert spread(plain, oracle) < FLOAT32_ROUNDING * largest(plain)
    assert spread(plain, unit) > 0.05


def test_one_observation_by_hand() -> None:
    """Two keys of equal score and lam 1 and 3: w = 1/4, 3/4, and everything else follows on paper."""
    zero = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    value = torch.tensor([[[[0.0, 4.0], [4.0, 0.0]]]], dtype=torch.float64)
    lam = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    seen = attention_observation(
        zero, zero.expand(1, 1, 2, 2), value, lam, settings=replace(UNIT, prior_scale="neighbours")
    )
    assert seen.weights.flatten().tolist() == pytest.approx([0.25, 0.75])
    assert seen.attention.flatten().tolist() == pytest.approx([0.5, 0.5])
    assert seen.estimate.flatten().tolist() == pytest.approx([3.0, 1.0])
    assert seen.second_moment.item() == pytest.approx(8.0)  # (12 + 4) / 2
    assert seen.residual_variance.item() == pytest.approx(3 / 8)  # (16 * 3/16) / 8
    assert seen.effective_sample_size.item() == pytest.approx(1.6)  # 1 / (1/16 + 9/16)
    assert seen.neighbour_variance.item() == pytest.approx(0.5)  # 1/4 / 1 + 3/4 / 3
    # s2 = (0.5 + 1.6 * 3/8) / 1.6, Var = s2 / 1.6
    assert seen.estimate_variance.item() == pytest.approx(1.1 / 2.56)
    assert seen.precision.item() == pytest.approx(2.56 / 1.1)


def test_heads_are_combined_as_variances_by_hand() -> None:
    """Head 0 sees equal values (RSS 0, n 2), head 1 sees +-1 (RSS 1, n 2): Var is 1/4 and 3/4 with nu0 = s0^2 = 1."""
    zero = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    value = torch.tensor([[[[2.0], [2.0]], [[1.0], [-1.0]]]], dtype=torch.float64)
    lam = torch.ones(1, 2, dtype=torch.float64)
    output_weight = torch.tensor([[1.0, 2.0], [0.0, 3.0], [2.0, 0.0]], dtype=torch.float64)

    def precision(granularity: str, units: str) -> list[float]:
        settings = replace(UNIT, granularity=granularity, observation_units=units)
        seen = attention_observation(
            zero, zero.expand(1, 2, 2, 1), value, lam, settings=settings, output_weight=output_weight
        )
        return seen.precision.flatten().tolist()

    assert precision("token", "relative") == pytest.approx([2.0])
    assert precision("token", "absolute") == pytest.approx([1 / ((5 * 0.25 + 13 * 0.75) / 3)])
    assert precision("channel", "absolute") == pytest.approx([1 / 3.25, 1 / 6.75, 1.0])
    # m2 is 4 in head 0 and 1 in head 1: (4 * 1 * .25 + 1 * 4 * .75) / (4 * 1 + 1 * 4) in the first channel.
    assert precision("channel", "relative") == pytest.approx([2.0, 4 / 3, 4.0])


def test_weights_sum_to_one_over_visible_keys_and_to_zero_where_there_is_none() -> None:
    model, ids = tiny_llama(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    oracle = reference_llama(weights_of(model), model.config, UNIT, ids, mask)
    for weights in oracle.weights:
        assert weights.min() >= 0
        torch.testing.assert_close(weights.sum(-1)[0], torch.ones_like(weights.sum(-1)[0]))
        torch.testing.assert_close(weights.sum(-1)[1, :, 3:], torch.ones_like(weights.sum(-1)[1, :, 3:]))
        assert weights[1, :, :3].abs().sum() == 0
        assert weights.triu(1).abs().sum() == 0
        assert weights[1, :, :, :3].abs().sum() == 0


def test_a_fully_masked_row_keeps_its_precision_and_takes_no_attention() -> None:
    model, ids = tiny_llama(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    oracle = reference_llama(with_filter(model), model.config, UNIT, ids, mask)
    for layer in range(3):
        assert oracle.gain[layer][1, :3].abs().sum() == 0
        assert (oracle.gain[layer][1, 3:] > 0).all()
        assert torch.equal(oracle.updated_precision[layer][1, :3], oracle.precision[layer][1, :3])
        assert (oracle.updated_precision[layer][1, 3:] > oracle.precision[layer][1, 3:]).all()


@pytest.mark.parametrize("separate", [False, True], ids=["one-precision", "key-precision"])
def test_the_weight_odds_of_a_token_follow_its_key_precision(separate: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    alike = attention_observation(query, key, value, torch.full((1, 5), 3.0).double(), settings=UNIT)
    torch.testing.assert_close(alike.attention, (query @ key.transpose(-1, -2) / 2).softmax(-1))
    torch.testing.assert_close(alike.weights, alike.attention)
    lam, other = (0.1 + torch.rand(1, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    settings = replace(UNIT, separate_key_precision=separate)

    def weights(factor: float) -> Tensor:
        changed = lam.clone()
        changed[:, 2] *= factor
        pair = {"precision": other, "key_precision": changed} if separate else {"precision": changed}
        return attention_observation(query, key, value, settings=settings, **pair).weights

    odds = [weights(factor)[..., 2] / (1 - weights(factor)[..., 2]) for factor in (1.0, 7.0)]
    torch.testing.assert_close(odds[1], 7 * odds[0])
    visible = torch.ones(1, 5, 5, dtype=torch.bool)
    visible[:, :, 2] = False
    pair = {"precision": other, "key_precision": lam} if separate else {"precision": lam}
    masked = attention_observation(query, key, value, settings=settings, visible=visible, **pair).weights
    torch.testing.assert_close(weights(0.0), masked)


def test_reliability_scales_odds_zero_is_masking_and_one_is_nothing() -> None:
    model, ids = tiny_llama(), tokens()
    state = with_filter(model)
    settings = replace(UNIT, observation_units="absolute", prior_scale="neighbours")
    run = lambda rho: reference_llama(state, model.config, settings, ids, reliability=rho)  # noqa: E731
    rho = torch.ones(ids.shape, dtype=torch.float64)
    plain = reference_llama(state, model.config, settings, ids)
    torch.testing.assert_close(run(rho).logits, plain.logits, rtol=0, atol=0)
    rho[0, 4] = 0.25
    odds = [w[0][0, :, 5:, 4] / (1 - w[0][0, :, 5:, 4]) for w in (plain.weights, run(rho).weights)]
    torch.testing.assert_close(odds[1], 0.25 * odds[0])
    assert spread(run(rho).logits[0, 5:], plain.logits[0, 5:]) > 1e-3
    rho[0, 4] = 0.0
    mask = torch.ones_like(ids)
    mask[0, 4] = 0
    masked = reference_llama(state, model.config, settings, ids, mask)
    torch.testing.assert_close(run(rho).logits, masked.logits)
    rho[0, 0] = 0.0
    first = run(rho)
    assert first.gain[0][0, 0] == 0
    assert first.gain[0][0, 1] > 0
    assert first.logits.isfinite().all()


def test_the_jacobian_is_the_slope_of_the_ffn_with_the_norm_scale_held() -> None:
    model = tiny_llama(mlp_bias=True)
    weights = {k.removeprefix("model.layers.1."): v for k, v in weights_of(model).items() if "layers.1." in k}
    hidden = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    jacobian = jacobian_diagonal(hidden, weights, 1e-4)
    norm_weight = weights["post_attention_layernorm.weight"]
    scale = rms_norm(hidden, norm_weight, 1e-4)[1]
    moving = torch.zeros_like(jacobian)
    for channel in range(32):
        step = torch.zeros(32, dtype=torch.float64)
        step[channel] = 1e-5
        held = [feed_forward(norm_weight * ((hidden + s * step) * scale), weights)[..., channel] for s in (1, -1)]
        free = [feed_forward(rms_norm(hidden + s * step, norm_weight, 1e-4)[0], weights)[..., channel] for s in (1, -1)]
        torch.testing.assert_close(jacobian[..., channel], (held[0] - held[1]) / 2e-5, rtol=1e-6, atol=1e-8)
        moving[..., channel] = (free[0] - free[1]) / 2e-5
    assert spread(jacobian, moving) > 1e-2


def test_prediction_recursion_by_hand_from_the_recorded_jacobian() -> None:
    model, ids = tiny_llama(), tokens()
    oracle = reference_llama(with_filter(model, log_tau=0.3, log_noise=-0.4), model.config, UNIT, ids)
    torch.testing.assert_close(oracle.precision[0], torch.full_like(oracle.precision[0], 0.3).exp())
    for layer, log_noise in enumerate([-0.4, 0.1]):
        updated = oracle.precision[layer] + oracle.observation_precision[layer]
        torch.testing.assert_close(oracle.updated_precision[layer], updated)
        variance = (1 + oracle.jacobian[layer]) ** 2 / updated + torch.tensor(log_noise, dtype=torch.float64).exp()
        torch.testing.assert_close(oracle.precision[layer + 1], 1 / variance)
    # Without gain both granularities bring the same states to the first FFN.
    token, channel = (
        reference_llama(with_filter(model), model.config, replace(UNIT, gain=False, granularity=kind), ids)
        for kind in ("token", "channel")
    )
    torch.testing.assert_close(token.jacobian[0], channel.jacobian[0].mean(-1))
    assert channel.jacobian[0].std(-1).min() > 1e-2
    still = reference_llama(with_filter(model), model.config, replace(UNIT, propagate=False), ids)
    assert torch.equal(still.precision[1], still.updated_precision[0])
    assert still.jacobian == [None, None, None]


def test_probes_equal_the_exact_sample_size_when_their_signs_are_orthogonal() -> None:
    """A Hadamard matrix as probes: the mean of the squared projections is the sum of the squared weights."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    hadamard = torch.kron(two, torch.kron(two, two))
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, 4, 8, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    lam = torch.ones(1, 8, dtype=torch.float64)
    visible = causal_visibility(8)
    exact = attention_observation(query, key, value, lam, settings=UNIT, visible=visible)
    probe_settings = replace(UNIT, effective_sample_size="probe")
    run = lambda signs: attention_observation(  # noqa: E731
        query, key, value, lam, settings=probe_settings, visible=visible, signs=signs
    )
    orthogonal = run(hadamard.expand(1, 2, 8, 8))
    torch.testing.assert_close(orthogonal.effective_sample_size, exact.effective_sample_size)
    one = run(hadamard[:, 5:6].expand(1, 2, 8, 1))
    assert spread(one.effective_sample_size, exact.effective_sample_size) > 0.1
    assert (one.effective_sample_size >= 1).all()
    assert (one.effective_sample_size <= torch.arange(1, 9)).all()


def test_unpatched_layers_pass_the_precision_on_and_run_plainly() -> None:
    model, ids = tiny_llama(), tokens()
    state = weights_of(model)
    plain = reference_llama(state, model.config, DEGENERATE, ids)
    outer = reference_llama(state, model.config, replace(UNIT, layers=(0, 2)), ids)
    last = reference_llama(state, model.config, replace(UNIT, layers=(2,)), ids)
    assert outer.gain[1] is None
    assert outer.precision[1] is None
    torch.testing.assert_close(last.hidden_states[2], plain.hidden_states[2])
    assert spread(last.logits, plain.logits) > 1e-3
    torch.testing.assert_close(last.precision[2], torch.ones_like(last.precision[2]))
    variance = (1 + outer.jacobian[0]) ** 2 / outer.updated_precision[0] + 1.0
    torch.testing.assert_close(outer.precision[2], 1 / variance)


def test_separate_key_precision_started_alike_changes_nothing_and_started_apart_does() -> None:
    model, ids = tiny_llama(), tokens()
    state = with_filter(model)
    one = reference_llama(state, model.config, UNIT, ids)
    for name in [name for name in state if ".bft." in name]:
        twin = name.replace("process_noise", "key_process_noise").replace("initial_precision", "initial_key_precision")
        state[twin] = state[name].clone()
    settings = replace(UNIT, separate_key_precision=True)
    torch.testing.assert_close(reference_llama(state, model.config, settings, ids).logits, one.logits)
    state["model.layers.0.bft.log_initial_key_precision"] += 2.0
    apart = reference_llama(state, model.config, settings, ids)
    torch.testing.assert_close(apart.gain[0], one.gain[0])
    assert spread(apart.weights[1], one.weights[1]) > 1e-3
    assert spread(apart.logits, one.logits) > 1e-3


def test_a_missing_filter_parameter_is_an_error_once_others_are_there() -> None:
    model, ids = tiny_llama(), tokens()
    state = with_filter(model)
    del state["model.layers.1.bft.log_process_noise"]
    with pytest.raises(KeyError, match=r"layers\.1\.bft\.log_process_noise"):
        reference_llama(state, model.config, UNIT, ids)


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_large_process_noise_and_a_vague_start_approach_transformers_llama(granularity: str) -> None:
    model, ids = tiny_llama(), tokens()
    plain = reference_llama(weights_of(model), model.config, DEGENERATE, ids).logits
    settings = replace(UNIT, granularity=granularity)

    def distance(scale: float) -> float:
        settings_there = replace(settings, initial_precision_value=1 / scale, initial_process_noise=scale)
        return spread(reference_llama(weights_of(model), model.config, settings_there, ids).logits, plain)

    distances = [distance(scale) for scale in (1.0, 1e2, 1e4, 1e6)]
    assert distances[0] > 0.05
    assert distances[1] < distances[0]
    assert distances[2] < min(distances[1] / 30, 1e-2)
    assert distances[3] < distances[2] / 30


@pytest.mark.parametrize("prior", ["unit", "neighbours"])
def test_gradients_are_finite_differences_once_nothing_is_detached(prior: str) -> None:
    model, ids, start = tiny_llama(), tokens(1, 6), replace(UNIT, prior_scale=prior)
    names = ["model.layers.0.bft.log_initial_precision", "model.layers.0.bft.log_process_noise"]

    def loss(state: dict[str, Tensor], settings: Settings) -> Tensor:
        return reference_llama(state, model.config, settings, ids).logits.square().mean()

    def gradient(settings: Settings) -> list[float]:
        state = with_filter(model)
        leaves = [state[name].requires_grad_() for name in names]
        return [float(g) for g in torch.autograd.grad(loss(state, settings), leaves)]

    def slope(name: str) -> float:
        sides = []
        for step in (1e-5, -1e-5):
            state = with_filter(model)
            state[name] = state[name] + step
            sides.append(float(loss(state, start)))
        return (sides[0] - sides[1]) / 2e-5

    slopes = [slope(name) for name in names]
    assert gradient(replace(start, differentiate_jacobian=True)) == pytest.approx(slopes, rel=1e-6)
    assert gradient(start) != pytest.approx(slopes, rel=1e-3)


def test_the_output_weight_gets_no_gradient_through_the_variance() -> None:
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(1, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    output_weight = torch.randn(6, 8, generator=generator, dtype=torch.float64).requires_grad_()
    lam = torch.ones(1, 5, dtype=torch.float64, requires_grad=True)
    settings = replace(UNIT, observation_units="absolute", prior_scale="neighbours")
    seen = attention_observation(query, key, value, lam, settings=settings, output_weight=output_weight)
    (of_lam, of_weight) = torch.autograd.grad(seen.precision.sum(), [lam, output_weight], allow_unused=True)
    assert of_weight is None
    assert of_lam.abs().min() > 0
