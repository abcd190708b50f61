"""Interactions of users with items: their histories, filtered by k-core, ordered, and split leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

PADDING = 0
"""The id of no item; items have 1 to `num_items`."""


class DataError(ValueError):
    """A file that cannot be read as interactions, or what they cannot give; one line, with the line's number."""


@dataclass(frozen=True)
class Interactions:
    """Histories of users, each in the order of time.

    Attributes:
        user_names: Names of the users, as in the file.
        item_names: Names of the items; the item with id i is `item_names[i - 1]`. Sorted, as numbers where all are.
        items: Item ids of all histories, one user's after the other's, shape (actions,).
        offsets: User u's history is `items[offsets[u] : offsets[u + 1]]`, shape (users + 1,).
        timestamps: Seconds since 1970 of every action, or None where the file has none.
        order: Where the order within a history comes from, for whoever reads a result.
    """

    user_names: tuple[str, ...]
    item_names: tuple[str, ...]
    items: np.ndarray
    offsets: np.ndarray
    timestamps: np.ndarray | None
    order: str

    @property
    def num_users(self) -> int:
        """How many users there are."""
        return len(self.user_names)

    @property
    def num_items(self) -> int:
        """How many items there are; their ids end with this number."""
        return len(self.item_names)

    @property
    def lengths(self) -> np.ndarray:
        """Length of every user's history, shape (users,)."""
        return np.diff(self.offsets)

    def history(self, user: int) -> np.ndarray:
        """Item ids of the user at this position, oldest first."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def k_core(self, k: int) -> Interactions:
        """Drop users and items with fewer than `k` actions until every one that is left has `k`.

        Args:
            k: Of 1 or less, everything stays.

        Raises:
            DataError: nothing is left.
        """
        users = np.repeat(np.arange(self.num_users), self.lengths)
        keep = np.ones(len(self.items), dtype=bool)
        while True:
            by_user = np.bincount(users[keep], minlength=self.num_users)
            by_item = np.bincount(self.items[keep], minlength=self.num_items + 1)
            rare = keep & ((by_user[users] < k) | (by_item[self.items] < k))
            if not rare.any():
                break
            keep &= ~rare
        if not keep.any():
            raise DataError(f"the {k}-core is empty: every user or item has fewer than {k} actions, ask for less")
        if keep.all():
            return self
        kept_users = np.flatnonzero(by_user)
        kept_items = np.flatnonzero(by_item)
        new_id = np.zeros(self.num_items + 1, dtype=self.items.dtype)
        new_id[kept_items] = np.arange(1, len(kept_items) + 1)
        return replace(
            self,
            user_names=tuple(self.user_names[u] for u in kept_users),
            item_names=tuple(self.item_names[i - 1] for i in kept_items),
            items=new_id[self.items[keep]],
            offsets=np.concatenate([[0], np.cumsum(by_user[kept_users])]),
            timestamps=None if self.timestamps is None else self.timestamps[keep],
        )

    def shuffle_ties(self, seed: int) -> Interactions:
        """Put the actions of a user that share a timestamp in a random order.

        Raises:
            DataError: there are no timestamps, so what was tied cannot be known.
        """
        if self.timestamps is None:
            raise DataError(
                "ties can be shuffled only where the file has timestamps: this one keeps the order of its actions "
                "and has lost which of them fell on one day"
            )
        users = np.repeat(np.arange(self.num_users), self.lengths)
        order = np.lexsort((np.random.default_rng(seed).random(len(users)), self.timestamps, users))
        description = f"by timestamp, ties shuffled with seed {seed}"
        return replace(self, items=self.items[order], timestamps=self.timestamps[order], order=description)

    def tied_targets(self) -> int | None:
        """Users whose test and validation items share a timestamp, or None without timestamps."""
        if self.timestamps is None:
            return None
        last = self.offsets[1:][self.lengths >= 2] - 1
        return int((self.timestamps[last] == self.timestamps[last - 1]).sum())


@dataclass(frozen=True)
class Split:
    """Leave-one-out: a user's last item is the test's, the one before it validation's, the others are trained on.

    Attributes:
        data: What was split.
        users: Positions of the users with three actions or more, who are evaluated; the others' actions are trained on
            whole, shape (evaluated,).
        train_end: User u trains on `items[offsets[u] : train_end[u]]`, shape (users,).
        item_frequency: Actions of the training part by item id, with 0 for padding, shape (num_items + 1,).
    """

    data: Interactions
    users: np.ndarray
    train_end: np.ndarray
    item_frequency: np.ndarray

    @property
    def untrained_targets(self) -> int:
        """Test items that no training part holds: nothing that learns items by id can rank them but by chance."""
        return int((self.item_frequency[self.targets("test")] == 0).sum())

    def targets(self, part: str) -> np.ndarray:
        """The held-out item of every evaluated user; `part` is "validation" or "test"."""
        return self.data.items[self._target_at(part)]

    def inputs(self, part: str, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Where in `data.items` the history before each held-out item starts and ends.

        Args:
            part: "validation" or "test"; the test's history ends with validation's item.
            max_length: Keep this many of its latest actions.
        """
        start, end = self.data.offsets[self.users], self._target_at(part)
        return start if max_length is None else np.maximum(start, end - max_length), end

    def _target_at(self, part: str) -> np.ndarray:
        if part not in ("validation", "test"):
            raise ValueError(f"part is {part!r}: 'validation' or 'test'")
        return self.data.offsets[self.users + 1] - (1 if part == "test" else 2)


def leave_one_out(data: Interactions) -> Split:
    """Split every history of three actions or more.

    Raises:
        DataError: there is no such history.
    """
    users = np.flatnonzero(data.lengths >= 3)
    if not len(users):
        raise DataError("no user has 3 actions or more: one to learn from, one for validation and one for the test")
    train_end = data.offsets[1:].copy()
    train_end[users] -= 2
    trained = np.ones(len(data.items), dtype=bool)
    trained[train_end[users]] = trained[train_end[users] + 1] = False
    frequency = np.bincount(data.items[trained], minlength=data.num_items + 1)
    return Split(data, users, train_end, frequency)
