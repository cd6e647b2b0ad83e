"""Train the byte-level pair that travels with the package, or with --draft one more draft of its target."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from spec_decode.environment import environment
from spec_decode.training import FURTHER_DRAFTS, Recipe, train_draft, train_pair

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Parse the flags, train, save, and print what came out."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "spec_decode" / "pairs" / "pydoc")
    parser.add_argument("--draft", choices=FURTHER_DRAFTS, help="train this draft of the target in --out")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    for name in ("seed", "target_steps", "draft_steps", "batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(recipe, name))
    flags = vars(parser.parse_args())
    out, device, draft = flags.pop("out"), flags.pop("device"), flags.pop("draft")
    if draft and flags["target_steps"] != recipe.target_steps:
        parser.error("--draft takes the target in --out as it is: leave --target-steps out")
    origin = {"command": shlex.join(["python", *sys.argv]), "commit": environment(device).commit}
    if draft:
        record = train_draft(out, draft, Recipe(**flags), device, origin)
    else:
        record = train_pair(out, Recipe(**flags), device, origin)
    print(*record["samples"], sep="\n-----\n")
    for name in ("losses", "accepted_of_4_per_round", "wall_seconds"):
        print(f"{name}: {record[name]}")


if __name__ == "__main__":
    main()
