"Names of other tools are answered with ours, and what an error tells to write can be copied from where it is read."

import ast
import re
import shlex

import pytest

from mixsd_nb import train
from mixsd_nb.console import main
from mixsd_nb.inject import InjectConfig
from mixsd_nb.runs import ParameterError, make_config
from mixsd_nb.runs.command_line import make_configs
from mixsd_nb.runs.config import FOREIGN_NAMES, on_command_line, spell
from mixsd_nb.train import TrainConfig


def test_names_of_other_tools_are_answered_with_what_exists(own_runs, capsys):
    for name in FOREIGN_NAMES: check_answer(name, capsys)


def check_answer(name, capsys):
    "Typed as an option, for papermill, and in Python; never by the list of all names."
    answers = []
    for words in ([f"--{name.replace('_', '-')}", "1"], ["-p", name, "1"]):
        assert main("train", *words) == 2
        answers.append(capsys.readouterr().err)
    assert answers[0] == answers[1] and answers[0].count("\n") == 1 and "known are" not in answers[0]
    options = {option.replace("-", "_") for option in re.findall(r"(?<!RUN DIR )--([a-z][\w-]*)", answers[0].partition("; ")[2])}
    assert options <= {*TrainConfig.model_fields, "force"} and options <= {*InjectConfig.model_fields, "force"}
    if name == "overwrite_output_dir": return  # in Python an argument of `run`
    with pytest.raises(ParameterError) as caught: train.run(**{name: 1})
    assert str(caught.value).startswith(f"unknown parameter {name}; ") and "known are" not in str(caught.value)
    if isinstance(answer := FOREIGN_NAMES[name], dict): assert make_config(TrainConfig, **answer)


def test_what_is_spelled_can_be_copied(own_runs, tmp_path, monkeypatch, capsys):
    "Python reads it, a shell splits it, and the option that an error prints is then taken."
    options = dict(columns={"question": "Wer's?", "answer": "\\"}, strict=False)
    assert ast.literal_eval(spell(dataset_options=options).partition("=")[2]) == options
    with on_command_line(): words = shlex.split(spell(dataset_options=options, seed=3))
    config, = make_configs(InjectConfig, dict(seed=words[3]))
    assert words[::2] == ["--dataset-options", "--seed"] and config.seed == 3 and spell(seed=3) == "seed=3"
    (tmp_path / "f.csv").write_text("Frage;Antwort;Quelle\nWer leitet den Chor?;Ana Brisk;a\nWo steht die Mühle?;Torvik;b\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main("plan", "train", "--dataset", "f.csv", "--model", "lab-s", "--method", "sft", "--suite", "recall") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "--dataset-options" in told
    assert main("plan", "train", "--dataset", "f.csv", "--model", "lab-s", "--method", "sft", "--suite", "recall", *shlex.split(told.partition(", write ")[2])) == 0
