// A table of any number of rows, of which only those in sight are elements. Uses frame.js.
"use strict";
/** "model/layers.0.wq.weight" → ["model/layers.0.", "wq.weight"]: the end is what tells neighbours apart. */
H.parted = (name) => {
  const cuts = [...name.matchAll(/[./]/g)].map((m) => m.index), at = name.slice((cuts.at(-1) ?? 0) + 1).length < 7 && cuts.length > 1 ? cuts.at(-2) : cuts.at(-1);
  return at === undefined ? ["", name] : [name.slice(0, at + 1), name.slice(at + 1)];
};
/** A name in a cell. What does not fit is cut at its beginning, which needs a text from right to left: isolated, or its last sign moves. */
H.named = (name, kind = "", more = null) => {
  const [prefix, last] = H.parted(name);
  return H.el("span", { class: "parted", title: name }, prefix ? H.el("span", { class: "cut muted" }, H.el("bdi", null, prefix)) : null, H.el("b", { class: kind }, last), more);
};

/**
 * H.table({ label, columns, rows, picked, sort: [column, 1 or -1] }) → { node, show(rows), columns(list), filter(test), select(row), … }
 *
 * columns: { name, width (of a grid column), value (row → what it is sorted by), cell (row → text or node; default value),
 *            right: true for figures, ascending: true if it is sorted upwards first, spare: true to leave it out on a narrow screen,
 *            narrow: its width there, title: a longer name }
 * picked(row) is called by a click or Enter. Arrows, Page Up and Down, Home and End move. A table whose columns have no room scrolls sideways.
 */
H.table = ({ label, columns: first, rows, picked, sort = null }) => {
  const ROW = 30, SPARE = 6;
  let columns = first, all = [...rows], shown = all, fits = null, active = 0, chosen = null, sorting = sort, pool = [];
  const name = `table-${(H.table.number = (H.table.number ?? 0) + 1)}`;
  const spacer = H.el("div", { style: { width: "1px" } });
  const none = H.el("div", { class: "none", hidden: true }, all.length ? "Nothing fits." : "There is none.");
  const kind = (column) => `${column.right ? "right" : ""} ${column.spare ? "spare" : ""}`;
  const heads = H.el("div", { class: "heads", role: "row", "aria-rowindex": 1 });
  const above = H.el("div", { class: "above", role: "rowgroup" }, heads);
  const body = H.el("div", { class: "rows", role: "rowgroup", tabindex: 0, "aria-label": label }, spacer, none);
  const node = H.el("div", { class: "table", role: "grid", "aria-label": label }, above, body);

  /** Pixels that columns of these widths need at least: of each the first number of pixels in it, gaps and padding. */
  const least = (widths, gap, padding) => `${widths.reduce((sum, width) => sum + Number(/(\d+)px/.exec(width)?.[1] ?? 0), gap * (widths.length - 1) + 2 * padding)}px`;
  function build() {
    const widths = columns.map((c) => c.width), narrow = columns.filter((c) => !c.spare).map((c) => c.narrow ?? c.width);
    const style = { "--columns": widths.join(" "), "--least": least(widths, 16, 16), "--narrow": narrow.join(" "), "--narrow-least": least(narrow, 10, 12) };
    Object.entries(style).forEach(([key, to]) => node.style.setProperty(key, to));
    node.setAttribute("aria-colcount", columns.length);
    H.empty(heads, columns.map((column, i) =>
      H.el("div", { role: "columnheader", class: kind(column) }, H.el("button", { type: "button", title: column.title ?? null, click: () => order(i) }, column.name))));
    pool.splice(0).forEach((row) => row.remove());
  }
  function order(index) {
    const first = columns[index].ascending ? 1 : -1;
    sorting = sorting && sorting[0] === index ? [index, -sorting[1]] : [index, first];
    arrange();
    H.say(`Sorted by ${columns[index].name}, ${sorting[1] > 0 ? "ascending" : "descending"}`);
  }
  function arrange() {
    [...heads.children].forEach((head, i) => {
      if (sorting && sorting[0] === i) head.setAttribute("aria-sort", sorting[1] > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    if (sorting) {
      const [index, direction] = sorting, of = columns[index].value;
      const keys = new Map(all.map((row, i) => [row, [of(row), i]]));
      all.sort((a, b) => {
        const [x, i] = keys.get(a), [y, j] = keys.get(b);
        if (x === y) return i - j;
        if (x === null || x === undefined) return 1; // what is not known comes last, either way
        if (y === null || y === undefined) return -1;
        return (x < y ? -1 : 1) * direction;
      });
    }
    narrow();
  }
  function narrow() {
    shown = fits ? all.filter(fits) : all;
    active = Math.max(0, chosen === null ? 0 : shown.indexOf(chosen));
    node.setAttribute("aria-rowcount", shown.length + 1);
    spacer.style.height = `${shown.length * ROW}px`;
    none.hidden = shown.length > 0;
    draw();
  }
  function draw() {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - SPARE);
    const last = Math.min(shown.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + SPARE);
    while (pool.length < last - first) {
      const row = H.el("div", { class: "row", role: "row" }, columns.map((c) => H.el("div", { role: "gridcell", class: kind(c) })));
      pool.push(row);
      body.append(row);
    }
    pool.splice(last - first).forEach((row) => row.remove());
    pool.forEach((element, i) => {
      const index = first + i, row = shown[index];
      element.style.transform = `translateY(${index * ROW}px)`;
      element.id = `${name}-${index}`;
      element.dataset.index = index;
      element.setAttribute("aria-rowindex", index + 2);
      element.setAttribute("aria-selected", row === chosen);
      element.classList.toggle("active", index === active);
      if (element.of === row) return;
      element.of = row;
      columns.forEach((column, c) => {
        const content = (column.cell ?? column.value)(row), cell = element.children[c];
        if (content instanceof Node) cell.replaceChildren(content); else cell.textContent = content ?? "";
      });
    });
    body.setAttribute("aria-activedescendant", shown.length ? `${name}-${active}` : "");
  }
  function reveal() {
    const top = active * ROW, bottom = top + ROW;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (bottom > body.scrollTop + body.clientHeight) body.scrollTop = bottom - body.clientHeight;
    draw();
  }
  function pick(index) {
    if (!shown[index]) return;
    active = index;
    chosen = shown[index];
    reveal();
    picked?.(chosen);
  }
  body.addEventListener("scroll", H.frame(draw), { passive: true });
  body.addEventListener("scroll", () => { above.scrollLeft = body.scrollLeft; }, { passive: true });
  above.addEventListener("scroll", () => { body.scrollLeft = above.scrollLeft; }, { passive: true }); // a heading that Tab brought into sight
  body.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) pick(Number(row.dataset.index));
  });
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(body.clientHeight / ROW) - 1);
    const to = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: shown.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") pick(active);
    else if (to !== undefined) { active = Math.min(shown.length - 1, Math.max(0, to)); reveal(); }
    else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(body);
  build();
  arrange();
  return {
    node,
    /** Show these rows instead, in the order that the columns have. */
    show(next) { all = [...next]; pool.forEach((row) => { row.of = undefined; }); body.scrollTop = 0; arrange(); },
    /** Have these columns instead. What it is sorted by stays, if there still is a column of that name. */
    columns(next) {
      const index = sorting ? next.findIndex((column) => column.name === columns[sorting[0]].name) : -1;
      sorting = index < 0 ? null : [index, sorting[1]];
      columns = next;
      build();
      arrange();
    },
    /** Sort by the same column again: what it shows has changed. */
    resort() { pool.forEach((row) => { row.of = undefined; }); arrange(); },
    /** Show those rows alone that pass a test. */
    filter(test) { fits = test; body.scrollTop = 0; narrow(); },
    /** Mark a row and bring it into sight, without calling picked. */
    select(row) { chosen = row; const at = shown.indexOf(row); if (at >= 0) { active = at; reveal(); } else draw(); },
    focus() { body.focus(); },
    get shown() { return shown; },
  };
};
