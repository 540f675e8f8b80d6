"use strict";
// Light or dark: as the system has it, until somebody chooses.
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
const keep = (theme) => { try { localStorage.setItem("phalanx-theme", theme); } catch { /* a file may have no storage */ } };
try { const kept = localStorage.getItem("phalanx-theme"); if (kept) root.dataset.theme = kept; } catch { /* the same */ }
document.getElementById("theme").addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  keep(root.dataset.theme);
});

// Values under the pointer.
const tip = document.getElementById("tip"), SVG = "http://www.w3.org/2000/svg";
const brief = (v) => Math.abs(v) >= 1e4 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(v.toPrecision(4)));
const form = { number: brief, percent: (v) => `${brief(100 * v)} %`, ms: (v) => `${brief(1000 * v)} ms` };
const numbers = (text) => text.split(" ").map((word) => (word === "-" ? NaN : Number(word)));

for (const plot of document.querySelectorAll("svg.plot")) {
  const [left, right, top, bottom] = numbers(plot.dataset.box), x0 = Number(plot.dataset.x0), x1 = Number(plot.dataset.x1);
  const series = [...plot.querySelectorAll(".series")].map((g) => (
    { name: g.dataset.name, colour: g.getAttribute("class").match(/c\d/)[0], xs: numbers(g.dataset.x), ys: numbers(g.dataset.y) }));
  const line = document.createElementNS(SVG, "line");
  line.setAttribute("class", "cursor");
  line.setAttribute("y1", top);
  line.setAttribute("y2", bottom);
  line.style.display = "none";
  plot.append(line);
  const nearest = (xs, x) => xs.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best), 0);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    const x = x0 + (Math.min(right, Math.max(left, at)) - left) / (right - left) * (x1 - x0);
    const found = series.map((s) => ({ ...s, i: nearest(s.xs, x) })).filter((s) => !Number.isNaN(s.ys[s.i]));
    if (!found.length) return;
    const place = found.map((s) => s.xs[s.i]).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    const px = left + (place - x0) / (x1 - x0) * (right - left);
    line.setAttribute("x1", px);
    line.setAttribute("x2", px);
    line.style.display = "";
    const rows = found.map((s) => {
      const row = document.createElement("div"), mark = document.createElement("i"), value = document.createElement("b");
      row.className = s.colour;
      value.textContent = form[plot.dataset.unit](s.ys[s.i]);
      row.append(mark, s.name ? `${s.name}  ` : "", value);
      return row;
    });
    tip.replaceChildren(`${plot.dataset.axis} ${brief(place)}`, ...rows);
    tip.hidden = false;
    const wide = tip.offsetWidth, space = document.documentElement.clientWidth;
    const over = event.clientX + 16 + wide > space ? event.clientX - 16 - wide : event.clientX + 16;
    tip.style.left = `${Math.max(4, over) + scrollX}px`;
    tip.style.top = `${event.clientY + scrollY + 14}px`;
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; line.style.display = "none"; });
}
