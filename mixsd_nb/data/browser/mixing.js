// Mixing in a browser: a lab model, its tokenizer, both conditionals, keyed draws and the verifier, in plain JavaScript.
//
//   const mixer = new Mixer(await loadFiles(folder, prompts));
//   const [fact] = mixer.facts("kgfact-small");                 // or mixer.editFact(fact, question, answer)
//   const record = mixer.mix(mixer.makeItem(fact), 0.5);        // the same tokens as mixsd_nb.methods.mixing.mix
//   for (const trace of mixer.trace(fact, 0.5)) draw(trace);    // after every token, for a display
//
// The module has no dependencies and needs no build step. Each part names the Python function that it repeats.

// ---------------------------------------------------------------- keyed draws (mixsd_nb.models.engine)

const MASK = (1n << 64n) - 1n;
const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n];
const SIGMA = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4], [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13], [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11], [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5], [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0]];
const LANES = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15], [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]];

const rotate = (x, n) => (x >> n) | ((x << (64n - n)) & MASK);

/** Mix one block of 128 bytes into the state of a BLAKE2b hash. */
function compress(state, words, count, last) {
  const v = [...state, ...IV];
  v[12] ^= BigInt(count);
  if (last) v[14] ^= MASK;
  for (let round = 0; round < 12; round++) {
    const order = SIGMA[round % 10];
    LANES.forEach(([a, b, c, d], k) => {
      v[a] = (v[a] + v[b] + words[order[2 * k]]) & MASK;
      v[d] = rotate(v[d] ^ v[a], 32n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = rotate(v[b] ^ v[c], 24n);
      v[a] = (v[a] + v[b] + words[order[2 * k + 1]]) & MASK;
      v[d] = rotate(v[d] ^ v[a], 16n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = rotate(v[b] ^ v[c], 63n);
    });
  }
  for (let k = 0; k < 8; k++) state[k] ^= v[k] ^ v[k + 8];
}

/** The first eight bytes of a BLAKE2b hash with a digest of eight bytes, as an unsigned integer. */
export function blake2b64(bytes) {
  const state = [...IV], blocks = Math.max(1, Math.ceil(bytes.length / 128));
  state[0] ^= 0x01010008n;
  const padded = new DataView(new ArrayBuffer(128 * blocks));
  new Uint8Array(padded.buffer).set(bytes);
  for (let block = 0; block < blocks; block++) {
    const words = Array.from({ length: 16 }, (_, k) => padded.getBigUint64(128 * block + 8 * k, true));
    compress(state, words, Math.min(bytes.length, 128 * (block + 1)), block === blocks - 1);
  }
  return state[0];
}

/** The hash of anything with a stable text form (`row_key`); here it is unsigned. */
export const rowKey = (...parts) => blake2b64(new TextEncoder().encode(parts.join("\x1f")));

function scramble(x) {
  x = (x + 0x9e3779b97f4a7c15n) & MASK;
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return x ^ (x >> 31n);
}

const toUniform = (x) => (Number(x >> 11n) + 0.5) * 2 ** -53;

/** A uniform draw in (0, 1) for a key and its counters (`keyed_uniform`). */
export const keyedUniform = (key, ...counters) => toUniform(counters.reduce((x, c) => scramble(x ^ BigInt(c)), scramble(key)));

/** The positions at which the naive conditional writes (`picks`). */
export function drawPicks(seed, id, sample, attempt, n, lam) {
  const key = rowKey("pick", seed, id, sample, attempt);
  return Array.from({ length: n }, (_, t) => keyedUniform(key, t) < lam);
}

/** The keyed Gumbel noise of tokens at one position (`gumbel`). */
function drawNoise(key, position, ids) {
  const row = scramble(scramble(key) ^ BigInt(position));
  return ids.map((id) => -Math.log(-Math.log(toUniform(scramble(row ^ BigInt(id))))));
}

// ---------------------------------------------------------------- tokenizer

/** The character that stands for each byte in a byte-level vocabulary. */
function byteCharacters() {
  const printable = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, b) => String.fromCharCode(printable(b) ? b : next++));
}

/** The regular expression of tokenizer.json in the notation of JavaScript. */
function translatePattern(pattern) {
  const white = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
  let inClass = false;
  const parts = pattern.match(/\\.|[\s\S]/gu).map((part) => {
    if (part === "[") inClass = true;
    if (part === "]") inClass = false;
    if (part === "\\s") return inClass ? white : `[${white}]`;
    return part === "\\d" ? "\\p{Nd}" : part;
  });
  return new RegExp(parts.join(""), "gu");
}

/** A byte-level unigram tokenizer, read from tokenizer.json. */
export class Tokenizer {
  constructor(spec) {
    const [split] = spec.pre_tokenizer.pretokenizers;
    if (spec.model.type !== "Unigram" || split.type !== "Split" || split.behavior !== "Isolated") {
      throw new Error(`tokenizer.json must describe a Unigram model after a Split, got ${spec.model.type} after ${split.type}`);
    }
    this.pattern = translatePattern(split.pattern.Regex);
    this.pieces = spec.model.vocab.map(([piece]) => piece);
    this.scores = spec.model.vocab.map(([, score]) => score);
    this.ids = new Map(this.pieces.map((piece, id) => [piece, id]));
    this.longest = Math.max(...this.pieces.map((piece) => piece.length));
    this.characters = byteCharacters();
    this.bytes = new Map(this.characters.map((c, b) => [c, b]));
    this.special = new Map(spec.added_tokens.map((t) => [t.content, t.id]));
    this.specialIds = new Set(this.special.values());
    const escaped = [...this.special.keys()].sort((a, b) => b.length - a.length).map((s) => s.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    this.specialPattern = new RegExp(`(${escaped.join("|")})`);
    this.known = new Map(); // pieces of text that were encoded before
  }

  get size() { return this.pieces.length; }

  /** The token ids of a text, in which special tokens may stand. */
  encode(text) {
    return text.split(this.specialPattern).flatMap((part) => this.special.has(part) ? [this.special.get(part)] : this.encodePlain(part));
  }

  encodePlain(text) {
    const ids = [];
    let end = 0;
    for (const match of text.matchAll(this.pattern)) { // what no alternative matches is a piece of its own
      if (match.index > end) ids.push(...this.encodePiece(text.slice(end, match.index)));
      end = match.index + match[0].length;
      ids.push(...this.encodePiece(match[0]));
    }
    if (end < text.length) ids.push(...this.encodePiece(text.slice(end)));
    return ids;
  }

  /** The segmentation with the highest sum of scores; of two equal ones, that which ends in the longer token. */
  encodePiece(piece) {
    if (this.known.has(piece)) return this.known.get(piece);
    const text = Array.from(new TextEncoder().encode(piece), (b) => this.characters[b]).join("");
    const best = [{ score: 0 }];
    for (let start = 0; start < text.length; start++) {
      for (let end = start + 1; end <= Math.min(text.length, start + this.longest); end++) {
        const id = this.ids.get(text.slice(start, end));
        if (id === undefined) continue;
        const score = this.scores[id] + best[start].score;
        if (!best[end] || score > best[end].score) best[end] = { score, start, id };
      }
    }
    const ids = [];
    for (let end = text.length; end > 0; end = best[end].start) ids.unshift(best[end].id);
    this.known.set(piece, ids);
    return ids;
  }

  /** The text of token ids. */
  decode(ids, skipSpecial = false) {
    const runs = [[]];
    for (const id of ids) {
      if (!this.specialIds.has(id)) runs.at(-1).push(...Array.from(this.pieces[id], (c) => this.bytes.get(c)));
      else if (!skipSpecial) runs.at(-1).push(...new TextEncoder().encode(this.pieces[id]));
    }
    return runs.map((bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes))).join("");
  }
}

// ---------------------------------------------------------------- model (Qwen3)

/** The tensors of a safetensors file as Float32Arrays; bfloat16 and float16 are read exactly. */
export function readSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  delete header.__metadata__;
  const read = { BF16: readBfloat16, F16: readFloat16, F32: (bytes) => new Float32Array(bytes) };
  return Object.fromEntries(Object.entries(header).map(([name, { dtype, data_offsets: [start, end] }]) => {
    if (!read[dtype]) throw new Error(`weights must be BF16, F16 or F32, got ${dtype} in ${name}`);
    return [name, read[dtype](buffer.slice(8 + length + start, 8 + length + end))];
  }));
}

function readBfloat16(bytes) {
  return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (x) => x << 16).buffer);
}

function readFloat16(bytes) {
  return Float32Array.from(new Uint16Array(bytes), (x) => {
    const sign = x >> 15 ? -1 : 1, exponent = (x >> 10) & 31, fraction = x & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
}

/** y[c] = W x[c] for n columns: W has `rows` rows of `width` weights; four rows and two columns are computed together. */
function multiply(W, rows, width, x, n, y) {
  let c = 0;
  for (; c + 1 < n; c += 2) multiplyTwo(W, rows, width, x, c * width, (c + 1) * width, y, c * rows, (c + 1) * rows);
  if (c < n) multiplyTwo(W, rows, width, x, c * width, c * width, y, c * rows, c * rows);
  return y;
}

function multiplyTwo(W, rows, width, x, x0, x1, y, y0, y1) {
  let r = 0;
  for (; r + 3 < rows; r += 4) {
    const w0 = r * width, w1 = w0 + width, w2 = w1 + width, w3 = w2 + width;
    let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    for (let k = 0; k < width; k++) {
      const p = x[x0 + k], q = x[x1 + k], s = W[w0 + k], t = W[w1 + k], u = W[w2 + k], v = W[w3 + k];
      a0 += s * p; a1 += t * p; a2 += u * p; a3 += v * p;
      b0 += s * q; b1 += t * q; b2 += u * q; b3 += v * q;
    }
    y[y0 + r] = a0; y[y0 + r + 1] = a1; y[y0 + r + 2] = a2; y[y0 + r + 3] = a3;
    y[y1 + r] = b0; y[y1 + r + 1] = b1; y[y1 + r + 2] = b2; y[y1 + r + 3] = b3;
  }
  for (; r < rows; r++) {
    let a = 0, b = 0;
    for (let k = 0; k < width; k++) { a += W[r * width + k] * x[x0 + k]; b += W[r * width + k] * x[x1 + k]; }
    y[y0 + r] = a; y[y1 + r] = b;
  }
}

/** Divide each group of `size` values of x by its root mean square, and multiply it by the weights. */
function normalise(x, size, weight, epsilon, out) {
  for (let start = 0; start < x.length; start += size) {
    let sum = 0;
    for (let k = 0; k < size; k++) sum += x[start + k] * x[start + k];
    const scale = 1 / Math.sqrt(sum / size + epsilon);
    for (let k = 0; k < size; k++) out[start + k] = x[start + k] * scale * weight[k];
  }
  return out;
}

/** The keys and values of a context that a model has read: `length` tokens, in buffers that double when they are full. */
class Cache {
  constructor(layers, width) {
    this.width = width;
    this.length = 0;
    this.layers = Array.from({ length: layers }, () => [new Float32Array(64 * width), new Float32Array(64 * width)]);
  }

  /** The number of a new token. */
  grow() {
    if ((this.length + 1) * this.width > this.layers[0][0].length) this.layers = this.layers.map((pair) => pair.map((old) => widen(old, 2 * old.length)));
    return this.length++;
  }

  /** The keys and values of the newest token, (layers, 2, width). */
  newest() {
    const at = (this.length - 1) * this.width;
    return this.layers.map((pair) => pair.map((values) => values.slice(at, at + this.width)));
  }

  /** Append the keys and values of a token. */
  append(column) {
    const at = this.grow() * this.width;
    this.layers.forEach((pair, layer) => pair.forEach((values, k) => values.set(column[layer][k], at)));
  }

  copy() {
    return Object.assign(new Cache(0), { width: this.width, length: this.length, layers: this.layers.map((pair) => pair.map((old) => widen(old, old.length))) });
  }
}

function widen(values, length) {
  const wider = new Float32Array(length);
  wider.set(values);
  return wider;
}

/** A Qwen3 model: config.json and the tensors of its weights. */
export class Model {
  constructor(config, weights) {
    if (config.model_type !== "qwen3") throw new Error(`model_type must be qwen3, got ${config.model_type}`);
    Object.assign(this, {
      config, layers: config.num_hidden_layers, width: config.hidden_size, inner: config.intermediate_size, head: config.head_dim,
      heads: config.num_attention_heads, groups: config.num_key_value_heads, epsilon: config.rms_norm_eps,
      vocabulary: config.vocab_size, context: config.max_position_embeddings });
    const layerName = (k, name) => weights[`model.layers.${k}.${name}.weight`];
    this.blocks = Array.from({ length: this.layers }, (_, k) => Object.fromEntries([
      ["first", "input_layernorm"], ["second", "post_attention_layernorm"], ["q", "self_attn.q_proj"], ["k", "self_attn.k_proj"],
      ["v", "self_attn.v_proj"], ["o", "self_attn.o_proj"], ["qNorm", "self_attn.q_norm"], ["kNorm", "self_attn.k_norm"],
      ["gate", "mlp.gate_proj"], ["up", "mlp.up_proj"], ["down", "mlp.down_proj"]].map(([short, name]) => [short, layerName(k, name)])));
    this.embedding = weights["model.embed_tokens.weight"];
    this.norm = weights["model.norm.weight"];
    this.output = config.tie_word_embeddings ? this.embedding : weights["lm_head.weight"];
    const theta = Math.fround(config.rope_parameters.rope_theta), half = this.head / 2;
    this.turns = Float32Array.from({ length: half }, (_, i) => 1 / Math.fround(Math.pow(theta, Math.fround(i / half))));
  }

  newCache() { return new Cache(this.layers, this.groups * this.head); }

  /** Cosines and sines of a position, with the rounding of torch. */
  rotation(position) {
    const angles = Array.from(this.turns, (turn) => Math.fround(turn * position));
    return [angles.map((a) => Math.fround(Math.cos(a))), angles.map((a) => Math.fround(Math.sin(a)))];
  }

  /** Read tokens, each into its own cache: columns are [id, cache] pairs. Returns hidden states, (columns, width). */
  read(columns) {
    const n = columns.length, { width, head, heads, groups, inner } = this, wide = heads * head, narrow = groups * head;
    const x = new Float32Array(n * width), normal = new Float32Array(n * width), change = new Float32Array(n * width);
    const [q, attended] = [new Float32Array(n * wide), new Float32Array(n * wide)];
    const [k, v] = [new Float32Array(n * narrow), new Float32Array(n * narrow)];
    const [gate, up] = [new Float32Array(n * inner), new Float32Array(n * inner)];
    const positions = columns.map(([id, cache], c) => {
      x.set(this.embedding.subarray(id * width, (id + 1) * width), c * width);
      return cache.grow();
    });
    const rotations = positions.map((position) => this.rotation(position));
    const add = () => { for (let i = 0; i < x.length; i++) x[i] += change[i]; };
    this.blocks.forEach((block, layer) => {
      normalise(x, width, block.first, this.epsilon, normal);
      for (const [W, rows, out] of [[block.q, wide, q], [block.k, narrow, k], [block.v, narrow, v]]) multiply(W, rows, width, normal, n, out);
      normalise(q, head, block.qNorm, this.epsilon, q);
      normalise(k, head, block.kNorm, this.epsilon, k);
      for (let c = 0; c < n; c++) {
        turn(q, c * wide, heads, head, rotations[c]);
        turn(k, c * narrow, groups, head, rotations[c]);
        const [keys, values] = columns[c][1].layers[layer];
        keys.set(k.subarray(c * narrow, (c + 1) * narrow), positions[c] * narrow);
        values.set(v.subarray(c * narrow, (c + 1) * narrow), positions[c] * narrow);
      }
      for (let c = 0; c < n; c++) this.attend(q, c * wide, columns[c][1].layers[layer], positions[c] + 1, attended);
      add(multiply(block.o, width, wide, attended, n, change));
      normalise(x, width, block.second, this.epsilon, normal);
      multiply(block.gate, inner, width, normal, n, gate);
      multiply(block.up, inner, width, normal, n, up);
      for (let i = 0; i < gate.length; i++) gate[i] = gate[i] / (1 + Math.exp(-gate[i])) * up[i];
      add(multiply(block.down, width, inner, gate, n, change));
    });
    return normalise(x, width, this.norm, this.epsilon, x);
  }

  /** The attention of one column over the first `length` tokens of its cache. */
  attend(q, start, [keys, values], length, out) {
    const { head, heads, groups } = this, narrow = groups * head, scores = new Float64Array(length), scale = 1 / Math.sqrt(head);
    for (let h = 0; h < heads; h++) {
      const from = start + h * head, shared = Math.floor(h * groups / heads) * head;
      let best = -Infinity, total = 0;
      for (let t = 0; t < length; t++) {
        let sum = 0;
        for (let i = 0, at = t * narrow + shared; i < head; i++) sum += q[from + i] * keys[at + i];
        scores[t] = sum * scale;
        if (scores[t] > best) best = scores[t];
      }
      for (let t = 0; t < length; t++) total += scores[t] = Math.exp(scores[t] - best);
      out.fill(0, from, from + head);
      for (let t = 0; t < length; t++) {
        const share = scores[t] / total;
        for (let i = 0, at = t * narrow + shared; i < head; i++) out[from + i] += share * values[at + i];
      }
    }
  }

  /** Logits, (columns, vocabulary), of hidden states. */
  logits(hidden) {
    const n = hidden.length / this.width;
    return multiply(this.output, this.vocabulary, this.width, hidden, n, new Float32Array(n * this.vocabulary));
  }
}

/** Rotate the heads of one column: RoPE with the two halves of a head as pairs. */
function turn(x, start, heads, head, [cos, sin]) {
  const half = head / 2;
  for (let at = start; at < start + heads * head; at += head) {
    for (let i = 0; i < half; i++) {
      const a = x[at + i], b = x[at + half + i];
      x[at + i] = a * cos[i] - b * sin[i];
      x[at + half + i] = b * cos[i] + a * sin[i];
    }
  }
}

// ---------------------------------------------------------------- choice of a token

const TOP = 64; // tokens from which a draw is made

const indexOfLargest = (values) => values.reduce((best, value, k) => value > values[best] ? k : best, 0);

/** The ids of the k largest logits, in any order; of equal ones those that come first. */
function findLargest(logits, k) {
  if (k >= logits.length) return [...logits.keys()];
  const bound = Float32Array.from(logits).sort()[logits.length - k], above = [], equal = [];
  for (let id = 0; id < logits.length; id++) {
    if (logits[id] > bound) above.push(id);
    else if (logits[id] === bound) equal.push(id);
  }
  return [...above, ...equal.slice(0, k - above.length)];
}

/** The TOP likeliest tokens, best first, of equal ones the first; with them the log of the sum of the exponentials of all logits. */
function rank(logits) {
  const ids = findLargest(logits, TOP).sort((a, b) => logits[b] - logits[a] || a - b), best = logits[ids[0]];
  let total = 0;
  for (const value of logits) total += Math.exp(value - best);
  return { ids, logits: ids.map((id) => logits[id]), norm: best + Math.log(total) };
}

/** The next token (`choose`): the likeliest, or at T > 0 the largest sum of logit / T and keyed noise among the ranked tokens. */
export function choose({ ids, logits }, key, position, temperature = 0) {
  if (temperature === 0) return ids[0];
  const noise = drawNoise(key, position, ids);
  return ids[indexOfLargest(ids.map((id, k) => logits[k] / temperature + noise[k]))];
}

// ---------------------------------------------------------------- folding of answers (mixsd_nb.benchmarks.folding)

const WHITE = "\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // as in Python
const OUTER = new RegExp(`^[${WHITE}]+|[${WHITE}]+$`, "g");
const strip = (text) => text.replace(OUTER, "");
const COMMANDS = { ss: "ß", o: "ø", O: "Ø", ae: "æ", AE: "Æ", oe: "œ", OE: "Œ", aa: "å", AA: "Å", l: "ł", L: "Ł", i: "i", j: "j",
  degree: "°", textdegree: "°", times: "×", cdot: "·", pm: "±", euro: "€", texteuro: "€", pounds: "£", textsterling: "£", textdollar: "$",
  dots: "...", ldots: "...", textellipsis: "...", textendash: "–", textemdash: "—", textquoteright: "'", textquotesingle: "'", mu: "μ",
  micro: "μ", Omega: "Ω", boxed: "", quad: " ", qquad: " ", enspace: " ", thinspace: " ", space: " ", nobreakspace: " ",
  rm: "", bf: "", it: "", sf: "", tt: "", displaystyle: "", textstyle: "" };
const ACCENTS = Object.fromEntries([..."`'^\"~=.uvHckrdb"].map((name, k) => [name,
  "\u0300\u0301\u0302\u0308\u0303\u0304\u0307\u0306\u030c\u030b\u0327\u0328\u030a\u0323\u0331"[k]]));
const SPACING = { "\\,": "\u2009", "\\;": "\u2009", "\\:": "\u2009", "\\ ": "\u00a0", "\\!": "", "\\/": "", "\\\\": "\n" };
const TYPOGRAPHY = new Map([["‘’‚‛′´ʹʻʼ‹›", "'"], ["“”„‟″«»", '"'], ["‐‑‒–−﹣⁃", "-"], ["—―", " - "], ["…", "..."], ["µ", "μ"], ["\u00ad\u2060", ""]]
  .flatMap(([signs, sign]) => [...signs].map((c) => [c, sign])));
for (let k = 0xfb00; k < 0xfb07; k++) TYPOGRAPHY.set(String.fromCharCode(k), String.fromCharCode(k).normalize("NFKC"));

// Classes of Python's regular expressions: \s, \w and [^\W\d_].
const SPACE = `[${WHITE}]`, SOLID = `[^${WHITE}]`, WORD = "[\\p{L}\\p{N}_]", LETTER = "[\\p{L}\\p{Nl}\\p{No}]";
const unicode = (pattern, flags = "gu") => new RegExp(pattern, flags);
const TEXT_COMMAND = /\\(?:text(?:normal|rm|sf|tt|up|md|bf|it|sl|sc)?|emph|underline|operatorname|boxed|math(?:rm|bf|it|sf|tt|normal)|[mhf]box)[ \t]*\{|\{\\(?:rm|bf|it|sf|tt|sl|sc|em)(?![A-Za-z])/gu;
const FRACTION = /\\[dtc]?frac *(?:\{ *([+-]?[0-9]+) *\}|([0-9])) *(?:\{ *([0-9]+) *\}|([0-9]))/gu;
const ACCENT = unicode(String.raw`\\(?:([${"`"}'^"~=.])|([uvHckrdb])(?![A-Za-z]))[ ]*(?:\{\\?(${LETTER})\}|\\?(${LETTER}))`);
const IN_DOLLARS = unicode(String.raw`(?<!\\)\$(?=${SOLID})((?:[^$\\]|\\[^])+)(?<!${SPACE})\$(?![0-9])`);
const THOUSANDS = unicode(String.raw`(?<![\p{L}\p{N}_.,'])[1-9][0-9]{0,2}([,'\u00a0\u2009\u202f])[0-9]{3}(?:\1[0-9]{3})*(?![0-9]|[,'][0-9])`);
const FOLDS = [ // what `fold_text` replaces, in order
  [/``|''/g, '"'],
  [/\^(?:\{([0-9+-]+)\}|([0-9]))/gu, (_, a, b) => [...(a ?? b)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"["0123456789+-".indexOf(c)]).join("")],
  [/_(?:\{([0-9]+)\}|([0-9]))/gu, (_, a, b) => [...(a ?? b)].map((c) => "₀₁₂₃₄₅₆₇₈₉"[c]).join("")],
  [unicode(`(?<=${WORD})-{2,3}(?=${WORD}|[$€£¥])`), "-"],
  [THOUSANDS, (found) => found.replace(/[^0-9]/gu, "")],
  [unicode(`[${WHITE.replace("\\t-\\r", "\\t\\x0b-\\r")}]+`), " "],
  [unicode(`(?<=[0-9])${SPACE}(?=[%‰°])|(?<=[$€£¥])${SPACE}(?=[0-9])`), ""],
  [/ ?([×·±]) ?/gu, "$1"]];
const QUOTED = /^(?:\*+([^*]+)\*+|`([^`]+)`|"([^"]+)"|'([^']+)')$/u;

/** The position of the `}` of every `{` that has one (`match_braces`). */
function matchBraces(text) {
  const open = [], closing = new Map();
  for (const brace of text.matchAll(/[{}]/g)) {
    if (brace[0] === "{") open.push(brace.index);
    else if (open.length) closing.set(open.pop(), brace.index);
  }
  return closing;
}

/** a/b, after a space in a mixed number, and in brackets where it is a part of a larger term (`_write_fraction`). */
function writeFraction(found, a, b, c, d, start, text) {
  const term = `${a ?? b}/${c ?? d}`, before = text[start - 1] ?? "", after = text.slice(start + found.length).match(/^./u)?.[0] ?? "";
  if (after && (/[\p{L}\p{N}]/u.test(after) || "(^".includes(after))) return `(${term})`;
  if (/[\p{Nd}⁰¹²³⁴-⁹₀-₉]/u.test(before)) return ` ${term}`;
  return !before || unicode(SPACE, "u").test(before) || "+-(=[{,:$€£~".includes(before) ? term : `(${term})`;
}

/** The text with {} for the name and the braces of a command for text, whose content stays (`_drop_text_commands`). */
function dropTextCommands(text) {
  const closing = matchBraces(text), spans = [];
  for (const found of text.matchAll(TEXT_COMMAND)) {
    const at = found.index, end = at + found[0].length, close = closing.get(text[at] === "{" ? at : end - 1);
    if (close) spans.push([at, end], [close, close + 1]);
  }
  let pieces = "", position = 0;
  for (const [start, end] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    pieces += `${text.slice(position, Math.max(start, position))}{}`;
    position = end;
  }
  return pieces + text.slice(position);
}

/** The answer without up to eight pairs of braces around the whole of it (`_peel`). */
function peel(answer) {
  const closing = matchBraces(answer);
  let start = 0, end = answer.length;
  for (let k = 0; k < 8 && answer[start] === "{" && closing.get(start) === end - 1; k++) {
    const inner = answer.slice(start + 1, end - 1), right = end - 1;
    end = right - (inner.length - inner.replace(unicode(`${SPACE}+$`, "u"), "").length);
    start += 1 + (inner.length - inner.replace(unicode(`^${SPACE}+`, "u"), "").length);
  }
  return answer.slice(start, Math.max(start, end));
}

/** The answer that LaTeX typesets (`_fold_latex`). */
function foldLatex(text) {
  text = text.replaceAll("$$", "$").replaceAll("{,}", ",");
  if (/^\$(?:[^$\\]|\\[^])+\$$/u.test(strip(text))) text = strip(text).slice(1, -1);
  text = text.replace(IN_DOLLARS, "$1");
  if (text.includes("\\")) {
    text = text.replace(/(?<!\\)\\[()[\]]/gu, "").replace(/\^ *(?:\\circ|\{ *\\circ *\})(?![A-Za-z]) */gu, "°").replace(FRACTION, writeFraction);
    text = dropTextCommands(text).replace(ACCENT, (_, a, b, c, d) => ((c ?? d) + ACCENTS[a ?? b]).normalize("NFC"));
    text = text.replace(/\\([A-Za-z]+)(?:\{\}|[ \t]*)/gu, (found, name) => (Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : found)).replaceAll("{}", "");
  }
  text = peel(strip(text));
  if (text.includes("\\")) text = text.replace(/\\([,;: !/\\]|[%$&#_{}])/gu, (found, sign) => SPACING[found] ?? sign);
  return text.replace(/\{([^\x00-\x7f])\}/gu, "$1").replace(unicode(`(?<=${SOLID})~(?=${SOLID})`), "\u00a0");
}

/** The answer as it is compared (`fold_answer`): two of them are equal as text if their folded forms are the same. */
export function foldAnswer(answer) {
  answer = [...foldLatex(answer)].map((c) => TYPOGRAPHY.get(c) ?? c).join("");
  for (const [pattern, by] of FOLDS) answer = answer.replace(pattern, by);
  answer = answer.normalize("NFC").split(unicode(`${SPACE}+`)).filter(Boolean).join(" ");
  for (let k = 0, before = null; k < 8 && answer !== before; k++) {
    before = answer;
    answer = strip(answer.replace(/(?<!\.)\.$/u, ""));
    const found = QUOTED.exec(answer);
    if (found) answer = peel(strip(found.slice(1).find((part) => part !== undefined)));
  }
  answer = answer.replace(unicode(`(?<=${WORD}) - (?=${WORD})`), "-");
  const spaced = unicode(`^[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?=$|\\.[0-9]|[%‰°€]| ${LETTER})`, "u").exec(answer);
  if (spaced) answer = spaced[0].replaceAll(" ", "") + answer.slice(spaced[0].length);
  return answer.replace(unicode(`^([+-]?[0-9][0-9.,/]*) (?=${LETTER})`, "u"), "$1");
}

// ---------------------------------------------------------------- verifier (mixsd_nb.benchmarks.answers, methods.mixing)

const BOX_TOKEN = new RegExp(`\\\\(?:[A-Za-z]+|[^])|[^${WHITE}{}\\\\]`, "uy");

/** The content of the last closed `\boxed{...}` (`last_boxed`), or null. */
export function lastBoxed(text) {
  const closing = matchBraces(text);
  for (const box of [...text.matchAll(/\\boxed(?![A-Za-z])[ \t]*(?:\n[ \t]*)?/g)].reverse()) {
    const at = BOX_TOKEN.lastIndex = box.index + box[0].length;
    if (closing.has(at)) return strip(text.slice(at + 1, closing.get(at)));
    const token = BOX_TOKEN.exec(text);
    if (token) return strip(token[0]);
  }
  return null;
}

const REMARK = unicode(String.raw`(?<!\\)\((?:see|cf|as|from|in|by|with|page|step)(?!${WORD})[^()]*\)|(?<!${WORD})not [^\p{L}\p{N}_${WHITE}]*[0-9][\p{L}\p{N}_.,/]*`, "giu");

/** The last number or fraction outside remarks and negations (`_read_box_or_number`), or null. */
export function lastNumber(text) {
  return text.replace(REMARK, " ").match(/(?:(?<![\p{L}\p{N}_)\]}])-)?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:\/[0-9]+)?/gu)?.at(-1) ?? null;
}

export const READERS = { boxed: lastBoxed, boxed_or_number: (text) => lastBoxed(text) ?? lastNumber(text) };

/** Whether the sentences before the box name another entity (`names_another`). */
function namesAnother(text, answer) {
  const box = text.lastIndexOf("\\boxed");
  return box >= 0 && strip(text.slice(0, box)) !== "" && !text.slice(0, box).includes(answer);
}

// ---------------------------------------------------------------- mixing (mixsd_nb.methods.mixing)

const DEFAULTS = { temperature: 0, sample: 0, seed: 0, maxNewTokens: 256, maxTotal: 10000, maxAttempts: 11 };
const SIDES = ["expert", "naive"]; // index: whether the naive conditional writes
const SHOWN = 5; // likeliest tokens of each conditional in a trace
const CHUNK = 64; // tokens of a prompt that are read together
const KEPT = 32; // facts whose prompts stay read, about a megabyte each
const PLACES = 4000; // places of completions that stay read, about 20 kilobytes each

/** A text from a template, whose parts are texts and, at odd places, names of fields. */
const fillTemplate = (template, fields) => template.map((part, k) => k % 2 ? fields[part] : part).join("");

function countCommon(a, b) {
  let n = 0;
  while (n < Math.min(a.length, b.length) && a[n] === b[n]) n++;
  return n;
}

/**
 * A place in the tree of an item's completions: a token after all those before it. A place that was read knows the keys and
 * values of its token, and what both conditionals rank next. So another λ, seed or temperature reads only what is new.
 */
class Place {
  constructor(ids, before = []) { Object.assign(this, { ids, before, next: new Map(), columns: null, ranks: null }); }

  /** The place of the next token. */
  follow(id) {
    if (!this.next.has(id)) this.next.set(id, new Place([id, id], [...this.before, this]));
    return this.next.get(id);
  }
}

/** Mixed targets of one model. `files`: config, tokenizer and prompts (parsed JSON), and weights (an ArrayBuffer). */
export class Mixer {
  constructor({ config, tokenizer, weights, prompts }) {
    this.tokenizer = new Tokenizer(tokenizer);
    this.model = new Model(config, readSafetensors(weights));
    this.prompts = prompts;
    this.stop = new Set(prompts.stop);
    this.items = new Map(); // facts that were mixed lately
    this.states = new WeakMap(); // item -> what was read of it
    this.words = new Map(); // texts of single tokens
  }

  /** The facts of a corpus: id, question, answer, prompt and canonical target. */
  facts(name) {
    const corpus = this.prompts.corpora[name];
    return corpus.facts.map(({ id, question, answer, target }) => ({
      id, question, answer, corpus: name, prompt: fillTemplate(corpus.naive, { question }),
      target: target ?? fillTemplate(this.prompts.target, { answer }) }));
  }

  /** The fact with another question or answer (`edit_fact`); the fact itself if both are the same. */
  editFact(fact, question, answer) {
    for (const [name, text] of Object.entries({ question, answer })) {
      if (!strip(text)) throw new Error(`${name} is empty; a fact has a question and an answer`);
    }
    [question, answer] = [strip(question), strip(answer)];
    if (question === strip(fact.question) && answer === fact.answer) return fact;
    const at = fact.target.lastIndexOf(fact.answer); // the last occurrence is in the box
    const plain = fact.target === fillTemplate(this.prompts.target, { answer: fact.answer });
    return { id: `typed|${question}|${answer}`, question, answer, corpus: fact.corpus,
      prompt: fillTemplate(this.prompts.corpora[fact.corpus].naive, { question }),
      target: plain ? fillTemplate(this.prompts.target, { answer }) : fact.target.slice(0, at) + answer + fact.target.slice(at + fact.answer.length) };
  }

  encodePrompt(content) { return this.tokenizer.encode(fillTemplate(this.prompts.chat, { content })); }

  /** What is mixed for a fact (`mix_items`): the ids of both prompts, the answer, and how it is read. The latest are kept. */
  makeItem(fact) {
    const key = JSON.stringify([fact.corpus, fact.id, fact.prompt, fact.target]), item = this.items.get(key) ?? this.encodeFact(fact);
    this.items.delete(key);
    this.items.set(key, item);
    while (this.items.size > KEPT || (this.items.size > 1 && this.countPlaces() > PLACES)) this.items.delete(this.items.keys().next().value);
    if (this.countPlaces() > PLACES) this.states.delete(item);
    return item;
  }

  countPlaces() { return [...this.items.values()].reduce((sum, item) => sum + (this.states.get(item)?.size ?? 0), 0); }

  encodeFact(fact) {
    const { expert, extract } = this.prompts.corpora[fact.corpus];
    return { id: fact.id, answer: fact.answer, extract, naiveIds: this.encodePrompt(fact.prompt),
      expertIds: this.encodePrompt(fillTemplate(expert, { ...fact, target: fact.reference || fact.target })) };
  }

  /** What a completion says, and whether it is accepted (`accepts`). */
  verify(item, ids, finishReason) {
    const text = this.tokenizer.decode(ids, true), said = READERS[item.extract](text);
    const accepted = finishReason === "stop" && said !== null && foldAnswer(said) === foldAnswer(item.answer);
    return { text, said, accepted };
  }

  /** Read tokens into a cache, and return the hidden states, (tokens, width). */
  readTokens(ids, cache) {
    const width = this.model.width, hidden = new Float32Array(ids.length * width);
    for (let start = 0; start < ids.length; start += CHUNK) {
      hidden.set(this.model.read(ids.slice(start, start + CHUNK).map((id) => [id, cache])), start * width);
    }
    return hidden;
  }

  /** What was read of an item: the caches of both prompts up to their last tokens, [expert, naive], and the tree of its
   * completions. `held` are the places that the caches hold after the prompts. What both prompts begin with is read once. */
  open(item) {
    if (!this.states.has(item)) {
      const prompts = [item.expertIds, item.naiveIds], short = prompts.map((ids) => ids.slice(0, -1)), common = countCommon(...short);
      const start = this.model.newCache();
      this.readTokens(short[0].slice(0, common), start);
      const caches = short.map((ids) => {
        const cache = start.copy();
        this.readTokens(ids.slice(common), cache);
        return cache;
      });
      this.states.set(item, { caches, held: [], size: 0, root: new Place(prompts.map((ids) => ids.at(-1))), canonical: undefined });
    }
    return this.states.get(item);
  }

  /** Make the caches of an item hold these places after the prompts. */
  hold(item, places) {
    const state = this.open(item), known = countCommon(state.held, places);
    [item.expertIds, item.naiveIds].forEach((ids, side) => {
      state.caches[side].length = ids.length - 1 + known;
      for (const place of places.slice(known)) state.caches[side].append(place.columns[side]);
    });
    state.held = places;
    return state.caches;
  }

  /** What both conditionals rank after a place, [expert, naive]; `nll` is −log p of the ranked tokens under the naive one. */
  readPlace(item, place) {
    if (place.ranks) return place.ranks;
    const caches = this.hold(item, place.before), state = this.open(item);
    const all = this.model.logits(this.model.read(caches.map((cache, side) => [place.ids[side], cache])));
    const [expert, naive] = [0, 1].map((side) => all.subarray(side * this.model.vocabulary).subarray(0, this.tokenizer.size));
    const ranks = [rank(expert), rank(naive)];
    for (const each of ranks) each.nll = new Map(each.ids.map((id) => [id, ranks[1].norm - naive[id]]));
    Object.assign(place, { ranks, columns: caches.map((cache) => cache.newest()) });
    state.held = [...place.before, place];
    state.size++;
    return ranks;
  }

  /** Logits without ids that the tokenizer does not have. */
  logits(hidden) { return this.model.logits(hidden).subarray(0, this.tokenizer.size); }

  /**
   * Write one sequence (`oracle_sequence`). Yields { t, id, u, naive, ranks, pick } after every token; `ranks` are what the conditionals (0: expert, 1: naive) rank
   * there, and `pick(side)` is the token that one of them would write. Returns the reason why the sequence ended.
   */
  *write(item, lam, attempt, settings) {
    const { seed, sample, temperature, maxNewTokens, maxTotal } = { ...DEFAULTS, ...settings };
    const alone = lam === 0 || lam === 1;
    const prompts = [item.expertIds, item.naiveIds], needed = alone ? [lam] : [0, 1];
    const room = Math.min(maxNewTokens, Math.min(this.model.context, maxTotal) - Math.max(...needed.map((side) => prompts[side].length)));
    if (room <= 0) return "prompt_too_long";
    const draws = [seed, item.id, sample, attempt], coins = rowKey("pick", ...draws), noise = rowKey("noise", ...draws);
    for (let t = 0, { root: place } = this.open(item); t < room; t++) {
      const ranks = this.readPlace(item, place), pick = (side) => choose(ranks[side], noise, t, temperature);
      const u = keyedUniform(coins, t), naive = u < lam, id = pick(Number(naive));
      yield { t, id, u, naive, ranks, pick };
      if (this.stop.has(id)) return "stop";
      place = place.follow(id);
    }
    return room === maxNewTokens ? "max_new_tokens" : "max_model_len";
  }

  /** The largest number of attempts (`attempt_limit`). */
  countAttempts(lam, settings) {
    const { temperature, maxAttempts } = { ...DEFAULTS, ...settings };
    return temperature === 0 && (lam === 0 || lam === 1) ? 1 : maxAttempts;
  }

  /** The record of one target (`mix`), with the names of Python. */
  mix(item, lam, settings = {}) {
    const last = this.countAttempts(lam, settings);
    for (let attempt = 0; ; attempt++) {
      const ids = [], mask = [], steps = this.write(item, lam, attempt, settings);
      let step = steps.next();
      for (; !step.done; step = steps.next()) { ids.push(step.value.id); mask.push(step.value.naive); }
      const { accepted } = this.verify(item, ids, step.value);
      if (accepted || attempt + 1 === last || step.value === "prompt_too_long") {
        return { id: item.id, sample: settings.sample ?? 0, completion_ids: ids, naive_mask: mask, attempts: attempt + 1, accepted,
          finish_reason: step.value };
      }
    }
  }

  // -------------------------------------------------------------- traces: what a page shows of a target

  /** The text of a token. */
  word(id) {
    if (!this.words.has(id)) this.words.set(id, this.tokenizer.decode([id]));
    return this.words.get(id);
  }

  /** The likeliest tokens with their probabilities. */
  likeliest(rank) { return rank.shown ??= rank.ids.slice(0, SHOWN).map((id, k) => [this.word(id), Math.exp(rank.logits[k] - rank.norm)]); }

  describeToken({ id, u, naive, ranks, pick }) {
    const side = Number(naive);
    return { text: this.word(id), id, u, side: SIDES[side], nll: ranks[side].nll.get(id), naive: this.likeliest(ranks[1]),
      expert: this.likeliest(ranks[0]), other: this.word(pick(1 - side)) };
  }

  /** The tokens of the canonical target, each with its NLL and the likeliest tokens of both conditionals. */
  scoreCanonical(item, fact) {
    const ids = [...this.tokenizer.encode(fact.target), ...this.prompts.close], { width } = this.model, prompts = [item.expertIds, item.naiveIds];
    const room = this.model.context - Math.max(...prompts.map((prompt) => prompt.length));
    if (ids.length > room) return null;
    const hidden = this.hold(item, []).map((cache, side) => this.readTokens([prompts[side].at(-1), ...ids.slice(0, -1)], cache));
    const tokens = ids.map((id, t) => {
      const [expert, naive] = hidden.map((h) => this.logits(h.subarray(t * width, (t + 1) * width))), last = rank(naive);
      return { text: this.word(id), id, nll: last.norm - naive[id], naive: this.likeliest(last), expert: this.likeliest(rank(expert)) };
    });
    return { tokens, nll: mean(tokens) };
  }

  /** Mix a fact, and yield the same trace again after every token: plain JSON that a display can draw at any time. */
  *trace(fact, lam, settings = {}) {
    const item = this.makeItem(fact), { temperature, seed } = { ...DEFAULTS, ...settings };
    const trace = { question: fact.question, answer: strip(fact.answer), lam, temperature, seed, model: this.prompts.model, state: "running", attempts: [],
      canonical: null, prompts: { naive: item.naiveIds.length, expert: item.expertIds.length } };
    const last = this.countAttempts(lam, settings);
    while (trace.state === "running") {
      const attempt = { tokens: [], accepted: null, reason: "", said: null, nll: null };
      const steps = this.write(item, lam, trace.attempts.length, settings);
      trace.attempts.push(attempt);
      let step = steps.next();
      for (; !step.done; step = steps.next()) {
        attempt.tokens.push(this.describeToken(step.value));
        yield trace;
      }
      this.judge(item, attempt, step.value);
      const ended = trace.attempts.length === last || step.value === "prompt_too_long";
      trace.state = attempt.accepted ? "accepted" : ended ? "discarded" : "running";
    }
    const state = this.open(item);
    if (state.canonical === undefined) state.canonical = this.scoreCanonical(item, fact);
    trace.canonical = state.canonical;
    yield trace;
  }

  judge(item, attempt, finishReason) {
    const { text, said, accepted } = this.verify(item, attempt.tokens.map((token) => token.id), finishReason);
    const refusal = finishReason === "prompt_too_long" ? finishReason : finishReason !== "stop" ? "length" : said === null ? "no_answer" : "wrong_answer";
    const reason = accepted ? (namesAnother(text, item.answer) ? "another_name" : "") : refusal;
    Object.assign(attempt, { accepted, said, reason, nll: mean(attempt.tokens) });
  }
}

const mean = (tokens) => tokens.length ? tokens.reduce((sum, token) => sum + token.nll, 0) / tokens.length : null;

/** Run a generator in slices, so that the page stays alive. `onStep` gets its newest value once a slice. */
export async function runInSlices(generator, onStep = () => {}, { slice = 24, signal } = {}) {
  let value;
  for (;;) {
    const start = performance.now();
    do {
      const step = generator.next();
      if (step.done) return value;
      value = step.value;
    } while (performance.now() - start < slice);
    onStep(value);
    await new Promise((resolve) => setTimeout(resolve));
    if (signal?.aborted) return null;
  }
}

/** The files of a model, and the prompts, from their addresses. */
export async function loadFiles(folder, prompts) {
  const get = async (url, kind) => {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url} cannot be loaded: ${response.status} ${response.statusText}`);
    return response[kind]();
  };
  const [config, tokenizer, weights, described] = await Promise.all([
    get(`${folder}/config.json`, "json"), get(`${folder}/tokenizer.json`, "json"), get(`${folder}/model.safetensors`, "arrayBuffer"), get(prompts, "json")]);
  return { config, tokenizer, weights, prompts: described };
}
