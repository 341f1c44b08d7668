"""Configuration of the exported class. Self-contained: it is shipped beside the weights, as its model is."""

from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

ROPE_TYPE = "per_layer_with_trust_remote_code"
"""No class but this one knows it: what is not this class, and would answer wrongly, refuses to be built with it."""


class DeepseekMLAConfig(DeepseekV3Config):
    """DeepSeek-V3's config and what a converted model has besides; all layers have one C and one R, no layer experts.

    Args:
        rope_inv_freq: per layer, the R/2 angular frequencies of its slots, radians a position; 0 for a slot not in use.
        rope_attention_scaling: the factor on cos and sin.
        attention_scale: the factor on the scores before the softmax; None for DeepSeek's (N + R)^-1/2.
        latent_norm_eps: the eps of ``kv_a_layernorm``; far above any latent's mean square it makes the norm a factor.
        query_bias, latent_bias, output_bias, mlp_bias: which projections carry a bias.
        layer_types, sliding_window: as in transformers; by default all layers attend fully.
    """

    model_type = "deepseek_mla"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - transformers' own convention

    q_lora_rank: int | None = None
    num_key_value_heads: int | None = None
    rope_interleave: bool | None = False
    rope_inv_freq: list | None = None
    rope_attention_scaling: float = 1.0
    attention_scale: float | None = None
    latent_norm_eps: float = 1e-6
    query_bias: bool = False
    latent_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_types: list | None = None
    sliding_window: int | None = None

    def __post_init__(self, **kwargs):
        self.first_k_dense_replace = self.num_hidden_layers
        # DeepSeek's attention in transformers 5.17 reads the factor of any type but the default one.
        self.rope_parameters = {"rope_type": ROPE_TYPE, "rope_theta": 10000.0, "factor": 1.0}
        cached = self.kv_lora_rank + self.qk_rope_head_dim
        self.rope_parameters["partial_rotary_factor"] = self.qk_rope_head_dim / cached
        slots = self.qk_rope_head_dim // 2
        if self.rope_inv_freq is None:
            row = [10000.0 ** (-slot / slots) for slot in range(slots)]
            self.rope_inv_freq = [row] * self.num_hidden_layers
        found = [len(row) for row in self.rope_inv_freq]
        if self.qk_rope_head_dim % 2 or found != [slots] * self.num_hidden_layers:
            raise ValueError(
                f"rope_inv_freq must hold R/2 frequencies for each of {self.num_hidden_layers} layers, R being even "
                f"and {self.qk_rope_head_dim}; found {found}"
            )
        if self.q_lora_rank is not None:
            raise ValueError(f"queries are not compressed: q_lora_rank must be null, got {self.q_lora_rank}")
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.attention_scale is None:
            self.attention_scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        super().__post_init__(**kwargs)
        # What is cached of a token. vLLM reads it here, as it does not know the model type.
        self.head_dim = cached

    def _validate_per_layer_with_trust_remote_code_rope_parameters(self, rope_parameters, ignore_keys=None):
        """Called by transformers by the name of the type; the frequencies are checked above."""


__all__ = ["DeepseekMLAConfig"]
