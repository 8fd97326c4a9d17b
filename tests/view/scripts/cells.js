([name, dtype, shape, bytes, cells, files]) => {
  // A tensor's cells as the page lays them out, and which part of the drawing they fill.
  const all = H.cellsOf({ shape, cells, files }), drawing = H.projection(shape, all);
  return {
    boxes: all.map((c) => [c.offsets, c.lengths, c.file]),
    count: H.cellCount({ shape, cells, files }),
    area: all.flatMap((c) => drawing.rectangles(c)).reduce((n, [, , w, h]) => n + w * h, 0),
  };
}
