import pytest
import torch

from builders.kernels.triton_runtime import torch_implementations
from tests.builders.flashinfer.host_planner import Case

CASES = {
    "one request": Case([8187]),
    "one short request": Case([1]),
    "page and chunk edges": Case([128, 129, 1024, 1025, 15, 16, 17]),
    "padding rows": Case([900, 0, 77, 0, 0]),
    "only padding rows": Case([0, 0, 0]),
    "one long request among short ones": Case([9000, *[3] * 31]),
    "one-token pages": Case([5, 300, 1, 2000], page_size=1),
    "large pages": Case([5, 300, 1, 2000], page_size=64),
    "one kv head and a large grid": Case([700, 8000, 30], num_kv_heads=1, grid=2112),
    "a batch that fills the grid": Case([200] * 82),
    "a grid of a power of two": Case([8192], grid=512),
    "a large batch": Case([0, 130, 4000, 7] * 100, num_kv_heads=1),
    "tensor cores": Case([8187, 0, 15, 1020], tensor_cores=True),
    "tensor cores, more rows than tiles": Case([500, 1, 0, 90] * 25, tensor_cores=True),
    "tensor cores, more long rows than tiles": Case([2000] * 80, tensor_cores=True),
    "tensor cores, as many rows as tiles": Case([2000, *[1] * 32], tensor_cores=True),
    "tensor cores, window": Case([8187, 0, 15, 1020], tensor_cores=True, window_left=127),
    "tensor cores, window past every length": Case([300, 20], tensor_cores=True, window_left=4096),
    "tensor cores, one kv head": Case([8000, 3, 400], tensor_cores=True, num_kv_heads=1, group=8),
    "several query tokens": Case([8187, 0, 15, 1020], tensor_cores=True, query_len=4),
    "several query tiles": Case([8187, 0, 15, 1020], tensor_cores=True, query_len=9, group=8, head_dim=256),
    "everything": Case(
        [8000, 0, 15, 1020] * 8, page_size=64, tensor_cores=True, num_kv_heads=2, group=8, head_dim=256, query_len=9,
        window_left=600,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replan(case):
    workspace, last_page_len = case.replanned()
    with torch_implementations():
        by_torch = case.replanned()
    assert torch.equal(workspace, by_torch[0]) and torch.equal(last_page_len, by_torch[1])
    assert not torch.equal(workspace, case.workspace())
