"""model.recommend(): the best items to follow a history, with their names and how certain the model is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .batches import ranking_inputs, uses_time
from .evaluation import item_scores
from .item_map import ITEM_MAP_FILE, ItemMap

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


@dataclass(frozen=True)
class Recommendation:
    """One item to recommend.

    Attributes:
        item: Its name where the model has a map of items, else its id.
        title: Its title, or None where the map has none.
        score: Its logit.
        probability: Softmax of the scores over the whole catalogue, seen items included: the model's share for this item, as
            well calibrated as training made it.
        precision: The filter's final precision of the user's last state, averaged over channels: with relative units, 1 is as
            uncertain as the state is strong. The same for all of a user's recommendations; None for a plain model.
        score_std: Standard deviation of `score` if each channel of the last state had an independent error of variance
            s^2 / precision, s^2 being the state's mean square: the filter's uncertainty carried through to this item. It is the
            model's own opinion, not a calibrated interval. None for a plain model and for observation_units="absolute".
    """

    item: str | int
    title: str | None
    score: float
    probability: float
    precision: float | None = None
    score_std: float | None = None


class RecommenderMixin:
    """What a sequential recommender of transformers gains: `recommend`, and a map of items that is saved along.

    Attributes:
        item_map: Names of the items, or None: histories and recommendations are ids then.
    """

    item_map: ItemMap | None = None

    def recommend(
        self,
        histories: Sequence[Sequence[str | int]],
        k: int = 10,
        exclude_seen: bool = True,
        *,
        timestamps: Sequence[Sequence[float]] | None = None,
        skip_unknown: bool = False,
        batch_size: int = 256,
    ) -> list[list[Recommendation]]:
        """The k best items to come next, for each history.

        The model is put into evaluation mode for the call and scores every item of the catalogue; of a history longer than it
        reads, the latest items count, though all of them count as seen.

        Args:
            histories: Items of each user, oldest first: names where the model has an `item_map`, else ids from 1.
            k: How many; fewer come back where fewer items are unseen.
            exclude_seen: Leave out the items of the history.
            timestamps: Seconds of each item, for a model with a time bias.
            skip_unknown: Drop items the model does not know, rather than refuse them.
            batch_size: Histories scored at once.

        Returns:
            A list for each history, best first.

        Raises:
            ValueError: an unknown item, a history without items, timestamps that are missing or do not fit, k below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}: ask for at least one item")
        model: Any = self
        ids, times = self._known(histories, timestamps, skip_unknown)
        order = np.argsort([len(row) for row in ids], kind="stable")
        results: list[list[Recommendation]] = [[] for _ in ids]
        mode = model.training
        model.eval()
        try:
            for begin in range(0, len(order), batch_size):
                batch = order[begin : begin + batch_size]
                rows = [ids[i] for i in batch]
                batch_times = None if times is None else [times[i] for i in batch]
                for i, found in zip(batch, self._best(rows, batch_times, k, exclude_seen), strict=True):
                    results[i] = found
        finally:
            model.train(mode)
        return results

    def _known(
        self, histories: Sequence[Sequence[str | int]], timestamps: Sequence[Sequence[float]] | None, skip_unknown: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Histories as ids, and the times of what was kept."""
        model: Any = self
        if timestamps is None and uses_time(model):
            raise ValueError("the model has a time bias: give timestamps, a number of seconds for each item")
        ids: list[np.ndarray] = []
        times: list[np.ndarray] | None = None if timestamps is None else []
        for index, history in enumerate(histories):
            if isinstance(history, str | int):
                raise ValueError(f"history {index} is {history!r}: it has to be a list of items, even of one")
            found = [self._id_of(item, skip_unknown) for item in history]
            kept = [position for position, item in enumerate(found) if item]
            if not kept:
                raise ValueError(f"history {index} has no {'known ' if found else ''}item: there is nothing to go by")
            ids.append(np.array([found[position] for position in kept], dtype=np.int64))
            if times is not None:
                assert timestamps is not None
                if len(timestamps) != len(histories) or len(timestamps[index]) != len(history):
                    raise ValueError(f"history {index} has {len(history)} items: give as many timestamps")
                times.append(np.asarray(timestamps[index])[kept])
        return ids, times

    def _id_of(self, item: str | int, skip_unknown: bool) -> int:
        """The item's id, or 0 for one that is skipped."""
        model: Any = self
        if self.item_map is not None:
            return 0 if skip_unknown and item not in self.item_map else self.item_map.id_of(item)
        count = model.config.num_items
        if isinstance(item, str) or not 1 <= item <= count:
            if skip_unknown and not isinstance(item, str):
                return 0
            raise ValueError(f"unknown item {item!r}: the model has no item_map, so items are ids from 1 to {count}")
        return int(item)

    @torch.no_grad()
    def _best(
        self, rows: list[np.ndarray], times: list[np.ndarray] | None, k: int, exclude_seen: bool
    ) -> Iterator[list[Recommendation]]:
        model: Any = self
        device = next(model.parameters()).device
        inputs, last = ranking_inputs(model, rows, times)
        with _precision_recorded(model) as trace:
            hidden = model(**{name: value.to(device) for name, value in inputs.items()}).last_hidden_state
        at = (torch.arange(len(rows), device=device), last.to(device))
        states = hidden[at]
        scores = item_scores(model, states)
        probability = scores.softmax(dim=1)
        if exclude_seen:
            seen = np.concatenate([np.full(len(row), i) for i, row in enumerate(rows)]), np.concatenate(rows) - 1
            scores[torch.from_numpy(seen[0]).to(device), torch.from_numpy(seen[1]).to(device)] = -torch.inf
        best, columns = scores.topk(min(k, scores.shape[1]), dim=1)
        precision = deviation = None
        if trace is not None:
            lam = trace.final_precision[at].float()
            precision = lam if lam.ndim == 1 else lam.mean(dim=1)
            if model_units(model) == "relative":
                deviation = _score_std(model, states.float(), lam, columns)
        for i in range(len(rows)):
            yield [
                Recommendation(
                    item=item if self.item_map is None else self.item_map.name_of(item),
                    title=None if self.item_map is None else self.item_map.title_of(item),
                    score=float(best[i, place]),
                    probability=float(probability[i, column]),
                    precision=None if precision is None else float(precision[i]),
                    score_std=None if deviation is None else float(deviation[i, place]),
                )
                for place, column in enumerate(columns[i].tolist())
                if best[i, place] > -torch.inf and (item := column + 1)
            ]

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save the model, and the map of its items if it has one."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]
        if self.item_map is not None and is_main_process and Path(save_directory).is_dir():
            self.item_map.save(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model, and the map of its items where there is one."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        path = _find_item_map(pretrained_model_name_or_path, kwargs)
        if path is not None:
            model.item_map = ItemMap.load(path)
            if len(model.item_map) != model.config.num_items:
                raise ValueError(
                    f"{path} names {len(model.item_map)} items and the model has {model.config.num_items}: "
                    "it belongs to another model"
                )
        return loaded


def _find_item_map(source: Any, arguments: dict[str, Any]) -> str | None:
    from transformers.utils import cached_file

    if source is None:
        return None
    options = {name: arguments[name] for name in _HUB_ARGUMENTS if arguments.get(name) is not None}
    found: str | None = cached_file(
        str(source),
        ITEM_MAP_FILE,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )
    return found


def model_units(model: Any) -> str:
    """The filter's `observation_units`."""
    from ..patching import get_config

    config = get_config(model)
    assert config is not None
    return config.observation_units


@contextmanager
def _precision_recorded(model: Any) -> Iterator[Any]:
    """A trace of the pass, or None for a plain model."""
    from ..patching import is_patched
    from ..tracing import record

    if not is_patched(model):
        yield None
        return
    with record(model) as trace:
        yield trace


def _score_std(
    model: Any, states: Float[Tensor, "user channel"], lam: Tensor, columns: Tensor
) -> Float[Tensor, "user place"]:
    """See `Recommendation.score_std`. A head that mixes channels (BERT4Rec's) takes their mean precision."""
    if lam.ndim == 1 or getattr(model, "head", None) is not None:
        lam = (lam if lam.ndim == 1 else lam.mean(dim=1))[:, None].expand_as(states)
    variance = states.square().mean(dim=1, keepdim=True) / lam
    embeddings = model.item_embeddings()[columns + 1].float()
    return torch.einsum("ukc,uc->uk", embeddings.square(), variance).sqrt()
