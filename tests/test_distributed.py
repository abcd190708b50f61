"""Several processes on existing engines: DDP by accelerate, FSDP2 by torchrun, and the configurations shipped for both."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from distributed import ddp, fsdp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoTokenizer

import bft_hf
from bft_hf.recipes.sft import main as sft_main

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "recipes" / "configs" / "accelerate"


ACCELERATE = ["accelerate.commands.launch", "--config_file", str(CONFIGS / "ddp_cpu.yaml"), "--main_process_port", "0"]
RATED = ["--method", "bft", "--distractors", "2", "--distractor_source", "random", "--reliability", "likelihood"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launch(*command: str, **variables: str) -> str:
    """Run a script of tests/distributed as several processes; gives back what they printed.

    Once in hundreds of launches torch's own threads abort a process on these machines (see distributed.leave); nothing of ours
    is compiled, so a launch that died of a signal is made again, once, and the tests' summary shows the warning.
    """
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    for attempt in range(2):
        done = subprocess.run(
            [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=200
        )
        if attempt or not re.search(r"exitcode *: -(6|11)\b", done.stderr):
            break
        warnings.warn(f"A process of {command} was aborted; once more.\n{done.stderr[:2000]}", stacklevel=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def ddp_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ddp")
    launch(*ACCELERATE, "-m", "distributed.ddp", str(folder))
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def fsdp_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp")
    launch(*TORCHRUN, "-m", "distributed.fsdp", str(folder))
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", ddp.JOBS)
def test_two_ddp_processes_follow_one_with_the_whole_batch(
    name: str, ddp_results: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, gradient norms and parameters, tau and Q among them; DDP is told to look for no unused parameter."""
    one, two = ddp.train(name, 1, tmp_path), ddp_results[name]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["losses"]) == ddp.STEPS
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    torch.testing.assert_close(two["parameters"], one["parameters"], rtol=0, atol=1e-4)
    assert one["losses"][0] != pytest.approx(one["losses"][1], abs=1e-2)
    # Each of tau and Q has moved, by more than the tolerance.
    for key, start in one["start"].items():
        assert (two["parameters"][key] - start).abs().max() > 2e-4, key


def test_ddp_would_have_reported_an_unused_parameter(ddp_results: dict[str, Any]) -> None:
    assert "Expected to have finished reduction" in ddp_results["unused"]["error"]


@pytest.mark.parametrize("method", [[], RATED], ids=["sft", "rated"])
def test_two_processes_of_bft_sft_follow_one_and_only_the_first_writes(
    method: list[str], tiny_llama: Callable[..., Any], stories260k: Path, tmp_path: Path
) -> None:
    """The command itself: losses, weights, predictions and what results.json says, within 1e-4; passages are rated in parts."""
    tiny_llama(vocab_size=512, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(stories260k).save_pretrained(tmp_path / "model")
    questions = [
        {"id": i, "context": f"Box {i} is {'red' if i % 3 else 'blue as ice'}.", "question": f"Box {i}?"}
        | {"answers": ["red" if i % 3 else "blue as ice"]}
        for i in range(40)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    flags = {
        "model_name_or_path": tmp_path / "model",
        "dataset": tmp_path / "questions.jsonl",
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_examples": 3,
        "max_new_tokens": 3,
        "noise": 0.3,
        "save_strategy": "no",
        "ddp_find_unused_parameters": "false",
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    argv += ["--use_cpu", *method]
    assert sft_main([*argv, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "one")]) == 0
    two = ["-m", "distributed.cli", str(tmp_path), *argv, "--per_device_train_batch_size", "2"]
    printed = launch(*ACCELERATE, *two)

    assert printed.count("Written to") == 1
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }
    assert not [path for path in (tmp_path / "rank1").rglob("*") if path.is_file()]
    ours, expected = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("rank0", "one"))
    assert ours["noise"] == expected["noise"] and ours["training"]["batch_size"] == 4
    assert len(expected["training"]["losses"]) == 3 and expected["training"]["losses"][0][1] > 1
    for mine, other in zip(ours["training"]["losses"], expected["training"]["losses"], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    assert ours["after"] == pytest.approx(expected["after"], abs=1e-4)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("rank0", "one", "model")]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-4)
    assert all((weights[1][name] - start).abs().max() > 1e-3 for name, start in weights[2].items())


@pytest.mark.parametrize("name", fsdp.JOBS)
def test_two_fsdp2_processes_follow_one_with_the_whole_batch(name: str, fsdp_results: dict[str, Any]) -> None:
    """Gradients of the first step, then losses, norms and parameters of three.

    A layer's precision leaves it beside its output, where FSDP2's hooks do not look: the gradient of Q arrives in time.
    J needs whole weights after the FFN's forward, where "modules within the layer" has put them away again.
    """
    one, two = fsdp.train(name, sharded=False), fsdp_results[name]
    assert "error" not in two, two["error"]
    assert two["gradients"].keys() == one["gradients"].keys()
    for key, expected in one["gradients"].items():
        scale = expected.abs().max().item()
        assert scale > 0, key
        torch.testing.assert_close(
            two["gradients"][key], expected, rtol=1e-4, atol=1e-4 * scale, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    torch.testing.assert_close(two["state"], dict(one["state"]), rtol=0, atol=1e-4)
    assert one["losses"][2] < one["losses"][0] - 1e-2


def test_fsdp2_shards_every_matrix_and_the_filters_vectors(fsdp_results: dict[str, Any]) -> None:
    for name in ("default", "channel, MLP"):
        for key, (local, size) in fsdp_results[name]["sizes"].items():
            assert local == -(-size // 2) or size < 2, (key, local, size)


@pytest.mark.parametrize("name", ["default", "channel, MLP"])
def test_fsdp2_state_dict_is_gathered_and_loaded_back(name: str, fsdp_results: dict[str, Any]) -> None:
    result = fsdp_results[name]
    assert torch.equal(result["loaded logits"], result["logits"])
    model = fsdp.make(name, seed=1)
    before = model.eval()(input_ids=fsdp.IDS).logits
    model.load_state_dict(result["state"])
    after = model(input_ids=fsdp.IDS).logits
    torch.testing.assert_close(after, result["logits"], rtol=1e-4, atol=1e-4)
    assert (before - after).abs().max() > 0.1


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_layers_are_refused_by_patch_and_kept_by_unpatch(
    one_process: Any, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama()
    fully_shard(model.model.layers[1], mesh=one_process)
    with pytest.raises(ValueError, match="FSDPLlamaDecoderLayer"):
        bft_hf.patch(model, bft_hf.BFTConfig.unit())
    assert not bft_hf.is_patched(model)

    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    fully_shard(model.model.layers[1], mesh=one_process)
    try:
        bft_hf.unpatch(model)
    except (RuntimeError, ValueError):  # a refusal that leaves everything as it was is as good
        assert bft_hf.is_patched(model)
    assert isinstance(model.model.layers[1], FSDPModule)


def test_fsdp2_in_mixed_precision_rounds_tau_by_no_more_than_its_digits(
    one_process: Any, tiny_llama: Callable[..., Any]
) -> None:
    """lerobot #2146: a float32 parameter under a bfloat16 policy, which FSDP2 applies as it gathers; docs/serving.md tells."""
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.identity())
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.0123
    parameters = {name: value.item() for name, value in bft_hf.bft_parameters(model).items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_process, mp_policy=policy)
    fully_shard(model, mesh=one_process, mp_policy=policy)
    with torch.no_grad(), bft_hf.record(model) as trace:
        assert model(input_ids=fsdp.IDS).logits.dtype == torch.bfloat16
    log_tau = next(value for name, value in parameters.items() if "initial_precision" in name)
    assert trace.precision[0].log().flatten()[0].item() == pytest.approx(log_tau, rel=2**-8)


def environment_of(name: str) -> dict[str, str]:
    """What `accelerate launch --config_file` would hand to the processes."""
    arguments = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        assert arguments.multi_gpu or arguments.use_fsdp
        environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE", "FSDP"))}


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """accelerate's launcher writes to this process's own environment."""
    kept = dict(os.environ)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(kept)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_accelerate_configuration_is_accepted_and_named_in_itself(
    name: str, clean_environment: pytest.MonkeyPatch
) -> None:
    environment = environment_of(name)
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if name == "ddp_cpu.yaml" else "bf16")
    assert f"recipes/configs/accelerate/{name}" in (CONFIGS / name).read_text()


def test_fsdp_finds_the_patched_layers_by_the_class_name(
    clean_environment: pytest.MonkeyPatch, tiny_llama: Callable[..., Any]
) -> None:
    """transformers #37672, verl #4950: "Could not find the transformer layer class LlamaDecoderLayer"."""
    for key, value in environment_of("fsdp2.yaml").items():
        clean_environment.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    for model in (tiny_llama(), bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())):
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        wrapped = [name for name, module in model.named_modules() if policy(module)]
        assert wrapped == ["model.layers.0", "model.layers.1", "model.layers.2"]
        assert get_module_class_from_name(model, "LlamaDecoderLayer") is type(model.model.layers[0])
        assert model._no_split_modules and set(model._no_split_modules) == {"LlamaDecoderLayer"}
    # The same by the first FSDP's policy.
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    assert all(policy(module=layer, recurse=False, nonwrapped_numel=0) for layer in model.model.layers)
    assert not policy(module=model.model.layers[0].bft, recurse=False, nonwrapped_numel=0)


def test_deepspeed_configuration_is_zero2(clean_environment: pytest.MonkeyPatch) -> None:
    for key, value in environment_of("deepspeed_zero2.yaml").items():
        clean_environment.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2 and plugin.deepspeed_config["zero_optimization"]["stage"] == 2
    assert "ZeRO-3" in (CONFIGS / "deepspeed_zero2.yaml").read_text()


def test_two_zero2_processes_follow_one_with_the_whole_batch(tmp_path: Path) -> None:
    """By the shipped configuration, put on CPUs; DeepSpeed compiles an extension the first time, which takes a minute.

    Trainer drops an optimizer that it is handed when DeepSpeed is on; BFTSFTTrainer makes its own, with a group for tau and Q.
    """
    pytest.importorskip(
        "deepspeed",
        reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed ninja",
    )
    config = yaml.safe_load((CONFIGS / "deepspeed_zero2.yaml").read_text())
    config |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    (tmp_path / "zero2.yaml").write_text(yaml.safe_dump(config))
    launcher = ["accelerate.commands.launch", "--config_file", str(tmp_path / "zero2.yaml"), "--main_process_port", "0"]
    launch(*launcher, "-m", "distributed.ddp", str(tmp_path), "sft", DS_ACCELERATOR="cpu")
    one, two = ddp.train("sft", 1, tmp_path), torch.load(tmp_path / "results.pt")["sft"]
    assert two["processes"] == 2
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    torch.testing.assert_close(two["parameters"], one["parameters"], rtol=0, atol=1e-4)
    # At the rate of the weights, three steps would move none of them by more than 3e-3.
    assert max((two["parameters"][key] - start).abs().max() for key, start in one["start"].items()) > 3e-2


def test_refusal_of_reentrant_checkpointing_names_every_way_out(tiny_llama: Callable[..., Any]) -> None:
    """TRL forces use_reentrant=True under PEFT and ZeRO-3: the way out is another engine, or none of it."""
    from test_checkpointing import gradients, outside_checkpoint

    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    outside_checkpoint(model, use_reentrant=True)
    with pytest.raises(RuntimeError, match="reentrant") as error:
        gradients(model)
    for remedy in ("use_reentrant=False", "ZeRO-2", "FSDP2", "off"):
        assert remedy in str(error.value)


def test_weights_that_zero3_has_put_away_are_refused_by_name(tiny_llama: Callable[..., Any]) -> None:
    """ZeRO-3 leaves an empty tensor outside the module's own forward, and the whole one's shape in `ds_shape`."""
    model = bft_hf.patch(tiny_llama(), bft_hf.BFTConfig.unit())
    ids = fsdp.IDS
    model(input_ids=ids)

    def gather(module: Any, args: Any) -> None:
        module.weight.data = module.weight.whole

    def put_away(module: Any, args: Any, output: Any) -> None:
        module.weight.data = torch.empty(0)

    for projection in model.model.layers[0].mlp.children():
        if isinstance(projection, torch.nn.Linear):
            weight = projection.weight
            weight.whole, weight.ds_shape, weight.ds_id = weight.data, weight.shape, 0
            weight.data = torch.empty(0)
            projection.register_forward_pre_hook(gather)
            projection.register_forward_hook(put_away)
    with pytest.raises(RuntimeError, match="ZeRO-2"):
        model(input_ids=ids)
