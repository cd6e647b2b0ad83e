"""Measure vLLM with its own draft backends and with ours, on the GPUs of one machine: python scripts/vllm_figures.py
--json reports/h100/vllm.json; or with --engines, whole engines: vLLM beside this library's LLM; or with --contexts,
over long contexts; or with --trained, a trained model.

The models are a Llama of the 8B shape with an EAGLE draft, a Qwen3 of its 8B shape with DFlash and DFlash2, which draft
a block at once, layers of Qwen3.5 with recurrent states and its MTP layer, and layers of DeepSeek-V3 with its MTP
layer, whose cache holds latents. Weights are random, and the target runs on the backend vLLM chooses, FLASH_ATTN or
FLASH_ATTN_MLA. Timed arms keep a fixed number of drafts per round, whatever was drafted, so that all do the same work.
Watched arms alternate between runs with and without the plug-in's metadata validation. Exact arms, on a small model,
keep what the target accepts: all draft from the same texts, and their draft tokens are compared with those drafted on
the target's backend. How far two of vLLM's own backends differ there is the effect of rounding. With two GPUs, some
arms run over both, with tensor parallelism. Timed Llamas and Qwen3s on one GPU are compiled, as vLLM does by default,
with piecewise graphs where full ones are impossible; other arms have full graphs or none, which starts an engine
sooner. Every arm is a process that runs each batch once before timing it, with exclusive use of its GPUs and their
share of the cores; exact arms share both. With --together, several engines start at once on a GPU, whose memory must
have room for all; each is timed alone, while the others wait. Each arm's result is kept in a folder, with its log: it
is reused while the code the report covers, the measuring code, the GPU and the versions are unchanged. With --minutes,
arms that are not finished in time are skipped, the last first, and what is kept is reported; you can move the folder to
another machine in between.

Fails if one of our drafts is not fused, plans a batch of decodes on the host, waits for the device, changes the
engine's graph mode, or drafts different tokens more often than vLLM's own backends do among themselves, or if a watched
arm compares nothing or finds a difference. A batch with prefills has no graph, and vLLM plans it. Comparisons also plan
and wait.

With --engines, both engines run the Llama without a draft and with EAGLE, in 16 and in 8 bits, on the same prompts, and
vLLM also with our linear layers: see engine_arm.py. Fails if LLM runs the target elsewhere than on this library's
layers.

With --contexts, vLLM decodes after 1k to 96k tokens that its cache holds already, on its own backends and on ours, also
on FlashAttention-2, its default on compute capability 8 and 12: see context_arm.py. On a Hopper card that kernel
stands in for those cards: it is the same code, on another chip. Its PTX is compiled by the driver, which takes 3
to 6 minutes once; keep CUDA_CACHE_PATH.

With --trained, SmolLM2, which `make smollm2` fetches, answers questions with its own draft, greedily and at temperature
1, on each backend, with the draft read by vLLM's layers and by ours, in 16 and in 8 bits, and over 8-bit KV caches: see
trained_arm.py. These arms share GPUs, as exact ones do. Each is compared with vLLM's own in as many bits, on
FLASH_ATTN, and with an 8-bit cache on TRITON_ATTN. Greedy texts part at near ties, and what a draft keeps depends on
the text, so acceptance is compared over the tokens with which both begin. Fails if these take 5 % more rounds, or are
too few for that to be more than three standard errors, or if texts part where no near tie was. At temperature 1, fails
if the drafts kept a round differ by more than three standard errors over 512 pairs of texts; the report says which loss
that finds. vLLM's own draft and caches in 8 bits are compared, not judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch

from attn_backends.engines.vllm import NAMES
from scripts.context_arm import ContextArm, context_arms, context_problems
from scripts.engine_arm import EngineArm, engine_arms, engine_problems
from scripts.free_places import share
from scripts.on_gpus import run_on_gpus
from scripts.only import chosen
from scripts.script_report import write_report
from scripts.trained_arm import TrainedArm, trained_agreement, trained_arms, trained_problems
from scripts.vllm_arm import ROOT, Arm, failures
from spec_decode.environment import environment
from spec_decode.files import write_whole
from spec_decode.source_digests import SourceRecord

ROOTS = (
    *("attn_backends.engines.vllm", "scripts.vllm_arm", "scripts.vllm_worker"),
    *(path.rpartition(".")[0] for path in NAMES.values()),
)
AnyArm: TypeAlias = Arm | EngineArm | ContextArm | TrainedArm
BASE, REBUILT, CONTROL = "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"
OURS = ("FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_TRITON_PAGED", "ATTN_BACKENDS_FLASH_ATTN3")


@dataclass(frozen=True)
class Names:
    """Draft backends over one kind of cache.

    base       the target's backend, the baseline of the comparison
    others     vLLM's other backends; their distance from the base is the effect of rounding
    ours       this library's; over latents, each on the kernels of vLLM's in the same place
    """

    base: str
    others: tuple[str, ...]
    ours: tuple[str, ...]

    @property
    def theirs(self) -> tuple[str, ...]:
        """vLLM's."""
        return (self.base, *self.others)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.theirs, *self.ours)

    @property
    def timed(self) -> tuple[str, ...]:
        """All but CONTROL, which is only compared."""
        return tuple(name for name in self.all if name != CONTROL)


GROUPED = Names(BASE, (REBUILT, CONTROL), OURS)
LATENT = Names(
    "FLASH_ATTN_MLA",
    # Only the last of vLLM's updates in place.
    ("FLASHMLA", "TRITON_MLA"),
    ("ATTN_BACKENDS_FLASH_ATTN3_MLA", "ATTN_BACKENDS_FLASHMLA", "ATTN_BACKENDS_TRITON_MLA"),
)
ROUNDS = {"eagle": (7, 3.2), "dflash": (15, 5.0), "dflash2": (7, 4.4), "mtp": (3, 1.8), "qwen3.5-mtp": (3, 1.8)}
"""Draft tokens per round by kind of draft, of blocks as published, and the mean number of them that is kept."""
EXACT_REQUESTS = (1, 4, 32)
MACHINE = ("device", "driver", "cuda", "torch", "triton", "python")
"""Fields of the environment that results depend on."""
EXACT_ARMS = 3
"""Exact arms that share a GPU."""
TUNED = frozenset({"qwen3.5-small"})
"""Small models for which vLLM picks kernels by their time when it first starts. It keeps the choice on disk, and
kernels round differently: several engines that start first together would write different texts."""
MARGIN = 0.02
"""Share of draft tokens by which ours may differ from FLASH_ATTN beyond vLLM's own backends: the count is small."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of draft and the model it is timed on.

    small      the model on which drafts are compared
    compiled   whether timed engines on one GPU are
    across     whether one of ours and the target's backend also run over two GPUs, if there are two
    watched    whether one of ours also runs with comparisons
    """

    kind: str
    size: str
    small: str
    compiled: bool = True
    across: bool = False
    watched: bool = False

    def arms(self, num_gpus: int) -> Iterator[Arm]:
        """Yield the arms. Exact arms over two GPUs are compared with each other, not with one GPU's: sums over GPUs
        round differently, and texts of random weights soon diverge."""
        of_kind, (steps, kept) = names(self.kind), ROUNDS[self.kind]
        timed = Arm("", steps, self.size, kept, kind=self.kind)
        exact = replace(timed, size=self.small, kept=0.0, requests=EXACT_REQUESTS)
        if self.across and num_gpus > 1:
            for draft in (of_kind.ours[0], of_kind.base):
                yield replace(timed, draft=draft, num_gpus=2)
                yield replace(exact, draft=draft, num_gpus=2)
        yield Arm("", 0, self.size, compiled=self.compiled)
        for draft in of_kind.timed:
            yield replace(timed, draft=draft, compiled=self.compiled)
        for draft in of_kind.all:
            yield replace(exact, draft=draft)
        if self.watched:
            yield replace(timed, draft=of_kind.ours[0], compiled=self.compiled, watched=True)


_MTP = Model(kind="mtp", size="deepseek-v3", small="deepseek-small", compiled=False, across=True)
_DFLASH = Model(kind="dflash", size="qwen3-8b", small="qwen3-small", across=True, watched=True)
MODELS = (
    _MTP,
    replace(_MTP, size="deepseek-v3-shard", across=False, watched=True),
    _DFLASH,
    replace(_DFLASH, kind="dflash2", across=False, watched=False),
    Model(kind="qwen3.5-mtp", size="qwen3.5", small="qwen3.5-small", watched=True),
    Model(kind="eagle", size="llama3-8b", small="small", across=True, watched=True),
)


def arms(num_gpus: int) -> list[Arm]:
    """Return the arms: those over two GPUs first, then uncompiled ones, then compiled ones."""
    every = dict.fromkeys(arm for model in MODELS for arm in model.arms(num_gpus))
    return sorted(every, key=lambda arm: (-arm.num_gpus, arm.compiled, not arm.is_timed))


def names(kind: str) -> Names:
    """Return the draft backends of a kind of draft."""
    return LATENT if kind == "mtp" else GROUPED


class Kept:
    """Results of arms, as JSON in a folder, each with what it depends on; a change in that discards the result."""

    def __init__(self, folder: Path, of: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._of = folder, json.loads(json.dumps(of))

    def path(self, arm: AnyArm, ending: str) -> Path:
        """Return the path of one of the arm's files."""
        return self._folder / (arm.name.replace(" ", "_") + ending)

    def load(self, arm: AnyArm) -> dict[str, Any] | None:
        """Return None if the arm must be run."""
        path = self.path(arm, ".json")
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return kept["found"] if kept.get("of") == self._of else None

    def store(self, arm: AnyArm, found: Mapping[str, Any]) -> None:
        write_whole(self.path(arm, ".json"), json.dumps({"of": self._of, "found": found}).encode())


def run(
    arm: AnyArm, gpus: Sequence[int], kept: Kept, seconds: float | None = None, *, among: Sequence[int]
) -> dict[str, Any] | None:
    """Return the arm's result, or its exit status and the end of its log; None if it exceeds `seconds`."""
    if (before := kept.load(arm)) is not None:
        return before
    if seconds is not None and seconds <= 0:
        return None
    log = kept.path(arm, ".log")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "arm.json")
        command = [sys.executable, str(ROOT / "scripts" / arm.script), json.dumps(asdict(arm)), str(made)]
        with log.open("w") as output:
            try:
                status = run_on_gpus(command, gpus, output, seconds, among=among)
            except subprocess.TimeoutExpired:
                return None
        found: dict[str, Any] = {"arm": asdict(arm) | {"name": arm.name}, "exit_status": status}
        if made.exists():
            env = environment(torch.device("cuda"))
            found |= {"commit": env.commit, "date": env.date} | json.loads(made.read_text())
            kept.store(arm, found)
            return found
    return found | {"rows": [], "said": log.read_text(errors="replace").splitlines()[-30:]}


def run_all(
    selected: Sequence[AnyArm], gpus: Sequence[int], kept: Kept, *, seconds: float | None = None, together: int = 1
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the arms' results, and the names of those that were not finished within `seconds`.

    A timed arm has exclusive use of its GPUs while it is timed, and up to `together` start at once; exact ones share
    them, but the first of a model in TUNED runs before the others.
    """
    ends = None if seconds is None else time.monotonic() + seconds
    skipped: list[str] = []

    def run_on(some: Sequence[int], arm: AnyArm) -> dict[str, Any] | None:
        found = run(arm, some, kept, None if ends is None else ends - time.monotonic(), among=gpus)
        if found is None:
            skipped.append(arm.name)
        else:
            shown = ("tokens_per_s", "kept", "left_out")
            speeds = [f"{row['requests']}: {next(row[n] for n in shown if n in row)}" for row in found["rows"]]
            print(" ".join((arm.name, *speeds)), *found.get("said", ()), sep="\n", flush=True)
        return found

    found: list[dict[str, Any] | None] = []
    for (wanted, is_timed), group in groupby(selected, key=lambda arm: (arm.num_gpus, arm.is_timed)):
        places = [gpus[at : at + wanted] for at in range(0, len(gpus) - wanted + 1, wanted)]
        places *= together if is_timed else EXACT_ARMS
        arms = list(group)
        first = {arm.size: arm for arm in reversed(arms) if isinstance(arm, Arm) and arm.size in TUNED}.values()
        for some in filter(None, ([*first], [arm for arm in arms if arm not in first])):
            found += share(places, some, run_on)
    order = [arm.name for arm in selected]
    return sorted(filter(None, found), key=lambda each: order.index(each["arm"]["name"])), skipped


def same_drafts(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, int]:
    """Count, for one row of two arms, the draft tokens compared and those equal, while the texts are equal.

    A draft token is compared only if all earlier ones of its round are equal: after a difference, the drafts continue
    different texts. Comparison stops at the first round in which one side has fewer requests because one finished.
    """
    compared = equal = 0
    for base_round, other_round in zip(base["drafts"], other["drafts"], strict=False):
        if len(base_round) != len(other_round):
            break
        for left, right in zip(base_round, other_round, strict=True):
            for a, b in zip(left, right, strict=True):
                compared += 1
                equal += a == b
                if a != b:
                    break
    texts = sum(a == b for a, b in zip(base["texts"], other["texts"], strict=True))
    return {"draft_tokens": compared, "equal": equal, "texts": len(base["texts"]), "equal_texts": texts}


def agreement(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each exact arm, row by row, with the target's backend on the same kind of draft and number of GPUs."""
    exact = [each for each in found if not each["arm"]["kept"] and each["arm"]["draft"] and each["rows"]]
    bases = {
        (each["arm"]["kind"], each["arm"]["num_gpus"]): each
        for each in exact
        if each["arm"]["draft"] == names(each["arm"]["kind"]).base
    }
    return [
        {name: each["arm"][name] for name in ("name", "kind", "draft", "num_gpus")}
        | {"requests": row["requests"]}
        | same_drafts(base_row, row)
        for each in exact
        if (base := bases.get((each["arm"]["kind"], each["arm"]["num_gpus"]))) is not None and each is not base
        for row in each["rows"]
        for base_row in base["rows"]
        if base_row["requests"] == row["requests"]
    ]


def share_differing(compared: Sequence[Mapping[str, Any]], draft: str, kind: str) -> float:
    """Return the share of a draft backend's tokens, for one kind of draft, that differ from the target backend's."""
    rows = [row for row in compared if (row["draft"], row["kind"]) == (draft, kind)]
    tokens = sum(row["draft_tokens"] for row in rows)
    return 1 - sum(row["equal"] for row in rows) / tokens if tokens else 1.0


def problems(found: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every claim that does not hold."""
    messages = failures(found)
    plain = {_engine(each): each["graph_mode"] for each in found if not each["arm"]["draft"] and each["rows"]}
    for each in found:
        if each["arm"]["draft"] not in (*GROUPED.ours, *LATENT.ours) or not each["rows"]:
            continue
        name, without = each["arm"]["name"], plain.get(_engine(each))
        if not all(each["fused"]):
            messages.append(f"{name}: not fused on every rank")
        if without not in (None, each["graph_mode"]):
            messages.append(f"{name}: graphs {each['graph_mode']}, {without} without a draft")
        if each["arm"]["watched"]:
            nothing = [row["requests"] for row in each["rows"] if not row["compared"]]
            messages += [f"{name}: compared nothing with {requests} requests" for requests in nothing]
            messages += [f"{name}: {row['difference']}" for row in each["rows"] if row["difference"]]
        else:
            messages += [f"{name}: {row['plans']} plans on the host" for row in each["rows"] if row["plans"]]
            waits = [next(iter(row["waits"])) for row in each["rows"] if row["waits"]]
            messages += [f"{name}: waits for the device: {wait}" for wait in waits]
    for kind, draft in sorted({(row["kind"], row["draft"]) for row in compared}):
        of_kind = names(kind)
        if draft not in of_kind.ours:
            continue
        own = max(share_differing(compared, other, kind) for other in of_kind.others)
        share = share_differing(compared, draft, kind)
        if share > own + MARGIN:
            messages.append(
                f"{draft}, {kind}: {share:.1%} of draft tokens differ from {of_kind.base}'s, vLLM's own: {own:.1%}"
            )
    return messages


def _engine(found: Mapping[str, Any]) -> tuple[bool, str]:
    """Return what the graphs of an engine without a draft depend on. Exact arms have no such engine of their size."""
    return found["arm"]["compiled"], found["arm"]["size"]


class Study(NamedTuple):
    """What is measured, and what its report says.

    roots    modules that it covers, besides ROOTS
    compare  returns what the report says of the arms together
    judge    returns every claim that does not hold for the arms' results and for that
    """

    schema: str
    arms: Sequence[AnyArm]
    judge: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[str]]
    roots: tuple[str, ...] = ()
    compare: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]] = lambda found: []


def study_of(flags: argparse.Namespace, num_gpus: int) -> Study:
    """Return the study that the command line asks for."""
    if flags.engines:
        roots = ("spec_decode.llm", "scripts.engine_arm")
        return Study("attn-engines/1", engine_arms(), lambda found, _: engine_problems(found), roots)
    if flags.contexts:
        return Study(
            "attn-contexts/1", context_arms(), lambda found, _: context_problems(found), ("scripts.context_arm",)
        )
    if flags.trained:
        return Study("attn-trained/1", trained_arms(), trained_problems, ("scripts.trained_arm",), trained_agreement)
    return Study("attn-vllm/1", arms(num_gpus), problems, compare=agreement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file to write")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--engines", action="store_true", help="measure vLLM beside this library's LLM")
    kinds.add_argument("--contexts", action="store_true", help="measure vLLM over long contexts")
    kinds.add_argument("--trained", action="store_true", help="serve SmolLM2 in vLLM on each backend")
    parser.add_argument(
        "--only",
        action="append",
        help="pattern of whole arm names, such as *EAGLE*; repeat it to run them in this order",
    )
    parser.add_argument("--kept", type=Path, default=ROOT / "build/vllm", help="cache folder")
    parser.add_argument("--together", type=int, default=1, help="engines that start at once on a GPU; 1 by default")
    parser.add_argument("--minutes", type=float, help="time limit; none by default")
    flags = parser.parse_args()
    if flags.minutes is not None and not flags.minutes > 0:
        parser.error(f"--minutes must be above 0, got {flags.minutes:g}.")
    if flags.together < 1:
        parser.error(f"--together must be at least 1, got {flags.together}.")
    gpus = list(range(torch.cuda.device_count()))
    study = study_of(flags, len(gpus))
    every, roots = study.arms, (*ROOTS, *study.roots)
    named = {arm.name: arm for arm in every}
    selected = [named[name] for name in chosen(parser, flags.only, [*named])]
    if not gpus:
        parser.error("vLLM's figures need a CUDA device, but none was found. Run this on a machine with one.")
    device = torch.device("cuda")
    env = msgspec.to_builtins(environment(device))
    of = {name: env[name] for name in MACHINE} | {"sources": SourceRecord.of({"": roots}).modules}
    seconds = flags.minutes and flags.minutes * 60
    found, skipped = run_all(selected, gpus, Kept(flags.kept, of), seconds=seconds, together=flags.together)
    compared = study.compare(found)
    messages = study.judge(found, compared)
    for each in found:
        for row in each["rows"]:
            # Exact and trained arms have thousands of tokens each; the agreement summarises them.
            for tokens in ("texts", "drafts", "margins", "round_tokens"):
                row.pop(tokens, None)
    agreed = {"agreement": compared} if compared else {}
    content = {"arms": found, **agreed, "problems": messages, "finished": not skipped}
    write_report(flags.json, study.schema, device, roots, **content)
    print(*messages, *(f"skipped for lack of time: {name}" for name in skipped), sep="\n")
    raise SystemExit(bool(messages))


if __name__ == "__main__":
    main()
