"""Names of models that are neither a directory nor a hub's."""

from __future__ import annotations

import pytest

from osd.errors import ConfigError
from osd.models.resolve import resolve


@pytest.mark.parametrize("name", ["~nobody-here/model", "./x" * 3000, f"/{'x' * 300}"])
def test_what_no_file_system_has_is_no_directory(name: str) -> None:
    """A home that there is not, as a shell leaves it, and names that are too long."""
    with pytest.raises(ConfigError, match="^serving.target=.*: no such directory; give a model"):
        resolve(name, "serving.target")
