"""What the measurements of vLLM compare and object to; vLLM itself runs on a GPU alone."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers

from scripts.vllm_arm import SIZES, Arm, engine_options, model_folder, prompts
from scripts.vllm_figures import BASE, CONTROL, OURS, REBUILT, Kept, agreement, arms, problems, run_all, same_drafts
from scripts.vllm_worker import MeasuredWorker, random_weights


def row(requests=1, drafts=(), texts=([1, 2],), **more):
    return {"requests": requests, "drafts": list(drafts), "texts": list(texts), "plans": 0, "waits": {}} | more


def arm(draft, *rows, kept=0.0, fused=(True,), graph_mode="FULL_DECODE_ONLY", compiled=False):
    named = {"draft": draft, "kept": kept, "name": f"{draft} {kept}", "compiled": compiled}
    return {"arm": named, "rows": list(rows), "fused": list(fused), "graph_mode": graph_mode, "exit_status": 0}


def engines():
    """Of every kind one, without an objection."""
    drafts = [[[5, 6, 7]]] * 50
    exact = [arm(name, row(drafts=drafts)) for name in (BASE, REBUILT, CONTROL, *OURS)]
    return [*exact, *(arm(name, row(), kept=1.8) for name in OURS), arm("", row())]


def objections(found):
    return problems(found, agreement(found))


def test_sound_engines_meet_no_objection():
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
def test_what_does_not_hold_of_a_draft_of_ours_is_said(change, says):
    found = engines()
    change(found[-2])
    assert [says in said for said in objections(found)] == [True]


def test_vllms_own_drafts_may_plan_wait_and_be_rebuilt():
    found = engines()
    found[1].update(fused=[False], graph_mode="NONE")
    found[1]["rows"][0].update(plans=9, waits={"waits": 2})
    assert objections(found) == []


def test_a_draft_that_leaves_flash_attn_more_often_than_vllms_own_is_said():
    found = engines()
    found[3]["rows"][0]["drafts"] = [[[5, 6, 8]]] * 50
    assert [said.split(":")[0] for said in objections(found)] == [OURS[0]]
    found[1]["rows"][0]["drafts"] = copy.deepcopy(found[3]["rows"][0]["drafts"])
    assert objections(found) == []


@pytest.mark.parametrize(("graph_mode", "objected"), [("FULL_AND_PIECEWISE", False), ("PIECEWISE", True)])
def test_graphs_of_compiled_drafts_are_judged_by_those_of_the_compiled_engine_without_one(graph_mode, objected):
    plain = arm("", row(), graph_mode="FULL_AND_PIECEWISE", compiled=True)
    draft = arm(OURS[0], row(), kept=1.8, graph_mode=graph_mode, compiled=True)
    assert bool(objections([*engines(), plain, draft])) is objected


def test_compiled_engines_run_as_vllm_does_by_default():
    modes = [engine_options(Arm("", 0, compiled=told))["compilation_config"] for told in (True, False)]
    assert "mode" not in modes[0] and "cudagraph_mode" not in modes[0]
    assert (modes[1]["mode"], modes[1]["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")


def test_draft_tokens_are_compared_up_to_the_first_that_differs():
    mine = row(drafts=[[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]], texts=[[1], [2]])
    theirs = row(drafts=[[[1, 9, 3], [4, 5, 6]], [[0, 8, 9]]], texts=[[1], [3]])
    assert same_drafts(mine, theirs) == {"draft_tokens": 6, "equal": 4, "texts": 2, "equal_texts": 1}


def test_timed_engines_are_not_compared():
    assert agreement([arm(BASE, row(), kept=1.8), arm(OURS[0], row(), kept=1.8)]) == []


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_draft_is_timed_and_compared_on_one_gpu(num_gpus):
    single = [each for each in arms(num_gpus) if each.num_gpus == 1 and not each.compiled]
    for steps in (3, 7):
        timed = {each.draft for each in single if each.kept and each.steps == steps}
        assert timed == {BASE, REBUILT, *OURS}
    assert {each.draft for each in single if not each.kept} == {"", BASE, REBUILT, CONTROL, *OURS}


def test_compiled_arms_time_flashinfer_both_ways_beside_flash_attn_and_no_draft():
    compiled = {(each.draft, each.steps) for each in arms(1) if each.compiled and each.is_timed}
    assert compiled == {("", 0), *((draft, steps) for draft in (BASE, REBUILT, OURS[0]) for steps in (3, 7))}


def test_two_gpus_run_tensor_parallelism_too():
    assert {(each.draft, bool(each.kept)) for each in arms(2) if each.num_gpus == 2} == {
        (BASE, True),
        (OURS[0], True),
        (OURS[0], False),
    }


def test_arms_are_told_apart_by_their_names():
    names = [each.name for each in arms(2)]
    assert len(names) == len(set(names))


def test_what_an_arm_found_is_kept_until_its_source_or_machine_is_another(tmp_path):
    asked = Arm(BASE, 3)
    for of in ({"sources": {"builders": "1"}}, {"sources": {"builders": "2"}}):
        kept = Kept(tmp_path / "kept", of)
        assert kept.load(asked) is None
        kept.store(asked, {"rows": [1]})
        assert kept.load(asked) == {"rows": [1]} and kept.load(Arm(BASE, 7)) is None


def test_arms_that_are_kept_are_not_run_again_and_come_in_their_order(tmp_path):
    kept, asked = Kept(tmp_path, {}), arms(2)
    for each in asked:
        kept.store(each, {"arm": {"name": each.name}, "rows": []})
    names = [found["arm"]["name"] for found in run_all(asked, [0, 1], kept)]
    assert sorted(names) == sorted(each.name for each in asked)
    assert [name.endswith("TP=2") for name in names] == sorted((each.num_gpus == 2 for each in asked), reverse=True)


def test_exact_arms_are_not_timed():
    assert [Arm(*told).is_timed for told in ((BASE, 3), (BASE, 3, "small", 1.8), ("", 0))] == [False, True, True]


def test_the_weights_are_a_whole_llama():
    config = transformers.AutoConfig.from_pretrained(model_folder("small", is_draft=False))
    with torch.device("meta"):
        expected = transformers.LlamaForCausalLM(config).state_dict()
    found = dict(random_weights(config, is_draft=False, seed=0, device=torch.device("cpu")))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: x.shape for name, x in expected.items()}


def test_the_weights_are_the_same_every_time_and_others_by_another_seed():
    config = transformers.AutoConfig.from_pretrained(model_folder("small", is_draft=True))
    config.vocab_size, device = 64, torch.device("cpu")
    first, again, other = (dict(random_weights(config, is_draft=True, seed=seed, device=device)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert not torch.equal(first["layers.0.self_attn.k_proj.weight"], first["layers.0.self_attn.v_proj.weight"])


def test_prompts_are_the_same_in_every_arm_and_inside_the_vocabulary():
    asked = prompts(4, 100)
    assert asked == prompts(4, 100) and asked != prompts(5, 100)[:4]
    assert all(3 <= token < 100 for prompt in asked for token in prompt["prompt_token_ids"])


def test_only_timed_arms_keep_what_was_not_asked_for():
    told = engine_options(Arm(OURS[0], 3, kept=1.8))["speculative_config"]
    assert (told["rejection_sample_method"], told["synthetic_acceptance_length"]) == ("synthetic", 2.8)
    assert "rejection_sample_method" not in engine_options(Arm(OURS[0], 3))["speculative_config"]
    assert "speculative_config" not in engine_options(Arm("", 0))


class Speculator:
    supports_decode_metadata_update = True
    num_speculative_steps = 3

    def propose(self, batch, tokens, **options):
        return torch.tensor(tokens)


class Runner:
    def __init__(self):
        self.speculator = Speculator()


DECODES, MIXED = SimpleNamespace(num_scheduled_tokens=[4, 4]), SimpleNamespace(num_scheduled_tokens=[4, 9])


def test_a_worker_keeps_what_was_drafted_since_it_was_asked():
    worker = MeasuredWorker()
    worker.model_runner = Runner()
    worker.watch_drafts(False)
    worker.model_runner.speculator.propose(DECODES, [1])
    worker.watch_drafts(False)
    worker.model_runner.speculator.propose(DECODES, [2], dummy_run=True)
    worker.model_runner.speculator.propose(DECODES, [3])
    seen = worker.drafts_seen()
    assert (seen["drafts"], len(seen["host_s"]), seen["fused"]) == ([[3]], 1, True)


def test_plans_of_batches_with_prefills_are_counted_apart():
    worker = MeasuredWorker()
    worker.model_runner = Runner()
    worker.watch_drafts(False)
    for batch, plans in ((MIXED, 2), (DECODES, 0), (DECODES, 1)):
        worker._plans += [None] * plans
        worker.model_runner.speculator.propose(batch, [1])
    seen = worker.drafts_seen()
    assert (seen["plans"], seen["prefill_plans"]) == (1, 2)


def test_waits_are_told_only_where_they_are_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Waiting(Speculator):
        def propose(self, batch, tokens, **options):
            if modes[-1:] == ["warn"]:
                warnings.warn("called a synchronizing operation", stacklevel=1)
            return super().propose(batch, tokens)

    worker = MeasuredWorker()
    worker.model_runner = Runner()
    worker.model_runner.speculator = Waiting()
    for count_waits in (True, False):
        worker.watch_drafts(count_waits)
        worker.model_runner.speculator.propose(DECODES, [1])
        worker.model_runner.speculator.propose(DECODES, [2])
        counted = {"called a synchronizing operation": 2} if count_waits else {}
        assert worker.drafts_seen()["waits"] == counted
    assert modes == ["warn", "default"] * 2


def test_sizes_are_those_that_the_names_say():
    config = transformers.AutoConfig.from_pretrained(model_folder("llama3-8b", is_draft=False))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert round(sum(x.numel() for x in model.parameters()) / 1e9, 2) == 8.03 and len(SIZES) == 2
