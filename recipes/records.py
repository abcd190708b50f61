"""What is kept of a run for a report: its results and a number a question, from its folder or packed into one small file."""

import argparse
import csv
import gzip
import json
import math
import sys
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .command import OneLineParser, UsageError
from .grid import SEED, Value, parse_name
from .runs import QUESTIONS, RANKS, RESULTS, read_record

PACKED = "bft-bench run"
PACKED_FORMAT = 1
DIGITS = 4  # of every number a question; what is packed and what is not give the same report
LARGEST = 50_000  # bytes of a packed run above which it is compressed
TEXTS = ("id", "prediction")
ENOUGH_LABELS = 20  # more different texts than this are no strata
CUTOFF = 10
WITHIN = "distractors"  # a run is evaluated with several numbers of them, a question once for each


@dataclass(frozen=True)
class Record:
    """One run as a report sees it.

    Attributes:
        name: Of the run.
        axes: Label by axis.
        results: What results.json holds.
        ids: Of the questions, in their order.
        numbers: By name a number for each question, None where it was not measured.
        strata: By name a label for each question.
    """

    name: str
    axes: dict[str, Value]
    results: dict[str, Any]
    ids: tuple[str, ...]
    numbers: dict[str, list[float | None]]
    strata: dict[str, list[str]] = field(default_factory=dict)

    @property
    def seed(self) -> Value:
        """Its label on the axis `seed`, or what its results say."""
        return self.axes.get(SEED, self.results.get("seed", 0))


def read_all(roots: Iterable[str | Path]) -> list[Record]:
    """Every finished run below the roots, one that was evaluated with several numbers of distractors as several.

    Raises:
        UsageError: From `read_whole`; or two questions of one id.
    """
    parts = []
    for record in read_whole(roots):
        parts += divide(record, WITHIN, whole=False) if WITHIN in record.numbers else [record]
    for record in parts:
        if len(set(record.ids)) < len(record.ids):
            raise UsageError(f"{record.name}: two of its questions have the same id")
    return parts


def read_whole(roots: Iterable[str | Path]) -> list[Record]:
    """Every finished run as it is below the roots: folders of runs, or folders of packed ones.

    Raises:
        UsageError: No such folder, none in it, two of one name, or something that cannot be read.
    """
    found: dict[str, tuple[Path, Record]] = {}
    for root in map(Path, roots):
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder")
        places = sorted(path for path in root.iterdir() if (path / RESULTS).is_file() or _is_packed(path))
        if not places:
            raise UsageError(f"{root} holds no finished run: no folder with a {RESULTS} and no packed run")
        for place in places:
            record = read_run(place) if place.is_dir() else read_packed(place)
            if record.name in found:
                raise UsageError(f"{place} and {found[record.name][0]} are the same run: leave one of them out")
            found[record.name] = (place, record)
    return [record for _, record in found.values()]


def read_run(folder: Path) -> Record:
    """Read the folder a run left.

    Raises:
        UsageError: A file of it is missing or cannot be read, or its name says nothing.
    """
    results = _json(folder / RESULTS)
    axes = read_record(folder).get("axes") or parse_name(folder.name)
    if (folder / QUESTIONS).is_file():
        ids, numbers, strata = _questions(folder / QUESTIONS)
    elif (folder / RANKS).is_file():
        ids, numbers, strata = _ranks(folder / RANKS, results)
    else:
        raise UsageError(f"{folder} has neither {QUESTIONS} nor {RANKS}: nothing can be paired without them")
    if not numbers:
        raise UsageError(f"{folder}: no number is measured for its questions")
    return Record(folder.name, axes, results, ids, numbers, strata)


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        value = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError):
        raise UsageError(f"{path} is not readable as JSON") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def _questions(path: Path) -> tuple[tuple[str, ...], dict[str, list[float | None]], dict[str, list[str]]]:
    """Numbers and short texts of predictions.jsonl, whatever they are called."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        ids = tuple(str(row["id"]) for row in rows)
        names = list(dict.fromkeys(name for row in rows for name in row))
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not JSONL with an id in every row") from None
    numbers: dict[str, list[float | None]] = {}
    strata: dict[str, list[str]] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        known = [value for value in values if value is not None]
        if name in TEXTS or not known:
            continue
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
            numbers[name] = [None if value is None else _rounded(value) for value in values]
        elif len(known) == len(values) and all(isinstance(value, str) for value in known):
            strata |= {name: values} if len(set(known)) <= ENOUGH_LABELS else {}
    return ids, numbers, strata


def _ranks(
    path: Path, results: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, list[float | None]], dict[str, list[str]]]:
    """Hit rate and NDCG from the rank of every user's held-out item; its quartile, and the history's length as results has it.

    Of validation's items they are called so: a report shall not compare them with the test's.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        columns = dict(zip(head, zip(*rows, strict=True), strict=True))
        ranks = list(map(float, columns["rank"]))
        ids, lengths = columns["user"], list(map(int, columns.get("history_length", ())))
    except (OSError, EOFError, ValueError, KeyError):
        raise UsageError(f"{path} is no table with the columns user and rank") from None
    part = "" if results.get("per_user", "test") == "test" else f"{results['per_user']}_"
    numbers: dict[str, list[float | None]] = {
        f"{part}hr@{CUTOFF}": [float(rank <= CUTOFF) for rank in ranks],
        f"{part}ndcg@{CUTOFF}": [_rounded(1 / math.log2(rank + 1)) if rank <= CUTOFF else 0.0 for rank in ranks],
    }
    strata = {"item_quartile": _shared(columns["item_quartile"])} if "item_quartile" in columns else {}
    names = (results.get("strata") or {}).get("history_length") or {}  # "6-10" and the like, of those that have users
    if lengths and names:
        lows = sorted((int(name.partition("-")[0]), name) for name in names)
        strata["history_length"] = [lows[bisect(lows, (length, "~")) - 1][1] for length in lengths]
    return ids, numbers, strata


def _shared(labels: Iterable[str]) -> list[str]:
    """The labels, each text once in memory: there are a few, and tens of thousands of users."""
    return list(map(sys.intern, labels))


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)


def divide(record: Record, name: str, *, whole: bool) -> list[Record]:
    """Divide a run's questions by a number or label they have, which becomes an axis.

    Args:
        record: The run.
        name: Of the number or label.
        whole: Also give the undivided run, labelled "all".

    Raises:
        UsageError: Its questions have no such thing.
    """
    if name not in record.numbers and name not in record.strata:
        known = ", ".join([*record.numbers, *record.strata])
        raise UsageError(f"{record.name}: its questions have no {name!r} (they have {known})")
    labels: Sequence[Any] = record.strata.get(name) or record.numbers[name]
    parts = [replace(record, axes={**record.axes, name: "all"})] if whole else []
    for label in sorted({label for label in labels if label is not None}):
        places = [place for place, other in enumerate(labels) if other == label]
        value = int(label) if isinstance(label, float) and label.is_integer() else label
        parts.append(
            replace(
                record,
                axes={**record.axes, name: value},
                ids=tuple(record.ids[place] for place in places),
                numbers={
                    key: [values[place] for place in places] for key, values in record.numbers.items() if key != name
                },
                strata={key: [values[place] for place in places] for key, values in record.strata.items()},
            )
        )
    return parts


def pack(record: Record) -> bytes:
    """A run as JSON, a line for each of its parts, the same bytes for the same run."""
    parts = {
        "kind": PACKED,
        "format": PACKED_FORMAT,
        "name": record.name,
        "axes": record.axes,
        "results": _short(record.results),
        "ids": record.ids,
        **{f"number {name}": values for name, values in record.numbers.items()},
        **{f"label {name}": values for name, values in record.strata.items()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in parts.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _short(value: Any) -> Any:
    """Six digits of every number: enough for settings and summaries."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_packed(path: Path) -> Record:
    """Read what `pack` wrote.

    Raises:
        UsageError: It is something else.
    """
    parts = _json(path)
    if parts.get("kind") != PACKED or parts.get("format") != PACKED_FORMAT:
        raise UsageError(f"{path} is no run packed by this version of bft-bench pack")
    return Record(
        parts["name"],
        parts["axes"],
        parts["results"],
        tuple(parts["ids"]),
        {key[7:]: values for key, values in parts.items() if key.startswith("number ")},
        {key[6:]: _shared(values) for key, values in parts.items() if key.startswith("label ")},
    )


def _is_packed(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz")) and not path.name.startswith(".")


def main(argv: Sequence[str]) -> int:
    """`bft-bench pack`: every finished run of a folder as one small file."""
    parser = OneLineParser(
        prog="bft-bench pack",
        description="Make every finished run of a folder one small JSON, results and a number a question, for a repository; "
        "bft-bench report reads them.",
    )
    parser.add_argument("root", metavar="ROOT", help="Folder of the runs' folders.")
    parser.add_argument("folder", metavar="FOLDER", help="Where the files go; those of the same runs are replaced.")
    options: argparse.Namespace = parser.parse_args(argv)
    files = {}
    for record in read_whole([options.root]):
        content = pack(record)
        if len(content) > LARGEST:
            files[f"{record.name}.json.gz"] = gzip.compress(content, mtime=0)
        else:
            files[f"{record.name}.json"] = content
    write_files(Path(options.folder), files)
    largest = max(files, key=lambda name: len(files[name]))
    print(f"{len(files)} runs in {options.folder}, the largest {largest} with {len(files[largest]) / 1000:.0f} kB")
    return 0


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, each whole or not at all.

    Raises:
        UsageError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            part = folder / f".{name}.part"
            part.write_bytes(content)
            part.replace(folder / name)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from None
