"""Ranks without an engine: what `collective_rpc` would answer of swappers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from osd.records import DraftRelease, RankReport, decode, encode
from serving.swap.ranks import Ranks
from serving.swap.swap import DraftSwapper


def ranks_of(*swappers: DraftSwapper[Any]) -> Ranks:
    """The replica's side of these swappers, started."""

    async def call(method: str, *arguments: Any) -> list[str]:
        return [answer(swapper, method, arguments) for swapper in swappers]

    ranks = Ranks(call)
    asyncio.run(ranks.start(""))
    return ranks


def answer(swapper: DraftSwapper[Any], method: str, arguments: Sequence[Any]) -> str:
    """As the worker extension's."""
    found: Any = RankReport()
    match method:
        case "osd_start":
            found = swapper.first_report()
        case "osd_stage":
            swapper.stage(decode(arguments[0], DraftRelease))
        case "osd_staging":
            found = swapper.staging
        case _:
            found = getattr(swapper, method.removeprefix("osd_"))(*arguments)
    return encode(found).decode()
