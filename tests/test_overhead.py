"""The benchmarks of speed on models of one tiny layer, and the script for a GPU with a stand-in for Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from test_saved_tensors import load_benchmark

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

MINUTES = 12
"""What a machine with a GPU may be had for."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a benchmark's main with a command line, both of its models being tiny."""

    def run(name: str, *argv: object) -> Any:
        module = load_benchmark(name)
        for model in sys.modules["workloads"].MODELS:
            monkeypatch.setitem(sys.modules["workloads"].MODELS, model, TINY)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, argv)])
        module.main()
        return module

    return run


def test_overhead_writes_every_kind_of_row(run: Any, tmp_path: Path) -> None:
    shapes = ("--train", "1x8", "--lora", "1x8", "--prefill", "1x8", "1x16", "1x24", "--decode", "2x8")
    run("overhead", *shapes, "--memory", "1x8", "prefill:1x8", "--repeats", 3, "--output", tmp_path)
    written = json.loads((tmp_path / "overhead.json").read_text())
    kinds = ["train", "lora", *3 * ["prefill"], "decode", "peak memory, train", "peak memory, prefill"]
    assert [row["what"] for row in written["rows"]] == kinds
    assert all(row["ratio"] > 0 and row["plain"] > 0 for row in written["rows"])
    assert (tmp_path / "overhead.md").read_text().count("\n|") == len(kinds) + 1
    assert (tmp_path / "ratio_by_length.svg").stat().st_size  # three lengths of one row


def test_profile_lists_what_the_patch_adds(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run("overhead", "--profile", "decode:1x8", "--repeats", 3)
    table = capsys.readouterr().out
    assert "| all |" in table and "`aten::linalg_vector_norm` | 0 | 0 |" in table


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_counts_tokens(cache: str, run: Any, tmp_path: Path) -> None:
    output = tmp_path / "generation.json"
    run("generation", "--batch", 1, 3, "--prompt", 4, "--new", 6, "--cache", cache, "--repeats", 3, "--output", output)
    for row, batch in zip(json.loads(output.read_text())["rows"], (1, 3), strict=True):
        for arm in ("plain", "patched"):
            assert row["tokens per second"][arm] == pytest.approx(batch * 6 / row["call"][arm])
            assert 0 < 5 * row["step"][arm] < 2 * row["call"][arm]


def test_a_decoding_step_that_is_not_one_graph_is_an_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler at work the benchmark stops, rather than time eager code under the name of compiled."""
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    with pytest.raises(AssertionError, match="plain: 0 graphs"):
        run("generation", "--batch", 1, "--prompt", 4, "--new", 4, "--cache", "static", "--compile", "--repeats", 2)


def test_a_dynamic_cache_is_not_compiled(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("generation", "--compile")
    assert "--compile wants --cache static" in capsys.readouterr().err


def test_script_for_a_gpu_gives_commands_that_parse_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine of ours has a GPU: a stand-in for Python writes down what the script would run, with every package there."""
    calls, stand_in = tmp_path / "calls", tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> {calls}\n')
    stand_in.chmod(0o755)
    script = REPOSITORY / "benchmarks" / "gpu.sh"
    done = subprocess.run(["bash", script, tmp_path / "out", stand_in], capture_output=True, text=True, check=True)
    assert "exit" not in done.stdout
    commands = calls.read_text().splitlines()
    kinds = [Path(line.split()[0]).stem for line in commands]
    assert kinds == ["widths", *4 * ["overhead"], *2 * ["generation"]]
    for kind, line in zip(kinds, commands, strict=True):
        monkeypatch.setattr(sys, "argv", line.split())
        arguments = load_benchmark(kind).parse()
        assert arguments.device == "cuda" and arguments.dtype == "bfloat16"
    limits = [int(line.split()[2]) for line in script.read_text().splitlines() if line.strip().startswith("timed ")]
    sdpa_and_flash = 2
    assert sum(limits[:1] + limits[-2:] + sdpa_and_flash * limits[1:-2]) < MINUTES * 60
