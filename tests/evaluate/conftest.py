import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import tiny_llama


@pytest.fixture(scope="package")
def llama() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="package")
def other_llama() -> PreTrainedModel:
    return tiny_llama(seed=1)


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 61, (5, 12), generator=torch.Generator().manual_seed(0))
