"""Imports that happen only on use: each part of the one child may load more than the part before it."""

import subprocess
import sys

PARTS = {
    "the help of a verb, but for bench's, which no wheel has, loads no torch": """
from click.testing import CliRunner
from spec_decode.cli.main import main
verbs = main.commands.keys() - {"bench"}
assert not any(CliRunner().invoke(main, [verb, "--help"]).exit_code for verb in verbs)
assert "torch" not in sys.modules
""",
    "finding a device loads no triton": """
from spec_decode.cli.options import resolve_device
resolve_device("cpu")
assert not {"triton", "builders"} & sys.modules.keys()
""",
    "loading a draft loads no transformers, and no compiler of torch, which takes a second or more": """
from spec_decode.models import SHIPPED_PAIR, load_draft, load_pair
load_pair(SHIPPED_PAIR)
assert not {"transformers", "torch._dynamo"} & sys.modules.keys()
""",
    "a capture in the emulator loads no compiler of torch": """
import torch
from spec_decode.graphs import runtime_for
cell = torch.zeros(1)
runtime_for(cell.device).capture(lambda: cell.add_(1)).replay()
assert cell.item() == 1 and "torch._dynamo" not in sys.modules
""",
}


def test_nothing_is_imported_before_it_is_used() -> None:
    script = "import sys\n" + "".join(f"{part}print({name!r})\n" for name, part in PARTS.items())
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines() == list(PARTS), ended.stderr
