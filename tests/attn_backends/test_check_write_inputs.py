from types import SimpleNamespace

import pytest
import torch

from attn_backends import check_write_inputs, get
from builders import AttentionKind, BatchError
from tests.factories import CPU, make_spec

MHA, MLA = make_spec(num_kv_heads=1), make_spec(num_kv_heads=1, kind=AttentionKind.MLA)
FP8_DS_MLA = make_spec(
    num_kv_heads=1, kind=AttentionKind.MLA, head_dim=512, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn
)
SPECS = {"keys and values": MHA, "latents": MLA, "fp8_ds_mla": FP8_DS_MLA}


def check(spec, change=None):
    """A write of 3 tokens, right but for what changes."""
    new = torch.zeros(3, 1, spec.head_dim, dtype=spec.dtype)
    given = {"key": new, "value": new, "slots": torch.zeros(3, dtype=torch.int64)}
    given |= {name: to(given[name]) for name, to in (change or {}).items()}
    metadata = SimpleNamespace(num_tokens=3, slot_mapping=given["slots"])
    check_write_inputs(given["key"], given["value"], get("torch_reference").allocate_kv(spec, 2, CPU), metadata)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_valid_write_inputs_are_accepted(spec):
    check(spec)


REFUSED = {
    "slots of another dtype": ({"slots": torch.Tensor.int}, r"slot_mapping must be torch\.int64"),
    "slots apart": ({"slots": lambda x: x.repeat_interleave(2)[::2]}, "slot_mapping must be contiguous"),
    "too few slots": ({"slots": lambda x: x[:2]}, r"slot_mapping must be torch\.int64"),
    "keys of another dim": ({"key": lambda x: x[..., :15]}, r"key must be torch\."),
    "keys of another dtype": ({"key": torch.Tensor.double}, r"key must be torch\."),
    "too many keys": ({"key": lambda x: torch.cat([x, x])}, r"key must be torch\."),
    "too many heads": ({"key": lambda x: x.expand(-1, 2, -1)}, r"key must be torch\."),
}
CASES = [(spec, *case) for spec in SPECS.values() for case in REFUSED.values()]


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        *CASES,
        (MHA, {"value": lambda x: x[..., :8]}, "value must be"),
        (MHA, {"key": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "the last dim of keys"),
    ],
)
def test_misread_write_inputs_raise_batch_error(spec, change, message):
    with pytest.raises(BatchError, match=message):
        check(spec, change)
