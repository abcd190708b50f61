"""push_to_hub by huggingface_hub's own client to a Hub on localhost, and from_pretrained from it in a fresh process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TEXT_FILES, LocalHub, serve
from safetensors.torch import load

PUSH = """
import sys, torch
torch.set_num_threads(1)
import huggingface_hub, transformers, bft_hf
from peft import LoraConfig, get_peft_model
assert huggingface_hub.constants.ENDPOINT == sys.argv[2] and not huggingface_hub.constants.HF_HUB_OFFLINE

def moved(model):
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += (0.9 if ".bft." in name else 0.01) * torch.randn(parameter.shape, generator=generator)
    return model.eval()

def keep(model, name):
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 12)[None]).logits
    torch.save({"state": model.state_dict(), "logits": logits}, f"{sys.argv[3]}/{name}.pt")

model = moved(bft_hf.patch(transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]), bft_hf.BFTConfig.unit(initial_process_noise=2.0)))
keep(model, "model")
model.push_to_hub("tester/patched", commit_message="the model")
transformers.AutoTokenizer.from_pretrained(sys.argv[4]).push_to_hub("tester/patched")
model.push_to_hub("tester/sharded", max_shard_size="40KB", private=True)
model.push_to_hub("tester/patched", revision="second")
model.save_pretrained(f"{sys.argv[3]}/saved", push_to_hub=True, repo_id="tester/saved")

base = transformers.AutoModelForCausalLM.from_pretrained("tester/patched")
torch.manual_seed(0)
lora = LoraConfig(
    r=2, target_modules="all-linear", modules_to_save=["bft"], init_lora_weights=False, task_type="CAUSAL_LM"
)
adapted = moved(get_peft_model(base, lora))
keep(adapted, "adapter")
adapted.push_to_hub("tester/adapter")

plain = bft_hf.unpatch(model)
keep(plain, "plain")
plain.push_to_hub("tester/plain")
"""

READ = """
import sys, torch
torch.set_num_threads(1)
import transformers, bft_hf
from peft import AutoPeftModelForCausalLM, PeftModel

def check(model, name, patched=True):
    expected = torch.load(f"{sys.argv[1]}/{name}.pt")
    assert bft_hf.is_patched(model) == patched, name
    state = model.eval().state_dict()
    assert state.keys() == expected["state"].keys(), (name, state.keys() ^ expected["state"].keys())
    for key, value in expected["state"].items():
        assert state[key].dtype == value.dtype and torch.equal(state[key], value), (name, key)
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.arange(3, 12)[None]).logits, expected["logits"]), name

auto = transformers.AutoModelForCausalLM
check(auto.from_pretrained("tester/patched"), "model")
assert bft_hf.get_config(auto.from_pretrained("tester/patched")).initial_process_noise == 2.0
check(transformers.LlamaForCausalLM.from_pretrained("tester/sharded"), "model")
check(auto.from_pretrained("tester/patched", revision="second"), "model")
check(auto.from_pretrained("tester/saved"), "model")
check(auto.from_pretrained("tester/plain"), "plain", patched=False)
check(AutoPeftModelForCausalLM.from_pretrained("tester/adapter"), "adapter")
check(bft_hf.load_adapter(auto.from_pretrained("tester/patched"), "tester/adapter"), "adapter")
check(PeftModel.from_pretrained(auto.from_pretrained("tester/patched"), "tester/adapter"), "adapter")
tokenizer = transformers.AutoTokenizer.from_pretrained("tester/patched")
assert tokenizer("Once upon a time").input_ids == transformers.AutoTokenizer.from_pretrained(sys.argv[2])("Once upon a time").input_ids
"""

WITHOUT = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained("tester/patched")
except Exception as error:
    assert "import bft_hf" in str(error), repr(error)
else:
    raise AssertionError("served as plain")
assert "bft_hf" not in sys.modules
"""


RECOMMENDER = """
import json, sys, torch
torch.set_num_threads(1)
import bft_hf
from bft_hf import rec
from bft_hf.rec.item_map import ItemMap

torch.manual_seed(0)
shape = {"num_items": 5, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8, "initializer_range": 0.5}
model = bft_hf.patch(rec.SASRecForNextItem(rec.SASRecConfig(**shape)), rec.filter_defaults(initial_process_noise=2.0))
with torch.no_grad():
    for parameter in bft_hf.bft_parameters(model).values():
        parameter += torch.randn(parameter.shape)
model.item_map = ItemMap(("tea", "cup", "pot", "milk", "cäke"), {"cup": "A cup"})
model.push_to_hub("tester/recommender", private=True)
model.save_pretrained(sys.argv[1] + "-saved", push_to_hub=True, repo_id="tester/saved-recommender")
with open(sys.argv[1], "w") as file:
    json.dump([[vars(row) for row in rows] for rows in model.recommend([["tea", "cup"], ["milk"]], k=3)], file)
"""

RECOMMEND = """
import json, sys, torch
torch.set_num_threads(1)
import bft_hf.rec
from transformers import AutoModel
from bft_hf.recipes.rec import main

expected = json.load(open(sys.argv[1]))
for repo in ("tester/recommender", "tester/saved-recommender"):
    model = AutoModel.from_pretrained(repo)
    assert bft_hf.is_patched(model) and bft_hf.get_config(model).initial_process_noise == 2.0
    assert [[vars(row) for row in rows] for rows in model.recommend([["tea", "cup"], ["milk"]], k=3)] == expected
sys.exit(main(["recommend", "--model", "tester/recommender", "--history", "tea cup", "--k", "3"]))
"""


def run(hub: LocalHub, home: Path, script: str, *arguments: Any) -> str:
    """Run Python in a fresh process whose Hub is `hub` and whose cache is empty, and give what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=hub.environment(home),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def pushed(
    tiny_llama: Callable[..., Any], stories260k: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalHub, Path]]:
    """A Hub to which one process pushed a model, its shards, a branch, a tokenizer, an adapter and the plain model."""
    folder = tmp_path_factory.mktemp("hub")
    with serve() as hub:
        tiny_llama(vocab_size=512).save_pretrained(folder / "start")
        run(hub, folder / "writer", PUSH, folder / "start", hub.url, folder, stories260k)
        yield hub, folder


def test_what_was_pushed_comes_back_patched_in_a_fresh_process_every_tensor_equal(
    pushed: tuple[LocalHub, Path], stories260k: Path
) -> None:
    hub, folder = pushed
    before = len(hub.requests)
    run(hub, folder / "reader", READ, folder, stories260k)
    read = hub.requests[before:]
    assert any("/tester/patched/resolve/" in request for request in read)
    assert any("/lfs/" in request for request in read)
    assert not hub.unknown, hub.unknown


def test_a_recommender_comes_back_from_the_hub_with_its_filter_and_the_names_of_its_items(tmp_path: Path) -> None:
    with serve() as hub:
        run(hub, tmp_path / "writer", RECOMMENDER, tmp_path / "expected.json")
        shown = run(hub, tmp_path / "reader", RECOMMEND, tmp_path / "expected.json")
        files, repository = hub.files("tester/recommender"), hub.repositories["tester/recommender"]
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert [len(rows) for rows in expected] == [3, 3] and {"tea", "cup"}.isdisjoint(row["item"] for row in expected[0])
    assert any(row["title"] == "A cup" for row in expected[1]) and all(row["score_std"] > 0 for row in expected[0])
    assert f"1  {expected[0][0]['item']}  score {expected[0][0]['score']:.3f} ±" in shown
    assert repository.private and {"items.json", "config.json", "model.safetensors"} <= set(files)
    assert "cäke" in files["items.json"].decode() and any(".bft." in name for name in load(files["model.safetensors"]))
    card = files["README.md"].decode()
    assert "from_pretrained('tester/recommender')" in card and "names from `items.json`" in card and "- bft\n" in card


def test_without_the_plugin_what_comes_from_the_hub_is_refused(pushed: tuple[LocalHub, Path]) -> None:
    hub, folder = pushed
    run(hub, folder / "without", WITHOUT)


def test_weights_went_through_lfs_and_configuration_in_the_commit(pushed: tuple[LocalHub, Path]) -> None:
    hub, _ = pushed
    for repo, weights in {"patched": "model.safetensors", "adapter": "adapter_model.safetensors"}.items():
        commit = hub.repositories[f"tester/{repo}"].find("main")
        assert commit is not None and weights in commit.lfs
        assert not any(path.endswith(TEXT_FILES) for path in commit.lfs)
    assert any(request.endswith("/info/lfs/objects/batch") for request in hub.requests)
    assert any(request.startswith("PUT /lfs/") for request in hub.requests)


def test_files_on_the_hub_say_that_the_model_is_patched(pushed: tuple[LocalHub, Path]) -> None:
    hub, folder = pushed
    files = hub.files("tester/patched")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"} <= set(files)
    config = json.loads(files["config.json"])
    assert config["bft_config"]["initial_process_noise"] == 2.0
    assert config["quantization_config"]["quant_method"] == "bft_hf"
    stored = load(files["model.safetensors"])
    state = torch.load(folder / "model.pt")["state"]
    assert sum(".bft." in name for name in stored) == 3 and all(torch.equal(stored[k], state[k]) for k in stored)
    assert len([path for path in hub.files("tester/sharded") if path.startswith("model-")]) > 2
    assert hub.repositories["tester/sharded"].private
    assert "bft" not in hub.files("tester/plain")["config.json"].decode()
    assert {c.message for c in hub.repositories["tester/patched"].branches["main"]} >= {"the model", "Upload tokenizer"}


def test_adapter_on_the_hub_holds_our_parameters_and_names_its_base(pushed: tuple[LocalHub, Path]) -> None:
    hub, _ = pushed
    files = hub.files("tester/adapter")
    assert sum(".bft." in name for name in load(files["adapter_model.safetensors"])) == 3
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "tester/patched" and config["modules_to_save"] == ["bft"]


def test_cards_on_the_hub_are_ours_where_there_were_none(pushed: tuple[LocalHub, Path]) -> None:
    hub, _ = pushed
    for repo in ("patched", "sharded", "saved", "adapter"):
        card = hub.files(f"tester/{repo}")["README.md"].decode()
        assert "Bayesian Filtering Transformer" in card and "- bft\n" in card, repo
        assert f"from_pretrained('tester/{repo}')" in card or repo == "adapter"
    assert "patched first" in hub.files("tester/adapter")["README.md"].decode()
    assert "base_model: tester/patched" in hub.files("tester/adapter")["README.md"].decode()
    assert json.loads(hub.files("tester/adapter")["bft_config.json"])["initial_process_noise"] == 2.0
    assert "bft" not in hub.files("tester/plain").get("README.md", b"").decode()


def test_the_server_refuses_what_the_hub_refuses(
    pushed: tuple[LocalHub, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong token, missing repository, file and revision, by the client's own errors."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, folder = pushed
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    api = HfApi(endpoint=hub.url, token="hf_localhost")
    assert api.repo_info("tester/patched").sha == hub.repositories["tester/patched"].branches["main"][-1].sha
    assert set(api.list_repo_files("tester/patched")) == set(hub.files("tester/patched"))
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.url, token="hf_wrong").create_repo("tester/other")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("tester/nothing")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("tester/patched", "nothing.json", cache_dir=folder / "cache")
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download("tester/patched", "config.json", revision="nothing", cache_dir=folder / "cache")
