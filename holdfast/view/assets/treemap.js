// A treemap on a canvas: groups in groups down to leaves, by bytes, in the order of the layers. Uses frame.js.
"use strict";
{
  const HEAD = 19, LINE = 11;

  const numbered = /^(.*?)(\d+)$/s;
  /** Things in their order, but those whose names differ in their last number alone stand by that number where the first of them stands. */
  H.ordered = (things, nameOf) => {
    const stems = new Map();
    for (const thing of things) {
      const name = nameOf(thing), match = numbered.exec(name), stem = match ? `#${match[1]}` : name;
      if (!stems.has(stem)) stems.set(stem, []);
      stems.get(stem).push([match ? Number(match[2]) : 0, thing]);
    }
    return [...stems.values()].flatMap((group) => group.sort((a, b) => a[0] - b[0]).map(([, thing]) => thing));
  };

  /** Leaves [{ path: [keys], bytes, … }] as a tree: { label, bytes, children, leaf, parent }; groups of one are joined. */
  H.tree = (leaves, label) => {
    const root = { label, bytes: 0, children: new Map(), parent: null };
    for (const leaf of leaves) {
      let node = root;
      root.bytes += leaf.bytes;
      leaf.path.forEach((key, depth) => {
        const end = depth === leaf.path.length - 1, of = end ? `\0${key}` : key; // a leaf and a group may share a name
        if (!node.children.has(of)) node.children.set(of, { label: key, bytes: 0, children: end ? null : new Map(), leaf: end ? leaf : null, parent: node });
        node = node.children.get(of);
        node.bytes += leaf.bytes;
      });
    }
    const settle = (node) => {
      if (!node.children) return node;
      let children = H.ordered([...node.children], ([key]) => key).map(([, child]) => settle(child));
      while (node.parent && children.length === 1 && children[0].children) {
        node.label = `${node.label}${children[0].label.match(/^[.[/]/) ? "" : "."}${children[0].label}`;
        children = children[0].children;
      }
      node.children = children;
      node.children.forEach((child, i) => { child.parent = node; child.number = i; });
      return node;
    };
    return settle(root);
  };

  /**
   * Rectangles of `items` in their order, in strips that are read as lines of text are: calls place(item, x, y, w, h). A strip takes the
   * next item as long as its rectangles come nearer to squares by that, in the mean.
   */
  function strips(items, x, y, w, h, place) {
    const some = items.filter((item) => item.bytes > 0);
    if (!(w > 0 && h > 0 && some.length)) return;
    const scale = (w * h) / some.reduce((sum, item) => sum + item.bytes, 0);
    const ratio = (strip, sum) => {
      const high = (sum * scale) / w;
      return strip.reduce((total, item) => { const wide = (item.bytes * scale) / high; return total + Math.max(wide / high, high / wide); }, 0) / strip.length;
    };
    const bytesOf = (strip) => strip.reduce((sum, item) => sum + item.bytes, 0), all = [];
    let strip = [], sum = 0, mean = Infinity;
    for (const item of some) {
      const longer = ratio([...strip, item], sum + item.bytes);
      if (strip.length && longer > mean) { all.push(strip); [strip, sum] = [[], 0]; }
      strip.push(item);
      sum += item.bytes;
      mean = strip.length === 1 ? ratio(strip, sum) : longer;
    }
    const before = all.at(-1), joined = [...(before ?? []), ...strip]; // a few at the end would be a thin line of their own
    if (before && ratio(joined, bytesOf(joined)) * joined.length < ratio(before, bytesOf(before)) * before.length + mean * strip.length) all.splice(-1, 1, joined);
    else all.push(strip);
    all.reduce((top, those) => {
      const high = (bytesOf(those) * scale) / w;
      those.reduce((left, item) => { const wide = (item.bytes * scale) / high; place(item, left, top, wide, high); return left + wide; }, x);
      return top + high;
    }, y);
  }

  /**
   * host: an element with a height. root: of H.tree. fill(leaf) → colour, or null to leave it pale; hit(leaf) → marked as bad;
   * describe(node) → what its tooltip shows; open(leaf): a leaf was chosen; moved(node): zoomed to a node.
   */
  H.treemap = ({ host, root, label, fill, hit, describe, open, moved }) => {
    let at = root, cells = [], frames = [], tops = [], active = 0, over = null, laid = "";
    const outline = H.el("div", { class: "outline", hidden: true });
    host.setAttribute("role", "application");
    host.setAttribute("aria-roledescription", "treemap");
    host.setAttribute("aria-label", `${label}. Arrow keys move, Enter goes in or opens a tensor, Escape goes out.`);
    host.tabIndex = 0;
    const again = H.canvas(host, draw);
    host.append(outline);

    const large = (w, h) => w >= 58 && h >= 46;
    function lay(node, x, y, w, h, depth, above = "", may = true) {
      const name = above ? `${above}.${node.label}` : node.label;
      if (depth === 1) tops.push({ node, x, y, w, h });
      if (node.leaf) { cells.push({ node, name, x, y, w, h }); return; }
      const framed = may && depth > 0 && depth < 6 && large(w, h), apart = !framed && depth > 0 && w >= 14 && h >= 14 ? 1 : 0;
      if (depth > 0) frames.push({ node, x, y, w, h, framed, apart, depth });
      if (w < 2.5 || h < 2.5) { cells.push({ node, name, x, y, w, h }); return; }
      const inner = framed ? [x + 3, y + HEAD, w - 6, h - HEAD - 3] : [x + apart, y + apart, w - 2 * apart, h - 2 * apart];
      const parts = [];
      strips(node.children, ...inner, (child, cx, cy, cw, ch) => { if (cw * ch > 0.2) parts.push([child, cx, cy, cw, ch]); });
      // Of a hundred layers alike a dozen would be a pixel larger and have frames: those of most bytes decide for all.
      const groups = parts.filter(([child]) => !child.leaf), sum = (those) => those.reduce((n, [child]) => n + child.bytes, 0);
      const each = 2 * sum(groups.filter(([, , , cw, ch]) => large(cw, ch))) >= sum(groups);
      parts.forEach((part) => lay(...part, depth + 1, framed || depth === 0 ? "" : name, each));
    }
    function arrange(width, height) {
      if (laid === `${width} ${height}`) return; // a filter or a theme changes colours alone
      [cells, frames, tops, laid] = [[], [], [], `${width} ${height}`];
      lay(at, 0, 0, width, height, 0);
    }
    const leafOf = (node) => { while (!node.leaf) node = node.children[0]; return node.leaf; };

    function draw(context, width, height) {
      arrange(width, height);
      const [line, sunken, surface, text, bad] = ["--line", "--sunken", "--surface", "--text", "--bad"].map(H.css);
      const family = H.family("--sans");
      context.textBaseline = "middle";
      for (const { node, x, y, w, h, framed, apart, depth } of frames) {
        if (apart) continue;
        if (!framed) { context.fillStyle = fill(leafOf(node)) ?? sunken; context.fillRect(x, y, w, h); continue; }
        context.fillStyle = depth % 2 ? sunken : surface;
        context.fillRect(x + 0.5, y + 0.5, w - 1, h - 1);
        context.strokeStyle = line;
        context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        context.font = `600 ${LINE}px ${family}`;
        context.fillStyle = text;
        const size = H.bytes(node.bytes), room = context.measureText(size).width;
        const name = fitted(context, node.label, w - 14 - (w > 130 ? room + 10 : 0));
        context.fillText(name, x + 6, y + HEAD / 2 + 1);
        if (w > 130) {
          context.font = `${LINE}px ${family}`;
          context.fillStyle = H.css("--muted");
          context.textAlign = "right";
          context.fillText(size, x + w - 6, y + HEAD / 2 + 1);
          context.textAlign = "left";
        }
      }
      for (const cell of cells) {
        const { node, x, y, w, h } = cell, leaf = leafOf(node), colour = fill(leaf);
        const gap = w > 3 && h > 3 ? 0.75 : 0;
        context.fillStyle = colour ?? sunken;
        context.fillRect(x + gap, y + gap, Math.max(0.5, w - 2 * gap), Math.max(0.5, h - 2 * gap));
        if (!colour && gap) { context.strokeStyle = line; context.strokeRect(x + 1.25, y + 1.25, w - 2.5, h - 2.5); }
        if (hit(leaf)) { context.strokeStyle = bad; context.lineWidth = 2; context.strokeRect(x + 1.5, y + 1.5, Math.max(1, w - 3), Math.max(1, h - 3)); context.lineWidth = 1; }
        cell.named = w >= 40 && h >= 18;
        if (!cell.named) continue;
        context.font = `${LINE}px ${family}`;
        context.fillStyle = colour ? H.ink(colour) : H.css("--muted");
        const size = H.bytes(node.bytes), two = h >= 34 && context.measureText(size).width <= w - 9; // half a number says another one
        const wide = context.measureText(cell.name).width <= w - 9;
        context.fillText(wide ? cell.name : fitted(context, node.label, w - 9), x + 5.5, y + (two ? 12 : Math.min(h / 2, 12) + 0.5));
        if (two) context.fillText(size, x + 5.5, y + 26);
      }
      mark();
    }
    function fitted(context, words, room) {
      if (room < 8) return "";
      if (context.measureText(words).width <= room) return words;
      let low = 0, high = words.length;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (context.measureText(`${words.slice(0, middle)}…`).width <= room) low = middle; else high = middle - 1;
      }
      return low < 2 ? "" : `${words.slice(0, low)}…`;
    }

    function mark() {
      const box = over ?? (document.activeElement === host ? tops[active] : null);
      outline.hidden = !box;
      if (!box) return;
      Object.assign(outline.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` });
    }
    const within = ({ x, y, w, h }, px, py) => px >= x && px < x + w && py >= y && py < y + h;
    /** What a click there would take: a leaf that has its name on it, else the innermost group that has one. */
    function under(event) {
      const box = host.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      const cell = cells.find((c) => within(c, px, py)) ?? null;
      const around = frames.filter((f) => within(f, px, py));
      const group = [...around].reverse().find((f) => f.framed) ?? around[0] ?? null;
      const goes = cell && cell.node.leaf && (cell.named || cell.node.parent === at || !group) ? cell : group;
      return { cell: cell ?? group, goes };
    }
    host.addEventListener("pointermove", (event) => {
      const { cell, goes } = under(event);
      if (!cell) { leave(); return; }
      over = cell;
      mark();
      H.tip.show(event.clientX, event.clientY, ...describe(cell.node), H.el("div", null, goes.node.leaf ? "Click to open" : `Click to go into ${goes.node.label}`));
      host.style.cursor = goes.node.leaf ? "pointer" : "zoom-in";
    });
    function leave() { over = null; mark(); H.tip.hide(); }
    host.addEventListener("pointerleave", leave);
    host.addEventListener("focus", mark);
    host.addEventListener("blur", mark);
    host.addEventListener("click", (event) => { const { goes } = under(event); if (goes) take(goes.node); });
    function take(node) { if (node.leaf) open(node.leaf); else go(node); }
    function go(node) {
      at = node;
      laid = "";
      arrange(host.clientWidth, host.clientHeight); // at once: the next key may come before the next frame
      active = 0;
      over = null;
      H.tip.hide();
      moved(node);
      again();
      H.say(`${node.label}, ${H.bytes(node.bytes)}, ${H.plural(node.children.length, "part")}`);
    }
    /** The nearest neighbour in a direction. */
    function neighbour(dx, dy) {
      const from = tops[active], cx = from.x + from.w / 2, cy = from.y + from.h / 2;
      let best = active, least = Infinity;
      tops.forEach((to, i) => {
        const tx = to.x + to.w / 2 - cx, ty = to.y + to.h / 2 - cy, ahead = tx * dx + ty * dy, aside = Math.abs(tx * dy) + Math.abs(ty * dx);
        if (i !== active && ahead > 0.5 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = i; }
      });
      return best;
    }
    host.addEventListener("keydown", (event) => {
      const arrow = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
      if (arrow && tops.length) {
        active = neighbour(...arrow);
        over = null;
        mark();
        const { node, x, y, h } = tops[active], box = host.getBoundingClientRect();
        H.tip.show(box.left + x + 10, box.top + y + Math.min(h, 40), ...describe(node));
        H.say(`${node.label}, ${H.bytes(node.bytes)}, ${H.percent(node.bytes / (root.bytes || 1))}`);
      } else if (event.key === "Enter" && tops[active]) take(tops[active].node);
      else if ((event.key === "Escape" || event.key === "Backspace") && at.parent) go(at.parent);
      else return;
      event.preventDefault();
    });
    return { again, go, get at() { return at; }, get tops() { return tops; }, get cells() { return cells; } };
  };
}
