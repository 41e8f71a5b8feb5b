// The page of mixing in a browser: controls for a fact, the temperature and the seed around a display of the trace.
//
//   mountPage(element, files, { engine, explainer });
//
// files: what `loadFiles` of mixing.js returns. engine: the module mixing.js. explainer: a module with
// mount(element, trace, options) -> { update(trace), busy(flag) }, such as explainer.js.

const STYLE = `
.mixsd-page { display: grid; gap: 1rem; min-width: 0; }
.mixsd-page form { display: grid; gap: .75rem; }
@media (min-width: 720px) { .mixsd-page form { grid-template-columns: repeat(3, 1fr); } .mixsd-page label.wide { grid-column: span 2; } }
.mixsd-page label { display: grid; gap: .25rem; align-content: start; min-width: 0; font-weight: 600; }
.mixsd-page :is(select, input, textarea) { font: inherit; font-weight: normal; width: 100%; min-width: 0; box-sizing: border-box;
  padding: .35rem .5rem; color: inherit; background: transparent; border: 1px solid #767676; border-radius: .25rem; }
.mixsd-page option { color: #000; background: #fff; }
.mixsd-page input[type=range] { padding: 0; min-height: 1.5rem; }
.mixsd-page :is(select, input, textarea):focus-visible { outline: 3px solid #0072b2; outline-offset: 1px; }
.mixsd-page [role=alert]:not(:empty) { border-left: .3rem solid #d55e00; padding: .5rem .75rem; }
.mixsd-page .status { font-size: .9rem; margin: 0; min-height: 1.5em; }
`;

const PAUSE = 120; // milliseconds between two drawings of a target that is being written
const FIELDS = [
  ["corpus", "corpus", "select"], ["fact", "fact", "select"], ["question", "question", "textarea"], ["answer", "answer", "input"],
  ["temperature", "temperature", "range"], ["seed", "seed of the draws", "number"]];
const RANGES = { temperature: { min: 0, max: 1.5, step: 0.1 } };

function makeField([name, title, kind]) {
  const label = document.createElement("label"), words = document.createElement("span");
  const field = document.createElement(["range", "number"].includes(kind) ? "input" : kind);
  words.textContent = title;
  Object.assign(field, { name, autocomplete: "off" });
  if (kind === "range") Object.assign(field, { type: "range", ...RANGES[name] });
  if (kind === "number") Object.assign(field, { type: "number", min: 0, max: 1e9, step: 1, value: 0 });
  if (kind === "textarea") Object.assign(field, { rows: 2 });
  if (name === "fact" || name === "question") label.className = "wide";
  label.append(words, field);
  return [label, field, words];
}

const shorten = (text, width = 80) => text.length > width ? `${text.slice(0, width / 2)} … ${text.slice(-width / 2)}` : text;

function fillOptions(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
}

/** Put the page into an element. Returns the mixer and a promise of the first finished trace. */
export function mountPage(element, files, { engine, explainer, lam = 0.5 }) {
  const started = performance.now(), mixer = new engine.Mixer(files);
  const style = Object.assign(document.createElement("style"), { textContent: STYLE });
  const [form, alert, place, status] = ["form", "div", "div", "p"].map((tag) => document.createElement(tag));
  alert.setAttribute("role", "alert");
  status.setAttribute("role", "status");
  status.className = "status";
  element.classList.add("mixsd-page");
  const fields = {}, titles = {};
  for (const field of FIELDS) {
    const [label, input, words] = makeField(field);
    [fields[field[0]], titles[field[0]]] = [input, words];
    form.append(label);
  }
  element.replaceChildren(style, form, alert, place, status);
  form.addEventListener("submit", (event) => event.preventDefault());

  let facts = [], view = null, running = new AbortController();
  const current = { lam };

  function showCorpus() {
    const { title, temperature } = mixer.prompts.corpora[fields.corpus.value];
    facts = mixer.facts(fields.corpus.value);
    fillOptions(fields.fact, facts.map((fact, k) => [k, shorten(fact.question.replace(/\s+/g, " "))]));
    fields.temperature.value = temperature;
    fields.corpus.title = title;
    return showFact();
  }

  function showFact() {
    const fact = facts[fields.fact.value];
    fields.question.value = fact.question;
    fields.answer.value = fact.answer;
    return draw();
  }

  function show(trace) {
    if (!view) view = explainer.mount(place, trace, { onLam: setLam, onCoins: drawCoins, label: "Live mixing of one target" });
    else view.update(trace);
  }

  /** Mix the target anew, and show it while it is written. */
  async function draw() {
    running.abort();
    const { signal } = running = new AbortController();
    titles.temperature.textContent = `temperature ${Number(fields.temperature.value).toFixed(1)}`;
    alert.textContent = "";
    try {
      const fact = mixer.editFact(facts[fields.fact.value], fields.question.value, fields.answer.value);
      const settings = { temperature: Number(fields.temperature.value), seed: Math.max(0, Math.round(Number(fields.seed.value))) };
      const begin = performance.now();
      let shown = -Infinity;
      const onStep = (trace) => {
        if (performance.now() - shown < PAUSE) return;
        show(trace);
        element.dataset.first ??= String(Math.round(performance.now() - started));
        shown = performance.now();
      };
      const trace = await engine.runInSlices(mixer.trace(fact, current.lam, settings), onStep, { signal });
      if (signal.aborted || !trace) return null;
      const count = trace.attempts.reduce((sum, attempt) => sum + attempt.tokens.length, 0), seconds = (performance.now() - begin) / 1000;
      show(trace);
      Object.assign(element.dataset, { tokens: count, rate: Math.round(count / seconds), state: trace.state });
      status.textContent = `${count} tokens in ${seconds.toFixed(2)} seconds, ${Math.round(count / seconds)} a second, in this browser.`;
      return trace;
    } catch (error) {
      alert.textContent = error.message;
      throw error;
    }
  }

  const redraw = () => { draw().catch(() => {}); };

  function setLam(value) {
    current.lam = Number(value);
    redraw();
  }

  function drawCoins() {
    fields.seed.value = Number(fields.seed.value) + 1;
    redraw();
  }

  let waiting;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 250); };
  for (const name of ["question", "answer", "seed"]) fields[name].addEventListener("input", later);
  fields.temperature.addEventListener("input", redraw);
  fields.corpus.addEventListener("change", () => { showCorpus().catch(() => {}); });
  fields.fact.addEventListener("change", () => { showFact().catch(() => {}); });
  fillOptions(fields.corpus, Object.entries(mixer.prompts.corpora).map(([name, { title }]) => [name, title === name ? name : `${title} (${name})`]));
  return { mixer, ready: showCorpus() };
}
