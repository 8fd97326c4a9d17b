// How many rows of the map of a diff have a colour, and whether anything is painted at all.
() => {
  const canvas = document.querySelector("#map canvas"), ratio = canvas.height / canvas.clientHeight, context = canvas.getContext("2d");
  const rows = Math.round((canvas.clientHeight - 28) / 21);
  return { rows, painted: context.getImageData(0, 0, canvas.width, Math.ceil(60 * ratio)).data.some((v) => v) };
}
