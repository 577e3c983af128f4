"""Names of the keys a buffer uses on a server.

    osd:DEPLOYMENT:{DRAFT:DOMAIN}:TARGET_ID:train     stream, dense ids SEQ-0, at most max_traces
    osd:DEPLOYMENT:{DRAFT:DOMAIN}:TARGET_ID:holdout   the same for held-out traces
    ...:train:unreadable, ...:holdout:unreadable      sorted sets, ids of unreadable entries
    osd:DEPLOYMENT:{DRAFT}:TARGET_ID:domains          set of domains other than ""
    osd:DEPLOYMENT:{DRAFT}:TARGET_ID:anchors          hash, slot -> trace: the trainer's anchors
    osd:DEPLOYMENT:buffers                            set of "DRAFT TARGET_ID" that hold traces
    osd:DEPLOYMENT:unreadable                         hash, reason -> unreadable entries ever met

The braces are Redis Cluster's hash tags: all keys of a script are in one slot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one deployment, draft and target. Raises `ValueError` for a name that cannot be
    part of a key."""

    deployment: str
    draft: str
    target_id: str

    def __post_init__(self) -> None:
        for name in ("deployment", "draft", "target_id"):
            value = getattr(self, name)
            if not _NAME.fullmatch(value):
                raise ValueError(
                    f"{name} {value!r}: only letters, digits and . _ -, at most 128 of them"
                )

    @property
    def domains(self) -> str:
        return f"osd:{self.deployment}:{{{self.draft}}}:{self.target_id}:domains"

    @property
    def anchors(self) -> str:
        return f"osd:{self.deployment}:{{{self.draft}}}:{self.target_id}:anchors"

    @property
    def buffers(self) -> str:
        return f"osd:{self.deployment}:buffers"

    @property
    def unreadable(self) -> str:
        return f"osd:{self.deployment}:unreadable"

    @property
    def member(self) -> str:
        """This buffer's member in the set `buffers`."""
        return f"{self.draft} {self.target_id}"

    def train(self, domain: str) -> str:
        return f"osd:{self.deployment}:{{{self.draft}:{domain}}}:{self.target_id}:train"

    def holdout(self, domain: str) -> str:
        return f"osd:{self.deployment}:{{{self.draft}:{domain}}}:{self.target_id}:holdout"

    @staticmethod
    def marks(stream: str) -> str:
        """The sorted set of a stream's unreadable entries."""
        return f"{stream}:unreadable"

    def others(self, members: Sequence[bytes]) -> list[Keys]:
        """The keys of every buffer named in the set `buffers`."""
        pairs = [member.decode().split(" ", 1) for member in members]
        return [Keys(self.deployment, draft, target_id) for draft, target_id in pairs]
