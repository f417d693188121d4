// What scrolls sideways can be reached by keyboard, the captions of the sidebar have a level as headings, and a number
// stays on one line with its error.
function reachable() {
  for (const one of document.querySelectorAll("pre, .table-wrapper, .math")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  }
}

addEventListener("load", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const cell of document.querySelectorAll("td")) {
    if (/^[^ ]* ± [^ ]*$/.test(cell.textContent.trim())) cell.style.whiteSpace = "nowrap";
  }
  reachable();
  addEventListener("resize", reachable);
});
