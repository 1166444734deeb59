// The list of kept spans, and the state and rules of the layer. Nothing from the server reaches the page other than as
// text, or as the address of a link whose scheme was checked.

const PAGE = 50,
  REFRESH_MS = 10_000,
  LONGEST_TEXT = 500;
const base = document.querySelector('meta[name=base]').content;

// --- text and elements

/** The same of milliseconds. */
const lasted = (ms) => duration(ms * 1e6);
const clock = (date) => `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
const day = (date) => `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
const ago = (ms) => {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 172_800 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86_400)} days ago`;
};

// --- what the server says

const server = { enabled: false, rules: '', source: '', kept: {}, stats: {}, trace_url: '', aheadMs: 0 };
/** The entries in the list, and those that a button adds. */
let entries = [],
  waiting = [],
  isLoaded = false;
const keyOf = (entry) => [entry.id, entry.span_id, entry.time, entry.name].join('\n');

async function ask(path, options) {
  const response = await fetch((base + path).replace(/(.)\/$/, '$1'), { credentials: 'same-origin', cache: 'no-store', ...options });
  if (response.ok) return response;
  const text = (await response.text()).slice(0, 4000);
  throw Object.assign(new Error(text || `status ${response.status}`), { status: response.status });
}
const askState = async (method) => (await ask('', { method, headers: { accept: 'application/json' } })).json();

function takeState(state) {
  Object.assign(server, state);
  const now = Date.parse(state.now);
  server.aheadMs = Number.isNaN(now) ? 0 : now - Date.now();
  showState();
}
async function refresh() {
  try {
    const [state, list] = await Promise.all([askState('GET'), ask('kept?limit=1000').then((response) => response.json())]);
    takeState(state);
    takeList(list.kept);
    problem('');
    showProcess().catch((error) => problem(`Cannot list the profiles of the process: ${error.message}`));
  } catch (error) {
    problem(isLoaded ? `Cannot refresh: ${error.message}` : `Cannot load what is kept: ${error.message}`);
  }
}
/** New entries wait for a click, so that rows do not move while they are read. */
/** A profile without a report is known only by its files. */
const whole = (entry) => ({
  name: '',
  reasons: '',
  isTimed: Number.isFinite(entry.wall_ms),
  ...entry,
  wall_ms: entry.wall_ms ?? 0,
  on_cpu_ms: entry.on_cpu_ms ?? 0,
  await_ms: entry.await_ms ?? 0,
});
function takeList(list) {
  const kept = list.map(whole);
  if (!isLoaded || entries.length === 0) {
    entries = kept;
    waiting = [];
    isLoaded = true;
    showAll();
    return;
  }
  const known = new Set(entries.map(keyOf)),
    isNew = kept.some((entry) => !known.has(keyOf(entry)));
  waiting = isNew ? kept : [];
  const number = kept.filter((entry) => !known.has(keyOf(entry))).length;
  const fresh = byId('fresh');
  if (number > 0 && fresh.hidden) say(count(number, 'new kept span'));
  fresh.hidden = number === 0;
  fresh.textContent = `${grouped(number)} new`;
  showTimes();
}
function takeWaiting() {
  entries = waiting;
  waiting = [];
  byId('fresh').hidden = true;
  showAll();
  byId('spans').querySelector('a, button')?.focus();
}
function problem(text) {
  byId('problem').hidden = text === '';
  byId('problem').textContent = text;
}

// --- state and rules

function showState() {
  byId('source').textContent = clean(server.source);
  byId('enabled').disabled = false;
  byId('enabled').setAttribute('aria-checked', server.enabled);
  byId('enabled-text').textContent = server.enabled ? 'on' : 'off';
  byId('rules').textContent = server.rules;
  showStats();
  if (!byId('empty').hidden) showEmpty();
}
async function toggle() {
  const control = byId('enabled');
  control.disabled = true;
  try {
    takeState(await askState(server.enabled ? 'DELETE' : 'POST'));
    problem('');
    say(`Profiling is ${server.enabled ? 'on' : 'off'}`);
  } catch (error) {
    problem(`Cannot turn profiling ${server.enabled ? 'off' : 'on'}: ${error.message}`);
  }
  control.disabled = false;
  control.focus();
}

function openEditor(text) {
  byId('editor').hidden = false;
  byId('edit').setAttribute('aria-expanded', true);
  byId('new-rules').value = text;
  rulesError('');
  byId('new-rules').focus();
}
function closeEditor() {
  byId('editor').hidden = true;
  byId('edit').setAttribute('aria-expanded', false);
  byId('edit').focus();
}
function rulesError(text) {
  byId('rules-error').hidden = text === '';
  byId('rules-error').textContent = text;
  byId('new-rules').setAttribute('aria-invalid', text !== '');
}
async function saveRules(event) {
  event.preventDefault();
  byId('save').disabled = true;
  try {
    const response = await ask('rules', {
      method: 'PUT',
      body: byId('new-rules').value,
      headers: { 'content-type': 'text/plain' },
    });
    server.rules = await response.text();
    showState();
    closeEditor();
    say('The rules were changed');
  } catch (error) {
    rulesError(error.message);
    byId('new-rules').focus();
  }
  byId('save').disabled = false;
}

function showStats() {
  const groups = new Map();
  for (const [name, value] of Object.entries(server.stats)) {
    const [group, ...rest] = name.split('.');
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([rest.join('.') || group, value]);
  }
  byId('stats').hidden = groups.size === 0;
  const rowOf = ([name, value]) =>
    el(
      'tr',
      value === 0 ? { class: 'zero' } : {},
      el('td', { class: 'code' }, clean(name)),
      el('td', { class: 'number' }, grouped(value)),
    );
  byId('stats')
    .querySelector('div')
    .replaceChildren(
      ...[...groups].map(([group, rows]) =>
        el('table', {}, el('caption', {}, clean(group)), el('tbody', {}, ...rows.map(rowOf))),
      ),
    );
}

function showEmpty() {
  byId('empty-rules').textContent = clean(server.rules);
  byId('empty-source').textContent = clean(server.source);
  const seen = server.stats['spans.seen'];
  byId('empty-why').textContent = !server.enabled
    ? 'Profiling is off.'
    : seen === 0
      ? 'No span that a rule matches has reached the layer so far: most likely the first cause below.'
      : seen > 0
        ? `${count(seen, 'span')} so far ${seen === 1 ? 'was' : 'were'} seen, and none met its rule.`
        : 'Kept spans appear here by themselves.';
}

// --- the list

const view = { text: '', reason: '', name: '', sort: 'time', isDescending: true, page: 0 };
/** What most of the time is in, of the largest part of it. */
function hotspotOf(entry) {
  const times = { on_cpu: entry.on_cpu_ms, off_cpu: entry.split_ms?.off_cpu, await: entry.await_ms },
    timeOf = ({ kind }) => times[kind] ?? 0;
  return entry.hotspots?.filter((one) => timeOf(one) > 0).sort((a, b) => timeOf(b) - timeOf(a))[0];
}
const namesOf = (hotspot) => hotspot.functions.map(({ name }) => name).join(', ');
function topOf(entry) {
  const hotspot = hotspotOf(entry);
  return hotspot ? namesOf(hotspot) : '';
}
const COLUMNS = [
  ['time', 'Time', (entry) => Date.parse(entry.time) || 0, true],
  ['span', 'Span', (entry) => entry.name, false],
  ['reason', 'Reason', (entry) => entry.reasons, false],
  ['wall', 'Wall time', (entry) => entry.wall_ms, true],
  ['typical', '× typical', (entry) => entry.times_typical ?? -1, true],
  ['top', 'Most of it in', (entry) => topOf(entry).toLowerCase(), false],
  ['trace', 'Trace', null, false],
  ['files', 'Files', null, false],
];
/** Without typical spans there is nothing to compare with. */
const shownColumns = () => COLUMNS.filter(([name]) => name !== 'typical' || entries.some((entry) => entry.references > 0));
const column = (name) => COLUMNS.find(([id, , value]) => id === name && value);
const reasonsOf = (entry) =>
  clean(entry.reasons)
    .split(/[|,]\s*/)
    .filter((reason) => reason !== '');

function shownEntries() {
  const text = view.text.trim().toLowerCase(),
    [, , valueOf] = column(view.sort);
  const has = (entry) =>
    [entry.name, entry.reasons, topOf(entry), entry.headline, entry.trace_id, entry.id, entry.no_profile].some(
      (value) =>
        String(value ?? '')
          .toLowerCase()
          .includes(text),
    );
  const shown = entries.filter(
    (entry) =>
      (view.reason === '' || reasonsOf(entry).includes(view.reason)) &&
      (view.name === '' || entry.name === view.name) &&
      (text === '' || has(entry)),
  );
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  return shown.sort((a, b) => compare(valueOf(a), valueOf(b)) * (view.isDescending ? -1 : 1));
}

function showAll() {
  const isEmpty = entries.length === 0;
  byId('empty').hidden = !isEmpty;
  byId('groups').hidden = byId('list').hidden = isEmpty;
  if (isEmpty) showEmpty();
  else showList();
}
function showList() {
  const shown = shownEntries(),
    pages = Math.max(1, Math.ceil(shown.length / PAGE));
  view.page = Math.min(view.page, pages - 1);
  const here = shown.slice(view.page * PAGE, (view.page + 1) * PAGE);
  const longest = shown.reduce((most, entry) => Math.max(most, entry.wall_ms), 0);
  byId('spans').tBodies[0].replaceChildren(...here.map((entry) => row(entry, longest)));
  byId('spans').hidden = shown.length === 0;
  byId('none').hidden = shown.length > 0;
  byId('shown').textContent =
    shown.length === entries.length
      ? grouped(entries.length)
      : `${grouped(shown.length)} of ${grouped(entries.length)}`;
  showHead();
  showGroups();
  showControls();
  showPages(pages);
  showTimes();
  writeAddress();
}

function row(entry, longest) {
  const cells = {
    time: timeCell,
    span: spanCell,
    reason: reasonCell,
    wall: wallCell,
    typical: typicalCell,
    top: topCell,
    trace: traceCell,
    files: filesCell,
  };
  return el(
    'tr',
    { role: 'row' },
    ...shownColumns().map(([name]) => el('td', { role: 'cell', class: name }, ...cells[name](entry, longest))),
  );
}
function timeCell(entry) {
  const date = new Date(entry.time);
  if (Number.isNaN(date.getTime())) return ['unknown'];
  return [
    el('time', { datetime: date.toISOString(), title: date.toISOString() }, clock(date)),
    el('small', { 'data-time': date.getTime() }, ''),
  ];
}
const fileUrl = (name) => `${base}profiles/${encodeURIComponent(name)}`;
const reportOf = (entry) => entry.files?.find((name) => name.endsWith('.html'));
function spanCell(entry) {
  const report = reportOf(entry),
    name = clean(entry.name);
  const title = report
    ? el('a', { href: fileUrl(report), class: 'name code clip', title: name }, name)
    : el('span', { class: 'name code clip', title: name }, name);
  return [
    title,
    ...(entry.no_profile ? [el('small', { class: 'clip' }, `No profile: ${clean(entry.no_profile)}`)] : []),
  ];
}
function reasonCell(entry) {
  const badges = reasonsOf(entry).map((reason) => el('span', { class: 'badge' }, reason));
  return [...badges.flatMap((badge) => [badge, ' ']), ...(entry.open ? [el('small', {}, 'still open')] : [])];
}
function wallCell(entry, longest) {
  if (!entry.isTimed) return ['–'];
  const [picture, words] = bar(entry.split_ms ?? {});
  picture.style.width = `${longest > 0 ? (entry.wall_ms / longest) * 100 : 0}%`;
  for (const text of entry.beside ?? []) words.append(` · ${clean(text)}`);
  return [el('b', {}, lasted(entry.wall_ms)), picture, words];
}
/** How many times as long as typical spans it took, and the largest difference that is not by chance. */
function typicalCell(entry) {
  if (!(entry.references > 0)) return ['–'];
  if (!(entry.times_typical > 0)) return [el('small', {}, `only ${count(entry.references, 'typical one')}`)];
  const cells = [el('b', {}, `${entry.times_typical} ×`), el('small', {}, `of ${lasted(entry.typical_median_ms)}`)];
  if (!entry.slower_in) return cells;
  const more = `+${lasted(entry.slower_in_ms)} ${clean(entry.slower_in)}`;
  return [...cells, el('small', { class: 'clip', title: more }, more)];
}
const TIMES_OF = { on_cpu: 'on-CPU time', off_cpu: 'waits', await: 'awaits' };
function topCell(entry) {
  const hotspot = hotspotOf(entry),
    lines = [];
  if (hotspot) {
    const names = clean(namesOf(hotspot)),
      share = Math.round(hotspot.functions.reduce((sum, one) => sum + one.share, 0) * 100);
    const of = hotspot.certain ? `${share} % of ${TIMES_OF[hotspot.kind]}` : 'likely: few samples';
    lines.push(el('div', { class: 'code clip', title: names }, names), el('small', {}, of));
  }
  if (entry.headline) {
    const headline = clean(entry.headline);
    lines.push(el('small', { class: 'clip', title: headline }, headline));
  }
  return lines.length > 0 ? lines : ['–'];
}
function traceCell(entry) {
  if (!entry.trace_id) return ['–'];
  const text = clean(entry.trace_id),
    url = traceUrl(server.trace_url, entry.trace_id, entry.span_id ?? '');
  const short = text.length > 8 ? `${text.slice(0, 8)}…` : text;
  return [
    url
      ? el('a', { href: url, class: 'code', title: text, target: '_blank', rel: 'noopener noreferrer' }, short)
      : el('span', { class: 'code', title: text }, short),
  ];
}
function filesCell(entry) {
  const names = { html: 'report', gz: 'pprof' };
  const links = (entry.files ?? []).map((name) => {
    const type = name.endsWith('.firefox.json.gz') ? 'firefox' : name.slice(name.lastIndexOf('.') + 1);
    return el('a', { href: fileUrl(name), ...(type === 'html' ? {} : { download: '' }) }, clean(names[type] ?? type));
  });
  return links.length > 0 ? links.flatMap((link) => [link, ' ']) : ['–'];
}
/** Ages change while the rows stay. */
function showTimes() {
  const now = Date.now() + server.aheadMs,
    today = day(new Date(now));
  for (const small of document.querySelectorAll('[data-time]')) {
    const time = Number(small.dataset.time),
      date = day(new Date(time));
    small.textContent = date === today ? ago(now - time) : date;
  }
}

function showHead() {
  const arrow = view.isDescending ? ' ↓' : ' ↑';
  byId('spans').tHead.rows[0].replaceChildren(
    ...shownColumns().map(([name, title, valueOf]) => {
      const isSorted = view.sort === name;
      const head = el('th', {
        role: 'columnheader',
        scope: 'col',
        class: name,
        ...(isSorted ? { 'aria-sort': view.isDescending ? 'descending' : 'ascending' } : {}),
      });
      head.append(valueOf ? button(title + (isSorted ? arrow : ''), () => sortBy(name), { 'data-sort': name }) : title);
      return head;
    }),
  );
}
function sortBy(name) {
  view.isDescending = view.sort === name ? !view.isDescending : column(name)[3];
  view.sort = name;
  view.page = 0;
  showList();
  byId('spans').querySelector(`[data-sort=${name}]`).focus();
}

let areAllGroups = false;
const FEW_GROUPS = 5;
function showGroups() {
  const groups = new Map();
  for (const entry of entries) {
    if (!entry.isTimed) continue;
    if (!groups.has(entry.name)) groups.set(entry.name, { walls: [], reasons: new Set() });
    const group = groups.get(entry.name);
    group.walls.push(entry.wall_ms);
    for (const reason of reasonsOf(entry)) group.reasons.add(reason);
  }
  const sorted = [...groups].sort(
    (a, b) => b[1].walls.length - a[1].walls.length || Math.max(...b[1].walls) - Math.max(...a[1].walls),
  );
  const shown = areAllGroups ? sorted : sorted.slice(0, FEW_GROUPS);
  const hadFocus = byId('group-table').contains(document.activeElement) ? document.activeElement.textContent : null;
  const longest = Math.max(...entries.map((entry) => entry.wall_ms));
  const head = el(
    'tr',
    {},
    el('th', { scope: 'col' }, 'Span'),
    el('th', { scope: 'col', class: 'strips' }, `Wall time of each, to ${lasted(longest)}`),
    ...['Kept', 'Median', 'Longest'].map((text) => el('th', { scope: 'col', class: 'number' }, text)),
    el('th', { scope: 'col', class: 'reasons' }, 'Reasons'),
  );
  const table = el(
    'table',
    {},
    el('thead', {}, head),
    el('tbody', {}, ...shown.map((group) => groupRow(group, longest))),
  );
  byId('group-table').replaceChildren(table);
  if (sorted.length > FEW_GROUPS) {
    byId('group-table').append(
      button(areAllGroups ? `Show ${FEW_GROUPS}` : `Show all ${sorted.length}`, () => {
        areAllGroups = !areAllGroups;
        showGroups();
        byId('group-table').lastChild.focus();
      }),
    );
  }
  if (hadFocus !== null)
    [...byId('group-table').querySelectorAll('button')].find((one) => one.textContent === hadFocus)?.focus();
}
function groupRow([name, { walls, reasons }], longest) {
  const sorted = walls.toSorted((a, b) => a - b),
    isChosen = view.name === name;
  const pick = button(clean(name), () => change({ name: isChosen ? '' : name }), {
    class: 'code',
    'aria-pressed': isChosen,
    title: clean(name),
  });
  const cells = [grouped(walls.length), lasted(sorted[Math.floor((sorted.length - 1) / 2)]), lasted(sorted.at(-1))];
  return el(
    'tr',
    {},
    el('td', {}, pick),
    el('td', { class: 'strips' }, strip(walls, longest)),
    ...cells.map((text) => el('td', { class: 'number' }, text)),
    el('td', { class: 'reasons' }, [...reasons].join(', ')),
  );
}

/** A tick for each of the newest on a common axis. */
function strip(walls, longest) {
  const ticks = el('span', { class: 'strip', 'aria-hidden': 'true' });
  for (const ms of walls.slice(0, 200)) {
    const tick = el('i');
    tick.style.left = `${(ms / longest) * 100}%`;
    ticks.append(tick);
  }
  return ticks;
}

function showControls() {
  const reasons = new Map();
  for (const entry of entries)
    for (const reason of reasonsOf(entry)) reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
  if (view.reason !== '' && !reasons.has(view.reason)) reasons.set(view.reason, 0);
  const option = (value, text) => el('option', { value }, text);
  byId('reason').replaceChildren(
    option('', 'All reasons'),
    ...[...reasons].map(([reason, number]) => option(reason, `${reason} (${number})`)),
  );
  byId('reason').value = view.reason;
  byId('sort').replaceChildren(
    ...shownColumns().filter(([, , valueOf]) => valueOf).flatMap(([name, title]) => [
      option(`${name} down`, `${title} ↓`),
      option(`${name} up`, `${title} ↑`),
    ]),
  );
  byId('sort').value = `${view.sort} ${view.isDescending ? 'down' : 'up'}`;
  if (byId('filter').value !== view.text) byId('filter').value = view.text;
  byId('chip').hidden = view.name === '';
  byId('chip').replaceChildren(
    button(`Only ${clean(view.name)} × clear`, () => {
      change({ name: '' });
      byId('filter').focus();
    }),
  );
}
function showPages(pages) {
  const turn = (step) => {
    view.page += step;
    showList();
    byId('list').scrollIntoView();
    const [back, next] = byId('pages').querySelectorAll('button');
    (step < 0 && !back.disabled ? back : next.disabled ? back : next).focus({ preventScroll: true });
  };
  byId('pages').hidden = pages === 1;
  const back = button('Previous', () => turn(-1)),
    next = button('Next', () => turn(1));
  back.disabled = view.page === 0;
  next.disabled = view.page === pages - 1;
  byId('pages').replaceChildren(back, `Page ${view.page + 1} of ${pages}`, next);
}
function change(values) {
  Object.assign(view, { page: 0 }, values);
  showList();
  say(`${byId('shown').textContent} kept spans`);
}

// --- the address

function writeAddress() {
  const values = new URLSearchParams();
  if (view.text) values.set('q', view.text);
  if (view.reason) values.set('reason', view.reason);
  if (view.name) values.set('name', view.name);
  if (view.sort !== 'time' || !view.isDescending) values.set('sort', `${view.isDescending ? '-' : ''}${view.sort}`);
  if (view.page > 0) values.set('page', view.page + 1);
  const fragment = `#${values}`;
  if (fragment !== (location.hash || '#')) history.replaceState(null, '', fragment);
}
function readAddress() {
  const values = new URLSearchParams(location.hash.slice(1)),
    sort = values.get('sort') ?? '-time';
  view.text = values.get('q') ?? '';
  view.reason = values.get('reason') ?? '';
  view.name = values.get('name') ?? '';
  view.isDescending = sort.startsWith('-');
  view.sort = column(sort.replace('-', '')) ? sort.replace('-', '') : 'time';
  view.page = Math.max(0, (Number.parseInt(values.get('page') ?? '1', 10) || 1) - 1);
}

// --- the process

const MOST_MINUTES = 10;
async function showProcess() {
  const [rate, files] = await Promise.all([
    ask('continuous').then((response) => response.text()),
    ask('process').then((response) => response.json()),
  ]);
  const isOn = rate !== 'off';
  byId('rate').textContent = isOn ? `${clean(rate)} samples per second of CPU time` : 'off';
  byId('continue').textContent = isOn ? 'Turn off' : 'Turn on';
  byId('continue').hidden = false;
  byId('continue').onclick = async () => {
    try {
      await ask('continuous', { method: 'PUT', body: isOn ? 'off' : 'on' });
      await showProcess();
      say(`Continuous profile: ${byId('rate').textContent}`);
    } catch (error) {
      problem(`Cannot change the continuous profile: ${error.message}`);
    }
  };
  const minutes = files.filter((file) => file.name.endsWith('.pb.gz')).slice(0, MOST_MINUTES);
  const link = (file) => {
    const href = `${base}process/${encodeURIComponent(file.name)}`;
    return el('a', { href, download: '' }, clock(new Date(file.time)));
  };
  byId('minutes').replaceChildren(...(minutes.length ? ['The last ones: '] : []), ...minutes.flatMap((file) => [link(file), ' ']));
}

// --- all together

function listenToState() {
  byId('enabled').addEventListener('click', toggle);
  byId('edit').addEventListener('click', () => (byId('editor').hidden ? openEditor(server.rules) : closeEditor()));
  byId('cancel').addEventListener('click', closeEditor);
  byId('editor').addEventListener('submit', saveRules);
  byId('new-rules').addEventListener('input', () => rulesError(''));
  byId('new-rules').addEventListener('keydown', (event) => {
    if (event.key === 'Escape') closeEditor();
    else if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) byId('editor').requestSubmit();
  });
  byId('lower').addEventListener('click', () => openEditor('10ms|error'));
}
function listenToList() {
  byId('fresh').addEventListener('click', takeWaiting);
  byId('filter').addEventListener('input', (event) => change({ text: event.target.value }));
  byId('reason').addEventListener('change', (event) => change({ reason: event.target.value }));
  byId('sort').addEventListener('change', (event) => {
    const [sort, direction] = event.target.value.split(' ');
    change({ sort, isDescending: direction === 'down' });
  });
  byId('clear').addEventListener('click', () => {
    change({ text: '', reason: '', name: '' });
    byId('filter').focus();
  });
}
function listenToWindow() {
  addEventListener('hashchange', () => {
    readAddress();
    showAll();
  });
  addEventListener('keydown', (event) => {
    if (
      event.key !== '/' ||
      /^(INPUT|TEXTAREA)$/.test(event.target.tagName) ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey
    )
      return;
    event.preventDefault();
    byId('filter').focus();
  });
  setInterval(() => {
    if (!document.hidden) refresh();
  }, REFRESH_MS);
  document.addEventListener('visibilitychange', () => {
    if (!document.hidden) refresh();
  });
}

// --- what is typical of routes, and a route in two periods

const MOST_ROWS = 20;
/** What a kind of time is called, and the look of its part of a bar. */
const KINDS = {
  on_cpu: ['on-CPU', 'on'],
  off_cpu: ['blocked', 'off'],
  runnable: ['waiting for a CPU', 'off'],
  await: ['await', 'await'],
  scheduling_delay: ['scheduling delay', 'delay'],
  unexplained_idle: ['unexplained idle', 'rest'],
  other_spans: ['other spans on its stack', 'rest'],
  unmeasured: ['not measured', 'on'],
};
const pathOf = (path, values) => `${base}${path}?${new URLSearchParams(values)}`;
const link = (href, ...text) => el('a', { href }, ...text);
const orDash = (ms) => (ms === null ? '–' : lasted(ms));
const growth = ({ was_ms, is_ms }) => signed((is_ms / was_ms - 1) * 100, (percent) => `${percent.toFixed(0)} %`);
const numberCell = (...children) => el('td', { class: 'number' }, ...children);
const explained = () =>
  el(
    'p',
    { class: 'hint' },
    'Of this hour and the one before, from reference spans, which were chosen at random when they were created; the ' +
      'number of requests is estimated from their probabilities. Percentiles need 10, 100 and 500 of them.',
  );

/** A table. Columns of numbers begin with `#`. */
function tableOf(caption, heads, rows) {
  const head = heads.map((text) =>
    el('th', { scope: 'col', ...(text.startsWith('#') ? { class: 'number' } : {}) }, text.replace('#', '')),
  );
  // A narrow page has no heads.
  for (const row of rows) for (const [at, cell] of [...row.children].entries()) cell.dataset.head = heads[at].replace('#', '');
  const above = caption === '' ? [] : [el('caption', {}, caption)];
  return el('table', {}, ...above, el('thead', {}, el('tr', {}, ...head)), el('tbody', {}, ...rows));
}
const wide = (label, ...children) =>
  el('section', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': label }, ...children);

/** A bar of the parts of a time, for those who see it: what it shows is in the text below. */
function bar(split) {
  const parts = Object.entries(split).sort((a, b) => b[1] - a[1]),
    all = parts.reduce((sum, [, ms]) => sum + ms, 0);
  const shape = (tag, attributes) => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const looks = { class: 'parts', viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' };
  const picture = shape('svg', looks);
  let x = 0;
  for (const [kind, ms] of parts) {
    const width = all > 0 ? (ms / all) * 100 : 0;
    picture.append(shape('rect', { class: KINDS[kind]?.[1] ?? 'rest', x: x.toFixed(2), width: width.toFixed(2), height: 10 }));
    x += width;
  }
  const words = parts
    .filter(([, ms]) => ms >= all / 1000)
    .map(([kind, ms]) => `${KINDS[kind]?.[0] ?? clean(kind)} ${lasted(ms)}`);
  return [picture, el('small', {}, words.join(' + '))];
}

function routesPage(routes) {
  if (routes.length === 0) {
    const off = el('code', {}, 'TRACING_PROFILING_REFERENCES=off');
    const why = el('p', {}, 'No reference span has closed yet. ', off, ' turns them off, and so do rules that keep nothing.');
    return [explained(), el('section', {}, why)];
  }
  const row = (route) => {
    const name = el('a', { class: 'code', href: pathOf('routes', { route: route.name }) }, clean(route.name));
    const slower = route.drift ? [' ', el('span', { class: 'badge' }, growth(route.drift))] : [];
    return el(
      'tr',
      {},
      el('td', {}, name, ...slower),
      numberCell(`~${grouped(route.requests_estimated)}`),
      ...[route.p50_ms, route.p95_ms, route.p99_ms, route.mean_wall_ms].map((ms) => numberCell(orDash(ms))),
      el('td', {}, ...bar(route.mean_wall_split_ms)),
      numberCell(grouped(route.references)),
    );
  };
  const heads = ['Route', '#Requests', '#p50', '#p95', '#p99', '#Mean', 'Where the time goes', '#References'];
  return [explained(), wide('Routes', tableOf('', heads, routes.map(row)))];
}

function routePage(route) {
  byId('title').textContent = document.title = clean(route.name);
  const { drift, kept } = route;
  const since = drift?.since.startsWith('version') ? `with ${clean(drift.since)}` : 'in the same hour of the day before';
  const slower = drift
    ? [
        `It has become slower: ${lasted(drift.is_ms)} on average in the hour from ${clean(drift.hour)}, ` +
          `and ${lasted(drift.was_ms)} ${since} (${growth(drift)}).`,
      ].map((text) => el('p', { class: 'problem' }, text))
    : [];
  const figures = {
    'requests, estimated': grouped(route.requests_estimated),
    references: grouped(route.references),
    p50: orDash(route.p50_ms),
    p95: orDash(route.p95_ms),
    p99: orDash(route.p99_ms),
    mean: lasted(route.mean_wall_ms),
  };
  const figure = ([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value));
  const profile = (format) => pathOf('routes/profile', { route: route.name, format });
  const has = document.querySelector('meta[name=formats]').content.split(' ');
  const links = [
    el('li', {}, link(profile('html'), 'Its flame graph'), ', the mean of the last references'),
    el('li', {}, link(profile('pprof'), 'For ', el('code', {}, 'go tool pprof')), ': ', el('code', {}, '-diff_base'), ' takes it, with the file of a kept span'),
    el('li', {}, link(profile('otlp'), 'As OTLP')),
    el('li', {}, link(pathOf('compare', { route: route.name }), 'This version against the one before'), ', or this hour against the day before'),
  ].filter((_, at) => (at !== 1 || has.includes('pprof')) && (at !== 2 || has.includes('otlp')));
  const report = ({ file, reasons }) => (file ? link(fileUrl(file), clean(reasons)) : 'no report');
  const row = (one) =>
    el('tr', {}, el('td', {}, el('time', { datetime: one.time }, clean(one.time))), numberCell(lasted(one.wall_ms)), el('td', {}, report(one)));
  return [
    explained(),
    ...slower,
    el('section', {}, el('dl', { class: 'figures' }, ...Object.entries(figures).map(figure)), ...bar(route.mean_wall_split_ms)),
    el('section', {}, el('h2', {}, 'The typical request'), el('ul', {}, ...links)),
    el(
      'section',
      {},
      el('h2', {}, 'The slowest kept ones'),
      kept.length === 0
        ? el('p', {}, 'None of the last 1,000 kept spans is of this route.')
        : tableOf('', ['Begun', '#Wall time', 'Report'], kept.map(row)),
    ),
  ];
}

/** The name of a set of hours. */
const periodOf = ({ version, hour }) =>
  version !== undefined
    ? `version ${clean(version)}`
    : hour !== undefined
      ? `the hour from ${clean(hour)}`
      : 'this hour and the one before';
const inUnit = (unit) => (value) =>
  unit === 'bytes' ? `${(value / 1e3).toFixed(0)} KB` : unit === 'count' ? grouped(value) : lasted(value);
/** What a row is of, and where that is. */
function placeOf(row) {
  const of = row.child ?? 'other',
    named = { allocated_bytes: 'allocated', child_spans: `${clean(of)} spans`, child_time: `wall time of ${clean(of)} spans` };
  if (named[row.what]) return [named[row.what], ''];
  const onOthers = row.what === 'other_threads' ? ' on other threads' : '';
  if (row.function !== undefined)
    return [clean(row.function), ` ${clean(row.file)}${row.line > 0 ? `:${row.line}` : ''}${onOthers}`];
  if (row.others) return ['in other functions', onOthers];
  const isWhole = ['runnable', 'unexplained_idle', 'other_spans', 'unmeasured'].includes(row.what);
  return [isWhole ? '' : 'in no known function', onOthers];
}
const isSure = (interval) => interval !== null && (interval[0] > 0 || interval[1] < 0);
function differenceRow(row) {
  const shown = inUnit(row.unit),
    [name, place] = placeOf(row),
    extra = signed(row.extra, shown);
  return el(
    'tr',
    {},
    el('td', {}, KINDS[row.what]?.[0] ?? ''),
    el('td', {}, el('span', { class: 'code' }, name), el('small', {}, place)),
    numberCell(isSure(row.interval) ? el('b', {}, extra) : extra),
    numberCell(row.interval ? row.interval.map((end) => signed(end, shown)).join(' and ') : '–'),
    numberCell(shown(row.before)),
    numberCell(shown(row.after)),
  );
}

function comparePage({ route, before, after, wall_ms: wall, rows, beside, versions }) {
  byId('title').textContent = document.title = clean(route);
  const sure = !wall.interval
    ? ' Fewer than ten reference spans: whether the difference is chance is not known.'
    : isSure(wall.interval)
      ? ''
      : ' The difference can be chance.';
  const text =
    `The mean request takes ${lasted(wall.after)} in ${periodOf(after)} (${after.references} references), and took ` +
    `${lasted(wall.before)} in ${periodOf(before)} (${before.references}): ${signed(wall.extra, lasted)}.${sure}`;
  const heads = ['Kind', 'In', '#Difference', '#Between', '#Before', '#After'];
  const rest = rows.slice(MOST_ROWS).reduce((sum, row) => sum + row.extra, 0);
  const further = el('tr', {}, el('td'), el('td', {}, `${rows.length - MOST_ROWS} further rows`), numberCell(signed(rest, lasted)));
  const all = [...rows.slice(0, MOST_ROWS).map(differenceRow), ...(rows.length > MOST_ROWS ? [further] : [])];
  const caption = 'Where the difference is. The rows add up to it; each interval has a confidence of 95 %.';
  const changed = beside.filter((row) => row.extra !== 0).slice(0, MOST_ROWS);
  const other = (version) => el('li', {}, link(pathOf('compare', { route, before: version }), clean(version)));
  return [
    el('p', {}, text),
    wide('Differences', tableOf(caption, heads, all)),
    ...(changed.length > 0
      ? [wide('Beside it', tableOf('Beside the wall time', heads, changed.map(differenceRow)))]
      : []),
    ...(versions.length > 0
      ? [el('section', {}, el('h2', {}, 'Against another version'), el('ul', {}, ...versions.map(other)))]
      : []),
  ];
}

async function showTypical() {
  const isComparison = location.pathname.endsWith('/compare'),
    isOne = new URLSearchParams(location.search).has('route');
  try {
    const response = await ask(`${isComparison ? 'compare' : 'routes'}${location.search}`);
    const answer = await response.json();
    if (isOne && !isComparison && answer.routes.length === 0) throw new Error('nothing is known of this route');
    const page = isComparison ? comparePage(answer) : isOne ? routePage(answer.routes[0]) : routesPage(answer.routes);
    byId('content').replaceChildren(...page);
  } catch (error) {
    problem(error.message);
  }
}

if (document.body.className === 'typical') {
  showTypical().then(() => performance.mark('index-ready'));
} else {
  readAddress();
  listenToState();
  listenToList();
  listenToWindow();
  refresh().then(() => performance.mark('index-ready'));
}
