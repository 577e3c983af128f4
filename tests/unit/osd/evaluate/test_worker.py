"""Parts of a step, by the scopes that vLLM enters."""

from __future__ import annotations

from osd.evaluate.worker import ORDER, StepParts


def test_each_step_has_its_own_seconds_of_each_part() -> None:
    now = [0.0]
    parts = StepParts(lambda: now[0])

    def enter(name: str, seconds: float) -> None:
        with parts.scope(f"gpu_model_runner: {name}"):
            now[0] += seconds

    enter("draft", 9.0)  # of a step that began before it was timed
    for factor in (1, 10):
        enter("preprocess", 1.0 * factor)
        enter("forward", 2.0 * factor)
        enter("sample", 3.0 * factor)
        enter("draft", 4.0 * factor)
        enter("bookkeep", 5.0 * factor)
        enter("something else", 100.0)
    assert ORDER == ("draft", "verify", "sample", "other")
    assert parts.take() == [[4.0, 2.0, 3.0, 6.0], [40.0, 20.0, 30.0, 60.0]]
    assert parts.take() == []
