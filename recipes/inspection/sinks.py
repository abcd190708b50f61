"""`bft-inspect sinks`: weight on the first token, effective sample size, gain and gates by context length."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command import OneLineParser, UsageError, as_usage_error, say
from ..filter_flags import first_given
from .cli import add_filter, add_model, check_dataset, check_model, check_output_dir, load, most_tokens, patch, write
from .texts import question_arguments, read_file

SINKS_FORMAT = 1
LENGTHS = (64, 128, 256, 512, 1024, 2048)
QUANTITIES = ("sink_rate", "first_token_mass", "sample_size", "gain", "gate")
HEADINGS = ("sink rate", "first-token mass", "n", "gain", "gate")


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-inspect sinks`."""
    result = OneLineParser(
        prog="bft-inspect sinks",
        usage="bft-inspect sinks MODEL [--file FILE | --dataset DATASET] [--FLAG VALUE ...]",
        allow_abbrev=False,
        description="Measure by context length the weight on the first token, the effective sample size n, a filter's gain and a "
        "gated attention's gates. A patched model is measured unpatched too, and a plain one patched.",
    )
    add_model(result)
    text = result.add_argument_group("running text, one of").add_mutually_exclusive_group()
    text.add_argument("--file", metavar="FILE", help="A file of text, or - for standard input.")
    text.add_argument("--dataset", help="The passages of a data set of questions, as bft-sft reads it. Default demo.")
    add = result.add_argument
    add("--split", help="train, validation or all. Default: all of a file, train of a data set of the Hub or demo.")
    add(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help=f"Context lengths. Default {' '.join(map(str, LENGTHS))}, as far as the model's positions and the text allow.",
    )
    add(
        "--samples", type=int, default=8, metavar="N", help="Stretches of text, each of the greatest length. Default 8."
    )
    add("--seed", type=int, default=42, metavar="N", help="Of where they are taken. Default 42.")
    add_filter(result)
    add = result.add_argument_group("output").add_argument
    add("--output_dir", metavar="DIR", help="Default outputs/sinks-<model>.")
    add("--overwrite", action="store_true", help="Replace an earlier measurement's files in --output_dir.")
    return result


def run(argv: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        UsageError: It cannot run as given.
    """
    options = _checked(parser().parse_args(argv))
    model, tokenizer = load(options)

    import bft_hf

    from ..results import library_versions
    from .figures import draw_lengths
    from .profile import Profile, by_length, correlation, per_doubling, profile

    ids = _tokens(options, tokenizer)
    lengths = _lengths(options, most_tokens(model, max(options.lengths or LENGTHS)), len(ids))
    rows = _stretches(ids, lengths[-1], options, tokenizer)
    patched_here = _patch(model, options)
    found: dict[str, Profile] = {}
    config = bft_hf.get_config(model)
    with as_usage_error(f"{options.model}: ", ValueError):
        if bft_hf.is_patched(model):
            say(f"Measuring the patched model on {len(rows)} stretches of {lengths[-1]} tokens")
            found["patched"] = profile(model, rows)
            bft_hf.unpatch(model)
        say(f"Measuring the plain model on {len(rows)} stretches of {lengths[-1]} tokens")
        found = {"plain": profile(model, rows), **found}
    arms = {arm: by_length(one, lengths) for arm, one in found.items()}
    slopes = {
        arm: {name: per_doubling(measured, name) for name in QUANTITIES if name in measured[0]}
        for arm, measured in arms.items()
        if len(lengths) > 1
    }
    follows = {
        arm: {name: correlation(one, name) for name in ("gain", "gate") if getattr(one, name) is not None}
        for arm, one in found.items()
    }
    result = {
        "format": SINKS_FORMAT,
        "command": shlex.join(["bft-inspect", "sinks", *argv]),
        "model": options.model,
        "patched_here": patched_here,
        "bft_config": None if config is None else config.to_dict(),
        "samples": len(rows),
        "by_length": arms,
        "per_doubling": slopes,
        "correlation": follows,
        "versions": library_versions(),
    }
    names = [name for name in QUANTITIES if any(name in measured[0] for measured in arms.values())]
    write(options.output_dir, {"sinks.svg": draw_lengths(arms, names)}, "sinks", result)
    print_lengths(arms, slopes, follows)
    say(f"Written to {options.output_dir}")


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    check_model(options)
    if options.samples < 1:
        raise UsageError(f"--samples must be at least 1, got {options.samples}")
    if options.lengths is not None and (min(options.lengths) < 2 or len(set(options.lengths)) < len(options.lengths)):
        raise UsageError("--lengths must be different numbers from 2 upwards")
    question_arguments(options)
    if options.file is None:
        options.dataset = options.dataset or "demo"
        check_dataset(options)
    elif options.split:
        raise UsageError("--split is of --dataset: leave it out")
    elif options.file != "-" and not Path(options.file).expanduser().is_file():
        raise UsageError(f"--file {options.file}: no such file")
    check_output_dir(options, "sinks")
    return options


def _tokens(options: argparse.Namespace, tokenizer: Any) -> list[int]:
    """All of the text, without the tokens that the tokenizer puts in front by itself."""
    from ..question_files import DataError, read_questions

    if options.file is not None:
        texts = [read_file(options.file)]
    else:
        with as_usage_error("", DataError, ValueError, OSError):
            rows = read_questions(options.dataset, split=options.split).rows
        texts = list(dict.fromkeys(row["context"] for row in rows))
    return [token for text in texts for token in tokenizer(text + "\n", add_special_tokens=False)["input_ids"]]


def _lengths(options: argparse.Namespace, most: int, tokens: int) -> list[int]:
    """The lengths to measure, ascending.

    Raises:
        UsageError: One that was asked for is longer than the model's positions or the text, or none is left.
    """
    asked = sorted(options.lengths or LENGTHS)
    allowed = [length for length in asked if length <= min(most, tokens)]
    if options.lengths and len(allowed) < len(asked):
        limit = f"the model's positions allow {most}" if asked[-1] > most else f"the text has {tokens} tokens"
        raise UsageError(f"--lengths {asked[-1]}: {limit}")
    if not allowed:
        raise UsageError(f"{options.file or options.dataset}: {tokens} tokens are too few, {asked[0]} are needed")
    return allowed


def _stretches(ids: list[int], length: int, options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Stretches of text from places drawn at random, behind what the tokenizer puts in front of a text by itself."""
    import torch

    front = list(tokenizer("", add_special_tokens=True)["input_ids"])
    if front and front[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id:
        front.pop()
    draws = torch.Generator().manual_seed(options.seed)
    room = length - len(front)
    starts = torch.randint(0, len(ids) - room + 1, (options.samples,), generator=draws).tolist()
    return [torch.tensor(front + ids[start : start + room]) for start in starts]


def _patch(model: Any, options: argparse.Namespace) -> bool:
    """Patch the model if it can be; one of another family is measured as it is."""
    try:
        return patch(model, options)
    except UsageError as error:
        if first_given(options) is not None:
            raise
        say(f"Measured as it is, not patched: {error}")
        return False


def print_lengths(
    arms: dict[str, list[dict[str, Any]]],
    slopes: dict[str, dict[str, list[float]]],
    follows: dict[str, dict[str, list[float]]],
) -> None:
    """Tables by context length on the terminal, with 95 % intervals over stretches of text."""
    from rich.console import Console
    from rich.table import Table

    from .profile import t_interval

    console = Console(width=max(120, Console().width))
    for arm, rows in arms.items():
        table = Table(title=f"{arm}: means, and 95 % intervals over stretches of text", title_justify="left")
        table.add_column("length", justify="right", no_wrap=True)
        names = [name for name in QUANTITIES if name in rows[0]]
        for name, heading in zip(QUANTITIES, HEADINGS, strict=True):
            if name in names:
                table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            cells = ["{:.3g} [{:.3g}, {:.3g}]".format(*t_interval(row[name])) for name in names]
            table.add_row(str(row["length"]), *cells)
        if arm in slopes:
            cells = ["{:+.2g} [{:+.2g}, {:+.2g}]".format(*t_interval(slopes[arm][name])) for name in names]
            table.add_row("per doubling", *cells, style="dim")
        console.print(table)
        for name, values in follows[arm].items():
            mean, low, high = t_interval(values)
            say(f"Correlation of the {name} with log n over a layer's tokens: {mean:.2f} [{low:.2f}, {high:.2f}]")
