// What scrolls sideways can be reached by keyboard, and the captions of the sidebar have a level as headings.
function reachable() {
  for (const one of document.querySelectorAll("pre, .table-wrapper, .math")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  }
}

addEventListener("load", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  reachable();
  addEventListener("resize", reachable);
});
