"""The README's Python runs as it stands, with a tiny model in place of the one it names."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sinkcache import SinkCache, policies, prefill
from sinkcache.guard import cache_argument
from sinkcache.plugins import named
from sinkcache.policies import H2O
from sinkcache.testing import check_policy

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def names(monkeypatch):
    """What a reader has at hand after the first block, its model a tiny one."""
    tiny = build("llama")
    words = Tokenizer(WordLevel({f"word{index}": index for index in range(97)}, unk_token="word1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=["input_ids", "attention_mask"])
    monkeypatch.setattr("sinkcache.models.load", lambda name: (tiny, tokenizer))
    inputs = tokenizer("The history of the sea is", return_tensors="pt")
    return {"model": tiny, "tokenizer": tokenizer, "inputs": inputs, "torch": torch}


def _run(block: str, names: dict[str, Any], **changes: str) -> None:
    if "model" in names:
        changes = {"cache=cache": f"{cache_argument(names['model'])}=cache", **changes}
    for old, new in changes.items():
        block = block.replace(old, new)
    exec(block, names)


def test_the_first_example_generates_past_its_budget(names, capsys):
    _run(BLOCKS[0], names, **{"budget=256": "budget=8", "max_new_tokens=2000": "max_new_tokens=30"})
    assert names["cache"].kept(0).shape[-1] == 8
    assert capsys.readouterr().out.split()[-2] == str(names["cache"].seen)


def test_the_caches_it_shows_can_be_made(names):
    _run("from sinkcache import SinkCache\n" + BLOCKS[1], names, **{"[1024] + [256] * 29": "[9, 8]"})


def test_prompt_turn_samples_file_and_stream_go_on_from_one_another(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _run("from sinkcache import SinkCache\nfrom sinkcache.policies import StreamingLLM\n" + BLOCKS[2], names)
    prompt, question = names["inputs"]["input_ids"].shape[1], names["question"].shape[1]
    assert names["cache"].seen == prompt + 49 + 1 + question + 49 + 3
    assert names["samples"].kept(0).shape[0] == 3


def test_the_policy_it_shows_reads_attention_and_keeps_the_contract(names, monkeypatch):
    module = ModuleType("of_the_readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its class can be pickled from
    _run(BLOCKS[3], vars(module))
    check_policy(module.MeanAttention(recent=4), 12)
    kept, tokens = [], torch.randint(1, VOCABULARY, (1, 40))
    for policy in (module.MeanAttention(recent=4), H2O(recent=4, reduce="mean"), H2O(recent=4)):
        cache = SinkCache(names["model"], policy, 12)
        prefill(names["model"], cache, tokens)
        kept.append(cache.kept(0))
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_each_policy_is_named_and_what_it_shows_can_be_made():
    section = README[README.index("## Policies") : README.index("## Models")]
    shown = [
        named(text) for text in re.findall(r"`(\w+\([^`\[]*\))`", section) if text.startswith(tuple(policies.__all__))
    ]
    classes = {type(policy).__name__ for policy in shown}
    assert classes == set(policies.__all__)


def test_it_is_150_lines_at_most():
    assert len(README.splitlines()) <= 150


def test_it_has_four_blocks_of_python():
    assert len(BLOCKS) == 4
