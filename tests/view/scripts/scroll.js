async () => {
  const rows = document.querySelector("#tensors .rows"), times = [];
  for (let i = 0; i < 30; i += 1) {
    const began = performance.now();
    rows.scrollTop = i * 9000;
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - began);
  }
  return times;
}
