"""Multi-head latent attention for the native model: expanded to heads, or absorbed, on whichever cache there is.

Self-contained like the model that uses it (torch and transformers only); where ``mla_kernels`` is installed, decoding
can use its kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_mla import MLAConfig

try:
    import mla_kernels
except ImportError:
    mla_kernels = None

ATTENTION_MODES = ("auto", "absorbed", "expanded")
DECODE_BACKENDS = ("auto", "triton", "torch")


class DecodeBackend(NamedTuple):
    """What decodes: ``triton`` (mla_kernels' kernel) or ``torch`` (matrix products), and why it is this one."""

    name: str
    reason: str


def check_decode_backend(wanted: str) -> None:
    """Raise ValueError for a name that is none, ImportError for the kernel where it is not installed."""
    if wanted not in DECODE_BACKENDS:
        raise ValueError(f"decode backend must be one of {DECODE_BACKENDS}, got {wanted!r}")
    if wanted == "triton" and mla_kernels is None:
        raise ImportError("the triton decode backend is in mla_kernels, which is not installed: install mla-convert")


def choose_decode_backend(wanted: str, config: MLAConfig, device: torch.device, dtype: torch.dtype) -> DecodeBackend:
    """Return what decodes tensors of that device and dtype when ``auto``, ``triton`` or ``torch`` is wanted."""
    if wanted != "auto":
        return DecodeBackend(wanted, "chosen with set_decode_backend")
    if config.reason_against_kernel is not None:
        return DecodeBackend("torch", config.reason_against_kernel)
    if device.type != "cuda":
        return DecodeBackend("torch", f"the model is on {device.type}, and the kernel is for CUDA devices")
    if mla_kernels is None:
        return DecodeBackend("torch", "mla_kernels is not installed")
    sizes = sorted({(config.kv_rank_of(i), config.rope_dim_of(i)) for i in range(config.num_hidden_layers)})
    for size in sizes:  # one backend for all layers
        suited = mla_kernels.choose_backend(device, dtype, *size)
        if suited.name != "triton":
            break
    return DecodeBackend(suited.name, suited.reason)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., S, R] (R/2 real parts, then R/2 imaginary parts) by the angles of cos and sin [..., S, R/2]."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    score_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention over expanded heads: query and key [B H . N+R], value [B H T V]; returns [B S H V], weights."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = mask_scores(change_scores(scores, softcap, score_bias), attention_mask)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def change_scores(scores: torch.Tensor, softcap: float | None, score_bias: torch.Tensor | None) -> torch.Tensor:
    """Cap scaled scores [B H S T] softly at ±softcap and add a bias of heads and cached tokens, [1 H 1 T]."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if score_bias is None else scores + score_bias[..., : scores.shape[-1]]


def normalise(x: torch.Tensor, norms: int, eps: float) -> torch.Tensor:
    """Divide x [..., norms·block], block by block, by its root mean square; computed in float32."""
    blocks = x.unflatten(-1, (norms, -1))
    return (blocks * inverse_rms(blocks, eps)[..., None]).to(x.dtype).flatten(-2)


def inverse_rms(blocks: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1/rms, float32, over the last dim."""
    return torch.rsqrt(blocks.float().square().mean(-1) + eps)


def mask_scores(scores: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Apply transformers' mask (None, boolean or additive; [B 1 S T]) to scores [B H S T].

    None means causal with the queries at the end of the cached tokens, as for torch's scaled_dot_product_attention.
    """
    queries, tokens = scores.shape[-2:]
    if attention_mask is None:
        if queries == 1:
            return scores
        future = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).triu(tokens - queries + 1)
        return scores.masked_fill(future, torch.finfo(scores.dtype).min)
    mask = attention_mask[..., :tokens]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [B H S I] with each head's matrix, weight [H I J]; returns [B H S J].

    Each head's matrix is read once for all sequences, where broadcasting would read it once for each.
    """
    batch, _, queries, _ = x.shape
    if batch == 1:
        return torch.matmul(x, weight)
    return torch.bmm(x.transpose(0, 1).flatten(1, 2), weight).unflatten(1, (batch, queries)).transpose(0, 1)


class MLAAttention(nn.Module):
    """Multi-head latent attention. The cache holds c_kv [B 1 T C] and the rotated k_rope [B 1 T R].

    Where the source normalises queries and keys (``config.qk_norm``), queries are normalised before they are mixed, and
    a head's score of a token is multiplied by 1/rms of that token's keys: k_rope [B 1 T R+scales] ends with these.

    A cache that attends by itself (a paged one) has, instead of ``update``,
    ``attend_latent(layer_idx, query, c_kv, k_rope, *, softmax_scale, window, backend)``: it appends c_kv [B S C] and
    k_rope [B S R] to its sequences, whose lengths only it knows, and returns the weighted latents [B S H C] of
    query [B S H C+R], causally and within the last ``window`` tokens.
    """

    def __init__(self, config: MLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_rank_of(layer_idx)
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.rope_dim_of(layer_idx)
        self.v_head_dim = config.v_head_dim
        self.scaling = config.attention_scale
        self.is_causal = True
        self.attention_mode = "auto"
        # Decode-ready matrices (mla_convert.maths.absorb.AbsorbedMatrices), attached after loading where they exist.
        self.absorbed = None

        hidden, heads = config.hidden_size, config.num_attention_heads
        nope, rank, rope = self.qk_nope_head_dim, self.kv_lora_rank, self.qk_rope_head_dim
        if config.qk_norm is None:
            self.q_proj = nn.Linear(hidden, heads * (nope + rope), bias=config.query_bias)
        else:
            dim, key_heads = config.qk_norm_dim, config.qk_norm_key_heads
            self.q_a_proj = nn.Linear(hidden, heads * dim, bias=config.query_bias)
            self.q_b_proj = nn.Linear(dim, heads * (nope + rope), bias=False)
            self.k_norm_proj = nn.Linear(hidden, key_heads * dim, bias=config.key_norm_bias)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + rope, bias=config.latent_bias)
        self.kv_b_proj = nn.Linear(rank, heads * (nope + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=config.output_bias)

    def uses_absorption(self, queries: int, tokens: int) -> bool:
        """Whether scoring `queries` new tokens against `tokens` cached ones is done in the latent space.

        ``auto`` expands for a prefill and absorbs where that costs fewer multiplications a head and cached token:
        S·(2C + R) against C·(N + V) + S·(N + R + V).
        """
        if self.attention_mode != "auto":
            return self.attention_mode == "absorbed"
        expansion = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        extra = 2 * self.kv_lora_rank - self.qk_nope_head_dim - self.v_head_dim
        return tokens > queries and queries * extra < expansion

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        decode_backend: str = "torch",
        score_bias: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, queries = hidden_states.shape[:2]
        cos, sin = (x[:, None] for x in position_embeddings)
        q_nope, q_rope = self._query(hidden_states).split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope, cos, sin)

        compressed = self.kv_a_proj_with_mqa(hidden_states)[:, None]
        c_kv, k_rope = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        # The slices are made whole, so that a cache that keeps them keeps C + R numbers and no shared storage.
        c_kv, k_rope = c_kv.contiguous(), rotate(k_rope, cos, sin)
        if hasattr(cache, "attend_latent"):
            return self._attend_in_cache(q_nope, q_rope, c_kv, k_rope, cache, decode_backend), None
        if self.config.qk_norm is not None:
            k_rope = torch.cat((k_rope, self._key_scales(hidden_states).to(k_rope.dtype)), dim=-1)
        if cache is not None:
            c_kv, k_rope = cache.update(c_kv, k_rope, self.layer_idx)
        k_rope, key_scale = self._by_head(k_rope)

        if self.uses_absorption(queries, c_kv.shape[2]):
            if decode_backend == "triton" and self._kernel_can(q_nope, c_kv, k_rope, attention_mask):
                return self._attend_in_kernel(q_nope, q_rope, c_kv, k_rope), None
            return self._attend_absorbed(q_nope, q_rope, c_kv, k_rope, key_scale, attention_mask, score_bias)
        heads, weights = self._attend_expanded(
            q_nope, q_rope, c_kv, k_rope, key_scale, attention_mask, score_bias, **kwargs
        )
        return self.o_proj(heads.reshape(batch, queries, -1)), weights

    def _query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Every head's content and RoPE query before rotation, [B H S N+R]."""
        config = self.config
        if config.qk_norm is None:
            return self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        norms = 1 if config.qk_norm == "all" else self.num_heads
        query = normalise(self.q_a_proj(hidden_states), norms, config.qk_norm_eps)
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return per_head(query, self.q_b_proj.weight.unflatten(0, (self.num_heads, -1)).transpose(1, 2))

    def _key_scales(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """1/rms of each norm's keys, [B 1 S scales], float32."""
        keys = self.k_norm_proj(hidden_states).unflatten(-1, (self.config.key_scales, -1))
        return inverse_rms(keys, self.config.qk_norm_eps)[:, None]

    def _by_head(self, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Part what is cached beside the latent into k_rope [B 1 T R] and every head's key scales [B H T]."""
        if self.config.qk_norm is None:
            return k_rope, None
        k_rope, scales = k_rope.split([self.qk_rope_head_dim, self.config.key_scales], dim=-1)
        scales = scales[:, 0].transpose(1, 2)
        return k_rope, scales.repeat_interleave(self.num_heads // scales.shape[1], dim=1)

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w_uk [H N C] and w_uv [H V C], views of kv_b_proj."""
        w_HJC = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        w_uk, w_uv = w_HJC.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return w_uk, w_uv

    def _attend_expanded(self, q_nope, q_rope, c_kv, k_rope, key_scale, attention_mask, score_bias, **kwargs):
        batch, _, tokens, _ = c_kv.shape
        expanded = self.kv_b_proj(c_kv[:, 0]).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
        k_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1, -1)), dim=-1)
        if key_scale is not None:
            key = key * key_scale[..., None]
        softcap, implementation = self.config.attention_softcap, self.config._attn_implementation
        if softcap is not None or score_bias is not None:  # which fused attention does not know
            implementation = "eager"
            kwargs |= {"softcap": softcap, "score_bias": score_bias}
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if implementation == "sdpa" and value.device.type == "cpu":
            # torch's fused attention for CPUs takes keys and values of one width only, and is twice as fast.
            value = nn.functional.pad(value, (0, max(0, key.shape[-1] - self.v_head_dim)))
        output, weights = attend(
            self,
            torch.cat((q_nope, q_rope), dim=-1),
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output[..., : self.v_head_dim], weights

    def _attend_absorbed(self, q_nope, q_rope, c_kv, k_rope, key_scale, attention_mask, score_bias):
        """Scores q_latent·c + q_rope·k_rope with q_latent = W_UK^T q_nope; the up-projections never touch the cache."""
        batch, heads, queries, _ = q_nope.shape
        # All heads read the same latents: one product with heads · queries rows reads them once.
        scores = torch.matmul(self._latent_query(q_nope).flatten(1, 2), c_kv[:, 0].transpose(1, 2))
        scores = scores + torch.matmul(q_rope.flatten(1, 2), k_rope[:, 0].transpose(1, 2))
        scores = scores.unflatten(1, (heads, queries)) * self.scaling
        if key_scale is not None:
            scores = scores * key_scale[:, :, None]
        scores = mask_scores(change_scores(scores, self.config.attention_softcap, score_bias), attention_mask)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q_nope.dtype)
        u_BHSC = torch.matmul(weights.flatten(1, 2), c_kv[:, 0]).view(batch, heads, queries, -1)
        return self._project_latents(u_BHSC), weights

    def _kernel_can(self, q_nope, c_kv, k_rope, attention_mask) -> bool:
        """Whether the kernel, which is causal, knows no mask and has no gradients, may take this call."""
        if self.config.reason_against_kernel is not None:
            return False
        differentiated = torch.is_grad_enabled() and (q_nope.requires_grad or c_kv.requires_grad)
        return attention_mask is None and not differentiated and q_nope.dtype == c_kv.dtype == k_rope.dtype

    def _attend_in_kernel(self, q_nope, q_rope, c_kv, k_rope):
        """The same as :meth:`_attend_absorbed`, by mla_kernels on a cache of sequences of one length."""
        query = torch.cat((self._latent_query(q_nope), q_rope), dim=-1).transpose(1, 2)
        batch, _, tokens, _ = c_kv.shape
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=c_kv.device)
        u_BSHC, _ = mla_kernels.mla_decode(
            query, c_kv[:, 0], None, lengths, self.kv_lora_rank, self.scaling, rope_cache=k_rope[:, 0], backend="triton"
        )
        return self._project_latents(u_BSHC.transpose(1, 2))

    def _attend_in_cache(self, q_nope, q_rope, c_kv, k_rope, cache, decode_backend):
        sliding = self.config.layer_types is not None and self.config.layer_types[self.layer_idx] == "sliding_attention"
        u_BSHC = cache.attend_latent(
            self.layer_idx,
            torch.cat((self._latent_query(q_nope), q_rope), dim=-1).transpose(1, 2),
            c_kv[:, 0],
            k_rope[:, 0],
            softmax_scale=self.scaling,
            window=self.config.sliding_window if sliding else None,
            backend=decode_backend,
        )
        return self._project_latents(u_BSHC.transpose(1, 2))

    def _latent_query(self, q_nope: torch.Tensor) -> torch.Tensor:
        """W_UK^T q_nope, [B H S C]."""
        w_uk = self._up_projections()[0] if self.absorbed is None else self.absorbed.w_uk
        return per_head(q_nope, w_uk.to(q_nope.dtype))

    def _project_latents(self, u_BHSC: torch.Tensor) -> torch.Tensor:
        """The layer's output [B S D] from each head's weighted sum of latents."""
        ready = self.absorbed
        if ready is not None and ready.w_comb is not None:
            merged = per_head(u_BHSC, ready.w_comb.to(u_BHSC.dtype)).sum(dim=1)
            return merged if self.o_proj.bias is None else merged + self.o_proj.bias
        w_uv_t = self._up_projections()[1].transpose(1, 2) if ready is None else ready.w_uv_t.to(u_BHSC.dtype)
        return self.o_proj(per_head(u_BHSC, w_uv_t).transpose(1, 2).flatten(2))


__all__ = [
    "ATTENTION_MODES",
    "DecodeBackend",
    "MLAAttention",
    "change_scores",
    "check_decode_backend",
    "choose_decode_backend",
    "eager_attention_forward",
    "inverse_rms",
    "normalise",
    "rotate",
]
