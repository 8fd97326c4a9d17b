// The cells that a tensor was saved in, as boxes of the tensor: read from the manifest's short form, and drawn. Uses frame.js.
"use strict";
{
  const MANY = 20000;

  /** The numbers that a text such as "0-3,7" or "0+8x1+128x8" stands for: ondisk/spans.py. At most `limit`. */
  H.spans = (text, limit = MANY) => {
    const all = [];
    for (const term of text ? text.split(",") : []) {
      const range = /^(\d+)(?:-(\d+))?$/.exec(term);
      if (range) {
        for (let i = Number(range[1]); i <= Number(range[2] ?? range[1]) && all.length < limit; i += 1) all.push(i);
        continue;
      }
      const [start, ...axes] = term.split("+");
      let numbers = [Number(start)];
      for (const axis of axes) {
        const [count, step] = axis.split("x").map(Number);
        numbers = numbers.slice(0, limit).flatMap((n) => Array.from({ length: Math.min(count, limit) }, (_, i) => n + i * step)).slice(0, limit);
      }
      all.push(...numbers.slice(0, limit - all.length));
    }
    return all;
  };

  const cutsOf = (shape, cells) => (cells === null ? shape.map((n) => [0, n]) : Array.isArray(cells)
    ? shape.map((n, d) => { const cuts = []; for (let at = 0; at < n && cuts.length <= MANY; at += cells[d]) cuts.push(at); return [...cuts, n]; })
    : cells.cuts ?? null);
  /** How many cells a tensor has, unexpanded. */
  H.cellCount = ({ shape, cells }) => (shape.includes(0) ? 0 : cells === null ? 1 : Array.isArray(cells)
    ? shape.reduce((n, length, d) => n * Math.ceil(length / cells[d]), 1)
    : cells.cuts ? cells.cuts.reduce((n, cuts) => n * (cuts.length - 1), 1) : (cells.boxes ?? []).length);

  /** Its cells, in the manifest's order: [{ offsets, lengths, file }], at most MANY. */
  H.cellsOf = (tensor) => {
    if (tensor.shape.includes(0)) return [];
    const files = H.spans(tensor.files), cuts = cutsOf(tensor.shape, tensor.cells);
    if (!cuts) return tensor.cells.boxes.slice(0, MANY).map(([offsets, lengths], i) => ({ offsets, lengths, file: files[i] }));
    let boxes = [[[], []]];
    for (const axis of cuts) {
      const next = [];
      for (const [offsets, lengths] of boxes) {
        for (let i = 0; i + 1 < axis.length && next.length < MANY; i += 1) next.push([[...offsets, axis[i]], [...lengths, axis[i + 1] - axis[i]]]);
      }
      boxes = next;
    }
    return boxes.map(([offsets, lengths], i) => ({ offsets, lengths, file: files[i] }));
  };

  /**
   * Two axes to draw on, and where a cell lies on them, from 0 to 1. Axes along which nothing is cut need not be seen. If
   * more than two are cut, those after the first are folded into the width: each interval of one holds all of the next.
   */
  H.projection = (shape, cells) => {
    const cut = shape.map((_, d) => d).filter((d) => cells.some((c) => c.lengths[d] !== shape[d]));
    const wide = shape.map((n, d) => [n, d]).filter(([n]) => n > 1);
    let down = null, along = [];
    if (cut.length >= 2) { down = cut[0]; along = cut.slice(1); }
    else if (shape.length >= 2 && wide.length >= 2) {
      const other = wide.filter(([, d]) => d !== cut[0]).sort((a, b) => b[0] - a[0])[0][1];
      const pair = cut.length ? [cut[0], other] : wide.sort((a, b) => b[0] - a[0]).slice(0, 2).map(([, d]) => d);
      [down, along] = [Math.min(...pair), [Math.max(...pair)]];
    } else along = [cut[0] ?? (wide[0] ? wide[0][1] : shape.length - 1)].filter((d) => d >= 0);
    const points = new Map(along.map((d) => [d, [...new Set(cells.flatMap((c) => [c.offsets[d], c.offsets[d] + c.lengths[d]]))].sort((a, b) => a - b)]));
    const across = (cell) => {
      let parts = [[0, 1]];
      along.forEach((d, depth) => {
        const n = shape[d] || 1, from = cell.offsets[d], to = from + cell.lengths[d], last = depth === along.length - 1, next = [];
        for (const [left, size] of parts) {
          if (last) { next.push([left + (size * from) / n, (size * (to - from)) / n]); continue; }
          const cuts = points.get(d);
          for (let i = 0; i + 1 < cuts.length; i += 1) if (cuts[i] >= from && cuts[i + 1] <= to) next.push([left + (size * cuts[i]) / n, (size * (cuts[i + 1] - cuts[i])) / n]);
        }
        parts = next.slice(0, MANY);
      });
      return parts;
    };
    const rectangles = (cell) => {
      const [top, height] = down === null ? [0, 1] : [cell.offsets[down] / shape[down], cell.lengths[down] / shape[down]];
      return across(cell).map(([left, width]) => [left, top, width, height]);
    };
    return { down, along, rectangles };
  };

  /** Who saved a cell, for colours and words: its rank, or its file where the format does not tell ranks. */
  const owner = (files, cell) => { const file = files[cell.file]; return file && file[2] !== null ? file[2] : cell.file ?? 0; };

  /** Draw a tensor's cells. files: [[path, bytes, rank or null]]. Returns { node, cells }. */
  H.shards = (tensor, files, itemsize) => {
    const cells = H.cellsOf(tensor), total = H.cellCount(tensor), { down, along, rectangles } = H.projection(tensor.shape, cells);
    const rows = down === null ? 1 : tensor.shape[down], columns = along.reduce((n, d) => n * tensor.shape[d], 1);
    const height = down === null ? 46 : Math.round(Math.min(180, Math.max(64, (340 * rows) / Math.max(1, columns))));
    const host = H.el("div", { class: "boxes", tabindex: 0, role: "application", "aria-roledescription": "drawing of cells", style: { height: `${height}px` } });
    const outline = H.el("div", { class: "outline", hidden: true });
    const placed = cells.flatMap((cell, i) => rectangles(cell).map((r) => [i, ...r])).slice(0, MANY * 2);
    let at = -1;
    const name = (cell) => { const f = files[cell.file]; return f && f[2] !== null ? `rank ${f[2]}` : f ? `file ${cell.file}` : "no file"; };
    const box = (cell) => (cell.offsets.length ? cell.offsets.map((o, d) => `${o}:${o + cell.lengths[d]}`).join(", ") : "");
    const bytes = (cell) => cell.lengths.reduce((n, l) => n * l, 1) * itemsize;
    const describe = (cell) => [H.el("b", null, name(cell)), H.el("div", null, `[${box(cell)}] · ${H.bytes(bytes(cell))}`), H.el("div", { class: "break" }, files[cell.file]?.[0] ?? "")];
    H.canvas(host, (context, width, tall) => {
      const surface = H.css("--surface");
      context.font = `11px ${H.family("--sans")}`;
      context.textBaseline = "middle";
      for (const [i, x, y, w, h] of placed) {
        const fill = H.colour(owner(files, cells[i])), wide = w * width, high = h * tall;
        context.fillStyle = fill;
        context.fillRect(x * width, y * tall, wide, high);
        if (wide > 7 && high > 7) { context.strokeStyle = surface; context.strokeRect(x * width, y * tall, wide, high); }
        if (wide > 52 && high > 16) { context.fillStyle = H.ink(fill); context.fillText(name(cells[i]), x * width + 7, y * tall + Math.min(high / 2, 13)); }
      }
      if (!placed.length) { context.fillStyle = H.css("--muted"); context.fillText("It has no elements.", 4, 14); }
    });
    host.append(outline);
    host.setAttribute("aria-label", `${H.plural(total, "cell")} of ${tensor.name}. Arrow keys move from one to the next.`);
    const show = (index, px, py) => {
      at = index;
      const bounds = host.getBoundingClientRect(), [, x, y, w, h] = placed[at];
      outline.hidden = false;
      Object.assign(outline.style, { left: `${x * 100}%`, top: `${y * 100}%`, width: `${w * 100}%`, height: `${h * 100}%` });
      H.tip.show(px ?? bounds.left + (x + w / 2) * bounds.width, py ?? bounds.top + (y + h / 2) * bounds.height, ...describe(cells[placed[at][0]]));
    };
    const hide = () => { outline.hidden = true; H.tip.hide(); };
    host.addEventListener("pointermove", (event) => {
      const bounds = host.getBoundingClientRect(), px = (event.clientX - bounds.left) / bounds.width, py = (event.clientY - bounds.top) / bounds.height;
      const index = placed.findIndex(([, x, y, w, h]) => px >= x && px < x + w && py >= y && py < y + h);
      if (index < 0) hide(); else show(index, event.clientX, event.clientY);
    });
    host.addEventListener("pointerleave", hide);
    host.addEventListener("blur", hide);
    host.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by || !placed.length) return;
      event.preventDefault();
      show((at + by + placed.length) % placed.length);
      H.say(describe(cells[placed[at][0]]).map((n) => n.textContent).join(", "));
    });
    const axis = (d) => `axis ${d}: ${H.count(tensor.shape[d])}`;
    const caption = !placed.length ? "" : tensor.shape.length === 0 ? "one number" : [down === null ? null : `↓ ${axis(down)}`, along.length ? `→ ${along.map(axis).join(", then ")}` : null,
      tensor.shape.length > along.length + (down === null ? 0 : 1) ? "other axes are not cut" : null].filter(Boolean).join("   ");
    const owners = new Map();
    for (const cell of cells) {
      const known = owners.get(cell.file) ?? { cells: 0, bytes: 0, who: name(cell), colour: owner(files, cell), path: files[cell.file]?.[0] ?? "" };
      owners.set(cell.file, { ...known, cells: known.cells + 1, bytes: known.bytes + bytes(cell) });
    }
    return { node: H.el("figure", null, host, H.el("figcaption", { class: "muted small" }, caption, total > cells.length ? ` · the first ${H.count(cells.length)} of ${H.count(total)} cells` : null)), owners: [...owners.values()], total };
  };
}
