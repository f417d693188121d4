"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const key = (row) => {
      const data = row.cells[column].querySelector("data");
      return data ? Number(data.value) : row.cells[column].textContent;
    };
    // Among numbers, cells without one stay at the end, whichever way the others go.
    const last = (a) => heading.classList.contains("number") && typeof a === "string";
    const order = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    heading.querySelector("button").addEventListener("click", () => {
      const way = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      const sign = way === "ascending" ? 1 : -1;
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => last(a) - last(b) || (last(a) ? 0 : sign * order(a, b)));
      body.append(...rows.map(([, row]) => row));
      headings.forEach((one) => one.setAttribute("aria-sort", one === heading ? way : "none"));
      document.getElementById("sorted").textContent = `Sorted by ${heading.textContent}, ${way}.`;
    });
  });
}
