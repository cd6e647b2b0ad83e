from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from attn_backends import get, register, unregister
from attn_backends.torch_reference import TorchReference
from attn_backends.triton_paged import TritonPaged
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    BatchError,
    GraphSupport,
    HostLengths,
    MetadataBuilder,
    ReferenceBuilder,
    RequestTables,
    TritonPagedBuilder,
)
from spec_decode.drafter import Drafter, VerifiedTokens, default_capture_sizes
from spec_decode.kv_groups import make_group
from spec_decode.models import DraftModel
from spec_decode.strategy import GraphMode, Strategy, StrategyError, Upkeep
from tests.factories import CPU, make_config, make_spec, owned_pages
from tests.foreseen import Foreseen, ForeseenBuilder

K, MAX_SEQ_LEN = 4, 48
CONFIG = make_config(hidden_size=64, head_dim=64)
CONTEXTS = [0, 7, 15]
STRATEGIES = [strategy for strategy in Strategy if strategy is not Strategy.PIECEWISE]
CAPTURING = [strategy for strategy in STRATEGIES if strategy is not Strategy.EAGER]


class Layer(nn.Module):
    """Attention and a residual; no more than it takes to depend on every earlier token."""

    def __init__(self, config):
        super().__init__()
        self.heads = [config.num_q_heads, config.num_kv_heads, config.num_kv_heads]
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_q_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, layer, x, attend):
        packed = self.qkv(x).unflatten(1, (sum(self.heads), -1))
        return x + self.out(attend(layer, *packed.split(self.heads, 1)).flatten(1))


class TwoLayerDraft(DraftModel):
    """A draft model whose layers may sit in different KV groups."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.hidden_size = self.feature_size = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(config.max_positions, config.hidden_size)
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def layer_groups(self, page_size):
        return self.config.layer_groups(page_size, torch.float32)

    def forward(self, token_ids, hidden, positions, attend):
        x = self.fuse(torch.cat([self.embed(token_ids), hidden], -1)) + self.place(positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend)
        return x.tanh() * 2

    def logits(self, hidden):
        return self.head(hidden)


class StrongBuilder(TritonPagedBuilder):
    """Advances in the graph; keeps count of its builds."""

    builds: ClassVar[list[int]] = []

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "views")

    def build(self, batch, *, horizon=0):
        self.builds.append(batch.max_query_len)
        return super().build(batch, horizon=horizon)


class Strong(TritonPaged):
    builder = StrongBuilder


class WeakBuilder(MetadataBuilder):
    """A third party's: only a build with exact lengths will do; an advance would be a mistake of the drafter's."""

    graph_support = GraphSupport.ALWAYS
    host_lengths = HostLengths.EXACT
    step_fields = ("seq_lens", "kv_end")
    builds: ClassVar[list[int]] = []

    def __init__(self, spec, device, **bounds):
        super().__init__(spec, device, **bounds)
        self._inner = ReferenceBuilder(spec, device, **bounds)

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "its plan is made on the host")

    def build(self, batch, *, horizon=0):
        assert batch.host_seq_lens_exact and list(batch.host_seq_lens) == batch.seq_lens.tolist()
        self.builds.append(batch.max_query_len)
        return self._inner.build(batch, horizon=horizon)

    def advance(self, metadata):
        raise AssertionError("a builder that says REBUILD was advanced")

    def capture_constants(self, metadata):
        return self._inner.capture_constants(metadata)


class Weak(TorchReference):
    name = "third_party"
    builder = WeakBuilder


class DecodeOnlyBuilder(ReferenceBuilder):
    """Its attention over several tokens a request cannot be captured."""

    graph_support = GraphSupport.SINGLE_TOKEN_DECODE


class DecodeOnly(TorchReference):
    builder = DecodeOnlyBuilder


class UncapturableBuilder(ReferenceBuilder):
    graph_support = GraphSupport.NEVER

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "views")


class Uncapturable(TorchReference):
    """Its attention reads the device, which no graph can hold; its metadata advances in one."""

    builder = UncapturableBuilder

    def forward(self, query, *args, **options):
        assert query.isfinite().all().item()
        return super().forward(query, *args, **options)


class UncapturableWeakBuilder(WeakBuilder):
    graph_support = GraphSupport.NEVER


class UncapturableWeak(Uncapturable):
    builder = UncapturableWeakBuilder


@pytest.fixture(autouse=True)
def third_party():
    register("third_party", Weak)
    StrongBuilder.builds.clear()
    WeakBuilder.builds.clear()
    ForeseenBuilder.builds.clear()
    yield
    unregister("third_party")


class Scene:
    """The two-layer model on two groups of other page sizes, with a context of noise in both caches."""

    def __init__(
        self, backends, *, limits=(MAX_SEQ_LEN,) * 3, max_reqs=4, steps=K, make_model=TwoLayerDraft, **options
    ):
        torch.manual_seed(0)
        self.model = make_model(CONFIG).requires_grad_(False)
        specs = [
            make_spec(num_q_heads=2, num_kv_heads=1, head_dim=64, page_size=8),
            make_spec(num_q_heads=2, num_kv_heads=1, head_dim=64, page_size=4, sliding_window=6),
        ]
        each = [MAX_SEQ_LEN // spec.page_size for spec in specs]
        self.tables = RequestTables(
            page_sizes=[8, 4], num_pages=[max_reqs * n for n in each], max_reqs=max_reqs, max_seq_len=MAX_SEQ_LEN,
            device=CPU,
        )  # fmt: skip
        self.pages = [owned_pages(max_reqs, n, max_reqs * n, seed) for seed, n in enumerate(each)]
        self.groups = [
            make_group(f"group{i}", backend, spec, [i], num_pages=max_reqs * n, device=CPU)
            for i, (backend, spec, n) in enumerate(zip(backends, specs, each, strict=True))
        ]
        for tensor in self.caches():
            tensor.copy_(torch.randn(tensor.shape))
        self.limits = list(limits)
        self.load(range(len(limits)))
        self.steps = steps
        self.drafter = Drafter(self.model, self.groups, self.tables, num_speculative_tokens=steps, **options)

    def caches(self):
        return [
            tensor for group in self.groups for cache in group.caches.values() for tensor in (cache.key, cache.value)
        ]

    def load(self, requests):
        self.tables.load([[rows[r] for r in requests] for rows in self.pages], [self.limits[r] for r in requests])

    def verified(self, *, round_=0, temperature=0.0, rows=slice(None), contexts=CONTEXTS):
        generator = torch.Generator().manual_seed(round_)
        n, width = len(contexts), self.steps + 1
        whole = VerifiedTokens(
            token_ids=torch.randint(0, CONFIG.vocab_size, (n, width), generator=generator),
            features=torch.randn(n, width, CONFIG.hidden_size, generator=generator),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            accepted=torch.randint(0, width, (n,), generator=generator, dtype=torch.int32),
            next_tokens=torch.randint(0, CONFIG.vocab_size, (n,), generator=generator),
            temperature=torch.full((n,), temperature),
            seeds=torch.arange(n) * 31,
        )
        given = [field.name for field in fields(whole) if getattr(whole, field.name) is not None]
        return VerifiedTokens(**{name: getattr(whole, name)[rows] for name in given})

    def rounds(self, count=3, temperature=0.0):
        """Rounds one behind the other, each from where the last one's accepted tokens end."""
        contexts, found = list(CONTEXTS), []
        for round_ in range(count):
            verified = self.verified(round_=round_, temperature=temperature, contexts=contexts)
            drafts = self.drafter.propose(verified)
            found.append((drafts.tokens.clone(), drafts.logits.clone()))
            contexts = [c + int(a) + 1 for c, a in zip(contexts, verified.accepted, strict=True)]
        return found


def mixed(**options):
    return Scene([Strong(), get("third_party")], **options)


def foreseen(**options):
    return Scene([Strong(), Foreseen()], **options)


def strong(**options):
    return Scene([get("triton_paged"), get("torch_reference")], **options)


def decode_only(**options):
    return Scene([get("triton_paged"), DecodeOnly()], **options)


def piecewise(**options):
    return Scene([get("triton_paged"), Uncapturable()], **options)


def assert_same(found, expected):
    for round_, ((tokens, logits), (wanted, wanted_logits)) in enumerate(zip(found, expected, strict=True)):
        assert tokens.tolist() == wanted.tolist(), f"round {round_}"
        assert torch.equal(logits, wanted_logits), f"round {round_}"


def test_a_weak_group_is_rebuilt_and_the_strong_one_is_not():
    plan = mixed().drafter.plan
    assert plan.strategy is Strategy.PER_STEP
    assert [(g.upkeep, g.waits) for g in plan.groups] == [(Upkeep.IN_GRAPH, False), (Upkeep.REBUILT, True)]


def test_a_group_that_the_host_can_foresee_leaves_the_full_loop_possible():
    plan = foreseen().drafter.plan
    assert plan.strategy is Strategy.FULL_LOOP
    assert [(g.upkeep, g.waits) for g in plan.groups] == [(Upkeep.IN_GRAPH, False), (Upkeep.AHEAD, True)]


def test_a_round_plans_every_later_step_of_such_a_group_before_the_loop():
    scene = foreseen()
    scene.drafter.capture()
    StrongBuilder.builds.clear()
    ForeseenBuilder.builds.clear()
    verified = scene.verified()
    scene.drafter.propose(verified)
    start = [c + int(a) + 1 for c, a in zip(CONTEXTS, verified.accepted, strict=True)]
    assert StrongBuilder.builds == []
    assert ForeseenBuilder.builds == [(*(n + step for n in start), 0) for step in range(1, K)]


def test_a_plan_ends_at_the_limit_of_its_request():
    scene = foreseen(limits=(MAX_SEQ_LEN, 14, MAX_SEQ_LEN))
    scene.drafter.capture()
    ForeseenBuilder.builds.clear()
    scene.drafter.propose(scene.verified())
    assert max(lens[1] for lens in ForeseenBuilder.builds) <= 14


@pytest.mark.parametrize("limits", [(MAX_SEQ_LEN,) * 3, (MAX_SEQ_LEN, 14, MAX_SEQ_LEN)], ids=["roomy", "limited"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_planned_groups_draft_what_eager_drafts(temperature, limits):
    expected = foreseen(strategy=Strategy.EAGER, limits=limits).rounds(1, temperature=temperature)
    found = foreseen(limits=limits).rounds(1, temperature=temperature)
    for (tokens, logits), (wanted, wanted_logits) in zip(found, expected, strict=True):
        assert tokens.tolist() == wanted.tolist()
        assert torch.equal(logits[tokens >= 0], wanted_logits[tokens >= 0])


def test_rounds_one_behind_the_other_are_each_planned_anew():
    assert_same(foreseen().rounds(), foreseen(strategy=Strategy.EAGER).rounds())


def test_a_round_builds_the_weak_group_once_a_step_and_the_strong_one_never():
    scene = mixed()
    scene.drafter.capture()
    StrongBuilder.builds.clear()
    WeakBuilder.builds.clear()
    scene.drafter.propose(scene.verified())
    assert StrongBuilder.builds == []
    assert WeakBuilder.builds == [K + 1] + [1] * (K - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mixed_groups_draft_what_eager_drafts(temperature):
    expected = mixed(strategy=Strategy.EAGER).rounds(temperature=temperature)
    assert_same(mixed().rounds(temperature=temperature), expected)


def test_a_forced_full_loop_with_a_weak_group_raises_with_its_reason():
    with pytest.raises(StrategyError, match="its plan is made on the host"):
        mixed(strategy=Strategy.FULL_LOOP)


def test_two_strong_groups_run_the_full_loop():
    assert strong().drafter.plan.strategy is Strategy.FULL_LOOP


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", CAPTURING)
def test_strong_groups_draft_what_eager_drafts(strategy, temperature):
    expected = strong(strategy=Strategy.EAGER).rounds(temperature=temperature)
    assert_same(strong(strategy=strategy).rounds(temperature=temperature), expected)


def test_a_group_captured_for_decode_alone_runs_step_0_eagerly_and_drafts_the_same():
    scene = decode_only()
    found = scene.rounds()
    assert {report.key.kind for report in scene.drafter.graphs.reports} == {"loop"}
    assert_same(found, strong(strategy=Strategy.EAGER).rounds())


def test_turning_graphs_off_is_eager_and_captures_nothing():
    scene = mixed(graph_mode=GraphMode.NONE)
    scene.rounds(1)
    assert scene.drafter.plan.strategy is Strategy.EAGER and scene.drafter.graphs.reports == []


def test_the_drafts_do_not_depend_on_the_padding():
    found, expected = (strong(capture_sizes=[size]).rounds() for size in (3, 4))
    assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in expected]


def dense_drafts(scene, verified, committed):
    """Greedy drafts by attention over each request's whole text, with no cache, page or batch; logits [n, K, V].

    committed: each request's (token ids, hidden states) of earlier rounds; this round's are added to it.
    """

    def attend(layer, query, key, value):
        spec = scene.groups[layer].spec
        lag = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (lag >= 0) & (lag < (spec.sliding_window or len(query)))
        key, value = (x.repeat_interleave(spec.group_size, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.softmax_scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)

    rows = []
    for request, (ids, hidden) in enumerate(committed):
        accepted = int(verified.accepted[request])
        ids += [*verified.token_ids[request, 1 : accepted + 1].tolist(), int(verified.next_tokens[request])]
        hidden += list(verified.features[request, : accepted + 1])
        drafted, states, logits = list(ids), list(hidden), []
        for _ in range(scene.steps):
            positions = torch.arange(len(drafted))
            states.append(scene.model(torch.tensor(drafted), torch.stack(states), positions, attend)[-1])
            logits.append(scene.model.logits(states[-1]))
            drafted.append(int(logits[-1].argmax()))
        rows.append(torch.stack(logits))
    return torch.stack(rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_round_drafts_what_dense_attention_over_the_text_gives(strategy):
    scene = strong(strategy=strategy)
    committed = [([], []) for _ in CONTEXTS]
    for round_ in range(4):
        verified = scene.verified(round_=round_, contexts=[len(ids) for ids, _ in committed])
        drafts = scene.drafter.propose(verified)
        wanted = dense_drafts(scene, verified, committed)
        assert drafts.tokens.tolist() == wanted.argmax(-1).tolist()
        torch.testing.assert_close(drafts.logits, wanted, rtol=1e-4, atol=1e-4)


def changed(**changes):
    scene = strong(strategy=Strategy.EAGER)
    verified = scene.verified()
    return scene, replace(verified, **{name: change(getattr(verified, name)) for name, change in changes.items()})


REFUSED = {
    "one row too few": ({"accepted": lambda x: x[:2]}, r"accepted must be torch\.int32 \[3\].*got torch\.int32 \[2\]"),
    "one column too few": ({"token_ids": lambda x: x[:, 1:]}, r"token_ids must be .*\[3, 5\].*\[3, 4\]"),
    "another hidden size": ({"features": lambda x: x[..., :32]}, r"features must be .*\[3, 5, 64\]"),
    "another float": ({"features": lambda x: x.bfloat16()}, r"must be torch\.float32.*got torch\.bfloat16"),
    "another integer": ({"context_lens": lambda x: x.long()}, r"must be torch\.int32 .*got torch\.int64"),
    "another device": ({"seeds": lambda x: x.to("meta")}, "on cpu, got .* on meta"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_verified_tokens_that_do_not_fit_are_refused(changes, message):
    scene, verified = changed(**changes)
    with pytest.raises(BatchError, match=message):
        scene.drafter.propose(verified)


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_nothing_runs_when_verified_tokens_are_refused(changes, message):
    scene, verified = changed(**changes)
    before = [tensor.clone() for tensor in scene.caches()]
    with pytest.raises(BatchError):
        scene.drafter.propose(verified)
    assert all(torch.equal(a, b) for a, b in zip(before, scene.caches(), strict=True))


def test_a_round_without_a_live_request_is_refused():
    scene = strong()
    scene.load([])
    with pytest.raises(BatchError, match="at least one live request"):
        scene.drafter.propose(scene.verified(rows=slice(0, 0)))


def test_a_batch_above_the_largest_capture_is_refused():
    scene = strong(capture_sizes=[1, 2])
    with pytest.raises(BatchError, match="largest captured batch is 2 requests, got 3"):
        scene.drafter.propose(scene.verified())


def test_tables_of_other_page_sizes_than_the_groups_are_refused():
    scene = strong()
    with pytest.raises(BatchError, match=r"page sizes \[4, 8\] against the tables' \[8, 4\]"):
        Drafter(scene.model, scene.groups[::-1], scene.tables, num_speculative_tokens=K)


def test_a_drafter_of_no_tokens_is_refused():
    with pytest.raises(StrategyError, match="at least 1 token a round, got 0"):
        strong(steps=0)


def test_more_tokens_a_round_than_a_request_has_places_are_refused():
    with pytest.raises(
        BatchError, match=f"takes {MAX_SEQ_LEN + 1} places of a request, these tables hold {MAX_SEQ_LEN}"
    ):
        strong(steps=MAX_SEQ_LEN)


@pytest.mark.parametrize("scene", [strong, mixed])
def test_a_single_token_is_drafted_by_step_0_alone(scene):
    expected = scene(steps=1, strategy=Strategy.EAGER).rounds()
    found = scene(steps=1)
    assert_same(found.rounds(), expected)
    assert {report.key.kind for report in found.drafter.graphs.reports} == {"extend"}
    assert expected[0][0].shape == (3, 1)


def test_fewer_steps_draft_the_same_first_tokens():
    def first(steps):
        scene = strong(steps=steps, strategy=Strategy.EAGER)
        verified = replace(scene.verified(), accepted=torch.zeros(3, dtype=torch.int32))
        hidden, ids = verified.features.clone(), verified.token_ids.clone()
        hidden[:], ids[:] = 0.5, 3
        same = replace(verified, features=hidden, token_ids=ids, next_tokens=torch.tensor([1, 2, 3]))
        return scene.drafter.propose(same).tokens[:, :2].tolist()

    assert first(2) == first(5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_count_that_cannot_be_drafts_as_the_nearest_that_can(strategy):
    def drafts(*accepted):
        scene = strong(strategy=strategy)
        given = scene.drafter.propose(replace(scene.verified(), accepted=torch.tensor(accepted, dtype=torch.int32)))
        return given.tokens, given.logits

    assert_same([drafts(2**31 - 1, -(2**31), 2)], [drafts(K, 0, 2)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_does_not_fit_proposes_nothing_and_is_flagged(strategy):
    limits = [MAX_SEQ_LEN, CONTEXTS[1] + K, MAX_SEQ_LEN]
    scene = strong(limits=limits, strategy=strategy)
    drafts = scene.drafter.propose(scene.verified())
    assert drafts.tokens[1].tolist() == [-1] * K and (drafts.tokens[[0, 2]] >= 0).all()
    assert scene.tables.overflow.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_reaches_its_limit_on_the_way_proposes_nothing_from_there_on(strategy):
    scene = strong(limits=[MAX_SEQ_LEN, CONTEXTS[1] + K + 2, MAX_SEQ_LEN], strategy=strategy)
    verified = replace(scene.verified(), accepted=torch.full((3,), K, dtype=torch.int32))
    # Step 0 ends one token below the limit, so one advance fits.
    tokens = scene.drafter.propose(verified).tokens
    assert (tokens[1] >= 0).tolist() == [True, True, False, False] and (tokens[[0, 2]] >= 0).all()
    assert scene.tables.overflow.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("limit", [CONTEXTS[1] + K, CONTEXTS[1] + K + 2])
@pytest.mark.parametrize("scene", [strong, mixed])
def test_neighbours_of_a_request_at_its_limit_draft_the_same(scene, limit):
    [(tokens, logits)] = scene(limits=[MAX_SEQ_LEN, limit, MAX_SEQ_LEN]).rounds(1)
    [(wanted, wanted_logits)] = scene().rounds(1)
    assert tokens[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    assert torch.equal(logits[[0, 2]], wanted_logits[[0, 2]])


def test_a_request_that_does_not_fit_writes_nothing():
    scene = strong(limits=[MAX_SEQ_LEN, CONTEXTS[1] + K, MAX_SEQ_LEN])
    before = [tensor.clone() for tensor in scene.caches()]
    scene.drafter.propose(scene.verified())
    for index, (was, tensor) in enumerate(zip(before, scene.caches(), strict=True)):
        pages = scene.pages[index // 2][1]
        assert torch.equal(tensor[pages], was[pages])


def test_a_round_writes_no_page_that_nobody_owns():
    scene = strong()
    before = [tensor.clone() for tensor in scene.caches()]
    scene.rounds(2)
    for index, (was, tensor) in enumerate(zip(before, scene.caches(), strict=True)):
        free = scene.pages[index // 2][3]
        assert torch.equal(tensor[free], was[free])


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("strategy", CAPTURING)
@pytest.mark.parametrize("scene", [strong, decode_only])
def test_a_capture_touches_nothing_of_a_live_request(scene, strategy, rounds):
    scene = scene(strategy=strategy)
    scene.rounds(rounds)
    tables = scene.tables
    live = [*scene.caches(), tables.block_tables, tables.token_limits, tables.overflow]
    before = [tensor.clone() for tensor in live]
    scene.drafter.capture()
    assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))


def test_a_capture_ahead_of_the_first_round_changes_no_token():
    scene = strong()
    scene.drafter.capture()
    assert_same(scene.rounds(), strong().rounds())


def test_a_capture_between_rounds_changes_no_token():
    scene, expected = strong(), strong().rounds(2)
    verified = [scene.verified(round_=0)]
    contexts = [c + int(a) + 1 for c, a in zip(CONTEXTS, verified[0].accepted, strict=True)]
    verified.append(scene.verified(round_=1, contexts=contexts))
    found = []
    for each in verified:
        drafts = scene.drafter.propose(each)
        found.append((drafts.tokens.clone(), drafts.logits.clone()))
        scene.drafter.graphs.release()
        scene.drafter.capture()
    assert_same(found, expected)


def test_an_eager_drafter_captures_nothing():
    scene = strong(strategy=Strategy.EAGER)
    scene.drafter.capture()
    assert scene.drafter.graphs.reports == []


def test_a_request_drafts_the_same_in_another_row_of_a_smaller_batch():
    scene = strong()
    tokens = scene.drafter.propose(scene.verified(temperature=1.0)).tokens.clone()
    other = strong()
    other.load([2, 1])
    found = other.drafter.propose(other.verified(temperature=1.0, rows=[2, 1])).tokens
    assert found.tolist() == tokens[[2, 1]].tolist()


def test_drafts_are_views_of_the_same_buffers_every_round():
    scene = strong()
    first = scene.drafter.propose(scene.verified())
    second = scene.drafter.propose(scene.verified(round_=1))
    assert first.tokens.data_ptr() == second.tokens.data_ptr() and first.logits.data_ptr() == second.logits.data_ptr()


def test_a_prompt_is_prefilled_alone_as_among_others():
    hidden, ids = torch.randn(9, CONFIG.hidden_size), torch.randint(0, CONFIG.vocab_size, (9,))
    together, alone = strong(limits=[MAX_SEQ_LEN] * 2), strong(limits=[MAX_SEQ_LEN] * 2)
    together.drafter.prefill(together.tables, [4, 5], [4, 5], ids, hidden)
    alone.load([1])
    alone.drafter.prefill(alone.tables, [5], [5], ids[4:], hidden[4:])
    for index, (found, wanted) in enumerate(zip(alone.caches(), together.caches(), strict=True)):
        pages = alone.pages[index // 2][1]
        torch.testing.assert_close(found[pages], wanted[pages], rtol=1e-5, atol=1e-5)


def test_a_prefill_writes_the_prompts_positions_and_no_other():
    scene = strong(limits=[MAX_SEQ_LEN] * 2)
    before = [tensor.clone() for tensor in scene.caches()]
    ids, hidden = torch.zeros(9, dtype=torch.int64), torch.randn(9, CONFIG.hidden_size)
    scene.drafter.prefill(scene.tables, [4, 5], [4, 5], ids, hidden)
    for index, (was, found) in enumerate(zip(before, scene.caches(), strict=True)):
        size, rows = found.shape[1], scene.pages[index // 2]
        written = {rows[r][p // size] * size + p % size for r, n in ((0, 4), (1, 5)) for p in range(n)}
        differs = (found != was).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
        assert set(differs.tolist()) == written


@pytest.mark.parametrize(("max_reqs", "sizes"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_capture_sizes_are_powers_of_two_up_to_the_most(max_reqs, sizes):
    assert default_capture_sizes(max_reqs) == sizes


class PlanBuilder(ReferenceBuilder):
    """Plans the pages of a round in build (as FlashInfer plans its indices); advance refreshes the rest."""

    build_per_round = True

    def __init__(self, *args, **bounds):
        super().__init__(*args, **bounds)
        self._plan = {}

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "planned for the horizon")

    def build(self, batch, *, horizon=0):
        fresh = torch.empty_like(batch.block_table, memory_format=torch.contiguous_format)
        plan = self._plan.setdefault(batch.num_reqs, fresh)
        plan.copy_(batch.block_table)
        return super().build(replace(batch, block_table=plan), horizon=horizon)


class Planned(TorchReference):
    builder = PlanBuilder


@pytest.mark.parametrize("other", ["torch_reference", "weak"])
def test_a_build_per_round_group_drafts_what_eager_drafts_when_rows_move(other):
    def rounds(strategy):
        scene = Scene([Planned(), Weak() if other == "weak" else get(other)], strategy=strategy)
        first = scene.drafter.propose(scene.verified()).tokens.tolist()
        scene.load([2, 1, 0])
        verified = scene.verified(round_=1, rows=[2, 1, 0], contexts=[5, 12, 20])
        return first, scene.drafter.propose(verified).tokens.tolist()

    assert rounds(None) == rounds(Strategy.EAGER)


class BoundBuilder(ReferenceBuilder):
    host_lengths = HostLengths.UPPER_BOUND

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "x")

    def build(self, batch, *, horizon=0):
        assert len(batch.host_seq_lens) == batch.num_reqs
        return super().build(batch, horizon=horizon)


class Bound(TorchReference):
    builder = BoundBuilder


def test_a_builder_gets_one_upper_bound_per_row_at_capture_too():
    Scene([Bound(), get("torch_reference")]).drafter.capture()


@pytest.mark.parametrize("strategy", [None, Strategy.EAGER])
def test_a_capture_size_beyond_the_tables_rows_is_refused_in_words(strategy):
    with pytest.raises(BatchError):
        strong(capture_sizes=[8], strategy=strategy).rounds(1)


def test_an_eager_drafter_needs_no_capture_size():
    strong(capture_sizes=[2], strategy=Strategy.EAGER).rounds(1)


LENGTHS = [2, 0, 3]


def cut(tokens, lengths):
    """These drafts, each ended behind so many tokens."""
    behind = torch.arange(tokens.shape[1]) >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(behind, -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_request_drafts_as_many_tokens_as_it_was_given(strategy, temperature):
    [(whole, _)] = strong(strategy=Strategy.EAGER).rounds(1, temperature)
    scene = strong(strategy=strategy, capture_sizes=[4])
    verified = scene.verified(temperature=temperature)
    drafts = scene.drafter.propose(replace(verified, draft_lens=torch.tensor(LENGTHS, dtype=torch.int32)))
    assert drafts.tokens.tolist() == cut(whole, LENGTHS).tolist()


@pytest.mark.parametrize("scene", [mixed, foreseen, piecewise])
def test_groups_of_every_kind_let_each_request_stop_on_its_own(scene):
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    one, other = scene(capture_sizes=[4]), scene(strategy=Strategy.EAGER)
    for round_ in range(2):
        found, expected = (
            s.drafter.propose(replace(s.verified(round_=round_), draft_lens=lengths)) for s in (one, other)
        )
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert (found.tokens >= 0).sum(1).tolist() == LENGTHS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_that_stops_is_no_overflow_and_writes_no_further_key(strategy):
    def caches(lengths):
        scene = strong(strategy=strategy, capture_sizes=[4])
        before = [tensor.clone() for tensor in scene.caches()]
        scene.drafter.propose(replace(scene.verified(), draft_lens=torch.tensor(lengths, dtype=torch.int32)))
        assert scene.tables.overflow.tolist() == [0] * 4
        return [
            (found != was).flatten(2).any(2).sum().item() for found, was in zip(scene.caches(), before, strict=True)
        ]

    # Step 0 writes 1 + K keys of each; how many it kept decides which of them later steps write over.
    assert all(fewer <= more for fewer, more in zip(caches([0, 1, 0]), caches([K] * 3), strict=True))
    assert caches([0, 0, 0]) == caches([1, 1, 1]) == [3 * (K + 1)] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_round_without_lengths_of_its_own_drafts_all_again(strategy):
    scene = strong(strategy=strategy, capture_sizes=[4])
    scene.drafter.propose(replace(scene.verified(), draft_lens=torch.tensor(LENGTHS, dtype=torch.int32)))
    assert (scene.drafter.propose(scene.verified()).tokens >= 0).all()


def test_lengths_written_in_place_hold_until_verified_tokens_come_without():
    scene = strong()
    scene.drafter.propose(scene.verified())
    scene.drafter.inputs.draft_lens[:3] = torch.tensor(LENGTHS)
    assert (scene.drafter.propose().tokens >= 0).sum(1).tolist() == LENGTHS
    assert (scene.drafter.propose(scene.verified()).tokens >= 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_round_of_fewer_tokens_drafts_the_first_ones_and_the_next_round_all(strategy):
    [(whole, logits)] = strong(strategy=Strategy.EAGER).rounds(1, 1.0)
    scene = strong(strategy=strategy, capture_sizes=[4])
    verified = scene.verified(temperature=1.0)
    for count in (2, 1, K, 3):
        drafts = scene.drafter.propose(verified, num_tokens=count)
        assert drafts.tokens.tolist() == whole[:, :count].tolist()
        assert torch.equal(drafts.logits, logits[:, :count])
    assert scene.drafter.propose(verified).tokens.tolist() == whole.tolist()


def test_the_device_loop_serves_every_number_of_tokens_with_the_graphs_it_has():
    scene = strong(strategy=Strategy.DEVICE_LOOP)
    scene.drafter.capture()
    reports = list(scene.drafter.graphs.reports)
    for count in range(1, K + 1):
        scene.drafter.propose(scene.verified(), num_tokens=count)
    assert scene.drafter.graphs.reports == reports


@pytest.mark.parametrize(("lengths", "steps"), [([0, 0, 0], 0), ([1, 1, 0], 0), ([2, 0, 1], 1), ([1, 4, 2], K - 1)])
def test_the_device_loop_ends_with_the_last_request_that_drafts_on(lengths, steps):
    scene = strong(strategy=Strategy.DEVICE_LOOP, capture_sizes=[4])
    scene.drafter.propose(replace(scene.verified(), draft_lens=torch.tensor(lengths, dtype=torch.int32)))
    assert scene.drafter._decode.batch.step.tolist() == [steps]


@pytest.mark.parametrize("count", [0, K + 1])
def test_a_round_of_a_number_of_tokens_that_the_drafter_has_not_is_refused(count):
    scene = strong()
    with pytest.raises(BatchError, match=f"proposes 1 to {K} tokens a round, asked for {count}"):
        scene.drafter.propose(scene.verified(), num_tokens=count)


def doubted(tokens, logits, temperature, least):
    """How many tokens of each request are drafted until the first one below the least confidence, itself included."""
    kept = logits.softmax(-1).gather(2, tokens[..., None])[..., 0] >= least
    return [min(int(row.int().cumprod(0).sum()) + 1, K) for row in kept]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_stops_behind_a_token_that_the_draft_doubts(strategy, temperature):
    [(whole, logits)] = strong(strategy=Strategy.EAGER).rounds(1, temperature)
    confidence = logits.softmax(-1).gather(2, whole[..., None])
    least = float(confidence.flatten().sort().values[5])
    lengths = doubted(whole, logits, temperature, least)
    assert min(lengths) < K
    [(found, _)] = strong(strategy=strategy, min_confidence=least, capture_sizes=[4]).rounds(1, temperature)
    assert found.tolist() == cut(whole, lengths).tolist()


@pytest.mark.parametrize("least", [-0.1, 1.0, float("nan")])
def test_a_least_confidence_that_is_no_probability_below_1_is_refused(least):
    with pytest.raises(BatchError, match="least confidence is a probability below 1"):
        strong(min_confidence=least)


class SmallVocabulary(TwoLayerDraft):
    """Scores every third token of the target's vocabulary."""

    def __init__(self, config):
        super().__init__(config)
        self.token_map = torch.arange(0, config.vocab_size, 3)

    def logits(self, hidden):
        return self.head(hidden)[:, self.token_map]


class MaskedVocabulary(SmallVocabulary):
    """The same draft, which says so by -inf in logits over the whole vocabulary."""

    def __init__(self, config):
        super().__init__(config)
        self.mask = torch.full((config.vocab_size,), float("-inf")).index_fill(0, self.token_map, 0.0)
        self.token_map = None

    def logits(self, hidden):
        return self.head(hidden) + self.mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_draft_of_fewer_tokens_drafts_as_one_that_never_proposes_the_others(strategy, temperature):
    expected = strong(strategy=Strategy.EAGER, make_model=MaskedVocabulary).rounds(2, temperature)
    assert_same(
        strong(strategy=strategy, make_model=SmallVocabulary, capture_sizes=[4]).rounds(2, temperature), expected
    )


def test_a_group_that_no_graph_holds_leaves_the_rest_of_the_step_in_one():
    scene = piecewise()
    scene.rounds(1)
    assert scene.drafter.plan.strategy is Strategy.PIECEWISE
    assert {report.key.kind for report in scene.drafter.graphs.reports} == {"step"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("backends", [(Strong, Uncapturable), (Weak, Uncapturable), (Strong, UncapturableWeak)])
def test_a_step_in_pieces_drafts_what_eager_drafts(backends, temperature):
    def rounds(strategy):
        return Scene([make() for make in backends], strategy=strategy).rounds(temperature=temperature)

    assert_same(rounds(None), rounds(Strategy.EAGER))


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
@pytest.mark.parametrize("mode", GraphMode)
def test_every_graph_mode_drafts_what_eager_drafts(mode, steps):
    expected = strong(steps=steps, strategy=Strategy.EAGER).rounds(2)
    found = strong(steps=steps, graph_mode=mode, capture_sizes=[4])
    assert_same(found.rounds(2), expected)
    kinds = {report.key.kind for report in found.drafter.graphs.reports}
    assert kinds == (set() if mode is GraphMode.NONE else {"extend", "loop"})


@pytest.mark.parametrize("strategy", CAPTURING)
def test_two_tokens_a_round_are_drafted_at_every_capture_size(strategy):
    found = strong(steps=2, strategy=strategy, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    expected = strong(steps=2, strategy=Strategy.EAGER, limits=(MAX_SEQ_LEN,) * 4, capture_sizes=[1, 2, 3, 4])
    for count in (4, 3, 2, 1):
        tokens = []
        for scene in (found, expected):
            scene.load(range(count))
            verified = scene.verified(round_=count, contexts=[3, 7, 15, 0][:count])
            tokens.append(scene.drafter.propose(verified).tokens.tolist())
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("strategy", CAPTURING)
def test_sizes_left_out_for_want_of_memory_are_served_by_the_next_larger(strategy):
    whole = strong(strategy=strategy)
    whole.drafter.capture()
    largest = sum(report.bytes for report in whole.drafter.graphs.reports if report.key.num_reqs == 4)
    scene = strong(strategy=strategy, graph_memory_limit=largest + 1)
    scene.load([0])
    wanted = strong(strategy=Strategy.EAGER, capture_sizes=[4])
    wanted.load([0])
    tokens = [s.drafter.propose(s.verified(rows=slice(0, 1))).tokens.tolist() for s in (scene, wanted)]
    assert set(scene.drafter.graphs.left_out) == {1, 2} and tokens[0] == tokens[1]


def test_a_drafter_whose_graphs_were_released_captures_them_for_its_next_round():
    scene, expected = strong(capture_sizes=[4]), strong(capture_sizes=[4]).rounds(2)
    found, contexts = [], list(CONTEXTS)
    for round_ in range(2):
        verified = scene.verified(round_=round_, contexts=contexts)
        drafts = scene.drafter.propose(verified)
        found.append((drafts.tokens.clone(), drafts.logits.clone()))
        contexts = [c + int(a) + 1 for c, a in zip(contexts, verified.accepted, strict=True)]
        scene.drafter.graphs.release()
    assert_same(found, expected)
