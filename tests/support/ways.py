"""The ways in which vLLM runs a model, as the tests know them. Imports neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass

SETTLED = "TESTED_WAY"
"""Environment variable: the name of the way, in processes that a test starts."""


@dataclass(frozen=True, kw_only=True)
class Way:
    name: str
    runner: str = "V1"
    """V1 or V2: vLLM's model runner. V2 needs an environment of its own (`elsewhere.py`)."""
    is_async: bool = False
    """Whether a step is scheduled before the one ahead of it has ended."""
    dtype: str = "float32"
    is_compiled: bool = False
    """By torch.compile; without, eager."""
    num_ranks: int = 1
    """Processes that target and draft are split over by tensor parallelism."""

    @property
    def stage(self) -> str:
        """The marker of its tests: `scripts/test_slow` runs them in so many stages."""
        return "ranks" if self.num_ranks > 1 else self.runner.lower()


V1_SYNC = Way(name="v1-sync")
V1_ASYNC = Way(name="v1-async", is_async=True)
V2_SYNC = Way(name="v2-sync", runner="V2")
V2_ASYNC = Way(name="v2-async", runner="V2", is_async=True)
COMPILED = Way(name="compiled", is_compiled=True)
TENSOR_PARALLEL = Way(name="tensor-parallel", num_ranks=2)
ASYNC_RANKS = Way(name="async-tensor-parallel", is_async=True, num_ranks=2)
V2_RANKS = Way(name="ranks-v2-async", runner="V2", is_async=True, num_ranks=2)
BFLOAT16 = Way(name="bfloat16", dtype="bfloat16")
FLOAT16 = Way(name="float16", dtype="float16")

EXACT = (V1_SYNC, V1_ASYNC, V2_SYNC, V2_ASYNC, COMPILED, TENSOR_PARALLEL, ASYNC_RANKS, V2_RANKS)
"""Those whose tokens at temperature 0 are the target's, one by one."""
HALF = (BFLOAT16, FLOAT16)
"""Those whose tokens may differ where the target is all but undecided."""
WAYS = (*EXACT, *HALF)
