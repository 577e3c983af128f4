"""What every section of the configuration has in common."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Strict and immutable: an unknown key is an error, and so is a number without end."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, which pydantic would read as 1."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and wanted in (int, float, int | None, float | None):
            raise ValueError("a number is wanted")
        return value


def check_home(value: str) -> str:
    """A directory as it was given. Raises `ValueError` where it begins with a home that there is
    not."""
    if os.path.expanduser(value).startswith("~"):
        raise ValueError(f"there is no home directory {value.split('/')[0]}")
    return value
