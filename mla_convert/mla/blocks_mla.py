"""What a decoder layer of the native model has around its attention: norms, feed-forward blocks, experts.

Self-contained like the model that uses it (torch and transformers only). What a layer has is in the config, under names
that are the same for all families.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_mla import MLAAttention
from .configuration_mla import MLAConfig


class MLARMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), computed in float32; `offset` is added to the weight."""

    def __init__(self, hidden_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.offset = offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.offset == 0:
            return self.weight * hidden_states.to(dtype)
        return ((self.weight.float() + self.offset) * hidden_states).to(dtype)  # 1 + w would round w in bfloat16


class MLALayerNorm(nn.Module):
    """LayerNorm (Ba et al., 2016) with or without a bias, computed in float32; `offset` is added to the weight."""

    def __init__(self, hidden_size: int, eps: float, bias: bool, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.variance_epsilon = eps
        self.offset = offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        weight = self.weight.float() + self.offset
        normed = nn.functional.layer_norm(hidden_states.float(), weight.shape, weight, bias, self.variance_epsilon)
        return normed.to(hidden_states.dtype)


def make_norm(config: MLAConfig) -> nn.Module:
    """Return a norm of the kind that the whole model has."""
    if config.norm == "layer":
        return MLALayerNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias, config.norm_offset)
    return MLARMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)


class MLAMLP(nn.Module):
    """Gated feed-forward block: down(act(gate x) · up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MLAPlainMLP(nn.Module):
    """Feed-forward block without a gate: down(act(up x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class MLAExperts(nn.Module):
    """A mixture of gated experts, of which each token is answered by a few, and one that may answer every token.

    The experts that answer weigh as much as their probabilities, a softmax over all in float32 (Shazeer et al., 2017);
    the shared expert weighs the sigmoid of its own gate.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        hidden, act = config.hidden_size, config.hidden_act
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [MLAMLP(hidden, config.moe_intermediate_size, act, bias=False) for _ in range(config.num_experts)]
        )
        self.shared_expert = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLAMLP(hidden, config.shared_expert_intermediate_size, act, bias=False)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        answer = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            part = self.experts[index](x[token]) * weights[token, place, None]
            answer.index_add_(0, token, part.to(x.dtype))
        if self.shared_expert is not None:
            answer = answer + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return answer.view_as(hidden_states)


def make_mlp(config: MLAConfig, layer_idx: int) -> nn.Module:
    """Return the feed-forward block of a layer."""
    if config.has_experts(layer_idx):
        return MLAExperts(config)
    kind = MLAMLP if config.mlp == "gated" else MLAPlainMLP
    return kind(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)


class MLADecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward block with residuals; norms before them, after them, or both, as the source has it."""

    def __init__(self, config: MLAConfig, layer_idx: int) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.residual_scale = config.residual_scale
        self.self_attn = MLAAttention(config, layer_idx)
        self.mlp = make_mlp(config, layer_idx)
        self.input_layernorm = self.post_attention_layernorm = None
        self.attention_output_layernorm = self.mlp_output_layernorm = None
        if config.input_norms:
            self.input_layernorm = make_norm(config)
            if not config.shared_input_norm:
                self.post_attention_layernorm = make_norm(config)
        if config.output_norms:
            self.attention_output_layernorm = make_norm(config)
            self.mlp_output_layernorm = make_norm(config)

    def attention_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the attention reads of the layer's input [B S D]."""
        return _through(self.input_layernorm, hidden_states)

    def attend(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """The attention's output [B S D] for the layer's input [B S D]."""
        return self.self_attn(hidden_states=self.attention_input(hidden_states), **kwargs)[0]

    def added(self, attended: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's input for an output of the attention, both [B S D]."""
        return self._scaled(_through(self.attention_output_layernorm, attended))

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended = hidden_states + self.added(self.attend(hidden_states, **kwargs))
        norm = self.input_layernorm if self.post_attention_layernorm is None else self.post_attention_layernorm
        fed = self.mlp(_through(norm, hidden_states if self.parallel else attended))
        return attended + self._scaled(_through(self.mlp_output_layernorm, fed))

    def _scaled(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.residual_scale == 1 else branch * self.residual_scale


def _through(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


__all__ = ["MLADecoderLayer", "make_norm"]
