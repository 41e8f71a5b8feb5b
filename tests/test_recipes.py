"Recipes: labels are parsed as they were written, whatever is composed; a short name is a composition."

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mixsd_nb.methods import ANCHORS, GATES, METHODS, check_label, compose, label_coordinates, label_title, ordered_labels, parse_label, recipe_label
from mixsd_nb.methods.recipes import translate_parameters
from mixsd_nb.runs import make_config
from mixsd_nb.train import TrainConfig

NUMBERS = st.one_of(st.floats(1e-6, 1e8), st.integers(0, 10**6)).map(lambda x: float(f"{x:g}"))  # as a label writes them


def fitting():
    "Every method with every set of up to two anchors and every gate that fits."
    names = ["", *ANCHORS, *map("+".join, itertools.combinations(ANCHORS, 2))]
    for method, anchor, gate, lora in itertools.product(METHODS, names, ["", *GATES], [0, 8]):
        try: yield compose(method, anchor, gate, lora=lora)
        except ValueError: pass


RECIPES = list(fitting())


@given(st.sampled_from(RECIPES), st.data())
@settings(max_examples=300, deadline=None)
def test_a_label_is_parsed_as_it_was_written(recipe, data):
    values = {name: data.draw(NUMBERS) for name in recipe.label_settings}
    label = recipe_label(recipe, **values)
    assert check_label(label) == (recipe, values)
    found = label_coordinates(label)
    assert (found["method"], found["anchor"]) == (recipe.method.name, "+".join(anchor.name for anchor in recipe.anchors))
    assert found["lora"] == int(values.get("lora", 0)) and all(part.title in label_title(label) for part in recipe.parts)


@given(st.lists(st.sampled_from(RECIPES), min_size=1, max_size=8, unique_by=lambda r: r.name), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_labels_does_not_depend_on_where_they_stood(recipes, random):
    labels = [recipe_label(r, **dict.fromkeys(r.label_settings, 1.0)) for r in recipes]
    assert ordered_labels(random.sample(labels, len(labels))) == ordered_labels(labels)


@given(st.sampled_from(RECIPES), st.randoms())
@settings(max_examples=100, deadline=None)
def test_anchors_are_composed_in_the_order_of_declaration(recipe, random):
    names = [anchor.name for anchor in recipe.anchors]
    shuffled = "+".join(random.sample(names, len(names)))
    assert compose(recipe.method.name, shuffled, recipe.gate.name if recipe.gate else "", lora=int(bool(recipe.adapters))) == recipe


def test_mixing_options_are_in_the_label():
    "Two runs with targets that are made by other rules have other labels, and each label is parsed again."
    changes = dict(consistent=[True], fallback=["own-words", "canonical"])
    singles = [{name: value} for name, values in changes.items() for value in values]
    configs = [make_config(TrainConfig, method="mixsd", options=options) for options in ({}, *singles, {k: v[0] for k, v in changes.items()})]
    labels = [config.label for config in configs]
    assert len({*labels}) == len(labels) == 5 and labels[0] == "mixsd-0.5"
    assert labels[-1] == "mixsd-0.5-consistent-own-words"
    for config, label in zip(configs, labels):
        recipe, values = parse_label(label)
        assert recipe == config.recipe and recipe_label(recipe, **values) == label
        assert values.items() <= {**config.options, "lam": 0.5}.items() and len(values) == len(label_coordinates(label)) - 5
    assert label_title(labels[-1]) == "MixSD (λ=0.5, consistent, else own words)"


def test_the_complete_recipe_is_a_composition_that_takes_other_values():
    "λ is 0 unless given, a single option can be changed, and each preset has its prompts of replay."
    plain, other = (make_config(TrainConfig, method="mixsd-complete", **more) for more in ({}, dict(lam=0.3, anchor="ewc", options=dict(wordings=0))))
    assert (plain.method, plain.anchor, plain.lam, plain.temperature, plain.options["max_attempts"]) == ("mixsd", "replay-kl", 0, 0.5, 6)
    assert plain.label == "mixsd-0-consistent-canonical-wordings2+replay-kl-0.5"
    assert other.label == "mixsd-0.3-consistent-canonical+replay-kl-0.5+ewc-0.1"
    configs = {preset: make_config(TrainConfig, method="mixsd-complete", preset=preset, model="lab-s") for preset in ("lab", "real", "paper")}
    assert [(c.options["share"], c.options["prompts"], c.options["count"]) for c in configs.values()] == [(0.5, "", 200), *2 * [(0.5, "own+neighbours", 400)]]
    assert all(parse_label(config.label)[0] == config.recipe for config in configs.values())
    assert label_title(configs["lab"].label) == "MixSD complete (λ=0, replay 0.5)"
    assert label_title(configs["real"].label) == "MixSD complete (λ=0, replay 0.5) with own prompts and neighbours, 400 replayed replies"
    assert configs["real"].label == "mixsd-0-consistent-canonical-wordings2+replay-kl-0.5-own-neighbours-400samples"


def test_variants_have_names_and_adapters_follow_the_method():
    named = make_config(TrainConfig, method="mixsd-shuffled", lam=0.3)
    assert named == make_config(TrainConfig, method="mixsd", lam=0.3, options=dict(draw="shuffled")) and named.label == "mixsd-shuffled-0.3-b1000"
    each, plain = make_config(TrainConfig, method="memit-each"), make_config(TrainConfig, method="memit")
    assert (each.method, each.options["place"], each.options["weight"], plain.options["weight"]) == ("memit", "each", 1000, 300) and each.hash() != plain.hash()
    assert make_config(TrainConfig, method="opsd", anchor="replay", lora=4).label == "opsd-n8-t1-lora4+replay-0.5"
    complete = make_config(TrainConfig, method="mixsd-complete", lora=16, quantise="nf4", preset="real")
    assert label_title(complete.label).endswith("400 replayed replies + LoRA (rank 16, NF4)") and label_coordinates(complete.label)["quantise"] == "nf4"
    assert complete.lr == 10 * make_config(TrainConfig, preset="real").lr and make_config(TrainConfig, lora=4, lr=1e-3).lr == 1e-3
    given = translate_parameters(dict(method="mixsd-complete", anchor="ewc+replay-kl", options='{"strength": 1, "wordings": 0}'))
    assert given["anchor"] == "replay-kl+ewc" and (given["options"]["strength"], given["options"]["wordings"]) == (1, 0)


def test_options_of_two_anchors_keep_apart():
    config = make_config(TrainConfig, method="sft", anchor="ewc+l2sp", options={"ewc.strength": 2, "l2sp.strength": 3})
    assert config.label == "sft+l2sp-3+ewc-2" and [config.recipe.options_of(a, config.options)["strength"] for a in config.recipe.anchors] == [3, 2]
