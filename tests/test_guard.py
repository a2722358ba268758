"""What would go wrong silently is refused: one line, the value, the way out, before work begins."""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jaxtyping
import pytest
import torch
import transformers as tf
from conftest import VOCABULARY, build, recurrent
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from sinkcache import Entries, Policy, SinkCache, prefill, stream
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM, Window
from sinkcache.slots import Slots

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Turns off the checking of types that tests run under and users do not, so that the library's own errors show."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(9))


def step(model: Any, cache: SinkCache, tokens: Tensor, **extra: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache}, **extra)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> None:
    assert "\n" not in str(error.value)


# arguments

ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a budget of zero": ({"budget": 0}, ValueError, r"budget must be at least 1 token, got 0"),
    "a negative budget": ({"budget": -3}, ValueError, r"budget must be at least 1 token, got -3"),
    "a negative share": ({"budget": -0.5}, ValueError, r"must be in \(0, 1\], got -0.5: for tokens give an int"),
    "a share of zero": ({"budget": 0.0}, ValueError, r"must be in \(0, 1\], got 0.0: for tokens give an int"),
    "a share above one": ({"budget": 512.0}, ValueError, r"must be in \(0, 1\], got 512.0: for tokens give an int"),
    "a share that is no number": ({"budget": float("nan")}, ValueError, r"must be in \(0, 1\], got nan"),
    "a budget of True": ({"budget": True}, TypeError, r"budget must be tokens \(a whole number\).* got True"),
    "a budget in words": ({"budget": "1024"}, TypeError, r"budget must be tokens \(a whole number\).* got '1024'"),
    "no budget": ({"budget": None}, TypeError, r"budget must be tokens \(a whole number\).* got None"),
    "too short a list": ({"budget": [9]}, ValueError, r"budget has 1 entries for 2 bounded layers: give one number"),
    "too long a list": ({"budget": [9] * 3}, ValueError, r"budget has 3 entries for 2 bounded layers: give one number"),
    "an empty list": ({"budget": []}, ValueError, r"budget has 0 entries for 2 bounded layers: give one number"),
    "a list with True": ({"budget": [1, True]}, TypeError, r"budget must be tokens \(a whole number\).* got True"),
    "a list with a zero": ({"budget": [0, 0]}, ValueError, r"budget must be at least 1 token, got 0"),
    "a list of True": ({"budget": [True, True]}, TypeError, r"got True"),
    "as many sinks as budget": (
        {"budget": 4, "policy": StreamingLLM(4)},
        ValueError,
        r"num_sinks=4 with budget=4: raise the budget or use fewer sinks",
    ),
    "a policy class": (
        {"policy": Window},
        TypeError,
        r"policy must be a Policy object such as StreamingLLM\(num_sinks=4\)",
    ),
    "a policy's name": ({"policy": "window"}, TypeError, r"policy must be a Policy object.* got 'window'"),
    "another convention": ({"positions": "rope"}, ValueError, r'positions must be "cache" or "original", got \'rope\''),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_bad_argument_is_an_error(model, case, unchecked):
    arguments, kind, message = ARGUMENTS[case]
    with pytest.raises(kind, match=message) as error:
        SinkCache(model("llama"), **arguments)
    one_line(error)


@pytest.mark.parametrize("num_sinks", [-1, True, 2.0, "4"])
def test_a_bad_number_of_sinks_is_an_error(num_sinks, unchecked):
    with pytest.raises(ValueError, match=f"num_sinks must be a whole number, 0 or more, got {num_sinks!r}"):
        StreamingLLM(num_sinks=num_sinks)


def test_a_config_where_a_model_is_needed_is_an_error(model):
    with pytest.raises(TypeError, match=r'needs the model.* Pass the model, or positions="original"'):
        SinkCache(model("llama").config)


@pytest.mark.parametrize("wrong", [nn.Linear(2, 3), "llama", None], ids=["a layer", "a name", "nothing"])
def test_what_is_no_model_is_an_error(wrong, unchecked):
    with pytest.raises(TypeError, match=r"model must be a causal LM or its config, got (Linear|str|NoneType)"):
        SinkCache(wrong)


# models

MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)),
        "adds positions to its hidden states",
    ),
    "OPT": (
        lambda: tf.OPTForCausalLM(tf.OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, init_std=0.3)),
        "adds positions to its hidden states",
    ),
    "Falcon with ALiBi": (
        lambda: tf.FalconForCausalLM(tf.FalconConfig(**SMALL, alibi=True, initializer_range=0.3)),
        "rotary or no position embeddings",
    ),
    "T5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        ),
        "T5Config is an encoder-decoder: SinkCache serves decoder-only models",
    ),
    "BART": (
        lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(
                vocab_size=97,
                d_model=64,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
            )
        ),
        "BartConfig is an encoder-decoder: SinkCache serves decoder-only models",
    ),
}


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_bounded_is_an_error(name, positions):
    make, message = MODELS[name]
    unfit = make().eval()
    with pytest.raises(ValueError, match=message) as error:
        SinkCache(unfit, positions=positions)
    one_line(error)


def test_dynamic_frequencies_in_original_positions_are_an_error():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match=r'rope_type is dynamic: .* Use positions="cache" with sinkcache\.stream'):
        SinkCache(build("llama", rope_parameters=parameters), positions="original")


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_longrope_is_an_error(positions):
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(ValueError, match=r"rope_type is longrope: .* Not supported"):
        SinkCache(build("llama", dtype=torch.float32, rope_parameters=parameters), positions=positions)


def test_a_model_of_sliding_layers_alone_is_an_error():
    sliding = build("gemma3", layer_types=["sliding_attention"] * 3)
    with pytest.raises(ValueError, match=r"no full-attention layer to bound.*DynamicSlidingWindowLayer"):
        SinkCache(sliding)


def test_a_model_on_the_meta_device_is_an_error():
    with torch.device("meta"):
        unloaded = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, intermediate_size=96))
    with pytest.raises(ValueError, match="LlamaForCausalLM is on the meta device: load its weights before"):
        SinkCache(unloaded)


def test_a_cache_implementation_in_the_generation_config_is_an_error():
    tiny = build("llama")
    cast(Any, tiny).generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match=r"cache_implementation is 'static', which generate refuses .* set it to None"):
        SinkCache(tiny)


def test_a_rotation_that_is_unknown_is_an_error_in_cache_positions():
    odd = build("llama", dtype=torch.float32)
    rotary = cast(Any, odd).model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids, *args, **kwargs: original(x, position_ids * 2, *args, **kwargs)
    with pytest.raises(ValueError, match=r'cannot be had: layer 0: no frequencies .* Use positions="original"'):
        SinkCache(odd)


# passes

PASSES: dict[str, tuple[int, dict[str, Any], str]] = {  # new tokens, extra arguments, message; 12 tokens were seen
    "a mask too narrow": (
        3,
        {"attention_mask": torch.ones(2, 3, dtype=torch.int64)},
        "attention_mask covers 3 tokens, but the cache has seen 12 and 3 are new: pass a mask of width 15, or none",
    ),
    "a mask as wide as what is held": (
        1,
        {"attention_mask": torch.ones(2, 9, dtype=torch.int64)},
        "attention_mask covers 9 tokens, but the cache has seen 12 and 1 are new: pass a mask of width 13, or none",
    ),
    "a mask one too wide": (
        3,
        {"attention_mask": torch.ones(2, 16, dtype=torch.int64)},
        "attention_mask covers 16 tokens, but the cache has seen 12 and 3 are new: pass a mask of width 15, or none",
    ),
    "a mask without the new tokens": (
        3,
        {"attention_mask": torch.ones(2, 12, dtype=torch.int64)},
        "attention_mask covers 12 tokens, but the cache has seen 12 and 3 are new: pass a mask of width 15, or none",
    ),
    "a padded mask": (
        3,
        {"attention_mask": torch.tensor([[0] * 4 + [1] * 11, [1] * 15])},
        "attention_mask of row 0 hides other tokens than when they were read: what was read as text stays text",
    ),
    "a 4D mask of another width": (
        3,
        {"attention_mask": torch.zeros(1, 1, 3, 15, dtype=torch.float64)},
        "attention_mask is 15 keys wide, but 10 will be attended to",
    ),
    "positions with a gap": (
        3,
        {"position_ids": torch.tensor([[12, 13, 15]])},
        "position_ids are not 3 positions in a row from 12, the same in rows that were padded alike: packed sequences",
    ),
    "positions that begin again": (
        3,
        {"position_ids": torch.tensor([[12, 0, 1]])},
        "position_ids are not 3 positions in a row from 12",
    ),
    "too many positions": (
        3,
        {"position_ids": torch.tensor([[10, 11, 12, 13, 14]])},
        "position_ids are 5 in a row for 3 tokens: give one for each",
    ),
    "a mask with a hole, in a decoding step": (
        1,
        {"attention_mask": torch.tensor([[1] * 6 + [0] + [1] * 6, [1] * 13])},
        "attention_mask of row 0 hides other tokens than when they were read",
    ),
    "positions that differ between rows": (
        2,
        {"position_ids": torch.tensor([[12, 13], [10, 11]])},
        "position_ids are not 2 positions in a row from 12, the same in rows that were padded alike",
    ),
}


@pytest.mark.parametrize("case", PASSES)
def test_a_pass_that_would_go_wrong_is_an_error_and_changes_nothing(model, case):
    count, extra, message = PASSES[case]
    cache, twin = (SinkCache(model("llama"), budget=8) for _ in range(2))
    for each in (cache, twin):
        step(model("llama"), each, ids(12, batch=2))
    with pytest.raises(ValueError, match=message) as error:
        step(model("llama"), cache, ids(count, batch=2), **extra)
    one_line(error)
    after = [step(model("llama"), each, ids(4, batch=2)).logits for each in (cache, twin)]
    assert torch.equal(*after)


def test_positional_arguments_are_watched_too(model):
    cache = SinkCache(model("llama"), budget=8)
    names = list(inspect.signature(model("llama").forward).parameters)
    given = {
        "input_ids": ids(5),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        cache_argument(model("llama")): cache,
    }
    last = max(names.index(name) for name in given)
    with pytest.raises(ValueError, match="attention_mask hides the last token of row 0"), torch.no_grad():
        model("llama")(*[given.get(name) for name in names[: last + 1]])


def test_embeddings_in_place_of_ids_are_watched_too(model):
    cache = SinkCache(model("llama"), budget=8)
    embeddings = model("llama").get_input_embeddings()(ids(5)).detach()
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    with pytest.raises(ValueError, match="attention_mask hides the last token of row 0"), torch.no_grad():
        model("llama")(inputs_embeds=embeddings, attention_mask=mask, **{cache_argument(model("llama")): cache})


def test_prefill_refuses_a_batch_padded_on_the_right_before_the_first_chunk(model):
    cache = SinkCache(model("llama"), budget=8)
    mask = torch.tensor([[1] * 15 + [0] * 5])
    with pytest.raises(ValueError, match="attention_mask hides the last token of row 0: a batch padded on the right"):
        prefill(model("llama"), cache, ids(20), chunk=5, attention_mask=mask)
    assert cache.seen == 0


@pytest.mark.parametrize("shape", [(5,), (1, 0)])
def test_prefill_of_no_tokens_is_an_error(model, shape, unchecked):
    tokens = torch.ones(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"at least.*got shape {re.escape(str(shape))}"):
        prefill(model("llama"), SinkCache(model("llama"), budget=8), tokens)


def test_gradients_are_an_error(model):
    with pytest.raises(RuntimeError, match=r"SinkCache is for inference: run the model under torch\.no_grad\(\)"):
        model("llama")(input_ids=ids(5), **{cache_argument(model("llama")): SinkCache(model("llama"), budget=8)})


@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_size_is_an_error(model, rows):
    cache = SinkCache(model("llama"), budget=8)
    step(model("llama"), cache, ids(12, batch=2))
    with pytest.raises(ValueError, match=rf"holds a batch of 2 and was given {rows} rows: call cache\.reset\(\)"):
        step(model("llama"), cache, ids(1, batch=rows))


def test_another_batch_size_is_an_error_without_hooks_too():
    tiny = build("llama")
    cache = SinkCache(cast(Any, tiny).config, budget=8, positions="original")
    step(tiny, cache, ids(12, batch=2))
    with pytest.raises(ValueError, match=r"holds a batch of 2 and was given 3 rows: call cache\.reset\(\)"):
        step(tiny, cache, ids(1, batch=3))


def test_another_batch_size_leaves_the_cache_as_it_was(model):
    cache = SinkCache(model("llama"), budget=8)
    step(model("llama"), cache, ids(12, batch=2))
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="holds a batch of 2"):
        step(model("llama"), cache, ids(1, batch=3))
    assert torch.equal(
        step(model("llama"), cache, ids(3, batch=2)).logits, step(model("llama"), twin, ids(3, batch=2)).logits
    )


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "as a negative number, got 3"),
        (-3, r"cannot take back 3 tokens once it has evicted.* cache\.fork\(\)"),
        (-13, "cannot take back 13 tokens: the cache has seen 12"),
    ],
)
def test_a_crop_that_cannot_be_exact_is_an_error(model, count, message):
    cache = SinkCache(model("llama"), budget=8)
    step(model("llama"), cache, ids(12))
    with pytest.raises(ValueError, match=message):
        cache.crop(count)
    assert cache.seen == 12


def test_crop_of_nothing_is_nothing(model):
    cache = SinkCache(model("llama"), budget=8)
    step(model("llama"), cache, ids(12))
    cache.crop(0)
    assert cache.seen == 12


# torn and bypassed


def _interrupted(cache_of: Callable[[nn.Module], SinkCache], first: int) -> tuple[nn.Module, SinkCache]:
    """A model and a cache that holds `first` tokens, and one more in its first layer alone."""
    tiny = build("llama")
    cache = cache_of(tiny)
    if first:
        step(tiny, cache, ids(first))

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = cast(Any, tiny).model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        step(tiny, cache, ids(1))
    handle.remove()
    return tiny, cache


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("first", [0, 12])
def test_after_an_interrupted_pass_the_next_is_an_error(first, positions):
    tiny, cache = _interrupted(lambda model: SinkCache(model, budget=8, positions=positions), first)
    with pytest.raises(RuntimeError, match=r"a forward pass was interrupted\. Call cache\.reset\(\)"):
        step(tiny, cache, ids(1))


def test_after_an_interrupted_pass_the_next_is_an_error_without_hooks_too():
    tiny, cache = _interrupted(lambda model: SinkCache(model.config, budget=8, positions="original"), 12)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"interrupted .*Call cache\.reset\(\)"):
        step(tiny, cache, ids(1))


def test_a_pass_that_failed_after_all_was_stored_is_not_read_again(model):
    llama: Any = build("llama")
    cache = SinkCache(llama, budget=8)
    handle = llama.lm_head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(llama, cache, ids(5))
    handle.remove()
    with pytest.raises(RuntimeError, match=r"stored its tokens and then failed.* Call cache\.reset\(\)"):
        step(llama, cache, ids(5))
    cache.reset()
    step(llama, cache, ids(5))


def test_reset_repairs_an_interrupted_cache():
    tiny, cache = _interrupted(lambda model: SinkCache(model, budget=8), 12)
    cache.reset()
    fresh = SinkCache(tiny, budget=8)
    assert torch.equal(step(tiny, cache, ids(12)).logits, step(tiny, fresh, ids(12)).logits)


@dataclass(frozen=True)
class Moody(Policy):
    """Two sinks and recent tokens, but fails when asked about `at` tokens."""

    at: int

    def score(self, entries: Entries) -> Tensor:
        if entries.positions.shape[-1] == self.at:
            raise ValueError(f"no score for {self.at} tokens")
        return (entries.positions < 2).float()


def refuses_or_is_right(model: nn.Module, cache: SinkCache, twin: SinkCache, tokens: Tensor) -> bool:
    """What matters after a failure: nothing is computed wrongly."""
    try:
        after = [step(model, cache, token).logits for token in tokens.split(1, dim=1)]
    except RuntimeError as error:
        return "reset()" in str(error)
    expected = [step(model, twin, token).logits for token in tokens.split(1, dim=1)]
    return torch.equal(torch.cat(after), torch.cat(expected))


@pytest.mark.parametrize("at", [8, 10])
def test_after_a_policy_failed_nothing_is_computed_wrongly(model, at):
    cache = SinkCache(model("llama"), Moody(at=at), budget=8, positions="cache")
    step(model("llama"), cache, ids(7))
    if at == 10:
        for token in ids(4).split(1, dim=1):
            step(model("llama"), cache, token)
    else:
        step(model("llama"), cache, ids(1))
    twin = copy.deepcopy(cache)
    twin.slots.policy = StreamingLLM(num_sinks=2)
    with pytest.raises(ValueError, match=f"no score for {at} tokens"):
        step(model("llama"), cache, ids(3))
    cache.slots.policy = StreamingLLM(num_sinks=2)
    assert refuses_or_is_right(model("llama"), cache, twin, ids(6))


def test_after_an_interrupt_amid_the_book_nothing_is_computed_wrongly(model, monkeypatch):
    cache = SinkCache(model("llama"), StreamingLLM(num_sinks=2), budget=8)
    for piece in ids(12).split([10, 1, 1], dim=1):
        step(model("llama"), cache, piece)
    twin, turns = copy.deepcopy(cache), Slots._turns

    def interrupted(*args: Any) -> None:
        turns(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Slots, "_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model("llama"), cache, ids(1))
    monkeypatch.undo()
    assert refuses_or_is_right(model("llama"), cache, twin, ids(6))


def test_a_model_that_drops_its_cache_is_found_out(monkeypatch):
    tiny = build("llama")
    cache = SinkCache(tiny, budget=8)
    name, original = cache_argument(tiny), tiny.forward
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, name: None})

    forward.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(tiny, "forward", forward)
    with pytest.raises(RuntimeError, match="it bypassed the SinkCache it was given"):
        step(tiny, cache, ids(5))


def test_a_model_that_skips_a_layers_cache_is_found_out():
    tiny = build("llama")
    cache = SinkCache(tiny, budget=8)

    def drop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {key: None if isinstance(value, SinkCache) else value for key, value in kwargs.items()}

    handle = cast(Any, tiny).model.layers[1].self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"layers \[1\]: it bypassed the SinkCache"):
        step(tiny, cache, ids(5))
    handle.remove()


def test_other_caches_of_a_watched_model_go_through_untouched(model):
    SinkCache(model("llama"), budget=8)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    whole = tf.DynamicCache(config=model("llama").config)
    assert step(model("llama"), cast(Any, whole), ids(5), attention_mask=mask).logits.shape == (1, 5, VOCABULARY)


def test_one_model_is_watched_once():
    tiny = build("llama")
    for _ in range(3):
        SinkCache(tiny, budget=8)
    assert len(tiny._forward_pre_hooks) == 1


def test_another_model_is_refused_before_it_reads(model):
    other = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    cache = SinkCache(model("llama"), budget=8)
    with pytest.raises(ValueError, match="made for a model that rotates otherwise") as error:
        prefill(other, cache, ids(5))
    one_line(error)
    assert cache.seen == 0


def test_a_stream_needs_a_budget_in_tokens_or_a_prompt(model):
    llama = model("llama")
    cache = SinkCache(llama, Window(), 0.25)
    with pytest.raises(ValueError, match=r"budget=0.25 is a share of a prompt and a stream has none: read") as error:
        stream(llama, cache, [1, 2, 3])
    one_line(error)
    prefill(llama, cache, ids(16))
    assert len(list(stream(llama, cache, [1, 2, 3]))) == 3
    assert cache.kept(0).shape[-1] == 4


def test_a_model_without_a_head_is_refused():
    with pytest.raises(TypeError, match="LlamaModel has none: load a causal LM") as error:
        SinkCache(build("llama").model)  # type: ignore[arg-type]
    one_line(error)


def test_multimodal_positions_are_refused(model):
    llama = model("llama")
    with pytest.raises(ValueError, match=r"shape \(3, 1, 5\) are not \[batch, tokens\]") as error:
        step(llama, SinkCache(llama, budget=8), ids(5), position_ids=torch.arange(15).reshape(3, 1, 5))
    one_line(error)


def test_a_growing_layer_of_another_kind_is_refused(model, monkeypatch):
    class Indexed(DynamicLayer):
        pass

    real = tf.DynamicCache

    def other(config):
        cache = real(config=config)
        cache.layers[1] = Indexed()
        return cache

    monkeypatch.setattr("sinkcache.cache.DynamicCache", other)
    with pytest.raises(ValueError, match="layers of a kind SinkCache does not know and so cannot bound: Indexed"):
        SinkCache(model("llama"), budget=8)


def test_layers_without_keys_do_not_keep_a_stream_from_being_rebased():
    hybrid = recurrent()
    tokens = ids(60)[0].tolist()
    one = torch.stack(list(stream(hybrid, SinkCache(hybrid, StreamingLLM(2), 10), tokens, rebase_at=1000)))
    other = torch.stack(list(stream(hybrid, SinkCache(hybrid, StreamingLLM(2), 10), tokens, rebase_at=16)))
    torch.testing.assert_close(other, one, rtol=0, atol=1e-3)  # float32, as its experts run in no wider


def test_pads_behind_the_first_chunk_of_a_recurrent_layer_are_an_error_before_it_is_read():
    hybrid, tokens, mask = recurrent(), ids(12, batch=2), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    cache = SinkCache(hybrid, budget=8)
    with pytest.raises(ValueError, match="linear-attention layers can skip pads only in front of a row and in the fir"):
        prefill(hybrid, cache, tokens, chunk=2, attention_mask=mask)
    assert cache.seen == 0
    prefill(hybrid, cache, tokens, chunk=3, attention_mask=mask)
