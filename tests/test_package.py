"""The wheel of `pip install mixsd_nb` in a fresh environment: it imports quickly and contains the lab model."""

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["settings.ini", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "mixsd_nb", "nbs"]


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "-qq", *map(str, arguments)], check=True)


def build_wheel(work):
    "The wheel, built from a copy of the tree, because setuptools leaves build/ behind and reuses its files."
    copy = work / "source"
    copy.mkdir()
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    pip("wheel", copy, "--no-deps", *isolation, "-w", work)
    return next(work.glob("*.whl"))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    "The Python of a new environment that has the wheel, and the dependencies of this environment."
    work = tmp_path_factory.mktemp("package")
    wheel = build_wheel(work)
    venv.create(work / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": work / "env"}))
    pip("install", wheel, "--no-deps", "--target", site)
    # Only the folder itself is added. Its .pth files, which contain the editable install, are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return work / "env/bin/python"


def ask(python, code):
    "The value that `code` puts into `answer`, in a process that starts outside the project."
    script = f"{code}\nimport json; print(json.dumps(answer))"
    ran = subprocess.run([python, "-I", "-c", script], check=False, cwd=python.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_import_is_quick_and_light(python):
    code = """import sys, time
start = time.process_time()
import mixsd_nb
seconds = time.process_time() - start
from mixsd_nb import corpora, find_runs, load_corpus, methods, models, benchmarks, results
answer = [seconds, mixsd_nb.__file__, 'torch' in sys.modules]"""
    seconds, file, torch_loaded = ask(python, code)
    assert python.parents[1] in Path(file).parents, f"not the installed package but {file}"
    assert seconds < 1
    assert not torch_loaded


@pytest.mark.skipif(not (ROOT / "mixsd_nb/data/lab-m").exists(), reason="the lab model's weights are not made yet")
def test_lab_model_loads(python):
    code = """from mixsd_nb.models import load_base
model, tokenizer = load_base('lab-m')
answer = [model.config.vocab_size, len(tokenizer)]"""
    vocabulary, tokens = ask(python, code)
    assert 0 < tokens <= vocabulary


def test_grids_ship(python):
    assert "knowledge-eval-small-lab" in ask(python, "from mixsd_nb.cluster import list_grids\nanswer = list(list_grids())")
