// Whether the last sign of each of these texts stands right of its first one: a direction may turn a dot around.
(wanted) => [...document.querySelectorAll(wanted)].every((element) => {
  const text = document.createTreeWalker(element, NodeFilter.SHOW_TEXT).nextNode();
  const at = (i) => {
    const range = document.createRange();
    range.setStart(text, i);
    range.setEnd(text, i + 1);
    return range.getBoundingClientRect().left;
  };
  return at(text.length - 1) > at(0);
})
