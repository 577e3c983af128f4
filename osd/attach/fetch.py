"""Reads a release's files from the control port, for engines that are no part of a Ray cluster."""

from __future__ import annotations

from urllib.parse import quote

import httpx

from osd.errors import AwayError, ReleaseError

SECONDS_TO_ANSWER = 30.0


def read_over_http(url: str, token: str, version: int, name: str, offset: int, size: int) -> bytes:
    """A part of a file. Raises `OSDError`."""
    where = f"{url}/osd/releases/{version}/{quote(name, safe='')}"
    try:
        answer = httpx.get(
            where,
            params={"offset": offset, "size": size},
            headers={"Authorization": f"Bearer {token}"},
            timeout=SECONDS_TO_ANSWER,
            trust_env=False,  # no proxy stands between machines of a deployment
        )
    except httpx.HTTPError as error:
        raise AwayError(
            f"{where}: no answer ({error}); engines on other machines need control.host"
        ) from None
    if answer.status_code != 200:
        raise ReleaseError(f"{where}: answered {answer.status_code}")
    return answer.content
