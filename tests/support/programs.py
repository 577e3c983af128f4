"""Programs that tests need and a machine may lack.

Without them a test is skipped, except in CI (CI=true), which installs them: there it fails.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def path_of(program: str, package: str) -> str:
    """The program's path. Skips or fails when it is absent, and names the package that has it."""
    return shutil.which(program) or absent(f"no {program} on PATH: apt-get install {package}")


def absent(what: str) -> NoReturn:
    """What a test cannot do without is not here."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} (in CI nothing is skipped for that)", pytrace=False)
    pytest.skip(what)
