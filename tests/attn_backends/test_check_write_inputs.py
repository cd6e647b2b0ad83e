from types import SimpleNamespace

import pytest
import torch

from attn_backends import KVCache, check_write_inputs, get
from builders import AttentionKind, BatchError
from tests.factories import CPU, make_spec


def a_write(kind, **changes):
    """The inputs of a right write of 3 tokens, but for what changes."""
    spec = make_spec(kind=kind, num_kv_heads=1, value_dim=16)
    cache = get("torch_reference").allocate_kv(spec, 2, CPU)
    heads = torch.zeros(3, 1, 16)
    right = {"key": heads, "value": heads, "slots": torch.zeros(3, dtype=torch.int64)}
    given = SimpleNamespace(**{**right, **changes})
    return given.key, given.value, cache, SimpleNamespace(num_tokens=3, slot_mapping=given.slots)


@pytest.mark.parametrize("kind", AttentionKind)
def test_a_right_write_is_let_through(kind):
    check_write_inputs(*a_write(kind))


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slot_mapping must be torch.int64"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "slot_mapping must be torch.int64"),
        ({"key": torch.zeros(3, 1, 15)}, "key must be torch.float32"),
        ({"key": torch.zeros(3, 1, 16, dtype=torch.bfloat16)}, "key must be torch.float32"),
        ({"key": torch.zeros(4, 1, 16)}, "key must be torch.float32"),
        ({"key": torch.zeros(3, 2, 16)}, "key must be torch.float32"),
    ],
)
def test_what_a_kernel_would_misread_is_refused(kind, changes, message):
    with pytest.raises(BatchError, match=message):
        check_write_inputs(*a_write(kind, **changes))


def test_a_value_of_another_shape_is_refused():
    with pytest.raises(BatchError, match="value must be"):
        check_write_inputs(*a_write(AttentionKind.MHA, value=torch.zeros(3, 1, 8)))


def test_a_packed_cache_of_latents_takes_bfloat16_latents():
    spec = make_spec(
        kind=AttentionKind.MLA, num_kv_heads=1, head_dim=512, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn
    )
    cache = get("torch_reference").allocate_kv(spec, 2, CPU)
    metadata = SimpleNamespace(num_tokens=1, slot_mapping=torch.zeros(1, dtype=torch.int64))
    latent = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    check_write_inputs(latent, latent, cache, metadata)
    with pytest.raises(BatchError, match=r"key must be torch\.bfloat16"):
        check_write_inputs(latent.float(), latent, cache, metadata)
    assert isinstance(cache, KVCache)
