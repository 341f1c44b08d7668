"""What computes absorbed attention: chosen openly, the same answers from each, and nothing that has to be installed."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_convert.maths.absorb import AbsorbedMatrices
from mla_convert.mla import MLAForCausalLM, attention_mla
from mla_kernels import UnsupportedDeviceError
from tests.mla.native import cache_of, native, tokens

# The smallest sizes that the kernel has; elsewhere every size of these models differs.
KERNEL_SIZES = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "rope_inv_freq": [[1.0, 0.5, 0.03, 0.002]] * 3}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel is interpreted
TOLERANCE = 1e-5  # float32 through three layers, logits of order one


@torch.no_grad()
def decoded(model: MLAForCausalLM, ids: Tensor, steps: tuple[int, ...] = (1, 3, 1)) -> Tensor:
    """Logits of a prefill of what is left and then of so many tokens at a time, on transformers' own cache."""
    cache, found = None, []
    for part in ids.to(model.device).split([ids.shape[1] - sum(steps), *steps], dim=1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = cache_of(outputs)
        found.append(outputs.logits)
    return torch.cat(found, dim=1)


UNEQUAL_SIZES = {
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "kv_lora_ranks": [16, 40, 24],
    "qk_rope_head_dims": [8, 0, 2],
    "rope_inv_freq": [[1.0, 0.5, 0.03, 0.002], [], [0.1]],
}


@pytest.mark.parametrize("merge", ["none", "apart", "merged"])
@pytest.mark.parametrize("variant", ["plain", "biases", "one-head", "windows", "unequal"])
def test_the_kernel_decodes_as_torch_does(variant: str, merge: str) -> None:
    sizes = UNEQUAL_SIZES if variant == "unequal" else KERNEL_SIZES
    model, ids = native(variant, **sizes).to(DEVICE), tokens()
    model.set_attention_mode("absorbed")
    model.set_decode_backend("torch")
    expected = decoded(model, ids)
    if merge != "none":
        for layer in model.model.layers:
            attention = layer.self_attn
            w_uk, w_uv = (w.detach() for w in attention._up_projections())
            w_uv_t = w_uv.transpose(1, 2)
            w_o = attention.o_proj.weight.detach().unflatten(1, (attention.num_heads, -1))
            values = {"w_uv_t": w_uv_t} if merge == "apart" else {"w_comb": torch.einsum("hcv,dhv->hcd", w_uv_t, w_o)}
            attention.absorbed = AbsorbedMatrices(w_uk, **values)
    model.set_decode_backend("triton")
    torch.testing.assert_close(decoded(model, ids), expected, atol=TOLERANCE, rtol=0)


def test_masks_and_gradients_are_left_to_torch() -> None:
    """A padded row is right with the kernel forced, which knows no padding; and so are gradients, which it has not."""
    model, ids = native(**KERNEL_SIZES), tokens(batch=1, length=9)
    model.set_attention_mode("absorbed")
    expected = decoded(model, ids)
    model.set_decode_backend("triton")
    padded = torch.cat((torch.ones(1, 4, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[:, 4:], expected, atol=TOLERANCE, rtol=0)
    gradients = []
    for backend in ("torch", "triton"):
        model.set_decode_backend(backend)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


def test_auto_on_a_cpu_is_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = native(**KERNEL_SIZES), tokens()
    assert model.decode_backend.name == "torch"
    assert "cpu" in model.decode_backend.reason
    with caplog.at_level(logging.INFO, logger="mla_convert"):
        automatic = decoded(model, ids)
        model.set_decode_backend("torch")
        chosen = decoded(model, ids)
    assert torch.equal(automatic, chosen)
    assert "set_decode_backend" in model.decode_backend.reason
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "absorbed decoding uses torch: the model is on cpu, and the kernel is for CUDA devices",
        "absorbed decoding uses torch: chosen with set_decode_backend",
    ]


def test_an_unknown_backend_is_refused() -> None:
    model = native()
    with pytest.raises(ValueError, match="'cuda'"):
        model.set_decode_backend("cuda")
    assert model.decode_backend.name == "torch"


def test_the_kernel_forced_on_a_cpu_fails_openly_where_it_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, ids = native(**KERNEL_SIZES), tokens()
    model.set_decode_backend("triton")
    decoded(model, ids, steps=())  # a prompt is expanded
    with pytest.raises(UnsupportedDeviceError, match="torch"):
        decoded(model, ids)


def test_without_mla_kernels_everything_but_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as it lies beside converted weights, on a machine with a GPU and without the package."""
    monkeypatch.setitem(sys.modules, "mla_kernels", None)
    spec = importlib.util.spec_from_file_location("mla_convert.mla.attention_alone", str(attention_mla.__file__))
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    backend = alone.choose_decode_backend("auto", native().config, torch.device("cuda"), torch.bfloat16)
    assert backend == ("torch", "mla_kernels is not installed")
    alone.check_decode_backend("torch")
    with pytest.raises(ImportError, match="install mla-convert"):
        alone.check_decode_backend("triton")


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_lora_rank": 10},
        {"qk_rope_head_dim": 130, "rope_inv_freq": [[0.5] * 65] * 3},
        {"kv_lora_rank": 64, "kv_lora_ranks": [32, 10, 64], "qk_rope_head_dims": [6, 6, 6]},
    ],
    ids=["rank", "rope", "one-layer"],
)
def test_sizes_that_the_kernel_has_not_are_left_to_torch(sizes: dict[str, Any]) -> None:
    config = native(**sizes).config
    backend = attention_mla.choose_decode_backend("auto", config, torch.device("cuda"), torch.bfloat16)
    assert backend.name == "torch"
    assert "no tile" in backend.reason
