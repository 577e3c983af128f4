"""The control port: one live page, its JSON twins, Prometheus text, and administration behind a
token."""

from osd.observe.dashboard.app import build_app
from osd.observe.dashboard.stream import ControlServer

__all__ = ["ControlServer", "build_app"]
