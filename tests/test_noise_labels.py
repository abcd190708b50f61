"""Label corruption: what it touches, how often, and that only seed and row id decide."""

import pickle

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_hf.noise.labels import LABEL_NOISES, LabelNoise, corrupt_labels

VOCABULARY = 50
EOS, PAD = 2, 0
OPTIONS = {"seed": 7, "vocab_size": VOCABULARY, "eos_token_ids": [EOS], "pad_token_id": PAD}


def make_rows(count: int = 40, answer: int = 6) -> Dataset:
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        prompt = generator.integers(3, VOCABULARY, 5).tolist()
        target = [*generator.integers(3, VOCABULARY, answer).tolist(), EOS]
        ids = [*prompt, *target, PAD]
        rows.append({"id": f"row-{number}", "input_ids": ids, "labels": [-100] * 5 + target + [PAD]})
    return Dataset.from_list(rows)


def by_id(dataset) -> dict[str, tuple[list[int], list[bool]]]:
    return {row["id"]: (row["labels"], row["corrupted"]) for row in dataset}


@given(rate=st.floats(0, 1), seed=st.integers(0, 2**63))
@settings(max_examples=25, deadline=None)
def test_only_completion_labels_change_and_the_column_says_which(rate, seed):
    clean = make_rows(6)
    noisy = corrupt_labels(clean, rate, **{**OPTIONS, "seed": seed})
    assert noisy["input_ids"] == clean["input_ids"]
    for before, after in zip(clean, noisy, strict=True):
        changed = [a != b for a, b in zip(before["labels"], after["labels"], strict=True)]
        assert changed == after["corrupted"]
        for label, new, corrupted in zip(before["labels"], after["labels"], changed, strict=True):
            assert not (corrupted and label in (-100, EOS, PAD))
            assert new == label or 0 <= new < VOCABULARY


def test_rate_zero_changes_nothing_and_rate_one_every_eligible_label():
    clean = make_rows()
    none, every = corrupt_labels(clean, 0, **OPTIONS), corrupt_labels(clean, 1, **OPTIONS)
    assert none["labels"] == clean["labels"]
    assert not any(map(any, none["corrupted"]))
    for before, after in zip(clean, every, strict=True):
        assert after["corrupted"] == [label not in (-100, EOS, PAD) for label in before["labels"]]
        assert after["labels"] != before["labels"]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_realised_rate_lies_within_binomial_bounds(rate):
    clean = make_rows(400, 20)
    realised = sum(map(sum, corrupt_labels(clean, rate, **OPTIONS)["corrupted"])) / 8000
    assert abs(realised - rate) < 4 * (rate * (1 - rate) / 8000) ** 0.5
    assert abs(realised - rate) > 0  # an exact hit would mean quotas, not draws


def test_replacements_are_uniform_over_the_other_tokens():
    rows = Dataset.from_list([{"id": i, "input_ids": [4] * 100, "labels": [4] * 100} for i in range(100)])
    labels = np.array(corrupt_labels(rows, 1.0, seed=0, vocab_size=11)["labels"]).ravel()
    counts = np.bincount(labels, minlength=11)
    assert counts[4] == 0
    others = np.delete(counts, 4)
    assert ((others - 1000) ** 2 / 1000).sum() < 27.9  # chi squared, 9 degrees of freedom, p = .001


def test_special_tokens_never_serve_as_replacements_unlike_others():
    special = list(range(3, 40))
    labels = np.array(corrupt_labels(make_rows(), 1, **OPTIONS, special_token_ids=special)["labels"])
    corrupted = np.array(corrupt_labels(make_rows(), 1, **OPTIONS, special_token_ids=special)["corrupted"])
    assert not np.isin(labels[corrupted], special).any()
    plain = np.array(corrupt_labels(make_rows(), 1, **OPTIONS)["labels"])
    assert np.isin(plain[corrupted], special).any()


def test_noise_is_the_same_whatever_workers_order_shards_or_streaming():
    clean = make_rows()
    expected = by_id(corrupt_labels(clean, 0.4, **OPTIONS))
    assert by_id(corrupt_labels(clean, 0.4, **OPTIONS, num_proc=2)) == expected
    assert by_id(corrupt_labels(clean.shuffle(seed=3), 0.4, **OPTIONS)) == expected
    shards = [corrupt_labels(clean.shard(3, place), 0.4, **OPTIONS) for place in range(3)]
    assert by_id(concatenate_datasets(shards)) == expected
    streamed = corrupt_labels(clean.to_iterable_dataset(num_shards=4), 0.4, **OPTIONS)
    assert by_id(streamed) == expected
    assert by_id(streamed) == expected  # the second epoch
    assert by_id(corrupt_labels(clean, 0.4, **{**OPTIONS, "seed": 8})) != expected


def test_the_row_id_keys_the_noise():
    rows = [{"id": name, "input_ids": [5] * 30, "labels": [5] * 30} for name in ("a", "b", "a")]
    first, second, third = corrupt_labels(Dataset.from_list(rows), 0.5, **OPTIONS)["labels"]
    assert first == third
    assert first != second


def test_noise_does_not_drift_between_versions():
    rows = Dataset.from_list([{"id": "row-0", "input_ids": [5] * 8, "labels": [5] * 8}])
    noisy = corrupt_labels(rows, 0.5, seed=7, vocab_size=100)
    assert noisy["labels"][0] == [31, 94, 5, 5, 12, 35, 5, 5]


def test_a_low_rates_corruption_is_part_of_a_higher_ones():
    low, high = (corrupt_labels(make_rows(), rate, **OPTIONS) for rate in (0.1, 0.3))
    low_count, high_count = (sum(map(sum, noisy["corrupted"])) for noisy in (low, high))
    assert 0 < low_count < high_count
    for few, many in zip(low, high, strict=True):
        for a, b, corrupted in zip(few["labels"], many["labels"], few["corrupted"], strict=True):
            assert not corrupted or a == b


@pytest.mark.parametrize("rate", [-0.1, 1.3, float("nan"), float("inf"), "x", None])
def test_rates_outside_the_interval_are_refused(rate):
    with pytest.raises(ValueError, match=r"number in \[0, 1\], got") as caught:
        corrupt_labels(make_rows(2), rate, **OPTIONS)
    assert repr(rate) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_columns_and_double_corruption_are_refused(streaming):
    def wrap(rows: Dataset):
        return rows.to_iterable_dataset() if streaming else rows

    for column in ("labels", "id"):
        with pytest.raises(ValueError, match=f"no column '{column}'"):
            corrupt_labels(wrap(make_rows(2).remove_columns(column)), 0.3, **OPTIONS)
    with pytest.raises(ValueError, match="'corrupted' already"):
        corrupt_labels(wrap(corrupt_labels(make_rows(2), 0.3, **OPTIONS)), 0.3, **OPTIONS)
    with pytest.raises(ValueError, match="choose from uniform"):
        corrupt_labels(wrap(make_rows(2)), 0.3, **OPTIONS, kind="spam")
    with pytest.raises(ValueError, match="two tokens"):
        corrupt_labels(wrap(make_rows(2)), 0.3, seed=0, vocab_size=1)


def test_a_label_outside_the_vocabulary_names_the_row():
    with pytest.raises(ValueError, match="'row-0' has a label outside the vocabulary of 10 tokens"):
        corrupt_labels(make_rows(1), 0.3, seed=0, vocab_size=10)


def test_a_row_without_any_answer_keeps_the_column_types():
    rows = Dataset.from_list(
        [{"id": "a", "input_ids": [1], "labels": [-100]}, {"id": "b", "input_ids": [], "labels": []}]
    )
    noisy = corrupt_labels(rows, 1.0, **OPTIONS)
    assert noisy["labels"] == [[-100], []]
    assert noisy["corrupted"] == [[False], []]
    assert noisy.features["labels"] == rows.features["labels"]


def test_map_finds_its_cache_again_for_the_same_arguments_only(tmp_path):
    make_rows().save_to_disk(tmp_path / "rows")
    first, again, other = (
        corrupt_labels(load_from_disk(tmp_path / "rows"), rate, **OPTIONS) for rate in (0.3, 0.3, 0.4)
    )
    assert first._fingerprint == again._fingerprint
    assert first.cache_files == again.cache_files
    assert first._fingerprint != other._fingerprint


class Swap(LabelNoise):
    """A kind of the later sort: whole rows, and learned from the data."""

    row_wise = True

    def prepare(self, rows, eligible):
        labels = np.array(next(iter(rows))["labels"])
        self.donor = labels[eligible(labels)]

    def replace(self, labels, generator, vocabulary, row):
        return np.resize(self.donor, labels.shape)


def test_a_new_kind_is_one_small_class(monkeypatch):
    monkeypatch.setitem(LABEL_NOISES, "swap", Swap)
    pickle.dumps(Swap())
    clean = make_rows(30)
    noisy = corrupt_labels(clean, 0.5, **OPTIONS, kind="swap", num_proc=2)
    whole = [sum(row) for row in noisy["corrupted"][1:]]
    assert 0 < sum(count > 0 for count in whole) < 29
    for before, after in zip(clean, noisy, strict=True):
        assert after["labels"] in (before["labels"], [-100] * 5 + clean[0]["labels"][5:11] + [EOS, PAD])
    assert noisy["labels"] != corrupt_labels(clean, 0.5, **OPTIONS)["labels"]
