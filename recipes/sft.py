"""`bft-sft`: fine-tune a patched or a plain language model on question answering with noisy labels, and measure it.

TinyLlama-1.1B, patched, on SQuAD from the Hub with 30 % of the answer labels replaced by wrong tokens:

    bft-sft --noise 0.3

The plain arm of that experiment, with LoRA, on questions of your own:

    bft-sft --method sft --noise 0.3 --use_peft --lora_r 16 --learning_rate 2e-4 --dataset questions.jsonl

Three arms with no Hub and no GPU, in minutes: `bft-sft --demo`.

The default model is the last *base* checkpoint, TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T. Chat-v1.0 has been
through instruction tuning and DPO, so what fine-tuning adds and noise spoils would be laid over somebody else's
fine-tuning. The base has no chat template; give `--model_name_or_path TinyLlama/TinyLlama-1.1B-Chat-v1.0` for one that has.

Every flag of TRL's SFTConfig and ModelConfig works (`--help-all`), also from `--config FILE` in YAML. Into `--output_dir`
go results.json, predictions.jsonl, the model or adapter with tau and Q, the tokenizer and a model card.
"""

import copy
import dataclasses
import functools
import gc
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    DEFAULT_METHOD,
    DEMO_METHODS,
    METHODS,
    FirstLook,
    SFTArguments,
    check_hub,
    check_output_dir,
    check_sources,
    default_output_dir,
    distractor_counts,
    first_look,
    is_resumed,
    light_parser,
    own_flags,
    parse,
    print_help,
)
from .command import UsageError, as_usage_error, console_script, is_main_process, missing_packages, say
from .data import (
    Data,
    evaluation_questions,
    load_data,
    training_questions,
    uses_reliability,
)
from .filter_flags import filter_config, first_given
from .results import (
    RESULTS_FORMAT,
    card_text,
    count_parameters,
    layer_lines,
    layer_state,
    library_versions,
    print_table,
    write_json,
)
from .token_classes import choose_rows, summary, token_classes

if TYPE_CHECKING:
    from datasets import Dataset

    from bft_hf import BFTConfig

    from .data import Rater

GAIN_PROMPTS = 8


@console_script("bft-sft", extra="sft")
def main(argv: list[str]) -> None:
    """Run the command on these words, the program's name left out."""
    asked = vars(light_parser().parse_known_args(argv)[0])
    if "help" in asked or "help_all" in asked:
        print_help(everything="help_all" in asked)
    else:
        _run(first_look(argv), shlex.join(["bft-sft", *argv]))


def _run(look: FirstLook, command: str) -> None:
    methods = [look.arguments.method or DEFAULT_METHOD]
    if look.arguments.demo and look.arguments.method is None:
        methods = list(DEMO_METHODS)
    folder = os.path.expanduser(look.output_dir or default_output_dir(look, methods[0]))
    # A second `bft-sft --demo` replaces the first one's results without being asked.
    replace = look.arguments.overwrite or (look.output_dir is None and look.arguments.demo)
    check_output_dir(folder, overwrite=replace, resume=look.resume)
    check_hub(look, check_sources(look))
    with _removed_on_refusal(folder):
        say("Importing the training libraries")
        with as_usage_error(missing_packages("sft"), ImportError):
            arms = [
                (method, *parse(look, ["--output_dir", os.path.join(folder, method) if len(methods) > 1 else folder]))
                for method in methods
            ]
        for _, later, _, _ in arms[1:]:
            later.eval_before = False  # all begin where the first one does, or, patched, a hundredth of a nat beside it
        resumed = [_resume_path(training, method) for method, _, training, _ in arms]
        _check_reliability(arms)
        arguments, training = arms[0][1], arms[0][2]
        say(f"Reading {arguments.dataset}" + (f" and {arguments.eval_dataset}" if arguments.eval_dataset else ""))
        data = load_data(methods, arguments, training.seed)
        for side, name in (("train", "dataset"), ("eval", "eval_dataset")):
            if left_out := data.description.get(f"{side}_without_gold"):
                say(f"{left_out} questions of --{name} have no gold passage and are left out")
        loaded = load_model(look, arms[0][2], arms[0][3])
        if replace and not any(resumed):
            _clear(folder, [training.output_dir for _, _, training, _ in arms])
        results: dict[str, dict[str, Any]] = {}
        for (method, arguments, training, model_config), resume in zip(arms, resumed, strict=True):
            if len(arms) > 1:
                say(f"\n{method}: {METHODS[method].summary}")
            last = method == methods[-1]
            arm = Arm(method, look, arguments, training, model_config, data, command)
            results[method] = arm.run(loaded[0] if last else copy.deepcopy(loaded[0]), loaded[1], resume)
            gc.collect()  # trainer and model refer to each other, and the next arm needs the room
        if len(arms) > 1:
            write_json(Path(folder, "results.json"), {"format": RESULTS_FORMAT, "command": command, "arms": results})
    if is_main_process():
        report(results, look)


def _check_reliability(arms: Sequence[tuple[str, SFTArguments, Any, Any]]) -> None:
    """Say of plain arms that they are told nothing.

    Raises:
        UsageError: TRL's packing would drop the column.
    """
    for method, arguments, training, _ in arms:
        if arguments.reliability is None:
            continue
        if not METHODS[method].patched:
            say(f"{method} is a plain model and ignores --reliability")
        elif training.packing or training.padding_free:
            raise UsageError("--reliability: TRL's packing and padding_free drop it: leave them out")


@contextmanager
def _removed_on_refusal(folder: str) -> Iterator[None]:
    """Leave no new folder behind when the command turns out not to be able to run."""
    path = Path(folder).absolute()
    new = [p for p in (path, *path.parents) if not p.exists()]
    try:
        yield
    except UsageError:
        kept = [*path.rglob("results.json"), *path.rglob("checkpoint-*")]
        if path in new and not kept:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # another run may have put its own folder beside this one
                for parent in new[1:]:
                    parent.rmdir()
        raise


def _clear(folder: str, outputs: Sequence[str]) -> None:
    """Remove an earlier run's checkpoints and results, and nothing else, from a folder that is used again."""
    for output in {folder, *outputs}:
        for checkpoint in Path(output).glob("checkpoint-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
        for name in ("results.json", "predictions.jsonl"):
            Path(output, name).unlink(missing_ok=True)


def _resume_path(training: Any, method: str) -> str | None:
    """The checkpoint to go on from, checked.

    Raises:
        UsageError: There is none, or it belongs to the other kind of model.
    """
    from transformers.trainer_utils import get_last_checkpoint

    from bft_hf.hub import checkpoint_config

    given = training.resume_from_checkpoint
    if not is_resumed(given):
        return None
    path = str(given)
    if path.lower() in ("true", "yes", "1"):
        last = get_last_checkpoint(training.output_dir) if os.path.isdir(training.output_dir) else None
        if last is None:
            raise UsageError(f"--resume_from_checkpoint: {training.output_dir} has no checkpoint-* folder")
        path = last
    if not Path(path, "trainer_state.json").is_file():
        raise UsageError(f"--resume_from_checkpoint {path}: no checkpoint there (no trainer_state.json)")
    patched = checkpoint_config(path) is not None
    if patched != METHODS[method].patched:
        kind, other = ("patched", "bft") if patched else ("plain", "sft")
        raise UsageError(f"--resume_from_checkpoint {path} is of a {kind} model: use --method {other}")
    return path


def load_model(look: FirstLook, training: Any, model_config: Any) -> tuple[Any, Any]:
    """The model, on the CPU and not patched unless its checkpoint is, and its tokenizer.

    Raises:
        UsageError: There is no such model.
    """
    import torch
    from transformers import set_seed
    from trl import get_quantization_config

    from .models import ModelNotFound, load_model_and_tokenizer

    options: dict[str, Any] = {}
    if model_config.attn_implementation is not None:
        options["attn_implementation"] = model_config.attn_implementation
    if model_config.model_revision != "main":
        options["revision"] = model_config.model_revision
    if (quantization := get_quantization_config(model_config)) is not None:
        options["quantization_config"] = quantization
    dtype = model_config.dtype
    # TRL moved this flag from ModelConfig to SFTConfig after 1.6.
    trust = getattr(training, "trust_remote_code", False) or getattr(model_config, "trust_remote_code", False)
    say(f"Loading {look.model}")
    set_seed(training.seed)
    with as_usage_error(f"--model_name_or_path {look.model}: ", OSError), as_usage_error("", ModelNotFound):
        return load_model_and_tokenizer(
            look.model,
            dtype=dtype if dtype in ("auto", None) else getattr(torch, dtype),
            trust_remote_code=trust,
            **options,
        )


@dataclass
class Arm:
    """One method's run: patch, train, evaluate before and after, save."""

    method: str
    look: FirstLook
    arguments: SFTArguments
    training: Any
    model_config: Any
    data: Data
    command: str
    context: dict[str, Any] = dataclasses.field(default_factory=dict)
    inspected: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rate: "Rater | None" = None

    @property
    def has_context(self) -> bool:
        """Whether anything stands beside the passages, or is said of them."""
        training, evaluation = distractor_counts(self.arguments, METHODS[self.method])
        return bool(training) or evaluation != [0] or uses_reliability(self.arguments, METHODS[self.method])

    @functools.cached_property
    def questions(self) -> tuple["Dataset", dict[str, Any] | None]:
        """The training questions, and the report of their distractors."""
        return training_questions(self.data, self.arguments, METHODS[self.method], self.training.seed, self.rate)

    @functools.cached_property
    def evaluations(self) -> "dict[int, Dataset]":
        """The evaluation questions by number of distractors."""
        found = evaluation_questions(self.data, self.arguments, METHODS[self.method], self.rate)
        self.context["evaluation"] = [report or {"distractors": k} for k, (_, report) in found.items()]
        return {k: rows for k, (rows, _) in found.items()}

    def run(self, model: Any, tokenizer: Any, resume: str | None) -> dict[str, Any]:
        """Do it.

        Args:
            model: Is changed.
            tokenizer: Has a pad token.
            resume: A checkpoint's folder, or None.

        Returns:
            What results.json holds.
        """
        from transformers import set_seed

        seconds: dict[str, float] = {}
        start = time.perf_counter()
        set_seed(self.training.seed)
        if uses_reliability(self.arguments, METHODS[self.method]) and self.arguments.reliability == "likelihood":
            self.rate = self._rater(model, tokenizer)
            _ = self.questions, self.evaluations  # rated by the model as it comes, before it is patched
        config = self._patch(model)
        rows, noise = self._tokenize(tokenizer)
        first = next(iter(self.evaluations))
        self.context |= self._context_settings()
        if config and self.arguments.calibrate:
            config = self._calibrate(model, rows, resume)
        results: dict[str, Any] = {
            "format": RESULTS_FORMAT,
            "method": self.method,
            "model": self.look.model,
            "adapter": bool(self.model_config.use_peft),
            "seed": self.training.seed,
            "noise": noise,
            "data": self.data.description,
            **({"context": self.context} if self.has_context else {}),
            "bft_config": config.to_dict() if config else None,
            "command": self.command,
            "flags": own_flags(self.arguments),
            "versions": library_versions(),
        }
        self._check_evaluations(model, tokenizer)
        trainer = self._trainer(model, tokenizer, rows, results)
        results["method_settings"] = METHODS[self.method].settings(self.training)
        results["parameters"] = count_parameters(trainer.model)
        results["device"] = str(self.training.device)
        label_loss = self._label_loss(trainer) if self.inspected else None  # refused before training, not after it
        layers = []
        seconds["preparation"] = time.perf_counter() - start

        def measure(when: str) -> dict[int, Any]:
            begin = time.perf_counter()
            found = {}
            for k, questions in self.evaluations.items():
                beside = f", {k} distractors" if self.has_context else ""
                desc = f"Evaluating {self.method} {when} training{beside}"
                with trainer.accelerator.autocast():  # in the precision it trains in, as Trainer evaluates
                    found[k] = self._evaluate(trainer.model, tokenizer, questions, desc)
            for note, evaluation in zip(self.context["evaluation"], found.values(), strict=True):
                note["shortened_rows"] = sum(row["truncated"] for row in evaluation.per_question)
            seconds[f"evaluation_{when}"] = time.perf_counter() - begin
            results[when] = found[first].summary()
            if self.has_context:
                results[f"{when}_by_distractors"] = {str(k): evaluation.summary() for k, evaluation in found.items()}
            return found

        def note_layers() -> None:
            if config:
                layers.append(layer_state(trainer.model, tokenizer, self._prompts(tokenizer)))

        if self.arguments.eval_before:
            measure("before")
        note_layers()
        begin = time.perf_counter()
        output = trainer.train(resume_from_checkpoint=resume)
        seconds["training"] = time.perf_counter() - begin
        results["training"] = {
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "loss": output.training_loss,
            "learning_rate": self.training.learning_rate,
            "bft_learning_rate": self.arguments.bft_learning_rate if config else None,
            "batch_size": self.training.train_batch_size
            * self.training.gradient_accumulation_steps
            * self.training.world_size,
            "losses": [[log["step"], log["loss"]] for log in trainer.state.log_history if "loss" in log],
        }
        evaluations = measure("after")
        note_layers()
        if self.inspected:
            begin = time.perf_counter()
            results["token_classes"] = self._token_classes(trainer, tokenizer, label_loss)
            seconds["token_classes"] = time.perf_counter() - begin
        if config:
            results["layers_before"], results["layers_after"] = layers
        seconds["total"] = time.perf_counter() - start
        results["seconds"] = {name: round(value, 2) for name, value in seconds.items()}
        self._save(trainer, results, evaluations)
        return results

    def _patch(self, model: Any) -> "BFTConfig | None":
        import bft_hf

        if not METHODS[self.method].patched:
            if bft_hf.is_patched(model):
                raise UsageError(f"{self.look.model} is a patched checkpoint: use --method bft")
            return None
        if not bft_hf.is_patched(model) or first_given(self.arguments) is not None:
            config = filter_config(self.arguments, default=bft_hf.BFTConfig())
            with as_usage_error(f"{self.look.model}: ", ValueError, TypeError, NotImplementedError):
                bft_hf.patch(model, config)
        return bft_hf.get_config(model)

    def _calibrate(self, model: Any, rows: "Dataset", resume: str | None) -> "BFTConfig | None":
        import torch

        import bft_hf
        from bft_hf.hub import checkpoint_config

        saved = checkpoint_config(resume) if resume else None
        if saved is not None:
            # What was measured when the run began: the same rows need not give the same digits on another device.
            bft_hf.patch(bft_hf.unpatch(model), saved)
        elif getattr(bft_hf.get_config(model), "gain_scale", None) is None:
            few = rows.select(range(min(self.arguments.calibrate, len(rows))))
            # On the answers' tokens: they are what is trained, and their gains are not those of the prompt.
            keys = ("input_ids", "labels")
            bft_hf.calibrate(model, ({key: torch.tensor([row[key]]) for key in keys} for row in few))
        return bft_hf.get_config(model)

    def _tokenize(self, tokenizer: Any) -> tuple["Dataset", dict[str, Any]]:
        """Training rows with corrupted labels, and what was done to them."""
        from bft_hf.noise.labels import corrupt_labels

        from .questions import end_of_turn, tokenize_questions

        method = METHODS[self.method]
        questions, added = self.questions
        told = uses_reliability(self.arguments, method)
        ends = {end_of_turn(tokenizer), tokenizer.eos_token_id} - {None}
        with as_usage_error("", ValueError):
            clean = tokenize_questions(
                questions,
                tokenizer,
                self.training.max_length,
                reliability=told,
                spans=self.arguments.noise_kind == "span_shift",
            )
            rows = corrupt_labels(
                clean,
                self.arguments.noise,
                seed=self.training.seed,
                vocab_size=len(tokenizer),
                kind=self.arguments.noise_kind,
                eos_token_ids=ends,
                pad_token_id=tokenizer.pad_token_id,
                special_token_ids=tokenizer.all_special_ids,
            )
        spared = ends | {tokenizer.pad_token_id}
        if self.arguments.token_classes:
            self.inspected = choose_rows(clean, rows, self.arguments.token_classes, spared, self.training.seed)
        noise = {
            "rate": self.arguments.noise,
            "kind": self.arguments.noise_kind,
            "corrupted_labels": sum(map(sum, rows["corrupted"])),
            "eligible_labels": sum(
                sum(label != -100 and label not in spared for label in row) for row in clean["labels"]
            ),
            "corrupted_rows": sum(map(any, rows["corrupted"])),
            "shortened_rows": sum(rows["truncated"]),
        }
        if added is not None:
            added |= {"shortened_rows": noise["shortened_rows"], "shortened_gold": sum(rows["gold_truncated"])}
            self.context["train"] = added
            if added["distractors"]:
                say(
                    f"{added['added']} distractors for {added['rows']} training questions ({added['short_rows']} have fewer "
                    f"than {added['distractors']}); {added['refused_answer']} candidates held an answer and were passed over; "
                    f"passages of {added['shortened_rows']} questions cut to fit, the gold one of {added['shortened_gold']}"
                )
        return rows.select_columns(["input_ids", "labels", *(["reliability"] if told else [])]), noise

    def _rater(self, model: Any, tokenizer: Any) -> "Rater":
        from .likelihood import likelihood_reliability

        def rate(rows: "Dataset") -> "Dataset":
            import torch

            if not (getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None)):
                model.to(self.training.device)
            size, length = self.training.per_device_eval_batch_size, self.training.max_length
            with torch.autocast(self.training.device.type, torch.bfloat16, enabled=bool(self.training.bf16)):
                return likelihood_reliability(rows, model, tokenizer, batch_size=size, max_length=length)

        return rate

    def _context_settings(self) -> dict[str, Any]:
        method = METHODS[self.method]
        return {
            "source": self.arguments.distractor_source,
            "gold_position": self.arguments.gold_position,
            "gold_probability": method.gold_probability,
            "reliability": self.arguments.reliability if uses_reliability(self.arguments, method) else None,
        }

    def _prompts(self, tokenizer: Any) -> list[dict[str, Any]]:
        from .questions import tokenize_example

        questions = next(iter(self.evaluations.values()))
        few = questions.select(range(min(GAIN_PROMPTS, len(questions))))
        return [tokenize_example(tokenizer, row, self.training.max_length) for row in few]

    def _trainer(self, model: Any, tokenizer: Any, rows: "Dataset", results: dict[str, Any]) -> Any:
        from trl import get_peft_config

        from .collator import reliability_collator
        from .questions import tokenize_questions
        from .trainer import BFTSFTTrainer

        method = METHODS[self.method]
        told = uses_reliability(self.arguments, method)
        peft_config = get_peft_config(self.model_config)
        if peft_config is not None and method.patched:
            # Otherwise LoRA freezes tau and Q and leaves them out of the adapter's file.
            peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or []), "bft"})
        method.configure(self.training)
        if not self.training.packing:
            # The rows are tokenized, labelled and cut already; TRL would map over them three times to find that out.
            self.training.dataset_kwargs = {"skip_prepare_dataset": True, **(self.training.dataset_kwargs or {})}
        evaluation = None
        if str(getattr(self.training.eval_strategy, "value", self.training.eval_strategy)) != "no":
            evaluation = tokenize_questions(
                next(iter(self.evaluations.values())), tokenizer, self.training.max_length, reliability=told
            ).select_columns(["input_ids", "labels", *(["reliability"] if told else [])])
        with as_usage_error("", ValueError, TypeError, ImportError, OSError, RuntimeError):
            return BFTSFTTrainer(
                model=model,
                args=self.training,
                train_dataset=rows,
                eval_dataset=evaluation,
                processing_class=tokenizer,
                peft_config=peft_config,
                data_collator=reliability_collator(tokenizer.pad_token_id, self.training) if told else None,
                bft_learning_rate=self.arguments.bft_learning_rate if method.patched else None,
                card=lambda where: card_text(results, where),
            )

    def _check_evaluations(self, model: Any, tokenizer: Any) -> None:
        """Refuse before training what evaluation would refuse after it, with the trained model lost.

        Raises:
            UsageError: A question that does not fit beside the answer's room, or reliability that does not fit its prompt.
        """
        from .evaluation import prepare_questions

        limit = self.training.max_length or getattr(model.config, "max_position_embeddings", None)
        told = uses_reliability(self.arguments, METHODS[self.method])
        with as_usage_error("evaluation: ", ValueError):
            for rows in self.evaluations.values():
                prepare_questions(
                    tokenizer,
                    list(rows),
                    max_new_tokens=self.arguments.max_new_tokens,
                    max_length=limit,
                    reliability=told,
                )

    def _evaluate(self, model: Any, tokenizer: Any, questions: "Dataset", desc: str) -> Any:
        from .evaluation import evaluate_answers

        return evaluate_answers(
            model,
            tokenizer,
            questions,
            batch_size=self.training.per_device_eval_batch_size,
            max_new_tokens=self.arguments.max_new_tokens,
            max_length=self.training.max_length,
            generate_first=self.arguments.eval_f1_examples,
            reliability=uses_reliability(self.arguments, METHODS[self.method]),
            record_uncertainty=self.arguments.record_uncertainty,
            progress=is_main_process(),
            desc=desc,
        )

    def _label_loss(self, trainer: Any) -> Any:
        from .losses import label_losses

        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise UsageError("--token_classes needs whole gradients, and here they are sharded: leave it out")
        with as_usage_error("--token_classes: ", ValueError):
            return label_losses(self.training)

    def _token_classes(self, trainer: Any, tokenizer: Any, label_loss: Any) -> dict[str, dict[str, float]]:
        with trainer.accelerator.autocast():
            return token_classes(
                trainer.model,
                self.inspected,
                label_loss,
                batch_size=self.training.per_device_eval_batch_size,
                pad_token_id=tokenizer.pad_token_id,
                progress=is_main_process(),
                desc=f"Labels of {self.method}",
            )

    def _save(self, trainer: Any, results: dict[str, Any], evaluations: dict[int, Any]) -> None:
        folder = Path(self.training.output_dir)
        trainer.save_model(str(folder))
        if not trainer.is_world_process_zero():
            return
        with open(folder / "predictions.jsonl", "w", encoding="utf-8") as file:
            for k, evaluation in evaluations.items():
                beside = {"distractors": k} if self.has_context else {}
                file.writelines(json.dumps(row | beside, ensure_ascii=False) + "\n" for row in evaluation.per_question)
        trainer.create_model_card()
        write_json(folder / "results.json", results)
        if self.training.push_to_hub:
            with as_usage_error(f"the results are in {folder}, but the upload failed: ", OSError, ValueError):
                trainer.push_to_hub()


def report(results: dict[str, dict[str, Any]], look: FirstLook) -> None:
    """The table at the end, and the sentence that belongs under it."""
    rows: list[dict[str, Any]] = []
    for method, result in results.items():
        if "before" in result:
            patched = ", patched" if METHODS[method].patched else ""
            rows += [{"name": f"untrained{patched}{k}", "metrics": metrics} for k, metrics in _by_k(result, "before")]
    for method, result in results.items():
        trained = {"parameters": result["parameters"], "seconds": result["seconds"]["training"]}
        for k, metrics in _by_k(result, "after"):
            rows.append({"name": f"{method}{k}", "metrics": metrics, **trained})
            trained = {}
    any_result = next(iter(results.values()))
    data, noise = any_result["data"], any_result["noise"]
    print_table(
        rows,
        f"{look.model}, {data['train_examples']} questions of {data['train']}, noise {noise['rate']:g} "
        f"({noise['corrupted_labels']} of {noise['eligible_labels']} labels), seed {any_result['seed']}",
    )
    for method, result in results.items():
        if line := summary(result.get("token_classes", {})):
            say(f"{method}: {line}")
        if result["bft_config"]:
            for line in layer_lines(result["layers_before"], result["layers_after"]):
                say(f"{method}: {line}")
    folder = Path(look.output_dir or default_output_dir(look, next(iter(results))))
    say(f"Written to {folder}")
    if len(results) > 1:
        say(
            f"One seed and {data['eval_examples']} questions are an example: which differences between "
            f"{', '.join(results)} hold, more seeds say (--seed)."
        )


def _by_k(result: dict[str, Any], when: str) -> list[tuple[str, dict[str, Any]]]:
    """Each evaluation of a run, with what to add to its name."""
    several = result.get(f"{when}_by_distractors")
    return [("", result[when])] if several is None else [(f", k = {k}", value) for k, value in several.items()]


if __name__ == "__main__":
    sys.exit(main())
