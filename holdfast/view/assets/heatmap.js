// A map of things in rows and columns, on a canvas: kinds by number, or layers by kind. Uses frame.js.
"use strict";
/**
 * H.heatmap({ host, rows: [label], columns: [number, null or label], cell(row, column) → thing or undefined,
 *             fill(thing, column) → colour, sign(thing) → "" or a mark, describe(row, column, thing) → nodes, open(thing), label }) → { again(), mark(thing) }
 * Arrow keys move, Enter opens. A column of null is for what has no number; labels of columns are written upwards.
 */
H.heatmap = ({ host, rows, columns, cell, fill, sign, describe, open, label }) => {
  const upright = columns.some((column) => typeof column === "string");
  const ROW = !upright || rows.length <= 60 ? 21 : rows.length <= 160 ? 12 : 6, NAMED = Math.ceil(13 / ROW), LEAST = upright ? 18 : 7, MOST = 44, HIGHEST = 260;
  const HEAD = upright ? Math.min(HIGHEST, H.widest(columns, "400 11.5px --sans") + 14) : 24;
  let left = 0, wide = MOST, at = [0, 0], marked = null;
  const outline = H.el("div", { class: "outline", hidden: true });
  host.tabIndex = 0;
  host.setAttribute("role", "application");
  host.setAttribute("aria-roledescription", "heat map");
  host.setAttribute("aria-label", `${label}. Arrow keys move, Enter opens.`);
  const inner = H.el("div", { style: { height: `${HEAD + rows.length * ROW + 4}px` } });
  host.append(inner);
  const labelled = (context, words, room) => {
    if (context.measureText(words).width <= room) return words;
    let first = 0; // the end of a name is what tells kinds apart
    while (first < words.length && context.measureText(`…${words.slice(first)}`).width > room) first += 1;
    return `…${words.slice(first)}`;
  };
  const again = H.canvas(inner, (context, width) => {
    const family = H.family("--mono");
    context.font = `11.5px ${family}`;
    context.textBaseline = "middle";
    const longest = rows.reduce((most, words) => Math.max(most, context.measureText(words).width), 0);
    left = Math.min(longest + 14, Math.max(120, width * 0.34));
    wide = Math.max(LEAST, Math.min(MOST, (width - left - 4) / columns.length));
    inner.style.minWidth = `${left + columns.length * LEAST + 4}px`;
    const muted = H.css("--muted"), text = H.css("--text");
    context.textAlign = "center";
    context.fillStyle = muted;
    context.font = `11px ${H.family("--sans")}`;
    const every = Math.max(1, Math.ceil(26 / wide));
    let shown = 0;
    columns.forEach((number, k) => {
      if (upright) {
        context.save();
        context.translate(left + (k + 0.5) * wide, HEAD - 7);
        context.rotate(-Math.PI / 2);
        context.textAlign = "left";
        context.fillText(labelled(context, number, HEAD - 10), 0, 0.5);
        context.restore();
      } else if (number === null) context.fillText("–", left + (k + 0.5) * wide, HEAD / 2);
      else if (shown++ % every === 0) context.fillText(String(number), left + (k + 0.5) * wide, HEAD / 2);
    });
    rows.forEach((words, r) => {
      const y = HEAD + r * ROW;
      context.textAlign = "right";
      context.font = `11.5px ${family}`;
      context.fillStyle = r === at[0] && document.activeElement === host ? text : muted;
      if (r % NAMED === 0) context.fillText(labelled(context, words, left - 10), left - 9, y + ROW / 2);
      columns.forEach((number, k) => {
        const thing = cell(r, k);
        if (thing === undefined) return;
        const gap = wide > 10 ? 1 : 0.5, colour = fill(thing, k);
        context.fillStyle = colour;
        context.fillRect(left + k * wide + gap / 2, y + (ROW > 12 ? 1 : 0.5), wide - gap, ROW - (ROW > 12 ? 2 : 1));
        const mark = sign(thing);
        if (!mark || ROW < 12) return;
        context.textAlign = "center";
        context.font = `700 ${wide > 12 && ROW > 12 ? 12 : 9}px ${H.family("--sans")}`;
        context.fillStyle = H.ink(colour);
        context.fillText(mark, left + (k + 0.5) * wide, y + ROW / 2 + 0.5);
      });
    });
    place();
  });
  inner.append(outline);
  function place(over = null) {
    const box = over ?? (document.activeElement === host ? at : marked);
    outline.hidden = !box;
    if (box) Object.assign(outline.style, { left: `${left + box[1] * wide - 1}px`, top: `${HEAD + box[0] * ROW}px`, width: `${wide + 2}px`, height: `${ROW}px` });
  }
  const under = (event) => {
    const box = inner.getBoundingClientRect();
    const k = Math.floor((event.clientX - box.left - left) / wide), r = Math.floor((event.clientY - box.top - HEAD) / ROW);
    return r >= 0 && r < rows.length && k >= 0 && k < columns.length && cell(r, k) !== undefined ? [r, k] : null;
  };
  host.addEventListener("pointermove", (event) => {
    const box = under(event);
    place(box);
    host.style.cursor = box ? "pointer" : "default";
    if (box) H.tip.show(event.clientX, event.clientY, ...describe(...box, cell(...box))); else H.tip.hide();
  });
  host.addEventListener("pointerleave", () => { place(); H.tip.hide(); });
  host.addEventListener("click", (event) => { const box = under(event); if (box) { at = box; open(cell(...box)); } });
  host.addEventListener("focus", again);
  host.addEventListener("blur", () => { H.tip.hide(); again(); });
  host.addEventListener("keydown", (event) => {
    const by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (by) {
      let to = [at[0] + by[0], at[1] + by[1]];
      // Over what is empty to the next one that way; down and up to the nearest of that row.
      const inside = ([r, k]) => r >= 0 && r < rows.length && k >= 0 && k < columns.length;
      if (by[0] && inside(to)) {
        const here = columns.map((_, k) => k).filter((k) => cell(to[0], k) !== undefined);
        to = [to[0], here.reduce((b, k) => (Math.abs(k - at[1]) < Math.abs(b - at[1]) ? k : b), here[0] ?? 0)];
      } else while (inside(to) && cell(...to) === undefined) to = [to[0] + by[0], to[1] + by[1]];
      if (inside(to) && cell(...to) !== undefined) at = to;
      again();
      place();
      const box = inner.getBoundingClientRect(), words = describe(...at, cell(...at));
      H.tip.show(box.left + left + at[1] * wide, box.top + HEAD + at[0] * ROW + 6, ...words);
      H.say(words.flat(3).filter(Boolean).map((node) => node.textContent).join(", "));
    } else if (event.key === "Enter" || event.key === " ") { const thing = cell(...at); if (thing !== undefined) open(thing); }
    else return;
    event.preventDefault();
  });
  for (let r = 0; r < rows.length; r += 1) { const k = columns.findIndex((_, i) => cell(r, i) !== undefined); if (k >= 0) { at = [r, k]; break; } }
  return { again, mark(r, k) { marked = r === null ? null : [r, k]; place(); }, get box() { return { left, wide, ROW, HEAD }; } };
};
