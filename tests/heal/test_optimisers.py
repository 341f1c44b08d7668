import pytest
import torch
from torch import nn

from mla_convert.heal.optimisers import make_optimisers


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (6, 4),
        "model.layers.0.self_attn.q_proj.bias": (6,),
        "model.embed_tokens.weight": (9, 4),
        "lm_head.weight": (9, 4),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def test_matrices_are_muons_and_vectors_tables_and_biases_adamws():
    trained = parameters()
    muon, adamw = make_optimisers(trained, kind="muon", learning_rate=0.1)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [
        id(trained["model.layers.0.self_attn.q_proj.weight"])
    ]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 3


def test_every_parameter_has_one_optimiser():
    trained = parameters()
    for kind in ("muon", "adamw"):
        held = [
            id(p)
            for optimiser in make_optimisers(trained, kind=kind, learning_rate=0.1)
            for group in optimiser.param_groups
            for p in group["params"]
        ]
        assert sorted(held) == sorted(map(id, trained.values()))


def test_without_anything_for_one_there_is_the_other_alone():
    trained = parameters()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert len(make_optimisers({name: trained[name]}, kind="muon", learning_rate=0.1)) == 1
    assert len(make_optimisers({"bias": trained["lm_head.weight"]}, kind="adamw", learning_rate=0.1)) == 1


def test_a_step_moves_all_directions_of_a_matrix_alike():
    """A gradient with singular values far apart; AdamW's typical step has a root mean square of 0.2 rates."""
    weight = nn.Parameter(torch.zeros(64, 32))
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(64, 32, generator=generator), full_matrices=False)
    weight.grad = left @ torch.diag(torch.logspace(0, -2, 32)) @ right
    (optimiser,) = make_optimisers({"q_proj.weight": weight}, kind="muon", learning_rate=0.1)
    optimiser.step()
    values = torch.linalg.svdvals(weight.detach())
    # five Newton-Schulz steps bring a hundredth of the largest to about a half of it, in bfloat16
    assert values.min() > 0.3 * values.max()
    assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.3)
