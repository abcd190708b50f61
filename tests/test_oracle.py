"""A patched Llama against the float64 oracle: values, and gradients to every parameter, for all combinations of settings."""

import itertools
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from reference import Settings, reference_llama
from torch.testing import assert_close
from transformers.models.llama import modeling_llama

import bft_hf
from bft_hf import BFTConfig
from bft_hf.filter import probe_signs
from bft_hf.sample_size import NUM_PROBES

TIGHT = 1e-9
EAGER = 1e-5  # transformers' eager attention takes its softmax in float32 whatever the model's dtype


@pytest.fixture(autouse=True)
def _all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms and rotary angles in float32 whatever the model's dtype; here 1e-9 is compared."""

    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        mean_square = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64)
        inverse_frequency = self.config.rope_parameters["rope_theta"] ** (-half / self.config.head_dim)
        angles = torch.cat([position_ids[..., None].double() * inverse_frequency] * 2, dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def settings_of(config: BFTConfig) -> Settings:
    """The oracle's settings for a configuration."""
    names = {name for name in vars(config) if name in Settings.__dataclass_fields__}
    return Settings(**{name: getattr(config, name) for name in names}, num_probes=NUM_PROBES)


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Token ids (3, 11) with rows of three lengths, padded on one side or not."""
    ids = torch.randint(3, 128, (3, 11), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 3, 6)):
        if padding == "left":
            mask[row, :pads] = 0
        elif padding == "right":
            mask[row, 11 - pads :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def perturbed(model: Any) -> Any:
    """Move the filter's parameters off their start values, each by its own amount."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def log_initial_precision(
    config: BFTConfig, state: dict[str, torch.Tensor], input_ids: torch.Tensor, key: str = ""
) -> Any:
    """log tau by token for a table or an MLP; None where the oracle reads a constant itself."""
    prefix = "model.layers.0.bft."
    log_tau = state.get(f"{prefix}log_initial_{key}precision")
    if config.initial_precision == "constant" or log_tau is None:
        return None
    if config.initial_precision == "table":
        log_tau = log_tau[input_ids]
    else:
        embedding = state["model.embed_tokens.weight"][input_ids]
        mean_square = embedding.square().mean(-1, keepdim=True)
        embedding = embedding / (mean_square + torch.finfo(torch.float64).eps).sqrt()
        hidden = torch.einsum("btc,hc->bth", embedding, state[f"{prefix}initial_{key}hidden"])
        log_tau = log_tau + (hidden * hidden.sigmoid()) @ state[f"{prefix}initial_{key}output"]
    return log_tau if config.granularity == "token" else log_tau[..., None]


def compare(
    config: BFTConfig,
    implementation: str = "sdpa",
    padding: str = "left",
    reliability: torch.Tensor | None = None,
    **model: Any,
) -> None:
    """Logits, everything that record() shows and the gradients of a loss, patched model against oracle."""
    tolerance = TIGHT if implementation == "sdpa" else EAGER
    values = {"rtol": tolerance, "atol": tolerance}
    patched = make_tiny_llama(dtype=torch.float64, attn_implementation=implementation, **model)
    perturbed(bft_hf.patch(patched, config).double())
    inputs = batch(padding)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    kept = inputs["attention_mask"].bool()

    with bft_hf.record(patched) as trace:
        output = patched(**inputs) if reliability is None else patched(**inputs, token_reliability=reliability)
    oracle_state = {name: value.detach().clone().requires_grad_() for name, value in patched.state_dict().items()}
    if patched.config.tie_word_embeddings:
        oracle_state["lm_head.weight"] = oracle_state["model.embed_tokens.weight"]
    reference = reference_llama(
        oracle_state,
        patched.config,
        settings_of(config),
        **inputs,
        signs=probe_signs,
        reliability=reliability,
        log_initial_precision=log_initial_precision(config, oracle_state, inputs["input_ids"]),
        log_initial_key_precision=log_initial_precision(config, oracle_state, inputs["input_ids"], "key_"),
    )
    assert_close(output.logits[kept], reference.logits[kept], **values)
    for name in ("precision", "observation_precision", "gain", "updated_precision", "jacobian"):
        for ours, theirs in zip(getattr(trace, name), _present(getattr(reference, name)), strict=True):
            assert_close(ours[kept], theirs.detach()[kept], **values, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("effective_sample_size", "residual_variance"):
        for ours, theirs in zip(getattr(trace, name), _present(getattr(reference, name)), strict=True):
            assert_close(ours.transpose(1, 2)[kept], theirs.detach().transpose(1, 2)[kept], **values)

    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.functional.cross_entropy(reference.logits.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in patched.named_parameters()}
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.abs().max() > 0, f"{name} is dead"
        scale = oracle_state[name].grad.abs().max().item()
        assert_close(
            gradient,
            oracle_state[name].grad,
            rtol=10 * tolerance,
            atol=10 * tolerance * scale,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def matrix() -> list[BFTConfig]:
    """Every combination of the settings that change what is computed, but for those without any filter at all."""
    starts = list(itertools.product(("constant", "table", "mlp"), (False, True)))
    return [
        BFTConfig.unit(
            granularity=granularity,
            observation_units=units,
            prior_scale=prior_scale,
            effective_sample_size=sample_size,
            initial_precision=initial_precision,
            separate_key_precision=separate,
            kriging=kriging,
            gain=gain,
            propagate=propagate,
            differentiate_jacobian=differentiate,
        )
        for granularity in ("token", "channel")
        for units in ("relative", "absolute")
        for prior_scale in ("unit", "neighbours")
        for sample_size in ("probe", "exact")
        for initial_precision, separate in starts
        for kriging, gain in ((True, True), (True, False), (False, True))
        for propagate, differentiate in ((True, False), (True, True), (False, False))
    ]


def short_name(config: BFTConfig) -> str:
    """The settings that are not the default, as a test id."""
    default = vars(BFTConfig.unit())
    return "-".join(f"{name}={value}" for name, value in vars(config).items() if value != default[name]) or "default"


@pytest.mark.parametrize("config", matrix(), ids=short_name)
def test_matrix(config: BFTConfig) -> None:
    compare(config)


def _present(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


# In float64 transformers' eager attention makes NaN of a fully masked row, patched or not, so no left padding there.
@pytest.mark.parametrize(
    ("implementation", "padding"),
    [("sdpa", "none"), ("sdpa", "left"), ("sdpa", "right"), ("eager", "none"), ("eager", "right")],
)
def test_backends_and_padding(implementation: str, padding: str) -> None:
    for sample_size in ("probe", "exact"):
        compare(BFTConfig.unit(effective_sample_size=sample_size), implementation, padding)


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 2)])
@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_some_layers_only(layers: tuple[int, ...], granularity: str) -> None:
    compare(BFTConfig.unit(layers=layers, granularity=granularity))


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("sample_size", ["probe", "exact"])
@pytest.mark.parametrize("kriging", [True, False])
def test_token_reliability(granularity: str, sample_size: str, kriging: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    reliability = torch.rand(3, 11, generator=generator, dtype=torch.float64)
    reliability[:, ::3] = 0
    reliability[0, :4] = 0  # the first queries of this row see nothing reliable
    config = BFTConfig.unit(granularity=granularity, effective_sample_size=sample_size, kriging=kriging)
    for padding in ("none", "left"):
        compare(config, padding=padding, reliability=reliability)


def test_prior_degrees_of_freedom() -> None:
    compare(BFTConfig.unit(prior_degrees_of_freedom=3.5))


def test_tied_embeddings_and_biases() -> None:
    compare(BFTConfig.unit(), tie_word_embeddings=True)
    compare(BFTConfig.unit(observation_units="absolute"), attention_bias=True, mlp_bias=True)
