"""What has to hold of the recommenders: the method's promises, padding, patching, saving, training, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tiny_recommenders import KINDS, NUM_ITEMS, all_kinds, batch, make
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments
from transformers.utils import PushToHubMixin

import bft_hf
from bft_hf import BFTConfig
from bft_hf.callbacks import BFTCallback
from bft_hf.cards import GENERATED
from bft_hf.rec import HSTUConfig, SASRecConfig, SASRecForNextItem, filter_defaults
from bft_hf.rec.step import inverse_std

granularities = pytest.mark.parametrize("granularity", ["token", "channel"])
all_units = pytest.mark.parametrize("units", ["relative", "absolute"])


def hidden(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def distance(model: Any, config: BFTConfig, inputs: dict[str, Tensor]) -> float:
    """How far the filter takes the hidden states of real items, as a share of their size."""
    kept = inputs["attention_mask"].bool()
    plain = hidden(model, **inputs)[kept]
    with bft_hf.patched(model, config):
        return float((hidden(model, **inputs)[kept] - plain).abs().max() / plain.abs().max())


# --- The method's promises ---------------------------------------------------------------------------------------------


@all_kinds
@granularities
@all_units
def test_identity_start_is_the_plain_model(kind: str, granularity: str, units: str) -> None:
    model, inputs = make(kind), batch(kind)
    fields = {"granularity": granularity, "observation_units": units, "effective_sample_size": "exact"}
    near = distance(model, BFTConfig.identity(**fields), inputs)
    nearer = distance(model, BFTConfig.unit(**fields, initial_precision_value=1e-7, initial_process_noise=1e7), inputs)
    unit = distance(model, BFTConfig.unit(**fields), inputs)
    assert near < (1e-2 if units == "relative" else 1e-1)
    assert nearer < 2e-2 * near
    assert unit > 2e-2 and unit > 3 * near


@all_kinds
@pytest.mark.parametrize("tau", [1e-3, 1.0, 50.0])
def test_equal_precisions_weigh_nothing(kind: str, tau: float) -> None:
    model, inputs = make(kind, num_hidden_layers=1), batch(kind)
    assert distance(model, filter_defaults(initial_precision_value=tau, gain=False), inputs) < 1e-12
    with torch.no_grad():
        plain = hidden(model, **inputs)
        bft_hf.patch(model, filter_defaults(initial_precision_value=tau, gain=False))
        model.layers[0].bft.log_initial_precision[int(inputs["input_ids"][0, 1])] += 1
        assert (hidden(model, **inputs) - plain)[0, 2:].abs().max() > 1e-4


@all_kinds
def test_no_precision_is_no_weight(kind: str) -> None:
    # What is left of HSTU's weights is larger than without the key, by n / (n - 1): its norm takes that away.
    model, inputs = make(kind, num_hidden_layers=1, layer_norm_eps=1e-14), batch(kind, "none")
    item = int(inputs["input_ids"][0, 1])
    others = inputs["input_ids"] != item
    position_ids = torch.arange(7).expand(3, 7)
    masked = hidden(model, input_ids=inputs["input_ids"], attention_mask=others.long(), position_ids=position_ids)
    whole = hidden(model, **inputs, position_ids=position_ids)
    bft_hf.patch(model, filter_defaults(gain=False))
    with torch.no_grad():
        model.layers[0].bft.log_initial_precision[item] = -60.0
    unweighted = hidden(model, **inputs, position_ids=position_ids)
    assert_close(unweighted[others], masked[others], rtol=1e-9, atol=1e-9)
    assert (whole - masked)[others].abs().max() > 1e-3


@all_kinds
@granularities
@all_units
def test_gain_and_precision_stay_in_their_ranges(kind: str, granularity: str, units: str) -> None:
    config = filter_defaults(granularity=granularity, observation_units=units, initial_process_noise=0.7)
    model, inputs = make(kind, config), batch(kind)
    kept = inputs["attention_mask"].bool()
    with bft_hf.record(model) as trace:
        hidden(model, **inputs)
    for gain, lam, observed in zip(trace.gain, trace.precision, trace.observation_precision, strict=True):
        assert_close(gain, observed / (lam + observed))
        assert (gain[kept] > 0).all() and (gain <= 1).all()
    for layer, lam in zip(model.layers[:-1], trace.precision[1:], strict=True):
        assert (lam[kept] * layer.bft.process_noise("", lam.dtype) <= 1 + 1e-12).all()
    for sample_size, residual in zip(trace.effective_sample_size, trace.residual_variance, strict=True):
        assert (sample_size >= 1 - 1e-12).all() and (sample_size <= 7 + 1e-12).all()
        assert (residual >= 0).all()
        if units == "relative":
            assert (residual <= 1).all()
    assert trace.layers == [0, 1, 2]
    assert trace.final_precision.shape == ((3, 7, 8) if granularity == "channel" else (3, 7))
    assert trace.effective_sample_size[0].shape == (3, 2, 7)


@all_kinds
@granularities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_is_finite(kind: str, granularity: str, dtype: torch.dtype) -> None:
    """Single items, rows without any, values that are all alike, projections of zeros; forward and backward."""
    model = make(kind, filter_defaults(granularity=granularity), dtype)
    assert all(parameter.dtype == torch.float32 for parameter in bft_hf.bft_parameters(model).values())
    ids = torch.tensor([[3, 3, 3, 3], [0, 0, 0, 5], [5, 0, 0, 0], [0, 0, 0, 0]])
    for zeroed in ((), ("o_proj",), ("v_proj", "uvqk_proj")):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in zeroed):
                    parameter.zero_()
        with bft_hf.record(model) as trace:
            output = model(ids, labels=torch.where(ids > 0, ids, -100))
        for values in (trace.precision, trace.observation_precision, trace.gain, trace.updated_precision):
            assert all(value.isfinite().all() and value.dtype == torch.float32 for value in values)
        assert output.last_hidden_state.isfinite().all() and output.last_hidden_state.dtype == dtype
        output.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert (trace.gain[0][3] == 0).all() or kind == "bert4rec"
    assert (trace.observation_precision[0][3] == 0).all()


@all_kinds
def test_the_filter_is_small(kind: str) -> None:
    model = make(kind, filter_defaults(initial_precision="constant"), hidden_size=64, num_items=1000)
    new = sum(parameter.numel() for parameter in bft_hf.bft_parameters(model).values())
    assert new == 1 + 2 * 64
    assert new < 2e-3 * model.num_parameters()
    table = make(kind, filter_defaults(), hidden_size=64, num_items=1000)
    assert table.num_parameters() - model.num_parameters() == table.config.vocab_size - 1


@all_kinds
def test_parameters_without_influence_are_not_created(kind: str) -> None:
    names = lambda **fields: set(bft_hf.bft_parameters(make(kind, filter_defaults(**fields))))  # noqa: E731
    assert names(kriging=False, gain=False) == set()
    assert names(propagate=False) == {"layers.0.bft.log_initial_precision"}
    assert "layers.1.bft.log_key_process_noise" in names(separate_key_precision=True)
    assert "layers.2.bft.log_process_noise" not in names()


@all_kinds
def test_gain_scale(kind: str) -> None:
    inputs = batch(kind)
    plain, scaled = make(kind, filter_defaults()), make(kind, filter_defaults(gain_scale=(1.5, 1.0, 1.0)))
    with bft_hf.record(plain) as before, bft_hf.record(scaled) as after:
        first, second = hidden(plain, **inputs), hidden(scaled, **inputs)
    assert_close(before.gain[0], after.gain[0])
    assert (first - second).abs().max() > 1e-3


# --- Padding, dropout, scores ------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("sample_size", ["exact", "probe"])
@pytest.mark.parametrize("positions", ["from_start", "from_end"])
def test_a_padded_row_is_the_row_alone(kind: str, sample_size: str, positions: str) -> None:
    config = filter_defaults(effective_sample_size=sample_size)
    row = torch.tensor([[4, 9, 2, 7]])
    other = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    for bft in (None, config):
        model = make(kind, bft, positions=positions)
        alone = hidden(model, input_ids=row)
        for pads in ((5, 0), (0, 5), (0, 90)):
            ids = torch.nn.functional.pad(row, pads)
            among = torch.cat([ids, torch.nn.functional.pad(other, (0, ids.shape[1] - 9))])
            padded = hidden(model, input_ids=among)[:1, pads[0] : pads[0] + 4]
            assert_close(padded, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
@pytest.mark.parametrize("bft", [None, filter_defaults(), filter_defaults(granularity="token")])
def test_the_past_does_not_see_the_future(kind: str, bft: BFTConfig | None) -> None:
    model = make(kind, bft)
    first, second = torch.tensor([[4, 9, 2, 7, 3]]), torch.tensor([[4, 9, 2, 1, 11]])
    assert_close(hidden(model, input_ids=first)[:, :3], hidden(model, input_ids=second)[:, :3], rtol=0, atol=1e-12)


def test_cloze_sees_both_sides() -> None:
    model = make("bert4rec", filter_defaults())
    first, second = torch.tensor([[4, NUM_ITEMS + 1, 2]]), torch.tensor([[4, NUM_ITEMS + 1, 3]])
    assert (hidden(model, input_ids=first) - hidden(model, input_ids=second))[0, 1].abs().max() > 1e-3


@all_kinds
def test_dropout_leaves_the_statistics_alone(kind: str) -> None:
    model, inputs = make(kind, filter_defaults(), dropout=0.5), batch(kind)
    with bft_hf.record(model) as still:
        quiet = hidden(model, **inputs)
    dropout = model.layers[0].attention_dropout if kind == "hstu" else model.layers[0].attention.dropout
    dropout.p = 0.5
    dropout.train()
    (model.layers[0] if kind == "hstu" else model.layers[0].attention).training = True
    with bft_hf.record(model) as shaken:
        loud = hidden(model, **inputs)
    assert (quiet - loud).abs().max() > 1e-3
    for name in ("effective_sample_size", "residual_variance", "observation_precision", "gain"):
        before, after = getattr(still, name), getattr(shaken, name)
        # HSTU's norm stands behind the dropout, but its scale belongs to the estimate.
        assert_close(before[0], after[0], rtol=0, atol=0)
        assert (before[1] - after[1]).abs().max() > 0


@all_kinds
def test_scores_and_loss(kind: str) -> None:
    model, inputs = make(kind), batch(kind)
    labels = torch.full((3, 7), -100)
    labels[0, 2], labels[1, 5] = 4, NUM_ITEMS
    output = model(**inputs, labels=labels, return_logits=True)
    assert model(**inputs).logits is None
    scores = output.last_hidden_state @ model.item_embeddings().T
    if model.item_bias() is not None:
        scores = scores + model.item_bias()
    assert output.logits.shape == (3, 7, model.config.vocab_size)
    assert_close(output.logits[..., 1 : NUM_ITEMS + 1], scores[..., 1 : NUM_ITEMS + 1])
    assert (output.logits[..., 0] == -torch.inf).all()
    assert (output.logits[..., NUM_ITEMS + 1 :] == -torch.inf).all()
    chosen = output.logits.log_softmax(-1)
    assert_close(output.loss, -(chosen[0, 2, 4] + chosen[1, 5, NUM_ITEMS]) / 2)
    assert model.objective == ("cloze" if kind == "bert4rec" else "next_item")
    assert model.config.mask_token_id == (NUM_ITEMS + 1 if kind == "bert4rec" else None)


# --- Patching and saving -----------------------------------------------------------------------------------------------


@all_kinds
def test_patch_and_unpatch(kind: str) -> None:
    model, inputs = make(kind), batch(kind)
    sibling = type(model)(model.config)
    before, keys = hidden(model, **inputs), list(model.state_dict())
    assert bft_hf.patch(model) is model
    assert bft_hf.get_config(model) == filter_defaults() == model.config.bft
    assert sibling.config.bft is None and not bft_hf.is_patched(sibling)
    assert bft_hf.patch(model, filter_defaults()) is model
    with pytest.raises(ValueError, match="unpatch"):
        bft_hf.patch(model, filter_defaults(gain=False))
    patched = hidden(model, **inputs)
    assert (patched - before).abs().max() > 1e-2
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(hidden(copied, **inputs), patched, rtol=0, atol=0)
    groups = bft_hf.param_groups(model, 1e-3)
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in bft_hf.bft_parameters(model).values()}
    assert bft_hf.unpatch(model) is model
    assert_close(hidden(model, **inputs), before, rtol=0, atol=0)
    assert list(model.state_dict()) == keys and model.config.bft is None and not bft_hf.is_patched(model)
    with pytest.raises(ValueError, match="0 to 2"):
        bft_hf.patch(model, filter_defaults(layers=(3,)))
    with pytest.raises(ValueError, match="not patched"), bft_hf.record(model):
        pass


@all_kinds
@pytest.mark.parametrize("start", ["table", "mlp"])
def test_save_and_load(kind: str, start: str, tmp_path: Path) -> None:
    model, inputs = make(kind, filter_defaults(initial_precision=start), torch.float32), batch(kind)
    model.save_pretrained(tmp_path)
    for loaded in (AutoModel.from_pretrained(tmp_path), type(model).from_pretrained(tmp_path)):
        assert type(loaded) is type(model)
        assert loaded.config.bft == model.config.bft == bft_hf.get_config(loaded)
        assert_close(hidden(loaded, **inputs), hidden(model, **inputs), rtol=0, atol=0)
    assert AutoConfig.from_pretrained(tmp_path).bft == model.config.bft
    narrow = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert narrow.embed_items.weight.dtype == torch.bfloat16
    for name, parameter in bft_hf.bft_parameters(narrow).items():
        assert_close(parameter.detach(), model.get_parameter(name).detach(), rtol=0, atol=0)
    plain = make(kind, None, torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    assert "bft_format" not in (tmp_path / "plain" / "config.json").read_text()
    for bft in (filter_defaults(initial_precision=start), filter_defaults(initial_precision=start).to_dict()):
        grown = type(model).from_pretrained(tmp_path / "plain", bft=bft)
        fresh = bft_hf.patch(plain, filter_defaults(initial_precision=start))
        assert_close(hidden(grown, **inputs), hidden(fresh, **inputs), rtol=0, atol=0)


@all_kinds
def test_model_card(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bft in (None, filter_defaults()):
        folder = tmp_path / str(bft is None)
        make(kind, bft, torch.float32).save_pretrained(folder)
        card = ModelCard.load(folder / "README.md")
        assert kind in card.data.tags and ("bft" in card.data.tags) == (bft is not None)
        assert f"from_pretrained({str(folder)!r})" in card.text
        assert (filter_defaults().to_json_string().strip() in card.text) == (bft is not None)
        (folder / "README.md").write_text("mine")
        make(kind, bft, torch.float32).save_pretrained(folder)
        assert (folder / "README.md").read_text() == "mine"

    pushed = {}

    def upload(self: Any, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> None:
        pushed[repo_id] = Path(working_dir, "README.md").read_text()

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    (folder / "README.md").write_text(f"---\ntags: [asked-for]\n---\n{GENERATED}\n")
    make(kind)._upload_modified_files(folder, "someone/model")
    assert "from_pretrained('someone/model')" in pushed["someone/model"]
    assert "asked-for" in pushed["someone/model"]


def test_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model = make("hstu", filter_defaults(), torch.float32)
    model.save_pretrained(tmp_path)
    script = (
        "import bft_hf.rec, torch; from transformers import AutoModel;"
        f"model = AutoModel.from_pretrained({str(tmp_path)!r});"
        "print(model(torch.tensor([[1, 2, 3]])).last_hidden_state.double().sum().item())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    expected = hidden(model, input_ids=torch.tensor([[1, 2, 3]])).double().sum().item()
    assert math.isclose(float(run.stdout), expected, rel_tol=1e-5)


# --- Training ----------------------------------------------------------------------------------------------------------


def histories(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Sixty walks around a circle of items, so the next item follows from the last."""
    starts = torch.randint(0, NUM_ITEMS, (60, 1), generator=torch.Generator().manual_seed(0))
    ids = (starts + torch.arange(7)) % NUM_ITEMS + 1
    if kind != "bert4rec":
        return {"input_ids": ids[:, :-1]}, ids[:, 1:].clone()
    labels = torch.full_like(ids, -100)
    labels[:, 4] = ids[:, 4]
    ids[:, 4] = NUM_ITEMS + 1
    return {"input_ids": ids}, labels


@all_kinds
@pytest.mark.parametrize("bft", [None, filter_defaults()], ids=["plain", "filter"])
def test_learns(kind: str, bft: BFTConfig | None) -> None:
    config_class, model_class = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(num_items=NUM_ITEMS, hidden_size=16, max_position_embeddings=8, bft=bft)).train()
    inputs, labels = histories(kind)
    optimizer = torch.optim.Adam(bft_hf.param_groups(model, 1e-2))
    losses = []
    for _ in range(60):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(NUM_ITEMS)) < 0.3
    assert losses[-1] < 0.6 * math.log(NUM_ITEMS)


def test_trainer_and_callback(tmp_path: Path) -> None:
    model = make("sasrec", filter_defaults(), torch.float32)
    inputs, labels = histories("sasrec")
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(inputs["input_ids"], labels, strict=True)]
    arguments = TrainingArguments(tmp_path, max_steps=2, logging_steps=1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.add_callback(BFTCallback(trainer))
    trainer.train()
    logged = trainer.state.log_history[0]
    assert 0 < logged["bft/gain/layer_00"] < 1
    assert logged["bft/process_noise/layer_01"] > 0


# --- What is refused ---------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_attention_heads"):
        SASRecConfig(hidden_size=10, num_attention_heads=3)
    with pytest.raises(ValueError, match="from_start"):
        SASRecConfig(positions="middle")
    with pytest.raises(ValueError, match="layers 0 to 1"):
        SASRecForNextItem(SASRecConfig(num_items=5, bft=filter_defaults(layers=(2,))))
    model, long = make("sasrec"), torch.ones(1, 10, dtype=torch.long)
    with pytest.raises(ValueError, match="last 9"):
        model(long)
    with pytest.raises(ValueError, match="bft_hf.patch"):
        model(long[:, :3], token_reliability=torch.ones(1, 3))
    bft_hf.patch(model)
    with pytest.raises(ValueError, match="shape"):
        model(long[:, :3], token_reliability=torch.ones(1, 4))
    with pytest.raises(ValueError, match="time_buckets=0"):
        make("hstu", time_buckets=8)(long[:, :3])
    with pytest.raises(ValueError, match="time_buckets=128"):
        make("hstu")(long[:, :3], timestamps=long[:, :3])
    assert HSTUConfig().time_buckets == 0
    with pytest.raises(ValueError, match="num_items"):
        model.resize_token_embeddings(20)


def test_inverse_std_is_that_of_the_norm() -> None:
    norm = torch.nn.LayerNorm(8, eps=1e-3, elementwise_affine=False, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close((x - x.mean(-1, keepdim=True)) * inverse_std(x, norm)[:, None], norm(x))


@all_kinds
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_kept_of_the_weights_is_renewed_after_a_step(kind: str, fused: bool) -> None:
    model = make(kind, filter_defaults(observation_units="absolute"))
    inputs = batch(kind)

    def observed(which: Any) -> list[Tensor]:
        with torch.no_grad(), bft_hf.record(which) as trace:
            which(**inputs)
        return [*trace.observation_precision, *trace.jacobian]

    stale = observed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    model(**inputs).last_hidden_state.square().sum().backward()
    optimizer.step()

    def anew() -> list[Tensor]:
        other = make(kind, filter_defaults(observation_units="absolute"))
        other.load_state_dict(model.state_dict())
        return observed(other)

    for before, after, expected in zip(stale, observed(model), anew(), strict=True):
        assert torch.equal(after, expected)
        assert kind == "hstu" or not torch.equal(before, after)
    with torch.no_grad():
        for layer in model.layers:
            layer.get_submodule("attention.o_proj" if kind != "hstu" else "o_proj").weight.mul_(1.5)
    assert all(map(torch.equal, observed(model), anew()))
