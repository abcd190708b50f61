"""`bft-rec`: train a sequential recommender, plain or as a Bayesian filter, and rank every user's last item among all.

SASRec on histories of your own, lines of `user item item ...`, oldest first:

    bft-rec --data histories.txt.gz --model sasrec --method bft

What to recommend after some items, by the model that this left:

    bft-rec recommend --model outputs/rec-histories-sasrec-bft-seed42 --history '12 7 101' --k 5

Leave-one-out: of every user the last item is the test's, the one before it validation's, and training stops at the best
validation NDCG@10. The held-out item is ranked among all items of the catalogue but those the user has had. `--test false`
leaves the test alone, for choosing. Into `--output_dir` go results.json, per_user.csv.gz (every user's rank, for paired
tests), the model and items.json, the names of its items. Several processes: `accelerate launch -m bft_hf.recipes.rec --data ...`.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_output_dir
from .command import UsageError, as_usage_error, console_script
from .filter_flags import filter_config, parse_overrides
from .rec_arguments import LEARNED, RecArguments, own_flags, parse, parse_recommend
from .rec_outputs import PROTOCOL, data_summary, describe, outcome, report, write_per_user
from .results import count_parameters, library_versions, write_json

if TYPE_CHECKING:
    from bft_hf.rec.data import Split
    from bft_hf.rec.evaluation import Ranking
    from bft_hf.rec.training import Trainer

RESULTS_FORMAT = 1
CHECKPOINT = "training.pt"
OURS = (CHECKPOINT, "results.json", "per_user.csv.gz")
"""By these a folder is known as bft-rec's: others may have a model and a README in theirs."""
OUTPUTS = (*OURS, "config.json", "model.safetensors", "items.json", "README.md")


@console_script("bft-rec", extra="rec", interrupted="interrupted; --resume goes on after the last epoch")
def main(argv: list[str]) -> None:
    """Run the command on these words, the program's name left out."""
    if argv[:1] == ["recommend"]:
        _recommend(argv[1:])
    else:
        _run(parse(argv), shlex.join(["bft-rec", *argv]))


def _without_bars() -> None:
    """A model of a few megabytes is read and written before a bar of progress can be."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _run(arguments: RecArguments, command: str) -> None:
    folder = Path(arguments.folder)
    check_folder(folder, arguments)
    if arguments.resume and (folder / "results.json").is_file():
        print(f"{folder} has the results of a finished run")
        return
    import torch
    from accelerate import Accelerator

    _without_bars()
    started = time.perf_counter()
    split = load_split(arguments)
    titles = read_item_titles(arguments)
    # accelerate joins processes on CPUs only where it is told to use them; else each would train alone, into one folder.
    cpu = arguments.cpu or not torch.accelerator.is_available()
    with as_usage_error("", ValueError):
        accelerator = Accelerator(cpu=cpu, mixed_precision=arguments.mixed_precision)
    quiet = not accelerator.is_main_process

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    say(describe(split, arguments))
    results: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "task": "rec",
        "model": arguments.model,
        "method": arguments.method,
        "seed": arguments.seed,
        "data": data_summary(split, arguments),
        "protocol": PROTOCOL,
        "command": command,
        "flags": own_flags(arguments),
        "versions": library_versions(),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
    }
    if arguments.model in LEARNED:
        trainer = prepare(arguments, split, titles, accelerator, say)
        if accelerator.is_main_process:
            clear(folder, keep_checkpoint=arguments.resume)
        accelerator.wait_for_everyone()
        ranking = fit(trainer, arguments, results)
    else:
        ranking = rank_baseline(arguments, split, results)
        if accelerator.is_main_process:
            clear(folder)
    results["seconds"]["total"] = time.perf_counter() - started
    if accelerator.is_main_process:
        save(folder, results, ranking, trainer.model if arguments.model in LEARNED else None)
    report(results, folder, say)


def check_folder(folder: Path, arguments: RecArguments) -> None:
    """Refuse a folder with something in it, or with nothing to go on from.

    Raises:
        UsageError: It is a file, or not empty and neither --overwrite nor --resume says that this is meant.
    """
    if arguments.resume and folder.is_dir() and any(folder.iterdir()):
        if not _is_ours(folder):
            raise UsageError(f"--resume: {folder} is not empty and holds nothing of bft-rec: give another --output_dir")
        return
    try:
        check_output_dir(str(folder), overwrite=arguments.overwrite, resume=None)
    except UsageError as error:
        raise UsageError(str(error).replace("--resume_from_checkpoint true", "--resume")) from None


def clear(folder: Path, keep_checkpoint: bool = False) -> None:
    """Make the folder, and remove an earlier run's files and nothing else.

    Raises:
        UsageError: It cannot be made or written to.
    """
    with as_usage_error("--output_dir: ", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS if _is_ours(folder) else ():
            if not (keep_checkpoint and name == CHECKPOINT):
                (folder / name).unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in OURS)


def load_split(arguments: RecArguments) -> "Split":
    """Read, filter, order and split the data.

    Raises:
        UsageError: The file cannot be read as asked.
    """
    from bft_hf.rec.data import DataError, leave_one_out
    from bft_hf.rec.reading import read_interactions

    with as_usage_error("--data: ", DataError):
        data = read_interactions(
            Path(str(arguments.data)).expanduser(),
            arguments.data_format,
            user_column=arguments.user_column,
            item_column=arguments.item_column,
            time_column=arguments.time_column,
            delimiter=arguments.delimiter,
        )
        data = data.k_core(arguments.k_core)
    with as_usage_error("--ties shuffle: ", DataError):
        if arguments.ties == "shuffle":
            data = data.shuffle_ties(arguments.ties_seed)
    with as_usage_error("--data: ", DataError):
        return leave_one_out(data)


def read_item_titles(arguments: RecArguments) -> dict[str, str]:
    """Titles by item, or none."""
    from bft_hf.rec.item_map import read_titles

    if arguments.item_titles is None:
        return {}
    with as_usage_error("--item_titles: ", ValueError, OSError):
        return read_titles(Path(arguments.item_titles).expanduser())


def build_model(arguments: RecArguments, num_items: int) -> Any:
    """A new model, patched where --method says so; its own weights are the same for both methods.

    Raises:
        UsageError: A field that its configuration refuses.
    """
    import torch

    import bft_hf
    from bft_hf import rec

    config_class, model_class = {
        "sasrec": (rec.SASRecConfig, rec.SASRecForNextItem),
        "bert4rec": (rec.BERT4RecConfig, rec.BERT4RecForMaskedItem),
        "hstu": (rec.HSTUConfig, rec.HSTUForNextItem),
    }[arguments.model]
    values: dict[str, Any] = {
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": arguments.num_heads,
        "max_position_embeddings": arguments.max_length,
        "dropout": arguments.dropout,
        "mask_probability": arguments.mask_probability,
        "time_buckets": 128 if arguments.time_bias else None,
    }
    values = {name: value for name, value in values.items() if value is not None}
    overrides = parse_overrides("config_overrides", arguments.config_overrides)
    known = config_class().to_dict()
    for name in overrides:
        if name not in known or name in ("num_items", "bft"):
            raise UsageError(f"--config_overrides: {config_class.__name__} has no field {name!r} to set")
    with as_usage_error("the model's configuration: ", ValueError, TypeError, KeyError, RuntimeError):
        torch.manual_seed(arguments.seed)
        model = model_class(config_class(num_items=num_items, **{**values, **overrides}))
    if arguments.method == "bft":
        with as_usage_error("--method bft: ", ValueError, TypeError, OSError, NotImplementedError):
            bft_hf.patch(model, filter_config(arguments, default=rec.filter_defaults()))
    return model


def prepare(arguments: RecArguments, split: "Split", titles: dict[str, str], accelerator: Any, say: Any) -> "Trainer":
    """The model with its map of items, and what trains it.

    Raises:
        UsageError: Settings that do not go together.
    """
    from bft_hf.rec.item_map import ItemMap
    from bft_hf.rec.training import Trainer, TrainingSettings

    names = {spec.name for spec in fields(TrainingSettings)} - {"block_bytes"}
    settings = TrainingSettings(**{name: getattr(arguments, name) for name in names})
    model = build_model(arguments, split.data.num_items)
    present = set(split.data.item_names)
    model.item_map = ItemMap(split.data.item_names, {name: text for name, text in titles.items() if name in present})
    with as_usage_error("", ValueError):
        return Trainer(model, split, settings, Path(arguments.folder) / CHECKPOINT, say, accelerator)


def fit(trainer: "Trainer", arguments: RecArguments, results: dict[str, Any]) -> "Ranking":
    """Train, and evaluate the best epoch's weights; the ranking of the last part evaluated.

    Raises:
        UsageError: Training cannot go on.
    """
    import bft_hf
    from bft_hf.rec.mechanism import filter_by_frequency

    started = time.perf_counter()
    with as_usage_error("", ValueError):
        record = trainer.train(resume=arguments.resume)
    evaluated = time.perf_counter()
    rankings = [trainer.rank(part, details=True) for part in arguments.parts]
    config = bft_hf.get_config(trainer.model)
    results |= {
        "model_config": trainer.model.config.to_dict(),
        "bft_config": config.to_dict() if config else None,
        "parameters": count_parameters(trainer.model),
        "settings": {**asdict(trainer.settings), "mixed_precision": arguments.mixed_precision},
        "best_epoch": record.best_epoch,
        "stopped_early": record.stopped_early,
        "epochs": record.epochs,
        "seconds": {
            "epoch": record.seconds_per_epoch(),
            "epoch_cpu": record.seconds_per_epoch("cpu_seconds"),
            "training": evaluated - started,
            "evaluation": time.perf_counter() - evaluated,
        },
    }
    if config:
        results["filter"] = filter_by_frequency(trainer.model, trainer.split)
    results |= outcome(rankings)
    return rankings[-1]


def rank_baseline(arguments: RecArguments, split: "Split", results: dict[str, Any]) -> "Ranking":
    """Rank by popularity or by transitions; the ranking of the last part evaluated."""
    from bft_hf.rec.baselines import BASELINES
    from bft_hf.rec.evaluation import rank_users

    started = time.perf_counter()
    scorer = BASELINES[arguments.model]
    rankings = [rank_users(split, part, scorer(split, part), recommend=True) for part in arguments.parts]
    results |= {"bft_config": None, "seconds": {"evaluation": time.perf_counter() - started}} | outcome(rankings)
    return rankings[-1]


def save(folder: Path, results: dict[str, Any], ranking: "Ranking", model: Any) -> None:
    """Write the model, the users' ranks and, last, results.json; the checkpoint goes."""
    if model is not None:
        model.save_pretrained(folder)
    write_per_user(folder / "per_user.csv.gz", ranking)
    write_json(folder / "results.json", results)
    (folder / CHECKPOINT).unlink(missing_ok=True)


def _recommend(argv: Sequence[str]) -> None:
    arguments = parse_recommend(argv)
    if not Path(arguments.model).expanduser().exists() and arguments.model.count("/") != 1:
        raise UsageError(f"--model {arguments.model}: no such folder (nor can it be a Hub id)")
    from safetensors import SafetensorError
    from transformers import AutoModel

    from bft_hf.rec.recommend import RecommenderMixin

    _without_bars()
    with as_usage_error(f"--model {arguments.model}: ", ValueError, OSError, SafetensorError):
        model = AutoModel.from_pretrained(os.path.expanduser(arguments.model))
    if not isinstance(model, RecommenderMixin):
        raise UsageError(f"--model {arguments.model} is a {type(model).__name__}: give the folder of a recommender")
    with as_usage_error("", ValueError):
        found = model.recommend(
            [_as_ids(model, history) for history in arguments.histories],
            arguments.k,
            not arguments.include_seen,
            timestamps=arguments.timestamps,
            skip_unknown=arguments.skip_unknown,
        )
    for history, rows in zip(arguments.histories, found, strict=True):
        if arguments.json:
            print(json.dumps({"history": history, "recommendations": [vars(row) for row in rows]}, ensure_ascii=False))
            continue
        precision = rows[0].precision if rows else None
        certainty = "" if precision is None else f" (final precision {precision:.3g})"
        print(f"After {shlex.join(history)}{certainty}:")
        for place, row in enumerate(rows, start=1):
            spread = "" if row.score_std is None else f" ± {row.score_std:.3f}"
            title = "" if row.title is None else f"  {row.title}"
            print(f"{place:4}  {row.item}  score {row.score:.3f}{spread}, probability {row.probability:.4f}{title}")


def _as_ids(model: Any, history: list[str]) -> list[str | int]:
    """Words of the command line as the model takes them: by name, or by id where it has no map."""
    if model.item_map is not None:
        return list(history)
    return [int(word) if word.isdecimal() else word for word in history]


if __name__ == "__main__":
    sys.exit(main())
