"use strict";
const table = document.getElementById("rows");
const body = table.tBodies[0];
const headings = [...table.tHead.rows[0].cells];
for (const [column, heading] of headings.entries()) {
  const button = heading.querySelector("button");
  button.addEventListener("click", () => {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    const sign = descending ? -1 : 1;
    const numeric = heading.dataset.numeric === "true";
    const value = (row) => row.cells[column].dataset.value;
    const rows = [...body.rows];
    rows.sort((a, b) => sign * (numeric ? value(a) - value(b) : value(a).localeCompare(value(b))));
    body.append(...rows);
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    document.getElementById("status").textContent =
      "Sorted by " + button.textContent + ", " + (descending ? "descending." : "ascending.");
  });
}
