"""Children of the demo: their output is kept, and nothing of their tree outlives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.demo_process import ChildError, descendants, is_running, reasons_in, run_child

# A parent whose child sits in a session of its own, as a launcher's workers do; stubborn ones ignore SIGTERM.
TREE = """
import signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen(  # inherits what is ignored
    [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
)
print(grandchild.pid, flush=True)
time.sleep(60)
"""

DEMO = """
import sys
from pathlib import Path
from tools import demo_process
demo_process.GRACE_S = 1.0
with demo_process.signals_interrupt():
    demo_process.run_child([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
"""


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_output_goes_to_the_log_and_a_failure_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    run_child([sys.executable, "-c", "print('fine')"], log)
    assert log.read_text() == "fine\n"
    with pytest.raises(ChildError, match=r"status 3(.|\n)*no good"):
        run_child([sys.executable, "-c", "print('no good'); raise SystemExit(3)"], log)


def test_poll_sees_the_log_while_the_child_runs(tmp_path: Path) -> None:
    log, flag = tmp_path / "child.log", tmp_path / "seen"
    script = f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"

    def poll() -> None:
        if "begun" in log.read_text():
            flag.touch()

    run_child([sys.executable, "-c", script], log, poll=poll)
    assert flag.exists()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_interrupt_leaves_no_process(tmp_path: Path, kind: signal.Signals, stubborn: bool) -> None:
    log = tmp_path / "child.log"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", DEMO, TREE.format(stubborn=stubborn), str(log)]
    demo = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        grandchild = int(log.read_text())
        tree = descendants(demo.pid)
        assert grandchild in tree
        os.kill(demo.pid, kind)
        _, told = demo.communicate(timeout=20)
        assert demo.returncode != 0
        assert told.startswith("stopping the processes")
        assert not [pid for pid in tree if is_running(pid)]
    finally:
        demo.kill()


def test_a_program_s_own_words_come_before_the_launcher_s() -> None:
    launcher = [f"line {number} of a traceback" for number in range(60)]
    told = "pretrain_gpt.py: rank 1: error: --split 1,0,0 leaves no validation data"
    assert reasons_in([told, *launcher]) == [told]
    assert reasons_in(launcher) == launcher[-25:]
