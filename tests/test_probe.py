"""Each layer's rotation is found from keys alone, for every family and scaling, without leaving a trace."""

import copy
from typing import Any, cast

import pytest
import torch
import transformers as tf
from conftest import FAMILIES, VOCABULARY, build
from torch import Tensor, nn
from transformers import DynamicCache

from sinkcache.guard import cache_argument
from sinkcache.positions import Rotation
from sinkcache.probe import probe

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
CHANNELS = {"qwen3": 24, "gpt_neox": 4, "phi": 8, "gemma3": 24, "glm": 12}  # how many turn; of the others, all 16
INTERLEAVED = {"glm", "cohere"}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0},
    "another theta": {"rope_type": "default", "rope_theta": 500_000.0},
}


def rotation(model: nn.Module, layer: int) -> Rotation:
    found = probe(model).rotations[layer]
    assert isinstance(found, Rotation), found
    return found


def keys_at(model: nn.Module, positions: list[int]) -> list[Tensor]:
    """Per layer, the keys `[kv heads, positions, channels]` of one token read alone at each position."""
    cache = DynamicCache(config=cast(Any, model).config)
    token = torch.full((len(positions), 1), 11)
    with torch.no_grad():
        cast(Any, model)(
            input_ids=token, position_ids=torch.tensor(positions)[:, None], **{cache_argument(model): cache}
        )
    return [cast(Any, layer).keys[:, :, -1].transpose(0, 1) for layer in cache.layers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_turning_by_what_was_found_gives_the_models_own_keys(family, dtype):
    tiny = build(family, dtype=dtype)
    where = [0, 5, 300]
    for found, keys in zip(probe(tiny).rotations, keys_at(tiny, where), strict=True):
        turned = keys[:, :1].expand_as(keys).clone()
        if found is not None:
            assert isinstance(found, Rotation), found
            found.put(turned, found.pick(turned) * found.phase(torch.tensor(where), keys))
        # bfloat16 keys are rounded twice here; float32 angles are 300 * 6e-8 off
        torch.testing.assert_close(
            turned,
            keys,
            rtol=0.02 if dtype == torch.bfloat16 else 1e-4,
            atol=float(keys.abs().max()) * (0.01 if dtype == torch.bfloat16 else 1e-4),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_the_channels_that_turn(family, dtype):
    assert rotation(build(family, dtype=dtype), 0).channels == CHANNELS.get(family, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_the_channels_that_pair(family, dtype):
    expected = "interleaved" if family in INTERLEAVED else "half"
    assert rotation(build(family, dtype=dtype), 0).layout == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_are_the_models_under_every_scaling(kind, dtype):
    tiny = build("llama", dtype=dtype, rope_parameters=SCALED[kind])
    assert torch.equal(rotation(tiny, 1).inv_freq, cast(Any, tiny).model.rotary_emb.inv_freq.double())


def test_scalings_are_told_apart():
    found = [rotation(build("llama", rope_parameters=each), 0).inv_freq for each in SCALED.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_partial_rotation_is_found_in_half_the_channels():
    tiny = build("phi", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75})
    assert rotation(tiny, 0).channels == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_two_thetas_have_each_their_own(dtype):
    tiny = build("gemma3", dtype=dtype)
    rotary = cast(Any, tiny).model.rotary_emb
    local, whole = rotary.sliding_attention_inv_freq.double(), rotary.full_attention_inv_freq.double()
    assert not torch.equal(local, whole)
    found = [cast(Rotation, each).inv_freq for each in probe(tiny).rotations]
    assert [torch.equal(each, expected) for each, expected in zip(found, [local, whole, local], strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_without_positions_have_no_rotation(dtype):
    found = probe(build("smollm3", dtype=dtype)).rotations
    assert [each is None for each in found] == [False, False, False, True]


def test_layers_that_turn_alike_share_one_object():
    assert len({id(each) for each in probe(build("llama")).rotations}) == 1


def test_training_modes_are_restored():
    tiny = build("llama").train()
    cast(Any, tiny).model.layers[1].eval()
    before = [module.training for module in tiny.modules()]
    probe(tiny)
    assert [module.training for module in tiny.modules()] == before


def test_training_modes_are_restored_after_a_failure(monkeypatch):
    tiny = build("llama").train()
    monkeypatch.setattr(tiny.model, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe(tiny)
    assert all(module.training for module in tiny.modules())


def test_dropout_does_not_mislead():
    tiny = build("llama", attention_dropout=0.5).train()
    assert all(isinstance(each, Rotation) for each in probe(tiny).rotations)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_left_as_it_was(family):
    tiny = build(family)
    ids = torch.arange(1, 30)[None] % VOCABULARY
    state, before = copy.deepcopy(tiny.state_dict()), tiny(input_ids=ids).logits
    buffers = {name: buffer.clone() for name, buffer in tiny.named_buffers()}
    probe(tiny)
    assert all(torch.equal(each, state[name]) for name, each in tiny.state_dict().items())
    assert all(torch.equal(each, buffers[name]) for name, each in tiny.named_buffers())
    assert torch.equal(tiny(input_ids=ids).logits, before)


def test_no_gradients_are_left_behind():
    tiny = build("llama")
    probe(tiny)
    assert all(each.grad is None for each in tiny.parameters())


def test_the_random_state_is_left_as_it_was():
    tiny, before = build("llama").train(), torch.get_rng_state()
    probe(tiny)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_weight_matrix_of_zeros_does_not_pass_for_a_rotation():
    tiny = build("llama")
    with torch.no_grad():
        cast(Any, tiny).model.layers[0].self_attn.k_proj.weight.zero_()
    assert probe(tiny).rotations[0] is None


def test_a_rotation_by_unknown_frequencies_is_named_and_not_guessed():
    tiny = build("llama", dtype=torch.float32)
    rotary = cast(Any, tiny).model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids, *args, **kwargs: original(x, position_ids * 2, *args, **kwargs)
    assert (
        probe(tiny).rotations[0] == "layer 0: no frequencies of the model explain how its keys change with the position"
    )


def test_the_caches_name_is_the_one_in_the_signature():
    class Old(nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    class New(nn.Module):
        def forward(self, input_ids, cache=None, past_key_values=None): ...

    assert [cache_argument(Old()), cache_argument(New())] == ["past_key_values", "cache"]


def test_frequencies_that_differ_far_away_alone_are_told_apart():
    tiny: Any = build("llama", torch.float32)
    rotary = tiny.model.rotary_emb
    known, forward, last = rotary.inv_freq, rotary.forward, torch.ones(8)
    last[-1] = 1.5  # an angle of 3e-4 at position 2, and of 2e-2 at 126

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        rotary.inv_freq = known * last
        try:
            return forward(*args, **kwargs)
        finally:
            rotary.inv_freq = known

    rotary.forward = otherwise
    assert all("no frequencies of the model explain" in str(each) for each in probe(tiny).rotations)


def test_a_bias_that_is_not_distance_in_the_cache_is_refused(monkeypatch):
    config = tf.MptConfig(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, initializer_range=0.3)
    monkeypatch.setattr("sinkcache.probe._cropped", lambda layer: layer)  # as if what was evicted were counted in
    with pytest.raises(ValueError, match="and counts evicted tokens in"):
        probe(tf.MptForCausalLM(config).eval())
