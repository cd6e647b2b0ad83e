"""FlashAttention-3's providers, as packages on disk with the entry points' signatures and no kernels."""

import sys
from dataclasses import replace

import pytest
import torch

from attn_backends import Accepted, Rejected, explain, registry
from attn_backends import fa3_providers as providers
from attn_backends.capabilities import Feature
from attn_backends.fa3_providers import PROVIDER_VARIABLE, BrokenProvider, find_provider
from builders import BatchError
from builders.flash_attn3 import FlashAttn3Metadata
from spec_decode.tools.specs import MLA
from tests.attn_backends.packages_on_disk import packages_on_disk, versions
from tests.backends_over_stand_ins import unloaded
from tests.factories import CPU, make_cache, make_spec
from tests.flash_attn3_stand_in import PATHS

MODULES = {kind.name: kind.module for kind in providers.PROVIDERS}
each_provider = pytest.mark.parametrize("name", MODULES)

VLLM = """
calls = []
FA3_AVAILABLE, FA3_UNAVAILABLE_REASON = True, None
def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, block_table=None,
        num_splits=0, fa_version=2, s_aux=None, return_softmax_lse=False, q_v=None, k_descale=None, v_descale=None):
    calls.append(dict(locals()))
    return (q, q[..., 0].t()) if return_softmax_lse else q
"""
UPSTREAM = """
calls = []
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None,
        cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        num_splits=0, return_softmax_lse=False, sinks=None, qv=None, k_descale=None, v_descale=None):
    calls.append(dict(locals()))
    return (q, q[..., 0].t(), None, None) if return_softmax_lse else q
"""
SOURCES = {"upstream": UPSTREAM, "vllm": VLLM, "sgl": UPSTREAM}
ERROR = "raise ImportError('undefined symbol: _ZN5torch')"
TOKENSPEED = ("SOFTCAP", "HDIM96", "SM8x", "HDIMDIFF64", "HDIMDIFF192")
"""What flash_attn_config of tokenspeed-fa3 3.0.0.post20260810 says was left out."""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Installs a provider; what is not installed is absent."""
    monkeypatch.delenv(PROVIDER_VARIABLE, raising=False)
    top_level = {module.partition(".")[0] for module in MODULES.values()}
    with packages_on_disk(tmp_path, *top_level, "flash_attn_config") as on_disk:
        yield lambda name, source=None, module=None: on_disk(
            module or MODULES[name], SOURCES[name] if source is None else source
        )


@pytest.fixture
def build(install):
    """Installs upstream with a record of the parts that its build left out, and gives the provider."""

    def build(*left_out, source=None):
        install("upstream", source)
        flags = {f"FLASHATTENTION_DISABLE_{part}": True for part in (*left_out, "BACKWARD")}
        install("upstream", f"CONFIG = {{'build_flags': {flags}}}", module="flash_attn_config")
        return find_provider()

    return build


@pytest.mark.parametrize(
    ("installed", "pinned", "chosen"),
    [
        (("sgl", "vllm", "upstream"), "", "upstream"),
        (("sgl", "vllm"), "", "vllm"),
        (("sgl",), "", "sgl"),
        *((("sgl", "vllm", "upstream"), name, name) for name in MODULES),
    ],
)
def test_find_provider_prefers_pinned_then_first_installed(installed, pinned, chosen, install, monkeypatch):
    for name in installed:
        install(name)
    monkeypatch.setenv(PROVIDER_VARIABLE, pinned)
    assert find_provider().name == chosen


@pytest.mark.parametrize(
    ("pinned", "error", "words"),
    [
        ("", ImportError, r"^FlashAttention-3 is not installed: pip install '\.\[flash-attn\]' in a checkout of \S+$"),
        ("sgl", ImportError, r"sgl_kernel\.flash_attn, which \w+=sgl pins, is not installed: pip install"),
        ("flash-attn", ValueError, "one of upstream, vllm, sgl, got 'flash-attn'"),
    ],
)
def test_absent_provider_raises_import_error(pinned, error, words, install, monkeypatch):
    if pinned:
        install("upstream")
        monkeypatch.setenv(PROVIDER_VARIABLE, pinned)
    with pytest.raises(error, match=words):
        find_provider()


BROKEN = {
    "undefined symbol": ("vllm", ERROR, "undefined symbol: _ZN5torch"),
    "missing library": ("upstream", "raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13"),
    "missing extension": ("upstream", "import flash_attn_3_that_is_not_here", "flash_attn_3_that_is_not_here"),
    "no Hopper": ("vllm", VLLM.replace("True, None", "False, 'no sm90a'"), "lacks FlashAttention-3: no sm90a"),
    "no entry": ("upstream", "", "no flash_attn_with_kvcache"),
    "too old": ("upstream", UPSTREAM.replace("page_table=None,", ""), "lacks page_table: it is too old"),
    "too old for splits": ("vllm", VLLM.replace("num_splits=0, fa_version=2", "fa_version=2"), "lacks num_splits"),
}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("name", "source", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_provider_raises_without_trying_others(name, source, words, pinned, install, monkeypatch):
    install("sgl")
    install(name, source)
    monkeypatch.setenv(PROVIDER_VARIABLE, name if pinned else "")
    with pytest.raises(BrokenProvider, match="no other provider was tried") as refusal:
        find_provider()
    assert words in str(refusal.value) and f"{name} ({MODULES[name]})" in str(refusal.value)


def test_package_without_module_is_broken_provider(install):
    install("vllm", "", module="vllm.version")
    install("sgl")
    with pytest.raises(BrokenProvider, match=r"No module named 'vllm\.vllm_flash_attn'"):
        find_provider()


@pytest.mark.parametrize("part", ["PAGEDKV", "VARLEN", "SPLIT"])
def test_upstream_build_without_required_part_is_broken(part, build):
    with pytest.raises(BrokenProvider, match=f"built without {part}"):
        build(part)


def test_unreadable_build_record_is_broken_provider(install):
    install("upstream")
    install("upstream", "CONFIG = {}", module="flash_attn_config")
    with pytest.raises(BrokenProvider, match="KeyError: 'build_flags'"):
        find_provider()


def test_upstream_claims_features_of_its_build(build):
    every = frozenset(Feature) - {Feature.BATCH_INVARIANT, Feature.HEAD_SCALES}
    whole = build()
    assert whole.features == every and whole.serves_latents
    assert build("LOCAL").features == every - {Feature.SLIDING_WINDOW}
    assert build("SOFTCAP").features == every - {Feature.SOFT_CAP}
    for part in ("HDIMDIFF64", "HDIMDIFF192"):
        less = build(part)
        assert less.features == every - {Feature.VALUE_DIM} and not less.serves_latents
    few = build("HDIM256", "FP16", "FP8")
    assert few.head_dims.maximum == 192 and few.dtypes == (torch.bfloat16,) and few.kv_dtypes == ()
    released = build(*TOKENSPEED)
    assert released.features == every - {Feature.SOFT_CAP, Feature.VALUE_DIM}
    assert (released.dtypes, released.kv_dtypes) == ((torch.bfloat16, torch.float16), (torch.float8_e4m3fn,))
    # A head dim without a kernel of its own, here up to 96, runs in the next wider one.
    assert released.head_dims.maximum == 256 and 96 in released.head_dims
    assert not build(source=UPSTREAM.replace(", qv=None", "")).serves_latents


def test_upstream_without_build_record_lacks_value_dim(install):
    install("upstream")
    assert find_provider().features == frozenset(Feature) - {
        Feature.VALUE_DIM, Feature.BATCH_INVARIANT, Feature.HEAD_SCALES,
    }  # fmt: skip


def test_build_without_lse_lacks_trees(install):
    install("vllm", VLLM.replace(", return_softmax_lse=False", "").replace("if return_softmax_lse", "if False"))
    found = find_provider()
    assert Feature.TREE not in found.features and found.serves_latents


def make_metadata(**changes):
    return FlashAttn3Metadata(**{
        "num_reqs": 2, "num_tokens": 6, "max_query_len": 3, "max_seq_len": 30, "num_splits": 5,
        "query_start_loc": torch.tensor([0, 3, 6], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 9], dtype=torch.int32), "kv_lens": torch.tensor([4, 6], dtype=torch.int32),
        "block_table": torch.zeros(2, 8, dtype=torch.int32), "slot_mapping": torch.zeros(6, dtype=torch.int64),
        **changes,
    })  # fmt: skip


METADATA = make_metadata()


def call_of(provider, spec, how="attend", **given):
    """What the provider's entry was called with, what it returned, and the tensors that it was given."""
    query, cache = torch.zeros(6, spec.num_q_heads, spec.head_dim), make_cache(spec, 3)
    found = getattr(provider, how)(query, cache, METADATA, spec, **given)
    return sys.modules[provider.module].calls[-1], found, query, cache


@each_provider
def test_entry_point_receives_batch_and_spec_numbers(name, install):
    install(name)
    provider = find_provider()
    call, found, query, cache = call_of(provider, make_spec(scale=0.3))
    given = zip(provider.inputs, (cache.key, cache.value, METADATA.kv_lens, METADATA.block_table), strict=True)
    assert found is query and call["q"] is query and all(call[argument] is tensor for argument, tensor in given)
    assert call["cu_seqlens_q"] is METADATA.query_start_loc and (call["softcap"], call["window_size"]) == (0, (-1, -1))
    assert [call[each] for each in ("max_seqlen_q", "softmax_scale", "causal", "num_splits")] == [3, 0.3, True, 5]
    if name == "vllm":
        assert (call["fa_version"], call["max_seqlen_k"], call["s_aux"], call["cu_seqlens_k"]) == (3, 30, None, None)
    else:
        assert (call["k"], call["v"], call["sinks"]) == (None, None, None)
    # The window counts the query itself.
    call, *_ = call_of(provider, make_spec(sliding_window=17, soft_cap=2.5))
    assert (call["softcap"], call["window_size"]) == (2.5, (16, 0))


@each_provider
def test_latents_are_passed_as_values_and_rotary_keys(name, install):
    install(name)
    spec = replace(MLA, causal=False)
    provider = find_provider()
    call, _, query, cache = call_of(provider, spec, "attend_to_latents")
    key, value = (call[entry] for entry in provider.inputs[:2])
    latent_query = call["q_v" if name == "vllm" else "qv"]
    assert value is cache.value and key.shape == (*cache.key.shape[:3], 64)
    assert key.data_ptr() == cache.key[..., 512:].data_ptr()
    assert call["q"].data_ptr() == query[..., 512:].data_ptr() and call["q"].shape[-1] == 64
    assert latent_query.data_ptr() == query.data_ptr() and latent_query.shape[-1] == 512
    assert (call["causal"], call["softmax_scale"]) == (False, spec.softmax_scale)


@each_provider
def test_prefix_call_is_not_causal_and_returns_lse(name, install):
    install(name)
    provider, spec = find_provider(), make_spec(sinks=True, tree=True)
    call, (out, lse), query, _ = call_of(provider, spec, "attend_to_prefix")
    assert out is query and lse.shape == (spec.num_q_heads, 6)
    assert call[provider.inputs[2]] is METADATA.kv_lens and call["return_softmax_lse"] is True
    assert (call["causal"], call["window_size"]) == (False, (-1, -1)) and call.get(provider.sinks) is None


@pytest.mark.parametrize("argument", ["s_aux", "sinks", "no_such"])
@each_provider
def test_sinks_are_passed_in_bf16_or_rejected(name, argument, install):
    install(name, SOURCES[name].replace("s_aux", "sinks").replace("sinks=None", f"{argument}=None"))
    provider, logits = find_provider(), torch.tensor([0.1, -2.0, 3.3, 4.0])
    assert (Feature.SINKS in provider.features) is (argument != "no_such")
    if argument == "no_such":
        with pytest.raises(BatchError, match="Set another provider"):
            call_of(provider, make_spec(sinks=True), sinks=logits)
    else:
        given = call_of(provider, make_spec(sinks=True), sinks=logits)[0][argument]
        assert given.dtype == torch.bfloat16 and torch.equal(given, logits.bfloat16())


def test_version_names_package_without_metadata(install, tmp_path):
    install("sgl")
    for known, version in (
        ({"sgl-kernel": "0.3.21"}, "sgl-kernel 0.3.21"),
        ({"sgl-kernel": "0.3.21", "sglang-kernel": "0.4.10"}, "sglang-kernel 0.4.10"),
        ({}, "sglang-kernel of unknown version"),
    ):
        with versions(known):
            assert find_provider().version == version
    (tmp_path / "sgl_kernel" / "flash_ops.abi3.so").write_bytes(b"kernels")
    digest = "sha256 e98f56f907c4"
    with versions({}):
        assert find_provider().version == f"sglang-kernel without its wheel's metadata (flash_ops.abi3.so, {digest})"
    # Upstream's module lies among libraries of others.
    install("upstream")
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "_another_package.abi3.so").write_bytes(b"not these")
    (tmp_path / "flash_attn_3" / "_C.abi3.so").write_bytes(b"kernels")
    with versions({}):
        assert find_provider().version == f"tokenspeed-fa3 without its wheel's metadata (_C.abi3.so, {digest})"


@pytest.fixture
def load(install):
    """Loads the backend over one provider; afterwards nobody has loaded it."""

    def load(name, source=None):
        install(name, source)
        return registry.get("flash_attn3")

    with unloaded(*PATHS):
        yield load


def hopper_spec(**changes):
    fields = {"num_q_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    return make_spec(**{**fields, **changes})


def reasons(backend, spec):
    return "; ".join(backend.unsupported_reasons(spec, CPU) + backend.capabilities.unsupported_reasons(spec, CPU))


def test_backend_claims_match_provider(load, build):
    without_sinks = UPSTREAM.replace(", sinks=None", "")
    provider = build(*TOKENSPEED, "FP8", source=without_sinks)
    backend = load("upstream", without_sinks)
    assert backend.capabilities.features == provider.features
    assert "has no sinks" in reasons(backend, hopper_spec(sinks=True))
    assert "has no soft_cap" in reasons(backend, hopper_spec(soft_cap=5.0))
    assert "has no value_dim" in reasons(backend, hopper_spec(head_dim=192, value_dim=128))
    assert "float8_e4m3fn" in reasons(backend, hopper_spec(kv_dtype=torch.float8_e4m3fn))


SERVED = [(64, 64), (64, 200), (64, 512), (136, 104), (192, 128), (256, 256)]
WITHOUT_KERNEL = [(64, 128), (64, 192), (64, 520), (96, 64), (128, 136), (192, 96), (192, 136), (200, 128)]


def test_dim_pairs_without_kernel_are_rejected(load):
    backend = load("vllm")
    rejections = {
        dims: reasons(backend, hopper_spec(head_dim=dims[0], value_dim=dims[1])) for dims in SERVED + WITHOUT_KERNEL
    }
    assert [dims for dims, why in rejections.items() if "value_dim" in why] == WITHOUT_KERNEL
    assert not any("head_dim" in rejections[dims] for dims in SERVED)


def test_sinks_rejected_outside_kernel_heads_and_dims(load):
    backend = load("vllm")
    assert "sinks" not in reasons(backend, hopper_spec(num_q_heads=64, sinks=True))
    assert "num_q_heads must be at most 64, got 66" in reasons(backend, hopper_spec(num_q_heads=66, sinks=True))
    assert "num_q_heads" not in reasons(backend, hopper_spec(num_q_heads=66))
    assert "with sinks value_dim must equal" in reasons(backend, hopper_spec(head_dim=192, value_dim=128, sinks=True))


def test_compute_capability_other_than_9_is_rejected(load, monkeypatch):
    backend = load("vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    support = str(backend.supports(hopper_spec(), torch.device("cuda")))
    assert "compute capability 9 only, the device has (10, 0)" in support
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(backend.supports(hopper_spec(), torch.device("cuda")), Accepted)


def test_forward_passes_cache_and_bf16_sinks(load):
    backend, spec = load("vllm"), hopper_spec(sinks=True)
    query, cache = torch.zeros(2, 8, 128, dtype=torch.bfloat16), make_cache(spec, 3)
    metadata = make_metadata(num_tokens=2, max_query_len=1)

    out = backend.forward(query, cache, metadata, spec=spec, sinks=torch.zeros(8))

    call = sys.modules[MODULES["vllm"]].calls[0]
    assert out is query and call["k"] is cache.key and call["s_aux"].dtype == torch.bfloat16


def test_queries_are_clamped_before_e4m3_cast(load, monkeypatch):
    backend, spec = load("vllm"), hopper_spec(kv_dtype=torch.float8_e4m3fn)
    cache = make_cache(spec, 3)
    query, metadata = torch.full((2, 8, 128), 470.0, dtype=torch.bfloat16), make_metadata(num_tokens=2)
    cast, largest = torch.Tensor.to, []
    # What a cast makes of 470 depends on the torch: NaN up to 2.11, 448 later.
    monkeypatch.setattr(torch.Tensor, "to", lambda x, dtype: largest.append(x.max().item()) or cast(x, dtype))

    backend.forward(query, cache, metadata, spec=spec)

    assert largest == [448.0]
    call = sys.modules[MODULES["vllm"]].calls[0]
    assert call["q"].float().eq(448).all()
    for name, scale in (("k_descale", cache.scales.key), ("v_descale", cache.scales.value)):
        assert torch.equal(call[name], scale.expand(metadata.num_reqs, spec.num_kv_heads))


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_a_build_without_scales_serves_no_e4m3_cache(name, load):
    backend = load("vllm", VLLM.replace(f", {name}=None", ""))
    assert "float8_e4m3fn" in reasons(backend, hopper_spec(kv_dtype=torch.float8_e4m3fn))


def test_broken_provider_rejection_names_it(load):
    with pytest.raises(registry.BrokenBackend):
        load("vllm", ERROR)
    verdict = explain("flash_attn3", hopper_spec(), CPU)
    assert isinstance(verdict, Rejected)
    assert "vllm (vllm.vllm_flash_attn.flash_attn_interface) is installed but cannot be used" in verdict.reasons[0]


def test_list_command_shows_chosen_provider(load):
    from click.testing import CliRunner

    from spec_decode.cli.main import main

    load("sgl")
    shown = CliRunner().invoke(main, ["list", "--device", "cpu"]).output
    assert "flash_attn3 sglang-kernel of unknown version: rejected" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without the kernels hears")
def test_missing_kernels_rejection_names_extra():
    verdict = explain("flash_attn3", make_spec(), CPU)

    assert isinstance(verdict, Rejected)
    assert "pip install '.[flash-attn]' in a checkout" in verdict.reasons[0]
