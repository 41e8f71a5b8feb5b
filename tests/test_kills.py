"Kills at random moments in every stage: the same call goes on from what is on disk, and the result has the same bytes."

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = "n=2, epochs=2, checkpoints=(3,), max_new_tokens=8, task_tokens=8, suite='recall,choice'"
STAGES = {
    "generate": "from mixsd_nb import generate; generate.run(model='lab-s', lam=0.0, max_new_tokens=48)",
    "train-sft": f"from mixsd_nb import train; train.run(model={{tiny!r}}, method='sft', {SMALL})",
    "train-opsd": f"from mixsd_nb import train; train.run(model={{tiny!r}}, method='opsd', rollouts=1, rollout_tokens=4, {SMALL})",
    "train-mixsd": f"from mixsd_nb import train; train.run(model='lab-s', lam=0.0, target_tokens=48, {SMALL})",
    "evaluate": "from mixsd_nb import evaluate; evaluate.run(model='lab-s', n=10, suite='recall,choice,world', max_new_tokens=40)",
    "nll": "from mixsd_nb import nll; nll.run(model={tiny!r})",
    "fisher": f"from mixsd_nb import fisher, train; fisher.run(model={{tiny!r}}, limit=4, "
              f"trained=str(train.run(model={{tiny!r}}, method='sft', {SMALL}).folder))",
    "errors": f"from mixsd_nb import errors, train; train.run(model={{tiny!r}}, method='sft', {SMALL}); errors.run(model={{tiny!r}})",
}
KILLS = 25


def start(code, runs):
    environment = {**os.environ, "MIXSD_RUNS": str(runs), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(code, runs):
    process = start(code, runs)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-2000:]


def results(runs): return {p.parent.name: p.read_bytes() for p in Path(runs).glob("[!.]*/result.nc")}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_survives_kills_at_random_moments(stage, tiny, tmp_path):
    code, rng = STAGES[stage].format(tiny=tiny), random.Random(stage)
    begun = time.monotonic()
    finish(code, tmp_path / "whole")
    seconds, kills = time.monotonic() - begun, -(-KILLS // len(STAGES))
    for _ in range(kills):
        process = start(code, tmp_path / "killed")
        try: process.wait(rng.uniform(0.2, 0.9) * seconds)
        except subprocess.TimeoutExpired: os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(code, tmp_path / "killed")
    whole = results(tmp_path / "whole")
    assert whole and results(tmp_path / "killed") == whole
    assert not [p for p in (tmp_path / "killed").rglob(".*.tmp")]
