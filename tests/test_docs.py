"""Every block of shell or Python in README.md, CONTRIBUTING.md and docs/ runs, in a short form, or says why it does not.

A page's blocks run in order, in one folder, the Python ones in one namespace. The commands are this package's own, called in
this process with the flags of `QUICK` added; `pip`, `make` and the like are held to what pyproject.toml and the Makefile know. A
block that cannot run stands under `<!-- not run: the reason -->`. `python tests/test_docs.py` prints how many of each there are.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from markdown_it import MarkdownIt

from bft_hf.architectures import ARCHITECTURES
from bft_hf.noise.labels import LABEL_NOISES
from bft_hf.recipes.losses import TOKEN_LOSSES

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
if not DOCS.is_dir():
    pytest.skip("no docs/ beside tests/", allow_module_level=True)
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS = PYPROJECT["project"]["scripts"]

RUN = {"bash", "python"}
SHOWN = {"text", "yaml", "toml", "json"}
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->\s*", re.DOTALL)

MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
"""A folder of this name holds a tiny random Llama, and takes the place of the names of other models."""
OTHER_MODELS = re.compile(r"smollm2-135m|HuggingFaceTB/SmolLM2-\w+(?:-Instruct)?|TinyLlama/TinyLlama-1\.1B-[\w.-]*\w")
STEPS = re.compile(r"\b(max_steps|num_train_epochs)=\d+")
"""Of Python blocks: as few steps as a test can wait for."""
FILES = {
    "train-v1.1.json.gz": "questions",
    "dev-v1.1-a.json.gz": "questions",
    "beauty.txt.gz": "histories",
    "questions.jsonl": "questions",
}
"""What a page takes for granted that its reader has."""

SFT = f"--model_name_or_path {MODEL} --max_steps 1 --train_examples 2 --eval_examples 2 --max_new_tokens 2 --bf16 false"
SFT += " --save_strategy no --overwrite --eval_before false --lora_target_modules all-linear --calibrate 0 --max_context_chars 4000 --max_length 600"
QUICK = {
    "bft-sft": SFT,
    "bft-audit": f"--model_name_or_path {MODEL} --train_examples 24 --calibration_examples 12 --calibration_noise 0.5 --max_context_chars 4000 --resamples 20 --overwrite",
    "bft-inspect": "--max_length 300 --weight_tokens 16 --overwrite --use_cpu",
    "bft-inspect sinks": "--lengths 16 32 --samples 1 --overwrite --use_cpu",
    "bft-audit compare": "",
    "bft-audit selective": "",
    "bft-rec": "--epochs 1 --hidden_size 8 --num_layers 1 --max_length 8 --batch_size 64 --overwrite",
    "bft-rec recommend": "",
    "bft-bench": "--list",
    "bft-bench report": "",
    "bft-bench pack": "",
}
"""Flags added to a command, by its first words; the last of a flag counts."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page, its first line, and why it does not run where that is said."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, indented ones too, whose language is empty."""
    found, before = [], ""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            reason = NOT_RUN.fullmatch(before)
            language = token.info.split()[0] if token.info.strip() else ""
            found.append(Block(page, token.map[0] + 1, language, token.content, reason[1] if reason else None))
        before = token.content if token.type == "html_block" else ""
    return found


BLOCKS = {page: blocks(page) for page in PAGES}


def test_every_block_says_its_language_and_runs_or_says_why_not() -> None:
    for block in (block for page in BLOCKS.values() for block in page):
        assert block.language, f"{block.place} is indented, or has no language: ```bash, ```python or ```text"
        if block.language not in RUN | SHOWN:
            assert block.reason, f"{block.place} is {block.language}: write <!-- not run: WHY --> above it, or ```text"
        prompts = block.language in SHOWN and re.search(r"^(\$ |bft-|pip |python |make )", block.text, re.MULTILINE)
        assert not prompts or block.reason, f"{block.place} shows commands as {block.language}: ```bash"


def test_most_blocks_run() -> None:
    run, marked = counts()
    assert run > 2 * marked > 0, f"{run} blocks run and {marked} do not"


def counts(*pages: Path) -> tuple[int, int]:
    """How many blocks of some pages run, of all if none is given, and how many are marked."""
    reasons = [block.reason for page in pages or PAGES for block in BLOCKS[page] if block.language not in SHOWN]
    return reasons.count(None), len(reasons) - reasons.count(None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the name of a model on the Hub is that of a tiny one."""
    from conftest import make_tiny_llama
    from test_questions import byte_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer()
    make_tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=4096).save_pretrained(
        folder / MODEL
    )
    tokenizer.save_pretrained(folder / MODEL)
    return folder


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A clone as a page's reader has it, with the files that the page takes for granted."""
    folder = tmp_path / "clone"
    shutil.copytree(models, folder)
    for name in ("recipes", "examples", "docs", "pyproject.toml", "constraints.txt"):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    for results in (DOCS / "results").iterdir():
        if results.is_dir():
            shutil.copytree(results, folder / "outputs" / results.name)
    monkeypatch.setattr("bft_hf.noise.bm25.default_cache", lambda: tmp_path / "bm25")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(folder)
    # Pages that add to a table of the package do so for their own length.
    monkeypatch.setattr("bft_hf.architectures._registered", set())
    with mock.patch.dict(ARCHITECTURES), mock.patch.dict(LABEL_NOISES), mock.patch.dict(TOKEN_LOSSES):
        yield folder


def lay_out(kind: str, path: Path) -> None:
    """Write a small file of the data that its name promises."""
    from bft_hf.recipes.questions import load_questions

    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "histories":
        draw = random.Random(0)
        lines = (f"{user} {' '.join(str(draw.randrange(1, 120)) for _ in range(9))}" for user in range(60))
        write(path, "\n".join([*lines, "61 12 7 101", "62 7 101 12"]) + "\n")
        return
    rows = load_questions("demo", split="train", limit=36, seed=0)
    if path.name.endswith("jsonl"):
        write(path, "".join(json.dumps(row) + "\n" for row in rows.to_list()))
        return
    articles = []
    for row in rows.to_list():
        answers = [{"text": text, "answer_start": row["context"].index(text)} for text in row["answers"]]
        asked = {"id": row["id"], "question": row["question"], "answers": answers}
        articles.append({"title": row["id"], "paragraphs": [{"context": row["context"], "qas": [asked]}]})
    write(path, json.dumps({"version": "1.1", "data": articles}))


def write(path: Path, text: str) -> None:
    import gzip

    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if counts(page)[0]], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_blocks_run(page: Path, workplace: Path) -> None:
    code = "".join(block.text for block in BLOCKS[page] if block.reason is None and block.language in RUN)
    for name, kind in FILES.items():
        for mention in set(re.findall(rf"[\w./-]*{re.escape(name)}", code)):
            if f"> {mention}" not in code and f'open("{mention}", "w")' not in code:
                lay_out(kind, workplace / mention)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS[page]:
        if block.reason is not None or block.language not in RUN:
            continue
        text = OTHER_MODELS.sub(MODEL, block.text)
        if block.language == "python":
            # Blank lines in front, so that a traceback names the page's line.
            exec(compile("\n" * block.line + STEPS.sub(r"\1=1", text), block.place, "exec"), namespace)
        else:
            Shell(workplace).run(text, block.place)


def make_one_answer_right(folders: list[Path]) -> None:
    """In the predictions of a tiny random model: where all answers are wrong, no score can tell the wrong ones."""
    for path in (folder / "predictions.jsonl" for folder in folders):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows[0] |= {"exact_match": 1.0, "f1": 1.0}
        write(path, "".join(json.dumps(row) + "\n" for row in rows))


SHIM = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send((os.path.basename(sys.argv[0]), os.getcwd(), sys.argv[1:]))
    status, printed, errors = server.recv()
sys.stdout.write(printed)
sys.stderr.write(errors)
sys.exit(status)
"""


class Shell:
    """bash, whose commands of this package are answered by this process: in one of their own each imports torch and TRL anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[str, Callable[[list[str]], int | None]] = {
            "pip": self.pip,
            "make": self.make,
            "python": self.python,
            "accelerate": self.accelerate,
        }

    def run(self, text: str, place: str) -> None:
        """Run a block, and fail with what it printed."""
        done: list[subprocess.CompletedProcess[str]] = []
        with Listener() as listener:
            binaries = self.folder / ".bin"
            binaries.mkdir(exist_ok=True)
            for name in [*COMMANDS, *self.answers]:
                (binaries / name).write_text(SHIM.format(python=sys.executable, address=listener.address))
                (binaries / name).chmod(0o755)

            def bash() -> None:
                environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
                command = ["bash", "-euo", "pipefail", "-c", text]
                done.append(
                    subprocess.run(
                        command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
                    )
                )
                with Client(listener.address) as client:
                    client.send(None)

            thread = threading.Thread(target=bash)
            thread.start()
            while True:
                with listener.accept() as connection:
                    if (asked := connection.recv()) is None:
                        break
                    connection.send(self.answer(*asked))
            thread.join()
        assert done[0].returncode == 0, f"{place}\n{text}\n{done[0].stdout}\n{done[0].stderr}"

    def answer(self, name: str, folder: str, argv: list[str]) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of one command."""
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            try:
                status = self.answers[name](argv) if name in self.answers else self.own(name, argv)
            except SystemExit as stopped:
                status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            except BaseException:
                traceback.print_exc()
                status = 1
        return status or 0, printed.getvalue(), errors.getvalue()

    def own(self, name: str, argv: list[str]) -> int | None:
        """A command of this package, made short."""
        module, _, function = COMMANDS[name].partition(":")
        words = f"{name} {argv[0]}" if argv and f"{name} {argv[0]}" in QUICK else name
        if words == "bft-audit selective":
            make_one_answer_right([Path(folder) for folder in argv[1:] if not folder.startswith("-")])
        return getattr(importlib.import_module(module), function)([*argv, *QUICK[words].split()])

    def pip(self, argv: list[str]) -> int:
        """`pip install`: the extras exist."""
        assert argv[0] == "install", argv
        for word in argv[1:]:
            extras = re.search(r"\[([\w,]+)\]", word)
            known = PYPROJECT["project"]["optional-dependencies"]
            assert extras is None or set(extras[1].split(",")) <= set(known), f"pip {argv}: extras are {sorted(known)}"
        return 0

    def make(self, argv: list[str]) -> int:
        """`make`: the targets exist."""
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        asked = [word for word in argv if "=" not in word and not word.startswith("-")]
        assert set(asked) <= set(targets), f"make {asked}: targets are {targets}"
        return 0

    def python(self, argv: list[str]) -> int | None:
        """`python examples/...`, on the tiny model."""
        assert argv[0].startswith("examples/"), f"python {argv[0]}: only the examples run here"
        tiny = ["--model", MODEL] if "--model" in Path(argv[0]).read_text(encoding="utf-8") else []
        with mock.patch.object(sys, "argv", [*argv, *tiny]):
            runpy.run_path(argv[0], run_name="__main__")
        return 0

    def accelerate(self, argv: list[str]) -> int | None:
        """`accelerate launch ... -m MODULE`: the configuration's file exists, and one process does the rest."""
        assert argv[0] == "launch", argv
        launch, flags = argv[1 : argv.index("-m")], argv[argv.index("-m") + 1 :]
        for option, value in itertools.pairwise(launch):
            assert option != "--config_file" or Path(value).is_file(), value
        name = {target.partition(":")[0]: name for name, target in COMMANDS.items()}[flags[0]]
        return self.own(name, flags[1:])


def test_a_failing_command_fails_its_block(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown --method 'bfft'"):
        Shell(tmp_path).run("bft-sft --method bfft\n", "here")
    with pytest.raises(AssertionError, match="extras are"):
        Shell(tmp_path).run("true\npip install 'bft-hf[everything]'\n", "here")


def test_the_page_of_the_interface_names_every_public_name() -> None:
    import bft_hf.rec

    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for module in (bft_hf, bft_hf.rec):
        for name in module.__all__:
            assert re.search(rf"^::: {module.__name__}\.{name}$", page, re.MULTILINE), f"docs/api.md lacks {name}"


def test_every_page_stands_in_the_navigation() -> None:
    listed = re.findall(
        r"^ +- [^:]+: ([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {str(page.relative_to(DOCS)) for page in PAGES[2:]} == set(listed)


if __name__ == "__main__":
    for page in PAGES:
        if any(counts(page)):
            print("{:42} {:3} run {:3} do not".format(str(page.relative_to(REPOSITORY)), *counts(page)))
    print("{:42} {:3} run {:3} do not".format("all", *counts()))
