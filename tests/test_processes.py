"The end of one of several processes: no thread of its process group meets an interpreter that is being torn down."

import json
import subprocess
import sys

import pytest

# Two processes of a group, forked from one that has imported torch. The interpreter's lock changes hands only when it is
# given up, as on a busy machine, so a thread of gloo that frees a tensor waits for it until the interpreter ends.
SCRIPT = """
import json, os, sys, tempfile
import torch.distributed as dist
from mixsd_nb.runs.processes import leave_after
from torch import ones

repetitions, how, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"
folder = tempfile.mkdtemp()

def work(rank, k):
    global kept
    sys.setswitchinterval(1000)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{k}", rank=rank, world_size=2)
    for _ in range(3): dist.all_reduce(ones(1000))
    kept = dist.group.WORLD  # as a sharded model does
    if fails: raise ValueError("a mistake")
    dist.destroy_process_group()

def start(rank, k):
    if pid := os.fork(): return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if how == "leaves": leave_after(work, rank, k)
    work(rank, k)
    sys.exit()

codes = []
for k in range(repetitions):
    processes = [start(rank, k) for rank in range(2)]
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
print(json.dumps(codes))
os._exit(0)
"""


def exit_codes(repetitions, how, outcome="works"):
    command = [sys.executable, "-c", SCRIPT, str(repetitions), how, outcome]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


@pytest.mark.parametrize("outcome, code", [("works", 0), ("fails", 1)])
def test_a_process_of_a_group_ends_in_order(outcome, code):
    assert exit_codes(10, "leaves", outcome) == [code] * 20
