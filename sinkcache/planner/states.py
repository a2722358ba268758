"""What a layer keeps of a conversation whatever its length: the rules of transformers 5.24, family by family."""

from sinkcache.planner.fields import Fields
from sinkcache.planner.kinds import State


def state_of(fields: Fields) -> State:
    """The state of a layer: Gated DeltaNet, a short convolution, or one of the Mambas."""
    reads, whole = fields.family.reads, fields.whole
    if "linear_conv_kernel_dim" in reads:
        keys = whole("linear_num_key_heads") * whole("linear_key_head_dim")
        heads, dim = whole("linear_num_value_heads"), whole("linear_value_head_dim")
        recurrent = heads * whole("linear_key_head_dim") * dim
        return State(2 * keys + heads * dim, whole("linear_conv_kernel_dim"), recurrent)
    if "conv_L_cache" in reads:
        return State(whole("hidden_size"), whole("conv_L_cache"))
    if "ssm_state_size" in reads:
        width, size = whole("mamba_num_heads") * whole("mamba_head_dim"), whole("ssm_state_size")
        return State(width + 2 * whole("n_groups") * size, whole("conv_kernel"), width * size)
    if "state_size" in reads:
        width, size = whole("expand") * whole("hidden_size"), whole("state_size")
        groups = whole("n_groups") if "n_groups" in fields.family.defaults else 0
        return State(width + 2 * groups * size, whole("conv_kernel"), width * size)
    width = whole("mamba_d_ssm") if fields.get("mamba_d_ssm") else whole("mamba_expand") * whole("hidden_size")
    groups = whole("mamba_n_groups") if "mamba_n_groups" in fields.family.defaults else 0
    size = whole("mamba_d_state")
    return State(width + 2 * groups * size, whole("mamba_d_conv"), width * size)
