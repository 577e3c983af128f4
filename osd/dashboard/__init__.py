"""The control port: one live page, its JSON twins, Prometheus text, and administration behind a token."""

from osd.dashboard.app import build_app
from osd.dashboard.stream import ControlServer

__all__ = ["ControlServer", "build_app"]
