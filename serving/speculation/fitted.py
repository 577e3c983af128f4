"""What of its settings the control leaves out in an engine that cannot do it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from serving.speculation.control import Settings
from serving.vllm.schedules import why_left_out, why_no_none

logger = logging.getLogger(__name__)


def fitted(settings: Settings, config: Any, *, is_v2: bool) -> tuple[Settings, dict[str, str]]:
    """The settings for an engine with this configuration of vLLM's, and what is left out of them
    -> why."""
    left_out: dict[str, str] = {}
    if (reason := why_left_out(config, is_v2=is_v2)) and "memory" in settings.proposers:
        logger.warning("the memory is left out of speculation.proposers: %s", reason)
        others = tuple(p for p in settings.proposers if p != "memory")
        settings = replace(settings, proposers=others)
        left_out["memory"] = reason
    if (reason := why_no_none(config)) and settings.net_interval_seconds:
        settings = replace(settings, net_interval_seconds=0.0)
        left_out["net"] = reason
    return settings, left_out
