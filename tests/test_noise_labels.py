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


KINDS = list(LABEL_NOISES)
ROW_WISE = [kind for kind in KINDS if LABEL_NOISES[kind].row_wise]


def by_id(dataset) -> dict[str, tuple[list[int], list[bool]]]:
    return {row["id"]: (row["labels"], row["corrupted"]) for row in dataset}


@pytest.mark.parametrize("kind", KINDS)
@given(rate=st.floats(0, 1), seed=st.integers(0, 2**63), answer=st.integers(1, 8))
@settings(max_examples=12, deadline=None)
def test_only_completion_labels_change_and_the_column_says_which(kind, rate, seed, answer):
    clean = make_rows(6, answer)
    noisy = corrupt_labels(clean, rate, **{**OPTIONS, "seed": seed}, kind=kind)
    assert noisy["input_ids"] == clean["input_ids"]
    for before, after in zip(clean, noisy, strict=True):
        changed = [a != b for a, b in zip(before["labels"], after["labels"], strict=True)]
        assert changed == after["corrupted"]
        for label, new, corrupted in zip(before["labels"], after["labels"], changed, strict=True):
            assert not (corrupted and label in (-100, EOS, PAD))
            assert new == label or 0 <= new < VOCABULARY


@pytest.mark.parametrize("kind", KINDS)
def test_rate_zero_changes_nothing_and_rate_one_every_eligible_label(kind):
    clean = make_rows()
    none, every = (corrupt_labels(clean, rate, **OPTIONS, kind=kind) for rate in (0, 1))
    assert none["labels"] == clean["labels"]
    assert not any(map(any, none["corrupted"]))
    for before, after in zip(clean, every, strict=True):
        eligible = [label not in (-100, EOS, PAD) for label in before["labels"]]
        # A wrong answer may share a token with the true one at its place; a wrong token never is the true one.
        assert after["corrupted"] == eligible or (kind in ROW_WISE and 0 < sum(after["corrupted"]) < sum(eligible))
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


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_the_same_whatever_workers_order_shards_or_streaming(kind):
    clean, options = make_rows(), {**OPTIONS, "kind": kind}
    expected = by_id(corrupt_labels(clean, 0.4, **options))
    assert by_id(corrupt_labels(clean, 0.4, **options, num_proc=2)) == expected
    assert by_id(corrupt_labels(clean.shuffle(seed=3), 0.4, **options)) == expected
    shards = [corrupt_labels(clean.shard(3, place), 0.4, **options, reference=clean) for place in range(3)]
    assert by_id(concatenate_datasets(shards)) == expected
    streamed = corrupt_labels(clean.to_iterable_dataset(num_shards=4), 0.4, **options)
    assert by_id(streamed) == expected
    assert by_id(streamed) == expected  # the second epoch
    assert by_id(corrupt_labels(clean, 0.4, **{**options, "seed": 8})) != expected


def test_a_shard_alone_has_a_pool_of_its_own():
    shard = make_rows().shard(3, 0)
    for kind in ("unigram", "answer_swap"):
        alone = corrupt_labels(shard, 0.9, **OPTIONS, kind=kind)
        assert by_id(alone) != by_id(corrupt_labels(shard, 0.9, **OPTIONS, kind=kind, reference=make_rows()))


def test_the_row_id_keys_the_noise():
    rows = [{"id": name, "input_ids": [5] * 30, "labels": [5] * 30} for name in ("a", "b", "a")]
    first, second, third = corrupt_labels(Dataset.from_list(rows), 0.5, **OPTIONS)["labels"]
    assert first == third
    assert first != second


def test_noise_does_not_drift_between_versions():
    rows = Dataset.from_list([{"id": "row-0", "input_ids": [5] * 8, "labels": [5] * 8}])
    noisy = corrupt_labels(rows, 0.5, seed=7, vocab_size=100)
    assert noisy["labels"][0] == [31, 94, 5, 5, 12, 35, 5, 5]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("unigram", [22, 4, 21, 42, 40, 38]),
        ("answer_swap", [4, 6, 3, 11, 41, 33]),
        ("span_shift", [45, 26, 31, 48, 37, 45]),
    ],
)
def test_learned_noise_does_not_drift_between_versions(kind, expected):
    assert corrupt_labels(make_rows(5), 1, **OPTIONS, kind=kind)["labels"][1][5:11] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_low_rates_corruption_is_part_of_a_higher_ones(kind):
    low, high = (corrupt_labels(make_rows(), rate, **OPTIONS, kind=kind) for rate in (0.1, 0.3))
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
    with pytest.raises(ValueError, match="choose from answer_swap, span_shift, uniform, unigram"):
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

    def prepare(self, rows, eligible, vocabulary):
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


@pytest.mark.parametrize("kind", ROW_WISE)
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_a_row_keeps_or_loses_its_answer_as_a_whole_at_the_given_rate(kind, rate):
    clean = make_rows(500)
    at_rate, at_one = (corrupt_labels(clean, value, **OPTIONS, kind=kind) for value in (rate, 1))
    lost = 0
    for before, after, wrong in zip(clean, at_rate, at_one, strict=True):
        assert after["labels"] in (before["labels"], wrong["labels"])
        lost += after["labels"] == wrong["labels"]
    assert abs(lost / 500 - rate) < 4 * (rate * (1 - rate) / 500) ** 0.5


def test_unigram_draws_tokens_as_often_as_they_occur_but_never_the_true_one():
    # Token 4 is half of all labels, 5 a third, 6 a sixth, and 7 may not serve.
    labels = [4] * 30 + [5] * 20 + [6] * 10 + [7]
    rows = Dataset.from_list([{"id": i, "input_ids": labels, "labels": labels} for i in range(200)])
    noisy = np.array(corrupt_labels(rows, 1.0, seed=0, vocab_size=11, kind="unigram", special_token_ids=[7])["labels"])
    assert set(np.unique(noisy)) == {4, 5, 6}
    for token, others in {4: {5: 2 / 3, 6: 1 / 3}, 5: {4: 3 / 4, 6: 1 / 4}, 7: {4: 1 / 2, 5: 1 / 3, 6: 1 / 6}}.items():
        drawn = noisy[:, np.array(labels) == token].ravel()
        assert not (drawn == token).any()
        for other, share in others.items():
            assert abs((drawn == other).mean() - share) < 4 * (share * (1 - share) / drawn.size) ** 0.5


@given(lengths=st.lists(st.integers(1, 6), min_size=3, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_swapped_answer_is_another_rows_cut_or_repeated(lengths, seed):
    answers = [[10 * (n + 1) + m for m in range(length)] for n, length in enumerate(lengths)]
    rows = Dataset.from_list(
        [{"id": n, "input_ids": [1, *answer, EOS], "labels": [-100, *answer, EOS]} for n, answer in enumerate(answers)]
    )
    noisy = corrupt_labels(rows, 1, seed=seed, vocab_size=100, eos_token_ids=[EOS], kind="answer_swap")
    for number, (answer, labels) in enumerate(zip(answers, noisy["labels"], strict=True)):
        wrong = labels[1:-1]
        donor = wrong[0] // 10 - 1
        assert donor != number and wrong == np.resize(answers[donor], len(answer)).tolist()
        assert labels[0] == -100 and labels[-1] == EOS


def test_answers_that_begin_alike_do_not_swap_into_themselves():
    labels = [[8], [8, 9], [7]]
    rows = Dataset.from_list([{"id": n, "input_ids": row, "labels": row} for n, row in enumerate(labels)])
    for seed in range(20):
        noisy = corrupt_labels(rows, 1, seed=seed, vocab_size=10, kind="answer_swap")
        assert noisy["labels"][0] == [7] and noisy["labels"][2] == [8]


def test_a_shifted_span_is_of_the_passage_and_near_the_answer():
    prompt, answer = list(range(10, 40)), [20, 21, 22]
    row = {"id": "a", "input_ids": [*prompt, *answer, EOS], "labels": [-100] * 30 + [*answer, EOS]}
    spans = {"passage_span": [5, 25], "answer_span": [10, 13]}

    def drawn(**columns):
        rows = Dataset.from_list([{**row, **columns, "id": n} for n in range(200)])
        labels = corrupt_labels(rows, 1, seed=0, vocab_size=50, eos_token_ids=[EOS], kind="span_shift")["labels"]
        assert all(label[33] == EOS and np.diff(label[30:33]).tolist() == [1, 1] for label in labels)
        return {label[30] for label in labels}

    assert drawn(**spans) == {17, 18, 19, 21, 22, 23}
    assert drawn(passage_span=[5, 25], answer_span=[-1, -1]) == set(range(15, 33)) - {20}
    assert drawn() == set(range(10, 38)) - {20}


def test_a_passage_shorter_than_the_answer_is_repeated():
    row = {"id": "a", "input_ids": [7, 8, 5, 6, 9, EOS], "labels": [-100, -100, 5, 6, 9, EOS]}
    noisy = corrupt_labels(Dataset.from_list([row]), 1, seed=0, vocab_size=10, eos_token_ids=[EOS], kind="span_shift")
    assert noisy["labels"] == [[-100, -100, 7, 8, 7, EOS]]


def test_kinds_refuse_what_they_cannot_draw_from():
    one = Dataset.from_list([{"id": n, "input_ids": [5], "labels": [5]} for n in range(3)])
    with pytest.raises(ValueError, match="two different tokens among the labels"):
        corrupt_labels(one, 0.3, **OPTIONS, kind="unigram")
    with pytest.raises(ValueError, match="two different answers"):
        corrupt_labels(one, 0.3, **OPTIONS, kind="answer_swap")
    with pytest.raises(ValueError, match="no column 'input_ids'"):
        corrupt_labels(one.remove_columns("input_ids"), 0.3, **OPTIONS, kind="span_shift")
