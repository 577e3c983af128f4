"""Memory that runs out is one line with a remedy; other errors stay what they are."""

from __future__ import annotations

import errno
import resource
import weakref
from pathlib import Path

import pytest
import torch

from osd.common.memory import end_me_first, has_run_out, told_when_out
from osd.errors import OSDError

OF_THE_HOST = (
    "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 4.00 TiB for an array"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"),
        RuntimeError(OF_THE_HOST),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"),
    ],
    ids=["numpy", "device", "host", "library", "map", "import"],
)
def test_it_is_one_line_with_the_remedy(error: Exception) -> None:
    with pytest.raises(OSDError) as caught, told_when_out("lower it"):
        raise error
    line = str(caught.value)
    assert line.startswith(f"memory runs out ({type(error).__name__}: {str(error)[:20]}")
    assert line.endswith("); lower it") and "\n" not in line and len(line) < 300


def test_nothing_of_what_failed_is_held_while_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    batches = weakref.WeakSet[torch.Tensor]()

    def fail() -> None:
        batch = torch.empty(8)
        batches.add(batch)
        raise MemoryError("no room for a gradient")

    with pytest.raises(OSDError), told_when_out("lower it"):
        fail()
    assert list(batches) == [] and emptied == [1]


def test_what_torch_says_of_the_hosts_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 45, dtype=torch.uint8)
    assert has_run_out(caught.value)


def test_what_torch_says_of_a_file_that_cannot_be_mapped_is_known(tmp_path: Path) -> None:
    file, num_bytes = tmp_path / "weights", 1 << 40
    with file.open("wb") as sparse:
        sparse.truncate(num_bytes)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (own + (1 << 30), hard))
    try:
        with pytest.raises(RuntimeError, match="unable to mmap") as caught:
            torch.UntypedStorage.from_file(str(file), False, num_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert has_run_out(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        OSError(errno.ENOSPC, "disk full"),
        ImportError("no module named 'x'"),
        KeyError("k"),
    ],
)
def test_other_errors_stay(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, told_when_out("lower it"):
        raise error
    assert caught.value is error


def test_a_process_may_ask_to_be_ended_first(tmp_path: Path) -> None:
    end_me_first(tmp_path / "score")
    assert (tmp_path / "score").read_text() == "1000"
    end_me_first(tmp_path / "no" / "such")
