// What scrolls sideways can be reached by keyboard, the captions of the sidebar have a level as headings, a number stays
// on one line with its error or interval, a picture opens in its full size, long signatures are not lists of
// definitions, the thumbnails of examples are named, words in a table are not squeezed into a column of letters.
const ONE = String.raw`([-+]?[\d.,]+(e[-+]?\d+)?%?|inf)`;
const NUMBER = new RegExp(`^${ONE}( (±|to) ${ONE})?( \\(${ONE} to ${ONE}\\))?$`);
function reachable() {
  for (const one of document.querySelectorAll("span.math")) {
    one.classList.remove("long");
    const drawn = one.querySelector("mjx-container"), around = one.closest("p, li, dd");
    if (drawn && around && !one.closest("td")) {
      one.classList.toggle("long", drawn.getBoundingClientRect().right > around.getBoundingClientRect().right + 1);
    }
  }
  for (const one of document.querySelectorAll("pre, .table-wrapper, .math")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  }
}

addEventListener("load", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const cell of document.querySelectorAll("td")) {
    const text = cell.textContent.trim();
    if (NUMBER.test(text)) cell.style.whiteSpace = "nowrap";
    else if (text.length > 30) cell.style.minWidth = "10em";
  }
  for (const one of document.querySelectorAll("dt dl, dt dl > dd")) one.role = "none";
  for (const link of document.querySelectorAll(".sphx-glr-thumbcontainer a")) link.ariaLabel = link.textContent;
  for (const picture of document.querySelectorAll("article img[alt]")) {
    if (picture.closest("a") || !picture.alt) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
  reachable();
  window.MathJax?.startup?.promise.then(reachable);
  addEventListener("resize", reachable);
});
