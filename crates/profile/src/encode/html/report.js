// The report of one profile. `#data` holds the profile: JSON, gzipped, in base64. Nothing from it reaches the page other
// than as text, or as the address of a link whose scheme was checked.

const RUST = 0,
  NATIVE = 1,
  KERNEL = 2,
  WAIT = 3,
  REMARK = 4,
  SPAN = 5,
  THREAD = 6,
  IDLE = 7,
  FOLD = 8,
  ALL = 9,
  AWAIT = 10,
  DELAY = 11;
const KIND_NAMES = [
  'Rust',
  'native code',
  'kernel',
  'wait',
  'remark',
  'span',
  'thread',
  'no thread was active',
  'calls without a branch',
  'everything shown',
  'await, in no thread',
  'woken, not polled',
];
const COLORS = [
  ...['rust', 'native', 'kernel', 'wait', 'remark', 'span', 'thread', 'idle', 'fold', 'all', 'await', 'delay'],
];
/** The patterns on boxes, so that color is not all that tells them apart. */
const PATTERNS = {
  [WAIT]: 'lines',
  [REMARK]: 'lines',
  [IDLE]: 'dots',
  [FOLD]: 'dots',
  [AWAIT]: 'bars',
  [DELAY]: 'grid',
};
// Whose code a function is. Of the code in a stack, that with the least is of interest.
const OWN = 0,
  OTHERS = 8;
// Kinds of samples.
const ON_CPU = 0,
  OFF_CPU = 1,
  AWAITING = 2,
  DELAYED = 3,
  ALLOCATED = 4;
// What was going on where a stack ends.
const BLOCKED = 1,
  PENDING = 2,
  WOKEN = 3,
  UNKNOWN = 5;
/** The mode that shows only samples of a kind, by kind. */
const MODES = ['cpu', 'off', 'await', 'delay', 'alloc'];
const isPending = (kind) => kind === AWAITING || kind === DELAYED;
/** Samples of at most this weight represent awaits and delays shorter than 10 ms. Some have a few nanoseconds more. */
const SHORT = 10.01e6;
const NO_THREAD = -2;
const LONGEST_TEXT = 2000;
const media = (query) => matchMedia(query);

// --- text and elements

// Reports that a server shows are in a sandbox, in which links to elsewhere do not work otherwise.
const NEW_TAB = { target: '_blank', rel: 'noopener noreferrer' };
const code = (text) => el('span', { class: 'code' }, text);
/** What boxes of a mode add up: time, or bytes. */
const amount = (value, mode = state.mode) => (mode === 'alloc' ? memory(value) : duration(value));
const percent = (part, whole) => {
  const value = whole > 0 ? (part / whole) * 100 : 0;
  if (value > 0 && value < 0.1) return '< 0.1 %';
  return `${value === 0 ? 0 : value < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
};
/** Points in time of one axis share the unit and the number of decimals. */
const axis = (length, step) => {
  const [size, unit] = length >= 1e9 ? [1e9, 's'] : length >= 1e6 ? [1e6, 'ms'] : [1e3, 'µs'];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return (ns) => `${(ns / size).toFixed(decimals)} ${unit}`;
};

const isEditorScheme = (scheme) => !['javascript:', 'data:', 'vbscript:', 'blob:'].includes(scheme);
const sourceUrl = (template, file, line) => {
  if (!template || !file || !(line > 0)) return null;
  const path = encodeURI(file.toWellFormed?.() ?? file).replace(/[?#]/g, encodeURIComponent);
  return checkedUrl(template, { file: path, line: String(line) }, isEditorScheme);
};

// --- the profile

let profile, wallClock;

async function decode() {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error(
      'This browser cannot decompress data (no DecompressionStream). Use Chrome 80, Firefox 113 or Safari ' +
        '16.4 or later.',
    );
  }
  try {
    const bytes = Uint8Array.from(atob(byId('data').textContent.trim()), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    const data = await new Response(stream).json();
    if (data.version === 2) return prepare(data);
  } catch {
    throw new Error('The data of this report is damaged. The file is incomplete or was changed.');
  }
  throw new Error('The data of this report is of a version that this page does not know.');
}

/** Adds to the profile what is derived from it. */
function prepare(data) {
  data.strings = data.strings.map(clean);
  if (data.kept.length === 0) data.kept.push(unknownSpan(data));
  for (const kept of data.kept) {
    kept.name = clean(kept.name);
    kept.reasons = clean(kept.reasons);
    kept.start = Math.max(0, kept.start);
    for (const name of TIMES) kept[name] ??= 0;
    kept.subtree_on_cpu ??= kept.on_cpu;
    kept.unexplained = Math.max(0, kept.idle - kept.await - kept.scheduling_delay);
  }
  data.length = Math.max(1, data.duration, ...data.kept.map((kept) => kept.start + kept.wall));
  for (const row of [...(data.compared?.rows ?? []), ...(data.compared?.beside ?? [])])
    Object.assign(row, { words: clean(row.words), name: clean(row.function ?? row.child ?? ''), file: clean(row.file ?? '') });
  nameLeaves(data);
  nameEmptyStacks(data, data.samples);
  if (data.typical) nameEmptyStacks(data, data.typical);
  markAwaits(data);
  data.kinds = new Set([...data.samples.kind, data.samples.short.includes(true) ? 'short' : '']);
  placeSamples(data.samples, data.threads.name.length);
  return data;
}

/** The times of a kept span, which are absent if they are unknown. */
const TIMES = [
  ...['wall', 'on_cpu', 'on_cpu_error', 'off_cpu', 'idle', 'await', 'scheduling_delay', 'other_spans'],
  ...['after_last_exit', 'unsampled'],
];
/** In place of the kept span of a profile that has none. */
const unknownSpan = ({ name, duration: wall }) => ({
  ...{ name, target: '', fields: [], reasons: '', open: false, trace_id: '', span_id: '', span: -1 },
  ...{ start: 0, wall, cpu_known: false, beside: [], split: [[['unmeasured', 'not measured'], wall]] },
});

/** The innermost box of a sample that did not run, by its leaf. */
function nameLeaves({ strings, leaves }) {
  const behind = (text) => (text === '' ? '[scheduling delay]' : `[scheduling delay behind ${text}]`);
  leaves.name = leaves.kind.map((kind, leaf) => {
    const text = strings[leaves.text[leaf]];
    if (kind === WOKEN) return behind(text);
    if (kind === PENDING) return text === '' ? '[await]' : `[await, ${text}]`;
    return (kind === BLOCKED || kind === UNKNOWN) && text !== '' ? `[${text}]` : '';
  });
  // The address and the holder of a lock are not those in another process: locks of one call are the same.
  const bare = leaves.name.map(bareLeaf);
  const first = new Map();
  bare.forEach((name, leaf) => {
    if (!first.has(name) || leaves.name[leaf] === name) first.set(name, leaf);
  });
  leaves.same = bare.map((name) => first.get(name));
}

const withoutAddress = (name) => name.replace(/ 0x[0-9a-f]+/, '');
const bareLeaf = (name) => name.replace(/ 0x[0-9a-f]+(, held by [^]*(?=\]$))?/, '');

/** A sample of which nothing is known gets a remark as its only frame. */
function nameEmptyStacks({ strings, functions, frames, stacks, leaves }, samples) {
  const made = new Map();
  const make = (name) => {
    functions.name.push(strings.push(name) - 1);
    functions.file.push(strings.push('') - 1);
    functions.origin.push(OTHERS);
    frames.function.push(functions.name.length - 1);
    frames.line.push(0);
    frames.kind.push(REMARK);
    frames.inferred.push(0);
    stacks.frame.push(frames.kind.length - 1);
    return stacks.parent.push(-1) - 1;
  };
  samples.stack.forEach((stack, i) => {
    const name = leaves.name[samples.leaf[i]];
    if (stack >= 0 || (name !== '' && hasLeafBox(samples.kind[i]))) return;
    if (!made.has(name)) made.set(name, make(name || '[no stack]'));
    samples.stack[i] = made.get(name);
  });
}
/** Whether what was going on is a box of its own. */
const hasLeafBox = (kind) => kind === OFF_CPU || isPending(kind);

/** Awaits are in no thread. */
function markAwaits({ samples }) {
  samples.short = samples.kind.map((kind, i) => isPending(kind) && samples.weight[i] <= SHORT);
  samples.kind.forEach((kind, i) => {
    if (isPending(kind)) samples.thread[i] = NO_THREAD;
  });
}

/**
 * The interval on its thread that each sample represents: before it, and not before the previous sample or wait. Of an
 * allocation, a moment.
 */
function placeSamples(samples, threads) {
  const size = samples.stack.length;
  samples.from = new Float64Array(size);
  samples.to = new Float64Array(size);
  const ends = new Float64Array(threads + 1);
  let now = 0;
  for (let i = 0; i < size; i++) {
    now += samples.time[i];
    const weight = samples.weight[i],
      thread = samples.thread[i] < 0 ? threads : samples.thread[i];
    if (samples.kind[i] === ON_CPU) {
      samples.from[i] = Math.min(now, Math.max(now - weight, ends[thread], 0));
      samples.to[i] = now;
    } else {
      samples.from[i] = now;
      samples.to[i] = now + (samples.kind[i] === ALLOCATED ? 0 : weight);
    }
    if (samples.kind[i] < AWAITING) ends[thread] = Math.max(ends[thread], samples.to[i]);
  }
}

/**
 * Divides wall time evenly among the samples that are active at each moment, so that their parts, and the time when
 * none is active, add up to wall time. Samples that represent short awaits have no exact length: they share the rest.
 */
function makeWallClock({ from, to, short }) {
  const isExact = (_, i) => !short[i];
  const starts = from.filter(isExact).sort(),
    ends = to.filter(isExact).sort();
  const size = starts.length * 2,
    times = new Float64Array(size + 1),
    active = new Uint32Array(size + 1);
  const shares = new Float64Array(size + 1),
    covered = new Float64Array(size + 1);
  let i = 0,
    j = 0,
    parallel = false;
  for (let k = 1; k <= size; k++) {
    const isEnd = i >= starts.length || ends[j] <= starts[i];
    times[k] = isEnd ? ends[j++] : starts[i++];
    active[k] = i - j;
    const elapsed = times[k] - times[k - 1];
    shares[k] = shares[k - 1] + (active[k - 1] > 0 ? elapsed / active[k - 1] : 0);
    covered[k] = covered[k - 1] + (active[k - 1] > 0 ? elapsed : 0);
    parallel ||= active[k - 1] > 1 && elapsed > 0;
  }
  const read = (sums, time, rate) => {
    const k = lastAtMost(times, times.length, time);
    return k < 0 ? 0 : sums[k] + (time - times[k]) * rate(active[k]);
  };
  const shareAt = (time) => read(shares, time, (number) => (number > 0 ? 1 / number : 0));
  const coveredAt = (time) => read(covered, time, (number) => (number > 0 ? 1 : 0));
  return {
    parallel,
    share: (begin, end) => Math.max(0, shareAt(end) - shareAt(begin)),
    covered: (begin, end) => coveredAt(end) - coveredAt(begin),
  };
}

/** The last index of a sorted list whose entry is at most `value`, or -1. */
function lastAtMost(sorted, length, value) {
  let low = 0,
    high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const functionName = (index) => profile.strings[profile.functions.name[index]];
const functionFile = (index) => profile.strings[profile.functions.file[index]] ?? '';
const frameName = (frame) => functionName(profile.frames.function[frame]);
const spanName = (span) => profile.strings[profile.spans.name[span]];
const threadName = (thread) =>
  thread < 0
    ? thread === NO_THREAD
      ? 'no thread'
      : 'unknown thread'
    : profile.strings[profile.threads.name[thread]] || `thread ${profile.threads.tid[thread]}`;
const placeText = (file, line) => (file && line > 0 ? `${file}:${line}` : file);
const shortPlace = (frame) => framePlace(frame).replace(/^.{12,}?\/([^/]+\/[^/]+)$/, '…/$1');
const framePlace = (frame) => placeText(functionFile(profile.frames.function[frame]), profile.frames.line[frame]);

function placeElement(frame) {
  const file = functionFile(profile.frames.function[frame]),
    text = framePlace(frame);
  const url = sourceUrl(profile.source_url, file, profile.frames.line[frame]);
  return url ? el('a', { href: url, class: 'code', ...NEW_TAB }, text) : code(text);
}

const originOf = (frame) => profile.functions.origin[profile.frames.function[frame]];
/** Whether a frame is the program's own code. */
const isOwn = (frame) => originOf(frame) === OWN;

/** The names of a span's ancestors and itself, the outermost first, as indexes. */
function spanPath(span) {
  const path = [];
  for (let at = span; at >= 0 && path.length < 1000; at = profile.spans.parent[at]) path.push(at);
  return path.reverse();
}

const remembered = (find) => {
  const known = new Map();
  return (key) => {
    if (!known.has(key)) known.set(key, find(key));
    return known.get(key);
  };
};
const isCode = (frame) => profile.frames.kind[frame] <= KERNEL;
/** The frame that a stack ends in; for a wait or an await, the code that called it. */
const siteOf = remembered(findSite);
function findSite(stack) {
  const { parent, frame } = profile.stacks;
  let site = -1;
  for (let at = stack; at >= 0; at = parent[at]) {
    const here = frame[at];
    if (isCode(here) && (site < 0 || originOf(here) < originOf(site))) site = here;
  }
  return site;
}
/** What the code at the site of a stack awaits: the call in it, or -1. */
const awaitedOf = remembered((stack) => {
  const { parent, frame } = profile.stacks;
  let call = -1;
  for (let at = stack; at >= 0 && frame[at] !== siteOf(stack); at = parent[at]) if (isCode(frame[at])) call = frame[at];
  return call;
});
/** `tokio::time::Sleep` of `<tokio::time::Sleep as Future>::poll`. */
const futureName = (frame) => {
  const name = frameName(frame);
  return bareName(name).replace(/^(?:&(?:mut )?)+|(?:::poll\w*)?(?:::\{\{?(?:closure|async)[^{}]*\}?\})*$/g, '') || name;
};

// --- what is shown

const state = {
  mode: '',
  view: 'graph',
  spans: true,
  threads: false,
  fold: true,
  search: '',
  /** The selected interval, [from, to], or null. */
  interval: null,
  /** String index of a span's name, or -1. */
  span: -1,
  /** Index of a function, or -1. */
  fn: -1,
  /** Whether a function has only what its own code ran or allocated, without what it calls. */
  self: false,
  /** `KIND.FRAME.OBJECT` of a wait, await or delay: its caller, and a frame or a leaf. Or ''. */
  wait: '',
  /** Whether the graph shows the difference to typical spans. */
  diff: false,
  /** Keys of the boxes from the root to the zoomed one. */
  zoom: [],
};
/** Typical spans have no times, threads or spans, so nothing can be filtered in a difference. */
const NO_FILTER = { interval: null, span: -1, fn: -1, wait: '' };

/** The samples in the interval and in the spans of that name, and the part of each that is in the interval. */
function selectSamples(ofSpan) {
  const { from, to, span } = profile.samples;
  const [begin, end] = state.interval ?? [-Infinity, Infinity];
  const inSpan = ofSpan < 0 ? null : spansNamed(ofSpan);
  const chosen = [];
  for (let i = 0; i < from.length; i++) {
    if (inSpan && !inSpan[span[i]]) continue;
    const length = to[i] - from[i];
    const part =
      length > 0
        ? (Math.min(end, to[i]) - Math.max(begin, from[i])) / length
        : from[i] >= begin && from[i] < end
          ? 1
          : 0;
    if (part > 0) chosen.push({ i, part: Math.min(1, part) });
  }
  return chosen;
}

/** For each span, whether it or one of its ancestors has that name. */
function spansNamed(name) {
  return profile.spans.name.map((_, span) => spanPath(span).some((at) => profile.spans.name[at] === name));
}

const matchesSite = ({ i }) => {
  const { stack, kind } = profile.samples;
  if (state.fn >= 0)
    return (
      MODES[kind[i]] === filteredMode() &&
      (state.self ? profile.frames.function[leafFrame(stack[i])] === state.fn : isOnStack(stack[i], state.fn))
    );
  return state.wait === '' || waitKey(i) === state.wait;
};
const leafFrame = (stack) => profile.stacks.frame[stack];
let written;
/** The first function that people wrote as the same one: closures are a part of the function around them. */
const writtenIn = (fn) => (written ??= groupFunctions())[fn];
function groupFunctions() {
  const first = new Map();
  return profile.functions.name.map((_, fn) => {
    const key = `${withoutClosure(functionName(fn))}\n${functionFile(fn)}`;
    if (!first.has(key)) first.set(key, fn);
    return first.get(key);
  });
}
const isOnStack = (stack, fn) => {
  const { parent, frame } = profile.stacks,
    wanted = writtenIn(fn);
  let at = stack;
  while (at >= 0 && writtenIn(profile.frames.function[frame[at]]) !== wanted) at = parent[at];
  return at >= 0;
};
const leafName = (leaf) => profile.leaves.name[leaf] ?? '';
const waitKey = (i) => `${profile.samples.kind[i]}.${siteOf(profile.samples.stack[i])}.${objectOf(i)}`;
/** Whether what a sample waited for is a call in the code at its site, and not its leaf. */
const isCall = (kind, site) => kind === AWAITING && site >= 0;
/** What a future awaited: a frame, or -1. What a thread waited for, or what delayed a poll: a leaf. */
function objectOf(i) {
  const { kind, stack, leaf } = profile.samples;
  return isCall(kind[i], siteOf(stack[i])) ? awaitedOf(stack[i]) : leaf[i];
}
function objectName(kind, site, object) {
  if (!isCall(kind, site)) return withoutAddress(leafName(object));
  return object < 0 ? '' : `at ${futureName(object)}`;
}

function weigh({ i, part }, mode, shortScale) {
  const { kind, weight, from, to, short } = profile.samples;
  if (mode !== 'wall') return MODES[kind[i]] === mode ? weight[i] * part : 0;
  if (kind[i] === ALLOCATED) return 0;
  if (short[i]) return weight[i] * part * shortScale;
  const [begin, end] = state.interval ?? [-Infinity, Infinity];
  return wallClock.share(Math.max(begin, from[i]), Math.min(end, to[i]));
}
/** The wall time that no exact sample covers, in all and without what short awaits take of it, and their scale there. */
function uncovered() {
  const [begin, end] = state.interval ?? [0, profile.length],
    { short, weight } = profile.samples;
  const all = Math.max(0, end - begin - wallClock.covered(begin, end));
  const shorts = selectSamples(-1).reduce((sum, { i, part }) => sum + (short[i] ? weight[i] * part : 0), 0);
  return { shortScale: Math.min(1, all / (shorts || 1)), rest: Math.max(0, all - shorts) };
}

// --- the tree

let tree;
const KEYS = 2 ** 27,
  SPAN_KEYS = 2 ** 25,
  THREAD_KEYS = 2 ** 26,
  IDLE_KEYS = THREAD_KEYS + 2 ** 25,
  LEAF_KEYS = 2 ** 24;
/** The kind of box of what was going on where a stack ends, by the kind of sample. */
const LEAF_BOXES = { [OFF_CPU]: WAIT, [AWAITING]: AWAIT, [DELAYED]: DELAY };

/** A tree of one node, to which `child` adds. */
function startTree() {
  const found = new Map(),
    nodes = [];
  const make = (parent, key, kind, what) => {
    const node = {
      id: nodes.length,
      parent,
      key,
      kind,
      what,
      value: 0,
      self: 0,
      /** In a difference: what this span and the typical one have. */
      slow: 0,
      typical: 0,
      samples: 0,
      children: [],
      places: [],
      at: 0,
    };
    nodes.push(node);
    parent?.children.push(node);
    return node;
  };
  const child = (parent, key, kind, what) => {
    const id = parent.id * KEYS + key;
    if (!found.has(id)) found.set(id, make(parent, key, kind, what));
    return found.get(id);
  };
  return { root: make(null, 0, ALL, -1), nodes, child };
}

/** Samples merged by thread, span and functions, from the outermost. */
function buildTree(chosen, mode) {
  const { root, nodes, child } = startTree(),
    groups = new Map();
  const nodeOf = (thread, span) => {
    let node = root;
    if (state.threads) node = child(node, THREAD_KEYS + thread - NO_THREAD, THREAD, thread);
    if (state.spans) {
      for (const at of spanPath(span)) node = child(node, SPAN_KEYS + profile.spans.name[at], SPAN, at);
    }
    return node;
  };
  const groupOf = (i) => {
    const { thread, span } = profile.samples;
    const key = `${state.threads ? thread[i] : ''}/${state.spans ? span[i] : ''}`;
    if (!groups.has(key)) {
      const node = nodeOf(thread[i], span[i]);
      // Spans of the same name share a group.
      node.group ??= { node, stacks: new Map() };
      groups.set(key, node.group);
    }
    return groups.get(key);
  };
  const { shortScale, rest } = uncovered();
  for (const one of chosen) {
    const weight = weigh(one, mode, shortScale);
    if (!(weight > 0)) continue;
    const place = placeIn(groupOf(one.i), profile.samples.stack[one.i], child);
    place.weight += weight;
    const leaf = profile.samples.leaf[one.i],
      box = leafName(leaf) === '' ? undefined : LEAF_BOXES[profile.samples.kind[one.i]];
    const node = box ? child(place.node, LEAF_KEYS + leaf, box, leaf) : place.node;
    node.self += weight;
    node.samples++;
  }
  addPlaces(groups);
  if (mode === 'wall') {
    const addIdle = (parent, kind, what, ns) => (child(parent, IDLE_KEYS + what, kind, what).self += ns);
    divideRest(
      rest,
      (...idle) => addIdle(root, ...idle),
      (span, ns) => addIdle(nodeOf(NO_THREAD, span), IDLE, 0, ns),
    );
  }
  sumUp(nodes);
  return { root, nodes };
}

/**
 * This span and the typical one, merged by functions. The width of a box is the larger of both, so that neither what was
 * added nor what is absent is hidden.
 */
function buildDifference(mode) {
  const { root, nodes, child } = startTree(),
    group = { node: root, stacks: new Map() },
    { samples, typical } = profile;
  const isWanted = (kind) => (mode === 'wall' ? kind !== ALLOCATED : MODES[kind] === mode);
  const add = ({ stack, leaf, kind, weight }, side, isInside) => {
    stack.forEach((at, i) => {
      if (!isWanted(kind[i]) || !isInside(i)) return;
      const place = placeIn(group, at, child),
        end = profile.leaves.same[leaf[i]],
        box = leafName(end) === '' ? undefined : LEAF_BOXES[kind[i]];
      place.weight += weight[i];
      const node = box ? child(place.node, LEAF_KEYS + end, box, end) : place.node;
      node[side] += weight[i];
      if (side === 'slow') node.samples++;
    });
  };
  const inside = insideCompared();
  add(samples, 'slow', (i) => !inside || inside[samples.span[i]]);
  add(typical, 'typical', () => true);
  addPlaces(new Map([['', group]]));
  for (const node of nodes) {
    node.self = Math.max(node.slow, node.typical);
    Object.assign(node, { selfSlow: node.slow, selfTypical: node.typical });
  }
  sumUp(nodes);
  return { root, nodes };
}
/** For each span, whether it is the compared one or inside it; null for all. */
function insideCompared() {
  const top = profile.kept[profile.compared.kept]?.span ?? -1;
  return top < 0 ? null : profile.spans.name.map((_, span) => spanPath(span).includes(top));
}
/** How much more this span has than the typical one, and as a part of the larger of both. */
const extraOf = (node) => node.slow - node.typical;
const relativeOf = (node) => extraOf(node) / (Math.max(node.slow, node.typical) || 1);
const SAME = 0.05;
const lookOf = (node) => (relativeOf(node) > SAME ? 'more' : relativeOf(node) < -SAME ? 'less' : 'same');
const LOOK_MARKS = { more: '▲', less: '▼', same: '' };
const extraText = (node) => signed(extraOf(node), amount);

/** The node of a stack, and of all its callers. */
function placeIn(group, stack, child) {
  const { parent, frame } = profile.stacks,
    missing = [];
  let at = stack;
  while (at >= 0 && !group.stacks.has(at)) {
    missing.push(at);
    at = parent[at];
  }
  let place = at >= 0 ? group.stacks.get(at) : { node: group.node, weight: 0 };
  while (missing.length > 0) {
    const next = missing.pop(),
      index = frame[next];
    const node = child(place.node, profile.frames.function[index], profile.frames.kind[index], index);
    place = { node, weight: 0, frame: index, outer: place };
    node.places.push(place);
    group.stacks.set(next, place);
  }
  return place;
}

/** Callers have the weight of their callees. A place is always inserted after its caller's. */
function addPlaces(groups) {
  for (const { stacks } of new Set(groups.values())) {
    for (const place of [...stacks.values()].reverse()) {
      if (place.outer) place.outer.weight += place.weight;
    }
  }
}

const IDLE_TEXTS = ['idle: not explained', 'not sampled', 'idle or not sampled', 'other spans on its stack', 'waiting for a CPU'];
/**
 * The wall time in which no sample is active: unexplained idle time of the topmost kept spans, the time in which their
 * threads were in other spans or waited for a CPU, and what remains.
 */
function divideRest(rest, add, addToSpan) {
  if (state.span >= 0 || state.fn >= 0 || state.wait !== '') return;
  // When a span was idle is unknown.
  if (state.interval) return add(IDLE, 2, rest);
  const idle = sumOver(topmostSpans(), (kept) => kept.unexplained),
    shown = Math.min(idle, rest);
  for (const { span, unexplained } of topmostSpans()) addToSpan(span, idle > 0 ? (unexplained / idle) * shown : 0);
  let left = rest - shown;
  for (const [what, of] of [
    [3, (kept) => kept.other_spans],
    [4, ({ split }) => sumOver(split, ([[kind], ns]) => (kind === 'runnable' ? ns : 0))],
  ]) {
    const part = Math.min(sumOver(topmostSpans(), of), left);
    if (part > 0) add(IDLE, what, part);
    left -= part;
  }
  add(REMARK, 1, left);
}
const sumOver = (list, of) => list.reduce((sum, one) => sum + Math.max(0, of(one)), 0);
/** The kept spans that are inside no other. */
function topmostSpans() {
  const topmost = profile.kept.filter((kept) => kept.topmost);
  return topmost.length > 0 ? topmost : [profile.kept[0]];
}

function sumUp(nodes) {
  for (const node of nodes.toReversed?.() ?? [...nodes].reverse()) {
    node.value += node.self;
    if (node.parent) {
      node.parent.value += node.value;
      node.parent.slow += node.slow;
      node.parent.typical += node.typical;
      node.parent.samples += node.samples;
    }
  }
  for (const node of nodes) {
    node.children = node.children
      .filter((child) => child.value > 0)
      .sort((a, b) => isIdle(a) - isIdle(b) || b.value - a.value);
    let at = node.at;
    for (const child of node.children) {
      child.at = at;
      at += child.value;
    }
  }
}
const isIdle = (node) => node.key >= IDLE_KEYS;

function nodeName(node) {
  if (node.kind === ALL) return 'all';
  if (isLeaf(node)) return leafName(node.what);
  if (node.kind === FOLD) return `… ${count(node.inside.length, 'call')}`;
  if (isIdle(node)) return `[${IDLE_TEXTS[node.what]}]`;
  if (node.kind === SPAN) return spanName(node.what);
  if (node.kind === THREAD) return threadName(node.what);
  return frameName(node.what);
}
const isLeaf = (node) => [WAIT, AWAIT, DELAY].includes(node.kind);
const hasCode = (node) => node.kind <= REMARK && !isLeaf(node) && !isIdle(node);
const isInferred = (node) => hasCode(node) && node.places.every((place) => profile.frames.inferred[place.frame]);
const isOwnNode = (node) => node.kind === RUST && isOwn(node.what);

/** The frames of a node that differ in their line, the one with the most time first. */
function framesOf(node) {
  const weights = new Map();
  for (const { frame, weight } of node.places) weights.set(frame, (weights.get(frame) ?? 0) + weight);
  return [...weights].sort((a, b) => b[1] - a[1]).map(([frame]) => frame);
}

// --- rows of the graph

const KEPT_AFTER = 3,
  FEWEST_FOLDED = 4;
/** Folds that were opened: the ids of the nodes above them. */
let opened = new Set();

/**
 * Gives each node its row, what is drawn above it (`up`) and below (`kids`). Runs of calls without a branch fold, other
 * than of the program's own code.
 */
function arrange() {
  tree.root.up = null;
  tree.root.row = 0;
  const open = [tree.root];
  while (open.length > 0) {
    const node = open.pop();
    node.kids = node.children;
    const run = state.fold && node.kind !== FOLD && !opened.has(node.id) ? runBelow(node) : [];
    if (run.length > 0) node.kids = [(node.fold ??= foldOf(node, run))];
    for (const kid of node.kids) {
      kid.up = node;
      kid.row = node.row + 1;
      open.push(kid);
    }
  }
}
const isRunPart = (node) => node.kind <= KERNEL && !isIdle(node) && !isOwnNode(node);

/** The calls to fold below a node: a run that begins with it, without its last calls. */
function runBelow(node) {
  const { parent } = node,
    run = [];
  const isFirst = isRunPart(node) && !(parent && isRunPart(parent) && parent.children.length === 1);
  let at = node;
  while (isFirst && at.children.length === 1 && isRunPart(at.children[0]) && at.self <= at.value * 0.001) {
    at = at.children[0];
    run.push(at);
  }
  return run.length >= FEWEST_FOLDED + KEPT_AFTER ? run.slice(0, -KEPT_AFTER) : [];
}
function foldOf(node, inside) {
  const last = inside.at(-1);
  return {
    id: -1 - node.id,
    parent: node,
    kind: FOLD,
    key: -1,
    inside,
    at: node.at,
    value: last.value,
    slow: last.slow,
    typical: last.typical,
    self: 0,
    samples: last.samples,
    children: last.children,
    places: [],
  };
}
const keyPath = (node) => {
  const keys = [];
  for (let at = node; at.parent; at = at.parent) if (at.kind !== FOLD) keys.push(at.key);
  return keys.reverse();
};
/** The node at a path of keys, or the last one of it that exists. */
function nodeAt(keys) {
  let node = tree.root;
  for (const key of keys) {
    const next = node.children.find((child) => child.key === key);
    if (!next) return node;
    node = next;
  }
  return node;
}
/** Opens the folds around a node. */
function reveal(node) {
  let isFolded = false;
  for (let at = node.parent; at; at = at.parent) {
    if (at.kids?.[0]?.kind === FOLD && at.kids[0].inside.includes(node)) {
      opened.add(at.id);
      isFolded = true;
    }
  }
  if (isFolded) arrange();
}

// --- canvases

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const FONT = '12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
/** The color and the pattern of each kind of sample in the timeline. */
const ACTIVE = ['on', 'off', 'awaits', 'delays'],
  ACTIVE_PATTERNS = ['', 'lines', 'bars', 'grid'];
let colors = {};

function readColors() {
  colors = {};
  for (const name of ['text', 'muted', 'line', 'soft', 'card', 'accent', 'rest', 'hatch', 'frame-text', ...ACTIVE]) {
    colors[name] = css(`--${name}`);
  }
  colors.hsl = {};
  for (const name of [...COLORS, 'user', 'match', 'more', 'less', 'same']) colors.hsl[name] = css(`--${name}`).split(/\s+/).map(parseFloat);
  colors.patterns = {
    ...{ lines: pattern(drawLines), dots: pattern(drawDots), bars: pattern(drawBars), grid: pattern(drawGrid) },
  };
}
function pattern(draw) {
  const tile = el('canvas', { width: 8, height: 8 }),
    context = tile.getContext('2d');
  context.strokeStyle = context.fillStyle = colors.hatch;
  draw(context);
  return context.createPattern(tile, 'repeat');
}
function drawLines(context) {
  context.lineWidth = 2;
  context.beginPath();
  for (const x of [-8, 0, 8]) {
    context.moveTo(x - 1, 9);
    context.lineTo(x + 9, -1);
  }
  context.stroke();
}
function drawDots(context) {
  context.fillRect(1, 1, 2, 2);
  context.fillRect(5, 5, 2, 2);
}

function drawBars(context) {
  for (const y of [1, 5]) context.fillRect(0, y, 8, 1.5);
}
function drawGrid(context) {
  drawBars(context);
  for (const x of [1, 5]) context.fillRect(x, 0, 1.5, 8);
}

/** Sizes a canvas for the screen's pixels, and returns its empty context. */
function contextOf(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 3);
  canvas.style.height = `${height}px`;
  const wide = Math.round(width * ratio),
    high = Math.round(height * ratio);
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = 'middle';
  return context;
}
let characterWidth = 0;
/** The text, or its end of the last two names, or its beginning, whatever fits. */
function fitted(context, text, width) {
  characterWidth ||= context.measureText('M'.repeat(20)).width / 20;
  const fits = Math.floor(width / characterWidth);
  if (text.length <= fits) return text;
  if (fits < 3) return '';
  const short = shortName(text);
  return short.length <= fits ? short : `${short.slice(0, fits - 1)}…`;
}
/** `shop::Cart::total` of `shop::Cart<T>::total` and of `<shop::Cart<T> as Trait>::total`. */
function bareName(name) {
  if (name.length > 400) return name;
  const [, type, method] = /^<(.+?) as .+>::([^>]+)$/.exec(name) ?? [];
  let bare = type ? `${type}::${method}` : name;
  for (let i = 0; i < 4; i++) bare = bare.replace(/(?:::)?<[^<>]*>/g, '');
  return bare;
}
/** The last two names of a path. */
function shortName(name) {
  if (name.length > 400) return name;
  const bare = bareName(name),
    parts = bare.split('::').filter((part) => part !== '');
  return parts.length > 2 ? parts.slice(-2).join('::') : bare.length > 2 ? bare : name;
}
const shades = new Map();
/** Functions of the same module have the same shade of their kind's color, from -1 to 1. */
function shadeOf(name) {
  if (!shades.has(name)) {
    const module = name.slice(0, name.lastIndexOf('::') + 1) || name;
    let hash = 0;
    for (let i = 0; i < module.length; i++) hash = (hash * 31 + module.charCodeAt(i)) | 0;
    shades.set(name, (Math.abs(hash) % 5) / 2 - 1);
  }
  return shades.get(name);
}

function showTip(event, lines) {
  const tip = byId('tip');
  tip.hidden = !event || lines.length === 0 || event.pointerType === 'touch';
  if (tip.hidden) return;
  tip.textContent = lines.map((line) => (line.length > 300 ? `${line.slice(0, 300)}…` : line)).join('\n');
  const { width, height } = tip.getBoundingClientRect();
  const x = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8));
  const below = event.clientY + 18,
    y = below + height > innerHeight ? event.clientY - height - 10 : below;
  tip.style.left = `${x}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

// --- the flame graph

const flame = byId('flame'),
  scroller = byId('scroller');
let rowHeight = 19,
  boxes = [],
  zoomed,
  current = null,
  hovered = null,
  matches = [],
  matchSet = new Set();
let drawing = 0,
  isLaidOut = false;
const TINY = 0.6;

/** Lays out what is wide enough to be seen: the zoomed node, those below it, and those above it at full width. */
function layOut() {
  isLaidOut = false;
  draw();
}
function draw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (!isLaidOut) collectBoxes();
    drawFlame();
  });
}
function collectBoxes() {
  const width = scroller.clientWidth,
    scale = width / (zoomed.value || 1);
  boxes = [];
  const put = (node, x, wide) => (boxes[node.row] ??= []).push({ node, x, width: wide });
  for (let up = zoomed.up; up; up = up.up) put(up, 0, width);
  const open = [zoomed];
  while (open.length > 0) {
    const node = open.pop();
    put(node, (node.at - zoomed.at) * scale, node.value * scale);
    for (let i = node.kids.length - 1; i >= 0; i--) {
      if (node.kids[i].value * scale >= TINY) open.push(node.kids[i]);
    }
  }
  isLaidOut = true;
}

function drawFlame() {
  const width = scroller.clientWidth,
    rows = boxes.length;
  const full = rows * rowHeight + 2,
    shown = Math.min(full, maxFlameHeight());
  scroller.style.height = `${shown + 2}px`;
  flame.style.marginBottom = `${full - shown}px`;
  const context = contextOf(flame, width, shown),
    top = scroller.scrollTop;
  const first = Math.floor(top / rowHeight),
    last = Math.min(rows, Math.ceil((top + shown) / rowHeight));
  for (let row = first; row < last; row++) {
    for (const box of boxes[row] ?? []) drawBox(context, box, row * rowHeight - top + 1);
  }
}
const maxFlameHeight = () => Math.max(420, innerHeight * 0.72) - 2;

function colorOf(node) {
  if (state.diff && !matchSet.has(node)) return differenceColor(node);
  const name = isOwnNode(node) ? 'user' : COLORS[node.kind];
  const [hue, saturation, light] = colors.hsl[matchSet.has(node) ? 'match' : name];
  const shift = node.kind <= KERNEL || node.kind === SPAN ? shadeOf(nodeName(node)) * 3 : 0;
  return `hsl(${hue} ${saturation}% ${light + shift}%)`;
}

/** The more it differs, the stronger the color. */
function differenceColor(node) {
  const look = lookOf(node),
    [hue, ...strong] = colors.hsl[look],
    [, ...weak] = colors.hsl.same;
  const part = 0.3 + 0.7 * Math.min(1, Math.abs(relativeOf(node)));
  const [saturation, light] = strong.map((value, i) => weak[i] + (value - weak[i]) * part);
  return `hsl(${hue} ${saturation}% ${light}%)`;
}
const patternOf = (node) => (state.diff ? (lookOf(node) === 'less' ? 'lines' : undefined) : PATTERNS[node.kind]);

function drawBox(context, { node, x, width }, y) {
  const height = rowHeight - 1,
    wide = Math.max(0.75, width - (width > 3 ? 1 : 0));
  context.globalAlpha = node.row < zoomed.row || (matches.length > 0 && !matchSet.has(node)) ? 0.55 : 1;
  context.fillStyle = colorOf(node);
  context.fillRect(x, y, wide, height);
  const overlay = colors.patterns[patternOf(node)];
  if (overlay && wide > 3) {
    context.fillStyle = overlay;
    context.fillRect(x, y, wide, height);
  }
  context.globalAlpha = 1;
  if (wide > 22) drawLabel(context, node, x, y + height / 2 + 0.5, wide - 8);
  if (matchSet.has(node) && wide > 4) outline(context, x, y, wide, height, 1);
  if (node === current) outline(context, x, y, wide, height, 2);
}
function outline(context, x, y, width, height, size) {
  context.strokeStyle = colors['frame-text'];
  context.lineWidth = size;
  context.strokeRect(x + size / 2, y + size / 2, Math.max(0, width - size), height - size);
}
function drawLabel(context, node, x, y, width) {
  const mark = state.diff ? differenceMark(node, width) : isInferred(node) ? '≈ ' : '';
  const name = nodeName(node);
  // Closures and async blocks have no name of their own.
  const place = name.startsWith('{') && hasCode(node) ? ` ${shortPlace(framesOf(node)[0])}` : '';
  const fits = fitted(context, name + place, width - mark.length * characterWidth);
  const label = fits === '' ? '' : mark + fits;
  if (label === '') return;
  if (patternOf(node)) drawPlate(context, node, x, y, Math.min(width, context.measureText(label).width));
  context.fillStyle = colors['frame-text'];
  context.fillText(label, x + 4, y, width);
}
/** `▲ `, or where there is room `▲ +1.06 s `. */
function differenceMark(node, width) {
  const mark = LOOK_MARKS[lookOf(node)];
  if (mark === '') return '';
  return width > 230 ? `${mark} ${extraText(node)} ` : `${mark} `;
}
/** Text on a pattern is hard to read. */
function drawPlate(context, node, x, y, width) {
  context.fillStyle = colorOf(node);
  context.fillRect(x + 2, y - rowHeight / 2 + 2, width + 4, rowHeight - 4);
}

function boxAt(event) {
  const bounds = flame.getBoundingClientRect();
  const row = Math.floor((event.clientY - bounds.top + scroller.scrollTop - 1) / rowHeight),
    x = event.clientX - bounds.left;
  return boxes[row]?.find((box) => x >= box.x && x < box.x + Math.max(1, box.width))?.node ?? null;
}

function shareText(node) {
  if (state.diff) return `${amount(node.slow)}, typical ${amount(node.typical)}, difference ${extraText(node)}`;
  return `${amount(node.value)} (${percent(node.value, tree.root.value)})`;
}
const COUNTED = {
  cpu: ['sample'],
  off: ['wait'],
  await: ['recorded await'],
  delay: ['recorded delay'],
  alloc: ['sample'],
  wall: ['sample or wait', 'samples and waits'],
};
const countedText = (number, mode) => count(number, ...COUNTED[mode]);
function countText(node) {
  if (isIdle(node)) return '';
  return countedText(node.samples, state.mode);
}
function placesText(node) {
  if (!hasCode(node)) return '';
  const frames = framesOf(node);
  return framePlace(frames[0]) + (frames.length > 1 ? ` and ${count(frames.length - 1, 'other line')}` : '');
}
const kindText = (node) =>
  (isOwnNode(node) ? 'your code' : isIdle(node) ? IDLE_TEXTS[node.what] : KIND_NAMES[node.kind]) +
  (isInferred(node) ? ', inferred' : '');
const describe = (node) =>
  [
    nodeName(node),
    placesText(node),
    state.diff ? shareText(node) : `${shareText(node)}, self ${amount(node.self)}`,
    kindText(node) + (state.diff ? `, ${LOOK_TEXTS[lookOf(node)]}` : ''),
  ].filter((text) => text !== '');
const LOOK_TEXTS = { more: 'more than typical', less: 'less than typical', same: 'as typical' };

function showDetail() {
  const node = hovered ?? current ?? zoomed,
    detail = byId('detail');
  const list = el('ul');
  const add = (...parts) => list.append(el('li', {}, ...parts));
  if (hasCode(node) && placesText(node) !== '') {
    const frames = framesOf(node);
    add(placeElement(frames[0]), frames.length > 1 ? ` and ${count(frames.length - 1, 'other line')}` : '');
  }
  if (state.diff) addDifference(node, add);
  else {
    add('total ', el('b', {}, amount(node.value)), ` (${percent(node.value, tree.root.value)})`);
    if (node.kind !== FOLD) add('self ', el('b', {}, amount(node.self)), ` (${percent(node.self, tree.root.value)})`);
  }
  if (countText(node) !== '') add(countText(node));
  add(kindText(node));
  if (node.kind === FOLD) add('Enter or a click opens it');
  detail.replaceChildren(el('div', { class: 'code' }, nodeName(node)), list);
}

function addDifference(node, add) {
  const bold = (text) => el('b', {}, text);
  add('this span ', bold(amount(node.slow)), ', typical ', bold(amount(node.typical)));
  add('difference ', bold(extraText(node)), ` (${LOOK_TEXTS[lookOf(node)]})`);
  if (node.kind !== FOLD && node.children.length > 0 && node.self > 0)
    add(`self ${amount(node.selfSlow)}, typical ${amount(node.selfTypical)}`);
}

function setCurrent(node, isQuiet) {
  current = node;
  if (state.view === 'graph') {
    const top = node.row * rowHeight,
      view = scroller.clientHeight;
    if (top < scroller.scrollTop) scroller.scrollTop = Math.max(0, top - rowHeight);
    if (top + rowHeight > scroller.scrollTop + view) scroller.scrollTop = top + 2 * rowHeight - view;
  }
  draw();
  showDetail();
  if (!isQuiet) say(describe(node).join(', '));
}

function zoomTo(node) {
  if (node.kind === FOLD) {
    opened.add(node.parent.id);
    arrange();
    current = node.inside[0];
    setZoom(zoomed.kind === FOLD ? tree.root : zoomed);
    return;
  }
  reveal(node);
  current = node;
  setZoom(node);
}
function setZoom(node) {
  zoomed = node;
  state.zoom = keyPath(node);
  scroller.scrollTop = Math.max(0, (node.row - 3) * rowHeight);
  layOut();
  showCrumbs();
  showDetail();
  if (state.view === 'table') showTable();
  writeAddress();
}
function showCrumbs() {
  const path = [];
  for (let at = zoomed; at; at = at.parent) path.unshift(at);
  const last = path.slice(1).slice(-4, -1),
    crumbs = [];
  if (path.length > 1) {
    crumbs.push(
      button(
        'Reset zoom',
        () => {
          zoomTo(tree.root);
          flame.focus();
        },
        { id: 'reset' },
      ),
    );
    if (path.length > 5) crumbs.push('…');
    for (const node of last)
      crumbs.push(
        button(shortName(nodeName(node)), () => zoomTo(node), { class: 'code' }),
        '›',
      );
    crumbs.push(el('b', { class: 'code' }, nodeName(zoomed)), ` ${shareText(zoomed)}`);
  } else {
    crumbs.push('The whole graph. Click a frame to zoom.');
  }
  byId('crumbs').replaceChildren(...crumbs);
}

function flameKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const node = current ?? zoomed,
    sibling = (step) => node.up?.kids[node.up.kids.indexOf(node) + step];
  const moves = {
    ArrowUp: () => node.up,
    ArrowDown: () => node.kids[0],
    ArrowLeft: () => sibling(-1),
    ArrowRight: () => sibling(1),
    Home: () => tree.root,
  };
  if (moves[event.key]) {
    const next = moves[event.key]();
    if (next) moveTo(next);
  } else if (event.key === 'Enter' || event.key === ' ') {
    zoomTo(node);
    say(`Zoomed to ${describe(current).join(', ')}`);
  } else if (event.key === 'Escape' && zoomed !== tree.root) {
    setZoom(tree.root);
    setCurrent(node, true);
    say('Zoomed out');
  } else {
    return;
  }
  event.preventDefault();
}
/** Makes a node the current one, zoomed so that it can be seen. */
function moveTo(node) {
  const isInside =
    node.at >= zoomed.at && node.at + node.value <= zoomed.at + zoomed.value * (1 + 1e-9) && node.row >= zoomed.row;
  const isAbove = node.row < zoomed.row && node.at <= zoomed.at && node.at + node.value >= zoomed.at;
  if (!isInside && !isAbove) setZoom(tree.root);
  if (!isAbove && (node.value / zoomed.value) * scroller.clientWidth < 3) {
    let up = node;
    while (up.up && up.up.value < node.value * 40) up = up.up;
    if (up.kind !== FOLD) setZoom(up);
  }
  setCurrent(node);
}

// --- search

function search() {
  const wanted = state.search.trim().toLowerCase();
  matches = [];
  if (wanted !== '') findMatches(wanted);
  matchSet = new Set(matches);
  for (const node of matches) if (node.kind !== FOLD) markFolded(node);
  byId('matches').textContent =
    wanted === ''
      ? ''
      : matches.length === 0
        ? 'no match'
        : `${count(matches.length, 'match', 'matches')}, ${matchedText()}`;
  byId('previous').disabled = byId('next').disabled = matches.length === 0;
  draw();
  if (state.view === 'table') showTable();
}
/** In the order of the graph: depth first. */
function findMatches(wanted) {
  const known = new Map(),
    open = [tree.root];
  const isMatch = (node) => {
    if (node.kind === ALL) return false;
    const key = hasCode(node) ? node.key : -2 - node.id;
    if (!known.has(key)) {
      const file = hasCode(node) ? functionFile(profile.frames.function[node.what]) : '';
      known.set(key, `${nodeName(node)}\n${file}`.toLowerCase().includes(wanted));
    }
    return known.get(key);
  };
  while (open.length > 0) {
    const node = open.pop();
    if (isMatch(node)) matches.push(node);
    for (let i = node.children.length - 1; i >= 0; i--) open.push(node.children[i]);
  }
}
/** A fold with a match inside is painted as one. */
function markFolded(node) {
  for (let at = node.parent, steps = 0; at && steps < 1100; at = at.parent, steps++) {
    const fold = at.kids?.[0];
    if (fold?.kind === FOLD) {
      if (fold.inside.includes(node)) matchSet.add(fold);
      return;
    }
  }
}
const matchedText = () =>
  state.diff
    ? signed(outermostSum(matches, extraOf), amount)
    : percent(outermostSum(matches, (node) => node.value), tree.root.value);
/** The sum of the matches; one inside another does not count twice. */
function outermostSum(nodes, of) {
  const rounding = tree.root.value * 1e-9;
  let sum = 0,
    end = -1;
  for (const node of nodes) {
    if (node.at < end - rounding) continue;
    sum += of(node);
    end = node.at + node.value;
  }
  return sum;
}
function stepMatch(step) {
  if (matches.length === 0) return;
  const at = matches.indexOf(current);
  const next = at < 0 ? (step > 0 ? 0 : matches.length - 1) : (at + step + matches.length) % matches.length;
  const node = matches[next];
  reveal(node);
  layOut();
  moveTo(node);
  if (state.view === 'table') showTable(node);
  byId('matches').textContent =
    `${next + 1} of ${count(matches.length, 'match', 'matches')}, ${matchedText()}`;
  say(`Match ${next + 1} of ${matches.length}: ${describe(node).join(', ')}`);
}

// --- the tree as a table

let expanded = new Set(),
  rowLimit = 300,
  tableRoot = null;

function showTable(focus) {
  if (tableRoot !== zoomed) {
    tableRoot = zoomed;
    rowLimit = 300;
    expanded = new Set();
    for (let at = zoomed; at && (at === zoomed || at.value >= zoomed.value * 0.5); at = at.children[0])
      expanded.add(at);
  }
  for (let at = focus?.parent; at; at = at.parent) expanded.add(at);
  const rows = [],
    open = [[zoomed, 1]];
  while (open.length > 0 && rows.length <= rowLimit) {
    const [node, level] = open.pop();
    rows.push(treeRow(node, level));
    if (!expanded.has(node)) continue;
    for (let i = node.children.length - 1; i >= 0; i--) open.push([node.children[i], level + 1]);
  }
  const isCut = rows.length > rowLimit;
  const head = el(
    'tr',
    {},
    ...['Function', 'File and line', ...(state.diff ? ['This span', 'Typical', 'Difference'] : ['Self', 'Total', 'Share'])].map(
      (text) => el('th', { scope: 'col' }, text),
    ),
  );
  head.children[1].className = 'place';
  const body = el('tbody', {}, ...rows.slice(0, rowLimit));
  const grid = el('table', { role: 'treegrid', 'aria-label': 'Functions by caller' }, el('thead', {}, head), body);
  grid.addEventListener('keydown', tableKey);
  byId('table').replaceChildren(grid);
  if (isCut)
    byId('table').append(
      button(
        'Show more rows',
        () => {
          rowLimit += 300;
          showTable();
        },
        { class: 'more' },
      ),
    );
  const start = [...body.children].find((row) => row.node === (focus ?? current)) ?? body.firstChild;
  start.tabIndex = 0;
  if (focus) start.scrollIntoView({ block: 'nearest' });
}
function treeRow(node, level) {
  const isOpen = expanded.has(node),
    hasChildren = node.children.length > 0;
  const toggle = hasChildren
    ? button(isOpen ? '▾' : '▸', () => toggleRow(node), { tabindex: -1, 'aria-hidden': 'true' })
    : el('span', { class: 'leaf' }, '\u2002');
  const name = el('td', {}, toggle, el('span', { class: 'code' }, nodeName(node)));
  name.style.paddingLeft = `${Math.min(level - 1, 24) * 9}px`;
  name.title = nodeName(node);
  const place = el('td', { class: 'place' });
  if (hasCode(node)) place.append(placeElement(framesOf(node)[0]));
  const row = el(
    'tr',
    { 'aria-level': level, tabindex: -1 },
    name,
    place,
    ...(state.diff
      ? [amount(node.slow), amount(node.typical), extraText(node)]
      : [amount(node.self), amount(node.value), percent(node.value, tree.root.value)]
    ).map((text) => el('td', {}, text)),
  );
  if (hasChildren) row.setAttribute('aria-expanded', isOpen);
  if (matchSet.has(node)) row.className = 'found';
  row.addEventListener('focus', () => {
    current = node;
    showDetail();
  });
  row.node = node;
  return row;
}
function toggleRow(node) {
  if (!expanded.delete(node)) expanded.add(node);
  current = node;
  const top = byId('table').scrollTop;
  showTable();
  byId('table').scrollTop = top;
  byId('table').querySelector('tr[tabindex="0"]').focus({ preventScroll: true });
}
function tableKey(event) {
  const row = event.target.closest('tr'),
    node = row?.node;
  if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
  const isOpen = expanded.has(node),
    hasChildren = node.children.length > 0,
    rows = row.parentNode.children;
  const focusRow = (next) => {
    if (!next) return;
    row.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const keys = {
    ArrowDown: () => focusRow(row.nextSibling),
    ArrowUp: () => focusRow(row.previousSibling),
    Home: () => focusRow(rows[0]),
    End: () => focusRow(rows[rows.length - 1]),
    ArrowRight: () => (hasChildren && !isOpen ? toggleRow(node) : focusRow(hasChildren ? row.nextSibling : null)),
    ArrowLeft: () =>
      isOpen && hasChildren ? toggleRow(node) : focusRow([...rows].find((other) => other.node === node.parent)),
    Enter: () => hasChildren && toggleRow(node),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

// --- the timeline

const timeline = byId('timeline');
let spanBars = [],
  lanes = [],
  showAllRows = false,
  cursor = 0,
  geometry = null;
const FEW_ROWS = 8,
  MANY_ROWS = 60,
  SPAN_ROW = 19;

function prepareTimeline() {
  spanBars = packBars(allBars());
  const { from, to, thread, kind, span, weight, short } = profile.samples,
    byThread = new Map();
  for (let i = 0; i < from.length; i++) {
    if (kind[i] === ALLOCATED) continue;
    const name = kind[i] < AWAITING ? '' : span[i] < 0 ? 'no span' : spanName(span[i]),
      key = name === '' ? thread[i] : name;
    if (!byThread.has(key)) byThread.set(key, []);
    const lane = laneFrom(byThread.get(key), from[i]) ?? { thread: thread[i], name, samples: [], active: 0, end: 0 };
    if (lane.samples.length === 0) byThread.get(key).push(lane);
    lane.samples.push(i);
    lane.active += short[i] ? weight[i] : to[i] - from[i];
    if (!short[i]) lane.end = to[i];
  }
  lanes = [...byThread.values()].flat().sort((a, b) => b.active - a.active);
  for (const lane of lanes) {
    lane.samples.sort((a, b) => from[a] - from[b]);
    lane.starts = Float64Array.from(lane.samples, (i) => from[i]);
  }
  timeline.setAttribute('aria-valuemax', Math.round(profile.length / 1e6));
  byId('timeline-more').hidden = spanRows() <= FEW_ROWS && lanes.length <= FEW_ROWS;
}
/** A thread has one lane. Awaits have a lane for each span's name, and more if they overlap. */
function laneFrom(lanesThere, from) {
  if (lanesThere[0]?.name === '' || lanesThere.length >= MANY_ROWS) return lanesThere[0];
  return lanesThere.find((lane) => lane.end <= from + 1000);
}
const laneName = (lane) => (lane.name === '' ? threadName(lane.thread) : `span ${lane.name}`);
const spanRows = () => spanBars.reduce((most, bar) => Math.max(most, bar.row + 1), 0);

/** Kept spans and the spans inside them. */
function allBars() {
  const { spans } = profile,
    bars = [];
  const endOf = (end) => (end < 0 ? profile.length : Math.min(end, profile.length));
  for (let span = 0; span < spans.name.length; span++) {
    const from = Math.max(0, spans.start[span]);
    bars.push({
      span,
      name: spanName(span),
      from,
      to: Math.max(from, endOf(spans.end[span])),
      kept: spans.kept[span],
      open: spans.end[span] < 0,
    });
  }
  profile.kept.forEach((kept, index) => {
    if (kept.span < 0)
      bars.push({
        span: -1,
        name: kept.name,
        from: kept.start,
        to: kept.start + kept.wall,
        kept: index,
        open: kept.open,
      });
  });
  return bars;
}
/** Each bar below its parent's, in the first row that is free there. */
function packBars(bars) {
  const ends = [],
    rowOf = new Map();
  bars.sort((a, b) => a.from - b.from || b.to - a.to || a.span - b.span);
  for (const bar of bars) {
    const parent = bar.span < 0 ? -1 : profile.spans.parent[bar.span];
    let row = rowOf.has(parent) ? rowOf.get(parent) + 1 : 0;
    while (ends[row] > bar.from) row++;
    ends[row] = bar.to;
    bar.row = row;
    if (bar.span >= 0) rowOf.set(bar.span, row);
  }
  return bars;
}

function measureTimeline() {
  const width = timeline.clientWidth,
    isNarrow = width < 640;
  const rows = Math.min(spanRows(), showAllRows ? MANY_ROWS : FEW_ROWS);
  const shownLanes = lanes.slice(0, showAllRows ? MANY_ROWS : FEW_ROWS);
  const gutter = isNarrow ? 6 : 150,
    top = 22,
    laneHeight = isNarrow ? 40 : 26;
  const lanesTop = top + rows * SPAN_ROW + 6;
  geometry = {
    width,
    isNarrow,
    rows,
    shownLanes,
    gutter,
    top,
    laneHeight,
    lanesTop,
    right: width - 8,
    height: lanesTop + shownLanes.length * laneHeight + 4,
    x: (ns) => gutter + Math.max(0, Math.min(1, ns / profile.length)) * (width - 8 - gutter),
    ns: (x) => Math.max(0, Math.min(1, (x - gutter) / (width - 8 - gutter))) * profile.length,
  };
}

function drawTimeline() {
  measureTimeline();
  const context = contextOf(timeline, geometry.width, geometry.height);
  drawAxis(context);
  for (const bar of spanBars) if (bar.row < geometry.rows) drawSpan(context, bar);
  geometry.shownLanes.forEach((lane, index) =>
    drawLane(context, lane, geometry.lanesTop + index * geometry.laneHeight),
  );
  drawSelection(context);
  showHidden();
}
function showHidden() {
  const deeper = spanBars.filter((bar) => bar.row >= geometry.rows).length,
    more = lanes.length - geometry.shownLanes.length;
  const hidden = [deeper > 0 ? count(deeper, 'span') : '', more > 0 ? count(more, 'lane') : ''].filter(
    (text) => text !== '',
  );
  byId('timeline-more').textContent = showAllRows
    ? `Show fewer rows${hidden.length ? ` (${hidden.join(' and ')} not shown)` : ''}`
    : `${hidden.join(' and ')} hidden: show`;
}
function drawAxis(context) {
  const step = niceStep(profile.length / Math.max(2, (geometry.right - geometry.gutter) / 90)),
    label = axis(profile.length, step);
  context.textAlign = 'center';
  for (let at = 0; at <= profile.length; at += step) {
    const x = geometry.x(at);
    context.fillStyle = colors.line;
    context.fillRect(Math.round(x), 18, 1, geometry.height);
    context.fillStyle = colors.muted;
    const text = label(at),
      half = context.measureText(text).width / 2;
    context.fillText(text, Math.max(half + 2, Math.min(x, geometry.width - half - 2)), 9);
  }
  context.textAlign = 'left';
}
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
function drawSpan(context, bar) {
  const x = geometry.x(bar.from),
    width = Math.max(1, geometry.x(bar.to) - x - 0.5),
    y = geometry.top + bar.row * SPAN_ROW;
  const [hue, saturation, light] = colors.hsl.span,
    shift = bar.kept >= 0 ? 0 : shadeOf(bar.name) * 3;
  const isChosen = state.span >= 0 && bar.span >= 0 && profile.spans.name[bar.span] === state.span;
  context.fillStyle = `hsl(${hue} ${saturation + (bar.kept >= 0 ? 20 : 0)}% ${light + shift}%)`;
  context.fillRect(x, y, width, SPAN_ROW - 2);
  if (bar.kept >= 0 || isChosen) {
    context.fillStyle = isChosen ? colors.accent : colors.muted;
    context.fillRect(x, y, isChosen ? width : Math.min(3, width), isChosen ? 2 : SPAN_ROW - 2);
  }
  if (bar.open && width > 6) {
    context.fillStyle = colors.patterns.lines;
    context.fillRect(x + width - 6, y, 6, SPAN_ROW - 2);
  }
  const label =
    width > 26
      ? fitted(context, width > 150 ? `${bar.name} ${duration(bar.to - bar.from)}` : bar.name, width - 10)
      : '';
  context.fillStyle = colors['frame-text'];
  if (label) context.fillText(label, x + 6, y + SPAN_ROW / 2 - 0.5, width - 8);
}
function drawLane(context, lane, y) {
  const top = y + (geometry.isNarrow ? 16 : 2),
    { gutter, right } = geometry;
  context.fillStyle = colors.text;
  context.fillText(
    fitted(context, laneName(lane), geometry.isNarrow ? right : gutter - 14),
    geometry.isNarrow ? 6 : 8,
    geometry.isNarrow ? y + 8 : top + 8,
  );
  context.fillStyle = colors.rest;
  context.fillRect(gutter, top + 7, right - gutter, 2);
  let begin = -1,
    end = -1,
    kind = -1;
  const flush = () => {
    if (kind >= 0) drawActive(context, kind, begin, end, top);
  };
  for (const i of lane.samples) {
    if (profile.samples.short[i]) continue;
    const from = geometry.x(profile.samples.from[i]),
      to = geometry.x(profile.samples.to[i]);
    if (profile.samples.kind[i] === kind && from <= end + 0.5) {
      end = Math.max(end, to);
      continue;
    }
    flush();
    [begin, end, kind] = [from, to, profile.samples.kind[i]];
  }
  flush();
  drawTicks(context, lane, top + 17);
  drawShort(context, lane, top);
}
function drawActive(context, kind, begin, end, top) {
  const width = Math.max(0.75, end - begin);
  for (const style of [colors[ACTIVE[kind]], colors.patterns[ACTIVE_PATTERNS[kind]]]) {
    if (!style) continue;
    context.fillStyle = style;
    context.fillRect(begin, top, width, 15);
  }
}
/** Marks of a fixed width: their length is not that of the awaits that they represent. */
function drawShort(context, lane, top) {
  let last = -4;
  for (const i of lane.samples) {
    const x = geometry.x(profile.samples.from[i]);
    if (!profile.samples.short[i] || x < last + 4) continue;
    context.fillStyle = colors[ACTIVE[profile.samples.kind[i]]];
    context.fillRect(x, top + 3, 2, 10);
    last = x;
  }
}
function drawTicks(context, lane, y) {
  context.fillStyle = colors.muted;
  let last = -2;
  for (const i of lane.samples) {
    const x = Math.round(geometry.x(profile.samples.to[i]));
    if (profile.samples.kind[i] !== ON_CPU || x < last + 2) continue;
    context.fillRect(x, y, 1, 4);
    last = x;
  }
}
function drawSelection(context) {
  const { height, gutter, right } = geometry;
  if (state.interval) {
    const [from, to] = state.interval.map(geometry.x);
    context.globalAlpha = 0.66;
    context.fillStyle = colors.card;
    context.fillRect(gutter, 18, from - gutter, height);
    context.fillRect(to, 18, right - to, height);
    context.globalAlpha = 1;
    context.strokeStyle = colors.accent;
    context.lineWidth = 2;
    context.strokeRect(from, 19, Math.max(1, to - from), height - 20);
  }
  context.fillStyle = document.activeElement === timeline ? colors.text : colors.muted;
  context.fillRect(Math.round(geometry.x(cursor)) - 0.5, 18, document.activeElement === timeline ? 2 : 1, height);
}

/** What runs on a thread at a time: a sample, or -1. */
function sampleAt(lane, time) {
  const at = lane.samples[lastAtMost(lane.starts, lane.starts.length, time)];
  return at !== undefined && profile.samples.to[at] >= time ? at : -1;
}
function activityText(i) {
  const { kind, stack, leaf, weight, short } = profile.samples,
    inner = leafFrame(stack[i]),
    site = siteOf(stack[i]);
  const at = site < 0 ? '' : `${frameName(site)} ${framePlace(site)}`.trim();
  const length = short[i] ? `represents ${duration(weight[i])} of shorter ones` : duration(weight[i]);
  if (kind[i] === ON_CPU) return `on-CPU in ${frameName(inner)} ${framePlace(inner)}`.trim();
  if (kind[i] === AWAITING) return `awaits in ${at} ${objectName(AWAITING, site, objectOf(i))}: ${length}`;
  if (kind[i] === DELAYED) return `woken, not polled${blocker(leaf[i]) && ` behind ${blocker(leaf[i])}`}: ${length}`;
  return `blocked in ${leafName(leaf[i]) || frameName(inner)}${site >= 0 ? ` by ${at}` : ''}`.trim();
}
/** The span behind which a poll was delayed, or ''. */
const blocker = (leaf) => profile.strings[profile.leaves.text[leaf]] ?? '';
const timeText = (ns) => axis(profile.length, profile.length / 500)(ns);
const edgeText = (ns) => axis(profile.length, profile.length / 100)(ns);
const intervalText = ([from, to]) => `${edgeText(from)} to ${edgeText(to)}`;
const barText = (bar) =>
  `${bar.name}: ${duration(bar.to - bar.from)}, from ${timeText(bar.from)}${bar.open ? ', still open' : ''}`;
const barAt = (time) => spanBars.filter((bar) => bar.from <= time && bar.to >= time).sort((a, b) => b.row - a.row)[0];

/** The time, the span there, and what each active thread does. */
function readoutLines(time, y) {
  const bar =
    spanBars.find(
      (one) =>
        y !== undefined && one.from <= time && one.to >= time && Math.floor((y - geometry.top) / SPAN_ROW) === one.row,
    ) ?? barAt(time);
  const active = geometry.shownLanes.map((lane) => [lane, sampleAt(lane, time)]).filter(([, i]) => i >= 0);
  const texts = active.slice(0, 4).map(([lane, i]) => `${laneName(lane)} ${activityText(i)}`);
  if (active.length > 4) texts.push(`and ${grouped(active.length - 4)} more`);
  return [
    `${timeText(time)}${bar ? `, in ${barText(bar)}` : ''}`,
    ...(texts.length ? texts : ['no thread is known to be active, and no await']),
  ];
}
function showReadout(lines) {
  byId('timeline-readout').replaceChildren(...lines.map((line) => el('span', {}, line)));
}
function moveCursor(time) {
  cursor = Math.max(0, Math.min(profile.length, time));
  const lines = readoutLines(cursor);
  timeline.setAttribute('aria-valuenow', Math.round(cursor / 1e6));
  timeline.setAttribute('aria-valuetext', lines.join('; '));
  showReadout(lines);
  drawTimeline();
}

let anchor = null;
function timelineKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowDown: -1,
    ArrowUp: 1,
    PageDown: -10,
    PageUp: 10,
    Home: -200,
    End: 200,
  };
  if (steps[event.key]) {
    if (!event.shiftKey) anchor = null;
    else anchor ??= cursor;
    moveCursor(cursor + (steps[event.key] * profile.length) / 200);
    if (event.shiftKey) selectInterval([anchor, cursor]);
  } else if (event.key === 'Escape') {
    anchor = null;
    selectInterval(null);
  } else if (event.key === 'Enter') {
    const bar = barAt(cursor);
    if (bar) selectInterval([bar.from, bar.to]);
  } else {
    return;
  }
  event.preventDefault();
}
function selectInterval(interval) {
  const sorted = interval && [Math.min(...interval), Math.max(...interval)];
  state.interval = sorted && sorted[1] - sorted[0] >= 1 ? sorted : null;
  if (state.interval) state.diff = false;
  drawTimeline();
  say(state.interval ? `Selected ${intervalText(state.interval)}` : 'Nothing is selected');
  later();
}

function dragTimeline(event) {
  if (event.button !== 0 && event.pointerType === 'mouse') return;
  const bounds = timeline.getBoundingClientRect(),
    start = event.clientX,
    y = event.clientY - bounds.top;
  const timeOf = (move) => geometry.ns(move.clientX - bounds.left);
  const first = timeOf(event);
  let isDrag = false;
  timeline.setPointerCapture(event.pointerId);
  const move = (to) => {
    isDrag ||= Math.abs(to.clientX - start) > 4;
    if (isDrag) selectInterval([first, timeOf(to)]);
  };
  const end = (to) => {
    timeline.removeEventListener('pointermove', move);
    if (to.type === 'pointerup' && !isDrag) clickTimeline(first, y);
  };
  timeline.addEventListener('pointermove', move);
  timeline.addEventListener('pointerup', end, { once: true });
  timeline.addEventListener('pointercancel', end, { once: true });
}
function clickTimeline(time, y) {
  anchor = null;
  moveCursor(time);
  const row = Math.floor((y - geometry.top) / SPAN_ROW);
  const bar = row < geometry.rows && spanBars.find((one) => one.row === row && one.from <= time && one.to >= time);
  selectInterval(bar ? [bar.from, bar.to] : null);
}
function hoverTimeline(event) {
  const bounds = timeline.getBoundingClientRect();
  const lines = readoutLines(geometry.ns(event.clientX - bounds.left), event.clientY - bounds.top);
  showReadout(lines);
  showTip(event, lines);
}

// --- identity and wall time

function fact(name, ...values) {
  const isWide = values.some((value) => (value.textContent ?? value).length > 20);
  byId('facts').append(el('div', isWide ? { class: 'full' } : {}, el('dt', {}, name), el('dd', {}, ...values)));
}
function showIdentity() {
  const [main] = profile.kept,
    resource = new Map(profile.resource.map(([key, value]) => [key, clean(value)]));
  document.title = `${main.name} · ${duration(main.wall)}`;
  byId('name').textContent = main.name;
  const badges = [main.reasons, main.open ? 'still open' : ''].filter((text) => text !== '');
  byId('badges').replaceChildren(...badges.map((text) => el('li', {}, text)));
  const service = [resource.get('service.name'), resource.get('service.version')].filter(Boolean).join(' ');
  fact('Service', service || 'unknown');
  if (resource.has('host.name')) fact('Host', resource.get('host.name'));
  const start = new Date(profile.start_unix_ms + main.start / 1e6);
  if (!Number.isNaN(start.getTime())) fact('Started', startElement(start));
  if (profile.rule) fact('Rule', code(clean(profile.rule)));
  if (main.target) fact('Target', code(clean(main.target)));
  if (main.trace_id) fact('Trace', traceElement(main));
  if (main.span_id) fact('Span', code(clean(main.span_id)));
  fact('Profile', code(clean(profile.id)));
  for (const [key, value] of main.fields ?? []) {
    if (!main.name.includes(clean(value))) fact(clean(key), clean(value));
  }
}
function startElement(start) {
  const utc = start.toISOString().replace('T', ' ').replace('Z', ' UTC');
  const [, local, zone] = /(\d\d:\d\d:\d\d) GMT(\S*)/.exec(start.toString()) ?? [];
  const isUtc = start.getTimezoneOffset() === 0;
  return el('time', { datetime: start.toISOString() }, utc, isUtc || !local ? '' : ` · ${local} ${zone}`);
}
function traceElement(kept) {
  const url = traceUrl(profile.trace_url, kept.trace_id, kept.span_id),
    text = clean(kept.trace_id);
  return url ? el('a', { href: url, class: 'code', ...NEW_TAB }, text) : code(text);
}

/** The look of a part of wall time. */
const LOOKS = { on_cpu: 'on', off_cpu: 'off', runnable: 'off', await: 'await', scheduling_delay: 'delay', unmeasured: 'on' };

/** What explains most of the time; without that, the longest await and what delayed polls most. */
function showHeadline() {
  const text = clean(profile.headline ?? '');
  byId('headline').textContent = text;
  byId('headline').hidden = text === '';
  if (text === '') showAwaits();
}
function showAwaits() {
  const line = byId('awaits-line'),
    longest = (kind) => sitesOf(selectSamples(-1), (one) => one === kind)[0];
  const [wait, delay] = [longest(AWAITING), longest(DELAYED)];
  const about = ({ short, total }) => `${short ? 'about ' : ''}${duration(total)}`;
  if (wait) {
    line.append(el('b', {}, about(wait)), ' awaiting');
    if (wait.site >= 0)
      line.append(' in ', code(withoutClosure(frameName(wait.site))), ' (', placeElement(wait.site), ')');
    if (wait.site >= 0 && wait.object >= 0) line.append(' at ', code(futureName(wait.object)));
  }
  if (delay) {
    line.append(wait ? ', ' : '', el('b', {}, about(delay)), ' scheduling delay');
    if (blocker(delay.object)) line.append(' behind ', code(blocker(delay.object)));
  }
  line.hidden = !wait && !delay;
}
/** An async function's code is a closure in it. */
const withoutClosure = (name) => name.replace(/(?:::\{\{?(?:closure|async)[^{}]*\}?\})+$/, '') || name;
function showWall() {
  const [main] = profile.kept,
    parts = main.split.filter(([, ns]) => ns >= main.wall / 10000);
  byId('wall-total').textContent = `${duration(main.wall)}${main.open ? ' so far' : ''}`;
  const bar = byId('wall-bar');
  bar.setAttribute(
    'aria-label',
    parts.map(([[, words], ns]) => `${words} ${duration(ns)}, ${percent(ns, main.wall)}`).join('; '),
  );
  for (const [[kind, words], ns] of parts) {
    const part = el('div', { class: LOOKS[kind] ?? 'rest' });
    part.style.width = `${(ns / main.wall) * 100}%`;
    part.append(el('span', {}, `${words} ${percent(ns, main.wall)}`));
    bar.append(part);
    byId('wall-legend').append(legendItem(kind, words, ns, main));
  }
  showScope(main);
  showFurther();
}
function legendItem(kind, words, ns, main) {
  const error = kind === 'on_cpu' && main.on_cpu_error > 0 ? ` ± ${duration(main.on_cpu_error)}` : '';
  const swatch = el('i', { class: `swatch ${LOOKS[kind] ?? 'rest'}` });
  return el('li', {}, swatch, `${words} `, el('b', {}, duration(ns)), `${error} (${percent(ns, main.wall)})`);
}
function showScope(main) {
  const texts = [];
  if (!main.cpu_known) texts.push('The CPU time of threads is unknown here: for the time not measured, a thread was in the span.');
  if (main.beside.length > 0) texts.push(`Beside it: ${main.beside.map(clean).join('; ')}.`);
  const blocked = profile.attributes.find(([key]) => key === 'profile.blocked_in_async_ns')?.[1];
  if (blocked > 0)
    texts.push(`An async executor was blocked for ${duration(blocked)}: other tasks of its thread could not run.`);
  byId('wall-scope').hidden = texts.length === 0;
  byId('wall-scope').textContent = texts.join(' ');
}
function showFurther() {
  const further = profile.kept.slice(1),
    details = byId('further');
  details.hidden = further.length === 0;

  details.querySelector('summary').textContent = `${count(further.length, 'further kept span')} in this profile`;
  const columns = [
    ...[
      'Span',
      'Reason',
      'Start',
      'Wall',
      'On-CPU',
      'Off-CPU',
      'Await',
      'Scheduling delay',
      'Unexplained idle',
      'Span id',
    ],
  ];
  const rows = further.map((kept) =>
    el(
      'tr',
      {},
      ...[
        kept.name,
        kept.reasons + (kept.open ? ', still open' : ''),
        timeText(kept.start),
        duration(kept.wall),
        kept.cpu_known ? duration(kept.on_cpu) : 'unknown',
        kept.cpu_known ? duration(kept.off_cpu) : 'unknown',
        duration(kept.await),
        duration(kept.scheduling_delay),
        duration(kept.unexplained),
        clean(kept.span_id || '-'),
      ].map((text, index) => el('td', index === 0 || index === 9 ? { class: 'code', title: text } : {}, text)),
    ),
  );
  const head = el('tr', {}, ...columns.map((text) => el('th', { scope: 'col' }, text)));
  details.querySelector('table').replaceChildren(el('thead', {}, head), el('tbody', {}, ...rows));
}

// --- against typical spans

const ROW_LOOKS = {
  'on-CPU': 'on',
  blocked: 'off',
  'waiting for a CPU': 'off',
  await: 'await',
  'scheduling delay': 'delay',
  'on-CPU on other threads': 'on',
};
/** What the graph shows of a row. */
const ROW_MODES = {
  'on-CPU': 'cpu',
  blocked: 'off',
  await: 'await',
  'scheduling delay': 'delay',
  'on-CPU on other threads': 'cpu',
  allocated: 'alloc',
};
const ROW_UNITS = { ns: duration, bytes: memory, count: grouped };
const FEW_PARTS = 5;
const allShown = { 'compared-rows': false, 'compared-beside': false };

function showCompared() {
  const { compared } = profile;
  byId('compared').hidden = byId('diff').hidden = !compared;
  if (!compared) return;
  const median = compared.median >= 0 ? `, median ${duration(compared.median)}` : '';
  byId('compared-title').replaceChildren(
    `Compared with ${grouped(compared.references)} typical `,
    code(clean(compared.cohort)),
    median,
  );
  byId('compared-verdict').replaceChildren(...verdict(compared));
  showParts();
}
function showParts() {
  const { rows, beside, wall } = profile.compared;
  const order = [...new Set(beside.map((row) => row.words))];
  const sorted = [...beside].sort(
    (a, b) => order.indexOf(a.words) - order.indexOf(b.words) || Math.abs(b.extra) - Math.abs(a.extra),
  );
  showPartsIn('compared-rows', rows, { ...wall, words: 'Wall time', name: '', unit: 'ns' });
  showPartsIn('compared-beside', sorted, null);
  byId('beside').hidden = beside.length === 0;
  document.querySelector('.pair').classList.toggle('one', beside.length === 0);
  const few = !wall.interval;
  byId('compared-hint').textContent =
    'Typical is the mean of spans that were chosen at random when they began. ' +
    (few
      ? ''
      : 'Below each difference is its interval, with 95 % confidence; grey ones have zero in it and can be chance. ') +
    'A click on a name shows it in the flame graph.';
}
/** What took longer, in a sentence. */
function verdict({ kept, references, rows, wall, times }) {
  const main = profile.kept[kept],
    isOther = kept > 0 && main,
    bold = (text) => el('b', {}, text);
  const subject = isOther ? [code(main.name)] : ['It'];
  if (!wall.interval) {
    return [
      ...subject,
      ' took ',
      bold(duration(wall.after)),
      `. There ${references === 1 ? 'is' : 'are'} only ${count(references, 'typical span')}: too few to tell a difference from chance.`,
    ];
  }
  const took = [...subject, ' took ', bold(duration(wall.after)), times ? `, ${times} × the median` : ''];
  if (!isCertain(wall)) return [...took, ': that is not unusual.'];
  const [first] = rows;
  if (!isCertain(first)) return [...took, '. No part differs for certain.'];
  const share = first.extra / wall.extra;
  return [
    ...took,
    '. The largest difference: ',
    bold(`${signed(first.extra, duration)} ${first.words}`),
    ...(first.name ? [' in ', code(first.name)] : []),
    share > 0 && share <= 1.005 ? `, ${percent(share, 1)} of all.` : '.',
  ];
}
const isCertain = ({ interval }) => interval !== null && (interval[0] > 0 || interval[1] < 0);

/** The rows that matter first, the rest as one row or all, and their sum. */
function showPartsIn(id, rows, sum) {
  const all = rows.reduce((all, row) => all + Math.abs(row.extra), 0);
  let number = Math.min(FEW_PARTS, rows.length);
  if (sum) while (number > 1 && Math.abs(rows[number - 1].extra) < all * 0.01) number--;
  if (rows.length - number < 2 || allShown[id]) number = rows.length;
  const longest = Math.max(1, ...rows.map((row) => (row.unit === 'ns' ? Math.abs(row.extra) : 0)));
  const body = rows.slice(0, number).map((row) => partRow(row, sum ? longest : 0));
  const left = rows.slice(number);
  if (left.length > 0 && sum) body.push(restRow(left));
  const head = PART_COLUMNS.map((text) => el('th', { scope: 'col', role: 'columnheader' }, text));
  const table = el(
    'table',
    { role: 'table', 'aria-label': sum ? 'Parts of wall time' : 'Beside wall time' },
    el('thead', { role: 'rowgroup' }, el('tr', { role: 'row' }, ...head)),
    el('tbody', { role: 'rowgroup' }, ...body),
  );
  if (sum) table.append(el('tfoot', { role: 'rowgroup' }, partRow(sum, 0)));
  byId(id).replaceChildren(table);
  if (rows.length <= FEW_PARTS && left.length === 0 && !allShown[id]) return;
  const text = allShown[id] ? 'Show fewer' : `Show all ${rows.length}`;
  const toggle = () => {
    allShown[id] = !allShown[id];
    showParts();
    byId(id).querySelector('.more').focus();
  };
  if (allShown[id] || left.length > 0) byId(id).append(button(text, toggle, { class: 'more' }));
}
const PART_COLUMNS = ['Part', 'This span', 'Typical', 'Difference', 'Typical ones'];
/** Cells with the name of their column, which narrow windows show. */
const partCells = (first, ...others) => [
  el('td', { role: 'cell' }, ...first),
  ...others.map((parts, i) => el('td', { role: 'cell', 'data-label': PART_COLUMNS[i + 1] }, ...parts)),
];
function partRow(row, longest) {
  const show = ROW_UNITS[row.unit] ?? grouped,
    [title, detail] = partTexts(row);
  const mode = ROW_MODES[row.words],
    canShow = mode && (row.name || mode === 'alloc');
  const name = canShow
    ? button(title, () => showInGraph(row, mode), { class: 'pick code', title: `Show in the flame graph: ${title}` })
    : el('span', { class: row.name ? 'code' : '' }, title);
  const first = [name];
  const look = ROW_LOOKS[row.words];
  if (detail.length > 0) first.push(el('small', {}, ...(look ? [el('i', { class: `swatch ${look}` })] : []), ...detail));
  if (longest > 0) {
    const bar = el('i', { class: `delta diff-${row.extra < 0 ? 'less' : 'more'}`, 'aria-hidden': 'true' });
    bar.style.width = `${(Math.abs(row.extra) / longest) * 100}%`;
    first.push(bar);
  }
  const difference = [el(isCertain(row) ? 'b' : 'span', !row.interval || isCertain(row) ? {} : { class: 'uncertain' }, signed(row.extra, show))];
  if (row.interval) difference.push(el('small', {}, row.interval.map((end) => signed(end, show)).join(' to ')));
  return el('tr', { role: 'row' }, ...partCells(first, [show(row.after)], [show(row.before)], difference, presence(row)));
}
/** Of the parts that are not shown, the sum. */
function restRow(rows) {
  const add = (of) => rows.reduce((all, row) => all + row[of], 0);
  const texts = [duration(add('after')), duration(add('before')), signed(add('extra'), duration)];
  return el('tr', { role: 'row' }, ...partCells([count(rows.length, 'smaller part')], ...texts.map((text) => [text]), []));
}
const WITH_FUNCTIONS = ['on-CPU', 'blocked', 'await', 'scheduling delay', 'on-CPU on other threads'];
/** The name of a part, and what it is. */
function partTexts({ words, name, file, line, others }) {
  const place = sourceUrl(profile.source_url, file, line),
    text = placeText(file, line);
  const link = text === '' ? [] : [' · ', place ? el('a', { href: place, class: 'code', ...NEW_TAB }, text) : code(text)];
  if (name) return [name, [words === 'child spans' ? 'number of child spans' : words, ...link]];
  if (others) return ['several small ones', [words]];
  if (WITH_FUNCTIONS.includes(words)) return ['no stack, or none of your code in it', [words]];
  return [words, []];
}
function presence({ present_in: present, as_extreme_in: extreme, extra }) {
  const { references } = profile.compared;
  if (present === undefined) return [];
  const found = present === references ? `in all ${grouped(references)}` : `in ${grouped(present)} of ${grouped(references)}`;
  if (extreme === undefined) return [found];
  return [found, el('small', {}, ` ${extra < 0 ? 'as little' : 'as much'} in ${extreme === 0 ? 'none' : grouped(extreme)}`)];
}
/** Shows the difference in the graph, with the function of a row found. */
function showInGraph({ name }, mode) {
  Object.assign(state, NO_FILTER, { diff: true, view: 'graph', mode, zoom: [], search: '' });
  refresh();
  const parts = bareName(name).split('::');
  for (const text of [name, parts.slice(-2).join('::'), parts.at(-1)]) {
    if (matches.length > 0 || text === '') continue;
    state.search = text;
    search();
  }
  showControls();
  writeAddress();
  byId('graph').scrollIntoView();
  flame.focus({ preventScroll: true });
  if (matches.length > 0) stepMatch(1);
}

// --- what is missing

function showMissing() {
  const lines = missingLines(),
    list = el('ul');
  const make = ([kind, text]) => el('li', kind ? { class: kind } : {}, text);
  list.append(...lines.slice(0, 5).map(make));
  byId('missing').replaceChildren(list);
  if (lines.length <= 5) return;
  byId('missing').append(
    button(
      `Show all ${lines.length}`,
      (event) => {
        list.append(...lines.slice(5).map(make));
        event.target.remove();
      },
      { class: 'more' },
    ),
  );
}
function missingLines() {
  const [main] = profile.kept,
    lines = [];
  if (!profile.of_process) lines.push(...coverageLines(main));
  for (const loss of profile.losses) lines.push(['bad', clean(loss)]);
  if (main.unsampled > 0)
    lines.push([
      main.unsampled > main.wall * 0.1 ? 'bad' : '',
      `${duration(main.unsampled)} on-CPU were not sampled.`,
    ]);
  if (main.unexplained >= 1e6 && main.unexplained >= main.wall * 0.01) {
    lines.push([
      main.unexplained > main.wall / 2 ? 'bad' : '',
      `Idle for ${duration(main.unexplained)} with no stack that shows at which await: only futures that are polled ` +
        'through `Profiled` show that.',
    ]);
  }
  if (main.open) lines.push(['', 'The span was still open: what came later is not here.']);
  lines.push(...remarkLines());
  return lines.some(([kind]) => kind === 'bad') ? lines : [['good', 'Nothing of note was lost.'], ...lines];
}
function coverageLines(main) {
  const { kind, weight } = profile.samples,
    sums = MODES.map(() => 0);
  for (let i = 0; i < kind.length; i++) sums[kind[i]] += weight[i];
  // The samples are those of all kept spans that are inside no other.
  const spans = topmostSpans(),
    sum = (of) => sumOver(spans, of);
  if (!spans.every((span) => span.cpu_known))
    return [
      ['', `${duration(sums[0])} have samples. The CPU time is unknown, so the part that they cover is, too.`],
      ...allocatedLines(sums[ALLOCATED]),
    ];
  const cpu = sum((span) => Math.max(span.subtree_on_cpu, span.on_cpu)),
    ready = sum(({ split }) => sumOver(split, ([[kind], ns]) => (kind === 'runnable' ? ns : 0))),
    offCpu = sum((span) => span.off_cpu) - ready,
    isWhole = spans.every((span) => span.subtree_on_cpu === span.on_cpu),
    lines = [];
  const isBad = (part, whole) => (part < whole * 0.9 && whole - part > main.wall * 0.02 ? 'bad' : '');
  lines.push([
    isBad(sums[0], cpu),
    `Samples cover ${duration(sums[0])} of ${duration(cpu)} on-CPU (${percent(Math.min(sums[0], cpu), cpu)}), with child spans.`,
  ]);
  // Off-CPU time is that of the spans themselves, and waits are those of their child spans as well.
  if (isWhole && (sums[1] > 0 || offCpu > main.wall * 0.01)) {
    lines.push([isBad(sums[1], offCpu), `Waits with a stack: ${duration(sums[1])} of ${duration(offCpu)} blocked.`]);
  } else if (sums[1] > 0) {
    lines.push(['', `Waits with a stack: ${duration(sums[1])}, with child spans on other threads.`]);
  }
  const pending = sum((span) => span.await + span.scheduling_delay),
    shown = sums[AWAITING] + sums[DELAYED];
  if (pending + shown > 0) {
    // Awaits of child spans are in the sum as well, and those of short awaits are estimates.
    const part = shown <= pending * 1.1 ? ` of ${duration(pending)}` : ', with child spans';
    lines.push([isBad(shown, pending), `Awaits and scheduling delays with a stack: ${duration(shown)}${part}.`]);
  }
  return [...lines, ...allocatedLines(sums[ALLOCATED])];
}
function allocatedLines(sampled) {
  const all = sumOver(topmostSpans(), (span) => span.allocated ?? 0);
  return sampled > 0 ? [['', `Samples of allocations represent ${memory(sampled)} of ${memory(all)}.`]] : [];
}
/** Stacks with a note in them that something is missing. */
function remarkLines() {
  const { stack } = profile.samples,
    totals = new Map(),
    known = new Map();
  for (let i = 0; i < stack.length; i++) {
    if (!known.has(stack[i])) known.set(stack[i], remarksOf(stack[i]));
    for (const name of known.get(stack[i])) totals.set(name, (totals.get(name) ?? 0) + 1);
  }
  return [...totals].map(([name, number]) => [
    '',
    `${name} in ${count(number, 'stack')} (${percent(number, stack.length)})`,
  ]);
}
function remarksOf(stack) {
  const { parent, frame } = profile.stacks,
    names = new Set();
  for (let at = stack; at >= 0; at = parent[at])
    if (profile.frames.kind[frame[at]] === REMARK) names.add(frameName(frame[at]));
  return names;
}

// --- tables

const FEW = 4,
  MANY = 200;
const lengths = {};

/** Rows: [key, name, second line, values, share]. Clicking one filters, or clears the filter. */
function showRows(id, columns, rows, chosen, choose, empty) {
  const box = byId(id),
    limit = lengths[id] ?? FEW;
  if (rows.length === 0) {
    box.replaceChildren(el('p', { class: 'hint' }, empty));
    return;
  }
  const hadFocus = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const body = rows.slice(0, limit).map(([key, name, second, values, share]) => {
    const pick = button('', () => choose(key === chosen ? null : key), {
      class: 'pick',
      'aria-pressed': key === chosen,
      'data-key': key,
    });
    pick.append(el('span', { class: 'code' }, name), el('small', { class: 'code' }, second || '\u00a0'));
    pick.title = second ? `${name}\n${second}` : name;
    pick.style.setProperty('--share', `${Math.min(100, share * 100).toFixed(1)}%`);
    return el('tr', {}, el('td', {}, pick), ...values.map((text) => el('td', {}, text)));
  });
  const head = el('tr', {}, ...columns.map((text) => el('th', { scope: 'col' }, text)));
  box.replaceChildren(el('table', {}, el('thead', {}, head), el('tbody', {}, ...body)));
  if (rows.length > FEW) {
    const isLong = limit > FEW,
      all = Math.min(MANY, rows.length);
    box.append(
      button(
        isLong ? `Show ${FEW}` : all < rows.length ? `Show ${all} of ${rows.length}` : `Show all ${all}`,
        () => {
          lengths[id] = isLong ? FEW : MANY;
          showTables();
          box.querySelector('.more').focus();
        },
        { class: 'more' },
      ),
    );
  }
  if (hadFocus !== undefined) box.querySelector(`[data-key="${CSS.escape(hadFocus)}"]`)?.focus();
}

function showTables() {
  const inSpan = selectSamples(state.span);
  showFunctions(inSpan, 'cpu');
  showFunctions(inSpan, 'alloc');
  showWaits(inSpan);
  showAwaited(inSpan);
  showSpans(state.span < 0 ? inSpan : selectSamples(-1));
}
const FUNCTION_TABLES = {
  cpu: ['functions', 'No sample here: no thread ran for long enough.'],
  alloc: ['allocated', 'No sample of an allocation here.'],
};
/** Of each function what it has of a mode: own ones with all that they call, or all with what their own code has. */
function sumFunctions(chosen, mode, isSelf) {
  const { parent, frame } = profile.stacks,
    size = profile.functions.name.length,
    [weights, ofFrames] = [new Float64Array(size), new Float64Array(profile.frames.function.length)],
    [lastOn, fewest, best] = [-1, -1, -1].map((none) => new Int32Array(size).fill(none)),
    ownOf = Int32Array.from(profile.frames.function, (fn, here) => (isOwn(here) ? writtenIn(fn) : -1));
  let all = 0;
  const add = (fn, here, callees, weight) => {
    weights[fn] += weight;
    ofFrames[here] += weight;
    if (fewest[fn] < 0 || callees < fewest[fn]) fewest[fn] = callees;
    if (best[fn] < 0 || ofFrames[here] > ofFrames[best[fn]]) best[fn] = here;
  };
  for (const { i, part } of chosen) {
    if (MODES[profile.samples.kind[i]] !== mode) continue;
    const stack = profile.samples.stack[i],
      weight = profile.samples.weight[i] * part;
    all += weight;
    if (isSelf) {
      add(profile.frames.function[leafFrame(stack)], leafFrame(stack), 0, weight);
      continue;
    }
    for (let at = stack, callees = 0; at >= 0; at = parent[at], callees++) {
      const fn = ownOf[frame[at]];
      if (fn < 0 || lastOn[fn] === i) continue;
      lastOn[fn] = i;
      add(fn, frame[at], callees, weight);
    }
  }
  // Of those with the same, the deepest says most.
  const sorted = [...weights.keys()]
    .filter((fn) => weights[fn] > 0)
    .sort((a, b) => weights[b] - weights[a] || fewest[a] - fewest[b])
    .map((fn) => [fn, { weight: weights[fn], frame: best[fn] }]);
  return { sorted, all };
}
function showFunctions(chosen, mode) {
  const [id, empty] = FUNCTION_TABLES[mode];
  let sums = sumFunctions(chosen, mode, state.self);
  const isSelf = state.self || sums.sorted.length === 0;
  if (isSelf && !state.self) sums = sumFunctions(chosen, mode, true);
  const { sorted, all } = sums;
  const title = isSelf ? 'Self' : 'Total';
  if (mode === 'cpu')
    byId('functions-title').querySelector('small').textContent = isSelf ? 'self time on-CPU' : 'your code, with what it calls';
  const rows = sorted.map(([fn, { weight, frame }]) => {
    const name = isSelf ? functionName(fn) : withoutClosure(functionName(fn));
    return [fn, name, shortPlace(frame), [amount(weight, mode), percent(weight, all)], weight / all];
  });
  showRows(
    id,
    ['Function', title, 'Share'],
    rows,
    filteredMode() === mode ? state.fn : -1,
    (fn) => {
      if (mode === 'alloc' || state.mode === 'alloc') state.mode = mode;
      filter({ fn: fn ?? -1, wait: '' });
    },
    empty,
  );
}
/** The samples of some kinds by site and object, the one with the most time first. */
function sitesOf(chosen, isWanted) {
  const { kind, stack, weight, short } = profile.samples,
    sums = new Map();
  for (const { i, part } of chosen) {
    if (!isWanted(kind[i])) continue;
    const key = waitKey(i),
      length = weight[i] * part;
    if (!sums.has(key)) {
      const of = { key, kind: kind[i], site: siteOf(stack[i]), object: objectOf(i) };
      sums.set(key, { ...of, number: 0, total: 0, longest: 0, short: false });
    }
    const sum = sums.get(key);
    sum.number++;
    sum.total += length;
    sum.short ||= short[i];
    if (!short[i]) sum.longest = Math.max(sum.longest, length);
  }
  return [...sums.values()].sort((a, b) => b.total - a.total);
}
function showSites(id, columns, sites, empty) {
  const all = sumOver(sites, (site) => site.total);
  const rows = sites.map(({ key, kind, site, object, number, total, longest, short }) => [
    key,
    site < 0 ? objectName(kind, site, object) : frameName(site),
    site < 0 ? '' : `${objectName(kind, site, object)} ${shortPlace(site)}`.trim(),
    // Of short awaits, only some are recorded.
    [
      (short ? '≥ ' : '') + grouped(number),
      (short ? '≈ ' : '') + duration(total),
      short && longest === 0 ? `< ${duration(SHORT)}` : duration(longest),
    ],
    total / all,
  ]);
  showRows(id, columns, rows, state.wait, (wait) => filter({ wait: wait ?? '', fn: -1 }), empty);
}
function showWaits(chosen) {
  const sites = sitesOf(chosen, (kind) => kind === OFF_CPU);
  showSites('waits', ['Caller', 'Waits', 'Total', 'Longest'], sites, 'No wait with a stack here.');
}
function showAwaited(chosen) {
  const sites = sitesOf(chosen, isPending);
  showSites('awaits', ['Caller', 'Number', 'Total', 'Longest'], sites, 'No await with a stack here.');
}
function showSpans(chosen) {
  const { spans, samples } = profile,
    sums = new Map();
  const sumOf = (name) => {
    if (!sums.has(name)) sums.set(name, { number: 0, wall: 0, cpu: 0, off: 0, await: 0, delay: 0, alloc: 0, samples: 0 });
    return sums.get(name);
  };
  const [begin, end] = state.interval ?? [-Infinity, Infinity];
  spans.name.forEach((name, span) => {
    if (spans.parent[span] < 0) return;
    const to = spans.end[span] < 0 ? profile.length : spans.end[span];
    const wall = Math.min(to, end) - Math.max(spans.start[span], begin);
    if (wall < 0) return;
    sumOf(name).number++;
    sumOf(name).wall += wall;
  });
  let total = 0;
  for (const { i, part } of chosen) {
    const isOnCpu = samples.kind[i] === ON_CPU;
    if (isOnCpu) total++;
    if (samples.span[i] < 0 || !sums.has(spans.name[samples.span[i]]) || spans.parent[samples.span[i]] < 0) continue;
    const sum = sumOf(spans.name[samples.span[i]]);
    sum[MODES[samples.kind[i]]] += samples.weight[i] * part;
    if (isOnCpu) sum.samples++;
  }
  const shown = MODES.filter((_, kind) => kind < AWAITING || profile.kinds.has(kind));
  const rows = [...sums]
    .sort((a, b) => sampledTime(b[1]) - sampledTime(a[1]))
    .map(([name, sum]) => [
      name,
      profile.strings[name],
      `${grouped(sum.number)} ×, ${duration(sum.wall)} wall`,
      [...shown.map((mode) => amount(sum[mode], mode)), percent(sum.samples, total)],
      total > 0 ? sum.samples / total : 0,
    ]);
  showRows(
    'spans',
    ['Span', ...shown.map((mode) => MODE_NAMES[mode]), 'Samples'],
    rows,
    state.span,
    (span) => filter({ span: span ?? -1 }),
    'No child span has samples or waits.',
  );
}
/** What was counted of the spans inside the outermost kept one that has it, with and without samples. */
function showChildren() {
  const kept = profile.kept.find(({ children }) => children?.totals.length > 0);
  byId('children').hidden = !kept;
  if (!kept) return;
  const { from, incomplete, totals } = kept.children,
    named = totals.map((row) => ({ ...row, name: row.name === '' ? 'all others' : clean(row.name) }));
  const rows = named.map(({ name, count: number, total, longest, open, order }) =>
    el(
      'tr',
      {},
      el('td', { class: 'code', title: name }, name, el('small', {}, order === 'in turn' ? order : `${order}: ${duration(open)}`)),
      ...[grouped(number), duration(total), duration(longest)].map((text) => el('td', {}, text)),
    ),
  );
  const columns = ['All that closed', 'Number', 'Total', 'Longest'];
  const head = el('tr', {}, ...columns.map((text) => el('th', { scope: 'col' }, text)));
  const since = from > 0 ? `, created ${duration(from)} after its start or later` : '';
  byId('children').replaceChildren(
    el('p', { class: 'hint' }, `Sampled or not, in ${kept.name}${since}${incomplete ? '; some are missing' : ''}`),
    el('table', {}, el('thead', {}, head), el('tbody', {}, ...rows)),
  );
}
const MODE_NAMES = { cpu: 'On-CPU', off: 'Off-CPU', await: 'Await', delay: 'Delay', alloc: 'Allocated' };
const sampledTime = (sum) => sum.cpu + sum.off + sum.await + sum.delay;

// --- filters and the address

function filter(change) {
  Object.assign(state, change);
  if (state.span >= 0 || state.fn >= 0 || state.wait !== '') state.diff = false;
  if (filteredMode() !== '' && state.mode !== 'wall') state.mode = filteredMode();
  refresh();
  say(byId('total').textContent);
}
/** The only mode but `wall` in which the filters leave something, or ''. */
const filteredMode = () => {
  if (state.fn >= 0) return state.mode === 'alloc' ? 'alloc' : 'cpu';
  return state.wait === '' ? '' : MODES[parseInt(state.wait)];
};
function showFilters() {
  const chips = [];
  const add = (text, clear) =>
    chips.push(
      button(
        `${text} × clear`,
        () => {
          filter(clear);
          timeline.focus({ preventScroll: true });
        },
        { 'aria-label': `${text}: clear this filter` },
      ),
    );
  if (state.interval) add(intervalText(state.interval), { interval: null });
  if (state.span >= 0) add(`in span ${profile.strings[state.span]}`, { span: -1 });
  if (state.fn >= 0) add(`in ${shortName(functionName(state.fn))}${state.self ? ' itself' : ''}`, { fn: -1 });
  if (state.wait !== '') add(waitName(state.wait), { wait: '' });
  byId('filters').hidden = chips.length === 0;
  byId('filters').replaceChildren('Only', ...chips);
}
const waitName = (key) => {
  const [kind, site, object] = key.split('.').map(Number);
  const verb = ['', 'waiting in', 'awaiting in', 'delayed in'][kind];
  return [verb, site < 0 ? '' : shortName(frameName(site)), objectName(kind, site, object)].filter(Boolean).join(' ');
};

/** The zoom is in the address as indexes of children, with runs of zeros shortened. */
function zoomIndexes() {
  const indexes = [];
  for (let at = zoomed; at.parent; at = at.parent) indexes.push(at.parent.children.indexOf(at));
  return indexes
    .reverse()
    .join('.')
    .replace(/(^|\.)0(?:\.0){2,}(?=\.|$)/g, (run, before) => `${before}z${run.split('.').filter(Boolean).length}`);
}
function keysOfIndexes(text) {
  const indexes = text
    .split('.')
    .flatMap((part) => (/^z\d{1,4}$/.test(part) ? new Array(Number(part.slice(1))).fill(0) : [Number(part)]));
  let node = tree.root;
  for (const index of indexes) {
    if (!node.children[index]) break;
    node = node.children[index];
  }
  return keyPath(node);
}
/** What changes within a second is one step back. The first address, and one that was read, are no steps. */
let writtenAt = Infinity;
function writeAddress() {
  const values = new URLSearchParams();
  values.set('mode', state.mode);
  if (state.view !== 'graph') values.set('view', state.view);
  if (!state.spans) values.set('spans', 'off');
  if (state.threads) values.set('threads', 'on');
  if (state.diff) values.set('diff', 'on');
  if (!state.fold) values.set('fold', 'off');
  if (state.self) values.set('held', 'self');
  if (state.search) values.set('q', state.search);
  if (state.interval) values.set('t', state.interval.map(Math.round).join('-'));
  for (const name of ['span', 'fn']) if (state[name] >= 0) values.set(name, state[name]);
  if (state.wait) values.set('wait', state.wait);
  if (zoomed !== tree.root) values.set('zoom', zoomIndexes());
  const fragment = `#${values}`;
  if (fragment === location.hash) return;
  const isStep = performance.now() - writtenAt > 1000;
  writtenAt = performance.now();
  try {
    history[isStep ? 'pushState' : 'replaceState'](null, '', fragment);
  } catch {
    location.replace(fragment);
  }
}
function readAddress() {
  const values = new URLSearchParams(location.hash.slice(1));
  const index = (name, list) =>
    /^\d{1,8}$/.test(values.get(name) ?? '') && Number(values.get(name)) < list.length ? Number(values.get(name)) : -1;
  const mode = values.get('mode');
  state.mode = [...MODES, 'wall'].includes(mode) ? mode : bestMode();
  state.view = values.get('view') === 'table' ? 'table' : 'graph';
  state.spans = values.get('spans') !== 'off';
  state.threads = values.get('threads') === 'on';
  state.fold = values.get('fold') !== 'off';
  state.self = values.get('held') === 'self';
  state.search = (values.get('q') ?? '').slice(0, 500);
  const interval = /^(\d{1,16})-(\d{1,16})$/.exec(values.get('t') ?? '');
  state.interval =
    interval && Number(interval[1]) < Number(interval[2]) ? [Number(interval[1]), Number(interval[2])] : null;
  state.span = index('span', profile.strings);
  state.fn = index('fn', profile.functions.name);
  const wait = /^[123]\.(-?\d{1,8})\.(-?\d{1,8})$/.exec(values.get('wait') ?? '');
  const isIn = (number, list) => Number(number) >= -1 && Number(number) < list.length;
  const objects = () => (isCall(parseInt(wait[0]), wait[1]) ? profile.frames.kind : profile.leaves.kind);
  state.wait = wait && isIn(wait[1], profile.frames.kind) && isIn(wait[2], objects()) ? wait[0] : '';
  state.diff = values.get('diff') === 'on' && profile.compared !== undefined;
  if (state.diff) Object.assign(state, NO_FILTER);
  return values.get('zoom') ?? '';
}
/** CPU if that is nearly all of it, else everything. */
function bestMode() {
  const [main] = profile.kept;
  if (profile.of_process) return 'cpu';
  if (profile.samples.kind.every((kind) => kind === ALLOCATED)) return 'alloc';
  return main.cpu_known && main.on_cpu >= main.wall * 0.95 ? 'cpu' : 'wall';
}

// --- all together

let timer = 0;
/** Rebuilds soon: while an interval is dragged, at most so often as the page can follow. */
function later() {
  clearTimeout(timer);
  byId('graph').setAttribute('aria-busy', true);
  timer = setTimeout(refresh, 60);
}
function refresh(zoom) {
  clearTimeout(timer);
  byId('graph').setAttribute('aria-busy', false);
  rebuildTree(zoom);
  showFilters();
  showTables();
  showControls();
  drawTimeline();
  writeAddress();
}
function rebuildTree(zoom) {
  tree = state.diff
    ? buildDifference(state.mode)
    : buildTree(selectSamples(state.span).filter(matchesSite), state.mode);
  opened = new Set();
  current = hovered = null;
  arrange();
  if (zoom) state.zoom = keysOfIndexes(zoom);
  zoomed = nodeAt(state.zoom);
  reveal(zoomed);
  state.zoom = keyPath(zoomed);
  tableRoot = null;
  scroller.scrollTop = Math.max(0, (zoomed.row - 3) * rowHeight);
  search();
  showCrumbs();
  showTotal();
  showView();
}
function showView() {
  const isTable = state.view === 'table';
  scroller.hidden = isTable;
  byId('table').hidden = !isTable;
  layOut();
  showDetail();
  if (isTable) showTable();
}
function showTotal() {
  const { root } = tree,
    names = { cpu: 'on-CPU', off: 'off-CPU', await: 'awaiting', delay: 'scheduling delay', alloc: 'allocated' };
  const name = names[state.mode] ?? (state.interval ? 'of wall time' : 'wall');
  byId('total').textContent =
    root.value <= 0
      ? 'Nothing to show'
      : state.diff
        ? `This span ${amount(root.slow)}, typical ${amount(root.typical)}: ${extraText(root)} ${state.mode === 'wall' ? 'in all' : name}`
        : `${amount(root.value)} ${name}`;
  byId('total-hint').textContent = root.value <= 0 ? emptyHint() : state.diff ? DIFFERENCE_HINT : totalHint(root.samples);
}
const DIFFERENCE_HINT =
  'all threads and futures added up, where they have stacks; the width of a box is the larger of both';
function totalHint(samples) {
  const number = countedText(samples, state.mode);
  if (state.mode === 'alloc') return `by ${number}, freed or not`;
  if (state.mode === 'cpu' || state.mode === 'off') return `${number}, all threads added up`;
  const parts = [number];
  if (state.mode === 'wall') parts.push('widths are shares of wall time');
  else parts[0] += ', all futures added up';
  if (profile.kinds.has('short'))
    parts.push(`those shorter than ${duration(SHORT)} are samples that each represent ${duration(SHORT)}`);
  if (state.mode === 'wall' && wallClock.parallel)
    parts.push('a moment in which several threads or futures were active is divided among them');
  return parts.join('; ');
}
function emptyHint() {
  if (state.interval || state.span >= 0 || state.fn >= 0 || state.wait !== '') return 'within the filters above.';
  return 'Nothing of this kind: choose Wall.';
}
function showControls() {
  for (const input of document.querySelectorAll('[name=mode]')) input.checked = input.value === state.mode;
  for (const input of document.querySelectorAll('[name=view]')) input.checked = input.value === state.view;
  for (const input of document.querySelectorAll('[name=diff]')) input.checked = (input.value === 'on') === state.diff;
  for (const id of ['by-span', 'by-thread']) byId(id).closest('label').hidden = state.diff;
  byId('mode').querySelector('[value=wall] + span').textContent = state.diff ? 'All time' : 'Wall';
  for (const label of byId('mode').querySelectorAll('[data-kind]')) {
    const kind = Number(label.dataset.kind);
    label.hidden = !profile.kinds.has(kind) && !(state.diff && profile.typical.kind.includes(kind));
  }
  for (const input of document.querySelectorAll('[name=held]')) input.checked = (input.value === 'self') === state.self;
  if (areKindsOfDifference !== state.diff) showKinds();
  byId('by-span').checked = state.spans;
  byId('by-thread').checked = state.threads;
  byId('fold').checked = state.fold;
  if (byId('search').value !== state.search) byId('search').value = state.search;
}
let areKindsOfDifference = null;
function showKinds() {
  areKindsOfDifference = state.diff;
  if (state.diff) {
    const items = Object.entries(LOOK_TEXTS).map(([look, text]) =>
      el('li', {}, el('i', { class: `swatch diff-${look}` }), `${LOOK_MARKS[look]} ${text}${look === 'less' ? ' (hatched)' : ''}`.trim()),
    );
    byId('kinds').replaceChildren(...items);
    return;
  }
  const used = new Set(
    profile.stacks.frame.map((frame) => (isOwn(frame) ? 'user' : COLORS[profile.frames.kind[frame]])),
  );
  for (const [kind, box] of Object.entries(LEAF_BOXES)) if (profile.kinds.has(Number(kind))) used.add(COLORS[box]);
  const texts = {
    span: 'span',
    user: 'your code',
    rust: 'other Rust',
    native: 'native',
    kernel: 'kernel',
    wait: 'wait (hatched)',
    await: 'await (barred)',
    delay: 'woken, not polled (grid)',
    remark: 'remark (hatched)',
    idle: 'idle (dotted)',
  };
  const items = Object.entries(texts)
    .filter(([name]) => used.has(name) || name === 'span' || name === 'idle')
    .map(([name, text]) => {
      const swatch = el('i', { class: 'swatch' }),
        [hue, saturation, light] = colors.hsl[name];
      swatch.style.background = `hsl(${hue} ${saturation}% ${light}%)`;
      return el('li', {}, swatch, text);
    });
  if (profile.frames.inferred.some(Boolean)) items.push(el('li', {}, '≈ inferred, likely but not certain'));
  byId('kinds').replaceChildren(...items);
}
/** Hides what is only of use with awaits. */
function showKindsThere() {
  for (const element of document.querySelectorAll('[data-kind]'))
    element.hidden = !element.dataset.kind.split(' ').some((kind) => profile.kinds.has(Number(kind) || kind));
  document.querySelector('.cards').classList.toggle('five', !byId('awaits').closest('.card').hidden);
}
/** A profile of the process has sums of CPU time, and neither waits nor the times of samples. */
function hideTimes() {
  if (!profile.of_process) return;
  const sections = [timeline, byId('waits'), byId('spans')].map((element) => element.closest('section'));
  const modes = ['off', 'wall'].map((mode) => document.querySelector(`#mode input[value=${mode}]`).closest('label'));
  for (const element of [byId('wall'), ...sections, ...modes]) element.hidden = true;
}
function showAttributes() {
  const text = (value) => clean(Array.isArray(value) ? value.join(', ') : value);
  const all = [...profile.attributes, ...profile.resource];
  byId('attributes')
    .querySelector('dl')
    .append(
      ...all.flatMap(([key, value]) => [
        el('dt', { class: 'code' }, clean(key)),
        el('dd', { class: 'code' }, text(value)),
      ]),
    );
  byId('attributes')
    .querySelector('ul')
    .append(...profile.notes.map((note) => el('li', {}, clean(note))));
  byId('attributes').hidden = all.length + profile.notes.length === 0;
}
function redraw() {
  rowHeight = media('(pointer: coarse)').matches ? 24 : 19;
  drawTimeline();
  layOut();
}

function listenToControls() {
  for (const name of ['mode', 'view']) {
    byId(name).addEventListener('change', (event) => {
      state[name] = event.target.value;
      if (state.mode !== 'wall' && state.mode !== filteredMode()) Object.assign(state, { fn: -1, wait: '' });
      if (name === 'mode') refresh();
      else {
        showView();
        writeAddress();
      }
      say(byId('total').textContent);
    });
  }
  byId('diff').addEventListener('change', (event) => {
    state.diff = event.target.value === 'on';
    if (state.diff) Object.assign(state, NO_FILTER);
    else if (MODES.indexOf(state.mode) >= AWAITING && !profile.kinds.has(MODES.indexOf(state.mode))) state.mode = bestMode();
    refresh();
    say(byId('total').textContent);
  });
  for (const [id, name] of [
    ['by-span', 'spans'],
    ['by-thread', 'threads'],
    ['fold', 'fold'],
  ]) {
    byId(id).addEventListener('change', (event) => {
      state[name] = event.target.checked;
      refresh();
    });
  }
  byId('held').addEventListener('change', (event) => {
    state.self = event.target.value === 'self';
    refresh();
    say(state.self ? 'Self time' : 'Total time');
  });
  byId('search').addEventListener('input', (event) => {
    state.search = event.target.value;
    search();
    writeAddress();
  });
  byId('search').addEventListener('keydown', (event) => {
    if (event.key === 'Enter') stepMatch(event.shiftKey ? -1 : 1);
    else if (event.key === 'Escape') leaveSearch();
    else return;
    event.preventDefault();
  });
  byId('next').addEventListener('click', () => stepMatch(1));
  byId('previous').addEventListener('click', () => stepMatch(-1));
}
function leaveSearch() {
  state.search = byId('search').value = '';
  search();
  writeAddress();
  (state.view === 'graph' ? flame : byId('table').querySelector('tr[tabindex="0"]')).focus();
}
function listenToGraph() {
  flame.addEventListener('click', (event) => {
    const node = boxAt(event);
    if (node) zoomTo(node);
  });
  flame.addEventListener('pointermove', (event) => {
    const node = boxAt(event);
    showTip(event, node ? describe(node) : []);
    if (node === hovered) return;
    hovered = node;
    showDetail();
  });
  flame.addEventListener('pointerleave', () => {
    hovered = null;
    showTip(null, []);
    showDetail();
  });
  flame.addEventListener('keydown', flameKey);
  flame.addEventListener('focus', () => {
    if (!current) setCurrent(zoomed);
  });
  scroller.addEventListener('scroll', draw);
  addEventListener('keydown', (event) => {
    const isTyping =
      /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) &&
      event.target.type !== 'radio' &&
      event.target.type !== 'checkbox';
    if (event.key !== '/' || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    byId('search').focus();
    byId('search').select();
  });
}
function listenToTimeline() {
  timeline.addEventListener('pointerdown', dragTimeline);
  timeline.addEventListener('pointermove', hoverTimeline);
  timeline.addEventListener('pointerleave', () => {
    showTip(null, []);
    showReadout(readoutLines(cursor));
  });
  timeline.addEventListener('keydown', timelineKey);
  timeline.addEventListener('focus', () => moveCursor(cursor));
  timeline.addEventListener('blur', drawTimeline);
  byId('timeline-more').addEventListener('click', () => {
    showAllRows = !showAllRows;
    drawTimeline();
  });
}
function listenToWindow() {
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    redraw();
  }).observe(document.body);
  media('(prefers-color-scheme: dark)').addEventListener('change', () => {
    readColors();
    showKinds();
    redraw();
  });
  addEventListener('hashchange', () => {
    const zoom = readAddress();
    state.zoom = [];
    writtenAt = Infinity;
    refresh(zoom);
  });
}

async function main() {
  profile = await decode();
  wallClock = makeWallClock(profile.samples);
  byId('report').hidden = false;
  readColors();
  showIdentity();
  showWall();
  showChildren();
  hideTimes();
  showHeadline();
  showCompared();
  showKindsThere();
  showMissing();
  showAttributes();
  prepareTimeline();
  refresh(readAddress());
  moveCursor(profile.length / 2);
  listenToControls();
  listenToGraph();
  listenToTimeline();
  listenToWindow();
  requestAnimationFrame(() => performance.mark('report-ready'));
}
function fail(error) {
  byId('report').hidden = true;
  byId('problem').hidden = false;
  byId('problem').textContent = error.message;
  try {
    byId('name').textContent = clean(JSON.parse(byId('summary').textContent).name);
  } catch {
    /* The headline stays as it is. */
  }
}
main().catch(fail);
