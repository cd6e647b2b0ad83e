"""Comparisons and problems in vLLM's measurements; vLLM itself runs only on a GPU."""

import argparse
import copy
import json
import math
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from scripts import vllm_figures, vllm_worker
from scripts.on_gpus import cores_of
from scripts.only import chosen
from scripts.vllm_arm import (
    DENSE_LAYERS,
    KINDS,
    SIZES,
    WATCHED_MOST,
    WATCHED_REPEATS,
    Arm,
    engine_options,
    model_folder,
    prompts,
    watched_runs,
)
from scripts.vllm_figures import (
    BASE,
    CONTROL,
    EXACT_ARMS,
    GROUPED,
    LATENT,
    OURS,
    REBUILT,
    Kept,
    agreement,
    arms,
    main,
    names,
    problems,
    run,
    run_all,
    same_drafts,
)
from scripts.vllm_worker import MeasuredWorker, random_weights, weight_shapes
from spec_decode.models import CheckpointError
from spec_decode.models.load import load_draft
from tests.spec_decode.models.generated import StubTarget
from tests.stand_in_modules import install_module

BLOCKS = ("dflash", "dflash2")


def row(requests=1, drafts=(), texts=([1, 2],), **more):
    return {"requests": requests, "drafts": list(drafts), "texts": list(texts), "plans": 0, "waits": {}} | more


def arm(draft, *rows, kept=0.0, fused=(True,), graph_mode="FULL_DECODE_ONLY", compiled=False, **more):
    named = {"draft": draft, "kept": kept, "name": f"{draft} {kept}", "compiled": compiled}
    named |= {"kind": "eagle", "size": "llama3-8b", "num_gpus": 1, "watched": False, **more}
    return {"arm": named, "rows": list(rows), "fused": list(fused), "graph_mode": graph_mode, "exit_status": 0}


def engines():
    """Of every kind one, without an objection."""
    drafts = [[[5, 6, 7]]] * 50
    exact = [arm(name, row(drafts=drafts)) for name in (BASE, REBUILT, CONTROL, *OURS)]
    return [*exact, *(arm(name, row(), kept=1.8) for name in OURS), arm("", row())]


def objections(found):
    return problems(found, agreement(found))


def test_sound_engines_give_no_objection():
    assert objections(engines()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda each: each.update(fused=[True, False]), "not fused on every rank"),
        (lambda each: each.update(graph_mode="NONE"), "graphs NONE"),
        (lambda each: each["rows"][0].update(plans=3), "3 plans on the host"),
        (
            lambda each: each["rows"][0].update(waits={"called a synchronizing operation": 1}),
            "waits for the device: called",
        ),
        (lambda each: each.update(rows=[], exit_status=1), "ended with 1"),
    ],
)
def test_draft_violation_is_reported(change, says):
    found = engines()
    change(found[-2])
    assert [says in text for text in objections(found)] == [True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"compared": 0}, ["compared nothing with 1 requests"]),
        ({"difference": ["a group", 2, "a field", "is 1"]}, ["['a group', 2, 'a field', 'is 1']"]),
    ],
)
def test_validated_arm_must_compare_and_find_no_difference(changes, says):
    seen = row(waits={"of comparisons": 3}, plans=1, **{"compared": 5, "difference": None, **changes})
    found = [*engines(), arm(OURS[0], seen, kept=3.2, watched=True)]
    assert objections(found) == [f"{OURS[0]} 3.2: {what}" for what in says]


def test_vllm_drafts_may_plan_wait_and_rebuild():
    found = engines()
    found[1].update(fused=[False], graph_mode="NONE")
    found[1]["rows"][0].update(plans=9, waits={"waits": 2})
    assert objections(found) == []


def test_draft_differing_more_than_vllms_is_reported():
    found = engines()
    found[3]["rows"][0]["drafts"] = [[[5, 6, 8]]] * 50
    assert [each.split(":")[0] for each in objections(found)] == [f"{OURS[0]}, eagle"]
    found[1]["rows"][0]["drafts"] = copy.deepcopy(found[3]["rows"][0]["drafts"])
    assert objections(found) == []


@pytest.mark.parametrize(("graph_mode", "objected"), [("FULL_AND_PIECEWISE", False), ("PIECEWISE", True)])
def test_compiled_draft_graph_is_compared_with_compiled_engine(graph_mode, objected):
    plain = arm("", row(), graph_mode="FULL_AND_PIECEWISE", compiled=True)
    draft = arm(OURS[0], row(), kept=1.8, graph_mode=graph_mode, compiled=True)
    assert bool(objections([*engines(), plain, draft])) is objected


def test_draft_graph_is_compared_with_same_model():
    plain = arm("", row(), graph_mode="NONE", size="qwen3-8b")
    draft = arm(OURS[0], row(), kept=4.4, graph_mode="NONE", size="qwen3-8b", kind="dflash2")
    assert objections([*engines(), plain, draft]) == []
    assert len(objections([*engines(), {**plain, "graph_mode": "FULL_DECODE_ONLY"}, draft])) == 1


def test_blocks_are_compared_within_their_kind():
    drafts = [[[5, 6, 7]]] * 50
    blocks = [arm(name, row(drafts=drafts), kind="dflash") for name in (BASE, REBUILT, CONTROL, *OURS)]
    others = [arm(name, row(drafts=[[[1, 2, 3]]] * 50), kind="dflash2") for name in (BASE, REBUILT, CONTROL, *OURS)]
    assert objections([*engines(), *blocks, *others]) == []
    blocks[3]["rows"][0]["drafts"] = [[[5, 6, 8]]] * 50
    assert [each.split(":")[0] for each in objections([*engines(), *blocks, *others])] == [f"{OURS[0]}, dflash"]


def test_latent_drafts_are_compared_with_target_backend():
    found = [arm(name, row(drafts=[[[5, 6, 7]]] * 50), kind="mtp", size="deepseek-small") for name in LATENT.all]
    assert objections([*engines(), *found]) == []
    found[3]["rows"][0]["drafts"] = [[[5, 6, 8]]] * 50
    assert [each.split(":")[0] for each in objections([*engines(), *found])] == [f"{LATENT.ours[0]}, mtp"]
    found[2].update(fused=[False])
    found[4].update(fused=[False])
    assert [each for each in objections(found) if "not fused" in each] == [
        f"{LATENT.ours[1]} 0.0: not fused on every rank"
    ]


def test_two_gpu_drafts_are_compared_over_two_gpus():
    drafts = [[[5, 6, 8]]] * 50
    across = [arm(name, row(drafts=drafts), num_gpus=2) for name in (BASE, OURS[0])]
    rows = [each for each in agreement([*engines(), *across]) if each["num_gpus"] == 2]
    assert [(each["draft"], each["draft_tokens"], each["equal"]) for each in rows] == [(OURS[0], 150, 150)]
    assert objections([*engines(), *across]) == []


def test_compiled_engines_use_vllm_defaults():
    modes = [engine_options(Arm("", 0, compiled=compiled))["compilation_config"] for compiled in (True, False)]
    assert modes == [{}, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}]


def test_draft_tokens_are_compared_up_to_first_difference():
    mine = row(drafts=[[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]], texts=[[1], [2]])
    theirs = row(drafts=[[[1, 9, 3], [4, 5, 6]], [[0, 8, 9]]], texts=[[1], [3]])
    assert same_drafts(mine, theirs) == {"draft_tokens": 6, "equal": 4, "texts": 2, "equal_texts": 1}


def test_drafts_are_compared_until_one_side_finishes():
    mine, theirs = row(drafts=[[[1], [2]], [[3], [4]], [[5]]]), row(drafts=[[[1], [2]], [[4]], [[5]]])
    assert same_drafts(mine, theirs) == {"draft_tokens": 2, "equal": 2, "texts": 1, "equal_texts": 1}


def test_timed_engines_are_not_compared():
    assert agreement([arm(BASE, row(), kept=1.8), arm(OURS[0], row(), kept=1.8)]) == []


def test_large_models_are_timed_and_small_compared():
    timed, exact, latent = {BASE, REBUILT, *OURS}, set(GROUPED.all), set(LATENT.all)
    grouped = {
        "eagle": (7, "llama3-8b", "small"),
        "dflash": (15, "qwen3-8b", "qwen3-small"),
        "dflash2": (7, "qwen3-8b", "qwen3-small"),
        "qwen3.5-mtp": (3, "qwen3.5", "qwen3.5-small"),
    }
    sizes = ("deepseek-v3", "deepseek-v3-shard")
    expected = {
        False: {
            **{("eagle", size, 0): {""} for size in sizes},
            **{("mtp", size, 3): latent for size in (*sizes, "deepseek-small")},
            **{(kind, small, steps): exact for kind, (steps, _, small) in grouped.items()},
        },
        True: {
            **{("eagle", size, 0): {""} for _, size, _ in grouped.values()},
            **{(kind, size, steps): timed for kind, (steps, size, _) in grouped.items()},
        },
    }
    found = {False: defaultdict(set), True: defaultdict(set)}
    for each in arms(1):
        found[each.compiled][each.kind, each.size, each.steps].add(each.draft)
        assert each.is_timed == ("small" not in each.size)
        assert each.target == (LATENT if each.size.startswith("deepseek") else GROUPED).base
    assert found == expected


def test_exact_arms_precede_compiled_ones():
    order = [(each.compiled, not each.is_timed) for each in arms(1)]
    assert order == sorted(order) and len(set(order)) == 3


def test_two_gpus_run_each_draft_timed_and_exact():
    across = [each for each in arms(2) if each.num_gpus == 2]
    assert {(each.kind, each.is_timed) for each in across} == {
        (kind, is_timed) for kind in ("eagle", "mtp", "dflash") for is_timed in (True, False)
    }
    without = {replace(each, num_gpus=1) for each in across} - set(arms(2))
    assert {(each.kind, each.is_timed) for each in without} == {("eagle", True), ("dflash", True)}, (
        "each other has one GPU's beside it, and of these it is compiled"
    )


def test_validation_cost_is_measured_for_each_draft():
    watched = [each for each in arms(1) if each.watched]
    assert sorted((each.kind, each.draft in names(each.kind).ours) for each in watched) == [
        ("dflash", True),
        ("eagle", True),
        ("mtp", True),
        ("qwen3.5-mtp", True),
    ]
    # Each engine is there without comparisons too.
    assert {replace(each, watched=False) for each in watched} <= set(arms(1))


def test_runs_alternate_with_and_without_comparisons():
    comparing, state = [], {"rounds": 3, "seconds": 1.0, "found": None}

    def compare(on):
        comparing.append(on)
        return dict(state)

    def generate():
        if comparing[-1]:
            state.update(rounds=state["rounds"] + 1, seconds=state["seconds"] + 0.25)
        return (2.0, [[1] * 10]) if comparing[-1] else (1.0, [[1] * 5, [1] * 6])

    row = watched_runs(generate, compare)
    assert comparing[1:5] == [True, False, False, True] and comparing[0] and comparing[-1]
    assert row == {
        "tokens_per_s": [5.0] * WATCHED_REPEATS,
        "unwatched_tokens_per_s": [11.0] * WATCHED_REPEATS,
        "watched_s": 2.0 * WATCHED_REPEATS,
        "compared": WATCHED_REPEATS,
        "compared_s": 0.25 * WATCHED_REPEATS,
        "difference": None,
    }


def test_runs_repeat_until_something_is_compared():
    runs = []

    def compare(on):
        runs.append(on)
        return {"rounds": sum(runs) // 30, "seconds": 0.0, "found": None}

    row = watched_runs(lambda: (1.0, [[1]]), compare)
    assert row["compared"] == 1
    assert WATCHED_REPEATS < len(row["tokens_per_s"]) == len(row["unwatched_tokens_per_s"]) < WATCHED_MOST
    row = watched_runs(lambda: (1.0, [[1]]), lambda on: {"rounds": 0, "seconds": 0.0, "found": None})
    assert row["compared"] == 0 and len(row["tokens_per_s"]) == WATCHED_MOST
    row = watched_runs(lambda: (1.0, [[1]]), lambda on: {"rounds": 0, "seconds": 0.0, "found": "a count"})
    assert row["difference"] == "a count" and len(row["tokens_per_s"]) == WATCHED_REPEATS


def test_arm_names_are_unique():
    names = [each.name for each in arms(2)]
    assert len(names) == len(set(names))


def test_arm_result_is_kept_until_source_changes(tmp_path):
    three = Arm(BASE, 3)
    for of in ({"sources": {"builders": "1"}}, {"sources": {"builders": "2"}}):
        kept = Kept(tmp_path / "kept", of)
        assert kept.load(three) is None
        kept.store(three, {"rows": [1]})
        assert kept.load(three) == {"rows": [1]} and kept.load(Arm(BASE, 7)) is None


def test_kept_arms_stay_in_order(tmp_path):
    kept, wanted = Kept(tmp_path, {}), arms(2)
    last = wanted[-1].name
    for each in wanted[:-1]:
        kept.store(each, {"arm": {"name": each.name}, "rows": []})
    found, skipped = run_all(wanted, [0, 1], kept, seconds=0)
    assert [each["arm"]["name"] for each in found] == [each.name for each in wanted[:-1]] and skipped == [last]
    assert [each.num_gpus for each in wanted] == sorted((each.num_gpus for each in wanted), reverse=True)


def test_arms_run_on_their_gpus_cores(tmp_path, monkeypatch):
    tells = tmp_path / "tells"
    report = "json.dump({'rows': [], 'cores': sorted(os.sched_getaffinity(0))}, open(sys.argv[-1], 'w'))"
    tells.write_text(f"#!{sys.executable}\nimport json, os, sys\n{report}\n")
    tells.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tells))
    timed = [Arm(draft, 3, "llama3-8b", 1.8) for draft in (BASE, REBUILT)]
    found, _ = run_all(timed, [0, 1], Kept(tmp_path / "kept", {}))
    assert len(found) == 2 and all(each["cores"] in [cores_of([gpu], [0, 1]) for gpu in (0, 1)] for each in found)


@pytest.mark.parametrize(("kept", "places"), [(1.8, [[0], [1]] * 2), (0.0, [[0], [1]] * EXACT_ARMS)])
def test_timed_engines_start_together_if_asked(kept, places, tmp_path, monkeypatch):
    shared = []
    monkeypatch.setattr(vllm_figures, "share", lambda places, group, work: shared.append(places) or [])
    run_all([Arm(BASE, 3, "small", kept)], [0, 1], Kept(tmp_path, {}), together=2)
    assert shared == [places]


def test_one_engine_picks_the_kernels_of_all_exact_arms(tmp_path, monkeypatch):
    waves = []
    monkeypatch.setattr(vllm_figures, "share", lambda places, group, work: waves.append([*group]) or [])
    hybrid = [Arm(draft, 3, "qwen3.5-small", kind="qwen3.5-mtp") for draft in (BASE, CONTROL, REBUILT)]
    others = [Arm(BASE, 7, "small"), Arm(BASE, 3, "qwen3.5", 1.8, kind="qwen3.5-mtp")]
    run_all([others[0], *hybrid, others[1]], [0], Kept(tmp_path, {}))
    assert waves == [hybrid[:1], [others[0], *hybrid[1:]], others[1:]]


def test_arm_over_time_is_killed_and_not_kept(tmp_path, monkeypatch):
    sleeps = tmp_path / "sleeps"
    sleeps.write_text("#!/bin/sh\nsleep 1000\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeps))
    kept = Kept(tmp_path, {})
    assert run(Arm(BASE, 3), [0], kept, 0.1, among=[0]) is None and kept.load(Arm(BASE, 3)) is None


@pytest.mark.parametrize(("flag", "says"), [("--minutes", "above 0, got 0."), ("--together", "at least 1, got 0.")])
def test_zero_is_rejected(flag, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_figures.py", "--json", "FILE", flag, "0"])
    with pytest.raises(SystemExit):
        main()
    assert f"{flag} must be {says}" in capsys.readouterr().err


def test_pattern_matching_no_arm_writes_no_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = tmp_path / "vllm.json"
    monkeypatch.setattr(sys, "argv", ["vllm_figures.py", "--json", str(report), "--only", "nonesuch*"])
    with pytest.raises(SystemExit):
        main()
    assert "--only must match one of " in capsys.readouterr().err and not report.exists()


@pytest.mark.parametrize("size", ["small", "qwen3-small", "qwen3.5-small", "deepseek-small"])
def test_random_weights_form_a_whole_model(size):
    config = transformers.AutoConfig.from_pretrained(model_folder(size))
    with torch.device("meta"):
        expected = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    found = {name: shape for name, (shape, _) in weight_shapes(config, is_draft=False).items()}
    assert found == {name: x.shape for name, x in expected.items()}


def test_moe_weights_match_transformers_and_mtp_layer():
    config = transformers.AutoConfig.from_pretrained(model_folder("deepseek-v3-shard"))
    with torch.device("meta"):
        expected = transformers.AutoModelForCausalLM.from_config(config)
    shapes = weight_shapes(config, is_draft=False)
    assert sum(map(math.prod, (shape for shape, _ in shapes.values()))) == sum(
        x.numel() for x in expected.state_dict().values()
    )
    last = f"model.layers.{DENSE_LAYERS}."
    draft = weight_shapes(config, is_draft=True)
    assert {name.replace(".4.", ".3.", 1): weight for name, weight in draft.items() if "head.norm" not in name} == {
        **{name: weight for name, weight in shapes.items() if name.startswith(last)},
        **{f"{last}{name}.weight": ((7168,), 1.0) for name in ("enorm", "hnorm")},
        f"{last}eh_proj.weight": ((7168, 2 * 7168), 1.0),
    }


@pytest.mark.parametrize("kind", BLOCKS)
def test_block_draft_weights_form_whole_checkpoint(kind, monkeypatch):
    """Our own loader of published drafts takes every tensor of one, and none besides."""
    vocab, hidden = 128, 64
    monkeypatch.setitem(SIZES, "qwen3-tiny", (hidden, 96, 4, 2, 16, vocab, 8))
    folder = Path(model_folder("qwen3-tiny", kind=kind))
    config = transformers.AutoConfig.from_pretrained(folder)
    weights = dict(random_weights(config, is_draft=True, seed=0, device=torch.device("cpu")))
    save_file(weights, folder / "model.safetensors")
    target = StubTarget(vocab_size=vocab, hidden_size=hidden, target_states_size=5 * hidden, dtype=torch.bfloat16)
    draft = load_draft(folder, target)
    assert type(draft).__name__.lower() == kind
    weights.popitem()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError):
        load_draft(folder, target)


def test_random_weights_repeat_by_seed():
    config = transformers.AutoConfig.from_pretrained(model_folder("small", kind="eagle"))
    config.vocab_size, device = 64, torch.device("cpu")
    first, again, other = (dict(random_weights(config, is_draft=True, seed=seed, device=device)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert not torch.equal(first["layers.0.self_attn.k_proj.weight"], first["layers.0.self_attn.v_proj.weight"])


def test_prompts_repeat_and_stay_in_vocabulary():
    drawn = prompts(4, 100)
    assert drawn == prompts(4, 100) and drawn != prompts(5, 100)[:4]
    assert all(3 <= token < 100 for prompt in drawn for token in prompt["prompt_token_ids"])


def test_only_timed_arms_use_synthetic_acceptance():
    config = engine_options(Arm(OURS[0], 3, kept=1.8))["speculative_config"]
    assert (config["rejection_sample_method"], config["synthetic_acceptance_length"]) == ("synthetic", 2.8)
    assert "rejection_sample_method" not in engine_options(Arm(OURS[0], 3))["speculative_config"]
    assert "speculative_config" not in engine_options(Arm("", 0))


class Speculator:
    supports_decode_metadata_update = True
    num_speculative_steps = 3

    def propose(self, batch, tokens, **options):
        return torch.tensor(tokens)


@pytest.fixture(autouse=True)
def marks(monkeypatch):
    """On a device that no machine of these tests has: two milliseconds go by from each to the next."""

    class Mark:
        def elapsed_time(self, other):
            return 2.0 * (created.index(other) - created.index(self))

    created = []
    monkeypatch.setattr(vllm_worker, "_mark", lambda: created.append(Mark()) or created[-1])


def watching(speculator=None):
    """A worker of vLLM's that keeps what is drafted."""
    worker = MeasuredWorker()
    worker.model_runner = SimpleNamespace(speculator=speculator or Speculator())
    worker.watch_drafts(False)
    return worker


DECODES, MIXED = SimpleNamespace(num_scheduled_tokens=[4, 4]), SimpleNamespace(num_scheduled_tokens=[4, 9])


def test_worker_keeps_drafts_since_last_request():
    worker = watching()
    worker.model_runner.speculator.propose(DECODES, [1])
    worker.watch_drafts(False)
    worker.model_runner.speculator.propose(DECODES, [2], dummy_run=True)
    worker.model_runner.speculator.propose(DECODES, [3])
    seen = worker.drafts_seen()
    assert (seen["drafts"], len(seen["host_s"]), seen["fused"]) == ([[3]], 1, True)
    assert seen["gpu_s"] == [0.002]


def test_prefill_plans_are_counted_separately():
    worker = watching()
    for batch, plans in ((MIXED, 2), (DECODES, 0), (DECODES, 1)):
        worker._plans += [None] * plans
        worker.model_runner.speculator.propose(batch, [1])
    seen = worker.drafts_seen()
    assert (seen["plans"], seen["prefill_plans"]) == (1, 2)


def test_decode_and_block_plans_are_counted(monkeypatch):
    backend = install_module(
        monkeypatch,
        "vllm.v1.attention.backends.flashinfer",
        fast_plan_decode=lambda *args, **options: "decode",
        BatchPrefillWithPagedKVCacheWrapper=type("Prefill", (), {"plan": lambda self, *args: "block"}),
    )
    worker = watching()
    assert (backend.fast_plan_decode(), backend.BatchPrefillWithPagedKVCacheWrapper().plan(1)) == ("decode", "block")
    worker.model_runner.speculator.propose(DECODES, [1])
    assert worker.drafts_seen()["plans"] == 2


def test_waits_are_reported_only_if_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Waiting(Speculator):
        def propose(self, batch, tokens, **options):
            if modes[-1:] == ["warn"]:
                warnings.warn("called a synchronizing operation", stacklevel=1)
            return super().propose(batch, tokens)

    worker = watching(Waiting())
    for count_waits in (True, False):
        worker.watch_drafts(count_waits)
        worker.model_runner.speculator.propose(DECODES, [1])
        worker.model_runner.speculator.propose(DECODES, [2])
        counted = {"called a synchronizing operation": 2} if count_waits else {}
        assert worker.drafts_seen()["waits"] == counted
    assert modes == ["warn", "default"] * 2


@pytest.mark.parametrize(("size", "billions"), [("llama3-8b", 8.03), ("qwen3-8b", 8.19)])
def test_model_sizes_match_their_names(size, billions):
    config = transformers.AutoConfig.from_pretrained(model_folder(size))
    shapes = (shape for shape, _ in weight_shapes(config, is_draft=False).values())
    assert round(sum(map(math.prod, shapes)) / 1e9, 2) == billions


def test_block_draft_config_matches_published_layers():
    config, other = (
        json.loads(Path(model_folder("qwen3-8b", kind=kind), "config.json").read_text()) for kind in BLOCKS
    )
    assert config["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33] and config["num_hidden_layers"] == 5
    assert "layer_types" not in config and other["layer_types"] == ["sliding_attention"] * 5
    assert (other["dflash_config"]["causal"], other["sliding_window"]) == (False, 2048)
    assert [config["architectures"], other["architectures"]] == [["DFlashDraftModel"], ["DFlash2DraftModel"]]


def test_speculative_config_names_draft_method():
    assert {engine_options(Arm(BASE, 7, kind=kind))["speculative_config"]["method"] for kind in BLOCKS} == {"dflash"}
    for kind in ("eagle", "eagle3"):
        assert engine_options(Arm(BASE, 7, kind=kind))["speculative_config"]["method"] == kind
    mtp = engine_options(Arm(LATENT.base, 3, "deepseek-small", kind="mtp"))
    assert mtp["speculative_config"]["method"] == "mtp" and mtp["attention_config"] == {"backend": "FLASH_ATTN_MLA"}
    assert "model" not in mtp["speculative_config"] and set(KINDS) == {
        *("eagle", "eagle3", *BLOCKS, "mtp", "qwen3.5-mtp")
    }


@pytest.mark.outside_inference_mode
def test_derived_weights_are_refilled_in_place(monkeypatch):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = None
            self.model = torch.nn.Linear(2, 2, bias=False)
            # As vLLM's block drafts do without weights, when they first run.
            with torch.inference_mode():
                self.model.fused = torch.zeros(4)

        def load_weights(self, weights):
            self.model.weight.data.copy_(dict(weights)["weight"])
            self.model.fused = self.model.weight.detach().flatten().clone()

    block, given, worker = Block(), torch.arange(4.0).view(2, 2), MeasuredWorker()
    fused = block.model.fused
    monkeypatch.setattr(vllm_worker, "random_weights", lambda *_, **__: iter([("weight", given)]))
    worker.model_runner = SimpleNamespace(model=block, speculator=None)
    worker.fill_weights(1)
    assert block.model.fused is fused and torch.equal(fused, given.flatten())


def test_chosen_arms_run_in_the_order_of_the_patterns():
    parser = argparse.ArgumentParser()
    assert chosen(parser, None, ["a1", "b1", "a2"]) == ["a1", "b1", "a2"]
    assert chosen(parser, ["b*", "a2", "*"], ["a1", "b1", "a2"]) == ["b1", "a2", "a1"]
