import pytest
import torch

from tests.conformance.backends import UNDER_TEST


@pytest.fixture(params=UNDER_TEST, ids=lambda b: b.name)
def backend(request):
    """One after the other, every backend that is registered; those for GPUs with `-m gpu`."""
    if request.param.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
