import math

import pytest
import torch

from builders import AttentionKind, AttentionSpec, SpecError
from tests.factories import make_spec

BROKEN = {
    "no query heads": ({"num_q_heads": 0}, "num_q_heads must be at least 1, got 0"),
    "no kv heads": ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
    "no head dim": ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    "no value dim": ({"value_dim": -1}, "value_dim must be at least 1, got -1"),
    "no page": ({"page_size": 0}, "page_size must be at least 1, got 0"),
    "heads do not group": ({"num_q_heads": 5}, "num_q_heads must be a multiple of num_kv_heads, got 5 and 2"),
    "empty window": ({"sliding_window": 0}, "sliding_window counts the query itself"),
    "zero soft cap": ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0"),
    "nan soft cap": ({"soft_cap": float("nan")}, "soft_cap must be a finite number or None, got nan"),
    "infinite soft cap": ({"soft_cap": math.inf}, "soft_cap must be a finite number or None, got inf"),
    "nan scale": ({"scale": math.nan}, "scale must be a finite number or None, got nan"),
    "infinite scale": ({"scale": math.inf}, "scale must be a finite number or None, got inf"),
    "no scale": ({"scale": 0}, "scale must be positive, got 0"),
    "kind as a string": ({"kind": "mla"}, "kind must be of type AttentionKind, got 'mla'"),
    "heads as a float": ({"num_q_heads": 16.0}, "num_q_heads must be an int, got 16.0"),
    "half a head": ({"num_kv_heads": 4.5}, "num_kv_heads must be an int, got 4.5"),
    "half a page": ({"page_size": 8.5}, "page_size must be an int, got 8.5"),
    "page as a bool": ({"page_size": True}, "page_size must be an int, got True"),
    "window as a bool": ({"sliding_window": True}, "sliding_window must be an int or None, got True"),
    "head dim as a string": ({"head_dim": "16"}, "head_dim must be an int, got '16'"),
    "dtype as a string": ({"dtype": "float32"}, "dtype must be of type dtype, got 'float32'"),
    "cache dtype as a string": ({"kv_dtype": "float32"}, "kv_dtype must be of type dtype or None, got 'float32'"),
    "integer queries": ({"dtype": torch.int8}, "and must be a floating-point dtype, got torch.int8"),
    "complex queries": ({"dtype": torch.complex64}, "and must be a floating-point dtype, got torch.complex64"),
    "a cache of int64": (
        {"kv_dtype": torch.int64},
        "dtype, torch.int8 or torch.uint8, got torch.int64",
    ),
    "invariance as a string": ({"batch_invariant": "yes"}, "batch_invariant must be True or False, got 'yes'"),
    "invariance as a number": ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
    "half invariant": ({"batch_invariant": 0.5}, "batch_invariant must be True or False, got 0.5"),
    "head scales of a wide cache": ({"head_scales": True}, "in torch.float8_e4m3fn, got mha in torch.float32"),
    "head scales of latents": (
        {"kind": AttentionKind.MLA, "num_kv_heads": 1, "kv_dtype": torch.float8_e4m3fn, "head_scales": True},
        "those of keys and values in torch.float8_e4m3fn, got mla",
    ),
    "two latents": ({"kind": AttentionKind.MLA}, "num_kv_heads must be 1 and value_dim at most head_dim, got 2"),
    "value beyond the latent": (
        {"kind": AttentionKind.MLA, "num_kv_heads": 1, "value_dim": 17},
        "value_dim at most head_dim, got 1 and 17 of 16",
    ),
}


def test_spec_defaults_follow_head_dim_and_dtype():
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
    assert (spec.out_dim, spec.cache_dtype, spec.softmax_scale, spec.group_size) == (
        64,
        torch.bfloat16,
        0.125,
        4,
    )


def test_given_values_win_over_defaults():
    spec = make_spec(value_dim=8, kv_dtype=torch.bfloat16, scale=0.5)
    assert (spec.out_dim, spec.cache_dtype, spec.softmax_scale) == (8, torch.bfloat16, 0.5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_cache_may_be_quantised(dtype):
    assert make_spec(kv_dtype=dtype).cache_dtype is dtype


def test_equal_specs_are_equal_values():
    assert make_spec() == make_spec(value_dim=16) and hash(make_spec()) == hash(make_spec(value_dim=16))


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_invalid_spec_is_rejected(changes, message):
    with pytest.raises(SpecError) as refused:
        make_spec(**changes)
    assert message in str(refused.value)


def test_every_problem_is_listed_at_once():
    with pytest.raises(SpecError) as refused:
        make_spec(num_q_heads=-1, head_dim=0, page_size=0, sliding_window=0, soft_cap=-2.0)
    for name in ("num_q_heads", "head_dim", "value_dim", "page_size", "sliding_window", "soft_cap"):
        assert name in str(refused.value)


def test_describe_names_the_basics_in_one_line():
    assert make_spec().describe() == "4/2 heads, dim 16, page 4, float32"


def test_describe_names_every_feature():
    spec = make_spec(
        num_kv_heads=1,
        value_dim=8,
        kv_dtype=torch.bfloat16,
        sliding_window=7,
        soft_cap=30.0,
        sinks=True,
        kind=AttentionKind.MLA,
    )
    assert spec.describe() == "4/1 heads, dim 16/8, page 4, float32, kv bfloat16, window 7, soft cap 30, sinks, mla"
