// Shows how one target is mixed, token by token. It draws a trace (JSON, made by views/mixing or by mixing.js) and needs no kernel.
// mount(element, trace, options) for any page; render({model, el}) for the anywidget of views/mixing.

const STYLE = `
.mx {--naive: #e69f00; --expert: #0072b2; --naive-ink: #7a4f00; --expert-ink: #00568a; --heat: 213,94,0;
  --ink: #1b1b1b; --soft: #595959; --line: #d4d4d4; --plate: #f6f6f4; --page: #fff; --good: #00694a; --bad: #a83a00;
  --focus: #0b62c4; --tint: 28%;
  color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; text-align: left;
  container-type: inline-size; white-space: normal}
[data-theme="dark"] .mx, [data-jp-theme-light="false"] .mx {
  --naive: #e8a91c; --expert: #3d9be0; --naive-ink: #ffc44d; --expert-ink: #8accf8; --ink: #ececec; --soft: #b4b4b4; --line: #4c4c4c; --plate: #1f1f1f;
  --page: #121212; --good: #5fd6a8; --bad: #ff9a66; --focus: #7db7ff; --tint: 34%; --heat: 255,122,40}
@media (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) body:not([data-jp-theme-light]) .mx {
  --naive: #e8a91c; --expert: #3d9be0; --naive-ink: #ffc44d; --expert-ink: #8accf8; --ink: #ececec; --soft: #b4b4b4; --line: #4c4c4c; --plate: #1f1f1f;
  --page: #121212; --good: #5fd6a8; --bad: #ff9a66; --focus: #7db7ff; --tint: 34%; --heat: 255,122,40}}
.mx * {box-sizing: border-box}
.mx p {margin: 4px 0}
.mx small, .mx .mx-soft {font-size: 12px; color: var(--soft)}
.mx h3 {font-size: 14px; font-weight: 650; margin: 18px 0 4px; color: var(--ink)}
.mx h3 small {font-weight: 400; margin-left: 8px}
.mx .mx-naive {color: var(--naive-ink); font-weight: 600} .mx .mx-expert {color: var(--expert-ink); font-weight: 600}
.mx :focus-visible {outline: 3px solid var(--focus); outline-offset: 1px}
.mx-fact {font-size: 16px; margin: 0 0 6px} .mx-fact b {font-weight: 650; margin-right: 16px}
.mx-ruler {position: relative; min-height: 106px; padding-top: 88px; margin: 6px 0 2px; user-select: none}
.mx-zone {position: absolute; top: 20px; height: 52px; font-size: 12px; padding: 1px 8px; overflow: hidden;
  white-space: nowrap}
.mx-zone.n {left: 0; background: color-mix(in srgb, var(--naive) var(--tint), transparent);
  border-radius: 6px 0 0 6px}
.mx-zone.e {right: 0; text-align: right; background: color-mix(in srgb, var(--expert) var(--tint), transparent);
  border-radius: 0 6px 6px 0}
.mx-coin {position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%; border: 1px solid var(--page);
  transition: background .15s}
.mx-coin.n {background: var(--naive)} .mx-coin.e {background: var(--expert)} .mx-coin.later {opacity: .22}
.mx-coin.now {width: 17px; height: 17px; margin: -8.5px; border: 3px solid var(--ink); z-index: 2; opacity: 1}
.mx-lam {position: absolute; top: 12px; height: 66px; margin-left: -1px; border-left: 2px solid var(--ink)}
.mx-lam span {position: absolute; bottom: 100%; left: 50%; transform: translateX(-50%); white-space: nowrap;
  font-weight: 650; font-size: 13px; line-height: 15px}
.mx .mx-ruler input {position: absolute; top: 70px; left: -8px; width: calc(100% + 16px); margin: 0; height: 18px; min-height: 0;
  accent-color: var(--ink); cursor: ew-resize}
.mx-ends {display: flex; justify-content: space-between; gap: 16px; font-size: 12px; line-height: 1.3; color: var(--soft)}
.mx-ends :last-child {text-align: right}
.mx-bar {display: flex; flex-wrap: wrap; align-items: center; gap: 6px; margin: 8px 0}
.mx button, .mx select {font: inherit; font-size: 13px; color: var(--ink); background: var(--page); cursor: pointer;
  border: 1px solid var(--soft); border-radius: 6px; padding: 3px 10px; height: 30px; min-width: 34px}
.mx button:hover {background: var(--plate)} .mx button:disabled {opacity: .4; cursor: default}
.mx button.mx-play {background: var(--ink); color: var(--page); border-color: var(--ink); min-width: 84px}
.mx .mx-bar input[type=range] {flex: 1 1 120px; max-width: 340px; min-height: 0; accent-color: var(--ink)}
.mx .mx-bar label {font-size: 13px; font-weight: 400; color: var(--soft); display: inline-flex; align-items: center; gap: 6px}
.mx .mx-bar select {width: auto; padding: 3px 10px}
.mx-stage {position: relative; background: var(--plate); border-radius: 10px; padding: 12px 14px}
.mx-tokens {display: flex; flex-wrap: wrap; row-gap: 5px; font: 15px/1.3 ui-monospace, "DejaVu Sans Mono", Menlo, monospace;
  outline-offset: 4px}
.mx-token {position: relative; padding: 3px 1px 10px; min-width: 20px; white-space: pre; cursor: pointer;
  border-radius: 3px; text-align: center; margin-right: 1px}
.mx-token.n {background: color-mix(in srgb, var(--naive) var(--tint), transparent)}
.mx-token.e {background: color-mix(in srgb, var(--expert) var(--tint), transparent)}
.mx-token.later {opacity: .13} .mx-token.now {box-shadow: 0 0 0 2.5px var(--ink); z-index: 1}
.mx-token.differ::before {content: ""; position: absolute; right: 1px; top: 1px; width: 5px; height: 5px;
  border-radius: 50%; background: var(--ink)}
.mx-token i {position: absolute; left: 2px; right: 2px; bottom: 4px; height: 2px; background: color-mix(in srgb, var(--ink) 32%, transparent)}
.mx-token i::before {content: ""; position: absolute; left: calc(var(--lam) * 100%); top: -3px; width: 1px; height: 8px;
  background: var(--ink)}
.mx-token i::after {content: ""; position: absolute; left: calc(var(--u) * 100% - 2.5px); top: -1.5px; width: 5px;
  height: 5px; border-radius: 50%; background: var(--dot)}
.mx-token.n i {--dot: var(--naive-ink)} .mx-token.e i {--dot: var(--expert-ink)}
.mx-break {flex-basis: 100%; height: 0}
.mx-wire {position: absolute; width: 2px; background: var(--ink); opacity: .55; pointer-events: none}
.mx-card {position: relative; margin-top: 12px; background: var(--page); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px 12px; width: min(100%, 860px); min-height: 172px;
  display: grid; grid-template-columns: minmax(170px, 210px) 1fr 1fr; gap: 4px 18px; transition: margin-left .12s}
.mx-card h4 {margin: 0 0 3px; font-size: 13px; font-weight: 650} .mx-card h4 small {font-weight: 400}
.mx-scale {position: relative; height: 12px; margin: 8px 0 20px; border-radius: 3px}
.mx-scale b, .mx-scale u {position: absolute; text-decoration: none}
.mx-scale b {width: 2px; margin-left: -1px; top: -3px; height: 18px; background: var(--ink)}
.mx-scale u {width: 14px; height: 14px; margin: -1px -7px; border-radius: 50%; border: 3px solid var(--ink); background: var(--page)}
.mx-scale span {position: absolute; top: 15px; font-size: 11px; color: var(--soft)}
.mx-row {display: grid; grid-template-columns: minmax(0, 96px) minmax(48px, 1fr) 44px; gap: 6px; align-items: center; font-size: 12px;
  height: 21px}
.mx-row code {font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow: hidden; text-overflow: ellipsis; white-space: pre;
  background: none; color: inherit; padding: 0; text-align: right}
.mx-row.hit {font-weight: 700}
.mx-row div {height: 12px; border-radius: 2px; min-width: 1px}
.mx-row.n div {background: var(--naive)} .mx-row.e div {background: var(--expert)}
.mx-row.muted div {opacity: .5}
.mx-film {display: grid; grid-auto-flow: column; grid-auto-columns: minmax(96px, 1fr); gap: 6px; overflow-x: auto; padding: 3px}
.mx button.mx-frame {height: auto; min-width: 0; text-align: left; padding: 5px 7px 6px; line-height: 1.25; border-color: var(--line);
  font-size: 12px; display: flex; flex-direction: column; justify-content: flex-start; background: var(--plate); align-self: stretch}
.mx button.mx-frame[aria-checked=true] {border-color: var(--ink); box-shadow: inset 0 0 0 1.5px var(--ink)}
.mx-frame b {display: block; font-size: 13px} .mx-frame.ok b {color: var(--good)} .mx-frame.no b {color: var(--bad)}
.mx-frame span {display: block; margin-top: 4px; overflow: hidden; text-overflow: ellipsis}
.mx-barcode {display: block; width: 100%; height: 12px; border-radius: 2px; margin-top: 4px}
.mx-why {border-left: 4px solid var(--line); padding: 2px 10px; margin: 8px 0; max-width: 90ch}
.mx-why.ok {border-color: var(--good)} .mx-why.no {border-color: var(--bad)} .mx-why.mind {border-color: var(--naive)}
.mx-two {display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 4px 28px}
.mx-heat {font: 14px/1.9 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre-wrap; overflow-wrap: anywhere}
.mx-heat span {padding: 2px 0; border-radius: 2px}
.mx-mean {display: grid; grid-template-columns: 1fr auto; gap: 8px; align-items: center; font-size: 13px}
.mx-mean div {height: 10px; border-radius: 3px; background: rgb(var(--heat)); min-width: 2px}
.mx-key {display: inline-block; width: 110px; height: 10px; border-radius: 3px; vertical-align: middle;
  background: linear-gradient(90deg, transparent, rgba(var(--heat), .55)); border: 1px solid var(--line)}
.mx-busy {opacity: 0; visibility: hidden; font-size: 13px; color: var(--soft); margin-left: auto}
.mx.mx-working .mx-busy {visibility: visible; opacity: 1; transition: opacity 0s .3s}
.mx-busy::before {content: ""; display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 50%;
  border: 2px solid var(--soft); border-top-color: transparent; animation: mx-turn .8s linear infinite; vertical-align: -1px}
@keyframes mx-turn {to {transform: rotate(360deg)}}
@media (prefers-reduced-motion: reduce) {.mx * {transition: none !important} .mx-busy::before {animation: none}}
@container (max-width: 640px) {.mx-card {grid-template-columns: 1fr 1fr} .mx-card > :first-child {grid-column: 1 / -1}}
@container (max-width: 460px) {.mx-card {grid-template-columns: 1fr}}
.mx-hidden {position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)}
`;
const SPEEDS = [["slow", 1400], ["normal", 600], ["fast", 220]];
const HOT = 8;  // nats at which the heat is full

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  node.setAttribute("data-lm-suppress-shortcuts", "true");  // else JupyterLab takes the arrow keys of whatever has the focus
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true && !name.startsWith("aria")) node.setAttribute(name, "");
    else if (value != null && (value !== false || name.startsWith("aria"))) node.setAttribute(name, value);
  }
  node.append(...children.filter(c => c != null));
  return node;
}
const show = text => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const quote = text => "“" + show(text).trim() + "”";
const letter = side => side[0];
const percent = p => (p >= 0.9995 ? "100" : p >= 0.1 ? (100 * p).toFixed(0) : (100 * p).toFixed(1)) + "%";
const other = side => side === "naive" ? "expert" : "naive";
const colour = side => make("span", {class: "mx-" + side}, side);

// Why an attempt ended as it did: a word for its frame, its class and a sentence.
function explain(attempt, number, answer) {
  const said = attempt.said == null ? "" : quote(attempt.said);
  if (attempt.accepted == null && !attempt.reason) return ["being written", "", "This attempt is being written."];
  switch (attempt.reason) {
  case "": return ["accepted", "ok",
    `Attempt ${number} is accepted: it ends with a stop token and its answer is ${quote(answer)}.`];
  case "another_name": return ["accepted", "mind",
    `Attempt ${number} is accepted, although its sentence names something else than ${quote(answer)}. Where the naive ` +
    `side wrote, it put its own guess into the sentence; the expert side saw the true answer and put it into the ` +
    `box. Only the final answer is checked, so the target is kept, and MixSD counts such targets.`];
  case "wrong_answer": return ["says " + said, "no",
    `Attempt ${number} is refused: its answer is ${said}, and the true one is ${quote(answer)}. The naive side wrote a ` +
    `decisive token with its own guess, and what follows stays true to it.`];
  case "no_answer": return ["no answer", "no", `Attempt ${number} is refused: it ends without a final answer.`];
  case "prompt_too_long": return ["no room", "no", `Attempt ${number} is refused: the prompt fills the model's context.`];
  default: return ["never ends", "no",
    `Attempt ${number} is refused: it reached ${attempt.tokens.length} tokens without a stop token.`];
  }
}

class Explainer {
  constructor(element, trace, options) {
    if (!document.getElementById("mx-style")) document.head.append(make("style", {id: "mx-style"}, STYLE));
    this.element = element;
    this.options = options;
    this.position = null;  // of the current token; null until a person has chosen one
    this.shown = null;  // number of the attempt that is shown; null for the last
    this.speed = 600;
    this.root = make("section", {class: "mx", "aria-label": options.label || "Live mixing of one target"});
    element.replaceChildren(this.root);
    this.resize = () => this.anchor();
    window.addEventListener("resize", this.resize);
    this.build();
    this.update(trace);
    if (options.autoplay) { this.go(-1); this.play(); }
  }

  build() {
    const button = (label, text, press, name = "") =>
      make("button", {type: "button", "aria-label": label, title: label, onclick: press, class: name}, text);
    this.fact = make("p", {class: "mx-fact"});
    this.range = make("input", {type: "range", min: 0, max: 1, step: 0.05, "aria-label": "λ, the share of naive tokens",
      oninput: () => this.moveLam(+this.range.value)});
    this.ruler = make("div", {class: "mx-ruler"});
    this.playButton = button("play", "▶ play", () => this.timer ? this.pause() : this.play(), "mx-play");
    this.scrub = make("input", {type: "range", min: 0, step: 1, "aria-label": "token", oninput: () => { this.pause(); this.go(+this.scrub.value); }});
    this.count = make("small", {});
    const speed = make("select", {"aria-label": "speed", onchange: () => { this.speed = +speed.value; if (this.timer) this.play(); }},
      ...SPEEDS.map(([name, ms]) => make("option", {value: ms, selected: ms === 600}, name)));
    const step = by => () => { this.pause(); this.go(this.at + by); };
    this.busySign = make("span", {class: "mx-busy", role: "status"});
    this.bar = make("div", {class: "mx-bar", role: "group", "aria-label": "step through the target"},
      this.playButton, button("first token", "|◀", () => { this.pause(); this.go(0); }), button("one token back", "◀", step(-1)),
      button("one token on", "▶|", step(1)), this.scrub, this.count, make("label", {}, "speed", speed),
      this.options.onCoins ? button("new coins", "⚄ new coins", () => this.options.onCoins()) : null, this.busySign);
    this.tokens = make("div", {class: "mx-tokens", role: "listbox", tabindex: 0, "aria-orientation": "horizontal",
      "aria-label": "tokens of the mixed target", onkeydown: e => this.press(e)});
    this.wire = make("div", {class: "mx-wire"});
    this.card = make("div", {class: "mx-card"});
    this.stage = make("div", {class: "mx-stage"}, this.tokens, this.wire, this.card);
    this.film = make("div", {class: "mx-film", role: "radiogroup", "aria-label": "attempts", onkeydown: e => this.pressFrame(e)});
    this.filmTitle = make("h3", {});
    this.why = make("p", {class: "mx-why", "aria-live": "polite"});
    this.below = make("div", {class: "mx-two"});
    this.message = make("p", {class: "mx-why"});
    this.body = make("div", {}, this.fact, this.ruler, this.bar, this.stage, this.why, this.filmTitle, this.film,
      make("h3", {}, "Beside the canonical target, on which SFT trains", make("small", {}, "the darker a token, the less the model expected it: ",
        make("span", {class: "mx-key", role: "img", "aria-label": `colour scale from 0 to ${HOT} nats`}), ` 0 to ${HOT} nats or more`)), this.below);
    this.root.append(this.message, this.body);
  }

  update(trace, options) {
    Object.assign(this.options, options);
    const before = this.trace;
    if (trace && performance.now() - this.moved < 800 && Math.abs(trace.lam - this.range.value) > 1e-6) return;  // of an earlier λ
    this.busy(false);
    this.body.hidden = !trace;
    this.message.hidden = !!trace;
    if (!trace) { this.message.textContent = "Nothing is mixed yet."; return; }
    this.trace = structuredClone(trace);
    for (const name of ["lam", "seed", "temperature", "state"]) this.root.dataset[name] = trace[name];
    if (!before || before.question !== trace.question || before.answer !== trace.answer) { this.position = null; this.pause(); }
    this.shown = null;
    this.draw();
  }

  fail(words) {
    this.update(null);
    this.message.textContent = words;
  }

  busy(on, words = "mixing …") {
    this.busySign.textContent = on ? words : "";
    this.root.classList.toggle("mx-working", on);
  }
  destroy() { this.pause(); window.removeEventListener("resize", this.resize); this.root.remove(); }

  moveLam(value) {
    this.moved = performance.now();
    this.trace.lam = value;
    this.drawRuler();
    this.options.onLam(value);
  }

  get number() { return this.shown ?? this.trace.attempts.length - 1; }
  get attempt() { return this.trace.attempts[this.number]; }
  get lam() { return this.trace.lam; }
  get at() {
    const n = this.attempt.tokens.length;
    if (this.position != null) return Math.min(this.position, n - 1);
    // at first the token at which the sides disagree most
    const share = t => t.other === t.text ? 1 : (t[other(t.side)] || []).find(([text]) => text === t.text)?.[1] ?? 0;
    const shares = this.attempt.tokens.map(share);
    return n ? shares.indexOf(Math.min(...shares)) : -1;
  }

  draw() {
    const {question, answer, model, temperature, seed} = this.trace;
    const settings = [model, `temperature ${temperature}`, seed == null ? null : `seed ${seed}`].filter(Boolean).join(" · ");
    this.fact.replaceChildren("“" + question + "” → ", make("b", {}, answer), make("small", {}, settings));
    this.drawTokens();
    this.drawFilm();
    this.drawBelow();
    this.mark();
  }

  drawRuler() {
    const {lam} = this, live = !!this.options.onLam, percentage = 100 * lam + "%";
    const zone = (side, width, text) => make("div", {class: "mx-zone " + letter(side), style: `width: ${100 * width}%`},
      width > 0.14 ? make("span", {class: "mx-" + side}, text) : null);
    const heights = [0, 9, -9, 5, -5], end = this.playing ? this.at : Infinity;
    const coins = this.attempt.tokens.map((t, k) => t.u == null ? null : make("span", {
      class: `mx-coin ${t.u < lam ? "n" : "e"}${k === this.at ? " now" : k > end ? " later" : ""}`,
      style: `left: ${100 * t.u}%; top: ${54 + (k === this.at ? 0 : heights[k % 5])}px`}));
    const line = make("div", {class: "mx-lam", style: `left: ${percentage}`}, make("span", {}, `λ = ${lam.toFixed(2)}`));
    const ends = make("div", {class: "mx-ends"}, make("span", {}, "λ = 0: expert alone, which sees the answer"),
      make("span", {}, "λ = 1: naive alone, which sees only the question"));
    if (live) this.range.value = this.trace.lam;
    const parts = [zone("naive", lam, "coin below λ: naive writes"), zone("expert", 1 - lam, "expert writes"),
      ...coins.filter(Boolean), line, ends];
    if (live && this.ruler.contains(this.range)) {
      for (const child of [...this.ruler.children]) if (child !== this.range) child.remove();
      this.range.before(...parts.slice(0, -1));
      this.range.after(ends);
    } else this.ruler.replaceChildren(...parts.slice(0, -1), ...(live ? [this.range] : []), ends);
  }

  drawTokens() {
    const {lam} = this, children = [];
    this.attempt.tokens.forEach((t, k) => {
      const differs = t.other != null && t.other !== t.text;
      const compare = t.u == null ? "" : `, coin ${t.u.toFixed(2)} ${t.u < lam ? "below" : "above"} lambda`;
      const says = t.other == null ? "" : differs ? `, ${other(t.side)} would write ${show(t.other)}` : ", both agree";
      children.push(make("span", {class: `mx-token ${letter(t.side)}${differs ? " differ" : ""}`, role: "option",
        id: `mx-${this.id}-${k}`, "data-id": t.id, style: `--u: ${t.u ?? 0}; --lam: ${lam}`, "data-source": t.side,
        "aria-label": `${show(t.text)}, ${t.side}${compare}${says}`,
        onmouseenter: () => this.hover(k), onmouseleave: () => this.hover(null),
        onclick: () => { this.pause(); this.go(k); }}, show(t.text), t.u == null ? null : make("i")));
      if (t.text.includes("\n")) children.push(make("span", {class: "mx-break", role: "presentation"}));
    });
    this.tokens.replaceChildren(...children);
    this.scrub.max = this.attempt.tokens.length - 1;
  }
  get id() { return this._id ??= Math.random().toString(36).slice(2, 8); }
  get spans() { return this.tokens.querySelectorAll(".mx-token"); }

  // Mark the current token everywhere and show its card.
  mark() {
    const k = this.at, spans = this.spans;
    spans.forEach((span, j) => {
      span.classList.toggle("now", j === k);
      span.classList.toggle("later", this.playing && j > k);
      span.setAttribute("aria-selected", j === k);
    });
    this.tokens.setAttribute("aria-activedescendant", k >= 0 ? `mx-${this.id}-${k}` : "");
    this.scrub.value = k;
    this.count.textContent = k < 0 ? "" : `token ${k + 1} of ${spans.length}`;
    this.drawRuler();
    this.drawCard(k);
    this.sayWhy();
  }

  drawCard(k) {
    const t = this.attempt.tokens[k], {lam} = this;
    this.cardToken = k;
    this.card.style.visibility = this.wire.style.visibility = t ? "visible" : "hidden";
    if (!t) return;
    const hit = t.side, said = t.other == null ? [] : t.other === t.text
      ? [make("p", {}, "The ", colour(other(hit)), " side would write the same.")]
      : [make("p", {}, "The ", colour(other(hit)), " side would write ", make("b", {}, quote(t.other)), ".")];
    const scale = t.u == null ? null : make("div", {class: "mx-scale", role: "img",
      "aria-label": `coin ${t.u.toFixed(2)}, lambda ${lam.toFixed(2)}`,
      style: `background: linear-gradient(90deg, var(--naive) ${100 * lam}%, var(--expert) ${100 * lam}%)`},
      make("b", {style: `left: ${100 * lam}%`}), make("u", {style: `left: ${100 * t.u}%`}),
      make("span", {style: "left: 0"}, "0"), make("span", {style: "right: 0"}, "1"),
      make("span", {style: `left: ${100 * lam}%; transform: translateX(-50%)`}, lam > 0.08 && lam < 0.92 ? "λ" : ""));
    const verdict = t.u == null ? null : make("p", {}, `coin ${t.u.toFixed(2)} ${t.u < lam ? "<" : "≥"} λ ${lam.toFixed(2)}` + ": ",
      colour(hit), " writes ", make("b", {}, quote(t.text)), ".");
    const first = make("div", {}, make("h4", {}, `token ${k + 1}`), scale, verdict, ...said);
    const bars = side => make("div", {}, make("h4", {}, colour(side), make("small", {}, side === "naive" ? "  sees the question" : "  sees the answer too")),
      ...(t[side] || []).map(([text, p]) => make("div", {class: `mx-row ${letter(side)}${text === t.text ? " hit" : ""}${side === hit ? "" : " muted"}`},
        make("code", {title: show(text)}, show(text)), make("div", {style: `width: ${100 * p}%`}), percent(p))),
      t[side] ? null : make("small", {}, "not scored"));
    this.card.replaceChildren(first, bars("naive"), bars("expert"));
    this.anchor();
  }

  // Put the card under its token, and draw the wire between them.
  anchor() {
    const span = this.spans[this.cardToken];
    if (!span) return;
    const stage = this.stage.getBoundingClientRect(), box = span.getBoundingClientRect();
    if (!stage.width) return;
    const middle = box.left + box.width / 2 - stage.left, space = stage.width - 28 - this.card.offsetWidth;
    this.card.style.marginLeft = Math.max(0, Math.min(space, middle - 14 - this.card.offsetWidth / 3)) + "px";
    const top = box.bottom - stage.top + 2;
    Object.assign(this.wire.style, {left: middle - 1 + "px", top: top + "px",
      height: Math.max(0, this.card.getBoundingClientRect().top - stage.top - top) + "px"});
  }

  drawFilm() {
    const {attempts, state, answer} = this.trace, n = attempts.length;
    const end = {accepted: `accepted at attempt ${n}`, running: "trying again …",
      discarded: n > 1 ? `discarded: none of ${n} attempts was accepted` : "discarded: the only attempt was refused"}[state];
    this.filmTitle.replaceChildren("Attempts", make("small", {}, end));
    this.film.replaceChildren(...attempts.map((a, k) => {
      const [word, kind] = explain(a, k + 1, answer), ok = a.accepted, on = k === this.number;
      const width = 100 / Math.max(1, a.tokens.length);
      const stripes = a.tokens.map((t, j) => `var(--${t.side}) ${(j * width).toFixed(2)}% ${((j + 1) * width).toFixed(2)}%`);
      return make("button", {type: "button", role: "radio", "aria-checked": on, tabindex: on ? 0 : -1, class: `mx-frame ${ok ? "ok" : "no"}`,
        onclick: () => this.choose(k), "aria-label": `attempt ${k + 1}: ${word}`},
        make("b", {}, `${k + 1} ${ok ? "✓" : a.accepted == null ? "…" : "✗"}`),
        make("span", {class: "mx-barcode", style: `background: linear-gradient(90deg, ${stripes.join(", ") || "transparent, transparent"})`}),
        make("span", {}, word));
    }));
  }

  sayWhy() {
    const [, kind, sentence] = explain(this.attempt, this.number + 1, this.trace.answer);
    const tail = this.number === this.trace.attempts.length - 1 && this.trace.state === "discarded" && this.trace.attempts.length > 1
      ? " No attempt is left, so the fact is left out of the training." : "";
    if (this.why.textContent !== sentence + tail) this.why.textContent = sentence + tail;
    this.why.className = "mx-why " + kind;
  }

  drawBelow() {
    const {canonical} = this.trace, mixed = this.attempt;
    const heat = side => make("div", {class: "mx-heat"}, ...side.tokens.map(t => make("span", {
      title: t.nll == null ? "" : `${show(t.text)}: NLL ${t.nll.toFixed(2)} nats`,
      style: `background: rgba(var(--heat), ${(0.55 * Math.min(1, (t.nll ?? 0) / HOT)).toFixed(3)})`}, t.text.replace(/\n/g, "⏎\n"))));
    const worst = Math.max(canonical?.nll ?? 0, mixed.nll ?? 0, 0.5);
    const column = (title, side) => side && make("div", {}, make("div", {}, make("b", {}, title)),
      side.nll == null ? null : make("div", {class: "mx-mean"}, make("div", {style: `width: ${100 * side.nll / worst}%`}),
        make("span", {}, `${side.nll.toFixed(2)} nats a token`)), heat(side));
    this.below.replaceChildren(...[column("canonical target", canonical), column(`mixed target, attempt ${this.number + 1}`, mixed)].filter(Boolean));
  }

  choose(k) {
    this.pause();
    this.shown = k;
    this.draw();
    this.film.children[k].focus();
  }
  pressFrame(event) {
    const by = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!by) return;
    event.preventDefault();
    const n = this.trace.attempts.length;
    this.choose((this.number + by + n) % n);
  }
  press(event) {
    const last = this.attempt.tokens.length - 1;
    const to = {ArrowRight: this.at + 1, ArrowDown: this.at + 1, ArrowLeft: this.at - 1, ArrowUp: this.at - 1, Home: 0, End: last}[event.key];
    if (to == null && event.key !== " " && event.key !== "Enter") return;
    event.preventDefault();
    if (to == null) return this.timer ? this.pause() : this.play();
    this.pause();
    this.go(to);
  }
  hover(k) {
    if (this.timer) return;
    this.drawCard(k ?? this.at);
  }
  go(k) {
    this.position = Math.max(this.playing ? -1 : 0, Math.min(this.attempt.tokens.length - 1, k));
    this.mark();
  }
  play() {
    clearInterval(this.timer);
    if (!this.playing && (this.position == null || this.at >= this.attempt.tokens.length - 1)) this.position = -1;
    this.playing = true;
    this.playButton.textContent = "❚❚ pause";
    this.playButton.setAttribute("aria-label", "pause");
    const step = () => this.at + 1 < this.attempt.tokens.length ? this.go(this.at + 1) : this.pause();
    this.timer = setInterval(step, this.speed);
    step();
  }
  pause() {
    clearInterval(this.timer);
    const was = this.playing;
    this.timer = this.playing = null;
    this.playButton.textContent = "▶ play";
    this.playButton.setAttribute("aria-label", "play");
    if (was) this.mark();
  }
}

export function mount(element, trace, options = {}) { return new Explainer(element, trace, {...options}); }


// In a notebook the engine mixing.js makes the traces in this page if the kernel has sent the `files` of a model and a `fact`;
// else the kernel sends each `trace`. The traits lam, temperature, seed, question and answer are linked to the controls.
const PAUSE = 120;  // milliseconds between two drawings of a target that is being written
const PATIENCE = 10000;  // milliseconds after which a kernel that has not answered is missed
const mixers = new WeakMap();  // by files
let engine;

async function openMixer(files) {
  engine ??= import(URL.createObjectURL(new Blob([files.engine], {type: "text/javascript"})));
  const {Mixer, runInSlices} = await engine;
  if (!mixers.has(files)) {
    const {buffer, byteOffset, byteLength} = files.weights;
    mixers.set(files, new Mixer({...files, weights: buffer.slice(byteOffset, byteOffset + byteLength)}));
  }
  return {mixer: mixers.get(files), runInSlices};
}

// Mix the fact for the other λ of the slider, the nearest first, while nobody waits.
function* readAhead(mixer, fact, lam, settings) {
  const others = Array.from({length: 21}, (_, k) => k / 20).sort((a, b) => Math.abs(a - lam) - Math.abs(b - lam));
  for (const other of others) yield* mixer.trace(fact, other, settings);
}

function render({model, el}) {
  const state = (...names) => Object.fromEntries(names.map(name => [name, model.get(name)]));
  // the links save what is set here, with the controls
  const options = {onLam: value => model.set("lam", value), onCoins: () => model.set("seed", model.get("seed") + 1)};
  const view = mount(el, model.get("fact").id ? null : model.get("trace"), options);
  let running = new AbortController(), texts = null, timer;

  const mixHere = async () => {
    running.abort();
    const {signal} = running = new AbortController();
    view.busy(true);
    try {
      const {mixer, runInSlices} = await openMixer(model.get("files")), {fact: {templates, ...picked}, lam, ...sampling} = state("fact", "lam", "temperature", "seed");
      mixer.prompts.corpora[picked.corpus] = templates;
      const fact = mixer.editFact(picked, texts.question, texts.answer);
      let shown = view.trace ? performance.now() : -Infinity;
      const show = trace => {
        if (performance.now() - shown < PAUSE) return;
        view.update(trace);
        view.busy(true);
        shown = performance.now();
      };
      const trace = await runInSlices(mixer.trace(fact, lam, sampling), show, {signal});
      if (!trace || signal.aborted) return;
      view.update(trace);
      await runInSlices(readAhead(mixer, fact, lam, sampling), () => {}, {signal, slice: 8});
    } catch (error) {
      if (!signal.aborted) view.fail(error.message);
    }
  };
  const later = (act, delay) => { clearTimeout(timer); timer = setTimeout(act, delay); };
  const draw = (delay = 0) => {
    if (model.get("fact").id) return later(mixHere, delay);
    view.busy(true);
    later(() => view.busy(true, "The kernel does not answer. What is shown belongs to earlier settings."), PATIENCE);
  };
  const pick = () => {
    const {question, answer} = model.get("fact");
    texts = {question, answer};
    running.abort();
    if (question) draw();
    else receive();
  };
  const read = () => {
    const {question, answer} = state("question", "answer");
    if (texts && (question !== texts.question || answer !== texts.answer)) { texts = {question, answer}; draw(30); }
  };
  const receive = () => {
    if (model.get("fact").id) return;
    clearTimeout(timer);
    view.update(model.get("trace"));
    view.busy(model.get("busy"));
  };
  const handlers = {"change:fact": pick, "change:files": pick, "change:question change:answer": read,
    "change:lam change:temperature change:seed": () => draw(), "change:trace change:busy": receive};
  for (const [names, handler] of Object.entries(handlers)) model.on(names, handler);
  pick();
  if (model.get("question")) read();
  return () => {
    for (const [names, handler] of Object.entries(handlers)) model.off(names, handler);
    running.abort();
    clearTimeout(timer);
    view.destroy();
  };
}
export default {render};
