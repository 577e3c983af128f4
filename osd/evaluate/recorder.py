"""The scheduler of a measured engine: vLLM's own under control, that also writes down what each
step verified and what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from osd.evaluate.plan import SUFFIX
from serving.speculation.scheduler import controlled_class


@dataclass(slots=True)
class Seen:
    """A step as its scheduler saw it."""

    batch: int = 0
    width: int = 0
    is_pure: bool = True
    proposed: int = 0
    own: float = 0.0
    """Seconds of the control of speculation."""
    scheduling: float = 0.0
    """Seconds in the scheduler, its own and the control's."""
    verified: dict[str, tuple[int, list[int], int]] = field(default_factory=dict)
    """request -> (output tokens before the step, draft tokens, how many were accepted)"""


class Recording:
    """Mixed into a controlled scheduler."""

    osd_clock: Callable[[], float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seen = Seen()
        super().__init__(*args, **kwargs)

    def take(self) -> Seen:
        """What was seen since this was last asked: one step, where the engine is stepped by
        hand."""
        seen, self._seen = self._seen, Seen()
        return seen

    # -- vLLM's methods ---------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().schedule, *args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, result: Any, *args: Any) -> Any:
        self._note(scheduler_output, result)
        update = super().update_from_output  # type: ignore[misc]
        return self._timed(update, scheduler_output, result, *args)

    def update_draft_token_ids(self, draft_token_ids: Any, *args: Any, **kwargs: Any) -> None:
        before = list(map(len, draft_token_ids.draft_token_ids))
        update = super().update_draft_token_ids  # type: ignore[misc]
        self._timed(update, draft_token_ids, *args, **kwargs)
        after = map(len, draft_token_ids.draft_token_ids)
        self._seen.proposed += sum(map(max, before, after))  # the memory's come later

    def _osd_lookup_table(self, k: int) -> list[int]:
        """Suffix decoding can only propose as many as it was started with; what is more than k is
        cut off before it is verified."""
        config = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        is_fixed = config is not None and config.method == SUFFIX
        table: list[int] = super()._osd_lookup_table(  # type: ignore[misc]
            self.num_spec_tokens if is_fixed else k  # type: ignore[attr-defined]
        )
        return table

    # -- inside -----------------------------------------------------------------------------------

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        started = self.osd_clock()
        try:
            return super()._osd_guard(act)  # type: ignore[misc]
        finally:
            self._seen.own += self.osd_clock() - started

    def _timed(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = self.osd_clock()
        try:
            return method(*args, **kwargs)
        finally:
            self._seen.scheduling += self.osd_clock() - started

    def _note(self, output: Any, result: Any) -> None:
        """Before vLLM trims what was sampled to the end of the answer."""
        seen, drafts = self._seen, output.scheduled_spec_decode_tokens
        invalid = output.num_invalid_spec_tokens or {}
        for req_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)  # type: ignore[attr-defined]
            sampled = result.sampled_token_ids
            emitted = sampled[result.req_id_to_index[req_id]] if sampled else ()
            drafted = list(drafts.get(req_id, ()))
            is_new = num_scheduled == 1 + len(drafted)  # else some of it is computed again
            drafted = drafted[: len(drafted) - invalid.get(req_id, 0)]
            seen.width += num_scheduled
            if request is None or not request.num_output_tokens or not is_new:
                seen.is_pure = False
            if request is None or not emitted:
                continue
            seen.batch += 1
            seen.verified[req_id] = request.num_output_tokens, drafted, len(emitted) - 1


def recording_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """What `scheduler_cls` names."""
    bases = (Recording, controlled_class(vllm_config))
    return type("RecordingScheduler", bases, {})(vllm_config, *args, **kwargs)
