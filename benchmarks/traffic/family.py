"""The families of models that the drift benchmark serves, each with its own kinds of traffic.

`tiny` has synthetic text and answers greedily. `natural` continues the standard library's source,
with sampling. So does `prose`, with books and manual pages in five languages out of Debian's
packages; `prose-1` and `prose-2` are the same from other first weights, names like `prose-2M-20%`
have another draft, those like `prose-T0.3` another temperature, and `prose-agent` is asked a few
things again and again. In `prose-large` the target that speed is measured with costs more. The
target of `tiny-deep` is deep enough for an EAGLE-3 head; `tiny-deep-head` and `prose-head` serve
with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.prose.recipe import FOREIGN, SIZE, SIZES
from osd.errors import ConfigError

TRAINING, FIRST_SERVED = 0, 1
"""Blocks of traffic that never meet: one to train the ceiling on, one for each seed of the
benchmark."""
BLOCK_SIZE = 1200
"""Requests of one domain in a block, where a family has no other size."""
TINY_SEED = 30_000
"""Traffic seed of block 0. The tiny models learnt from seeds below 1000."""
NATURAL_SEED = 3

PROSE = ("prose", "prose-1", "prose-2")
"""By the seed of the models."""
TEMPERATURE = 0.7
"""At which prose is answered."""
AT_TEMPERATURE = {t: f"prose-T{t}" for t in (0.3, 0.5)} | {TEMPERATURE: "prose"}
"""Families that differ in nothing but their temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models, and the traffic they are served."""

    name: str
    domains: Callable[[], Sequence[str]]
    home: Callable[[], str]
    """The domain the draft was trained on."""
    models: Callable[[], tuple[Path, Path]]
    """Directories of target and draft, built where they are missing."""
    costly_models: Callable[[], tuple[Path, Path]]
    """The same target at the cost of a far larger model, for measuring speed, and the draft that
    goes with it."""
    requests: Callable[[str, int, int], Sequence[Any]]
    """(domain, block, n) -> the first n requests of it."""
    temperature: float
    max_tokens: int
    block_size: int = BLOCK_SIZE
    """Requests of one domain in a block."""
    recorded_as: str = ""
    """Family with the same target and traffic, whose recordings it shares; empty = its own."""

    def prompts(self, domain: str, block: int, num: int) -> list[str]:
        """The first `num` prompts of a domain in a block. Raises `ConfigError` when they are not
        all different."""
        if num > self.block_size:
            raise ConfigError(
                f"{num} requests of {domain}: a schedule may ask for {self.block_size} of a domain "
                "at most"
            )
        found = [request.prompt for request in self.requests(domain, block, num)]
        if len(set(found)) < num:
            raise ConfigError(
                f"{domain}, block {block}: a prompt comes twice; choose another traffic seed"
            )
        return found


def _tiny_domains() -> Sequence[str]:
    from osd.tiny.traffic import DOMAINS

    return DOMAINS


def _tiny_home() -> str:
    from osd.tiny.traffic import HOME

    return HOME


def _tiny_models() -> tuple[Path, Path]:
    from osd.tiny.models import ensure

    found = ensure()
    return found.target, found.draft


def _tiny_costly() -> tuple[Path, Path]:
    from osd.tiny.models import ensure_cost_shaped

    return ensure_cost_shaped(), _tiny_models()[1]


def _tiny_requests(domain: str, block: int, num: int) -> Sequence[Any]:
    from osd.tiny.traffic import requests

    return requests(domain, num, TINY_SEED + block)


def _deep_models() -> tuple[Path, Path]:
    from osd.tiny.deep.models import ensure

    found = ensure()
    return found.target, found.draft


def _deep_head() -> tuple[Path, Path]:
    from osd.tiny.deep import head
    from osd.tiny.deep.models import ensure_target

    return ensure_target(), head.ensure()


def _deep_costly() -> tuple[Path, Path]:
    from osd.tiny.deep.models import ensure_cost_shaped

    return ensure_cost_shaped(), _deep_models()[1]


def _deep_head_costly() -> tuple[Path, Path]:
    from osd.tiny.deep import head
    from osd.tiny.deep.models import ensure_cost_shaped

    return ensure_cost_shaped(), head.ensure_cost_shaped()


def _natural_domains() -> Sequence[str]:
    from benchmarks.natural.text import PACKAGES

    return tuple(PACKAGES)


def _natural_home() -> str:
    from benchmarks.natural.text import HOME

    return HOME


def _natural_models() -> tuple[Path, Path]:
    from benchmarks.natural.models import ensure_natural

    found = ensure_natural()
    return found.target, found.draft


def _natural_costly() -> tuple[Path, Path]:
    from benchmarks.natural.models import ensure_natural_cost_shaped

    return ensure_natural_cost_shaped(), _natural_models()[1]


def _natural_requests(domain: str, block: int, num: int) -> Sequence[Any]:
    # Other seeds bring the same prompts in another order: blocks are places in the order of one
    # seed.
    from benchmarks.natural.traffic import requests

    return requests(domain, num, NATURAL_SEED, block * BLOCK_SIZE)


def _prose_domains() -> Sequence[str]:
    from benchmarks.prose.corpus import DOMAINS

    return DOMAINS


def _prose_home() -> str:
    from benchmarks.prose.corpus import HOME

    return HOME


def _prose_models(seed: int, size: str, foreign: float) -> tuple[Path, Path]:
    from benchmarks.prose.models import ensure_draft, ensure_target
    from benchmarks.prose.recipe import TargetRecipe, draft_recipe

    target = TargetRecipe(seed=seed)
    return ensure_target(target), ensure_draft(draft_recipe(size, foreign, seed), target)


def _prose_costly(seed: int, size: str, foreign: float) -> tuple[Path, Path]:
    from benchmarks.prose.models import ensure_prose_cost_shaped

    return ensure_prose_cost_shaped(seed), _prose_models(seed, size, foreign)[1]


def _prose_requests(domain: str, block: int, num: int) -> Sequence[Any]:
    from benchmarks.prose.traffic import requests

    return requests(domain, block, num)


def _prose(name: str, seed: int, size: str = SIZE, foreign: float = 0.0) -> Family:
    return Family(
        name=name,
        domains=_prose_domains,
        home=_prose_home,
        models=partial(_prose_models, seed, size, foreign),
        costly_models=partial(_prose_costly, seed, size, foreign),
        requests=_prose_requests,
        temperature=TEMPERATURE,
        max_tokens=96,
        block_size=576,
        recorded_as=PROSE[seed] if name != PROSE[seed] else "",
    )


def _prose_drafts() -> Iterator[Family]:
    """The same targets with each other draft, as `prose-1-2M-20%`."""
    for seed, base in enumerate(PROSE):
        for size, foreign in product(SIZES, FOREIGN):
            if (size, foreign) != (SIZE, 0.0):
                yield _prose(f"{base}-{size}-{foreign:.0%}", seed, size, foreign)


def _prose_head() -> tuple[Path, Path]:
    from benchmarks.prose.head import ensure_head
    from benchmarks.prose.models import ensure_target

    return ensure_target(), ensure_head()


def _prose_head_costly() -> tuple[Path, Path]:
    from benchmarks.prose.models import ensure_prose_cost_shaped
    from benchmarks.prose.wide_head import ensure_wide_head

    return ensure_prose_cost_shaped(), ensure_wide_head()


def _prose_large() -> tuple[Path, Path]:
    from benchmarks.engines.models import LARGE
    from benchmarks.prose.models import ensure_prose_cost_shaped

    return ensure_prose_cost_shaped(size=LARGE), FAMILIES["prose"].models()[1]


def _agent_domains() -> Sequence[str]:
    from benchmarks.prose.agent import DOMAIN

    return (DOMAIN,)


def _agent_requests(domain: str, block: int, num: int) -> Sequence[Any]:
    from benchmarks.prose.agent import requests

    return requests(block, num)


_TINY = Family(
    name="tiny",
    domains=_tiny_domains,
    home=_tiny_home,
    models=_tiny_models,
    costly_models=_tiny_costly,
    requests=_tiny_requests,
    temperature=0.0,
    max_tokens=160,
)
_DEEP = replace(_TINY, name="tiny-deep", models=_deep_models, costly_models=_deep_costly)
FAMILIES = {
    "tiny": _TINY,
    "natural": Family(
        name="natural",
        domains=_natural_domains,
        home=_natural_home,
        models=_natural_models,
        costly_models=_natural_costly,
        requests=_natural_requests,
        temperature=0.7,
        max_tokens=96,
    ),
    **{name: _prose(name, seed) for seed, name in enumerate(PROSE)},
    "prose-agent": replace(
        _prose("prose-agent", 0),
        domains=_agent_domains,
        requests=_agent_requests,
        temperature=0.0,
        recorded_as="",
    ),
    "prose-large": replace(
        _prose("prose-large", 0), costly_models=_prose_large, recorded_as="prose"
    ),
    **{one.name: one for one in _prose_drafts()},
    **{
        name: replace(_prose(name, 0), temperature=temperature, recorded_as="")
        for temperature, name in AT_TEMPERATURE.items()
    },
    "tiny-deep": _DEEP,
    "tiny-deep-head": replace(
        _DEEP,
        name="tiny-deep-head",
        models=_deep_head,
        costly_models=_deep_head_costly,
        recorded_as="tiny-deep",
    ),
    "prose-head": replace(
        _prose("prose-head", 0),
        models=_prose_head,
        costly_models=_prose_head_costly,
        recorded_as="prose",
    ),
}
"""By the names a schedule uses."""
