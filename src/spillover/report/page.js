"use strict";
// Shows, over a chart, the values next to the pointer. Without it the page says the same, with less comfort.
const charts = JSON.parse(document.getElementById("curves").textContent);

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - xs[low] < xs[high] - wanted ? low : high;
}

function clock(seconds) {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = charts[figure.dataset.chart];
  if (!chart) continue;
  const plot = figure.querySelector(".plot");
  const cursor = document.createElement("div"), told = document.createElement("div");
  cursor.className = "cursor";
  told.className = "told";
  cursor.hidden = told.hidden = true;
  plot.append(cursor, told);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const wanted = chart.low + (event.clientX - box.left) / box.width * (chart.high - chart.low);
    const at = chart.series[0].x[nearest(chart.series[0].x, wanted)];
    const lines = [chart.clock ? `${clock(at)} at work` : `${chart.over} ${at.toLocaleString("en")}`];
    for (const series of chart.series) {
      const place = nearest(series.x, wanted);
      const where = series.x[place] === at || chart.clock ? "" : ` (at ${series.x[place].toLocaleString("en")})`;
      lines.push(`${series.name} ${series.y[place]}${where}`);
    }
    told.textContent = lines.join("\n");
    const share = (at - chart.low) / (chart.high - chart.low);
    cursor.style.left = `${100 * share}%`;
    told.style.left = share < 0.5 ? `calc(${100 * share}% + .6rem)` : "auto";
    told.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + .6rem)`;
    cursor.hidden = told.hidden = false;
  });
  plot.addEventListener("pointerleave", () => { cursor.hidden = told.hidden = true; });
}
