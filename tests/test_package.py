"""The wheel of `pip install mixsd_nb` in a fresh environment: it imports quickly and contains the lab model."""

import hashlib
import importlib.util
import json
import re
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


ADDRESS = "https://example.org/somebody/mixsd_nb"


def build_wheel(work):
    "The wheel of a repository with an address, built from a copy of the tree, because setuptools leaves build/ behind and reuses its files."
    copy = work / "source"
    copy.mkdir()
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    (copy / "settings.ini").write_text(re.sub("^git_url =.*", f"git_url = {ADDRESS}.git", settings, flags=re.MULTILINE), encoding="utf-8")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    pip("wheel", copy, "--no-deps", *isolation, "-w", work)
    return next(work.glob("*.whl"))


def install_wheel(work):
    "Make a new environment in a folder that has the wheel, and the dependencies of this environment; returns its Python."
    wheel = build_wheel(work)
    venv.create(work / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": work / "env"}))
    pip("install", wheel, "--no-deps", "--target", site)
    # Only the folder itself is added. Its .pth files, which contain the editable install, are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return work / "env/bin/python"


@pytest.fixture(scope="module")
def python(tmp_path_factory): return install_wheel(tmp_path_factory.mktemp("package"))


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


def test_the_lab_models_and_the_grids_ship(python):
    "Byte by byte; test_models.py loads the models."
    code = """import hashlib
from mixsd_nb.cluster import list_grids
from mixsd_nb.models.lab import lab_folder
answer = list(list_grids()), {f"{s}/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for s in ("lab-s", "lab-m") for p in lab_folder(s).iterdir()}"""
    grids, files = ask(python, code)
    shipped = {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in ROOT.glob("mixsd_nb/data/lab-[sm]/*")}
    assert "knowledge-eval-small-lab" in grids and files == shipped and "lab-m/model.safetensors" in files


def test_the_page_of_an_index_leads_to_the_repository(python):
    "Every link and picture of README is an address of a file in the repository; so are the project's URLs."
    metadata = ask(python, "from importlib.metadata import metadata; answer = metadata('mixsd_nb').json")
    links = re.findall(r"\]\(([^)\s]+)\)", metadata["description"])
    own = [link.removeprefix(f"{ADDRESS}/") for link in links if link.startswith(ADDRESS)]
    assert len(own) > 10 and all(link.startswith(("https://", "#")) for link in links)
    for kind, branch, path in (link.partition("#")[0].split("/", 2) for link in own):
        assert (ROOT / path).is_file() and branch == "main" and kind == ("raw" if path.endswith(".png") else "blob")
    urls = dict(url.split(", ") for url in metadata["project_url"])
    assert urls["Source"] == ADDRESS and urls["Guides"] == f"{ADDRESS}/blob/main/nbs/guides/index.md"
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12)} <= {*metadata["classifier"]} and "explore" in metadata["provides_extra"]


def test_without_locks_of_files_the_import_is_one_sentence():
    "On Windows there is no fcntl, and much else is missing too."
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['fcntl'] = None; import mixsd_nb"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("ImportError: mixsd_nb needs Linux or macOS; on Windows")
