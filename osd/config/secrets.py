"""Settings as they may be shown: in a terminal, a log, a report."""

from __future__ import annotations

import re
from typing import Any

SECRET = re.compile(r"(^|[_-])(key|token|secret|password|passphrase)$", re.IGNORECASE)
"""Ends of names whose values are for nobody else."""


def without_secrets(value: Any) -> Any:
    """The same, but for values in a mapping whose names say that they are secret.

    Example:
        without_secrets({"api_key": "sk-1", "dtype": "auto"}) == {"api_key": "***", "dtype": "auto"}
    """
    if not isinstance(value, dict):
        return value
    return {k: "***" if SECRET.search(str(k)) else without_secrets(v) for k, v in value.items()}
