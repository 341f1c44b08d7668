"""Configuration of the native MLA model class. Self-contained: it is also shipped beside converted weights."""

from transformers.configuration_utils import PreTrainedConfig


class MLAConfig(PreTrainedConfig):
    """Sizes and constants of a converted model; DeepSeek's names where DeepSeek has one.

    Args:
        kv_lora_rank: latent rank C. With ``qk_rope_head_dim`` R it is what is cached: C + R numbers a token a layer.
        qk_rope_head_dim: R, two dims for every RoPE slot.
        kv_lora_ranks, qk_rope_head_dims: C and R of each layer where layers differ, both or neither; ``kv_lora_rank``
            and ``qk_rope_head_dim`` are then the largest.
        qk_nope_head_dim: N, the content (no-RoPE) dims of a head.
        v_head_dim: V, the value dims of a head.
        rope_inv_freq: per layer, the R/2 angular frequencies of its slots, radians a position.
        rope_attention_scaling: the factor on cos and sin that the source applies (1 except for YaRN-like scaling).
        attention_scale: the factor on the scores before the softmax (the source's; DeepSeek's class uses (N + R)^-1/2).
        query_bias, latent_bias, output_bias, mlp_bias: which projections carry a bias.
        layer_types, sliding_window: as in transformers; all layers attend fully when ``layer_types`` is None.
    """

    model_type = "mla_convert"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - transformers' own convention

    vocab_size: int = 32000
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    kv_lora_rank: int = 128
    qk_rope_head_dim: int = 32
    qk_nope_head_dim: int = 64
    v_head_dim: int = 64
    kv_lora_ranks: list | None = None
    qk_rope_head_dims: list | None = None
    rope_inv_freq: list | None = None
    rope_attention_scaling: float = 1.0
    attention_scale: float = 0.125
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    query_bias: bool = False
    latent_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    layer_types: list | None = None
    sliding_window: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self, **kwargs):
        self._check_layers()
        sizes = [self.rope_dim_of(layer) for layer in range(self.num_hidden_layers)]
        if any(size % 2 for size in sizes):
            raise ValueError(f"qk_rope_head_dim must be even, got {sorted(set(sizes))}")
        if self.rope_inv_freq is None:
            self.rope_inv_freq = [[10000.0 ** (-2 * pair / size) for pair in range(size // 2)] for size in sizes]
        expected, found = [size // 2 for size in sizes], [len(row) for row in self.rope_inv_freq]
        if found != expected:
            raise ValueError(f"rope_inv_freq must hold R/2 frequencies a layer, {expected}, found {found}")
        super().__post_init__(**kwargs)

    def _check_layers(self) -> None:
        ranks, rope_dims = self.kv_lora_ranks, self.qk_rope_head_dims
        if (ranks is None) != (rope_dims is None):
            raise ValueError("kv_lora_ranks and qk_rope_head_dims go together: give both or neither")
        for name, sizes in (("kv_lora_rank", ranks), ("qk_rope_head_dim", rope_dims)):
            if sizes is None:
                continue
            if len(sizes) != self.num_hidden_layers:
                raise ValueError(f"{name}s must hold a size for each of {self.num_hidden_layers} layers, got {sizes}")
            if max(sizes) != getattr(self, name):
                raise ValueError(f"{name} must be the largest of {name}s, {max(sizes)}, got {getattr(self, name)}")

    def kv_rank_of(self, layer: int) -> int:
        """C of a layer."""
        return self.kv_lora_rank if self.kv_lora_ranks is None else self.kv_lora_ranks[layer]

    def rope_dim_of(self, layer: int) -> int:
        """R of a layer."""
        return self.qk_rope_head_dim if self.qk_rope_head_dims is None else self.qk_rope_head_dims[layer]

    def to_dict(self):
        """The fields as config.json has them: lists of sizes are left out where all layers are alike."""
        fields = super().to_dict()
        for name in ("kv_lora_ranks", "qk_rope_head_dims"):
            if fields.get(name) is None:
                fields.pop(name, None)
        return fields

    @property
    def num_key_value_heads(self) -> int:
        """After expansion every query head has keys and values of its own."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """N + R, the width of an expanded query or key head (the widest, where layers differ)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


__all__ = ["MLAConfig"]
