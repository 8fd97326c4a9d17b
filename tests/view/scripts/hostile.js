// Shows hostile texts everywhere where the frame can show a text.
H.header(H.data.names[0], H.data.names[1]);
document.getElementById("main").append(H.card(H.data.names[2], H.badge("good", H.data.names[3])),
  ...H.data.names.map((n) => H.el("p", { class: "shown", title: n, "aria-label": n }, n)), H.pairs(H.data.names.map((n) => [n, n])),
  H.facts(H.data.names.map((n) => [n, n, n])), H.legend(H.data.names.map((n) => [n, n])));
const table = H.table({ label: H.data.names[0], columns: [{ name: H.data.names[1], width: "1fr", value: (r) => r }], rows: H.data.names });
document.getElementById("main").append(table.node);
H.tip.show(10, 10, H.data.names[0]); H.say(H.data.names[1]);
H.ready();
