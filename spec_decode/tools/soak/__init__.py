"""Soak: thousands of rounds while requests join and leave, each strategy in its turn; one in ten is compared."""

from spec_decode.tools.soak.memory import Memory
from spec_decode.tools.soak.result import SCHEMA, Failure, Options, SoakReport, SoakResult, StrategyRounds
from spec_decode.tools.soak.runner import command_line, soak, soak_backend

__all__ = [
    "SCHEMA",
    "Failure",
    "Memory",
    "Options",
    "SoakReport",
    "SoakResult",
    "StrategyRounds",
    "command_line",
    "soak",
    "soak_backend",
]
