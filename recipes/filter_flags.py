"""The flags by which every command says what BFTConfig it wants."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .command import UsageError, as_usage_error, read_yaml

if TYPE_CHECKING:
    from bft_hf import BFTConfig

FILTER_FLAGS = ("bft_config", "bft_overrides", "process_noise", "initial_precision")
OVERRIDES_HELP = "Fields of BFTConfig: gain=false,initial_precision=mlp,layers=[14,15]."
# A comma between two pairs, not one within a list.
_COMMA = re.compile(r",(?![^\[]*\])")


class FilterFlags(Protocol):
    """What holds the values of FILTER_FLAGS, None where one was not given."""

    @property
    def bft_config(self) -> str | None: ...
    @property
    def bft_overrides(self) -> str | None: ...
    @property
    def process_noise(self) -> float | None: ...
    @property
    def initial_precision(self) -> float | None: ...


def first_given(flags: FilterFlags) -> str | None:
    """The name of the first of the flags that was given, None if there is none."""
    return next((name for name in FILTER_FLAGS if getattr(flags, name, None) is not None), None)


def check_filter_flags(flags: FilterFlags) -> None:
    """Refuse a file that is not there and overrides that are no pairs, before anything heavy is imported.

    Raises:
        UsageError: Either.
    """
    if flags.bft_config is not None and not Path(flags.bft_config).expanduser().is_file():
        raise UsageError(f"--bft_config {flags.bft_config}: no such file")
    parse_overrides("bft_overrides", flags.bft_overrides)


def parse_overrides(flag: str, text: str | None) -> dict[str, Any]:
    """`name=value,name=value` as a dictionary; values are read as YAML reads them, lists in brackets included.

    Raises:
        UsageError: Something that is no such pair.
    """
    import yaml

    values: dict[str, Any] = {}
    for pair in _COMMA.split(text or ""):
        if not pair.strip():
            continue
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--{flag}: {pair.strip()!r} is no name=value")
        try:
            values[name.strip()] = read_yaml(value)
        except yaml.YAMLError:
            raise UsageError(f"--{flag}: {value!r} is not readable") from None
    return values


def filter_config(flags: FilterFlags, default: "BFTConfig") -> "BFTConfig":
    """The BFTConfig that the flags ask for: the file's or the default, changed by the overrides, Q and tau.

    Raises:
        UsageError: A file that does not hold one, a field that there is none of, or values it refuses.
    """
    from bft_hf import BFTConfig

    config = default
    if flags.bft_config is not None:
        with as_usage_error("--bft_config: ", ValueError, TypeError, OSError):
            config = BFTConfig.from_json_string(Path(flags.bft_config).expanduser().read_text(encoding="utf-8"))
    overrides = parse_overrides("bft_overrides", flags.bft_overrides)
    for name in overrides:
        if name not in {spec.name for spec in dataclasses.fields(BFTConfig)}:
            raise UsageError(f"--bft_overrides: BFTConfig has no field {name!r}")
    starts = {"initial_process_noise": flags.process_noise, "initial_precision_value": flags.initial_precision}
    changes = overrides | {name: value for name, value in starts.items() if value is not None}
    with as_usage_error("the filter's settings: ", ValueError, TypeError):
        return dataclasses.replace(config, **changes)
