"A Slurm of one node that runs during the tests: munged, slurmctld and slurmd, with two character devices as GPUs."

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from helpers import need, need_tools, command_output, until

from mixsd_nb.methods.trainer import die_with_parent

PARTITION = "tests"
CONFIG = """
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
KillWait=5
MaxArraySize=5
GresTypes=gpu
NodeName={node} NodeAddr=127.0.0.1 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 \
RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName={partition} Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    return ports


def find_processes(root):
    "Processes that a killed test may have left behind: daemons, steps and their children."
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid(): continue
            if process.environ().get("SLURM_CONF") == str(root / "slurm.conf"): yield process
        except psutil.Error: pass


@pytest.fixture(scope="session")
def slurm():
    "Start the cluster and set SLURM_CONF; end every daemon afterwards."
    need_tools("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    if os.geteuid(): need("Slurm's daemons and its devices need root")
    root = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # the path of a socket must be short
    for name in ("munge", "state", "spool"): (root / name).mkdir(mode=0o755)
    root.chmod(0o755)
    for k in range(2):
        try: os.mknod(root / f"gpu{k}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError: need("devices cannot be made here")
    node = socket.gethostname().split(".")[0]
    (root / "slurm.conf").write_text(CONFIG.format(root=root, node=node, partition=PARTITION, ports=free_ports(2)))
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (root / "gres.conf").write_text(f"AutoDetect=off\nNodeName={node} Name=gpu File={root}/gpu[0-1]\n")
    (root / "munge/key").write_bytes(os.urandom(128))
    (root / "munge/key").chmod(0o400)
    os.environ["SLURM_CONF"] = str(root / "slurm.conf")
    munge = ["--socket", "--key-file", "--pid-file", "--log-file", "--seed-file"]
    files = [root / "munge" / name for name in ("socket", "key", "pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", *(str(x) for pair in zip(munge, files) for x in pair)]
    commands = [munged, ["slurmctld", "-D"], ["slurmd", "-D"]]
    daemons = []
    try:
        for command in commands:
            log = open(root / f"{command[0]}.out", "w")
            die = lambda: die_with_parent(signal.SIGKILL)
            daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die))
            if command[0] == "munged": until(files[0].exists, 180, "the socket of munged")
        until(lambda: command_output("sinfo", "--noheader", "--format=%T").strip() == "idle", 180, "an idle node")
        yield root
    finally:
        command_output("scancel", f"--partition={PARTITION}")
        until(lambda: not command_output("squeue", "--noheader"), 180, "the end of all jobs")
        for daemon in reversed(daemons): daemon.terminate()
        for daemon in daemons: daemon.wait(180)
        for process in find_processes(root): process.kill()
        del os.environ["SLURM_CONF"]
        shutil.rmtree(root, ignore_errors=True)
