"""Interactions: every format read alike, every malformed line named, k-core, order, split, windows and batches."""

import gzip
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bft_hf.rec.batches import NO_LABEL, TrainingWindows, ranking_inputs
from bft_hf.rec.data import DataError, Interactions, leave_one_out
from bft_hf.rec.reading import read_interactions

HISTORIES = {"ann": ["7", "10", "9"], "bob": ["10", "7", "12", "9"], "cy": ["9", "12"]}
TIMES = {"ann": [30, 10, 20], "bob": [5, 5, 4, 6], "cy": [1, 2]}


def names(data: Interactions) -> dict[str, list[str]]:
    return {user: [data.item_names[i - 1] for i in data.history(index)] for index, user in enumerate(data.user_names)}


def in_time(user: str) -> list[str]:
    order = np.argsort(TIMES[user], kind="stable")
    return [HISTORIES[user][i] for i in order]


def make(histories: list[list[int]], timestamps: list[list[float]] | None = None) -> Interactions:
    """Interactions of items given by id."""
    lengths = [len(history) for history in histories]
    count = max(max(history) for history in histories)
    return Interactions(
        user_names=tuple(f"u{i}" for i in range(len(histories))),
        item_names=tuple(f"i{i}" for i in range(1, count + 1)),
        items=np.concatenate([np.array(history) for history in histories]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        timestamps=None if timestamps is None else np.concatenate([np.array(times) for times in timestamps]),
        order="as given",
    )


def model(objective: str = "next_item", length: int = 5, **config: Any) -> Any:
    """As much of a recommender as batches look at."""
    fields = {
        "max_position_embeddings": length,
        "num_items": 90,
        "mask_token_id": 91,
        "mask_probability": 0.4,
        **config,
    }
    return SimpleNamespace(objective=objective, config=SimpleNamespace(**fields))


ROWS = [(user, item, time) for user in HISTORIES for item, time in zip(HISTORIES[user], TIMES[user], strict=True)]
FILES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "a.txt": ("".join(f"{user} {' '.join(items)}\n" for user, items in HISTORIES.items()) + "\n", {}, False),
    "a.pairs": ("".join(f"{user}\t{item}\n" for user, item, _ in ROWS), {"format": "pairs"}, False),
    "a.json": (json.dumps({user: [int(i) for i in items] for user, items in HISTORIES.items()}), {}, False),
    "a.inter": (
        "item_id:token\tuser_id:token\trating:float\ttimestamp:float\n"
        + "".join(f"{item}\t{user}\t3\t{time}\n" for user, item, time in ROWS),
        {},
        True,
    ),
    "a.csv": (
        "who,what,when\n" + "".join(f'{user},"{item}",{time}.0\n' for user, item, time in ROWS),
        {"user_column": "who", "item_column": "what", "time_column": "when"},
        True,
    ),
    "b.csv": ("user_id,item_id\n" + "".join(f"{user},{item}\n" for user, item, _ in ROWS), {}, False),
    "a.tsv": ("user_id\titem_id\n" + "".join(f"{user}\t{item}\n" for user, item, _ in ROWS), {}, False),
    "c.csv": (
        "".join(f"{time};{item};{user}\n" for user, item, time in ROWS),
        {"user_column": "3", "item_column": "2", "time_column": "1", "delimiter": ";"},
        True,
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_histories(name: str, packed: bool, tmp_path: Path) -> None:
    text, options, timed = FILES[name]
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    data = read_interactions(path, **options)
    assert names(data) == {user: in_time(user) if timed else HISTORIES[user] for user in HISTORIES}
    assert data.item_names == ("7", "9", "10", "12")  # as numbers, not as text
    assert (data.num_users, data.num_items, data.lengths.tolist()) == (3, 4, [3, 4, 2])
    if timed:
        assert data.timestamps is not None and data.timestamps.tolist() == [10, 20, 30, 4, 5, 5, 6, 1, 2]
        assert data.order == "by timestamp, ties as in the file" and data.tied_targets() == 0
    else:
        assert data.timestamps is None and "no timestamps" in data.order and data.tied_targets() is None


BAD: list[tuple[str, str, dict[str, Any], str]] = [
    ("a.txt", "1 2 3\n2\n", {}, r"a\.txt, line 2: user '2' without an item"),
    ("a.txt", "1 2 3\n\n2 4\n1 5\n", {}, r"line 4: user '1' again \(line 1 has one\): .* format pairs"),
    ("a.txt", "\n\n", {}, "no interactions"),
    ("a.txt", b"1 2 \xff\n", {}, "not UTF-8"),
    ("a.dat", "1 2\n", {}, "does not tell the format, name it: sequences, pairs, json, inter, csv"),
    ("a.txt", "1 2\n", {"format": "parquet"}, "unknown format 'parquet'"),
    ("a.txt", "1 2\n", {"user_column": "u"}, "a user column was given"),
    ("a.txt", "1 2\n1 3 4\n", {"format": "pairs"}, "line 2: 3 words, expected `user item`"),
    ("a.json", '{"1": [2,\n 3}', {}, "line 2: not JSON"),
    ("a.json", "[1, 2]", {}, "a JSON list, expected an object"),
    ("a.json", '{"1": []}', {}, r"user '1' has \[\], expected a list"),
    ("a.json", '{"1": [2, 2.5]}', {}, "user '1' has the item 2.5"),
    ("a.json", '{"1": [true]}', {}, "user '1' has the item true"),
    ("a.json", '{"1": [2], "1": [3]}', {}, "user '1' stands there twice"),
    ("a.csv", "", {}, "line 1: empty"),
    ("a.csv", "user,item_id\n1,2\n", {}, "line 1: no user column 'user_id' among user, item_id"),
    ("a.csv", "user_id,item_id\n1,2\n3\n", {}, "line 3: 1 columns, line 1 has 2"),
    ("a.csv", 'user_id,item_id,note\n1,2,"a\nb"\n3\n', {}, "line 4: 1 columns"),  # a quoted line break counts as a line
    ("a.csv", "user_id,item_id\n1,2\n3,\n", {}, "line 3: no item"),
    ("a.csv", "user_id,item_id,timestamp\n1,2,3\n1,4,soon\n", {}, "line 3: the timestamp 'soon' is not a number"),
    ("a.csv", "user_id,item_id,timestamp\n1,2,nan\n", {}, "line 2: the timestamp 'nan'"),
    ("a.csv", "user_id,item_id\n1,2\n", {"time_column": "when"}, "no time column 'when'"),
    ("a.csv", "1,2\n", {"user_column": "1", "item_column": "3"}, "no item column 3, line 1 has 2"),
    ("a.csv", "1,2\n", {"user_column": "1"}, "the item column needs a number as well"),
    ("a.csv", "1,2\n", {"user_column": "1", "item_column": "2", "delimiter": "::"}, "one character"),
    (
        "a.tsv",
        'user_id\titem_id\nu1\t"abc\nu2\tx\nu3\ty"\n',
        {},
        "line 4: a quotation mark that was opened lines before",
    ),
    ("a.txt.gz", b"no gzip", {}, "not a whole gzip file"),
    ("a.txt.gz", gzip.compress("".join(f"{i} 2 3\n" for i in range(50)).encode())[:-9], {}, "not a whole gzip file"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.inter", "pairs.txt"])
def test_a_byte_order_mark_is_no_part_of_a_name(name: str, packed: bool, tmp_path: Path) -> None:
    """As Excel and Notepad put it in front of a file."""
    texts = {
        "a.txt": "u1 x y\nu2 x\n",
        "a.csv": "user_id,item_id\nu1,x\nu1,y\nu2,x\n",
        "a.inter": "user_id:token\titem_id:token\nu1\tx\nu1\ty\nu2\tx\n",
        "pairs.txt": "u1 x\nu1 y\nu2 x\n",
    }
    content = texts[name].encode("utf-8-sig")
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    data = read_interactions(path, format="pairs" if name == "pairs.txt" else None)
    assert (data.user_names, data.item_names) == (("u1", "u2"), ("x", "y"))


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD)
def test_what_cannot_be_read_is_named(
    name: str, content: str | bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        read_interactions(path, **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_interactions(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_interactions(tmp_path / "folder.txt")


@given(
    histories=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=9), min_size=1, max_size=12),
    k=st.integers(0, 4),
)
def test_k_core_is_the_largest_set_in_which_all_have_k(histories: list[list[int]], k: int) -> None:
    actions = [(user, item) for user, history in enumerate(histories) for item in history]
    while True:
        kept = [
            (u, i) for u, i in actions if sum(a == u for a, _ in actions) >= k and sum(b == i for _, b in actions) >= k
        ]
        if kept == actions:
            break
        actions = kept
    data = make(histories)
    if not actions:
        with pytest.raises(DataError, match=f"the {k}-core is empty"):
            data.k_core(k)
        return
    core = data.k_core(k)
    found = [(f"u{u}", f"i{i}") for u, i in actions]
    assert [(user, item) for user, items in names(core).items() for item in items] == found
    if len(actions) < len(data.items):
        assert set(core.item_names) == {item for _, item in found}
    assert core.items.max() <= core.num_items and core.items.min() >= 1


def test_shuffled_ties_move_only_among_themselves_and_by_seed() -> None:
    histories = [list(range(1, 31)), list(range(1, 31))]
    times = [[i // 10 for i in range(30)], list(range(30))]
    data = make(histories, times)
    first, again, other = data.shuffle_ties(1), data.shuffle_ties(1), data.shuffle_ties(2)
    assert first.items.tolist() == again.items.tolist() != other.items.tolist()
    assert first.history(0).tolist() != histories[0] and first.history(1).tolist() == histories[1]
    for day in range(3):
        assert sorted(first.history(0)[10 * day : 10 * day + 10]) == histories[0][10 * day : 10 * day + 10]
    assert first.order == "by timestamp, ties shuffled with seed 1"
    assert data.tied_targets() == 1
    with pytest.raises(DataError, match="only where the file has timestamps"):
        make(histories).shuffle_ties(1)


def test_leave_one_out_holds_back_the_last_two_of_those_who_have_three() -> None:
    data = make([[1, 2, 3, 4], [5, 6], [2, 2, 7]])
    split = leave_one_out(data)
    assert split.users.tolist() == [0, 2]
    assert split.targets("validation").tolist() == [3, 2] and split.targets("test").tolist() == [4, 7]
    parts = {part: [data.items[a:b].tolist() for a, b in zip(*split.inputs(part), strict=True)] for part in PARTS}
    assert parts == {"validation": [[1, 2], [2]], "test": [[1, 2, 3], [2, 2]]}
    assert [data.items[a:b].tolist() for a, b in zip(*split.inputs("test", 2), strict=True)] == [[2, 3], [2, 2]]
    # What is held back is not counted, what the user of two did is.
    assert split.item_frequency.tolist() == [0, 1, 2, 0, 0, 1, 1, 0]
    assert split.untrained_targets == 2
    with pytest.raises(ValueError, match="'validation' or 'test'"):
        split.targets("train")
    with pytest.raises(DataError, match="no user has 3 actions"):
        leave_one_out(make([[1, 2], [3]]))


PARTS = ("validation", "test")


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), width=st.integers(2, 12), seed=st.integers(0, 99))
def test_every_item_but_a_history_s_first_is_a_target_once(lengths: list[int], width: int, seed: int) -> None:
    # Three more for the split, and every action an item of its own, so that targets can be told apart.
    starts = np.cumsum([0, *(length + 3 for length in lengths)])
    data = make([list(range(a + 1, b + 1)) for a, b in itertools.pairwise(starts)])
    windows = TrainingWindows.of(leave_one_out(data), model(length=width))
    rng = np.random.default_rng(seed)
    targets: list[int] = []
    batches = windows.epoch(3, rng)
    for chosen in batches:
        batch = windows.batch(chosen, rng)
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        assert ids.shape[1] <= width and (batch["attention_mask"].numpy() == (ids > 0)).all()
        assert (labels[ids > 0] == ids[ids > 0] + 1).all() and (labels[ids == 0] == NO_LABEL).all()
        targets += labels[labels != NO_LABEL].tolist()
    expected = [i for a, length in zip(starts, lengths, strict=False) for i in range(a + 2, a + length + 2)]
    assert sorted(targets) == expected
    assert windows.targets_per_window == pytest.approx(len(targets) / sum(map(len, batches)))


def test_batches_are_of_like_length_in_random_order() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.geometric(0.15, 2000) + 3
    data = make([[1] * int(length) for length in lengths])
    windows = TrainingWindows.of(leave_one_out(data), model(length=50))
    batches = windows.epoch(32, np.random.default_rng(1))
    assert sorted(np.concatenate(batches)) == list(range(len(windows.starts)))
    padded = sum(len(b) * int(windows.lengths[b].max()) for b in batches)
    order = rng.permutation(len(windows.starts))
    shuffled = sum(32 * int(windows.lengths[order[i : i + 32]].max()) for i in range(0, len(order), 32))
    assert padded < 1.25 * windows.lengths.sum() and shuffled > 2 * padded
    sizes = [windows.lengths[b].mean() for b in batches]
    assert 0.3 < (np.diff(sizes) > 0).mean() < 0.7
    again = windows.epoch(32, np.random.default_rng(1))
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))


def test_cloze_hides_items_and_asks_for_them() -> None:
    rng = np.random.default_rng(0)
    data = make([list(rng.integers(1, 91, int(n))) for n in rng.integers(5, 30, 400)])
    cut = TrainingWindows.of(leave_one_out(data), model("cloze", length=8))
    assert cut.lengths.max() == 8 and cut.lengths.min() >= 2
    hidden = items = 0
    for chosen in cut.epoch(64, rng):
        batch = {name: value.numpy() for name, value in cut.batch(chosen, rng).items()}
        ids, labels, real = batch["input_ids"], batch["labels"], batch["attention_mask"].astype(bool)
        assert ((labels != NO_LABEL) == (ids == 91)).all() and (ids[~real] == 0).all()
        assert (labels != NO_LABEL).any(axis=1).all()
        hidden, items = hidden + (labels != NO_LABEL).sum(), items + real.sum()
    assert hidden / items == pytest.approx(0.4, abs=0.03)
    assert cut.targets_per_window == pytest.approx(hidden / len(cut.lengths), rel=0.03)
    last = TrainingWindows.of(leave_one_out(data), model("cloze", length=8), mask_last=0.999)
    batch = last.batch(np.arange(50), rng)
    assert (batch["labels"] != NO_LABEL).sum(dim=1).tolist() == [1] * 50
    at = (batch["labels"] != NO_LABEL).int().argmax(dim=1).numpy()
    assert (at == last.lengths[:50] - 1).all()


def test_a_model_with_a_time_bias_gets_the_times_of_its_items() -> None:
    timed = make([[1, 2, 3, 4, 5], [6, 7, 8]], [[10, 20, 30, 40, 50], [1, 2, 3]])
    windows = TrainingWindows.of(leave_one_out(timed), model(time_buckets=8))
    batch = windows.batch(np.arange(len(windows.starts)), np.random.default_rng(0))
    assert batch["input_ids"].tolist() == [[1, 2]] and batch["timestamps"].tolist() == [[10, 20]]
    with pytest.raises(ValueError, match="needs timestamps, and the data has none"):
        TrainingWindows.of(leave_one_out(make([[1, 2, 3, 4]])), model(time_buckets=8))
    rows = [np.array([3, 4]), np.array([5])]
    inputs, last = ranking_inputs(model("cloze", time_buckets=8), rows, [np.array([7, 8]), np.array([9])])
    assert inputs["timestamps"].tolist() == [[7, 8, 8], [9, 9, 0]] and last.tolist() == [2, 1]
    with pytest.raises(ValueError, match="needs the timestamps"):
        ranking_inputs(model(time_buckets=8), rows)


def test_ranking_reads_the_latest_items_and_the_last_position() -> None:
    rows = [np.arange(1, 9), np.array([3])]
    inputs, last = ranking_inputs(model(), rows)
    assert inputs["input_ids"].tolist() == [[4, 5, 6, 7, 8], [3, 0, 0, 0, 0]] and last.tolist() == [4, 0]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    inputs, last = ranking_inputs(model("cloze"), rows)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 91], [3, 91, 0, 0, 0]] and last.tolist() == [4, 1]


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(ValueError, match="there is nothing to learn"):
        TrainingWindows.of(leave_one_out(make([[1, 2, 3], [2, 3, 1]])), model())


SHARED: dict[str, tuple[int, int, int, int]] = {
    "beauty.txt.gz": (22363, 12101, 198502, 138),
    "sports.txt.gz": (35598, 18357, 296337, 317),
    "instruments.json.gz": (24772, 9922, 206153, 35),
    "ml-1m.txt.gz": (6040, 3416, 999611, 0),
    "ml-100k.inter.gz": (943, 1682, 100000, 3),
}


@pytest.mark.parametrize("name", SHARED)
def test_public_data_sets_have_their_known_size(name: str, shared_data: Path) -> None:
    data = read_interactions(shared_data / "rec" / name)
    split = leave_one_out(data)
    assert (data.num_users, data.num_items, len(data.items), split.untrained_targets) == SHARED[name]
    assert len(split.users) == data.num_users
    assert (data.timestamps is not None) == (name == "ml-100k.inter.gz")
    if name in ("beauty.txt.gz", "instruments.json.gz"):  # published as 5-cores
        assert data.k_core(5) is data
    if data.timestamps is not None:
        assert data.tied_targets() == 415
