"""Rules for every test: nothing it starts or opens may outlive it, and property tests are the same in every run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# "ci": the same examples every time, so that a red run can be repeated. "long": fresh and many, for a night.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.register_profile(
    "long", deadline=None, max_examples=3000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("UNIKV_TEST_PROFILE", "ci"))

THREAD_GRACE_S = 1.0
"""How long a thread that was told to end may take to do so."""

LEAKS_SHOWN = 8

DRIVER_FILES = ("/dev/nvidia", "anon_inode:[event", "pipe:")
"""What a GPU's driver opens once, with the first kernel, and keeps; only where there is one."""
if not Path("/dev/nvidiactl").exists():
    DRIVER_FILES = ()

LIBRARY_THREADS = frozenset({"TMonitor"})
"""Classes of threads that libraries start once and keep: tqdm's monitor, started by loading a model."""

_failed = pytest.StashKey[bool]()


def _children() -> set[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    # multiprocessing keeps one helper process for the life of the interpreter.
    kept = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(int(pid) for pid in (task / "children").read_text().split())
    return found - kept


def _descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - five times as fast
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - as above
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    found.pop(resource_tracker._resource_tracker._fd or -1, None)  # type: ignore[attr-defined]
    return found


def _in_use(name: str) -> bool:
    """Whether another process has the file open or mapped: then it is that process's business, not a leftover."""
    me = os.getpid()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
            if f"/dev/shm/{name}" in [*opened, *(process / "maps").read_text().split()] and int(process.name) != me:
                return True
        except OSError:
            continue
    return False


@dataclass(slots=True)
class Holdings:
    """What this process holds at one moment.

    Attributes:
        threads: Python threads.
        children: process ids of children, finished ones included that nobody waited for.
        descriptors: target by file descriptor.
        shared: names in /dev/shm. Our own pools have none (they are memfd files); libraries may leave some behind.
    """

    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    children: set[int] = field(default_factory=_children)
    descriptors: dict[int, str] = field(default_factory=_descriptors)
    shared: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))  # noqa: PTH208 - five times as fast

    def leaks_since(self, before: Holdings) -> list[str]:
        """Return what is here and was not there before, in words."""
        threads = [t for t in self.threads - before.threads if type(t).__name__ not in LIBRARY_THREADS]
        leaks = [f"thread {thread.name!r} is alive" for thread in threads if thread.is_alive()]
        leaks += [f"child process {pid} was not waited for" for pid in sorted(self.children - before.children)]
        if len(self.descriptors) > len(before.descriptors):
            new = sorted(self.descriptors.items() - before.descriptors.items())
            new = [(fd, target) for fd, target in new if not target.startswith(DRIVER_FILES)]
            leaks += [f"file descriptor {fd} ({target}) is open" for fd, target in new]
        leaks += [f"/dev/shm/{name} exists" for name in sorted(self.shared - before.shared) if not _in_use(name)]
        return leaks


def _settled(before: Holdings) -> list[str]:
    """Look again after garbage is collected and threads that are on their way out have gone."""
    gc.collect()
    multiprocessing.active_children()
    for thread in set(threading.enumerate()) - before.threads:
        if type(thread).__name__ not in LIBRARY_THREADS:
            thread.join(THREAD_GRACE_S)
    return Holdings().leaks_since(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = report.failed or item.stash.get(_failed, False)
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, processes, descriptors or shared memory behind.

    What fixtures of a wider scope hold was there before. A test that failed anyway keeps its own message.
    """
    before = Holdings()
    yield
    leaks = Holdings().leaks_since(before)
    if leaks and not request.node.stash.get(_failed, False):
        leaks = _settled(before)
        if leaks:
            shown = leaks[:LEAKS_SHOWN] + ["..."] * (len(leaks) > LEAKS_SHOWN)
            pytest.fail(f"the test left {len(leaks)} thing(s) behind:\n  " + "\n  ".join(shown), pytrace=False)
