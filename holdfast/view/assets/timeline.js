// A timeline on a canvas: lanes of spans, which zooms and moves. Uses frame.js.
"use strict";
{
  const ROW = 18, SIDE = 150, TOP = 22;

  /** A moment in as many digits as tell it from the next one. */
  function exactly(at, step) {
    const [unit, word] = step < 1e-4 ? [1e6, "µs"] : step < 0.1 ? [1e3, "ms"] : [1, "s"];
    const by = step * unit, digits = [0, 1, 2, 3].find((d) => Math.abs(by * 10 ** d - Math.round(by * 10 ** d)) < 1e-6) ?? 3;
    return `${(at * unit).toFixed(digits)} ${word}`;
  }

  /** { lanes: [[process, thread]], names, spans: [[lane, name, begin, length, detail]], dropped, window: [from, to] or null }, times in seconds. */
  H.timeline = ({ lanes, names, spans, dropped, window: first }) => {
    // Spans of a lane that lie over each other (one calls the other) get rows of their own.
    const ends = lanes.map(() => []), depth = [];
    spans.forEach(([lane, , begin, length], i) => {
      const rows = ends[lane];
      let row = rows.findIndex((end) => end <= begin + 1e-9);
      if (row < 0) { row = rows.length; rows.push(0); }
      rows[row] = begin + length;
      depth[i] = row;
    });
    const firsts = [];
    let rows = 0;
    lanes.forEach((_, i) => { firsts[i] = rows; rows += Math.max(1, ends[i].length); });
    const whole = spans.reduce((most, [, , begin, length]) => Math.max(most, begin + length), 1e-6);
    let from = 0, to = whole, top = 0, drawn = [], at = -1;
    if (first && first[1] > first[0]) { // what the page is about, with a little around it
      const rim = (first[1] - first[0]) * 0.04;
      [from, to] = [Math.max(0, first[0] - rim), Math.min(whole, first[1] + rim)];
    }
    const height = Math.min(460, TOP + rows * ROW + 6);
    const host = H.el("div", { class: "lanes", tabindex: 0, role: "application", "aria-roledescription": "timeline", style: { height: `${height}px` },
      "aria-label": `Timeline of ${H.plural(spans.length, "span")} in ${H.plural(lanes.length, "lane")}. Plus and minus zoom, left and right move, up and down scroll, comma and full stop step through spans.` });
    const colours = new Map(names.map((_, i) => [i, i]));

    const again = H.canvas(host, (context, width, tall) => {
      const X = (s) => SIDE + ((s - from) / (to - from)) * (width - SIDE - 8);
      const [line, muted, text, surface] = ["--line", "--muted", "--text", "--surface"].map(H.css);
      const family = H.family("--sans");
      context.font = `11px ${family}`;
      context.textBaseline = "middle";
      drawn = [];
      let said = null;
      const scale = H.ticks(from, to, Math.max(2, Math.floor((width - SIDE) / 120))).filter((s) => X(s) >= SIDE - 0.5 && X(s) <= width);
      context.fillStyle = line;
      scale.forEach((s) => context.fillRect(Math.round(X(s)), TOP - 4, 1, tall));
      for (let i = 0; i < lanes.length; i += 1) {
        const y = TOP + firsts[i] * ROW - top, high = Math.max(1, ends[i].length) * ROW;
        if (y + high < TOP || y > tall) continue;
        context.fillStyle = line;
        context.fillRect(0, Math.round(y), width, 1);
        context.fillStyle = text;
        context.save();
        context.beginPath();
        context.rect(0, 0, SIDE - 8, tall);
        context.clip();
        const [process, thread] = lanes[i];
        context.fillText(process === said ? "" : process, 0, y + ROW / 2 + 1);
        context.fillStyle = muted;
        context.fillText(thread, process === said ? 12 : Math.min(96, context.measureText(process).width + 8), y + ROW / 2 + 1);
        context.restore();
        said = process;
      }
      context.save();
      context.beginPath();
      context.rect(SIDE, TOP, width - SIDE, tall);
      context.clip();
      spans.forEach(([lane, name, begin, length], i) => {
        if (begin > to || begin + length < from) return;
        const y = TOP + (firsts[lane] + depth[i]) * ROW - top;
        if (y + ROW < TOP || y > tall) return;
        const x = X(begin), w = Math.max(1, X(begin + length) - x), fill = H.colour(colours.get(name));
        context.fillStyle = fill;
        context.fillRect(x, y + 2, w, ROW - 3);
        drawn.push([i, x, y + 2, w, ROW - 3]);
        if (w > 34) {
          context.save();
          context.beginPath();
          context.rect(x, y, w - 3, ROW);
          context.clip();
          context.fillStyle = H.ink(fill);
          context.fillText(names[name], Math.max(x, SIDE) + 5, y + ROW / 2 + 1);
          context.restore();
        }
      });
      context.restore();
      context.fillStyle = surface;
      context.fillRect(0, 0, width, TOP - 4);
      context.fillStyle = muted;
      context.textAlign = "center";
      scale.forEach((s) => context.fillText(exactly(s, scale[1] - scale[0]), Math.min(width - 24, X(s)), TOP / 2 - 1));
      context.textAlign = "left";
      if (at >= 0) {
        const box = drawn.find(([i]) => i === at);
        if (box) { context.strokeStyle = text; context.lineWidth = 2; context.strokeRect(box[1], box[2], box[3], box[4]); context.lineWidth = 1; }
      }
    });
    const describe = (i) => {
      const [lane, name, begin, length, detail] = spans[i];
      return [H.el("b", null, names[name]), H.el("div", null, `${H.seconds(length)}, from ${H.seconds(begin)} on`), H.el("div", null, lanes[lane].join(" · ")), detail ? H.el("div", null, detail) : null];
    };
    function zoom(by, around = (from + to) / 2) {
      const span = Math.min(whole, Math.max(whole / 1e6, (to - from) * by)), part = (around - from) / (to - from);
      from = Math.max(0, Math.min(whole - span, around - span * part));
      to = from + span;
      again();
    }
    function pan(by) { const span = to - from; from = Math.max(0, Math.min(whole - span, from + by * span)); to = from + span; again(); }
    function scroll(by) { top = Math.max(0, Math.min(TOP + rows * ROW + 6 - host.clientHeight, top + by)); again(); }
    const second = (event) => from + ((event.clientX - host.getBoundingClientRect().left - SIDE) / (host.clientWidth - SIDE - 8)) * (to - from);
    host.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, second(event)); }
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(event.deltaX / host.clientWidth); }
      else if (rows * ROW + TOP > host.clientHeight) { const before = top; scroll(event.deltaY); if (top !== before) event.preventDefault(); }
    }, { passive: false });
    let held = null;
    host.addEventListener("pointerdown", (event) => { held = [event.clientX, event.clientY, from, top]; host.setPointerCapture(event.pointerId); });
    host.addEventListener("pointerup", () => { held = null; });
    host.addEventListener("pointermove", (event) => {
      if (held) {
        const span = to - from;
        from = Math.max(0, Math.min(whole - span, held[2] - ((event.clientX - held[0]) / (host.clientWidth - SIDE)) * span));
        to = from + span;
        top = held[3];
        scroll(held[1] - event.clientY);
        return;
      }
      const box = host.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      const hit = [...drawn].reverse().find(([, x, y, w, h]) => px >= x - 1 && px <= x + w + 1 && py >= y && py < y + h);
      if (hit) H.tip.show(event.clientX, event.clientY, ...describe(hit[0])); else H.tip.hide();
    });
    host.addEventListener("pointerleave", H.tip.hide);
    host.addEventListener("dblclick", (event) => zoom(0.4, second(event)));
    host.addEventListener("keydown", (event) => {
      const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7), 0: () => zoom(1e9), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
        ArrowUp: () => scroll(-ROW * 3), ArrowDown: () => scroll(ROW * 3), ".": () => step(1), ",": () => step(-1) }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    function step(by) {
      if (!spans.length) return;
      at = (at + by + spans.length) % spans.length;
      const [lane, , begin, length] = spans[at];
      if (begin < from || begin + length > to) { const span = Math.max(to - from, length * 1.2); from = Math.max(0, Math.min(whole - span, begin - span * 0.1)); to = Math.min(whole, from + span); }
      const y = (firsts[lane] + depth[at]) * ROW;
      if (y < top || y + ROW > top + host.clientHeight - TOP) { top = 0; scroll(y - 40); }
      again();
      H.say(describe(at).filter(Boolean).map((n) => n.textContent).join(", "));
    }
    const button = (words, does, run) => H.el("button", { type: "button", class: "icon", "aria-label": does, title: does, click: run }, words);
    return H.card("Timeline", [dropped ? H.el("span", { class: "muted" }, `${H.count(dropped)} shorter spans are left out`) : null,
      H.el("span", { class: "muted" }, `${H.plural(spans.length, "span")} in ${H.seconds(whole)}`), button("−", "Zoom out", () => zoom(1.7)), button("+", "Zoom in", () => zoom(0.6)), button("⟷", "All of it", () => zoom(1e9))],
    H.el("div", { class: "body" }, host));
  };
}
