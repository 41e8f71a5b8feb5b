"""The pages that compute in the reader's browser. Their modules and data are packed into scripts, so that they also work from a file."""

import base64
import json
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "mixsd_nb"
ASSETS = {  # scripts within the sources, which Sphinx copies to _static/
    "mixing-files.js": ["data/browser/mixing.js", "data/browser/page.js", "views/explainer.js", "data/browser/prompts.json",
                        "data/lab-m/config.json", "data/lab-m/tokenizer.json", "data/lab-m/model.safetensors"],
}

OPEN = """
const url = (name, kind) => `data:${kind};base64,${globalThis.mixsdFiles[name]}`;
const open = async (name, as) => (await fetch(url(name, "application/octet-stream")))[as]();
const load = (name) => import(url(name, "text/javascript"));
async function start(element, run) {
  try { await run(element); }
  catch (error) { element.replaceChildren(Object.assign(document.createElement("p"), { role: "alert", textContent: error.message })); }
}
"""

MIX = """
start(document.getElementById("mixsd-mixing"), async (element) => {
  const [engine, page, explainer, prompts, config, tokenizer, weights] = await Promise.all([
    load("mixing.js"), load("page.js"), load("explainer.js"), open("prompts.json", "json"), open("config.json", "json"),
    open("tokenizer.json", "json"), open("model.safetensors", "arrayBuffer")]);
  const { mixer, ready } = page.mountPage(element, { prompts, config, tokenizer, weights }, { engine, explainer });
  globalThis.mixsdMixer = mixer;
  await ready;
});
"""

DRAW = """
start(document.getElementById("mixsd-frontier"), async (element) => {
  await vegaEmbed(element, mixsdFrontier, { renderer: "svg", actions: { export: true, source: false, compiled: false, editor: false } });
  element.dataset.ready = "";
});
"""


def embed(name: str, script: str, run: str) -> str:
    "The element of a page, and its scripts."
    return f"""<div id="{name}"><p>Loading …</p><noscript><p>This page needs JavaScript.</p></noscript></div>
<script src="_static/{script}" defer></script>
<script type="module">{OPEN}{run}</script>"""


BODIES = {"browser": embed("mixsd-mixing", "mixing-files.js", MIX), "frontier": embed("mixsd-frontier", "frontier-files.js", DRAW)}

BROWSER = """# Mixing in your browser

This page mixes targets while you watch. It contains the shipped model `lab-m`, its tokenizer and both prompts, and
everything is computed here: no server is asked, and the page also works from a file. The tokens are those of
[](methods/mixing.ipynb): each one is written by the naive conditional, which sees the question alone, where its coin
lies below λ, and else by the expert conditional, which sees the answer too. A target that does not end with the right
answer is refused, and another attempt is made with other coins. Choose a fact or type one of your own, and move λ.

```{raw} html
%s
```
"""

FRONTIER = """# Frontiers of all methods

A method that learns new facts loses some of those that the model knew. The chart shows every checkpoint of the cube
`rivals-lab`, trained on `lab-m`. The line of a method is the most that it keeps at each recall, as a mean over its seeds;
the band is their range. Point at a mark for its numbers, and choose a method to leave it alone.

```{raw} html
%s
```

[](lab/study.ipynb) compares the methods, with intervals.
"""


def pack_files(paths: list[Path]) -> str:
    "A script that gives a page the content of files in base64, by their names. A page that is opened from disk may not fetch files."
    content = {path.name: base64.b64encode(path.read_bytes()).decode("ascii") for path in paths}
    return f"globalThis.mixsdFiles = {json.dumps(content)};\n"


def browser_pages() -> dict[str, str]:
    return {"browser.md": BROWSER % BODIES["browser"], "frontier.md": FRONTIER % BODIES["frontier"]}


def pack_frontier() -> str:
    "A script with Vega, whose names stay its own, and the chart of the explorer."
    import vl_convert

    from mixsd_nb.results.cube import read_cubes
    from mixsd_nb.views.charts import draw_frontier
    from mixsd_nb.views.runs import select_corpus
    chart = draw_frontier(select_corpus(read_cubes()["rivals-lab"], "kgfact-small", "lab-m"), "world")
    return f"(() => {{\n{vl_convert.javascript_bundle()}\n}})();\nglobalThis.mixsdFrontier = {json.dumps(chart.to_dict())};\n"


def write_assets(target: Path) -> None:
    "Write the scripts beside the sources of the pages."
    (target / "assets").mkdir(parents=True, exist_ok=True)
    (target / "assets/frontier-files.js").write_text(pack_frontier(), encoding="utf-8")
    for name, files in ASSETS.items(): (target / "assets" / name).write_text(pack_files([PACKAGE / file for file in files]), encoding="utf-8")
