// What every page stands on: elements, number formats, colours, theme, tooltip, keys, canvas. Text only ever becomes
// textContent: no name of a tensor can be markup. Pages find it as `H`, with what they are to show in `H.data`.
"use strict";
const H = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // ---- elements

  const SVG = "http://www.w3.org/2000/svg";
  const SAFE = /^(?:class|id|role|tabindex|type|value|placeholder|title|for|name|hidden|disabled|checked|selected|href|download|open|list|autocomplete|spellcheck|min|max|step|lang|width|height|viewBox|preserveAspectRatio|x|y|x1|x2|y1|y2|cx|cy|r|rx|ry|d|points|fill|stroke|transform|opacity|(?:aria|data|stroke|fill|text|dominant|font|clip|pointer|shape|vector)-[a-z-]+)$/;

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "style") Object.entries(value).forEach(([key, to]) => node.style.setProperty(key, to));
      else if (typeof value === "function") node.addEventListener(name, value);
      else if (SAFE.test(name)) node.setAttribute(name, value === true ? "" : value);
      else throw new Error(`no attribute ${name} is set by pages`);
    }
    node.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false)
      .map((c) => (c instanceof Node ? c : document.createTextNode(String(c)))));
    return node;
  }

  /** An element: el("p", { class: "muted", click: f }, "text", child, …). Functions listen, `style` is an object. */
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const empty = (node, ...children) => { node.replaceChildren(); return fill(node, null, children); };

  // ---- numbers

  const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];
  const grouped = new Intl.NumberFormat("en-US");

  /** 1234567 → "1.23 MB". */
  function bytes(n) {
    if (n === null || n === undefined) return "–";
    let unit = 0, value = n;
    while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
    return `${unit ? short(value) : value} ${UNITS[unit]}`;
  }
  const short = (x) => x.toFixed(Math.abs(x) >= 99.95 ? 0 : Math.abs(x) >= 9.995 ? 1 : 2);
  /** 1234567 → "1,234,567". */
  const count = (n) => (n === null || n === undefined ? "–" : grouped.format(n));
  /** A float in about five digits. */
  function number(x) {
    if (x === null || x === undefined || Number.isNaN(x)) return "–";
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(3).replace("e+", "e");
    return String(Number(x.toPrecision(5)));
  }
  const percent = (x) => (x >= 0.9995 ? "100 %" : x > 0 && x < 0.0005 ? "< 0.1 %" : `${(x * 100).toFixed(x < 0.0995 ? 1 : 0)} %`);
  function seconds(s) {
    if (s === null || s === undefined) return "–";
    const size = Math.abs(s);
    if (size === 0) return "0 s";
    if (size < 0.9995e-3) return `${short(s * 1e6)} µs`;
    if (size < 0.9995) return `${short(s * 1e3)} ms`;
    if (size < 119.5) return `${short(s)} s`;
    const whole = Math.round(s), minutes = Math.round(s / 60);
    if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many ?? `${one}s`}`;
  const shape = (sizes) => (sizes.length ? sizes.join(" × ") : "scalar");
  /** Unix seconds, in the zone of whoever looks. */
  const time = (at) => (at === null || at === undefined ? "–" : new Date(at * 1000).toLocaleString("en-GB",
    { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" }));
  /** Ticks at round numbers, about n of them, from low to high. */
  function ticks(low, high, n = 5) {
    if (!(high > low)) return [low];
    const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const marks = [];
    if (!(Math.max(Math.abs(low), Math.abs(high)) / step < 2 ** 50)) return [low]; // they differ in the last bits: nothing round lies between
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) marks.push(i * step);
    return marks;
  }

  // ---- theme

  const root = document.documentElement, watchers = [];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const repaint = () => { resolved.clear(); watchers.forEach((f) => f()); };
  function setTheme(theme) {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    try { localStorage.setItem("holdfast-theme", theme ?? ""); } catch { /* a page from a file may not be allowed to */ }
    repaint();
  }
  const onTheme = (f) => { watchers.push(f); };
  const probe = el("span", { hidden: true });
  const resolved = new Map();
  /** A colour of style.css as the canvas needs it: css("--accent"). */
  function css(name) {
    if (!resolved.has(name)) { probe.style.color = `var(${name})`; resolved.set(name, getComputedStyle(probe).color); }
    return resolved.get(name);
  }
  try { const kept = localStorage.getItem("holdfast-theme"); if (kept) root.dataset.theme = kept; } catch { /* as above */ }
  system.addEventListener("change", repaint);

  // ---- colours: evenly bright, so that no kind of thing seems to weigh more; light tints by day, deep ones by night

  const HUES = [178, 55, 275, 95, 330, 145, 25, 235, 300, 115];
  function oklch(l, c, h) {
    const a = c * Math.cos((h * Math.PI) / 180), b = c * Math.sin((h * Math.PI) / 180);
    const [x, y, z] = [l + 0.3963377774 * a + 0.2158037573 * b, l - 0.1055613458 * a - 0.0638541728 * b,
      l - 0.0894841775 * a - 1.291485548 * b].map((v) => v ** 3);
    return [4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z, -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
      -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z].map((v) => Math.min(1, Math.max(0, v)));
  }
  const encode = (v) => Math.round(255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055));
  const text = (linear) => `rgb(${linear.map(encode).join(", ")})`;
  const hueOf = (i) => (HUES[i % HUES.length] + 13 * Math.floor(i / HUES.length)) % 360;
  const mixed = new Map(); // thousands of tiles have the same few colours
  const mix = (l, c, h) => {
    const of = `${l.toFixed(3)} ${c} ${h}`;
    if (!mixed.has(of)) mixed.set(of, text(oklch(l, c, h)));
    return mixed.get(of);
  };
  /** The i-th of any number of kinds, as a fill. `shade` from -1 to 1 tells neighbours of one kind apart. */
  const colour = (i, shade = 0) => mix(dark() ? 0.44 + 0.05 * shade : 0.85 + 0.035 * shade, 0.075, hueOf(i));
  /** The same kind as a line or a dot, seen against the surface. */
  const stroke = (i) => mix(dark() ? 0.78 : 0.52, 0.11, hueOf(i));
  /** 0 … 1 as a fill from next to nothing to much. */
  const ramp = (t) => text(dark() ? oklch(0.27 + 0.48 * t, 0.03 + 0.08 * t, 178 - 40 * t) : oklch(0.96 - 0.46 * t, 0.02 + 0.08 * t, 178 + 20 * t));
  /** -1 … 1 as a fill: less is blue, more is orange, none is grey. */
  function diverge(t) {
    const size = Math.min(1, Math.abs(t));
    return text(dark() ? oklch(0.3 + 0.38 * size, 0.13 * size, t < 0 ? 250 : 55) : oklch(0.95 - 0.33 * size, 0.13 * size, t < 0 ? 250 : 55));
  }
  /** Black or white, whichever is easier to read on a fill. */
  function ink(fillColour) {
    const [r, g, b] = fillColour.match(/[\d.]+/g).map((v) => { const s = v / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#0b1310" : "#ffffff";
  }

  // ---- tooltip

  const tipBox = el("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
  const tip = {
    /** Show children beside a point of the window. */
    show(x, y, ...children) {
      empty(tipBox, ...children);
      tipBox.hidden = false;
      const { width, height } = tipBox.getBoundingClientRect();
      const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
      const below = y + 16 + height > innerHeight ? y - 10 - height : y + 16;
      tipBox.style.left = `${Math.max(4, left)}px`;
      tipBox.style.top = `${Math.max(4, below)}px`;
    },
    hide() { tipBox.hidden = true; },
  };

  // ---- keys of the page: { key, does, run }; "?" lists them

  const shortcuts = [];
  const typing = (target) => target instanceof HTMLElement && (target.isContentEditable || /^(?:INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
  /** A key for the whole page, but while somebody types. Escape always. `run` returns false to let it pass. */
  function key(name, does, run) { shortcuts.push({ name, does, run }); }
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") tip.hide();
    if (typing(event.target) && event.key !== "Escape") return;
    for (const shortcut of shortcuts) {
      if (shortcut.name === event.key && shortcut.run && shortcut.run(event) !== false) { event.preventDefault(); return; }
    }
  });
  function help() {
    const dialog = el("dialog", { "aria-label": "Keys", close: () => dialog.remove() },
      el("h2", null, "Keys"),
      el("dl", { class: "pairs" }, shortcuts.map(({ name, does }) => [el("dt", null, el("kbd", null, name === "Escape" ? "Esc" : name)), el("dd", null, does)])),
      el("form", { class: "right" }, el("button", { type: "button", class: "primary", click: () => dialog.close() }, "Close")));
    document.body.append(dialog);
    dialog.showModal();
  }

  // ---- for whoever does not see the page

  const live = el("div", { class: "unseen", role: "status", "aria-live": "polite" });
  const say = (words) => { live.textContent = words; };

  // ---- drawing

  /** At most one call a frame. */
  function frame(draw) {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; draw(); });
    };
  }
  const LARGEST = 32000;
  /** A canvas as large as its host and as sharp as the screen: draw(context, width, height). Returns "draw again". */
  function canvas(host, draw) {
    const board = el("canvas", { "aria-hidden": "true" });
    host.classList.add("canvas");
    host.append(board);
    const again = frame(() => {
      const { clientWidth: width, clientHeight: height } = host;
      if (!width || !height) return;
      const ratio = Math.min(Math.max(1, devicePixelRatio), LARGEST / width, LARGEST / height); // larger ones stay blank
      if (board.width !== Math.round(width * ratio) || board.height !== Math.round(height * ratio)) {
        board.width = Math.round(width * ratio);
        board.height = Math.round(height * ratio);
      }
      const context = board.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      draw(context, width, height);
    });
    new ResizeObserver(again).observe(host);
    onTheme(again);
    return again;
  }
  /** Pixels that the longest of some texts takes, in a font such as "600 14px --sans". Only the fifty of most signs are measured. */
  function widest(texts, font = "600 14px --sans") {
    const context = document.createElement("canvas").getContext("2d");
    context.font = font.replace(/--\w+/, family);
    return Math.ceil([...texts].sort((a, b) => b.length - a.length).slice(0, 50).reduce((most, words) => Math.max(most, context.measureText(words).width), 0));
  }
  const family = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // ---- parts of pages

  const icon = (path) => svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round", "aria-hidden": "true" }, svg("path", { d: path }));
  const MOON = "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z";
  const SUN = "M8 5a3 3 0 1 0 0 6a3 3 0 0 0 0-6zM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1.1 1.1M11.9 11.9L13 13M13 3l-1.1 1.1M4.1 11.9L3 13";

  /** The header: a title, the path below it, and what a page adds at the right. */
  function header(title, where, ...more) {
    const mark = svg("svg", { class: "mark", viewBox: "0 0 16 16", fill: "none", "aria-hidden": "true" },
      svg("rect", { width: 16, height: 16, rx: 4, fill: "currentColor" }),
      svg("path", { d: "M8 3v5M8 8c0 3-2.5 3-3.5 5M8 8c0 3 2.5 3 3.5 5M8 8v5", "stroke-width": 1.4, "stroke-linecap": "round", style: { stroke: "var(--on-accent)" } }));
    const toggle = el("button", { class: "icon", id: "theme", click: () => setTheme(dark() ? "light" : "dark") });
    const paint = () => { empty(toggle, icon(dark() ? SUN : MOON)); toggle.setAttribute("aria-label", dark() ? "Light colours" : "Dark colours"); toggle.title = toggle.getAttribute("aria-label"); };
    onTheme(paint);
    paint();
    empty(document.getElementById("top"), mark, el("div", { class: "name" }, el("h1", null, title), el("div", { class: "where" }, where)),
      el("div", { class: "tools" }, more, el("button", { class: "icon", id: "keys", "aria-label": "Keys", title: "Keys", click: help }, "?"), toggle));
  }
  /** A card with a heading, tools at the right of it, and content. */
  function card(title, tools, ...content) {
    const id = `card-${(card.number = (card.number ?? 0) + 1)}`;
    return el("section", { class: "card", "aria-labelledby": id }, el("div", { class: "head" }, el("h2", { id }, title), tools), content);
  }
  /** Named figures in a row: [name, value, small print]. */
  const facts = (rows) => el("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value, note]) =>
    el("div", null, el("dt", null, name), el("dd", null, value, note ? el("small", null, note) : null))));
  const pairs = (rows) => el("dl", { class: "pairs" }, rows.filter(Boolean).map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
  const badge = (kind, words) => el("span", { class: `badge ${kind}` }, words);
  const legend = (items) => el("ul", { class: "legend" }, items.map(([fillColour, words]) =>
    el("li", null, el("i", { style: { background: fillColour } }), el("span", { class: "cut" }, words))));
  /** Buttons of which one is on: options are [value, words]. Arrows move, as in any group of radio buttons. */
  function segmented(label, options, value, change) {
    const group = el("div", { class: "segmented", role: "radiogroup", "aria-label": label });
    const buttons = options.map(([of, words]) => el("button", { type: "button", role: "radio", "data-value": of, click: () => choose(of) }, words));
    const choose = (to, silent) => {
      buttons.forEach((b, i) => { const on = options[i][0] === to; b.setAttribute("aria-checked", on); b.tabIndex = on ? 0 : -1; });
      if (!silent) change(to);
    };
    group.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = (buttons.indexOf(document.activeElement) + by + buttons.length) % buttons.length;
      choose(options[next][0]);
      buttons[next].focus();
    });
    group.append(...buttons);
    choose(value, true);
    return group;
  }

  /** To be called when the page stands: tests, and whoever prints it, wait for that. */
  const ready = () => { root.dataset.ready = "1"; };

  document.body.append(tipBox, live, probe);
  key("?", "this list", help);

  return { data, el, svg, empty, bytes, count, number, percent, seconds, plural, shape, time, ticks, dark, setTheme, onTheme, css,
    colour, stroke, ramp, diverge, ink, tip, key, help, say, frame, canvas, family, widest, header, card, facts, pairs, badge, legend, segmented, ready };
})();
