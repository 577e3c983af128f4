"""Entry point of `vllm.general_plugins`, which vLLM loads in each of its processes.

Without `OSD_ATTACH` in the environment it does nothing, and loads nothing.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "OSD_ATTACH"
"""URL of the deployment's Redis."""


def register() -> None:
    """Let engines of this process be built so that they can be attached. May be called again."""
    if os.environ.get(VARIABLE):
        try:
            from osd.attach.arguments import install

            install()
        except Exception:  # vLLM would not start
            logging.getLogger(__name__).exception("not attached; vLLM serves as without")
