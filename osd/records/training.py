"""What the trainer says of a round, and the draft release that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """One class of traffic in an `EvalReport`.

    Example:
        ClassReport(num_traces=12, alpha_base=0.41, alpha_candidate=0.72, diff_high=0.36,
                    success_candidate=(0.72, 0.81, 0.85, 0.87, 0.88))
    """

    num_traces: int
    alpha_base: float
    alpha_candidate: float
    diff_high: float
    """Upper end of the paired bootstrap interval of candidate - base."""
    success_candidate: tuple[float, ...] = ()
    """As in `EvalReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """A candidate draft and its base, replayed on the same held-out traces (conditional acceptance
    α throughout).

    Example:
        EvalReport(num_traces=40, num_tokens=1600, k=4, alpha_base=0.41, alpha_candidate=0.72,
                   alpha_base_per_pos=(0.5, 0.4, 0.3, 0.2),
                   alpha_candidate_per_pos=(0.8, 0.7, 0.7, 0.6), diff=0.31, diff_low=0.27,
                   diff_high=0.35)
    """

    num_traces: int
    num_tokens: int
    k: int
    alpha_base: float
    alpha_candidate: float
    alpha_base_per_pos: tuple[float, ...]
    """[k]; NaN-free: positions never tested are 0."""
    alpha_candidate_per_pos: tuple[float, ...]
    diff: float
    """alpha_candidate - alpha_base."""
    diff_low: float
    diff_high: float
    """Paired bootstrap interval of `diff`, resampled by request."""
    success_base: tuple[float, ...] = ()
    success_candidate: tuple[float, ...] = ()
    """[5]; share of the served tokens that are among the draft's 1 to 5 likeliest, had it begun to
    propose there: what a token tree of that width would hold. () of reports from before it was
    measured."""
    classes: dict[str, ClassReport] = field(default_factory=dict)
    """By class of traffic: the label, or a cluster of unlabelled prompts."""
    sampled: tuple[float, float] | None = None
    """(α of the candidate as it drafts, α if its tokens were drawn from its distribution) of the
    newest requests above temperature 0; None where there are none, or they are drawn anyway."""
    num_before: int = 0
    """Held-out traces left out as the traffic has changed since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierReport:
    """An earlier release and the serving one, replayed on the newest traces, which neither has
    learnt (conditional acceptance α throughout).

    Example:
        EarlierReport(version=1, num_traces=16, alpha_base=0.72, alpha=0.79, diff_low=0.05,
                      since=1.7e9)
    """

    version: int
    num_traces: int
    alpha_base: float
    """Of the release that serves."""
    alpha: float
    """Of the earlier one."""
    diff_low: float
    """Lower bound of alpha - alpha_base, by Student's t over requests, corrected for the number of
    comparisons (`CHANCE_TO_RECALL`)."""
    since: float
    """When the oldest of the traces was finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSize:
    """How much a round learns from.

    Example:
        RoundSize(new_traces=32, replay_batches=8)
    """

    new_traces: int
    """At most so many; of more, only the newest."""
    replay_batches: int
    """Stored batches replayed for every batch of them."""


NO_TRACES = "no traces"
"""`RoundOutcome.discarded` of a round that had nothing to learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOutcome:
    """One training round: where the candidate lies and how it was made and judged.

    Example:
        RoundOutcome(base_version=3, path="/data/candidates/17", num_steps=24, num_tokens=3100,
                     loss_first=2.1, loss_last=0.6, seconds=2.4, trace_age_mean_s=4.0,
                     trace_age_max_s=9.5, eval=EvalReport(...))
    """

    draft: str = "default"
    base_version: int
    target_id: str = ""
    kind: Literal["full", "lora"] = "full"
    """What was trained. The candidate is a whole, plain model either way."""
    path: str
    """Directory with the candidate in Hugging Face format, on the trainer's machine; "" when the
    round was discarded."""
    files: dict[str, str] = field(default_factory=dict)
    """The candidate's files: name -> sha256."""
    num_steps: int
    num_tokens: int
    """Rows trained on, replayed ones included."""
    loss_first: float
    loss_last: float
    seconds: float
    trace_age_mean_s: float
    trace_age_max_s: float
    eval: EvalReport | None
    """None when there were too few held-out traces, or the round was discarded."""
    discarded: str = ""
    """Why the round produced no candidate ("non-finite loss"); "" when it did."""
    learning_rate: float = 0.0
    """Peak learning rate of this round."""
    holdout_loss_before: float | None = None
    holdout_loss_after: float | None = None
    """Mean loss over the newest held-out traces; None when there were too few."""
    padding: float = 0.0
    """Share of the tokens computed that were padding."""
    replay_batches: int | None = None
    """Stored batches replayed for every batch of new traces; None: by a trainer that did not
    say."""
    num_new_rows: int = 0
    """Rows of new traces that could be trained on."""
    num_contradicting: int = 0
    """Rows of new traces that were left out because they contradict the text that was served."""
    num_student_traces: int = 0
    """Traces trained on whose answer the draft had sampled (`trainer.sampling`)."""
    sampling_cpu_s: float = 0.0
    """CPU seconds that sampling these answers took, a part of the round."""
    scoring_cpu_s: float = 0.0
    """CPU seconds that the target took to label them, a part of the round."""
    features_cpu_s: float = 0.0
    """CPU seconds that computing the target's features took, which a head is trained on; a part of
    the round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRelease:
    """An immutable draft on disk: a plain Hugging Face directory plus this record as
    `release.json`.

    Example:
        DraftRelease(version=4, parent=3, path="/data/releases/v000004", sha256="ab12...",
                     target_id="9f2c", created_at=1.7e9, outcome=RoundOutcome(...))
    """

    draft: str = "default"
    version: int
    parent: int
    """Version it was trained from; 0 for the first."""
    kind: Literal["full", "lora"] = "full"
    path: str
    """Where the store's machine keeps it."""
    sha256: str
    """Of `model.safetensors`."""
    files: dict[str, str] = field(default_factory=dict)
    """All of its files: name -> sha256."""
    target_id: str
    created_at: float
    outcome: RoundOutcome | None = None
    """How it came to be; None for the draft the service started with."""
    origin: str = ""
    """Fingerprint of the draft its line of releases began with; "" = not known."""
    judged_since: float = 0.0
    """Unix time; of a round's base: held-out requests of before are of other traffic than its
    candidate is for. 0 = all count."""

    @property
    def predicted_alpha(self) -> float | None:
        """Conditional acceptance on held-out requests as the gate measured it before publication;
        None for a draft that was never measured."""
        report = self.outcome.eval if self.outcome is not None else None
        return None if report is None else report.alpha_candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftView:
    """A release, beside how it was judged, what was decided since, and how it served.

    Example:
        DraftView(version=4, parent=3, target_id="9f2c", created_at=1.7e9, sha256="ab12...",
                  path="/data/releases/v000004", kind="full", num_steps=24, serving=True,
                  predicted_alpha=0.72, served_alpha=0.69, served_tested=81_000)
    """

    version: int
    parent: int
    target_id: str
    created_at: float
    sha256: str
    path: str
    kind: Literal["full", "lora"]
    eval: EvalReport | None = None
    num_steps: int = 0
    """0 of the draft the service started with."""
    num_tokens: int = 0
    num_new_rows: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    seconds: float = 0.0
    """Of its round."""
    serving: bool = False
    pinned: bool = False
    kept: bool = False
    """Never pruned."""
    bad: bool = False
    """Not offered again."""
    bad_reason: str = ""
    predicted_alpha: float | None = None
    """α that its gate measured."""
    served_alpha: float | None = None
    """α it served with, as far as history reaches."""
    served_tested: int = 0
    """Draft tokens tested for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A new release that one of several replicas serves first.

    Example:
        Canary(replica="gpu-2-8000", release=DraftRelease(...), before=DraftRelease(...))
    """

    replica: str
    release: DraftRelease
    before: DraftRelease
    """What all others serve meanwhile."""
