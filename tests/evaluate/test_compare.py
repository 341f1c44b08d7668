import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.evaluate import compare, perplexity
from tests.evaluate.models import FixedLogits
from tests.tiny import tiny_llama


def test_a_model_agrees_with_itself(llama, windows):
    found = compare(llama, llama, windows)
    assert (found.kl, found.top1_agreement, found.tokens) == (0.0, 1.0, 55)
    assert found.model == found.reference
    assert found.log_ratio == 0.0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_a_direct_computation(llama, other_llama, windows, batch_size):
    with torch.no_grad():
        log_q = llama(windows).logits[:, :-1].double().log_softmax(-1).flatten(0, 1)
        log_p = other_llama(windows).logits[:, :-1].double().log_softmax(-1).flatten(0, 1)
    # torch's kl_div(input, target) is KL(target || input).
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True).item()
    agreement = (log_q.argmax(-1) == log_p.argmax(-1)).double().mean().item()

    found = compare(llama, other_llama, windows, batch_size=batch_size)
    assert found.kl == pytest.approx(kl, rel=1e-5)
    assert found.kl > 0
    assert found.top1_agreement == pytest.approx(agreement)
    assert found.top1_agreement < 1


def test_kl_is_taken_under_the_reference():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p||q) = ln(2/sqrt 3), KL(q||p) is another number.
    windows = torch.zeros(1, 5, dtype=torch.long)
    reference = FixedLogits(torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log())
    model = FixedLogits(torch.tensor([[0.25, 0.75], [0.25, 0.75]], dtype=torch.float64).log())
    assert compare(model, reference, windows).kl == pytest.approx(0.14384103622589045, rel=1e-12)
    assert compare(reference, model, windows).kl == pytest.approx(0.13081203594113694, rel=1e-12)


def test_a_token_that_both_rule_out_adds_nothing():
    windows = torch.zeros(1, 5, dtype=torch.long)
    ruled_out = FixedLogits(torch.tensor([[0.0, 1.0, float("-inf")]] * 3))
    assert compare(ruled_out, ruled_out, windows).kl == 0.0


@pytest.mark.parametrize("stride", [None, 5])
def test_both_perplexities_are_those_of_perplexity(llama, other_llama, windows, stride):
    found = compare(llama, other_llama, windows, stride=stride)
    assert found.model == perplexity(llama, windows, stride=stride)
    assert found.reference == perplexity(other_llama, windows, stride=stride)
    assert found.log_ratio == found.model.nll_per_token - found.reference.nll_per_token


def test_the_models_take_turns_batch_by_batch(windows):
    model, reference = FixedLogits(torch.zeros(61, 61)), FixedLogits(torch.zeros(61, 61))
    order = []
    model.calls = reference.calls = order
    compare(model, reference, windows, batch_size=2)
    assert all(torch.equal(a, b) for a, b in zip(order[::2], order[1::2], strict=True))
    assert [len(call) for call in order] == [2, 2, 2, 2, 1, 1]


def test_refuses_another_vocabulary(llama, windows):
    with pytest.raises(UsageError, match="vocabular"):
        compare(llama, tiny_llama(vocab_size=289), windows)
