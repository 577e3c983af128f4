"""What each proposer would have had at each output position of a recorded request.

The first token comes from prefill. Position t is where t tokens are out and a step begins: 1 to
T - 1 of an answer of T tokens. Arrays hold position t at index t - 1.

Legend: T output tokens, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerRuns:
    """One proposer over one answer.

    Example:
        ProposerRuns(right=np.array([2, 1, 0]), offered=np.array([4, 4, 4]))
        A draft of 4 tokens is right in its first 2 where one token is out.
    """

    right: np.ndarray
    """int [T - 1]: draft tokens accepted if drafting begins there"""
    offered: np.ndarray
    """int [T - 1]: draft tokens that there are at most; 0 where it has nothing to propose"""
    tokens: np.ndarray | None = None
    """int [T - 1, K]: what it proposes, -1 beyond `offered`; None where nobody asked"""
    odds: np.ndarray | None = None
    """float [T - 1, K]: chance of each that it is accepted where those before it are"""

    def __post_init__(self) -> None:
        if self.right.shape != self.offered.shape:
            raise ValueError(
                f"right {self.right.shape} and offered {self.offered.shape} are not of one length"
            )
        if (self.right < 0).any() or (self.right > self.offered).any():
            raise ValueError("right: more draft tokens are accepted than offered, or fewer than 0")

    @classmethod
    def of_model(cls, right: np.ndarray, most: int) -> ProposerRuns:
        """Of a draft model, which always has as many as it is asked for, up to `most`."""
        return cls(right=np.minimum(right, most), offered=np.full(len(right), most))


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRuns:
    """One answered request.

    Example:
        RequestRuns(num_prompt=16, num_output=4, proposers={"draft": ProposerRuns(...)})
    """

    num_prompt: int
    num_output: int
    """T, at least 1"""
    proposers: Mapping[str, ProposerRuns]

    def __post_init__(self) -> None:
        for name, runs in self.proposers.items():
            if len(runs.right) != max(self.num_output - 1, 0):
                raise ValueError(
                    f"proposers.{name}: {len(runs.right)} positions, but an answer of "
                    f"{self.num_output} tokens has {self.num_output - 1}"
                )
