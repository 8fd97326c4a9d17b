(sizes) => {
  // Where a treemap of layers of these sizes puts them: [label, x, y, w, h].
  const root = H.tree(sizes.map((bytes, i) => ({ name: `blocks.${i}`, path: ["blocks", String(i), "w"], bytes })).concat({ name: "head", path: ["head"], bytes: 1 }), "state");
  const host = H.el("div", { style: { width: "400px", height: "300px" } });
  document.body.append(host);
  const blocks = root.children.find((child) => child.label === "blocks");
  const map = H.treemap({ host, root, label: "test", fill: () => "rgb(1, 2, 3)", hit: () => false, describe: () => [], open: () => {}, moved: () => {} });
  map.go(blocks);
  return { kinds: root.children.map((child) => child.label), placed: map.tops.map(({ node, x, y, w, h }) => [node.label, x, y, w, h]) };
}
