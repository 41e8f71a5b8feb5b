"The stage generate: every way to run it leads to the same bytes; targets that are given up, replaced, or must be agreed on."


import pyarrow.parquet as pq
import pytest
from helpers import fork_workers, forked

from mixsd_nb import generate, train
from mixsd_nb.corpora import load_corpus
from mixsd_nb.corpora.prompts import encode_completion
from mixsd_nb.models import load_base, load_tokenizer
from mixsd_nb.models.engines import HFEngine
from mixsd_nb.runs import make_config

pytestmark = pytest.mark.usefixtures("own_runs")
SMALL = dict(max_new_tokens=8, max_attempts=2, samples=2)


@pytest.fixture(scope="module")
def model(strong): return strong


def written(**parameters):
    "The bytes of targets and result."
    file = generate.run(**parameters).folder / "targets.parquet"
    return file.read_bytes(), (file.parent / "result.nc").read_bytes()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("whole")))
        return written(model=model, **SMALL)


def mix_here(parameters): generate.run(**parameters)


@pytest.mark.parametrize("how", [dict(batch_size=7), dict(replicas=2, batch_size=3)])
def test_how_it_is_run_changes_no_byte(how, model, whole, monkeypatch):
    fork_workers(monkeypatch)
    assert written(model=model, **how, **SMALL) == whole


class Doubting(HFEngine):
    "An engine whose audit confirms no sequence, whether it has just been decoded or was read from a journal."

    def __init__(self, *args):
        super().__init__(*args)
        self.mismatches = []

    def stream(self, queue, **options):
        for r, completion in super().stream(queue, **options):
            self.mismatches.append((r.tag, [0]))
            yield r, completion

    def confirm(self, written, **options): self.mismatches += [(r.tag, [0]) for r, _ in written]


def test_no_kill_changes_the_number_of_unconfirmed_targets(model, monkeypatch):
    "Every target counts once, although the audit also sees rejected attempts."
    monkeypatch.setattr(generate, "load_engine", lambda *_, **__: Doubting(*load_base(model)))
    for _ in range(2):
        run = generate.run(model=model, dataset_options=dict(domains=2), **SMALL)
        assert run.root.unconfirmed.item() == run.root.asked.item() > 0
        (run.folder / "result.nc").unlink()


def test_only_what_was_given_up_is_replaced():
    some = dict(lam=0.7, max_attempts=1, max_new_tokens=64, dataset_options=dict(domains=3))
    plain, mended = (pq.read_table(generate.run(fallback=how, **some).folder / "targets.parquet").to_pylist() for how in ("none", "canonical"))
    tokenizer, rows = load_base("lab-m")[1], load_corpus("kgfact-small", "train", domains=3)
    assert {r["accepted"] for r in plain} == {True, False}
    for row, a, b in zip(rows, plain, mended, strict=True):
        assert b["accepted"] and (a == {k: b[k] for k in a} if a["accepted"] else tokenizer.decode(b["completion_ids"], skip_special_tokens=True) == row["target"])


def test_two_at_once_mix_once(model, whole, own_runs):
    both = [forked(mix_here, dict(model=model, **SMALL), MIXSD_RUNS=str(own_runs)) for _ in range(2)]
    for process in both: process.join()
    assert [process.exitcode for process in both] == [0, 0] and written(model=model, **SMALL) == whole
    journal, = own_runs.glob("*/finished.jsonl")
    assert len(journal.read_bytes().splitlines()) == 200


SOME = dict(model="lab-s", max_attempts=1, max_new_tokens=80, dataset_options=dict(domains=3))


def test_a_target_is_kept_only_where_every_set_accepts_its_own():
    "By hand from the three runs that are mixed on the way; the canonical target stands everywhere else."
    found = generate.run(lam=0.3, unanimous=dict(lam=[0.1, 0.5]), **SOME)
    alone = [generate.run(lam=lam, **SOME) for lam in (0.3, 0.1, 0.5)]
    rows = {r["id"]: r for r in load_corpus("kgfact-small", "train", domains=3)}
    accepted = list(zip(*(run.targets.accepted for run in alone), strict=True))
    assert {all(a) for a in accepted} == {True, False} and {a[0] for a in accepted if not all(a)} == {True, False}
    for target, own, each in zip(found.targets.itertuples(), alone[0].targets.itertuples(), accepted, strict=True):
        canonical = encode_completion(load_tokenizer("lab-s"), rows[target.id]["target"])
        assert target.id == own.id and target.accepted
        assert list(target.completion_ids) == (list(own.completion_ids) if all(each) else canonical)
        assert (target.finish_reason == "canonical") == (not all(each))
    assert found.root.replaced == sum(not all(a) for a in accepted) and found.folder != alone[0].folder


def test_training_passes_the_options_of_its_targets(monkeypatch):
    asked = []

    def mix(config):
        asked.append(config)
        raise InterruptedError
    monkeypatch.setattr(generate.GenerateConfig, "run", mix)
    agreeing = dict(model=["lab-s", "lab-m"], lam=[0.3, 0.5])
    for options in ({}, dict(fallback="canonical"), dict(unanimous=agreeing)):
        config = make_config(train.TrainConfig, dataset="simpleqa-lab", lam=0.3, options=options)
        with pytest.raises(InterruptedError): train.mixed_targets(config)
    assert [(c.fallback, c.unanimous) for c in asked] == [("none", {}), ("canonical", {}), ("none", agreeing)]
    with pytest.raises(ValueError, match="^options must be among wordings for sft, got fallback$"):
        make_config(train.TrainConfig, method="sft", options=dict(fallback="canonical"))
