"""Stands in the worker where a draft cannot be swapped."""

from __future__ import annotations

from osd.records import DraftRelease, RankReport, StagingReport


class Unswappable:
    """The draft of the engine's start serves on; every release is refused with the reason."""

    is_whole = True

    def __init__(self, version: int, reason: str) -> None:
        self.version = version
        self._reason = f"swap is off: {reason}"
        self.staging = StagingReport()

    def first_report(self) -> RankReport:
        return self._refusal()

    def stage(self, release: DraftRelease) -> None:
        self.staging = StagingReport(version=release.version, done=True, error=self._reason)

    def drop(self) -> None:
        """Nothing is staged here."""

    def put(self, _version: int, _is_read: bool = True) -> RankReport:
        return self._refusal()

    def put_back(self, _is_read: bool = True) -> RankReport:
        return RankReport(version=self.version)

    def confirm(self) -> RankReport:
        return RankReport(version=self.version)

    def disown(self) -> RankReport:
        return RankReport(version=self.version)

    def _refusal(self) -> RankReport:
        return RankReport(version=self.version, error=self._reason)
