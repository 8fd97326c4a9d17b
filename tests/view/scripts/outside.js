() => {
  // Elements whose right edge lies outside of what can be seen or scrolled to, and texts that are cut.
  const faults = [], room = document.documentElement.clientWidth;
  if (document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth) faults.push(["the page scrolls sideways", document.scrollingElement.scrollWidth]);
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || element.closest(".unseen, .skip, .tip, script, style, svg, canvas")) continue;
    const name = `${element.tagName} ${element.id} ${element.className} ${element.textContent.slice(0, 40)}`, box = element.getBoundingClientRect();
    if (!box.width) continue;
    let around = element.parentElement;
    while (around && getComputedStyle(around).overflowX === "visible") around = around.parentElement;
    const boxed = around && around !== document.body && around !== document.documentElement;
    const scrolls = boxed && (/^(?:auto|scroll)$/.test(getComputedStyle(around).overflowX) || around.matches(".above")); // headings scroll with their rows
    const edge = !boxed ? room : scrolls ? around.getBoundingClientRect().left + around.clientLeft - around.scrollLeft + around.scrollWidth : around.getBoundingClientRect().right;
    if (box.right > edge + 1) faults.push([getComputedStyle(around ?? document.body).textOverflow === "ellipsis" ? "cut" : "outside", name, box.right, edge]);
    const style = getComputedStyle(element);
    if (style.overflowX === "hidden" && !element.matches(".above, .boxes") && element.scrollWidth > element.clientWidth + 1) faults.push(["cut", name, element.scrollWidth, element.clientWidth]);
  }
  return faults;
}
