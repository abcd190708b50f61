"""The settings of a Bayesian Filtering Transformer: one frozen, validated dataclass that travels with a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = (1, 1)
"""(major, minor) of the JSON form. A minor step adds a field, a major step changes what a field means."""

SMALLEST, LARGEST = 1e-12, 1e12
"""The range of start values and degrees of freedom: float32 holds their products too."""

RANGE = f"from {SMALLEST:g} to {LARGEST:g}"

_ADDED_LATER: dict[str, Any] = {"gain_scale": None}
"""Fields added after version 1.0, with the value that computes what checkpoints written before the field computed."""

_VERSION_KEY = "bft_format"


def _choice(default: str, *allowed: str, help: str) -> Any:
    return field(default=default, metadata={"help": help, "choices": allowed})


def _positive(default: float, help: str) -> Any:
    return field(default=default, metadata={"help": help, "positive": True})


def _switch(default: bool, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class BFTConfig:
    """How `bft_hf.patch` turns decoder layers into filter steps.

    The defaults start near the pretrained function: process noise 100 in every layer, in units of the layer's own signal
    power, keeps precisions near .01 and gains near 1, and training moves both from there. `BFTConfig.unit()` starts the
    filter at full strength, for models that begin from random weights; `BFTConfig.identity()` keeps the pretrained function.

    Raises:
        ValueError: a field has a value that is not allowed; the message names field, value and what is allowed.
    """

    granularity: str = _choice(
        "token", "token", "channel", help="One precision a token, or one a token and residual channel."
    )
    initial_precision: str = _choice(
        "constant",
        "constant",
        "table",
        "mlp",
        help="Where a token's first precision comes from: one learned scalar, one a vocabulary item, or an MLP.",
    )
    initial_precision_value: float = _positive(0.01, "Start value of the initial precision tau.")
    initial_process_noise: float = _positive(100.0, "Start value of the process noise Q of every layer.")
    prior_degrees_of_freedom: float = _positive(1.0, "nu0: how many observations the variance prior is worth.")
    prior_scale: str = _choice(
        "unit", "unit", "neighbours", help="s0^2 of the variance prior: 1, or the neighbours' own variance."
    )
    observation_units: str = _choice(
        "relative", "relative", "absolute", help="Residual variance as a share of the value power, or in value units."
    )
    effective_sample_size: str = _choice(
        "probe",
        "probe",
        "exact",
        help="Kish's n from random-sign value channels, or from a second pass over the scores.",
    )
    kriging: bool = _switch(True, "Weight keys by their precision.")
    gain: bool = _switch(True, "Scale the attention update by the Kalman gain; off means gain 1.")
    propagate: bool = _switch(True, "Carry the precision through the FFN with process noise; off leaves it as it is.")
    differentiate_jacobian: bool = _switch(False, "Let gradients flow through the FFN's Jacobian.")
    separate_key_precision: bool = _switch(False, "Give keys a precision of their own, apart from the filter's prior.")
    layers: tuple[int, ...] | None = field(
        default=None, metadata={"help": "Indices of the layers to patch, ascending; None means all."}
    )

    gain_scale: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "Factor on the gain of each patched layer, as `calibrate` measures it; None is 1 everywhere."
        },
    )

    def __post_init__(self) -> None:
        for name in ("layers", "gain_scale"):
            if isinstance(getattr(self, name), list):  # JSON and YAML have no tuples
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for spec in dataclasses.fields(self):
            self._validate(spec)

    def _validate(self, spec: dataclasses.Field) -> None:
        value = getattr(self, spec.name)
        choices = spec.metadata.get("choices")
        if choices is not None:
            if value not in choices:
                _refuse(spec.name, value, f"one of {', '.join(map(repr, choices))}")
        elif spec.metadata.get("positive"):
            if not _in_range(value):
                _refuse(spec.name, value, f"a finite number above 0, {RANGE}")
            object.__setattr__(self, spec.name, float(value))
        elif spec.name == "layers":
            if value is not None:
                indices = isinstance(value, tuple) and all(type(index) is int and index >= 0 for index in value)
                if not indices or not value or list(value) != sorted(set(value)):
                    _refuse(spec.name, value, "None or ascending layer indices from 0, each once")
        elif spec.name == "gain_scale":
            if value is not None:
                if not (isinstance(value, tuple) and value and all(_in_range(scale) for scale in value)):
                    _refuse(spec.name, value, f"None or numbers above 0, one a patched layer, {RANGE}")
                object.__setattr__(self, spec.name, tuple(map(float, value)))
        elif not isinstance(value, bool):
            _refuse(spec.name, value, "True or False")

    @classmethod
    def unit(cls, **overrides: Any) -> BFTConfig:
        """The start with tau 1 and Q 1: precision 1 is as uncertain as the signal is strong, and the gain varies at once.

        It is not the pretrained function: use it where there is none, or to see the filter at work without training.

        Args:
            **overrides: further fields.
        """
        return cls(**{"initial_precision_value": 1.0, "initial_process_noise": 1.0, **overrides})

    @classmethod
    def identity(cls, **overrides: Any) -> BFTConfig:
        """The start that keeps the pretrained function: tau 1e-4 and Q 1e4, so that every gain is close to 1.

        Args:
            **overrides: further fields. `prior_scale` has to stay "unit": with "neighbours" the gain at this start is
                n^2 / (1 + n^2), which is not 1.
        """
        if overrides.get("prior_scale", "unit") != "unit":
            _refuse("prior_scale", overrides["prior_scale"], "'unit' for the identity start")
        return cls(**{"initial_precision_value": 1e-4, "initial_process_noise": 1e4, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Every field, defaults included, with the format version: a later default cannot change an old checkpoint."""
        values = dataclasses.asdict(self)
        for name in ("layers", "gain_scale"):
            values[name] = None if values[name] is None else list(values[name])
        return {_VERSION_KEY: ".".join(map(str, FORMAT_VERSION)), **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BFTConfig:
        """Read what `to_dict` wrote, by this version or another.

        Raises:
            ValueError: the format's major version is newer than this one's, or a field is unknown to this version
                although the format is not newer.

        Warns:
            UserWarning: fields of a newer minor version, which are ignored.
        """
        values = dict(values)
        version = _parse_version(values.pop(_VERSION_KEY, None))
        if version[0] > FORMAT_VERSION[0]:
            raise ValueError(
                f"this BFT configuration has format {version[0]}.{version[1]}, newer than the {FORMAT_VERSION[0]}."
                f"{FORMAT_VERSION[1]} that the installed bft_hf reads: upgrade it with `pip install -U bft-hf`"
            )
        names = {spec.name for spec in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown and version <= FORMAT_VERSION:
            raise ValueError(f"unknown BFTConfig field {unknown[0]!r}: allowed are {', '.join(sorted(names))}")
        if unknown:
            warnings.warn(
                f"ignoring {', '.join(unknown)}: written by a newer bft_hf (format {version[0]}.{version[1]}); "
                "upgrade it with `pip install -U bft-hf`",
                stacklevel=2,
            )
        known = {name: value for name, value in values.items() if name in names}
        before = _ADDED_LATER if version < FORMAT_VERSION else {}
        return cls(**{**before, **known})

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json_string(cls, text: str) -> BFTConfig:
        """Read `to_json_string`. Raises ValueError as `from_dict` does, and for text that is not a JSON object."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a BFT configuration has to be a JSON object: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"a BFT configuration has to be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise ValueError(f"BFTConfig.{name} is {value!r}: allowed is {allowed}")


def _in_range(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def _parse_version(text: Any) -> tuple[int, int]:
    if text is None:
        return FORMAT_VERSION
    try:
        major, minor = str(text).split(".")
        return int(major), int(minor)
    except ValueError:
        raise ValueError(f"{_VERSION_KEY} is {text!r}: it has to look like '1.0'") from None
