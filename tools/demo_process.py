"""Child processes of the demo: followed through a log file, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

TOLD_LINES = 5
TAIL_LINES = 25
POLL_S = 0.2
GRACE_S = 10.0


class ChildError(Exception):
    """A child ended with a status that is not 0."""


def run_child(command: Sequence[str], log: Path, *, poll: Callable[[], None] = lambda: None) -> None:
    """Run with all output in `log`, calling `poll` now and then; on any exception the child's whole tree ends."""
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this process only, which then ends the tree in order.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while child.poll() is None:
                poll()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
            poll()
        except KeyboardInterrupt:
            sys.stderr.write("stopping the processes ...\n")
            sys.stderr.flush()
            raise
        finally:
            end_tree(child)
    if child.returncode != 0:
        reasons = "\n".join(reasons_in(log.read_text(encoding="utf-8", errors="replace").splitlines()))
        raise ChildError(f"{' '.join(command[:6])} ... ended with status {child.returncode}; from {log}:\n{reasons}")


def reasons_in(lines: Sequence[str]) -> Sequence[str]:
    """The lines of a log in which a program of ours says why it ended; its last lines where there are none."""
    told = [line for line in lines if ".py: " in line and "error" in line]
    return told[:TOLD_LINES] or lines[-TAIL_LINES:]


def end_tree(child: subprocess.Popen[bytes]) -> None:
    """End the child and everything it started: first politely, then by force."""
    if child.poll() is not None:
        return
    # Listed first: a launcher's workers sit in sessions of their own, and are nobody's children once it is gone.
    tree = [child.pid, *descendants(child.pid)]
    send(tree, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    with suppress(KeyboardInterrupt):  # a second Ctrl-C only ends the patience
        while time.monotonic() < deadline and any(is_running(pid) for pid in tree):
            child.poll()  # collects it when it has ended
            time.sleep(0.05)
    send([*tree, *descendants(child.pid)], signal.SIGKILL)
    child.wait()


def send(pids: Sequence[int], kind: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, kind)


def descendants(pid: int) -> list[int]:
    """Every process there is now that `pid` started, directly or not."""
    children: dict[int, list[int]] = {}
    for process, parent in _process_pairs():
        children.setdefault(parent, []).append(process)
    found: list[int] = []
    pending = [pid]
    while pending:
        started = children.get(pending.pop(), [])
        found += started
        pending += started
    return found


def _process_pairs() -> Iterator[tuple[int, int]]:
    """(pid, parent pid) of all processes: from /proc where there is one, else from `ps`."""
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    for stat in stats:
        with suppress(OSError):  # it ended meanwhile
            yield int(stat.parent.name), int(_state_and_parent(stat)[1])
    if not stats:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            process, parent = line.split()
            yield int(process), int(parent)


def _state_and_parent(stat: Path) -> list[str]:
    """The fields after the process's name, which stands in brackets and may hold blanks."""
    return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]


def is_running(pid: int) -> bool:
    """Whether the process exists; one that ended and waits to be collected counts as ended."""
    with suppress(OSError):
        return _state_and_parent(Path(f"/proc/{pid}/stat"))[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside it a polite kill or a closed terminal acts as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, interrupt) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
