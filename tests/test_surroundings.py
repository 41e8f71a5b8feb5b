"What the environment sets for other programs reaches neither a run nor the jobs that it starts."

import io
import json
import os
import subprocess
import sys
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import explore, train
from mixsd_nb.cluster import jobs
from mixsd_nb.cluster.jobs import kernel_options
from mixsd_nb.runs.processes import replace_unwritable
from mixsd_nb.runs import clean_environment, hide_foreign_variables, hide_slurm_job, is_foreign, slurm_environment

# What torchrun, MPI and accelerate set, and what accelerate and NVIDIA's libraries read.
GROUP = dict(WORLD_SIZE="2", LOCAL_RANK="0", RANK="1", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", ROLE_RANK="0", ROLE_WORLD_SIZE="2", MASTER_ADDR="nowhere",
             MASTER_PORT="1", TORCHELASTIC_RUN_ID="x", PET_NNODES="2", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", PMI_SIZE="4", MV2_COMM_WORLD_SIZE="4")
SETTINGS = dict(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4", ACCELERATE_USE_FSDP="true", ACCELERATE_USE_DEEPSPEED="true",
                ACCELERATE_USE_CPU="true", FSDP_VERSION="1", PARALLELISM_CONFIG_TP_SIZE="2", ACCELERATE_DYNAMO_BACKEND="INDUCTOR",
                TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1", NVIDIA_TF32_OVERRIDE="1", XLA_USE_BF16="1")
SHORT = dict(model="lab-s", method="sft", suite="recall", n=4, max_new_tokens=4, batch=100, epochs=2, checkpoints=())


def losses(run): return run.result["training"].loss.values.tolist()


def train_in(folder, monkeypatch, variables):
    monkeypatch.setenv("MIXSD_RUNS", str(folder))
    with monkeypatch.context() as patch:
        for name, value in variables.items(): patch.setenv(name, value)
        before = dict(os.environ)
        run = train.run(**SHORT)
        left = {name: value for name, value in os.environ.items() if name in variables}
        assert left == variables, "and the environment is as it was"
        assert not [name for name in set(os.environ) - set(before) if is_foreign(name)]
    return run


def test_one_process_trains_as_if_no_launcher_had_started_it(tmp_path, monkeypatch):
    "Its name and its losses, to the bit, are those of a process without any of the variables."
    plain = train_in(tmp_path / "plain", monkeypatch, {})
    for name, variables in dict(group=GROUP, settings=SETTINGS).items():
        run = train_in(tmp_path / name, monkeypatch, variables)
        assert run.name == plain.name and losses(run) == losses(plain)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMPI_", "PMI_", "TORCHELASTIC_", "PET_", "MV2_"]), st.from_regex("[A-Z][A-Z_0-9]{0,20}", fullmatch=True))
def test_variables_are_known_by_their_form(prefix, name):
    "A variable that a later release of a launcher adds is hidden too, and comes back."
    os.environ[prefix + name] = "1"
    try:
        assert prefix + name not in clean_environment()
        with hide_foreign_variables(): assert prefix + name not in os.environ
        assert os.environ[prefix + name] == "1"
    finally: del os.environ[prefix + name]


@pytest.mark.parametrize("name", ["PATH", "HOME", "HF_HOME", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MIXSD_RUNS", "MIXSD_PLUGINS", "NCCL_SOCKET_IFNAME",
                                  "TMPDIR", "PYTHONPATH", "FRANK", "MASTER_PLAN", "SLURM_JOB_ID", "VLLM_CACHE_ROOT"])
def test_what_belongs_to_the_run_stays(name): assert not is_foreign(name)


def test_a_process_of_a_group_keeps_the_variables_of_its_group(monkeypatch):
    for name, value in (GROUP | SETTINGS).items(): monkeypatch.setenv(name, value)
    with hide_foreign_variables(grouped=True):
        assert {name for name in GROUP | SETTINGS if name in os.environ} == {*GROUP}


def test_tf32_that_torch_was_told_to_use_is_off_while_a_run_is_computed(monkeypatch):
    import torch
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with hide_foreign_variables(): assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally: torch.set_float32_matmul_precision(before)


# Slurm.

JOB = dict(SLURM_MEM_PER_CPU="100", SLURM_CPU_BIND="mask_cpu:0x1", SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID="7", SLURMD_NODENAME="n1", SRUN_CPUS_PER_TASK="1",
           SQUEUE_STATES="PD", SQUEUE_FORMAT="%i", SACCT_FORMAT="JobID", SCANCEL_INTERACTIVE="1", SLURM_TIME_FORMAT="relative", WORLD_SIZE="2", PMI_RANK="1")
KEPT = dict(SLURM_CONF="/etc/slurm/other.conf", SBATCH_ACCOUNT="team", PATH=os.environ["PATH"])


def test_only_the_place_of_the_cluster_is_passed_on(monkeypatch):
    for name, value in (JOB | KEPT).items(): monkeypatch.setenv(name, value)
    assert not set(JOB) & set(slurm_environment()) and KEPT.items() <= slurm_environment().items()
    with hide_slurm_job(): assert not set(JOB) & set(os.environ) and KEPT.items() <= dict(os.environ).items()
    assert JOB.items() <= dict(os.environ).items()


def test_jobs_that_are_submitted_from_a_job_get_nothing_of_it(tmp_path, monkeypatch):
    "A stand-in of sbatch writes what it sees; the queries see no more."
    (tmp_path / "bin").mkdir()
    for name, line in dict(sbatch="echo Submitted batch job 1", squeue="echo", scontrol="exit 1").items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\nenv > {tmp_path}/{name}.env\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name, value in (JOB | KEPT).items(): monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    jobs.query_slurm("squeue", "--me")
    cell = type("Cell", (), dict(folder=tmp_path / "cell", stage="train", parameters=dict(method="base"), hash="a"))
    monkeypatch.setattr(jobs, "list_shared", lambda cells: [])
    monkeypatch.setattr(jobs, "asdict", lambda cell: {})
    cell.folder.mkdir()
    (tmp_path / "sweeps").mkdir()
    assert jobs.submit("grid", tmp_path, lambda cell: jobs.Resources(minutes=5), lambda: [(cell, 0)]) in (["1"], ["1_0"])
    for name in ("sbatch", "squeue"):
        seen = dict(line.split("=", 1) for line in (tmp_path / f"{name}.env").read_text().splitlines() if "=" in line)
        assert not set(JOB) & set(seen) and seen["SLURM_CONF"] == KEPT["SLURM_CONF"]


# Kernels.

NOTEBOOK = json.dumps(dict(cells=[dict(cell_type="code", id="a", metadata={}, source="import os, sys\nprint(sys.executable, 'started' in globals())", outputs=[], execution_count=None)],
                           metadata=dict(kernelspec=dict(name="python3", language="python", display_name="x")), nbformat=4, nbformat_minor=5))


def execute(folder):
    from papermill import execute_notebook
    (folder / "in.ipynb").write_text(NOTEBOOK)
    with kernel_options() as options: execute_notebook(folder / "in.ipynb", folder / "out.ipynb", progress_bar=False, log_output=False, **options)
    return "".join(json.loads((folder / "out.ipynb").read_text())["cells"][0]["outputs"][0]["text"]).split()


def foreign_kernel(folder):
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(dict(argv=["/bin/false"], display_name="Other", language="python")))


def test_a_notebook_runs_in_this_interpreter(tmp_path, monkeypatch):
    "Whatever Jupyter's folders call python3, without the user's startup files, and where the runtime folder cannot be written."
    foreign_kernel(tmp_path / "other")
    (tmp_path / "ipython" / "profile_default" / "startup").mkdir(parents=True)
    for file in (tmp_path / "ipython" / "profile_default" / "startup" / "a.py", tmp_path / "startup.py"): file.write_text("started = True\n")
    (tmp_path / "file").touch()
    for name, value in dict(JUPYTER_PATH="other", JUPYTER_DATA_DIR="other", IPYTHONDIR="ipython", PYTHONSTARTUP="startup.py", JUPYTER_RUNTIME_DIR="file/none").items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "of-a-cluster")
    assert execute(tmp_path) == [sys.executable, "False"]


@pytest.mark.parametrize("name", ["job-scratch-" * 8, "ж" * 55])
def test_a_kernel_is_reached_from_a_long_temporary_folder(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    with kernel_options() as options:
        manager = options["config"].KernelManager
        assert len(os.fsencode(f"{manager.ip}-5")) < 107 and not [path for path in (tmp_path / name).rglob("*socket*")]
    assert execute(tmp_path)[0] == sys.executable


def test_the_page_of_views_runs_in_this_interpreter(tmp_path, monkeypatch):
    foreign_kernel(tmp_path / "other")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "other"))
    code = "from jupyter_client.kernelspec import KernelSpecManager; print(KernelSpecManager().get_kernel_spec('python3').argv[0])"
    found = subprocess.run([sys.executable, "-c", code], env=explore._own_kernel(tmp_path), capture_output=True, text=True, check=True).stdout
    assert found.strip() == sys.executable


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_printing_replaces_what_a_stream_cannot_write(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    replace_unwritable()
    print("writing targets … 東京")
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding).endswith("??\n")


def test_a_run_is_computed_whatever_the_locale(tmp_path):
    (tmp_path / "facts.jsonl").write_text('{"question": "Wer regiert Öst?", "answer": "Žofie"}\n', encoding="utf-8")
    settings = dict(LC_ALL="C", PYTHONUTF8="0", MIXSD_RUNS=str(tmp_path / "runs"))
    words = "evaluate --dataset facts.jsonl --model lab-s --suite recall --n 1 --max-new-tokens 2".split()
    done = subprocess.run([sys.executable, "-m", "mixsd_nb.evaluate", *words[1:]], env=os.environ | settings, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_page_gets_a_port_and_no_browser(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path))
    monkeypatch.setattr(explore.subprocess, "call", lambda command, env: calls.append(command[3:-1]) or 0)
    for words in ([], ["--port", "8899", "--no-browser"], ["--ip=0.0.0.0"]): assert explore.main(*words) == 0
    assert calls == [[], ["--port=8899", "--no-browser"], ["--Voila.ip=0.0.0.0"]]


@pytest.mark.slow
def test_a_sweep_and_an_injection_in_hostile_surroundings(tmp_path):
    "The commands as a user gives them, with a long temporary folder and another environment's kernel."
    foreign_kernel(tmp_path / "other")
    scratch = tmp_path / ("job-scratch-" * 8) / "tmp"
    scratch.mkdir(parents=True)
    (tmp_path / "facts.csv").write_text("question,answer\nWho leads the choir?,Velmis\nWhen was it founded?,1874\n")
    (tmp_path / "grid.yaml").write_text("notebook: train\nfixed: {method: sft, model: lab-s, suite: recall, n: 2, max_new_tokens: 4, epochs: 1, batch: 100}\n"
                                        "axes: {seed: [0]}\nresources: {minutes: 5}\n")
    env = os.environ | GROUP | SETTINGS | dict(TMPDIR=str(scratch), JUPYTER_PATH=str(tmp_path / "other"), MIXSD_RUNS=str(tmp_path / "runs"))
    code = "import sys; from mixsd_nb.console import main; sys.exit(main(*sys.argv[1:]))"
    def call(*words): return subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    swept = call("sweep", "run", "grid.yaml", "--workers", "1")
    assert swept.returncode == 0 and "1 done" in swept.stdout, swept.stdout + swept.stderr
    injected = call("inject", "facts.csv", "--model", "lab-s", "--method", "sft", "--suite", "recall", "--n", "2", "--epochs", "2", "--batch", "2")
    assert injected.returncode == 0 and "not stored" not in injected.stderr and [*(tmp_path / "runs").glob("inject-*/inject.ipynb")]
