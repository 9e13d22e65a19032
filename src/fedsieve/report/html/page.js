"use strict";
// The page is readable without this script: theme, sorting, CSV, numbers at the pointer, and updates of a running run.
const root = document.documentElement, tip = document.getElementById("tip");
const LEFT = 58, RIGHT = 14, WIDTH = 480;

const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const storedTheme = (value) => { try { return value ? localStorage.setItem("fedsieve-theme", value) : localStorage.getItem("fedsieve-theme"); } catch { return null; } };
const theme = document.getElementById("theme");
const labelThemeButton = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours"); };
if (storedTheme()) root.dataset.theme = storedTheme();
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; storedTheme(root.dataset.theme); labelThemeButton(); });
labelThemeButton();

const exactText = (cell) => cell.dataset.v ?? cell.textContent;
const cells = (table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map(exactText));
const heads = (table) => [...table.tHead.rows[0].cells].map((cell) => cell.textContent);

function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const sign = order === "ascending" ? 1 : -1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const keyed = [...body.rows].map((row) => { const text = exactText(row.cells[column]); return [text, text === "" ? NaN : Number(text), row]; });
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

function addDownloadButtons(part) {
  for (const box of part.querySelectorAll(".table")) {
    const button = document.createElement("button");
    button.type = "button"; button.className = "csv"; button.textContent = "Download CSV";
    button.setAttribute("aria-label", "Download as CSV: " + box.getAttribute("aria-label"));
    box.after(button);
  }
}
addDownloadButtons(document);

// The numbers at the pointer, or at the position set by the arrow keys, come from the table of the chart.
function chartRows(chart) {
  const table = chart.closest("figure").querySelector("table");
  chart.rows ??= cells(table).map((row) => row.map(Number)).sort((a, b) => a[0] - b[0]);
  chart.names ??= heads(table);
  return chart.rows;
}
function xPosition(chart, value) {
  const f = chart.dataset.scale === "log" ? Math.log10 : (v) => v;
  const low = f(+chart.dataset.x0), high = f(+chart.dataset.x1);
  return LEFT + (f(value) - low) / (high - low) * (WIDTH - RIGHT - LEFT);
}
function showNumbers(chart, i) {
  const row = chartRows(chart)[i], at = xPosition(chart, row[0]), box = chart.getBoundingClientRect();
  hideNumbers();
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("class", "cursor"); line.setAttribute("d", `M${at},16V226`);
  chart.append(line); chart.cursor = line; chart.at = i; showNumbers.chart = chart;
  tip.textContent = row.map((v, n) => `${chart.names[n]}  ${isNaN(v) ? "none" : Number.isInteger(v) ? v : v.toPrecision(5)}`).join("\n");
  tip.hidden = false;
  const x = box.left + at / WIDTH * box.width;
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.max(4, box.top - tip.offsetHeight - 4) + "px";
}
function hideNumbers() { tip.hidden = true; showNumbers.chart?.cursor?.remove(); showNumbers.chart = null; }
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg[data-x0]");
  if (!chart) { if (showNumbers.chart && showNumbers.chart !== document.activeElement) hideNumbers(); return; }
  const box = chart.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH, rows = chartRows(chart);
  let best = 0;
  rows.forEach((row, i) => { if (Math.abs(xPosition(chart, row[0]) - x) < Math.abs(xPosition(chart, rows[best][0]) - x)) best = i; });
  showNumbers(chart, best);
});
document.addEventListener("focusin", (event) => { if (event.target.matches("svg[data-x0]:focus-visible")) showNumbers(event.target, event.target.at ?? chartRows(event.target).length - 1); });
document.addEventListener("focusout", hideNumbers);
document.addEventListener("keydown", (event) => {
  const chart = event.target.closest?.("svg[data-x0]");
  if (event.key === "Escape") return hideNumbers();
  if (!chart) return;
  const last = chartRows(chart).length - 1, now = chart.at ?? last;
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  showNumbers(chart, Math.max(0, Math.min(last, next)));
});
document.addEventListener("click", (event) => {
  const head = event.target.closest("th button");
  if (head) sort(head.parentElement);
  if (event.target.matches(".csv")) download(event.target.previousElementSibling.querySelector("table"));
});
// A link to a run opens it.
function openLinkedRun() { const run = document.getElementById(location.hash.slice(1)); if (run?.matches("details")) { run.open = true; run.scrollIntoView(); } }
addEventListener("hashchange", openLinkedRun);
openLinkedRun();

// A page served by `fedsieve watch` polls once a second for changes. Opened details stay open.
if (root.dataset.kind === "live") {
  let stamp = null;
  const poll = async () => {
    try {
      const state = await (await fetch("state")).json();
      if (stamp !== null && state.stamp !== stamp) {
        const page = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
        const open = [...document.querySelectorAll("details")].map((one) => one.open), main = document.getElementById("content");
        const update = page.getElementById("content");
        [...update.querySelectorAll("details")].forEach((one, i) => { one.open = open[i] ?? false; });
        hideNumbers(); main.replaceChildren(...update.childNodes); addDownloadButtons(main);
      }
      stamp = state.stamp;
    } catch { /* the server may have stopped; the page does not change */ }
    setTimeout(poll, 1000);
  };
  poll();
}
