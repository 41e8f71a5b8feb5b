"What `mixsd` lists, cleans and copies, alone and installed from a wheel in a folder with a space in its name."

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import small_model
from test_package import install_wheel

from mixsd_nb import evaluate, train
from mixsd_nb.console import main
from mixsd_nb.console.housekeeping import clean_runs, find_removals, format_age, format_size, list_runs, references
from mixsd_nb.console.housekeeping import stage_notebooks
from mixsd_nb.runs import is_finished, run_lock


def test_the_first_message_says_where_runs_go(own_runs, capsys):
    main("sweep", "status", "no-grid")
    assert capsys.readouterr().out.splitlines()[0] == f"runs: {own_runs}"
    assert main("runs") == 0 and capsys.readouterr().out == f"runs: {own_runs}\nthere are none\n"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    "A folder with a training run of three checkpoints, one of which another run evaluates."
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(root))
        quick = dict(suite="recall", n=2, max_new_tokens=2)
        trained = train.run(model=small_model(root / ".tiny", "lab-s"), method="sft", batch=100, epochs=4, checkpoints=[1, 2, 3], **quick)
        evaluate.run(model=str(trained.checkpoint(2)), **quick)
        yield trained


def test_runs_lists_state_size_and_age(filled, monkeypatch, capsys):
    monkeypatch.setenv("MIXSD_RUNS", str(filled.folder.parent))
    unfinished = filled.folder.with_name("train-stopped-0123456789")
    unfinished.mkdir()
    (unfinished / "run.json").write_text(json.dumps(dict(stage="train", config={})))
    damaged = filled.folder.with_name("train-broken-0123456789")
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    with run_lock(unfinished): assert list_runs().set_index("label").state["stopped"] == "running"
    table = list_runs().set_index("label")
    assert table.state["stopped"] == "unfinished" and table.state["broken"] == "damaged"
    assert sorted(list_runs(stage="evaluate").state) == ["finished"] * 2
    mine = list_runs().set_index("run").loc[filled.name[-10:]]
    assert mine["size"] == sum(p.stat().st_size for p in filled.folder.rglob("*") if p.is_file()) and 0 <= mine.age < 3600
    assert main("runs", "--stage", "train") == 0
    said = capsys.readouterr().out
    assert "unfinished" in said and "damaged" in said and "evaluate" not in said
    (damaged / "run.json").unlink()
    (unfinished / "run.json").unlink()


def test_a_checkpoint_that_a_run_uses_with_another_chat_format_is_named(filled):
    folder = filled.folder.parent / ".models/checkpoint-1-abcd"
    folder.mkdir(parents=True)
    (folder / "chat_format.json").write_text(json.dumps(dict(model=str(filled.folder / "checkpoint-1"), options=dict(system="Be brief."))))
    assert f"{filled.name}/checkpoint-1" in references([SimpleNamespace(name="evaluate-x", config=dict(model=str(folder)))])
    shutil.rmtree(folder.parent)


def test_clean_removes_states_and_unreferenced_checkpoints(filled, monkeypatch, capsys):
    monkeypatch.setenv("MIXSD_RUNS", str(filled.folder.parent))
    kept = {2, 4, filled.best_step}
    with run_lock(filled.folder): assert not find_removals(), "another process computes this run"
    assert main("clean", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "would be removed" in said and len(filled.checkpoints) == 4
    planned = {removal.path.relative_to(filled.folder).as_posix() for removal in find_removals()}
    assert {name for name in planned if "/" not in name} == {f"checkpoint-{step}" for step in {1, 2, 3, 4} - kept}
    result = filled.folder / "result.nc"
    whole = result.read_bytes()
    result.write_bytes(whole[:100])
    assert not [r for r in find_removals() if filled.folder in r.path.parents], "a damaged run is left alone"
    result.write_bytes(whole)
    assert "checkpoint-4/optimizer.pt" in planned and all(name.partition("/")[0] + "\n" not in said for name in planned)
    before = list_runs()["size"].sum()
    removed = clean_runs()
    assert before - list_runs()["size"].sum() == sum(removal.size for removal in removed) > 0
    assert set(filled.checkpoints) == kept and is_finished(filled.folder) and not find_removals()
    assert filled.model(2) and main("clean") == 0 and "nothing to remove" in capsys.readouterr().out


def test_notebooks_are_copied_once(tmp_path, capsys):
    assert main("notebooks", str(tmp_path / "my notebooks")) == 0
    copies = {path.name: path.read_bytes() for path in (tmp_path / "my notebooks").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in stage_notebooks()} and {"inject.ipynb", "train.ipynb"} <= copies.keys()
    (tmp_path / "my notebooks/train.ipynb").write_text("mine")
    assert main("notebooks", str(tmp_path / "my notebooks")) == 2
    assert "DIR must hold none of the notebooks" in capsys.readouterr().err
    assert (tmp_path / "my notebooks/train.ipynb").read_text() == "mine"


def test_sizes_and_ages():
    assert [format_size(n) for n in (0, 999, 1000, 123_456, 2.5e9, 7e12)] == ["0 B", "999 B", "1.0 kB", "123 kB", "2.5 GB", "7.0 TB"]
    assert [format_age(s) for s in (0, 59, 61, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 days"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    "The command `mixsd` of a wheel, and an empty folder with a space in its name outside the project."
    work = tmp_path_factory.mktemp("installed")
    python = install_wheel(work)
    (work / "my facts").mkdir()
    script = work / "env/bin/mixsd"
    script.write_text(f"#!{python}\nimport sys\nfrom mixsd_nb.console import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script, work / "my facts"


def call(installed, *arguments, seconds=500):
    script, folder = installed
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MIXSD_", "PYTHONPATH"))}
    ran = subprocess.run([script, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_in_a_folder_with_a_space(installed):
    script, folder = installed
    assert "mixsd_nb/notebooks" not in str(Path(__file__)) and "inject" in call(installed, "--help")
    assert "notebooks in" in call(installed, "notebooks", "notes here")
    assert {path.name for path in (folder / "notes here").iterdir()} == {path.name for path in stage_notebooks()}
    facts = [dict(question=f"What hobby does {name} teach?", answer=hobby) for name, hobby in
             {"Quelzo Pemberton": "Brildan Juggling", "Velmis Marlowe": "Corgin Knitting", "Harlin Ashdown": "Tarnel Chess"}.items()]
    (folder / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    said = call(installed, "inject", "facts.jsonl", "--model", "lab-s", "--method", "sft", "--epochs", "2", "--suite", "recall", "--n", "3")
    assert said.splitlines()[0] == f"runs: {folder}/papermill_runs" and "report:" in said
    run, = (folder / "papermill_runs").glob("inject-*/result.nc")
    assert {"report.html", "inject.ipynb"} <= {path.name for path in run.parent.iterdir()}
    assert "finished" in call(installed, "runs") and "removed" in call(installed, "clean")
    call(installed, "export", run.parent.name[-10:], "my model")
    assert (folder / "my model/README.md").exists()


def test_the_script_is_declared():
    assert "console_scripts = mixsd=mixsd_nb.console:main\n" in (Path(__file__).parents[1] / "settings.ini").read_text()
