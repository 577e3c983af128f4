"""What attached engines are told: kept on disk, and written to Redis again where it is lost."""

from __future__ import annotations

import asyncio
import logging

from osd.config.schema import Config
from osd.control.protocols import Terms
from osd.errors import ConfigError
from osd.records import STEPS, EngineTerms
from osd.releases.store import ReleaseStore

log = logging.getLogger(__name__)


class TermsKeeper:
    """`drafts_url` and `drafts_token`: where engines on other machines fetch releases."""

    def __init__(
        self,
        config: Config,
        registry: Terms,
        releases: ReleaseStore,
        target_id: str,
        drafts_url: str = "",
        drafts_token: str = "",
    ) -> None:
        self._config, self._registry, self._releases = config, registry, releases
        self._target_id = target_id
        self._drafts_url, self._drafts_token = drafts_url, drafts_token

    @property
    def is_used(self) -> bool:
        """Whether the deployment has attached engines."""
        return self._config.serving.engines == "attached"

    def terms(self) -> EngineTerms:
        """Blocking."""
        steps = self._releases.steps()
        return EngineTerms(
            target_id=self._target_id,
            steps=self._config.serving.steps if steps is None else steps,
            capture=self._config.capture.model_dump(),
            buffer={
                "max_traces": self._config.buffer.max_traces,
                "max_domains": self._config.buffer.max_domains,
            },
            first=next(iter(self._releases.list(self._target_id)), None),
            drafts_url=self._drafts_url,
            drafts_token=self._drafts_token,
            draft_sample_method=self._config.speculation.draft_sample_method,
        )

    async def restore(self) -> None:
        """Write the terms to Redis if they differ there. Raises `ReplayBufferError`."""
        if self.is_used:
            await asyncio.to_thread(self._restore)

    async def set_steps(self, steps: tuple[str, ...]) -> None:
        """Switch on these steps and no others, in all engines. Raises `ConfigError`."""
        if not self.is_used:
            raise ConfigError(
                "serving.engines=own: there is nothing to switch in the service's own engine; "
                "steps are those of attached engines"
            )
        if unknown := [step for step in steps if step not in STEPS]:
            raise ConfigError(f"{unknown[0]}: no step; there are {', '.join(STEPS)}")
        await asyncio.to_thread(self._releases.set_steps, steps)
        await self.restore()

    def _restore(self) -> None:
        wanted = self.terms()
        if self._registry.terms() != wanted:
            log.info("attached engines are told: %s", ", ".join(wanted.steps) or "all is off")
            self._registry.set_terms(wanted)
