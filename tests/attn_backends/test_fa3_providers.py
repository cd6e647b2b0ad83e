"""FlashAttention-3's providers, with packages on disk that have the entries' signatures and no kernels."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from attn_backends import Accepted, KVCache, Rejected, explain, registry
from attn_backends import fa3_providers as providers
from attn_backends.capabilities import Feature
from attn_backends.fa3_providers import PROVIDER_VARIABLE, BrokenProvider, find_provider
from builders import BatchError, FlashAttn3Metadata
from spec_decode.tools.specs import MLA
from tests.backends_over_stand_ins import unloaded
from tests.factories import CPU, make_cache, make_spec
from tests.flash_attn3_stand_in import BACKENDS

MODULES = {kind.name: kind.module for kind in providers.PROVIDERS}
TOP_LEVEL = {module.partition(".")[0] for module in MODULES.values()} | {"flash_attn_config"}

VLLM = """
calls = []
FA3_AVAILABLE, FA3_UNAVAILABLE_REASON = True, None
def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
        softmax_scale=None, causal=False, window_size=None, softcap=0.0, block_table=None,
        num_splits=0, fa_version=2, s_aux=None, return_softmax_lse=False, q_v=None):
    calls.append(dict(locals()))
    return (q, q[..., 0].t()) if return_softmax_lse else q
"""
UPSTREAM = """
calls = []
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None,
        cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        num_splits=0, return_softmax_lse=False, sinks=None, qv=None):
    calls.append(dict(locals()))
    return (q, q[..., 0].t(), None, None) if return_softmax_lse else q
"""
WITHOUT_SINKS = UPSTREAM.replace(", sinks=None", "")
WITHOUT_LATENTS = UPSTREAM.replace(", qv=None", "")
WHOLE = {"vllm": VLLM, "upstream": UPSTREAM, "sgl": UPSTREAM}
TOKENSPEED = [
    *(f"FLASHATTENTION_DISABLE_{part}" for part in ("BACKWARD", "SOFTCAP", "HDIM96", "SM8x")),
    *(f"FLASH_ATTENTION_DISABLE_HDIMDIFF{dim}" for dim in (64, 192)),
]
"""What flash_attn_config of tokenspeed-fa3 3.0.0.post20260810 says was left out."""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts a provider's module on disk, with the packages around it; what is not put there is absent."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in TOP_LEVEL}
    for name in before:
        del sys.modules[name]
    for name in TOP_LEVEL:
        sys.modules[name] = None
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv(PROVIDER_VARIABLE, raising=False)

    def install(name, source=None, module=None):
        *packages, leaf = (module or MODULES[name]).split(".")
        folder = tmp_path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{leaf}.py").write_text(WHOLE[name] if source is None else source)
        sys.modules.pop((*packages, leaf)[0], None)
        importlib.invalidate_caches()

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in TOP_LEVEL]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def build_record(install):
    """Installs upstream with a record of the parts that its build left out."""

    def build(*left_out):
        install("upstream")
        flags = dict.fromkeys([*left_out, "FLASHATTENTION_DISABLE_BACKWARD"], True)
        install("upstream", f"CONFIG = {{'build_flags': {flags}}}", module="flash_attn_config")

    return build


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [(("sgl", "vllm", "upstream"), "upstream"), (("sgl", "vllm"), "vllm"), (("sgl",), "sgl")],
)
def test_the_first_that_is_installed_is_taken(installed, chosen, install):
    for name in installed:
        install(name)
    assert find_provider().name == chosen


def test_with_none_installed_the_message_names_the_package_to_install(install):
    with pytest.raises(
        ImportError, match=r"^FlashAttention-3 is not installed: pip install '\.\[flash-attn\]' in a checkout of \S+$"
    ):
        find_provider()


BROKEN = {
    "undefined_symbol": ("vllm", "raise ImportError('undefined symbol: _ZN5torch')", "undefined symbol: _ZN5torch"),
    "missing_library": ("upstream", "raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13"),
    "missing_extension": ("upstream", "import flash_attn_3_that_is_not_here", "flash_attn_3_that_is_not_here"),
    "no_hopper": ("vllm", VLLM.replace("True, None", "False, 'no sm90a'"), "without FlashAttention-3: no sm90a"),
    "no_entry": ("upstream", "", "no flash_attn_with_kvcache"),
    "too_old": ("upstream", UPSTREAM.replace("page_table=None,", ""), "has no page_table: it is too old"),
    "too_old_for_splits": ("vllm", VLLM.replace("num_splits=0, fa_version=2", "fa_version=2"), "has no num_splits"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_one_is_refused_in_its_own_words_and_no_other_is_taken(case, install):
    name, source, words = BROKEN[case]
    install("sgl")
    install(name, source)
    with pytest.raises(BrokenProvider, match="no other provider was tried") as refusal:
        find_provider()
    assert words in str(refusal.value) and f"{name} ({MODULES[name]})" in str(refusal.value)


def test_a_package_without_the_module_is_broken_and_not_absent(install):
    install("vllm", "", module="vllm.version")
    install("sgl")
    with pytest.raises(BrokenProvider, match=r"No module named 'vllm\.vllm_flash_attn'"):
        find_provider()


@pytest.mark.parametrize("part", ["PAGEDKV", "VARLEN", "SPLIT"])
def test_upstream_built_without_what_every_call_needs_is_broken(part, build_record):
    build_record(f"FLASHATTENTION_DISABLE_{part}")
    with pytest.raises(BrokenProvider, match=f"built without {part}"):
        find_provider()


@pytest.mark.parametrize("name", MODULES)
def test_an_explicit_choice_is_taken_whatever_the_order(name, install, monkeypatch):
    for each in MODULES:
        install(each)
    monkeypatch.setenv(PROVIDER_VARIABLE, name)
    assert find_provider().name == name


def test_an_explicit_choice_that_is_absent_is_refused(install, monkeypatch):
    install("upstream")
    monkeypatch.setenv(PROVIDER_VARIABLE, "sgl")
    with pytest.raises(ImportError, match=r"sgl_kernel\.flash_attn, which \w+=sgl pins, is not installed: pip install"):
        find_provider()


def test_an_explicit_choice_that_is_broken_is_refused(install, monkeypatch):
    install("upstream")
    install("sgl", "raise RuntimeError('built for another torch')")
    monkeypatch.setenv(PROVIDER_VARIABLE, "sgl")
    with pytest.raises(BrokenProvider, match="built for another torch"):
        find_provider()


def test_an_unknown_choice_lists_the_known_ones(install, monkeypatch):
    install("vllm")
    monkeypatch.setenv(PROVIDER_VARIABLE, "flash-attn")
    with pytest.raises(ValueError, match="one of upstream, vllm, sgl, got 'flash-attn'"):
        find_provider()


def test_an_empty_choice_is_none(install, monkeypatch):
    install("vllm")
    monkeypatch.setenv(PROVIDER_VARIABLE, "")
    assert find_provider().name == "vllm"


@pytest.mark.parametrize("argument", ["sinks", "s_aux", "no_such"])
@pytest.mark.parametrize("name", MODULES)
def test_sinks_are_claimed_where_the_entry_takes_them(name, argument, install):
    install(name, renamed_sinks(name, argument))
    assert (Feature.SINKS in find_provider().features) is (argument != "no_such")


def renamed_sinks(name, argument):
    return WHOLE[name].replace("s_aux", "sinks").replace("sinks=None", f"{argument}=None")


def test_a_build_that_returns_no_lse_claims_no_trees(install):
    install("vllm", VLLM.replace(", return_softmax_lse=False", "").replace("if return_softmax_lse", "if False"))
    assert Feature.TREE not in find_provider().features


def test_a_provider_without_sinks_never_drops_them_in_silence(install):
    install("upstream", WITHOUT_SINKS)
    with pytest.raises(BatchError, match="Name another provider"):
        attend(find_provider(), make_spec(sinks=True), sinks=torch.zeros(4))


@pytest.mark.parametrize(
    ("flag", "feature"),
    [
        ("FLASHATTENTION_DISABLE_LOCAL", Feature.SLIDING_WINDOW),
        ("FLASHATTENTION_DISABLE_SOFTCAP", Feature.SOFT_CAP),
        ("FLASH_ATTENTION_DISABLE_HDIMDIFF64", Feature.VALUE_DIM),
        ("FLASHATTENTION_DISABLE_HDIMDIFF192", Feature.VALUE_DIM),
    ],
)
def test_upstream_claims_only_what_its_build_kept(flag, feature, build_record):
    build_record()
    assert feature in find_provider().features
    build_record(flag)
    assert feature not in find_provider().features


def test_upstream_without_a_record_of_its_build_claims_no_value_dim(install):
    install("upstream")
    assert find_provider().features == frozenset(Feature) - {Feature.VALUE_DIM, Feature.BATCH_INVARIANT}


def test_upstream_built_for_fewer_dims_and_dtypes_claims_fewer(build_record):
    build_record("FLASHATTENTION_DISABLE_HDIM256", "FLASHATTENTION_DISABLE_FP16", "FLASHATTENTION_DISABLE_FP8")
    found = find_provider()
    assert found.head_dims.maximum == 192 and found.dtypes == (torch.bfloat16,) and found.kv_dtypes == ()


def test_the_package_of_the_registry_claims_what_its_record_says(build_record):
    build_record(*TOKENSPEED)
    found = find_provider()
    lacking = {Feature.SOFT_CAP, Feature.VALUE_DIM, Feature.BATCH_INVARIANT}
    assert found.features == frozenset(Feature) - lacking
    assert (found.dtypes, found.kv_dtypes) == ((torch.bfloat16, torch.float16), (torch.float8_e4m3fn,))
    # A head dim without a kernel of its own, here up to 96, runs in the next wider one.
    assert found.head_dims.maximum == 256 and 96 in found.head_dims


def test_a_record_that_cannot_be_read_is_a_broken_build(install):
    install("upstream")
    install("upstream", "CONFIG = {}", module="flash_attn_config")
    with pytest.raises(BrokenProvider, match="KeyError: 'build_flags'"):
        find_provider()


def make_metadata(**changes):
    fields = {
        "num_reqs": 2,
        "num_tokens": 6,
        "max_query_len": 3,
        "max_seq_len": 30,
        "num_splits": 5,
        "query_start_loc": torch.tensor([0, 3, 6], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 9], dtype=torch.int32),
        "block_table": torch.zeros(2, 8, dtype=torch.int32),
        "slot_mapping": torch.zeros(6, dtype=torch.int64),
    }
    fields |= changes
    return FlashAttn3Metadata(**{"kv_lens": fields["seq_lens"], **fields})


def attend(provider, spec, metadata=None, **given):
    """What the provider's entry was called with, beside the tensors it was given."""
    query, cache = torch.zeros(6, spec.num_q_heads, spec.head_dim), make_cache(spec, 3)
    metadata = metadata or make_metadata()
    assert provider.attend(query, cache, metadata, spec, **given) is query
    return sys.modules[provider.module].calls[-1], query, cache, metadata


def passed_through(call, names, values):
    return all(call[name] is value for name, value in zip(names, values, strict=True))


def test_vllm_is_called_for_version_3_with_the_builders_bound(install):
    install("vllm")
    spec = make_spec(scale=0.3)
    call, query, cache, metadata = attend(find_provider(), spec)
    assert passed_through(
        call,
        ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table"),
        (query, cache.key, cache.value, metadata.query_start_loc, metadata.seq_lens, metadata.block_table),
    )
    assert (call["fa_version"], call["max_seqlen_q"], call["max_seqlen_k"]) == (3, 3, 30)
    assert (call["softmax_scale"], call["causal"], call["num_splits"]) == (0.3, True, 5)
    assert call["s_aux"] is None and call["cu_seqlens_k"] is None


@pytest.mark.parametrize("name", ["upstream", "sgl"])
def test_the_others_are_called_with_the_cache_and_its_table(name, install):
    install(name)
    call, query, cache, metadata = attend(find_provider(), make_spec(scale=0.3))
    assert passed_through(
        call,
        ("q", "k_cache", "v_cache", "cu_seqlens_q", "cache_seqlens", "page_table"),
        (query, cache.key, cache.value, metadata.query_start_loc, metadata.seq_lens, metadata.block_table),
    )
    assert (call["max_seqlen_q"], call["softmax_scale"], call["causal"], call["num_splits"]) == (3, 0.3, True, 5)
    assert call["k"] is None and call["v"] is None


@pytest.mark.parametrize(("name", "latent_query"), [("vllm", "q_v"), ("upstream", "qv"), ("sgl", "qv")])
def test_latents_are_values_and_keys_beside_their_rotary_dims(name, latent_query, install):
    install(name)
    provider, spec = find_provider(), replace(MLA, causal=False)
    query, cache = torch.zeros(6, spec.num_q_heads, spec.head_dim), make_cache(spec, 3)
    provider.attend_to_latents(query, cache, make_metadata(), spec)
    call = sys.modules[provider.module].calls[-1]
    key, value = (call[entry] for entry in provider.inputs[:2])
    assert value is cache.value and key.shape == (*cache.key.shape[:3], 64)
    assert key.data_ptr() == cache.key[..., 512:].data_ptr()
    assert call["q"].data_ptr() == query[..., 512:].data_ptr() and call["q"].shape[-1] == 64
    assert call[latent_query].data_ptr() == query.data_ptr() and call[latent_query].shape[-1] == 512
    assert (call["causal"], call["softmax_scale"]) == (False, spec.softmax_scale)


def test_latents_are_served_by_a_whole_build_that_takes_them(install, build_record):
    install("vllm")
    assert find_provider().serves_latents
    build_record(*TOKENSPEED)
    assert not find_provider().serves_latents
    install("upstream", WITHOUT_LATENTS)
    install("upstream", "CONFIG = {'build_flags': {}}", module="flash_attn_config")
    found = find_provider()
    assert Feature.VALUE_DIM in found.features and not found.serves_latents


@pytest.mark.parametrize("name", MODULES)
def test_a_prefix_is_attended_to_without_causality_and_sinks_and_gives_its_lse(name, install):
    install(name)
    provider, spec = find_provider(), make_spec(sinks=True, tree=True)
    query, cache = torch.zeros(6, spec.num_q_heads, spec.head_dim), make_cache(spec, 3)
    metadata = make_metadata(kv_lens=torch.tensor([4, 6], dtype=torch.int32))

    out, lse = provider.attend_to_prefix(query, cache, metadata, spec)

    call = sys.modules[provider.module].calls[-1]
    assert out is query and lse.shape == (spec.num_q_heads, 6)
    assert call[provider.inputs[2]] is metadata.kv_lens and call["return_softmax_lse"] is True
    assert (call["causal"], call["window_size"]) == (False, (-1, -1)) and call.get(provider.sinks) is None


@pytest.mark.parametrize("name", MODULES)
def test_a_window_counts_the_query_itself(name, install):
    install(name)
    provider = find_provider()
    assert attend(provider, make_spec(sliding_window=17))[0]["window_size"] == (16, 0)
    assert attend(provider, make_spec())[0]["window_size"] == (-1, -1)


@pytest.mark.parametrize("name", MODULES)
def test_no_soft_cap_is_zero(name, install):
    install(name)
    provider = find_provider()
    assert attend(provider, make_spec(soft_cap=2.5))[0]["softcap"] == 2.5
    assert attend(provider, make_spec())[0]["softcap"] == 0.0


@pytest.mark.parametrize("argument", ["s_aux", "sinks"])
@pytest.mark.parametrize("name", MODULES)
def test_sinks_are_handed_over_in_bf16_by_whichever_name_the_entry_gives_them(name, argument, install):
    install(name, renamed_sinks(name, argument))
    logits = torch.tensor([0.1, -2.0, 3.3, 4.0])
    call = attend(find_provider(), make_spec(sinks=True), sinks=logits)[0]
    assert call[argument].dtype == torch.bfloat16 and torch.equal(call[argument], logits.bfloat16())


def test_the_version_of_upstream_is_of_its_own_library(install, tmp_path, monkeypatch):
    monkeypatch.setattr(providers, "version_of", mock_absent)
    install("upstream")
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "_another_package.abi3.so").write_bytes(b"not these")
    (tmp_path / "flash_attn_3" / "_C.abi3.so").write_bytes(b"kernels")
    assert find_provider().version == ("tokenspeed-fa3 without its wheel's metadata (_C.abi3.so, sha256 e98f56f907c4)")


def mock_absent(package):
    raise providers.PackageNotFoundError(package)


def test_the_version_names_the_package_even_where_it_has_no_metadata(install, monkeypatch, tmp_path):
    install("sgl")
    versions = {"sgl-kernel": "0.3.21"}

    def version_of(package):
        if package not in versions:
            raise providers.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(providers, "version_of", version_of)
    assert find_provider().version == "sgl-kernel 0.3.21"
    versions["sglang-kernel"] = "0.4.10"
    assert find_provider().version == "sglang-kernel 0.4.10"
    versions.clear()
    assert find_provider().version == "sglang-kernel of unknown version"
    (tmp_path / "sgl_kernel" / "flash_ops.abi3.so").write_bytes(b"kernels")
    assert find_provider().version == (
        "sglang-kernel without its wheel's metadata (flash_ops.abi3.so, sha256 e98f56f907c4)"
    )


@pytest.fixture
def load(install):
    """Loads the backend over one provider; afterwards nobody has loaded it."""

    def load(name, source=None):
        install(name, source)
        return registry.get("flash_attn3")

    with unloaded(*BACKENDS):
        yield load


def hopper_spec(**changes):
    fields = {"num_q_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
    return make_spec(**{**fields, **changes})


def reasons(backend, spec):
    return "; ".join(backend.unsupported_reasons(spec, CPU) + backend.capabilities.unsupported_reasons(spec, CPU))


def test_the_backend_claims_what_its_provider_has(load, build_record):
    build_record(*TOKENSPEED, "FLASHATTENTION_DISABLE_FP8")
    backend = load("upstream", WITHOUT_SINKS)
    assert backend.capabilities.features == find_provider().features
    assert "has no sinks" in reasons(backend, hopper_spec(sinks=True))
    assert "has no soft_cap" in reasons(backend, hopper_spec(soft_cap=5.0))
    assert "has no value_dim" in reasons(backend, hopper_spec(head_dim=192, value_dim=128))
    assert "float8_e4m3fn" in reasons(backend, hopper_spec(kv_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("dims", [(64, 64), (64, 200), (64, 512), (136, 104), (192, 128), (256, 256)])
def test_pairs_of_dims_that_have_a_kernel_are_served(dims, load):
    told = reasons(load("vllm"), hopper_spec(head_dim=dims[0], value_dim=dims[1]))
    assert "value_dim" not in told and "head_dim" not in told


@pytest.mark.parametrize(
    "dims", [(64, 128), (64, 192), (64, 520), (96, 64), (128, 136), (192, 96), (192, 136), (200, 128)]
)
def test_pairs_of_dims_without_a_kernel_are_refused(dims, load):
    assert "value_dim" in reasons(load("vllm"), hopper_spec(head_dim=dims[0], value_dim=dims[1]))


def test_sinks_are_refused_beyond_the_heads_and_dims_of_their_kernel(load):
    backend = load("vllm")
    assert "sinks" not in reasons(backend, hopper_spec(num_q_heads=64, sinks=True))
    assert "num_q_heads must be at most 64, got 66" in reasons(backend, hopper_spec(num_q_heads=66, sinks=True))
    assert "num_q_heads" not in reasons(backend, hopper_spec(num_q_heads=66))
    assert "with sinks value_dim must equal" in reasons(backend, hopper_spec(head_dim=192, value_dim=128, sinks=True))


def test_another_compute_capability_than_9_is_refused(load, monkeypatch):
    backend = load("vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "compute capability 9 alone, the device has (10, 0)" in str(
        backend.supports(hopper_spec(), torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(backend.supports(hopper_spec(), torch.device("cuda")), Accepted)


def test_the_forward_hands_cache_and_rounded_sinks_to_the_provider(load):
    backend, spec = load("vllm"), hopper_spec(sinks=True)
    query, sinks = torch.zeros(2, 8, 128, dtype=torch.bfloat16), torch.zeros(8)
    cache = KVCache(*(torch.zeros(3, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2)))

    out = backend.forward(query, cache, make_metadata(num_tokens=2, max_query_len=1), spec=spec, sinks=sinks)

    call = sys.modules[MODULES["vllm"]].calls[0]
    assert out is query and call["k"] is cache.key and call["s_aux"].dtype == torch.bfloat16


def test_queries_over_a_cache_of_e4m3_are_clamped_before_they_are_cast(load, monkeypatch):
    backend, spec = load("vllm"), hopper_spec(kv_dtype=torch.float8_e4m3fn)
    cache = KVCache(*(torch.zeros(3, 16, 2, 128, dtype=torch.float8_e4m3fn) for _ in range(2)))
    query, metadata = torch.full((2, 8, 128), 470.0, dtype=torch.bfloat16), make_metadata(num_tokens=2)
    cast, largest = torch.Tensor.to, []
    # What a cast makes of 470 depends on the torch: NaN up to 2.11, 448 later.
    monkeypatch.setattr(torch.Tensor, "to", lambda x, dtype: largest.append(x.max().item()) or cast(x, dtype))

    backend.forward(query, cache, metadata, spec=spec)

    assert largest == [448.0]
    assert sys.modules[MODULES["vllm"]].calls[0]["q"].float().eq(448).all()


def test_a_broken_provider_is_a_rejection_that_names_it(load):
    with pytest.raises(registry.BrokenBackend):
        load("vllm", "raise ImportError('undefined symbol: _ZN5torch')")
    verdict = explain("flash_attn3", hopper_spec(), CPU)
    assert isinstance(verdict, Rejected)
    assert "vllm (vllm.vllm_flash_attn.flash_attn_interface) is installed and cannot be used" in verdict.reasons[0]


def test_the_list_shows_whose_kernels_were_chosen(load):
    from click.testing import CliRunner

    from spec_decode.cli.main import main

    load("sgl")
    shown = CliRunner().invoke(main, ["list", "--device", "cpu"]).output
    assert "flash_attn3 sglang-kernel of unknown version: rejected" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without the kernels hears")
def test_without_the_kernels_it_is_refused_with_the_extra_that_brings_them():
    verdict = explain("flash_attn3", make_spec(), CPU)

    assert isinstance(verdict, Rejected)
    assert "pip install '.[flash-attn]' in a checkout" in verdict.reasons[0]
