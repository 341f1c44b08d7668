import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from mla_convert.heal.divergence import divergence, hidden_distance, targets

VOCAB = 23


def logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_torchs_own_divergence(temperature):
    teacher, student = logits(0), logits(1)
    found = divergence(student, targets(teacher, temperature=temperature, top_k=None), temperature=temperature)
    p, q = (Categorical(logits=x.double() / temperature) for x in (teacher, student))
    # float32 against float64: 23 terms of order 1
    torch.testing.assert_close(found.double(), temperature**2 * kl_divergence(p, q).mean(1), atol=1e-5, rtol=1e-5)


def test_the_head_of_everything_is_everything():
    whole, head = (targets(logits(0), temperature=1.0, top_k=k) for k in (None, VOCAB))
    assert torch.equal(divergence(logits(1), whole, temperature=1.0), divergence(logits(1), head, temperature=1.0))


def test_a_head_is_the_divergence_of_k_tokens_and_the_rest_as_one():
    teacher, student = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.4, 0.1, 0.2, 0.3])
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.5)
    wanted = targets(teacher.log()[None, None], temperature=1.0, top_k=2)
    assert divergence(student.log()[None, None], wanted, temperature=1.0).item() == pytest.approx(by_hand, rel=1e-5)


def test_a_longer_head_tells_more():
    values = [
        divergence(logits(1), targets(logits(0), temperature=1.0, top_k=k), temperature=1.0).sum().item()
        for k in (1, 4, 12, VOCAB)
    ]
    assert values == sorted(values)
    assert values[0] > 0


@pytest.mark.parametrize("top_k", [None, 4, VOCAB - 1])
def test_the_gradient_is_that_of_finite_differences(top_k):
    teacher, student = logits(0), logits(1).requires_grad_()
    wanted = targets(teacher, temperature=1.5, top_k=top_k)
    divergence(student, wanted, temperature=1.5).sum().backward()
    direction = logits(2)
    step = 1e-2
    ahead, behind = (
        divergence(student.detach() + sign * step * direction, wanted, temperature=1.5).sum().item() for sign in (1, -1)
    )
    # central differences in float32: rounding 1e-6 / 2e-2 beside a curvature of step squared
    assert (student.grad * direction).sum().item() == pytest.approx((ahead - behind) / (2 * step), abs=2e-3)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_token_that_the_teacher_rules_out_costs_nothing(top_k):
    teacher, student = logits(0), logits(1).requires_grad_()
    teacher[..., 3:] = -math.inf
    divergence(student, targets(teacher, temperature=1.0, top_k=top_k), temperature=1.0).sum().backward()
    assert student.grad.isfinite().all()


def test_hidden_distance_is_relative_and_a_mean_over_layers():
    target = [torch.ones(1, 2, 3), torch.full((1, 2, 3), 10.0)]
    states = [torch.full((1, 2, 3), 1.5), torch.full((1, 2, 3), 10.0)]
    assert hidden_distance(states, target).tolist() == [0.125]


def test_the_gradient_over_a_whole_vocabulary_is_autograds():
    """More positions than a block, and windows that count differently."""
    generator = torch.Generator().manual_seed(3)
    teacher, student = (torch.randn(2, 70, VOCAB, generator=generator, dtype=torch.float64).float() for _ in range(2))
    weights = torch.tensor([1.0, -3.0])
    found = [student.clone().requires_grad_() for _ in range(2)]
    (divergence(found[0], targets(teacher, temperature=1.5, top_k=None), temperature=1.5) * weights).sum().backward()
    log_p, log_q = ((x / 1.5).log_softmax(-1) for x in (teacher, found[1]))
    (1.5**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1) * weights).sum().backward()
    torch.testing.assert_close(found[0].grad, found[1].grad, atol=1e-7, rtol=1e-4)
