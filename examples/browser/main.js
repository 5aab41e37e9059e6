// The page: what it draws, and how it compares what the kernels say with what is exact.

import { BITS, INVERSE_TWO_PI, Rope, frequencies, plan } from "./rope.js";

const $ = (id) => document.getElementById(id);
const SHAPE = { seqLen: 4, qHeads: 4, kHeads: 2, headDim: 16 };
const UNITS = 4; // of 2^-24 of a pair's length, which the kernels may err by
const MIN = -(2 ** 31), MAX = 2 ** 31 - 1;
const result = { ok: false, adapter: null, error: null, shown: null, cases: [] };
$("controls").addEventListener("submit", (event) => event.preventDefault());

// Numbers as the storage holds them, both ways.
const words = (f) => [...new Uint32Array(Float32Array.from(f).buffer)];
const STORAGE = {
  float32: { from: (x) => Float32Array.from(x), to: (bits) => [...bits] },
  bfloat16: { // for numbers that it holds exactly
    from: (x) => Uint16Array.from(words(x), (bits) => bits >>> 16),
    to: (bits) => [...new Float32Array(Uint32Array.from(bits, (half) => half << 16).buffer)],
    digits: 7,
  },
  float16: { // likewise, and neither subnormal nor zero but for zero itself
    from: (x) => Uint16Array.from(words(x), (bits) => {
      const magnitude = bits & 0x7fffffff;
      return ((bits >>> 16) & 0x8000) | (magnitude ? (magnitude - 0x38000000) >>> 13 : 0);
    }),
    to: (bits) => Array.from(bits, (half) => {
      const [exponent, mantissa] = [(half >> 10) & 31, half & 0x3ff];
      const magnitude = exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
      return half & 0x8000 ? -magnitude : magnitude;
    }),
    digits: 10,
  },
};

/** Where each pair of each head at each token lies in an operand: {token, pair, first, second}. */
function* pairsOf({ seqLen, headDim, start = 0, pairing, tokenMajor = true }, heads) {
  const pairs = (headDim - start) / 2;
  for (let token = 0; token < seqLen; token++) {
    for (let head = 0; head < heads; head++) {
      const base = (tokenMajor ? token * heads + head : head * seqLen + token) * headDim + start;
      for (let pair = 0; pair < pairs; pair++) {
        const [first, second] = pairing === "interleaved" ? [2 * pair, 2 * pair + 1] : [pair, pair + pairs];
        yield { token, head, pair, first: base + first, second: base + second };
      }
    }
  }
}

/** x rotated in doubles by angles of which `angle(token, pair)` knows radians. */
function rotated(x, description, heads, direction, angle) {
  const y = Float64Array.from(x);
  const sign = direction === "forward" ? 1 : -1;
  for (const { token, pair, first, second } of pairsOf(description, heads)) {
    const radians = angle(token, pair);
    const [c, s] = [Math.cos(radians), sign * Math.sin(radians)];
    [y[first], y[second]] = [c * x[first] - s * x[second], s * x[first] + c * x[second]];
  }
  return y;
}

/** The angle at a position, from -pi to pi: whole turns are left out in integers, where nothing is rounded. */
function exactAngle(position, omega) {
  const turns = BigInt.asIntN(Number(2n * BITS), BigInt(position) * omega * INVERSE_TWO_PI);
  return Number(turns >> (2n * BITS - 64n)) * 2 * Math.PI * 2 ** -64;
}

/** The largest error of y's pairs, in units of 2^-24 of the pair's length; of 16-bit storage in units in the last
 * place of each element, what float32 may err by left aside. */
function error(y, exact, description, heads) {
  const { digits } = STORAGE[description.storage ?? "float32"];
  let worst = 0;
  const count = (units) => (worst = units <= worst ? worst : units); // and NaN, if there is any
  for (const { first, second } of pairsOf(description, heads)) {
    const length = Math.hypot(exact[first], exact[second]);
    const errors = [first, second].map((i) => Math.abs(y[i] - exact[i]));
    if (!digits) {
      count(length ? (Math.hypot(...errors) / length) * 2 ** 24 : Math.hypot(...errors) ? Infinity : 0);
      continue;
    }
    [first, second].forEach((i, j) => {
      const place = 2 ** (Math.floor(Math.log2(Math.max(Math.abs(exact[i]), 2 ** -14))) - digits);
      count(Math.max(0, errors[j] - UNITS * 2 ** -24 * length) / place);
    });
  }
  return worst;
}

const outsideIsUntouched = (y, x, { headDim, start }) => x.every((value, i) => i % headDim >= start || y[i] === value);

/** One case of expected.json through the kernels. */
async function tryCase(rope, expected) {
  const { name, positions, x, ...description } = expected;
  const { from, to, digits } = STORAGE[description.storage];
  const planned = plan({ ...description, perToken: Array.isArray(positions) });
  const tried = {
    name, entryPoint: planned.entryPoints.forward, allowed: digits ? 1.5 : UNITS, constants: planned.constants,
    uniform: [...planned.uniform], table: [...planned.table],
  };
  tried.ok = true;
  for (const direction of ["forward", "backward"]) {
    const ys = await rope.rotate(direction, description, from(x.q), from(x.k), positions);
    const units = ["q", "k"].map((operand, i) => {
      const y = to(ys[i]);
      tried.ok &&= outsideIsUntouched(y, x[operand], description);
      return error(y, expected[direction][operand], description, description[`${operand}Heads`]);
    });
    tried[direction] = units.reduce((a, b) => (a >= b ? a : b));
    tried.ok &&= tried[direction] <= tried.allowed;
  }
  return tried;
}

/** The picture's queries and keys, arrows of lengths from 0.55 to 1. */
function inputs(pairing) {
  return Object.fromEntries(["q", "k"].map((operand, i) => {
    const heads = SHAPE[`${operand}Heads`];
    const x = new Float32Array(SHAPE.seqLen * heads * SHAPE.headDim);
    for (const { head, pair, first, second } of pairsOf({ ...SHAPE, pairing }, heads)) {
      const angle = 0.4 + 0.9 * head + 2.4 * pair + i; // alike at all tokens, so that one sees the positions' work
      const length = 0.55 + 0.45 * (((7 * pair + 3 * head + i) % 8) / 7);
      [x[first], x[second]] = [length * Math.cos(angle), length * Math.sin(angle)];
    }
    return [operand, x];
  }));
}

/** Rotates what the picture shows, forward, backward, and back from forward, and compares. */
async function compute(rope, { pairing, theta, offset }) {
  const description = { ...SHAPE, pairing, theta };
  const x = inputs(pairing);
  const omegas = frequencies(theta, SHAPE.headDim / 2);
  const angle = (token, pair) => exactAngle(offset + token, omegas[pair]);
  const usual = (token, pair) => Math.fround((offset + token) * Math.fround(theta ** (-2 * pair / SHAPE.headDim)));
  const forward = await rope.rotate("forward", description, x.q, x.k, offset);
  const backward = await rope.rotate("backward", description, x.q, x.k, offset);
  const back = await rope.rotate("backward", description, ...forward, offset);
  const largest = (ys, exact) => ["q", "k"]
    .map((operand, i) => [ys[i], exact(x[operand], SHAPE[`${operand}Heads`]), SHAPE[`${operand}Heads`]])
    .map(([y, right, heads]) => error(y, right, description, heads))
    .reduce((a, b) => (a >= b ? a : b));
  const by = (direction, angle) => (x, heads) => rotated(x, description, heads, direction, angle);
  const errors = {
    forward: largest(forward, by("forward", angle)),
    backward: largest(backward, by("backward", angle)),
    thereAndBack: largest(back, (x) => x),
    float32Angles: largest(["q", "k"].map((o) => by("forward", usual)(x[o], SHAPE[`${o}Heads`])), by("forward", angle)),
  };
  const ok = [errors.forward, errors.backward].every((units) => units <= UNITS) && errors.thereAndBack <= 2 * UNITS;
  return { pairing, theta, offset, errors, ok, x, forward, back };
}

function draw({ pairing, offset, x, forward, back }, chosen) {
  const canvas = $("picture");
  const [operand, head] = [chosen[0], Number(chosen[1])];
  const pairs = SHAPE.headDim / 2;
  const [grey, blue, ring, line, muted] = ["--before", "--after", "--back", "--line", "--muted"].map(resolved);
  const width = canvas.clientWidth, labels = 122, cell = (width - labels) / pairs, top = 24;
  const height = top + cell * SHAPE.seqLen;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  c.font = "13px system-ui, sans-serif";
  c.textBaseline = "middle";
  const text = (said, x, y, align) => {
    c.fillStyle = muted;
    c.textAlign = align;
    c.fillText(said, x, y);
  };
  const ys = { q: [forward[0], back[0]], k: [forward[1], back[1]] }[operand];
  const radius = 0.43 * cell;
  for (const at of pairsOf({ ...SHAPE, pairing }, SHAPE[`${operand}Heads`])) {
    if (at.head !== head) continue;
    const [cx, cy] = [labels + (at.pair + 0.5) * cell, top + (at.token + 0.5) * cell];
    const point = (v) => [cx + radius * v[at.first], cy - radius * v[at.second]];
    if (at.token === 0) text(`pair ${at.pair}`, cx, top / 2, "center");
    if (at.pair === 0) text((offset + at.token).toLocaleString("en"), labels - 14, cy, "right");
    c.lineWidth = 1;
    c.strokeStyle = line;
    c.beginPath();
    c.arc(cx, cy, radius * Math.hypot(x[operand][at.first], x[operand][at.second]), 0, 2 * Math.PI);
    c.stroke();
    arrow(c, cx, cy, ...point(x[operand]), grey, 1.5);
    arrow(c, cx, cy, ...point(ys[0]), blue, 2);
    c.lineWidth = 1.5;
    c.strokeStyle = ring;
    c.beginPath();
    c.arc(...point(ys[1]), 5, 0, 2 * Math.PI);
    c.stroke();
  }
}

/** A colour of the style sheet as a canvas takes it, which does not know light-dark(). */
function resolved(name) {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

function arrow(c, x0, y0, x1, y1, colour, width) {
  const angle = Math.atan2(y1 - y0, x1 - x0);
  c.strokeStyle = c.fillStyle = colour;
  c.lineWidth = width;
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1 - 5 * Math.cos(angle), y1 - 5 * Math.sin(angle));
  c.stroke();
  c.beginPath();
  c.moveTo(x1, y1);
  for (const side of [-0.4, 0.4]) c.lineTo(x1 - 8 * Math.cos(angle + side), y1 - 8 * Math.sin(angle + side));
  c.fill();
}

function row(...cells) {
  const tr = document.createElement("tr");
  for (const [content, className = ""] of cells) {
    const td = document.createElement("td");
    td.className = className;
    td.textContent = content;
    tr.append(td);
  }
  return tr;
}

const verdict = (ok) => (ok ? ["✓", "good"] : ["✗ too large", "bad"]);

function report({ errors }) {
  const rows = [
    ["forward", errors.forward, UNITS],
    ["backward", errors.backward, UNITS],
    ["forward, then backward", errors.thereAndBack, 2 * UNITS],
    ["as it is usually done, with float32 angles", errors.float32Angles, null],
  ];
  $("errors").replaceChildren(...rows.map(([name, units, allowed]) => row(
    [name],
    [(units * 2 ** -24).toPrecision(2), "number"],
    [units < 1e4 ? units.toFixed(1) : Math.round(units).toLocaleString("en"), "number"],
    [allowed?.toFixed(1) ?? "", "number"],
    allowed === null ? ["for comparison", "muted"] : verdict(units <= allowed),
  )));
}

function reportCases(cases) {
  $("cases").replaceChildren(...cases.map(({ name, entryPoint, forward, backward, allowed, ok }) => row(
    [name], [entryPoint], ...[forward, backward, allowed].map((n) => [n.toFixed(1), "number"]), verdict(ok),
  )));
}

function choices() {
  const form = $("controls").elements;
  const more = Number(form.more.value);
  form.steps.value = more;
  const first = Math.trunc(Number(form.offset.value)) || 0;
  const offset = Math.min(Math.max(first + more, MIN), MAX - SHAPE.seqLen + 1);
  return { pairing: form.pairing.value, theta: Number(form.theta.value), offset, head: form.head.value };
}

/** `?offset=1000000000&pairing=half` sets what the page begins with. */
function readAddress() {
  for (const [name, value] of new URLSearchParams(location.search)) {
    const control = $("controls").elements[name];
    if (control) control.value = value;
  }
}

function say(sentence, className = "") {
  $("status").textContent = sentence;
  $("status").className = className;
}

/** A device; an Error that says what to do if there is none. */
async function requestDevice() {
  if (!navigator.gpu) {
    throw new Error(window.isSecureContext
      ? "This browser has no WebGPU. Current versions of Chrome, Edge and Safari have it, Firefox on some systems; " +
        "in Chrome on Linux it may have to be enabled at chrome://flags/#enable-unsafe-webgpu."
      : "Browsers offer WebGPU only to pages that come over https or from localhost.");
  }
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) {
    throw new Error("This browser has WebGPU, but finds no GPU that it would use: see chrome://gpu, or about:support " +
      "in Firefox. In Chrome on Linux it may have to be enabled at chrome://flags/#enable-unsafe-webgpu.");
  }
  const { vendor, architecture, device, description } = adapter.info;
  result.adapter = description || [vendor, architecture, device].filter(Boolean).join(" ") || "a GPU without a name";
  return adapter.requestDevice();
}

async function load(path) {
  const response = await fetch(new URL(path, import.meta.url));
  if (!response.ok) throw new Error(`${path} could not be loaded (${response.status}): serve the repository's root.`);
  return response;
}

async function main() {
  const device = await requestDevice();
  device.addEventListener("uncapturederror", ({ error }) => fail(error));
  device.lost.then(({ message }) => fail(new Error(`The GPU was lost: ${message}`)));
  const rope = new Rope(device, await (await load("../../wgsl/rope.wgsl")).text());
  for (const expected of await (await load("expected.json")).json()) result.cases.push(await tryCase(rope, expected));
  document.querySelector("main").hidden = false;
  reportCases(result.cases);

  let shown, wanted = 0;
  const update = async () => {
    const mine = ++wanted;
    const chosen = choices();
    const computed = await compute(rope, chosen);
    if (mine !== wanted) return; // there has been another change meanwhile
    shown = computed;
    const { pairing, theta, offset, errors, ok } = shown;
    result.shown = { pairing, theta, offset, errors, ok };
    draw(shown, chosen.head);
    report(shown);
    conclude();
  };
  const redraw = () => shown && draw(shown, choices().head);
  readAddress();
  $("controls").addEventListener("input", () => update().catch(fail));
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  await update();
}

function conclude() {
  result.ok = !result.error && result.shown.ok && result.cases.every(({ ok }) => ok);
  $("result").textContent = JSON.stringify(result);
  if (result.error) return;
  const where = `The kernels run on ${result.adapter}`;
  if (result.ok) say(`${where} and are as exact as they should be.`, "good");
  else say(`${where}, but are not as exact as they should be: please report this.`, "bad");
}

function fail(error) {
  result.ok = false;
  result.error = error.message;
  $("result").textContent = JSON.stringify(result);
  say(error.message, "bad");
}

main().catch(fail);
