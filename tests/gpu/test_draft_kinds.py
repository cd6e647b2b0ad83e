"""Drafts of every published kind on a GPU: graphs draft what eager kernels draft, bit for bit, and so does a CPU.

Each kind's checkpoint is random, with heads as wide as the kernels support. A drafter runs three rounds in every
strategy that its kind has, at temperature 0 and 1, as chains and as trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_decode.drafter import Strategy
from spec_decode.trees import DynamicTreeConfig
from tests.factories import CPU
from tests.spec_decode.models import oracle
from tests.spec_decode.models.generated import (
    VOCAB,
    Generated,
    make_causal,
    make_dflash,
    make_dflash2,
    make_eagle,
    make_eagle3,
    make_latent_eagle3,
)
from tests.spec_decode.models.generated_mtp import (
    GLM_CONFIG,
    MIMO_CONFIG,
    QWEN_MOE_CONFIG,
    QWEN_TEXT,
    SIZES,
    make_mtp,
)
from tests.spec_decode.models.test_published_drafts import THREE_STATES, TWO_STATES, Case, DraftFixture

SCHEMA = "attn-draft-kinds/1"
HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}
TREE = DynamicTreeConfig(width=3, num_tokens=9)
ROUNDS = 3
NEAR = 1e-3
"""By how much a GPU's fp32 logit may differ from a CPU's."""


def with_heads(config: dict[str, Any]) -> Generated:
    """Multi-token prediction of one layer over grouped heads."""
    return make_mtp({**config, **SIZES, **HEADS, "vocab_size": VOCAB})


QWEN = {**QWEN_TEXT, "architectures": ["Qwen3_5ForCausalLM"]}
CHAINS = {
    "EAGLE": Case(make_eagle(**HEADS), oracle.Eagle),
    "EAGLE-3.1": Case(make_eagle3(fc_norm=True, norm_output=True, **HEADS), oracle.Eagle3, THREE_STATES),
    "EAGLE-3 over latents": Case(make_latent_eagle3(**LATENT), oracle.Eagle3, THREE_STATES),
    "Qwen3.5's MTP": Case(with_heads(QWEN), oracle.Eagle),
    "Qwen3-Next's MTP": Case(with_heads(QWEN_MOE_CONFIG), oracle.Eagle),
    "GLM-4.5's MTP": Case(with_heads(GLM_CONFIG), oracle.Eagle),
    "MiMo's MTP": Case(with_heads(MIMO_CONFIG), oracle.Eagle),
}
"""Drafts that go step by step. The oracles are not run here."""
BLOCKS = {
    "P-EAGLE": Case(make_eagle3(mask=(), ptd_token_id=7, **HEADS), oracle.Eagle3, THREE_STATES),
    "PARD": Case(make_causal(pard_token=VOCAB - 1, **HEADS), oracle.Causal),
    "DFlash": Case(make_dflash(**HEADS), oracle.DFlash, TWO_STATES),
    "DSpark": Case(make_dflash(markov_rank=6, **HEADS), oracle.DSpark, TWO_STATES),
    "DFlash2": Case(make_dflash2(**HEADS), oracle.DFlash2, TWO_STATES),
}
"""Drafts that propose a block at once."""
STRATEGIES = (Strategy.PER_STEP, Strategy.FULL_LOOP, Strategy.DEVICE_LOOP)

Round = tuple[torch.Tensor, ...]


def rounds(case: Case, folder: Path, strategy: Strategy, temperature: float, device: torch.device, tree: bool) -> Any:
    """Tokens, logits and parents of each round."""
    backend = "triton_mla" if "kv_lora_rank" in case.checkpoint.config else "triton_paged"
    options = {"tree": TREE} if tree else {}
    fixture = DraftFixture(case, folder, strategy, device=device, backend=backend, **options)
    first = fixture.verified._replace(temperature=torch.full_like(fixture.verified.temperature, temperature))
    found: list[Round] = []
    for number in range(ROUNDS):
        fixture.verified = first._replace(
            next_tokens=first.next_tokens.roll(number),
            target_hidden_states=first.target_hidden_states.roll(number, 0),
        )
        drafts = fixture.drafts()
        outputs = (drafts.tokens, drafts.logits, drafts.parents)
        found.append(tuple(each.clone().cpu() for each in outputs if each is not None))
    assert fixture.drafter.plan.strategy is strategy
    return found


def same_bits(found: list[Round], wanted: list[Round]) -> bool:
    """Whether all tensors of all rounds are equal."""
    return all(torch.equal(*pair) for pair in zip(sum(found, ()), sum(wanted, ()), strict=True))


def largest_difference(found: list[Round], wanted: list[Round]) -> float:
    """Of logits that are finite in one of the two; infinite where tokens or parents differ."""
    worst = 0.0
    for (tokens, logits, *parents), (theirs, others, *their_parents) in zip(found, wanted, strict=True):
        equal = all(torch.equal(*pair) for pair in zip((tokens, *parents), (theirs, *their_parents), strict=True))
        distance = (logits - others).abs()[logits.isfinite() | others.isfinite()]
        worst = max(
            worst,
            float(distance.nan_to_num(torch.inf, torch.inf).max()) if len(distance) else 0.0,
            0.0 if equal else torch.inf,
        )
    return worst


def rows_of(device: torch.device, folders: Callable[[], Path]) -> Iterator[dict[str, Any]]:
    """How every kind drafts, a row for each strategy and temperature."""
    for name, case in (CHAINS | BLOCKS).items():
        for tree, temperature in product((False, True), (0.0, 1.0)):
            eager = rounds(case, folders(), Strategy.EAGER, temperature, device, tree)
            on_a_cpu = rounds(case, folders(), Strategy.EAGER, temperature, CPU, tree)
            for strategy in STRATEGIES:
                if strategy is Strategy.DEVICE_LOOP and (name in BLOCKS or tree):
                    continue
                found = rounds(case, folders(), strategy, temperature, device, tree)
                yield {
                    "draft": name,
                    "tree": tree,
                    "strategy": strategy.value,
                    "temperature": temperature,
                    "as_eager": same_bits(found, eager),
                    # Noise turns a difference in the last bit into another token only near a tie.
                    "from_cpu": largest_difference(found, on_a_cpu),
                }


def problems_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows."""
    named = [
        (f"{row['draft']}, {row['strategy']}, temperature {row['temperature']:g}, tree {row['tree']}", row)
        for row in rows
    ]
    return [
        *(f"{name}: other bits than eager" for name, row in named if not row["as_eager"]),
        *(f"{name}: {row['from_cpu']} from a CPU's" for name, row in named if not row["from_cpu"] <= NEAR),
    ]


@pytest.mark.gpu
def test_every_draft_kind_agrees_on_gpu(tmp_path_factory, write_report):
    rows = list(rows_of(torch.device("cuda"), lambda: tmp_path_factory.mktemp("draft")))
    write_report(SCHEMA, backends=["triton_mla", "triton_paged"], rows=rows)
    assert not problems_of(rows)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", CHAINS | BLOCKS)
def test_every_draft_kind_agrees_on_cpu(name, tree, tmp_path):
    case = (CHAINS | BLOCKS)[name]
    eager = rounds(case, tmp_path / "eager", Strategy.EAGER, 0.0, CPU, tree)
    graph = rounds(case, tmp_path / "graph", Strategy.FULL_LOOP, 0.0, CPU, tree)
    assert same_bits(graph, eager) and largest_difference(graph, eager) == 0.0
    assert (eager[0][0] >= 0).any() and not torch.equal(eager[0][0], eager[1][0])


def test_differing_row_is_a_problem():
    row = {"draft": "DFlash", "tree": False, "strategy": "full_loop", "temperature": 0.0}
    found = [(torch.tensor([[1]]), torch.tensor([[0.5, -torch.inf]]))]
    assert largest_difference(found, found) == 0.0 and same_bits(found, found)
    for other in ((torch.tensor([[2]]), found[0][1]), (found[0][0], torch.tensor([[0.5, 0.0]]))):
        assert largest_difference([other], found) == torch.inf and not same_bits([other], found)
    assert not problems_of([{**row, "as_eager": True, "from_cpu": NEAR}])
    assert len(problems_of([{**row, "as_eager": False, "from_cpu": torch.nan}])) == 2
