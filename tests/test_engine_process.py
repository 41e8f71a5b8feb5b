"An engine in a process of its own is an engine like any other: equal results, one sentence if it ends, and no process that is left."

import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from helpers import fork_workers, forked, until

from mixsd_nb import generate, nll, train
from mixsd_nb.analysis import likelihood
from mixsd_nb.benchmarks import evaluation
from mixsd_nb.corpora import CORPORA, load_corpus
from mixsd_nb.methods.rollouts import RolloutEngine
from mixsd_nb.methods.mixing import mix, mix_items
from mixsd_nb.models import ENGINES, load_base, load_engine, load_tokenizer, open_engine
from mixsd_nb.models.engine import Request
from mixsd_nb.runs import ProcessFailed, load_plugins, read_json, write_json

PROMPTS = [[20 + k, 6, 7 + k] for k in range(9)]
PAIRS = [(ids, [30, 4, 50]) for ids in PROMPTS]


@pytest.fixture(scope="module", autouse=True)
def declared():
    "The toy engine, which its process finds as a plugin. Processes are forked from one that has imported torch."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_PLUGINS", "engine_toys")
        fork_workers(patch)
        import engine_toys
        yield engine_toys
    ENGINES.remove("apart")


@pytest.fixture(scope="module")
def engines(declared):
    "The engine here, in another process, and in two of them; few requests at once, so that most come later."
    options = dict(batch_size=2)
    with load_engine("apart", "lab-s", **options) as one, load_engine("apart", "lab-s", replicas=2, **options) as two:
        yield open_engine("apart", "lab-s", **options), one, two


def processes(engine): return [worker.process for worker in engine.workers]


def test_mixing_with_retries_is_the_same(engines):
    "Some targets are accepted at once, some after retries, some never; requests that are retried come while others are decoded."
    rows, corpus = list(load_corpus("kgfact-small", "train"))[:7], CORPORA["kgfact-small"]
    items, found = mix_items(load_tokenizer("lab-s"), rows, corpus.expert, corpus.extract), []
    for engine in engines:
        known = len(engine.mismatches)
        records = mix(engine, items, 0.5, temperature=1.0, max_attempts=4, max_new_tokens=48)
        audit = {(item["id"], attempt) for (item, _, attempt), _ in engine.mismatches[known:]}
        found.append([[(r["id"], r["completion_ids"], r["naive_mask"].tolist(), r["attempts"], r["accepted"], r["finish_reason"]) for r in records], audit])
    alone, one, two = found
    assert alone[0] == one[0] == two[0]
    judged = {(r[0], r[3] - 1) for r in alone[0] if sum(r[1]) % 2 == 0}  # further attempts may have been started ahead of their turn
    assert judged and all(judged <= audit for _, audit in found)
    assert len({r[3] for r in alone[0]}) > 1 and {r[4] for r in alone[0]} == {True, False}


def test_every_method_gives_the_same(engines, tmp_path):
    alone, *others = engines
    for options in (dict(max_new_tokens=6), dict(max_new_tokens=6, temperature=1.0, keys=[*range(9)]), dict(max_total=2)):
        expected = alone.generate(PROMPTS, **options)
        for engine in others: assert engine.generate(PROMPTS, **options) == expected
    model, tokenizer = load_base("lab-s")
    model.lm_head.weight.data.mul_(-1)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    scores = []
    for source in (str(tmp_path), engines[0].model.name_or_path):
        assert all(engine.load_weights(source) for engine in engines)
        scores.append(alone.score(PAIRS))
        for engine in others:
            for a, b in zip(scores[-1], engine.score(PAIRS), strict=True): np.testing.assert_allclose(a, b, rtol=1e-5)
            for a, b in zip(alone.greedy_tokens(PAIRS), engine.greedy_tokens(PAIRS), strict=True): assert a.tolist() == b.tolist()
    assert abs(scores[0][0] - scores[1][0]).max() > 1
    written = [(Request((ids,), tag=f"request {k}"), [k]) for k, ids in enumerate(PROMPTS)]
    for engine in engines:
        known = len(engine.mismatches)
        assert engine.confirm(written) is None
        assert sorted(engine.mismatches[known:]) == [(f"request {k}", [0]) for k in range(0, 9, 2)]
        assert engine.context == alone.context and engine.tokenizer.get_vocab() == alone.tokenizer.get_vocab()
        assert engine.score([]) == []


def test_requests_that_come_later_are_decoded_and_a_stream_can_be_dropped(engines):
    _, one, two = engines
    for engine in (one, two):
        queue, ended = deque(Request((ids,), tag=k) for k, ids in enumerate(PROMPTS[:2])), []
        for request, _ in engine.stream(queue, max_new_tokens=4):
            ended.append(request.tag)
            if len(ended) < 8: queue.append(Request((PROMPTS[len(ended)],), tag=len(ended) + 1))
        assert sorted(ended) == [*range(9)]
        queue = deque(Request((ids,)) for ids in PROMPTS)
        stream = engine.stream(queue, max_new_tokens=64)
        next(stream)
        assert len(queue) == 9 - 4 * len(engine.workers), "a process gets twice the number that it decodes at once"
        score = engine.score(PAIRS)
        with pytest.raises(RuntimeError, match="^an engine was called before its stream had ended$"): list(stream)
        stream = engine.stream(deque(Request((ids,)) for ids in PROMPTS), max_new_tokens=64)
        next(stream)
        stream.close()
        for a, b in zip(engine.score(PAIRS), score): assert a.tolist() == b.tolist()


def test_what_happens_to_a_process_is_one_sentence(declared, tiny):
    "An error leaves the engine as it is; an engine that hangs or is killed is closed."
    special = lambda first: PAIRS[:2] + [([first, 1], [2])]
    for replicas, first, sentence in ((2, declared.HANG, "did not answer in 1.5 s and was ended"), (1, declared.DIE, r"was killed \(exit status -6\)")):
        engine = load_engine("apart", tiny, replicas=replicas)
        with pytest.raises(ProcessFailed, match=r"^engine apart failed in its process \(KeyError: 'two\\nlines'\)$"): engine.score(special(declared.FAIL))
        with pytest.raises(ValueError, match="^a prompt must not begin with 6$"): engine.score(special(declared.REFUSE))
        with pytest.raises(ValueError, match="^a prompt is empty; a prompt has at least one token$"): engine.generate([[7], []])
        assert len(engine.generate(PROMPTS, max_new_tokens=2)) == 9
        engine.patience = 1.5
        with pytest.raises(ProcessFailed, match=f"^the process of the engine apart {sentence}$"): engine.score(special(first))
        assert all(process.returncode is not None for process in processes(engine))
        with pytest.raises(ProcessFailed, match="^the process of the engine apart was killed"): engine.generate(PROMPTS)


def test_a_stage_is_the_same_and_leaves_no_process(own_runs, tiny, monkeypatch):
    "Also rollouts with the weights of a model that changes."
    small, opened = dict(model=tiny, lam=0.5, dataset_options=dict(domains=2, entities=5), max_attempts=2, max_new_tokens=12), []
    monkeypatch.setattr(generate, "load_engine", lambda *a, **o: opened.append(load_engine(*a, **o)) or opened[-1])
    runs = [generate.run(engine=engine, force=True, **small) for engine in ("hf", "apart")]
    assert runs[0].folder == runs[1].folder and len(opened) == 2
    assert runs[0].targets.equals(runs[1].targets) and runs[0].root.drop_attrs().identical(runs[1].root.drop_attrs())
    assert [process.returncode for process in processes(opened[1])] == [0]
    model, tokenizer = load_base(tiny)
    writer = RolloutEngine("apart", tokenizer)
    for factor in (1, -1):
        for p in model.parameters(): p.data.mul_(factor)
        engine = writer.load(model)
        assert engine.generate(PROMPTS, max_new_tokens=4) == open_engine("hf", model, tokenizer).generate(PROMPTS, max_new_tokens=4)
        opened.append(engine)
    assert opened[-1] is opened[-2], "other weights are read in place"
    process, = processes(engine)
    opened.clear()
    del writer, engine
    assert process.returncode == 0, "an engine that nobody refers to ends its process"


def test_a_cell_of_the_table_is_the_same(own_runs, tiny, monkeypatch):
    "Base, targets and checkpoints are asked by one engine after the other, and none is left when the next stage begins."
    small = dict(model=tiny, method="mixsd", lam=0.5, epochs=1, checkpoints=(2,), n=4, suite="recall,arithmetic", max_new_tokens=6, task_tokens=6,
                 target_tokens=12, options=dict(fallback="canonical"))
    opened, results = [], []

    def load(*arguments, **options):
        assert all(process.returncode is not None for engine in opened for process in processes(engine)), "two engines at a time"
        engine = load_engine(*arguments, **options)
        if hasattr(engine, "workers"): opened.append(engine)
        return engine
    for module in (evaluation, generate, likelihood): monkeypatch.setattr(module, "load_engine", load)
    for options in ({}, dict(replicas=2), dict(engine="apart", replicas=2)):
        opened.clear()
        monkeypatch.setenv("MIXSD_RUNS", str(own_runs / f"runs-{len(results)}"))
        found = train.run(**small, **options).root, nll.run(model=tiny, **{k: v for k, v in options.items() if k == "engine"}).root
        results.append([root.drop_attrs() for root in found])
        assert all(one.identical(other) for one, other in zip(results[0], results[-1]))
        assert len(opened) == 3 * ("replicas" in options) + ("engine" in options), "the base, targets and checkpoints; NLL has no replicas"
        assert all(process.returncode is not None for engine in opened for process in processes(engine))


def own(tiny, state, file):
    "Open the engine, and work or wait."
    load_plugins.cache_clear()
    engine = load_engine("apart", tiny)
    write_json(file, dict(pid=engine.workers[0].process.pid))
    if state == "works": engine.score([([3, 1], [2])])
    threading.Event().wait()


@pytest.mark.parametrize("state", ["works", "waits"])
def test_a_process_ends_with_its_owner(state, tiny, tmp_path):
    "The owner is killed while the process works or waits."
    owner = forked(own, tiny, state, file := tmp_path / "pid")
    pid = until(lambda: read_json(file).get("pid"))
    owner.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the process")
    owner.join()
    assert owner.exitcode == -9


SCRIPT = """import os, sys
from mixsd_nb.models import ENGINES, EngineSpec, load_engine

ENGINES.add(EngineSpec("mine", "Mine", "__main__:Mine", own_process=True))

class Mine:
    context, mismatches = 8, ()
    @classmethod
    def open(cls, *_, **__): return cls()
    def score(self, pairs): return [os.getpid()]

def show():
    with load_engine("mine", "lab-s") as engine: print(engine.score([([1], [2])]) != [os.getpid()])

{}"""
GUARDS = {"for _ in range(1):\n    show()": "", 'def main():\n    show()\n\nif "__main__" == __name__: sys.exit(main())': "True"}


@pytest.mark.parametrize("calls", GUARDS, ids=["loop", "main"])
def test_a_script_without_a_guard_is_told_before_a_process_starts(calls, tmp_path, monkeypatch):
    monkeypatch.delenv("MIXSD_PLUGINS")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(calls))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == GUARDS[calls]
    if not GUARDS[calls]:
        assert done.stderr.strip().splitlines()[-1].startswith(f"ValueError: engine mine runs in a process that imports {script}")
