import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from attn_backends import registry
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, ReferenceBuilder
from spec_decode.cli.main import main
from spec_decode.conformance.report import Report, Result
from spec_decode.environment import environment
from spec_decode.models import EagleDraft, LatentConfig, LlamaTarget, ModelConfig, load_target, save_draft, save_pair
from spec_decode.models.load import load_draft
from spec_decode.testing.outcome import Outcome
from tests.factories import register_as
from tests.spec_decode.models.generated import make_dflash

CPU = torch.device("cpu")


class RebuildBuilder(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "for the test")


class RebuildBackend(TorchReference):
    name = "rebuilt"
    builder = RebuildBuilder


def write_pair(folder, vocab_size=256, latent=False):
    config = ModelConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=64, num_layers=1,
        num_q_heads=2, num_kv_heads=1, head_dim=64, max_positions=256,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaTarget(config)
    save_pair(folder, target, EagleDraft(config, target), {})
    if latent:
        layer = LatentConfig(rope_dim=16, q_rank=16, out_rank=16)
        config = replace(config, sliding_window=24, latent=layer)
        save_draft(folder, "latent_draft", EagleDraft(config, target), {})
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def latent_pair(tmp_path_factory):
    """A pair with an additional draft that only latent backends support."""
    return write_pair(tmp_path_factory.mktemp("latent_pair"), latent=True)


@pytest.fixture(scope="module")
def block_pair(tmp_path_factory):
    """A pair with an additional draft that proposes its tokens at once."""
    pair, published = write_pair(tmp_path_factory.mktemp("block_pair")), tmp_path_factory.mktemp("published")
    checkpoint = make_dflash(num_states=1, target_hidden=64, vocab_size=256, hidden_size=64)
    draft = load_draft(checkpoint.write(published), load_target(Path(pair)), dtype=torch.float32)
    save_draft(Path(pair), "block_draft", draft, {})
    return pair


@pytest.fixture
def make_pair():
    return write_pair


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plug_in():
    added = []

    def add(name, factory):
        register_as(name, factory)
        added.append(name)

    yield add
    for name in added:
        registry.unregister(name)


@pytest.fixture
def checks(monkeypatch):
    return stand_in_kit(monkeypatch)


def stand_in_kit(monkeypatch):
    """A stand-in for the conformance kit: `outcomes` are its results, `calls` its calls, `isolated` those that were to
    run in a subprocess."""
    fake = SimpleNamespace(outcomes=["pass"], calls=[], isolated=[])

    def check_backend(name, **options):
        fake.calls.append((name, options, os.environ.get("TRITON_INTERPRET")))
        registry.load(name)
        if "interrupt" in fake.outcomes:
            raise KeyboardInterrupt
        results = tuple(
            Result(check="graph.replay", case=f"decode{n or ''}", outcome=Outcome(outcome), reason="[stale] seq_lens")
            for n, outcome in enumerate(fake.outcomes)
        )
        for result in results:
            options["on_result"](result)
        command = options.get("command", "")
        return Report(backend=name, version="1", env=environment(CPU), command=command, results=results)

    def check_isolated(name, *, request, env, **options):
        fake.isolated.append(name)
        return check_backend(name, **request, **options)

    runner = SimpleNamespace(
        check_list=lambda name, **selection: (name, selection),
        run=lambda planned, **callbacks: check_backend(planned[0], **planned[1], **callbacks),
    )
    monkeypatch.setitem(sys.modules, "spec_decode.conformance.runner", runner)
    isolation = SimpleNamespace(check_isolated=check_isolated)
    monkeypatch.setitem(sys.modules, "spec_decode.conformance.subprocess_runner", isolation)
    return fake


@pytest.fixture
def rebuilt(plug_in):
    """A backend whose metadata must be rebuilt between steps."""
    plug_in("rebuilt", RebuildBackend)


def invoke(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def run():
    return invoke


@pytest.fixture
def refused(run):
    """Run a command with a user error, and return the one line it prints."""

    def refused(*words):
        result = run(*words)
        assert result.exit_code == 2, result.output
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        return lines[0]

    return refused


@pytest.fixture
def refused_after(run):
    """The same for errors found while it runs: the last line, after progress output."""

    def refused_after(*words):
        result = run(*words)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
        return result.stderr.splitlines()[-1]

    return refused_after


@pytest.fixture
def reports(checks, tmp_path, run):
    run("check", "torch_reference", "--device", "cpu", "--json", tmp_path / "reports" / "cpu")
    return tmp_path / "reports" / "cpu" / "check-torch_reference.json"
