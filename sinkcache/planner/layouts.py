"""Which layer of a model is of which kind, and what it stores: the rules of transformers 5.24, family by family."""

from typing import Any

from sinkcache.planner.fields import Fields
from sinkcache.planner.kinds import Kind, Layer
from sinkcache.planner.states import state_of

# What files call a kind of layer, now and before transformers 5.
_TYPES: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "full",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "conv",
    "hybrid": "hybrid",
    "moe": "none",
    "mlp": "none",
}
_STATES = {"linear_conv_kernel_dim", "mamba_d_state", "state_size", "ssm_state_size"}  # fields that tell of one
_MOST_LAYERS = 10_000
_LETTERS: dict[str, Kind] = {"M": "linear", "*": "full", "E": "none", "-": "none"}  # of Nemotron-H's pattern


def layers_of(fields: Fields) -> tuple[Layer, ...]:
    """The layers of a model; raises ValueError, which names the field, for contradictions and unknown kinds."""
    kinds = _kinds(fields)
    if fields.model_type == "gemma4_text":  # its class has the last layer keep everything, whatever the list says
        kinds[-1] = "full"
    if fields.family.decoder:
        return tuple(each for _ in kinds for each in (_attention(fields, "full"), _attention(fields, "cross")))
    shared = fields.whole("num_kv_shared_layers", 0) if "num_kv_shared_layers" in fields.family.defaults else 0
    if shared >= len(kinds):
        raise ValueError(f"config field num_kv_shared_layers = {shared} leaves no layer of {len(kinds)} to share from")
    sharing: list[Kind] = ["shared"] * shared
    kinds[len(kinds) - shared :] = sharing
    made: dict[Kind, Layer] = {}
    for kind in kinds:
        if kind not in made:
            made[kind] = _layer(fields, kind)
    return tuple(made[kind] for kind in kinds)


def _kinds(fields: Fields) -> list[Kind]:
    pattern = fields.config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"config field hybrid_override_pattern must be a letter for each layer, got {pattern!r}")
        unknown = set(pattern) - set(_LETTERS)
        if unknown:
            raise ValueError(f"config field hybrid_override_pattern has {min(unknown)!r}, a kind no rule is known for")
        if "num_hidden_layers" in fields.config and len(pattern) != (number := fields.whole("num_hidden_layers")):
            raise ValueError(
                f"config fields contradict: hybrid_override_pattern has {len(pattern)} letters, num_hidden_layers is "
                f"{number}"
            )
        return [_LETTERS[letter] for letter in pattern]
    for name in ("layer_types", "layers_block_type"):
        if fields.config.get(name) is not None:
            given = _entries(fields, name)
            return _nope(fields, [_kind(fields, name, index, each) for index, each in enumerate(given)])
    return _nope(fields, [_by_pattern(fields, index) for index in range(_number(fields))])


def _number(fields: Fields) -> int:
    if fields.model_type == "t5" and "num_decoder_layers" not in fields.config and "num_layers" in fields.config:
        return fields.derived("num_hidden_layers", fields.whole("num_layers"), "as many as the encoder has")
    number = fields.whole("num_hidden_layers")
    if number > _MOST_LAYERS:
        raise ValueError(f"config field num_hidden_layers = {number:,} is more layers than any model has")
    return number


def _entries(fields: Fields, name: str) -> list[Any]:
    """A list with an entry for each layer."""
    given = fields.config[name]
    if not isinstance(given, list) or not given:
        raise ValueError(f"config field {name} must be a list with an entry for each layer, got {given!r}")
    if "num_hidden_layers" in fields.config and len(given) != (number := fields.whole("num_hidden_layers")):
        raise ValueError(f"config fields contradict: {name} has {len(given)} entries, num_hidden_layers is {number}")
    return given


def _kind(fields: Fields, name: str, index: int, given: Any) -> Kind:
    if not isinstance(given, str) or given not in _TYPES:
        raise ValueError(f"config field {name}[{index}] = {given!r} is a kind of layer that no rule is known for")
    kind, reads = _TYPES[given], fields.family.reads
    known = {
        "linear": bool(_STATES & set(reads)),
        "conv": "conv_L_cache" in reads,
        "hybrid": fields.family.pattern == "both",
        "full": given != "indexed_attention" or "index_head_dim" in reads,
    }
    if not known.get(kind, True):
        raise ValueError(f"config field {name}[{index}] = {given!r} is no kind of layer that {fields.model_type} has")
    if kind == "sliding" and _window(fields, kind) is None:
        raise ValueError(
            f"config fields contradict: {name}[{index}] = {given!r}, and sliding_window is null or not used"
        )
    return kind


def _by_pattern(fields: Fields, index: int) -> Kind:
    """The kind of a layer where no list says."""
    match fields.family.pattern:
        case "alike":
            return "full" if _window(fields, "sliding") is None else "sliding"
        case "period":
            if _window(fields, "sliding") is None:
                return "full"
            return "sliding" if (index + 1) % fields.whole("sliding_window_pattern") else "full"
        case "upper":
            used = _window(fields, "sliding") is not None and index >= fields.whole("max_window_layers", 0)
            return "sliding" if used else "full"
        case "rotary":
            return _of_rotary(fields, index)
        case "interval":
            return "linear" if (index + 1) % fields.whole("full_attention_interval") else "full"
        case "listed":
            return _of_list(fields, index)
        case "states":
            return "linear"
        case "both":
            return "hybrid"
        case "cross":
            return "cross" if index in fields.indices("cross_attention_layers") else "full"


def _of_rotary(fields: Fields, index: int) -> Kind:
    """Llama 4 cuts the layers that turn into chunks; SmolLM3 may let those slide that do not."""
    if "attention_chunk_size" in fields.family.reads:
        return "chunked" if _turns(fields, index) and fields.get("attention_chunk_size") is not None else "full"
    return "full" if _turns(fields, index) or _window(fields, "sliding") is None else "sliding"


def _of_list(fields: Fields, index: int) -> Kind:
    """Layers that a list of their own says have attention; the others have a state."""
    if "conv_L_cache" in fields.family.reads:
        every = fields.get("full_attn_idxs") is None
        return "full" if every or index in fields.indices("full_attn_idxs") else "conv"
    if "attn_layer_period" in fields.family.defaults:
        return "full" if index % fields.whole("attn_layer_period") == fields.whole("attn_layer_offset", 0) else "linear"
    if "hybrid_override_pattern" in fields.family.reads:
        raise ValueError("config fields hybrid_override_pattern and layers_block_type are missing")
    return "full" if index in fields.indices("attn_layer_indices") else "linear"


def _nope(fields: Fields, kinds: list[Kind]) -> list[Kind]:
    """`kinds`, full layers that do not turn by their position told apart."""
    if "no_rope_layer_interval" not in fields.family.defaults:
        return kinds
    return ["nope" if kind == "full" and not _turns(fields, index) else kind for index, kind in enumerate(kinds)]


def _turns(fields: Fields, index: int) -> bool:
    if fields.config.get("no_rope_layers"):
        given = _entries(fields, "no_rope_layers")
        if index >= len(given):
            raise ValueError(f"config field no_rope_layers has {len(given)} entries, and there are more layers")
        return bool(given[index])
    return (index + 1) % fields.whole("no_rope_layer_interval") != 0


def _window(fields: Fields, kind: Kind) -> int | None:
    """The window of layers of that kind: None where null says that there is none, or the class does."""
    if kind == "chunked":
        return fields.whole("attention_chunk_size")
    if "use_sliding_window" in fields.family.defaults and not fields.get("use_sliding_window"):
        return None
    window = fields.get("sliding_window")
    return None if window is None else fields.whole("sliding_window")


def _layer(fields: Fields, kind: Kind) -> Layer:
    if kind in ("shared", "none"):
        return Layer(kind)
    if kind in ("linear", "conv"):
        return Layer(kind, state=state_of(fields))
    if "kv_lora_rank" in fields.family.reads:
        return _latent(fields)
    return _attention(fields, kind)


def _attention(fields: Fields, kind: Kind) -> Layer:
    heads = fields.whole("num_attention_heads")
    kv_heads, dim = _kv_heads(fields, heads), _head_dim(fields, heads)
    if kind == "full" and "global_head_dim" in fields.family.defaults:  # Gemma 4
        dim = fields.whole("global_head_dim")
        if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
            kv_heads = fields.whole("num_global_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"config fields contradict: num_attention_heads {heads} is no multiple of {kv_heads} key heads"
        )
    rotary = 0 if kind in ("nope", "cross") else _rotary(fields, dim)
    state = state_of(fields) if kind == "hybrid" else None
    window = _window(fields, kind) if kind in ("sliding", "chunked") else None
    return Layer(kind, heads, kv_heads, dim, dim, rotary, window, state)


def _latent(fields: Fields) -> Layer:
    """Latent attention: of each token one latent for all heads, and one key that turns."""
    rank, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
    heads, nope = fields.whole("num_attention_heads"), fields.whole("qk_nope_head_dim")
    extra = fields.whole("index_head_dim") if "index_head_dim" in fields.family.reads else 0
    unpacked = heads * (nope + rope + fields.whole("v_head_dim"))
    return Layer("mla", heads, 1, rank, rope, rope, extra=extra, unpacked=unpacked)


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.model_type == "falcon":  # grouped in newer files, one head or all in older ones
        grouped, single = fields.get("new_decoder_architecture"), fields.get("multi_query")
        given = heads if fields.get("num_kv_heads") is None else fields.whole("num_kv_heads")
        return given if grouped or not single else 1
    if fields.get("num_key_value_heads") is None:
        return fields.derived("num_key_value_heads", heads, "as many as attention heads")
    return fields.whole("num_key_value_heads")


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.whole("head_dim")
    hidden = fields.whole("hidden_size")
    dim, rest = divmod(hidden, heads)
    if rest or (fields.family.rotary and dim % 2):
        raise ValueError(
            f"config field head_dim is null or missing, and hidden_size {hidden} / num_attention_heads {heads} = "
            f"{hidden / heads:g} cannot be it: heads that turn have an even number of channels. Give head_dim"
        )
    return fields.derived("head_dim", dim, "hidden_size / num_attention_heads")


def _rotary(fields: Fields, dim: int) -> int:
    """Channels of a key that turn with its position."""
    if fields.model_type == "gptj":
        return fields.whole("rotary_dim", 0) if fields.config.get("rotary_dim") else 64
    rope = fields.config.get("rope_parameters")
    nested = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    written = (nested, fields.config.get("partial_rotary_factor"), fields.config.get("rotary_pct"))
    share = next((each for each in written if each is not None), fields.family.rotary)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"the share of a head's channels that turn must be in [0, 1], got {share!r}")
    return int(dim * share)
