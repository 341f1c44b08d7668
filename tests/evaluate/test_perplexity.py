import math

import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.evaluate import perplexity
from tests.evaluate.models import FixedLogits


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_equals_cross_entropy_over_every_predicted_token(llama, windows, batch_size):
    with torch.no_grad():
        logits = llama(windows).logits.double()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).item()
    found = perplexity(llama, windows, batch_size=batch_size)
    assert found.tokens == 5 * 11
    # The batch size changes float32 matrix products by their rounding.
    assert found.nll_per_token == pytest.approx(expected, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.parametrize("stride", [None, 5])
def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(windows, stride):
    uniform = FixedLogits(torch.full((61, 61), 3.7))
    assert perplexity(uniform, windows, stride=stride).perplexity == pytest.approx(61, rel=1e-12)


def test_a_model_that_knows_the_text_has_perplexity_1():
    windows = torch.arange(10).view(1, 10)
    table = torch.full((10, 10), -100.0)
    table[torch.arange(9), torch.arange(1, 10)] = 100.0
    assert perplexity(FixedLogits(table), windows).perplexity == pytest.approx(1.0, rel=1e-12)


def test_a_hopeless_model_has_infinite_perplexity():
    table = torch.zeros(10, 10)
    table[:, 0] = 1000.0
    found = perplexity(FixedLogits(table), torch.arange(10).view(1, 10))
    assert (found.perplexity, found.nll_per_token) == (math.inf, 1000.0)


def test_bfloat16_logits_are_upcast():
    table = torch.randn(61, 61, generator=torch.Generator().manual_seed(0)).bfloat16()
    windows = torch.arange(60).view(2, 30)
    targets = windows[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(table.double()[windows[:, :-1].flatten()], targets).item()
    assert perplexity(FixedLogits(table), windows).nll_per_token == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stride", range(1, 12))
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sliding_contexts_score_every_token_once(stride, batch_size):
    # The model sees one token back only, so a token's nll is the same in every context that holds it.
    table = torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = -table.log_softmax(-1)[torch.arange(23), torch.arange(1, 24)].mean().item()
    found = perplexity(FixedLogits(table), torch.arange(24).view(2, 12), stride=stride, batch_size=batch_size)
    assert found.tokens == 23
    assert found.nll_per_token == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stride", [1, 4, 5, 7, 11])
def test_sliding_contexts_equal_scoring_each_token_by_hand(llama, windows, stride):
    stream = windows.flatten()
    total = scored = 0.0
    starts = [*range(0, len(stream) - 12, stride), len(stream) - 12]
    done = 1  # the first token has no predecessor
    with torch.no_grad():
        for start in starts:
            log_p = llama(stream[None, start : start + 12]).logits[0].double().log_softmax(-1)
            for position in range(max(done, start + 1), start + 12):
                total -= log_p[position - start - 1, stream[position]].item()
                scored += 1
            done = start + 12
    found = perplexity(llama, windows, stride=stride, batch_size=4)
    assert found.tokens == scored == len(stream) - 1
    assert found.nll_per_token == pytest.approx(total / scored, abs=1e-5)


def test_later_sliding_contexts_score_their_last_stride_tokens_only():
    # Outside the first context, the model sees `context - stride` tokens before the first that counts.
    model = FixedLogits(torch.zeros(24, 24))
    perplexity(model, torch.arange(24).view(2, 12), stride=4)
    assert [call[0].tolist() for call in model.calls] == [list(range(start, start + 12)) for start in (0, 4, 8, 12)]


@pytest.mark.parametrize("stride", [0, -1, 12, 13])
def test_refuses_a_stride_without_context(llama, windows, stride):
    with pytest.raises(UsageError, match="stride"):
        perplexity(llama, windows, stride=stride)


def test_refuses_an_empty_batch(llama, windows):
    with pytest.raises(UsageError, match="batch"):
        perplexity(llama, windows, batch_size=0)


def test_reports_progress(llama, windows):
    calls = []
    perplexity(llama, windows, batch_size=2, progress=lambda *call: calls.append(call))
    assert calls == [("perplexity", 1, 3), ("perplexity", 2, 3), ("perplexity", 3, 3)]
