"An exported folder answers alike elsewhere, and neither it, nor its card, nor its upload shows what it should not."

import getpass
import shutil
import stat
from pathlib import Path

import huggingface_hub
import pandas as pd
import pytest
import torch
from families import POSITIONS, list_families, small_config
from helpers import lines, small_model
from hypothesis import given, strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mixsd_nb import train
from mixsd_nb.analysis.curvature import open_tensors
from mixsd_nb.corpora.prompts import apply_template
from mixsd_nb.diff import pair_models
from mixsd_nb.models import load_base, load_tokenizer, whole_model
from mixsd_nb.models.chat import describe_template, settle_template, wrap_template
from mixsd_nb.models.tiny import random_model
from mixsd_nb.reports.export import export_model, main, push_folder
from mixsd_nb.reports.export import describe_model, hub_id, parameter_rows
from mixsd_nb.reports.export import _rewrite_config, _save_model, hide_folders, older_positions, oldest_release, save_portable
from mixsd_nb.runs import ParameterError, read_json, write_json

QUICK = dict(method="sft", suite="recall", n=4, max_new_tokens=4, batch=100, epochs=1, checkpoints=(), preset="lab")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A folder of runs, and everything in it."
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(folder / "runs"))
        yield folder


@pytest.fixture(scope="module")
def run(root):
    "A training of lab-s."
    return train.run(model="lab-s", **QUICK)


@pytest.fixture(scope="module")
def private(root):
    """A training whose every file lies in a private folder: the base, whose own settings name folders of other machines too and ask for
    sampling, the chat template, the facts and the benchmark."""
    folder = root / "private"
    small_model(folder / "base", "lab-s")
    config, settings = (folder / "base" / f"{name}.json" for name in ("config", "tokenizer_config"))
    write_json(config, read_json(config) | dict(_name_or_path="/home/ann/secret/base", teacher="/home/ann/secret/teacher", note="a/b",
                                                auto_map={"AutoConfig": "secret--code.Config"}))
    write_json(settings, read_json(settings) | dict(tokenizer_file="/home/ann/secret/tokenizer.json", name_or_path="../secret/base",
                                                    special_tokens_map_file="/home/ann/secret/special_tokens_map.json"))
    write_json(folder / "base" / "generation_config.json", dict(do_sample=True, temperature=1.5, repetition_penalty=1.3, eos_token_id=2))
    (folder / "t.jinja").write_text(load_tokenizer("lab-s").chat_template + "\n")
    (folder / "facts.jsonl").write_text(lines(*[dict(question=f"Who keeps lamp {k}?", answer=name) for k, name in enumerate(("Ivo", "Una", "Oda", "Eli"))]))
    (folder / "either | or.jsonl").write_text(lines(dict(prompt="Say Ivo", answer="Ivo", grading="contains")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return train.run(**QUICK | dict(batch=4), model="private/base", dataset="private/facts.jsonl", model_options={
            "template": "private/t.jinja", "system": "Answer yes | no."})


def card(folder): return (folder / "README.md").read_text()


# J1: positions, names of classes and of data types


def test_a_base_whose_positions_have_another_period(run, tmp_path):
    out = export_model(run, tmp_path / "out")
    config, settings = (read_json(out / f"{name}.json") for name in ("config", "tokenizer_config"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6 and config["rope_scaling"] is None
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and config["use_cache"] is True
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert settings["chat_template"] == (out / "chat_template.jinja").read_text()
    assert "transformers 4.57 and later" in card(out).partition("## Method")[0]
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {stat.S_IMODE((out / "config.json").stat().st_mode)}


def without_factor(rope):
    "Positions without what follows from the rest: the factor of `longrope`, and a second name of the form."
    if "rope_type" not in rope: return {kind: without_factor(one) for kind, one in rope.items()}
    return {name: value for name, value in rope.items() if name != "type" and (name != "factor" or rope["rope_type"] != "longrope")}


def test_every_family_is_read_by_release_5_as_before(tmp_path):
    "The older names change nothing there; a family that has none for its positions is said to need a newer release."
    seen, newer = 0, set()
    for family in list_families():
        for form in POSITIONS:
            try: config = small_config(family, form)
            except Exception: continue  # transformers refuses such positions
            config.save_pretrained(tmp_path)
            plain = AutoConfig.from_pretrained(tmp_path)
            _rewrite_config(tmp_path / "config.json", config.attribute_map)
            written, again = read_json(tmp_path / "config.json"), AutoConfig.from_pretrained(tmp_path)
            assert without_factor(again.rope_parameters) == without_factor(plain.rope_parameters), (family, form)
            if older_positions(written) is None: newer.add((family, form))
            else: assert "rope_theta" in written and (form == "default") == (written["rope_scaling"] is None), (family, form)
            assert all(written[other] == written[name] for other, name in config.attribute_map.items() if name in written)
            seen += 1
    assert seen > 400 and ("qwen3", "yarn") not in newer and ("olmo", "yarn") in newer


NUMBER = st.floats(1, 100, allow_nan=False)
SCALED = st.one_of(
    st.just(dict(rope_type="default")), st.builds(lambda f: dict(rope_type="linear", factor=f), NUMBER),
    st.builds(lambda f, n: dict(rope_type="yarn", factor=f, original_max_position_embeddings=n), NUMBER, st.integers(1, 9999)),
    st.builds(lambda f, low: dict(rope_type="llama3", factor=f, low_freq_factor=low, high_freq_factor=4 * low, original_max_position_embeddings=8), NUMBER, NUMBER))


@given(rope=SCALED, period=st.floats(1e3, 1e8), share=st.one_of(st.none(), st.floats(0.1, 1)))
def test_positions_under_older_names_are_the_same_positions(rope, period, share):
    "What an older release reads, put together again, is what there was."
    whole = rope | dict(rope_theta=period) | ({} if share is None else dict(partial_rotary_factor=share))
    found = older_positions(dict(model_type="llama", max_position_embeddings=9999, rope_parameters=whole))
    scaling = found.pop("rope_scaling") or dict(rope_type="default")
    assert scaling | found == whole


def test_a_number_of_experts_has_every_name(tmp_path):
    config = CONFIG_MAPPING["qwen3_moe"](num_experts=4)
    config.save_pretrained(tmp_path)
    _rewrite_config(tmp_path / "config.json", config.attribute_map)
    assert read_json(tmp_path / "config.json")["num_experts"] == 4


def test_positions_that_older_releases_cannot_express(tmp_path):
    config = small_config("olmo2", "yarn")
    config.save_pretrained(tmp_path)
    _rewrite_config(tmp_path / "config.json", config.attribute_map)
    assert "rope_theta" not in read_json(tmp_path / "config.json") and oldest_release(tmp_path) == "5.5"


def test_further_special_tokens_have_their_older_name(tmp_path):
    tokenizer = load_tokenizer("lab-s")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|aside|>"]})
    model = random_model(tokenizer, layers=1)
    save_portable(model, tokenizer, [2], tmp_path)
    settings = read_json(tmp_path / "tokenizer_config.json")
    assert settings["additional_special_tokens"] == ["<|aside|>"] and "extra_special_tokens" not in settings
    text = "a <|aside|> b<|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]


# J2: names without folders


def test_nothing_that_is_exported_names_a_folder(private, root, tmp_path, monkeypatch):
    "Neither one of this machine, nor one of another that the base model's files name."
    monkeypatch.chdir(tmp_path)
    out = export_model(private, "out")
    words = ["secret", "private", "/runs", "ann/", str(root), str(Path.home()) + "/", f"/{getpass.getuser()}/"]
    for path in out.iterdir():
        text = path.read_bytes()[:200_000].decode(errors="replace")
        assert not [word for word in words if word in text], path.name
    rows = [line for line in card(out).splitlines() if line.startswith(("| model |", "| model_options"))]
    assert sorted(rows) == ["| model | base |", "| model_options | {'template': 't.jinja', 'system': 'Answer yes \\| no.'} |"]
    assert "base_model" not in card(out) and read_json(out / "config.json")["note"] == "a/b"
    AutoModelForCausalLM.from_pretrained(out)


FOLDERS = st.lists(st.sampled_from(["folder-q", "folder.q", "folder_q2", "FolderQ"]), min_size=1, max_size=4)
ROOTS = st.sampled_from(["/", "~/", "~ann/folderq/", "../", "./", "file:///", "C:\\", "D:/", ""])
NAMES = st.sampled_from(["chat.jinja", "facts.jsonl", "rows.parquet", "facts.csv.gz", "model.safetensors"])


@given(start=ROOTS, folders=FOLDERS, name=NAMES, frame=st.sampled_from(["{}", "recall,{}", "{},world", "Read {} first.", "({})", "see\n{}"]))
def test_a_path_loses_its_folders_wherever_it_stands(start, folders, name, frame):
    joint = "\\" if start.endswith("\\") else "/"
    path = start + joint.join([*folders, name])
    if frame not in ("{}", "recall,{}", "{},world") and start in ("", "C:\\", "file:///"): return  # in a sentence these may be words
    for value in (frame.format(path), {"a": [frame.format(path)]}):
        shown = str(hide_folders(value))
        assert "folder" not in shown.lower() and name in shown, shown


def test_a_folder_whose_name_has_a_number_keeps_it():
    assert [hub_id(name) for name in ("/models/Qwen3-0.6B", "/models/Llama-3.2-1B", "/hub/models--Qwen--Qwen3-0.6B/snapshots/1", "x/facts.jsonl")] == [
        "Qwen3-0.6B", "Llama-3.2-1B", "Qwen/Qwen3-0.6B", "facts"]


# J3, J5: the upload


class FakeHub:
    "In place of `HfApi`: what is done is in `done`; `fails` names the calls that fail."
    done, fails, private, uploaded = [], (), False, None

    def __init__(self, **_): pass

    def _call(self, name, note):
        if name in FakeHub.fails: raise OSError("401 Unauthorized\nmore")
        FakeHub.done.append((name, note))

    def create_repo(self, name, **options):
        self._call("create_repo", options.get("private"))
        return name

    def repo_info(self, *_, **__):
        self._call("repo_info", "")
        return type("Info", (), dict(private=FakeHub.private))()

    def upload_folder(self, folder_path, **_):
        self._call("upload_folder", card(Path(folder_path)) if (Path(folder_path) / "README.md").exists() else "")


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    FakeHub.done, FakeHub.fails, FakeHub.private = [], (), False
    return FakeHub


def test_the_owner_of_a_public_repository_decides(hub, tmp_path):
    push_folder(tmp_path, "team/m")
    assert [call for call, _ in hub.done] == ["create_repo", "upload_folder"] and hub.done[0][1] is None


@pytest.mark.parametrize("state", [False, None])
def test_nothing_private_goes_where_others_see_it(hub, tmp_path, state):
    hub.private = state
    with pytest.raises(OSError, match="team/m is on the hub already and not private, so nothing was uploaded"): push_folder(tmp_path, "team/m", True)
    assert hub.done == [("create_repo", True), ("repo_info", "")]


@pytest.mark.parametrize("state, fails", [(True, ()), (True, ("repo_info",))])
def test_a_private_repository_is_asked_first(hub, tmp_path, state, fails):
    hub.private, hub.fails = state, fails
    if not fails: push_folder(tmp_path, "team/m", True)
    else:
        with pytest.raises(OSError, match="401 Unauthorized"): push_folder(tmp_path, "team/m", True)
    assert [call for call, _ in hub.done] == (["create_repo"] if fails else ["create_repo", "repo_info", "upload_folder"])


def test_private_without_a_push(run, tmp_path, capsys):
    assert main(run.name, str(tmp_path / "out"), "--private") == 2 and not (tmp_path / "out").exists()
    assert "private must be given with push" in capsys.readouterr().err


@pytest.mark.parametrize("fails", ["create_repo", "upload_folder"])
def test_a_push_that_failed_is_repeated(run, hub, fails, tmp_path, monkeypatch, capsys):
    "The same command pushes the folder; under another name the card has that name, and what was added to it stays."
    monkeypatch.chdir(tmp_path)
    hub.fails = (fails,)
    assert main(run.name, "out", "--push", "team/m") != 0 and "the same command pushes the folder" in capsys.readouterr().err
    hub.fails = ()
    weights = Path("out/model.safetensors").stat().st_mtime_ns
    Path("out/README.md").write_text(card(Path("out")) + "\nThanks to all.\n")
    assert main(run.name, "out", "--push", "team/m") == 0 and 'pipeline("text-generation", "team/m")' in hub.done[-1][1]
    assert main(run.name, "out", "--push", "me/other") == 0
    assert 'pipeline("text-generation", "me/other")' in hub.done[-1][1] and 'LLM("me/other")' in hub.done[-1][1] and "Thanks" in hub.done[-1][1]
    assert Path("out/model.safetensors").stat().st_mtime_ns == weights, "it is not written again"


def test_a_folder_of_another_checkpoint_is_not_pushed(run, hub, tmp_path, capsys):
    other = export_model(run, tmp_path / "base", step=0)
    shutil.copytree(other, tmp_path / "cut", ignore=shutil.ignore_patterns("*.safetensors"))
    for folder in ("base", "cut", ""):
        assert main(run.name, str(tmp_path / folder), "--push", "team/m") == 2
    assert not hub.done and "DIR must be a new or an empty folder, or with --push the export of the same checkpoint" in capsys.readouterr().err


# J4: the base is gone


def test_a_checkpoint_is_exported_without_its_base(root, tmp_path):
    folder = small_model(root / "gone", "lab-s")
    AutoModelForCausalLM.from_pretrained(folder, dtype="float16").save_pretrained(folder)
    run = train.run(model=folder, **QUICK)
    shutil.rmtree(folder)
    out = export_model(run.name, tmp_path / "out")
    assert read_json(out / "config.json")["dtype"] == "float16" and "| model | gone |" in card(out)
    record = read_json(run.folder / "run.json")
    write_json(run.folder / "run.json", {name: value for name, value in record.items() if name != "base_dtype"})  # as of older releases
    assert read_json(export_model(run.name, tmp_path / "older") / "config.json")["dtype"] == "float32"
    with pytest.raises(ValueError, match="model must be"): export_model(run.name, tmp_path / "base", step=0)
    assert not (tmp_path / "base").exists()


# J6: decoding


def test_settings_of_sampling_are_left_out(private, tmp_path):
    out = export_model(private, tmp_path / "out")
    assert {*read_json(out / "generation_config.json")} <= {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    assert "greedy" in card(out) and "do_sample=False" in card(out) and "temperature=0" in card(out)
    assert "The answers were decoded greedily." in card(out)


SETTINGS = dict(do_sample=True, temperature=0.2, top_p=0.5, top_k=3, min_p=0.1, typical_p=0.9, repetition_penalty=1.2, no_repeat_ngram_size=2, num_beams=3,
                bad_words_ids=[[5]], suppress_tokens=[7], forced_eos_token_id=2, min_new_tokens=3, max_new_tokens=1, max_length=9, guidance_scale=1.5)


@given(names=st.sets(st.sampled_from(sorted(SETTINGS))))
def test_generation_has_tokens_alone(names):
    from transformers import GenerationConfig
    from mixsd_nb.reports.export import plain_generation
    found = plain_generation(GenerationConfig(pad_token_id=0, **{name: SETTINGS[name] for name in names}), [2, 5])
    assert found.to_diff_dict().keys() <= {"eos_token_id", "pad_token_id", "transformers_version"} and found.eos_token_id == [2, 5]


# J7, J8: tables


def cells(line):
    "The cells of a row as Markdown reads them: a bar after an odd number of backslashes ends none."
    found, text = [], iter(line.strip().strip("|"))
    part = ""
    for sign in text:
        if sign == "\\": part += sign + next(text, "")
        elif sign == "|": found, part = [*found, part], ""
        else: part += sign
    return [*found, part]


@given(text=st.text(st.sampled_from("a|\\<\n `'\"")))
def test_any_text_is_one_cell(text):
    rows = parameter_rows(dict(lr=1, value=f"x{text}", options=dict(system=text)))
    assert len(rows) == 5 and all(len(cells(row)) == 2 and "\n" not in row for row in rows) and not any("<" in row.replace("\\<", "") for row in rows)


def test_a_bar_in_the_name_of_a_benchmark(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    Path("either | or.jsonl").write_text(lines(dict(prompt="Say Ivo", answer="Ivo", grading="contains")))
    out = export_model(train.run(model="lab-s", **QUICK | dict(suite="recall,either | or.jsonl")), tmp_path / "out")
    assert [line for line in card(out).splitlines() if line.startswith("| either")][0].startswith("| either \\| or | own | 1 |")
    assert "| suite | recall,either \\| or.jsonl |" in card(out)
    assert huggingface_hub.ModelCard.load(out / "README.md").data.eval_results[-2].dataset_name == "either | or"


def test_an_unfinished_export_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mixsd_nb.reports.export.write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError): export_model(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ParameterError, match="DIR must be"): export_model(run, Path(__file__))


# What a template writes elsewhere, and further files of a tokenizer.


BODY = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
HYBRID = {"off if told": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}", "on by default": "{% if enable_thinking | default(true) %}<think>{% endif %}",
          "on unless defined": "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}{% if enable_thinking %}<think>{% endif %}",
          "date": "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today is {{ date_string }}", "day": "{% set day = strftime_now(\"%Y-%m-%d\") %}{{ day }}"}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", HYBRID)
def test_a_template_writes_elsewhere_what_it_wrote_in_the_measurement(kind, thinking):
    tokenizer, turns = load_tokenizer("lab-s"), [dict(role="user", content="Who?")]
    measured = tokenizer.chat_template = wrap_template(BODY + HYBRID[kind], thinking=thinking)
    expected, asked = apply_template(tokenizer, turns, add_generation_prompt=True), apply_template(tokenizer, turns, enable_thinking=True)
    tokenizer.chat_template = settle_template(measured)
    write = lambda **options: tokenizer.apply_chat_template(turns, tokenize=False, **options)
    assert write(add_generation_prompt=True) == write(add_generation_prompt=True, enable_thinking=None) == expected
    assert write(enable_thinking=True) == asked == apply_template(tokenizer, turns, enable_thinking=True)
    assert ("thinks before" if thinking else "without thinking") in describe_template(tokenizer.chat_template) or "think" not in HYBRID[kind]
    assert settle_template(BODY) == BODY and describe_template(BODY) == ""


def test_all_files_of_a_tokenizer_are_exported_and_no_others(tmp_path):
    small_model(tmp_path / "base", "lab-s")
    for name in ("tokenizer.model", "vocab.txt", "notes.txt", "training_args.bin"): (tmp_path / "base" / name).write_text("x")
    _save_model(str(tmp_path / "base"), str(tmp_path / "base"), tmp_path / "out")
    assert [(tmp_path / "out" / name).exists() for name in ("tokenizer.model", "vocab.txt", "notes.txt", "training_args.bin")] == [True, True, False, False]
    _save_model(str(tmp_path / "base"), str(tmp_path / "gone"), tmp_path / "other")


def test_adapters_are_exported_merged_or_alone_and_every_command_takes_their_checkpoint(strong, own_runs, capsys):
    "Plain transformers and plain PEFT compute what the checkpoint does; neither folder names a folder of this machine."
    peft = pytest.importorskip("peft")
    run = train.run(model=strong, lora=2, **QUICK)
    checkpoint, ids = run.source(1), torch.tensor([list(range(5, 25))])
    assert main(run.name, str(own_runs / "whole")) == 0 and main(run.name, str(own_runs / "thin"), "--adapter") == 0
    assert capsys.readouterr().out.startswith("model: ")
    base = load_base(strong)[0]
    with torch.inference_mode():
        before, *others = (model(ids).logits for model in (
            base, load_base(checkpoint)[0], AutoModelForCausalLM.from_pretrained(own_runs / "whole", dtype="float32"),
            peft.PeftModel.from_pretrained(load_base(strong)[0], own_runs / "thin"), AutoModelForCausalLM.from_pretrained(whole_model(checkpoint, "float32"))))
    assert not torch.allclose(before, others[0], atol=1e-3) and all(torch.allclose(others[0], other, atol=1e-3) for other in others[1:])
    card, settings = (own_runs / "thin/README.md").read_text(), read_json(own_runs / "thin/adapter_config.json")
    assert "library_name: peft" in card and "PeftModel" in card and "/" not in settings["base_model_name_or_path"] and settings["lora_alpha"] == 32
    assert {path.suffix for path in (own_runs / "thin").iterdir() if path.stat().st_size > 10**6} == set()
    assert isinstance(run.chat("Who?", max_new_tokens=2), str) and {*open_tensors(checkpoint)} == {*open_tensors(strong)}
    assert pair_models(checkpoint) == (strong, checkpoint)
    with pytest.raises(ParameterError, match="trained all weights"): export_model(train.run(model=strong, **QUICK), own_runs / "none", adapter=True)


def test_a_card_links_to_what_the_hub_has_and_to_nothing_else():
    scores = pd.DataFrame(dict(after=[1.0]), index=["recall"])
    linked = describe_model("Qwen/Qwen3-8B", "owner/facts", "SFT", scores).to_dict()
    assert (linked["base_model"], linked["datasets"], linked["base_model_relation"]) == ("Qwen/Qwen3-8B", ["owner/facts"], "finetune")
    own = describe_model("lab-m", "facts.jsonl", "SFT", scores).to_dict()
    assert not {"base_model", "datasets", "base_model_relation"} & {*own} and own["model-index"][0]["name"] == "lab-m-facts"
