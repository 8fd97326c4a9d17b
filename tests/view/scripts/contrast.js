() => {
  // Every text that is seen, with the contrast to what lies behind it, as WCAG counts it.
  const parse = (c) => { const n = (c.match(/[\d.]+/g) || []).map(Number); const srgb = c.startsWith("color(srgb");
    return [...n.slice(0, 3).map((v) => srgb ? v : v / 255), n.length > 3 ? n[3] : 1]; };
  const lin = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const lum = ([r, g, b]) => 0.2126 * lin(r) + 0.7152 * lin(g) + 0.0722 * lin(b);
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * a[3] + b[i] * (1 - a[3])).concat([1]);
  const behind = (node) => { const stack = [];
    for (let e = node; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); stack.push(c); if (c[3] === 1) break; }
    return stack.reverse().reduce((below, c) => over(c, below), [1, 1, 1, 1]); };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), e = walk.currentNode.parentElement;
    if (!text || !e || /^(?:SCRIPT|STYLE|NOSCRIPT|OPTION)$/.test(e.tagName) || !e.checkVisibility() || e.closest(".unseen, .skip, [aria-disabled]") || e.disabled) continue;
    const style = getComputedStyle(e);
    const colour = e instanceof SVGElement ? style.fill : style.color;
    const a = lum(over(parse(colour), behind(e))), b = lum(behind(e));
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 40), e.className.baseVal ?? e.className, colour]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}
