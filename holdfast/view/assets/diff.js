// The page of a diff: a map of layers, a table of names, and the numbers of one.
"use strict";
{
  const { el, data } = H, main = document.getElementById("main"), { a, b } = data;
  const FIELDS = ["name", "status", "bytes", "relative", "cosine", "largest", "mean", "norm", "normA", "normB", "nonfinite", "kind", "layer", "byChecksums"];
  const all = data.rows.map((row) => Object.fromEntries(FIELDS.map((field, i) => [field, row[i]])));
  all.forEach((t) => { t.lower = t.name.toLowerCase(); });
  const STATUS = {
    same: ["good", "same", ""], changed: ["", "changed", ""], shape: ["bad", "other shape", "≠"], dtype: ["warn", "other type", "≈"],
    "only in a": ["bad", "only in A", "A"], "only in b": ["bad", "only in B", "B"],
  };

  // ---- header and facts

  H.header(a.name === b.name ? `${a.name}: A and B` : `${a.name} → ${b.name}`, el("span", null, `A ${a.path}`, el("br"), `B ${b.path}`));
  const count = (status) => all.filter((t) => t.status === status).length;
  const sum = (of) => Math.sqrt(all.reduce((n, t) => n + (of(t) ?? 0) ** 2, 0));
  const apart = sum((t) => t.norm), size = Math.max(sum((t) => t.normA), sum((t) => t.normB));
  const worst = all.reduce((w, t) => (t.relative !== null && (!w || t.relative > w.relative) ? t : w), null);
  const nonfinite = all.reduce((n, t) => n + t.nonfinite, 0), odd = all.filter((t) => t.status !== "same" && t.status !== "changed");
  const stamp = (c) => [c.step === null ? "–" : `step ${H.count(c.step)}`, [c.format, c.run ? `run ${c.run.slice(0, 8)}` : null].filter(Boolean).join(", ")];
  const facts = H.facts([
    ["A", ...stamp(a)], ["B", ...stamp(b)],
    ["Same", H.count(count("same")), `of ${H.plural(all.length, "name")}`], ["Changed", H.count(count("changed")), nonfinite ? el("span", { class: "bad" }, `${H.plural(nonfinite, "number")} NaN or infinite`) : "to some bit"],
    ["Do not fit", H.count(odd.length), odd.length ? "shape, type, or not in both" : "all fit"],
    ["Relative change", size ? H.number(apart / size) : "–", "of all that changed"],
    worst && worst.relative > 0 ? ["Furthest apart", H.number(worst.relative), el("span", { class: "cut", title: worst.name }, worst.name.length > 34 ? `…${worst.name.slice(-33)}` : worst.name)] : null,
  ]);

  // ---- measures

  const MEASURES = {
    relative: { words: "relative change", of: (t) => t.relative, note: "the norm of the difference, as a part of the larger of the two norms" },
    angle: { words: "angle", of: (t) => (t.cosine === null ? (t.status === "same" ? 0 : null) : 1 - t.cosine), note: "one minus the cosine: 0 is the same direction" },
    largest: { words: "largest", of: (t) => t.largest, note: "the largest absolute difference of any number" },
  };
  let measure = "relative";
  const spread = () => {
    const values = all.map(MEASURES[measure].of).filter((v) => v !== null && v > 0);
    const low = values.reduce((m, v) => Math.min(m, v), Infinity), high = values.reduce((m, v) => Math.max(m, v), 0);
    return high ? [Math.max(low, high * 1e-8), high] : null;
  };
  let range = spread();
  const part = (v) => (range && range[1] > range[0] ? 0.12 + 0.88 * (Math.log(Math.max(v, range[0]) / range[0]) / Math.log(range[1] / range[0])) : 1);

  // ---- the map: of several tensors in one place (experts, say) the one that is furthest apart

  const numbers = [...new Set(all.map((t) => t.layer))].filter((v) => v !== null).sort((x, y) => x - y);
  const columns = [...(all.some((t) => t.layer === null) ? [null] : []), ...numbers], column = new Map(columns.map((v, i) => [v, i]));
  const sized = data.kinds.map((kind, k) => [kind, k]);
  // With hundreds of values that are no tensors (rng, lr, …) the map would be all of them: they are in the table.
  const mapped = new Set(all.filter((t) => t.layer !== null || t.bytes > 0).map((t) => t.kind));
  const known = sized.filter(([, k]) => mapped.has(k)).slice(0, 1000);
  const sectionOf = (kind) => (kind.includes("/") ? kind.slice(0, kind.indexOf("/")) : "state");
  const sections = [...new Set(known.map(([kind]) => sectionOf(kind)))];
  const several = sections.length > 1 && sections.length < 8; // of more no row of buttons is made, and all are shown
  let section = several && known.length > 24 ? sections[0] : "", shownKinds = [], rowOf = new Map(), cells = new Map(), map = null;
  const RANK = { same: 0, changed: 1, dtype: 2, shape: 3, "only in a": 4, "only in b": 4 };
  const leading = (group) => group.reduce((w, t) => (RANK[t.status] > 1 && RANK[t.status] > RANK[w.status] ? t : RANK[w.status] > 1 ? w : (MEASURES[measure].of(t) ?? -1) > (MEASURES[measure].of(w) ?? -1) ? t : w), group[0]);
  const cell = (r, k) => cells.get(`${r},${k}`);
  const fill = (group) => {
    const t = leading(group), v = MEASURES[measure].of(t);
    if (RANK[t.status] > 2) return H.css("--bad-soft");
    if (t.nonfinite) return H.css("--bad");
    if (t.status === "same" || v === 0) return H.css("--line");
    return v === null ? H.css("--warn-soft") : H.ramp(part(v));
  };
  const figure = (v) => (v === null || v === undefined ? "–" : H.number(v));
  /** Close to 1 it is what lacks that tells one from another. */
  const cosine = ({ cosine: v }) => (v !== null && v > 0.9999 && v < 1 ? `1 − ${Number((1 - v).toPrecision(2))}` : figure(v));
  const describe = (r, k, group) => {
    const t = leading(group), more = group.length > 1 ? el("div", null, `the furthest of ${group.length} here`) : null;
    return [el("b", null, t.name), more, el("div", null, STATUS[t.status][1]),
      t.status === "changed" || t.status === "dtype" ? [el("div", null, `relative change ${figure(t.relative)}`), el("div", null, `cosine ${cosine(t)}`), el("div", null, `largest ${figure(t.largest)}`)] : null,
      t.nonfinite ? el("div", { class: "bad" }, `${H.plural(t.nonfinite, "number")} NaN or infinite`) : null];
  };
  const field = el("div"), key = el("div", { class: "scale" });
  const paintKey = () => {
    const steps = Array.from({ length: 24 }, (_, i) => el("i", { style: { background: H.ramp(0.12 + (0.88 * i) / 23) } }));
    H.empty(key, el("span", { class: "muted" }, `${MEASURES[measure].words}:`), el("i", { class: "none", style: { background: H.css("--line") } }), el("span", { class: "muted" }, "none"),
      range ? [el("span", { class: "muted first" }, figure(range[0])), el("span", { class: "steps" }, steps), el("span", { class: "muted" }, figure(range[1]))] : null,
      odd.length ? [el("i", { class: "none", style: { background: H.css("--bad-soft") } }), el("span", { class: "muted" }, "does not fit")] : null);
    key.title = MEASURES[measure].note;
  };
  const measures = H.segmented("What the colour says", Object.entries(MEASURES).map(([of, m]) => [of, m.words]), measure, (to) => { measure = to; range = spread(); paintKey(); map.again(); });
  function lay() {
    shownKinds = known.filter(([kind]) => !section || sectionOf(kind) === section);
    rowOf = new Map(shownKinds.map(([, k], r) => [k, r]));
    cells = new Map();
    all.forEach((t) => {
      if (!rowOf.has(t.kind)) return;
      const key = `${rowOf.get(t.kind)},${column.get(t.layer)}`;
      if (!cells.has(key)) cells.set(key, []);
      cells.get(key).push(t);
    });
    const host = el("div", { class: "heat", id: "map" });
    H.empty(field, host);
    map = H.heatmap({ host, rows: shownKinds.map(([kind]) => kind), columns, cell, fill, sign: (group) => (leading(group).nonfinite ? "!" : STATUS[leading(group).status][2]), describe, open: (group) => open(leading(group)), label: "Differences by layer" });
  }
  const which_section = several ? H.segmented("Which section", [...sections.map((name) => [name, name]), ["", "all"]], section, (to) => { section = to; lay(); }) : null;
  lay();
  H.onTheme(paintKey);
  paintKey();

  // ---- the numbers of one

  const detail = el("section", { class: "card panel", id: "detail", "aria-label": "A tensor", hidden: true });
  const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replace(/'/g, "'\\''")}'`);
  function open(t) {
    table.select(t);
    if (rowOf.has(t.kind)) map.mark(rowOf.get(t.kind), column.get(t.layer)); else map.mark(null);
    const here = rowOf.has(t.kind) ? cells.get(`${rowOf.get(t.kind)},${column.get(t.layer)}`).filter((o) => o !== t) : [];
    H.empty(detail,
      el("div", { class: "head" }, el("h2", { class: "name break" }, t.name), el("button", { type: "button", class: "plain", "aria-label": "Close", click: shut }, "✕")),
      el("div", { class: "body" }, H.badge(STATUS[t.status][0], STATUS[t.status][1]),
        el("div", { class: "apart" }, H.pairs([
          ["bytes", t.bytes ? H.bytes(t.bytes) : "a value"], ["relative change", figure(t.relative)], ["cosine", cosine(t)],
          ["largest difference", figure(t.largest)], ["mean difference", figure(t.mean)], ["norm of the difference", figure(t.norm)],
          ["norm in A", figure(t.normA)], ["norm in B", figure(t.normB)], t.nonfinite ? ["NaN or infinite", H.count(t.nonfinite)] : null,
        ])),
        t.status === "same" ? el("p", { class: "note apart" }, t.byChecksums ? "The same by the recorded checksums: the bytes were not read." : "The same to the last bit.") : null,
        here.length ? [el("h3", { class: "apart" }, `In the same place: ${H.count(here.length)}`), el("ul", { class: "list" }, here.slice(0, 200).map((o) => el("li", null, el("button", { type: "button", class: "plain cut", click: () => open(o) }, o.name), el("span", { class: "muted" }, figure(MEASURES[measure].of(o))))))] : null,
        el("h3", { class: "apart" }, "On the command line"), el("code", { class: "command" }, `holdfast diff ${quoted(a.path)} ${quoted(b.path)} --tensors ${quoted(t.name.replace(/[[*?]/g, (sign) => `[${sign}]`))}`)));
    detail.hidden = false;
    halves.classList.replace("column", "halves");
  }
  function shut() { detail.hidden = true; halves.classList.replace("halves", "column"); map.mark(null); table.focus(); }

  // ---- table

  const table = H.table({
    label: "Names", picked: open, rows: all, sort: [2, -1],
    columns: [
      { name: "Name", width: "minmax(180px, 3fr)", narrow: "minmax(0, 1fr)", ascending: true, value: (t) => t.name, cell: (t) => H.named(t.name) },
      { name: "Status", width: "minmax(104px, .8fr)", narrow: "104px", ascending: true, value: (t) => t.status, cell: (t) => H.badge(STATUS[t.status][0], STATUS[t.status][1]) },
      { name: "Relative", width: "minmax(84px, .7fr)", narrow: "76px", right: true, value: (t) => t.relative, cell: (t) => figure(t.relative) },
      { name: "Cosine", spare: true, width: "minmax(92px, .7fr)", right: true, value: (t) => t.cosine, cell: cosine },
      { name: "Largest", spare: true, width: "minmax(84px, .7fr)", right: true, value: (t) => t.largest, cell: (t) => figure(t.largest) },
      { name: "Mean", spare: true, width: "minmax(84px, .7fr)", right: true, value: (t) => t.mean, cell: (t) => figure(t.mean) },
      { name: "Bytes", spare: true, width: "minmax(76px, .6fr)", right: true, value: (t) => t.bytes, cell: (t) => (t.bytes ? H.bytes(t.bytes) : "value") },
    ],
  });
  table.node.id = "names";
  table.node.style.height = `${Math.min(12, Math.max(3, all.length)) * 30 + 42}px`;
  const input = el("input", { class: "field", type: "search", id: "filter", placeholder: "Filter by a part of the name", "aria-label": "Filter by name", autocomplete: "off", spellcheck: "false" });
  const WHICH = { all: () => true, changed: (t) => t.status !== "same", odd: (t) => t.status !== "same" && t.status !== "changed" };
  let which = odd.length && !count("changed") ? "odd" : all.length === count("same") ? "all" : "changed";
  const words = el("span", { class: "muted", "aria-live": "polite" });
  const filter = H.frame(() => {
    const wanted = input.value.trim().toLowerCase(), shown = all.filter((t) => WHICH[which](t) && t.lower.includes(wanted));
    words.textContent = `${H.count(shown.length)} of ${H.plural(all.length, "name")}`;
    table.show(shown);
  });
  input.addEventListener("input", filter);
  input.addEventListener("keydown", (event) => { if (event.key === "Escape") { input.value = ""; filter(); input.blur(); event.preventDefault(); } });
  const which_ = H.segmented("Which names", [["all", "all"], ["changed", "not the same"], ["odd", "do not fit"]], which, (to) => { which = to; filter(); });

  const halves = el("div", { class: "grid column" },
    el("div", { class: "grid column" },
      known.length ? H.card("By layer", [key, which_section, measures], el("div", { class: "body" }, field)) : null,
      H.card("Names", [words, input, which_], el("div", { class: "body flush" }, table.node))), detail);
  H.empty(main, facts, all.length && all.length === count("same") ? el("p", { class: "note" }, all.some((t) => t.byChecksums) ? "Both hold the same by their recorded checksums: holdfast verify reads the bytes." : "Both hold the same, to the last bit.") : null, halves);
  H.key("/", "filter by name", () => { input.focus(); });
  H.key("m", "what the colour says", () => { const kinds = Object.keys(MEASURES); measures.querySelector(`[data-value=${kinds[(kinds.indexOf(measure) + 1) % kinds.length]}]`).click(); });
  H.key("Escape", "close the numbers", () => { if (detail.hidden) return false; shut(); return true; });
  filter();
  H.ready();
}
