// The page of a checkpoint: treemap, table, panel, values. Everything else is in the files before this one.
"use strict";
{
  const { el, data } = H, main = document.getElementById("main");

  // ---- what there is

  const hit = new Set(data.health.hit), aliases = Object.entries(data.aliases);
  const sectionOf = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "state");
  const base = data.path.endsWith("/") ? data.path : `${data.path}/`;
  H.shortPath = (path) => (path.startsWith(base) ? path.slice(base.length) : path).replace(/\.[0-9a-f]{16}\.safetensors$/, "");
  const keys = (name) => name.split("/").flatMap((part, i) => part.split(".").filter((p) => p !== "").map((p, j) => (i === 0 && j === 0 && !name.includes("/") ? p : p)));
  const made = ([name, dtype, shape, bytes, cells, files, origins], alias) => {
    const elements = shape.reduce((n, length) => n * length, 1);
    return { name, lower: name.toLowerCase(), dtype, shape, bytes, cells, files, elements, itemsize: elements ? bytes / elements : 0, alias, section: sectionOf(name), bad: hit.has(name), path: null, origins };
  };
  const stored = data.tensors.map((row) => made(row, null)), byName = new Map(stored.map((t) => [t.name, t]));
  const rows = new Map(data.tensors.map((row) => [row[0], row]));
  const tied = aliases.map(([name, of]) => made([name, ...rows.get(of).slice(1)], of));
  const tensors = [...stored, ...tied];
  tensors.forEach((t) => { t.count = H.cellCount(t); t.path = [t.section, ...keys(t.name.includes("/") ? t.name.slice(t.section.length + 1) : t.name)]; });
  const total = stored.reduce((n, t) => n + t.bytes, 0);
  const known = new Map(Object.entries(data.statistics ?? {})), statisticsOf = (t) => known.get(t.name) ?? known.get(t.alias);
  const ranked = (of) => { const sums = new Map(); stored.forEach((t) => sums.set(of(t), (sums.get(of(t)) ?? 0) + t.bytes)); return [...sums].sort((a, b) => b[1] - a[1]); };
  const sections = ranked((t) => t.section), dtypes = ranked((t) => t.dtype);
  const index = (list) => new Map(list.map(([name], i) => [name, i]));
  const sectionIndex = index(sections), dtypeIndex = index(dtypes);

  // ---- header and facts

  const created = data.created ? new Date(data.created) : null; // for whoever looks: in the zone of the browser
  H.header(data.title, data.path);
  const stamp = created && !Number.isNaN(created.getTime()) ? H.time(created.getTime() / 1000) : "–";
  const used = data.files.reduce((n, f) => n + f[1], 0);
  const makers = Object.entries(data.producer), software = makers.filter(([name]) => /^(?:holdfast|torch)$/.test(name));
  const producer = (software.length ? software : makers).map(([name, version]) => `${name} ${version}`).join(", ");
  const facts = H.facts([
    ["Step", data.step === null ? "–" : H.count(data.step), data.run ? `run ${data.run.slice(0, 8)}` : "no run named"],
    ["State", H.bytes(total), `${H.plural(tensors.length, "tensor")}${tied.length ? `, ${tied.length} tied` : ""}`],
    ["Ranks", H.count(data.ranks), "saved it"],
    ["Files", H.count(data.files.length), H.bytes(used)],
    ["Format", data.format, data.reading || producer || null],
    created ? ["Saved", stamp.split(",")[0], stamp.split(", ")[1]] : null,
    ["Health", H.badge(data.health.kind, data.health.words), data.health.note],
    ["Signature", H.badge(data.signature[0], data.signature[1]), data.signature[2] || null],
  ]);

  // ---- filter

  const input = el("input", { class: "field", type: "search", id: "filter", placeholder: "Part of a name, or a glob like *.weight", "aria-label": "Filter tensors by name", autocomplete: "off", spellcheck: "false" });
  const counted = el("span", { class: "muted counted", "aria-live": "polite" });
  /** A test of names, as the command line has it: a glob over the whole name, else a part of it. */
  function test(words) {
    const wanted = words.trim().toLowerCase();
    if (!wanted) return () => true;
    if (!/[*?[]/.test(wanted)) return (t) => t.lower.includes(wanted);
    const glob = new RegExp(`^${wanted.replace(/[.+^${}()|\\]/g, "\\$&").replace(/\[(?![^\]]+\])/g, "\\[").replace(/\*/g, ".*").replace(/\?/g, ".").replace(/\[!/g, "[^")}$`, "s");
    return (t) => glob.test(t.lower);
  }
  let fits = () => true, narrowed = false;
  function apply() {
    try { fits = test(input.value); } catch { fits = () => false; } // half a character class, while it is typed
    narrowed = input.value.trim() !== "";
    table.filter(narrowed ? fits : null);
    const { shown } = table, bytes = shown.reduce((n, t) => n + (t.alias ? 0 : t.bytes), 0);
    counted.textContent = narrowed ? `${H.count(shown.length)} of ${H.plural(tensors.length, "tensor")}, ${H.bytes(bytes)}` : `${H.plural(tensors.length, "tensor")}, ${H.bytes(total)}`;
    stored.forEach((t) => { t.pale = !fits(t); });
    map?.again();
    offer();
  }
  const filter = H.frame(apply);
  input.addEventListener("input", filter);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { if (input.value) { input.value = ""; apply(); } else input.blur(); event.preventDefault(); }
    else if (event.key === "ArrowDown" || event.key === "Enter") { apply(); table.focus(); event.preventDefault(); }
  });

  // ---- treemap

  const COLOURS = {
    section: [(t, shade) => H.colour(sectionIndex.get(t.section), shade), () => sections.map(([name, n], i) => [H.colour(i), `${name}  ${H.bytes(n)}`])],
    type: [(t, shade) => H.colour(dtypeIndex.get(t.dtype), shade), () => dtypes.map(([name, n], i) => [H.colour(i), `${name}  ${H.bytes(n)}`])],
    size: [(t) => H.ramp(Math.log1p(t.bytes) / Math.log1p(largest)), () => [0.2, 0.4, 0.6, 0.8, 1].map((at) => [H.ramp(at), H.bytes(Math.round(Math.expm1(at * Math.log1p(largest))))])],
  };
  const largest = stored.reduce((n, t) => Math.max(n, t.bytes), 1);
  let by = "section", map = null;
  const crumbs = el("nav", { class: "crumbs", "aria-label": "Where the treemap is" }), key = el("div", { class: "key" });
  const field = el("div", { class: "map", id: "map" });
  const paintKey = () => H.empty(key, H.legend(COLOURS[by][1]().slice(0, 12)));
  const colours = el("label", { class: "inline muted" }, "Colour", H.segmented("Colour of the treemap", [["section", "section"], ["type", "type"], ["size", "size"]], by, (to) => { by = to; paintKey(); map?.again(); }));
  const trail = (node) => {
    const above = [];
    for (let one = node; one; one = one.parent) above.unshift(one);
    H.empty(crumbs, above.map((one, i) => [i ? el("span", { "aria-hidden": "true" }, "›") : null,
      el("button", { type: "button", class: "plain", "aria-current": one === node ? "location" : null, click: () => map.go(one) }, one.label)]));
  };
  const root = H.tree(stored.filter((t) => t.bytes > 0), "state");
  stored.forEach((t, i) => { t.shade = ((i * 7) % 5) / 2 - 1; });
  const describe = (node) => {
    const share = el("div", null, `${H.bytes(node.bytes)} · ${H.percent(node.bytes / (total || 1))} of the state`);
    if (node.leaf) return [el("b", null, node.leaf.name), el("div", null, `${node.leaf.dtype} · ${H.shape(node.leaf.shape)}`), share];
    const above = [];
    for (let one = node; one.parent; one = one.parent) above.unshift(one.label);
    return [el("b", null, above.join(" › ") || node.label), share, el("div", null, H.plural(node.children.length, "part"))];
  };

  // ---- table and panel

  const panel = el("aside", { class: "card panel", id: "panel", "aria-label": "The chosen tensor", tabindex: -1 });
  let chosen = null;
  function choose(tensor, from) {
    chosen = tensor;
    if (from !== "table") table.select(tensor);
    show();
    norms.mark(tensor);
    if (from === "map" || from === "norms") panel.scrollIntoView({ block: "nearest" });
    H.say(`${tensor.name}, ${tensor.dtype}, ${H.shape(tensor.shape)}, ${H.bytes(tensor.bytes)}`);
  }
  function show() {
    const names = tied.filter((t) => t.alias === (chosen.alias ?? chosen.name) && t !== chosen).map((t) => t.name);
    H.panel(panel, chosen, { known, total, names, learned });
  }
  H.onTheme(() => { paintKey(); if (chosen) show(); });
  const share = (t) => el("span", { class: "share" }, el("i", { style: { width: `${(56 * t.bytes) / largest}px` } }), el("span", null, H.bytes(t.bytes)));
  const widths = { name: Math.max(120, H.widest(tensors.map((t) => (t.alias ? `${t.name} tied` : t.name))) + 18), type: Math.max(44, H.widest(dtypes.map(([name]) => name)) + 2), shape: Math.max(60, H.widest(tensors.map((t) => H.shape(t.shape))) + 2) };
  /** A column of statistics: it is sorted from the largest down, and what was not read stays last. */
  const figure = (name, title, of, least) => ({
    name, title, width: `${least}px`, right: true, value: (t) => (statisticsOf(t) ? of(statisticsOf(t)) : null),
    cell: (t) => { const value = statisticsOf(t) ? of(statisticsOf(t)) : null; return name === "NaN" || name === "Inf" ? el("span", { class: value ? "bad" : "muted" }, H.count(value)) : H.number(value); },
  });
  const countWidth = (of) => Math.max(data.served ? 66 : 40, H.widest([...known.values()].map((statistics) => H.count(of(statistics)))) + 2);
  /** Statistics, once there are any, take the room of what the panel shows too. */
  const columns = () => [
    { name: "Name", width: known.size ? "minmax(190px, 1fr)" : "minmax(180px, 1fr)", narrow: `minmax(${widths.name}px, 1fr)`, value: (t) => t.name, cell: (t) => H.named(t.name, t.bad ? "bad" : "", t.alias ? el("em", { class: "muted" }, "tied") : null), ascending: true },
    { name: "Type", width: `${widths.type}px`, value: (t) => t.dtype, ascending: true, spare: true },
    { name: "Shape", width: `${widths.shape}px`, value: (t) => t.elements, cell: (t) => H.shape(t.shape), right: true },
    known.size ? null : { name: "Cells", width: "48px", spare: true, value: (t) => t.count, cell: (t) => H.count(t.count), right: true },
    { name: "Size", width: known.size ? "66px" : "136px", narrow: "66px", value: (t) => t.bytes, cell: known.size ? (t) => H.bytes(t.bytes) : share, right: true },
    ...(known.size ? [figure("Norm", "the root of the sum of squares", (s) => s.norm, 76), figure("Std", "standard deviation", (s) => s.std, 76),
      figure("NaN", "elements that are NaN", (s) => s.nan, countWidth((s) => s.nan)), figure("Inf", "elements that are infinite", (s) => s.inf, countWidth((s) => s.inf))] : []),
  ].filter(Boolean);
  const list = columns();
  const table = H.table({ label: "Tensors", rows: tensors, picked: (t) => choose(t, "table"), sort: [list.findIndex(({ name }) => name === "Size"), -1], columns: list });
  let shownStatistics = known.size > 0;
  /** Statistics were added: the table and the map show them. */
  const learned = H.frame(() => {
    if (shownStatistics) table.resort(); else table.columns(columns());
    shownStatistics = true;
    norms.again();
    offer();
  });
  const norms = H.norms({ tensors: stored, known, served: data.served, open: (t) => choose(t, "norms") });

  // ---- statistics of all that the filter leaves, one by one, from the server

  let reading = false;
  const failure = el("p", { class: "note bad", hidden: true });
  const readAll = el("button", { type: "button", hidden: true, click: async () => {
    if (reading) { reading = false; return; }
    const wanted = unread();
    [reading, failure.hidden] = [true, true];
    try {
      for (let i = 0; i < wanted.length && reading; i += 1) {
        readAll.textContent = `Stop: ${H.count(i)} of ${H.count(wanted.length)} read`;
        await H.ask(wanted[i].name, known);
        learned();
      }
    } catch (error) { failure.hidden = false; failure.textContent = error.message; }
    reading = false;
    offer();
    if (chosen) show();
  } });
  const unread = () => table.shown.filter((t) => !t.alias && !known.has(t.name));
  function offer() {
    if (!data.served || reading) return;
    const wanted = unread();
    readAll.hidden = !wanted.length;
    readAll.textContent = `Read ${H.bytes(wanted.reduce((n, t) => n + t.bytes, 0))} for statistics of ${H.plural(wanted.length, "tensor")}`;
  }
  table.node.id = "tensors";
  table.node.style.height = `${Math.min(12, Math.max(3, tensors.length)) * 30 + 36}px`;

  // ---- what is no tensor

  const values = [
    ...data.values.map(([path, [text, type]]) => ({ path, rank: null, text, type })),
    ...data.perRank.flatMap(([path, ranks, few]) => [
      ...few.map(([text, type], rank) => ({ path, rank, text, type })),
      ...(few.length < ranks ? [{ path, rank: few.length, text: `ranks ${few.length} to ${ranks - 1} are not shown`, type: "" }] : []),
    ]),
  ];
  const whole = el("div", { class: "body", hidden: true });
  const valueWidths = { path: Math.max(80, H.widest(values.map((v) => v.path)) + 2), text: Math.min(900, H.widest(values.map((v) => v.text), "14px --mono") + 2) }; // a click shows what is longer
  const valueTable = H.table({
    label: "Values", rows: values,
    picked: (v) => { whole.hidden = false; H.empty(whole, el("p", { class: "note mono" }, v.text)); },
    columns: [
      { name: "Path", width: "minmax(140px, 1.4fr)", narrow: `minmax(${valueWidths.path}px, 1.4fr)`, value: (v) => v.path, cell: (v) => H.named(v.path), ascending: true },
      data.perRank.length ? { name: "Rank", width: "52px", value: (v) => v.rank, cell: (v) => (v.rank === null ? "" : String(v.rank)), right: true, ascending: true } : null,
      { name: "Value", width: "minmax(140px, 1fr)", narrow: `minmax(${valueWidths.text}px, 1fr)`, value: (v) => v.text, cell: (v) => el("span", { class: "mono", title: v.text }, v.text), ascending: true },
      { name: "Type", width: "76px", spare: true, value: (v) => v.type, cell: (v) => el("span", { class: "muted" }, v.type), ascending: true },
    ].filter(Boolean),
  });
  valueTable.node.style.height = `${Math.min(values.length, 9) * 30 + 36}px`;
  const attached = Object.entries(data.attachments), left = Object.entries(data.leftOut);
  const listing = (items, cell) => el("ul", { class: "list" }, items.slice(0, 500).map(cell), items.length > 500 ? el("li", { class: "muted" }, `and ${H.count(items.length - 500)} more`) : null);

  /** What a producer tells is text; of the classes of modules it is an object, which is read better line by line. */
  const listed = (words) => {
    if (!words.startsWith("{")) return words;
    try {
      return el("ul", { class: "list small" }, Object.entries(JSON.parse(words)).map(([name, of]) => el("li", null, el("span", { class: "break" }, name), el("span", { class: "muted" }, String(of)))));
    } catch { return words; } // it may be anything: then as it is
  };

  // ---- the page

  main.replaceChildren(...[
    facts,
    data.health.kind !== "bad" ? null : el("div", { class: "note bad" }, el("b", null, `${data.health.words}: `), data.health.note,
      data.health.faults.length ? listing(data.health.faults, (words) => el("li", null, words)) : null),
    tensors.length ? null : el("p", { class: "note" }, "There is no tensor in it."),
    tensors.length ? el("div", { class: "toolbar" }, input, counted, root.children.length ? colours : null) : null,
    tensors.length ? el("div", { class: "grid halves" },
      el("div", { class: "grid column" },
        root.children.length ? H.card("State by bytes", crumbs, el("div", { class: "body" }, field, key)) : null,
        norms.node,
        H.card("Tensors", [el("span", { class: "muted" }, "Enter or a click shows one"), readAll], failure, table.node)),
      panel) : null,
    el("div", { class: `grid ${values.length + left.length ? "pair" : ""}` },
      values.length + left.length ? el("div", { class: "grid column" },
        values.length ? H.card("Values", el("span", { class: "muted" }, H.plural(values.length, "value")), valueTable.node, whole) : null,
        left.length ? H.card("Left out", el("span", { class: "muted" }, "has no place in a state"), el("div", { class: "body" }, listing(left, ([name, why]) => el("li", null, el("span", { class: "break" }, name), el("span", { class: "muted break" }, why))))) : null) : null,
      el("div", { class: "grid column" },
        H.card("Made by", null, el("div", { class: "body" }, H.pairs([
          ...makers.map(([name, words]) => [name, listed(words)]), data.run ? ["Run", el("span", { class: "mono" }, data.run)] : null, data.save ? ["Save", el("span", { class: "mono" }, data.save)] : null,
          created ? ["At", stamp] : null, ["Check", el("code", { class: "command" }, `holdfast verify ${data.quoted}`)], data.signature[3] ? ["Signed by", el("span", { class: "mono" }, data.signature[3])] : null, ["This page", `holdfast ${data.by}`]]))),
        attached.length ? H.card("Attached files", null, el("div", { class: "body" }, listing(attached, ([name, bytes]) => el("li", null, el("span", { class: "break" }, name), el("span", { class: "muted" }, H.bytes(bytes)))))) : null)),
    data.timeline ? H.timeline(data.timeline) : null,
  ].filter(Boolean));
  if (root.children.length) {
    map = H.treemap({
      host: field, root, label: "Treemap of the state by bytes", fill: (t) => (t.pale ? null : COLOURS[by][0](t, t.shade)), hit: (t) => t.bad, describe,
      open: (t) => choose(t, "map"), moved: trail,
    });
    trail(root);
  }
  paintKey();
  apply();
  const first = table.shown[0];
  if (first) choose(first, "start");

  H.key("/", "filter tensors by name", () => { input.focus(); input.select(); });
  H.key("t", "to the table of tensors: arrows move, Enter shows one", () => table.focus());
  H.key("m", "to the treemap: arrows move, Enter goes in, Escape goes out", () => field.focus());
  if (!norms.node.hidden || data.served) H.key("n", "to the map of norms: arrows move, Enter shows a tensor", () => document.getElementById("norms")?.focus());
  H.key("c", "colour the treemap by the next thing", () => { const all = [...colours.querySelectorAll("button")]; all[(all.findIndex((b) => b.getAttribute("aria-checked") === "true") + 1) % all.length].click(); });
  H.key("Escape", "close, clear, or go out of a part of the treemap", () => (map && map.at.parent ? map.go(map.at.parent) : false));
  addEventListener("load", () => requestAnimationFrame(H.ready));
}
