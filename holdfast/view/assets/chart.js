// Small charts, drawn as SVG: lines over steps or time, bars, a histogram. Uses frame.js.
"use strict";
{
  const { el, svg } = H;

  /** Draw into a host at its width, again when that or the theme changes. */
  function drawn(host, height, draw) {
    host.classList.add("chart");
    let last = 0;
    const again = () => {
      const width = Math.floor(host.clientWidth);
      if (!width) return;
      last = width;
      H.empty(host, draw(width, height));
    };
    new ResizeObserver(() => { if (Math.floor(host.clientWidth) !== last) again(); }).observe(host);
    H.onTheme(again);
    again();
    return again;
  }
  const across = (low, high, from, to) => (high > low ? (v) => from + ((v - low) / (high - low)) * (to - from) : () => (from + to) / 2);

  /**
   * Lines (or dots) over x. host: an element.
   * series: { name, points: [[x, y or null], …], colour: number of a kind, dots: true for no line }
   * x, y: formats of the axes; zero: the y axis begins at 0; marks: [{ x, words, kind: "bad"|"warn"|"good" }] upright lines;
   * label: what it shows, for whoever does not see it; picked(index of the nearest point of the first series).
   * The pointer, or arrows once it has the focus, read off values.
   */
  H.lines = (host, { series, x = H.count, y = H.number, zero = true, marks = [], label, height = 180, picked = null }) => {
    const all = series.flatMap((s) => s.points.filter((p) => p[1] !== null && p[1] !== undefined));
    const xs = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
    let at = xs.length - 1;
    return drawn(host, height, (width) => {
      if (!all.length) return el("p", { class: "muted" }, "Nothing to draw yet.");
      const values = all.map((p) => p[1]), lowest = Math.min(...values), highest = Math.max(...values);
      const low = zero ? Math.min(0, lowest) : lowest, steps = H.ticks(low, highest > low ? highest : low + 1, 4);
      const top = Math.max(highest, steps[steps.length - 1]), bottom = Math.min(low, steps[0]);
      const left = 8 + Math.max(...steps.map((v) => y(v).length)) * 6.4, right = width - 14;
      const X = across(xs[0], xs[xs.length - 1], left + 4, right), Y = across(bottom, top === bottom ? top + 1 : top, height - 24, 10);
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${label}. Arrow keys read off values.` });
      for (const v of steps) picture.append(svg("line", { class: "rule", x1: left, x2: right, y1: Math.round(Y(v)), y2: Math.round(Y(v)) }), svg("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, y(v)));
      const room = Math.max(2, Math.floor((right - left) / 90));
      for (const v of H.ticks(xs[0], xs[xs.length - 1], room)) picture.append(svg("text", { x: X(v), y: height - 6, "text-anchor": "middle" }, x(v)));
      for (const mark of marks) picture.append(svg("line", { x1: X(mark.x), x2: X(mark.x), y1: 6, y2: height - 24, stroke: H.css(`--${mark.kind ?? "muted"}`), "stroke-dasharray": "3 3" }));
      for (const one of series) {
        const colour = H.stroke(one.colour ?? 0);
        let path = "", pen = false;
        for (const [px, py] of one.points) {
          if (py === null || py === undefined) { pen = false; continue; }
          path += `${pen ? "L" : "M"}${X(px).toFixed(1)} ${Y(py).toFixed(1)}`;
          pen = true;
        }
        if (!one.dots) picture.append(svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round" }));
        if (one.dots || one.points.length < width / 14) for (const [px, py] of one.points) if (py !== null && py !== undefined) picture.append(svg("circle", { cx: X(px).toFixed(1), cy: Y(py).toFixed(1), r: one.dots ? 3 : 2.4, fill: colour }));
      }
      const hair = svg("line", { y1: 6, y2: height - 24, stroke: H.css("--muted"), opacity: 0 });
      picture.append(hair);
      const told = (index) => {
        const step = xs[index], mark = marks.filter((m) => m.x === step);
        return [el("b", null, x(step)), series.map((s) => { const p = s.points.find((q) => q[0] === step); return p && p[1] !== null && p[1] !== undefined ? el("div", null, `${s.name}: ${y(p[1])}`) : null; }), mark.map((m) => el("div", null, m.words))];
      };
      const show = (index, px, py) => {
        at = Math.min(xs.length - 1, Math.max(0, index));
        hair.setAttribute("x1", X(xs[at]));
        hair.setAttribute("x2", X(xs[at]));
        hair.setAttribute("opacity", 1);
        const box = picture.getBoundingClientRect();
        H.tip.show(px ?? box.left + X(xs[at]), py ?? box.top + 20, ...told(at));
      };
      const nearest = (event) => {
        const px = event.clientX - picture.getBoundingClientRect().left;
        return xs.reduce((best, v, i) => (Math.abs(X(v) - px) < Math.abs(X(xs[best]) - px) ? i : best), 0);
      };
      const hide = () => { hair.setAttribute("opacity", 0); H.tip.hide(); };
      picture.addEventListener("pointermove", (event) => show(nearest(event), event.clientX, event.clientY));
      picture.addEventListener("pointerleave", hide);
      picture.addEventListener("blur", hide);
      picture.addEventListener("click", () => picked?.(at));
      picture.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 }[event.key];
        if (by !== undefined) { event.preventDefault(); show(by); H.say(told(at).flat(3).filter(Boolean).map((n) => n.textContent).join(", ")); }
        else if (event.key === "Enter") picked?.(at);
      });
      return picture;
    });
  };

  /** A histogram: n + 1 edges, n counts. */
  H.histogram = (host, edges, counts, { height = 130, label = "Histogram", x = H.number } = {}) => drawn(host, height, (width) => {
    const most = Math.max(1, ...counts), left = 4, right = width - 4, base = height - 20, wide = (right - left) / counts.length;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${label}: ${counts.length} bins from ${x(edges[0])} to ${x(edges[edges.length - 1])}` });
    counts.forEach((n, i) => {
      const high = n ? Math.max(1.5, (n / most) * (base - 8)) : 0;
      const bar = svg("rect", { class: "bar", x: (left + i * wide + 0.5).toFixed(2), y: (base - high).toFixed(2), width: Math.max(0.6, wide - 1).toFixed(2), height: high.toFixed(2) });
      const catcher = svg("rect", { x: left + i * wide, y: 0, width: wide, height: base, fill: "transparent" });
      catcher.addEventListener("pointermove", (event) => H.tip.show(event.clientX, event.clientY, el("b", null, H.plural(n, "element")), el("div", null, `${x(edges[i])} to ${x(edges[i + 1])}`)));
      picture.append(bar, catcher);
    });
    picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: base + 0.5, y2: base + 0.5 }),
      svg("text", { x: left, y: height - 5 }, x(edges[0])), svg("text", { x: right, y: height - 5, "text-anchor": "end" }, x(edges[edges.length - 1])));
    if (edges[0] < 0 && edges[edges.length - 1] > 0) {
      const zero = left + ((0 - edges[0]) / (edges[edges.length - 1] - edges[0])) * (right - left);
      picture.append(svg("line", { class: "axis", x1: zero, x2: zero, y1: base - 4, y2: base + 4 }));
      if (zero > 90 && zero < width - 90) picture.append(svg("text", { x: zero, y: height - 5, "text-anchor": "middle" }, "0"));
    }
    picture.addEventListener("pointerleave", H.tip.hide);
    return picture;
  });
}
