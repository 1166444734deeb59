// Reports with awaits, scheduling delays and unexplained idle time, and of such a request against typical ones, made of
// another report's page.

import zlib from "node:zlib";

const MS = 1e6;
/** Whose code a function is. */
const OWN = 0,
    DEPENDENCY = 2;
const DATA = /(<script type="text\/plain" id="data">)[^<]*/;

/** The report with other data: `change` gets the present data and returns the new. */
export function withData(html, change) {
    const [, packed] = /id="data">([^<]*)/.exec(html);
    const data = JSON.parse(zlib.gunzipSync(Buffer.from(packed, "base64")));
    const changed = zlib.gzipSync(JSON.stringify(change(data))).toString("base64");
    return html.replace(DATA, (_, tag) => tag + changed);
}

/**
 * A request of 2.06 s: 20 ms on-CPU, an await of 1.18 s, 300 ms in which another request blocks the worker, 10 ms
 * on-CPU, a hundred awaits of 5 ms in child spans, 50 ms blocked. Then a span of 140 ms without a wrapper, of which
 * 10 ms are on-CPU.
 */
export const awaits = (data) => build(data, () => ({}));

/** The same request against 200 typical ones of 160 ms on average. */
export const compared = (data) => build(data, (tables, stacks) => comparison(tables, stacks, 200));
/** Against too few. */
export const few = (data) => build(data, (tables, stacks) => comparison(tables, stacks, 4));
/** With names that try to run a script or to break the page. */
export const hostileNames = (data) => {
    const { compared: of, ...rest } = compared(data),
        attack = '<img src=x onerror="window.hacked=1">\u202e' + "x".repeat(3000);
    const bad = (text) => text && attack + text;
    const hostile = (row) => ({ ...row, function: bad(row.function), child: bad(row.child), file: row.file && attack });
    return {
        ...rest,
        compared: { ...of, cohort: attack, rows: of.rows.map(hostile), beside: of.beside.map(hostile) },
        strings: rest.strings.map((text) => (text.startsWith("shop::") ? attack + text : text)),
    };
};

function comparison(tables, { poll, sleep, query, fetch }, references) {
    tables.typical(2, sleep, 60);
    tables.typical(2, query, 70);
    tables.typical(1, [...poll, ["shop::cart::Cart::lock", "shop/src/cart.rs", 8]], 5, "futex");
    tables.typical(0, [...fetch, ["shop::upstream::parse", "shop/src/upstream.rs", 55]], 1);
    tables.typical(0, [...poll, ["shop::cache::get", "shop/src/cache.rs", 3]], 5);
    tables.typical(0, [...poll, ["shop::upstream::prepare", "shop/src/upstream.rs", 12]], 19);
    const value = (value, typical, low, high) => ({
        ...{ after: value, before: typical, extra: value - typical },
        interval: references >= 10 ? [low, high] : null,
    });
    const time = (words, name, place, numbers, present_in, as_extreme_in) => {
        const [file, line] = place.split(":");
        const of = Math.min(present_in, references);
        const at = name === "" ? {} : { function: name, file, line: Number(line) || undefined };
        const all = { words, ...at, others: false, unit: "ns", present_in: of, as_extreme_in };
        return { ...all, ...value(...numbers.map((ms) => ms * MS)) };
    };
    const rows = [
        time("await", "shop::upstream::fetch", "shop/src/upstream.rs:41", [1180, 60, 1090, 1150], 200, 0),
        time("await", "shop::db::rows", "shop/src/db.rs:77", [500, 70, 400, 460], 190, 1),
        time("scheduling delay", "", "", [300, 0, 280, 320], 3, 0),
        time("blocked", "shop::cart::Cart::lock", "shop/src/cart.rs:8", [50, 5, -5, 95], 20, 4),
        time("on-CPU", "shop::upstream::parse", "shop/src/upstream.rs:0", [10, 1, 2, 16], 200, 5),
        time("on-CPU", "shop::cache::get", "shop/src/cache.rs:0", [0, 5, -6, -4], 180, 20),
        time("on-CPU", "shop::upstream::prepare", "shop/src/upstream.rs:0", [20, 19, -3, 5], 200, 80),
    ];
    const other = (words, name, unit, numbers, as_extreme_in) => ({
        ...{ words, others: false, unit, present_in: references, as_extreme_in },
        ...(name === "" ? {} : words.includes("child") ? { child: name } : { function: name, file: "" }),
        ...value(...numbers),
    });
    const beside = [
        other("on-CPU on other threads", "shop::prefetch", "ns", [0, 12 * MS, -14 * MS, -10 * MS], 3),
        other("allocated", "", "bytes", [25e6, 2e6, 22e6, 24e6], 0),
        other("child spans", "query", "count", [100, 14, 80, 92], 0),
        other("time in child spans", "query", "ns", [500 * MS, 70 * MS, 400 * MS, 460 * MS], 0),
    ];
    return {
        typical: tables.typicalColumns(),
        compared: {
            ...{ cohort: "GET /upstream", kept: 0, references, median: 150 * MS, rows, beside },
            ...(references >= 10 ? { times: 14 } : {}),
            wall: value(...[2060, 160, 1880, 1920].map((ms) => ms * MS)),
        },
    };
}

function build(data, more) {
    const tables = new Tables();
    const [request, audit] = [tables.span("GET /upstream", -1, 0, 2060, 0), tables.span("audit", -1, 2060, 2200, 1)];
    const poll = [
        [
            "tokio::runtime::scheduler::multi_thread::worker::run",
            "/cargo/tokio-1.50.0/src/runtime/scheduler/worker.rs",
            512,
        ],
        ["tokio::runtime::task::raw::poll", "/cargo/tokio-1.50.0/src/runtime/task/raw.rs", 271],
        [
            "<tracing_profiling::Profiled<F> as core::future::Future>::poll",
            "/cargo/tracing-profiling-1.0.0/src/awaits.rs",
            90,
        ],
        ["shop::http::handle::{{closure}}", "shop/src/http.rs", 20],
    ];
    const fetch = [...poll, ["shop::upstream::fetch::{{closure}}", "shop/src/upstream.rs", 41]];
    const sleep = [
        ...fetch,
        ["<tokio::time::Sleep as core::future::Future>::poll", "/cargo/tokio-1.50.0/src/time/sleep.rs", 448],
    ];
    const rows = [...poll, ["shop::db::rows::{{closure}}", "shop/src/db.rs", 77]];
    const query = [
        ...rows,
        ["sqlx::query::Query<DB,A>::fetch_one::{{closure}}", "/cargo/sqlx-0.8.6/src/query.rs", 130],
        [
            "<futures_channel::oneshot::Receiver<T> as core::future::Future>::poll",
            "/cargo/futures-0.3.31/src/oneshot.rs",
            9,
        ],
    ];
    const run = (span, stack, from, ms) => {
        for (let at = from + 1; at <= from + ms; at++) tables.sample(0, span, stack, at, 1, 0);
    };
    run(request, [...poll, ["shop::upstream::prepare", "shop/src/upstream.rs", 12]], 0, 20);
    tables.sample(2, request, sleep, 20, 1180);
    tables.sample(3, request, sleep, 1200, 300, -1, "report");
    run(request, [...fetch, ["shop::upstream::parse", "shop/src/upstream.rs", 55]], 1500, 10);
    for (let number = 0; number < 100; number++) {
        const from = 1510 + 5 * number,
            span = tables.span("query", request, from, from + 5, -1);
        if (number % 2 === 1) tables.sample(2, span, query, from, number % 4 === 1 ? 9.999998 : 10.000002);
    }
    tables.sample(
        1,
        request,
        [...poll, ["shop::cart::Cart::lock", "shop/src/cart.rs", 8]],
        2010,
        50,
        0,
        "futex 0x7f01",
    );
    run(audit, [["shop::audit::write::{{closure}}", "shop/src/audit.rs", 5]], 2060, 10);
    const further = more(tables, { poll, sleep, query, fetch });
    const known = { on_cpu_error: 0, cpu_known: true, after_last_exit: 0, unsampled: 0, open: false, topmost: true };
    const ids = { trace_id: "0af7651916cd43dd8448eb211c80319c", span_id: "b7ad6b7169203331", target: "shop::http" };
    const times = (start, wall, on_cpu, off_cpu, awaiting, delay, idle) => ({
        ...{
            start: start * MS,
            wall: wall * MS,
            on_cpu: on_cpu * MS,
            subtree_on_cpu: on_cpu * MS,
            off_cpu: off_cpu * MS,
        },
        ...{ await: awaiting * MS, scheduling_delay: delay * MS, idle: idle * MS, busy: (on_cpu + off_cpu) * MS },
        beside: [],
        split: [
            [["on_cpu", "on-CPU"], on_cpu * MS],
            [["off_cpu", "blocked"], off_cpu * MS],
            [["await", "await"], awaiting * MS],
            [["scheduling_delay", "scheduling delay"], delay * MS],
            [["unexplained_idle", "unexplained idle"], (idle - awaiting - delay) * MS],
        ].filter(([, ns]) => ns > 0),
    });
    const kept = [
        { name: "GET /upstream", span: request, ...times(0, 2060, 30, 50, 1680, 300, 1980) },
        { name: "audit", span: audit, ...times(2060, 140, 10, 0, 0, 0, 130) },
    ];
    return {
        ...data,
        ...{
            name: "GET /upstream",
            title: "GET /upstream",
            headline: "",
            duration: 2200 * MS,
            losses: [],
            notes: [],
            attributes: [],
        },
        rule: "1s",
        kept: kept.map((span) => ({ ...known, ...ids, fields: [], reasons: "latency", rule: "1s", ...span })),
        ...tables.columns(),
        threads: { name: [tables.text("tokio-rt-worker")], tid: [42] },
        ...further,
        strings: tables.strings,
    };
}

/** The same request in an earlier release, without awaits. */
export function older(data) {
    const { kept, samples, ...same } = awaits(data);
    for (const span of kept) {
        delete span.await;
        delete span.scheduling_delay;
        span.split = [[["unexplained_idle", "unexplained idle"], span.idle]];
    }
    let now = 0,
        last = 0;
    const rows = samples.kind.flatMap((kind, i) => {
        now += samples.time[i];
        if (kind > 1) return [];
        const time = now - last;
        last = now;
        return [{ ...Object.fromEntries(Object.keys(samples).map((name) => [name, samples[name][i]])), time }];
    });
    return { ...same, kept, samples: columnsOf(rows) };
}
const columnsOf = (rows) =>
    Object.fromEntries(Object.keys(rows[0]).map((name) => [name, rows.map((row) => row[name])]));

class Tables {
    strings = [];
    functions = [];
    frames = [];
    stacks = [];
    leaves = [];
    spans = [];
    samples = [];
    typicalSamples = [];

    text(text) {
        return place(this.strings, text);
    }
    span(name, parent, from, to, kept) {
        return this.spans.push([this.text(name), parent, from * MS, to * MS, kept, this.text("")]) - 1;
    }
    /** What was going on at the end of the stack has the number of the kind of sample. */
    sample(kind, span, stack, at, ms, thread = -1, leafText = "") {
        const [node, leaf] = this.place(kind, stack, leafText);
        this.samples.push([node, span, thread, kind, at * MS, Math.round(ms * MS), leaf]);
    }
    /** What a typical span has of a stack. */
    typical(kind, stack, ms, leafText = "") {
        const [node, leaf] = this.place(kind, stack, leafText);
        this.typicalSamples.push([node, leaf, kind, ms * MS]);
    }
    typicalColumns() {
        return columns(["stack", "leaf", "kind", "weight"], this.typicalSamples);
    }
    place(kind, stack, leafText) {
        let node = -1;
        for (const [name, file, line] of stack) {
            const fn = place(this.functions, [this.text(name), this.text(file), /^shop\b/.test(file) ? OWN : DEPENDENCY]);
            node = place(this.stacks, [node, place(this.frames, [fn, line, 0, 0])]);
        }
        return [node, place(this.leaves, [kind, this.text(leafText)])];
    }
    columns() {
        this.samples.sort((a, b) => a[4] - b[4]);
        const differences = this.samples.map(([...row], index) => {
            row[4] -= this.samples[index - 1]?.[4] ?? 0;
            return row;
        });
        return {
            functions: columns(["name", "file", "origin"], this.functions),
            frames: columns(["function", "line", "kind", "inferred"], this.frames),
            stacks: columns(["parent", "frame"], this.stacks),
            spans: columns(["name", "parent", "start", "end", "kept", "span_id"], this.spans),
            leaves: columns(["kind", "text"], this.leaves),
            samples: columns(["stack", "span", "thread", "kind", "time", "weight", "leaf"], differences),
        };
    }
}
const columns = (names, rows) =>
    Object.fromEntries(names.map((name, column) => [name, rows.map((row) => row[column])]));
function place(list, entry) {
    const known = list.findIndex((other) => String(other) === String(entry));
    return known < 0 ? list.push(entry) - 1 : known;
}
