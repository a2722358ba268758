"""A synthetic language with something to do now and then, and the small model that learns it.

Idea: Bigram-Backcopy (Guo et al., 2024, arXiv 2410.13835). A stream begins with BOS; a character follows the one before
it as often as in a text, but after one of three trigger characters comes, once more, the character before the trigger.
An attention head has work at a trigger only. Everywhere else it had best bring nothing, and a softmax must look
somewhere: the first token serves.

The model is transformers' `GPTNeoXForCausalLM` and narrower than the vocabulary, so what attention brings in vain is in
the way of the rest.

Differs: characters, bigrams and triggers (the most frequent three) are those of the embedded text. The first character
is no trigger, so none copies BOS, and no two triggers come to copy each other forever.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from experiments.results import Row
from sinkcache.texts import Text

SYNTHETIC = "a synthetic task (Bigram-Backcopy) and no language: nothing here is a claim about natural text"
CONTROLS = {"none": "bos", "no-bos": "anywhere"}  # where streams begin
FIXED = {"betas": [0.9, 0.95], "weight_decay": 1e-4, "warm_up": 50, "clip": 1.0, "rotary": 0.25}  # AdamW's; the model's
VOCABULARY, TRIGGERS = 64, 3
BOS, UNKNOWN = "<bos>", "<unk>"  # ids 0 and 1; then characters, the most frequent first
FIRST_QUERY = 64  # earlier queries see few tokens, and the first among them always
HELD_OUT_SEED = 2**32 - 1  # of the streams that are measured on; training has the seeds below
HELD_OUT_STREAMS, HELD_OUT_TEXT = 64, 2**13
_EVERY = 10  # steps between two reports
Tell = Callable[[Row], None]  # is told of a step and its loss, or of all that was found at a checkpoint


@dataclass(frozen=True)
class Recipe:
    """What is trained: a model, on streams of `tokens` tokens, `batch` a step, with checkpoints after `steps`."""

    seed: int
    control: str
    steps: list[int]
    width: int
    layers: int
    heads: int
    tokens: int
    batch: int
    lr: float

    def check(self) -> None:
        """Raises ValueError if there is no such model, or nothing of it to measure."""
        if self.width % (8 * self.heads):
            raise ValueError(f"--width {self.width} must be a multiple of 8 for each of --heads {self.heads}")
        if self.tokens < FIRST_QUERY + 2:
            raise ValueError(f"--tokens must be {FIRST_QUERY + 2} or more, got {self.tokens}: queries count from 64 on")
        if self.seed >= HELD_OUT_SEED - 1:
            raise ValueError(f"--seeds must be below {HELD_OUT_SEED - 1}, got {self.seed}: later ones are held out")

    def settings(self) -> Row:
        """All of it by name, and what is never otherwise."""
        return {**asdict(self), **FIXED}

    def model(self) -> GPTNeoXForCausalLM:
        """A new model with the seed's weights; torch's own random state stays as it was."""
        config = GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.tokens,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": FIXED["rotary"]},
            use_parallel_residual=False,
            attention_bias=False,
            bos_token_id=0 if CONTROLS[self.control] == "bos" else None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GPTNeoXForCausalLM(config)


@dataclass(frozen=True)
class Backcopy:
    """The process: its `characters` from id 2 on, those that trigger, and where each leads.

    `begin` is "bos", or "anywhere": the same streams without BOS, whose first token is an ordinary character.
    """

    characters: str
    triggers: str
    begin: str
    cumulative: Float[Tensor, "vocabulary vocabulary"] = field(repr=False)
    """By id, the distribution of the next, summed up; the first row leads from BOS."""

    def streams(self, batch: int, tokens: int, generator: torch.Generator) -> Int[Tensor, "batch tokens"]:
        """New streams, one a row."""
        length = tokens + (self.begin == "anywhere")
        ids = torch.zeros(batch, length, dtype=torch.int64)
        draws = torch.rand(length, batch, 1, dtype=torch.float64, generator=generator)
        triggers = torch.isin(torch.arange(VOCABULARY), torch.tensor(self.ids_of(self.triggers)))
        for t in range(1, length):
            last = ids[:, t - 1]
            drawn = torch.searchsorted(self.cumulative[last], draws[t], right=True)[:, 0]
            ids[:, t] = torch.where(triggers[last], ids[:, t - 2], drawn)  # neither of the first two triggers
        return ids[:, length - tokens :]

    def triggered(self, ids: Int[Tensor, "batch tokens"]) -> Bool[Tensor, "batch tokens"]:
        """Which tokens are triggers: as queries these have to copy, and the others have not."""
        return torch.isin(ids, torch.tensor(self.ids_of(self.triggers)))

    def ids_of(self, text: str) -> list[int]:
        """The ids of characters of this language."""
        return [2 + self.characters.index(each) for each in text]

    def text_of(self, ids: Int[Tensor, " tokens"]) -> str:
        """The characters of a stream, BOS left out."""
        return "".join(self.characters[each - 2] for each in ids.tolist() if each >= 2)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A token for each character, and BOS in front if streams begin so."""
        known = {name: index for index, name in enumerate([BOS, UNKNOWN, *self.characters])}
        plain = tokenizers.Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
        each = tokenizers.Regex(r"[\s\S]")
        plain.pre_tokenizer = pre_tokenizers.Split(each, "isolated")  # type: ignore[assignment]
        plain.decoder = decoders.Fuse()  # type: ignore[assignment]
        named: dict[str, Any] = {}
        if self.begin == "bos":
            front = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A $B", [(BOS, 0)])
            plain.post_processor = front  # type: ignore[assignment]
            named = {"bos_token": BOS}
        return PreTrainedTokenizerFast(
            tokenizer_object=plain, unk_token=UNKNOWN, clean_up_tokenization_spaces=False, **named
        )


def backcopy(text: Text, begin: str = "bos") -> Backcopy:
    """The process made of the most frequent characters of `text`; what is rarer is left out of it."""
    characters = "".join(each for each, _ in Counter(text.text).most_common(VOCABULARY - 2))
    known = {each: 2 + index for index, each in enumerate(characters)}
    ids = torch.tensor([known[each] for each in text.text if each in known])
    pairs = torch.bincount(ids[:-1] * VOCABULARY + ids[1:], minlength=VOCABULARY**2)
    counts = pairs.view(VOCABULARY, VOCABULARY).double()
    counts[0] = torch.bincount(ids, minlength=VOCABULARY)
    counts[0, 2 : 2 + TRIGGERS] = 0
    cumulative = counts.cumsum(1)
    return Backcopy(characters, characters[:TRIGGERS], begin, cumulative / cumulative[:, -1:])


class Training:
    """A model, its optimiser and its streams, after `step` steps."""

    def __init__(self, recipe: Recipe, process: Backcopy) -> None:
        self.recipe, self.process, self.model = recipe, process, recipe.model()
        betas, decay = (FIXED["betas"][0], FIXED["betas"][1]), FIXED["weight_decay"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), recipe.lr, betas, weight_decay=decay)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.step, self.checkpoints, self._began = 0, [], time.monotonic()

    def go_to(self, step: int, tell: Tell) -> None:
        """Trains up to `step`."""
        while self.step < step:
            ids = self.process.streams(self.recipe.batch, self.recipe.tokens, self.generator)
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.lr * min(1, (self.step + 1) / FIXED["warm_up"])
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), FIXED["clip"])
            self.optimizer.step()
            self.step += 1
            if self.step % _EVERY == 0:
                tell({"step": self.step, "loss": loss.item()})

    def seconds(self) -> float:
        """Since the beginning, without the time in which it was interrupted."""
        return time.monotonic() - self._began

    def state(self) -> dict[str, Any]:
        """All that going on depends on."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        told = {"step": self.step, "checkpoints": self.checkpoints, "seconds": self.seconds()}
        return {**parts, **told, "generator": self.generator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Comes to where another was."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step, self.checkpoints = state["step"], state["checkpoints"]
        self._began -= state["seconds"]


def held_out(process: Backcopy, tokens: int) -> Int[Tensor, "batch tokens"]:
    """The streams that are measured on, the same for every seed."""
    return process.streams(HELD_OUT_STREAMS, tokens, torch.Generator().manual_seed(HELD_OUT_SEED))


def held_out_files(process: Backcopy, tokens: int) -> dict[str, str]:
    """By file name, those streams with a mark at each trigger, and the characters of one long stream more."""
    ids = held_out(process, tokens)
    told = {
        "first_query": FIRST_QUERY,
        "begin": process.begin,
        "trigger_characters": process.triggers,
        "trigger_ids": process.ids_of(process.triggers),
        "uniform": _uniform(process, ids),
        "texts": [process.text_of(row) for row in ids],
        "ids": ids.tolist(),
        "trigger": process.triggered(ids).int().tolist(),
    }
    long = process.streams(1, HELD_OUT_TEXT, torch.Generator().manual_seed(HELD_OUT_SEED - 1))[0]
    return {"held_out.json": json.dumps(told) + "\n", "held_out.txt": process.text_of(long)}


@torch.no_grad()
def measured(folder: Path, process: Backcopy, tokens: int) -> Row:
    """Of the checkpoint in `folder`: losses in nats, and the first token's share by layer and head."""
    ids = held_out(process, tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    found = model(input_ids=ids, labels=ids, output_attentions=True, use_cache=False)
    first = torch.stack([layer[..., 0] for layer in found.attentions]).transpose(1, 2)  # layer, head, batch, query
    triggers, late = process.triggered(ids), torch.arange(ids.shape[1]) >= FIRST_QUERY
    shares = first[:, :, ~triggers & late].mean(-1)
    copies = cross_entropy(found.logits[:, :-1][triggers[:, :-1]], ids[:, 1:][triggers[:, :-1]])
    return {
        "loss": float(found.loss),
        "copy_loss": float(copies),
        "share": float(shares.max()),
        "x_uniform": float(shares.max()) / _uniform(process, ids),
        "shares": shares.tolist(),
        "trigger_shares": first[:, :, triggers & late].mean(-1).tolist(),
    }


def _uniform(process: Backcopy, ids: Int[Tensor, "batch tokens"]) -> float:
    """The first token's share if each query attended evenly to all it sees."""
    even = (1 / torch.arange(1.0, ids.shape[1] + 1)).expand(ids.shape)
    return float(even[:, FIRST_QUERY:][~process.triggered(ids)[:, FIRST_QUERY:]].mean())
