// The page of a frontier: move along the checkpoints of a recipe, see which facts are answered, and read five replies.
//
//   mountFrontier(element, data);        // data: frontier.json, written by mixsd_nb.views.frontier

const STYLE = `
.mixsd-frontier { display: grid; gap: 1rem; min-width: 0; margin-bottom: 1.5rem; --known: #0072b2; --new: #c25700; --dark: #8883; }
html[data-theme=dark] .mixsd-frontier { --known: #56b4e9; --new: #e69f00; --dark: #fff2; }
.mixsd-frontier form { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 16rem), 1fr)); }
.mixsd-frontier label { display: grid; gap: .25rem; align-content: start; min-width: 0; font-weight: 600; }
.mixsd-frontier label.wide { grid-column: 1 / -1; }
.mixsd-frontier :is(select, input) { font: inherit; font-weight: normal; width: 100%; min-width: 0; box-sizing: border-box; min-height: 2rem; }
.mixsd-frontier select { padding: .35rem .5rem; color: inherit; background: transparent; border: 1px solid #767676; border-radius: .25rem; }
.mixsd-frontier option { color: #000; background: #fff; }
.mixsd-frontier :is(select, input):focus-visible { outline: 3px solid var(--known); outline-offset: 1px; }
.mixsd-frontier .columns { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); align-items: start; }
.mixsd-frontier svg { width: 100%; height: auto; max-width: 30rem; font: 12px sans-serif; }
.mixsd-frontier svg text { fill: currentColor; }
.mixsd-frontier h3 { font-size: 1rem; margin: 0 0 .35rem; }
.mixsd-frontier .tiles { display: grid; grid-template-columns: repeat(20, 1fr); gap: 2px; max-width: 30rem; margin-bottom: .75rem; }
.mixsd-frontier .tiles span { aspect-ratio: 1; border-radius: 2px; background: var(--dark); box-shadow: inset 0 0 0 1px #8886; }
.mixsd-frontier .tiles.world span.on { background: var(--known); }
.mixsd-frontier .tiles.recall span.on { background: var(--new); }
.mixsd-frontier .replies { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); padding: 0; margin: 0; list-style: none; }
.mixsd-frontier .replies li { margin: 0; border-left: .3rem solid; border-color: #8888; padding: 0 .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.mixsd-frontier .replies li.right { border-color: var(--known); }
.mixsd-frontier .replies .prompt { font-weight: 600; }
.mixsd-frontier :is(p, li > p) { margin: 0; }
.mixsd-frontier details ul { max-height: 20rem; overflow: auto; }
`;
const SVG = "http://www.w3.org/2000/svg";
const NAMES = { recall: "a new fact", world: "a fact known before", arithmetic: "arithmetic", "word-problems": "a word problem", choice: "a choice" };
const ALL = "all";

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const countOnes = (signs) => [...signs].filter((sign) => sign === "1").length;
const share = (signs) => 100 * countOnes(signs) / signs.length;
export const place = (checkpoint) => [share(checkpoint.recall), share(checkpoint.world)];

/** The checkpoints that no other one beats on both axes, from the fewest new facts to the most. */
export function findFrontier(checkpoints) {
  const sorted = checkpoints.map((c) => [c, ...place(c)]).sort((a, b) => b[1] - a[1] || b[2] - a[2]);
  let best = -1;
  return sorted.filter(([, , kept]) => kept > best && ((best = kept), true)).map(([c]) => c).reverse();
}

const X = (value) => 46 + value * 3.4, Y = (value) => 264 - value * 2.5;

function drawAxes(svg) {
  for (const value of [0, 25, 50, 75, 100]) {
    svg.append(draw("line", { x1: X(value), x2: X(value), y1: Y(0), y2: Y(100), stroke: "currentColor", opacity: 0.15 }),
      draw("line", { x1: X(0), x2: X(100), y1: Y(value), y2: Y(value), stroke: "currentColor", opacity: 0.15 }),
      draw("text", { x: X(value), y: 282, "text-anchor": "middle" }, value), draw("text", { x: 38, y: Y(value) + 4, "text-anchor": "end" }, value));
  }
  svg.append(draw("text", { x: X(50), y: 300, "text-anchor": "middle" }, "new facts recalled, %"),
    draw("text", { x: 0, y: 0, transform: `translate(12 ${Y(50)}) rotate(-90)`, "text-anchor": "middle" }, "known facts kept, %"));
}

function drawChart(others, path, current) {
  const svg = draw("svg", { viewBox: "0 0 400 306", role: "img" }), [x, y] = place(current);
  svg.setAttribute("aria-label", `${x.toFixed(0)} percent of the new facts recalled, ${y.toFixed(0)} percent of the known facts kept`);
  drawAxes(svg);
  for (const c of others) svg.append(draw("circle", { cx: X(place(c)[0]), cy: Y(place(c)[1]), r: 3, fill: "currentColor", opacity: 0.3 }));
  const points = path.map((c) => `${X(place(c)[0])},${Y(place(c)[1])}`).join(" ");
  svg.append(draw("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": 2 }));
  for (const c of path) svg.append(draw("circle", { cx: X(place(c)[0]), cy: Y(place(c)[1]), r: 4, fill: "currentColor" }));
  svg.append(draw("circle", { cx: X(x), cy: Y(y), r: 8, fill: "var(--new)", stroke: "currentColor", "stroke-width": 2 }));
  return svg;
}

function makeTiles(kind, signs, questions, words) {
  const tiles = [...signs].map((sign, k) => make("span", { className: sign === "1" ? "on" : "", title: questions[k] }));
  const grid = make("div", { className: `tiles ${kind}` }, ...tiles);
  grid.setAttribute("role", "img");
  grid.setAttribute("aria-label", words);
  return [make("h3", { textContent: words }), grid];
}

const describe = (c) => c.step === 0 ? "before training" : `rate ${c.lr}, step ${c.step}`;

/** Put the page into an element. */
export function mountFrontier(element, data) {
  element.classList.add("mixsd-frontier");
  const option = (value, textContent) => make("option", { value, textContent });
  const base = data.checkpoints.find((c) => c.step === 0), trained = data.checkpoints.filter((c) => c.step > 0);
  const recipes = Object.entries(data.titles).filter(([name]) => trained.some((c) => c.recipe === name));
  const recipe = make("select", { name: "recipe" }, ...recipes.map(([name, title]) => option(name, title)));
  const rate = make("select", { name: "rate" }), slider = make("input", { type: "range", name: "checkpoint", min: 0, step: 1 });
  const words = make("span"), columns = make("div", { className: "columns" }), replies = make("ul", { className: "replies" });
  const lost = make("ul"), summary = make("summary"), status = make("p"), form = make("form", {}, make("label", {}, "recipe", recipe), make("label", {}, "learning rate", rate),
    make("label", { className: "wide" }, words, slider));
  status.setAttribute("role", "status");
  form.addEventListener("submit", (event) => event.preventDefault());
  element.replaceChildren(make("style", { textContent: STYLE }), form, status, columns, make("details", {}, summary, lost),
    make("h3", { textContent: "Five prompts and the replies of this checkpoint" }), replies);

  const ofRecipe = () => trained.filter((c) => c.recipe === recipe.value);
  const path = () => rate.value === ALL ? findFrontier([base, ...ofRecipe()]) : [base, ...ofRecipe().filter((c) => String(c.lr) === rate.value)];

  function showRecipe() {
    const rates = [...new Set(ofRecipe().map((c) => c.lr))];
    rate.replaceChildren(option(ALL, "the frontier over all rates"), ...rates.map((lr) => option(String(lr), `${lr}, step by step`)));
    showPath();
  }

  function showPath() {
    slider.max = path().length - 1;
    slider.value = slider.max;
    show();
  }

  function show() {
    const points = path(), c = points[slider.value], known = base.world, dark = [...c.world].flatMap((sign, k) => sign === "0" && known[k] === "1" ? [k] : []);
    words.textContent = `checkpoint ${Number(slider.value) + 1} of ${points.length}: ${describe(c)}`;
    slider.setAttribute("aria-valuetext", describe(c));
    const sentence = (n, of, what) => `${n} of ${of} ${what}`;
    columns.replaceChildren(drawChart(ofRecipe(), points, c), make("div", {},
      ...makeTiles("world", c.world, data.facts.world, sentence(countOnes(c.world), c.world.length, "facts of the pretraining are answered")),
      ...makeTiles("recall", c.recall, data.facts.recall, sentence(countOnes(c.recall), c.recall.length, "new facts are recalled"))));
    status.textContent = `${data.titles[c.recipe]}: ${dark.length} of the ${countOnes(known)} facts that the base model answered have gone dark.`;
    summary.textContent = `The ${dark.length} facts that went dark`;
    lost.replaceChildren(...dark.map((k) => make("li", { textContent: `${data.facts.world[k]} ${data.known[k]}` })));
    replies.replaceChildren(...data.prompts.map(({ kind, prompt }, k) => make("li", { className: c.right[k] === "1" ? "right" : "" },
      make("p", { textContent: `${NAMES[kind]}, ${c.right[k] === "1" ? "right" : "wrong"}` }), make("p", { className: "prompt", textContent: prompt }),
      make("p", { textContent: data.replies[c.replies[k]] }))));
    element.dataset.ready = describe(c);
  }

  recipe.addEventListener("change", showRecipe);
  rate.addEventListener("change", showPath);
  slider.addEventListener("input", show);
  recipe.value = (recipes.find(([name]) => name === "mixsd-0.5") ?? recipes[0])[0];
  showRecipe();
}
