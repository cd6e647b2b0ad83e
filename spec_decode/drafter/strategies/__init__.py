"""The strategies that run the later steps of a round: one file each, listed here."""

from __future__ import annotations

from enum import Enum

from spec_decode.drafter.strategies.base import DraftStrategy
from spec_decode.drafter.strategies.device_loop import DeviceLoop
from spec_decode.drafter.strategies.eager import Eager
from spec_decode.drafter.strategies.full_loop import FullLoop
from spec_decode.drafter.strategies.per_step import PerStep
from spec_decode.drafter.strategies.piecewise import Piecewise

__all__ = ["DraftStrategy", "Strategy"]


class Strategy(str, Enum):
    """Strategies in the order they are tried: from least host work a round to most. A member's value is its name."""

    _value_: str
    implementation: type[DraftStrategy]

    DEVICE_LOOP = "device_loop", DeviceLoop
    FULL_LOOP = "full_loop", FullLoop
    PER_STEP = "per_step", PerStep
    PIECEWISE = "piecewise", Piecewise
    EAGER = "eager", Eager

    def __new__(cls, name: str, implementation: type[DraftStrategy] = Eager) -> Strategy:
        # The default is for type checkers, which take the lookup Strategy("eager") for a call of this.
        member = str.__new__(cls, name)
        member._value_, member.implementation = name, implementation
        return member
