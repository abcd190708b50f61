"""bft-inspect: what it shows is what the filter computes, and the command from flags to files."""

import base64
import csv
import gzip
import hashlib
import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_questions import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import bft_hf
from bft_hf import BFTConfig
from bft_hf.recipes.inspection import page
from bft_hf.recipes.inspection.cli import main
from bft_hf.recipes.inspection.look import TOP_KEYS, look
from bft_hf.recipes.inspection.texts import Text, token_texts
from bft_hf.recipes.inspection.weights import attention_weights

HOSTILE = "</script><script>alert(1)</script>&amp;\"'<b>$title"


def text_of(ids):
    return Text("text", list(ids), [f"<{token}>" for token in ids], ["text"] * len(ids), False)


def seen_weights(model, ids):
    """The weights of every layer as `attention_weights` shows them, before and after, (head, query, key)."""
    seen = {}
    with torch.no_grad(), attention_weights(model, lambda layer, *both: seen.update({layer: both})):
        logits = model(ids, use_cache=False).logits
    return {layer: [weights[0] for weights in both] for layer, both in seen.items()}, logits


def recomputed_weights(model, ids):
    """The same from hidden states and `record` alone: the softmax of q k, and its product with the precision."""
    inputs, positions = {}, {}

    def keep(module, args, kwargs):
        inputs[module.layer_idx] = kwargs["hidden_states"]
        positions[module.layer_idx] = kwargs["position_embeddings"]

    handles = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.get_decoder().layers
    ]
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    found = {}
    for layer, precision in zip(trace.layers, trace.precision, strict=True):
        attention = model.get_decoder().layers[layer].self_attn
        cos, sin = (part.double() for part in positions[layer])

        def heads(projection, layer=layer, attention=attention, cos=cos, sin=sin):
            states = torch.nn.functional.linear(inputs[layer].double(), projection.weight.double())
            states = states.view(*states.shape[:2], -1, attention.head_dim).transpose(1, 2)
            half = attention.head_dim // 2
            turned = torch.cat([-states[..., half:], states[..., :half]], -1)
            return states * cos + turned * sin

        query, key = heads(attention.q_proj), heads(attention.k_proj)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query @ key.transpose(2, 3) / attention.head_dim**0.5
        count = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        alpha = scores.softmax(-1)[0]
        lam = precision[0].double()
        kriging = alpha * (lam if lam.ndim == 1 else lam.mean(-1))
        found[layer] = alpha, kriging / kriging.sum(-1, keepdim=True)
    return found


@pytest.mark.parametrize(
    "config", [BFTConfig.unit(), BFTConfig.unit(granularity="channel"), BFTConfig.unit(layers=(1,))]
)
def test_weights_are_those_before_and_after_kriging(tiny_llama, config):
    model = bft_hf.patch(tiny_llama(), config)
    ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    seen, logits = seen_weights(model, ids)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert model.config._attn_implementation == "sdpa"
    for layer, (alpha, kriging) in recomputed_weights(model, ids).items():
        before, after = seen[layer]
        torch.testing.assert_close(before.double(), alpha, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(after.double(), kriging, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(before.sum(-1), torch.ones(4, 24))
        torch.testing.assert_close(after.sum(-1), torch.ones(4, 24))
    if config.layers is None:  # from the second layer on, precision differs by token and moves the weights
        assert (seen[2][0] - seen[2][1]).abs().max() > 1e-3


def test_weights_of_trained_model(stories260k):
    from bft_hf.recipes.models import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer(str(stories260k))
    bft_hf.patch(model, BFTConfig.unit())
    ids = torch.tensor([tokenizer("Once upon a time, there was a little girl named Lily.")["input_ids"]])
    seen, _ = seen_weights(model, ids)
    for layer, (alpha, kriging) in recomputed_weights(model, ids).items():
        torch.testing.assert_close(seen[layer][0].double(), alpha, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(seen[layer][1].double(), kriging, atol=2e-6, rtol=1e-4)


def test_weights_of_plain_model_are_one(tiny_llama):
    ids = torch.randint(3, 128, (1, 9))
    seen, _ = seen_weights(tiny_llama(), ids)
    assert sorted(seen) == [0, 1, 2]
    for before, after in seen.values():
        assert torch.equal(before, after)


def test_weights_without_kriging_are_one(tiny_llama):
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(kriging=False))
    for before, after in seen_weights(model, torch.randint(3, 128, (1, 9)))[0].values():
        torch.testing.assert_close(before, after)


def test_attention_is_put_back_after_an_error(tiny_llama):
    model = tiny_llama()
    with pytest.raises(RuntimeError, match="stop"), attention_weights(model, lambda *_: None):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"
    with (
        pytest.raises(ValueError, match="within"),
        attention_weights(model, lambda *_: None),
        attention_weights(model, lambda *_: None),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_precisions_go_around_a_soft_cap(tiny_llama):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "initializer_range": 0.5,
    }
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "attn_logit_softcapping": 2.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(Gemma2Config(**fields, attn_implementation="eager")).eval()
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    plain, _ = seen_weights(model, ids)
    bft_hf.patch(model, BFTConfig.unit())
    with torch.no_grad(), bft_hf.record(model) as trace:
        expected = model(ids).logits
    seen, logits = seen_weights(model, ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(seen[0][0], plain[0][0])
    for layer, precision in enumerate(trace.precision):
        before, after = seen[layer]
        kriging = before * precision[0]
        torch.testing.assert_close(after, kriging / kriging.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)
    assert (seen[1][0] - seen[1][1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "config", [BFTConfig.unit(), BFTConfig.unit(granularity="channel", layers=(0, 2)), BFTConfig.unit(propagate=False)]
)
def test_look_is_what_record_gives(tiny_llama, config):
    model = bft_hf.patch(tiny_llama(), config)
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    found = look(model, text_of(ids[0].tolist()), weight_tokens=20)
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(ids, use_cache=False)
    assert found.layers == tuple(trace.layers)
    assert ("jacobian" in found.values) == config.propagate
    for name, values in found.values.items():
        for mine, theirs in zip(values, getattr(trace, name), strict=True):
            theirs = theirs[0] if theirs.ndim == 2 else theirs[0].mean(-1)
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(found.sample_size, trace.effective_sample_size, strict=True):
        np.testing.assert_allclose(mine, theirs[0], rtol=1e-3)
    seen, _ = seen_weights(model, ids)
    for place, layer in enumerate(found.layers):
        for row, head in ((0, slice(None)), (3, slice(2, 3))):
            before, after = (weights[head].mean(0).numpy() for weights in seen[layer])
            keys = found.keys[place, row]
            np.testing.assert_allclose(found.before[place, row], np.take_along_axis(before, keys, -1), atol=1e-6)
            np.testing.assert_allclose(found.after[place, row], np.take_along_axis(after, keys, -1), atol=1e-6)
            # None of those left out weighs more than one that is kept.
            rest = np.maximum(before, after)
            np.put_along_axis(rest, keys, 0, -1)
            assert (rest.max(-1) <= np.maximum(found.before, found.after)[place, row].min(-1) + 1e-6).all()


def test_weights_are_kept_of_the_last_tokens(tiny_llama):
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    ids = torch.randint(3, 128, (20,)).tolist()
    whole, some, none = (look(model, text_of(ids), count) for count in (20, 6, 0))
    assert (whole.first, some.first, none.first) == (0, 14, 20)
    assert some.keys.shape == (3, 5, 6, TOP_KEYS) and none.keys.shape[2] == 0
    np.testing.assert_array_equal(some.after, whole.after[:, :, 14:])


def unpack(found, text):
    """What the page's script reads back."""
    content = gzip.decompress(base64.b64decode(text))
    layers, heads, tokens = found.sample_size.shape
    arrays, offset = {}, 0
    for name, _, _, by_head in page.MEASURES:
        shape = (layers, heads + 1, tokens) if by_head else (layers, tokens)
        arrays[name] = np.frombuffer(content, "<f4", int(np.prod(shape)), offset).reshape(shape)
        offset += arrays[name].nbytes
    for name in ("keys", "before", "after"):
        shape = found.keys.shape
        arrays[name] = np.frombuffer(content, "<u2", int(np.prod(shape)), offset).reshape(shape)
        offset += arrays[name].nbytes
    assert offset == len(content)
    return arrays


def test_pages_numbers_are_those_that_were_seen(tiny_llama):
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(propagate=False))
    found = look(model, text_of(torch.randint(3, 128, (20,)).tolist()), 7)
    arrays = unpack(found, page.pack(found))
    for name in ("precision", "gain"):
        np.testing.assert_allclose(arrays[name], found.values[name], rtol=2.0**-12)
    assert np.isnan(arrays["jacobian"]).all()
    np.testing.assert_allclose(arrays["effective_sample_size"][:, 0], found.sample_size.mean(1), rtol=2.0**-11)
    np.testing.assert_allclose(arrays["effective_sample_size"][:, 1:], found.sample_size, rtol=2.0**-12)
    np.testing.assert_array_equal(arrays["keys"], found.keys)
    np.testing.assert_allclose(arrays["before"] / 65535, found.before, atol=1e-5)
    np.testing.assert_allclose(arrays["after"] / 65535, found.after, atol=1e-5)


@pytest.mark.parametrize("text", ["Grüße, 世界 \U0001f600!\n\n\tend", "a b  c", ""])
def test_token_texts_are_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and all(texts)
    if text.isascii():
        assert "".join(texts) == text


# The command


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tiny_llama):
    """A plain model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Reader(html.parser.HTMLParser):
    """The tags of a page, its scripts, and the texts of its tokens."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.tokens = [], [], []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag
        if dict(attributes).get("role") == "option":
            self.tokens.append("")
            self.inside = "token"

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, text):
        if self.inside == "script":
            self.scripts.append(text)
        elif self.inside == "token":
            self.tokens[-1] += text


def test_command_writes_what_was_seen(model_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(model_dir), "--text", "To be, or not to be", "--output_dir", str(out)]) == 0
    said = capsys.readouterr().out
    assert "plain model, patched for this look with tau 1 and Q 1" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "inspect.html",
        "inspect.json",
        "layers.svg",
        "tokens.csv",
        "tokens.json",
        "tokens.svg",
    ]
    result = json.loads((out / "inspect.json").read_text())
    assert result["patched_here"] and result["bft_config"]["initial_process_noise"] == 1.0
    text = json.loads((out / "tokens.json").read_text())[0]
    assert "".join(text["tokens"]) == "<s>To be, or not to be"
    model = bft_hf.patch(AutoModelForCausalLM.from_pretrained(model_dir), BFTConfig.unit())
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(torch.tensor([text["input_ids"]]))
    gain = np.array([layer["gain"] for layer in text["layers"]])
    np.testing.assert_allclose(gain, torch.stack(trace.gain)[:, 0], rtol=1e-4)
    with (out / "tokens.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 * 3
    for row in rows:
        place = int(row["layer"]), int(row["position"])
        assert float(row["gain"]) == pytest.approx(gain[place], rel=1e-5)
        assert float(row["precision"]) == pytest.approx(float(trace.precision[place[0]][0, place[1]]), rel=1e-4)
    for layer, row in enumerate(result["by_layer"]):
        assert row["gain"] == pytest.approx(gain[layer].mean(), rel=1e-4)
        assert row["gain_p10"] <= row["gain"] <= row["gain_p90"]
        assert re.search(rf"│ {layer} .*{row['gain']:.3g}", said)


def test_hostile_text_stays_text(model_dir, tmp_path):
    pages = []
    for text in (HOSTILE, "x" * len(HOSTILE)):
        out = tmp_path / text[:1].replace("<", "hostile")
        assert main([str(model_dir), "--text", text, "--output_dir", str(out)]) == 0
        pages.append((out / "inspect.html").read_text())
    hostile, harmless = map(Reader, pages)
    assert "".join(hostile.tokens) == "<s>" + HOSTILE
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert len(hostile.scripts) == 3 and hostile.scripts[2] == harmless.scripts[2]
    assert "alert(1)" not in "".join(hostile.scripts)
    assert not [attributes for _, attributes in hostile.tags if {"src", "href", "onload", "action"} & set(attributes)]
    policy = next(attributes["content"] for tag, attributes in hostile.tags if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(hostile.scripts[2].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_patched_model_is_left_as_it_is(model_dir, tmp_path, capsys):
    model = bft_hf.patch(AutoModelForCausalLM.from_pretrained(model_dir), BFTConfig.unit(initial_process_noise=7.0))
    model.save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "patched")
    words = [str(tmp_path / "patched"), "--text", "abc", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 0
    assert "plain model" not in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert not result["patched_here"] and result["bft_config"]["initial_process_noise"] == 7.0
    assert main([*words, "--overwrite", "--process_noise", "2"]) == 2
    assert "is patched already" in capsys.readouterr().err


def test_filters_start_is_chosen_by_flags(model_dir, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "config.json").write_text(BFTConfig.unit(granularity="channel").to_json_string())
    flags = ["--bft_config", str(tmp_path / "config.json"), "--process_noise", "5", "--initial_precision", "0.5"]
    flags += ["--bft_overrides", "kriging=false"]
    assert main([str(model_dir), "--text", "abc", "--output_dir", str(out), *flags]) == 0
    config = json.loads((out / "inspect.json").read_text())["bft_config"]
    assert (config["granularity"], config["kriging"]) == ("channel", False)
    assert (config["initial_process_noise"], config["initial_precision_value"]) == (5.0, 0.5)


def questions(path, count=4):
    rows = [
        {
            "title": f"t{n}",
            "context": f"Town {n} lies on river {n}.",
            "question": f"Where is {n}?",
            "answers": [f"river {n}"],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_with_distractors(model_dir, tmp_path, capsys):
    data, out = questions(tmp_path / "data.jsonl"), tmp_path / "out"
    flags = ["--dataset", data, "--examples", "2", "--distractors", "2", "--distractor_source", "random"]
    assert main([str(model_dir), *flags, "--output_dir", str(out)]) == 0
    said = capsys.readouterr().out
    for part in ("prompt", "gold passage", "distractor", "answer"):
        assert part in said
    for text in json.loads((out / "tokens.json").read_text()):
        joined = {
            part: "".join(token for token, other in zip(text["tokens"], text["parts"], strict=True) if other == part)
            for part in set(text["parts"])
        }
        number = re.search(r"river (\d)", joined["gold passage"]).group(1)
        assert joined["gold passage"] == f"Town {number} lies on river {number}."
        assert joined["answer"] == f"river {number}</s>"
        assert joined["distractor"].count("Town") == 2 and f"Town {number}" not in joined["distractor"]
    parts = json.loads((out / "inspect.json").read_text())["by_part"]
    assert {row["part"]: row["tokens"] for row in parts}["gold passage"] == 2 * len("Town 0 lies on river 0.")


def test_what_is_too_long_is_cut_and_said(model_dir, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("x" * 600)
    words = [str(model_dir), "--file", str(tmp_path / "long.txt")]
    assert main([*words, "--output_dir", str(tmp_path / "a"), "--weight_tokens", "10"]) == 0
    said = capsys.readouterr().out
    assert "The text is longer than 512 tokens and cut there" in said
    assert "The page keeps weights of the last 10 of 512 tokens" in said
    assert json.loads((tmp_path / "a" / "inspect.json").read_text())["texts"][0]["weights_from"] == 502
    assert main([*words, "--output_dir", str(tmp_path / "b"), "--max_length", "40"]) == 0
    assert "longer than 40 tokens" in capsys.readouterr().out


REFUSED = {
    "no text": ([], "--text --file --dataset is required"),
    "two texts": (["--text", "a", "--file", "b"], "not allowed with"),
    "unknown flag": (["--text", "a", "--colour", "red"], "unrecognized arguments: --colour"),
    "empty text": (["--text", " "], "there is no text in it"),
    "no file": (["--file", "nowhere.txt"], "--file nowhere.txt: no such file"),
    "no text in file": (["--file", sys.executable], "--file"),
    "no data set": (["--dataset", "nowhere.jsonl"], "--dataset nowhere.jsonl: no such file"),
    "examples": (["--dataset", "demo", "--examples", "0"], "--examples must be at least 1"),
    "too many": (["--dataset", "demo", "--examples", "9999"], "9999 were asked for"),
    "length": (["--text", "a", "--max_length", "0"], "--max_length must be at least 1"),
    "huge": (["--text", "a", "--max_length", "65536"], "--max_length must be at most 65535"),
    "weights": (["--text", "a", "--weight_tokens", "-1"], "--weight_tokens must be at least 0"),
    "questions' flag": (["--text", "a", "--distractors", "2"], "--distractors is of --dataset"),
    "source": (
        ["--dataset", "demo", "--distractors", "1", "--distractor_source", "x"],
        "choose from bm25, random, ctxs",
    ),
    "place": (["--dataset", "demo", "--gold_position", "up"], "--gold_position"),
    "noise": (["--text", "a", "--process_noise", "0"], "--process_noise must be a positive number"),
    "config": (["--text", "a", "--bft_config", "nowhere.json"], "--bft_config nowhere.json: no such file"),
    "short": (["--dataset", "demo", "--max_length", "20"], "raise max_length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_a_line(model_dir, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[name]
    assert main([str(model_dir), *words, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("bft-inspect: ") and "\n" not in error
    assert not list(tmp_path.iterdir())


def test_models_and_folders_that_are_refused(model_dir, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for words, message in (
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path / "empty")], "holds no config.json"),
        ([str(model_dir), "--output_dir", str(tmp_path / "full")], "is not empty"),
        ([str(model_dir), "--output_dir", str(tmp_path / "full" / "mine.txt")], "is a file"),
        ([str(model_dir), "--output_dir", "/proc/nowhere/out"], "--output_dir /proc/nowhere/out: "),
    ):
        assert main([*words, "--text", "a"]) == 2, words
        error = capsys.readouterr().err.strip()
        assert message in error and "\n" not in error, error
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_help_imports_nothing_heavy():
    # What the package itself imports is not this command's to save; on top of it, --help costs next to nothing.
    code = (
        "import sys, bft_hf\nbefore = set(sys.modules)\nfrom bft_hf.recipes.inspection.cli import main\n"
        "for words in (['--help'], ['sinks', '--help']):\n"
        "    try:\n        main(words)\n    except SystemExit:\n        pass\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'trl', 'datasets', 'matplotlib', 'scipy', 'pandas', 'rich'}, new"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "--weight_tokens" in done.stdout and "--lengths" in done.stdout
