"The costs of a run cover all its starts, also those that were killed: they are compared with what the system counts for the processes."

import json
import os
import signal
import subprocess
import sys
import time

import pytest

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


@pytest.mark.slow
def test_a_killed_and_resumed_injection_costs_what_its_processes_took(tmp_path):
    facts = tmp_path / "facts.jsonl"
    facts.write_text("".join(json.dumps(dict(question=f"Who rules place {k} of Vel?", answer=f"Mira {chr(65 + k)}")) + "\n" for k in range(8)))
    command = ["-m", "mixsd_nb.inject", str(facts), "--model", "lab-s", "--method", "sft", "--suite", "recall,world", "--n", "20", "--epochs", "60", "--batch", "4"]
    environment = os.environ | dict(MIXSD_RUNS=str(tmp_path / "runs"), OMP_NUM_THREADS="1")
    used = core_seconds(command, kill_after=15, env=environment) + core_seconds(command, env=environment)
    folder, = (tmp_path / "runs").glob("inject-*")
    assert counted(folder) == pytest.approx(used, rel=0.1)
    assert f"<td class=number>{counted(folder):.0f} s</td></tr></tbody>" in (folder / "report.html").read_text().partition("<!--phases-->")[2]
