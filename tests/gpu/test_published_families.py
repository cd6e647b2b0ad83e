"""Every family of published targets generates on a GPU, in fp32, the texts that it generates on a CPU.

For each kind of target on this library's layers, and for hybrid targets: plainly, with a draft, with
a draft and batch invariance, with a draft and edited logits, and with a draft over 8-bit caches, in the graphs that
`LLM` chooses. On a CPU, other tests compare these texts with `transformers`' own.
"""

from __future__ import annotations

import multiprocessing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from spec_decode.llm import LLM, SamplingParams
from tests.spec_decode.engine import hybrid_helpers as hybrids
from tests.spec_decode.llm.test_published import write_tokenizer
from tests.spec_decode.llm.test_published_targets import PROMPTS, WORDS, with_prediction_layer
from tests.spec_decode.models.generated import make_causal
from tests.spec_decode.models.test_decoder_target import KINDS, WITH_STATES, make_model

SCHEMA = "attn-published-families/1"
JOBS = 8
HYBRIDS = tuple(hybrids.FAMILIES)
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True)
EDITED = SamplingParams(
    max_tokens=24, ignore_eos=True, min_tokens=4, logit_bias={7: 2.0, 9: -3.0},
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
)  # fmt: skip
MODES: dict[str, tuple[bool, dict[str, Any], SamplingParams]] = {
    "plain": (False, {}, PLAIN),
    "drafted": (True, {}, PLAIN),
    "batch invariant": (True, {"batch_invariant": True}, PLAIN),
    "edited": (True, {}, EDITED),
    "8-bit caches": (True, {"kv_cache_dtype": "fp8"}, PLAIN),
}
"""Whether there is a draft, options of `LLM`, and how the texts are sampled."""


def write(kind: str, folder: Path) -> Path:
    """Write a random target of this kind; return the folder of a draft that often agrees with it."""
    draft = folder / "draft"
    write_tokenizer(folder, WORDS[: hybrids.VOCAB] if kind in HYBRIDS else WORDS)
    if kind in HYBRIDS:
        hybrids.make_model(kind).save_pretrained(folder)
        draft.mkdir()
        make_causal(vocab_size=hybrids.VOCAB, max_position_embeddings=96).write(draft)
        return draft
    model = make_model(kind)
    model.save_pretrained(folder)
    if kind.startswith("glm"):
        return with_prediction_layer(folder)
    if kind in WITH_STATES:
        draft.mkdir()
        make_causal(vocab_size=model.config.vocab_size, max_position_embeddings=128).write(draft)
        return draft
    model.model.norm.weight.data.add_(0.2)
    model.save_pretrained(draft)
    return draft


def texts(kind: str, folder: Path, draft: Path, mode: str, device: str) -> tuple[list[list[int]], float]:
    """Return how a target continues the prompts, and the drafts kept in a round."""
    drafts, chosen, params = MODES[mode]
    options: dict[str, Any] = chosen | ({"draft": draft, "num_speculative_tokens": 3} if drafts else {})
    llm = LLM(folder, device=device, dtype="float32", max_model_len=64, max_num_seqs=4, **options)
    prompts = hybrids.PROMPTS if kind in HYBRIDS else PROMPTS
    found = [list(each.token_ids) for each in llm.generate(prompts, params, progress=False)]
    assert llm.engine.stats.lost_states == 0
    return found, llm.engine.stats.mean_accepted


def compare(job: tuple[str, str]) -> list[dict[str, Any]]:
    """Return a row for each mode: the prompts whose text on the device differs from the CPU's, or the refusal."""
    kind, device = job
    rows = []
    with TemporaryDirectory() as folder:
        draft = write(kind, Path(folder))
        for mode in MODES:
            row: dict[str, Any] = {"kind": kind, "mode": mode}
            try:
                expected, _ = texts(kind, Path(folder), draft, mode, "cpu")
                found, accepted = texts(kind, Path(folder), draft, mode, device)
            except Exception as error:
                rows.append(row | {"problem": f"{type(error).__name__}: {error}"[:400]})
                continue
            unlike = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
            rows.append(row | {"unlike_cpu": unlike, "prompts": len(expected), "accepted": round(accepted, 3)})
    return rows


def broken(row: dict[str, Any]) -> bool:
    """Whether a row is no evidence: another text, or a problem other than a refusal of batch invariance."""
    if "problem" in row:
        return row["mode"] != "batch invariant" or row["kind"] not in (*HYBRIDS, *WITH_STATES)
    return row["unlike_cpu"] > 0


@pytest.mark.gpu
def test_families_generate_the_texts_of_a_cpu(write_report):
    jobs = [(kind, "cuda") for kind in (*KINDS, *HYBRIDS)]
    with multiprocessing.get_context("spawn").Pool(JOBS, maxtasksperchild=1) as pool:
        rows = [row for found in pool.imap(compare, jobs) for row in found]
    write_report(SCHEMA, roots=["spec_decode.llm"], backends=["triton_paged", "torch_reference"], rows=rows)
    assert not [row for row in rows if broken(row)]


# On a CPU, small.


@pytest.mark.parametrize("kind", ["llama-3", "glm-4.5", HYBRIDS[0]])
def test_right_family_agrees(kind):
    rows = compare((kind, "cpu"))
    assert [row["mode"] for row in rows] == list(MODES) and not any(map(broken, rows))
    assert all(row["accepted"] > 0 for row in rows if row["mode"] in ("drafted", "edited", "8-bit caches"))


def test_another_text_is_broken(monkeypatch):
    original, calls = texts, count()

    def changed(*args):
        found, accepted = original(*args)
        return (found if next(calls) % 2 else [found[0][::-1], *found[1:]]), accepted

    monkeypatch.setattr(f"{__name__}.texts", changed)
    assert all(map(broken, compare(("llama-3", "cpu"))))


def test_refused_kind_is_broken(monkeypatch):
    monkeypatch.setattr(LLM, "generate", None)
    assert all(map(broken, compare(("llama-3", "cpu"))))
