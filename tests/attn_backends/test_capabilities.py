import re
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from attn_backends import Accepted, Capabilities, CapabilitiesError, Feature, Rejected, Sizes, get
from attn_backends.capabilities import features_of
from builders import AttentionKind
from tests.factories import CPU, make_spec

NARROW = Capabilities(
    devices=("cpu",),
    dtypes=(torch.float32, torch.bfloat16),
    head_dims=Sizes(minimum=8, maximum=16, multiple_of=8),
    page_sizes=Sizes(power_of_two=True),
    features=frozenset({Feature.GQA}),
)
WRONG = [
    ("devices", None),
    ("devices", "cpu"),
    ("devices", ()),
    ("devices", (1,)),
    ("devices", ("cuda:1",)),
    ("dtypes", ()),
    ("dtypes", ("float32",)),
    ("head_dims", 64),
    ("page_sizes", None),
    ("features", {Feature.GQA}),
    ("features", frozenset({"gqa"})),
    ("required", frozenset({Feature.SINKS})),
    ("kinds", ("mha",)),
    ("value_dims", (64,)),
    ("kv_dtypes", [torch.float16]),
    ("quantises_queries", 1),
    ("rounds_partials", None),
    ("lowest_score", float("-inf")),
    ("lowest_score", -1),
    ("lowest_score", 5e4),
    ("mixed_kv_dtypes", "no"),
    ("fused_writes", frozenset({Feature.GQA})),
    ("compute_capability", 9),
    ("compute_capability", (9,)),
    ("compute_capability", (-1, 0)),
    ("one_major_version", None),
]
AGAINST = {
    "dtype": ({"dtype": torch.float16, "kv_dtype": torch.float32}, "dtype must be one of float32, bfloat16"),
    "kv dtype": ({"kv_dtype": torch.float16}, "kv_dtype must be one of float32, bfloat16"),
    "mixed dtypes": ({"kv_dtype": torch.bfloat16}, "kv_dtype must equal dtype"),
    "head dim": ({"head_dim": 12}, "head_dim must be 8 to 16, a multiple of 8, got 12"),
    "page size": ({"page_size": 12}, "page_size must be at least 1, a power of two, got 12"),
    "kind": ({"kind": AttentionKind.MLA, "num_kv_heads": 1}, "serves mha, not mla"),
    "window": ({"sliding_window": 4}, "has no sliding_window"),
    "soft cap": ({"soft_cap": 4.0}, "has no soft_cap"),
    "sinks": ({"sinks": True}, "has no sinks"),
    "value dim": ({"value_dim": 8}, "has no value_dim"),
}


@given(st.integers(1, 600), st.integers(1, 64), st.integers(64, 512), st.integers(1, 16), st.booleans())
@example(size=1, minimum=1, maximum=1, multiple=1, power=True)
def test_sizes_contain_exactly_what_rules_allow(size, minimum, maximum, multiple, power):
    powers = {2**n for n in range(12)}
    expected = {n for n in range(minimum, maximum + 1) if n % multiple == 0 and (not power or n in powers)}
    rules = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple, "power_of_two": power}
    if expected:
        assert (size in Sizes(**rules)) == (size in expected)
    else:
        with pytest.raises(CapabilitiesError, match="sizes must contain at least one"):
            Sizes(**rules)


RULES = [("minimum", 0), ("minimum", 1.0), ("maximum", -64), ("multiple_of", True), ("power_of_two", 2)]


@pytest.mark.parametrize(("make", "field", "value"), [(Sizes, *rule) for rule in RULES] + [(NARROW, *w) for w in WRONG])
def test_invalid_capability_names_field_and_value(make, field, value):
    words = rf"{field} must be .*, got {re.escape(repr(value))}: .*was created"
    with pytest.raises(CapabilitiesError, match=words):
        Sizes(**{field: value}) if make is Sizes else replace(NARROW, **{field: value})


def test_all_invalid_capability_fields_are_named():
    with pytest.raises(CapabilitiesError, match=r"^devices must be .*; dtypes must be .*; kinds must be "):
        replace(NARROW, devices=(), dtypes=(), kinds=())


@pytest.mark.parametrize(("changes", "reason"), AGAINST.values(), ids=AGAINST)
def test_each_unsupported_spec_part_has_a_reason(changes, reason):
    assert any(reason in found for found in NARROW.unsupported_reasons(make_spec(**changes), CPU))


def test_unsupported_reasons_lists_all_without_device():
    spec = make_spec(head_dim=12, page_size=12, sliding_window=4, soft_cap=2.0, sinks=True)
    assert len(NARROW.unsupported_reasons(spec, CPU)) == 6  # the value dim follows the head dim
    assert NARROW.spec_reasons(spec) == NARROW.unsupported_reasons(spec, CPU)


def test_supported_spec_has_no_reasons():
    assert NARROW.unsupported_reasons(make_spec(), CPU) == []
    mixed = replace(NARROW, mixed_kv_dtypes=True)
    assert mixed.unsupported_reasons(make_spec(kv_dtype=torch.bfloat16), CPU) == []


def test_unsupported_device_is_a_reason(monkeypatch):
    cuda, spec = torch.device("cuda"), make_spec()
    assert NARROW.unsupported_reasons(spec, cuda) == ["runs on cpu, not on cuda"]
    anywhere = replace(NARROW, devices=("cpu", "cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert anywhere.unsupported_reasons(spec, cuda) == ["needs a CUDA device and this machine has none"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert anywhere.unsupported_reasons(spec, cuda) == ["needs compute capability (8, 0), the device has (7, 5)"]


def test_features_of_lists_every_feature_used():
    spec = make_spec(sliding_window=64, soft_cap=2.0, sinks=True, value_dim=8, batch_invariant=True, tree=True)
    scaled = make_spec(kv_dtype=torch.float8_e4m3fn, head_scales=True)
    assert {*features_of(spec), *features_of(make_spec(causal=False)), *features_of(scaled)} == set(Feature)
    assert features_of(make_spec(num_kv_heads=4)) == []


def test_backend_reasons_follow_capability_reasons():
    class Picky(type(get("torch_reference"))):
        def unsupported_reasons(self, spec, device):
            return ["does not like Mondays"] if spec.sinks else []

    assert Picky().supports(make_spec(), CPU) == Accepted()
    verdict = Picky().supports(make_spec(dtype=torch.float64, sinks=True), CPU)
    assert isinstance(verdict, Rejected) and verdict.reasons[-1] == "does not like Mondays" and len(verdict.reasons) > 1
    assert Accepted() and not verdict


@pytest.mark.parametrize("name", ["torch_reference", "triton_paged"])
def test_allocate_kv_shapes_match_spec(name):
    spec = make_spec(head_dim=64, value_dim=72, kv_dtype=None)
    cache = get(name).allocate_kv(spec, 5, CPU)
    assert cache.key.shape == (5, 4, 2, 64) and cache.value.shape == (5, 4, 2, 72) and cache.num_pages == 5


def test_triton_paged_interleaves_keys_and_values_by_page():
    cache = get("triton_paged").allocate_kv(make_spec(head_dim=64), 5, CPU)
    page = 4 * 2 * 64
    assert cache.key.stride(0) == 2 * page
    assert cache.value.data_ptr() - cache.key.data_ptr() == page * cache.key.element_size()
