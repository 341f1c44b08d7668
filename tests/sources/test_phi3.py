from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_phi3


def _longrope(turning: int = 16) -> dict[str, Any]:
    """Two sets of frequencies, for ``turning`` dims of a head; the second holds beyond 16 tokens."""
    pairs = turning // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": turning / 16,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 16,
    }


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}


class TestPhi3(AdapterConformance):
    variants: ClassVar = {
        "MHA": lambda: tiny_phi3("MHA"),
        "GQA-window": lambda: tiny_phi3("GQA", window=8),
        "MQA-tied": lambda: tiny_phi3("MQA", tied=True),
        "partial": lambda: tiny_phi3(rope_parameters=dict(PARTIAL)),
        "longrope": lambda: tiny_phi3(rope_parameters=_longrope(), original_max_position_embeddings=16),
        "partial-longrope": lambda: tiny_phi3(
            tied=True, rope_parameters=_longrope(12), original_max_position_embeddings=16
        ),
        "bfloat16": lambda: tiny_phi3(dtype=torch.bfloat16),
    }


def test_a_part_of_each_head_turns(tmp_path: Path) -> None:
    rope = open_source(str(save_source(tiny_phi3(rope_parameters=dict(PARTIAL)), tmp_path))).spec.rope
    assert rope.dim == 12
    assert rope.inv_freq[6:] == (0.0, 0.0)
    assert all(rope.inv_freq[:6])


def test_dims_that_turn_come_first_in_both_halves(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_phi3("MHA", rope_parameters=dict(PARTIAL)), tmp_path)))
    fused = source.tensor("model.layers.0.self_attn.qkv_proj.weight")
    weights = source.attention(0)
    # 6 pairs of dims l and l + 6 turn; dims 12 to 15 are the two pairs that do not.
    order = [0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15]
    for head in range(4):
        assert torch.equal(weights.w_q[head], fused[:64].view(4, 16, 64)[head, order])
        assert torch.equal(weights.w_k[head], fused[64:128].view(4, 16, 64)[head, order])
        assert torch.equal(weights.w_v[head], fused[128:].view(4, 16, 64)[head])


def test_gate_and_up_are_the_halves_of_their_matrix(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_phi3(), tmp_path)))
    fused = source.tensor("model.layers.1.mlp.gate_up_proj.weight")
    parts = {part.target: part.take(fused) for name, part in source.copied(1) if name.endswith("gate_up_proj.weight")}
    assert torch.equal(parts["model.layers.1.mlp.gate_proj.weight"], fused[:96])
    assert torch.equal(parts["model.layers.1.mlp.up_proj.weight"], fused[96:])


def test_longrope_under_its_first_name_is_longrope(tmp_path: Path) -> None:
    """The first files of Phi-3 call it `su`, in a rope_scaling of the old form."""
    model = tiny_phi3(rope_parameters=_longrope(), original_max_position_embeddings=16)
    folder = save_source(model, tmp_path)
    expected = open_source(str(folder)).spec.rope
    fields = json.loads((folder / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_scaling"] = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    (folder / "config.json").write_text(json.dumps(fields))
    found = open_source(str(folder)).spec.rope
    assert (found.kind, found.inv_freq, found.update) == ("longrope", expected.inv_freq, expected.update)
    assert found.attention_scaling == expected.attention_scaling
