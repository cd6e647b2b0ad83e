"""Multi-token-prediction modules that draft one token each: short texts, chunked prompts, and what rounds require."""

from itertools import pairwise

import pytest
import torch

from attn_backends import get
from builders import BatchError, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy, StrategyError
from spec_decode.models import CheckpointError
from spec_decode.models.load import load_draft
from spec_decode.models.mtp_modules import MtpModules
from spec_decode.paged.kv_groups import make_group
from tests.factories import CPU
from tests.spec_decode.models.generated import Generated, StubTarget
from tests.spec_decode.models.generated_mtp import V3_CONFIG, module_tensors
from tests.spec_decode.models.test_published_drafts import MAX_SEQ_LEN, MODULES, PAGE, DraftFixture, assert_published
from tests.spec_decode.models.test_published_drafts import K as COUNT

V3 = MODULES["deepseek_v3_of_modules"]
ACCEPTED = [None, (1, 3, 0), (0, 0, 0), (3, 2, 4), (2, 0, 1)]
"""What each round keeps of the one before; of most it keeps less than was drafted."""


class ModulesFixture(DraftFixture):
    """Whose prompts come in parts; what was never read is NaN."""

    def __init__(self, folder, strategy=Strategy.FULL_LOOP, *, part=99, **options):
        super().__init__(V3, folder, strategy, **options)
        self.part = part

    def prefill(self):
        self.drafter._step.inputs_read.states.fill_(torch.nan)
        tables = self.make_tables()
        for start in range(0, max(self.contexts), self.part):
            ends = [min(start + self.part, length) for length in self.contexts]
            rows = [row for row, end in enumerate(ends) if end > start]
            tables.load([[pages[row] for row in rows] for pages in self.pages], [ends[row] for row in rows])
            ids, hidden = (
                torch.cat([of[row][start : ends[row]] for row in rows])
                for of in (self.prompts, self.target_hidden_states)
            )
            lens = [ends[row] for row in rows]
            self.drafter.prefill(tables, [end - start for end in lens], lens, ids, hidden)

    def assert_rounds(self):
        for accepted in ACCEPTED:
            kept = None if accepted is None else torch.tensor(accepted, dtype=torch.int32).clamp(max=self.steps)
            drafts = self.drafts() if kept is None else self.go_on(accepted=kept)
            assert_published(drafts, self, V3)


@pytest.fixture
def fixture(tmp_path):
    return ModulesFixture(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "triton_mla", "contexts": [3, 0, 9], "part": 1},
        {"part": 5, "strategy": Strategy.EAGER},
        {"contexts": [0, 1, 2], "steps": 3},
        {"contexts": [3, 0, 9], "steps": 1},
    ],
    ids=str,
)
def test_rounds_match_chain_over_whole_text(options, tmp_path):
    """Of fewer tokens than modules, those of the first."""
    ModulesFixture(tmp_path, **options).assert_rounds()


def test_unread_states_reach_no_cache(tmp_path):
    fixture = ModulesFixture(tmp_path, Strategy.EAGER, contexts=[0, 1, 2])
    fixture.drafts()
    pages = [page * PAGE + offset for pages in fixture.pages[0] for page in pages for offset in range(PAGE)]
    rows = torch.tensor(pages).view(3, MAX_SEQ_LEN)[:, :COUNT]
    for cache in fixture.groups[0].caches.values():
        assert cache.key.flatten(0, 1)[rows].isfinite().all()


def test_repeated_round_drafts_same_and_stops_as_given(fixture):
    first = fixture.drafts()
    tokens, logits, verified = first.tokens.clone(), first.logits.clone(), fixture.verified
    again = fixture.drafter.propose(verified)
    assert torch.equal(again.tokens, tokens) and torch.equal(again.logits, logits)
    limited = verified._replace(draft_lens=torch.tensor([1, COUNT, 0], dtype=torch.int32))
    wanted = [[int(tokens[0, 0]), *[-1] * (COUNT - 1)], tokens[1].tolist(), [-1] * COUNT]
    assert fixture.drafter.propose(limited).tokens.tolist() == wanted
    assert fixture.drafter.propose(verified, 2).tokens.tolist() == tokens[:, :2].tolist()


def test_rows_may_change_between_rounds(fixture):
    tokens = fixture.drafts().tokens.clone()
    fixture.tables.load([pages[::-1] for pages in fixture.pages], [MAX_SEQ_LEN] * 3)
    turned = [None if tensor is None else tensor.flip(0) for tensor in fixture.verified]
    assert torch.equal(fixture.drafter.propose(type(fixture.verified)(*turned)).tokens, tokens.flip(0))


def test_plan_explains_missing_later_steps(tmp_path):
    fixture = ModulesFixture(tmp_path, None)
    fixture.drafts()
    plan = fixture.drafter.plan
    assert plan.strategy is Strategy.FULL_LOOP and {r.key.kind for r in fixture.drafter.graphs.reports} == {"step_0"}
    assert "no later steps" in dict(plan.not_chosen)[Strategy.DEVICE_LOOP]
    with pytest.raises(StrategyError, match=r"device_loop cannot run: .* no later steps"):
        ModulesFixture(tmp_path, Strategy.DEVICE_LOOP)


def test_more_tokens_than_modules_are_rejected(fixture, monkeypatch):
    monkeypatch.setattr(torch, "zeros", None)
    with pytest.raises(BatchError, match=r"num_speculative_tokens must be at most 4, .*, got 5\. Lower it"):
        Drafter(fixture.model, fixture.groups, fixture.tables, DrafterConfig(num_speculative_tokens=COUNT + 1))


def test_every_module_has_own_parameters_and_cache(fixture):
    model, [group] = fixture.model, fixture.model.layer_groups(16)
    assert isinstance(model, MtpModules) and len(model.prediction_modules) == COUNT
    for one, other in pairwise(model.prediction_modules):
        assert not torch.equal(one.fuse.project.weight, other.fuse.project.weight)
    assert group.layers == tuple(range(COUNT))
    caches = make_group("mtp", get("torch_reference"), group.spec, group.layers, num_pages=2, device=CPU).caches
    assert len({cache.key.data_ptr() for cache in caches.values()}) == COUNT


def test_shared_prefix_ends_before_rewritten_positions(fixture):
    fixture.drafts()
    tables = RequestTables(page_sizes=[PAGE], num_pages=[36], max_reqs=1, max_seq_len=MAX_SEQ_LEN, device=CPU)
    tables.load([[list(range(12))]], [MAX_SEQ_LEN], writable_from=[8])
    prompt = torch.zeros(2, dtype=torch.int64), torch.zeros(2, fixture.model.hidden_size)
    with pytest.raises(BatchError, match="write from position 8 on, got queries from position 5"):
        fixture.drafter.prefill(tables, [2], [10], *prompt)
    fixture.drafter.prefill(tables, [2], [13], *prompt)


@pytest.mark.parametrize(("count", "modules"), [(3, [0, 1]), (2, [0, 1, 2]), (1, [0, 1]), (10**9, [0]), (3, [0, 2])])
def test_checkpoint_with_wrong_module_count_is_rejected(tmp_path, count, modules):
    tensors = {name: tensor for module in modules for name, tensor in module_tensors(V3_CONFIG, module).items()}
    checkpoint = Generated({**V3_CONFIG, "num_nextn_predict_layers": count}, tensors)
    row = len(modules) if modules == list(range(len(modules))) else 1
    with pytest.raises(CheckpointError, match=rf"draft layers, {count} from model\.layers\.2 on, got {row}[;.]"):
        load_draft(checkpoint.write(tmp_path), StubTarget(**V3.target), dtype=torch.float32)
