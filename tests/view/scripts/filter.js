async () => {
  const input = document.querySelector("#filter"), times = [];
  for (const words of ["l", "la", "layers.7", "*.experts.9?.*", "nothing", ""]) {
    const began = performance.now();
    input.value = words;
    input.dispatchEvent(new Event("input"));
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - began);
  }
  return times;
}
