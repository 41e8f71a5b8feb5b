"""Compare what an exported model says in several environments; `make test-exports` runs the steps one after the other.

`write FOLDER [MODEL …]` runs in the environment of this package: it exports lab-s and further models after a few updates, with the tokens
that they answer to twenty questions, a small random model of every family and form of positions, with its logits, and one of every class
of tokenizers, with the ids of some texts. `read FOLDER` and
`vllm FOLDER` run in any environment that has transformers or vLLM, without this package: they load the folders and compare."""

import json
import sys
from pathlib import Path

import torch

CLASSES = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer", "GemmaTokenizer", "CohereTokenizer", "CodeLlamaTokenizer")
TOKENS, TEXTS = 32, ["two  spaces", "<|im_end|> and </s>", "Ivo lebt in Köln.\n\n\tna", "日本 🙂", " leading", "x=3.14; y['a']"]


def ask(tokenizer, model, questions):
    "The greedy tokens after each question, one question at a time."
    answers = []
    for question in questions:
        text = tokenizer.apply_chat_template([dict(role="user", content=question)], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        answers.append([ids, out[0, len(ids):].tolist()])
    return answers


def write(folder, *models):
    "Export models, and store what they say."
    (folder / "models").mkdir(parents=True)
    import families
    from mixsd_nb import train
    from mixsd_nb.corpora import load_corpus
    from mixsd_nb.models import load_tokenizer
    from mixsd_nb.reports.export import export_model
    from mixsd_nb.reports.export import oldest_release, save_portable
    from transformers import AutoModelForCausalLM, AutoTokenizer
    questions = [row["prompt"] for row in load_corpus("kgfact-small", "train")][:20]
    for name in ("lab-s", *models):
        run = train.run(model=name, method="sft", suite="recall", n=2, max_new_tokens=4, batch=4, epochs=1, limit=0, checkpoints=[1, 2], lr=1e-4, preset="lab")
        out = export_model(run, folder / "models" / Path(name).name, step=2)
        tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        record = dict(questions=questions, answers=ask(tokenizer, model, questions), texts={text: tokenizer(text)["input_ids"] for text in TEXTS})
        (folder / "models" / f"{out.name}.json").write_text(json.dumps(record))
    write_tokenizers(folder / "tokenizers")
    tokenizer, ids = load_tokenizer("lab-s"), torch.arange(3, 99)[None] % 96
    for family in families.list_families():
        for form in families.POSITIONS:
            out = folder / "families" / f"{family}-{form}"
            try:
                families.small_model(families.small_config(family, form)).save_pretrained(folder / "base")
                model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
                with torch.no_grad(): logits = model(ids).logits[0, -1]
            except Exception: continue  # the family has no such positions
            out.mkdir(parents=True)
            save_portable(model, tokenizer, [2], out)
            (out / "logits.json").write_text(json.dumps([oldest_release(out), logits.tolist()]))


def write_tokenizers(folder):
    "Save a model with the tokenizer of every family of the hub and of every class of tokenizers."
    from hub_models import FAMILIES, make_tokenizer, train_vocabulary
    from mixsd_nb.models import load_tokenizer
    from mixsd_nb.models.tiny import random_model
    from mixsd_nb.reports.export import save_portable
    vocabulary = train_vocabulary()
    spaced = json.loads(vocabulary)
    spaced["pre_tokenizer"]["add_prefix_space"] = True
    families = FAMILIES | {f"{name}, with a space": family for name, family in FAMILIES.items()}
    for name, family in families.items():
        for kind in CLASSES:
            base, out = folder / "base", folder / f"{name}-{kind}"
            tokenizer = make_tokenizer(family, vocabulary if name in FAMILIES else json.dumps(spaced))
            tokenizer.save_pretrained(base)
            settings = json.loads((base / "tokenizer_config.json").read_text())
            (base / "tokenizer_config.json").write_text(json.dumps(settings | dict(tokenizer_class=kind)))
            random_model(tokenizer, layers=1, heads=1, head_dim=8, feed_forward=8).save_pretrained(base)
            out.mkdir()
            try: tokenizer, expected = (found := load_tokenizer(str(base))), encode(found)
            except Exception: continue  # the class needs another vocabulary
            save_portable(random_model(tokenizer, layers=1, heads=1, head_dim=8, feed_forward=8), tokenizer, [2], out)
            (out / "ids.json").write_text(json.dumps(expected))


def encode(tokenizer):
    "The ids of some texts and of a conversation, and the names of a model's inputs."
    turns = [dict(role="user", content=TEXTS[1]), dict(role="assistant", content="Ivo")]
    found = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [found, tokenizer.apply_chat_template(turns, tokenize=False), sorted(tokenizer("a")), tokenizer.decode(found[0] + found[2]), tokenizer.eos_token_id]


def read(folder):
    "Compare with transformers; returns the number of differences."
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING
    transformers.logging.set_verbosity(50)
    old, wrong, counts = transformers.__version__.startswith("4."), 0, dict(tokenizers=0, equal=0, absent=0, newer=0)
    for file in sorted((folder / "models").glob("*.json")):
        record = json.loads(file.read_text())
        tokenizer, model = AutoTokenizer.from_pretrained(file.with_suffix("")), AutoModelForCausalLM.from_pretrained(file.with_suffix(""), dtype=torch.float32)
        answers = ask(tokenizer, model, record["questions"])
        same = sum(a == b for a, b in zip(answers, record["answers"]))
        texts = sum(tokenizer(text)["input_ids"] == ids for text, ids in record["texts"].items())
        inputs = set(tokenizer("a")) == {"input_ids", "attention_mask"}
        print(f"transformers {transformers.__version__}, {file.stem}: {same} of {len(answers)} replies and {texts} of {len(TEXTS)} texts have the same tokens")
        wrong += same < len(answers) or texts < len(TEXTS) or not inputs
    for file in sorted((folder / "tokenizers").glob("*/ids.json")):
        expected = json.loads(file.read_text())
        try: found = encode(AutoTokenizer.from_pretrained(file.parent))
        except Exception as e: found = [f"{type(e).__name__}: {str(e)[:150]}"]
        counts["tokenizers"] += found == expected
        wrong += found != expected
        if found != expected: print(f"  {file.parent.name}: {[(a, b) for a, b in zip(found, expected) if a != b]}")
    ids = torch.arange(3, 99)[None] % 96
    for one in sorted((folder / "families").iterdir()):
        release, expected = json.loads((one / "logits.json").read_text())
        if json.loads((one / "config.json").read_text())["model_type"] not in CONFIG_MAPPING: counts["absent"] += 1
        elif old and release != "4.57": counts["newer"] += 1
        else:
            try:
                model = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval()
                with torch.no_grad(): gap = (model(ids).logits[0, -1] - torch.tensor(expected)).abs().max().item()
            except Exception as e: gap = f"{type(e).__name__}: {str(e).splitlines()[0][:150]}"
            if isinstance(gap, float) and gap < 1e-3 * max(map(abs, expected)): counts["equal"] += 1
            else: wrong += not print(f"  {one.name}: {gap}")
    print(f"transformers {transformers.__version__}: {counts['tokenizers']} tokenizers have the same ids; of random models {counts['equal']} have the same logits, {counts['absent']} are of "
          f"families that it lacks, {counts['newer']} say that they need a newer release; {wrong} differences in all")
    return wrong


def vllm(folder):
    "Compare with vLLM; returns the number of differences."
    from vllm import LLM, SamplingParams
    wrong = 0
    for file in sorted((folder / "models").glob("*.json")):
        record, llm = json.loads(file.read_text()), LLM(str(file.with_suffix("")), dtype="float32", enforce_eager=True, max_model_len=1024)
        turns = [[dict(role="user", content=question)] for question in record["questions"]]
        found = llm.chat(turns, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
        answers = [[list(one.prompt_token_ids), list(one.outputs[0].token_ids)] for one in found]
        same = sum(a == b for a, b in zip(answers, record["answers"]))
        print(f"vLLM, {file.stem}: {same} of {len(answers)} replies have the same tokens")
        wrong += same < len(answers)
        del llm
    return wrong


if __name__ == "__main__":
    sys.exit(bool(dict(write=write, read=read, vllm=vllm)[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
