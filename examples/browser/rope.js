// Rotary position embedding in any WebGPU program, by wgsl/rope.wgsl. An ES module without dependencies, to be copied.
//
//     const rope = new Rope(device, await (await fetch("rope.wgsl")).text());
//     const description = { seqLen, qHeads, kHeads, headDim, pairing: "half", theta: 500_000 };
//     const rotation = rope.prepare(description, heads, offset);
//     rotation.record(encoder, "forward");
//
// rotates in place what lies in the GPUBuffer `heads`: q, then k. wgsl/README.md says what the kernels take.

export const WORKGROUP_SIZE = 64;
export const HEADS_PER_THREAD = 16;
const STORAGES = { float32: { bytes: 4 }, bfloat16: { bytes: 2, constant: 1 }, float16: { bytes: 2, constant: 2 } };

// Frequencies are BigInts in units of 2^-BITS radians per position: a double's 53 bits are not enough for positions
// up to 2^31.
export const BITS = 256n;
export const INVERSE_TWO_PI = 0x28be60db9391054a7f09d5f47d4d377036d8a5664f10e4107f9458eaf7aef158n; // likewise

/** A finite double as a frequency, exactly. */
export function fixed(value) {
  if (!Number.isFinite(value)) throw new RangeError(`a frequency must be finite, got ${value}`);
  let shift = 0n;
  for (; !Number.isInteger(value); shift++) value *= 2;
  return (BigInt(value) << BITS) >> shift;
}

/** The frequencies theta^(-i / pairs) of pairs i = 0, 1, ... */
export function frequencies(theta, pairs) {
  if (!(theta >= 1e-6 && theta <= 1e30)) throw new RangeError(`theta must be from 1e-6 to 1e30, got ${theta}`);
  const one = 1n << BITS;
  const ratio = root((one << (BITS * BigInt(pairs))) / fixed(theta), pairs, theta ** (-1 / pairs));
  const result = [one];
  while (result.length < pairs) result.push((result.at(-1) * ratio) >> BITS);
  return result;
}

/** The integer n-th root of value, by Newton's method from a double near it, in units of 2^-BITS. */
function root(value, n, near) {
  const [degree, less] = [BigInt(n), BigInt(n - 1)];
  let x = fixed(near * (1 + 1e-6)); // from above, it falls until it is there
  for (;;) {
    const next = (less * x + value / x ** less) / degree;
    if (next >= x) return x;
    x = next;
  }
}

/** What binding 2 holds, from frequencies; `streams` says which stream of positions each pair follows. */
export function pairTable(omegas, { amplitude = 1, streams = omegas.map(() => 0) } = {}) {
  const table = new Uint32Array(4 * omegas.length);
  const shift = 2n * BITS - 64n;
  omegas.forEach((omega, i) => {
    const turns = (omega * INVERSE_TWO_PI + (1n << (shift - 1n))) >> shift; // 2^-64 turn, rounded
    const whole = Number(turns >> 64n);
    if (whole < -(2 ** 23) || whole >= 2 ** 23) throw new RangeError(`pair ${i} turns too fast: ${whole} times`);
    table.set([Number(BigInt.asUintN(32, turns >> 32n)), Number(BigInt.asUintN(32, turns))], 4 * i);
    table.set([(whole << 8) | streams[i], bitsOf(amplitude)], 4 * i + 2);
  });
  return table;
}

/** The bits of a number as float32. */
function bitsOf(value) {
  return new Uint32Array(Float32Array.of(value).buffer)[0];
}

/** The WGSL struct Divisor. */
function divisor(value) {
  const shift = 32 - Math.clz32(value - 1);
  const multiplier = ((1n << BigInt(31 + shift)) + BigInt(value) - 1n) / BigInt(value);
  return [value, Number(multiplier), shift, 0];
}

/**
 * Everything about a rotation that does not depend on a device.
 *
 *     batch, seqLen, qHeads, kHeads, headDim   sizes; kHeads is 0 if there is only one operand
 *     tokenMajor   true: heads lie as [batch, seqLen, heads, headDim]; false: as [batch, heads, seqLen, headDim]
 *     start, pairs   the rotated window of each head: 2 * pairs elements from start on
 *     pairing      "interleaved": elements (2i, 2i + 1) of the window; "half": (i, i + pairs)
 *     storage      "float32", "bfloat16", "float16"
 *     theta, amplitude   or `table`, a Uint32Array as `pairTable` makes
 *     perToken     whether positions are given for each token, [seqLen]; else a row counts from one offset on
 */
export function plan({
  batch = 1, seqLen, qHeads, kHeads = 0, headDim, tokenMajor = true, start = 0, pairs = (headDim - start) / 2,
  pairing = "interleaved", storage = "float32", theta = 10_000, amplitude = 1, table = null, perToken = false,
}) {
  for (const [name, size] of Object.entries({ batch, seqLen, qHeads, headDim, pairs })) {
    if (!(Number.isInteger(size) && size > 0)) throw new RangeError(`${name} must be an integer above 0, got ${size}`);
  }
  if (start + 2 * pairs > headDim) throw new RangeError(`${pairs} pairs from ${start} on exceed headDim ${headDim}`);
  if (!["interleaved", "half"].includes(pairing)) throw new RangeError(`pairing is ${pairing}`);
  const { bytes, constant } = STORAGES[storage];

  // A thread takes 8 or 16 bytes from each half of the window where everything is aligned to them.
  const aligned = (n) => [headDim, start, pairs].every((value) => value % n === 0);
  if (bytes === 2 && !aligned(4)) throw new RangeError(`${storage} needs multiples of 4 elements; use float32`);
  const [kind, pairsPerThread] = bytes === 2 ? ["_packed", 4] : aligned(2) ? ["", 2] : ["_scalar", 1];
  const groups = pairs / pairsPerThread;
  const tokens = batch * seqLen;
  const blocks = Math.ceil(qHeads / HEADS_PER_THREAD) + Math.ceil(kHeads / HEADS_PER_THREAD);
  if (tokens * blocks * groups >= 2 ** 31) throw new RangeError("too many threads: cut it into several dispatches");

  // k begins at a multiple of 16 bytes.
  const kBase = Math.ceil((tokens * qHeads * headDim * bytes) / 16) * (16 / bytes);
  const operand = (base, heads) => [
    base + start,
    seqLen * heads * headDim,
    tokenMajor ? heads * headDim : headDim,
    tokenMajor ? headDim : seqLen * headDim,
  ];
  table ??= pairTable(frequencies(theta, pairs), { amplitude });
  const amplitudes = table.filter((_, i) => i % 4 === 3);
  const plain = amplitudes.every((bits) => bits === amplitudes[0]);
  const uniform = new Uint32Array(40);
  uniform.set([
    ...divisor(groups),
    ...divisor(tokenMajor ? blocks : tokens), // inner: neighbouring threads take neighbouring heads, or tokens
    ...divisor(seqLen),
    ...operand(0, qHeads),
    ...operand(kBase, kHeads),
    tokens,
    blocks,
    qHeads,
    kHeads,
    tokenMajor ? 0 : 1, // tokens_inner
    pairs,
    0, // fractions: positions are whole
    0, // pair_batch_stride: all rows share the table,
    0, // position_batch_stride: and the positions,
    0, // position_stream_stride: of which there is one stream
    perToken ? 1 : 0, // position_token_stride
    perToken ? 0 : 1, // position_step
    0, // first_token
    0, 0, 0, 0, // of the entry points that read tables of cosines and sines
    amplitudes.reduce((a, b) => Math.max(a, b)),
  ]);
  return {
    uniform,
    table,
    kStart: kBase * bytes,
    bytes: Math.ceil(((kBase + tokens * kHeads * headDim) * bytes) / 16) * 16,
    workgroups: Math.ceil((tokens * blocks * groups) / WORKGROUP_SIZE),
    entryPoints: { forward: `forward${kind}`, backward: `backward${kind}` },
    constants: {
      INTERLEAVED: pairing === "interleaved" ? 1 : 0,
      PLAIN: plain ? 1 : 0,
      WORKGROUP_SIZE,
      HEADS_PER_THREAD,
      ...(constant ? { STORAGE: constant } : {}),
    },
  };
}

/** The kernels on one device. */
export class Rope {
  #module;
  #groupLayout;
  #layout;
  #pipelines = new Map();

  constructor(device, code) {
    this.device = device;
    this.#module = device.createShaderModule({ label: "rope.wgsl", code });
    this.#groupLayout = device.createBindGroupLayout({
      entries: ["uniform", "read-only-storage", "read-only-storage", "storage"].map((type, binding) => ({
        binding,
        visibility: GPUShaderStage.COMPUTE,
        buffer: { type },
      })),
    });
    this.#layout = device.createPipelineLayout({ bindGroupLayouts: [this.#groupLayout] });
  }

  pipeline(entryPoint, constants) {
    const key = JSON.stringify([entryPoint, constants]);
    if (!this.#pipelines.has(key)) {
      const compute = { module: this.#module, entryPoint, constants };
      this.#pipelines.set(key, this.device.createComputePipeline({ layout: this.#layout, compute }));
    }
    return this.#pipelines.get(key);
  }

  /**
   * A rotation of `heads`, a GPUBuffer that holds q and, from `plan(...).kStart` on, k. `positions` is an int32 offset,
   * or one position for each token.
   */
  prepare(description, heads, positions = 0) {
    const perToken = typeof positions !== "number";
    const planned = plan({ ...description, perToken });
    const { seqLen } = description;
    const buffers = [planned.uniform, new Int32Array(perToken ? seqLen : 1), planned.table].map((data, i) => {
      const usage = (i ? GPUBufferUsage.STORAGE : GPUBufferUsage.UNIFORM) | GPUBufferUsage.COPY_DST;
      const buffer = this.device.createBuffer({ size: data.byteLength, usage });
      this.device.queue.writeBuffer(buffer, 0, data);
      return buffer;
    });
    const entries = [...buffers, heads].map((buffer, binding) => ({ binding, resource: { buffer } }));
    const group = this.device.createBindGroup({ layout: this.#groupLayout, entries });
    const most = this.device.limits.maxComputeWorkgroupsPerDimension;
    const y = Math.ceil(planned.workgroups / most);
    const rotation = {
      plan: planned,
      /** Other positions, as many as before: it is only a few bytes that are written. */
      moveTo: (moved) => {
        const data = perToken ? Int32Array.from(moved) : Int32Array.of(moved);
        if (data.length !== (perToken ? seqLen : 1)) throw new RangeError(`${data.length} positions`);
        this.device.queue.writeBuffer(buffers[1], 0, data);
      },
      /** Records one dispatch. "backward" takes the gradient of the result to the gradient of what was rotated. */
      record: (encoder, direction) => {
        const pass = encoder.beginComputePass();
        pass.setPipeline(this.pipeline(planned.entryPoints[direction], planned.constants));
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(Math.ceil(planned.workgroups / y), y);
        pass.end();
      },
      destroy: () => buffers.forEach((buffer) => buffer.destroy()),
    };
    rotation.moveTo(positions);
    return rotation;
  }

  /** Rotates q and k, typed arrays of the storage's bits, and reads them back: for tests and first steps. */
  async rotate(direction, description, q, k, positions) {
    const { kStart, bytes } = plan(description);
    const { STORAGE, COPY_DST, COPY_SRC, MAP_READ } = GPUBufferUsage;
    const heads = this.device.createBuffer({ size: bytes, usage: STORAGE | COPY_DST | COPY_SRC });
    const staging = this.device.createBuffer({ size: bytes, usage: COPY_DST | MAP_READ });
    this.device.queue.writeBuffer(heads, 0, q);
    if (k?.length) this.device.queue.writeBuffer(heads, kStart, k);
    const rotation = this.prepare(description, heads, positions);
    const encoder = this.device.createCommandEncoder();
    rotation.record(encoder, direction);
    encoder.copyBufferToBuffer(heads, 0, staging, 0, bytes);
    this.device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    const mapped = staging.getMappedRange().slice();
    for (const buffer of [heads, staging, rotation]) buffer.destroy();
    const read = (like, start) => new like.constructor(mapped, start, like.length);
    return [read(q, 0), k?.length ? read(k, kStart) : k];
  }
}
