() => {
  // The colours of the rows of the map of norms, each as all colours of its cells in one text.
  const canvas = document.querySelector("#norms canvas"), ratio = canvas.height / canvas.clientHeight, context = canvas.getContext("2d");
  const colours = [];
  for (let y = canvas.clientHeight - 4 - 21 / 2; y > 40; y -= 21) {
    const { data } = context.getImageData(110 * ratio, (y - 8) * ratio, canvas.width - 110 * ratio, 1), seen = [];
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.push(`${data[i]},${data[i + 1]},${data[i + 2]}`);
    if (seen.length) colours.unshift([...new Set(seen)].join(" "));
  }
  return colours.slice(-13);
}
