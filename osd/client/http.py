"""The commands' client of the control port."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from osd.errors import ConfigError, OSDError
from osd.exchange.redis_url import is_loopback
from osd.service import note

R = TypeVar("R")
SECONDS_TO_ANSWER = 10
SECONDS_TO_READ_LOG = 40
SECONDS_TO_CHANGE = 120
"""What is under way has to end first: a large draft that is published, the server's file that is
rewritten."""
SECONDS_BETWEEN_CHUNKS = 60


class Client:
    """The service at `--url` / `OSD_URL` (with `OSD_TOKEN`), else the one running under this
    user."""

    def __init__(
        self, url: str | None = None, deployment: str | None = None, token: str | None = None
    ) -> None:
        url = url or os.environ.get("OSD_URL")
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url={url}: must begin with http://, like http://127.0.0.1:8001")
        self._asks_proxies = False  # none stands between machines of a deployment
        if url:
            self.url = _checked(url)
            self._asks_proxies = may_stand_behind_a_proxy(self.url)
            mine = (
                running.token
                for running in note.find_all()
                if _same_place(running.control_url, self.url)
            )
            self._token = token or os.environ.get("OSD_TOKEN") or next(mine, "")
        else:
            running = note.find(deployment)
            self.url, self._token = running.control_url, running.token

    def get(self, path: str, **params: Any) -> Any:
        return self._request("GET", path, params=params)

    def parsed(self, answer: Any, record_type: type[R]) -> R:
        """The records behind the JSON of an answer. Raises `OSDError`."""
        try:
            return msgspec.convert(answer, record_type)
        except msgspec.ValidationError as error:
            raise OSDError(f"{self.url}: answers as no control port does ({error})") from None

    def admin(self, action: str, **body: Any) -> Any:
        return self._change(action, json=body)

    def set_steps(self, steps: Sequence[str]) -> Any:
        """Switch on these steps and no others in attached engines."""
        return self._change("steps", params={"steps": ",".join(steps)})

    def places(self) -> Any:
        """The parts of the service, with their machines and logs."""
        return self._request("GET", "/osd/logs", headers=self._credentials())

    def log(self, part: str, num_lines: int) -> str:
        """The last lines that a part logged."""
        path, params = f"/osd/logs/{quote(part, safe='')}", {"lines": num_lines}
        answer = self._request(
            "GET", path, params=params, headers=self._credentials(), timeout=SECONDS_TO_READ_LOG
        )
        return str(answer["text"])

    def purge(self, domain: str | None, before: float | None) -> Any:
        """Delete stored traces; both None = all."""
        params: dict[str, Any] = {"domain": domain, "before": before}
        params = {name: value for name, value in params.items() if value is not None} or {
            "all": True
        }
        return self._change("purge", params=params)

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        """The chunks of a long answer, asked for with the admin token."""
        try:
            headers = self._credentials()
            with httpx.stream(
                "GET",
                self.url + path,
                headers=headers,
                timeout=SECONDS_BETWEEN_CHUNKS,
                trust_env=self._asks_proxies,
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise OSDError(_reason(response))
                yield response.iter_bytes()
        except httpx.HTTPError as error:
            raise OSDError(f"{self.url}: no answer ({error}); is the service running?") from None

    def _credentials(self) -> dict[str, str]:
        if not self._token:
            where = (
                "it stands in DEPLOYMENT.json, in the runtime directory on the service's machine"
            )
            raise ConfigError(f"{self.url}: this wants the admin token; set OSD_TOKEN ({where})")
        return {"Authorization": f"Bearer {self._token}"}

    def _change(self, action: str, **kwargs: Any) -> Any:
        """A change that is given up comes all the same, so it is waited for."""
        timeout = httpx.Timeout(SECONDS_TO_CHANGE, connect=SECONDS_TO_ANSWER)
        headers = self._credentials()
        return self._request(
            "POST", f"/osd/admin/{action}", headers=headers, timeout=timeout, **kwargs
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        timeout: float | httpx.Timeout = SECONDS_TO_ANSWER,
        **kwargs: Any,
    ) -> Any:
        try:
            response = httpx.request(
                method, self.url + path, timeout=timeout, trust_env=self._asks_proxies, **kwargs
            )
        except httpx.HTTPError as error:
            raise OSDError(f"{self.url}: no answer ({error}); is the service running?") from None
        if response.status_code >= 400:
            raise OSDError(_reason(response))
        try:
            return response.json()
        except ValueError:
            raise OSDError(_stranger(response)) from None


def may_stand_behind_a_proxy(url: str) -> bool:
    """Whether the proxies that the environment names are to be asked: not for this machine."""
    return not is_loopback(httpx.URL(url).host)


def _checked(url: str) -> str:
    try:
        host = httpx.URL(url).host
        host.encode("idna")  # else whoever looks it up would
        is_fit = bool(host) and urlsplit(url).port != 0
    except (ValueError, httpx.InvalidURL):
        is_fit = False
    if not is_fit:
        raise ConfigError(f"--url={url}: is no address, like http://127.0.0.1:8001")
    return url.rstrip("/")


def _same_place(one: str, other: str) -> bool:
    """Whether two URLs name the same port. All names of this machine are equal."""
    here = ("localhost", "127.0.0.1", "::1")
    places = [
        (parts.hostname in here or parts.hostname, parts.port)
        for parts in map(urlsplit, (one, other))
    ]
    return places[0] == places[1]


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return _stranger(response)


def _stranger(response: httpx.Response) -> str:
    return (
        f"{response.request.url}: answered {response.status_code}; is this the control port of "
        "a service?"
    )
