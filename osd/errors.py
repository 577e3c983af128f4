"""Every error that is shown to users.

OSDError               one line: what is wrong, where, and the remedy
├── ConfigError        a configuration key, value, file or command line is wrong (exit status 2)
├── ReplayBufferError  the replay buffer's server cannot be reached or used
├── AwayError          another part of the service does not answer; it is tried again
├── ReleaseError       a draft release is missing, incomplete or does not fit
├── CaptureError       an engine's verifications cannot be captured; it serves on without
└── SwapError          an engine refused a draft; the previous one keeps serving
"""


class OSDError(Exception):
    """Base of all errors whose text is shown to users as one line."""

    exit_status = 1


class ConfigError(OSDError, ValueError):
    """A configuration key, value, file or command line is wrong."""

    exit_status = 2


class ReplayBufferError(OSDError):
    """The replay buffer's server cannot be reached or used."""


class AwayError(OSDError):
    """Another part of the service does not answer, or its process ended."""


class ReleaseError(OSDError):
    """A draft release is missing, incomplete, or does not fit the served draft."""


class CaptureError(OSDError):
    """An engine's verifications cannot be captured; it serves on without capture."""


class SwapError(OSDError):
    """An engine refused a draft; the previous one keeps serving."""


def first_line(error: BaseException) -> str:
    """What an error of others says, cut after its first line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
