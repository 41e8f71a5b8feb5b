"What a run gives back: its table, picture, checkpoints, responses, a conversation, and an exported model with a card, which can be pushed to the hub."

import base64
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import matplotlib
import pytest
import torch
import yaml
from helpers import small_model

from mixsd_nb import evaluate, train
from mixsd_nb.console.chat import main as chat
from mixsd_nb.models import load_base
from mixsd_nb.reports.export import export_model, main, push_folder
from mixsd_nb.reports.finished import FinishedRun, ModelRun
from mixsd_nb.reports.export import LOADING
from mixsd_nb.runs import ParameterError, open_run, read_json, write_json

matplotlib.use("Agg")
QUICK = dict(dataset="kgfact-small", suite="recall", n=4, max_new_tokens=4, batch=100, epochs=2, checkpoints=[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "The runs of SFT and of the base model on a tiny model, and the folder that holds them."
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(root))
        model = small_model(root / "tiny", "lab-s")
        yield train.run(model=model, method="sft", **QUICK), evaluate.run(model=model, suite="recall", n=4, max_new_tokens=4)


def test_a_run_says_where_it_is_and_what_it_found(runs):
    trained, measured = runs
    assert isinstance(trained, ModelRun) and trained.path.is_absolute() and (trained.path / "result.nc").is_file()
    table = trained.table()
    assert list(table) == ["step 0", "step 1", "step 2", "N"] and set(table.index) >= {"recall", "validation"}
    assert table.N["recall"] == 4
    assert measured.table().loc["recall", "n"] == 4
    assert len(trained.plot().axes) == 2 and len(measured.plot().axes) == 1


def test_the_step_is_the_papers_unless_it_is_given(runs):
    trained, measured = runs
    assert trained.best_step in (1, 2) and measured.best_step == 0
    assert trained.checkpoint(2) == trained.checkpoints[2] and trained.checkpoint().name == f"checkpoint-{trained.best_step}"
    assert len(trained.responses()) == len(trained.responses(1)) and len(measured.responses()) == 4
    with pytest.raises(ValueError, match="step must be one of 1, 2 of train-.*, got 7"): trained.checkpoint(7)
    with pytest.raises(ValueError, match="step must be one of none"): measured.checkpoint(1)
    base, tuned = (trained.model(step)[0] for step in (0, 2))
    assert not base.lm_head.weight.equal(tuned.lm_head.weight)


def test_chat_adds_template_and_request(runs, monkeypatch):
    from mixsd_nb.models.engine import Engine
    trained, prompts = runs[0], []
    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, p, **o: prompts.append(self.tokenizer.decode(p[0])) or generate(self, p, **o))
    said = trained.chat("Who is it?", max_new_tokens=3)
    assert said == trained.chat("Who is it?", max_new_tokens=3), "a greedy reply is always the same"
    trained.chat("Who is it?", suffix=False, max_new_tokens=3)
    assert prompts[0].startswith("<|im_start|>user\nWho is it?\n\nThink step by step") and prompts[0].endswith("<|im_start|>assistant\n")
    assert "Think step by step" not in prompts[-1]


def test_the_shell_chats_with_a_run(runs, monkeypatch, capsys):
    "A question is answered alone; lines of the input are answered until an empty one, with the model before if that is asked for."
    trained, digits = runs[0], runs[0].name.rpartition("-")[2]
    assert chat(digits, "Who is it?", "--max-new-tokens", "3") == 0
    assert capsys.readouterr().out == trained.chat("Who is it?", max_new_tokens=3) + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhere?\n\nWhen?\n"))
    monkeypatch.setenv("COLUMNS", "203")
    assert chat(str(trained.path), "--both", "--max-new-tokens", "3", "--temperature", "1", "--seed", "2") == 0
    said = [[cell.strip() for cell in line.split(" | ")] for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert [row for row in said if "tiny" in row[0]] == 2 * [["tiny", f"tiny, update {trained.best_step}"]]
    options = dict(max_new_tokens=3, temperature=1.0, seed=2)
    words = lambda texts: " ".join(" ".join(texts).split())
    for k in (0, 1): assert words(row[k] for row in said if "tiny" not in row[0]) == words(trained.chat(q, (0, None)[k], **options) for q in ("Who?", "Where?"))


def test_jupyter_shows_a_run_with_links(runs, monkeypatch):
    trained, _ = runs
    monkeypatch.chdir(trained.folder)
    page = trained._repr_html_()
    assert str(trained.path) in page and "href='result.nc'" in page and "href='checkpoint-2'" in page and "recall" in page
    (trained.folder / "notes<.html").touch()
    assert "notes&lt;.html" in trained._repr_html_()
    for stage in ("<img src=x onerror=alert(1)>", "'><script>"):
        record = read_json(trained.folder / "run.json")
        write_json(trained.folder / "run.json", record | dict(stage=stage))
        page = trained._repr_html_()
        write_json(trained.folder / "run.json", record)
        assert "<img" not in page and "<script" not in page


@pytest.mark.parametrize("form", [lambda run: run.name, lambda run: run.path, lambda run: run.name.rpartition("-")[2]])
def test_a_run_is_opened_by_name_or_folder(runs, form):
    assert open_run(form(runs[0])).table().equals(runs[0].table())


def test_a_folder_that_is_no_run(runs, tmp_path):
    with pytest.raises(ParameterError, match=f"run must be the folder of a run, or its name in .* or the ten digits at its end, which `mixsd runs` lists, got {tmp_path}"): open_run(tmp_path)


def test_a_run_without_accuracies_has_a_table(runs):
    from mixsd_nb import generate
    mixed = generate.run(model=runs[0].base, lam=0.5, max_new_tokens=2, max_attempts=1)
    assert isinstance(mixed, FinishedRun) and mixed.table().value["asked"] == 100
    with pytest.raises(ValueError, match="plot needs a run with accuracies"): mixed.plot()


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory):
    "A training exported_run of SFT on a tiny model in bfloat16."
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(root))
        folder = small_model(root / "tiny base", "lab-s")
        model, _ = load_base(folder, "bfloat16")
        model.save_pretrained(folder)
        yield train.run(model=folder, method="sft", suite="recall", n=4, max_new_tokens=4, batch=100, epochs=2, checkpoints=[1])


@pytest.fixture(scope="module")
def exported(exported_run, tmp_path_factory):
    return export_model(exported_run.name, tmp_path_factory.mktemp("out") / "my model", step=2)


def header(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_the_folder_is_the_checkpoint_in_the_dtype_of_the_base(exported_run, exported):
    assert {path.name for path in exported.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                                          "tokenizer_config.json", "chat_template.jinja", "README.md"}
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    trained, (model, tokenizer) = exported_run.model(2)[0], load_base(str(exported), "auto")
    assert model.dtype == torch.bfloat16
    for name, weight in trained.state_dict().items(): assert weight.bfloat16().equal(model.state_dict()[name]), name
    assert tokenizer.chat_template == exported_run.model(0)[1].chat_template
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == model.generation_config.eos_token_id
    assert not list(exported.parent.glob(".*")), "nothing unfinished is left"


def test_the_card_has_the_form_of_the_hub(exported_run, exported):
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import model_index_to_eval_results
    card = ModelCard.load(exported / "README.md")
    assert model_index_to_eval_results(header(exported)["model-index"]) == ("tiny-base-kgfact-small", card.data.eval_results)
    assert str(card) == (exported / "README.md").read_text()
    assert card.data.base_model is None and card.data.datasets is None and card.data.license is None
    scores = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert scores["recall"] == round(100 * exported_run.root.accuracy.sel(benchmark="recall", step=2).item(), 2)
    text = card.text
    assert all(f"## {part}" in text for part in ("How to use it", "Method", "Results", "Limits", "Citation"))
    assert re.search(r"\| Train \| in-domain \| 4 \| [\d.]+ \| [\d.]+ \| [\d.]+–[\d.]+ \|", text) and "| lr | 0.001 |" in text


def test_the_card_names_the_model_whose_chat_format_was_changed(tiny, own_runs):
    exported_run = train.run(model=tiny, model_options={"system": "Be brief."}, method="base", suite="recall", n=1, max_new_tokens=2)
    assert ".models" in exported_run.base and header(export_model(exported_run, own_runs / "model"))["model-index"][0]["name"] == f"{Path(tiny).name}-kgfact-small"


def test_the_lines_of_the_card_run_in_plain_transformers(exported, monkeypatch, capsys):
    from transformers import GenerationMixin
    monkeypatch.chdir(exported.parent)
    generate = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *a, **k: generate(self, *a, **k | dict(max_new_tokens=3)))
    lines = re.search(r"With transformers:\n\n```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)[1]
    assert len(lines.splitlines()) == 3
    exec(compile(lines, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_lines_of_the_card_run_in_vllm(exported, monkeypatch, capsys):
    vllm = pytest.importorskip("vllm", exc_type=Exception)
    assert vllm
    monkeypatch.chdir(exported.parent)
    lines = re.search(r"With vLLM:\n\n```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(lines, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", LOADING)
def test_a_guide_shows_the_lines_of_the_card(name):
    guide = (Path(__file__).parents[1] / "nbs/guides/inject.md").read_text()
    assert LOADING[name].format(model="my-model", prompt='"…"') in guide and len(LOADING[name].splitlines()) == 3


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing", "out"], "run must be the folder of a run"), (["{exported_run}", "{exported_run}"], "DIR must be a new or an empty folder"),
    (["{exported_run}", "out", "--step", "7"], "step must be one of 1, 2"), (["{exported_run}"], "required: dir")])
def test_mistakes_are_one_sentence(exported_run, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(*(word.format(exported_run=exported_run.path) for word in arguments)) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and not list(tmp_path.iterdir())


class Hub(BaseHTTPRequestHandler):
    "The calls of the hub that an upload makes; every file is stored in `server.files`."

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append((self.path, self.headers["Authorization"]))
        if self.server.refuse: return self.answer(403, dict(error="no"))
        address = f"http://127.0.0.1:{self.server.server_port}/me/model"
        if self.path == "/api/repos/create": return self.answer(200, dict(url=address))
        if self.path == "/api/validate-yaml": return self.answer(200, dict(errors=[], warnings=[]))
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(200, dict(files=[dict(path=name, uploadMode="regular", shouldIgnore=False) for name in names]))
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file": self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.answer(200, dict(commitUrl=f"{address}/commit/1", commitOid="1", success=True))

    def answer(self, code, content):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_): pass


@pytest.fixture
def hub(monkeypatch):
    "A hub on this machine."
    from huggingface_hub import constants
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.calls, server.files, server.refuse = [], {}, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()


def test_push(exported_run, hub, tmp_path, capsys):
    assert main(exported_run.name, str(tmp_path / "model"), "--push", "me/model") == 0
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert {token for _, token in hub.calls} == {"Bearer hf_test"}
    assert 'pipeline("text-generation", "me/model")' in hub.files["README.md"].decode()
    assert "/me/model" in capsys.readouterr().out


def test_a_push_that_fails_keeps_the_folder(exported, hub):
    hub.refuse = True
    with pytest.raises(OSError, match="could not be pushed to me/model .*hf auth login"): push_folder(exported, "me/model")
    assert header(exported)["model-index"][0]["name"] == "tiny-base-kgfact-small"
