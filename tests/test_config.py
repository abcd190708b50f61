"""BFTConfig: validation of every field, immutability, and the JSON form across versions."""

import dataclasses
import json
import warnings

import pytest

from bft_hf import BFTConfig
from bft_hf.config import FORMAT_VERSION

MAJOR, MINOR = FORMAT_VERSION
FIELDS = [spec.name for spec in dataclasses.fields(BFTConfig)]

# Field, a value that is refused, what the message has to name as allowed.
REFUSED = [
    ("granularity", "head", "'channel'"),
    ("granularity", None, "'token'"),
    ("initial_precision", "vector", "'mlp'"),
    ("initial_precision_value", 0.0, "number"),
    ("initial_precision_value", -1, "number"),
    ("initial_precision_value", float("nan"), "number"),
    ("initial_precision_value", True, "number"),
    ("initial_process_noise", float("inf"), "number"),
    ("initial_process_noise", "1.0", "number"),
    ("prior_degrees_of_freedom", 0, "number"),
    ("prior_scale", "unity", "'neighbours'"),
    ("observation_units", "percent", "'absolute'"),
    ("effective_sample_size", 8, "'exact'"),
    ("kriging", 1, "True or False"),
    ("gain", "yes", "True or False"),
    ("propagate", None, "True or False"),
    ("differentiate_jacobian", 0.0, "True or False"),
    ("separate_key_precision", "False", "True or False"),
    ("layers", (), "ascending"),
    ("layers", (1, 0), "ascending"),
    ("layers", (1, 1), "once"),
    ("layers", (-1,), "from 0"),
    ("layers", (0.0,), "indices"),
    ("layers", (False,), "indices"),
    ("layers", "01", "indices"),
    ("layers", 3, "indices"),
    ("gain_scale", (), "one a patched layer"),
    ("gain_scale", (1.0, 0.0), "above 0"),
    ("gain_scale", (1.0, True), "numbers"),
    ("gain_scale", 1.5, "None"),
]

# One value a field that differs from its default.
OTHERS = {
    "granularity": "channel",
    "initial_precision": "table",
    "initial_precision_value": 0.25,
    "initial_process_noise": 3.0,
    "prior_degrees_of_freedom": 2.5,
    "prior_scale": "neighbours",
    "observation_units": "absolute",
    "effective_sample_size": "exact",
    "kriging": False,
    "gain": False,
    "propagate": False,
    "differentiate_jacobian": True,
    "separate_key_precision": True,
    "layers": (0, 2),
    "gain_scale": (1.25, 1.5),
}


def test_defaults_are_those_of_the_contract() -> None:
    assert dataclasses.asdict(BFTConfig()) == {
        "granularity": "token",
        "initial_precision": "constant",
        "initial_precision_value": 0.01,
        "initial_process_noise": 100.0,
        "prior_degrees_of_freedom": 1.0,
        "prior_scale": "unit",
        "observation_units": "relative",
        "effective_sample_size": "probe",
        "kriging": True,
        "gain": True,
        "propagate": True,
        "differentiate_jacobian": False,
        "separate_key_precision": False,
        "layers": None,
        "gain_scale": None,
    }


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_frozen(name: str) -> None:
    config = BFTConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, OTHERS[name])
    assert config == BFTConfig()


def test_equal_configurations_are_equal_and_hash_alike() -> None:
    assert BFTConfig(layers=[0, 1]) == BFTConfig(layers=(0, 1))
    assert hash(BFTConfig(layers=[0, 1])) == hash(BFTConfig(layers=(0, 1)))
    assert BFTConfig(layers=(0, 1)) != BFTConfig()


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED)
def test_refusal_names_field_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        BFTConfig(**{name: value})
    message = str(error.value)
    assert name in message and repr(value) in message and allowed in message
    assert "\n" not in message


def test_every_field_is_refused_somewhere_and_allowed_elsewhere() -> None:
    assert {name for name, _, _ in REFUSED} == set(FIELDS) == set(OTHERS)
    for name, value in OTHERS.items():
        assert getattr(BFTConfig(**{name: value}), name) == value


def test_integers_pass_for_numbers_and_become_floats() -> None:
    config = BFTConfig(initial_process_noise=2)
    assert config.initial_process_noise == 2.0 and isinstance(config.initial_process_noise, float)


@pytest.mark.parametrize("name", FIELDS)
def test_json_round_trip_keeps_each_field(name: str) -> None:
    config = BFTConfig(**{name: OTHERS[name]})
    assert json.loads(config.to_json_string()) == config.to_dict()
    for again in (BFTConfig.from_json_string(config.to_json_string()), BFTConfig.from_dict(config.to_dict())):
        assert again == config != BFTConfig()
        assert type(getattr(again, name)) is type(OTHERS[name])


def test_json_names_every_field_and_the_version() -> None:
    values = json.loads(BFTConfig().to_json_string())
    assert set(values) == {*FIELDS, "bft_format"}
    assert values["bft_format"] == f"{MAJOR}.{MINOR}"


def test_reading_does_not_change_the_dictionary() -> None:
    values = BFTConfig(layers=(0,)).to_dict()
    before = json.dumps(values)
    BFTConfig.from_dict(values)
    assert json.dumps(values) == before


def test_unknown_field_of_a_newer_minor_version_warns() -> None:
    values = {**BFTConfig(gain=False).to_dict(), "bft_format": f"{MAJOR}.{MINOR + 1}", "new_field": 3}
    with pytest.warns(UserWarning, match=r"new_field.*pip install -U bft-hf"):
        config = BFTConfig.from_dict(values)
    assert config == BFTConfig(gain=False)


def test_newer_minor_version_without_unknown_fields_is_silent() -> None:
    values = {**BFTConfig().to_dict(), "bft_format": f"{MAJOR}.{MINOR + 1}"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BFTConfig.from_dict(values) == BFTConfig()


def test_newer_major_version_is_refused() -> None:
    values = {**BFTConfig().to_dict(), "bft_format": f"{MAJOR + 1}.0"}
    with pytest.raises(ValueError, match=rf"{MAJOR + 1}\.0.*pip install -U bft-hf"):
        BFTConfig.from_dict(values)


@pytest.mark.parametrize("version", [f"{MAJOR}.{MINOR}", None])
def test_unknown_field_of_this_version_is_an_error(version: str | None) -> None:
    values = BFTConfig().to_dict() | {"grain": True}
    values["bft_format"] = version
    if version is None:
        del values["bft_format"]
    with pytest.raises(ValueError, match=r"'grain'.*gain"):
        BFTConfig.from_dict(values)


@pytest.mark.parametrize("version", ["1", "one.two", "", 7])
def test_malformed_version_is_an_error(version: object) -> None:
    with pytest.raises(ValueError, match="bft_format"):
        BFTConfig.from_dict({**BFTConfig().to_dict(), "bft_format": version})


def test_wrong_value_in_a_file_is_refused_like_one_in_code() -> None:
    with pytest.raises(ValueError, match=r"granularity.*'words'.*'token'"):
        BFTConfig.from_dict({**BFTConfig().to_dict(), "granularity": "words"})


@pytest.mark.parametrize("text", ["[]", "{", "3", ""])
def test_text_that_is_no_json_object_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        BFTConfig.from_json_string(text)


def test_identity_is_tau_1e_4_and_q_1e4() -> None:
    config = BFTConfig.identity()
    assert (config.initial_precision_value, config.initial_process_noise) == (1e-4, 1e4)
    assert config == BFTConfig(initial_precision_value=1e-4, initial_process_noise=1e4) != BFTConfig()


def test_unit_is_the_start_at_full_strength() -> None:
    config = BFTConfig.unit(kriging=False)
    assert config == BFTConfig(initial_precision_value=1.0, initial_process_noise=1.0, kriging=False) != BFTConfig()
    assert BFTConfig.unit(initial_process_noise=2.0).initial_process_noise == 2.0


def test_identity_takes_other_fields_but_needs_the_unit_prior() -> None:
    assert BFTConfig.identity(effective_sample_size="exact").effective_sample_size == "exact"
    assert BFTConfig.identity(initial_process_noise=100.0).initial_process_noise == 100.0
    assert BFTConfig.identity(prior_scale="unit") == BFTConfig.identity()
    with pytest.raises(ValueError, match=r"prior_scale.*'neighbours'.*'unit'"):
        BFTConfig.identity(prior_scale="neighbours")


@pytest.mark.parametrize("value", [1e-300, 1e300])
@pytest.mark.parametrize("name", ["initial_precision_value", "initial_process_noise"])
def test_start_values_that_float32_cannot_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        BFTConfig(**{name: value})
