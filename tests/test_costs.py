"The costs of a run cover all its starts, also those that were killed: they are compared with what the system counts for the processes."

import json
import os
import signal
import subprocess
import sys
import time


from mixsd_nb.runs.provenance import CostLog

WORK = """
import sys, time
from mixsd_nb.runs.provenance import CostLog, count_whole_process
count_whole_process()
with CostLog(sys.argv[1]) as costs, costs.phase("work"):
    while time.process_time() < float(sys.argv[2]): sum(range(10**5))
"""


def core_seconds(command, kill_after=None, **options):
    "The core-seconds of a process and its children; it is killed when it has used so many itself."
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    while kill_after:
        used = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()
        if sum(map(int, used[11:13])) / os.sysconf("SC_CLK_TCK") > kill_after: break
        time.sleep(0.05)
    if kill_after: os.kill(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == (signal.SIGKILL if kill_after else 0)
    return usage.ru_utime + usage.ru_stime


def counted(folder): return sum(phase["cpu_seconds"] for phase in json.loads((folder / "costs.json").read_text())["phases"].values())


def test_a_killed_start_counts(tmp_path):
    long, short = ["-c", WORK, str(tmp_path), "60"], ["-c", WORK, str(tmp_path), "2"]
    used = core_seconds(long, kill_after=4) + core_seconds(short)
    assert used - 1.5 < counted(tmp_path) < used + 0.3, "a kill loses what one core did since the last second was written"
    assert [*CostLog(tmp_path).phases] == [CostLog.between, "work"]
