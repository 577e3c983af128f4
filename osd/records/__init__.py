"""Every record that crosses a process boundary. numpy only, no torch.

Token ids are int32, times are seconds, `at` is Unix time. G draft tokens per step
(vLLM's `num_speculative_tokens`).

    trace         a finished request, on its way from an engine through the buffer to the trainer
    acceptance    the three acceptances, and the counters behind them
    replica       windows, swap reports and heartbeats, from the replicas
    speculation   what the control of speculation says of itself, within the heartbeat
    training      a round's outcome and a draft release, from the trainer
    service       what the controller finds and tells
"""

from osd.records.acceptance import (
    SOURCES,
    Counters,
    acceptance_length,
    acceptance_rate,
    conditional_acceptance,
)
from osd.records.replica import (
    CommitReport,
    RankReport,
    ReplicaStatus,
    SpecWindow,
    StagingReport,
    SwapReport,
    WorkerReport,
)
from osd.records.service import (
    STEPS,
    BufferStats,
    EngineTerms,
    Event,
    Figures,
    Health,
    Member,
    MetricPoint,
    Payback,
    Place,
    ReplicaView,
    ServiceStatus,
)
from osd.records.speculation import (
    FAR_FEWER_ERRORS,
    FEWER_ERRORS,
    DraftWorth,
    NetGain,
    PlanChange,
    PlanTotals,
    ReplicaPlanChange,
    SpeculationFigures,
    SpeculationReport,
)
from osd.records.trace import (
    ACCEPTED,
    BY_MEMORY,
    BY_STUDENT,
    HOLDOUT_ONE_IN,
    MAX_DOMAIN_LENGTH,
    NO_VERSION,
    PLAIN,
    REJECTED,
    TRACE_ARRAYS,
    Trace,
    clean_domain,
)
from osd.records.training import (
    NO_TRACES,
    Canary,
    ClassReport,
    DraftRelease,
    DraftView,
    EarlierReport,
    EvalReport,
    RoundOutcome,
    RoundSize,
)
from osd.records.wire import decode, encode

__all__ = [
    "ACCEPTED",
    "BY_MEMORY",
    "BY_STUDENT",
    "FAR_FEWER_ERRORS",
    "FEWER_ERRORS",
    "HOLDOUT_ONE_IN",
    "MAX_DOMAIN_LENGTH",
    "NO_TRACES",
    "NO_VERSION",
    "PLAIN",
    "REJECTED",
    "SOURCES",
    "STEPS",
    "TRACE_ARRAYS",
    "BufferStats",
    "Canary",
    "ClassReport",
    "CommitReport",
    "Counters",
    "DraftRelease",
    "DraftView",
    "DraftWorth",
    "EarlierReport",
    "EngineTerms",
    "EvalReport",
    "Event",
    "Figures",
    "Health",
    "Member",
    "MetricPoint",
    "NetGain",
    "Payback",
    "Place",
    "PlanChange",
    "PlanTotals",
    "RankReport",
    "ReplicaPlanChange",
    "ReplicaStatus",
    "ReplicaView",
    "RoundOutcome",
    "RoundSize",
    "ServiceStatus",
    "SpecWindow",
    "SpeculationFigures",
    "SpeculationReport",
    "StagingReport",
    "SwapReport",
    "Trace",
    "WorkerReport",
    "acceptance_length",
    "acceptance_rate",
    "clean_domain",
    "conditional_acceptance",
    "decode",
    "encode",
]
