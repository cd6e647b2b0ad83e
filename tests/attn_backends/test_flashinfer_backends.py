"""The conformance kit over FlashInfer's four backends, with a stand-in for its kernels that attends by their plans."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch

import builders.flashinfer
from attn_backends import KVCache, Rejected, explain
from builders import BatchError
from spec_decode.conformance import check_backend
from spec_decode.conformance.runner import check_list, run
from spec_decode.testing.batches import DECODE, RAGGED, VERIFY, Batch
from spec_decode.testing.built_batch import BuiltBatch
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject
from tests.factories import CPU, make_spec
from tests.flashinfer_stand_in import NAMES, absent, backend, installed
from tests.telling_checks import KIT, telling_checks

OF_ONE_KERNEL = NAMES[1:]
"""The first decodes by whichever kernel of theirs serves a spec best."""
OTHER_BATCHES = "graph.ragged_replays_over_other_batches"
NOT_SERVED = "numerics.bits_do_not_depend_on_the_batch"
TREES = ("numerics.trees_see_their_ancestors", "graph.tree_replays_over_other_trees")
VARIANTS = (
    "base",
    "window",
    "window_1",
    "soft_cap",
    "scale",
    "page_1",
    "page_128",
    "fp16",
    "mha",
    "mqa",
    "dim_256",
    "fp8_cache",
)
MQA = {"num_q_heads": 8, "num_kv_heads": 1}


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    with installed():
        yield


def fixture_of(instance, rows, **changes):
    subject = Subject(instance, CPU)
    return PagedFixture(subject, replace(subject.base_spec(), scale=None, **changes), rows)


def attend(fixture, batch):
    """The output, and the queries it is of."""
    view = fixture.view(fixture.load(batch), batch)
    metadata, queries = fixture.builder().build(view), fixture.queries(batch)
    return fixture.attend(metadata, batch, batch.seq_lens, queries), queries


def assert_attends_right(fixture, batch):
    out, queries = attend(fixture, batch)
    fixture.expect_cache(batch.seq_lens, contract="writes")
    fixture.assert_within_budget(out, batch.seq_lens, queries, contract="attention")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE_KERNEL)
def test_a_backend_passes_the_kit(name):
    instance = backend(name)
    report = check_backend(instance, device=CPU, checks=telling_checks(instance, *KIT))
    refused = {(result.check, result.case) for result in report.results if result.outcome is Outcome.UNSUPPORTED}
    without_trees = {(check, case) for check, case in refused if "tree" not in check}
    xqa = name == "flashinfer_xqa"
    refused_caches = ("fp8_cache_head_scales", *["fp8_cache"] * xqa)
    assert without_trees <= {
        # FlashInfer plans decodes and prompts apart.
        *((OTHER_BATCHES, f"{each}-ragged") for each in ("base", "window")),
        *[("graph.blocks_replay_over_other_batches", "page_1-block")] * xqa,
        *(("refusal.bad_scales_never_reach_a_kernel", f"{each}-decode") for each in refused_caches),
    }


def test_automatic_backend_passes_quick_kit():
    report = run(check_list(backend("flashinfer"), device=CPU, checks=KIT, quick=True))
    assert report.ok, report.summary()
    assert {f"{result.check.partition('.')[0]}.*" for result in report.results} == {*KIT}
    others = {result.check: result.outcome for result in report.results if result.outcome is not Outcome.PASS}
    assert others == {OTHER_BATCHES: Outcome.UNSUPPORTED}


@pytest.mark.parametrize(
    "name", [OF_ONE_KERNEL[0], *(pytest.param(name, marks=pytest.mark.slow) for name in OF_ONE_KERNEL[1:])]
)
def test_attention_and_trees_pass_except_windows(name):
    instance = backend(name)
    patterns = [*(f"numerics.*[[]{variant}-*" for variant in VARIANTS), f"{TREES[0]}[[]*-ragged[]]"]
    report = check_backend(instance, device=CPU, checks=telling_checks(instance, *patterns), report=True)
    served = [result for result in report.results if result.check not in (NOT_SERVED, *TREES)]
    found = {v: {result.outcome for result in served if result.case.startswith(f"{v}-")} for v in VARIANTS}
    refused = {"soft_cap", "page_1", "fp8_cache"} if name == "flashinfer_xqa" else set()
    wanted = {variant: {Outcome.UNSUPPORTED if variant in refused else Outcome.PASS} for variant in VARIANTS}
    assert found == wanted, report.summary()

    trees = [result for result in report.results if result.check == TREES[0]]
    without = {result.case.partition("-")[0] for result in trees if result.outcome is not Outcome.PASS}
    assert without == {"window", "sinks"} | refused
    assert {result.case.partition("-")[0] for result in trees} - without >= {"base", "gqa", "page_64", "dim_128"}


@pytest.mark.parametrize("name", NAMES)
def test_single_tokens_may_be_trees(name):
    fixture = fixture_of(backend(name), 3, tree=True)

    BuiltBatch(fixture, Batch((1, 1), (1, 150), 3, ((), ()))).expect_attention("attention of single tokens")


def test_chains_and_trees_are_planned_separately():
    fixture = fixture_of(backend("flashinfer"), 4, tree=True)
    builder = fixture.builder()
    for batch in (VERIFY, replace(VERIFY, trees=((0, 0, 1, 1),) * 3), VERIFY):
        metadata, queries = builder.build(fixture.view(fixture.load(batch), batch)), fixture.queries(batch)
        out = fixture.attend(metadata, batch, batch.seq_lens, queries)
        expect = fixture.expect_trees if batch.trees else fixture.assert_within_budget
        expect(out, batch if batch.trees else batch.seq_lens, queries, contract="attention")


@pytest.mark.parametrize("lens", [(6, 150), (37, 141)], ids=["an empty prefix", "prefixes"])
def test_trees_across_query_tiles_and_chunks_are_right(lens):
    fixture = fixture_of(backend("flashinfer"), 3, tree=True, **MQA)

    BuiltBatch(fixture, Batch((6, 6), lens, 3, ((0, 0, 1, 1, 2), (0, 1, 2, 3, 4)))).expect_attention(
        "attention of trees"
    )


def test_cuda_cores_reject_unsupported_group_size():
    report = check_backend(backend("flashinfer_cuda_cores"), device=CPU, checks=["numerics.*wide_group-*"], report=True)

    assert {result.outcome for result in report.results} == {Outcome.UNSUPPORTED}
    assert all("one of (1, 2, 3, 4, 8), got 6" in result.reason for result in report.results)


@pytest.mark.parametrize(("name", "case"), list(zip(NAMES, ("k3-n3", "k2-n2", "k3-n3", "k2-n2"), strict=True)))
def test_strategies_agree_on_whole_rounds(name, case):
    check_backend(backend(name), device=CPU, checks=[f"drafter.strategies_agree[[]{case}[]]"])


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_cuda_cores"])
def test_steps_attend_to_the_logical_prefix(name):
    check_backend(backend(name), device=CPU, checks=["drafter.steps_attend*k4-*"])


@pytest.mark.parametrize(
    ("window", "batch"),
    [
        (None, Batch((20, 20), (33, 160), 3)),
        (40, Batch((20, 20), (33, 160), 3)),
        (None, Batch((40, 1), (160, 150), 3)),
        (100, Batch((40, 1), (160, 150), 3)),
    ],
)
def test_extend_across_query_tiles_and_chunks_is_right(window, batch):
    assert_attends_right(fixture_of(backend("flashinfer"), 3, sliding_window=window, **MQA), batch)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_after_last_row_are_ignored(name):
    assert_attends_right(fixture_of(backend(name), 4), Batch((3, 1, 6), (9, 40, 6), 4, tail=2))


def test_xqa_rejects_too_many_query_heads():
    report = check_backend(backend("flashinfer_xqa"), device=CPU, checks=["refusal.claims_are_served"])
    xqa, base = backend("flashinfer_xqa"), Subject(backend("flashinfer_xqa"), CPU).base_spec()
    answers = [xqa.supports(replace(base, num_q_heads=heads, num_kv_heads=1), CPU) for heads in (32, 33)]
    assert report.ok and [bool(answer) for answer in answers] == [True, False]


@pytest.mark.parametrize("rows", [7, 9])
def test_cuda_cores_are_right_with_and_without_splits(rows):
    instance = backend("flashinfer_cuda_cores")
    fixture = fixture_of(instance, rows)
    batch = replace(DECODE, rows=rows)
    launch = fixture.builder().build(fixture.view(fixture.load(batch), batch)).launch

    assert launch.layout.split == (rows == 7)
    assert not assert_attends_right(fixture, batch)[5:].any()


@pytest.mark.parametrize("batch", [DECODE, VERIFY, RAGGED], ids=["decode", "verify", "ragged"])
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_may_share_one_tensor(name, batch):
    def allocate_kv(self, spec, num_pages, device):
        both = torch.empty(num_pages, spec.page_size, spec.num_kv_heads, 2 * spec.head_dim, dtype=spec.cache_dtype)
        return KVCache(both[..., : spec.head_dim], both[..., spec.head_dim :])

    instance = backend(name)
    type(instance).allocate_kv = allocate_kv

    assert_attends_right(fixture_of(instance, batch.rows), batch)


def built(name, batch=DECODE):
    fixture = fixture_of(backend(name), batch.rows)
    return fixture, fixture.builder().build(fixture.view(fixture.load(batch), batch))


def padded_dims(cache, by):
    """A copy whose heads lie `by` elements further apart."""
    return KVCache(*(torch.cat([t, t[..., :by]], -1)[..., :-by] for t in (cache.key, cache.value)))


def forward(fixture, metadata, cache):
    query = torch.zeros(metadata.num_tokens, fixture.spec.num_q_heads, fixture.spec.head_dim, dtype=fixture.spec.dtype)
    return fixture.subject.backend.forward(query, cache, metadata, spec=fixture.spec)


@pytest.mark.parametrize("name", NAMES)
def test_unsupported_cache_strides_raise_batch_error(name):
    fixture, metadata = built(name)
    unlike = KVCache(padded_dims(fixture.cache, 64).key, fixture.cache.value)
    with pytest.raises(BatchError, match=r"same strides, .* call allocate_kv"):
        forward(fixture, metadata, unlike)
    if name != "flashinfer_tensor_cores":
        with pytest.raises(BatchError):
            forward(fixture, metadata, padded_dims(fixture.cache, 8 if name == "flashinfer_xqa" else 4))


@pytest.mark.parametrize("name", NAMES)
def test_missing_flashinfer_rejection_names_extra(name):
    with absent():
        verdict = explain(name, make_spec(), CPU)

    assert isinstance(verdict, Rejected)
    assert "pip install '.[flashinfer]' in a checkout" in verdict.reasons[0]


@pytest.fixture
def package_that_breaks(monkeypatch, tmp_path):
    """A flashinfer whose import ends in an error, and no backend over it."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("raise OSError('libcudart.so.13 is not here')")
    with absent():
        del sys.modules["flashinfer"]
        monkeypatch.syspath_prepend(tmp_path)
        yield


@pytest.mark.parametrize("name", NAMES)
def test_loading_backend_does_not_import_flashinfer(name, package_that_breaks):
    """Importing it would start CUDA."""
    verdict = explain(name, make_spec(dtype=torch.bfloat16, head_dim=64, page_size=16), CPU)

    assert verdict == Rejected(("runs on cuda, not on cpu",))
    assert "flashinfer" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_unimportable_package_is_a_reason_on_cuda(name, package_that_breaks):
    verdict = explain(name, make_spec(), torch.device("cuda"))

    broken = "flashinfer is installed but cannot be imported: OSError: libcudart.so.13 is not here"
    assert isinstance(verdict, Rejected) and broken in verdict.reasons


def test_only_xqa_declares_rounded_partials():
    assert [name for name in NAMES if backend(name).capabilities.rounds_partials] == ["flashinfer_xqa"]


@pytest.mark.parametrize(
    ("release", "lowest"),
    [
        ("0.6.12", -46_341.0),
        ("0.7.2", -46_341.0),
        ("0.7.2.post1", None),
        ("0.8.0", None),
        ("without its wheel's metadata (_build_meta.py, sha256 3f07)", -46_341.0),
    ],
)
def test_lowest_score_is_declared_for_older_releases(release, lowest):
    module = importlib.import_module("attn_backends.flashinfer")
    assert module._lowest_score(f"flashinfer-python {release}") == lowest
    assert module.FlashInferXqa.capabilities.lowest_score == pytest.approx(-69_315, rel=1e-4)


def test_the_stand_in_leaves_no_trace():
    names = ("flashinfer", "flashinfer.decode", "builders.flashinfer.builder", "attn_backends.flashinfer")

    def seen():
        return [sys.modules.get(name) for name in names] + [vars(builders.flashinfer).get("builder")]

    before = seen()
    with installed():
        backend("flashinfer")
        assert all(inside is not outside for inside, outside in zip(seen(), before, strict=True))
    assert seen() == before
