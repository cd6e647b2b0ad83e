import pytest
import torch

from builders import BatchError
from builders.errors import require_tensor


class Elsewhere:
    """As much of a tensor as the check asks for, on a device that need not be here."""

    def __init__(self, device):
        self.shape, self.dtype, self.device = torch.Size([2]), torch.float32, torch.device(device)


def required_on(device, tensor_device):
    require_tensor("x", Elsewhere(tensor_device), shape=(2,), dtype=torch.float32, device=torch.device(device))


def test_a_tensor_of_the_same_kind_of_device_but_another_one_is_refused():
    with pytest.raises(BatchError, match=r"x must be torch\.float32 \[2\] on cuda:0, got .* on cuda:1; a kernel"):
        required_on("cuda:0", "cuda:1")


@pytest.mark.parametrize(("wanted", "found"), [("cuda", "cuda:1"), ("cpu:0", "cpu"), ("cuda:1", "cuda:1")])
def test_a_device_without_an_index_is_any_of_its_type(wanted, found):
    required_on(wanted, found)
