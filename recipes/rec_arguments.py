"""The flags of `bft-rec`: what they are, their defaults, and what is refused before anything heavy is imported."""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from .arguments import read_config
from .command import OneLineParser, UsageError
from .filter_flags import OVERRIDES_HELP, check_filter_flags, first_given

MODELS = ("sasrec", "bert4rec", "hstu", "popularity", "transitions")
METHODS = ("plain", "bft")
FORMATS = ("sequences", "pairs", "json", "inter", "csv")
LEARNED = MODELS[:3]


def _flag(default: Any, help: str, group: str, choices: Sequence[str] = (), minimum: float | None = None) -> Any:
    if choices:
        help = f"{help} One of {', '.join(choices)}."
    if default is not None and default is not False:
        help = f"{help} Default {default}."
    metadata = {"help": help, "group": group, "choices": tuple(choices), "minimum": minimum}
    return field(default=default, metadata=metadata)


@dataclass
class RecArguments:
    """Every flag of the command."""

    data: str | None = _flag(None, "File of interactions, .gz or not; --data_format says which formats.", "data")
    data_format: str | None = _flag(
        None,
        "sequences: `user item item ...` (.txt); pairs: `user item`; json: {user: [items]}; inter: RecBole's (.inter); csv: "
        "columns (.csv, .tsv). Default: by the name's end.",
        "data",
        choices=FORMATS,
    )
    user_column: str | None = _flag(None, "Column of users: a name (default user_id), or a number from 1.", "data")
    item_column: str | None = _flag(None, "Column of items, alike (default item_id).", "data")
    time_column: str | None = _flag(
        None, "Column of seconds, alike (default timestamp; without it rows are in the order of time).", "data"
    )
    delimiter: str | None = _flag(
        None, "Between columns of a csv; default a tab if line 1 has one, else a comma.", "data"
    )
    k_core: int = _flag(0, "Drop users and items with fewer actions, repeatedly; 0 keeps all.", "data", minimum=0)
    ties: str = _flag(
        "file",
        "Order of a user's actions of one timestamp: as in the file, or shuffled by --ties_seed.",
        "data",
        choices=("file", "shuffle"),
    )
    ties_seed: int = _flag(0, "Decides the shuffle; the same data for every --seed.", "data", minimum=0)
    item_titles: str | None = _flag(
        None, "Titles to save with the model: JSON {item: title}, or lines of item, tab or comma, title.", "data"
    )

    model: str = _flag(
        "sasrec",
        "The recommender; popularity and transitions (by the last item alone) learn nothing.",
        "model",
        choices=MODELS,
    )
    method: str = _flag("plain", "bft: the model as a Bayesian filter.", "model", choices=METHODS)
    hidden_size: int | None = _flag(None, "Width. Default: the model's own, 64 or (HSTU) 50.", "model", minimum=1)
    num_layers: int = _flag(2, "Blocks.", "model", minimum=1)
    num_heads: int | None = _flag(None, "Heads. Default: the model's own, 2 or (HSTU) 1.", "model", minimum=1)
    max_length: int = _flag(50, "Items of a history that the model reads; 200 suits ML-1M.", "model", minimum=2)
    dropout: float = _flag(0.2, "In [0, 1).", "model", minimum=0)
    mask_probability: float | None = _flag(
        None, "BERT4Rec: share hidden (default .2; Sun et al. hide .6 of Amazon's).", "model"
    )
    time_bias: bool = _flag(False, "HSTU: a bias by time difference; needs timestamps.", "model")
    config_overrides: str | None = _flag(
        None, "Further fields of the model's configuration: intermediate_size=256,hidden_act=gelu.", "model"
    )

    process_noise: float | None = _flag(None, "Start value of every layer's Q. Default 1.", "filter")
    initial_precision: float | None = _flag(None, "Start value of tau. Default 1.", "filter")
    bft_config: str | None = _flag(
        None, "A BFTConfig as a JSON file, for what is not channel, table and exact.", "filter"
    )
    bft_overrides: str | None = _flag(None, OVERRIDES_HELP, "filter")
    bft_learning_rate: float = _flag(1e-2, "Learning rate of log tau and log Q.", "filter")

    loss: str = _flag(
        "full", "Softmax over every item, or over a sample of them.", "training", choices=("full", "sampled")
    )
    negatives: int = _flag(1024, "Items sampled a step.", "training", minimum=1)
    negatives_power: float = _flag(0.5, "Drawn by (1 + frequency) to this power.", "training", minimum=0)
    loss_dtype: str = _flag(
        "float32",
        "Of the full softmax's logits; bfloat16 is several times faster on a CPU or GPU that multiplies it.",
        "training",
        choices=("float32", "bfloat16"),
    )
    epochs: int = _flag(100, "At most.", "training", minimum=1)
    patience: int = _flag(
        5, "Evaluations without a better NDCG@10 on validation; 0: never stop.", "training", minimum=0
    )
    evaluate_every: int = _flag(1, "Epochs between evaluations.", "training", minimum=1)
    batch_size: int = _flag(256, "Histories a step, over all processes.", "training", minimum=1)
    learning_rate: float = _flag(1e-3, "Of AdamW.", "training")
    weight_decay: float = _flag(0.0, "On matrices.", "training", minimum=0)
    warmup_steps: int = _flag(0, "Steps in which the learning rate rises.", "training", minimum=0)
    schedule: str = _flag(
        "constant", "Of the learning rate, to 0 at --epochs.", "training", choices=("constant", "linear", "cosine")
    )
    max_grad_norm: float = _flag(0.0, "Clip gradients to it; 0: never.", "training", minimum=0)
    mask_last: float = _flag(0.1, "BERT4Rec: share of histories in which only the last item is hidden.", "training")
    evaluation_batch_size: int = _flag(256, "Users ranked at once.", "training", minimum=1)
    mixed_precision: str = _flag(
        "no", "accelerate's autocast; the loss stays in float32.", "training", choices=("no", "bf16", "fp16")
    )
    cpu: bool = _flag(False, "Leave an accelerator alone.", "training")
    seed: int = _flag(42, "Of new weights, order, dropout, what is hidden or sampled.", "training", minimum=0)

    test: bool = _flag(
        True, "Evaluate on the test; false: on validation alone, whose ranks per_user.csv.gz then has.", "run"
    )
    output_dir: str | None = _flag(
        None, "Where all goes. Default outputs/rec-<data>-<model>-<method>-seed<seed>.", "run"
    )
    overwrite: bool = _flag(False, "Use --output_dir even if it is not empty, and start anew.", "run")
    resume: bool = _flag(False, "Go on after the last epoch that --output_dir holds.", "run")

    def __post_init__(self) -> None:
        if not self.data:
            raise UsageError("--data is missing: give a file of interactions (bft-rec --help)")
        for spec in fields(self):
            self._check(spec.name, spec.metadata)
        for name in ("dropout", "mask_last"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("learning_rate", "bft_learning_rate", "process_noise", "initial_precision"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"--{name} must be a positive number, got {value}")
        if self.mask_probability is not None and not 0 < self.mask_probability < 1:
            raise UsageError(f"--mask_probability must be in (0, 1), got {self.mask_probability}")
        self._check_combinations()

    def _check(self, name: str, metadata: Any) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if metadata["choices"] and value not in metadata["choices"]:
            raise UsageError(f"unknown --{name} {value!r}: choose from {', '.join(metadata['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} must be a finite number, got {value}")
        if metadata["minimum"] is not None and value < metadata["minimum"]:
            raise UsageError(f"--{name} must be at least {metadata['minimum']:g}, got {value}")

    def _check_combinations(self) -> None:
        if self.method != "bft":
            if (given := first_given(self)) is not None:
                raise UsageError(f"--{given} is of the filter: add --method bft")
        elif self.model not in LEARNED:
            raise UsageError(f"--method bft: {self.model} is no transformer, choose --model {', '.join(LEARNED)}")
        if self.model != "bert4rec" and self.mask_probability is not None:
            raise UsageError("--mask_probability is BERT4Rec's: add --model bert4rec")
        if self.model != "hstu" and self.time_bias:
            raise UsageError("--time_bias is HSTU's: add --model hstu")
        if self.overwrite and self.resume:
            raise UsageError("--overwrite starts anew and --resume goes on: give one of them")
        check_filter_flags(self)
        if self.item_titles is not None and not Path(self.item_titles).expanduser().is_file():
            raise UsageError(f"--item_titles {self.item_titles}: no such file")

    @property
    def parts(self) -> tuple[str, ...]:
        """What the trained model is evaluated on; every user's rank is kept of the last."""
        return ("validation", "test") if self.test else ("validation",)

    @property
    def folder(self) -> str:
        """Where the results go."""
        if self.output_dir:
            return os.path.expanduser(self.output_dir)
        name = Path(str(self.data)).name.split(".")[0].lower()
        return os.path.join("outputs", f"rec-{name}-{self.model}-{self.method}-seed{self.seed}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="bft-rec",
        usage="bft-rec --data FILE [--FLAG VALUE ...]\n       bft-rec recommend --model FOLDER --history 'ITEM ITEM ...'",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Train a sequential recommender, plain or as a Bayesian filter, and rank every user's last item among all "
        "items. `bft-rec recommend --help` is about using one.",
    )
    hints = get_type_hints(RecArguments)
    groups: dict[str, Any] = {}
    for spec in fields(RecArguments):
        name = spec.metadata["group"]
        group = groups.setdefault(name, None) or parser.add_argument_group(name)
        groups[name] = group
        options: dict[str, Any] = {"help": spec.metadata["help"].replace("%", "%%")}
        if hints[spec.name] is bool:
            options |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "BOOL"}
        else:
            kind = next(kind for kind in (int, float, str) if hints[spec.name] in (kind, kind | None))
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(f"--{spec.name}", **options)
        if "_" in spec.name:
            hidden = {**options, "help": argparse.SUPPRESS, "dest": spec.name}
            group.add_argument(f"--{spec.name.replace('_', '-')}", **hidden)
    groups["run"].add_argument(
        "--config", metavar="FILE", help="Flags from a YAML file; what stands on the command line wins."
    )
    return parser


def _boolean(text: str) -> bool:
    if text.lower() in ("yes", "true", "1"):
        return True
    if text.lower() in ("no", "false", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text}")


def parse(argv: Sequence[str]) -> RecArguments:
    """The flags, those of --config beneath those of the command line.

    Raises:
        UsageError: An unknown flag or a value that is not allowed.
    """
    parser = _parser()
    given, rest = parser.parse_known_args(list(argv))
    known = {spec.name for spec in fields(RecArguments)}
    if rest:
        name = rest[0].split("=")[0].lstrip("-")
        raise UsageError(f"unknown flag {rest[0].split('=')[0]}{_suggestion(name, known)} (bft-rec --help lists them)")
    values = vars(given)
    source = values.pop("config", None)
    from_file: dict[str, Any] = {}
    if source is not None:
        for name, value in read_config(source).items():
            if name not in known:
                raise UsageError(f"--config {source}: unknown flag {name!r}{_suggestion(name, known)}")
            if value is not None:
                parsed = parser.parse_args([f"--{name}={value}"])
                from_file[name] = getattr(parsed, name)
    return RecArguments(**{**from_file, **values})


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=1)
    return f", did you mean --{close[0]}?" if close else ""


def own_flags(arguments: RecArguments) -> dict[str, Any]:
    """The flags whose value differs from the default, for results.json."""
    return {
        spec.name: getattr(arguments, spec.name)
        for spec in fields(arguments)
        if getattr(arguments, spec.name) != spec.default
    }


@dataclass(frozen=True)
class RecommendArguments:
    """The flags of `bft-rec recommend`.

    Attributes:
        model: A folder or Hub id.
        histories: Items of each user, oldest first.
        timestamps: Seconds of each item, or None.
        k: How many to recommend.
        include_seen: Whether items of the history may come back.
        skip_unknown: Whether to drop unknown items.
        json: Whether to print JSON lines.
    """

    model: str
    histories: list[list[str]]
    timestamps: list[list[float]] | None
    k: int
    include_seen: bool
    skip_unknown: bool
    json: bool


def parse_recommend(argv: Sequence[str]) -> RecommendArguments:
    """The flags of `bft-rec recommend`.

    Raises:
        UsageError: A flag is missing, unknown or wrong.
    """
    import shlex

    parser = OneLineParser(
        prog="bft-rec recommend", allow_abbrev=False, description="The best items to follow a history."
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="What bft-rec left, or a Hub id.")
    parser.add_argument(
        "--history",
        action="append",
        default=[],
        metavar="ITEMS",
        help="Items by name, oldest first, separated by spaces (quotes keep a space within a name); may be given again.",
    )
    parser.add_argument("--histories", metavar="FILE", help="A history a line; - reads the standard input.")
    parser.add_argument(
        "--timestamps", action="append", metavar="SECONDS", help="Of each --history, for a model with a time bias."
    )
    parser.add_argument("--k", type=int, default=10, metavar="INT", help="How many to recommend. Default 10.")
    parser.add_argument("--include_seen", action="store_true", help="Items of the history may come back.")
    parser.add_argument("--skip_unknown", action="store_true", help="Drop items the model does not know.")
    parser.add_argument("--json", action="store_true", help="A line of JSON for each history.")
    given = parser.parse_args(list(argv))
    lines = list(given.history)
    if given.histories == "-":
        lines += [line for line in sys.stdin if line.strip()]
    elif given.histories is not None:
        try:
            lines += [
                line for line in Path(given.histories).read_text(encoding="utf-8-sig").splitlines() if line.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--histories {given.histories}: {error}") from None
    if not lines:
        raise UsageError("--history is missing: give the items of a user, oldest first")
    if given.k < 1:
        raise UsageError(f"--k must be at least 1, got {given.k}")
    try:
        histories = [shlex.split(line) for line in lines]
        timestamps = given.timestamps and [[float(word) for word in line.split()] for line in given.timestamps]
    except ValueError as error:
        raise UsageError(f"--history or --timestamps: {error}") from None
    return RecommendArguments(
        given.model, histories, timestamps, given.k, given.include_seen, given.skip_unknown, given.json
    )
