"""calibrate(): the mean gain is folded back, layer after layer, travels with the model and leaves no trace behind."""

import pytest
import torch
from conftest import make_tiny_llama
from transformers import AutoModelForCausalLM

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(0))


def scaled_gains(model: torch.nn.Module, batch: dict[str, torch.Tensor], kept: torch.Tensor) -> list[float]:
    scales = bft_hf.get_config(model).gain_scale
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(**batch)
    return [float((gain[kept] * scale).mean()) for gain, scale in zip(trace.gain, scales, strict=True)]


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("layers", [None, (1, 2)])
def test_every_layers_mean_gain_becomes_one_on_the_batch_it_was_measured_on(granularity, layers):
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit(granularity=granularity, layers=layers))
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(IDS)
    assert max(float(gain.mean()) for gain in trace.gain) < 0.95
    scales = bft_hf.calibrate(model, [{"input_ids": IDS}])
    assert scales == bft_hf.get_config(model).gain_scale
    assert len(scales) == len(trace.gain)
    means = scaled_gains(model, {"input_ids": IDS}, torch.ones_like(IDS, dtype=torch.bool))
    torch.testing.assert_close(torch.tensor(means), torch.ones(len(means)), rtol=1e-5, atol=1e-5)


def test_the_scaled_model_is_one_with_a_scaled_output_projection():
    model = bft_hf.patch(make_tiny_llama(dtype=torch.float64), BFTConfig.unit())
    scales = bft_hf.calibrate(model, [{"input_ids": IDS}])
    folded = make_tiny_llama(dtype=torch.float64)
    for layer, scale in zip(folded.model.layers, scales, strict=True):
        layer.self_attn.o_proj.weight.data.mul_(scale)
    bft_hf.patch(folded, BFTConfig.unit())
    torch.testing.assert_close(model(IDS).logits, folded(IDS).logits, rtol=1e-9, atol=1e-9)


def test_padding_does_not_count():
    padded = torch.cat([torch.zeros(4, 9, dtype=torch.long), IDS], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 9).long().expand(4, -1)
    alone, beside = (bft_hf.patch(make_tiny_llama(), BFTConfig.unit()) for _ in range(2))
    expected = bft_hf.calibrate(alone, [{"input_ids": IDS}])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = bft_hf.calibrate(beside, [{"input_ids": padded, "attention_mask": mask, "position_ids": positions}])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_with_labels_the_tokens_that_predict_one_count():
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    labels = IDS.clone()
    labels[:, :20] = -100
    bft_hf.calibrate(model, [{"input_ids": IDS, "labels": labels}])
    kept = torch.zeros_like(IDS, dtype=torch.bool)
    kept[:, 19:-1] = True
    torch.testing.assert_close(
        torch.tensor(scaled_gains(model, {"input_ids": IDS}, kept)), torch.ones(3), rtol=1e-5, atol=0
    )
    everywhere = scaled_gains(model, {"input_ids": IDS}, torch.ones_like(kept))
    assert max(abs(mean - 1) for mean in everywhere) > 0.01
    with pytest.raises(ValueError, match="labels of -100 alone"):
        bft_hf.calibrate(
            bft_hf.patch(make_tiny_llama(), BFTConfig.unit()),
            [{"input_ids": IDS, "labels": torch.full_like(IDS, -100)}],
        )


def test_batches_are_averaged_and_modes_left_alone():
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit()).train()
    batches = ({"input_ids": ids[None]} for ids in IDS)
    bft_hf.calibrate(model, batches)
    assert all(module.training for module in model.modules())
    means = scaled_gains(model.eval(), {"input_ids": IDS}, torch.ones_like(IDS, dtype=torch.bool))
    # The first rows saw the layers before them scaled by a mean of fewer rows: close, not equal.
    torch.testing.assert_close(torch.tensor(means), torch.ones(3), rtol=0.02, atol=0.02)


def test_scales_come_back_from_disk_and_unpatch_is_exact(tmp_path):
    plain = make_tiny_llama()
    before = plain(IDS).logits
    model = bft_hf.patch(plain, BFTConfig.unit())
    unit = model(IDS).logits
    bft_hf.calibrate(model, [{"input_ids": IDS}])
    calibrated = model(IDS).logits
    assert (calibrated - unit).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bft_hf.get_config(loaded) == bft_hf.get_config(model)
    assert torch.equal(loaded(IDS).logits, calibrated)
    assert torch.equal(bft_hf.unpatch(model)(IDS).logits, before)
    again = bft_hf.patch(model, bft_hf.get_config(loaded))
    assert torch.equal(again(IDS).logits, calibrated)


def test_what_cannot_be_calibrated_is_refused_and_left_as_it_was():
    batch = [{"input_ids": IDS}]
    with pytest.raises(ValueError, match="not patched"):
        bft_hf.calibrate(make_tiny_llama(), batch)
    with pytest.raises(ValueError, match="switched off"):
        bft_hf.calibrate(bft_hf.patch(make_tiny_llama(), BFTConfig.unit(gain=False)), batch)
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    before = model(IDS).logits
    with pytest.raises(ValueError, match="no batch"):
        bft_hf.calibrate(model, [])
    with pytest.raises(IndexError):
        bft_hf.calibrate(model, [{"input_ids": IDS}, {"input_ids": torch.tensor([[1000]])}])
    assert bft_hf.get_config(model) == BFTConfig.unit()
    assert torch.equal(model(IDS).logits, before)
    bft_hf.calibrate(model, batch)
    with pytest.raises(ValueError, match="calibrated already"):
        bft_hf.calibrate(model, batch)
    with pytest.raises(ValueError, match="2 factors for 3 patched layers"):
        bft_hf.patch(make_tiny_llama(), BFTConfig.unit(gain_scale=(1.0, 1.0)))
