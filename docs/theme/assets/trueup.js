// What scrolls sideways can be reached by keyboard.  The theme takes that from code on touch screens: it is put back.
const boxes = "pre > code, .output-figure, .md-typeset__scrollwrap";
const reach = () => document.querySelectorAll(boxes).forEach(box => {
  const scrolls = box.scrollWidth > box.clientWidth || box.closest("details:not([open])");
  if (scrolls && box.getAttribute("tabindex") !== "0") box.tabIndex = 0;
});
reach();
new MutationObserver(reach).observe(document.body, {subtree: true, childList: true, attributeFilter: ["tabindex"]});
window.addEventListener("resize", reach);

// The search dialog has a name.
const search = document.querySelector(".md-search");
search?.setAttribute("aria-label", search.querySelector("input").placeholder);
