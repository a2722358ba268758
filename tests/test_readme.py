"""The README's Python runs as it stands, with a tiny model in place of the one it names."""

import re
from pathlib import Path

import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sinkcache import SinkCache, prefill

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def names(monkeypatch):
    """What a reader has at hand: the first block's names, its model a tiny one and its generation short."""
    tiny = build("llama")
    words = Tokenizer(WordLevel({f"word{index}": index for index in range(97)}, unk_token="word1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words)
    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", lambda name: tiny)
    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    return {"model": tiny}


def test_the_first_example_generates_past_its_budget(names, capsys):
    shorter = BLOCKS[0].replace("budget=256", "budget=8").replace("max_new_tokens=2000", "max_new_tokens=30")
    assert shorter != BLOCKS[0]
    exec(shorter, names)
    assert names["cache"].kept(0).shape[-1] == 8
    assert capsys.readouterr().out.split()[-2] == str(names["cache"].seen)


def test_the_caches_it_shows_can_be_made(names):
    exec("from sinkcache import SinkCache\n" + BLOCKS[1], names)


def test_the_policy_it_shows_can_be_used(names):
    exec(BLOCKS[2], names)
    cache = SinkCache(names["model"], names["EveryOther"](recent=4), 12)
    prefill(names["model"], cache, torch.randint(1, VOCABULARY, (1, 40)))
    assert cache.kept(0)[0, 0].tolist() == [*range(20, 36, 2), 36, 37, 38, 39]


def test_it_has_three_blocks_of_python():
    assert len(BLOCKS) == 3
