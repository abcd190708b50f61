"""The names of a recommender's items: a file beside the weights that turns item ids into names and back."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ITEM_MAP_FILE = "items.json"


@dataclass(frozen=True)
class ItemMap:
    """Items by name: what the file of interactions calls them, and a title where one is known.

    Attributes:
        names: The item with id i is `names[i - 1]`; id 0 is padding.
        titles: Title by name, for some or all of them.
    """

    names: tuple[str, ...]
    titles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names, start=1)}

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return str(name) in self._ids

    def id_of(self, name: object) -> int:
        """The id of the item with this name; an integer is a name like any other, never an id.

        Raises:
            ValueError: there is no such item.
        """
        try:
            return self._ids[str(name)]
        except KeyError:
            raise ValueError(f"unknown item {str(name)!r}: the model was trained on {len(self)} others") from None

    def name_of(self, item_id: int) -> str:
        """The name of the item with this id.

        Raises:
            ValueError: the id is not from 1 to the number of items.
        """
        if not 1 <= item_id <= len(self):
            raise ValueError(f"there is no item id {item_id}: they run from 1 to {len(self)}")
        return self.names[item_id - 1]

    def title_of(self, item_id: int) -> str | None:
        """The title of the item with this id, or None."""
        return self.titles.get(self.name_of(item_id))

    def save(self, folder: str | Path) -> None:
        """Write `items.json` into a model's folder."""
        values: dict[str, Any] = {"format": 1, "items": list(self.names)}
        if self.titles:
            values["titles"] = dict(self.titles)
        Path(folder, ITEM_MAP_FILE).write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ItemMap:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is none of ours.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            names, titles = values["items"], values.get("titles", {})
            return cls(tuple(map(str, names)), {str(name): str(title) for name, title in titles.items()})
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a map of items ({type(error).__name__}: {error})") from None


def read_titles(path: str | Path) -> dict[str, str]:
    """Titles of items from a JSON object {item: title}, or from lines of item, tab or comma, title (.csv, .tsv, .txt).

    Raises:
        ValueError: a line without a title, named by its number.
    """
    path = Path(path)
    try:
        if path.suffix == ".json":
            values = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(values, dict):
                raise ValueError(f"{path}: expected a JSON object {{item: title}}")
            return {str(name): str(title) for name, title in values.items()}
        with open(path, encoding="utf-8-sig", newline="") as file:
            return dict(_title_rows(path, file))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not readable ({error})") from None


def _title_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    reader = csv.reader(lines, delimiter="," if path.suffix == ".csv" else "\t")
    for row in reader:
        if not row:
            continue
        if len(row) < 2 or not row[0].strip():
            raise ValueError(f"{path}, line {reader.line_num}: expected an item and its title")
        yield row[0].strip(), row[1].strip()
