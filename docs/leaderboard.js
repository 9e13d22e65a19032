// Sorts and filters the table of leaderboard.md. Without JavaScript the table stays as it is in the page.
(() => {
  const table = document.getElementById("leaderboard-table");
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  const key = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;

  function compare(a, b, column, sign) {
    const [x, y] = [key(a, column), key(b, column)];
    if ((x === "") !== (y === "")) return x === "" ? 1 : -1; // empty cells are last in both orders
    const isNumber = a.cells[column].dataset.value !== undefined;
    return sign * (isNumber ? Number(x) - Number(y) : x.localeCompare(y));
  }

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = header.getAttribute("aria-sort") === "descending" ? 1 : -1;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      body.append(...[...body.rows].sort((a, b) => compare(a, b, column, sign)));
    });
  });

  const select = document.createElement("select");
  select.setAttribute("aria-label", "task and setting");
  const cell = (row) => `${row.cells[0].textContent}, ${row.cells[1].textContent}`;
  select.append(...["all tasks", ...new Set([...body.rows].map(cell))].map((text) => new Option(text)));
  select.addEventListener("change", () => {
    for (const row of body.rows) row.hidden = select.selectedIndex > 0 && cell(row) !== select.value;
  });
  table.before(select);
})();
