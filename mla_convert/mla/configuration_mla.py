"""Configuration of the native MLA model class. Self-contained: it is also shipped beside converted weights."""

from transformers.configuration_utils import PreTrainedConfig

_QK_NORMS = (None, "head", "all")

# Fields that config.json has only where they are not at their defaults.
_LEFT_OUT = (
    *("kv_lora_ranks", "qk_rope_head_dims", "rope_update", "rope_pairs", "attention_softcap", "alibi_slopes"),
    "alibi_rounded",
    *("qk_norm", "qk_norm_eps", "qk_norm_dim", "qk_norm_key_heads", "key_norm_bias"),
    *("norm", "norm_bias", "norm_offset", "input_norms", "output_norms", "parallel_residual", "shared_input_norm"),
    *("mlp", "num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "expert_layers", "embedding_scale", "residual_scale", "logits_scale"),
    *("final_logit_softcap", "learned_positions", "embedding_norm"),
)


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
        rope_attention_scaling: the factor on cos and sin that the source applies (1 except for YaRN-like scaling); a
            slot of frequency 0 does not turn and has none.
        rope_update: how frequencies change with the length of the input: ``kind`` (``longrope`` or ``dynamic``),
            ``original_positions`` (up to which ``rope_inv_freq`` holds), ``inv_freq`` (longrope: the frequency of each
            pair of a source head beyond it), ``theta``, ``factor`` and ``dim`` (dynamic: a pair's frequency is
            theta'^(-2·pair/dim), theta' = theta·(factor·length/original_positions - factor + 1)^(dim/(dim - 2))).
        rope_pairs: per layer, which pair of a source head each slot turns as; only with ``rope_update``.
        attention_scale: the factor on the scores before the softmax (the source's; DeepSeek's class uses (N + R)^-1/2).
        attention_softcap: cap·tanh(scores / cap) before the softmax; None for none.
        alibi_slopes: per query head, the slope of a bias slope·(t - s) on the scores; None for none.
        alibi_rounded: the bias is slope·t instead, with slope, t and their product rounded to bfloat16 (Falcon).
        qk_norm: what one root mean square of queries and keys is taken over, ``head`` or ``all`` heads of a token; None
            for none. ``qk_norm_eps`` is added to it, ``qk_norm_dim`` is K, ``qk_norm_key_heads`` G, of the source;
            ``key_norm_bias``: what keys' norms are taken of has a bias.
        query_bias, latent_bias, output_bias, mlp_bias: which projections carry a bias.
        layer_types, sliding_window: as in transformers; all layers attend fully when ``layer_types`` is None.
        norm: of the decoder layers, ``rms`` or ``layer`` (LayerNorm, with a bias if ``norm_bias``); ``norm_offset`` is
            added to their weights.
        input_norms, output_norms: norms before attention and feed-forward block; norms on what they add.
        parallel_residual: both read the layer's input; with ``shared_input_norm`` through the attention's norm.
        mlp: ``gated`` (gate, up, down) or ``plain`` (up, down).
        num_experts: experts of a mixture; 0 for none. ``expert_layers`` says which layers have them (None: all).
        num_experts_per_tok, norm_topk_prob: how many answer a token, and whether their weights are made to sum to 1.
        moe_intermediate_size, shared_expert_intermediate_size: of an expert, and of one that answers always (0: none).
        embedding_scale, residual_scale, logits_scale: factors on the embeddings, on what attention and feed-forward
            block add, and on the logits.
        final_logit_softcap: cap·tanh(logits / cap); None for none.
        learned_positions: rows of a table of learned positions, added to the embeddings; 0 for none.
        embedding_norm: whether there is a norm on the embeddings.
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
    rope_update: dict | None = None
    rope_pairs: list | None = None
    attention_softcap: float | None = None
    alibi_slopes: list | None = None
    alibi_rounded: bool = False
    qk_norm: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_dim: int = 0
    qk_norm_key_heads: int = 0
    key_norm_bias: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    parallel_residual: bool = False
    shared_input_norm: bool = False
    mlp: str = "gated"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    expert_layers: list | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    final_logit_softcap: float | None = None
    learned_positions: int = 0
    embedding_norm: bool = False
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
        self._check_rope_update(expected)
        self._check_choices()
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

    def _check_rope_update(self, slots: list[int]) -> None:
        if (self.rope_update is None) != (self.rope_pairs is None):
            raise ValueError("rope_update and rope_pairs go together: give both or neither")
        if self.rope_update is None or self.rope_pairs is None:
            return
        if self.rope_update["kind"] not in ("longrope", "dynamic"):
            raise ValueError(f"rope_update is of 'longrope' or 'dynamic' kind, got {self.rope_update['kind']!r}")
        found = [len(row) for row in self.rope_pairs]
        if found != slots:
            raise ValueError(
                f"rope_pairs must hold a pair for each of the R/2 slots of a layer, {slots}, found {found}"
            )

    def _check_choices(self) -> None:
        for name, choices in (("norm", ("rms", "layer")), ("mlp", ("gated", "plain")), ("qk_norm", _QK_NORMS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name, size in (("alibi_slopes", self.num_attention_heads), ("expert_layers", self.num_hidden_layers)):
            values = getattr(self, name)
            if values is not None and len(values) != size:
                raise ValueError(f"{name} must hold {size} values, got {len(values)}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok must be 1 to {self.num_experts}, got {self.num_experts_per_tok}")
        if self.qk_norm is not None and not (self.qk_norm_dim and self.qk_norm_key_heads):
            raise ValueError("qk_norm needs qk_norm_dim and qk_norm_key_heads")

    def kv_rank_of(self, layer: int) -> int:
        """C of a layer."""
        return self.kv_lora_rank if self.kv_lora_ranks is None else self.kv_lora_ranks[layer]

    def rope_dim_of(self, layer: int) -> int:
        """R of a layer."""
        return self.qk_rope_head_dim if self.qk_rope_head_dims is None else self.qk_rope_head_dims[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward block of a layer is a mixture of experts."""
        return self.num_experts > 0 and (self.expert_layers is None or self.expert_layers[layer])

    def to_dict(self):
        """The fields as config.json has them: those that few models need are left out at their defaults."""
        fields = super().to_dict()
        for name in _LEFT_OUT:
            if fields.get(name) == getattr(type(self), name):
                fields.pop(name, None)
        return fields

    @property
    def key_scales(self) -> int:
        """Numbers a token a layer that are cached beside C + R: one for each norm of keys."""
        if self.qk_norm is None:
            return 0
        return self.qk_norm_key_heads if self.qk_norm == "head" else 1

    @property
    def _reason_of_scores(self) -> str | None:
        reasons = (
            (self.attention_softcap is not None, "the model caps its attention scores"),
            (self.alibi_slopes is not None, "the model biases its attention scores by position"),
            (self.qk_norm is not None, "the model's keys have scales of their own in the cache"),
        )
        return next((reason for holds, reason in reasons if holds), None)

    @property
    def reason_against_kernel(self) -> str | None:
        """Why the decode kernel, which scores c_kv and k_rope and no more, cannot serve this model; None if it can."""
        return self._reason_of_scores or ("the model has no RoPE dims" if self.qk_rope_head_dim == 0 else None)

    @property
    def reason_against_paging(self) -> str | None:
        """Why a cache that attends by itself, with sequences of any length, cannot serve this model; None if it can."""
        changes = "the model's RoPE frequencies change with the length of a text"
        return self._reason_of_scores or (changes if self.rope_update is not None else None)

    @property
    def num_key_value_heads(self) -> int:
        """After expansion every query head has keys and values of its own."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """N + R, the width of an expanded query or key head (the widest, where layers differ)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


__all__ = ["MLAConfig"]
