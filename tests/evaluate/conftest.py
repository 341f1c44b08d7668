import pytest
import torch
from transformers import LlamaForCausalLM

from tests.evaluate.models import tiny_llama


@pytest.fixture(scope="package")
def llama() -> LlamaForCausalLM:
    return tiny_llama(0)


@pytest.fixture(scope="package")
def other_llama() -> LlamaForCausalLM:
    return tiny_llama(1)


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 61, (5, 12), generator=torch.Generator().manual_seed(0))
