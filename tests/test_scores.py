"""Token scores against a loop over rows by hand, and how little of the model they run."""

import pytest
import torch

import bft_hf
from bft_hf.recipes.scores import answer_uncertainty, score_rows


def make_rows(lengths=((9, 3), (20, 5), (6, 6), (12, 1))):
    """Rows of so many tokens, the last few of which are trained."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, (length, trained) in enumerate(lengths):
        tokens = torch.randint(3, 128, (length,), generator=generator).tolist()
        labels = [-100] * (length - trained) + tokens[length - trained :]
        rows.append({"id": f"r{number}", "input_ids": tokens, "labels": labels})
    return rows


@pytest.fixture
def patched(tiny_llama):
    return bft_hf.patch(tiny_llama(dtype=torch.float64), bft_hf.BFTConfig.unit())


def by_hand(model, row):
    """Each column, from the logits and the trace of one row without padding."""
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        if bft_hf.is_patched(model):
            with bft_hf.record(model) as trace:
                log_probs = model(ids).logits[0].log_softmax(-1)
        else:
            trace, log_probs = None, model(ids).logits[0].log_softmax(-1)
    columns = {name: [] for name in ("loss", "entropy", "rivals", "rival_loss", "precision", "gain", "input_precision")}
    for place in range(1, ids.shape[1]):
        label = row["labels"][place]
        if label == -100:
            continue
        predicted = log_probs[place - 1]
        others = [token for token in predicted.argsort(descending=True).tolist() if token != label]
        columns["loss"].append(-predicted[label].item())
        columns["entropy"].append(-(predicted.exp() * predicted).sum().item())
        columns["rivals"].append(others[0])
        columns["rival_loss"].append(-predicted[others[0]].item())
        if trace is not None:
            columns["precision"].append(trace.final_precision[0, place - 1].item())
            columns["input_precision"].append(trace.final_precision[0, place].item())
            columns["gain"].append([gain[0, place - 1].item() for gain in trace.gain])
    return columns


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_column_equals_a_loop_over_rows_without_padding(patched, batch_size):
    rows = make_rows()
    with torch.no_grad():  # labels that are the likeliest tokens: the rivals are the second ones then
        likeliest = patched(torch.tensor([rows[3]["input_ids"]])).logits[0].argmax(-1).tolist()
    rows[3]["labels"] = [-100] * 8 + likeliest[7:11]
    scored = score_rows(patched, rows, batch_size=batch_size, progress=False)
    assert [row.id for row in scored] == ["r0", "r1", "r2", "r3"]
    for row, score in zip(rows, scored, strict=True):
        for name, values in by_hand(patched, row).items():
            assert getattr(score, name) == pytest.approx(torch.tensor(values).numpy(), rel=1e-6), name
        assert [row["labels"][place] for place in score.positions] == score.labels.tolist()
    assert [len(score.loss) for score in scored] == [3, 5, 5, 4]  # nothing predicts a row's first token
    assert scored[0].mean_gain == pytest.approx(scored[0].gain.mean(1))
    assert scored[1].probability == pytest.approx(torch.tensor(scored[1].loss).neg().exp().numpy())


def test_a_plain_model_has_losses_and_no_precision(tiny_llama):
    plain, rows = tiny_llama(), make_rows()
    scored = score_rows(plain, rows, progress=False)
    for row, score in zip(rows, scored, strict=True):
        assert score.loss == pytest.approx(by_hand(plain, row)["loss"], rel=1e-4)
        assert score.precision is None and score.gain is None and score.mean_gain is None
    other = score_rows(bft_hf.patch(plain, bft_hf.BFTConfig.unit()), rows, progress=False)
    assert other[0].loss != pytest.approx(scored[0].loss, rel=1e-3)


def test_precision_by_channel_is_averaged(tiny_llama):
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit(granularity="channel"))
    row = make_rows()[1]
    with bft_hf.record(model) as trace, torch.no_grad():
        model(torch.tensor([row["input_ids"]]))
    score = score_rows(model, [row], progress=False)[0]
    assert score.precision == pytest.approx(trace.final_precision[0, 14:19].mean(-1).numpy(), rel=1e-4)
    assert score.gain.shape == (5, 3)


def test_the_head_runs_at_trained_positions_alone_and_training_goes_on(patched):
    rows, seen = make_rows(), []
    handle = patched.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1]))
    patched.train()
    score_rows(patched, rows, batch_size=2, progress=False)
    handle.remove()
    assert seen == [(1, 6), (1, 8)]
    assert patched.training
    ids = torch.tensor([rows[0]["input_ids"]])
    assert patched(ids).logits.shape == (1, 9, 128)


def test_rows_that_differ_in_labels_alone_share_a_pass(patched):
    rows = make_rows()
    other = {**rows[1], "id": "other", "labels": [-100] * 12 + [7] * 8}
    lengths = []
    handle = patched.model.register_forward_hook(
        lambda module, args, output: lengths.append(output.last_hidden_state.shape[0])
    )
    together = score_rows(patched, [*rows, other], batch_size=16, progress=False)
    handle.remove()
    assert lengths == [4]
    alone = [*score_rows(patched, rows, progress=False), *score_rows(patched, [other], progress=False)]
    for score, expected in zip(together, alone, strict=True):
        assert score.id == expected.id
        assert score.loss == pytest.approx(expected.loss)
        assert score.precision == pytest.approx(expected.precision)
    assert together[1].precision == pytest.approx(together[4].precision[3:])  # blind to the label
    assert together[1].loss != pytest.approx(together[4].loss[3:])


def test_precision_sees_what_stands_in_the_input(patched):
    row = make_rows()[1]
    changed = {**row, "input_ids": [*row["input_ids"][:17], 99, *row["input_ids"][18:]]}
    before, after = score_rows(patched, [row, changed], progress=False)
    assert after.precision[:3] == pytest.approx(before.precision[:3])
    assert after.input_precision[2] != pytest.approx(before.input_precision[2])
    assert after.precision[3] == after.input_precision[2]


def test_reliability_reaches_the_model_and_passages_are_averaged(patched):
    row = make_rows()[1] | {"passage_spans": [[1, 5], [5, 12]]}
    plain, doubted = score_rows(
        patched,
        [row, row | {"reliability": [1.0] * 5 + [0.0] * 7 + [1.0] * 8}],
        progress=False,
    )
    assert doubted.loss != pytest.approx(plain.loss)
    with bft_hf.record(patched) as trace, torch.no_grad():
        patched(torch.tensor([row["input_ids"]]))
    assert plain.passages[0]["precision"] == pytest.approx(trace.final_precision[0, 1:5].mean().item())
    gains = torch.stack([gain[0, 5:12] for gain in trace.gain])
    assert plain.passages[1]["gain"] == pytest.approx(gains.mean().item())


@pytest.mark.parametrize("kind", ["lora", "prompt_tuning"])
def test_adapters_are_scored_as_they_run(patched, kind):
    peft = pytest.importorskip("peft", reason="pip install peft")
    rows = make_rows()
    before = score_rows(patched, rows, progress=False)
    if kind == "lora":
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    else:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(patched, config).double()
    for row, score, old in zip(rows, score_rows(model, rows, progress=False), before, strict=True):
        with torch.no_grad(), bft_hf.record(model) as trace:
            log_probs = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        before_labels = score.positions - 1 - len(row["input_ids"])
        assert score.precision == pytest.approx(trace.final_precision[0, before_labels].numpy(), rel=1e-6)
        assert score.gain == pytest.approx(torch.stack(trace.gain, -1)[0, before_labels].numpy(), rel=1e-6)
        expected = [
            -log_probs[place - 1 - len(row["input_ids"]), row["labels"][place]].item() for place in score.positions
        ]
        assert score.loss == pytest.approx(expected, rel=1e-6)
        assert score.loss != pytest.approx(old.loss, rel=1e-3)


def test_bfloat16_autocast_is_near(tiny_llama):
    model, rows = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit()), make_rows()
    exact = score_rows(model, rows, progress=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = score_rows(model, rows, progress=False)
    for score, expected in zip(rounded, exact, strict=True):
        assert score.loss == pytest.approx(expected.loss, abs=0.2)
        assert score.loss.tolist() != expected.loss.tolist()


def test_rows_that_cannot_be_scored_are_refused(patched):
    with pytest.raises(ValueError, match="row 'a' needs one label for each"):
        score_rows(patched, [{"id": "a", "input_ids": [1, 2], "labels": [1]}], progress=False)
    with pytest.raises(ValueError, match="row 0 needs one label"):
        score_rows(patched, [{"input_ids": [], "labels": []}], progress=False)
    nothing = score_rows(patched, [{"input_ids": [4, 5], "labels": [-100, -100]}], progress=False)[0]
    assert len(nothing.loss) == 0 and nothing.precision.shape == (0,)


def test_the_uncertainty_of_answers_is_that_of_their_tokens(patched):
    prompts, answers = [[5, 6, 7, 8], [9, 10]], [[11, 2], [12, 13, 14, 15]]
    found = answer_uncertainty(patched, prompts, answers)
    for prompt, answer, values in zip(prompts, answers, found, strict=True):
        whole = {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        expected = by_hand(patched, whole)
        assert values["log_probability"] == pytest.approx(-sum(expected["loss"]))
        assert values["token_entropy"] == pytest.approx(sum(expected["entropy"]) / len(answer))
        assert values["final_precision"] == pytest.approx(sum(expected["precision"]) / len(answer))
        assert values["mean_gain"] == pytest.approx(torch.tensor(expected["gain"]).mean().item())
        assert values["answer_tokens"] == len(answer)
    doubted = answer_uncertainty(patched, prompts, answers, token_reliability=[[1.0, 0.0, 1.0, 1.0], [1.0, 1.0]])
    assert doubted[0]["log_probability"] != pytest.approx(found[0]["log_probability"])
    assert doubted[1] == pytest.approx(found[1])
    plain = answer_uncertainty(bft_hf.unpatch(patched), prompts, answers)
    assert plain[0]["final_precision"] is None and plain[0]["mean_gain"] is None
    assert answer_uncertainty(patched, [[5]], [[]])[0] == {
        "log_probability": None,
        "token_entropy": None,
        "final_precision": None,
        "mean_gain": None,
        "answer_tokens": 0,
    }
