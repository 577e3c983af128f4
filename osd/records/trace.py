"""One finished request, as the replay buffer holds it.

Legend: P prompt tokens, T output tokens, N captured rows, K top-k.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

REJECTED, ACCEPTED, PLAIN = 0, 1, 2
"""`Trace.kind`: the draft token was rejected, was accepted, or nothing was proposed here (k = 0,
bonus token)."""

NO_VERSION, BY_MEMORY, BY_STUDENT = 0, -1, -2
"""`Trace.draft_version` where a draft proposed that counts for no version, since a swap is not
decided; where the memory did; and where nothing was served at all: the trainer sampled the text
from the draft. Such traces live for a round, and are never stored."""

HOLDOUT_ONE_IN = 8
"""One trace in so many is held out: the gate judges drafts on it, training never sees it."""

MAX_DOMAIN_LENGTH = 48
"""Characters of a traffic class's name."""

_SAMPLE_NUMBER = re.compile(r"^\d+_")
"""vLLM names sample i of request R `i_R`."""


def clean_domain(label: str) -> str:
    """The name of a traffic class, wherever it appears: at most 48 of A-Z a-z 0-9 . _ -, anything
    else becomes "_".

    Example:
        clean_domain("code/python 3") == "code_python_3"
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", label.strip()[:MAX_DOMAIN_LENGTH])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """One finished request: its tokens, and the target's distribution at the captured positions.

    Positions are absolute indices into `tokens` = prompt_ids + output_ids: row i with `position` t
    is the target's distribution for token t given tokens[:t].

    Example:
        Trace(trace_id="cmpl-1", target_id="9f2c", finished_at=1.7e9, prompt_ids=[1, 7, 9],
              output_ids=[4, 4, 2], position=[4], kind=[REJECTED], draft_ids=[8],
              target_ids=[[4, 2]], target_logprobs=[[-0.1, -2.5]], tail_logprob=[-4.1],
              keep_prob=[1.0], draft_version=[1], num_drafts=1, num_draft_tokens=4,
              num_accepted_tokens=0)
        At position 4 the draft proposed token 8; the target gave 0.90 to token 4, 0.08 to 2, and
        0.02 to all others.
    """

    trace_id: str
    draft: str = "default"
    """Name of the draft that served this request."""
    target_id: str
    """Hash of the target's weights, tokenizer and adapter."""
    domain: str = ""
    """Traffic class given by the client; "" when unlabelled."""
    finished_at: float
    prompt_ids: np.ndarray
    """int32[P], the last `capture.max_context` tokens of the prompt."""
    output_ids: np.ndarray
    """int32[T]"""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Sampling parameters of the request; top_k 0 = off."""
    position: np.ndarray
    """int32[N], ascending, each in [1, P + T)."""
    kind: np.ndarray
    """int8[N]: REJECTED, ACCEPTED or PLAIN."""
    draft_ids: np.ndarray
    """int32[N], the proposed token, whoever proposed it; -1 where nothing was proposed."""
    target_ids: np.ndarray
    """int32[N, K], most likely first."""
    target_logprobs: np.ndarray
    """float16[N, K]: raw log-softmax, before temperature, not renormalised over the K."""
    tail_logprob: np.ndarray
    """float32[N]: log of the probability mass outside the K; -inf when there is none."""
    keep_prob: np.ndarray
    """float32[N] in (0, 1]: probability with which this row was kept; its loss weight is 1 /
    keep_prob."""
    draft_version: np.ndarray
    """int32[N]: version of the draft that proposed here; or `BY_MEMORY`, `BY_STUDENT` or
    `NO_VERSION`."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_shared: bool = False
    """Whether requests of others may be proposed this answer: its own request is known to have had
    no `cache_salt`. Stored beside the encoded trace, in the replay buffer alone."""

    def __post_init__(self) -> None:
        for name, (dtype, ndim) in TRACE_ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.size == 0 and ndim == 2:
                array = array.reshape(0, array.shape[-1] if array.ndim == 2 else 0)
            if array.ndim != ndim:
                raise ValueError(
                    f"trace {self.trace_id}: {name} has {array.ndim} dimensions, expected {ndim}"
                )
            object.__setattr__(self, name, array)
        num_rows = len(self.position)
        for name in _ROW_ARRAYS:
            if len(getattr(self, name)) != num_rows:
                raise ValueError(
                    f"trace {self.trace_id}: {name} has {len(getattr(self, name))} rows, position "
                    f"has {num_rows}"
                )
        if self.target_ids.shape != self.target_logprobs.shape:
            raise ValueError(
                f"trace {self.trace_id}: target_ids {self.target_ids.shape} and target_logprobs "
                f"{self.target_logprobs.shape} differ"
            )
        if num_rows:
            self._check_values()

    def _check_values(self) -> None:
        num_tokens = len(self.prompt_ids) + len(self.output_ids)
        if self.position.min() < 1 or self.position.max() >= num_tokens:
            raise ValueError(
                f"trace {self.trace_id}: position "
                f"{int(self.position.min())}..{int(self.position.max())} outside "
                f"[1, {num_tokens})"
            )
        if not (self.keep_prob > 0).all() or (self.keep_prob > 1).any():
            raise ValueError(f"trace {self.trace_id}: keep_prob outside (0, 1]")
        if np.isnan(self.target_logprobs).any() or np.isnan(self.tail_logprob).any():
            raise ValueError(f"trace {self.trace_id}: target_logprobs or tail_logprob holds NaN")
        if (self.target_logprobs > 1e-2).any():
            raise ValueError(f"trace {self.trace_id}: target_logprobs above 0")

    @property
    def num_rows(self) -> int:
        return len(self.position)

    @classmethod
    def of_text(cls, prompt_ids: Any, output_ids: Any, **fields: Any) -> Trace:
        """A prompt and its answer as token ids, without rows."""
        values: dict[str, Any] = {"trace_id": "", "target_id": "", "finished_at": 0.0}
        values |= {name: np.zeros(0) for name in _ROW_ARRAYS}
        return cls(**values | fields | {"prompt_ids": prompt_ids, "output_ids": output_ids})

    def with_rows(self, keep_N: np.ndarray) -> Trace:
        """The same request with some of its rows. keep_N: bool."""
        return (
            self
            if keep_N.all()
            else replace(self, **{name: getattr(self, name)[keep_N] for name in _ROW_ARRAYS})
        )

    @property
    def is_holdout(self) -> bool:
        """Whether the gate may judge on this trace and the trainer must not see it (a stable hash
        of its id)."""
        request_id = _SAMPLE_NUMBER.sub(
            "", self.trace_id
        )  # all samples of a request are on the same side
        return zlib.crc32(request_id.encode()) % HOLDOUT_ONE_IN == 0

    @property
    def is_one_of_several(self) -> bool:
        """Whether its request has other answers, too (`n`)."""
        return _SAMPLE_NUMBER.match(self.trace_id) is not None

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(getattr(self, name).nbytes for name in TRACE_ARRAYS)


TRACE_ARRAYS: dict[str, tuple[Any, int]] = {
    "prompt_ids": (np.int32, 1),
    "output_ids": (np.int32, 1),
    "position": (np.int32, 1),
    "kind": (np.int8, 1),
    "draft_ids": (np.int32, 1),
    "target_ids": (np.int32, 2),
    "target_logprobs": (np.float16, 2),
    "tail_logprob": (np.float32, 1),
    "keep_prob": (np.float32, 1),
    "draft_version": (np.int32, 1),
}
"""Array fields of `Trace`: dtype and number of dimensions. The codec writes exactly these."""

_ROW_ARRAYS = tuple(name for name in TRACE_ARRAYS if name not in ("prompt_ids", "output_ids"))
