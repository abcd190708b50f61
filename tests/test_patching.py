"""patch and unpatch: what they change, what they leave alone, and what they refuse."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

import bft_hf
from bft_hf import BFTConfig

HEADS = [
    LlamaModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaForQuestionAnswering,
]
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0


def answer(model: Any, **inputs: Any) -> torch.Tensor:
    """The first tensor a model gives back for a left-padded batch."""
    with torch.no_grad():
        output = model(**(inputs or {"input_ids": IDS, "attention_mask": MASK}))
    return output[0].clone()


def anatomy(model: nn.Module) -> dict[str, Any]:
    """All that unpatch has to give back, by identity where identity is promised."""
    return {
        "keys": list(model.state_dict()),
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "hooks": [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules() if not hasattr(module, "generation_config")],
        "config": model.config.to_dict(),
        "config class": type(model.config),
        "float32 patterns": set(model._keep_in_fp32_modules_strict or ()),
    }


def perturbed(model: Any) -> Any:
    """Move tau and Q off their start values."""
    with torch.no_grad():
        for i, parameter in enumerate(bft_hf.bft_parameters(model).values()):
            parameter += 0.7 - 0.4 * i
    return model


@pytest.mark.parametrize("model_class", HEADS)
def test_patch_changes_and_unpatch_restores(model_class: type, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(model_class=model_class)
    before, logits = anatomy(model), answer(model)
    assert bft_hf.patch(model) is model and bft_hf.get_config(model) == BFTConfig()
    during = anatomy(model)
    assert (answer(model) - logits).abs().max() > 1e-3
    assert set(during["parameters"]) > set(before["parameters"])
    names = [type(module).__name__ for module in model.modules() if type(module).__name__ != "BFTState"]
    assert names == [cls.__name__ for _, _, cls in before["modules"]]

    assert bft_hf.unpatch(model) is model and not bft_hf.is_patched(model)
    assert anatomy(model) == before
    assert torch.equal(answer(model), logits)


def test_classes_are_subclasses_of_what_they_were(tiny_llama: Callable[..., Any]) -> None:
    plain = tiny_llama()
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    for (name, ours), (_, theirs) in zip(
        [(n, m) for n, m in model.named_modules() if not n.endswith(".bft")], plain.named_modules(), strict=True
    ):
        assert isinstance(ours, type(theirs)), name
    layer = model.model.layers[0]
    assert type(layer) is not type(plain.model.layers[0])
    assert (
        type(layer).__qualname__ == "LlamaDecoderLayer"
        and type(layer).__module__ == type(plain.model.layers[0]).__module__
    )


def test_patch_three_times_unpatch_once(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    before, logits = anatomy(model), answer(model)
    for _ in range(3):
        bft_hf.patch(model, BFTConfig.unit())
    once = answer(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    assert torch.equal(answer(model), once) and not torch.equal(once, logits)
    bft_hf.unpatch(model)
    assert anatomy(model) == before and torch.equal(answer(model), logits)


def test_patching_again_keeps_what_was_learned(tiny_llama: Callable[..., Any]) -> None:
    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    logits = answer(model)
    bft_hf.patch(model, BFTConfig.unit())
    assert torch.equal(answer(model), logits)
    assert not torch.equal(answer(bft_hf.patch(bft_hf.unpatch(model), BFTConfig.unit())), logits)


def test_another_configuration_is_refused_and_names_unpatch(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    logits = answer(model)
    with pytest.raises(ValueError, match="unpatch"):
        bft_hf.patch(model, BFTConfig.unit(initial_process_noise=2.0))
    assert bft_hf.get_config(model) == BFTConfig.unit() and torch.equal(answer(model), logits)
    bft_hf.patch(bft_hf.unpatch(model), BFTConfig.unit(initial_process_noise=2.0))
    assert bft_hf.get_config(model) == BFTConfig.unit(initial_process_noise=2.0)
    assert not torch.equal(answer(model), logits)


def test_unpatch_of_a_plain_model_does_nothing(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    before, logits = anatomy(model), answer(model)
    assert bft_hf.unpatch(model) is model
    assert anatomy(model) == before and torch.equal(answer(model), logits)
    assert not bft_hf.is_patched(model) and bft_hf.get_config(model) is None


@pytest.mark.parametrize("share_config", [False, True])
def test_the_other_model_is_left_alone(share_config: bool, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    other = tiny_llama()
    model = LlamaForCausalLM(other.config).eval() if share_config else tiny_llama(seed=1)
    other.save_pretrained(tmp_path / "before")  # which itself notes the architecture in the configuration
    before, logits, model_before = anatomy(other), answer(other), anatomy(model)
    bft_hf.patch(model, BFTConfig.unit())
    assert anatomy(other) == before and torch.equal(answer(other), logits)
    assert not bft_hf.is_patched(other) and not hasattr(other.config, "bft_config")
    other.save_pretrained(tmp_path / "after")
    saved = (tmp_path / "after" / "config.json").read_text()
    assert saved == (tmp_path / "before" / "config.json").read_text() and "bft" not in saved
    bft_hf.patch(other, BFTConfig.unit(gain=False))
    assert bft_hf.get_config(model) == BFTConfig.unit()
    bft_hf.unpatch(model)
    assert anatomy(model) == model_before and bft_hf.is_patched(other)


def test_configuration_changes_made_while_patched_stay(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    model.config.use_cache = False
    assert bft_hf.unpatch(model).config.use_cache is False


def test_model_type_and_attention_name_stay_what_they_were(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(attn_implementation="eager"), BFTConfig.unit())
    assert model.config.model_type == "llama" and isinstance(model.config, LlamaConfig)
    assert model.config._attn_implementation == "eager" and model.config.hidden_act == "silu"
    for config in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert config.to_dict() == model.config.to_dict() and type(config) is type(model.config)


def test_positional_input_ids_and_inputs_embeds_run_the_filter(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    plain = answer(model)
    bft_hf.patch(model, BFTConfig.unit())
    logits = answer(model)
    assert (logits - plain).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(model(IDS, MASK).logits, logits)
        assert torch.equal(model.model(IDS, MASK)[0], model.model(input_ids=IDS, attention_mask=MASK)[0])
        assert torch.equal(model(IDS, attention_mask=MASK, return_dict=False)[0], logits)
        embeddings = model.get_input_embeddings()(IDS)
    assert torch.equal(answer(model, inputs_embeds=embeddings, attention_mask=MASK), logits)


class CountedCalls:
    """Counts calls of the attention functions by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama import modeling_llama

        self.counts = {"sdpa": 0, "eager": 0}
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        eager = modeling_llama.eager_attention_forward
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", self._counting("sdpa", sdpa))
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", self._counting("eager", eager))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize(("first", "second"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_a_later_change_of_backend_is_followed(
    first: str, second: str, tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(attn_implementation=first)
    plain = answer(model)
    bft_hf.patch(model, BFTConfig.unit())
    logits = answer(model)
    model.set_attn_implementation(second)
    calls = CountedCalls(monkeypatch)
    changed = answer(model)
    assert calls.counts == {first: 0, second: 3}
    assert bft_hf.is_patched(model) and model.config._attn_implementation == second
    kept = MASK.bool()
    torch.testing.assert_close(changed[kept], logits[kept], rtol=1e-5, atol=2e-5)
    assert (changed[kept] - plain[kept]).abs().max() > 1e-3
    bft_hf.unpatch(model)
    calls.counts = {"sdpa": 0, "eager": 0}
    answer(model)
    assert calls.counts == {first: 0, second: 3}


def test_eager_hands_out_the_kriging_weights(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(attn_implementation="eager")
    with torch.no_grad():
        plain = model(IDS, output_attentions=True).attentions
        ours = bft_hf.patch(perturbed(bft_hf.patch(model, BFTConfig.unit())), BFTConfig.unit())(
            IDS, output_attentions=True
        ).attentions
    assert len(ours) == 3 and all(weights.shape == (2, 4, 9, 9) for weights in ours)
    for weights in ours:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    torch.testing.assert_close(ours[0], plain[0])  # one tau for all: the first layer's kriging changes nothing
    assert (ours[1] - plain[1]).abs().max() > 1e-3


def test_hidden_states_have_the_plain_models_shapes(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 9, 32)] * 4


def test_model_without_a_supported_decoder_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ValueError, match=r"llama.*docs/families\.md") as error:
        bft_hf.patch(model, BFTConfig.unit())
    assert "GPT2LMHeadModel" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="llama"):
        bft_hf.patch(nn.Linear(2, 2), BFTConfig.unit())


def test_zero_layers_are_an_error(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(num_hidden_layers=0)
    with pytest.raises(ValueError, match=r"no (decoder )?layers?") as error:
        bft_hf.patch(model, BFTConfig.unit())
    assert "-1" not in str(error.value)
    assert not bft_hf.is_patched(model)


def test_layers_the_model_lacks_are_refused_and_nothing_is_changed(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    before = anatomy(model)
    with pytest.raises(ValueError, match=r"layers.*0 to 2"):
        bft_hf.patch(model, BFTConfig.unit(layers=(1, 3)))
    assert anatomy(model) == before


@pytest.mark.parametrize("path", ["", "self_attn", "mlp"])
def test_a_forward_of_its_own_is_refused_and_nothing_is_changed(path: str, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    module = model.model.layers[1].get_submodule(path)
    module.forward = module.forward
    before = anatomy(model)
    with pytest.raises(ValueError, match=r"layers\.1.*forward.*bft_hf\.patch") as error:
        bft_hf.patch(model, BFTConfig.unit())
    assert "\n" not in str(error.value)
    assert anatomy(model) == before and not bft_hf.is_patched(model)
    del module.forward
    assert bft_hf.is_patched(bft_hf.patch(model, BFTConfig.unit()))


def test_context_manager_patches_and_undoes(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    before, logits = anatomy(model), answer(model)
    with bft_hf.patched(model, BFTConfig.unit(initial_process_noise=2.0)) as inside:
        assert inside is model and bft_hf.get_config(model) == BFTConfig.unit(initial_process_noise=2.0)
        assert not torch.equal(answer(model), logits)
    assert anatomy(model) == before and torch.equal(answer(model), logits)


def test_context_manager_undoes_on_an_exception(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    before = anatomy(model)
    with pytest.raises(KeyError, match="inside"), bft_hf.patched(model, BFTConfig.unit()):
        raise KeyError("inside")
    assert anatomy(model) == before
    with pytest.raises(ValueError, match="layers"), bft_hf.patched(model, BFTConfig.unit(layers=(7,))):
        pass
    assert anatomy(model) == before


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
def test_copies_are_patched_and_stand_alone(copied: Callable[[Any], Any], tiny_llama: Callable[..., Any]) -> None:
    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_process_noise=2.0)))
    logits = answer(model)
    copy_of_model = copied(model)
    assert bft_hf.get_config(copy_of_model) == bft_hf.get_config(model)
    assert torch.equal(answer(copy_of_model), logits)
    assert [type(m) for m in copy_of_model.modules()] == [type(m) for m in model.modules()]
    assert not {id(p) for p in copy_of_model.parameters()} & {id(p) for p in model.parameters()}

    # The copy trains: its own tau, Q and weights move, the original's stay, and J follows the copy's own weights.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(bft_hf.param_groups(copy_of_model, 1e-2))
    copy_of_model.train()
    copy_of_model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    copy_of_model.eval()
    for name, parameter in copy_of_model.named_parameters():
        assert not torch.equal(parameter, state[name]), name
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(answer(model), logits)
    trained = answer(copy_of_model)
    assert not torch.equal(trained, logits)
    fresh = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_process_noise=2.0))
    fresh.load_state_dict(copy_of_model.state_dict())
    assert torch.equal(answer(fresh), trained)
    plain = answer(bft_hf.unpatch(copied(model)))
    assert torch.equal(plain, answer(tiny_llama())) and bft_hf.is_patched(model)


def run_in_worker(model: Any, ids: torch.Tensor, queue: Any) -> None:
    """Target of the spawned process: a fresh interpreter that has never called patch."""
    torch.set_num_threads(1)
    with torch.no_grad(), bft_hf.record(model) as trace:
        logits = model(ids).logits
    queue.put((logits.numpy(), [gain.numpy() for gain in trace.gain]))


def test_a_spawned_worker_runs_the_filter(tiny_llama: Callable[..., Any]) -> None:
    import torch.multiprocessing as multiprocessing

    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=run_in_worker, args=(model, IDS, queue))
    worker.start()
    while queue.empty() and worker.is_alive():
        worker.join(0.1)
    logits, gains = queue.get(timeout=1)
    worker.join(10)
    assert torch.equal(torch.from_numpy(logits), answer(model, input_ids=IDS))
    assert len(gains) == 3 and (gains[0] < 0.99).any()


def test_unpickling_in_a_process_that_never_patched_runs_the_filter(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    import subprocess
    import sys

    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    torch.save(model, tmp_path / "model.pt")
    torch.save((IDS, answer(model, input_ids=IDS)), tmp_path / "expected.pt")
    script = """
import sys, torch
torch.set_num_threads(1)
model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
ids, expected = torch.load(sys.argv[1] + "/expected.pt")
with torch.no_grad():
    assert torch.equal(model(ids).logits, expected), (model(ids).logits - expected).abs().max()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_identity_start_is_near_the_plain_model_and_nearer_as_q_grows(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    kept = MASK.bool()
    plain = answer(model)[kept]
    distances = []
    for noise in (1e2, 1e3, 1e4, 1e5):
        with bft_hf.patched(model, BFTConfig.identity(initial_precision_value=1 / noise, initial_process_noise=noise)):
            distances.append((answer(model)[kept] - plain).abs().max().item() / plain.abs().max().item())
    assert 0 < distances[2] < 5e-3
    for nearer, farther in zip(distances[1:], distances, strict=False):
        assert nearer < 0.2 * farther
    with bft_hf.patched(model, BFTConfig.identity()):
        identity = (answer(model)[kept] - plain).abs().max().item()
    with bft_hf.patched(model):
        default = (answer(model)[kept] - plain).abs().max().item()
    with bft_hf.patched(model, BFTConfig.unit()):
        unit = (answer(model)[kept] - plain).abs().max().item()
    assert unit > 10 * default > 100 * identity


def test_kriging_by_a_constant_precision_changes_nothing(tiny_llama: Callable[..., Any]) -> None:
    """Property 1: without propagation and gain every lam_bar is a constant in the first layer, whatever tau is."""
    model = tiny_llama(num_hidden_layers=1)
    kept = MASK.bool()
    for tau in (1e-6, 1.0, 1e6):
        one = answer(bft_hf.patch(model, BFTConfig.unit(initial_precision_value=tau)))
        bft_hf.unpatch(model)
        without = answer(bft_hf.patch(model, BFTConfig.unit(initial_precision_value=tau, kriging=False)))
        bft_hf.unpatch(model)
        torch.testing.assert_close(one[kept], without[kept], rtol=1e-5, atol=1e-5)
    deep = tiny_llama()
    with bft_hf.patched(deep, BFTConfig.unit()):
        kriging = answer(deep)
    with bft_hf.patched(deep, BFTConfig.unit(kriging=False)):
        assert (answer(deep)[kept] - kriging[kept]).abs().max() > 1e-3


def test_every_parameter_gets_a_gradient(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit()).train()
    model(IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0 and parameter.grad.isfinite().all(), name


def test_extra_parameters_are_few_on_smollm2s_shape() -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    before = sum(parameter.numel() for parameter in model.parameters())
    bft_hf.patch(model, BFTConfig.unit())
    ours = bft_hf.bft_parameters(model)
    assert all(parameter.is_meta and parameter.shape == (1,) for parameter in ours.values())
    assert len(ours) == 30  # tau, and Q of every layer but the last
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    assert added == 30 and added < 1e-3 * before


def test_param_groups_hold_every_trainable_parameter_once(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    model.model.embed_tokens.weight.requires_grad_(False)
    groups = {group["name"]: group for group in bft_hf.param_groups(model, 2e-5, 3e-2, weight_decay=0.1)}
    held = [id(parameter) for group in groups.values() for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert {id(p) for p in groups["bft"]["params"]} == {id(p) for p in bft_hf.bft_parameters(model).values()}
    assert (groups["bft"]["lr"], groups["bft"]["weight_decay"]) == (3e-2, 0.0)
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (2e-5, 0.1)
    assert all(parameter.ndim == 1 for parameter in groups["biases_and_norms"]["params"])
    assert groups["biases_and_norms"]["weight_decay"] == 0.0


def test_a_layer_alone_is_refused(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    hidden = torch.randn(1, 4, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(RuntimeError, match="call the model"):
        model.model.layers[1](hidden, position_embeddings=rotary)


def test_packed_documents_give_what_they_give_apart(tiny_llama: Callable[..., Any]) -> None:
    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    first, second = IDS[:1, :5], IDS[1:, 4:]
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(5)])[None]
    apart = torch.cat([answer(model, input_ids=first), answer(model, input_ids=second)], dim=1)
    together = answer(model, input_ids=packed, position_ids=positions, use_cache=False)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=2e-5)
    assert (answer(model, input_ids=packed, use_cache=False) - apart).abs().max() > 1e-3


def test_left_padded_row_equals_the_row_alone(tiny_llama: Callable[..., Any]) -> None:
    model = perturbed(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    positions = (MASK.cumsum(-1) - 1).clamp_min(0)
    padded = answer(model, input_ids=IDS, attention_mask=MASK, position_ids=positions)
    alone = answer(model, input_ids=IDS[1:, 4:])
    torch.testing.assert_close(padded[1:, 4:], alone, rtol=1e-5, atol=2e-5)


class Shapes(TorchDispatchMode):
    """Collects the output shapes and names of all operations, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.shapes.add((func.name(), tuple(tensor.shape)))
        return output


TOKENS, PAST = 61, 46  # their sum, 107, and both are no dimension of the model


@pytest.mark.parametrize("case", ["unmasked", "left padding", "cached"])
def test_sdpa_never_runs_the_math_kernel_and_nothing_of_ours_is_tokens_by_keys(
    case: str, tiny_llama: Callable[..., Any]
) -> None:
    tokens = torch.randint(3, 128, (2, TOKENS), generator=torch.Generator().manual_seed(4))
    keys = TOKENS + PAST if case == "cached" else TOKENS

    def run(model: Any) -> tuple[set[tuple[int, ...]], set[str]]:
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if case == "left padding":
            inputs["attention_mask"] = torch.ones_like(tokens)
            inputs["attention_mask"][0, :7] = 0
        if case == "cached":
            with torch.no_grad():
                past = model(tokens[:, :PAST], use_cache=True)
            inputs |= {"use_cache": True, "past_key_values": past.past_key_values}
        with Shapes() as seen, profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(**inputs).logits.square().mean().backward()
        quadratic = {s for _, s in seen.shapes if TOKENS in s and keys in s and (keys != TOKENS or s.count(keys) > 1)}
        return quadratic, seen.names | {event.key for event in profiler.key_averages()}

    plain_shapes, plain_names = run(tiny_llama())
    shapes, names = run(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    assert any("_scaled_dot_product_flash_attention_for_cpu" in name for name in names)
    assert any("flash_attention_for_cpu_backward" in name for name in names)
    assert not any("_scaled_dot_product_attention_math" in name for name in names | plain_names)
    assert shapes <= plain_shapes
    # The same eyes see what eager attention forms, and what two widths do.
    eager_shapes, _ = run(bft_hf.patch(tiny_llama(attn_implementation="eager"), BFTConfig.unit()))
    assert (2, 4, TOKENS, keys) in eager_shapes


def test_the_profiler_would_see_the_math_kernel() -> None:
    query, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 16)
    with Shapes() as seen, profile(activities=[ProfilerActivity.CPU]) as profiler:
        nn.functional.scaled_dot_product_attention(query, query, value)
    names = seen.names | {event.key for event in profiler.key_averages()}
    assert any("_scaled_dot_product_attention_math" in name for name in names)


@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_exact_sample_sizes_differ_from_probed_ones_only_by_the_probe(
    sample_size: str, tiny_llama: Callable[..., Any]
) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(effective_sample_size=sample_size))
    with bft_hf.record(model) as trace:
        answer(model, input_ids=IDS)
    for n in trace.effective_sample_size:
        assert (n >= 1 - 1e-5).all() and (n <= torch.arange(1, 10) + 1e-4).all()
        torch.testing.assert_close(n[..., 0], torch.ones(2, 4))
    assert trace.effective_sample_size[0][..., -1].mean() > 1.2
