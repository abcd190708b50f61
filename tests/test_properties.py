"""Properties of the method on whole models that the oracle alone does not state."""

import pytest
import torch
from conftest import make_tiny_llama

import bft_hf
import bft_hf.attention
from bft_hf import BFTConfig


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_a_zero_output_projection_leaves_everything_finite(granularity: str) -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit(granularity=granularity, observation_units="absolute"))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[2].self_attn.o_proj.weight[3] = 0
    ids = torch.randint(3, 128, (2, 9))
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("initial_precision", ["table", "mlp"])
def test_initial_precision_varies_by_token(initial_precision: str) -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit(initial_precision=initial_precision))
    with torch.no_grad():
        for name, parameter in bft_hf.bft_parameters(model).items():
            if "initial" in name:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, 9, 5, 30]])
    with bft_hf.record(model) as trace:
        model(ids)
    first = trace.precision[0][0]
    assert torch.equal(first[0], first[2])
    assert first[[0, 1, 3]].unique().numel() == 3


def test_a_table_needs_ids_and_says_so() -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit(initial_precision="table"))
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 9]]))
    with pytest.raises(ValueError, match="pass input_ids"):
        model(inputs_embeds=embeddings)
    bft_hf.unpatch(model)
    bft_hf.patch(model, BFTConfig.unit(initial_precision="mlp"))
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(torch.tensor([[5, 9]])).logits)


def test_a_table_follows_the_vocabulary() -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit(initial_precision="table"))
    with torch.no_grad():
        model.model.layers[0].bft.log_initial_precision += torch.arange(128) / 100
    before = model.model.layers[0].bft.log_initial_precision.detach().clone()
    model.resize_token_embeddings(140)
    table = model.model.layers[0].bft.log_initial_precision
    assert torch.equal(table[:128], before)
    assert torch.equal(table[128:], before.mean().expand(12))
    assert model(torch.tensor([[139]])).logits.shape[-1] == 140
    model.resize_token_embeddings(100)
    assert torch.equal(model.model.layers[0].bft.log_initial_precision, before[:100])
    bft_hf.unpatch(model)
    model.resize_token_embeddings(128)


def test_patching_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    bft_hf.patch(make_tiny_llama(), BFTConfig.unit(initial_precision="mlp"))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_with_a_large_mean_move_the_gain_little(dtype: torch.dtype) -> None:
    """The expanded square loses all digits of RSS here, but an error e of RSS / m2 moves K by at most lam e / n."""
    model = bft_hf.patch(make_tiny_llama(attention_bias=True), BFTConfig.unit())
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        value = model.model.layers[0].self_attn.v_proj
        value.bias.fill_(30 * value(model.model.layers[0].input_layernorm(model.get_input_embeddings()(ids))).std())
    gains = {}
    for kind in (torch.float64, dtype):
        with torch.no_grad(), bft_hf.record(model.to(kind)) as trace:
            model(ids)
        gains[kind] = trace.gain[0].double()
        residual = trace.residual_variance[0]
        model.to(torch.float64)
    assert (residual == 0).any(), "the values are not far enough from zero for this test to mean anything"
    assert (gains[torch.float64] - gains[dtype]).abs().max() < 0.02
    assert gains[torch.float64].std() > 0.05


@pytest.mark.parametrize("initial_precision", ["constant", "mlp"])
def test_a_model_patched_on_the_meta_device_takes_its_tensors_later(initial_precision: str) -> None:
    config = BFTConfig.unit(initial_precision=initial_precision)
    model = bft_hf.patch(make_tiny_llama(), config)
    with torch.device("meta"):
        empty = bft_hf.patch(type(model)(model.config), config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.model.rotary_emb = model.model.rotary_emb  # its buffers are not in the state dict
    ids = torch.tensor([[5, 9, 30]])
    assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "config", [BFTConfig.unit(), BFTConfig.identity(), BFTConfig.unit(initial_process_noise=100.0)]
)
def test_key_biases_are_shifted_to_lie_near_zero(config: BFTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """log lam_bar itself is about -9 at the identity start, which would cost a bfloat16 key a digit of every score."""
    model = bft_hf.patch(make_tiny_llama(), config)
    biases = []
    widen = bft_hf.attention.KrigingCall.widen_key_value

    def seen(self: bft_hf.attention.KrigingCall, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        biases.append(self.key_bias)
        return widen(self, *args)

    monkeypatch.setattr(bft_hf.attention.KrigingCall, "widen_key_value", seen)
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(3)))
    assert all(bias.abs().max() < 2 for bias in biases)
    for bias, precision in zip(biases, trace.precision, strict=True):
        shift = bias - precision.log()
        assert (shift - shift.flatten()[0]).abs().max() < 1e-5
