"""Scores of suspicion: how wrong a label looks, from what one forward pass says about it; higher is more suspicious."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas

DEFAULT_SCORE = "loss"
DEFAULT_AGGREGATE = "max"
COMBINED = "combined"
FOLDS = 5
CLEANLAB_FLOOR = 1e-6  # below which cleanlab clips a probability


@dataclass(frozen=True)
class Suspicion:
    """A row of `SUSPICIONS`.

    Attributes:
        summary: What `--help` and the page say about it.
        function: Of a table of tokens, with the columns that `bft-audit` writes, and the size of the vocabulary.
        needs: A column that the table must have.
    """

    summary: str
    function: Callable[["pandas.DataFrame", int], np.ndarray]
    needs: str = "loss"


def _confidence_weighted_entropy(tokens: "pandas.DataFrame", vocab_size: int) -> np.ndarray:
    ratio = tokens["entropy"] / np.log(vocab_size) / tokens["probability"].clip(lower=CLEANLAB_FLOOR)
    return 1 - (np.log1p(ratio) / ratio.clip(lower=CLEANLAB_FLOOR)).to_numpy()


# The directions are fixed here, before any data: what is unlikely is suspicious, and so is what the filter is unsure of. An
# AUROC below one half stays below.
SUSPICIONS: dict[str, Suspicion] = {
    "loss": Suspicion("-log p(label)", lambda tokens, _: tokens["loss"].to_numpy()),
    # 1 - the label quality scores of cleanlab 2.9 (rank.get_label_quality_scores), without its adjustment by class.
    "self_confidence": Suspicion("cleanlab: p(label)", lambda tokens, _: 1 - tokens["probability"].to_numpy()),
    "normalized_margin": Suspicion(
        "cleanlab: p(label) against the likeliest other token's",
        lambda tokens, _: (1 - tokens["probability"] + tokens["rival_probability"]).to_numpy() / 2,
    ),
    "confidence_weighted_entropy": Suspicion("cleanlab: entropy over p(label)", _confidence_weighted_entropy),
    "entropy": Suspicion(
        "of the predicted distribution; blind to the label", lambda tokens, _: tokens["entropy"].to_numpy()
    ),
    "precision": Suspicion(
        "low final precision of the state that predicts the label; blind to the label",
        lambda tokens, _: -np.log(tokens["precision"].to_numpy()),
        needs="precision",
    ),
    "gain": Suspicion(
        "low mean gain of that state; blind to the label", lambda tokens, _: -tokens["gain"].to_numpy(), needs="gain"
    ),
    "input_precision": Suspicion(
        "low final precision of the token in the input",
        lambda tokens, _: -np.log(tokens["input_precision"].to_numpy()),
        needs="input_precision",
    ),
    "input_gain": Suspicion(
        "low mean gain of the token in the input",
        lambda tokens, _: -tokens["input_gain"].to_numpy(),
        needs="input_gain",
    ),
}
FEATURES = ("loss", "entropy", "precision", "gain", "input_precision", "input_gain")
AGGREGATES: dict[str, Callable[[Any], Any]] = {
    "max": lambda grouped: grouped.max(),
    "mean": lambda grouped: grouped.mean(),
}


def suspicions(tokens: "pandas.DataFrame", vocab_size: int) -> dict[str, np.ndarray]:
    """Every score that the table has the columns for, (token,) by name."""
    return {name: score.function(tokens, vocab_size) for name, score in SUSPICIONS.items() if score.needs in tokens}


def by_row(scores: np.ndarray, rows: np.ndarray, aggregate: str) -> np.ndarray:
    """A row's suspicion: the most suspicious of its tokens ("max", as cleanlab's sentence score), or their mean.

    Args:
        scores: (token,).
        rows: (token,), the number of each token's row.
        aggregate: A key of `AGGREGATES`.

    Returns:
        (distinct row,), in the order of their numbers.
    """
    import pandas

    return AGGREGATES[aggregate](pandas.Series(scores).groupby(rows, sort=True)).to_numpy()


class Combination:
    """A logistic regression on standardised scores, with weights from rows whose corruption is known.

    Args:
        tokens: Of rows into which corruption was put, with a column `row`.
        corrupted: (token,) bool, where.

    Raises:
        ValueError: No label is corrupted, or all are.
    """

    def __init__(self, tokens: "pandas.DataFrame", corrupted: np.ndarray) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        if corrupted.all() or not corrupted.any():
            raise ValueError(
                f"{int(corrupted.sum())} of {len(corrupted)} labels of the calibration rows were corrupted: give more rows or "
                "another rate (--calibration_examples, --calibration_noise)"
            )
        self.model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        self.model.fit(_features(tokens), corrupted)
        self.names = [name for name in FEATURES if name in tokens]

    def __call__(self, tokens: "pandas.DataFrame") -> np.ndarray:
        """The log-odds of corruption, (token,), up to the share of corruption in the rows it was fitted on."""
        return self.model.decision_function(_features(tokens))

    @property
    def weights(self) -> dict[str, float]:
        """What a standard deviation of each score adds to the log-odds."""
        return dict(zip(self.names, self.model[-1].coef_[0].tolist(), strict=True))


def _features(tokens: "pandas.DataFrame") -> np.ndarray:
    columns = [SUSPICIONS[name].function(tokens, 0) for name in FEATURES if name in tokens]
    return np.column_stack(columns)


def combined(
    tokens: "pandas.DataFrame", known: "pandas.DataFrame", corrupted: np.ndarray, seed: int = 0
) -> tuple[np.ndarray, dict[str, float]]:
    """Rank tokens by a `Combination` that was never fitted on the rows it ranks.

    Rows that gave no calibration rows are ranked by one fitted on all of those; the others, fold by fold, by one fitted on
    the calibration rows of the other folds.

    Args:
        tokens: What is ranked; `row` numbers the rows.
        known: Tokens of the calibration rows, copies of some of the rows with corruption put in, numbered alike.
        corrupted: (calibration token,) bool, where.
        seed: Of the folds.

    Returns:
        The score of each token, and the weights of the combination that was fitted on all calibration rows.

    Raises:
        ValueError: Too few rows, or corrupted labels, for the folds.
    """
    numbers = known["row"].unique()
    if len(numbers) < FOLDS:
        raise ValueError(f"{len(numbers)} calibration rows: at least {FOLDS} are needed (--calibration_examples)")
    whole = Combination(known, corrupted)
    scores = whole(tokens)
    folds = np.array_split(np.random.default_rng(seed).permutation(numbers), FOLDS)
    for fold in folds:
        own, others = tokens["row"].isin(fold).to_numpy(), ~known["row"].isin(fold).to_numpy()
        if own.any():
            scores[own] = Combination(known[others], corrupted[others])(tokens[own])
    return scores, whole.weights
