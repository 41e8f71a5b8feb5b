"A Slurm of two nodes that runs during the tests: munged, slurmctld and two slurmd, each with character devices as GPUs."

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

from mixsd_nb.training.trainer import die_with_parent

PARTITION, URGENT = "tests", "urgent"  # a job of the second one preempts jobs of the first one
NODES, GPUS = ("a", "b"), 3
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill
JobAcctGatherFrequency=task=1
JobSubmitPlugins=lua
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=6000
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MaxArraySize=1001
GresTypes=gpu
{nodes}
PartitionName={normal} Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName={urgent} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
NODE = ("NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
        "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{gpus} State=UNKNOWN")
# As MaxSubmitJobs of an account: an array with more jobs than the file `limit` says is refused (2050 is Slurm's code).
LIMIT = """
function slurm_job_submit(job, partitions, user)
  local file = io.open("{root}/limit")
  if not file then return slurm.SUCCESS end
  local limit = file:read("*n")
  file:close()
  local last = tonumber(string.match(job.array_inx or "0", "-(%d+)")) or 0
  if last + 1 > limit then return 2050 end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    return ports


class Cluster:
    "The daemons of a Slurm in a folder of their own."

    def __init__(self, root):
        self.root, self.daemons = root, {}
        host, (port, *ports) = socket.gethostname().split(".")[0], free_ports(1 + len(NODES))
        for name in ("munge", "state"): (root / name).mkdir(mode=0o755)
        for name in NODES: (root / f"spool-{name}").mkdir(mode=0o755)
        for k in range(GPUS): os.mknod(root / f"gpu{k}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        nodes = [NODE.format(name=name, host=host, port=port, gpus=GPUS) for name, port in zip(NODES, ports)]
        gpus = [f"NodeName={name} Name=gpu File={root}/gpu[0-{GPUS - 1}]" for name in NODES]
        (root / "slurm.conf").write_text(CONFIG.format(root=root, host=host, ports=[port], nodes="\n".join(nodes),
                                                       normal=PARTITION, urgent=URGENT))
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (root / "gres.conf").write_text("\n".join(["AutoDetect=off", *gpus, ""]))
        (root / "job_submit.lua").write_text(LIMIT.replace("{root}", str(root)))
        (root / "munge/key").write_bytes(os.urandom(128))
        (root / "munge/key").chmod(0o400)

    def start(self, name):
        "Start a daemon, or that of a node; it ends with this process."
        munge = ["--socket", "--key-file", "--pid-file", "--log-file", "--seed-file"]
        files = [self.root / "munge" / name for name in ("socket", "key", "pid", "log", "seed")]
        commands = dict(munged=["munged", "--foreground", "--force", *(str(x) for pair in zip(munge, files) for x in pair)],
                        slurmctld=["slurmctld", "-D"])
        command = commands.get(name, ["slurmd", "-D", "-N", name])
        log = open(self.root / f"{name}.out", "a")
        self.daemons[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                              env=os.environ | dict(SLURMD_NODENAME=name),
                                              preexec_fn=lambda: die_with_parent(signal.SIGKILL))
        if name == "munged": until(files[0].exists, 180, "the socket of munged")

    def stop(self, name):
        self.daemons[name].terminate()
        self.daemons[name].wait(180)

    def find_processes(self, *nodes):
        "The processes of some nodes, or all: daemons, steps and their children, also those of a killed test."
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid(): continue
                environment = process.environ()
                if environment.get("SLURM_CONF") != str(self.root / "slurm.conf"): continue
                if not nodes or environment.get("SLURMD_NODENAME") in nodes: yield process
            except psutil.Error: pass

    def fail_node(self, name):
        "End all that runs on a node, as a loss of power does, and tell Slurm, which would notice after some minutes."
        processes = list(self.find_processes(name))
        for process in processes: process.suspend()  # none may notice the end of another
        for process in processes: process.kill()
        self.daemons[name].wait(180)
        command_output("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=power")

    def set_limit(self, jobs):
        "Limit the jobs of a submission; None for no limit."
        if jobs is None: (self.root / "limit").unlink()
        else: (self.root / "limit").write_text(str(jobs))

    def ready(self):
        states = command_output("sinfo", "--noheader", "--Node", f"--partition={PARTITION}", "--format=%T").split()
        return states == ["idle"] * len(NODES)


@pytest.fixture(scope="session")
def slurm():
    "Start the cluster and set SLURM_CONF; end every daemon afterwards."
    need_tools("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    if os.geteuid(): need("Slurm's daemons and its devices need root")
    root = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # the path of a socket must be short
    root.chmod(0o755)
    try: cluster = Cluster(root)
    except PermissionError: need("devices cannot be made here")
    os.environ["SLURM_CONF"] = str(root / "slurm.conf")
    try:
        for name in ("munged", "slurmctld", *NODES): cluster.start(name)
        until(cluster.ready, 180, "idle nodes")
        yield cluster
    finally:
        command_output("scancel", f"--partition={PARTITION}")
        until(lambda: not command_output("squeue", "--noheader"), 180, "the end of all jobs")
        for name in reversed(cluster.daemons): cluster.stop(name)
        for process in cluster.find_processes(): process.kill()
        del os.environ["SLURM_CONF"]
        shutil.rmtree(root, ignore_errors=True)
