() => {
  // The least contrast of what is written on the fills that kinds of things may have.
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => rgb.reduce((n, v, i) => n + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  return Math.min(...Array.from({ length: 200 }, (_, i) => {
    const fill = H.colour(i, (i % 5) / 2 - 1), a = luminance(fill.match(/[\d.]+/g).map(Number)), b = luminance(hex(H.ink(fill)));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}
