"""What users of such caches reported, as claims: padded rows, going back, copies on disk, turns, budgets by layer."""

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from conftest import PADS_BESIDE_WINDOWS, VOCABULARY, build
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache

from sinkcache import SinkCache, prefill, turn
from sinkcache.guard import cache_argument
from sinkcache.policies import StreamingLLM

CONVENTIONS: list[Any] = ["cache", "original"]
SINKS = oracles.sinks_and_recent(4)
BUDGET = 16


def tokens(length: int, batch: int = 1, seed: int = 31) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def bounded(model: Any, convention: str = "cache", budget: Any = BUDGET) -> SinkCache:
    return SinkCache(model, StreamingLLM(num_sinks=4), budget=budget, positions=convention)  # type: ignore[arg-type]


def step(model: Any, cache: Any, ids: Tensor, **extra: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **extra).logits


def read(model: Any, cache: Any, ids: Tensor, chunks: list[int]) -> Tensor:
    assert sum(chunks) == ids.shape[1]
    return torch.cat([step(model, cache, piece) for piece in ids.split(chunks, dim=1)], dim=1)


def masked(model: Any, cache: Any, ids: Tensor, mask: Tensor, chunks: list[int]) -> Tensor:
    """Logits of passes that are given a mask as wide as what was seen and is new, and no positions."""
    logits, seen = [], 0
    for piece in ids.split(chunks, dim=1):
        seen += piece.shape[1]
        logits.append(step(model, cache, piece, attention_mask=mask[:, :seen]))
    return torch.cat(logits, dim=1)


def generate(model: Any, cache: Any, ids: Tensor, count: int, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=count, **{cache_argument(model): cache}, **options)


def expected(model: Any, row: Tensor, chunks: list[int], convention: str = "cache", budget: int = BUDGET) -> Tensor:
    ids = row.tolist()
    assert sum(chunks) == len(ids)
    if convention == "original":
        return oracles.by_mask(model, ids, chunks, budget, SINKS)
    return oracles.by_module(model, ids, chunks, budget, SINKS, convention)


def alone(model: Any, row: Tensor, shown: Tensor, chunks: list[int], convention: str = "cache") -> Tensor:
    """What the shown tokens of a row give when they are read without the hidden ones."""
    real = [int(piece.sum()) for piece in shown.split(chunks)]
    return expected(model, row[shown.bool()], [count for count in real if count], convention)


def same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)  # float64


# left padding


def padded(pads: list[int], width: int, more: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows whose first tokens are padding, with `more` tokens behind `width`."""
    mask = torch.ones(len(pads), width + more, dtype=torch.int64)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return tokens(width + more, batch=len(pads)) * mask, mask


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_padded_rows_generate_what_they_generate_alone(model, family, convention):
    if family == "gemma3" and not PADS_BESIDE_WINDOWS:
        pytest.skip("refused before transformers 5.14, see tests/test_padding.py")
    tiny = model(family)
    ids, mask = padded([0, 10], 30, 0)
    options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    out = generate(tiny, bounded(tiny, convention), ids, 20, **options)
    for row, pad in enumerate((0, 10)):
        whole = out.sequences[row, pad:-1]
        wanted = expected(tiny, whole, [30 - pad, *[1] * 19], convention)[29 - pad :]
        got = torch.stack([logits[row] for logits in out.logits]).double()
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)  # generate rounds logits to float32
        assert out.sequences[row, 30:].tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_padded_rows_equal_themselves_alone_at_every_step_of_a_loop(model, convention):
    llama, pads, chunks = model("llama"), [0, 10], [30, *[1] * 20]
    ids, mask = padded(pads, 30, 20)
    logits = masked(llama, bounded(llama, convention), ids, mask, chunks)
    for row, pad in enumerate(pads):
        same(logits[row, pad:], alone(llama, ids[row], mask[row], chunks, convention))


def test_sinks_are_each_rows_first_real_tokens(model):
    llama, pads = model("llama"), [0, 1, 5, 19]
    ids, mask = padded(pads, 24, 0)
    cache = bounded(llama)
    prefill(llama, cache, ids, attention_mask=mask)
    kept = cache.kept(0)
    assert kept.shape == (4, 2, 16)
    for row, pad in enumerate(pads):
        real = 24 - pad
        held = [0, 1, 2, 3, *range(real - 12, real)] if real > 16 else [*[-1] * (16 - real), *range(real)]
        assert kept[row].tolist() == [held] * 2


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("chunk", [8, 30])
def test_padding_longer_than_sinks_budget_and_chunk_is_never_seen(model, chunk, convention):
    llama, pads = model("llama"), [25, 0, 7]
    ids, mask = padded(pads, 30, 14)
    cache = bounded(llama, convention)
    logits = [prefill(llama, cache, ids[:, :30], chunk=chunk, attention_mask=mask[:, :30])]
    logits += [step(llama, cache, ids[:, at : at + 1], attention_mask=mask[:, : at + 1])[:, -1] for at in range(30, 44)]
    chunks = [*[chunk] * (30 // chunk), *([30 % chunk] if 30 % chunk else []), *[1] * 14]
    for row in range(3):
        same(torch.stack(logits)[:, row], alone(llama, ids[row], mask[row], chunks, convention)[-15:])


WAYS: dict[str, Callable[..., Any]] = {
    "pass": lambda model, cache, ids, **mask: step(model, cache, ids, **mask),
    "prefill": lambda model, cache, ids, **mask: prefill(model, cache, ids, **mask),
    "generate": lambda model, cache, ids, **mask: generate(model, cache, ids, 3, **mask),
}


@pytest.mark.parametrize("way", ["pass", "prefill"])
def test_padding_without_a_mask_is_an_error_that_names_it(model, way):
    llama = model("llama")
    ids, _ = padded([3, 0], 12, 0)
    cache = bounded(llama)
    with pytest.raises(ValueError, match="attention_mask"):
        WAYS[way](llama, cache, ids)
    assert cache.seen == 0


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_one_padded_row_is_the_row_without_its_padding(model, convention):
    llama, chunks = model("llama"), [20, *[1] * 10]
    ids, mask = padded([10], 20, 10)
    logits = masked(llama, bounded(llama, convention), ids, mask, chunks)
    same(logits[0, 10:], alone(llama, ids[0], mask[0], chunks, convention))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("way", ["loop", "generate"])
def test_a_row_with_a_hole_is_the_row_without_it(model, way, convention):
    llama, ids = model("llama"), tokens(35, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 7] = 0
    if way == "loop":
        chunks = [20, *[1] * 15]
        logits = masked(llama, bounded(llama, convention), ids, mask, chunks)
        for row in (0, 1):
            same(logits[row][mask[row].bool()], alone(llama, ids[row], mask[row], chunks, convention))
    else:
        out = generate(llama, bounded(llama, convention), ids[:, :20], 15, attention_mask=mask[:, :20])
        for row in (0, 1):
            whole = out[row, :-1][mask[row, :34].bool()]
            real = int(mask[row, :20].sum())
            wanted = expected(llama, whole, [real, *[1] * 14], convention)[real - 1 :].argmax(-1)
            assert out[row, 20:].tolist() == wanted.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_right_padding_is_an_error_that_says_so(model, way):
    llama, ids = model("llama"), tokens(12, batch=2)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with pytest.raises(ValueError, match="right"):
        WAYS[way](llama, bounded(llama), ids, attention_mask=mask)


def test_a_row_that_ends_before_the_others_is_an_error(model):
    llama, ids = model("llama"), tokens(12, batch=2)
    cache, mask = bounded(llama), torch.ones_like(ids)
    step(llama, cache, ids[:, :11])
    mask[1, -1] = 0
    with pytest.raises(ValueError, match="right"):
        step(llama, cache, ids[:, 11:], attention_mask=mask)


# going back


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_the_same_tokens_after_a_crop_give_the_same_logits(model, family, convention):
    tiny, ids = model(family), tokens(36)
    cache = bounded(tiny, convention, budget=24)
    before = read(tiny, cache, ids[:, :20], [17, 3])
    cache.crop(-3)
    assert cache.seen == cache.get_seq_length() == 17
    assert cache.kept(1)[0, 0].tolist() == list(range(17))
    same(step(tiny, cache, ids[:, 17:20]), before[:, 17:])
    after = read(tiny, cache, ids[:, 20:], [1] * 16)  # nothing stale is left behind
    same(after[0], expected(tiny, ids[0], [17, 3, *[1] * 16], convention, budget=24)[20:])


@pytest.mark.parametrize("count", [-1, -3, -20])
def test_a_crop_after_an_eviction_is_an_error_and_changes_nothing(model, count):
    llama, ids = model("llama"), tokens(40)
    cache, twin = bounded(llama), bounded(llama)
    for each in (cache, twin):
        read(llama, each, ids[:, :20], [10, *[1] * 10])
    with pytest.raises(ValueError, match="evict"):
        cache.crop(count)
    assert torch.equal(read(llama, cache, ids[:, 20:], [1] * 20), read(llama, twin, ids[:, 20:], [1] * 20))


def test_a_crop_to_a_length_is_an_error(model):
    cache = bounded(model("llama"))
    step(model("llama"), cache, tokens(10))
    with pytest.raises(ValueError, match="3"):
        cache.crop(3)
    assert cache.seen == 10


@pytest.mark.skipif(not PADS_BESIDE_WINDOWS, reason="before transformers 5.14 assisted decoding gives a length to keep")
def test_assisted_decoding_within_the_budget_says_what_greedy_decoding_does(model):
    llama, helper = model("llama"), build("llama", seed=1, num_hidden_layers=1)
    full = generate(llama, DynamicCache(config=llama.config), tokens(9), 30)
    cache = bounded(llama, budget=64)
    assert torch.equal(generate(llama, cache, tokens(9), 30, assistant_model=helper), full)
    assert cache.seen == full.shape[1] - 1  # the tokens accepted and read, none of the assistant's own
    assert torch.equal(generate(llama, bounded(llama, budget=64), tokens(9), 30, prompt_lookup_num_tokens=3), full)


@pytest.mark.parametrize("how", [{"assistant_model": 1}, {"prompt_lookup_num_tokens": 3}], ids=["model", "lookup"])
def test_assisted_decoding_that_would_evict_is_an_error(model, how):
    llama = model("llama")
    if "assistant_model" in how:
        how = {"assistant_model": build("llama", seed=1, num_hidden_layers=1)}
    with pytest.raises(ValueError, match=r"evict|[Aa]ssisted"):
        generate(llama, bounded(llama), tokens(9), 40, **how)


# copies, in memory and on disk


def test_what_a_fork_reads_does_not_reach_the_original(model):
    llama, ids = model("llama"), tokens(60)
    cache, twin = bounded(llama), bounded(llama)
    for each in (cache, twin):
        read(llama, each, ids[:, :30], [20, *[1] * 10])
    fork = cache.fork()
    generate(llama, fork, ids[:, :35], 10)
    assert (fork.seen, cache.seen) == (44, 30)
    assert torch.equal(read(llama, cache, ids[:, 30:], [1] * 30), read(llama, twin, ids[:, 30:], [1] * 30))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_rows_of_a_fork_go_on_as_if_alone(model, convention):
    llama, ids, more = model("llama"), tokens(30), tokens(12, batch=3, seed=32)
    cache = bounded(llama, convention)
    read(llama, cache, ids, [30])
    logits = read(llama, cache.fork(batch=3), more, [1] * 12)
    for row in range(3):
        whole = torch.cat([ids[0], more[row]])
        same(logits[row], expected(llama, whole, [30, *[1] * 12], convention)[30:])


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_a_cache_from_disk_goes_on_as_the_one_that_was_saved(model, family, convention, tmp_path):
    tiny, ids = model(family), tokens(120)
    cache = bounded(tiny, convention)
    read(tiny, cache, ids[:, :100], [30, *[1] * 70])
    cache.save(tmp_path / "cache.safetensors")
    loaded = SinkCache.load(tmp_path / "cache.safetensors", tiny)
    full = [index for index, layer in enumerate(cache.layers) if type(layer).__name__ == "SinkLayer"]
    assert loaded.seen == 100
    assert all(torch.equal(loaded.kept(layer), cache.kept(layer)) for layer in full)
    rows = [[line.split()[:-1] for line in each.describe().splitlines()] for each in (loaded, cache)]
    assert rows[0] == rows[1]  # but for the bytes of native layers, which slice longer storage
    assert torch.equal(read(tiny, loaded, ids[:, 100:], [1] * 20), read(tiny, cache, ids[:, 100:], [1] * 20))


def saved(model: Any, path: Any) -> bytes:
    cache = bounded(model)
    read(model, cache, tokens(40), [20, *[1] * 20])
    cache.save(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"seed": 5},
    ],
    ids=["rotation", "layers", "heads", "weights"],
)
def test_a_file_of_another_model_is_an_error(model, changes, tmp_path):
    saved(model("llama"), tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match=r"model|layers|heads|weights"):
        SinkCache.load(tmp_path / "cache.safetensors", build("llama", **changes))


def test_a_file_cut_short_is_an_error(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    whole = saved(model("llama"), path)
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"file|saved|header|cut"):
            SinkCache.load(path, model("llama"))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_file_of_another_convention_is_an_error(model, convention, tmp_path):
    path, other = tmp_path / "cache.safetensors", "original" if convention == "cache" else "cache"
    cache = bounded(model("llama"), convention)
    read(model("llama"), cache, tokens(40), [20, *[1] * 20])
    cache.save(path)
    with pytest.raises(ValueError, match="positions"):
        SinkCache.load(path, model("llama"), positions=other)  # type: ignore[arg-type]


def test_a_file_with_another_convention_in_its_header_is_an_error(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    saved(model("llama"), path)
    with safe_open(path, "pt") as file:
        header = dict(file.metadata())
    changed = {
        name: "original" if text == "cache" else text.replace('"cache"', '"original"') for name, text in header.items()
    }
    assert changed != header
    save_file(load_file(path), path, changed)
    with pytest.raises(ValueError, match=r"file|saved|header|cut"):
        SinkCache.load(path, model("llama"))


def test_a_file_whose_keys_were_changed_is_an_error(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    whole = bytearray(saved(model("llama"), path))
    whole[-100] ^= 64
    path.write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=r"file|saved|header|cut"):
        SinkCache.load(path, model("llama"))


# turns


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_turn_of_new_ids_is_the_turn_of_the_whole_history(model, convention):
    llama, texts = model("llama"), []
    for short in (True, False):
        cache = bounded(llama, convention)
        out = generate(llama, cache, tokens(9), 12)
        history = out
        for seed in (41, 42):
            new = tokens(6, seed=seed)
            history = torch.cat([history, new], dim=1)
            if short:
                out = llama.generate(**turn(llama, cache, new, output=out), max_new_tokens=12, do_sample=False)
                history = torch.cat([history, out[:, -12:]], dim=1)
            else:
                history = generate(llama, cache, history, 12)
        texts.append(history)
        assert cache.seen == history.shape[1] - 1
    assert torch.equal(*texts)
    chunks = [9, *[1] * 11, 7, *[1] * 11, 7, *[1] * 11]
    assert texts[0][0, 45:].tolist() == expected(llama, texts[0][0, :-1], chunks, convention)[44:].argmax(-1).tolist()


# one prompt, several rows


def test_a_prefilled_prompt_serves_beams(model):
    llama, ids = model("llama"), tokens(30)
    cache = bounded(llama)
    prefill(llama, cache, ids[:, :-1])
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "output_scores": True}
    out = generate(llama, cache, ids, 12, return_dict_in_generate=True, **options)
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        wanted = expected(llama, row[:-1], [29, *[1] * 12])[29:]
        chosen = wanted.log_softmax(-1).gather(1, row[30:, None]).sum()
        torch.testing.assert_close(score.double(), chosen, rtol=1e-5, atol=1e-4)  # 12 scores in float32, summed


def test_a_prefilled_prompt_serves_several_samples(model):
    llama, ids = model("llama"), tokens(30)
    cache = bounded(llama)
    prefill(llama, cache, ids[:, :-1])
    options = {"do_sample": True, "num_return_sequences": 3, "output_logits": True, "return_dict_in_generate": True}
    out = generate(llama, cache, ids, 12, **options)
    assert len({tuple(row.tolist()) for row in out.sequences}) == 3
    for row, logits in zip(out.sequences, torch.stack(out.logits, dim=1), strict=True):
        wanted = expected(llama, row[:-1], [29, *[1] * 12])[29:]
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)  # generate rounds to float32


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_prefilled_prompt_serves_the_rows_of_a_batch(model, convention):
    llama, ids, more = model("llama"), tokens(30), tokens(12, batch=3, seed=32)
    cache = bounded(llama, convention)
    prefill(llama, cache, ids)
    logits = read(llama, cache, more, [3, *[1] * 9])
    for row in range(3):
        whole = torch.cat([ids[0], more[row]])
        same(logits[row], expected(llama, whole, [30, 3, *[1] * 9], convention)[30:])


# a budget for each layer


@torch.no_grad()
def by_layer(model: Any, ids: list[int], chunks: list[int], budgets: list[int], convention: str) -> Tensor:
    """As `oracles.by_module`, with a budget for each layer."""
    books = [list(oracles.steps(chunks, budget, SINKS)) for budget in budgets]
    angles: dict[Any, tuple[Tensor, Tensor]] = {}
    inputs: dict[Any, list[Tensor]] = {}

    def note(module: Any, given: dict[str, Any]) -> None:
        angles[module] = given["position_embeddings"]
        inputs[module] = []

    with oracles._each_attention(model, note):
        model(input_ids=torch.tensor([ids]), use_cache=False)
    logits = []
    for at in range(len(chunks)):

        def substitute(module: Any, given: dict[str, Any], at: int = at) -> None:
            held, new, _ = books[module.layer_idx][at]
            places = oracles._positions(held, new, convention)
            cos, sin = angles[module]
            shown = torch.tensor([[key <= query for key in held + new] for query in new])
            given["attention_mask"] = oracles._additive(shown)
            given["position_embeddings"] = cos[:, places[len(held) :]], sin[:, places[len(held) :]]
            name = oracles._cache_name(module)
            given[name] = oracles._Given()
            if held:
                before = cos[:, places[: len(held)]], sin[:, places[: len(held)]]
                again = {**given, "attention_mask": None, "position_embeddings": before}
                again["hidden_states"] = torch.cat([inputs[module][position] for position in held], 1)
                module.forward(**again)
                given[name] = oracles._Given(again[name].keys, again[name].values)
            inputs[module] += list(given["hidden_states"].split(1, dim=1))

        with oracles._each_attention(model, substitute):
            new = books[0][at][1]
            logits.append(model(input_ids=torch.tensor([ids])[:, new], use_cache=False).logits[0])
    return torch.cat(logits)


def test_the_reference_by_layer_is_the_reference_where_budgets_are_equal(model):
    llama, ids, chunks = model("llama"), tokens(30)[0].tolist(), [11, *[1] * 12, 7]
    same(by_layer(llama, ids, chunks, [8, 8], "cache"), oracles.by_module(llama, ids, chunks, 8, SINKS, "cache"))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", [[30, *[1] * 20], [5, 9, 1, 1, 20, 1, 13]], ids=["one shot", "mixed"])
def test_layers_of_different_budgets_equal_the_reference(model, implementation, convention, chunks):
    llama = model("llama", num_hidden_layers=3, attn_implementation=implementation)
    ids, budgets = tokens(50), [16, 32, 8]
    cache = bounded(llama, convention, budgets)
    logits = read(llama, cache, ids, chunks)[0]
    assert [cache.kept(layer).shape[2] for layer in range(3)] == budgets
    wanted = by_layer(llama, ids[0].tolist(), chunks, budgets, convention)
    if implementation == "eager":
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)  # eager code has its softmax in float32
    else:
        same(logits, wanted)


# torch.compile


def test_a_compiled_model_computes_what_the_plain_one_does_and_settles(model):
    tiny: Any = build("llama", dtype=torch.float32)
    ids, counted, frames = tokens(120), CompileCounter(), []
    torch.compiler.reset()
    compiled = torch.compile(tiny, backend=counted)
    cache, twin = bounded(tiny), bounded(tiny)
    for at in range(120):
        one, other = step(compiled, cache, ids[:, at : at + 1]), step(tiny, twin, ids[:, at : at + 1])
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # float32
        frames.append(counted.frame_count)
    torch.compiler.reset()
    assert frames[-1] == frames[19]  # the window is full
    assert cache.is_compileable is False
