// The page of a run: charts of its saves over steps or time, a table of them, and what is there now.
"use strict";
{
  const { el, data } = H, main = document.getElementById("main"), c = data.columns, n = c.step.length;
  const indices = c.step.map((_, i) => i);
  const some = (name) => c[name].some((v) => v !== null && v !== undefined && v !== 0);
  const perSecond = (rate) => (rate === null || rate === undefined ? "–" : `${H.bytes(Math.round(rate))}/s`);

  // ---- starts: stretches of saves that one start of training made

  const starts = [];
  indices.forEach((i) => {
    const last = starts.at(-1);
    if (last && last.id === c.start[i] && last.ranks === c.ranks[i]) { last.end = i; return; }
    starts.push({ id: c.start[i], ranks: c.ranks[i], first: i, end: i, journaled: data.journaled[c.start[i]] });
  });
  const breaks = new Array(n).fill(false);
  starts.forEach((s) => { breaks[s.first] = true; });
  const restarts = new Set(starts.filter((s) => s.journaled).map((s) => s.id)).size;

  // ---- what is there now

  const there = new Map(data.steps.map(([step, name, kind, words, fault, lost]) => [step, { name, kind, words, fault, lost }]));
  const newest = new Map(indices.filter((i) => c.outcome[i] === "saved").map((i) => [c.step[i], i])); // of a step made twice, the later one
  const health = (i) => {
    if (c.outcome[i] !== "saved") return null;
    if (newest.get(c.step[i]) !== i) return { kind: "", words: "replaced", fault: "the step was saved again", lost: [] };
    return there.get(c.step[i]) ?? { kind: "", words: "swept", fault: "", lost: [] };
  };
  const KIND = { saved: "good", failed: "bad", skipped: "warn" };

  // ---- header and facts

  const counts = { saved: 0, failed: 0, skipped: 0 };
  c.outcome.forEach((o) => { counts[o] += 1; });
  const lastSaved = indices.filter((i) => c.outcome[i] === "saved").at(-1);
  const median = (values) => { const v = values.filter((x) => x !== null && x !== undefined).sort((a, b) => a - b); return v.length ? v[v.length >> 1] : null; };
  const rated = indices.filter((i) => c.metric[i] !== null && c.outcome[i] === "saved");
  const best = rated.reduce((b, i) => (b === null || (data.mode === "max" ? c.metric[i] > c.metric[b] : c.metric[i] < c.metric[b]) ? i : b), null);
  const STATE = { running: ["good", "running"], saving: ["good", "saving"], ended: ["", "ended"], silent: ["bad", "silent"], unknown: ["", "no journal"] };
  const bad = data.steps.filter((s) => s[2] === "bad"), ago = (s) => (s === null || s === undefined ? "" : `${s < 120 ? `${Math.round(s)} s` : H.seconds(s)} ago`);
  H.header(data.title, data.path, el("span", { class: "muted small" }, `as of ${H.time(data.at)}`));
  const facts = H.facts([
    ["State", H.badge(...STATE[data.state]), data.heard === null ? " " : `heard of ${ago(data.heard)}`],
    ["Step", data.step === null ? "–" : H.count(data.step), lastSaved === undefined ? "none saved" : `${H.count(c.step[lastSaved])} saved ${ago(Math.max(0, data.at - c.began[lastSaved]))}`],
    ["Saves", H.count(counts.saved), [counts.failed ? `${H.count(counts.failed)} failed` : "none failed", counts.skipped ? `, ${H.count(counts.skipped)} skipped` : ""].join("")],
    ["There now", H.plural(there.size, "step"), bad.length ? `${H.count(bad.length)} damaged` : data.backlog ? `${H.count(data.backlog)} to be uploaded` : "none damaged"],
    ["A save takes", H.seconds(median(c.seconds)), `training waits ${H.seconds(median(c.stall))}`],
    restarts > 1 ? ["Starts", H.count(restarts), `on ${[...new Set(starts.map((s) => s.ranks))].map(H.count).join(", ")} ranks`] : ["Ranks", n ? H.count(c.ranks[n - 1]) : "–", "saved it last"],
    best === null ? null : ["Best metric", H.number(c.metric[best]), `at step ${H.count(c.step[best])}`],
  ]);

  // ---- charts

  const line = (name, values, colour) => ({ name, values, colour, kind: "line" });
  const describe = (i) => {
    const row = (name, value) => (value === "–" ? null : el("div", null, `${name}: ${value}`));
    const state = health(i);
    return [
      el("b", null, `Step ${H.count(c.step[i])}`), el("div", { class: KIND[c.outcome[i]] }, c.outcome[i] + (state ? ` · ${state.words}` : "")),
      row("begun", H.time(c.began[i])), row("metric", H.number(c.metric[i])), row("took", H.seconds(c.seconds[i])), row("training waited", H.seconds(c.stall[i])),
      row("size", H.bytes(c.bytes[i])), c.written[i] !== c.bytes[i] ? row("written", H.bytes(c.written[i])) : null, row("throughput", perSecond(c.rate[i])),
      row("a step took", H.seconds(c.step_seconds[i])), row("ranks", H.count(c.ranks[i])), c.backlog[i] === null ? null : row("to be uploaded", H.plural(c.backlog[i], "step")),
      data.errors[i] && c.outcome[i] === "failed" ? el("div", { class: "bad" }, data.errors[i]) : null,
    ];
  };
  const zoomed = el("button", { type: "button", class: "plain", id: "reset", hidden: true, click: () => charts.reset() }, "Show all");
  const charts = H.linked({ n, describe, breaks, picked: (i) => open(i), moved: (is) => { zoomed.hidden = !is; } });
  const clock = (v, by) => {
    const when = new Date(v * 1000), two = (x) => String(x).padStart(2, "0");
    const hours = `${two(when.getHours())}:${two(when.getMinutes())}`;
    const day = when.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return by >= 86400 ? day : by >= 3600 * 6 || by === 0 ? `${day} ${hours}` : by >= 60 ? hours : `${hours}:${two(when.getSeconds())}`;
  };
  /** Round times of the day in the zone of whoever looks: every minute, hour, day, … */
  const times = (low, high, most) => {
    const EACH = [1, 5, 15, 30, 60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000];
    const by = EACH.find((s) => (high - low) / s <= most) ?? (high - low) / most, off = new Date(low * 1000).getTimezoneOffset() * 60, marks = [];
    for (let v = Math.ceil((low - off) / by) * by + off; v <= high; v += by) marks.push(v);
    return marks;
  };
  /** Steps are whole: between 1 and 2 there is none to name. */
  const whole = (low, high, n) => H.ticks(low, high, Math.min(n, Math.max(1, Math.floor(high - low)))).filter(Number.isInteger);
  const AXES = { step: [c.step, (v) => H.count(Math.round(v)), whole], time: [c.began, clock, times] };
  const axisOf = H.segmented("What charts go over", [["step", "steps"], ["time", "time"]], "step", (to) => charts.axis(...AXES[to]));

  /** Which start of training made what, on how many ranks; failures and what was skipped. */
  const strip = ({ context, X, height, left, right, range }) => {
    const [from, to] = [8, height - 18], axis = AXES[axisOf.querySelector("[aria-checked=true]").dataset.value][0];
    starts.forEach((s, k) => {
      const xs = [];
      for (let i = s.first; i <= s.end; i += 1) xs.push(axis[i]);
      const a = Math.max(left, X(Math.min(...xs.slice(0, 1), ...xs.slice(-1)))), b = Math.min(right, X(Math.max(...xs.slice(0, 1), ...xs.slice(-1))));
      if (b < left || a > right || Math.max(...xs.slice(-1), xs[0]) < range[0]) return;
      const fill = H.colour(k);
      context.fillStyle = fill;
      context.fillRect(a, from, Math.max(3, b - a), to - from);
      context.font = `600 11px ${H.family("--sans")}`;
      context.fillStyle = H.ink(fill);
      const words = [H.plural(s.ranks, "rank"), s.journaled && restarts > 1 ? `start ${s.id + 1 - data.journaled.slice(0, s.id).filter((t) => !t).length}` : null].filter(Boolean).join(" · ");
      if (context.measureText(words).width < b - a - 12) context.fillText(words, a + 7, (from + to) / 2 + 0.5);
    });
    indices.forEach((i) => {
      if (c.outcome[i] === "saved") return;
      const x = X(axis[i]);
      context.fillStyle = H.css(c.outcome[i] === "failed" ? "--bad" : "--warn");
      context.beginPath(); context.moveTo(x, to + 3); context.lineTo(x - 5, to + 12); context.lineTo(x + 5, to + 12); context.fill();
    });
  };
  const band = el("div", { id: "starts" });
  const panels = [];
  function panel(title, id, options, legend = null) {
    const host = el("div", { id });
    panels.push(H.card(title, legend, el("div", { class: "body" }, host)));
    charts.chart(host, { label: `${title} of each save`, ...options });
  }
  charts.chart(band, { label: "Starts, ranks and failures", height: 66, series: [], paint: strip });
  const PHASES = [["copied", c.staging, 0], ["written", c.writing, 1], ["committed", c.commit, 2]];
  const legendOf = (rows) => { const host = el("div"); const paint = () => H.empty(host, H.legend(rows.map(([name, , colour]) => [H.stroke(colour), name]))); H.onTheme(paint); paint(); return host; };
  if (some("metric")) panel("Metric", "metric", { y: H.number, zero: false, series: [line("metric", c.metric, 2)] });
  if (some("seconds")) panel("How long a save took", "seconds", { y: H.seconds, series: PHASES.map(([name, values, colour]) => ({ name, values, colour, kind: "stack" })) }, legendOf(PHASES));
  if (some("stall")) panel("What training waited", "stall", { y: H.seconds, series: [{ name: "stall", values: c.stall, colour: 6, kind: "bars" }] });
  if (some("rate")) panel("Throughput", "rate", { y: perSecond, series: [line("throughput", c.rate, 0)] });
  const SIZES = [["size", c.bytes, 0], ["written", c.written, 1]];
  const borrows = indices.some((i) => c.written[i] !== null && c.written[i] !== c.bytes[i]);
  panel("Size", "bytes", { y: H.bytes, series: (borrows ? SIZES : SIZES.slice(0, 1)).map((s) => line(...s)) }, borrows ? legendOf(SIZES) : null);
  if (some("step_seconds")) panel("How long a step took", "step_seconds", { y: H.seconds, series: [line("a step", c.step_seconds, 4)] });
  if (some("backlog")) panel("Steps to be uploaded", "backlog", { y: H.count, whole: true, series: [line("backlog", c.backlog, 3)] });

  // ---- table and details

  const detail = el("section", { class: "card panel", id: "detail", "aria-label": "A save", hidden: true });
  function open(i) {
    charts.show(i, true);
    table.select(i);
    const state = health(i), path = state && there.get(c.step[i]) ? `${data.path.replace(/\/$/, "")}/${there.get(c.step[i]).name}` : null;
    const total = c.seconds[i] ?? 0, parts = PHASES.filter(([, values]) => values[i]);
    const bar = el("div", { class: "phases" }, parts.map(([name, values, colour]) => {
      const piece = el("i", { style: { flex: String(Math.max(values[i] / (total || 1), 0.004)), background: H.stroke(colour) }, title: `${name} ${H.seconds(values[i])}` });
      return piece;
    }));
    H.empty(detail,
      el("div", { class: "head" }, el("h2", null, `Step ${H.count(c.step[i])}`), H.badge(KIND[c.outcome[i]], c.outcome[i]), state ? H.badge(state.kind, state.words) : null,
        el("button", { type: "button", class: "plain", "aria-label": "Close", click: shut }, "✕")),
      el("div", { class: "body" },
        H.pairs([
          ["begun", H.time(c.began[i])], ["ranks", H.count(c.ranks[i])], c.metric[i] === null ? null : ["metric", H.number(c.metric[i])],
          ["size", H.bytes(c.bytes[i])], borrows ? ["written", H.bytes(c.written[i])] : null, ["took", H.seconds(c.seconds[i])],
          ["training waited", H.seconds(c.stall[i])], ["throughput", perSecond(c.rate[i])], ["a step took", H.seconds(c.step_seconds[i])],
        ]),
        parts.length ? [el("h3", { class: "apart" }, "Where the time went"), bar, el("ul", { class: "list" }, parts.map(([name, values, colour]) => el("li", null, el("span", null, el("i", { class: "swatch", style: { background: H.stroke(colour) } }), name), el("span", null, H.seconds(values[i])))))] : null,
        data.errors[i] ? el("p", { class: `note apart ${c.outcome[i] === "failed" ? "bad" : "warn"}` }, data.errors[i]) : null,
        state?.fault ? el("p", { class: `note apart ${state.kind}` }, state.fault) : null,
        state?.lost.length ? el("p", { class: "note apart" }, `It has lost ${state.lost.join(", ")} since.`) : null,
        path ? [el("h3", { class: "apart" }, "Look into it"), el("code", { class: "command" }, `holdfast view ${/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replace(/'/g, "'\\''")}'`}`)] : null));
    detail.hidden = false;
    halves.classList.replace("column", "halves");
  }
  function shut() { detail.hidden = true; halves.classList.replace("halves", "column"); table.focus(); }
  const table = H.table({
    label: "Saves", picked: open, rows: [...indices].reverse(),
    columns: [
      { name: "Step", width: "minmax(56px, 1fr)", narrow: "minmax(44px, 1fr)", right: true, value: (i) => c.step[i], cell: (i) => H.count(c.step[i]) },
      { name: "Begun", spare: true, width: "minmax(108px, 1.7fr)", value: (i) => c.began[i], cell: (i) => el("span", { title: H.time(c.began[i]) }, clock(c.began[i], 0)) },
      { name: "Outcome", width: "minmax(78px, .9fr)", narrow: "84px", ascending: true, value: (i) => c.outcome[i], cell: (i) => H.badge(KIND[c.outcome[i]], c.outcome[i]) },
      { name: "Now", width: "minmax(84px, 1fr)", narrow: "82px", ascending: true, value: (i) => health(i)?.words ?? null, cell: (i) => { const h = health(i); return h ? (h.kind ? H.badge(h.kind, h.words) : el("span", { class: "muted" }, h.words)) : ""; } },
      { name: "Took", width: "minmax(56px, 1fr)", narrow: "60px", right: true, value: (i) => c.seconds[i], cell: (i) => H.seconds(c.seconds[i]) },
      { name: "Waited", spare: true, width: "minmax(58px, 1fr)", right: true, value: (i) => c.stall[i], cell: (i) => H.seconds(c.stall[i]) },
      { name: "Size", spare: true, width: "minmax(62px, 1fr)", right: true, value: (i) => c.bytes[i], cell: (i) => H.bytes(c.bytes[i]) },
      { name: "Throughput", spare: true, width: "minmax(82px, 1fr)", right: true, value: (i) => c.rate[i], cell: (i) => perSecond(c.rate[i]) },
      some("metric") ? { name: "Metric", spare: true, width: "minmax(58px, 1fr)", right: true, value: (i) => c.metric[i], cell: (i) => H.number(c.metric[i]) } : null,
      { name: "Ranks", spare: true, width: "minmax(44px, .7fr)", right: true, value: (i) => c.ranks[i], cell: (i) => H.count(c.ranks[i]) },
    ].filter(Boolean),
  });
  const FILTERS = { all: () => true, there: (i) => there.has(c.step[i]) && newest.get(c.step[i]) === i, failed: (i) => c.outcome[i] !== "saved" };
  const filter = H.segmented("Which saves", [["all", "all"], ["there", "there now"], ["failed", "not saved"]], "all", (to) => table.show([...indices].reverse().filter(FILTERS[to])));
  const halves = el("div", { class: "grid column" }, H.card("Saves", filter, el("div", { class: "body flush" }, table.node)), detail);
  table.node.id = "saves";
  table.node.style.height = `${Math.min(12, Math.max(3, n)) * 30 + 42}px`;

  // ---- the page

  const notes = [
    ...(data.state === "unknown" ? [el("p", { class: "note" }, "No journal was kept of this run: what is shown comes from the steps that are there. How long saves took, and which failed, is not known.")] : []),
    ...bad.map(([step, name, , , fault]) => el("p", { class: "note bad" }, `Step ${H.count(step)} (${name}): ${fault}`)),
  ];
  H.empty(main, facts, notes,
    H.card("Starts", [zoomed, el("label", { class: "inline muted" }, "Over", axisOf)], el("div", { class: "body" }, band)),
    el("div", { class: "grid charts" }, panels), halves);
  H.key("x", "charts over steps or over time", () => { const to = axisOf.querySelector("[aria-checked=false]"); to.click(); });
  H.key("0", "show all of the run", charts.reset);
  H.key("t", "to the table", () => { table.focus(); });
  H.key("Escape", "close the details", () => { if (detail.hidden) return false; shut(); return true; });
  charts.axis(...AXES.step);
  H.ready();
}
