// A map of the layers: a row a layer, a column a kind of parameter, the colour is the norm. Uses frame.js, treemap.js, heatmap.js.
"use strict";
{
  const { el } = H;
  const ROWS = 400, COLUMNS = 120;

  /** Where a tensor stands: "blocks.3.attn.q.weight" is "attn.q.weight" of "blocks.3", "tok.weight" is "weight" of "tok". Later numbers make no kinds. */
  H.placed = ({ name, section }) => {
    const within = name.includes("/") ? name.slice(section.length + 1) : name, parts = within.match(/[^./[\]]+|[./[\]]+/g) ?? [within];
    const number = (part) => /^\d{1,6}$/.test(part), first = parts.findIndex(number);
    if (first >= 0) return [parts.slice(0, first + 1).join(""), parts.slice(first + 1).map((part) => (number(part) ? "*" : part)).join("").replace(/^[./\]]+/, "") || "–"];
    const cut = within.includes(".") ? within.lastIndexOf(".") : within.lastIndexOf("/");
    return cut < 0 ? [section, within] : [within.slice(0, cut), within.slice(cut + 1)];
  };

  const MEASURES = {
    norm: { words: "norm", note: "The root of the sum of squares. The scale is logarithmic." },
    ratio: { words: "against its kind", note: "The norm divided by the median of the same parameter of all layers. The scale is logarithmic." },
  };
  const median = (values) => { const sorted = [...values].sort((a, b) => a - b); return sorted[Math.floor(sorted.length / 2)]; };
  const nonfinite = (statistics) => statistics.nan + statistics.inf;

  /**
   * H.norms({ tensors, known: Map of statistics by name, served, open(tensor) }) → { node, again(): statistics were added, mark(tensor) }
   * Without a server only tensors with statistics are on it.
   */
  H.norms = ({ tensors, known, served, open }) => {
    const all = tensors.filter((t) => served || known.has(t.name)), sections = [...new Set(all.map((t) => t.section))];
    let section = sections[0], measure = "norm", cells = new Map(), places = new Map(), range = null, medians = new Map(), stems = [], map = null;
    const key = el("div", { class: "scale" }), field = el("div"), left = el("p", { class: "muted small", hidden: true });

    /** Of several in one place the one to be looked at first: with NaN, else of the largest norm. */
    const leading = (group) => group.reduce((best, t) => {
      const a = known.get(best.name), b = known.get(t.name);
      if (!a || !b) return a ? best : t;
      return nonfinite(b) !== nonfinite(a) ? (nonfinite(b) > nonfinite(a) ? t : best) : (b.norm ?? -1) > (a.norm ?? -1) ? t : best;
    });
    const normOf = (group) => known.get(leading(group).name)?.norm ?? null;
    const kindOf = ([r, k]) => `${k} ${stems[r]}`;
    const ratioOf = (group) => { const norm = normOf(group), typical = medians.get(kindOf(places.get(group[0]))); return norm > 0 && typical ? norm / typical : null; };
    const part = (norm) => (range[0] === range[1] ? 0.5 : Math.log(norm / range[0]) / Math.log(range[1] / range[0]));
    function fill(group) {
      const statistics = known.get(leading(group).name);
      if (!statistics) return H.css("--sunken");
      if (nonfinite(statistics)) return H.css("--bad");
      if (!statistics.norm) return H.css("--line");
      return measure === "norm" ? H.ramp(0.12 + 0.88 * part(statistics.norm)) : H.diverge(Math.log10(ratioOf(group) ?? 1));
    }
    const describe = (r, k, group) => {
      const t = leading(group), statistics = known.get(t.name), ratio = ratioOf(group);
      return [el("b", null, t.name), group.length > 1 ? el("div", null, `the largest of ${H.count(group.length)} here`) : null,
        ...(statistics ? [el("div", null, `norm ${H.number(statistics.norm)}`), ratio === null ? null : el("div", null, `${H.number(Number(ratio.toPrecision(3)))} × the median of its kind`), el("div", null, `std ${H.number(statistics.std)}`),
          nonfinite(statistics) ? el("div", { class: "bad" }, `${H.count(statistics.nan)} NaN, ${H.count(statistics.inf)} infinite`) : null] : [el("div", null, "not read")])].filter(Boolean);
    };
    const swatch = (colour, words) => [el("i", { class: "none", style: { background: colour } }), el("span", { class: "muted" }, words)];
    function paintKey() {
      const steps = (colour) => el("span", { class: "steps" }, Array.from({ length: 24 }, (_, i) => el("i", { style: { background: colour(i / 23) } })));
      const words = (text) => el("span", { class: "muted" }, text);
      H.empty(key, el("span", { class: "muted" }, `${MEASURES[measure].words}:`),
        measure === "ratio" ? [words("1/10"), steps((t) => H.diverge(2 * t - 1)), words("10 times")]
          : range ? [words(H.number(range[0])), steps((t) => H.ramp(0.12 + 0.88 * t)), words(`${H.number(range[1])}, log scale`)] : null,
        swatch(H.css("--line"), "0"), swatch(H.css("--bad"), "NaN or infinite"), served ? swatch(H.css("--sunken"), "not read") : null);
      key.title = MEASURES[measure].note;
    }
    function measured() {
      const byKind = new Map();
      for (const group of cells.values()) {
        const norm = normOf(group), kind = kindOf(places.get(group[0]));
        if (!(norm > 0)) continue;
        if (!byKind.has(kind)) byKind.set(kind, []);
        byKind.get(kind).push(norm);
      }
      const norms = [...byKind.values()].flat();
      range = norms.length ? norms.reduce(([low, high], norm) => [Math.min(low, norm), Math.max(high, norm)], [Infinity, 0]) : null;
      medians = new Map([...byKind].filter(([, values]) => values.length > 1).map(([kind, values]) => [kind, median(values)]));
    }
    function lay() {
      const those = all.filter((t) => t.section === section), layers = new Map(), kinds = new Map();
      for (const t of those) {
        const [layer, kind] = H.placed(t);
        layers.set(layer, null);
        if (!kinds.has(kind)) kinds.set(kind, kinds.size);
      }
      const rows = H.ordered([...layers.keys()], (layer) => layer), columns = [...kinds.keys()];
      rows.forEach((layer, r) => layers.set(layer, r));
      stems = rows.map((layer) => layer.replace(/\d+$/, "*"));
      [cells, places] = [new Map(), new Map()];
      for (const t of those) {
        const [layer, kind] = H.placed(t), place = [layers.get(layer), kinds.get(kind)];
        if (place[0] >= ROWS || place[1] >= COLUMNS) continue;
        places.set(t, place);
        if (!cells.has(`${place}`)) cells.set(`${place}`, []);
        cells.get(`${place}`).push(t);
      }
      left.hidden = rows.length <= ROWS && columns.length <= COLUMNS;
      left.textContent = `These are the first ${Math.min(rows.length, ROWS)} of ${H.count(rows.length)} rows and ${Math.min(columns.length, COLUMNS)} of ${H.count(columns.length)} columns.`;
      const host = el("div", { class: "heat", id: "norms" });
      H.empty(field, host);
      measured();
      map = H.heatmap({
        host, rows: rows.slice(0, ROWS), columns: columns.slice(0, COLUMNS), cell: (r, k) => cells.get(`${r},${k}`), fill, describe,
        sign: (group) => { const statistics = known.get(leading(group).name); return statistics && nonfinite(statistics) ? "!" : ""; },
        open: (group) => open(leading(group)), label: "Norms by layer and kind of parameter",
      });
      paintKey();
    }
    const sectionPick = sections.length > 1 ? H.segmented("Which section", sections.map((name) => [name, name]), section, (to) => { section = to; lay(); }) : null;
    const measurePick = H.segmented("What the colour says", Object.entries(MEASURES).map(([name, { words }]) => [name, words]), measure, (to) => { measure = to; paintKey(); map.again(); });
    const node = H.card("Norms by layer", [sectionPick, measurePick], el("div", { class: "body" }, field, left, key));
    node.hidden = !known.size || !all.length;
    if (all.length) { lay(); H.onTheme(paintKey); }
    return {
      node,
      again() { if (!all.length) return; node.hidden = !known.size; measured(); paintKey(); map.again(); },
      mark(t) { if (map) map.mark(...(places.get(t) ?? [null])); },
    };
  };
}
