"""Intervals of a mean over seeds and questions by a hierarchical bootstrap, Holm's correction, and how they are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
SAMPLES = 10_000
FEWEST_DIGITS, MOST_DIGITS = 3, 6  # after the point
ROUNDING = 1e-12  # what lies this near to zero is zero: errors of sums
METHOD = (
    "Intervals are of 95 % by a hierarchical bootstrap over seeds and questions. The questions are the same in every run, so a draw "
    "takes seeds with replacement and, once for all seeds and both arms, questions with replacement. Seeds and questions have the "
    "shares in a draw that a crossed two-way layout estimates without bias, and the draws are stretched until 95 % of them span as "
    "much as Student's t with Satterthwaite's degrees of freedom: plain percentiles over three seeds that differ would hold the "
    "truth only 79 times in 100. p is two-sided and of the same draws; p (Holm) is corrected for all comparisons of its table, the "
    "intervals are not."
)


@dataclass(frozen=True)
class Interval:
    """A mean and where it may lie.

    Attributes:
        mean: Over seeds and questions.
        low: Lower end.
        high: Upper end.
        p: Two-sided, of the mean being zero; no smaller than the number of draws can tell.
        seeds: How many. With one there is no telling how much another would differ: the interval is over questions alone.
        questions: How many.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    questions: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


def hierarchical_bootstrap(
    values: "np.ndarray[Any, Any]", *, level: float = LEVEL, samples: int = SAMPLES, seed: int = 0
) -> Interval:
    """The mean of a table of seeds by questions, where another draw of either could have come.

    With row means r, column means c and mean squares MS of seeds, questions and the rest, a draw is

        mean + stretch (a sum_s u_s (r_s - mean) + b sum_q v_q (c_q - mean)),

    u and v the shares by which seeds and questions were drawn, a² = S/(S-1) max(0, 1 - MS_rest/MS_seeds) and b² = Q/(Q-1):
    a plain draw from both (Owen 2007, "The pigeonhole bootstrap") counts the rest's variance three times and shrinks that of
    S seeds by (S-1)/S. The stretch makes the interval as wide as that of Student's t with the layout's own variance,
    (max(0, MS_seeds - MS_rest) + MS_questions) / SQ, and Satterthwaite's degrees of freedom; where its two ends lie is left
    to the draws. Every second draw mirrors the seeds' part: a handful of seeds has no tails, and a skew only by chance.

    Args:
        values: (seed, question), finite; of paired differences, say.
        level: Of the interval.
        samples: Draws.
        seed: Of the draws.

    Raises:
        ValueError: A table that is empty, not two-dimensional or holds something that is not finite.
    """
    import numpy as np
    from scipy import stats

    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"a table (seed, question) of finite numbers is needed, got shape {values.shape}")
    seeds, questions = values.shape
    mean = values.mean()
    by_seed, by_question = values.mean(1) - mean, values.mean(0) - mean
    rest = values - mean - by_seed[:, None] - by_question
    free_s, free_q = seeds - 1, questions - 1
    ms_seed = questions * (by_seed**2).sum() / free_s if free_s else 0.0
    ms_question = seeds * (by_question**2).sum() / free_q if free_q else 0.0
    ms_rest = (rest**2).sum() / (free_s * free_q) if free_s and free_q else 0.0
    of_seeds = max(0.0, ms_seed - ms_rest)
    if of_seeds + ms_question <= (np.finfo(float).eps * np.abs(values).max()) ** 2 * values.size:  # rounding alone
        return Interval(float(mean), float(mean), float(mean), float(mean == 0), seeds, questions)
    # Satterthwaite: (sum of mean squares)² over the sum of their squares, each by its own degrees of freedom.
    spread = (ms_question**2 / free_q if free_q else 0.0) + (
        ms_seed**2 / free_s + (ms_rest**2 / (free_s * free_q) if free_q else 0.0) if of_seeds else 0.0
    )
    freedom = (of_seeds + ms_question) ** 2 / spread
    quantile = (1 + level) / 2
    half_width = stats.t.ppf(quantile, freedom) * ((of_seeds + ms_question) / values.size) ** 0.5
    draws = np.zeros(samples)
    if of_seeds:
        scale = (seeds / free_s * of_seeds / ms_seed) ** 0.5
        mirrored = np.resize([1.0, -1.0], samples)
        draws += scale * mirrored * _weighted_means(by_seed, samples, seed)
    if free_q:
        draws += (questions / free_q) ** 0.5 * _weighted_means(by_question, samples, seed + 1)
    low, high = np.quantile(draws, [1 - quantile, quantile])
    stretch = 2 * half_width / (high - low) if high > low else 1.0
    draws, low, high = mean + stretch * draws, mean + stretch * low, mean + stretch * high
    tail = min((draws <= 0).sum(), (draws >= 0).sum())
    return Interval(float(mean), float(low), float(high), min(1.0, 2 * (tail + 1) / (samples + 1)), seeds, questions)


def _weighted_means(values: "np.ndarray[Any, Any]", samples: int, seed: int) -> "np.ndarray[Any, Any]":
    """The mean of as many values drawn with replacement, `samples` times."""
    import numpy as np

    counts = _counts(len(values), samples, seed)
    chunk = max(1, 4_000_000 // len(values))
    parts = [counts[start : start + chunk].astype(float) @ values for start in range(0, samples, chunk)]
    return np.concatenate(parts) / len(values)


@lru_cache(maxsize=4)
def _counts(size: int, samples: int, seed: int) -> "np.ndarray[Any, Any]":
    """How often each of `size` things was drawn, (samples, size): the same draws for every comparison of a report."""
    import numpy as np

    generator = np.random.default_rng([seed, size])
    counts = np.empty((samples, size), dtype=np.uint8)
    for row in range(samples):
        counts[row] = np.bincount(generator.integers(size, size=size), minlength=size)
    return counts


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the adjusted p of each, in the order given (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def written(mean: float, low: float, high: float, *, signed: bool = False) -> str:
    """`mean [low, high]`, all with as many digits as it takes to see the width, and that an end is not zero.

    A smaller end than the last digit can show stands as `+2e-08`: nobody shall take for zero what is not.

    Args:
        mean: Zero where it rounds to zero.
        low: Lower end.
        high: Upper end.
        signed: With the sign of what is positive, too, as a difference has it.
    """
    half = (high - low) / 2
    digits = FEWEST_DIGITS
    if half > 0:
        digits = min(MOST_DIGITS, max(digits, math.ceil(-math.log10(half))))
    ends = [end for end in (low, high) if float(f"{end:.{MOST_DIGITS}f}")]
    while not all(float(f"{end:.{digits}f}") for end in ends):
        digits += 1
    plus = "+" if signed else ""

    def text(value: float, *, end: bool) -> str:
        rounded = f"{value:{plus}.{digits}f}"
        if float(rounded):
            return rounded
        return f"{value:{plus}.0e}" if end and abs(value) > ROUNDING else rounded.replace("-", plus)

    return f"{text(mean, end=False)} [{text(low, end=True)}, {text(high, end=True)}]"
