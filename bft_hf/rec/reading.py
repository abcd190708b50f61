"""Files of interactions in the formats that data sets for recommendation come in, read into `Interactions`."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .data import DataError, Interactions

FORMATS = ("sequences", "pairs", "json", "inter", "csv")
USER_COLUMN, ITEM_COLUMN, TIME_COLUMN = "user_id", "item_id", "timestamp"

_SUFFIXES = {".txt": "sequences", ".json": "json", ".inter": "inter", ".csv": "csv", ".tsv": "csv"}


def read_interactions(
    path: str | Path,
    format: str | None = None,
    *,
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    delimiter: str | None = None,
) -> Interactions:
    """Read a file of interactions, or the same file within .gz.

    Args:
        path: `sequences`: lines of `user item item ...`, oldest first. `pairs`: lines of `user item`, oldest first.
            `json`: {user: [items]}, oldest first. `inter`: RecBole's atomic file, columns separated by tabs, named
            `name:type`. `csv`: columns with names in the first line, or numbered from 1 without such a line.
        format: One of the above; None goes by the name's end (.txt is `sequences`, .tsv is `csv`).
        user_column: Name of the column of users in `inter` and `csv`, "user_id" by default, or its number.
        item_column: The same of items, "item_id".
        time_column: The same of the times, "timestamp"; where the file has no such column and none was asked for, a user's
            actions keep the file's order. Rows are sorted by it, ties stay in the file's order.
        delimiter: Of `csv`; by default a tab if the first line has one, else a comma.

    Returns:
        The interactions; users in the order in which they first appear.

    Raises:
        DataError: the file cannot be read as such; a malformed line is named by its number.
    """
    path = Path(path)
    format = _format_of(path) if format is None else format
    if format not in FORMATS:
        raise DataError(f"unknown format {format!r}: choose from {', '.join(FORMATS)}")
    columns = {"user column": user_column, "item column": item_column, "time column": time_column}
    asked = [name for name, value in (columns | {"delimiter": delimiter}).items() if value is not None]
    if asked and format not in ("csv", "inter"):
        raise DataError(f"{path}: a {asked[0]} was given, but files of the format {format} have no columns")
    try:
        with _opened(path) as file:
            if format in ("csv", "inter"):
                return _read_columns(path, file, format, user_column, item_column, time_column, delimiter)
            reader = {"sequences": _read_sequences, "pairs": _read_pairs, "json": _read_json}[format]
            return _assemble(path, reader(path, file), "as in the file (no timestamps: ties cannot be told)")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder: give a file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start} of a block)") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error})") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path}: {error}") from None


def _format_of(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in _SUFFIXES:
        raise DataError(f"{path}: the name does not tell the format, name it: {', '.join(FORMATS)}")
    return _SUFFIXES[suffix.lower()]


def _opened(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")  # type: ignore[return-value]
    return open(path, encoding="utf-8-sig", newline="")


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    raise DataError(f"{path}, line {line}: {what}")


def _read_sequences(path: Path, file: io.TextIOBase) -> dict[str, list[str]]:
    histories: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(file, start=1):
        words = line.split()
        if not words:
            continue
        user, *items = words
        if not items:
            _refuse(path, number, f"user {user!r} without an item, expected `user item item ...`")
        if user in histories:
            _refuse(
                path, number, f"user {user!r} again (line {first[user]} has one): lines of `user item` are format pairs"
            )
        histories[user], first[user] = items, number
    return histories


def _read_pairs(path: Path, file: io.TextIOBase) -> dict[str, list[str]]:
    histories: dict[str, list[str]] = {}
    for number, line in enumerate(file, start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2:
            _refuse(path, number, f"{len(words)} words, expected `user item`")
        histories.setdefault(words[0], []).append(words[1])
    return histories


def _read_json(path: Path, file: io.TextIOBase) -> dict[str, list[str]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise DataError(f"{path}: user {again!r} stands there twice")
        return values

    try:
        values = json.load(file, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        _refuse(path, error.lineno, f"not JSON ({error.msg})")
    if not isinstance(values, dict):
        raise DataError(f"{path}: a JSON {type(values).__name__}, expected an object {{user: [items]}}")
    histories: dict[str, list[str]] = {}
    for user, items in values.items():
        if not isinstance(items, list) or not items:
            raise DataError(f"{path}: user {user!r} has {json.dumps(items)[:40]}, expected a list of items")
        for item in items:
            if not isinstance(item, str | int) or isinstance(item, bool):
                raise DataError(
                    f"{path}: user {user!r} has the item {json.dumps(item)[:40]}, expected text or an integer"
                )
        histories[user] = [str(item) for item in items]
    return histories


def _read_columns(
    path: Path,
    file: io.TextIOBase,
    format: str,
    user_column: str | None,
    item_column: str | None,
    time_column: str | None,
    delimiter: str | None,
) -> Interactions:
    first = file.readline()
    if not first.strip():
        _refuse(path, 1, "empty, expected names of columns")
    if format == "inter":
        delimiter = delimiter or "\t"
    elif delimiter is None:
        delimiter = "\t" if "\t" in first else ","
    if len(delimiter) != 1:
        raise DataError(f"the delimiter is {delimiter!r}: it has to be one character")
    header = next(csv.reader([first], delimiter=delimiter))
    names = [name.strip().split(":")[0] if format == "inter" else name.strip() for name in header]
    given = [column for column in (user_column, item_column, time_column) if column is not None]
    numbered = bool(given) and all(column.isdecimal() for column in given)

    def position(column: str | None, default: str, flag: str) -> int | None:
        if numbered:
            if column is None:
                if flag == "time":
                    return None
                raise DataError(f"{path}: columns are given by number, so the {flag} column needs a number as well")
            if not 1 <= int(column) <= len(names):
                raise DataError(f"{path}: there is no {flag} column {column}, line 1 has {len(names)}")
            return int(column) - 1
        if (column or default) in names:
            return names.index(column or default)
        if column is None and flag == "time":
            return None
        raise DataError(
            f"{path}, line 1: no {flag} column {column or default!r} among {', '.join(names)[:200]}: name it"
        )

    user_at = position(user_column, USER_COLUMN, "user")
    item_at = position(item_column, ITEM_COLUMN, "item")
    time_at = position(time_column, TIME_COLUMN, "time")
    assert user_at is not None and item_at is not None
    # Where columns are numbered the first line is a row like any other.
    reader = csv.reader(chain([first], file) if numbered else file, delimiter=delimiter)
    lines_before = 0 if numbered else 1
    histories: dict[str, list[str]] = {}
    times: dict[str, list[float]] = {}
    for row in reader:
        if not row:
            continue
        number = reader.line_num + lines_before
        if len(row) != len(names):
            _refuse(path, number, f"{len(row)} columns, line 1 has {len(names)}")
        user, item = row[user_at].strip(), row[item_at].strip()
        if not user or not item:
            _refuse(path, number, f"no {'item' if user else 'user'}")
        if "\n" in user or "\n" in item:
            _refuse(path, number, "a quotation mark that was opened lines before ends here: double it, or take it out")
        histories.setdefault(user, []).append(item)
        if time_at is not None:
            times.setdefault(user, []).append(_time(path, number, row[time_at]))
    if time_at is None:
        return _assemble(path, histories, "as in the file (no timestamps: ties cannot be told)")
    return _assemble(path, histories, "by timestamp, ties as in the file", times)


def _time(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 2**53:  # false for NaN; above, seconds would no longer be told apart
        _refuse(path, line, f"the timestamp {text!r} is not a number of seconds")
    return value


def _assemble(
    path: Path, histories: dict[str, list[str]], order: str, times: dict[str, list[float]] | None = None
) -> Interactions:
    if not histories:
        raise DataError(f"{path}: no interactions in it")
    names = sorted({item for items in histories.values() for item in items})
    if all(name.isdecimal() and name.isascii() for name in names):
        names.sort(key=int)
    ids = {name: index for index, name in enumerate(names, start=1)}
    lengths = [len(items) for items in histories.values()]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = np.fromiter((ids[i] for history in histories.values() for i in history), dtype=np.int64, count=offsets[-1])
    timestamps = None
    if times is not None:
        timestamps = np.fromiter(
            (t for history in times.values() for t in history), dtype=np.float64, count=offsets[-1]
        )
        users = np.repeat(np.arange(len(lengths)), lengths)
        by_time = np.lexsort((timestamps, users))  # stable: ties keep the file's order
        items, timestamps = items[by_time], timestamps[by_time]
    return Interactions(tuple(histories), tuple(names), items, offsets, timestamps, order)
