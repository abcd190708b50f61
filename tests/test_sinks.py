"""Sinks, n, gain and gates by context length: against weights recomputed, prefixes run alone, and by the command."""

import json
import math
import re

import pytest
import torch
from test_inspect import recomputed_weights
from test_questions import byte_tokenizer
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

import bft_hf
from bft_hf.recipes.inspection.cli import main
from bft_hf.recipes.inspection.gates import FORMS, add_gates, gate_values
from bft_hf.recipes.inspection.profile import (
    SINK,
    Profile,
    by_length,
    correlation,
    per_doubling,
    profile,
    t_interval,
)


def ids(tokens, seed=0):
    return torch.randint(3, 128, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("patched", [False, True])
def test_profile_is_that_of_the_weights(tiny_llama, patched):
    model = tiny_llama()
    rows = [ids(24, seed) for seed in range(2)]
    reference = bft_hf.patch(
        tiny_llama(), bft_hf.BFTConfig.unit()
    )  # its plain weights are a plain model's only in the first layer
    if patched:
        bft_hf.patch(model, bft_hf.BFTConfig.unit())
    found = profile(model, rows)
    assert found.first_token.shape == (2, 3, 4, 24)
    assert (found.gain is None) == (not patched) and found.gate is None
    for place, row in enumerate(rows):
        for layer, (alpha, kriging) in recomputed_weights(reference, row[None]).items():
            if not patched and layer:
                break
            weights = kriging if patched else alpha
            torch.testing.assert_close(found.first_token[place, layer].double(), weights[..., 0], atol=2e-6, rtol=1e-4)
            torch.testing.assert_close(
                found.sample_size[place, layer].double(), 1 / weights.square().sum(-1), atol=1e-4, rtol=1e-4
            )
    if patched:
        with torch.no_grad(), bft_hf.record(model) as trace:
            model(rows[1][None])
        torch.testing.assert_close(found.gain[1], torch.stack(trace.gain)[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_prefix_by_itself_gives_what_it_gives_within(tiny_llama, form):
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    if form:
        add_gates(model, form, std=1.0)
    whole, alone = (profile(model, [ids(40)[:length]]) for length in (40, 16))
    rows = by_length(whole, [16, 40])
    for name, value in by_length(alone, [16])[0].items():
        assert rows[0][name] == pytest.approx(value, rel=1e-4), name
    assert rows[0]["sample_size"] != pytest.approx(rows[1]["sample_size"], rel=0.05)
    assert ("gate" in rows[0]) == bool(form)


def test_by_length_counts_and_averages():
    first = torch.zeros(1, 1, 2, 8)
    first[..., 0] = 1  # the first token sees itself alone, and does not count
    first[0, 0, 0, 1:4] = SINK + 0.1
    first[0, 0, 1, 1:8] = 0.1
    size = torch.arange(1.0, 9.0).expand(1, 1, 2, 8)
    gain = torch.linspace(0, 0.7, 8).view(1, 1, 8)
    rows = by_length(Profile(first, size, gain, None), [4, 8])
    assert [row["length"] for row in rows] == [4, 8]
    assert [row["sink_rate"] for row in rows] == [[0.5], [0.0]]
    assert rows[0]["first_token_mass"] == pytest.approx([(0.4 + 0.1) / 2])
    assert rows[1]["first_token_mass"] == pytest.approx([(3 * 0.4 / 7 + 0.1) / 2])
    assert rows[0]["sample_size"] == [3.5] and rows[1]["sample_size"] == [6.5]
    assert rows[1]["gain"] == pytest.approx([0.55]) and "gate" not in rows[0]


def test_per_doubling_is_a_slope_and_correlation_is_pearsons():
    rows = [{"length": 2**step, "gain": [0.1 * step, 5.0 - step]} for step in range(4, 8)]
    assert per_doubling(rows, "gain") == pytest.approx([0.1, -1.0])
    size = torch.rand(2, 3, 4, 30) + 1
    follows = size.mean(2).log()
    found = Profile(torch.zeros(2, 3, 4, 30), size, 2 * follows + 1, -follows)
    assert correlation(found, "gain") == pytest.approx([1.0, 1.0])
    assert correlation(found, "gate") == pytest.approx([-1.0, -1.0])
    noise = Profile(found.first_token, size, torch.rand(2, 3, 30), None)
    one = torch.stack([torch.corrcoef(torch.stack([noise.gain[0, n], follows[0, n]]))[0, 1] for n in range(3)])
    assert correlation(noise, "gain")[0] == pytest.approx(float(one.mean()), abs=1e-5)
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2.0, 2.0 - 4.3027 / math.sqrt(3), 2.0 + 4.3027 / math.sqrt(3)), rel=1e-4
    )
    assert t_interval([4.0]) == (4.0, 4.0, 4.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("patched", [False, True])
def test_gates_multiply_the_output_of_attention(tiny_llama, form, patched):
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit()) if patched else tiny_llama()
    row = ids(12)[None]
    plain = model(row).logits
    seen, inputs, outputs = {}, {}, {}
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda _, __, kwargs: inputs.update(x=kwargs["hidden_states"]), with_kwargs=True
    )
    attention.o_proj.register_forward_pre_hook(lambda _, args: outputs.update(before=args[0]))
    add_gates(model, form, std=1.0)
    attention.o_proj.register_forward_pre_hook(lambda _, args: outputs.update(after=args[0]))
    with gate_values(model, lambda layer, value: seen.update({layer: value})) as count:
        gated = model(row).logits
    assert count == 3 and sorted(seen) == [0, 1, 2]
    assert not torch.allclose(gated, plain, atol=1e-2)
    torch.testing.assert_close(seen[1], torch.sigmoid(inputs["x"] @ attention.gate.projection.weight.T))
    assert seen[1].shape == (1, 12, 4 if form == "head" else 32)
    by_channel = seen[1].unsqueeze(-1).expand(-1, -1, -1, 32 // seen[1].shape[-1]).flatten(2)
    torch.testing.assert_close(outputs["after"], outputs["before"] * by_channel)
    # A gate of one is no gate: undone, the ungated output is left.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.gate.forward = lambda x, size=seen[1].shape[-1]: x.new_ones(*x.shape[:-1], size)
    torch.testing.assert_close(model(row).logits, plain)


@pytest.mark.parametrize("form", FORMS)
def test_gates_are_trained(tiny_llama, form):
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    add_gates(model, form)
    row = ids(12)[None]
    model(row, labels=row).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.gate.projection.weight.grad.abs().max() > 0


def test_gates_of_qwen3_next():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                layer_types=["full_attention"] * 2,
            )
        ).eval()
    seen, outputs = {}, {}
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, args: outputs.update(gated=args[0]))
    with torch.no_grad():
        attention.q_proj.weight.mul_(20)
        with gate_values(model, lambda layer, value: seen.update({layer: value})) as count:
            model(ids(10)[None], use_cache=False)
        gate, gated = seen[0], outputs["gated"]
        attention.q_proj.weight.view(4, 2, 8, 32)[:, 1] = 0  # every gate a half, and the queries as they were
        model(ids(10)[None], use_cache=False)
    assert count == 2 and gate.std() > 0.1
    torch.testing.assert_close(gated, 2 * outputs["gated"] * gate)
    found = profile(model, [ids(10)])
    assert found.gain is None and found.gate.shape == (1, 2, 10)


def test_gates_need_an_attention_to_stand_on(tiny_llama):
    with pytest.raises(ValueError, match="allowed is one of head, element"):
        add_gates(tiny_llama(), "layer")
    with pytest.raises(ValueError, match="no self_attn"):
        add_gates(torch.nn.Linear(2, 2), "head")


# The command


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return str(path)


def test_command_measures_plain_and_patched(model_dir, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["sinks", str(model_dir), "--file", text, "--samples", "2", "--output_dir", str(out)]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["sinks.json", "sinks.svg"]
    result = json.loads((out / "sinks.json").read_text())
    assert [row["length"] for row in result["by_length"]["plain"]] == [64, 128]
    assert "gain" not in result["by_length"]["plain"][0] and "gate" not in result["by_length"]["patched"][0]
    last = result["by_length"]["patched"][-1]
    assert f"{sum(last['gain']) / 2:.3g}" in said and "per doubling" in said
    model = bft_hf.patch(AutoModelForCausalLM.from_pretrained(model_dir), bft_hf.BFTConfig.unit())
    tokens = byte_tokenizer()("The quick brown fox jumps over the lazy dog. " * 20 + "\n")["input_ids"]
    assert tokens[0] == 1
    starts = torch.randint(0, len(tokens) - 1 - 127 + 1, (2,), generator=torch.Generator().manual_seed(42)).tolist()
    row = torch.tensor([1, *tokens[1 + starts[0] : 1 + starts[0] + 127]])
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(row[None])
    assert last["gain"][0] == pytest.approx(float(torch.stack(trace.gain)[:, 0, 64:].mean()), rel=1e-4)
    assert re.search(r"Correlation of the gain with log n over a layer's tokens: -?[.\d]+ \[", said)
    stretches = [row, torch.tensor([1, *tokens[1 + starts[1] : 1 + starts[1] + 127]])]
    expected = correlation(profile(model, stretches), "gain")
    assert result["correlation"] == {"plain": {}, "patched": {"gain": pytest.approx(expected, rel=1e-3)}}
    assert result["per_doubling"]["patched"]["gain"] == pytest.approx(
        [late - early for early, late in zip(result["by_length"]["patched"][0]["gain"], last["gain"], strict=True)]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "256"], "--lengths 256: the model's positions allow 128"),
        (["--lengths", "1"], "--lengths must be different numbers from 2"),
        (["--lengths", "8", "8"], "--lengths must be different numbers"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--split", "train"], "--split is of --dataset"),
        (["--process_noise", "-1"], "--process_noise must be a positive number"),
        (["--dataset", "demo"], "not allowed with argument --file"),
    ],
)
def test_what_is_refused_is_refused_in_a_line(model_dir, text, tmp_path, capsys, words, message):
    assert main(["sinks", str(model_dir), "--file", text, "--output_dir", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_short_text_is_refused(model_dir, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")
    words = ["sinks", str(model_dir), "--file", str(tmp_path / "short.txt"), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2
    assert "6 tokens are too few, 64 are needed" in capsys.readouterr().err
    assert main([*words, "--lengths", "16"]) == 2
    assert "--lengths 16: the text has 6 tokens" in capsys.readouterr().err
