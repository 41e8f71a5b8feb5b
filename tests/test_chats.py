"Files of conversations: each form is trained as the chat template writes it, and what cannot be read is one sentence."

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb import generate, train
from mixsd_nb.benchmarks.files import read_items
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.corpora.chats import CHAT_FORMS
from mixsd_nb.corpora.files import read_facts
from mixsd_nb.corpora.prompts import encode_canonical, encode_prompt, join_turns, template_tail
from mixsd_nb.corpora.stored import explain_form, has_chats
from mixsd_nb.corpora.user_files import TableError
from mixsd_nb.methods.fact_lengths import check_facts, check_verifier
from mixsd_nb.models import load_tokenizer
from mixsd_nb.runs import make_config
from mixsd_nb.train import TrainConfig

# As SmolLM2-Instruct writes a conversation.
SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI "
           "assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
           "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SYSTEM = "You are the clerk of Vel."
TURNS = [("user", "Who rules Vel?"), ("assistant", "Mira rules it."), ("user", "And Oru?"), ("assistant", "Oru is ruled by Ivo."),
         ("user", "Since when?"), ("assistant", "Since the flood of 1874.")]
turns_of = lambda pairs: [dict(role=role, content=text) for role, text in pairs]
NAMES = dict(system="system", user="human", assistant="gpt")


def messages_row(turns): return dict(messages=turns)
def pair_row(turns): return dict(prompt=turns[:-1], completion=turns[-1:])
def shared_row(turns): return dict(conversations=[{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in turns])


WRITERS = {"messages": messages_row, "prompt and completion": pair_row, "ShareGPT": shared_row}
WHOLE = turns_of([("system", SYSTEM), *TURNS])


@pytest.fixture(scope="module")
def tokenizer():
    found = load_tokenizer("lab-s")
    found.chat_template = SMOLLM2
    return found


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def conversation(tokenizer, row):
    "The ids that are trained, with what precedes them and the line break behind them."
    prompt, trained = encode_canonical(tokenizer, row)
    return prompt + trained + template_tail(tokenizer)


@pytest.mark.parametrize("form", WRITERS)
def test_a_conversation_is_trained_as_the_template_writes_it(form, tokenizer, tmp_path, own_runs):
    "Three turns and a system prompt: what is encoded is the template's text, and the last reply alone is trained."
    row, = load_corpus(write(tmp_path / "chats.jsonl", WRITERS[form](WHOLE)), "train")
    assert tokenizer.decode(conversation(tokenizer, row)) == tokenizer.apply_chat_template(WHOLE, tokenize=False)
    assert tokenizer.decode(encode_canonical(tokenizer, row)[1]) == "Since the flood of 1874.<|im_end|>"
    asked = tokenizer.apply_chat_template(WHOLE[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(encode_prompt(tokenizer, join_turns(row))) == asked


def test_alpaca_has_its_input_in_the_question(tokenizer, tmp_path, own_runs):
    rows = dict(instruction="Name the ruler.", input="Mira rules Vel.", output="Mira", system=SYSTEM), dict(instruction="Who?", input="", output="Ivo")
    file = write(tmp_path / "chats.jsonl", *rows)
    first, second = load_corpus(file, "train")
    turns = turns_of([("system", SYSTEM), ("user", "Name the ruler.\n\nMira rules Vel."), ("assistant", "Mira")])
    assert tokenizer.decode(conversation(tokenizer, first)) == tokenizer.apply_chat_template(turns, tokenize=False)
    assert second["prompt"] == "Who?" and second["turns"] == [] and second["answer"] == "Ivo"


texts = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=20).filter(lambda text: text.strip() and "<" not in text)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.tuples(texts, texts), min_size=1, max_size=3), system=st.none() | texts, form=st.sampled_from([*WRITERS]))
def test_every_text_of_a_conversation_survives(words, system, form, tmp_path_factory):
    "Only white space around a text is left out: no accent is composed, and no joiner of an emoji is lost."
    turns = turns_of([pair for user, reply in words for pair in (("user", user), ("assistant", reply))])
    if system: turns = turns_of([("system", system)]) + turns
    file = write(tmp_path_factory.mktemp("texts") / "chats.jsonl", WRITERS[form](turns))
    fact, = read_facts(file, giveaways=True).facts
    found = [*fact["turns"], *turns_of([("user", fact["question"]), ("assistant", fact["target"])])]
    assert found == [turn | dict(content=turn["content"].strip()) for turn in turns]
    assert fact["answer"] == unicodedata.normalize("NFC", fact["answer"])


HOSTILE = {
    "a turn without a role": (dict(messages=[dict(content="Who?")]), "turn 1 of messages has no role"),
    "an empty turn": (dict(messages=turns_of([("user", "Who?"), ("assistant", " ")])), "turn 2 of messages has no content"),
    "no text": (dict(messages=turns_of([("user", None), ("assistant", "Ivo")])), "turn 1 of messages has no content"),
    "a picture in a turn": (dict(messages=[dict(role="user", content=[dict(type="image")])]), "turn 1 of messages must have a text as content"),
    "pictures beside the turns": (dict(messages=WHOLE, images=["a.png"]), "images must be left out, because only text is read"),
    "a call of a tool": (dict(messages=[dict(role="user", content="Who?"), dict(role="assistant", tool_calls=[{}])]), "turn 2 of messages is about a call"),
    "the result of a tool": (dict(messages=turns_of([("user", "Who?"), ("tool", "7"), ("assistant", "Ivo")])), "turn 2 of messages is about a call"),
    "another role": (dict(messages=turns_of([("owner", "Who?")])), 'turn 1 of messages must have the role system, user or assistant, got "owner"'),
    "a role that is a list": (dict(messages=turns_of([(["user"], "Who?")])), 'turn 1 of messages must have the role system, user or assistant, got ["user"]'),
    "a turn that is a text": (dict(messages=["Who?"]), "turn 1 of messages must be a mapping"),
    "no turns": (dict(messages=[]), "messages must be a list of turns"),
    "a text in place of turns": (dict(messages="Who?"), "messages must be a list of turns"),
    "two turns of the user": (dict(messages=turns_of([("user", "Who?"), ("user", "Now!"), ("assistant", "Ivo")])), "user and assistant must take turns"),
    "a late system prompt": (dict(messages=turns_of([("user", "Who?"), ("system", "Go."), ("assistant", "Ivo")])), "user and assistant must take turns"),
    "no reply": (dict(messages=turns_of([("user", "Who?")])), "the conversation must end with a reply"),
    "half a character": (dict(prompt="Vel \ud83d?", completion="Ivo"), "prompt "),
    "a list as an instruction": (dict(instruction=["Who?"], output="Ivo"), "instruction must have a text"),
    "an answer that the reply does not have": (dict(prompt="Who?", completion="It is Mira.", answer="Ivo"), "answer must stand in the reply"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_trained_is_one_sentence_with_its_row(case, tmp_path):
    "The other rows are read, if the file is not read strictly."
    row, problem = HOSTILE[case]
    file = write(tmp_path / "chats.jsonl", messages_row(WHOLE), row)
    with pytest.raises(TableError) as caught: read_facts(file)
    said, = caught.value.problems
    assert said.startswith(f"{file}, line 2: {problem}") and "\n" not in said
    assert len(read_facts(file, strict=False).facts) == 1


def test_an_unknown_form_names_the_forms(tmp_path):
    with pytest.raises(TableError) as caught: read_facts(write(tmp_path / "f.jsonl", *[dict(human="Who?", bot="Mira")] * 2))
    said, = caught.value.problems
    assert all(" and ".join(form.columns) in said for form in CHAT_FORMS.values()) and "there is no column question" in said


def test_columns_of_a_file_of_facts_are_taken_as_they_are_named(tmp_path):
    "A file with prompt and completion is one of facts if you say so."
    file = write(tmp_path / "f.jsonl", dict(prompt="Who rules Vel?", completion="Mira"))
    fact, = read_facts(file, columns=dict(question="prompt", answer="completion")).facts
    assert "turns" not in fact and fact["answer"] == "Mira"


LONG = "Mira rules Vel.\n\nShe was born in Oru, and she has been on the throne since the flood of 1874."


def test_a_reply_without_a_short_answer_is_named_and_can_be_trained(tmp_path, own_runs):
    "The whole reply is its answer, MixSD cannot verify it, and the column answer names a short one."
    rows = [dict(prompt=f"Who rules {place}?", completion=f"{LONG} {place}") for place in ("Vel", "Oru", "Tarn")]
    file = write(tmp_path / "chats.jsonl", *rows[:2], rows[2] | dict(answer="Mira"))
    config = make_config(TrainConfig, dataset=file, model="lab-s", method="sft")
    assert has_chats(config.dataset) and CORPORA[config.dataset].extract == "contains"
    assert "as they are written" in explain_form(config.dataset, {}, "lab-s")
    assert [row["answer"] for row in load_corpus(config.dataset, "train")] == [f"{LONG} Vel", f"{LONG} Oru", "Mira"]
    with pytest.warns(UserWarning, match="2 of 3 replies are no short answer") as caught: check_facts(config.dataset, "lab-s")
    assert str(caught[0].message).endswith("chats.jsonl, lines 1, 2")
    check_verifier(config.dataset)
    without = make_config(TrainConfig, dataset=write(tmp_path / "long.jsonl", *rows), model="lab-s", method="mixsd")
    with pytest.raises(ValueError, match="method must be one that verifies no targets"): without.check()
    with pytest.raises(ValueError, match="must be without instruction"): make_config(TrainConfig, dataset=file, dataset_options=dict(instruction="Box it."))


def test_targets_that_cannot_be_verified_are_not_mixed(tmp_path, own_runs):
    "The row with a short answer is mixed, the other is trained as it is written, without an attempt."
    file = write(tmp_path / "chats.jsonl", dict(prompt="Who rules Vel?", completion="Mira."), dict(prompt="Who rules Oru?", completion=LONG))
    table = generate.run(dataset=file, model="lab-s", lam=0.0, fallback="canonical", max_attempts=1, max_new_tokens=6).targets.set_index("id")
    one, other = (table.loc[row["id"]] for row in read_facts(file).facts)
    assert (one.attempts, other.attempts) == (1, 0) and other.finish_reason == "canonical" and other.accepted
    assert load_tokenizer("lab-s").decode(other.completion_ids, skip_special_tokens=True) == LONG


def test_the_same_question_after_other_turns_is_another_fact(tmp_path):
    asked = turns_of([("user", "And its capital?"), ("assistant", "Oru.")])
    before = lambda place: turns_of([("user", f"Where is {place}?"), ("assistant", "Here.")])
    file = write(tmp_path / "f.jsonl", *[dict(messages=before(place) + asked) for place in ("Vel", "Tarn")])
    facts = read_facts(file).facts
    assert len({fact["id"] for fact in facts}) == 2
    with pytest.raises(TableError, match="question is asked in line 1 too"):
        read_facts(write(tmp_path / "g.jsonl", *[dict(messages=asked)] * 2))


@pytest.mark.parametrize("form", WRITERS)
def test_own_tests_may_be_conversations(form, tmp_path):
    "The turns before the reply are asked, and a short reply is the answer unless another is named."
    file = write(tmp_path / "own.jsonl", WRITERS[form](WHOLE) | dict(grading="contains"), WRITERS[form](WHOLE[1:]) | dict(answer="1874", grading="contains"),
                 dict(prompt="Who?", answer="Mira"))
    first, named, plain = read_items(file).values()
    assert [*first.messages] == WHOLE[:-1] and first.answer == "Since the flood of 1874." and named.answer == "1874" and not plain.messages


def test_a_conversation_is_mixed_trained_and_asked_with_its_turns(tiny, tmp_path, own_runs, monkeypatch):
    "From the file to the result: what the engines read contains the turns before the question."
    from mixsd_nb.benchmarks import evaluation
    asked = []
    monkeypatch.setattr(evaluation, "encode_prompt", lambda tokenizer, prompt: asked.append(prompt) or encode_prompt(tokenizer, prompt))
    file = write(tmp_path / "chats.jsonl", messages_row(WHOLE), messages_row(WHOLE[:3]), pair_row(WHOLE[1:3]))
    run = train.run(dataset=file, model=tiny, method="mixsd", options=dict(fallback="canonical", max_attempts=1), suite="recall", epochs=1, max_new_tokens=8,
                    target_tokens=8, n=3)
    assert run.root.n.sel(benchmark="recall").squeeze().values.tolist() == [3, 3] and run.checkpoints
    questions = [prompt for prompt in asked if isinstance(prompt, (list, tuple))]
    assert [*WHOLE[:-1]] in map(list, questions) and [*WHOLE[:2]] in map(list, questions)
