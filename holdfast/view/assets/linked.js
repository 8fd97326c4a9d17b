// Charts over one axis: what is read off in one is marked in all, and what is drawn in one is all that the others show.
// Uses frame.js.
"use strict";
/**
 * H.linked({ n, describe, picked, moved }) → { chart(host, options), axis(values, format, ticks), zoom(low, high), reset(), show(i), … }
 *
 * n: how many points; describe(i) → what a tooltip says of one; picked(i): chosen by a click or Enter; moved(): zoomed.
 * axis: where each point stands (they need not be in order), how that is written, and its ticks; breaks[i]: no line leads to point i.
 * options: { label, height, y: format, zero, series: [{ name, values, colour, kind: "line"|"bars"|"stack" }], marks(draw) }
 * A drag zooms, a double click or Escape shows all. Arrows read off, + and - zoom, Shift with arrows moves along.
 */
H.linked = ({ n, describe, picked = null, moved = null, breaks = [] }) => {
  const charts = [], LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 22;
  let xs = [], order = [], write = H.count, ticksOf = H.ticks, full = [0, 1], range = [0, 1], at = -1;
  const known = (v) => v !== null && v !== undefined;

  function axis(values, format, ticks = H.ticks) {
    const kept = range[0] === full[0] && range[1] === full[1];
    const seen = kept ? null : order.filter((i) => xs[i] >= range[0] && xs[i] <= range[1]);
    xs = values;
    write = format;
    ticksOf = ticks;
    order = xs.map((_, i) => i).sort((a, b) => xs[a] - xs[b] || a - b);
    const low = n ? xs[order[0]] : 0, high = n ? xs[order[n - 1]] : 1, spare = (high - low || Math.abs(high) || 1) * 0.015;
    full = [low - spare, high + spare];
    const again = seen && seen.length ? seen.map((i) => xs[i]) : null;
    range = again ? [again.reduce((x, y) => Math.min(x, y)) - spare / 4, again.reduce((x, y) => Math.max(x, y)) + spare / 4] : full;
    redraw();
  }
  function redraw() { charts.forEach((c) => c.again()); place(); moved?.(range[0] > full[0] || range[1] < full[1]); }
  function zoom(low, high) {
    const least = (full[1] - full[0]) / Math.max(400, n * 4);
    if (high - low < least) { const middle = (low + high) / 2; low = middle - least / 2; high = middle + least / 2; }
    if (high - low >= full[1] - full[0]) range = full;
    else {
      const by = Math.max(0, full[0] - low) - Math.max(0, high - full[1]);
      range = [low + by, high + by];
    }
    redraw();
  }
  const reset = () => { range = full; redraw(); };
  const seenNow = () => order.filter((i) => xs[i] >= range[0] && xs[i] <= range[1]);

  /** The point whose place is nearest to x; of several there, the last one. */
  function nearest(x) {
    let low = 0, high = n - 1;
    while (low < high) { const middle = (low + high) >> 1; if (xs[order[middle]] < x) low = middle + 1; else high = middle; }
    if (low > 0 && Math.abs(xs[order[low - 1]] - x) < Math.abs(xs[order[low]] - x)) low -= 1;
    while (low + 1 < n && xs[order[low + 1]] === xs[order[low]]) low += 1;
    return low;
  }
  function place() { charts.forEach((c) => c.mark(at)); }
  /** Mark a point in all charts: -1 is none. Brings it into sight. */
  function show(i, inside = false) {
    at = i;
    if (inside && i >= 0 && (xs[i] < range[0] || xs[i] > range[1])) {
      const half = (range[1] - range[0]) / 2;
      zoom(xs[i] - half, xs[i] + half);
    } else place();
  }

  function chart(host, { label, height = 132, y = H.number, zero = true, series, whole = false, paint = null }) {
    host.classList.add("linked");
    host.style.height = `${height}px`;
    host.tabIndex = 0;
    host.setAttribute("role", "application");
    host.setAttribute("aria-roledescription", "chart");
    host.setAttribute("aria-label", `${label}. Arrow keys read off values, plus and minus zoom, Escape shows all.`);
    let width = 0, low = 0, high = 1;
    const X = (v) => LEFT + ((v - range[0]) / (range[1] - range[0])) * (width - LEFT - RIGHT);
    const back = (px) => range[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (range[1] - range[0]);
    const Y = (v) => height - BOTTOM - ((v - low) / (high - low)) * (height - BOTTOM - TOP);
    const hair = H.el("div", { class: "hair", hidden: true }), brush = H.el("div", { class: "brush", hidden: true });
    const dots = series.map(() => H.el("i", { hidden: true }));

    function scale() {
      let least = Infinity, most = -Infinity;
      const sums = series.some((s) => s.kind === "stack");
      for (let i = 0; i < n; i += 1) {
        if (xs[i] < range[0] || xs[i] > range[1]) continue;
        let sum = 0;
        for (const s of series) {
          const v = s.values[i];
          if (!known(v)) continue;
          sum += v;
          const shown = sums ? sum : v;
          if (shown < least) least = shown;
          if (shown > most) most = shown;
        }
      }
      if (most === -Infinity) return false;
      if (zero) least = Math.min(0, least);
      if (least === most) { most += Math.abs(most) || 1; if (!zero) least -= Math.abs(least) * 0.1 || 1; }
      if (whole) most = Math.max(most, least + 2);
      const room = (most - least) * 0.06;
      high = most + room;
      low = zero && least === 0 ? 0 : least - room;
      return true;
    }
    function line(context, s) {
      context.strokeStyle = H.stroke(s.colour);
      context.lineWidth = 1.6;
      context.lineJoin = "round";
      context.beginPath();
      let column = null, pen = false, alone = [];
      const flush = () => {
        if (!column) return;
        for (const v of column.n > 2 ? [column.first, column.min, column.max, column.last] : [column.first, column.last]) {
          if (pen) context.lineTo(column.x, Y(v)); else { context.moveTo(column.x, Y(v)); pen = true; }
        }
        column = null;
      };
      let seen = 0;
      for (let i = 0; i < n; i += 1) {
        const v = s.values[i];
        if (!known(v) || breaks[i]) { flush(); pen = false; if (!known(v)) continue; }
        const px = X(xs[i]);
        if (px < LEFT - 4000 || px > width + 4000) { flush(); pen = false; continue; }
        if (px >= LEFT && px <= width - RIGHT) { seen += 1; if (alone && seen < width / 9) alone.push([px, Y(v)]); else alone = null; }
        const x = Math.round(px * 2) / 2;
        if (column && column.x === x) { column.n += 1; column.last = v; column.min = Math.min(column.min, v); column.max = Math.max(column.max, v); }
        else { flush(); column = { x, n: 1, first: v, last: v, min: v, max: v }; }
      }
      flush();
      context.stroke();
      if (alone) {
        context.fillStyle = H.stroke(s.colour);
        for (const [x, yy] of alone) { context.beginPath(); context.arc(x, yy, 2.2, 0, 7); context.fill(); }
      }
    }
    function bars(context) {
      const wide = Math.max(1, Math.min(10, ((width - LEFT - RIGHT) / Math.max(1, seenNow().length)) * 0.72));
      const tops = new Map(); // of a column of pixels the highest bar
      for (let i = 0; i < n; i += 1) {
        if (xs[i] < range[0] || xs[i] > range[1]) continue;
        const values = series.map((s) => s.values[i]);
        if (!values.some(known)) continue;
        const sum = values.reduce((a, b) => a + (b ?? 0), 0), x = Math.round(X(xs[i]));
        if (!tops.has(x) || tops.get(x)[0] < sum) tops.set(x, [sum, values]);
      }
      for (const [x, [, values]] of tops) {
        let base = 0;
        series.forEach((s, k) => {
          const v = values[k] ?? 0;
          context.fillStyle = H.stroke(s.colour);
          context.fillRect(x - wide / 2, Y(base + v), wide, Math.max(v > 0 ? 0.7 : 0, Y(base) - Y(base + v)));
          base += v;
        });
      }
    }
    const again = H.canvas(host, (context, w) => {
      width = w;
      const rule = H.css("--line"), muted = H.css("--muted"), some = paint ? true : scale();
      context.font = `11px ${H.family("--sans")}`;
      context.textBaseline = "middle";
      context.fillStyle = muted;
      context.strokeStyle = rule;
      context.lineWidth = 1;
      const ticks = ticksOf(range[0], range[1], Math.max(2, Math.floor((w - LEFT) / 110)));
      context.textAlign = "center";
      for (const v of ticks) {
        const x = Math.round(X(v)) + 0.5, words = write(v || 0, ticks[1] - ticks[0]), half = context.measureText(words).width / 2;
        if (x - half > LEFT - 30 && x + half < w) context.fillText(words, x, height - BOTTOM / 2);
        context.beginPath(); context.moveTo(x, height - BOTTOM); context.lineTo(x, height - BOTTOM + 4); context.stroke();
      }
      context.textAlign = "right";
      if (!paint && some) {
        for (const v of H.ticks(low, high, 3)) {
          if (whole && v !== Math.round(v)) continue;
          const yy = Math.round(Y(v)) + 0.5;
          context.fillText(y(v || 0), LEFT - 7, yy);
          context.beginPath(); context.moveTo(LEFT, yy); context.lineTo(w - RIGHT, yy); context.stroke();
        }
      }
      context.textAlign = "left";
      if (!some) context.fillText("Nothing is known about these saves.", LEFT + 8, height / 2 - 8);
      context.save();
      context.beginPath(); context.rect(LEFT, 0, w - LEFT - RIGHT + 4, height - BOTTOM + 1); context.clip();
      for (let i = 1; i < n; i += 1) {
        if (!breaks[i] || paint) continue;
        const x = Math.round(X(xs[i])) + 0.5;
        context.strokeStyle = H.css("--line-strong");
        context.setLineDash([3, 3]);
        context.beginPath(); context.moveTo(x, TOP); context.lineTo(x, height - BOTTOM); context.stroke();
        context.setLineDash([]);
      }
      if (paint) paint({ context, X, width: w, height: height - BOTTOM, left: LEFT, right: w - RIGHT, range });
      else if (some && series[0].kind === "line") series.forEach((s) => line(context, s));
      else if (some) bars(context);
      context.restore();
      mark(at);
    });
    function mark(i) {
      const seen = i >= 0 && width && xs[i] >= range[0] && xs[i] <= range[1];
      hair.hidden = !seen;
      dots.forEach((dot) => { dot.hidden = true; });
      if (!seen) return;
      Object.assign(hair.style, { left: `${X(xs[i])}px`, top: `${TOP}px`, height: `${height - BOTTOM - TOP}px` });
      if (paint || series[0].kind !== "line") return;
      series.forEach((s, k) => {
        if (!known(s.values[i])) return;
        dots[k].hidden = false;
        Object.assign(dots[k].style, { left: `${X(xs[i])}px`, top: `${Y(s.values[i])}px`, background: H.stroke(s.colour) });
      });
    }

    // ---- pointer and keys

    let from = null;
    const px = (event) => Math.min(width - RIGHT, Math.max(LEFT, event.clientX - host.getBoundingClientRect().left));
    host.addEventListener("pointerdown", (event) => {
      if (event.button || !n) return;
      from = px(event);
      host.setPointerCapture(event.pointerId);
    });
    host.addEventListener("pointermove", (event) => {
      if (!n || !width) return;
      const here = px(event);
      if (from !== null && Math.abs(here - from) > 3) {
        brush.hidden = false;
        Object.assign(brush.style, { left: `${Math.min(from, here)}px`, width: `${Math.abs(here - from)}px`, top: `${TOP}px`, height: `${height - BOTTOM - TOP}px` });
        H.tip.show(event.clientX, event.clientY, H.el("div", null, `${write(back(Math.min(from, here)), 0)} to ${write(back(Math.max(from, here)), 0)}`));
        return;
      }
      show(order[nearest(back(here))]);
      H.tip.show(event.clientX, event.clientY, ...describe(at));
    });
    host.addEventListener("pointerup", (event) => {
      const began = from, here = px(event);
      from = null;
      brush.hidden = true;
      if (began === null) return;
      if (Math.abs(here - began) > 3) { zoom(back(Math.min(began, here)), back(Math.max(began, here))); H.tip.hide(); }
      else if (at >= 0) picked?.(at);
    });
    const leave = () => { from = null; brush.hidden = true; H.tip.hide(); show(-1); };
    host.addEventListener("pointercancel", leave);
    host.addEventListener("pointerleave", () => { if (from === null) leave(); });
    host.addEventListener("blur", () => { H.tip.hide(); });
    host.addEventListener("dblclick", reset);
    host.addEventListener("keydown", (event) => {
      if (!n || event.ctrlKey || event.metaKey || event.altKey) return;
      const middle = at >= 0 ? xs[at] : (range[0] + range[1]) / 2, wide = range[1] - range[0];
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const scaleBy = (f) => zoom(middle - (middle - range[0]) * f, middle + (range[1] - middle) * f);
      if (by && event.shiftKey) zoom(range[0] + by * wide * 0.25, range[1] + by * wide * 0.25);
      else if (by || event.key === "Home" || event.key === "End") {
        const seen = seenNow(), now = seen.indexOf(at);
        const to = event.key === "Home" ? 0 : event.key === "End" ? seen.length - 1 : now < 0 ? (by > 0 ? 0 : seen.length - 1) : now + by;
        if (!seen.length) return;
        show(seen[Math.min(seen.length - 1, Math.max(0, to))]);
        const box = host.getBoundingClientRect(), words = describe(at);
        H.tip.show(box.left + X(xs[at]), box.top + TOP, ...words);
        H.say(words.flat(3).filter(Boolean).map((node) => node.textContent).join(", "));
      } else if (event.key === "+" || event.key === "=") scaleBy(0.5);
      else if (event.key === "-") scaleBy(2);
      else if (event.key === "Escape" || event.key === "0") { H.tip.hide(); reset(); }
      else if (event.key === "Enter" && at >= 0) picked?.(at);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    host.append(brush, hair, ...dots);
    charts.push({ again, mark });
  }
  return { chart, axis, zoom, reset, show, get range() { return range; }, get at() { return at; } };
};
