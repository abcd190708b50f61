"""The interval holds a known difference as often as it says, whatever the differences come from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bft_hf.recipes.intervals import Interval, hierarchical_bootstrap, holm, written

DIFFERENCE = 0.3
REPLICATIONS = 400
# Standard deviations of what differs by seed, by question, and by both.
SOURCES = {
    "seeds": (0.05, 0.05, 0.1),
    "questions": (0.0, 0.5, 0.1),
    "neither": (0.0, 0.05, 0.5),
    "all": (0.03, 0.3, 0.3),
}
Maker = Callable[[int, int, float], "np.ndarray[Any, Any]"]


def normal_maker(source: str) -> Maker:
    by_seed, by_question, rest = SOURCES[source]
    generator = np.random.default_rng(11)

    def make(seeds: int, questions: int, difference: float) -> "np.ndarray[Any, Any]":
        return (
            difference
            + generator.normal(0, by_seed, (seeds, 1))
            + generator.normal(0, by_question, (1, questions))
            + generator.normal(0, rest, (seeds, questions))
        )

    return make


def answers_maker() -> Maker:
    """Right and wrong answers of two arms to the same questions, some easy and some hard, training differing by seed."""
    generator = np.random.default_rng(8)

    def arm(easy: "np.ndarray[Any, Any]", seeds: int) -> "np.ndarray[Any, Any]":
        level = easy + generator.normal(0, 0.1, (seeds, 1)) + generator.normal(0, 1.0, (seeds, easy.shape[1]))
        return (generator.random(level.shape) < 1 / (1 + np.exp(-level))).astype(float)

    def make(seeds: int, questions: int, difference: float) -> "np.ndarray[Any, Any]":
        easy = generator.normal(0, 2, (1, questions))
        return arm(easy, seeds) - arm(easy, seeds) + difference

    return make


def plain_bootstrap(values: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Percentiles of means over seeds and questions drawn with replacement, nothing corrected."""
    generator = np.random.default_rng(0)
    seeds, questions = values.shape
    by_seed, by_question = (
        generator.integers(seeds, size=(400, seeds)),
        generator.integers(questions, size=(400, questions)),
    )
    low, high = np.quantile(values[by_seed[:, :, None], by_question[:, None]].mean((1, 2)), [0.025, 0.975])
    return low, high


def intervals(make: Maker, seeds: int, difference: float) -> list[Interval]:
    return [hierarchical_bootstrap(make(seeds, 100, difference), samples=500) for _ in range(REPLICATIONS)]


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("source", [*SOURCES, "answers"])
def test_holds_the_difference_95_times_in_100(source: str, seeds: int) -> None:
    make = answers_maker() if source == "answers" else normal_maker(source)
    found = intervals(make, seeds, DIFFERENCE)
    holds = np.mean([interval.low <= DIFFERENCE <= interval.high for interval in found])
    # Two and a half standard errors of the count below .95. Above, five seeds can rule out little: wide is honest.
    assert 0.923 <= holds <= 0.985, holds


@pytest.mark.parametrize("source", ["seeds", "all", "answers"])
def test_no_difference_is_rarely_found(source: str) -> None:
    make = answers_maker() if source == "answers" else normal_maker(source)
    found = intervals(make, 5, 0.0)
    assert 0.01 <= np.mean([interval.excludes_zero for interval in found]) <= 0.078
    assert 0.01 <= np.mean([interval.p < 0.05 for interval in found]) <= 0.078


def test_a_difference_of_four_standard_errors_is_found() -> None:
    by_seed, by_question, rest = SOURCES["all"]
    error = (by_seed**2 / 5 + by_question**2 / 100 + rest**2 / 500) ** 0.5
    found = intervals(normal_maker("all"), 5, 4 * error)
    assert np.mean([interval.low > 0 for interval in found]) > 0.9
    assert np.mean([interval.low > 0 for interval in intervals(normal_maker("all"), 5, -4 * error)]) == 0


def test_a_plain_bootstrap_would_not_do() -> None:
    make = normal_maker("seeds")
    ends = [plain_bootstrap(make(3, 100, DIFFERENCE)) for _ in range(300)]
    assert 0.70 < np.mean([low <= DIFFERENCE <= high for low, high in ends]) < 0.86


def test_seeds_alone_are_students_t() -> None:
    by_seed = np.random.default_rng(3).normal(0.1, 0.05, 8)
    interval = hierarchical_bootstrap(np.tile(by_seed[:, None], (1, 50)))
    low, high = stats.t.interval(0.95, 7, by_seed.mean(), stats.sem(by_seed))
    assert interval.mean == pytest.approx(by_seed.mean())
    assert [interval.low, interval.high] == pytest.approx([low, high], abs=0.1 * (high - low))


def test_one_seed_is_an_interval_over_questions() -> None:
    values = np.random.default_rng(4).normal(0.1, 0.5, 300)
    interval = hierarchical_bootstrap(values[None])
    low, high = stats.t.interval(0.95, 299, values.mean(), stats.sem(values))
    assert (interval.seeds, interval.questions) == (1, 300)
    assert [interval.low, interval.high] == pytest.approx([low, high], abs=0.05 * (high - low))


def test_one_question_is_an_interval_over_seeds() -> None:
    interval = hierarchical_bootstrap(np.array([[0.1], [0.2], [0.3], [0.2]]))
    assert interval.low < 0.2 < interval.high and interval.mean == pytest.approx(0.2)


def test_draws_are_fixed_and_zero_alike_has_no_width() -> None:
    values = np.random.default_rng(5).normal(size=(4, 30))
    assert hierarchical_bootstrap(values) == hierarchical_bootstrap(values)
    assert hierarchical_bootstrap(values) != hierarchical_bootstrap(values, seed=1)
    assert hierarchical_bootstrap(np.zeros((3, 9))) == Interval(0.0, 0.0, 0.0, 1.0, 3, 9)
    assert not hierarchical_bootstrap(np.zeros((3, 9))).excludes_zero
    assert hierarchical_bootstrap(np.full((3, 9), 0.5)).excludes_zero


def test_p_and_interval_agree() -> None:
    values = np.random.default_rng(6).normal(0, 0.2, (5, 80))
    interval = hierarchical_bootstrap(values)
    at_the_edge = hierarchical_bootstrap(values - interval.low)
    assert at_the_edge.p == pytest.approx(0.05, abs=0.004)


@pytest.mark.parametrize("values", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.array([[1.0, np.nan]])])
def test_what_is_no_table_is_refused(values: "np.ndarray[Any, Any]") -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        hierarchical_bootstrap(values)


def test_holm() -> None:
    # Holm 1979 by hand: .005 * 4, .01 * 3, .03 * 2, and .04 no smaller than the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # An arm of a recommender that loses, and would seem to lose perhaps.
        ((-0.00117, -0.00221, -0.00014), "-0.0012 [-0.0022, -0.0001]"),
        ((-0.0003, -0.0004, 0.0012), "-0.0003 [-0.0004, +0.0012]"),
        ((0.024, -0.0000031, 0.048), "+0.024000 [-0.000003, +0.048000]"),
        ((0.024, -0.00000002, 0.048), "+0.024 [-2e-08, +0.048]"),
        # Three digits are enough.
        ((0.0001, -0.051, 0.0512), "+0.000 [-0.051, +0.051]"),
        ((0.0, -0.0015, 0.0005), "+0.000 [-0.002, +0.001]"),
        ((1.4011, 1.2079, 1.5893), "+1.401 [+1.208, +1.589]"),
        # Zero is zero, with the rounding of a sum too.
        ((0.0, 0.0, 0.0), "+0.000 [+0.000, +0.000]"),
        ((-0.01, -0.02, -2e-17), "-0.010 [-0.020, +0.000]"),
        # As many digits as it takes to see the width, and no more than six.
        ((0.0012, 0.00112, 0.00128), "+0.00120 [+0.00112, +0.00128]"),
        ((0.5, 0.5 - 1e-9, 0.5 + 1e-9), "+0.500000 [+0.500000, +0.500000]"),
    ],
)
def test_no_end_that_is_not_zero_is_written_as_zero(ends: tuple[float, float, float], expected: str) -> None:
    assert written(*ends, signed=True) == expected
    assert written(*ends) == expected.replace("+", "")
