"use strict";
// Reading needs none of this: theme, sorting, CSV, numbers under the pointer, and news of a run under way.
const root = document.documentElement, tip = document.getElementById("tip");
const LEFT = 58, RIGHT = 14, WIDTH = 480;

const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const remember = (value) => { try { return value ? localStorage.setItem("fedsieve-theme", value) : localStorage.getItem("fedsieve-theme"); } catch { return null; } };
const theme = document.getElementById("theme");
const paint = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours"); };
if (remember()) root.dataset.theme = remember();
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remember(root.dataset.theme); paint(); });
paint();

const raw = (cell) => cell.dataset.v ?? cell.textContent;
const cells = (table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map(raw));
const heads = (table) => [...table.tHead.rows[0].cells].map((cell) => cell.textContent);

function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const sign = order === "ascending" ? 1 : -1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const keyed = [...body.rows].map((row) => { const text = raw(row.cells[column]); return [text, text === "" ? NaN : Number(text), row]; });
  keyed.sort((a, b) => {
    if ((a[0] === "") !== (b[0] === "")) return a[0] === "" ? 1 : -1;
    return sign * (isNaN(a[1]) || isNaN(b[1]) ? a[0].localeCompare(b[0], undefined, { numeric: true }) : a[1] - b[1]);
  });
  body.append(...keyed.map((entry) => entry[2]));
}

function download(table) {
  const quote = (text) => /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  const text = [heads(table), ...cells(table)].map((row) => row.map(quote).join(",")).join("\n") + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = table.caption.textContent.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").toLowerCase() + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function dress(part) {
  for (const box of part.querySelectorAll(".table")) {
    const button = document.createElement("button");
    button.type = "button"; button.className = "csv"; button.textContent = "Download CSV";
    button.setAttribute("aria-label", "Download as CSV: " + box.getAttribute("aria-label"));
    box.after(button);
  }
}
dress(document);

// The numbers under the pointer, or under the arrow keys, come from the table below the chart.
function rowsOf(chart) {
  const table = chart.closest("figure").querySelector("table");
  chart.rows ??= cells(table).map((row) => row.map(Number)).sort((a, b) => a[0] - b[0]);
  chart.names ??= heads(table);
  return chart.rows;
}
function place(chart, value) {
  const f = chart.dataset.scale === "log" ? Math.log10 : (v) => v;
  const low = f(+chart.dataset.x0), high = f(+chart.dataset.x1);
  return LEFT + (f(value) - low) / (high - low) * (WIDTH - RIGHT - LEFT);
}
function point(chart, i) {
  const row = rowsOf(chart)[i], at = place(chart, row[0]), box = chart.getBoundingClientRect();
  hide();
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("class", "cursor"); line.setAttribute("d", `M${at},16V226`);
  chart.append(line); chart.cursor = line; chart.at = i; point.chart = chart;
  tip.textContent = row.map((v, n) => `${chart.names[n]}  ${isNaN(v) ? "none" : Number.isInteger(v) ? v : v.toPrecision(5)}`).join("\n");
  tip.hidden = false;
  const x = box.left + at / WIDTH * box.width;
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.max(4, box.top - tip.offsetHeight - 4) + "px";
}
function hide() { tip.hidden = true; point.chart?.cursor?.remove(); point.chart = null; }
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg[data-x0]");
  if (!chart) { if (point.chart && point.chart !== document.activeElement) hide(); return; }
  const box = chart.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH, rows = rowsOf(chart);
  let best = 0;
  rows.forEach((row, i) => { if (Math.abs(place(chart, row[0]) - x) < Math.abs(place(chart, rows[best][0]) - x)) best = i; });
  point(chart, best);
});
document.addEventListener("focusin", (event) => { if (event.target.matches("svg[data-x0]:focus-visible")) point(event.target, event.target.at ?? rowsOf(event.target).length - 1); });
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => {
  const chart = event.target.closest?.("svg[data-x0]");
  if (event.key === "Escape") return hide();
  if (!chart) return;
  const last = rowsOf(chart).length - 1, now = chart.at ?? last;
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  point(chart, Math.max(0, Math.min(last, next)));
});
document.addEventListener("click", (event) => {
  const head = event.target.closest("th button");
  if (head) sort(head.parentElement);
  if (event.target.matches(".csv")) { let box = event.target.previousElementSibling; download(box.querySelector("table")); }
});
// A link to a run opens it.
function unfold() { const run = document.getElementById(location.hash.slice(1)); if (run?.matches("details")) { run.open = true; run.scrollIntoView(); } }
addEventListener("hashchange", unfold);
unfold();

// A page served by `fedsieve watch` asks once a second whether there is something new, and keeps what the reader has opened.
if (root.dataset.kind === "live") {
  let seen = null;
  const look = async () => {
    try {
      const now = await (await fetch("state")).json();
      if (seen !== null && now.stamp !== seen) {
        const fresh = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
        const open = [...document.querySelectorAll("details")].map((one) => one.open), main = document.getElementById("content");
        const update = fresh.getElementById("content");
        [...update.querySelectorAll("details")].forEach((one, i) => { one.open = open[i] ?? false; });
        hide(); main.replaceChildren(...update.childNodes); dress(main);
      }
      seen = now.stamp;
    } catch { /* the server may be gone; the page stays as it is */ }
    setTimeout(look, 1000);
  };
  look();
}
