"""model.recommend(): against a plain ranking by the model's scores, with names, with the filter's uncertainty, saved and loaded."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

import bft_hf
from bft_hf import rec
from bft_hf.rec.data import Interactions, leave_one_out
from bft_hf.rec.item_map import ItemMap, read_titles
from bft_hf.rec.mechanism import filter_by_frequency
from bft_hf.rec.metrics import frequency_quartiles

NAMES = tuple(f"n{i}" for i in range(1, 21))
HISTORIES = [["n3"], ["n4", "n4", "n9"], [f"n{i}" for i in range(1, 13)]]


def make(kind: str = "sasrec", patched: bool = False, item_map: ItemMap | None = None, **fields: Any) -> Any:
    model_class = {"sasrec": rec.SASRecForNextItem, "bert4rec": rec.BERT4RecForMaskedItem, "hstu": rec.HSTUForNextItem}[
        kind
    ]
    torch.manual_seed(0)
    values = {"num_items": 20, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = model_class(model_class.config_class(**{**values, "initializer_range": 0.5, **fields}))
    if patched:
        bft_hf.patch(model)
    model.item_map = item_map
    return model


def scores_of(model: Any, history: Sequence[int]) -> torch.Tensor:
    """Scores of the items after one history, by the model alone."""
    cloze = model.objective == "cloze"
    ids = [*history[-(8 - cloze) :], *([21] if cloze else [])]
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]), return_logits=True).logits[0, -1, 1:21]


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "bft"])
@pytest.mark.parametrize("kind", ["sasrec", "bert4rec", "hstu"])
def test_recommendations_are_the_best_scores_of_what_is_unseen(kind: str, patched: bool) -> None:
    model = make(kind, patched, ItemMap(NAMES, {"n5": "Five"}))
    for exclude_seen in (True, False):
        model.train()
        found = model.recommend(HISTORIES, k=4, exclude_seen=exclude_seen, batch_size=2)
        assert model.training
        for history, rows in zip(HISTORIES, found, strict=True):
            scores = scores_of(model, [int(name[1:]) for name in history])
            order = [f"n{i + 1}" for i in scores.argsort(descending=True).tolist()]
            expected = [name for name in order if not (exclude_seen and name in history)][:4]
            assert [row.item for row in rows] == expected
            for row in rows:
                index = int(str(row.item)[1:]) - 1
                assert row.score == pytest.approx(float(scores[index]), abs=1e-4)
                assert row.probability == pytest.approx(float(scores.softmax(0)[index]), abs=1e-5)
                assert row.title == ("Five" if row.item == "n5" else None)
                assert (row.precision is not None) == (row.score_std is not None) == patched


def test_without_a_map_items_are_ids() -> None:
    model = make()
    named = make(item_map=ItemMap(NAMES))
    ids = model.recommend([[3, 4]], k=3)[0]
    assert [f"n{row.item}" for row in ids] == [row.item for row in named.recommend([["n3", "n4"]], k=3)[0]]
    assert len(model.recommend([list(range(1, 19))], k=10)[0]) == 2
    for history, message in {
        (0,): "unknown item 0: the model has no item_map",
        (21,): "unknown item 21",
        ("n3",): "unknown item 'n3'",
        (): "history 0 has no item",
    }.items():
        with pytest.raises(ValueError, match=message):
            model.recommend([list(history)])


def test_what_is_unknown_is_refused_or_skipped() -> None:
    model = make(item_map=ItemMap(NAMES))
    with pytest.raises(ValueError, match="unknown item 'x': the model was trained on 20 others"):
        model.recommend([["n3", "x"]])
    assert model.recommend([["n3", "x"]], skip_unknown=True) == model.recommend([["n3"]])
    with pytest.raises(ValueError, match="history 1 has no known item"):
        model.recommend([["n3"], ["x"]], skip_unknown=True)
    with pytest.raises(ValueError, match="it has to be a list of items"):
        model.recommend(["n3"])
    with pytest.raises(ValueError, match="ask for at least one"):
        model.recommend([["n3"]], k=0)


def test_a_time_bias_wants_times() -> None:
    model = make("hstu", time_buckets=128, item_map=ItemMap(NAMES))
    with pytest.raises(ValueError, match="give timestamps"):
        model.recommend([["n3", "n4"]])
    with pytest.raises(ValueError, match="2 items: give as many timestamps"):
        model.recommend([["n3", "n4"]], timestamps=[[1.0]])
    near = model.recommend([["n3", "n4"]], timestamps=[[0, 10]])
    far = model.recommend([["n3", "n4"]], timestamps=[[0, 10**8]])
    assert near != far
    assert model.recommend([["n3", "x", "n4"]], timestamps=[[0, 5, 10]], skip_unknown=True) == near


@pytest.mark.parametrize("kind", ["sasrec", "bert4rec"])
def test_uncertainty_is_the_last_state_s_precision_carried_to_the_score(kind: str) -> None:
    """score_std is the spread of the scores when the state is disturbed as the precision says."""
    model = make(kind, True).eval()
    history = [3, 4, 9]
    ids = torch.tensor([[*history, *([21] if kind == "bert4rec" else [])]])
    with torch.no_grad(), bft_hf.record(model) as trace:
        state = model(ids).last_hidden_state[0, -1]
    lam = trace.final_precision[0, -1].float()
    found = model.recommend([history], k=5, exclude_seen=False)[0]
    assert all(row.precision == pytest.approx(float(lam.mean()), rel=1e-5) for row in found)
    if kind == "bert4rec":
        lam = lam.mean().expand_as(lam)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(20000, 8, generator=generator) * (state.square().mean() / lam).sqrt()
    embeddings = model.item_embeddings().detach()
    for row in found:
        spread = float((noise @ embeddings[int(row.item)]).std())
        assert row.score_std == pytest.approx(spread, rel=0.03)
    # Another item, another spread; and none where units are those of the values.
    assert len({row.score_std for row in found}) == 5
    bft_hf.unpatch(model)
    bft_hf.patch(model, rec.filter_defaults(observation_units="absolute"))
    row = model.recommend([history], k=1)[0][0]
    assert row.precision is not None and row.score_std is None


@pytest.mark.parametrize("kind", ["sasrec", "bert4rec", "hstu"])
def test_the_filter_is_told_apart_by_frequency(kind: str) -> None:
    """Items of a quartile get a tau of their own, and it is found again; the gain is a mean over positions."""
    rng = np.random.default_rng(0)
    # Items 1 to 20, the higher the more frequent.
    histories = [rng.choice(20, 7, replace=False, p=np.arange(1, 21) / 210) + 1 for _ in range(60)]
    users, items = tuple(map(str, range(60))), tuple(map(str, range(1, 21)))
    split = leave_one_out(Interactions(users, items, np.concatenate(histories), np.arange(0, 421, 7), None, "as drawn"))
    quartiles = frequency_quartiles(split.item_frequency[1:])
    model = make(kind, True)
    table = next(p for name, p in bft_hf.bft_parameters(model).items() if "initial_precision" in name)
    with torch.no_grad():
        table[1:21] = torch.from_numpy(quartiles).float() / 4
    found = filter_by_frequency(model, split, batch_size=16)
    assert [found["log_initial_precision"][f"Q{i}"] for i in range(4)] == pytest.approx([0, 0.25, 0.5, 0.75], abs=1e-5)
    assert sum(found["positions"].values()) == 60 * 6 and len(found["process_noise"]) <= 2
    # A token that starts with a higher precision has a lower gain.
    assert len(found["gain"]["Q0"]) == 2 and found["gain"]["Q0"][0] > found["gain"]["Q3"][0]
    assert found["updated_precision"]["Q0"][0] < found["updated_precision"]["Q3"][0]


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "bft"])
@pytest.mark.parametrize("kind", ["sasrec", "bert4rec", "hstu"])
def test_names_travel_with_the_model(kind: str, patched: bool, tmp_path: Path) -> None:
    model = make(kind, patched, ItemMap(NAMES, {"n5": "Fünf"}))
    expected = model.recommend(HISTORIES)
    model.save_pretrained(tmp_path)
    for loaded in (AutoModel.from_pretrained(tmp_path), type(model).from_pretrained(tmp_path)):
        assert loaded.item_map == model.item_map
        assert loaded.recommend(HISTORIES) == expected
    loaded, _ = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert loaded.item_map == model.item_map


def test_a_model_without_names_is_saved_without_a_map(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    assert not (tmp_path / "items.json").exists()
    assert AutoModel.from_pretrained(tmp_path).item_map is None


def test_a_map_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    make(item_map=ItemMap(NAMES)).save_pretrained(tmp_path)
    (tmp_path / "items.json").write_text(json.dumps({"items": ["a", "b"]}))
    with pytest.raises(ValueError, match="names 2 items and the model has 20"):
        AutoModel.from_pretrained(tmp_path)
    (tmp_path / "items.json").write_text("[]")
    with pytest.raises(ValueError, match=r"items\.json: not a map of items"):
        AutoModel.from_pretrained(tmp_path)


def test_item_map() -> None:
    items = ItemMap(("10", "b"), {"b": "Bee"})
    assert (len(items), items.id_of(10), items.id_of("b"), items.name_of(2), items.title_of(2)) == (2, 1, 2, "b", "Bee")
    assert 10 in items and "c" not in items and items.title_of(1) is None
    for item_id in (0, 3):
        with pytest.raises(ValueError, match="from 1 to 2"):
            items.name_of(item_id)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.json", '{"1": "One, or so", "2": "Two"}'),
        ("t.csv", '1,"One, or so"\n2,Two,more\n'),
        ("t.tsv", "1\tOne, or so\n\n2\tTwo\n"),
    ],
)
def test_titles_are_read(name: str, text: str, tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(text, encoding=encoding)
        assert read_titles(tmp_path / name) == {"1": "One, or so", "2": "Two"}
    (tmp_path / "bad.tsv").write_text("1\tOne\n2\n")
    with pytest.raises(ValueError, match="line 2: expected an item and its title"):
        read_titles(tmp_path / "bad.tsv")
    with pytest.raises(ValueError, match="no such file"):
        read_titles(tmp_path / "none.tsv")


def test_example_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import runpy

    path = Path(__file__).resolve().parents[1] / "examples" / "recommend.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recommend.py"])
    runpy.run_path(str(path), run_name="__main__")
    assert "precision" in capsys.readouterr().out
    mine = "".join(f"u{user} {' '.join(f'i{(user + step) % 12}' for step in range(5))}\n" for user in range(40))
    for name in ("histories.txt", "listeners.txt"):
        Path(name).write_text(mine)
        monkeypatch.setattr(sys, "argv", ["recommend.py", "--data", name, "--history", "i1", "i2"])
        runpy.run_path(str(path), run_name="__main__")
        assert Path(name).read_text() == mine and "i3" in capsys.readouterr().out
