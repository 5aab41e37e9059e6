// Rotary position embedding, forward and backward, in place.
//
// Pair i of a token at position p turns by the angle p * omega_i:
//     y1 = cos * x1 - sin * x2,    y2 = sin * x1 + cos * x2
// `backward` turns the other way, which is the transpose. cos and sin carry the pair's amplitude.
//
// Angles are counted in turns. A pair's frequency is a 64-bit fraction of a turn, so the phase of an
// integer position is a product modulo 2^64, which u32 multiplications give exactly at every position.
// The builtins sin, cos, pow and exp are not used: WGSL only promises 2^-11 for them.
//
// Bindings, all in group 0
//     0  uniform              Call, below
//     1  storage, read        positions: i32 each, then (if call.fractions > 0) as many f32 fractions
//     2  storage, read        pairs: per pair the turn fraction's high and low word, then
//                             (whole turns << 8) | position stream, then the amplitude as f32 bits;
//                             or tables: the caller's cosines, then as many sines
//     3  storage, read_write  the heads that are rotated, first q's, then k's (if there are any)
//
// Entry points. Those named here read positions and pairs; with _tables appended they read tables instead
//     forward, backward                two pairs a thread, float32 storage. head_dim, the window's start, the number
//                                      of pairs and every stride and base are multiples of two elements.
//     forward_packed, backward_packed  four pairs a thread, 16-bit storage, likewise multiples of four elements.
//     forward_scalar, backward_scalar  one pair a thread, float32 storage, any layout.
//
// Dispatch ceil(threads / WORKGROUP_SIZE) workgroups, threads = tokens * blocks * groups, spread over x and y
// as the adapter's limits ask. threads is less than 2^31.

override WORKGROUP_SIZE: u32 = 64;
override INTERLEAVED: bool = true;  // pairs (2i, 2i + 1); else halves (i, i + pair_count)
override STORAGE: u32 = 1;          // of the packed entry points
override HEADS_PER_THREAD: u32 = 16; // they share one angle
override PLAIN: bool = false;       // positions are whole, one stream of them, and call.amplitude is all pairs' own
const BFLOAT16 = 1u;
const FLOAT16 = 2u;

struct Divisor { // n / value = floor(2n * multiplier / 2^(32 + shift)) for n < 2^31
    value: u32,
    multiplier: u32, // ceil(2^(31 + shift) / value)
    shift: u32,      // ceil(log2(value))
    unused: u32,
}

struct Operand { // in elements
    base: u32, // of the first rotated element
    batch_stride: u32,
    token_stride: u32,
    head_stride: u32,
}

struct Call { // 160 bytes
    groups: Divisor,  // threads that share a head: pair_count / 2, packed: / 4, scalar: pair_count
    inner: Divisor,   // blocks if neighbouring threads take neighbouring heads, else tokens
    seq_len: Divisor,
    q: Operand,
    k: Operand,
    tokens: u32,      // batch * seq_len
    blocks: u32,      // ceil(q_heads / HEADS_PER_THREAD) + ceil(k_heads / HEADS_PER_THREAD)
    q_heads: u32,
    k_heads: u32,     // 0 if there is only one operand
    tokens_inner: u32, // 1 if inner is tokens, 0 if it is blocks
    pair_count: u32,
    fractions: u32,   // index of the first fraction, 0 if positions are whole
    pair_batch_stride: u32,      // in pairs: 0 if all rows share their frequencies
    position_batch_stride: u32,  // in positions: 0 if all rows share them
    position_stream_stride: u32,
    position_token_stride: u32,  // 1, or 0 if a row has one position, its offset,
    position_step: u32,          // and counts from there by 1 (else 0),
    first_token: u32,            // first_token being this dispatch's first
    table_batch_stride: u32,     // 0 if all rows share their tables
    table_token_stride: u32,     // pair_count or twice that
    table_second: u32,           // where the second results' factors begin in a token's row: 0 or pair_count
    table_sine: u32,             // where the sines begin
    amplitude: u32,              // the bits of a float32
}

@group(0) @binding(0) var<uniform> call: Call;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> tables: array<f32>;
@group(0) @binding(3) var<storage, read_write> words: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read_write> scalars: array<f32>; // the same buffer, for the scalar entry points

// The high word of a product, from four 16-bit products.
fn multiply_high(a: u32, b: u32) -> u32 {
    let a_low = a & 0xffffu;
    let a_high = a >> 16u;
    let b_low = b & 0xffffu;
    let b_high = b >> 16u;
    let middle = a_high * b_low + ((a_low * b_low) >> 16u);
    let carry = a_low * b_high + (middle & 0xffffu);
    return a_high * b_high + (middle >> 16u) + (carry >> 16u);
}

fn multiply_high2(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2(multiply_high(a.x, b.x), multiply_high(a.y, b.y));
}

fn divide(n: u32, by: Divisor) -> u32 {
    return multiply_high(2u * n, by.multiplier) >> by.shift;
}

// What a thread works on: `heads` heads from element `base` on, `stride` apart, at one token.
struct Work {
    batch: u32,
    token: u32,
    group: u32,
    base: u32,
    stride: u32,
    heads: u32, // 0 past the last thread
}

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
}

fn work_of(at: Invocation) -> Work {
    let thread = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * WORKGROUP_SIZE + at.local;
    let outer_and_inner = divide(thread, call.groups);
    let outer = divide(outer_and_inner, call.inner);
    let inner = outer_and_inner - outer * call.inner.value;
    var index = outer;
    var block = inner;
    if (call.tokens_inner > 0u) {
        index = inner;
        block = outer;
    }
    if (index >= call.tokens || block >= call.blocks) {
        return Work();
    }
    let q_blocks = (call.q_heads + HEADS_PER_THREAD - 1u) / HEADS_PER_THREAD;
    var operand = call.q;
    var heads = call.q_heads;
    if (block >= q_blocks) {
        operand = call.k;
        heads = call.k_heads;
        block -= q_blocks;
    }
    let batch = divide(index, call.seq_len);
    let token = index - batch * call.seq_len.value;
    let head = block * HEADS_PER_THREAD;
    return Work(
        batch,
        token,
        thread - outer_and_inner * call.groups.value,
        operand.base + batch * operand.batch_stride + token * operand.token_stride + head * operand.head_stride,
        operand.head_stride,
        min(HEADS_PER_THREAD, heads - head),
    );
}

// What turns two pairs: y1 = cosine x1 - sine x2, y2 = sine2 x1 + cosine2 x2.
struct Rotation {
    cosine: vec2<f32>,
    sine: vec2<f32>,
    cosine2: vec2<f32>,
    sine2: vec2<f32>,
}

// Sine and cosine of phases in units of 2^-32 turn: to the nearest quarter turn in integers, then
// minimax polynomials in turns on [-1/8, 1/8].
fn rotation_of(phase: vec2<u32>, amplitude: vec2<f32>, direction: f32) -> Rotation {
    let quadrant = (phase + vec2(0x20000000u)) >> vec2(30u);
    let turns = vec2<f32>(bitcast<vec2<i32>>(phase - (quadrant << vec2(30u)))) * 0x1p-32f;
    let square = turns * turns;
    let s = turns * (6.2831855 + square * (-41.341747 + square * (81.60228 - 75.72509 * square)));
    let c = 1.0 + square * (-19.739208 + square * (64.93914 + square * (-85.423134 + 58.564697 * square)));
    let swap = (quadrant & vec2(1u)) != vec2(0u);
    let cosine_sign = ((quadrant + vec2(1u)) & vec2(2u)) << vec2(30u);
    let sine_sign = (quadrant & vec2(2u)) << vec2(30u);
    let cosine = amplitude * bitcast<vec2<f32>>(bitcast<vec2<u32>>(select(c, s, swap)) ^ cosine_sign);
    let sine = direction * amplitude * bitcast<vec2<f32>>(bitcast<vec2<u32>>(select(s, c, swap)) ^ sine_sign);
    return Rotation(cosine, sine, cosine, sine);
}

fn rotations(work: Work, first: u32, second: u32, direction: f32) -> Rotation {
    let row = work.batch * call.pair_batch_stride;
    let at = work.batch * call.position_batch_stride + work.token * call.position_token_stride;
    let counted = (work.token + call.first_token) * call.position_step;
    if (PLAIN) {
        let a = pairs[row + first].xy;
        let b = pairs[row + second].xy;
        let phase = phase_of(vec2(positions[at]), counted, vec2(a.x, b.x), vec2(a.y, b.y));
        return rotation_of(phase, vec2(bitcast<f32>(call.amplitude)), direction);
    }
    let a = pairs[row + first];
    let b = pairs[row + second];
    let high = vec2(a.x, b.x);
    var amplitude = bitcast<vec2<f32>>(vec2(a.w, b.w));
    let ats = at + (vec2(a.z, b.z) & vec2(0xffu)) * call.position_stream_stride;
    var phase = phase_of(vec2(positions[ats.x], positions[ats.y]), counted, high, vec2(a.y, b.y));
    if (call.fractions > 0u) {
        let bits = vec2(positions[call.fractions + ats.x], positions[call.fractions + ats.y]);
        let fraction = bitcast<vec2<f32>>(bits);
        let size = vec2<u32>(abs(fraction) * 0x1p32f);
        let whole_turns = bitcast<vec2<u32>>(bitcast<vec2<i32>>(vec2(a.z, b.z)) >> vec2(8u));
        let part = multiply_high2(size, high) + size * whole_turns;
        phase += select(part, vec2(0u) - part, fraction < vec2(0.0));
        // Not a position: the result is not a number either.
        amplitude = select(amplitude, fraction, (bits & vec2(0x7fffffffu)) > vec2(0x7f800000u));
    }
    return rotation_of(phase, amplitude, direction);
}

// Positions `counted` on from `start`, times turn fractions, in units of 2^-32 turn.
fn phase_of(start: vec2<u32>, counted: u32, high: vec2<u32>, low: vec2<u32>) -> vec2<u32> {
    let position = start + counted;
    let phase = position * high + multiply_high2(position, low);
    // A negative position is 2^32 too large as u32. An offset that counts past 2^31 is not negative.
    return phase - select(vec2(0u), low, (start & position) >= vec2(0x80000000u));
}

// As `rotations`, from the caller's tables. The transpose of ((c, -s), (s2, c2)) is ((c, s2), (-s, c2)).
fn table_rotations(work: Work, first: u32, second: u32, direction: f32) -> Rotation {
    let at = vec2(first, second) + work.batch * call.table_batch_stride + work.token * call.table_token_stride;
    let at2 = at + call.table_second;
    let cosine = vec2(tables[at.x], tables[at.y]);
    let sine = vec2(tables[call.table_sine + at.x], tables[call.table_sine + at.y]);
    let cosine2 = vec2(tables[at2.x], tables[at2.y]);
    let sine2 = vec2(tables[call.table_sine + at2.x], tables[call.table_sine + at2.y]);
    if (direction < 0.0) {
        return Rotation(cosine, -sine2, cosine2, -sine);
    }
    return Rotation(cosine, sine, cosine2, sine2);
}

// Two pairs: their first elements, their second elements.
struct Pairs {
    x1: vec2<f32>,
    x2: vec2<f32>,
}

fn turn(r: Rotation, x: Pairs) -> Pairs {
    // Only an angle of exactly 0 has these. It must not turn -0 into 0 or spread a NaN.
    let identity = (r.sine == vec2(0.0)) & (r.cosine == vec2(1.0)) & (r.sine2 == vec2(0.0)) & (r.cosine2 == vec2(1.0));
    return Pairs(
        select(r.cosine * x.x1 - r.sine * x.x2, x.x1, identity),
        select(r.sine2 * x.x1 + r.cosine2 * x.x2, x.x2, identity),
    );
}

fn float16_to_float32(half: vec2<u32>) -> vec2<f32> {
    let magnitude = half & vec2(0x7fffu);
    let normal = bitcast<vec2<f32>>(select(
        (magnitude << vec2(13u)) + vec2(0x38000000u),
        (magnitude << vec2(13u)) | vec2(0x7f800000u), // infinite or not a number
        magnitude >= vec2(0x7c00u),
    ));
    let value = select(normal, vec2<f32>(magnitude) * 0x1p-24f, magnitude < vec2(0x400u));
    return bitcast<vec2<f32>>(bitcast<vec2<u32>>(value) | ((half & vec2(0x8000u)) << vec2(16u)));
}

// Rounds to nearest, ties to even, as the builtin need not.
fn float32_to_float16(value: vec2<f32>) -> vec2<u32> {
    let bits = bitcast<vec2<u32>>(value);
    let magnitude = bits & vec2(0x7fffffffu);
    let normal = (magnitude - vec2(0x38000000u) + vec2(0xfffu) + ((magnitude >> vec2(13u)) & vec2(1u))) >> vec2(13u);
    // Adding 0.5 leaves a subnormal's digits, rounded, in the low bits.
    let subnormal = bitcast<vec2<u32>>(bitcast<vec2<f32>>(magnitude) + vec2(0.5)) - vec2(0x3f000000u);
    var half = select(normal, subnormal, magnitude < vec2(0x38800000u));
    half = select(half, vec2(0x7c00u), magnitude >= vec2(0x477ff000u));
    let payload = (magnitude >> vec2(13u)) & vec2(0x3ffu);
    let not_a_number = vec2(0x7c00u) | select(payload, vec2(0x200u), payload == vec2(0u));
    half = select(half, not_a_number, magnitude > vec2(0x7f800000u));
    return half | ((bits >> vec2(16u)) & vec2(0x8000u));
}

fn float32_to_bfloat16(value: vec2<f32>) -> vec2<u32> {
    let bits = bitcast<vec2<u32>>(value);
    let high = bits >> vec2(16u);
    let rounded = (bits + vec2(0x7fffu) + (high & vec2(1u))) >> vec2(16u);
    let not_a_number = high | select(vec2(0u), vec2(0x40u), (high & vec2(0x7fu)) == vec2(0u));
    return select(rounded, not_a_number, (bits & vec2(0x7fffffffu)) > vec2(0x7f800000u));
}

// The low and the high half of each word.
fn unpack_low(packed: vec2<u32>) -> vec2<f32> {
    if (STORAGE == BFLOAT16) {
        return bitcast<vec2<f32>>(packed << vec2(16u));
    }
    return float16_to_float32(packed & vec2(0xffffu));
}

fn unpack_high(packed: vec2<u32>) -> vec2<f32> {
    if (STORAGE == BFLOAT16) {
        return bitcast<vec2<f32>>(packed & vec2(0xffff0000u));
    }
    return float16_to_float32(packed >> vec2(16u));
}

fn pack(low: vec2<f32>, high: vec2<f32>) -> vec2<u32> {
    if (STORAGE == BFLOAT16) {
        return float32_to_bfloat16(low) | (float32_to_bfloat16(high) << vec2(16u));
    }
    return float32_to_float16(low) | (float32_to_float16(high) << vec2(16u));
}

// Two pairs a thread: two float32 from each half of the window. Interleaved, these are a pair each.
fn rotate(work: Work, r: Rotation) {
    var i = work.base / 2u + work.group;
    let apart = call.pair_count / 2u;
    for (var head = 0u; head < work.heads; head++) {
        let a = bitcast<vec2<f32>>(words[i]);
        let b = bitcast<vec2<f32>>(words[i + apart]);
        if (INTERLEAVED) {
            let y = turn(r, Pairs(vec2(a.x, b.x), vec2(a.y, b.y)));
            words[i] = bitcast<vec2<u32>>(vec2(y.x1.x, y.x2.x));
            words[i + apart] = bitcast<vec2<u32>>(vec2(y.x1.y, y.x2.y));
        } else {
            let y = turn(r, Pairs(a, b));
            words[i] = bitcast<vec2<u32>>(y.x1);
            words[i + apart] = bitcast<vec2<u32>>(y.x2);
        }
        i += work.stride / 2u;
    }
}

// Four pairs a thread: four 16-bit numbers from each half of the window. r and s turn the pairs that `packed_pairs_of`
// says: interleaved, those of the first and of the second half; else those in the low and in the high halves of words.
fn rotate_packed(work: Work, r: Rotation, s: Rotation) {
    var i = work.base / 4u + work.group;
    let apart = call.pair_count / 4u;
    for (var head = 0u; head < work.heads; head++) {
        let a = words[i];
        let b = words[i + apart];
        if (INTERLEAVED) {
            let y = turn(r, Pairs(unpack_low(a), unpack_high(a)));
            let z = turn(s, Pairs(unpack_low(b), unpack_high(b)));
            words[i] = pack(y.x1, y.x2);
            words[i + apart] = pack(z.x1, z.x2);
        } else {
            let y = turn(r, Pairs(unpack_low(a), unpack_low(b)));
            let z = turn(s, Pairs(unpack_high(a), unpack_high(b)));
            words[i] = pack(y.x1, z.x1);
            words[i + apart] = pack(y.x2, z.x2);
        }
        i += work.stride / 4u;
    }
}

// One pair a thread, wherever its two float32 lie.
fn rotate_scalar(work: Work, r: Rotation) {
    var i = work.base + select(work.group, 2u * work.group, INTERLEAVED);
    let apart = select(call.pair_count, 1u, INTERLEAVED);
    for (var head = 0u; head < work.heads; head++) {
        let y = turn(r, Pairs(vec2(scalars[i]), vec2(scalars[i + apart])));
        scalars[i] = y.x1.x;
        scalars[i + apart] = y.x2.x;
        i += work.stride;
    }
}

// The two pairs that `rotate` turns.
fn pairs_of(group: u32) -> vec2<u32> {
    return select(vec2(2u * group) + vec2(0u, 1u), vec2(group, group + call.pair_count / 2u), INTERLEAVED);
}

// The pairs that `rotate_packed` turns by r (x and y) and by s (z and w).
fn packed_pairs_of(group: u32) -> vec4<u32> {
    let interleaved = 2u * group + vec4(0u, 1u, call.pair_count / 2u, call.pair_count / 2u + 1u);
    return select(4u * group + vec4(0u, 2u, 1u, 3u), interleaved, INTERLEAVED);
}

fn by_angles(work: Work, direction: f32) {
    if (work.heads > 0u) {
        let pair = pairs_of(work.group);
        rotate(work, rotations(work, pair.x, pair.y, direction));
    }
}

fn by_angles_packed(work: Work, direction: f32) {
    if (work.heads > 0u) {
        let pair = packed_pairs_of(work.group);
        let r = rotations(work, pair.x, pair.y, direction);
        rotate_packed(work, r, rotations(work, pair.z, pair.w, direction));
    }
}

fn by_angles_scalar(work: Work, direction: f32) {
    if (work.heads > 0u) {
        rotate_scalar(work, rotations(work, work.group, work.group, direction));
    }
}

fn by_tables(work: Work, direction: f32) {
    if (work.heads > 0u) {
        let pair = pairs_of(work.group);
        rotate(work, table_rotations(work, pair.x, pair.y, direction));
    }
}

fn by_tables_packed(work: Work, direction: f32) {
    if (work.heads > 0u) {
        let pair = packed_pairs_of(work.group);
        let r = table_rotations(work, pair.x, pair.y, direction);
        rotate_packed(work, r, table_rotations(work, pair.z, pair.w, direction));
    }
}

fn by_tables_scalar(work: Work, direction: f32) {
    if (work.heads > 0u) {
        rotate_scalar(work, table_rotations(work, work.group, work.group, direction));
    }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward(at: Invocation) {
    by_angles(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward(at: Invocation) {
    by_angles(work_of(at), -1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward_packed(at: Invocation) {
    by_angles_packed(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward_packed(at: Invocation) {
    by_angles_packed(work_of(at), -1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward_scalar(at: Invocation) {
    by_angles_scalar(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward_scalar(at: Invocation) {
    by_angles_scalar(work_of(at), -1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward_tables(at: Invocation) {
    by_tables(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward_tables(at: Invocation) {
    by_tables(work_of(at), -1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward_packed_tables(at: Invocation) {
    by_tables_packed(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward_packed_tables(at: Invocation) {
    by_tables_packed(work_of(at), -1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn forward_scalar_tables(at: Invocation) {
    by_tables_scalar(work_of(at), 1.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn backward_scalar_tables(at: Invocation) {
    by_tables_scalar(work_of(at), -1.0);
}
