// A histogram, drawn as SVG. Uses frame.js.
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
