"""What the commands share: errors of one line, a parser that raises them, quiet libraries and an exit status."""

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol


class UsageError(ValueError):
    """The command cannot run as given; the message is one line and names the remedy."""


def one_line(error: BaseException) -> str:
    """An exception's message on one line, its type in front when the message alone says nothing."""
    text = " ".join(str(error).split())
    return text if len(text) > 8 else f"{type(error).__name__}: {text}"


@contextmanager
def as_usage_error(prefix: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn exceptions of these kinds into one line for who typed the command."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(f"{prefix}{one_line(error)}") from error


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the flags)")


def without_flag(argv: Sequence[str], flag: str) -> list[str]:
    """The command line without a flag and its value, written `--flag value` or `--flag=value`."""
    rest, skip = [], False
    for word in argv:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            rest.append(word)
    return rest


def read_yaml(text: str) -> Any:
    """A YAML document, with the numbers of YAML 1.2: PyYAML's 1.1 takes 1e-4, without a point, for a text.

    Raises:
        yaml.YAMLError: It is none.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader)


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that `accelerate launch` started."""
    return int(os.environ.get("RANK", 0)) == 0


def say(text: str) -> None:
    """A line of progress on stdout, seen at once in a pipe too; of several processes the first one's."""
    if is_main_process():
        print(text, flush=True)


def missing_packages(extra: str) -> str:
    """What stands in front of an ImportError of packages that an extra brings."""
    return f"packages are missing, pip install 'bft-hf[{extra}]' brings them: "


class Main(Protocol):
    """A console script: its words, or None for those of sys.argv, to an exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def console_script(
    name: str, *, extra: str, interrupted: str = "interrupted"
) -> Callable[[Callable[[list[str]], int | None]], Main]:
    """Make the `main` of a console script of a function of its words.

    Args:
        name: The program's.
        extra: As for `run_command`.
        interrupted: As for `run_command`.

    Returns:
        A decorator. What it makes gives the exit status of `run_command`.
    """

    def decorate(body: Callable[[list[str]], int | None]) -> Main:
        def main(argv: Sequence[str] | None = None) -> int:
            words = list(sys.argv[1:] if argv is None else argv)
            return run_command(name, lambda: body(words), extra=extra, interrupted=interrupted)

        main.__doc__, main.__module__ = body.__doc__, body.__module__
        main.__name__ = main.__qualname__ = body.__name__
        return main

    return decorate


def run_command(name: str, body: Callable[[], int | None], *, extra: str, interrupted: str = "interrupted") -> int:
    """Run a command's body and turn what it raises into one line on stderr and an exit status.

    Args:
        name: The program's.
        body: Gives an exit status, or None for 0.
        extra: The extra that brings the packages it imports.
        interrupted: What to say after an interrupt.

    Returns:
        The body's status; 2 if the command cannot run as given, 130 after an interrupt.
    """
    try:
        with _quiet():
            return body() or 0
    except UsageError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # of a machine's processes one speaks
            print(f"{name}: {one_line(error)}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{name}: {missing_packages(extra)}{one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Notices of the libraries are addressed to their callers, not to who types a command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not is_main_process():  # read as the libraries are imported
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    # Where it is installed, PEFT imports it, and on some CPUs it misses a kernel that nothing here would use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        # PEFT's, of a base model that came out of a wheel and has no folder of its own.
        warnings.filterwarnings("ignore", message="Could not find a config file")
        yield
