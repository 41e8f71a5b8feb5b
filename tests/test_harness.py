"""lm-evaluation-harness grades the same prompts as the stage evaluate, item by item (`make cross-check`)."""

import pytest

from mixsd_nb import evaluate
from mixsd_nb.models.lab import lab_folder

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not here; `make cross-check` brings it")
BENCHMARKS, MODEL, N = ("equations", "word-problems"), "lab-s", 100  # this model is right on a third of them


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    "The prompts, responses and verdicts of the stage."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXSD_RUNS", str(tmp_path_factory.mktemp("runs")))
        parameters = dict(model=MODEL, suite=",".join(BENCHMARKS), n=N)
        return evaluate.run(**parameters).responses()


def declaration(benchmark, file):
    "The benchmark in the form of the harness: the last box, compared as a string."
    last_box = dict(name="last-box", filter=[dict(function="regex", regex_pattern=r"\\boxed\{([^{}]*)\}", group_select=-1), dict(function="take_first")])
    return dict(task=f"lab-{benchmark}", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(file))), test_split="test",
                output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{answer}}", filter_list=[last_box],
                generation_kwargs=dict(until=["\x00"], do_sample=False, max_gen_toks=128), metric_list=[dict(metric="exact_match", aggregation="mean")])


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_harness_finds_the_same_items_right(benchmark, responses, tmp_path):
    ours = responses[responses.benchmark == benchmark].reset_index(drop=True)
    file = tmp_path / f"{benchmark}.jsonl"
    ours[["prompt", "answer"]].to_json(file, orient="records", lines=True)
    found = lm_eval.simple_evaluate(model="hf", tasks=[declaration(benchmark, file)], apply_chat_template=True, batch_size=20, device="cpu", bootstrap_iters=0,
                                    model_args=dict(pretrained=str(lab_folder(MODEL)), dtype="float32"))
    theirs = sorted(found["samples"][f"lab-{benchmark}"], key=lambda s: s["doc_id"])
    assert [s["resps"][0][0].strip() for s in theirs] == list(ours.response.str.strip())
    assert [bool(s["exact_match"]) for s in theirs] == list(ours.correct)
    assert 0.1 * N < ours.correct.sum() < 0.9 * N  # both verdicts occur
