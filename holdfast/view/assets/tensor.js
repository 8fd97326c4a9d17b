// The panel of one tensor: what is known of it, its cells, its statistics. Uses frame.js, chart.js, shards.js.
"use strict";
{
  const { el } = H;
  const SHOWN = 200;
  const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  /** A name that fits itself alone, also where it has the signs of a glob in it. */
  const pattern = (name) => quoted(name.replace(/[[*?]/g, (sign) => `[${sign}]`));

  function figures(of) {
    const rows = [["Min", H.number(of.min)], ["Max", H.number(of.max)], ["Mean", H.number(of.mean)], ["Std", H.number(of.std)],
      ["Norm", H.number(of.norm)], ["Zeros", of.zeros ? `${H.count(of.zeros)} (${H.percent(of.zeros / of.count)})` : "0"],
      ["NaN", el("span", { class: of.nan ? "bad" : "" }, H.count(of.nan))], ["Infinite", el("span", { class: of.inf ? "bad" : "" }, H.count(of.inf))]];
    const chart = el("div", null);
    const node = el("div", { class: "statistics" }, el("dl", { class: "figures" }, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))), chart);
    if (of.counts?.length) requestAnimationFrame(() => H.histogram(chart, of.edges, of.counts, { label: `Histogram of ${of.name}` }));
    return node;
  }

  /** Ask the server for the statistics of a tensor, and keep them in `known`. Throws an Error whose message is for the page. */
  H.ask = async (name, known) => {
    let answer;
    try {
      answer = await fetch(`statistics?name=${encodeURIComponent(name)}`);
    } catch { throw new Error("The server does not answer: it was ended. Start it again and open the address that it prints."); }
    const result = await answer.json();
    if (!answer.ok) throw new Error(result.error);
    known.set(name, result);
    return result;
  };

  function statistics(tensor, known, learned) {
    const host = el("div", { class: "on-demand" });
    const ready = known.get(tensor.name) ?? known.get(tensor.alias);
    if (ready) return H.empty(host, figures(ready));
    if (!H.data.served) {
      const command = `holdfast view ${H.data.quoted} --stats ${pattern(tensor.name)}`;
      return H.empty(host, el("p", { class: "muted" }, "Not in this page. It is if the page was made with"), el("code", { class: "command" }, command),
        el("p", { class: "muted" }, "or asked for as you look, with ", el("code", null, "--serve"), "."));
    }
    const ask = el("button", { type: "button", class: "primary", click: async () => {
      ask.disabled = true;
      ask.textContent = `Reading ${H.bytes(tensor.bytes)} …`;
      try {
        const result = await H.ask(tensor.name, known);
        H.empty(host, figures(result));
        H.say(`Min ${H.number(result.min)}, max ${H.number(result.max)}, mean ${H.number(result.mean)}, ${H.plural(result.nan, "NaN")}`);
        learned();
      } catch (error) {
        H.empty(host, el("p", { class: "note bad" }, error.message), ask);
        ask.disabled = false;
        ask.textContent = "Try again";
      }
    } }, `Read ${H.bytes(tensor.bytes)} and compute`);
    return H.empty(host, ask);
  }

  /** Fill the panel. tensor: as checkpoint.js makes them; known: Map of statistics by name; learned(): one was added. */
  H.panel = (host, tensor, { known, total, names, learned }) => {
    const { data } = H, drawing = H.shards(tensor, data.files, tensor.itemsize);
    const { owners } = drawing, several = new Set(owners.map((o) => o.who)).size;
    const [prefix, last] = H.parted(tensor.name);
    const spread = tensor.shape.includes(0) ? "it has no elements" : drawing.total === 0 ? "no file holds it: the map makes it" : drawing.total === 1 ? "saved whole" : `saved in ${H.plural(drawing.total, "cell")} by ${H.plural(several, owners[0]?.who.startsWith("rank") ? "rank" : "file")}`;
    H.empty(host,
      el("header", { class: "head" }, el("h2", { class: "name break" }, prefix ? el("span", { class: "muted" }, prefix) : null, last), tensor.bad ? H.badge("bad", "hit by damage") : null),
      el("div", { class: "body" },
        H.pairs([["Shape", H.shape(tensor.shape)], ["Type", tensor.dtype], ["Size", `${H.bytes(tensor.bytes)} · ${H.percent(tensor.bytes / (total || 1))} of the state`],
          ["Elements", H.count(tensor.elements)], tensor.alias ? ["Stored as", tensor.alias] : null, names.length ? ["Also called", names.join(", ")] : null,
          tensor.origins ? ["Made of", tensor.origins.slice(0, SHOWN).join(", ") + (tensor.origins.length > SHOWN ? ` and ${H.count(tensor.origins.length - SHOWN)} more` : "") || "one number"] : null]),
        el("section", null, el("h3", null, "Shards ", el("span", { class: "plain" }, spread)), drawing.total || !tensor.elements ? drawing.node : null,
          el("ul", { class: "owners", tabindex: 0, "aria-label": "Files of this tensor" }, owners.slice(0, SHOWN).map((o) => el("li", null, el("i", { style: { background: H.colour(o.colour) } }), el("b", null, o.who), el("span", { class: "cut muted", title: o.path }, H.shortPath(o.path)), el("span", null, H.bytes(o.bytes)))),
            owners.length > SHOWN ? el("li", { class: "muted" }, `and ${H.count(owners.length - SHOWN)} more files`) : null)),
        el("section", null, el("h3", null, "Statistics"), statistics(tensor, known, learned))));
  };
}
